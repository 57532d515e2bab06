"""Read tables with one row per point: CSV, JSONL, JSON lists, Parquet. An invalid row is an error.

Columns, in any case: `compute`, `reward` and optionally `recipe`, `seed`, `sd` (the reward's standard error) and
`baseline` (the recipe that the row's recipe is compared with). Only rows with a blank reward or compute are skipped,
and counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from sweeps.curve import Array
from sweeps.errors import UserError
from sweeps.source.cells import numbers
from sweeps.source.collected import ALL, Collected, ForeignRun, Request, make_labels
from sweeps.source.columns import (
    check_columns,
    column_named,
    counter_named,
    refuse_blank_labels,
    refuse_negative,
    strict_numbers,
    whole_steps,
)
from sweeps.source.frame import Table, group_rows, read_table, with_order
from sweeps.source.log import looks_per_step
from sweeps.source.run_names import pairs_in
from sweeps.source.text import File, listed, short
from sweeps.source.vocabulary import ORDER, STEP_NAMES, order_warning
from sweeps.source.wide import wide_hint
from sweeps.terminal import counted

if TYPE_CHECKING:
    from pandas import DataFrame

NAME = "table"


class NoTableError(UserError):
    """The file has no rows under a header, or lacks columns that a table needs."""


def matches(file: File, into: Collected) -> bool:
    """Return True, because this reader is tried last and takes any file."""
    return True


def is_table(table: Table, into: Collected) -> bool:
    """Return whether a table has points: it has columns `compute` and `reward`, or a column of recipes."""
    if "_step" in table.names:
        return False
    default = table.named("compute") and table.named("reward")
    return bool(default or table.named(into.request.by or "recipe"))


@dataclass
class Columns:
    """Columns chosen in a table.

    Attributes:
        used: name of the column for each role (`compute`, `reward`, ...) that has one.
        factors: columns of the requested factors.
        fallback: whether compute is a framework's counter or a step, because there is no column `compute`.
    """

    used: dict[str, str]
    factors: list[str] = field(default_factory=list)
    fallback: bool = False


def read(file: File, into: Collected) -> None:
    """Add the rows of a table, by recipe.

    Raises:
        UserError: there are no rows, a column is missing or repeated, a cell is not a number, a recipe or
            seed is blank, or compute is negative.
    """
    path, request = file.path, into.request
    try:
        table = read_table(file, request)
    except UserError as error:
        raise NoTableError(str(error)) from error
    if table is None:
        raise UserError(f"{path}: the file is empty; give a table with columns and rows")
    if table.torn:
        raise UserError(table.torn)
    if request.y == ALL:
        raise UserError(f"{path}: --metric {ALL} is for runs and logs; a table has one reward column, named with --y")
    table = _with_names(file, table, request)
    labels = [name.strip().casefold() for name in (request.by or "recipe", "seed", *request.factors)]
    table = with_order(table, request, labels)
    columns = _columns(file, table, request)
    column_of = columns.used
    check_columns(file, table, [*column_of.values(), *columns.factors])
    compute, no_compute = strict_numbers(file, table, column_of["compute"], "another with --x")
    reward, no_reward = strict_numbers(file, table, column_of["reward"], "another with --y")
    refuse_negative(file, table, column_of["compute"], compute)
    steps = whole_steps(table)
    sd = None
    if "sd" in column_of:
        sd, _ = strict_numbers(file, table, column_of["sd"], "it values, or another name")
        refuse_negative(file, table, column_of["sd"], sd)
    recipes = table.label(column_of["recipe"]) if "recipe" in column_of else [into.run_name(file)] * table.count
    seeds = table.label(column_of["seed"]) if "seed" in column_of else [""] * table.count
    factors = [table.label(name) for name in columns.factors]
    bases = table.label(column_of["baseline"]) if "baseline" in column_of else [""] * table.count
    if request.seed_from is not None:
        split_labels = [into.split_seed(recipe) for recipe in recipes]
        recipes, seeds = (
            [label for label, _ in split_labels],
            [named_seed or seed for (_, named_seed), seed in zip(split_labels, seeds, strict=True)],
        )
    skipped = no_compute | no_reward
    if "seed" in column_of and not any(seed for seed, skip in zip(seeds, skipped.tolist(), strict=True) if not skip):
        del column_of["seed"]  # some exports have a seed column that is blank in all rows: treat it as missing
    for role in ("recipe", "seed"):
        if role in column_of:
            cells = recipes if role == "recipe" else seeds
            refuse_blank_labels(file, table, column_of[role], cells, skipped)
    run_labels: dict[str, str] = {}  # label of each recipe's run, in a table without seeds, where a recipe has one run
    for (recipe, base, *values), all_rows in group_rows([recipes, bases, *factors]).items():
        kept_rows = all_rows[~skipped[all_rows]]
        if not len(kept_rows):
            continue
        factor_values = dict(zip(request.factors, values, strict=True))
        axis = request.x or column_of["compute"].casefold()
        points = into.points(recipe, factor_values, axis, request.y or "reward", str(path), base or None)
        points.own_seeds |= "seed" in column_of
        if (
            (columns.fallback or axis == ORDER)
            and (note := order_warning(column_of["compute"]))
            and note not in points.warnings
        ):
            points.warnings.append(note)
        for (seed,), indices in group_rows([[seeds[i] for i in kept_rows.tolist()]]).items():
            rows = kept_rows[indices]
            run = ForeignRun(
                where=str(path),
                name=into.run_name(file) if "recipe" not in column_of else recipe,
                labels=make_labels(
                    factor_values, recipe=recipe, seed=seed if "seed" in column_of else None, baseline=base or None
                ),
                axis=axis,
                metric=column_of["reward"],
                compute=compute[rows],
                reward=reward[rows],
                steps=None if steps is None or np.isnan(steps[rows]).any() else steps[rows],
                sd=None if sd is None else sd[rows],
            )
            if not seed and "seed" not in column_of:
                points.plain_table = True
                if points.recipe not in run_labels:
                    run_labels[points.recipe] = into.run_label(points, None)
                seed = run_labels[points.recipe]
            into.add(points, seed, run)
    _warn_if_not_cumulative(file, into, table, column_of, compute, [recipes, seeds, *factors])
    _warn_skipped(file, into, no_compute, no_reward, recipes)
    _note(file, into, columns, table, int((~skipped).sum()))


def _with_names(file: File, table: Table, request: Request) -> Table:
    """Add requested columns whose values are in the file's name instead, as in `loss=grpo,seed=1.csv`."""
    pairs = pairs_in(file.run_name)
    missing = [name for name in (request.by, *request.factors) if name is not None and not table.named(name)]
    if not missing or not all(name in pairs for name in missing):
        return table
    constant = {
        name: pairs[name] for name in dict.fromkeys([*missing, "seed"]) if name in pairs and not table.named(name)
    }
    names = [*table.names, *constant]

    def load() -> DataFrame:
        frame = table.frame.assign(**{f"_{name}": value for name, value in constant.items()})
        return frame.set_axis(range(len(names)), axis=1)

    return replace(table, names=names, load=load)


