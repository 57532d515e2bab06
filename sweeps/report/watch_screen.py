"""The live screen of `scalerl watch`, laid out in lines that fit any terminal: ranking, members, warnings."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from textwrap import wrap
from typing import TYPE_CHECKING

from sweeps.decide.live_ranking import Place, Ranked
from sweeps.launch.observer import STYLES
from sweeps.report.labels import shortened as short_labels
from sweeps.terminal import BLOCKS, Cell, Column, counted, duration, fitted, one_line, shortened, sparkline

if TYPE_CHECKING:
    from rich.text import Text

    from sweeps.curve import Curve

# Order of the members' states: what needs somebody first, what is over last.
STATES = ("failed", "cancelled", "running", "ended", "stopped", "queued", "waiting", "finished", "")
_CURVE = 16  # characters of a sparkline
SURE, OUT = 0.95, 0.05  # P(best) from which, and below which, a recipe is coloured
_TALL = 20  # lines of a terminal from which there is room for sentences
ROWS = 40  # members that are printed when the screen is left

_RANKING = (
    Column("rank", 2, right=True), Column("recipe", least=10), Column("P(best)", right=True),
    Column("A", 1, right=True), Column("95% of A", 4, right=True), Column("reward", 3, right=True),
    Column("curve", 5), Column("verdict", 6),
)  # fmt: skip
_MEMBERS = (
    Column("state", 2), Column("recipe", least=10), Column("seed", 1, right=True), Column("step", 5, right=True),
    Column("reward", right=True), Column("curve", 3), Column("why", 6, least=12),
)  # fmt: skip


@dataclass(frozen=True)
class Member:
    """One run as the screen shows it.

    Attributes:
        state: see `sweeps.launch.status.MemberView`; "" for a run of a source that says none.
        step, steps: newest step and budget; None where not known.
        rewards: evaluations so far, in order.
        note: why it failed or waits, or since when nothing was heard of it.
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
    """Everything that the live screen shows at one time.

    Attributes:
        title: name of the study.
        left_s: estimated seconds until the last member ends; None where not known.
        curves: mean over seeds of each recipe's rewards, in order.
        ranked: newest ranking; None before the first. ranked_s: its age in seconds.
        evaluations: number of evaluations there are by now.
        waiting: why there is no ranking yet.
        warnings: of departures, and on the sources; the most important first.
    """

    title: str
    members: tuple[Member, ...] = ()
    left_s: float | None = None
    curves: dict[str, tuple[float, ...]] = field(default_factory=dict)
    ranked: Ranked | None = None
    ranked_s: float = 0.0
    evaluations: int = 0
    waiting: str = ""
    warnings: tuple[str, ...] = ()


