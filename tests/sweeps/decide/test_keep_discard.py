"""Tests of `scalerl decide`: keep or discard by final values, on simulated tables and on tables of real loops."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from sweeps import api
from sweeps.cli.main import main
from sweeps.decide.keep_discard import DISCARD, KEEP, UNDECIDED, ChangeVerdict, keep_or_discard, runs_needed
from sweeps.report.comparison_text import choice_text
from sweeps.source.run_values import RunTable, RunValues
from tests.paths import ROOT

EXAMPLE = ROOT / "examples" / "results.tsv"
HEAD = "commit\tval_bpb\tmemory_gb\tstatus\tdescription\n"


def choice(margin: float | None = None, /, **runs: Any) -> ChangeVerdict:
    """Decide between recipes `a` and `b`. `runs` are lists of values by recipe, None for a failed run."""
    recipes = [
        RunValues(name, tuple(v for v in values if v is not None), sum(v is None for v in values))
        for name, values in runs.items()
    ]
    return keep_or_discard(RunTable("value", tuple(recipes), {}, ()), "a", "b", margin)


def verdicts(pairs: int, apart: float, runs: tuple[int, int], spread: float = 1.0, repeats: int = 0) -> Counter[str]:
    """Count verdicts on simulated tables. spread: sd of the runs of `b`. repeats: runs per other recipe."""
    rng = np.random.default_rng(62)
    counts: Counter[str] = Counter()
    for _ in range(pairs):
        table = {
            "a": rng.normal(0, 1, runs[0]),
            "b": rng.normal(apart, spread, runs[1]),
            "c": rng.normal(5, 1, repeats),
            "d": rng.normal(-5, 1, repeats),
        }
        counts[choice(**{name: map(float, values) for name, values in table.items()}).verdict] += 1
    return counts


@pytest.mark.parametrize(
    ("runs", "spread", "repeats"),
    [((5, 5), 1.0, 0), ((5, 5), 3.0, 0), ((10, 3), 3.0, 0), ((5, 1), 1.0, 0), ((1, 1), 1.0, 4)],
    ids=["five each", "one scatters more", "few of the one that scatters", "a single run", "others repeated"],
)
def test_at_most_5_percent_of_null_pairs_are_decided(runs: tuple[int, int], spread: float, repeats: int) -> None:
    pairs = 1000
    counts = verdicts(pairs, 0.0, runs, spread, repeats)
    # Student's t test is exact in the last two cases, so the error of the simulation is added. Welch's test decides too
    # often if three runs scatter three times as far as ten others: 7%, as the guide says.
    allowed = 0.05 if runs == (5, 5) and spread == 1 else 0.05 + 3 * np.sqrt(0.05 * 0.95 / pairs)
    allowed += 0.02 * (runs == (10, 3))
    assert 0.01 < (counts[KEEP] + counts[DISCARD]) / pairs <= allowed


def test_90_percent_of_pairs_three_noise_floors_apart_are_decided_correctly() -> None:
    better, worse = verdicts(500, 3.0, (5, 5)), verdicts(500, -3.0, (5, 5))
    assert better[KEEP] >= 450 and not better[DISCARD]
    assert worse[DISCARD] >= 450 and not worse[KEEP]


@pytest.mark.parametrize("margin", [3.0, 1.5, 0.7])
def test_runs_needed_give_80_percent_power(margin: float) -> None:
    needed = runs_needed(1.0, margin)
    assert needed is not None
    drawn = np.random.default_rng(1).normal(0, 1, (2, 20_000, needed))
    power = [
        float((stats.ttest_ind(drawn[0, :, :count] + margin, drawn[1, :, :count], axis=1).pvalue < 0.05).mean())
        for count in (needed - 1, needed)
    ]
    assert power[0] < 0.81 and power[1] > 0.79
    assert runs_needed(1.0, 1e-9) is None


def test_the_noise_floor_is_pooled_and_its_interval_has_95_percent_coverage() -> None:
    rng = np.random.default_rng(3)
    held = []
    for _ in range(400):
        decision = choice(a=map(float, rng.normal(0, 2, 3)), b=map(float, rng.normal(9, 2, 2)), c=[1.0])
        assert decision.noise_floor is not None and decision.degrees == 3
        low, high = decision.noise_floor.low, decision.noise_floor.high
        assert low is not None and high is not None
        held.append(low < 2 < high)
    assert 0.92 < np.mean(held) < 0.98
    one = choice(a=[1.0, 3.0], b=[5.0, 9.0])
    assert one.noise_floor is not None and one.noise_floor.value == pytest.approx(np.sqrt((2 + 8) / 2))


def test_single_runs_are_undecided_with_a_remedy() -> None:
    decision = choice(a=[0.1], b=[0.9])
    assert decision.verdict == UNDECIDED and decision.difference is None and decision.noise_floor is None
    assert decision.sentence.startswith("undecided: nothing was repeated")
    assert decision.remedy == "run a 5 times, each with another seed, and give every run its own row"


def test_the_default_margin_is_named_and_runs_needed_are_shown_if_undecided() -> None:
    """Without --margin, 17 runs are needed in every table. So the output names the difference that they can detect."""
    base, near, far = [1.0, 1.2, 0.9, 1.1, 1.05], [1.1, 1.2, 1.0], [3.0, 3.2, 2.9]
    by_default, with_margin = choice(a=base, b=near), choice(0.5, a=base, b=near)
    assert by_default.verdict == with_margin.verdict == UNDECIDED and by_default.runs_needed == 17
    difference = f"a difference as large as the noise floor ({by_default.margin:.4g})"
    assert by_default.remedy is not None and by_default.remedy.startswith(
        f"detecting {difference} needs 17 runs of each: run a 12 more"
    )
    assert by_default.remedy.endswith("; or give the difference that matters to you with --margin")
    (row,) = [line for line in choice_text(by_default).splitlines() if line.startswith("runs needed")]
    assert row.startswith("runs needed       17 of each ") and row.endswith(
        f" to detect {difference} at the 5% level with 80% power"
    )
    assert "noise floor (" not in choice_text(with_margin)
    assert "to detect a difference of 0.5 at the 5% level with 80% power" in choice_text(with_margin)
    for decide_rows in (choice(a=base, b=far), choice(a=far, b=base)):
        assert decide_rows.verdict in (KEEP, DISCARD) and decide_rows.to_json()["runs_needed"] == 17
        assert "runs needed" not in choice_text(decide_rows)


def test_identical_runs_show_no_spread() -> None:
    decision = choice(a=[0.3, 0.1 + 0.2, 0.3], b=[0.9])
    assert decision.verdict == UNDECIDED and "all repeated runs are identical" in decision.sentence
    assert decision.notes[0].startswith("a: its 3 runs are identical and count as one")


def test_failed_runs_are_counted_and_may_prevent_a_verdict() -> None:
    ahead = [3.0, 3.2, 2.9, 3.1, 3.05]
    base = [1.0, 1.2, 0.9, 1.1, 1.05]
    assert choice(a=base, b=ahead).verdict == KEEP
    one_failed = choice(a=base, b=[*ahead, None])
    assert (
        one_failed.verdict == KEEP
        and one_failed.failed == 1
        and one_failed.notes[-1].startswith("failed runs: b 1 of 6")
    )
    most_failed = choice(a=base, b=[*ahead, *[None] * 6])
    assert most_failed.verdict == UNDECIDED and most_failed.sentence.endswith("but 6 of its 11 runs failed")
    assert most_failed.remedy is not None and most_failed.remedy.startswith("repeat the failed runs")
    half_failed = choice(a=base, b=[*ahead, *[None] * 5])
    assert half_failed.verdict == UNDECIDED and half_failed.sentence.endswith("but 5 of its 10 runs failed")
    near = [1.2, 1.4, 1.25, 1.35, 1.3]
    assert choice(a=base, b=near).verdict == KEEP
    assert "would not hold if these had ended like a" in choice(a=base, b=[*near, *[None] * 3]).sentence
    assert (
        choice(a=ahead, b=[*base, *[None] * 6]).verdict == DISCARD
    )  # failures of the recipe that is behind do not matter
    none = choice(a=base, b=[None, None])
    assert none.verdict == UNDECIDED and "no run of b finished (2 runs failed)" in none.sentence


# --- tables ---------------------------------------------------------------------------------------------------------


def decide(capsys: pytest.CaptureFixture[str], *words: str | Path) -> tuple[int, str, str]:
    code = main(["decide", *map(str, words)])
    out, err = capsys.readouterr()
    return code, out, err


def test_a_table_of_autoresearch_is_read_unchanged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Quotes are text, 1e23456 is a commit and not a number, and a crash with value 0 is not the lowest loss."""
    rows = [f"1e23456\t{value}\t44.0\tkeep\tbaseline" for value in (1.01, 1.0, 0.99)]
    rows += [
        '0123456\t0.0\t0.0\tcrash\t"wide" model',
        *(f'0123456\t{v}\t44\tdiscard\t"wide" it' for v in (1.2, 1.22, 1.21)),
    ]
    table = tmp_path / "results.tsv"
    table.write_text(HEAD + "\n".join(rows) + "\n")
    code, out, _ = decide(capsys, "1e23456", "0123456", "--from", table, "--lower-is-better", "--json")
    printed = json.loads(out)
    assert code == 0 and printed["verdict"] == DISCARD and printed["statuses"] == {"keep": 3, "crash": 1, "discard": 3}
    assert [side["failed"] for side in printed["recipes"]] == [0, 1] and printed["difference"][
        "value"
    ] == pytest.approx(-0.21)


