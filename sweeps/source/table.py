"""Tables with a row a point: CSV, JSONL, JSON lists, Parquet. Strict: a row that is no point is an error.

Columns: `compute`, `reward`, and where they are there `recipe`, `seed`, `sd` (the reward's standard error) and
`baseline` (the recipe that this one departs from).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from sweeps.curve import Array
from sweeps.errors import UserError
from sweeps.source.cells import Rows, numbers, read_rows
from sweeps.source.collected import ALL, Collected
from sweeps.source.text import File, listed, short

NAME = "table"


def matches(file: File, into: Collected) -> bool:
    """Any file: the last reader that is asked."""
    return True


def is_table(rows: Rows, into: Collected) -> bool:
    """Whether the header is a table's own, with columns that no log has."""
    if "_step" in rows.names:
        return False
    default = {"compute", "reward"} <= set(rows.names)
    return default or (into.asked.by or "recipe") in rows.names


def read(file: File, into: Collected) -> None:
    """Add the rows of a table, by recipe.

    Raises:
        UserError: no rows, a column that is missing or there twice, a cell that is no number, negative compute.
    """
    path, asked = file.path, into.asked
    rows = read_rows(file)
    if rows is None:
        raise UserError(f"{path}: the file is empty; give a table with columns and rows")
    if rows.torn:
        raise UserError(rows.torn)
    if asked.y == ALL:
        raise UserError(f"{path}: --metric {ALL} is for runs and logs; a table has one reward column, named with --y")
    wanted = {"compute": asked.x or "compute", "reward": asked.y or "reward"}
    if asked.by is not None:
        wanted["recipe"] = asked.by
    needed = [*wanted.values(), *asked.factors]
    missing = sorted({name for name in needed if name not in rows.names})
    if missing:
        raise UserError(
            f"{path}: no column {', '.join(short(m) for m in missing)}; found {listed(rows.names)}; "
            f"name them with --x, --y, --by{' or --group' if asked.factors else ''}"
        )
    used = dict(wanted)
    used.update((k, k) for k in ("recipe", "seed", "sd", "baseline") if k not in wanted and k in rows.names)
    columns = [*used.values(), *asked.factors]
    twice = sorted({name for name in columns if rows.names.count(name) > 1})
    if twice:
        raise UserError(f"{path}: column {', '.join(map(short, twice))} occurs more than once; rename one")
    if not rows.count:
        raise UserError(f"{path}: a header and no rows; give a file with points")
    cells = {name: rows.cells(name) for name in columns}
    ragged = sorted({i for column in cells.values() for i, cell in enumerate(column, start=1) if cell is None})
    if ragged:
        raise UserError(f"{path}: {len(ragged)} rows have too few cells, first row {ragged[0]}; repair them")
    compute = _column(path, used["compute"], cells[used["compute"]])
    reward = _column(path, used["reward"], cells[used["reward"]])
    sd = _column(path, used["sd"], cells[used["sd"]]) if "sd" in used else None
    _not_negative(path, used["compute"], compute)
    if sd is not None:
        _not_negative(path, used["sd"], sd)
    recipes = _text(cells[used["recipe"]]) if "recipe" in used else [path.stem] * rows.count
    seeds = _text(cells[used["seed"]]) if "seed" in used else ["0"] * rows.count
    factors = [_text(cells[name]) for name in asked.factors]
    bases = _text(cells["baseline"]) if "baseline" in used else [""] * rows.count
    if asked.seed_from is not None:
        parted = [asked.parted(recipe) for recipe in recipes]
        recipes, seeds = (
            [label for label, _ in parted],
            [own or seed for (_, own), seed in zip(parted, seeds, strict=True)],
        )
    for (recipe, base, *values), at in _groups([recipes, bases, *factors]).items():
        named = dict(zip(asked.factors, values, strict=True))
        points = into.points(recipe, named, used["compute"], used["reward"], str(path), base or None)
        points.extend(
            compute[at].tolist(),
            reward[at].tolist(),
            [seeds[i] for i in at.tolist()],
            None if sd is None else sd[at].tolist(),
        )
    _note(file, into, used, rows.count)


def _note(file: File, into: Collected, used: dict[str, str], count: int) -> None:
    """The line on how the table was read: shown where its name stands in for a recipe column."""

    def rule(key: str, option: str) -> str:
        given = used.get(key, key) != key
        return f"{key} <- {used[key]} ({f'given by {option}' if given else 'default'})"

    optional = [f"{key} <- {used.get(key, 'none')}" for key in ("seed", "sd")]
    recipe = rule("recipe", "--by") if "recipe" in used else "recipe <- the file's name"
    line = (
        f"{file.path}: {NAME}; {rule('compute', '--x')}; {rule('reward', '--y')}; {recipe}; {'; '.join(optional)}; "
        f"{count} rows: {count} points"
    )
    into.study.note(short(line, 2000), shown="recipe" not in used)


def _text(cells: Sequence[Any]) -> list[str]:
    return [str(cell).strip() for cell in cells]


def _groups(labels: Sequence[Sequence[str]]) -> dict[tuple[str, ...], Any]:
    """Row indices by label, in order of first appearance."""
    codes: dict[tuple[str, ...], int] = {}
    code = np.fromiter((codes.setdefault(key, len(codes)) for key in zip(*labels, strict=True)), int, len(labels[0]))
    order = np.argsort(code, kind="stable")
    cuts = np.searchsorted(code[order], np.arange(1, len(codes)))
    return dict(zip(codes, np.split(order, cuts), strict=True))


def _column(path: object, name: str, cells: Sequence[Any]) -> Array:
    """A column as finite numbers; rows are counted from 1 below the header."""
    values = numbers(cells)
    bad = np.flatnonzero(np.isnan(values))
    if len(bad):
        raise UserError(
            f"{path}: column {short(name)} is not a finite number in {len(bad)} of {len(cells)} rows, "
            f"first row {bad[0] + 1} ({short(str(cells[bad[0]]))!r}); correct or remove them"
        )
    return values


def _not_negative(path: object, name: str, values: Array) -> None:
    below = np.flatnonzero(values < 0)
    if len(below):
        raise UserError(
            f"{path}: column {short(name)} is negative in {len(below)} rows, first row {below[0] + 1} "
            f"({values[below[0]]:g}); it starts at 0"
        )
