"""The live screen of `scalerl watch`: it fits any terminal, and shows what matters first."""

from __future__ import annotations

import io
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from sweeps.decide.live_ranking import Place, Ranked
from sweeps.report.watch_screen import ROWS, STATES, Member, Screen, draw
from tests.examples import examples

NAMES = st.one_of(
    st.sampled_from(["scalerl", "scalerl+loss=dapo+aggregation=token", "配方" * 20, "a\x1b[2Jb\r\n", "👩‍👩‍👧" * 9]),
    st.text(max_size=50),
)
REWARDS = st.lists(st.floats(-5, 100), max_size=12).map(tuple)
NUMBERS = st.one_of(st.none(), st.floats(-1, 2))
MEMBERS = st.builds(
    Member,
    recipe=NAMES,
    seed=st.text(max_size=8),
    state=st.sampled_from(STATES),
    step=st.one_of(st.none(), st.integers(0, 10**7)),
    steps=st.one_of(st.none(), st.integers(1, 10**7)),
    rewards=REWARDS,
    note=NAMES,
)
PLACES = st.builds(
    Place,
    recipe=NAMES,
    rank=st.one_of(st.none(), st.integers(1, 200)),
    p_best=st.one_of(st.none(), st.floats(0, 1)),
    A=st.tuples(NUMBERS, NUMBERS, NUMBERS),
    reward=NUMBERS,
    verdict=st.sampled_from(["identifiable", "open", "too_few_points"]),
)
SCREENS = st.builds(
    Screen,
    title=NAMES,
    members=st.lists(MEMBERS, max_size=9).map(tuple),
    left_s=st.one_of(st.none(), st.floats(0, 1e7)),
    curves=st.dictionaries(NAMES, REWARDS, max_size=3),
    ranked=st.one_of(st.none(), st.builds(Ranked, st.lists(PLACES, max_size=6).map(tuple), NAMES, NUMBERS, st.just(3))),
    ranked_s=st.floats(0, 1e5),
    evaluations=st.integers(0, 99),
    waiting=NAMES,
    warnings=st.lists(NAMES, max_size=5).map(tuple),
)


def shown(screen: Screen, width: int, height: int | None, page: int = 0) -> list[str]:
    """The lines as a terminal of this size gets them, without colours."""
    output = io.StringIO()
    console = Console(file=output, width=width, force_terminal=True, color_system="truecolor", legacy_windows=False)
    for line in draw(screen, width, height, page):
        console.print(line)
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", output.getvalue()).split("\n")[:-1]


@settings(max_examples=examples(80))
@given(
    screen=SCREENS,
    width=st.one_of(st.sampled_from([40, 80, 120, 200]), st.integers(4, 60)),
    height=st.one_of(st.none(), st.sampled_from([10, 24, 40]), st.integers(1, 12)),
    page=st.integers(-3, 9),
)
def test_it_fits_its_terminal_whatever_names_there_are(
    screen: Screen, width: int, height: int | None, page: int
) -> None:
    lines = shown(screen, width, height, page)
    assert height is None or len(lines) == height
    assert all(cell_len(line) <= width for line in lines)
    assert all(character.isprintable() for line in lines for character in line)


def study(members: int = 30, recipes: int = 6) -> Screen:
    names = [f"scalerl+loss=variant_{number}" for number in range(recipes)]
    places = tuple(
        Place(name, at + 1, 0.9 if at == 0 else 0.02, (0.7 - at / 100, 0.68, 0.72), 0.6, "identifiable")
        for at, name in enumerate(names)
    )
    return Screen(
        title="outputs/mine",
        members=tuple(
            Member(names[number % recipes], str(number // recipes), STATES[number % 8], number, 40, (0.1, 0.2, 0.5))
            for number in range(members)
        ),
        left_s=600.0,
        curves={name: (0.1, 0.3, 0.5) for name in names},
        ranked=Ranked(places, "undecided: " + "which is it, " * 30, 12.5, 90),
        ranked_s=4.0,
        evaluations=93,
        warnings=("variant_1: reward lies below its forecast", "two", "three", "four"),
    )


def test_a_small_terminal_has_a_bit_of_everything() -> None:
    lines = shown(study(), 40, 10)
    assert (
        lines[0].startswith("outp…ine  about 10 min left, 4 failed")
        and "P(best)" in lines[1]
        and re.match(" +1 +loss=…nt_0 +0.90", lines[2])
    )
    assert any(line.startswith("! ") for line in lines) and "of 30 members" in "\n".join(lines)
    assert lines[-1].startswith("q: leave")


def test_failures_come_first_and_pages_show_every_member_once() -> None:
    screen = study()
    first = shown(screen, 120, 24)
    table = [line for line in first if re.match(r"(failed|running|cancelled) ", line)]
    assert table[0].startswith("failed  ") and "about 10 min left" in first[0] and "4 failed" in first[0]
    rows: list[str] = []
    for page in range(40):
        lines = shown(screen, 120, 24, page)
        (more,) = [line for line in lines if "of 30 members" in line]
        begin, end = map(int, re.findall(r"\d+", more)[:2])
        if page and begin == 1:
            break
        at = lines.index(more)
        rows += lines[at - (end - begin + 1) : at]
    assert len(rows) == len({row.strip() for row in rows}) == 30


def test_ranking_is_kept_in_sight_and_what_is_left_is_printed_with_the_whole_sentence() -> None:
    screen = study(members=60)
    assert sum("identifiable" in line for line in shown(screen, 120, 40)) == 6
    assert "ranked 4 s ago, 3 evaluations since, rewards at compute 12.5" in shown(screen, 120, 40)[-1]
    left = shown(screen, 120, None)
    assert sum("which is it," in line for line in left) == 4 and f"1 to {ROWS - 1} of 60 members" in left
    assert not any("q: leave" in line for line in left)


@pytest.mark.parametrize("waiting", ["", "no evaluation yet; waiting for the first"])
def test_before_the_first_ranking_it_says_why_there_is_none(waiting: str) -> None:
    lines = shown(Screen(title="x", waiting=waiting), 80, 10)
    assert lines[1] == (waiting or "fitting for the first time")
