"""Measure by precision how far trainer and generator differ with equal weights: the source of `Precision.probe_bounds`.

python benchmarks/precision_gap.py [--steps 25]
"""

from __future__ import annotations

import argparse
import logging
import warnings
from collections.abc import Mapping

from lightning.pytorch import Trainer

from lightning_scalerl import RolloutDataModule, ScaleRL, arithmetic_base_model
from lightning_scalerl.axes.async_mode import OnPolicy, Pipeline
from lightning_scalerl.axes.choice import DesignChoice
from lightning_scalerl.axes.precision import Precision
from lightning_scalerl.callbacks import Recorder
from lightning_scalerl.measure.probe import MEAN, P99

CASES: dict[str, list[DesignChoice]] = {
    "fp32, on policy": [Precision("fp32"), OnPolicy()],
    "bf16, head in fp32, on policy": [Precision(), OnPolicy()],
    "bf16, head in bf16, on policy": [Precision("bf16", False, False), OnPolicy()],
    "bf16, head in fp32, pipeline": [Precision(), Pipeline()],
}


class Largest(Recorder):
    """Records the largest gaps of a run, and the number of steps in which a gap was measured."""

    def __init__(self) -> None:
        self.steps = 0
        self.mean = self.p99 = 0.0

    def on_record(self, kind: str, step: int, metrics: Mapping[str, float]) -> None:
        """Update the maxima with one record."""
        if P99 in metrics:
            self.steps += 1
            self.mean, self.p99 = max(self.mean, metrics[MEAN]), max(self.p99, metrics[P99])


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=25)
    steps = parser.parse_args().steps
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    print(f"{'precision':32} {'steps':>7} {'mean':>9} {'p99':>9}")
    for name, choices in CASES.items():
        largest = Largest()
        trainer = Trainer(
            max_steps=steps,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[*choices, largest],
        )
        trainer.fit(ScaleRL(arithmetic_base_model()), datamodule=RolloutDataModule("arithmetic"))
        print(f"{name:32} {largest.steps:>3}/{steps:<3} {largest.mean:9.2g} {largest.p99:9.2g}", flush=True)


if __name__ == "__main__":
    main()
