"""Training on several ranks: the curve of one rank, equal weights on all ranks, one journal, a common end.

Ranks are forked from this process, which has already imported everything, and communicate over gloo.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.plugins.environments import LightningEnvironment, SLURMEnvironment
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy

from lightning_scalerl import ConfigurationError, RolloutDataModule, ScaleRL
from lightning_scalerl.axes.aggregation import TokenAggregation
from lightning_scalerl.axes.loss import DAPO, ClipCov, KLCov
from lightning_scalerl.callbacks.base import Recorder
from lightning_scalerl.callbacks.checkpointing import ResumableCheckpoint, newest_checkpoint
from lightning_scalerl.callbacks.evaluate import Evaluate
from lightning_scalerl.callbacks.run_log import RunLog
from lightning_scalerl.distributed.ranks import LeaderFailedError, Ranks, check_strategy
from lightning_scalerl.distributed.sharded import ShardedStrategy
from lightning_scalerl.distributed.start import STRATEGIES, free_devices, process_rank, trainer_settings
from lightning_scalerl.member.identify import STRATEGIES as KNOWN
from lightning_scalerl.model.load import load_model, load_tokenizer
from lightning_scalerl.model.shared_prompt import batch_of_sequences
from lightning_scalerl.rollouts.rollout import PassSize, whole
from lightning_scalerl.verify.verification import RewardError
from sweeps.executor.failure import kind_of
from sweeps.port import free_port
from sweeps.run.gpu import REQUIRED, NoGpuError
from sweeps.run.interruption import interruption
from sweeps.run.journal import JournalView, read_journal
from tests.axes.test_contract import batch_of
from tests.helpers import SMALL, CountingTask, quiet

LIMIT_S = 60.0


def fit(
    model_path: str,
    run_dir: Path,
    ranks: int,
    steps: int = 4,
    callbacks: Sequence[Callback] = (),
    overrides: Sequence[str] = (),
    task: CountingTask | None = None,
    checkpoint_every: int = 1000,
    resume: bool = False,
    recipe: str = "scalerl",
    dropout: float = 0.0,
    logger: Any = False,
    strategy: Any = "ddp",
) -> ScaleRL:
    torch.manual_seed(7)
    model = load_model(model_path)
    model.config.attention_dropout = dropout
    for module in model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = dropout
    module = ScaleRL(
        model,
        recipe,
        [*SMALL, "precision=fp32", f"optimizer.dropout={dropout > 0}", *overrides],
        load_tokenizer(model_path),
    )
    several: dict[str, Any] = {"devices": ranks, "strategy": strategy} if ranks > 1 else {}
    directory = run_dir / "checkpoints"
    trainer = Trainer(
        max_steps=steps,
        callbacks=[
            *callbacks,
            Evaluate(2, 2),
            RunLog(run_dir),
            ResumableCheckpoint(directory, checkpoint_every),
        ],
        **{**quiet(), "logger": logger, "enable_checkpointing": True, **several},
    )
    data = RolloutDataModule(task or CountingTask())
    newest = newest_checkpoint(directory).path if resume else None
    trainer.fit(module, datamodule=data, ckpt_path=newest, weights_only=True)
    return module


def on_ranks(count: int, work: Callable[[int], str]) -> list[str]:
    """Return what `work(rank)` returns on each of `count` forked ranks, or "<error>: ..." if it raises."""
    port = free_port()
    children = []
    for rank in range(count):
        inlet, outlet = os.pipe()
        child = os.fork()
        if child == 0:
            os.environ |= {"LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            # A forked process has no torch threads. Create the pool here, before several threads load a model.
            torch.set_num_threads(torch.get_num_threads())
            try:
                result = work(rank)
            except BaseException as error:
                traceback.print_exc()
                result = f"{type(error).__name__}: {error}"
            os.write(outlet, result.encode())
            sys.stderr.flush()
            os._exit(0)
        os.close(outlet)
        children.append((child, inlet))
    deadline = time.monotonic() + LIMIT_S
    waiting = [child for child, _ in children]
    while waiting and time.monotonic() < deadline:
        waiting = [child for child in waiting if os.waitpid(child, os.WNOHANG)[0] == 0]
        time.sleep(0.02)
    for child in waiting:
        os.kill(child, 9)
        os.waitpid(child, 0)
    assert not waiting, "ranks hang"
    return [os.read(inlet, 1 << 16).decode() for _, inlet in children]


def fingerprint(module: ScaleRL) -> str:
    digest = hashlib.sha256()
    for tensor in module.policy.state_dict().values():
        digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    """Use one thread, because a forked child has none of its parent's worker threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# Metrics that depend only on the sampled rollouts, not on how sums over ranks are rounded.
