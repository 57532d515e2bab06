"""Tests of runs that get a stop request, lose their lease or run out of disk space, and then continue."""

from __future__ import annotations

import errno
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_scalerl import RolloutDataModule, train
from lightning_scalerl.axes.async_mode import OnPolicy, Pipeline, PPOOffPolicy
from lightning_scalerl.callbacks.base import Recorder
from lightning_scalerl.callbacks.checkpoint_file import DirectCheckpointIO
from lightning_scalerl.callbacks.checkpointing import ResumableCheckpoint, checkpoints, newest_checkpoint
from lightning_scalerl.callbacks.evaluate import Evaluate
from lightning_scalerl.callbacks.run_log import RunLog
from lightning_scalerl.module import ScaleRL
from sweeps.run.interruption import RunInterruptedError, interruption
from sweeps.run.journal import read_journal
from tests.examples import every
from tests.helpers import SMALL, CountingTask, fit, quiet, undisturbed

STEPS = 6


class ActAt(Recorder):
    """Calls `act` at the record of the given kind and step."""

    def __init__(self, step: int, act: Callable[[], Any], kind: str = "train") -> None:
        self.wanted, self.act = (kind, step), act

    def on_record(self, kind: str, step: int, metrics: Any) -> None:
        if (kind, step) == self.wanted:
            self.act()


def request_stop() -> None:
    interruption.request("SIGUSR2")


@pytest.fixture(autouse=True)
def _no_request() -> Iterator[None]:
    interruption.clear()
    yield
    interruption.clear()


def weights(module: ScaleRL) -> list[torch.Tensor]:
    return list(module.policy.state_dict().values())


MODES = {
    "on_policy": ("scalerl_core", OnPolicy),
    "ppo_off_policy": ("scalerl_core", lambda: PPOOffPolicy(k=3)),
    "pipeline_stale": ("scalerl", lambda: Pipeline(3, "stale")),
    "pipeline_recompute": ("scalerl", lambda: Pipeline(3, "recompute")),
}


@pytest.mark.slow
@pytest.mark.parametrize("mode", every(4, reversed(MODES), pytest.mark.full))
def test_a_run_stopped_after_any_step_continues_bit_for_bit(mode: str, tiny_model_path: str, tmp_path: Path) -> None:
    """This holds for stops between checkpoints, and for a second stop after the first."""
    recipe, choice = MODES[mode]
    options: dict[str, Any] = {"steps": STEPS, "recipe": recipe, "checkpoint_every": 4}
    journal, expected_weights = undisturbed(tiny_model_path, choice=choice, **options)
    for stops in ([1], [2, 3], [4], [5]):
        run_dir = tmp_path / f"stopped_{stops[0]}"
        for number, step in enumerate(stops):
            interruption.clear()
            with pytest.raises(RunInterruptedError, match=f"^step {step}: SIGUSR2$"):
                fit(
                    tiny_model_path,
                    run_dir,
                    callbacks=[choice(), ActAt(step, request_stop)],
                    resume=number > 0,
                    **options,
                )
            view = read_journal(run_dir)
            assert (view.status, view.reason, view.checkpoint_step) == ("running", None, step)
            assert '"kind":"end"' not in (run_dir / "metrics.jsonl").read_text()
            assert view.of_kind("train")[-1].step == step
        interruption.clear()
        resumed = fit(tiny_model_path, run_dir, callbacks=[choice()], resume=True, **options)
        view = read_journal(run_dir)
        assert view.status == "finished"
        assert view.deterministic() == journal, stops
        assert all(map(torch.equal, expected_weights, weights(resumed)))


