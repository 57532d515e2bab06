"""Reader of tables with one row per point: CSV, JSONL, JSON lists, Parquet. An invalid row is an error.

Columns, in any case: `compute`, `reward` and optionally `recipe`, `seed`, `sd` (the reward's standard error) and
`baseline` (the recipe that this one is compared with). Only rows with a blank reward or compute are skipped; they are
counted.
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
from sweeps.source.collected import ALL, Asked, Collected, ForeignRun, described
from sweeps.source.columns import check_columns, column_named, counter_named, not_negative, strict_numbers
from sweeps.source.frame import Table, grouped, read_table, with_order
from sweeps.source.log import looks_per_step
from sweeps.source.run_names import pairs_in
from sweeps.source.text import File, listed, short
from sweeps.source.vocabulary import ORDER, STEP_NAMES, order_warning
from sweeps.source.wide import how_wide
from sweeps.terminal import counted

if TYPE_CHECKING:
    from pandas import DataFrame

NAME = "table"


class NoTableError(UserError):
    """Error: the file has no rows under a header, or none of the columns that a table needs."""


def matches(file: File, into: Collected) -> bool:
    """Return True: this reader is tried last and takes any file."""
    return True


def is_table(table: Table, into: Collected) -> bool:
    """Return whether a table has points, judged by its header: `compute` and `reward`, or a recipe column."""
    if "_step" in table.names:
        return False
    default = table.named("compute") and table.named("reward")
    return bool(default or table.named(into.asked.by or "recipe"))


@dataclass
class Columns:
    """Columns chosen in a table: names by role, the requested factors, and how compute was found."""

    used: dict[str, str]
    factors: list[str] = field(default_factory=list)
    fallback: bool = False  # without a column of that name, compute is a framework's counter or a step


def read(file: File, into: Collected) -> None:
    """Add the rows of a table, by recipe.

    Raises:
        UserError: no rows, a missing or repeated column, a cell that is not a number, or negative compute.
    """
    path, asked = file.path, into.asked
    try:
        table = read_table(file, asked)
    except UserError as error:
        raise NoTableError(str(error)) from error
    if table is None:
        raise UserError(f"{path}: the file is empty; give a table with columns and rows")
    if table.torn:
        raise UserError(table.torn)
    if asked.y == ALL:
        raise UserError(f"{path}: --metric {ALL} is for runs and logs; a table has one reward column, named with --y")
    table = _with_names(file, table, asked)
    labels = [name.strip().casefold() for name in (asked.by or "recipe", "seed", *asked.factors)]
    table = with_order(table, asked, labels)
    columns = _columns(file, table, asked)
    used = columns.used
    check_columns(file, table, [*used.values(), *columns.factors])
    compute, no_compute = strict_numbers(file, table, used["compute"], "another with --x")
    reward, no_reward = strict_numbers(file, table, used["reward"], "another with --y")
    not_negative(file, table, used["compute"], compute)
    sd = None
    if "sd" in used:
        sd, _ = strict_numbers(file, table, used["sd"], "it values, or another name")
        not_negative(file, table, used["sd"], sd)
    recipes = table.label(used["recipe"]) if "recipe" in used else [file.run_name] * table.count
    seeds = table.label(used["seed"]) if "seed" in used else ["0"] * table.count
    factors = [table.label(name) for name in columns.factors]
    bases = table.label(used["baseline"]) if "baseline" in used else [""] * table.count
    if asked.seed_from is not None:
        labelled = [asked.split_seed(recipe) for recipe in recipes]
        recipes, seeds = (
            [label for label, _ in labelled],
            [hidden or seed for (_, hidden), seed in zip(labelled, seeds, strict=True)],
        )
    skipped = no_compute | no_reward
    for (recipe, base, *values), rows_of in grouped([recipes, bases, *factors]).items():
        at = rows_of[~skipped[rows_of]]
        if not len(at):
            continue
        named = dict(zip(asked.factors, values, strict=True))
        axis = asked.x or used["compute"].casefold()
        points = into.points(recipe, named, axis, asked.y or "reward", str(path), base or None)
        points.own_seeds |= "seed" in used
        if (
            (columns.fallback or axis == ORDER)
            and (note := order_warning(used["compute"]))
            and note not in points.warnings
        ):
            points.warnings.append(note)
        for (seed,), places in grouped([[seeds[i] for i in at.tolist()]]).items():
            rows = at[places]
            run = ForeignRun(
                where=str(path),
                name=file.run_name if "recipe" not in used else recipe,
                labels=described(named, recipe=recipe, seed=seed if "seed" in used else None, baseline=base or None),
                axis=axis,
                metric=used["reward"],
                compute=compute[rows],
                reward=reward[rows],
                sd=None if sd is None else sd[rows],
            )
            into.add(points, seed, run)
    _say_per_step(file, into, table, used, compute, [recipes, seeds, *factors])
    _say_skipped(file, into, no_compute, no_reward, recipes)
    _note(file, into, columns, table, int((~skipped).sum()))


def _with_names(file: File, table: Table, asked: Asked) -> Table:
    """Return the table with requested columns that its file's name contains, as in `loss=grpo,seed=1.csv`."""
    in_name = pairs_in(file.run_name)
    wanted = [name for name in (asked.by, *asked.factors) if name is not None and not table.named(name)]
    if not wanted or not all(name in in_name for name in wanted):
        return table
    constant = {
        name: in_name[name] for name in dict.fromkeys([*wanted, "seed"]) if name in in_name and not table.named(name)
    }
    names = [*table.names, *constant]

    def load() -> DataFrame:
        frame = table.frame.assign(**{f"_{name}": value for name, value in constant.items()})
        return frame.set_axis(range(len(names)), axis=1)

    return replace(table, names=names, load=load)


