"""Tests of our published curves: pandas and `scalerl fit` read the table, and its data card matches it."""

from __future__ import annotations

import csv
import re

import pandas as pd

from benchmarks.curves import CARD, TABLE, counts, rows
from sweeps.api import load


def test_pandas_reads_the_table_and_the_card_lists_its_columns() -> None:
    curves = pd.read_csv(TABLE)
    columns = CARD.read_text().split("## Columns")[1].split("## Studies")[0]
    assert re.findall(r"^\| `(\w+)` \|", columns, flags=re.MULTILINE) == list(curves)
    assert not curves.isna().any().any() and curves.reward.between(0, 1).all() and (curves.sd > 0).all()
    assert curves.groupby(["study", "recipe", "seed"]).step.is_monotonic_increasing.all()
    assert TABLE.stat().st_size < 10**6


def test_the_command_reproduces_table_and_card() -> None:
    with TABLE.open(newline="") as file:
        committed = [tuple(row) for row in csv.reader(file)][1:]
    assert committed == list(rows())
    assert "\n".join(counts(committed)) in CARD.read_text()


def test_fit_reads_the_table_with_its_standard_errors() -> None:
    study = load(TABLE, x="flops", group="study")
    recipes = pd.read_csv(TABLE).groupby(["study", "recipe"]).ngroups
    assert len(study.study.curves) == recipes and all(curve.sd is not None for curve in study.study.curves)