class Signals(CountingTask):
    """Calls `act` at the n-th reward, for example to send a signal in the middle of a generation."""

    def __init__(self, at: int, act: Callable[[], Any]) -> None:
        super().__init__()
        self.rewards, self.at, self.act = 0, at, act

    def reward(self, prompt: Any, completion: str) -> float:
        self.rewards += 1
        if self.rewards == self.at:
            self.act()
        assert self.rewards < self.at + 12, "the run must stop within less than a batch"
        return super().reward(prompt, completion)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "mode", "at"),
    every(
        3,
        [
            (signal.SIGUSR2, "on_policy", 20),
            pytest.param(signal.SIGTERM, "on_policy", 60, marks=pytest.mark.slow),
            (signal.SIGTERM, "ppo_off_policy", 60),
            pytest.param(signal.SIGTERM, "pipeline_stale", 20, marks=pytest.mark.slow),
            (signal.SIGTERM, "pipeline_stale", 60),
            (signal.SIGTERM, "pipeline_recompute", 60),
        ],
        pytest.mark.full,
    ),
)
def test_a_signal_during_a_generation_stops_the_run_there(
    tiny_model_path: str, tmp_path: Path, number: signal.Signals, mode: str, at: int
) -> None:
    """The run stops between two events of the stream, also in the first generation, and continues bit for bit."""
    recipe, choice = MODES[mode]
    options: dict[str, Any] = {"steps": STEPS, "recipe": recipe}
    task = Signals(at, lambda: os.kill(os.getpid(), number))
    with interruption.on_signals([number]), pytest.raises(RunInterruptedError, match=number.name):
        fit(tiny_model_path, tmp_path / "parts", callbacks=[choice()], task=task, **options)
    view = read_journal(tmp_path / "parts")
    trained = [record.step for record in view.of_kind("train")]
    assert view.checkpoint_step == (trained[-1] if trained else 0) < STEPS
    names = [path.name for path in (tmp_path / "parts" / "checkpoints").iterdir()]
    assert names == [f"step-{view.checkpoint_step:08d}.ckpt"]
    interruption.clear()
    resumed = fit(tiny_model_path, tmp_path / "parts", callbacks=[choice()], resume=True, **options)
    journal, expected_weights = undisturbed(tiny_model_path, choice=choice, **options)
    assert read_journal(tmp_path / "parts").deterministic() == journal
    assert all(map(torch.equal, expected_weights, weights(resumed)))


@pytest.mark.slow
@pytest.mark.parametrize(("evaluation", "steps"), every(2, [(0, 5), (2, 5), (5, 5), (4, 5)], pytest.mark.full))
def test_a_request_during_an_evaluation_stops_the_run_there(
    tiny_model_path: str, tmp_path: Path, evaluation: int, steps: int
) -> None:
    """The interrupted evaluation is not recorded and is repeated: at the start, in between, and after the last step."""

    class InEvaluation(CountingTask):
        """Requests a stop during the evaluation of a step; an evaluation of 3 prompts needs 6 rewards."""

        heldout = 0

        def reward(self, prompt: Any, completion: str) -> float:
            self.heldout += prompt in self.pool[-3:]
            if self.heldout == 6 * [0, 2, 4, 5].index(evaluation) + 1:
                request_stop()
            return super().reward(prompt, completion)

    with pytest.raises(RunInterruptedError, match=f"step {evaluation}: SIGUSR2"):
        fit(tiny_model_path, tmp_path / "parts", steps, task=InEvaluation())
    view = read_journal(tmp_path / "parts")
    assert view.status == "running" and evaluation not in [record.step for record in view.of_kind("eval")]
    # The request is still there: the run stops again at once, and loses nothing.
    with pytest.raises(RunInterruptedError, match=f"step {evaluation}: SIGUSR2"):
        fit(tiny_model_path, tmp_path / "parts", steps, resume=True)
    interruption.clear()
    fit(tiny_model_path, tmp_path / "parts", steps, resume=True)
    resumed = read_journal(tmp_path / "parts")
    assert resumed.status == "finished"
    assert resumed.deterministic() == undisturbed(tiny_model_path, steps)[0]
    assert not any(record.metrics["compute/wasted_flops"] for record in resumed.records), "no step was lost"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["train", "eval"])
