"""Base class of observers, which are notified as members start and end; and one observer, the progress display."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sweeps.launch.time_left import TimeLeft
from sweeps.run.progress import last_metrics
from sweeps.run.spec import RunSpec
from sweeps.terminal import Cell, Column, NonBlockingWriter, duration, fitted, is_interactive, one_line

if TYPE_CHECKING:
    from rich.live import Live

SHOWN = 6  # number of members in one progress line
_BAR = 16  # width of a member's progress bar in characters
# Colours of members' states in all displays.
STYLES = {
    "finished": "green", "running": "cyan", "queued": "blue", "waiting": "bright_black", "paused": "bright_black",
    "retried": "yellow", "stopped": "yellow", "ended": "yellow", "cancelled": "red", "failed": "bold red",
}  # fmt: skip
_COLUMNS = (
    Column("recipe", soft=True), Column("seed", 50, right=True), Column("", 60), Column("step", right=True),
    Column("pass rate", 50, right=True),
)  # fmt: skip
# Number of journals read per update: a cluster may run a thousand members on a slow file system.
JOURNALS_PER_UPDATE = 32


class Observer:
    """Base class of observers such as MLflow's and the progress display. All methods do nothing by default."""

    def open(self) -> None:
        """Prepare for the launch. The study's lease is now held, so the observer may write to the study's folder."""

    def accepted(self) -> None:
        """Handle the acceptance of the launch, after which it cannot be refused and rolled back."""

    def added(self, specs: Sequence[RunSpec]) -> None:
        """Handle members that were added to the study."""

    def queued(self, spec: RunSpec, run_dir: Path) -> None:
        """Handle a member that is queued on the cluster, for the first time or again."""

    def started(self, spec: RunSpec, run_dir: Path) -> None:
        """Handle a member that has begun to run."""

    def retried(self, spec: RunSpec, run_dir: Path, reason: str) -> None:
        """Handle a failed attempt that is followed by a retry."""

    def paused(self, spec: RunSpec, run_dir: Path, reason: str) -> None:
        """Handle a member that was saved and paused until the decider resumes it."""

    def ended(self, spec: RunSpec, run_dir: Path, state: str, reason: str | None) -> None:
        """Handle the end of a member, including one that was done before this launch.

        Args:
            spec: specification of the member.
            run_dir: the member's folder.
            state: `finished`, `failed`, `cancelled`, or `stopped` (not to be resumed).
            reason: why the member ended; None for a finished member that reached its budget.
        """

    def say(self, line: str) -> None:
        """Show a line from the study's decider."""

    def tick(self, running: Sequence[RunSpec], queued: int, done: int, failed: int) -> None:
        """Handle the periodic update, about once per second.

        Args:
            running: specifications of the running members.
            queued, done, failed: number of members in each of these states.
        """

    def close(self, failed: int, left: int) -> None:
        """Close the observer when this process leaves the study.

        Args:
            failed: number of members that failed, see `Controller.count_failed_and_continuing`.
            left: number of members that continue on a cluster without this process.
        """


