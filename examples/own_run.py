"""A run in a user's script, with three loggers, Lightning's callbacks, and the user's own task and loss.

python examples/own_run.py [--steps 40] [--output outputs/own_run]

Needs the package wandb (`pip install wandb`), which is used offline; `wandb sync` uploads its records. A second call
with more `--steps` continues where the first one ended.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, MLFlowLogger, WandbLogger
from torch import Tensor

from lightning_scalerl import (
    Evaluate,
    Prompt,
    ResumableCheckpoint,
    RolloutDataModule,
    RunLog,
    ScaleRL,
    Task,
    arithmetic_base_model,
)
from lightning_scalerl.axes.loss import Loss, importance_ratio
from lightning_scalerl.callbacks.checkpointing import newest_checkpoint
from lightning_scalerl.task.arithmetic import ArithmeticTask

RATE = "eval/heldout/pass_rate"


class AnswerOnly(Task):
    """Additions of which only the answer after `#` is checked, not the reasoning before it."""

    def __init__(self) -> None:
        self._problems = ArithmeticTask(train=[80, 400, 400], heldout=[10, 30, 30], seed=7)

    def train_prompts(self) -> Sequence[Prompt]:
        """Return the pool of training prompts."""
        return self._problems.train_prompts()

    def eval_sets(self) -> Mapping[str, Sequence[Prompt]]:
        """Return one held-out set, `heldout`."""
        return self._problems.eval_sets()

    def reward(self, prompt: Prompt, completion: str) -> float:
        """Return 1 for the right answer, independent of the text before it."""
        return float(completion.rpartition("#")[2] == prompt.answer.rpartition("#")[2])


class PatientCISPO(Loss):
    """CISPO with smaller penalties: negative advantages are multiplied by `blame`."""

    def __init__(self, max_ratio: float = 5.0, blame: float = 0.5) -> None:
        self.max_ratio = max_ratio
        self.blame = blame

    def per_token(self, trainer_logprobs: Tensor, anchor_logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
        """Return the loss per token; all shapes are (R, T)."""
        weight = importance_ratio(trainer_logprobs, anchor_logprobs).detach().clamp(max=self.max_ratio)
        return -weight * advantages.where(advantages > 0, self.blame * advantages) * trainer_logprobs

    def clipped(self, trainer_logprobs: Tensor, anchor_logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
        """Return where the ratio was clipped."""
        return importance_ratio(trainer_logprobs, anchor_logprobs) > self.max_ratio


def main(arguments: Sequence[str] | None = None) -> Trainer:
    """Train, and print the final and the best pass rate."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--output", type=Path, default=Path("outputs/own_run"))
    parser.add_argument("--batches", type=int, default=1000, help="warm-up of the base model, which is made once")
    options = parser.parse_args(arguments)
    output: Path = options.output.resolve()
    output.mkdir(parents=True, exist_ok=True)
    seed_everything(0)

    loggers = [
        CSVLogger(str(output), name="csv"),
        MLFlowLogger("own_run", tracking_uri=f"sqlite:///{output}/mlflow.db", artifact_location=str(output / "mlflow")),
        WandbLogger("own_run", save_dir=str(output), project="lightning-scalerl", offline=True),
    ]
    newest = newest_checkpoint(output / "checkpoints")
    best = ModelCheckpoint(output / "best", filename="{step}", monitor=RATE, mode="max")
    callbacks: list[Any] = [
        PatientCISPO(),
        Evaluate(every_n_steps=5, samples=2),
        RunLog(output, passed_over=newest.passed_over),
        EarlyStopping(RATE, mode="max", patience=10),
        LearningRateMonitor(),
        best,
        ResumableCheckpoint(output / "checkpoints", every_n_steps=10),
    ]
    module = ScaleRL(arithmetic_base_model(batches=options.batches), recipe="scalerl", overrides=["batch.prompts=8"])
    trainer = Trainer(max_steps=options.steps, accelerator="cpu", logger=loggers, callbacks=callbacks)
    trainer.fit(module, datamodule=RolloutDataModule(AnswerOnly()), ckpt_path=newest.path, weights_only=True)
    print(f"pass rate {float(trainer.callback_metrics[RATE]):.3f} after {module.completed_steps} steps")
    print(f"best: {float(best.best_model_score or 0):.3f} in {best.best_model_path}")
    return trainer


if __name__ == "__main__":
    main()
