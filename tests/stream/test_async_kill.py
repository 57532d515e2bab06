"""SIGKILL after every single scheduler event of a run, and resume: the journal of an undisturbed run, bit for bit.

Nothing but its files outlives a process that is killed. So the undisturbed run notes after every event, byte for byte,
what it would leave; of events after which it would leave the same, one is killed in earnest and resumed, once it is
shown that the kill did leave this. Children are forked from this process, which has imported everything and loaded
the model already.
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
# With the completion limit: no more events than MAX_EVENTS, and in the pipelines weights change within a rollout.
MODES: dict[str, tuple[Callable[[], Any], int]] = {
    "on_policy": (OnPolicy, 3),
    "ppo_off_policy": (lambda: PPOOffPolicy(2), 3),
    "pipeline_stale": (lambda: Pipeline(2, "stale"), 4),
    "pipeline_recompute": (lambda: Pipeline(2, "recompute"), 4),
}


Left = dict[str, bytes]


def left_in(run_dir: Path) -> Left:
    """Every file below a run's directory, by name: all of the run that a kill leaves, but what tells of the clock."""
    files = [path for path in run_dir.rglob("*") if path.is_file() and HEARTBEAT_FILE not in path.name]
    return {str(path.relative_to(run_dir)): path.read_bytes() for path in files}


class OnEvent(Callback):
    """Notes the stream's events and what a kill would leave after each; after number `kill_after` it is one."""

    def __init__(self, run_dir: Path, kill_after: int | None = None, pause_s: float = 0.0) -> None:
        self.run_dir = run_dir
        self.kill_after = kill_after
        self.pause_s = pause_s
        self.seen: list[str] = []
        self.left: list[Left] = []

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        pl_module.driver.listeners.append(self.on_event)

    def on_event(self, event: Event) -> None:
        self.seen.append(event.kind)
        self.left.append(left_in(self.run_dir))
        if len(self.seen) == self.kill_after:
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
    """What `os.waitstatus_to_exitcode` says of a forked child that does the work."""
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
    """A forked child has none of its parent's worker threads."""
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
        assert without_clock(left_in(run_dir)) == without_clock(undisturbed.left[event - 1]), f"after event {event}"
        assert in_child(lambda: run(model_path, run_dir, mode, OnEvent(run_dir), resume=True)) == 0  # noqa: B023
        view = read_journal(run_dir)
        assert view.status == "finished"
        assert view.deterministic() == whole.deterministic(), f"after event {event}"
        for record in view.records:
            check_hours(record.metrics)


def without_clock(left: Left) -> tuple[list[str], list[tuple[str, int | None, Any]]]:
    """What two runs of one identity leave alike: their files, and the journal line by line."""
    lines = [json.loads(line) for line in left["metrics.jsonl"].splitlines()]
    clock = ("compute/device_hours", "compute/wasted_", "time/")
    metrics = [{k: v for k, v in line.get("metrics", {}).items() if not k.startswith(clock)} for line in lines]
    return sorted(left), [(line["kind"], line.get("step"), m) for line, m in zip(lines, metrics, strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize("mode", every(len(MODES), reversed(MODES), pytest.mark.full))
def test_killed_after_every_event(mode: str, tiny_model_path: str, tmp_path: Path) -> None:
    """Invariant 5, with everything that can be in flight in flight."""
    whole, watch = undisturbed(tiny_model_path, tmp_path / "whole", mode)
    events = watch.seen
    assert len(events) <= MAX_EVENTS
    assert {"admit", "decode", "finish", "batch", "trained", "publish"} <= set(events)
    swapped = [record.metrics["train/staleness_in_flight_max"] for record in whole.of_kind("train")]
    assert (max(swapped) > 0) == mode.startswith("pipeline")
    # The last of all events after which a kill leaves the same bytes stands for them.
    alike = {left_alike(left): event for event, left in enumerate(watch.left, start=1)}
    assert len(watch.left) == len(events) and len(alike) == STEPS, "it stops before each step, everything in flight"
    check(tiny_model_path, tmp_path, mode, sorted(alike.values()), watch)


def left_alike(left: Left) -> tuple[tuple[str, bytes], ...]:
    """The same for two events if, and only if, a kill leaves the same bytes after both."""
    return tuple(sorted(left.items()))


@pytest.mark.slow
def test_killed_with_a_pipeline_full(tiny_model_path: str, tmp_path: Path) -> None:
    """The fast version: one mode, a few events."""
    _, watch = undisturbed(tiny_model_path, tmp_path / "whole", "pipeline_stale")
    check(tiny_model_path, tmp_path, "pipeline_stale", range(3, len(watch.seen), 8), watch)


@pytest.mark.slow
def test_three_kills_before_the_first_record_are_counted(
    tiny_model_path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of the work is in any record."""
    monkeypatch.setattr(heartbeat, "FIRST_INTERVAL_S", 0.02)
    monkeypatch.setattr(heartbeat, "MAX_INTERVAL_S", 0.02)
    run_dir, spent = tmp_path / "run", []
    for _ in range(3):
        watch = OnEvent(run_dir, kill_after=5, pause_s=0.3)
        assert in_child(lambda: run(tiny_model_path, run_dir, "ppo_off_policy", watch, resume=True)) == -signal.SIGKILL  # noqa: B023
        assert not read_journal(run_dir).of_kind("train")
        spent.append(heartbeat_cost(run_dir))
    assert spent[0]["flops"] > 0 and spent[0]["device_hours"] > 0.2 / 3600
    assert [each["flops"] for each in spent] == pytest.approx([spent[0]["flops"] * kills for kills in (1, 2, 3)])
    run(tiny_model_path, run_dir, "ppo_off_policy", OnEvent(run_dir), resume=True)
    for record in read_journal(run_dir).of_kind("train"):
        assert {f"compute/wasted_{name}": record.metrics[f"compute/wasted_{name}"] for name in spent[2]} == (
            pytest.approx({f"compute/wasted_{name}": value for name, value in spent[2].items()})
        )
    assert not (run_dir / HEARTBEAT_FILE).exists()