def test_columns_and_statuses_can_be_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = tmp_path / "runs.csv"
    table.write_text("arm,acc,end\n" + "".join(f"{arm},{v},{end}\n" for arm, v, end in (
        ("x", 0.5, "ok"), ("x", 0.51, "ok"), ("y", 0.7, "ok"), ("y", 0.9, "Diverged"), ("y", "", "ok"),
    )))  # fmt: skip
    words = ("--by", "arm", "--y", "acc", "--status", "end", "--failed", "diverged", "--margin", "0.1")
    code, out, err = decide(capsys, "x", "y", "--from", table, *words)
    assert code == 0 and "keep y" not in out and re.search(r"B  y +1 +2 +0.7", out)
    assert "1 of 5 rows have no number in acc: counted as failed" in err
    frame = pd.read_csv(table)
    options = {"by": "arm", "y": "acc", "status": "end", "failed": "diverged", "margin": 0.1}
    assert api.decide("x", "y", frame, **options).to_json() == api.decide("x", "y", table, **options).to_json()


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("a1b2c3d", "b2c3d4e", "--from", EXAMPLE), "--y val_bpb: its name is that of a loss; add --lower-is-better"),
        (("a1b2c3d", "nothing", "--from", EXAMPLE, "--lower-is-better"), "nothing: no such recipe; the table has a1b"),
        (("a1b2c3d", "a1b2c3d", "--from", EXAMPLE, "--lower-is-better"), "a1b2c3d: is compared with itself"),
        (("a", "b", "--from", EXAMPLE, "--y", "accuracy"), "no column accuracy; name it with --y; found"),
        (("a", "b", "--from", "nowhere.tsv"), "nowhere.tsv"),
        (("a1b2c3d", "b2c3d4e", "--from", EXAMPLE, "--lower-is-better", "--margin", "0"), "--margin 0: give a"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_refused_in_one_line(
    words: tuple[str, ...], error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = decide(capsys, *words)
    assert code == 1 and out == "" and error in err and err.count("\n") == 1


def test_the_python_function_returns_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("a1b2c3d", "b2c3d4e", "--from", EXAMPLE, "--lower-is-better")
    decision = api.decide("a1b2c3d", "b2c3d4e", EXAMPLE, lower_is_better=True)
    assert decision.to_json() == json.loads(decide(capsys, *words, "--json")[1])
    assert "keep b2c3d4e" in decision._repr_html_() and len(decision.to_frame()) == 2


def test_the_guide_shows_the_output_of_decide(capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs/guide/assistants.md").read_text()
    blocks = re.findall(r"```\n\$ scalerl decide (.*)\n([^`]*)\n```", page)
    assert blocks
    for words, text in blocks:
        assert decide(capsys, *words.replace("examples/", f"{EXAMPLE.parent}/").split())[1].rstrip() == text


@pytest.mark.parametrize("delimiter", [",", "\t"])
def test_duplicate_columns_are_refused_in_csv_and_tsv(
    delimiter: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Regression: TSV used the last of two equal columns and CSV the first, so one table had two verdicts."""

    def decide_rows(header: str, *words: str) -> tuple[int, str, str]:
        rows = [header, "a,0.5,1", "a,0.51,2", "b,0.6,0.1", "b,0.61,0.11"]
        (tmp_path / "t.txt").write_text("\n".join(rows).replace(",", delimiter))
        return decide(capsys, "a", "b", "--from", tmp_path / "t.txt", *words)

    code, _, err = decide_rows("commit,reward,reward")
    assert code == 1 and "t.txt: column reward occurs more than once; rename one" in err
    code, _, err = decide_rows("commit,reward,Reward")
    assert code == 1 and "columns reward and Reward differ only in case; rename one, or choose with --y" in err
    code, out, _ = decide_rows("commit,reward,Reward", "--y", "reward", "--json")
    assert code == 0 and json.loads(out)["verdict"] == KEEP
    assert decide_rows("commit,reward,note")[0] == 0
    (tmp_path / "t.txt").write_text(f"commit{delimiter}reward\n")
    assert (
        "t.txt: a header without rows; give one row per run"
        in decide(capsys, "a", "b", "--from", tmp_path / "t.txt")[2]
    )


def test_decimal_commas_are_read_and_other_text_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Regression: text counted as a failed run, so in a table with decimal commas all runs had failed."""
    table = tmp_path / "t.tsv"

    def decide_rows(*rows: str) -> tuple[int, str, str]:
        table.write_text("\n".join(["commit\tval_bpb\tstatus", *(row.replace(" ", "\t") for row in rows)]))
        return decide(capsys, "a", "b", "--from", table, "--lower-is-better", "--json")

    code, out, _ = decide_rows("a 1,0000 keep", "a 1,0100 keep", "a 0,9900 keep", "b 0,9000 keep", "b 0,91 keep")
    assert code == 0 and [side["mean"] for side in json.loads(out)["recipes"]] == pytest.approx([1, 0.905])
    code, out, _ = decide_rows(
        "a 1.0 keep", "a 1.01 keep", "b 0.9 keep", "b ??? crash", "b nan keep", "b oom -", "b inf keep"
    )
    assert code == 0 and [side["failed"] for side in json.loads(out)["recipes"]] == [0, 4]
    code, _, err = decide_rows("a 1.0 keep", "", "b 0.9x keep")
    assert code == 1 and "t.tsv: column val_bpb is not a number at line 4 ('0.9x'); correct it, or leave the" in err
    code, _, err = decide_rows("a 1,043 keep", "a 2,086 keep", "b 347 keep")
    assert code == 1 and "column val_bpb has '1,043', whose comma may be decimal or separate thousands" in err
    table.write_text("commit,reward\na,0.5\nb,high\n")
    assert "column reward is not a number at line 3 ('high')" in decide(capsys, "a", "b", "--from", table)[2]
