"""Draw the live screen of `scalerl watch` with rich: ranking, members, warnings."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from sweeps.launch.observer import STYLES
from sweeps.report.labels import shorten_labels
from sweeps.terminal import Cell, Column, counted, duration, fitted, one_line, sparkline

if TYPE_CHECKING:
    from sweeps.curve import Curve
    from sweeps.decide.rank import Ranking

# Order of the members' states: states that need attention first, finished members and unknown states last.
STATES = ("failed", "cancelled", "running", "ended", "stopped", "queued", "waiting", "finished", "")
_CURVE = 16  # characters of a sparkline
SURE, OUT = 0.95, 0.05  # P(best) from which a recipe is highlighted, and below which it is grey
_TALL = 20  # fewest lines of a terminal that show several sentences and warnings
ROWS = 40  # most members that are printed when the screen is closed

_RANKING = (
    Column("rank", 40, right=True), Column("recipe", soft=True), Column("P(best)", right=True), Column("A", right=True),
    Column("95% of A", 70, right=True), Column("reward", 70, right=True), Column("curve", 80), Column("verdict", 100),
)  # fmt: skip
_MEMBERS = (
    Column("state"), Column("recipe", soft=True), Column("seed", 40, right=True), Column("step", 60, right=True),
    Column("reward", right=True), Column("curve", 70), Column("note", 60, soft=True),
)  # fmt: skip


@dataclass(frozen=True)
class Member:
    """One run, as shown on the screen.

    Attributes:
        state: see `sweeps.launch.status.MemberView`; "" if the source does not report it.
        step, steps: newest step, and number of steps of the whole run; None if unknown.
        rewards: rewards of the evaluations so far, in order.
        note: why the run failed or waits, or the time since its last heartbeat.
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
    """Content of the live screen at one time, drawn by rich.

    Attributes:
        title: name of the study.
        left_s: estimated seconds until the last member ends; None if unknown.
        curves: each recipe's rewards in order, averaged over seeds.
        ranking: newest ranking; None before the first ranking.
        ranked_s: age of the ranking in seconds.
        behind: number of evaluations made since the ranking.
        waiting: why there is no ranking yet.
        warnings: recipes that departed from their forecasts, and problems of the sources; the most important first.
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
        """Draw the header, then as many rows of both tables as fit on the screen."""
        width, height = options.max_width, self.height
        max_sentences = None if height is None else 3 if height >= _TALL else 1
        outcome = self.waiting or "the first fit is running" if self.ranking is None else self.ranking.sentence
        lines = [self._head(), *self._age(), *Text(one_line(outcome)).wrap(console, width)[:max_sentences]]
        lines += [Text(one_line(f"! {text}"), "yellow") for text in self.warnings[:max_sentences]]
        for line in lines:
            line.truncate(width, overflow="ellipsis")
        ranking_rows = [] if self.ranking is None else _ranking_rows(self.ranking, self.curves)
        members = sorted(self.members, key=lambda member: STATES.index(member.state))
        row_count = len(ranking_rows) + ROWS
        if height is not None:
            # Leave out the headers of both tables, a blank line, and "and 3 more".
            row_count = max(2, height - len(lines) - 4)
            ranking_rows = ranking_rows[: max(row_count // 2, row_count - len(members))]
        shown_members = members[: row_count - len(ranking_rows)]
        yield from lines
        if ranking_rows:
            yield from (fitted(_RANKING, ranking_rows, width), "")
        if shown_members:
            yield fitted(_MEMBERS, _member_rows(shown_members, members), width)
        if len(shown_members) < len(members):
            yield Text(f"and {len(members) - len(shown_members)} more", "bright_black")

    def _head(self) -> Text:
        states = Counter(member.state for member in self.members)
        counts = [f"{states[state]} {state}" for state in STATES if state and states[state]]
        time_left = [f"about {duration(self.left_s)} left"] if self.left_s and self.left_s >= 1 else []
        summary = ", ".join([*time_left, *(counts or [counted(len(self.members), "run")])])
        return Text.assemble((one_line(self.title), "bold"), "  ", summary)

    def _age(self) -> list[Text]:
        if self.ranking is None:
            return []
        since = f", {counted(self.behind, 'evaluation')} since" if self.behind > 0 else ""
        rewards = self.ranking.rewards
        at = "" if rewards is None or rewards.compute is None else f", rewards at compute {rewards.compute:.4g}"
        return [Text(f"ranked {duration(self.ranked_s)} ago{since}{at}", "bright_black")]


def ranking_table(ranking: Ranking, curves: Mapping[str, tuple[float, ...]], width: int) -> Table:
    """Make the table of a ranking, for the screen and the end of a study. For `curves` see `Screen`."""
    return fitted(_RANKING, _ranking_rows(ranking, curves), width)


def mean_curve(curve: Curve) -> tuple[float, ...]:
    """Return a recipe's rewards averaged over seeds, evaluation by evaluation."""
    by_place: dict[int, list[float]] = defaultdict(list)
    for seed in dict.fromkeys(curve.seed.tolist()):
        for place, reward in enumerate(curve.reward[curve.seed == seed].tolist()):
            by_place[place].append(reward)
    return tuple(sum(values) / len(values) for _, values in sorted(by_place.items()))


def _ranking_rows(ranking: Ranking, curves: Mapping[str, tuple[float, ...]]) -> list[list[Cell]]:
    """Return the rows of the ranking. Recipes without a rank follow, by P(best)."""
    rewards = {} if ranking.rewards is None else {row.recipe: row.R.value for row in ranking.rewards.rows}
    names, scale = shorten_labels(list(curves)), _scale(curves.values())
    last_rank = len(ranking.ranking) + 1
    rows: list[list[Cell]] = []
    for entry in sorted(ranking.ranking, key=lambda entry: (entry.rank or last_rank, -(entry.p_best or 0.0))):
        is_ranked, p, reward = entry.rank is not None, entry.p_best, rewards.get(entry.recipe)
        style = "" if p is None else "bold green" if p >= SURE else "bright_black" if p < OUT else ""
        low = "-inf" if entry.A.low is None else f"{entry.A.low:.3f}"
        high = "inf" if entry.A.high is None else f"{entry.A.high:.3f}"
        rows.append([
            str(entry.rank or "-"),
            (names.get(entry.recipe, entry.recipe), style),
            ("-" if p is None else f"{p:.2f}", style or "cyan"),
            f"{entry.A.value:.3f}" if is_ranked else "",
            f"{low} {high}" if is_ranked else "",
            "" if reward is None else f"{reward:.3f}",
            (sparkline(curves.get(entry.recipe, ()), *scale, _CURVE), "magenta"),
            (entry.verdict, "" if is_ranked else "yellow"),
        ])  # fmt: skip
    return rows


def _member_rows(shown: Sequence[Member], members: Sequence[Member]) -> list[list[Cell]]:
    """Return the rows of the shown members. Their names and scale depend on all members."""
    names = shorten_labels(list(dict.fromkeys(member.recipe for member in members)))
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
    values = [value for curve in curves for value in curve]
    return min(values, default=0.0), max(values, default=1.0)
