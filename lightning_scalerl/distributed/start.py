"""Launch environment of this process: its rank and its training devices."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch.strategies import DDPStrategy, Strategy

from lightning_scalerl.checks import ConfigurationError, error_line
from lightning_scalerl.distributed.sharded import ShardedStrategy, check_divides
from sweeps.run import slurm_job
from sweeps.run.gpu import REMEDY, REQUIRED, NoGpuError


def process_rank() -> int:
    """Return this process's rank from the variables of its launcher (torchrun, srun or Lightning); 0 without one.

    It needs no Trainer, so it can be used before a Trainer exists, for actions that only one process may do.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return int(os.environ["RANK"])
    if slurm_job.step_tasks() > 1:
        return slurm_job.rank()
    return int(os.environ.get("LOCAL_RANK", 0))


STRATEGIES: dict[str, Callable[..., Strategy]] = {"ddp": DDPStrategy, "fsdp2": ShardedStrategy}


def trainer_settings(strategy: str = "ddp", layout: tuple[int, int] | None = None, **options: Any) -> dict[str, Any]:
    """Return the arguments of `Trainer` for the run's devices, depending on how this process was started.

    A single task, under SLURM or not, trains on one device, even if the job has more. Tasks that were started together
    by one `srun` or `torchrun` train one run, with one device per task. Request GPUs from SLURM per node, not per task,
    because each task picks its device among all GPUs of the node.

    Args:
        strategy: how the ranks share the model, a key of `STRATEGIES`.
        layout: required number of nodes and of ranks per node; None for as many as were started.
        options: arguments of the strategy, from its file in `conf/strategy/`.

    Raises:
        ConfigurationError: nodes have different numbers of tasks, a node has fewer GPUs than tasks, the number of ranks
            is not that of `layout`, the job requests GPUs but torch was built for CPUs, or `tensor_parallel` does not
            divide the number of devices.
        NoGpuError: the job requests GPUs, but torch cannot use any on this node.
    """
    _check_gpu()
    settings = _devices(strategy, options)
    actual = settings.get("num_nodes", 1), settings["devices"]
    if layout is not None and actual != layout:
        raise ConfigurationError(
            f"strategy.devices: {layout[1]} ranks on {layout[0]} node(s) are asked for, and {actual[1]} on {actual[0]} "
            f"were started; start them by torchrun --nnodes {layout[0]} --nproc-per-node {layout[1]} or by "
            "cluster=slurm, or say strategy.devices=null"
        )
    check_divides(options.get("tensor_parallel", 1), actual[0] * actual[1])
    return settings


def _devices(strategy: str, options: Mapping[str, Any]) -> dict[str, Any]:
    if "TORCHELASTIC_RUN_ID" in os.environ:
        tasks, tasks_per_node = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_WORLD_SIZE"])
        if tasks == 1:
            return {"accelerator": "auto", "devices": 1}
        return _several_ranks(tasks // tasks_per_node, tasks_per_node, STRATEGIES[strategy](**options))
    tasks = slurm_job.step_tasks()
    if tasks == 1:
        # Without this plugin Lightning would infer several tasks from SLURM's variables, and requeue the job on SLURM's
        # signals.
        return {"accelerator": "auto", "devices": 1, "plugins": [LightningEnvironment()]}
    if tasks == 0:
        return {"accelerator": "auto", "devices": 1}
    nodes = slurm_job.step_nodes()
    if tasks % nodes or not slurm_job.evenly_spread():
        raise ConfigurationError(
            f"SLURM: {tasks} tasks on {nodes} nodes ({slurm_job.tasks_of_nodes()} a node); start the same number on "
            "each, with --ntasks-per-node"
        )
    # Lightning compares SLURM's variables of the job with the Trainer's settings: give these variables the step's
    # values.
    slurm_job.set_step_sizes_in_environment(tasks, nodes)
    if nodes == 1:
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", str(_port()))
    return {
        **_several_ranks(nodes, tasks // nodes, STRATEGIES[strategy](**options)),
        "plugins": [SLURMEnvironment(auto_requeue=False)],
    }


def _check_gpu() -> None:
    """Raise an error if the job requests a GPU that torch cannot use, because it would silently train on the CPU."""
    if REQUIRED not in os.environ or torch.cuda.is_available():
        return
    if torch.version.cuda is None and torch.version.hip is None:
        raise ConfigurationError(
            f"torch: {torch.__version__} was built for CPUs, and the job asks for GPUs; install one that was built for "
            "the nodes' driver, or give hydra.launcher.require_gpu=false"
        )
    try:
        # This raises CUDA's own error, which is_available() hides.
        torch.empty(1, device="cuda")
        why = "torch.cuda.is_available() is false"
    except Exception as error:
        why = error_line(error)
    raise NoGpuError(f"the job asks for GPUs and torch {torch.__version__} can use none on this node ({why}); {REMEDY}")


def free_devices(ranks: int) -> list[str]:
    """Return the node's GPUs on which no rank trains, named as in CUDA_VISIBLE_DEVICES; empty if there are none.

    Generator processes run on these GPUs.
    """
    if not torch.cuda.is_available():
        return []
    variable = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    visible = variable.split(",") if variable else [str(number) for number in range(torch.cuda.device_count())]
    return visible[ranks:]


def _several_ranks(nodes: int, tasks_per_node: int, strategy: Strategy) -> dict[str, Any]:
    visible = torch.cuda.device_count() if torch.cuda.is_available() else tasks_per_node
    if visible < tasks_per_node:
        raise ConfigurationError(
            f"devices: {tasks_per_node} ranks on this node see {visible} GPUs; give every task all of the node's "
            "(SLURM: --gpus-per-node, not --gpus-per-task)"
        )
    return {"accelerator": "auto", "devices": tasks_per_node, "num_nodes": nodes, "strategy": strategy}


def _port() -> int:
    """Return a port for this step of this job, below the ephemeral ports (on Linux from 32768)."""
    job, step = slurm_job.step_numbers()
    # The range is 15000 to 31999. Ports of consecutive jobs are 31 apart, so that their first steps do not collide.
    return 15000 + (job * 31 + step) % 17000
