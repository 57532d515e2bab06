"""The live screen of `scalerl watch`, drawn by rich: ranking, members, warnings."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from sweeps.launch.observer import STYLES
from sweeps.report.labels import shortened
from sweeps.terminal import Cell, Column, counted, duration, fitted, one_line, sparkline

if TYPE_CHECKING:
    from sweeps.curve import Curve
    from sweeps.decide.rank import Ranking

# Order of the members' states: those that need attention first, ended ones last.
STATES = ("failed", "cancelled", "running", "ended", "stopped", "queued", "waiting", "finished", "")
_CURVE = 16  # characters of a sparkline
SURE, OUT = 0.95, 0.05  # P(best) at or above which, and below which, a recipe is coloured
_TALL = 20  # minimum height of a terminal, in lines, for several sentences and warnings
ROWS = 40  # members that are printed when the screen is closed

_RANKING = (
    Column("rank", 40, right=True), Column("recipe", soft=True), Column("P(best)", right=True), Column("A", right=True),
    Column("95% of A", 70, right=True), Column("reward", 70, right=True), Column("curve", 80), Column("verdict", 100),
)  # fmt: skip
_MEMBERS = (
    Column("state"), Column("recipe", soft=True), Column("seed", 40, right=True), Column("step", 60, right=True),
    Column("reward", right=True), Column("curve", 70), Column("why", 60, soft=True),
)  # fmt: skip


@dataclass(frozen=True)
class Member:
    """One run as the screen shows it.

    Attributes:
        state: see `sweeps.launch.status.MemberView`; "" if the source does not report it.
        step, steps: newest step and budget; None where not known.
        rewards: evaluations so far, in order.
        note: why it failed or waits, or the time since its last heartbeat.
    """

    recipe: str
    seed: str
    state: str = ""
    step: int | None = None
    steps: int | None = None
    rewards: tuple[float, ...] = ()
    note: str = ""


@dataclass(frozen=True)
class Screen:
    """Everything that the live screen shows at one time, drawn by rich.

    Attributes:
        title: name of the study.
        left_s: estimated seconds until the last member ends; None where not known.
        curves: mean over seeds of each recipe's rewards, in order.
        ranking: newest ranking; None before the first.
        ranked_s: age of the ranking in seconds.
        behind: number of evaluations since the ranking.
        waiting: why there is no ranking yet.
        warnings: departures from forecasts, and problems of the sources; the most important first.
        height: lines of the terminal; None for the final print when the screen is closed.
    """

    title: str
    members: tuple[Member, ...] = ()
    left_s: float | None = None
    curves: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    ranking: Ranking | None = None
    ranked_s: float = 0.0
    behind: int = 0
    waiting: str = ""
    warnings: tuple[str, ...] = ()
    height: int | None = None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Draw the header, then as many rows of both tables as fit."""
        width, height = options.max_width, self.height
        most = None if height is None else 3 if height >= _TALL else 1
        outcome = self.waiting or "fitting for the first time" if self.ranking is None else self.ranking.sentence
        lines = [self._head(), *self._age(), *Text(one_line(outcome)).wrap(console, width)[:most]]
        lines += [Text(one_line(f"! {text}"), "yellow") for text in self.warnings[:most]]
        for line in lines:
            line.truncate(width, overflow="ellipsis")
        places = [] if self.ranking is None else _places(self.ranking, self.curves)
        members = sorted(self.members, key=lambda member: STATES.index(member.state))
        room = len(places) + ROWS
        if height is not None:
            room = max(2, height - len(lines) - 4)  # the headers of both tables, a blank line, and "and 3 more"
            places = places[: max(room // 2, room - len(members))]
        shown = members[: room - len(places)]
        yield from lines
        if places:
            yield from (fitted(_RANKING, places, width), "")
        if shown:
            yield fitted(_MEMBERS, _rows(shown, members), width)
        if len(shown) < len(members):
            yield Text(f"and {len(members) - len(shown)} more", "bright_black")

    def _head(self) -> Text:
        """Return the title with the time left, and the number of members in each state."""
        states = Counter(member.state for member in self.members)
        counts = [f"{states[state]} {state}" for state in STATES if state and states[state]]
        left = [f"about {duration(self.left_s)} left"] if self.left_s and self.left_s >= 1 else []
        summary = ", ".join([*left, *(counts or [counted(len(self.members), "run")])])
        return Text.assemble((one_line(self.title), "bold"), "  ", summary)

    def _age(self) -> list[Text]:
        """Return the ranking's age, and the compute of its rewards."""
        if self.ranking is None:
            return []
        since = f", {counted(self.behind, 'evaluation')} since" if self.behind > 0 else ""
        rewards = self.ranking.rewards
        at = "" if rewards is None or rewards.compute is None else f", rewards at compute {rewards.compute:.4g}"
        return [Text(f"ranked {duration(self.ranked_s)} ago{since}{at}", "bright_black")]


def ranking_table(ranking: Ranking, curves: Mapping[str, tuple[float, ...]], width: int) -> Table:
    """Return a ranking as shown on the screen and at the end of a study; `curves` are the recipes' mean rewards."""
    return fitted(_RANKING, _places(ranking, curves), width)


def mean_curve(curve: Curve) -> tuple[float, ...]:
    """Return the mean reward over a recipe's seeds at their first, second, ... evaluation."""
    by_place: dict[int, list[float]] = defaultdict(list)
    for seed in dict.fromkeys(curve.seed.tolist()):
        for place, reward in enumerate(curve.reward[curve.seed == seed].tolist()):
            by_place[place].append(reward)
    return tuple(sum(values) / len(values) for _, values in sorted(by_place.items()))


def _places(ranking: Ranking, curves: Mapping[str, tuple[float, ...]]) -> list[list[Cell]]:
    """Return the rows of the ranking; recipes without a rank follow, those with the highest P(best) first."""
    rewards = {} if ranking.rewards is None else {row.recipe: row.R.value for row in ranking.rewards.rows}
    names, scale = shortened(list(curves)), _scale(curves.values())
    last = len(ranking.ranking) + 1
    rows: list[list[Cell]] = []
    for entry in sorted(ranking.ranking, key=lambda entry: (entry.rank or last, -(entry.p_best or 0.0))):
        named, p, reward = entry.rank is not None, entry.p_best, rewards.get(entry.recipe)
        style = "" if p is None else "bold green" if p >= SURE else "bright_black" if p < OUT else ""
        low = "-inf" if entry.A.low is None else f"{entry.A.low:.3f}"
        high = "inf" if entry.A.high is None else f"{entry.A.high:.3f}"
        rows.append([
            str(entry.rank or "-"),
            (names.get(entry.recipe, entry.recipe), style),
            ("-" if p is None else f"{p:.2f}", style or "cyan"),
            f"{entry.A.value:.3f}" if named else "",
            f"{low} {high}" if named else "",
            "" if reward is None else f"{reward:.3f}",
            (sparkline(curves.get(entry.recipe, ()), *scale, _CURVE), "magenta"),
            (entry.verdict, "" if named else "yellow"),
        ])  # fmt: skip
    return rows


def _rows(shown: Sequence[Member], members: Sequence[Member]) -> list[list[Cell]]:
    """Return the rows of the members shown, with the names and the scale of all members."""
    names = shortened(list(dict.fromkeys(member.recipe for member in members)))
    scale = _scale(member.rewards for member in members)
    rows: list[list[Cell]] = []
    for member in shown:
        budget = "" if member.steps is None else f"/{member.steps}"
        rows.append([
            (member.state, STYLES.get(member.state, "")),
            names[member.recipe],
            (member.seed, "bright_black"),
            "" if member.step is None else f"{member.step}{budget}",
            (f"{member.rewards[-1]:.3f}" if member.rewards else "-", "cyan"),
            (sparkline(member.rewards, *scale, _CURVE), "magenta"),
            (member.note, "yellow"),
        ])  # fmt: skip
    return rows


def _scale(curves: Iterable[Sequence[float]]) -> tuple[float, float]:
    """Return the lowest and the highest value of all curves."""
    values = [value for curve in curves for value in curve]
    return min(values, default=0.0), max(values, default=1.0)