def _columns(file: File, table: Table, request: Request) -> Columns:
    """Choose a column for each role, by the user's name or the default name.

    Raises:
        UserError: a required column is missing or ambiguous.
    """
    requested = {
        "compute": request.x,
        "reward": request.y,
        "recipe": request.by,
        "seed": None,
        "sd": None,
        "baseline": None,
    }
    options = {"compute": "--x", "reward": "--y", "recipe": "--by"}
    chosen = {
        role: column_named(file, table, name or role, options.get(role, "another name"), exact=name is not None)
        for role, name in requested.items()
    }
    factors = [column_named(file, table, name, request.option_of(name), exact=True) for name in request.factors]
    fallback = False
    if chosen["compute"] is None and request.x is None:
        chosen["compute"] = counter_named(file, table)
        fallback = chosen["compute"] is not None
    roles = ["compute", "reward"] if request.by is None else ["compute", "reward", "recipe"]
    needed = [(requested[role] or role, options[role], chosen[role]) for role in roles]
    needed += [(name, request.option_of(name), column) for name, column in zip(request.factors, factors, strict=True)]
    missing = {name: option for name, option, column in needed if column is None}
    if missing:
        remedies = list(dict.fromkeys(missing.values()))
        order = f" (--x {ORDER} numbers the rows)" if "--x" in remedies else ""
        raise NoTableError(
            f"{file.path}: no column {', '.join(map(short, missing))}; found {listed(table.names)}; "
            f"name {'it' if len(missing) == 1 else 'them'} with {', '.join(remedies)}{order}"
            f"{wide_hint(file, table, request)}"
        )
    column_of = {role: name for role, name in chosen.items() if name is not None}
    return Columns(column_of, [name for name in factors if name is not None], fallback)


