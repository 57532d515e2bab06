"""`scalerl noise MODEL TASK`: repeats one evaluation at fixed weights, to measure the error of a point on a curve."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer
from omegaconf import OmegaConf
from scipy import stats
from torch import Tensor

from lightning_scalerl.callbacks.checkpointing import newest_checkpoint
from lightning_scalerl.checks import CannotGoOnError, ConfigurationError
from lightning_scalerl.composition import build, build_recipe, compose, use_folders
from lightning_scalerl.data import RolloutDataModule
from lightning_scalerl.member.run import silence_libraries
from lightning_scalerl.member.trust import check_run
from lightning_scalerl.module import ScaleRL
from sweeps.errors import UserError
from sweeps.run.spec import SPEC_FILE, RunSpec


def measure_noise(model: str, overrides: Sequence[str], repeats: int, trust: bool = False) -> list[dict[str, Any]]:
    """Evaluate the same weights several times, each time with other random numbers.

    Args:
        model: folder of a run (its newest checkpoint is used), or folder or hub id of a model.
        overrides: for a model, overrides with at least a task; must be empty for a run.
        repeats: number of evaluations.
        trust: run any code that a run names, without the checks of `member.trust`.

    Returns:
        One row per held-out set: number of prompts and samples, mean pass rate, standard deviation over the repeats
        with its 95% interval (chi-squared; if all repeats agree, the upper end is `largest_error`), the standard error
        that single evaluations report, and the standard error due to the choice of prompts.

    Raises:
        UserError: the model cannot be evaluated; the error gives the reason.
    """
    if repeats < 2:
        raise UserError(f"--repeats {repeats}: at least 2, or there is nothing to compare")
    silence_libraries()
    try:
        config, weights = _config_and_checkpoint(model, overrides, trust)
        torch.set_num_threads(int(config.launch.threads))
        recipe = build_recipe(config, "noise")
        module = ScaleRL(model=build(config, "model"), recipe=recipe)
        evaluation = build(config, "evaluation")
        datamodule = RolloutDataModule(build(config, "task"))
        trainer = Trainer(
            logger=False, enable_progress_bar=False, enable_model_summary=False, callbacks=[evaluation],
            enable_checkpointing=False, devices=1,
        )  # fmt: skip
        repeats_by_set: dict[str, list[tuple[Tensor, float]]] = {}
        for repeat in range(repeats):
            evaluation.seed = evaluation.seed + bool(repeat)
            trainer.validate(module, datamodule, ckpt_path=weights, verbose=False, weights_only=True)
            weights = None  # the module has the weights after the first repeat
            for name, passes in evaluation.passes.items():
                counts = zip(passes.passed, passes.scored, strict=True)
                rates = torch.tensor([passed / scored for passed, scored in counts if scored], dtype=torch.float64)
                reported = float(trainer.callback_metrics.get(f"eval/{name}/pass_rate_se", 0.0))  # absent if greedy
                repeats_by_set.setdefault(name, []).append((rates, reported))
    except (ConfigurationError, CannotGoOnError) as error:
        raise UserError(str(error)) from error
    settings = evaluation.settings(datamodule.task)
    samples = {name: set_settings.samples or evaluation.samples for name, set_settings in settings.items()}
    return [_row(name, repeated, samples[name]) for name, repeated in repeats_by_set.items()]


def _config_and_checkpoint(model: str, overrides: Sequence[str], trust: bool) -> tuple[Any, str | None]:
    """Return the configuration, and the path of the checkpoint to evaluate (None for the model's own weights)."""
    if (Path(model) / SPEC_FILE).is_file():
        if overrides:
            raise UserError(
                f"{overrides[0]}: a run is evaluated as it was trained; to change that, give a model's folder"
            )
        spec = RunSpec.read(Path(model))
        if not trust:
            check_run(Path(model), spec)
        use_folders(spec.folders)
        weights = newest_checkpoint(Path(model) / "checkpoints", run=spec.run).path
        if weights is None:
            raise UserError(f"{model}: no checkpoint that can be read; train the run first")
        return OmegaConf.create(dict(spec.config)), str(weights)
    if not any(entry.startswith("task=") for entry in overrides):
        raise UserError(
            "task: say what is evaluated, such as: scalerl noise MODEL gsm8k scale=0.6b task.train=... task.heldout=..."
        )
    return compose(["model=path", f"model.path={model}", *overrides]), None


def _row(name: str, repeats: Sequence[tuple[Tensor, float]], samples: int) -> dict[str, Any]:
    """Return the row of one held-out set from the pass rates per prompt and reported errors of all repeats."""
    if len({rates.numel() for rates, _ in repeats}) > 1:
        raise UserError(f"{name}: its verifier graded other prompts from time to time; see scalerl rollouts for why")
    rates = torch.stack([repeat_rates for repeat_rates, _ in repeats])  # (repeats, prompts)
    count, prompts = rates.shape
    means = rates.mean(1)
    spread = float(means.std())
    low, high = (stats.chi2.ppf(share, count - 1) for share in (0.975, 0.025))
    pass_rate = float(means.mean())
    spread_high = spread * math.sqrt((count - 1) / high)
    # If all repeats agree, chi-squared gives the interval [0, 0], which is right for greedy decoding only. Compare with
    # 1e-12, because equal means may differ by rounding.
    if spread <= 1e-12 and any(reported for _, reported in repeats):
        spread_high = largest_error(pass_rate, prompts, samples, count)
    by_prompt = rates.mean(0)
    # Subtract the sampling variance of each prompt's mean, which the variance between prompts includes.
    sampling_variance = float((by_prompt * (1 - by_prompt)).mean()) / max(1, count * samples - 1)
    prompt_variance = max(0.0, float(by_prompt.var()) - sampling_variance) if prompts > 1 else 0.0
    return {
        "set": name,
        "prompts": prompts,
        "samples": samples,
        "pass_rate": pass_rate,
        "sampling_error": spread,
        "sampling_error_low": spread * math.sqrt((count - 1) / low),
        "sampling_error_high": spread_high,
        "foretold": math.sqrt(sum(reported**2 for _, reported in repeats) / count),
        "prompt_error": math.sqrt(prompt_variance / prompts),
    }


def largest_error(pass_rate: float, prompts: int, samples: int, repeats: int) -> float:
    """Return the largest sampling error of one evaluation that the pass rate over all repeats permits.

    The error is largest if every prompt has the same chance p of a pass: sqrt(p (1 - p) / (prompts * samples)). p is
    the value nearest to 1/2 in the exact 95% interval of the share of passes (Clopper and Pearson 1934).
    """
    total = repeats * prompts * samples
    passes = round(pass_rate * total)
    low = float(stats.beta.ppf(0.025, passes, total - passes + 1)) if passes else 0.0
    high = float(stats.beta.ppf(0.975, passes + 1, total - passes)) if passes < total else 1.0
    share = min(max(0.5, low), high)
    return math.sqrt(share * (1 - share) / (prompts * samples))
