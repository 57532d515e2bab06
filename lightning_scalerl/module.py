"""The path of one training step, top to bottom.

prompts -> generator -> length control -> reward                       (rollout_stream, virtual_driver)
        -> filter -> advantage, normalization -> truncated -> TrainBatch               (credit)
        -> trainer logprobs -> loss (per token) -> aggregation -> optimizer step       (here)
        -> weights to the generator                                                    (virtual_driver)

With several ranks, rank 0 does what stands in other files and hands the batch to all; each trains on its rows of
it, and their gradients add up to the batch's (distributed).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from lightning_scalerl.callbacks.evaluate import Evaluate, evaluation_of
from lightning_scalerl.callbacks.trainer import count_from
from lightning_scalerl.lifecycle import Lifecycle
from lightning_scalerl.measure.probe import check_probe, logprob_gaps, probe_metrics
from lightning_scalerl.measure.step_metrics import step_metrics
from lightning_scalerl.rollout import Part, TrainBatch, whole


class ScaleRL(Lifecycle):
    """RL post-training with verifiable rewards; every design choice is a callback.

    The recipe supplies a choice for each axis that no callback of the Trainer claims. With several ranks only rank 0
    (`ranks.leads`) has `generator`, `prompts`, `mechanism` and `alarm`, and only its records are made.

    `Trainer.fit` again, with a larger `max_steps`, goes on from where the last one ended. `Trainer.validate` evaluates.

    Args:
        model: a local folder or hub id of a causal language model, or the model itself.
        recipe: a name in `conf/recipe/`, or a built recipe.
        overrides: Hydra overrides of a named recipe, such as "optimizer.lr=1e-3".
        config_dir: a folder of yours where recipes and choices are looked for too (docs/extend.md).
        tokenizer: needed if `model` is not a path.

    Raises:
        ConfigurationError: an unknown recipe, key or value, a model that cannot be loaded, or settings that were made
            for another one.
    """

    def next_batch(self) -> TrainBatch:
        """Generate until a batch is due: on rank 0, for all."""
        # Before the step begins, so that whoever looks at its beginning (LearningRateMonitor) sees its own rate.
        self._set_learning_rate()
        with self.meter.phase("generate"):
            batch = self.ranks.share_batch(lambda: self.driver.next_batch(lambda: self.stop_reason is not None))
        return batch if batch is not None else self._stop_between_steps()

    def training_step(self, batch: TrainBatch, batch_index: int) -> None:
        """One optimizer step."""
        batch = batch.to(self.device)
        optimizer = self.optimizers()
        with self.meter.phase("train"):
            # To nothing, not to zero: without a gradient a batch that keeps nothing moves nothing, momentum included.
            optimizer.zero_grad(set_to_none=True)  # type: ignore[union-attr]
            total = torch.zeros((), device=self.device)
            own_parts: list[Part] = []
            with self.ranks.unsynchronized():
                for micro_batch in self.ranks.rows(batch).micro_batches(self.recipe.batch.micro_batch):
                    trainer_logprobs, entropies = self.policy(micro_batch)
                    anchor_logprobs = self.choices.correction.anchor(micro_batch)
                    per_token_loss = self.choices.loss.per_token(
                        trainer_logprobs, anchor_logprobs, micro_batch.advantages, micro_batch.loss_mask
                    )
                    for own in self.choices.own.values():
                        per_token_loss = own.adjust_loss(per_token_loss, micro_batch, trainer_logprobs)
                    loss = self.choices.aggregation.reduce(per_token_loss, micro_batch, batch.denominators)
                    self.manual_backward(loss)
                    total += loss.detach()
                    own_parts.append((micro_batch, trainer_logprobs.detach(), entropies))
            self.ranks.sum_gradients(self.policy.parameters())
            total = self.ranks.sum(total)
            parts = self.ranks.gather_parts(batch, own_parts)
            gradient_norm = nn.utils.clip_grad_norm_(self.policy.parameters(), self.recipe.optimizer.clip_norm)
            gaps = torch.zeros(0)
            if self.ranks.leads:
                trainer_logprobs, _ = whole(batch, parts)
                size = self.recipe.batch.micro_batch
                asked = self.generator if self.driver.may_probe else None
                gaps = logprob_gaps(batch, trainer_logprobs, self.policy, self.completed_steps, size, asked)
                if self.mechanism.axes:
                    self.mechanism.observe(batch, trainer_logprobs)
            optimizer.step()  # type: ignore[union-attr]
            self.meter.trained(batch)
        self.stream.step_completed()
        optimized = {
            "train/loss": total,
            "train/gradient_norm": gradient_norm,
            "train/learning_rate": optimizer.param_groups[0]["lr"],  # type: ignore[union-attr]
        }
        recorded = self.record(
            "train", lambda: {**optimized, **self._step_metrics(batch, parts), **probe_metrics(gaps)}
        )
        check_probe(recorded, self.choices.precision)

    def _step_metrics(self, batch: TrainBatch, parts: Sequence[Part]) -> dict[str, Any]:
        """What the step on `batch` looked like, on rank 0."""
        metrics = step_metrics(batch, parts, self.choices, self.completed_steps - 1)
        return {
            "train/epoch": self.prompts.epoch,
            "train/prompts_retired": self.prompts.retired,
            **metrics,
            **self.alarm.observe(metrics["train/truncated"], self.completed_steps),
            **self.mechanism.metrics(),
        }

    def validation_step(self, sets: list[str], batch_index: int) -> None:
        """Evaluate all held-out sets: `Evaluate`'s own time in a fit, at once for `Trainer.validate`."""
        evaluation = evaluation_of(self.trainer) or Evaluate()
        if self.trainer.state.fn == "fit":
            metrics = evaluation.measure(self)
            self.record("eval", lambda: metrics)
            return
        metrics = evaluation.measure(self, in_fit=False)
        count_from(self.trainer, self.completed_steps)
        several = self.ranks.count > 1
        self.log_dict(metrics, batch_size=1, sync_dist=several, rank_zero_only=several)

    def _set_learning_rate(self) -> None:
        rate = self.recipe.optimizer.lr * self.recipe.schedule.factor(self.completed_steps)
        for group in self.optimizers().param_groups:  # type: ignore[union-attr]
            group["lr"] = rate
