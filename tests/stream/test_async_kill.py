"""Tests of resuming a run that was killed with SIGKILL after any scheduler event.

The resumed run's journal must equal the journal of a run that was never killed, bit for bit. Only files survive a kill,
so the uninterrupted run records the bytes of its files after every event. Events after which these bytes are the same
need only one real kill. Each killed run must leave the recorded files. Child processes are forked from this process,
which has imported everything and loaded the model already.
"""

from __future__ import annotations

import json
import os
import signal
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback

from lightning_scalerl.axes.async_mode import OnPolicy, Pipeline, PPOOffPolicy
from lightning_scalerl.measure import heartbeat
from lightning_scalerl.measure.heartbeat import HEARTBEAT_FILE, heartbeat_cost
from lightning_scalerl.stream.events import Event
from sweeps.run.journal import JournalView, read_journal
from tests.examples import every
from tests.helpers import fit
from tests.measure.test_compute_meter import check_hours

STEPS = 3
MAX_EVENTS = 30
# Small enough for few events, large enough that tokens, groups and weights are in flight at most of them.
TINY = (
    "batch.prompts=1",
    "batch.completions=2",
    "generator.slots=3",
    "thinking.interrupt_from=1",
    "thinking.interrupt_to=1",
    "precision=fp32",
)
# Mode and its limit of new tokens: at most MAX_EVENTS events, and in pipelines weights change during a rollout.
MODES: dict[str, tuple[Callable[[], Any], int]] = {
    "on_policy": (OnPolicy, 3),
    "ppo_off_policy": (lambda: PPOOffPolicy(2), 3),
    "pipeline_stale": (lambda: Pipeline(2, "stale"), 4),
    "pipeline_recompute": (lambda: Pipeline(2, "recompute"), 4),
}


Files = dict[str, bytes]


def files_in(run_dir: Path) -> Files:
    """Return the content of every file in a run's directory, by name, without the heartbeat, which depends on time."""
    files = [path for path in run_dir.rglob("*") if path.is_file() and HEARTBEAT_FILE not in path.name]
    return {str(path.relative_to(run_dir)): path.read_bytes() for path in files}


class OnEvent(Callback):
    """Record each event and the run's files after it; kill the process after event number `kill_after`."""

    def __init__(self, run_dir: Path, kill_after: int | None = None, pause_s: float = 0.0) -> None:
        self.run_dir = run_dir
        self.kill_after = kill_after
        self.pause_s = pause_s
        self.kinds: list[str] = []
        self.run_files: list[Files] = []

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        pl_module.driver.listeners.append(self.on_event)

    def on_event(self, event: Event) -> None:
        self.kinds.append(event.kind)
        self.run_files.append(files_in(self.run_dir))
        if len(self.kinds) == self.kill_after:
            time.sleep(self.pause_s)
            os.kill(os.getpid(), signal.SIGKILL)


def run(model_path: str, run_dir: Path, mode: str, watch: OnEvent, resume: bool = False) -> None:
    choice, max_new_tokens = MODES[mode]
    fit(
        model_path,
        run_dir,
        steps=STEPS,
        callbacks=[choice(), watch],
        overrides=[*TINY, f"context.max_new_tokens={max_new_tokens}"],
        checkpoint_every=1,
        resume=resume,
        recipe="scalerl",
    )


def in_child(work: Callable[[], None]) -> int:
    """Call `work` in a forked child process; return its exit code, or minus the number of the signal that killed it."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def undisturbed(model_path: str, run_dir: Path, mode: str) -> tuple[JournalView, OnEvent]:
    watch = OnEvent(run_dir)
    run(model_path, run_dir, mode, watch)
    return read_journal(run_dir), watch


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    """A forked child has none of its parent's worker threads, so torch must not use any."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def check(model_path: str, tmp_path: Path, mode: str, kill_points: Sequence[int], undisturbed: OnEvent) -> None:
    whole = read_journal(undisturbed.run_dir)
    for event in kill_points:
        run_dir = tmp_path / f"killed_after_{event}"
        killed = in_child(lambda: run(model_path, run_dir, mode, OnEvent(run_dir, event)))  # noqa: B023
        assert killed == -signal.SIGKILL
        assert without_clock(files_in(run_dir)) == without_clock(undisturbed.run_files[event - 1]), (
            f"after event {event}"
        )
        assert in_child(lambda: run(model_path, run_dir, mode, OnEvent(run_dir), resume=True)) == 0  # noqa: B023
        view = read_journal(run_dir)
        assert view.status == "finished"
        assert view.deterministic() == whole.deterministic(), f"after event {event}"
        for record in view.records:
            check_hours(record.metrics)


