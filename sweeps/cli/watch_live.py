"""Live screen of `scalerl watch`. The main thread reads, `sweeps.decide.live_ranking` fits, and rich draws."""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from sweeps.cli.curves import fit_options, load_sources
from sweeps.cli.study_commands import inactivity_note
from sweeps.decide.live_ranking import LiveRanking
from sweeps.decide.watch import sources_state, waiting
from sweeps.errors import UserError
from sweeps.executor.clusters import Scheduler
from sweeps.launch.ledger import LEDGER_FILE
from sweeps.launch.settings import LaunchSettings
from sweeps.launch.status import MemberView, overview
from sweeps.launch.time_left import TimeLeft
from sweeps.report.watch_screen import Member, Screen, mean_curve
from sweeps.run.tail import Tails
from sweeps.source import LoadedStudy
from sweeps.source.places import Place

# Seconds between two reads of the files: at least `POLL_S`, and at least `POLL_FACTOR` times the CPU time of a read.
POLL_S, POLL_FACTOR = 1.0, 15.0
QUERY_S = 30.0  # seconds between two queries of a scheduler
# Ends of warnings that are not shown, because the states of members show the same.
_REDUNDANT_ENDINGS = (": no evaluation yet", "the run has not started writing")


class _Reader:
    """Reader of the states and evaluations that the screen shows.

    Args:
        options: options of the command.

    Attributes:
        margin: margin with which the study was launched; None if unknown.
        study: newest evaluations.
        screen: content of the screen without the ranking.

    Raises:
        UserError: the sources cannot be read. Sources without evaluations are accepted.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._journals = Tails({"train": sys.maxsize})  # skip train records: only evaluations are fitted
        self._folder = Place(options.sources[0]).folder if len(options.sources) == 1 else None
        self._scheduler = None if self._folder is None else _scheduler(self._folder)
        self._views: list[MemberView] = []
        self._viewed = float("-inf")
        self.margin = None if self._folder is None else LaunchSettings.margin_of(self._folder)
        self._remaining, self._running = TimeLeft(), set[str]()
        self._state: object = None
        self._loaded = float("-inf")
        self.study = LoadedStudy()
        self.screen = Screen(title=", ".join(options.sources))
        try:
            self._load()
        except UserError:
            launched = self._folder is not None and (self._folder / LEDGER_FILE).is_file()
            if not launched and not waiting(options.sources):
                raise
        self.update()

    def update(self) -> None:
        """Read new data. What cannot be read now keeps its last state, and a warning is shown."""
        problems: list[str] = []
        with _collect_errors(problems):
            self._load()
        if self._folder is not None and (self._scheduler is None or time.monotonic() - self._viewed >= QUERY_S):
            self._viewed = time.monotonic()
            with _collect_errors(problems):
                self._views = overview(self._folder, self._scheduler)
        views = self._views
        curves = self.study.curves
        rewards = {
            (curve.recipe, str(seed)): tuple(curve.reward[curve.seed == seed].tolist())
            for curve in curves
            for seed in dict.fromkeys(curve.seed.tolist())
        }
        members = [_member_row(view, rewards.get((view.recipe, str(view.seed)), ())) for view in views]
        members = members or [
            Member(recipe, seed, rewards=run_rewards) for (recipe, seed), run_rewards in rewards.items()
        ]
        notes = [note for note in self.study.warnings if not (members and note.endswith(_REDUNDANT_ENDINGS))]
        none_yet = "" if curves else "no evaluation yet; waiting for the first"
        self.screen = replace(
            self.screen,
            members=tuple(members) or self.screen.members,
            left_s=self._time_left(views),
            curves={curve.recipe: mean_curve(curve) for curve in curves},
            waiting=none_yet,
            warnings=tuple(dict.fromkeys([*([] if none_yet else problems), *notes])),
        )

    def _load(self) -> None:
        """Read the sources if they have changed. If changes cannot be detected, read them once per `--interval`."""
        state = sources_state(self._options.sources)
        if state is None and self.study.curves and time.monotonic() - self._loaded < self._options.interval:
            return
        if state is None or state != self._state:
            self._loaded = time.monotonic()
            self.study = load_sources(self._options, read=self._journals)
            self._state = state  # only after the read, so that a failed read is repeated

    def _time_left(self, views: Sequence[MemberView]) -> float | None:
        """Estimate the seconds until the last member ends, from the progress that this process has seen."""
        now = time.monotonic()
        left = {view.run: max(0, view.steps - (view.step or 0)) for view in views if view.steps is not None}
        running = {view.run: view for view in views if view.state == "running" and view.run in left}
        for run, view in running.items():
            if run not in self._running:
                self._remaining.started(run, view.recipe, view.step or 0, view.steps or 0, now)
            self._remaining.reached(run, view.step or 0, now)
        for view in views:
            if view.run in self._running - running.keys():
                self._remaining.ended(view.run, view.step or 0, now)
        self._running = set(running)
        waiting_views = [view for view in views if view.state in ("queued", "waiting") and view.run in left]
        to_come = [(view.recipe, float(left[view.run])) for view in waiting_views]
        return self._remaining.left_s({run: left[run] for run in running}, to_come, now) if running else None


def watch_live(options: argparse.Namespace, path: Path | None) -> None:
    """Show the live screen until Ctrl-C. Its last state stays on the terminal.

    Args:
        options: options of the command.
        path: file to which snapshots are appended; None to write none.

    Raises:
        UserError: the sources cannot be read.
    """
    # Imported here, because only this screen needs rich.
    from rich.console import Console
    from rich.live import Live

    reader = _Reader(options)
    fits = LiveRanking(fit_options(options), path, reader.margin)
    fits.start()
    console = Console(highlight=False)
    # Leave through the `with` block below, which restores the terminal.
    signal.signal(signal.SIGTERM, lambda signum, frame: sys.exit(128 + signum))
    try:
        with Live(
            console=console,
            screen=True,
            refresh_per_second=1,
            get_renderable=lambda: _screen(reader, fits, console.height),
        ):
            while True:
                fits.set_curves(reader.study.curves)
                begin = time.thread_time()
                reader.update()
                time.sleep(max(POLL_S, POLL_FACTOR * (time.thread_time() - begin)))
    except KeyboardInterrupt:
        pass  # Ctrl-C is the normal way to stop watching
    console.print(_screen(reader, fits))


def _screen(reader: _Reader, fits: LiveRanking, height: int | None = None) -> Screen:
    screen = reader.screen
    departed = [f"{recipe}: {warning}" for recipe, warning in fits.departures.items() if warning]
    return replace(
        screen,
        ranking=fits.ranking,
        ranked_s=time.monotonic() - fits.ranked_s,
        behind=sum(len(curve.compute) for curve in reader.study.curves) - fits.evaluations,
        waiting=screen.waiting or fits.last_error,
        warnings=(*([fits.last_error] if fits.last_error and fits.ranking else []), *departed, *screen.warnings),
        height=height,
    )


def _member_row(view: MemberView, rewards: tuple[float, ...]) -> Member:
    note = view.reason or inactivity_note(view)
    return Member(
        recipe=view.recipe,
        seed=str(view.seed),
        state=view.state,
        step=view.step,
        steps=view.steps,
        rewards=rewards,
        note=note,
    )


@contextmanager
def _collect_errors(problems: list[str]) -> Iterator[None]:
    """Append an error of reading, in a `with` block, to `problems`: a file may be half written, or just moved away."""
    try:
        yield
    except (UserError, OSError) as error:
        problems.append(str(error))


def _scheduler(folder: Path) -> Scheduler | None:
    try:
        return LaunchSettings.scheduler_of(folder)
    except UserError:
        return None  # states then come from the jobs' own records