OF_ROLLOUTS = (
    "pass_rate",
    "reward",
    "completion_tokens",
    "truncated",
    "interrupted",
    "groups_kept",
    "staleness",
    "epoch",
)


def check_same_curve(one: JournalView, several: JournalView, steps: int) -> None:
    for kind in ("train", "eval"):
        expected, actual = one.of_kind(kind), several.of_kind(kind)
        assert [record.step for record in expected] == [record.step for record in actual]
        for a, b in zip(expected, actual, strict=True):
            if a.step > steps:
                continue
            _, _, expected_metrics = a.deterministic()
            _, _, actual_metrics = b.deterministic()
            assert set(expected_metrics) == set(actual_metrics)
            assert actual_metrics == pytest.approx(expected_metrics, rel=1e-5, abs=1e-6), f"{kind} {a.step}"
            if kind == "train":
                rollout_metrics = [
                    key for key in expected_metrics if key.startswith(tuple(f"train/{name}" for name in OF_ROLLOUTS))
                ]
                assert len(rollout_metrics) >= 10
                assert [expected_metrics[key] for key in rollout_metrics] == [
                    actual_metrics[key] for key in rollout_metrics
                ]


def test_two_ranks_train_as_one(tiny_model_path: str, tmp_path: Path) -> None:
    """Rollouts, losses, gradient norms and counters match a run on one rank. Both ranks end with the same weights."""

    def callbacks() -> list[Callback]:
        return [DAPO(clip_low=0.05, clip_high=0.05), TokenAggregation()]

    fit(tiny_model_path, tmp_path / "one", 1, callbacks=callbacks())

    def work(rank: int) -> str:
        module = fit(tiny_model_path, tmp_path / "two", 2, callbacks=callbacks())
        assert hasattr(module, "generator") == hasattr(module, "mechanism") == (rank == 0)
        assert torch.initial_seed() == 7 + rank  # dropout differs
        assert module.meter.devices == 2  # every hour counts twice
        # Every rank needs the metric, because EarlyStopping and ModelCheckpoint decide on each rank.
        assert "eval/heldout/pass_rate" in module.trainer.callback_metrics
        return fingerprint(module)

    results = on_ranks(2, work)
    assert results[0] == results[1] and len(results[0]) == 64
    assert read_journal(tmp_path / "two").status == "finished"
    check_same_curve(read_journal(tmp_path / "one"), read_journal(tmp_path / "two"), steps=4)
    assert any(record.metrics["mechanism/loss"] for record in read_journal(tmp_path / "two").of_kind("train"))


@pytest.mark.parametrize("kind", [ClipCov, pytest.param(KLCov, marks=pytest.mark.slow)])
def test_ranks_select_the_same_tokens_as_one_rank(tiny_model_path: str, tmp_path: Path, kind: Any) -> None:
    """The selection is among all tokens of the step. With two epochs, the penalty of KL-Cov takes effect."""

    def run(name: str, ranks: int) -> ScaleRL:
        loss = ClipCov(share=0.1, low=1e-3) if kind is ClipCov else KLCov(share=0.1)
        overrides = ["epochs.count=2", "correction=proximal"]
        return fit(tiny_model_path, tmp_path / name, ranks, steps=2, callbacks=[loss], overrides=overrides)

    run("one", 1)
    results = on_ranks(2, lambda rank: fingerprint(run("two", 2)))
    assert results[0] == results[1] and len(results[0]) == 64
    one, two = (read_journal(tmp_path / name) for name in ("one", "two"))
    check_same_curve(one, two, steps=2)
    assert all(record.metrics["train/clip_fraction"] > 0.01 for record in one.of_kind("train")) or kind is KLCov