class Progress(Observer):
    """Progress display of a study: on a terminal a live table of members, else a line every few seconds.

    Args:
        total: number of members.
        steps: mean budget of a member in optimizer steps, used to estimate the time of members that are not in `specs`.
        every_s: seconds between updates; None for 2 with a live table, and 10 with lines.
        metric: metric to show for each running member, from its newest evaluation.
        preface: lines to print first, when the launch is accepted. A refused launch prints only its error.
        write: called with each line; None for stderr, where a terminal gets a live table. Writing to stderr does not
            block if it is a pipe that nobody reads.
        specs: specifications of the members that are known at the start.
    """

    def __init__(
        self,
        total: int,
        steps: float,
        every_s: float | None = None,
        metric: str = "pass_rate",
        preface: Sequence[str] = (),
        write: Callable[[str], object] | None = None,
        specs: Sequence[RunSpec] = (),
    ) -> None:
        self._total = total
        self._steps = steps
        self._specs = {spec.run: spec for spec in specs}
        self._ended: set[str] = set()  # members that have ended in any way
        self._remaining = TimeLeft()
        self._live = _live_display() if write is None and is_interactive(sys.stderr) else None
        self._write = write or NonBlockingWriter(sys.stderr).write
        self._every_s = every_s if every_s is not None else (2.0 if self._live else 10.0)
        self._metric = metric
        self._preface = preface
        self._begin = self._last = time.monotonic()
        self._directories: dict[str, Path] = {}
        self._latest: dict[str, dict[str, float]] = {}  # metrics of members that this process has seen running
        self._next_unshown = 0  # the next member whose journal is read: index among those that are not shown
        self._stopped: set[str] = set()
        self._has_reported = False

    def accepted(self) -> None:
        """Print the preface."""
        for line in self._preface:
            self._write(f"{line}\n")

    def added(self, specs: Sequence[RunSpec]) -> None:
        """Add the members to the total."""
        self._steps = self._steps or sum(spec.steps for spec in specs) / len(specs)
        self._total += len(specs)
        self._specs |= {spec.run: spec for spec in specs}

    def started(self, spec: RunSpec, run_dir: Path) -> None:
        """Remember the member's folder and its steps so far, to measure its pace."""
        self._stopped.discard(spec.run)
        self._directories[spec.run] = run_dir
        self._ended.discard(spec.run)
        self._latest[spec.run] = last_metrics(run_dir)
        self._remaining.started(spec.run, spec.recipe, self._step(spec), spec.steps, time.monotonic())

    def retried(self, spec: RunSpec, run_dir: Path, reason: str) -> None:
        """Print a line on the retry with its reason."""
        self._event("retried", spec, reason)

    def paused(self, spec: RunSpec, run_dir: Path, reason: str) -> None:
        """Print a line on the pause with its reason."""
        self._event("paused", spec, reason.removeprefix("paused: "))

    def ended(self, spec: RunSpec, run_dir: Path, state: str, reason: str | None) -> None:
        """Print a line about the member's end, with the reason or its last metrics."""
        self._has_reported = True
        if state == "stopped":
            self._stopped.add(spec.run)
        latest = last_metrics(run_dir)
        if spec.run in self._latest:
            self._latest[spec.run] = latest = {**self._latest[spec.run], **latest}
            self._remaining.ended(spec.run, self._step(spec), time.monotonic())
        self._ended.add(spec.run)
        described = _progress_text(spec, latest, self._metric)
        self._event(state, spec, f"{described}; {reason}" if reason and state == "finished" else reason or described)

    def say(self, line: str) -> None:
        """Print the line, with the time since the start."""
        self._line(line)

    def tick(self, running: Sequence[RunSpec], queued: int, done: int, failed: int) -> None:
        """Read the journals and show the progress, at most every `every_s` seconds."""
        self._has_reported = True
        if time.monotonic() - self._last < self._every_s:
            return
        self._last = time.monotonic()
        self._read_metrics(running)
        stopped = len(self._stopped)
        counts = ((done, f"/{self._total} done"), (failed, " failed"), (stopped, " stopped"), (queued, " queued"))
        ended = ", ".join(f"{count}{what}" for count, what in counts if count or what.startswith("/"))
        left_s = self._left_s(self._total - done - failed - stopped, running)
        summary = (f"about {duration(left_s)} left, " if left_s and left_s >= 1 else "") + ended
        if self._live is not None:
            self._draw(self._live, summary, running)
            return
        members = [f"{s.title}: {_progress_text(s, self._latest[s.run], self._metric)}" for s in running[:SHOWN]]
        more = [f"{len(running) - SHOWN} more running"] if len(running) > SHOWN else []
        self._line(" | ".join([summary, *members, *more]))

    def close(self, failed: int, left: int) -> None:
        """Print the final counts and remove the live table from the terminal."""
        if self._has_reported:  # nothing to report for a refused launch
            stopped = len(self._stopped)
            counts = ((left, "under way"), (stopped, "stopped"), (failed, "not done"))
            others = [f", {count} {what}" for count, what in counts if count]
            self._line(f"{self._total - failed - left - stopped}/{self._total} done{''.join(others)}")
        if self._live is not None:
            self._live.stop()

    def _read_metrics(self, running: Sequence[RunSpec]) -> None:
        """Read the metrics of the members shown, and of others in turn: at most `JOURNALS_PER_UPDATE` in all."""
        others = running[SHOWN:]
        start = self._next_unshown % max(1, len(others))
        turned = [*others[start:], *others[:start]][: JOURNALS_PER_UPDATE - SHOWN]
        self._next_unshown = start + len(turned)
        for spec in [*running[:SHOWN], *turned]:
            # Keep older metrics: only the end of a journal is read, and the newest evaluation may be before it.
            self._latest[spec.run] = {**self._latest[spec.run], **last_metrics(self._directories[spec.run])}

    def _step(self, spec: RunSpec) -> int:
        """Return the step that a member has reached; a branch begins at the step of its parent."""
        return max(int(self._latest[spec.run].get("step", 0)), spec.first_step)

    def _left_s(self, unfinished_count: int, running: Sequence[RunSpec]) -> float | None:
        """Estimate the seconds until the study ends, from the pace seen by this process; None while no pace is known.

        Args:
            open_members: number of members that have not ended.
            running: specifications of the running members.
        """
        now = time.monotonic()
        for spec in running:
            self._remaining.reached(spec.run, self._step(spec), now)
        at_work = {spec.run: max(0, spec.steps - self._step(spec)) for spec in running}
        waiting = [
            (spec.recipe, float(spec.steps - spec.first_step))
            for run, spec in self._specs.items()
            if run not in at_work and run not in self._ended
        ]
        if len(waiting) != unfinished_count - len(running):  # `_specs` lacks some members
            waiting = [("", self._steps)] * (unfinished_count - len(running))
        return self._remaining.left_s(at_work, waiting, now)

    def _row(self, spec: RunSpec) -> list[Cell]:
        from rich.progress_bar import ProgressBar

        latest, step = self._latest[spec.run], self._step(spec)
        rate = _rate(latest, self._metric)
        return [
            spec.recipe,
            (str(spec.seed), "bright_black"),
            ProgressBar(total=spec.steps, completed=step, width=_BAR),
            f"{step}/{spec.steps}" if "step" in latest else ("starting", "yellow"),
            "" if rate is None else (f"{rate:.3f}", "cyan"),
        ]

    def _event(self, state: str, spec: RunSpec, text: str) -> None:
        self._line(f"{spec.title}: {text}", state)

    def _line(self, text: str, state: str = "") -> None:
        minutes, seconds = divmod(int(time.monotonic() - self._begin), 60)
        parts = f"[{minutes:02d}:{seconds:02d}] ", f"{state:9} " if state else "", one_line(text)
        if self._live is None:
            self._write("".join([*parts, "\n"]))
            return
        from rich.text import Text

        self._live.console.print(Text.assemble(parts[0], (parts[1], STYLES.get(state, "")), parts[2]))

    def _draw(self, live: Live, summary: str, running: Sequence[RunSpec]) -> None:
        from rich.console import Group
        from rich.text import Text

        rows = [self._row(spec) for spec in running[: live.console.height]]
        live.start()
        live.update(Group(Text(summary, "bold"), fitted(_COLUMNS, rows, live.console.width)), refresh=True)


def _live_display() -> Live:
    """Return a display at the bottom of stderr's terminal. Lines are printed above it; at the end it disappears."""
    # Imported here, because rich is needed only on a terminal.
    from rich.console import Console
    from rich.live import Live

    return Live(console=Console(file=sys.stderr), auto_refresh=False, transient=True)


def _progress_text(spec: RunSpec, metrics: Mapping[str, float], shown: str) -> str:
    """Format a member's step and budget, followed by the metric `shown` if there is an evaluation."""
    text = f"step {int(metrics['step'])}/{spec.steps}" if "step" in metrics else "starting"
    rate = _rate(metrics, shown)
    return text + ("" if rate is None else f", pass rate {rate:.3f}")


def _rate(metrics: Mapping[str, float], shown: str) -> float | None:
    """Return the metric `shown` of the newest evaluation, on any evaluation set; None if there is no evaluation."""
    return next((value for key, value in metrics.items() if key.endswith(f"/{shown}")), None)