def test_sigterm_of_a_script_stops_the_run_at_the_end_of_a_step(
    tiny_model_path: str, tmp_path: Path, kind: str
) -> None:
    """The script handles no signals, so Lightning gets SIGTERM. `ResumableCheckpoint` lets the run continue later."""
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(RunInterruptedError, match="step 2: SIGTERM"):
        fit(
            tiny_model_path,
            tmp_path / "parts",
            4,
            callbacks=[ActAt(2, lambda: os.kill(os.getpid(), signal.SIGTERM), kind)],
        )
    assert signal.getsignal(signal.SIGTERM) == before and read_journal(tmp_path / "parts").status == "running"
    fit(tiny_model_path, tmp_path / "parts", 4, resume=True)
    assert read_journal(tmp_path / "parts").deterministic() == undisturbed(tiny_model_path, 4)[0]


def test_lightnings_own_signal_handling_stops_a_generation(tiny_model_path: str) -> None:
    """A script without resumable checkpoints ends as Lightning ends it, within the current generation."""
    task = Signals(20, lambda: os.kill(os.getpid(), signal.SIGTERM))
    module = ScaleRL(tiny_model_path, "scalerl", overrides=SMALL)
    with pytest.raises(SIGTERMException):
        Trainer(max_steps=5, **quiet()).fit(module, datamodule=RolloutDataModule(task))


@pytest.mark.parametrize("error", [KeyboardInterrupt, SIGTERMException])
def test_ctrl_c_and_sigterm_in_a_script_are_no_failures(tiny_model_path: str, tmp_path: Path, error: type) -> None:
    """Lightning ends the process in both cases. The run may be continued, so its journal has no end."""

    def interrupt() -> None:
        raise error

    with pytest.raises(SystemExit):
        fit(tiny_model_path, tmp_path, 2, callbacks=[ActAt(1, interrupt)])
    view = read_journal(tmp_path)
    assert (view.status, view.reason, view.records[-1].step) == ("running", None, 0)
    fit(tiny_model_path, tmp_path, 2)
    assert read_journal(tmp_path).status == "finished"


def ctrl_c(times: int) -> None:
    """Receive Ctrl-C as Lightning's Trainer does, which exits with code 1 on KeyboardInterrupt."""
    try:
        for _ in range(times):
            signal.raise_signal(signal.SIGINT)
    except KeyboardInterrupt:
        sys.exit(1)
    if interruption.requested:
        raise RunInterruptedError(f"step 4: {interruption.reason}")


