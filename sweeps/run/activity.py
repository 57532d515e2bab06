"""Watchdog of the run in this process: record its activity, and end the process if it hangs.

A process that hangs (in a collective whose peer is gone, on a file server that never answers, in a deadlock) would hold
its GPUs until the job's time limit. So a run records everything it does: a decoded token, a micro-batch, a line of the
journal. If it records nothing for much longer than ever before, the watchdog reports that, writes every thread's stack
to the log and ends the process. The program that started it then resumes the run from the last checkpoint.
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

# Exit code of a process that the watchdog ended because it hung.
HUNG_CODE = 86
# File descriptor of stderr, which goes to a member's log. `sys.stderr` may be replaced or buffered.
_STDERR = 2
# Time limit for writing the last messages, because the log may be on a file server that does not answer.
_LAST_WORDS_S = 60.0
# A thread in one of these modules waits at a debugger's prompt, which is not a hang.
_DEBUGGERS = frozenset({"pdb", "bdb"})


@dataclass(frozen=True)
class HangTimeout:
    """Hang timeout of a run: how long it may record no activity.

    Attributes:
        factor: the timeout as a multiple of the longest earlier pause between two activities; None for no timeout.
        at_least_s: lower bound of the timeout in seconds, because the first step loads, compiles and fills caches.
    """

    factor: float | None = 10.0
    at_least_s: float = 1800.0

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> HangTimeout:
        """Read the timeout from `launch.hang_factor` and `launch.hang_min_s` of a configuration, if they are set.

        Raises:
            UserError: a value is not a number above its lower bound.
        """
        launch = config.get("launch") or {}
        factor, at_least_s = launch.get("hang_factor", cls.factor), launch.get("hang_min_s", cls.at_least_s)
        for name, value, lower_bound in (("hang_factor", factor, 1), ("hang_min_s", at_least_s, 0)):
            if name == "hang_factor" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int | float) or not lower_bound < value < math.inf:
                also = ", or null to wait forever" if name == "hang_factor" else ""
                raise UserError(f"launch.{name}: {value!r} must be a number above {lower_bound}{also}")
        return cls(factor, at_least_s)

    def limit_s(self, longest_s: float) -> float | None:
        """Return the timeout in seconds for a run whose longest pause was `longest_s`; None for no timeout."""
        return None if self.factor is None else max(self.at_least_s, self.factor * longest_s)


class Activity:
    """Record of this process's last activity and longest pause. `activity` below is the only instance.
    Attributes:
        longest_s: longest pause between two activities in seconds.
        last_word: called with the reason before a process that hangs is ended; set by the code that records attempts.
        reports: functions, by name, whose values are written with each heartbeat of the lease.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._doing = "starting"
        self._last = clock()
        self._awake_until = math.inf  # until then the process is known not to have been suspended
        self.longest_s = 0.0
        self.last_word: Callable[[str], None] = lambda reason: None
        self.reports: dict[str, Callable[[], Any]] = {}

    def note(self, doing: str) -> None:
        """Record an activity, which restarts the hang timeout. Cheap enough to call for every token."""
        now = self._clock()
        # No lock is needed: if threads record activities at the same time, a pause may at worst appear shorter.
        if now <= self._awake_until:  # otherwise it may have been suspended in between, and this was no pause
            self.longest_s = max(self.longest_s, now - self._last)
        self._doing, self._last = doing, now

    def begin(self) -> None:
        """Reset the record at the start of a run in this process."""
        self.longest_s = 0.0
        self._doing, self._last = "starting", self._clock()

    @property
    def idle_s(self) -> float:
        """Seconds since the last recorded activity."""
        return self._clock() - self._last

    def facts(self) -> dict[str, Any]:
        """Return what to write with a heartbeat: the last activity, the seconds since then, and `reports`."""
        reports = {name: report() for name, report in list(self.reports.items())}
        return {"doing": self._doing, "idle_s": round(self.idle_s, 1), **reports}

    def hang_message(self, patience: HangTimeout) -> str | None:
        """Return a message if the run has exceeded its hang timeout; else None."""
        limit_s = patience.limit_s(self.longest_s)
        if limit_s is None or self.idle_s <= limit_s:
            return None
        return (
            f"no sign of life for {self.idle_s:.0f} s (last activity: {self._doing}; longest earlier pause: "
            f"{self.longest_s:.1f} s); the stack of every thread is in the log"
        )

    @contextmanager
    def watched(self, patience: HangTimeout, leave: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Watch the run in a `with` block. If it hangs, call `leave` and end this process with `HUNG_CODE`."""
        if patience.factor is None:
            yield
            return
        self.begin()
        done = threading.Event()
        every_s = max(0.05, min(10.0, patience.at_least_s / 20))

        def watch() -> None:
            last_check = self._clock()
            while not done.wait(every_s):
                now = self._clock()
                late_s, last_check = now - last_check - every_s, now
                if late_s > every_s:  # the process was suspended (by a cluster, or Ctrl-Z), which is not idle time
                    self._last += late_s
                self._awake_until = now + 3 * every_s
                reason = self.hang_message(patience)
                if reason is not None and not _debugged():
                    self._end(reason, leave)
                limit_s = patience.limit_s(self.longest_s)
                assert limit_s is not None
                # Second watchdog, which needs no GIL: a call that never releases the GIL blocks this thread as well.
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
        """End this process once `_report` has returned, or after `_LAST_WORDS_S`."""
        thread = threading.Thread(target=self._report, args=(_stacks(), reason, leave), daemon=True, name="last words")
        with suppress(Exception):
            thread.start()
            thread.join(_LAST_WORDS_S)
        os._exit(HUNG_CODE)

    def _report(self, stacks: str, reason: str, leave: Callable[[], None]) -> None:
        """Write stacks and reason, and call `leave`. If one of these fails, the others still run."""
        with suppress(Exception):  # the stacks first, because they are the most useful
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
    """Format the stack of every thread. `faulthandler` would stop all other threads while it writes."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    lines = []
    for ident, innermost in sys._current_frames().items():
        lines.append(f"Thread {names.get(ident, ident)} (most recent call first):")
        lines += [
            f'  File "{frame.f_code.co_filename}", line {frame.f_lineno} in {frame.f_code.co_name}'
            for frame in _frames(innermost)
        ]
    return "\n".join([*lines, ""])


def _debugged() -> bool:
    frames = sys._current_frames().values()
    return any(frame.f_globals.get("__name__") in _DEBUGGERS for innermost in frames for frame in _frames(innermost))


def _frames(innermost: FrameType) -> Iterator[FrameType]:
    frame: FrameType | None = innermost
    while frame is not None:
        yield frame
        frame = frame.f_back


activity = Activity()
