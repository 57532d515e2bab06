"""Estimate the cost of a launch: its steps, and its device hours from the cost per step of earlier runs."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from sweeps.as_json import AsJson
from sweeps.curve import DEVICE_HOURS
from sweeps.errors import UserError
from sweeps.launch.ledger import RUNS_DIR
from sweeps.run.checkpoint_names import CHECKPOINTS_DIR, checkpoints, step_of
from sweeps.run.journal import JournalView, find_runs, finite
from sweeps.run.progress import final_reason, journal_or_none
from sweeps.run.spec import RunSpec
from sweeps.terminal import counted

# Groups of the configuration that, together with the recipe, determine the cost of a step.
SCALE = ("model", "task", "batch", "context")


@dataclass(frozen=True)
class Price(AsJson):
    """Estimate of a launch's device hours from earlier runs.

    Attributes:
        hours: device hours of all remaining steps.
        by: folder of the study or run whose runs gave the device hours per step.
        runs: number of runs in that folder with known device hours per step.
        other_scale: groups of the configuration (`SCALE`) in which some members differ from every run in that folder.
            Device hours of these members are estimated from runs of another scale.
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
        steps, left: optimizer steps of all members together: in total, and those still to do.
        price: estimated device hours; None if the device hours per step are unknown.
        money: price of these device hours; None if they or the price of one hour are unknown.
    """

    members: int
    recipes: int
    seeds: int
    steps: int
    left: int
    price: Price | None
    money: float | None

    def sentences(self, show_unknown: bool = True) -> list[str]:
        """Describe the launch and its device hours, in lines for display.

        Args:
            show_unknown: whether to say that device hours are unknown, and the remedy. In a first study they always
                are.
        """
        arms = f"{counted(self.recipes, 'recipe')}, {counted(self.seeds, 'seed')}"
        if self.members > self.recipes * self.seeds:  # trials of a search, whose recipes are not known yet
            lines = [f"{counted(self.members, 'trial')}, {self.steps} steps"]
        else:
            lines = [f"{counted(self.members, 'member')} ({arms}), {self.steps} steps"]
        if self.left < self.steps:
            lines[0] += f", of which {self.left} are left"
        if self.left == 0 and not show_unknown:
            return lines
        if self.price is None:
            unknown = (
                "device hours: unknown, because no run here has taken a step; name an earlier study whose runs have"
            )
            return [*lines, f"{unknown} (launch.like=STUDY, or --like)"] if show_unknown else lines
        runs = counted(self.price.runs, "run")
        text = f"device hours: about {self.price.hours:.3g}, estimated from {runs} of {self.price.by}"
        if self.price.other_scale:
            text += f"; some members differ from these runs in {', '.join(self.price.other_scale)}"
        lines.append(text if self.money is None else f"{text}; price: {self.money:.4g}")
        return lines


def estimate_launch(
    specs: Sequence[RunSpec],
    directory: Path,
    like: str | None = None,
    rate: float | None = None,
    elsewhere: Collection[str] = (),
) -> Launch:
    """Return the size and estimated cost of a launch of these members.

    Args:
        specs: members to launch; duplicates (such as from `seed=0,0`) count once.
        directory: their study's folder, whose runs give the cost of a step unless `like` is given.
        like: folder of an earlier study or run that gives the cost of a step; None for `directory`.
        rate: price of one device hour; None to leave money out.
        elsewhere: identities of members that run or ran elsewhere, and cost nothing here.

    Raises:
        UserError: `like` has no run with device hours, or the rate is invalid.
    """
    if rate is not None and (isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 <= rate < 1e12):
        raise UserError(f"launch.rate: {rate!r} must be the money that a device hour costs, 0 or more")
    specs = list({spec.run: spec for spec in specs}.values())
    progress = cache(_progress)  # read each journal once, though two computations below need it
    # The first steps of a branch were taken by its parent.
    done = {spec.run: max(progress(directory / RUNS_DIR / spec.run).resume_step, spec.first_step) for spec in specs}
    left = {spec.run: max(spec.steps - done[spec.run], 0) for spec in specs}
    left |= {spec.run: 0 for spec in specs if left[spec.run] and final_reason(directory / RUNS_DIR / spec.run)}
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


def check_hours(launch: Launch, limit: object) -> None:
    """Refuse a launch that takes more than `limit` device hours; None means no limit.

    Raises:
        UserError: the launch takes more, its device hours are unknown, or the limit is not a number of hours.
    """
    if limit is None:
        return
    if isinstance(limit, bool) or not isinstance(limit, int | float) or not 0 < limit < float("inf"):
        raise UserError(f"launch.max_device_hours: {limit!r} must be a positive number of hours, or null")
    if launch.price is None:
        raise UserError(
            f"launch.max_device_hours: {limit:g}, but no run says what a step takes; name an earlier study of this "
            "scale with launch.like=STUDY, or launch one member with a small budget.steps first"
        )
    if launch.price.hours > limit:
        raise UserError(
            f"launch.max_device_hours: {limit:g}, and {launch.left} steps take about {launch.price.hours:.3g} by "
            f"{launch.price.by}; launch fewer members or steps, or raise the limit"
        )


@dataclass(frozen=True, eq=False)
class _Rates:
    """Device hours per step of the runs in `folder`, by scale (as JSON, see `_scale`) and recipe; and all scales."""

    folder: str
    rates: Mapping[tuple[str, str], Sequence[float]]
    scales: Sequence[Mapping[str, str]]

    @classmethod
    def read(cls, folder: Path, progress: Callable[[Path], _Progress]) -> _Rates | None:
        """Read the runs in a folder; None if no run has taken a step. `progress` is `_progress`, perhaps cached."""
        rates: dict[tuple[str, str], list[float]] = defaultdict(list)
        scales: dict[str, Mapping[str, str]] = {}
        for run_dir in find_runs(folder):
            recipe, step, hours, _ = progress(run_dir)
            if not step or not hours:
                continue
            scale = _scale(_configuration(run_dir))
            key = json.dumps(scale)
            scales[key] = scale
            rates[key, recipe].append(hours / step)
        return cls(str(folder), rates, list(scales.values())) if rates else None

    def price(self, specs: Sequence[RunSpec], left: Mapping[str, int]) -> Price:
        """Estimate the device hours of the remaining steps, `left` by member.

        A member's rate is the median over the runs of the same recipe and scale. If there are none, it is the median
        over the runs of the same scale; if there are none either, over all runs.
        """
        hours, differing_groups = 0.0, set()
        for spec in specs:
            scale = _scale(spec.config)
            key = json.dumps(scale)
            same_scale = [rates for (scale_key, _), rates in self.rates.items() if scale_key == key]
            if not same_scale:
                nearest: list[str] = min((_differing_groups(scale, other) for other in self.scales), key=len)
                differing_groups |= set(nearest)
            rates = self.rates.get((key, spec.recipe)) or chain.from_iterable(same_scale or self.rates.values())
            hours += left[spec.run] * median(rates)
        runs = sum(map(len, self.rates.values()))
        return Price(hours, self.folder, runs, tuple(name for name in SCALE if name in differing_groups))


def _scale(config: Mapping[str, Any]) -> dict[str, str]:
    return {name: json.dumps(config[name], sort_keys=True, default=str) for name in SCALE if name in config}


def _differing_groups(first: Mapping[str, str], second: Mapping[str, str]) -> list[str]:
    return [name for name in SCALE if first.get(name) != second.get(name)]


def _configuration(run_dir: Path) -> Mapping[str, Any]:
    """Return the configuration of a run; empty if it has no specification that this version can read."""
    try:
        return RunSpec.read(run_dir).config
    except UserError:  # the run of a script, or of another version
        return {}


class _Progress(NamedTuple):
    """Progress of a run: recipe, last step, device hours up to that step, and the step from which it would resume."""

    recipe: str = ""
    step: int = 0
    hours: float | None = None
    resume_step: int = 0


def _progress(run_dir: Path) -> _Progress:
    """Return a run's progress; the defaults of `_Progress` if the journal cannot be read."""
    view = journal_or_none(run_dir)
    if view is None:
        return _Progress()
    last = max(view.records, key=lambda record: record.step, default=None)
    step = 0 if last is None else last.step
    # Hours are cumulative. Both the train and the eval record of a step have them: take the larger, which is newer.
    values = [finite(record.metrics.get(DEVICE_HOURS)) for record in view.records if record.step == step]
    hours = max((value for value in values if value is not None), default=None)
    return _Progress(str(view.header.get("recipe", "")), step, hours, _resume_step(run_dir, view, step))


def _resume_step(run_dir: Path, view: JournalView, last_step: int) -> int:
    """Return the step from which a run resumes: its last if it has finished, else that of its newest checkpoint."""
    if view.status == "finished":
        return last_step
    covered = view.checkpoint_step or 0
    if view.attempts:  # the run is another trainer's command, whose checkpoints may be in any place
        return covered
    steps = map(step_of, checkpoints(run_dir / CHECKPOINTS_DIR))
    return max((step for step in steps if step <= covered), default=0)