@pytest.mark.slow
def test_a_rank_without_rows_takes_part(tiny_model_path: str, tmp_path: Path) -> None:
    """Two rollouts for three ranks, and steps in which no rank has any."""

    class Sometimes(CountingTask):
        calls = 0

        def reward(self, prompt: Any, completion: str) -> float:
            self.calls += 1
            return self.calls % 2 if int(prompt.prompt_id[1:]) % 2 else 1.0

    options: dict[str, Any] = {
        "recipe": "scalerl_core",
        "overrides": ["batch.prompts=1", "batch.completions=2", "async_mode.k=1"],
        "steps": 7,
    }
    fit(tiny_model_path, tmp_path / "one", 1, task=Sometimes(), **options)
    results = on_ranks(
        3, lambda rank: fingerprint(fit(tiny_model_path, tmp_path / "three", 3, task=Sometimes(), **options))
    )
    assert len(set(results)) == 1 and len(results[0]) == 64
    view = read_journal(tmp_path / "three")
    check_same_curve(read_journal(tmp_path / "one"), view, steps=7)
    kept = [record.metrics["train/groups_kept"] for record in view.of_kind("train")]
    assert kept[0] == 0 and 1 in kept[:-2], kept


class AskToStop(Recorder):
    """Ask this process to stop after `step` steps. Works on ranks that record nothing, too."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_record(self, kind: str, step: int, metrics: Any) -> None: ...

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *rest: Any) -> None:
        if pl_module.completed_steps == self.step:
            interruption.request("SIGUSR2")


@pytest.mark.full
def test_a_stop_request_on_one_rank_stops_all_and_the_run_resumes_bit_for_bit(
    tiny_model_path: str, tmp_path: Path
) -> None:
    """Dropout makes every rank's random state matter. Sums over two ranks do not depend on the order."""

    def whole_run(rank: int) -> str:
        return fingerprint(fit(tiny_model_path, tmp_path / "whole", 2, steps=5, dropout=0.3))

    def first(rank: int) -> str:
        stop = [AskToStop(3)] if rank == 1 else []
        fit(tiny_model_path, tmp_path / "parts", 2, steps=5, dropout=0.3, callbacks=stop)
        return "went on"

    def second(rank: int) -> str:
        return fingerprint(fit(tiny_model_path, tmp_path / "parts", 2, steps=5, dropout=0.3, resume=True))

    expected = on_ranks(2, whole_run)
    assert on_ranks(2, first) == ["RunInterruptedError: step 3: SIGUSR2"] * 2
    between = read_journal(tmp_path / "parts")
    assert (between.status, between.checkpoint_step) == ("running", 3)
    assert on_ranks(2, second) == expected
    view = read_journal(tmp_path / "parts")
    assert view.status == "finished"
    assert view.deterministic() == read_journal(tmp_path / "whole").deterministic()


@pytest.mark.full
def test_sigterm_to_one_rank_disturbs_no_sum(tiny_model_path: str, tmp_path: Path) -> None:
    """The signal comes in the middle of a step, where Lightning's own handler would broadcast."""

    class Terminated(Callback):
        def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
            if pl_module.completed_steps == 1:
                os.kill(os.getpid(), signal.SIGTERM)

    def work(rank: int) -> str:
        with interruption.on_signals([signal.SIGTERM]):
            fit(tiny_model_path, tmp_path / "two", 2, callbacks=[Terminated()] if rank == 1 else [])
        return "went on"

    assert on_ranks(2, work) == ["RunInterruptedError: step 2: SIGTERM"] * 2
    results = on_ranks(2, lambda rank: fingerprint(fit(tiny_model_path, tmp_path / "two", 2, resume=True)))
    assert results[0] == results[1]
    fit(tiny_model_path, tmp_path / "one", 1)
    check_same_curve(read_journal(tmp_path / "one"), read_journal(tmp_path / "two"), steps=4)


@pytest.mark.slow
def test_a_run_resumes_with_another_number_of_ranks(tiny_model_path: str, tmp_path: Path) -> None:
    fit(tiny_model_path, tmp_path / "one", 1)
    fit(tiny_model_path, tmp_path / "both", 1, steps=2)
    results = on_ranks(2, lambda rank: fingerprint(fit(tiny_model_path, tmp_path / "both", 2, resume=True)))
    assert results[0] == results[1] and len(results[0]) == 64
    check_same_curve(read_journal(tmp_path / "one"), read_journal(tmp_path / "both"), steps=4)