def _columns(file: File, table: Table, asked: Asked) -> Columns:
    """Choose the columns by role, as named by the user or by their default names.

    Raises:
        UserError: a required column is missing or ambiguous.
    """
    named = {"compute": asked.x, "reward": asked.y, "recipe": asked.by, "seed": None, "sd": None, "baseline": None}
    options = {"compute": "--x", "reward": "--y", "recipe": "--by"}
    chosen = {
        role: column_named(file, table, name or role, options.get(role, "another name"), asked=name is not None)
        for role, name in named.items()
    }
    factors = [column_named(file, table, name, "--group", asked=True) for name in asked.factors]
    fallback = False
    if chosen["compute"] is None and asked.x is None:
        chosen["compute"] = counter_named(file, table)
        fallback = chosen["compute"] is not None
    roles = ["compute", "reward"] if asked.by is None else ["compute", "reward", "recipe"]
    needed = [(named[role] or role, options[role], chosen[role]) for role in roles]
    needed += [(name, "--group", column) for name, column in zip(asked.factors, factors, strict=True)]
    missing = {name: option for name, option, column in needed if column is None}
    if missing:
        remedies = list(dict.fromkeys(missing.values()))
        order = f" (--x {ORDER} numbers the rows)" if "--x" in remedies else ""
        raise NoTableError(
            f"{file.path}: no column {', '.join(map(short, missing))}; found {listed(table.names)}; "
            f"name {'it' if len(missing) == 1 else 'them'} with {', '.join(remedies)}{order}"
            f"{how_wide(file, table, asked)}"
        )
    used = {role: name for role, name in chosen.items() if name is not None}
    return Columns(used, [name for name in factors if name is not None], fallback)


def _say_per_step(
    file: File, into: Collected, table: Table, used: Mapping[str, str], compute: Array, labels: Sequence[Sequence[str]]
) -> None:
    """Warn if compute looks like an amount per step, judged along the table's own step column."""
    step = next((name for name in STEP_NAMES if name in table.names and name != used["compute"]), None)
    if step is None or used["compute"] == ORDER:
        return
    steps = numbers(table.column(step))
    for at in grouped(labels).values():
        known = at[np.isfinite(steps[at]) & np.isfinite(compute[at])]
        if looks_per_step(compute[known[np.argsort(steps[known], kind="stable")]]):
            into.study.warnings.append(
                f"{file.path}: {short(used['compute'])} looks like what each step took, not what was spent so far: it "
                f"does not rise along {step}; add a column with its running sum, and name that with --x"
            )
            return


def _say_skipped(
    file: File, into: Collected, no_compute: NDArray[np.bool_], no_reward: NDArray[np.bool_], recipes: Sequence[str]
) -> None:
    """Warn of a file's blank rows, and of recipes that have only those."""
    skipped = no_compute | no_reward
    if not skipped.any():
        return
    if skipped.all():
        raise UserError(f"{file.path}: no row has both compute and reward; log them in one row, or give another table")
    counts = ((no_reward, "rows without a reward"), (no_compute & ~no_reward, "rows without compute"))
    parts = [f"{mask.sum()} {what}" for mask, what in counts if mask.any()]
    remaining = {recipe for recipe, blank in zip(recipes, skipped.tolist(), strict=True) if not blank}
    lost = [recipe for recipe in dict.fromkeys(recipes) if recipe not in remaining]
    without = f"; nothing is left of {listed(lost)}" if lost else ""
    into.study.warnings.append(f"{file.path}: {' and '.join(parts)} were skipped{without}")


def _note(file: File, into: Collected, columns: Columns, table: Table, points: int) -> None:
    """Note how the table was read; the line is shown if recipe, compute or cells were not read by default."""
    used, asked = columns.used, into.asked

    def rule(role: str, option: str, given: str | None) -> str:
        how = f"given by {option}" if given not in (None, role) else "default"
        if role == "compute" and columns.fallback:
            how = "for want of a column compute"
        return f"{role} <- {used[role]} ({how})"

    optional = [f"{key} <- {used.get(key, 'none')}" for key in ("seed", "sd")]
    recipe = rule("recipe", "--by", asked.by) if "recipe" in used else "recipe <- the file's name"
    counts = f"{counted(table.count, 'row')}: {counted(points, 'point')}"
    line = (
        f"{file.path}: {NAME}; {rule('compute', '--x', asked.x)}; {rule('reward', '--y', asked.y)}; {recipe}; "
        f"{'; '.join(optional)}; {', '.join([counts, *table.notes])}"
    )
    into.study.note(short(line, 2000), shown="recipe" not in used or columns.fallback or bool(table.notes))
