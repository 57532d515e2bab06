"""The live screen of `scalerl watch`: a thread reads, a process fits, and this one draws and listens to keys.

journals --(thread: `_Reader`)--> members, curves --(pipe)--> process: `sweeps.decide.live_ranking.serve`
                  |                                                     |
                  +-----------> the screen, drawn anew as one comes <---+  ranking, departures
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from threading import Event, Thread
from types import FrameType

from sweeps.cli.curves import fit_options, load_sources
from sweeps.curve import Curve
from sweeps.decide.live_ranking import Asks, Departed, Ranked, Trouble, serve
from sweeps.decide.watch import sources_state, waiting
from sweeps.errors import UserError
from sweeps.executor.slurm.scheduler import Scheduler
from sweeps.launch.ledger import LEDGER_FILE
from sweeps.launch.settings import LaunchSettings
from sweeps.launch.status import MemberView, Overview
from sweeps.launch.time_left import TimeLeft
from sweeps.report.watch_screen import Member, Screen, draw, mean_curve
from sweeps.run.tail import Tails
from sweeps.source import LoadedStudy
from sweeps.source.places import Place
from sweeps.terminal import BLOCKS, LETTERS, duration

# Seconds between two looks at the files, and how many times as long as one look took of this process.
LOOK_S, REST = 1.0, 15.0
# Without a change the screen is drawn anew after so long, for what it says of time.
REDRAW_S = 1.0
SILENT_S = 60.0  # without a heartbeat, after which a member's row says so
_NO_NEWS = (": no evaluation yet", "the run has not started writing")  # ends of warnings that the members' states say


class _Reader:
    """Reads states and evaluations in a thread; the newest are in `screen` and `curves`.

    Args:
        options: of the command.
        told: called after each look.
    """

    def __init__(self, options: argparse.Namespace, told: Callable[[], None]) -> None:
        self._options, self._told = options, told
        self._journals = Tails({"train": sys.maxsize})  # only evaluations are fitted
        self._folder = Place(options.sources[0]).folder if len(options.sources) == 1 else None
        self._overview = None if self._folder is None else Overview(self._folder, _scheduler(self._folder))
        self.margin = None if self._folder is None else LaunchSettings.margin_of(self._folder)
        self._left, self._running = TimeLeft(), set[str]()
        self._state: object = None
        self._study = LoadedStudy()
        self._loaded = float("-inf")
        self._over = Event()
        self.screen = Screen(title=", ".join(options.sources))
        self.curves: list[Curve] = []
        self._thread = Thread(target=self._run, daemon=True)

    def begin(self) -> None:
        """Look once, in the caller's thread, then again and again in one of its own.

        Raises:
            UserError: the sources cannot be read, and it is not that there is nothing in them yet.
        """
        try:
            self._load()
        except UserError:
            sources = self._options.sources
            launched = self._folder is not None and (self._folder / LEDGER_FILE).is_file()
            if not launched and not waiting(sources):
                raise
        self._look()
        self._thread.start()

    def end(self) -> None:
        """Stop looking."""
        self._over.set()

    def _run(self) -> None:
        spent = 0.0
        while not self._over.wait(max(LOOK_S, REST * spent)):
            begin = time.thread_time()
            self._look()
            spent = time.thread_time() - begin
            self._told()

    def _look(self) -> None:
        """Read what has changed; whatever cannot be read now stays as it was last seen, with a warning."""
        trouble: list[str] = []
        with _noting(trouble):
            self._load()
        views: list[MemberView] = []
        if self._overview is not None:
            with _noting(trouble):
                views = self._overview.look()
        self.curves = self._study.curves
        rewards = _rewards(self._study)
        members = [_of_view(view, rewards.get(view.run, ())) for view in views] or _of_curves(self._study.curves)
        notes = [note for note in self._study.warnings if not (members and note.endswith(_NO_NEWS))]
        none_yet = "" if self._study.curves else "no evaluation yet; waiting for the first"
        self.screen = replace(
            self.screen,
            members=tuple(members) or self.screen.members,
            left_s=self._time_left(views),
            curves={curve.recipe: mean_curve(curve) for curve in self._study.curves},
            evaluations=sum(len(curve.compute) for curve in self._study.curves),
            waiting=none_yet,
            warnings=tuple(dict.fromkeys([*([] if none_yet else trouble), *notes])),
        )

    def _load(self) -> None:
        """Read the sources if they have changed; those of which that is not known, after each `--interval`."""
        state = sources_state(self._options.sources)
        if state is None and self._study.curves and time.monotonic() - self._loaded < self._options.interval:
            return
        if state is None or state != self._state:
            self._loaded = time.monotonic()
            self._study = load_sources(self._options, read=self._journals)
            self._state = state  # only now: what failed is tried again

    def _time_left(self, views: Sequence[MemberView]) -> float | None:
        """Estimate the time until the last member ends, at the pace at which this process sees them go on."""
        now = time.monotonic()
        known = {view.run: (view.step or 0, view.steps) for view in views if view.steps is not None}
        running = {view.run: view for view in views if view.state == "running" and view.run in known}
        for run, view in running.items():
            step, steps = known[run]
            if run not in self._running:
                self._left.started(run, view.recipe, step, steps or 0, now)
            self._left.saw(run, step, now)
        for run in self._running - running.keys():
            self._left.ended(run, known[run][0] if run in known else 0, now)
        self._running = set(running)
        at_work = {run: max(0, (known[run][1] or 0) - known[run][0]) for run in running}
        to_come = [
            (view.recipe, float((known[view.run][1] or 0) - known[view.run][0]))
            for view in views
            if view.state in ("queued", "waiting") and view.run in known
        ]
        return self._left.left_s(at_work, to_come, now) if at_work else None


def watch_live(options: argparse.Namespace, path: Path | None) -> int:
    """Show the live screen until q or Ctrl-C; the last state stays on the terminal.

    Args:
        options: of the command.
        path: file for snapshots; None for none.

    Raises:
        UserError: the sources cannot be read.
    """
    from rich.console import Console

    awake, wake = os.pipe()
    os.set_blocking(wake, False)

    def told() -> None:
        with suppress(OSError):  # full: the screen is awake
            os.write(wake, b".")

    reader = _Reader(options, told)
    reader.begin()
    context = get_context("spawn")  # a fork would copy the locks of whatever threads run
    ours, theirs = context.Pipe()
    fitting = context.Process(
        target=_serve_quietly, args=(theirs, fit_options(options), path, reader.margin), daemon=True
    )
    fitting.start()
    theirs.close()
    console = Console(file=sys.stdout, highlight=False)
    levels = BLOCKS if console.encoding.lower().startswith("utf") else LETTERS
    if levels is LETTERS and hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")
    shown = _Shown(reader, ours)
    try:
        with _ending_cleanly(), _keys() as keys:
            _follow(shown, console, levels, awake, keys)
    except KeyboardInterrupt:
        pass  # how one stops watching
    finally:
        reader.end()
        ours.close()
        fitting.terminate()
        fitting.join()
    for line in draw(shown.screen(), console.width, levels=levels):
        console.print(line)
    return 0


def _follow(shown: _Shown, console: object, levels: str, awake: int, keys: int | None) -> None:
    """Draw whenever something has come, until a key ends it."""
    from rich.console import Console, Group
    from rich.live import Live

    assert isinstance(console, Console)
    page = 0
    with Live(console=console, screen=True, auto_refresh=False, vertical_overflow="crop") as live:
        while True:
            shown.send()
            width, height = console.size
            live.update(Group(*draw(shown.screen(), width, height, page, levels)), refresh=True)
            sources: list[int | Connection] = [awake, *([keys] if keys is not None else []), *shown.connections]
            ready = wait(sources, REDRAW_S)
            if awake in ready:
                os.read(awake, 4096)
            shown.receive()
            for key in os.read(keys, 64).decode(errors="replace") if keys in ready and keys is not None else "":
                if key in "qQ\x04":
                    return
                page += {" ": 1, "n": 1, "p": -1, "b": -1}.get(key, 0)


class _Shown:
    """What the screen shows, put together from the reader and from the process that fits."""

    def __init__(self, reader: _Reader, connection: Connection) -> None:
        self._reader = reader
        self.connections = [connection]
        self._sent: list[Curve] | None = None
        self._asked = False
        self._ranked: Ranked | None = None
        self._ranked_at = 0.0
        self._departed: dict[str, str] = {}
        self._trouble = ""

    def send(self) -> None:
        """Send curves that are asked for, once there are some that have not been sent."""
        curves = self._reader.curves
        if self._asked and curves and curves is not self._sent:
            self._sent, self._asked = curves, False
            with suppress(OSError):
                self.connections[0].send(curves)

    def receive(self) -> None:
        """Take in all that the process that fits has said by now."""
        while self.connections and self.connections[0].poll():
            try:
                said = self.connections[0].recv()
            except (EOFError, OSError):
                self.connections, self._asked = [], False
                self._trouble = self._trouble or "the fits have ended; begin again to have them"
                return
            match said:
                case Asks():
                    self._asked = True
                case Ranked():
                    self._ranked, self._ranked_at, self._trouble = said, time.monotonic(), ""
                case Departed(recipe, None):
                    self._departed.pop(recipe, None)
                case Departed(recipe, str(warning)):
                    self._departed[recipe] = f"{recipe}: {warning}"
                case Trouble(text):
                    self._trouble = text

    def screen(self) -> Screen:
        """Return the screen as it is now."""
        screen = self._reader.screen
        trouble = [self._trouble] if self._trouble and self._ranked is not None else []
        return replace(
            screen,
            ranked=self._ranked,
            ranked_s=time.monotonic() - self._ranked_at,
            waiting=screen.waiting or self._trouble,
            warnings=(*trouble, *self._departed.values(), *screen.warnings),
        )


def _serve_quietly(connection: Connection, *arguments: object) -> None:
    """Run `serve` with nothing written to the terminal, which is the screen's."""
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    serve(connection, *arguments)  # type: ignore[arg-type]