@pytest.mark.slow
def test_when_rank_0_fails_all_stop(tiny_model_path: str, tmp_path: Path) -> None:
    class Breaks(CountingTask):
        calls = 0

        def reward(self, prompt: Any, completion: str) -> float:
            self.calls += 1
            return float("nan") if self.calls > 60 else super().reward(prompt, completion)

    def work(rank: int) -> str:
        with pytest.raises(RewardError if rank == 0 else LeaderFailedError, match="returned nan"):
            fit(tiny_model_path, tmp_path, 2, steps=50, task=Breaks())
        return "stopped"

    assert on_ranks(2, work) == ["stopped", "stopped"]
    view = read_journal(tmp_path)
    assert view.status == "failed" and str(view.reason).startswith("RewardError")


@pytest.mark.slow
def test_an_error_only_on_rank_0_stops_all(tiny_model_path: str, tmp_path: Path) -> None:
    fit(tiny_model_path, tmp_path, 1, steps=1)
    journal_before = (tmp_path / "metrics.jsonl").read_bytes()
    results = on_ranks(2, lambda rank: str(fit(tiny_model_path, tmp_path, 2)))
    assert results[0].startswith("ConfigurationError: run_dir: ") and "holds a finished run" in results[0]
    assert results[1] == f"LeaderFailedError: rank 0 failed: {results[0]}"
    assert (tmp_path / "metrics.jsonl").read_bytes() == journal_before


@pytest.mark.slow
def test_a_full_disk_stops_all_ranks(tiny_model_path: str, tmp_path: Path) -> None:
    from lightning_scalerl.callbacks.checkpoint_file import DirectCheckpointIO

    def work(rank: int) -> str:
        class Full(DirectCheckpointIO):
            def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
                if checkpoint["global_step"] > 2:
                    Path(path).write_bytes(b"half")
                    raise OSError(28, "No space left on device")
                super().save_checkpoint(checkpoint, path, storage_options)

        DirectCheckpointIO.__new__ = lambda cls, *a, **k: object.__new__(Full)  # type: ignore[method-assign]
        fit(tiny_model_path, tmp_path, 2, checkpoint_every=2)
        return "trained"

    results = on_ranks(2, work)
    assert results[0].startswith("OSError: [Errno 28]")
    assert results[1].startswith("LeaderFailedError: rank 0 failed: OSError: [Errno 28]")
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000002.ckpt"]
    assert "No space left" in str(read_journal(tmp_path).reason)


@pytest.mark.slow
def test_ranks_that_read_different_checkpoints_write_nothing(tiny_model_path: str, tmp_path: Path) -> None:
    fit(tiny_model_path, tmp_path, 1, steps=2)
    journal_before = (tmp_path / "metrics.jsonl").read_bytes()
    results = on_ranks(2, lambda rank: str(fit(tiny_model_path, tmp_path, 2, resume=rank == 0)))
    assert all("completed steps: differs between ranks, [2, 0]" in text for text in results)
    assert (tmp_path / "metrics.jsonl").read_bytes() == journal_before


class Other(DDPStrategy):
    pass


@pytest.mark.parametrize("strategy", [FSDPStrategy, Other, lambda: DDPStrategy(start_method="spawn")])
def test_other_strategies_are_refused(strategy: Any) -> None:
    with pytest.raises(ConfigurationError, match=r'strategy: .* is not supported; use strategy="ddp"') as caught:
        check_strategy(strategy())
    assert "\n" not in str(caught.value)


def test_a_trainer_with_another_strategy_is_refused(tiny_model_path: str) -> None:
    module = ScaleRL(tiny_model_path, overrides=SMALL)

    def work(rank: int) -> str:
        trainer = Trainer(max_steps=1, accelerator="cpu", devices=1, strategy=Other(), logger=False)
        trainer.fit(module, datamodule=RolloutDataModule(CountingTask()))
        return "trained"

    assert "ConfigurationError: strategy: Other is not supported" in on_ranks(1, work)[0]


@pytest.mark.parametrize("tokens", [None, 16])
@pytest.mark.parametrize("count", [2, 3, 20])
def test_rows_of_all_ranks_are_the_batch(count: int, tokens: int | None) -> None:
    batch = batch_of()
    rank_batches = [Ranks(number, count).rows(batch, PassSize(4, tokens)) for number in range(count)]
    assert sorted(int(row) for part in rank_batches for row in part.row) == sorted(batch.row.tolist())
    assert all(part.denominators == batch.denominators for part in rank_batches)
    if count == 2:
        assert abs(int(rank_batches[0].lengths.sum() - rank_batches[1].lengths.sum())) < 7
    parts = [(part, part.generator_logprobs, part.advantages) for part in rank_batches]
    logprobs, advantages = whole(batch, parts)
    real = torch.arange(logprobs.shape[1]) < (batch.lengths - batch.completion_start).unsqueeze(1)
    assert torch.equal(logprobs, batch.generator_logprobs)
    assert torch.equal(advantages[real], batch.advantages[real])