def _warn_if_not_cumulative(
    file: File,
    into: Collected,
    table: Table,
    column_of: Mapping[str, str],
    compute: Array,
    labels: Sequence[Sequence[str]],
) -> None:
    """Warn if compute, sorted by the table's step column, looks like an amount per step and not a running total."""
    step = next((name for name in STEP_NAMES if name in table.names and name != column_of["compute"]), None)
    if step is None or column_of["compute"] == ORDER:
        return
    steps = numbers(table.column(step))
    for rows in group_rows(labels).values():
        finite_rows = rows[np.isfinite(steps[rows]) & np.isfinite(compute[rows])]
        if looks_per_step(compute[finite_rows[np.argsort(steps[finite_rows], kind="stable")]]):
            into.study.warnings.append(
                f"{file.path}: {short(column_of['compute'])} looks like the compute of each step, not the total "
                f"so far: it does not rise along {step}; add a column with its running sum, and name that with --x"
            )
            return


def _warn_skipped(
    file: File, into: Collected, no_compute: NDArray[np.bool_], no_reward: NDArray[np.bool_], recipes: Sequence[str]
) -> None:
    skipped = no_compute | no_reward
    if not skipped.any():
        return
    if skipped.all():
        raise UserError(f"{file.path}: no row has both compute and reward; log them in one row, or give another table")
    counts = ((no_reward, "without a reward"), (no_compute & ~no_reward, "without compute"))
    parts = [f"{counted(int(mask.sum()), 'row')} {description}" for mask, description in counts if mask.any()]
    remaining = {recipe for recipe, blank in zip(recipes, skipped.tolist(), strict=True) if not blank}
    lost_recipes = [recipe for recipe in dict.fromkeys(recipes) if recipe not in remaining]
    loss_note = f"; no row is left of {listed(lost_recipes)}" if lost_recipes else ""
    into.study.warnings.append(f"{file.path}: skipped {' and '.join(parts)}{loss_note}")


def _note(file: File, into: Collected, columns: Columns, table: Table, points: int) -> None:
    """Note how the table was read.

    The user sees the note if recipe, compute or cells were not read in the default way.
    """
    column_of, request = columns.used, into.request

    def rule(role: str, option: str, name: str | None) -> str:
        reason = f"given by {option}" if name not in (None, role) else "default"
        if role == "compute" and columns.fallback:
            reason = "there is no column compute"
        return f"{role} <- {column_of[role]} ({reason})"

    optional = [f"{key} <- {column_of.get(key, 'none')}" for key in ("seed", "sd")]
    recipe = rule("recipe", "--by", request.by) if "recipe" in column_of else "recipe <- the file's name"
    counts = f"{counted(table.count, 'row')}: {counted(points, 'point')}"
    line = (
        f"{file.path}: {NAME}; {rule('compute', '--x', request.x)}; {rule('reward', '--y', request.y)}; {recipe}; "
        f"{'; '.join(optional)}; {', '.join([counts, *table.notes])}"
    )
    into.study.note(short(line, 2000), shown="recipe" not in column_of or columns.fallback or bool(table.notes))
