"""Training step of a run, top to bottom.

prompts -> generator -> length control -> reward                       (rollout_stream, virtual_driver)
        -> filter -> advantage, normalization -> truncated -> TrainBatch               (credit)
        -> passes before the update -> credit a token                                  (update.before, token_credit)
        -> trainer logprobs -> terms of the loss (per token) -> aggregation -> optimizer step   (here, update.terms)
        -> weights to the generator                                                    (virtual_driver)

With several ranks, rank 0 does what stands in other files and hands the batch to all; each trains on its rows of
it, and their gradients add up to the batch's (distributed).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_scalerl.callbacks.evaluate import Evaluate, evaluation_of
from lightning_scalerl.callbacks.trainer import count_from
from lightning_scalerl.lifecycle import Lifecycle
from lightning_scalerl.measure.probe import check_probe, logprob_gaps, probe_metrics
from lightning_scalerl.measure.step_metrics import Pass, step_metrics
from lightning_scalerl.rollout import Part, Scored, TrainBatch, whole
from lightning_scalerl.update.before import scored_before
from lightning_scalerl.update.health import at_the_limit
from lightning_scalerl.update.token_credit import token_credit


class ScaleRL(Lifecycle):
    """RL post-training with verifiable rewards; every design choice is a callback.

    The recipe supplies a choice for each axis that no callback of the Trainer claims. With several ranks only rank 0
    (`ranks.leads`) has `generator`, `prompts`, `mechanism` and `alarm`, and only its records are made.

    `Trainer.fit` again, with a larger `max_steps`, goes on from where the last one ended. `Trainer.validate` evaluates.

    Args:
        model: a local folder or hub id of a causal language model, or the model itself.
        recipe: a name in `conf/recipe/`, or a built recipe.
        overrides: Hydra overrides of a named recipe, such as "optimizer.lr=1e-3".
        config_dir: a folder of yours where recipes and choices are looked for too (docs/guide/extend.md).
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
        """Take one training step: as many updates of the weights on one batch as axis `epochs` says."""
        batch = batch.to(self.device)
        optimizer = self.optimizers()
        with self.meter.phase("train"):
            rows = self._credited(self.ranks.rows(batch))
            batch = self.ranks.gather_rows(batch, rows)
            passes: list[Pass] = []
            for number in range(self.choices.epochs.count):
                # None, not zero: AdamW skips parameters without a gradient, so an empty batch moves nothing, not even
                # by momentum.
                optimizer.zero_grad(set_to_none=True)  # type: ignore[union-attr]
                done = self._backward(batch, rows)
                passes.append(done)
                if number == 0:
                    gaps = self._gaps(batch, done)
                if number + 1 < self.choices.epochs.count:
                    self.optimizers(use_pl_optimizer=False).step()  # type: ignore[union-attr]  # Lightning counts batches
            if self.ranks.leads and self.mechanism.axes:
                last, first = (whole(batch, each.parts)[0] for each in (passes[-1], passes[0]))
                self.mechanism.observe(batch, last, first)
            optimizer.step()  # type: ignore[union-attr]
            self.meter.trained(batch, self.choices.passes)
        self.stream.step_completed()
        recorded = self.record("train", lambda: {**self._step_metrics(batch, passes), **probe_metrics(gaps)})
        check_probe(recorded, self.choices.precision, self.completed_steps - 1)
        self.health.check(recorded, self.completed_steps)

    def _credited(self, rows: TrainBatch) -> TrainBatch:
        """Return the rows with per-token credit, after the forward passes before the first update."""
        size = self.recipe.batch.a_pass
        rows = scored_before(rows, self.choices, self.policy, self.reference, self.critic, size)
        return token_credit(rows, self.choices, self.ranks.sum, remember=True)

    def _backward(self, batch: TrainBatch, rows: TrainBatch) -> Pass:
        """Make one pass over the batch: gradients of all terms, summed over ranks, clipped, dropped if not finite."""
        parts: list[Part] = []
        totals = torch.zeros(len(self.terms), device=self.device)
        with self.ranks.unsynchronized():
            for micro_batch in rows.micro_batches(self.recipe.batch.a_pass):
                logprobs, entropies = self.policy(micro_batch, entropy_gradient=self.choices.entropy.acts)
                values = None if self.critic is None else self.critic(micro_batch)
                scored = Scored(micro_batch, logprobs, entropies, values)
                losses = torch.stack([term.reduce(scored) for term in self.terms])
                self.manual_backward(self.loss_scale.scaled(losses.sum()))
                totals += losses.detach()
                parts.append((micro_batch, logprobs.detach(), entropies.detach()))
        self.ranks.sum_gradients(self.parameters())
        totals = self.ranks.sum(totals)
        gathered = self.ranks.gather_parts(batch, parts)
        self.loss_scale.unscale(self.parameters())
        # Without a clip the bound is infinite: the norm is measured, and the gradient stays as it is.
        clip = math.inf if self.recipe.optimizer.clip_norm is None else self.recipe.optimizer.clip_norm
        norms = {"gradient_norm": nn.utils.clip_grad_norm_(self.policy.parameters(), clip)}
        if self.critic is not None:
            norms["value_gradient_norm"] = nn.utils.clip_grad_norm_(self.critic.parameters(), clip)
        finite = bool(torch.stack([totals.sum(), *norms.values()]).isfinite().all())
        self.skipped.observe(finite, self.loss_scale, self.completed_steps)
        if not finite:
            self.optimizers().zero_grad(set_to_none=True)  # type: ignore[union-attr]
        return Pass(gathered, {term.name: total for term, total in zip(self.terms, totals, strict=True)}, norms, finite)

    def _gaps(self, batch: TrainBatch, done: Pass) -> Tensor:
        """Return the gaps between trainer and generator before the first update, on rank 0."""
        if not self.ranks.leads or not done.finite:  # an update that is left out says nothing of the generator
            return torch.zeros(0)
        trainer_logprobs, _ = whole(batch, done.parts)
        asked = self.generator if self.driver.may_probe else None
        size = self.recipe.batch.a_pass
        return logprob_gaps(batch, trainer_logprobs, self.policy, self.completed_steps, size, asked, self._asking)

    @contextmanager
    def _asking(self) -> Iterator[None]:
        """Book the time of a probe of the generator under the driver's phase."""
        with self.meter.phase(self.driver.probe_phase), self.driver.asking():
            yield

    def _step_metrics(self, batch: TrainBatch, passes: Sequence[Pass]) -> dict[str, Any]:
        """Return the metrics of the step on `batch`, on rank 0."""
        metrics = step_metrics(batch, passes, self.choices, self.completed_steps - 1, self.stream.dropped_for_batch)
        clip = self.recipe.optimizer.clip_norm
        clipped = [clip is not None and float(each.norms["gradient_norm"]) > clip for each in passes]
        return {
            "train/learning_rate": self.optimizers().param_groups[0]["lr"],  # type: ignore[union-attr]
            "train/epoch": self.prompts.epoch,
            "train/prompts_retired": self.prompts.retired,
            **metrics,
            "train/gradient_clipped": sum(clipped) / len(clipped),
            **self.meter.reward_rate(sum(float(group.rewards.sum()) for group in batch.groups)),
            **self.stream.watch.metrics(),
            **self.skipped.metrics(),
            **({"train/loss_scale": self.loss_scale.factor} if self.loss_scale.acts else {}),
            **self.alarm.observe(at_the_limit(metrics), self.completed_steps),
            **self.mechanism.metrics(),
        }

    def validation_step(self, sets: list[str], batch_index: int) -> None:
        """Evaluate all held-out sets, for `Evaluate` in a fit or for `Trainer.validate`."""
        evaluation = evaluation_of(self.trainer)
        if evaluation is None:
            evaluation = Evaluate()
            evaluation.follow(self.recipe.evaluation)
        if self.trainer.state.fn == "fit":
            metrics = evaluation.measure(self)
            self.record("eval", lambda: metrics)
            return
        metrics = evaluation.measure(self, in_fit=False)
        count_from(self.trainer, self.completed_steps)
        several = self.ranks.count > 1
        self.log_dict(metrics, batch_size=1, sync_dist=several, rank_zero_only=several)

    def _set_learning_rate(self) -> None:
        factor = self.recipe.schedule.factor(self.completed_steps)
        for group, rate in zip(self.optimizers().param_groups, self.learning_rates, strict=True):  # type: ignore[union-attr]
            group["lr"] = rate * factor
