"""SIGKILL after every single scheduler event of a run, and resume: the journal of an undisturbed run, bit for bit.

Children are forked from this process, which has imported everything and loaded the model already.
"""

from __future__ import annotations

import os
import signal
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback

from lightning_scalerl.axes.async_mode import OnPolicy, Pipeline, PPOOffPolicy
from lightning_scalerl.stream.events import Event
from sweeps.run.journal import JournalView, read_journal
from tests.helpers import fit

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


class OnEvent(Callback):
    """Counts the stream's events, and kills this very process after number `kill_after`."""

    def __init__(self, kill_after: int | None = None) -> None:
        self.kill_after = kill_after
        self.seen: list[str] = []

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        pl_module.stream.listeners.append(self.on_event)

    def on_event(self, event: Event) -> None:
        self.seen.append(event.kind)
        if len(self.seen) == self.kill_after:
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


def undisturbed(model_path: str, run_dir: Path, mode: str) -> tuple[JournalView, list[str]]:
    watch = OnEvent()
    run(model_path, run_dir, mode, watch)
    return read_journal(run_dir), watch.seen


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    """A forked child has none of its parent's worker threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def check(model_path: str, tmp_path: Path, mode: str, kill_points: list[int], whole: JournalView) -> None:
    for event in kill_points:
        run_dir = tmp_path / f"killed_after_{event}"
        killed = in_child(lambda: run(model_path, run_dir, mode, OnEvent(event)))  # noqa: B023
        assert killed == -signal.SIGKILL
        assert in_child(lambda: run(model_path, run_dir, mode, OnEvent(), resume=True)) == 0  # noqa: B023
        view = read_journal(run_dir)
        assert view.status == "finished"
        assert view.deterministic() == whole.deterministic(), f"after event {event}"


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_killed_after_every_event(mode: str, tiny_model_path: str, tmp_path: Path) -> None:
    """Invariant 5, with everything that can be in flight in flight."""
    whole, events = undisturbed(tiny_model_path, tmp_path / "whole", mode)
    assert len(events) <= MAX_EVENTS
    assert {"admit", "decode", "finish", "batch", "trained", "publish"} <= set(events)
    swapped = [record.metrics["train/staleness_in_flight_max"] for record in whole.of_kind("train")]
    assert (max(swapped) > 0) == mode.startswith("pipeline")
    check(tiny_model_path, tmp_path, mode, list(range(1, len(events) + 1)), whole)


def test_killed_with_a_pipeline_full(tiny_model_path: str, tmp_path: Path) -> None:
    """The fast version: one mode, a few events."""
    whole, events = undisturbed(tiny_model_path, tmp_path / "whole", "pipeline_stale")
    check(tiny_model_path, tmp_path, "pipeline_stale", list(range(3, len(events), 8)), whole)