def test_ranks_get_equal_tokens_if_passes_are_limited_by_tokens() -> None:
    """Counts differ by at most the shortest row. Dealt out by rows, the first rank gets the longer row each time."""
    lengths, start = torch.arange(2, 66).flip(0), torch.ones(64, dtype=torch.int64)
    batch = batch_of_sequences(torch.zeros(64, 65, dtype=torch.int64), start, lengths, torch.zeros_like(start))
    batch.row = torch.arange(64)

    def tokens(size: PassSize) -> list[int]:
        return [int(Ranks(number, 4).rows(batch, size).lengths.sum()) for number in range(4)]

    by_rows, by_tokens = tokens(PassSize(4)), tokens(PassSize(4, 32))
    assert sum(by_rows) == sum(by_tokens) == int(batch.lengths.sum())
    assert max(by_tokens) - min(by_tokens) <= 2 < max(by_rows) - min(by_rows) == 16 * 3
    assert by_tokens == tokens(PassSize(8, 64)), "independent of the size of a pass"


def test_a_single_rank_passes_values_through() -> None:
    ranks, batch = Ranks(), batch_of()
    assert ranks.leads and ranks.rows(batch) is batch and ranks.share_batch(lambda: batch) is batch
    assert ranks.gather(3) == [3] and ranks.agree(None) is None and ranks.agree("x") == "x"
    assert dataclasses.asdict(ranks) == {"number": 0, "count": 1, "hosts": None, "strategy": None, "answer": None}


# --- how processes are started -------------------------------------------------------------------------------

