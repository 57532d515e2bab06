"""Cost estimate of a launch: steps, and device hours from the cost per step of earlier runs."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any

from sweeps.as_json import AsJson
from sweeps.curve import DEVICE_HOURS
from sweeps.errors import UserError
from sweeps.launch.ledger import RUNS_DIR
from sweeps.run.journal import find_runs, finite
from sweeps.run.progress import journal_or_none, why_final
from sweeps.run.spec import RunSpec
from sweeps.terminal import counted

# Groups of the configuration, besides the recipe, that determine the cost of a step.
SCALE = ("model", "task", "batch", "context")


@dataclass(frozen=True)
class Price(AsJson):
    """Estimate of a launch's device hours from earlier runs.

    Attributes:
        hours: device hours of all remaining steps.
        by, runs: study or run that the rates were read from, and number of its runs with a rate.
        other_scale: groups of the configuration in which some members differ from every run there; their rate is then
            that of a run of another scale.
    """

    hours: float
    by: str
    runs: int
    other_scale: tuple[str, ...]


@dataclass(frozen=True)
class Launch(AsJson):
    """Size and cost of a launch: members, steps, and device hours if they can be estimated.

    Attributes:
        members, recipes, seeds: number of each.
        steps, left: optimizer steps of all members together, and the remaining ones.
        price: estimated device hours; None if no earlier run has a rate.
        money: price of the device hours; None without a rate, or without device hours.
    """

    members: int
    recipes: int
    seeds: int
    steps: int
    left: int
    price: Price | None
    money: float | None

    def sentences(self, asked: bool = True) -> list[str]:
        """Describe the launch and its device hours in lines for display.

        Args:
            asked: whether to mention unknown device hours. A launch that is merely accepted does not, because that
                would be useless for a first study.
        """
        arms = f"{counted(self.recipes, 'recipe')}, {counted(self.seeds, 'seed')}"
        lines = [f"{counted(self.members, 'member')} ({arms}), {self.steps} steps"]
        if self.left < self.steps:
            lines[0] += f", of which {self.left} are left"
        if self.left == 0 and not asked:
            return lines
        if self.price is None:
            unknown = "device hours: not known, for no run here has taken a step; name an earlier study that has"
            return [*lines, f"{unknown} (launch.like=STUDY, or --like)"] if asked else lines
        text = f"device hours: {self.price.hours:.3g}, by {counted(self.price.runs, 'run')} of {self.price.by}"
        if self.price.other_scale:
            text += f", with another {', '.join(self.price.other_scale)} than some members have"
        lines.append(text if self.money is None else f"{text}; {self.money:.4g} in money")
        return lines


def launch_of(
    specs: Sequence[RunSpec],
    directory: Path,
    like: str | None = None,
    rate: float | None = None,
    elsewhere: Collection[str] = (),
) -> Launch:
    """Return the size and estimated cost of a launch of these members.

    Args:
        specs: members to launch.
        directory: their study's folder; the cost of a step is read from its runs unless `like` is given.
        like: folder of an earlier study or run to read it from; None for `directory`.
        rate: price of a device hour; None to leave money out.
        elsewhere: members that ran or are running elsewhere, and cost nothing here.

    Raises:
        UserError: `like` has no run with device hours, or the rate is invalid.
    """
    if rate is not None and (isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 <= rate < 1e12):
        raise UserError(f"launch.rate: {rate!r} must be the money that a device hour costs, 0 or more")
    progress = cache(_progress)  # cached: used for the remaining steps and for the cost per step
    # A branch takes its first steps from its parent; 0 for a run that is already beyond this budget.
    done = {spec.run: max(progress(directory / RUNS_DIR / spec.run)[1], spec.first_step) for spec in specs}
    left = {spec.run: max(spec.steps - done[spec.run], 0) for spec in specs}
    left |= {spec.run: 0 for spec in specs if left[spec.run] and why_final(directory / RUNS_DIR / spec.run)}
    left |= dict.fromkeys(elsewhere, 0)
    rates = _Rates.read(directory if like is None else Path(like), progress)
    if rates is None and like is not None:
        raise UserError(
            f"launch.like: {like}: no run with device hours here; give a study or run of ours that has taken some steps"
        )
    price = None if rates is None else rates.price(specs, left)
    money = None if price is None or rate is None else price.hours * rate
    return Launch(
        members=len(specs),
        recipes=len({spec.curve for spec in specs}),
        seeds=len({spec.seed for spec in specs}),
        steps=sum(spec.steps for spec in specs),
        left=sum(left.values()),
        price=price,
        money=money,
    )


def check_hours(launch: Launch, most: object) -> None:
    """Refuse a launch that takes more device hours than allowed.

    Raises:
        UserError: it takes more, its cost is unknown, or the limit is not a number of hours.
    """
    if most is None:
        return
    if isinstance(most, bool) or not isinstance(most, int | float) or not 0 < most < float("inf"):
        raise UserError(f"launch.max_device_hours: {most!r} must be a positive number of hours, or null")
    if launch.price is None:
        raise UserError(
            f"launch.max_device_hours: {most:g}, but no run says what a step takes; name an earlier study of this "
            "scale with launch.like=STUDY, or launch one member with a small budget.steps first"
        )
    if launch.price.hours > most:
        raise UserError(
            f"launch.max_device_hours: {most:g}, and {launch.left} steps take about {launch.price.hours:.3g} by "
            f"{launch.price.by}; launch fewer members or steps, or raise the limit"
        )


@dataclass(frozen=True, eq=False)
class _Rates:
    """Device hours per step of the runs in a folder.

    Attributes:
        by: the folder, as text.
        found: rates of single runs, in device hours per step, by scale (as JSON) and recipe.
        scales: all scales that occur, see `_scale`.
    """

    by: str
    found: Mapping[tuple[str, str], Sequence[float]]
    scales: Sequence[Mapping[str, str]]

    @classmethod
    def read(cls, place: Path, progress: Callable[[Path], tuple[str, int, float | None]]) -> _Rates | None:
        """Read the rates of the runs in a folder with `progress`, see `_progress`; None if no run has taken a step."""
        found: dict[tuple[str, str], list[float]] = defaultdict(list)
        scales: dict[str, Mapping[str, str]] = {}
        for run_dir in find_runs(place):
            recipe, step, hours = progress(run_dir)
            if not step or not hours:
                continue
            scale = _scale(_configuration(run_dir))
            key = json.dumps(scale)
            scales[key] = scale
            found[key, recipe].append(hours / step)
        return cls(str(place), found, list(scales.values())) if found else None

    def price(self, specs: Sequence[RunSpec], left: Mapping[str, int]) -> Price:
        """Price the remaining steps by the median rate of the same recipe and scale, else of the scale, else of all."""
        hours, differs = 0.0, set()
        for spec in specs:
            scale = _scale(spec.config)
            key = json.dumps(scale)
            same_scale = [rates for (where, _), rates in self.found.items() if where == key]
            if not same_scale:
                nearest: list[str] = min((_departures(scale, other) for other in self.scales), key=len)
                differs |= set(nearest)
            rates = self.found.get((key, spec.recipe)) or chain.from_iterable(same_scale or self.found.values())
            hours += left[spec.run] * median(rates)
        runs = sum(map(len, self.found.values()))
        return Price(hours, self.by, runs, tuple(name for name in SCALE if name in differs))


def _scale(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the parts of a configuration that determine the cost of a step, as JSON texts."""
    return {name: json.dumps(config[name], sort_keys=True, default=str) for name in SCALE if name in config}


def _departures(first: Mapping[str, str], second: Mapping[str, str]) -> list[str]:
    return [name for name in SCALE if first.get(name) != second.get(name)]


def _configuration(run_dir: Path) -> Mapping[str, Any]:
    try:
        return RunSpec.read(run_dir).config
    except UserError:  # a script's run, or one of another version
        return {}


def _progress(run_dir: Path) -> tuple[str, int, float | None]:
    """Return a run's recipe, its last step and the device hours up to it; "", 0 and None if it cannot be read."""
    view = journal_or_none(run_dir)
    if view is None:
        return "", 0, None
    last = max(view.records, key=lambda record: record.step, default=None)
    step = 0 if last is None else last.step
    # Hours are cumulative and recorded with both train and eval of a step: the larger value is newer.
    hours = [finite(record.metrics.get(DEVICE_HOURS)) for record in view.records if record.step == step]
    return str(view.header.get("recipe", "")), step, max((value for value in hours if value is not None), default=None)
