"""Logs of Lightning's CSVLogger are read as runs. Not in tests/sweeps, because tests there never import torch."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from lightning.pytorch.loggers import CSVLogger

from sweeps.source import load
from sweeps.source.collected import LoadedStudy


def points(study: LoadedStudy) -> dict[tuple[str, str], list[tuple[float, float]]]:
    """Compute and reward of each recipe and seed."""
    return {
        (curve.recipe, str(seed)): [
            (float(x), round(float(y), 6))
            for curve_seed, x, y in zip(curve.seed, curve.compute, curve.reward, strict=True)
            if curve_seed == seed
        ]
        for curve in study.curves
        for seed in dict.fromkeys(curve.seed)
    }


def csv_logs(folder: Path, *axes: str, seeds: int = 2) -> Path:
    """Log what one of our runs logs."""
    for seed in range(seeds):
        logger = CSVLogger(str(folder), name="mine")
        logger.log_hyperparams({"seed": seed, "recipe": "scalerl", "batch": {"prompts": 2}})
        for step in range(5):
            compute = {name: float(step * (number + 1)) for number, name in enumerate(axes)}
            logger.log_metrics({"eval/heldout/pass_rate": 0.1 * step + seed / 100, **compute}, step)
            logger.log_metrics({"train/reward": 0.5}, step)
        logger.save()
    return folder


@pytest.mark.parametrize(
    ("axes", "chosen"),
    [
        (("compute/flops", "compute/device_hours", "compute/virtual_device_hours"), "compute/virtual_device_hours"),
        (("compute/flops", "compute/device_hours"), "compute/device_hours"),
    ],
)
def test_logs_of_the_csv_logger_are_read_as_runs(axes: tuple[str, ...], chosen: str, tmp_path: Path) -> None:
    study = load([csv_logs(tmp_path, *axes)])
    (curve,) = study.curves
    assert curve.axis == chosen and curve.metric == "eval/heldout/pass_rate"
    times = axes.index(chosen) + 1
    assert points(study) == {
        ("scalerl", str(seed)): [(float(step * times), round(0.1 * step + seed / 100, 6)) for step in range(5)]
        for seed in (0, 1)
    }
    assert all("our default: virtual device hours, else device hours" in line for line in study.shown)
    (other,) = load([tmp_path], x="compute/flops").curves
    assert other.axis == "compute/flops"


def test_without_hyper_parameters_the_log_is_read_as_a_plain_table(tmp_path: Path) -> None:
    csv_logs(tmp_path, "compute/flops", seeds=1)
    (path,) = tmp_path.rglob("metrics.csv")
    shutil.copy(path, tmp_path / "metrics.csv")
    assert not any("CSVLogger" in line for line in load([tmp_path / "metrics.csv"]).mapping)
