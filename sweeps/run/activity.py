"""Watchdog of the run in this process: records its activity, and ends it when it hangs.

A process that hangs (a collective whose peer is gone, a file server that never answers, a deadlock) holds its GPUs
until the job's time limit. Whatever a run does, it notes: a decoded token, a micro-batch, a line of the journal. If
nothing is noted for much longer than ever before, the process says so, writes every thread's stack into its log and
ends; whoever started it goes on from the last checkpoint.
"""

from __future__ import annotations

import faulthandler
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType
from typing import Any

from sweeps.errors import UserError

# The exit code of a process that the watchdog has ended because it hung.
HUNG_CODE = 86
# Python's own stream may have been replaced or buffered; a member's log is here.
_STDERR = 2
# Log and records may lie on the very file server that never answers.
_LAST_WORDS_S = 60.0
# Whoever sits at one of these prompts is not a run that hangs.
_DEBUGGERS = frozenset({"pdb", "bdb"})


@dataclass(frozen=True)
class Patience:
    """Hang timeout of a run: how long it may show no activity.

    Attributes:
        factor: multiple of the longest pause between two activities so far; None waits for ever.
        at_least_s: lower bound of the timeout in seconds: the first step loads, compiles and fills caches.
    """

    factor: float | None = 10.0
    at_least_s: float = 1800.0

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Patience:
        """Make it from a configuration's `launch.hang_factor` and `launch.hang_min_s`, with defaults for missing ones.

        Raises:
            UserError: a value that is no number above its bound.
        """
        launch = config.get("launch") or {}
        factor, at_least_s = launch.get("hang_factor", cls.factor), launch.get("hang_min_s", cls.at_least_s)
        for name, value, least in (("hang_factor", factor, 1), ("hang_min_s", at_least_s, 0)):
            if name == "hang_factor" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int | float) or not value > least:
                also = ", or null to wait for ever" if name == "hang_factor" else ""
                raise UserError(f"launch.{name}: {value!r} must be a number above {least}{also}")
        return cls(factor, at_least_s)

    def limit_s(self, longest_s: float) -> float | None:
        """Return the timeout in seconds after pauses of up to `longest_s`; None for no timeout."""
        return None if self.factor is None else max(self.at_least_s, self.factor * longest_s)


class Activity:
    """Record of this process's last activity and longest pause. One for each process: `activity` below.

    `last_word` is called with the reason before a process that hangs ends itself: whoever keeps a record of the
    attempt sets it. `reports` holds, by name, what else is told with each heartbeat.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._doing = "starting"
        self._last = clock()
        self._awake_until = math.inf
        self.longest_s = 0.0
        self.last_word: Callable[[str], None] = lambda reason: None
        self.reports: dict[str, Callable[[], Any]] = {}

    def note(self, doing: str) -> None:
        """Record an activity, by which the hang timeout starts anew. Cheap enough for every token."""
        now = self._clock()
        # Also where several threads note at once: a pause is at most taken for a shorter one.
        if now <= self._awake_until:  # else the whole process stood still, and that says nothing of the run
            self.longest_s = max(self.longest_s, now - self._last)
        self._doing, self._last = doing, now

    def begin(self) -> None:
        """Reset the record at the begin of a run in this process."""
        self.longest_s = 0.0
        self._doing, self._last = "starting", self._clock()

    @property
    def idle_s(self) -> float:
        """Seconds since the last recorded activity."""
        return self._clock() - self._last

    def facts(self) -> dict[str, Any]:
        """Return the last activity, seconds since then, and the reports, to be written with each heartbeat."""
        reports = {name: report() for name, report in list(self.reports.items())}
        return {"doing": self._doing, "idle_s": round(self.idle_s, 1), **reports}

    def hung(self, patience: Patience) -> str | None:
        """Return why the run counts as hung, None if it does not."""
        limit_s = patience.limit_s(self.longest_s)
        if limit_s is None or self.idle_s <= limit_s:
            return None
        return (
            f"no sign of life for {self.idle_s:.0f} s (the last: {self._doing}; the longest pause before: "
            f"{self.longest_s:.1f} s); the stack of every thread is in the log"
        )

    @contextmanager
    def watched(self, patience: Patience, leave: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Context manager: a run that hangs inside ends this process with `HUNG_CODE`, after a call of `leave`."""
        if patience.factor is None:
            yield
            return
        self.begin()
        done = threading.Event()
        every_s = max(0.05, min(10.0, patience.at_least_s / 20))

        def watch() -> None:
            looked = self._clock()
            while not done.wait(every_s):
                now = self._clock()
                late_s, looked = now - looked - every_s, now
                if late_s > every_s:  # stopped and continued (SLURM's suspend, Ctrl-Z): time in which nothing could be
                    self._last += late_s
                self._awake_until = now + 3 * every_s
                reason = self.hung(patience)
                if reason is not None and not _debugged():
                    self._end(reason, leave)
                limit_s = patience.limit_s(self.longest_s)
                assert limit_s is not None
                # A call that never gives Python's lock back stops this thread as well; this one needs no lock.
                faulthandler.dump_traceback_later(2 * limit_s + every_s, exit=True, file=_STDERR)

        thread = threading.Thread(target=watch, daemon=True, name="signs of life")
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()
            self._awake_until = math.inf
            faulthandler.cancel_dump_traceback_later()

    def _end(self, reason: str, leave: Callable[[], None]) -> None:
        words = threading.Thread(target=self._say, args=(_stacks(), reason, leave), daemon=True, name="last words")
        with suppress(Exception):
            words.start()
            words.join(_LAST_WORDS_S)
        os._exit(HUNG_CODE)

    def _say(self, stacks: str, reason: str, leave: Callable[[], None]) -> None:
        """Write stacks and reason wherever that is possible; each part may fail without the others."""
        with suppress(Exception):  # the stacks are worth more than a word about them
            os.write(_STDERR, stacks.encode())
        with suppress(Exception):
            self.last_word(reason)
        with suppress(Exception):
            leave()
        with suppress(Exception):
            os.write(_STDERR, f"scalerl: {reason}\n".encode())
        with suppress(Exception):
            sys.stdout.flush()


def _stacks() -> str:
    """Format the stack of every thread; unlike `faulthandler` it blocks no other thread while it is written."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    lines = []
    for ident, innermost in sys._current_frames().items():
        lines.append(f"Thread {names.get(ident, ident)} (most recent call first):")
        lines += [
            f'  File "{each.f_code.co_filename}", line {each.f_lineno} in {each.f_code.co_name}'
            for each in _outwards(innermost)
        ]
    return "\n".join([*lines, ""])


def _debugged() -> bool:
    """Return whether a thread is in a debugger, whose prompt is no hang."""
    frames = sys._current_frames().values()
    return any(each.f_globals.get("__name__") in _DEBUGGERS for innermost in frames for each in _outwards(innermost))


def _outwards(innermost: FrameType) -> Iterator[FrameType]:
    frame: FrameType | None = innermost
    while frame is not None:
        yield frame
        frame = frame.f_back


activity = Activity()