@pytest.mark.parametrize(
    ("times", "ignored", "code", "line"),
    [
        (1, False, 130, "scalerl train: saved (step 4: SIGINT); the same command continues the run"),
        (2, False, 130, "scalerl train: interrupted; the same command continues the run"),
        (2, True, None, None),
    ],
)
def test_ctrl_c_saves_a_single_run_and_a_second_one_ends_it(
    times: int, ignored: bool, code: int | None, line: str | None, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Where Ctrl-C is ignored, as under nohup, it stays ignored."""
    words = ["scalerl train", "scale=tiny", "budget.steps=8", f"output_dir={tmp_path}"]
    monkeypatch.setattr(sys, "argv", words)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")  # `main` sets it too; monkeypatch restores it
    monkeypatch.setattr(train, "_run_with_our_trainer", lambda run_dir, progress: ctrl_c(times))
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN if ignored else signal.default_int_handler)
    try:
        if code is None:
            train.main()
        else:
            with pytest.raises(SystemExit) as stop:
                train.main()
            assert stop.value.code == code
    finally:
        signal.signal(signal.SIGINT, handler)
    # On a fresh machine the first run makes the base model and says so.
    lines = [each for each in capfd.readouterr().err.splitlines() if not each.startswith("making the base model")]
    told = "Ctrl-C: the run stops as soon as it is saved; a second Ctrl-C ends it at once"
    assert lines == ([] if line is None else [told, line])


@pytest.mark.slow
def test_a_run_asked_before_its_first_step_does_not_train(tiny_model_path: str, tmp_path: Path) -> None:
    run_dir = tmp_path / "parts"
    with pytest.raises(RunInterruptedError, match="step 0: SIGUSR2"):
        fit(tiny_model_path, run_dir, steps=2, callbacks=[ActAt(0, request_stop, "eval")])
    assert read_journal(run_dir).status == "running" and not read_journal(run_dir).of_kind("train")
    assert newest_checkpoint(run_dir / "checkpoints").path is None
    interruption.clear()
    with pytest.raises(RunInterruptedError, match="step 1: SIGUSR2"):
        fit(tiny_model_path, run_dir, steps=2, callbacks=[ActAt(1, request_stop)], resume=True)
    # The request is still there: a resumed run stops at once, with the same checkpoint.
    with pytest.raises(RunInterruptedError, match="step 1: SIGUSR2"):
        fit(tiny_model_path, run_dir, steps=2, resume=True)
    interruption.clear()
    fit(tiny_model_path, run_dir, steps=2, resume=True)
    assert read_journal(run_dir).deterministic() == undisturbed(tiny_model_path, 2)[0]


@pytest.mark.slow
def test_a_run_asked_during_its_last_evaluation_finishes(tiny_model_path: str, tmp_path: Path) -> None:
    fit(tiny_model_path, tmp_path, steps=3, callbacks=[ActAt(3, request_stop, "eval")])
    view = read_journal(tmp_path)
    assert (view.status, view.checkpoint_step) == ("finished", 3)
    # The run stays finished, with or without a request.
    fit(tiny_model_path, tmp_path, steps=3, resume=True)
    assert read_journal(tmp_path).status == "finished"


class LostError(Exception):
    """Raised when another process has taken over the run."""

    leave_journal = True


class Lease:
    """A guard that raises from the n-th call on."""

    def __init__(self, calls: int) -> None:
        self.left = calls

    def __call__(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise LostError("taken over")


def guarded_fit(model_path: str, run_dir: Path, log_guard: Any, checkpoint_guard: Any, steps: int = 4) -> None:
    module = ScaleRL(model_path, "scalerl_core", overrides=SMALL)
    trainer = Trainer(
        max_steps=steps,
        callbacks=[
            Evaluate(2, 2),
            RunLog(run_dir, guard=log_guard),
            ResumableCheckpoint(run_dir / "checkpoints", 2, guard=checkpoint_guard),
        ],
        **{**quiet(), "enable_checkpointing": True},
    )
    trainer.fit(module, datamodule=RolloutDataModule(CountingTask()))


@pytest.mark.slow
def test_a_process_that_lost_the_run_writes_nothing_more(tiny_model_path: str, tmp_path: Path) -> None:
    """The lease is lost at several writes. The journal is then shorter and has no end."""
    unlimited = Lease(1000)
    guarded_fit(tiny_model_path, tmp_path / "whole", unlimited, None)
    calls = 1000 - unlimited.left
    lines = len((tmp_path / "whole" / "metrics.jsonl").read_text().splitlines())
    assert calls >= lines == 1 + 3 + 4 + 2 + 1
    written = []
    for allowed in [0, 1, 2, 3, 5, 8, lines]:
        run_dir = tmp_path / f"kept_{allowed}"
        with pytest.raises(LostError):
            guarded_fit(tiny_model_path, run_dir, Lease(allowed), None)
        journal = run_dir / "metrics.jsonl"
        written.append(len(journal.read_text().splitlines()) if journal.exists() else 0)
        assert not journal.exists() or '"end"' not in journal.read_text()
        assert (run_dir / "semantics.json").exists() == (
            allowed > 1
        )  # the first call is made when the journal is opened
    assert written[0] == 0
    # The guard is also called by the meter's heartbeat, as often as time passes, and by the passes of 3 evaluations.
    assert written == sorted(written) and written[-1] >= lines - 7


@pytest.mark.slow
def test_a_checkpoint_of_a_lost_run_is_not_kept(tiny_model_path: str, tmp_path: Path) -> None:
    with pytest.raises(LostError):
        guarded_fit(tiny_model_path, tmp_path, None, Lease(1), steps=8)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000002.ckpt"]
    view = read_journal(tmp_path)
    assert (view.status, view.checkpoint_step) == ("running", 2)


def fail_half_written(monkeypatch: pytest.MonkeyPatch, from_step: int) -> None:
    """Let every checkpoint from a step on fail half-written, as on a full disk."""
    save = DirectCheckpointIO.save_checkpoint

    def full(self: Any, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        save(self, checkpoint, path, storage_options)
        if checkpoint["global_step"] >= from_step:
            os.truncate(path, 1000)
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(DirectCheckpointIO, "save_checkpoint", full)


@pytest.mark.slow
def test_a_full_disk_at_a_checkpoint(tiny_model_path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = tmp_path / "parts"
    with monkeypatch.context() as patch:
        fail_half_written(patch, 4)
        with pytest.raises(OSError, match="No space left"):
            fit(tiny_model_path, run_dir, steps=6, checkpoint_every=2)
    assert [path.name for path in (run_dir / "checkpoints").iterdir()] == ["step-00000002.ckpt"]
    view = read_journal(run_dir)
    assert view.status == "failed" and view.reason == "OSError: [Errno 28] No space left on device"
    fit(tiny_model_path, run_dir, steps=6, checkpoint_every=2, resume=True)
    assert read_journal(run_dir).deterministic() == undisturbed(tiny_model_path, 6, checkpoint_every=2)[0]


@pytest.mark.slow
def test_a_full_disk_at_the_journal(tiny_model_path: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Even the end cannot be written. The disk's error is still raised, and the run continues once there is space."""
    run_dir = tmp_path / "parts"

    class Fills(Recorder):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *rest: Any) -> None:
            if pl_module.completed_steps == 3:
                (log,) = (callback for callback in trainer.callbacks if isinstance(callback, RunLog))
                log.journal._handle = Path("/dev/full").open("a", encoding="utf-8")  # noqa: SIM115

        def on_record(self, kind: str, step: int, metrics: Any) -> None: ...

    with caplog.at_level(logging.WARNING), pytest.raises(OSError, match="No space left") as caught:
        fit(tiny_model_path, run_dir, steps=6, checkpoint_every=2, callbacks=[Fills()])
    assert caught.value.__context__ is None
    assert "does not record how the run ended" in caplog.text
    view = read_journal(run_dir)
    assert (view.status, view.checkpoint_step) == ("running", 2)
    fit(tiny_model_path, run_dir, steps=6, checkpoint_every=2, resume=True)
    assert read_journal(run_dir).deterministic() == undisturbed(tiny_model_path, 6, checkpoint_every=2)[0]