def without_clock(run_files: Files) -> tuple[list[str], list[tuple[str, int | None, Any]]]:
    """Return the file names and the journal's lines without measured times: equal for two runs of one identity."""
    lines = [json.loads(line) for line in run_files["metrics.jsonl"].splitlines()]
    clock = ("compute/device_hours", "compute/wasted_", "time/")
    metrics = [{k: v for k, v in line.get("metrics", {}).items() if not k.startswith(clock)} for line in lines]
    return sorted(run_files), [(line["kind"], line.get("step"), m) for line, m in zip(lines, metrics, strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize("mode", every(len(MODES), reversed(MODES), pytest.mark.full))
def test_killed_after_every_event(mode: str, tiny_model_path: str, tmp_path: Path) -> None:
    """Resume after a kill with groups, tokens and weights in flight (invariant 5)."""
    whole, watch = undisturbed(tiny_model_path, tmp_path / "whole", mode)
    events = watch.kinds
    assert len(events) <= MAX_EVENTS
    assert {"admit", "decode", "finish", "batch", "trained", "publish"} <= set(events)
    swapped = [record.metrics["train/staleness_in_flight_max"] for record in whole.of_kind("train")]
    assert (max(swapped) > 0) == mode.startswith("pipeline")
    # Test only the last of all events after which a kill leaves the same files.
    alike = {files_key(run_files): event for event, run_files in enumerate(watch.run_files, start=1)}
    assert len(watch.run_files) == len(events) and len(alike) == STEPS, (
        "files change at checkpoints only: one kill per step"
    )
    check(tiny_model_path, tmp_path, mode, sorted(alike.values()), watch)


def files_key(run_files: Files) -> tuple[tuple[str, bytes], ...]:
    """Key that is the same for two events exactly when a kill leaves the same bytes after both."""
    return tuple(sorted(run_files.items()))


@pytest.mark.slow
def test_killed_with_a_pipeline_full(tiny_model_path: str, tmp_path: Path) -> None:
    """A faster version of the test above: one mode and every eighth event."""
    _, watch = undisturbed(tiny_model_path, tmp_path / "whole", "pipeline_stale")
    check(tiny_model_path, tmp_path, "pipeline_stale", range(3, len(watch.kinds), 8), watch)


@pytest.mark.slow
def test_three_kills_before_the_first_record_are_counted(
    tiny_model_path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed before the first record, a run's compute is known from its heartbeat file alone."""
    monkeypatch.setattr(heartbeat, "FIRST_INTERVAL_S", 0.02)
    monkeypatch.setattr(heartbeat, "MAX_INTERVAL_S", 0.02)
    run_dir, spent = tmp_path / "run", []
    for _ in range(3):
        watch = OnEvent(run_dir, kill_after=5, pause_s=0.3)
        assert in_child(lambda: run(tiny_model_path, run_dir, "ppo_off_policy", watch, resume=True)) == -signal.SIGKILL  # noqa: B023
        assert not read_journal(run_dir).of_kind("train")
        spent.append(heartbeat_cost(run_dir))
    assert spent[0]["flops"] > 0 and spent[0]["device_hours"] > 0.2 / 3600
    assert [cost["flops"] for cost in spent] == pytest.approx([spent[0]["flops"] * kills for kills in (1, 2, 3)])
    run(tiny_model_path, run_dir, "ppo_off_policy", OnEvent(run_dir), resume=True)
    for record in read_journal(run_dir).of_kind("train"):
        assert {f"compute/wasted_{name}": record.metrics[f"compute/wasted_{name}"] for name in spent[2]} == (
            pytest.approx({f"compute/wasted_{name}": value for name, value in spent[2].items()})
        )
    assert not (run_dir / HEARTBEAT_FILE).exists()
