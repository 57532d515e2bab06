"""Golden curves: a refactoring must not change these numbers.

python tests/golden/test_golden.py     rewrites them after an intended change
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
COLUMNS = ("train/loss", "train/reward", "train/gradient_norm", "train/entropy", "compute/flops")
STEPS = 8


def curves() -> dict[str, Any]:
    """Return the callbacks of each stored curve, by file name."""
    from lightning_scalerl.axes.aggregation import TokenAggregation
    from lightning_scalerl.axes.async_mode import OnPolicy
    from lightning_scalerl.axes.loss import DAPO

    return {
        "scalerl_core": [],
        "dapo_token_on_policy": [DAPO(clip_low=0.2, clip_high=0.26), TokenAggregation(), OnPolicy()],
    }


def run(model_path: str, run_dir: Path, callbacks: list[Any]) -> list[list[float]]:
    """Return the curve: one row per step, with the step first."""
    from sweeps.run.journal import read_journal
    from tests.helpers import fit

    # The stored curves are from before the recipe's rewards of -1 and 1.
    fit(model_path, run_dir, steps=STEPS, callbacks=callbacks, overrides=["reward=zero_one"])
    return [[r.step, *(r.metrics[name] for name in COLUMNS)] for r in read_journal(run_dir).of_kind("train")]


@pytest.mark.parametrize("name", ["scalerl_core", "dapo_token_on_policy"])
def test_golden_curve(name: str, tiny_model_path: str, tmp_path: Path) -> None:
    stored = [list(map(float, line.split())) for line in (HERE / f"{name}.txt").read_text().splitlines()[1:]]
    measured = run(tiny_model_path, tmp_path, curves()[name])
    assert len(stored) == len(measured) == STEPS
    # Processors round differently; a changed formula moves these by far more.
    for expected, actual in zip(stored, measured, strict=True):
        assert actual == pytest.approx(expected, rel=1e-3, abs=1e-5)


def main() -> None:
    """Rewrite the stored curves."""
    from lightning_scalerl.task.arithmetic_base import new_model, tokenizer

    with tempfile.TemporaryDirectory() as scratch:
        model = Path(scratch) / "tiny"
        new_model(width=32, layers=2, seed=3).save_pretrained(model)
        tokenizer().save_pretrained(model)
        for name, callbacks in curves().items():
            rows = run(str(model), Path(scratch) / name, callbacks)
            lines = [" ".join(("step", *COLUMNS))]
            lines += [" ".join([str(int(row[0])), *(f"{value:.8g}" for value in row[1:])]) for row in rows]
            (HERE / f"{name}.txt").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    sys.path.insert(0, str(HERE.parent.parent))
    main()
