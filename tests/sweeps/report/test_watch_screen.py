"""Tests of the live screen of `scalerl watch`: it fits any terminal and shows failures and the ranking first."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console
from rich.screen import Screen as Whole

from sweeps.decide.rank import Ranking, rank
from sweeps.fit.fit import fit_curves
from sweeps.fit.points import FitOptions
from sweeps.report.watch_screen import ROWS, STATES, Member, Screen, mean_curve, ranking_table
from tests.examples import examples
from tests.sweeps.fit.simulate import curve

NAMES = st.one_of(
    st.sampled_from(
        ["scalerl", "scalerl+loss=dapo+aggregation=token", "配方" * 20, "a\x1b[2Jb\r\n", "[bold]", "👩‍👩‍👧" * 9]
    ),
    st.text(max_size=50),
)
CURVES = [curve("scalerl", points=9), curve("scalerl+loss=dapo", a=0.5, points=9), curve("scalerl+kl=fixed", points=4)]


@cache
def ranking() -> Ranking:
    return rank(fit_curves(CURVES, FitOptions()), brief=True)


def printed_lines(screen: Screen, width: int, height: int | None) -> list[str]:
    """Return the lines on a terminal of this size, without colours. height None: the final, unlimited output."""
    output = io.StringIO()
    console = Console(
        file=output, width=width, height=height, force_terminal=True, color_system="truecolor", legacy_windows=False
    )
    console.print(screen if height is None else Whole(replace(screen, height=height)), end="")
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", output.getvalue()).splitlines()


@settings(max_examples=examples(40))
@given(
    members=st.lists(
        st.builds(
            Member,
            recipe=NAMES,
            seed=st.text(max_size=8),
            state=st.sampled_from(STATES),
            step=st.one_of(st.none(), st.integers(0, 10**7)),
            steps=st.one_of(st.none(), st.integers(1, 10**7)),
            rewards=st.lists(st.floats(-5, 100), max_size=12).map(tuple),
            note=NAMES,
        ),
        max_size=9,
    ).map(tuple),
    text=NAMES,
    ranked=st.booleans(),
    width=st.one_of(st.sampled_from([40, 80, 120, 200]), st.integers(20, 60)),
    height=st.one_of(st.none(), st.sampled_from([10, 24, 40])),
)
def test_the_screen_fits_the_terminal_with_any_names(
    members: tuple[Member, ...], text: str, ranked: bool, width: int, height: int | None
) -> None:
    screen = Screen(text, members, 600.0, {}, ranking() if ranked else None, 4.0, 2, text, (text,) * 5)
    lines = printed_lines(screen, width, height)
    assert height is None or len(lines) == height
    assert all(cell_len(line) <= width for line in lines)
    assert all(character.isprintable() for line in lines for character in line)


def study(members: int = 30) -> Screen:
    names = [recipe_curve.recipe for recipe_curve in CURVES]
    return Screen(
        title="outputs/mine",
        members=tuple(
            Member(names[number % 3], str(number // 3), STATES[number % 8], number, 40, (0.1, 0.2, 0.5))
            for number in range(members)
        ),
        left_s=600.0,
        curves={recipe_curve.recipe: mean_curve(recipe_curve) for recipe_curve in CURVES},
        ranking=ranking(),
        ranked_s=4.0,
        behind=3,
        warnings=("scalerl: reward has been below its forecast", "two", "three", "four"),
    )


def test_a_small_terminal_shows_some_lines_of_every_part() -> None:
    lines = printed_lines(study(), 40, 10)
    assert lines[0].startswith("outputs/mine  about 10 min left, 4 fail") and lines[3].startswith("! scalerl")
    assert re.match(r"rank +recipe +P\(best\)", lines[4]) and re.match(r" +1 +scalerl +[01]\.\d\d", lines[5])
    assert "and 29 more" in "\n".join(lines)


def test_failures_come_first_and_the_ranking_stays_visible() -> None:
    lines = printed_lines(study(), 120, 24)
    assert "about 10 min left, 4 failed" in lines[0]
    ranking_rows = [line for line in lines if re.search(r"0\.\d\d +(0\.\d{3} )?.*[▁-█]{4}.*[a-z_]+ *$", line)]
    assert len(ranking_rows) == 3 and ranking_rows[2].split()[:2] == ["-", "kl=fixed"]
    states = [line.split()[0] for line in lines if line.partition(" ")[0] in STATES[:-1]]
    assert states[:5] == ["failed"] * 4 + ["cancelled"]
    not_shown = int(re.findall(r"and (\d+) more", lines[-1])[0])
    assert len(states) + not_shown == 30


def test_the_final_output_has_the_whole_sentence() -> None:
    final_lines = printed_lines(study(members=60), 60, None)
    final_text = " ".join("\n".join(final_lines).split())
    assert ranking().sentence in final_text and f"and {60 - ROWS} more" in final_lines
    assert "ranked 4 s ago, 3 evaluations since, rewards at compute" in final_text


@pytest.mark.parametrize("waiting", ["", "no evaluation yet; waiting for the first"])
def test_before_the_first_ranking_the_screen_says_what_it_waits_for(waiting: str) -> None:
    lines = printed_lines(Screen(title="x", waiting=waiting), 80, 10)
    assert lines[1].rstrip() == (waiting or "the first fit is running")


def test_unranked_recipes_are_ordered_by_their_probability() -> None:
    short = [
        curve(recipe=name, a=a, points=4, seeds=1, rng=at) for at, (name, a) in enumerate([("low", 0.4), ("high", 0.9)])
    ]
    table = ranking_table(rank(fit_curves(short, FitOptions()), brief=True), {}, 120)
    assert [str(cell) for cell in table.columns[1].cells] == ["high", "low"]
