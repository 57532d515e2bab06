"""What is told about members as they start and end."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from sweeps.run.progress import last_metrics
from sweeps.run.spec import RunSpec

SHOWN = 6  # members a line of progress


class Observer(Protocol):
    """Told about members as they start and end: MLflow, progress."""

    def open(self) -> None:
        """The study is ours to run now; nothing before this may leave a trace."""
        ...

    def queued(self, spec: RunSpec, run_dir: Path) -> None:
        """A member waits for its turn on the cluster, at first or again."""
        ...

    def started(self, spec: RunSpec, run_dir: Path) -> None:
        """A member runs."""
        ...

    def retried(self, spec: RunSpec, run_dir: Path, reason: str) -> None:
        """An attempt ended before the member was done; another follows."""
        ...

    def ended(self, spec: RunSpec, run_dir: Path, state: str, reason: str | None) -> None:
        """A member is `finished` (also when it was done before), `failed` or `cancelled`."""
        ...

    def tick(self, running: Sequence[RunSpec], queued: int, done: int, failed: int) -> None:
        """About once a second."""
        ...

    def close(self, failed: int, left: int) -> None:
        """This process has done its part.

        Args:
            failed: members that are not done and that nobody works on.
            left: members that go on without this process.
        """
        ...


class Progress:
    """Prints how a study is getting on: a line every few seconds, for terminals and log files alike.

    Args:
        total: members.
        steps: budget of a member.
        every_s: seconds between lines.
        metric: shown for each running member, as it was last evaluated.
    """

    def __init__(
        self,
        total: int,
        steps: int,
        every_s: float = 10.0,
        metric: str = "pass_rate",
        write: Callable[[str], object] = sys.stderr.write,
    ) -> None:
        self._total = total
        self._steps = steps
        self._every_s = every_s
        self._metric = metric
        self._write = write
        self._begin = time.monotonic()
        self._last = self._begin
        self._directories: dict[str, Path] = {}

    def open(self) -> None:
        """Nothing to prepare."""

    def queued(self, spec: RunSpec, run_dir: Path) -> None:
        """Nothing to show yet."""

    def started(self, spec: RunSpec, run_dir: Path) -> None:
        """Remember where to look."""
        self._directories[spec.run] = run_dir

    def retried(self, spec: RunSpec, run_dir: Path, reason: str) -> None:
        """Say so."""
        self._line(f"{'again':9} {spec.title}: {reason}")

    def ended(self, spec: RunSpec, run_dir: Path, state: str, reason: str | None) -> None:
        """Say so."""
        latest = last_metrics(run_dir)
        tail = f": {reason}" if reason else self._describe(latest)
        self._line(f"{state:9} {spec.title}{tail}")

    def tick(self, running: Sequence[RunSpec], queued: int, done: int, failed: int) -> None:
        """A line if it is time."""
        if time.monotonic() - self._last < self._every_s:
            return
        self._last = time.monotonic()
        members = [
            f"{spec.title}{self._describe(last_metrics(self._directories[spec.run]))}" for spec in running[:SHOWN]
        ]
        more = [f"{len(running) - SHOWN} more running"] if len(running) > SHOWN else []
        counts = ((done, f"/{self._total} done"), (failed, " failed"), (queued, " queued"))
        ended = ", ".join(f"{count}{what}" for count, what in counts if count or what.startswith("/"))
        self._line(" | ".join([ended, *members, *more]))

    def close(self, failed: int, left: int) -> None:
        """Nothing to end."""

    def _describe(self, metrics: Mapping[str, float]) -> str:
        text = f": step {int(metrics['step'])}/{self._steps}" if "step" in metrics else ": starting"
        rates = [value for key, value in metrics.items() if key.endswith(f"/{self._metric}")]
        return text + (f", pass rate {rates[0]:.3f}" if rates else "")

    def _line(self, text: str) -> None:
        seconds = int(time.monotonic() - self._begin)
        self._write(f"[{seconds // 60:02d}:{seconds % 60:02d}] {text}\n")