def draw(screen: Screen, width: int, height: int | None = None, page: int = 0, levels: str = BLOCKS) -> list[Text]:
    """Lay the screen out in lines of at most `width` cells, and at most `height` of them.

    Args:
        screen: what is shown.
        width, height: size of the terminal; None for what is printed when the screen is left.
        page: of the members, where they do not all fit; the first again after the last.
        levels: characters of sparklines.
    """
    tall = height is None or height >= _TALL
    names = short_labels(list(dict.fromkeys([*screen.curves, *(member.recipe for member in screen.members)])))
    values = [value for member in screen.members for value in member.rewards]
    scale = (min(values), max(values)) if values else (0.0, 1.0)

    def curve(rewards: Sequence[float]) -> str:
        return sparkline(rewards, *scale, _CURVE, levels)

    places = [_place(screen, place, names, curve) for place in (screen.ranked.places if screen.ranked else ())]
    warnings = [_line(f"! {text}", width, "yellow") for text in screen.warnings[: 3 if tall else 1]]
    if len(screen.warnings) > len(warnings):
        warnings[-1] = _line(f"! and {len(screen.warnings) - len(warnings) + 1} more warnings", width, "yellow")
    gap = [_line("", width)] * tall
    sentences = _wrapped(_outcome(screen), width, 1 if not tall else 2 if height else 8) if tall or not places else []
    # Rows that are left for both tables, of which the ranking takes what members leave, and two fifths at least.
    rows = len(places) + min(ROWS, len(screen.members))
    if height is not None:  # else all recipes and the first members are printed
        fixed = 2 + len(warnings) + 2 * len(gap) + len(sentences) + bool(places) + bool(screen.members)
        rows = max(0, height - fixed)
    ranked = min(len(places), max(2 * rows // 5, rows - len(screen.members), 0 if height else rows))
    lines = [_head(screen, width), *gap, *sentences]
    if ranked:
        lines += fitted(_RANKING, places[:ranked], width)
    lines += [*gap, *_members(screen, rows - ranked, page, lambda member: _member(member, names, curve), width)]
    lines += warnings
    if height is None:
        return lines
    lines = lines[: height - 1]
    return [*lines, *[_line("", width)] * (height - 1 - len(lines)), _foot(screen, width)]


def ranking_lines(ranked: Ranked, curves: Mapping[str, tuple[float, ...]], width: int) -> list[Text]:
    """Lay out a ranking alone, as the end of a study shows it: its sentence, and one table of at most `width` cells."""
    names = short_labels(list(curves))
    values = [value for rewards in curves.values() for value in rewards]
    screen = Screen("", curves=dict(curves), ranked=ranked)

    def curve(rewards: Sequence[float]) -> str:
        return sparkline(rewards, min(values), max(values), _CURVE)

    rows = [_place(screen, place, names, curve) for place in ranked.places]
    return [*_wrapped(ranked.sentence, width, 8), _line("", width), *fitted(_RANKING, rows, width)]


def mean_curve(curve: Curve) -> tuple[float, ...]:
    """Return the mean reward of a recipe's seeds at their first, second, ... evaluation."""
    by_place: dict[int, list[float]] = defaultdict(list)
    for seed in dict.fromkeys(curve.seed.tolist()):
        for place, reward in enumerate(curve.reward[curve.seed == seed].tolist()):
            by_place[place].append(reward)
    return tuple(sum(values) / len(values) for _, values in sorted(by_place.items()))


def _line(text: str, width: int, style: str = "") -> Text:
    """Return a line of text, its end left out where it is too long."""
    from rich.text import Text

    line = Text(one_line(text), style=style, no_wrap=True, overflow="crop")
    line.truncate(width, overflow="ellipsis")
    return line


def _wrapped(text: str, width: int, lines: int) -> list[Text]:
    """Return a sentence in so many lines at most, its end left out where they do not hold it."""
    parts = wrap(one_line(text), max(1, width))
    rest = " ".join(parts[lines - 1 :])
    return [_line(part, width) for part in [*parts[: lines - 1], *([rest] if rest else [])]]


def _head(screen: Screen, width: int) -> Text:
    """Return the title with the number of members in each state, and the time left."""
    from rich.text import Text

    states = Counter(member.state for member in screen.members)
    counts = [f"{states[state]} {state}" for state in STATES if state and states[state]]
    left = [f"about {duration(screen.left_s)} left"] if screen.left_s and screen.left_s >= 1 else []
    told = ", ".join([*left, *(counts or [counted(len(screen.members), "run")])])
    title = shortened(screen.title, max(8, width - len(told) - 2))
    line = Text.assemble((title, "bold"), "  ", told, no_wrap=True, overflow="crop")
    line.truncate(width, overflow="ellipsis")
    return line


def _outcome(screen: Screen) -> str:
    return screen.ranked.sentence if screen.ranked is not None else screen.waiting or "fitting for the first time"


def _foot(screen: Screen, width: int) -> Text:
    """Return the age of the ranking, and the keys."""
    keys = "q: leave, space: next page" if len(screen.members) > 1 else "q: leave"
    if screen.ranked is None:
        return _line(keys, width, "bright_black")
    ranked, behind = screen.ranked, screen.evaluations - screen.ranked.evaluations
    at = "" if ranked.compute is None else f", rewards at compute {ranked.compute:.4g}"
    told = f"ranked {duration(screen.ranked_s)} ago" + (
        f", {counted(behind, 'evaluation')} since" if behind > 0 else ""
    )
    return _line(f"{keys}  {told}{at}", width, "bright_black")


def _place(
    screen: Screen, place: Place, names: Mapping[str, str], curve: Callable[[Sequence[float]], str]
) -> list[Cell]:
    """Return a recipe's row of the ranking."""
    value, low, high = place.A if place.rank is not None else (None, None, None)
    p = place.p_best
    style = "" if p is None else "bold green" if p >= SURE else "bright_black" if p < OUT else ""
    return [
        "-" if place.rank is None else str(place.rank),
        (names.get(place.recipe, place.recipe), style),
        ("-" if p is None else f"{p:.2f}", style or "cyan"),
        "" if value is None else f"{value:.3f}",
        ""
        if value is None
        else f"{'-inf' if low is None else f'{low:.3f}'} {'inf' if high is None else f'{high:.3f}'}",
        "" if place.reward is None else f"{place.reward:.3f}",
        (curve(screen.curves.get(place.recipe, ())), "magenta"),
        (place.verdict, "" if place.rank is not None else "yellow"),
    ]


def _member(member: Member, names: Mapping[str, str], curve: Callable[[Sequence[float]], str]) -> list[Cell]:
    """Return a run's row of the table of members."""
    step = "" if member.step is None else str(member.step) if member.steps is None else f"{member.step}/{member.steps}"
    return [
        (member.state, STYLES.get(member.state, "")),
        names.get(member.recipe, member.recipe),
        (member.seed, "bright_black"),
        step,
        (f"{member.rewards[-1]:.3f}" if member.rewards else "-", "cyan"),
        (curve(member.rewards), "magenta"),
        (member.note, "yellow"),
    ]


def _members(screen: Screen, rows: int, page: int, cells: Callable[[Member], list[Cell]], width: int) -> list[Text]:
    """Return the table of members in so many rows: a page of them, and how many there are besides."""
    members = sorted(screen.members, key=lambda member: STATES.index(member.state))
    if not members or rows < 1:
        return []
    if len(members) <= rows:
        return fitted(_MEMBERS, [cells(member) for member in members], width)
    rows = max(1, rows - 1)  # the last line says how many there are besides
    begin = page % -(-len(members) // rows) * rows
    shown = members[begin : begin + rows]
    more = f"{begin + 1} to {begin + len(shown)} of {len(members)} members"
    return [*fitted(_MEMBERS, [cells(member) for member in shown], width), _line(more, width, "bright_black")]