BATCH_SCRIPT = {"SLURM_JOB_ID": "70123", "SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2", "SLURM_PROCID": "0"}
STEP = {**BATCH_SCRIPT, "SLURM_STEP_ID": "0", "SLURM_LOCALID": "1", "SLURM_NODEID": "0", "SLURM_PROCID": "1"}
ONE_NODE = {**STEP, "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_TASKS_PER_NODE": "2"}


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, str]], None]:
    for name in list(os.environ):
        if name.startswith(("SLURM_", "TORCHELASTIC_", "MASTER_", "LOCAL_RANK", "RANK", "WORLD_SIZE")):
            monkeypatch.delenv(name)
    # Undo at the end what trainer_settings itself sets.
    for name in ("SLURM_NTASKS", "SLURM_NNODES", "SLURM_NTASKS_PER_NODE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)

    def set_all(variables: dict[str, str]) -> None:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return set_all


def without_cuda(monkeypatch: pytest.MonkeyPatch, built_for: str | None) -> None:
    """Set up a job that requires GPUs, and a torch built for CUDA `built_for` (None: for CPUs) that can use none."""
    monkeypatch.setenv(REQUIRED, "1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", built_for)
    monkeypatch.setattr(torch.version, "hip", None)


def test_a_job_that_asks_for_gpus_does_not_train_on_the_cpu(launched: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    without_cuda(monkeypatch, "13.0")

    def too_old(*sizes: int, device: str) -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 11040).")

    monkeypatch.setattr(torch, "empty", too_old)
    with pytest.raises(
        NoGpuError, match=r"torch .* can use none on this node .*too old \(found version 11040\)"
    ) as caught:
        trainer_settings()
    assert kind_of(caught.value) == "gpu"
    assert "require_gpu=false" in str(caught.value) and "\n" not in str(caught.value)


def test_a_torch_built_for_cpus_is_not_blamed_on_the_node(launched: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    without_cuda(monkeypatch, None)
    with pytest.raises(ConfigurationError, match=r"torch: .* was built for CPUs, .*require_gpu=false") as caught:
        trainer_settings()
    assert kind_of(caught.value) == "error"


def test_a_job_that_asks_for_gpus_and_has_one_trains(launched: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(REQUIRED, "1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert trainer_settings() == {"accelerator": "auto", "devices": 1}


def test_settings_of_a_run_started_by_hand(launched: Any) -> None:
    assert trainer_settings() == {"accelerator": "auto", "devices": 1}
    assert process_rank() == 0


@pytest.mark.parametrize("variables", [BATCH_SCRIPT, {**ONE_NODE, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}])
def test_a_slurm_job_with_one_task_trains_on_one_device(launched: Any, variables: dict[str, str]) -> None:
    """Lightning must neither wait for other ranks nor handle the job's signals, however many tasks the job has."""
    launched(variables)
    settings = trainer_settings()
    assert settings["devices"] == 1 and "strategy" not in settings
    assert [type(plugin) for plugin in settings["plugins"]] == [LightningEnvironment]
    trainer = Trainer(logger=False, **{**settings, "accelerator": "cpu"})
    assert trainer.world_size == 1
    assert process_rank() == 0


def test_slurm_tasks_on_one_node(launched: Any) -> None:
    launched(ONE_NODE)
    settings = trainer_settings()
    assert (settings["devices"], settings["num_nodes"]) == (2, 1)
    (environment,) = settings["plugins"]
    assert isinstance(environment, SLURMEnvironment) and not environment.auto_requeue
    assert environment.main_address == "127.0.0.1"
    assert 15000 <= environment.main_port < 32000
    assert process_rank() == 1
    trainer = Trainer(logger=False, **{**settings, "accelerator": "cpu"})
    assert (trainer.world_size, trainer.global_rank) == (2, 1)
    check_strategy(trainer.strategy)


def test_a_configured_number_of_ranks_that_differs_is_refused(launched: Any) -> None:
    assert trainer_settings("fsdp2", (1, 1)) == {"accelerator": "auto", "devices": 1}
    with pytest.raises(
        ConfigurationError, match=r"strategy.devices: 8 ranks on 2 .*, and 1 on 1 .*torchrun --nnodes 2"
    ):
        trainer_settings("fsdp2", (2, 8))
    launched(ONE_NODE)
    assert trainer_settings("fsdp2", (1, 2))["devices"] == 2
    with pytest.raises(
        ConfigurationError, match=r"strategy.devices: 4 ranks on 1 .*, and 2 on 1 .*strategy.devices=null"
    ):
        trainer_settings("fsdp2", (1, 4))


def test_steps_of_one_job_meet_at_different_ports(launched: Any) -> None:
    ports = set()
    for step in range(3):
        launched({**ONE_NODE, "SLURM_STEP_ID": str(step)})
        trainer_settings()
        ports.add(os.environ.pop("MASTER_PORT"))
    assert len(ports) == 3


def test_a_step_smaller_than_its_job(launched: Any) -> None:
    """The job's variables say 4 tasks per node on 3 nodes. This step has 2 tasks on each of 2 nodes."""
    launched({**STEP, "SLURM_NTASKS_PER_NODE": "4", "SLURM_NNODES": "3", "SLURM_STEP_NUM_TASKS": "4"})
    launched({"SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_NODELIST": "node[7-8]"})
    settings = trainer_settings()
    assert (settings["devices"], settings["num_nodes"]) == (2, 2)
    settings["plugins"][0].validate_settings(2, 2)
    assert settings["plugins"][0].main_address == "node7"


def test_uneven_tasks_are_refused(launched: Any) -> None:
    launched({**STEP, "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_TASKS_PER_NODE": "3,1"})
    with pytest.raises(ConfigurationError, match=r"4 tasks on 2 nodes \(3,1 a node\)"):
        trainer_settings()


def test_torchrun(launched: Any) -> None:
    launched({"TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "RANK": "3", "LOCAL_RANK": "1"})
    settings = trainer_settings()
    assert (settings["devices"], settings["num_nodes"]) == (2, 2)
    assert process_rank() == 3
    assert type(settings["strategy"]) is DDPStrategy
    assert type(trainer_settings("fsdp2")["strategy"]) is ShardedStrategy and set(STRATEGIES) == set(KNOWN)


def test_too_few_gpus_for_the_tasks(launched: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    launched(ONE_NODE)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ConfigurationError, match=r"2 ranks on this node see 1 GPUs; .*--gpus-per-node"):
        trainer_settings()


@pytest.mark.parametrize(
    ("named", "ranks", "beside"),
    [("", 1, ["1", "2", "3"]), ("4,6", 1, ["6"]), ("4,6", 2, []), ("GPU-a,GPU-b", 1, ["GPU-b"])],
)
def test_generators_take_the_gpus_that_no_rank_trains_on(
    monkeypatch: pytest.MonkeyPatch, named: str, ranks: int, beside: list[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    assert free_devices(ranks) == beside
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert free_devices(ranks) == []