def _of_view(view: MemberView, rewards: Sequence[float]) -> Member:
    note = view.reason or ""
    if not note and view.idle_s is not None and view.idle_s >= SILENT_S:
        note = f"no sign of life for {duration(view.idle_s)} (the last: {view.doing})"
    return Member(view.recipe, str(view.seed), view.state, view.step, view.steps, tuple(rewards), note)


def _of_curves(curves: Sequence[Curve]) -> list[Member]:
    """Return the runs of sources that say no states, in the curves' order."""
    return [
        Member(curve.recipe, str(seed), rewards=tuple(curve.reward[curve.seed == seed].tolist()))
        for curve in curves
        for seed in dict.fromkeys(curve.seed.tolist())
    ]


def _rewards(study: LoadedStudy) -> Mapping[str, tuple[float, ...]]:
    """Return the evaluations of each run of ours, in order, by its identity."""
    metric = study.curves[0].column if study.curves else ""
    sign = -1 if study.curves and study.curves[0].lower_is_better else 1
    return {
        str(view.header.get("run", view.path.parent.name)): tuple(
            sign * record.metrics[metric] for record in view.of_kind("eval") if metric in record.metrics
        )
        for view in study.runs
    }


@contextmanager
def _noting(trouble: list[str]) -> Iterator[None]:
    """Turn an error of reading into a line of trouble: a file may be half written, or just moved away."""
    try:
        yield
    except (UserError, OSError) as error:
        trouble.append(str(error))


def _scheduler(folder: Path) -> Scheduler | None:
    try:
        return LaunchSettings.scheduler_of(folder)
    except UserError:
        return None  # it cannot be asked from here: states are those of the jobs' own records


@contextmanager
def _ending_cleanly() -> Iterator[None]:
    """Give the terminal back before this process ends by SIGTERM, too."""

    def end(signum: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + signum)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _keys() -> Iterator[int | None]:
    """Give the descriptor from which single keys can be read; None where standard input is no terminal of ours."""
    import termios
    import tty

    try:
        keys = sys.stdin.fileno()
        if not os.isatty(keys) or os.tcgetpgrp(keys) != os.getpgrp():
            yield None
            return
    except (OSError, ValueError):
        yield None
        return
    before = termios.tcgetattr(keys)
    tty.setcbreak(keys)
    try:
        yield keys
    finally:
        termios.tcsetattr(keys, termios.TCSADRAIN, before)