def test_only_complete_checkpoints_of_our_runs_are_used(tiny_model_path: str, tmp_path: Path) -> None:
    fit(tiny_model_path, tmp_path, steps=1)
    directory = tmp_path / "checkpoints"
    (valid,) = checkpoints(directory)
    foreign = torch.load(valid, weights_only=True)
    del foreign["scalerl"]
    torch.save(foreign, directory / "step-00000002.ckpt")
    torch.save([1, 2], directory / "step-00000003.ckpt")
    torch.save(torch.zeros(3), directory / "step-00000004.ckpt")
    (directory / "step-00000005.ckpt").write_bytes(valid.read_bytes()[:-100])
    (directory / "step-00000006.ckpt").write_bytes(b"")
    (directory / "step-00000007.ckpt").mkdir()
    (directory / "step-00000008.ckpt").symlink_to(directory / "gone")
    (directory / "step-00000009.12345678.part").write_bytes(valid.read_bytes())
    assert newest_checkpoint(directory).path == valid
    valid.unlink()
    assert newest_checkpoint(directory).path is None
    assert newest_checkpoint(tmp_path / "nowhere").path is None


def test_partial_checkpoints_of_another_process_are_deleted(tiny_model_path: str, tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "step-00000001.12345678.part").write_bytes(b"half")
    fit(tiny_model_path, tmp_path, steps=1)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000001.ckpt"]


def test_checkpoints_after_the_resumed_one_are_set_aside(tiny_model_path: str, tmp_path: Path) -> None:
    """A checkpoint that is unreadable now may be readable later. It would then void newer records or checkpoints."""
    saves = ResumableCheckpoint(tmp_path, every_n_steps=2)
    for step in (2, 8, 288):
        (tmp_path / f"step-{step:08d}.ckpt").write_text("unreadable")
    saves._set_aside(2)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "step-00000002.ckpt", "step-00000008.void", "step-00000288.void"
    ]  # fmt: skip
