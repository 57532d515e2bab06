"""A study: its members, its ledger, and the loop that runs what is not done yet."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol

from filelock import FileLock, Timeout

from sweeps.errors import UserError
from sweeps.executor import LOG_FILE, Executor
from sweeps.journal import JOURNAL_FILE, JournalError, JournalView, read_journal
from sweeps.ledger import Ledger, MemberState
from sweeps.spec import RunSpec, check_distinct

LOCK_FILE = ".controller.lock"


class Observer(Protocol):
    """Told about members as they start and end: MLflow, progress."""

    def open(self) -> None:
        """The study is ours to run now; nothing before this may leave a trace."""
        ...

    def started(self, spec: RunSpec, run_dir: Path) -> None:
        """A member was submitted."""
        ...

    def ended(self, spec: RunSpec, run_dir: Path, state: str, reason: str | None) -> None:
        """A member is `finished` (also when it was done before) or `failed`."""
        ...

    def tick(self, running: Sequence[RunSpec], done: int, failed: int) -> None:
        """About once a second."""
        ...

    def close(self, failed: int) -> None:
        """The study is over, or was interrupted (then none counts as done); `failed` members are not done."""
        ...


class Study:
    """Members under `directory/runs/<identity>`, and a ledger of what happened to them.

    Args:
        directory: created if missing.
        specs: members; repetitions count once.
    """

    def __init__(self, directory: Path, specs: Sequence[RunSpec]) -> None:
        self.directory = directory
        self.specs = check_distinct(specs)
        self.ledger = Ledger(directory)

    def run_dir(self, spec: RunSpec) -> Path:
        """Where a member writes."""
        return self.directory / "runs" / spec.run

    def run(self, executor: Executor, observers: Sequence[Observer] = ()) -> dict[str, MemberState]:
        """Run every member that is not done; a member that fails touches no other.

        Returns:
            The state of each member, by identity.

        Raises:
            UserError: another process is running this study.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        lock = FileLock(self.directory / LOCK_FILE)
        try:
            lock.acquire(timeout=0)
        except Timeout as error:
            raise UserError(
                f"study: {self.directory} is being run by another process; wait for it, or end it first"
            ) from error
        # Interrupted, the study counts as failed; every part is released, whatever becomes of the others.
        failed = len(self.specs)
        with ExitStack() as stack:
            stack.callback(lock.release)
            for observer in observers:
                observer.open()
                stack.callback(lambda each: each.close(failed), observer)
            stack.callback(executor.close)
            states = self._run(executor, observers)
            failed = sum(state.state != "finished" for state in states.values())
            return states

    def _run(self, executor: Executor, observers: Sequence[Observer]) -> dict[str, MemberState]:
        known = self.ledger.fold()
        specs = {spec.run: spec for spec in self.specs}
        waiting = []
        earlier: dict[str, tuple[int, int]] = {}
        done = failed = 0
        for spec in self.specs:
            if spec.run not in known:
                self.ledger.append("planned", spec.run, recipe=spec.recipe, seed=spec.seed)
            if is_done(self.run_dir(spec), spec.steps):
                done += 1
                if known.get(spec.run) is None or known[spec.run].state != "finished":
                    self.ledger.append("finished", spec.run)
                for observer in observers:
                    observer.ended(spec, self.run_dir(spec), "finished", None)
            else:
                waiting.append(spec)
        while waiting or executor.running():
            while waiting and executor.has_room():
                spec = waiting.pop(0)
                spec.write(self.run_dir(spec))
                earlier[spec.run] = written(self.run_dir(spec))
                self.ledger.append("started", spec.run)
                for observer in observers:
                    observer.started(spec, self.run_dir(spec))
                executor.submit(spec.run, self.run_dir(spec))
            for outcome in executor.poll(timeout_s=1.0):
                spec = specs[outcome.run]
                finished = outcome.exit_code == 0 and is_done(self.run_dir(spec), spec.steps)
                reason = None if finished else why_failed(self.run_dir(spec), outcome.reason, earlier[spec.run])
                state = "finished" if finished else "failed"
                self.ledger.append(state, spec.run, reason=reason)
                done, failed = done + finished, failed + (not finished)
                for observer in observers:
                    observer.ended(spec, self.run_dir(spec), state, reason)
            for observer in observers:
                observer.tick([specs[run] for run in executor.running()], done, failed)
        folded = self.ledger.fold()
        return {run: folded[run] for run in specs}


