"""Launch environment of this process: its rank, and the devices that it trains on."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch.strategies import DDPStrategy, Strategy

from lightning_scalerl.checks import ConfigurationError, said
from lightning_scalerl.distributed.sharded import ShardedStrategy, check_divides
from sweeps.run import slurm_job
from sweeps.run.gpu import REMEDY, REQUIRED, NoGpuError


def process_rank() -> int:
    """Return this process's rank by its launcher (torchrun, srun, or Lightning on one machine), 0 without one.

    Known before there is a Trainer: for what only one process may do.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return int(os.environ["RANK"])
    if slurm_job.step_tasks() > 1:
        return slurm_job.rank()
    return int(os.environ.get("LOCAL_RANK", 0))


STRATEGIES: dict[str, Callable[..., Strategy]] = {"ddp": DDPStrategy, "fsdp2": ShardedStrategy}


def trainer_settings(strategy: str = "ddp", layout: tuple[int, int] | None = None, **options: Any) -> dict[str, Any]:
    """Return arguments of `Trainer` that name the run's devices, from how this process was started.

    One task, under SLURM or not, trains on one device, whatever the job has been given. Tasks that one `srun` (or
    `torchrun`) has started together train one run, one device each; ask SLURM for GPUs by node, not by task, since
    every task picks its own among those of its node. Where the ranks meet is said in `meeting`.

    Args:
        strategy: how several ranks share the model, a name of `STRATEGIES`.
        layout: nodes and ranks on each that the run is to have; None for as many as there are.
        options: of that strategy, the settings of its file in `conf/strategy/`.

    Raises:
        ConfigurationError: nodes with different numbers of tasks, a node with fewer GPUs than tasks, another number of
            ranks than the run is to have, a job that asks for GPUs with a torch that was built for CPUs, or devices
            that `tensor_parallel` does not divide.
        NoGpuError: the job asks for GPUs, and torch cannot use any here.
    """
    _check_gpu()
    settings = _devices(strategy, options)
    there = settings.get("num_nodes", 1), settings["devices"]
    if layout is not None and there != layout:
        raise ConfigurationError(
            f"strategy.devices: {layout[1]} ranks on {layout[0]} node(s) are asked for, and {there[1]} on {there[0]} "
            f"were started; start them by torchrun --nnodes {layout[0]} --nproc-per-node {layout[1]} or by "
            "cluster=slurm, or say strategy.devices=null"
        )
    check_divides(options.get("tensor_parallel", 1), there[0] * there[1])
    return settings


def _devices(strategy: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments of `Trainer` by how this process was started."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        tasks, tasks_a_node = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_WORLD_SIZE"])
        if tasks == 1:
            return {"accelerator": "auto", "devices": 1}
        return _several(tasks // tasks_a_node, tasks_a_node, STRATEGIES[strategy](**options))
    tasks = slurm_job.step_tasks()
    if tasks == 1:
        # Lightning would take SLURM's variables for several tasks, and its signals for requests to requeue the job.
        return {"accelerator": "auto", "devices": 1, "plugins": [LightningEnvironment()]}
    if tasks == 0:
        return {"accelerator": "auto", "devices": 1}
    nodes = slurm_job.step_nodes()
    if tasks % nodes or not slurm_job.evenly_spread():
        raise ConfigurationError(
            f"SLURM: {tasks} tasks on {nodes} nodes ({slurm_job.tasks_of_nodes()} a node); start the same number on "
            "each, with --ntasks-per-node"
        )
    # Lightning compares these variables with the Trainer's settings: the step's values replace the job's.
    slurm_job.put_step_for_job(tasks, nodes)
    if nodes == 1:
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", str(_port()))
    return {
        **_several(nodes, tasks // nodes, STRATEGIES[strategy](**options)),
        "plugins": [SLURMEnvironment(auto_requeue=False)],
    }


def _check_gpu() -> None:
    """Check that torch can use a GPU if the job asks for one: it would silently train on the CPU."""
    if REQUIRED not in os.environ or torch.cuda.is_available():
        return
    if torch.version.cuda is None and torch.version.hip is None:
        raise ConfigurationError(
            f"torch: {torch.__version__} was built for CPUs, and the job asks for GPUs; install one that was built for "
            "the nodes' driver, or give hydra.launcher.require_gpu=false"
        )
    try:
        # Fails with CUDA's own reason, which is_available() hides.
        torch.empty(1, device="cuda")
        why = "torch.cuda.is_available() is false"
    except Exception as error:
        why = said(error)
    raise NoGpuError(f"the job asks for GPUs and torch {torch.__version__} can use none on this node ({why}); {REMEDY}")


def devices_beside(ranks: int) -> list[str]:
    """Return the GPUs beyond those that the node's ranks train on, as CUDA_VISIBLE_DEVICES names them.

    Generators in processes of their own run there. Empty where there are none.
    """
    if not torch.cuda.is_available():
        return []
    named = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    visible = named.split(",") if named else [str(number) for number in range(torch.cuda.device_count())]
    return visible[ranks:]


def _several(nodes: int, tasks_a_node: int, strategy: Strategy) -> dict[str, Any]:
    visible = torch.cuda.device_count() if torch.cuda.is_available() else tasks_a_node
    if visible < tasks_a_node:
        raise ConfigurationError(
            f"devices: {tasks_a_node} ranks on this node see {visible} GPUs; give every task all of the node's "
            "(SLURM: --gpus-per-node, not --gpus-per-task)"
        )
    return {"accelerator": "auto", "devices": tasks_a_node, "num_nodes": nodes, "strategy": strategy}


def _port() -> int:
    """Return a port for this step of this job, below the ephemeral ports (on Linux from 32768)."""
    job, step = slurm_job.step_numbers()
    # 15000 to 31999; jobs stand 31 apart, so that their first steps do not meet those of the next job.
    return 15000 + (job * 31 + step) % 17000
