"""Forecast of layouts by a run's overrides or by a live run, as `scalerl layouts` shows it: nothing is trained."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median

from omegaconf import DictConfig, OmegaConf

from lightning_scalerl.checks import ConfigurationError
from lightning_scalerl.composition import build_recipe, compose, use_folders
from lightning_scalerl.member.trust import check_run
from lightning_scalerl.recipe import Recipe
from lightning_scalerl.stream.cost_model import CostModel
from lightning_scalerl.stream.layouts import Layout, Measured, Workload, calibrated, splits
from sweeps.errors import UserError
from sweeps.run.journal import JournalView, read_journal
from sweeps.run.spec import RunSpec, layout_of

# Share of the steps of a run, from its start, that are not looked at: queues fill, lengths change.
WARM_UP = 0.25


def layouts_of(
    overrides: Sequence[str],
    run: Path | None,
    devices: int,
    tensor_parallel: Sequence[int] = (1,),
    tokens: float | None = None,
    trust: bool = False,
) -> tuple[list[Layout], CostModel, Workload]:
    """Return forecasts of splits, the one that wastes least first, with the rates and the work behind them.

    Args:
        overrides: of the run, as on the command line; its `cost_model` has the rates.
        run: folder of a live run in their place, whose busy times say what the rates come to on its devices.
        devices: number of devices to split.
        tensor_parallel: numbers of generator devices of an engine.
        tokens: mean length of a completion; None for the run's, or half of the limit without one.
        trust: read the run's configuration whatever code it names, see `member.trust`.

    Raises:
        UserError: overrides that do not compose, devices that cannot be split so, or a run that has measured nothing.
    """
    try:
        if run is None:
            recipe = build_recipe(config := compose(overrides), "")
            workload = _workload(recipe, config, tokens or recipe.context.max_new_tokens / 2)
            return _splits(workload, recipe.cost_model, devices, tensor_parallel)
        spec = RunSpec.read(run)
        if not trust:
            check_run(run, spec)
        use_folders(spec.folders)
        recipe = build_recipe(config := OmegaConf.create(dict(spec.config)), "")
        view = read_journal(run)
        workload = _workload(recipe, config, tokens or _mean(view, "train/completion_tokens"))
        ranks = int(view.header.get("ranks", 1))
        own = cost_model_of(recipe, config, view, ranks)
        return _splits(workload, calibrated(workload, own, measured(view)), devices, tensor_parallel)
    except ConfigurationError as error:
        raise UserError(str(error)) from error


def _splits(
    workload: Workload, rates: CostModel, devices: int, tensor_parallel: Sequence[int]
) -> tuple[list[Layout], CostModel, Workload]:
    found = splits(workload, rates, devices, tensor_parallel)
    if not found:
        raise UserError(
            f"--devices: {devices} cannot be split between a trainer and engines of "
            f"{', '.join(map(str, tensor_parallel))} devices; give more, or a smaller --tensor-parallel"
        )
    return found, rates, workload


def _workload(recipe: Recipe, config: DictConfig, completion_tokens: float) -> Workload:
    return Workload(
        recipe.choices,
        recipe.batch.prompts,
        recipe.batch.completions,
        int(config.generator.get("slots") or 256),
        # Prompts are seldom as long as they may be.
        recipe.context.max_prompt_tokens / 2,
        completion_tokens,
        recipe.context.max_new_tokens,
    )


def measured(view: JournalView) -> Measured:
    """Return what a live run has measured: the mean step, both idle shares, the pause of a publish.

    Raises:
        UserError: it was not live, or has ended too soon.
    """
    trained = [record for record in view.records if record.kind == "train"]
    last = trained[-1].metrics if trained else {}
    # Between two steps with nothing else between them, such as an evaluation.
    pairs = zip(view.records, view.records[1:], strict=False)
    took = [two.time - one.time for one, two in pairs if one.kind == two.kind == "train" and two.step == one.step + 1]
    late = took[int(WARM_UP * len(took)) :]
    if "live/trainer_idle" not in last or len(late) < 3:
        raise UserError(f"{view.path}: no live run of some steps; train it with driver=live")
    return Measured(
        fmean(late), last["live/trainer_idle"], last["live/generator_idle"], median(_all(view, "live/publish_s"))
    )


def cost_model_of(recipe: Recipe, config: DictConfig, view: JournalView, ranks: int) -> CostModel:
    """Return a run's cost model with the devices that it really had: its ranks, and its engines."""
    last = next(record.metrics for record in reversed(view.records) if record.kind == "train")
    engines = sum(re.fullmatch(r"live/engine\d+_idle", key) is not None for key in last)
    if not engines:
        raise UserError(f"{view.path}: its engines are not known; train it with driver=live")
    return replace(
        recipe.cost_model,
        generator_devices=engines * recipe.cost_model.tensor_parallel,
        trainer_devices=max(ranks, *(layout_of(config) or (1,))),
        colocated=False,
    )


def _all(view: JournalView, name: str) -> list[float]:
    return [record.metrics[name] for record in view.records if record.kind == "train" and name in record.metrics]


def _mean(view: JournalView, name: str) -> float:
    values = _all(view, name)
    if not values:
        raise UserError(f"{view.path}: no training steps yet")
    return fmean(values[int(WARM_UP * len(values)) :])