def is_done(run_dir: Path, steps: int) -> bool:
    """Whether the journal says that the run has reached its budget."""
    view = journal_or_none(run_dir)
    return view is not None and view.status == "finished" and max((r.step for r in view.records), default=-1) >= steps


def journal_or_none(run_dir: Path) -> JournalView | None:
    """The journal, or None if there is none yet or it cannot be read."""
    try:
        return read_journal(run_dir)
    except JournalError:
        return None


def written(run_dir: Path) -> tuple[int, int]:
    """Bytes of journal and log so far."""
    files = (run_dir / JOURNAL_FILE, run_dir / LOG_FILE)
    journal, log = (path.stat().st_size if path.exists() else 0 for path in files)
    return journal, log


def why_failed(run_dir: Path, fallback: str, earlier: tuple[int, int] = (0, 0)) -> str:
    """The reason in the journal if the run wrote one, else the log's last line, else how the process ended.

    Args:
        run_dir: of the member.
        fallback: how its process ended.
        earlier: what was `written` before it started: the reason of an earlier attempt is not this one's.
    """
    view = journal_or_none(run_dir)
    spoke = written(run_dir)[0] != earlier[0]
    if spoke and view is not None and view.status == "failed" and view.reason:
        return view.reason
    try:
        log = (run_dir / LOG_FILE).read_bytes()[earlier[1] :].decode(errors="replace")
    except OSError:
        log = ""
    lines = [line for line in log.splitlines() if line.strip()]
    if lines and not fallback.startswith("killed"):
        return lines[-1].strip()[:500]
    return fallback


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

    def started(self, spec: RunSpec, run_dir: Path) -> None:
        """Remember where to look."""
        self._directories[spec.run] = run_dir

    def ended(self, spec: RunSpec, run_dir: Path, state: str, reason: str | None) -> None:
        """Say so."""
        latest = last_metrics(run_dir)
        tail = f": {reason}" if reason else self._describe(latest)
        self._line(f"{state:9} {spec.title}{tail}")

    def tick(self, running: Sequence[RunSpec], done: int, failed: int) -> None:
        """A line if it is time."""
        if time.monotonic() - self._last < self._every_s:
            return
        self._last = time.monotonic()
        members = [f"{spec.title}{self._describe(last_metrics(self._directories[spec.run]))}" for spec in running]
        ended = f"{done}/{self._total} done" + (f", {failed} failed" if failed else "")
        self._line(" | ".join([ended, *members]))

    def close(self, failed: int) -> None:
        """Nothing to end."""

    def _describe(self, metrics: Mapping[str, float]) -> str:
        text = f": step {int(metrics['step'])}/{self._steps}" if "step" in metrics else ": starting"
        rates = [value for key, value in metrics.items() if key.endswith(f"/{self._metric}")]
        return text + (f", pass rate {rates[0]:.3f}" if rates else "")

    def _line(self, text: str) -> None:
        seconds = int(time.monotonic() - self._begin)
        self._write(f"[{seconds // 60:02d}:{seconds % 60:02d}] {text}\n")


def last_metrics(run_dir: Path, tail_bytes: int = 65536) -> dict[str, float]:
    """The newest step and the newest evaluation, from the end of the journal (never the whole file)."""
    found: dict[str, float] = {}
    try:
        with (run_dir / JOURNAL_FILE).open("rb") as handle:
            handle.seek(0, 2)
            handle.seek(max(0, handle.tell() - tail_bytes))
            lines = handle.read().split(b"\n")
    except OSError:
        return found
    for line in lines:
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if isinstance(entry, dict) and entry.get("kind") in ("train", "eval"):
            found["step"] = float(entry["step"])
            found |= {key: value for key, value in entry["metrics"].items() if key.startswith("eval/")}
    return found
