"""Training step of a run, top to bottom.

prompts -> generator -> length control -> reward                       (rollout_stream, virtual_driver)
        -> filter -> advantage, normalization -> truncated -> TrainBatch               (credit)
        -> passes before the update -> per-token credit                                (update.before, token_credit)
        -> trainer logprobs -> terms of the loss (per token) -> aggregation -> optimizer step   (here, update.terms)
        -> weights to the generator                                                    (virtual_driver)

With several ranks, rank 0 does the parts that are in other files and shares the batch. Each rank trains on its rows of
the batch, and their gradients add up to the batch's gradient (`distributed`).

Everything else that a run under Lightning's Trainer needs (set-up, data path, checkpoints, records) is in `session`.
Lightning's hooks are at the end of the class and call it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import torch
from lightning.pytorch import Callback, LightningModule
from torch import nn

from lightning_scalerl.callbacks.base import without_tips
from lightning_scalerl.callbacks.predict import Prediction, predicted
from lightning_scalerl.callbacks.trainer import warn_of_pytorch_lightning
from lightning_scalerl.distributed.checkpoint_folder import is_folder
from lightning_scalerl.distributed.ranks import Follower, Ranks
from lightning_scalerl.distributed.sharded import whole_tensor
from lightning_scalerl.generator.base import Generator
from lightning_scalerl.measure.compute_meter import ComputeMeter
from lightning_scalerl.measure.mechanism import MechanismCounters
from lightning_scalerl.measure.probe import check_probe, probe_metrics
from lightning_scalerl.measure.step_metrics import Pass
from lightning_scalerl.measure.truncation_alarm import TruncationAlarm
from lightning_scalerl.model.files import WeightFiles
from lightning_scalerl.model.load import load_model
from lightning_scalerl.model.policy import Policy
from lightning_scalerl.model.value import ValueModel
from lightning_scalerl.recipe import Recipe
from lightning_scalerl.rollouts.grade import Sample
from lightning_scalerl.rollouts.prompt import Prompt
from lightning_scalerl.rollouts.rollout import Part, Rollout, Scored, TrainBatch
from lightning_scalerl.session.checkpoint_state import from_folder, load_state, save_state
from lightning_scalerl.session.continuation import Continuation
from lightning_scalerl.session.data_path import DataPath
from lightning_scalerl.session.export import export
from lightning_scalerl.session.fit import (
    batch_or_why_none,
    begin_fit,
    begin_training,
    close_engines,
    end_exhausted,
    end_fit,
    fail,
    lines_at_start,
    stop_between_steps,
    validate,
)
from lightning_scalerl.session.models import Reference, make
from lightning_scalerl.session.placement import shard_models
from lightning_scalerl.session.records import Records
from lightning_scalerl.session.sampling import Sampling
from lightning_scalerl.session.setup import build_optimizer, set_learning_rates, set_up, supplied_choices
from lightning_scalerl.session.step import count_mechanisms, generator_gaps, metrics_of
from lightning_scalerl.stream.drivers import Driver
from lightning_scalerl.stream.prompts import PromptSet, PromptSource
from lightning_scalerl.stream.rollout_stream import RolloutStream
from lightning_scalerl.task.base import Task
from lightning_scalerl.update.before import scored_before
from lightning_scalerl.update.health import HealthWatch
from lightning_scalerl.update.loss_scale import LossScale, SkippedUpdates
from lightning_scalerl.update.terms import Term
from lightning_scalerl.update.token_credit import token_credit
from lightning_scalerl.update.trained import TrainedPolicy
from lightning_scalerl.verify.verification import Verifiers
from sweeps.run.interruption import interruption


class ScaleRL(LightningModule):
    """RL post-training with verifiable rewards, in which every design choice is a callback.

    The module holds the models, the recipe and the state that `session` sets up for a run. The recipe supplies a choice
    for each axis that no callback of the Trainer covers. With several ranks only rank 0 (`ranks.leads`) has
    `generator`, `prompts`, `mechanism` and `alarm`, and only rank 0 writes records.

    Calling `Trainer.fit` again with a larger `max_steps` continues the run. `Trainer.validate` evaluates.

    Args:
        model: a local folder or hub id of a causal language model, or the model itself.
        recipe: a name in `conf/recipe/`, or a built recipe.
        overrides: Hydra overrides of a named recipe, such as "optimizer.lr=1e-3".
        config_dir: your own folder, in which recipes and choices are looked up as well (docs/guide/extend.md).
        tokenizer: needed if `model` is not a path.
        streamed: do not read the model's weights until `Trainer(strategy="fsdp2")` shards it. Each rank then reads only
            its own part. If the model does not allow that, it is loaded at once.

    Raises:
        ConfigurationError: a recipe, key or value is unknown, the model cannot be loaded, or the settings were made for
            another model.
    """

    # Set by `setup`, on rank 0 only, except the stream: other ranks have a substitute that counts the steps.
    stream: RolloutStream
    sampling: Sampling
    prompts: PromptSource
    generator: Generator
    driver: Driver
    mechanism: MechanismCounters
    alarm: TruncationAlarm
    # Set by `setup`, on every rank.
    meter: ComputeMeter
    sigterm_handler: Any

    def __init__(
        self,
        model: str | nn.Module | None = None,
        recipe: str | Recipe | None = "scalerl",
        overrides: Sequence[str] = (),
        tokenizer: Any = None,
        config_dir: str | Path | None = None,
        streamed: bool = False,
    ) -> None:
        super().__init__()
        without_tips()
        warn_of_pytorch_lightning()
        self.automatic_optimization = False
        made = make(model, recipe, overrides, tokenizer, config_dir, streamed)
        self.recipe, self.tokenizer, self.stop_tokens = made.recipe, made.tokenizer, made.stop_tokens
        self.arguments = made.arguments
        # Models that are trained and saved. The reference model is neither, so it is hidden from `nn.Module`.
        self.policy = made.policy
        self.critic: ValueModel | None = None
        # The files of a policy whose weights are not read yet, or the reason why each rank reads the whole model.
        self.files = made.files if isinstance(made.files, WeightFiles) else None
        self.read_whole = made.files if isinstance(made.files, str) else None
        self.reference_model = Reference(made.arguments.get("model"), self.files)
        # Set anew by `setup` for every fit.
        self.choices = made.recipe.choices
        self.ranks = Ranks()
        self.trained = TrainedPolicy(self.policy, lambda: self.ranks, lambda: load_model(made.arguments["model"]))
        self.stream = Follower()  # type: ignore[assignment]  # no step is completed yet
        self.memory = ""  # a line on the fit's use of device memory
        self.data_path: DataPath | None = None
        self.terms: list[Term] = []
        self.loss_scale = LossScale(acts=False)
        self.skipped = SkippedUpdates()
        self.health = HealthWatch(self.recipe.health, self.recipe.reward.incorrect)
        self.optimizer: torch.optim.Optimizer | None = None
        # Kept from one fit to the next.
        self.continuation = Continuation()
        self.records = Records()
        self.exhausted: str | None = None
        self.save_hyperparameters(self.arguments)

    # --- the path of one training step -------------------------------------------------------------------

    def next_batch(self) -> TrainBatch | None:
        """Generate on rank 0 until a batch is ready for all ranks. Without prompts left, return None to end the fit."""
        # Set the rates before the step starts: callbacks such as LearningRateMonitor read them at its start.
        set_learning_rates(self)
        with self.meter.phase("generate"):
            batch = self.ranks.share_batch(lambda: batch_or_why_none(self))
        if isinstance(batch, str):
            end_exhausted(self, batch)
            return None
        return batch if batch is not None else stop_between_steps(self)

    def training_step(self, batch: TrainBatch, batch_index: int) -> None:
        """Take one training step on a batch, with one update per pass of axis `epochs`."""
        batch = replace(batch.to(self.device), packed=self.policy.packs)
        optimizer = self.optimizers()
        with self.meter.phase("train"):
            rows = self._credited(self.ranks.rows(batch, self.recipe.batch.a_pass))
            batch = self.ranks.gather_rows(batch, rows)
            passes: list[Pass] = []
            for number in range(self.choices.epochs.count):
                # None, not zero: AdamW skips parameters without a gradient, so after an empty batch not even momentum
                # moves the weights.
                optimizer.zero_grad(set_to_none=True)  # type: ignore[union-attr]
                done = self._backward(batch, rows)
                passes.append(done)
                # Only the first pass uses the weights before the update, which the generator may also have.
                if number == 0:
                    gaps = self.ranks.share(lambda: generator_gaps(self, batch, passes[0]))
                # All updates but the last bypass Lightning, which would count each of them as a global step.
                if number + 1 < self.choices.epochs.count:
                    self.optimizers(use_pl_optimizer=False).step()  # type: ignore[union-attr]
            self.ranks.share(lambda: count_mechanisms(self, batch, passes))
            optimizer.step()  # type: ignore[union-attr]
            self.meter.trained(batch, self.choices.passes)
        self.stream.step_completed()
        recorded = self.records.record(
            self, "train", lambda: {**metrics_of(self, batch, passes), **probe_metrics(gaps)}
        )
        check_probe(recorded, self.choices.precision, self.completed_steps - 1)
        self.health.check(recorded, self.completed_steps)

    def _credited(self, rows: TrainBatch) -> TrainBatch:
        """Make the forward passes before the first update, and return the rows with per-token credit."""
        size = self.recipe.batch.a_pass
        rows = scored_before(rows, self.choices, self.policy, self.reference, self.critic, size, self.ranks)
        return token_credit(rows, self.choices, self.ranks.sum, remember=True)

    def _backward(self, batch: TrainBatch, rows: TrainBatch) -> Pass:
        """Make one pass over the batch: gradients of all terms, summed over ranks, clipped, dropped if not finite."""
        parts: list[Part] = []
        totals = torch.zeros(len(self.terms), device=self.device)
        with self.ranks.unsynchronized():
            for numbers, micro_batch in self.ranks.passes(rows, self.recipe.batch.a_pass):
                logprobs, entropies = self.policy(micro_batch, entropy_gradient=self.choices.entropy.acts)
                values = None if self.critic is None else self.critic(micro_batch)
                scored = Scored(micro_batch, logprobs, entropies, values)
                losses = torch.stack([term.reduce(scored) for term in self.terms])
                self.manual_backward(self.loss_scale.scaled(losses.sum()))
                totals += losses.detach()
                # A pass without rows has weight 0; it is made because all ranks of a sharded model must take part.
                if numbers.numel():
                    parts.append((micro_batch, logprobs.detach(), entropies.detach()))
        self.ranks.sum_gradients(self.parameters())
        totals = self.ranks.sum(totals)
        gathered = self.ranks.gather_parts(batch, parts)
        self.loss_scale.unscale(self.parameters())
        # Without clipping the bound is infinite: the norm is measured and the gradient stays unchanged.
        clip = math.inf if self.recipe.optimizer.clip_norm is None else self.recipe.optimizer.clip_norm
        norms = {"gradient_norm": whole_tensor(nn.utils.clip_grad_norm_(self.policy.parameters(), clip))}
        if self.critic is not None:
            norms["value_gradient_norm"] = whole_tensor(nn.utils.clip_grad_norm_(self.critic.parameters(), clip))
        finite = bool(torch.stack([totals.sum(), *norms.values()]).isfinite().all())
        self.skipped.observe(finite, self.loss_scale, self.completed_steps)
        if not finite:
            self.optimizers().zero_grad(set_to_none=True)  # type: ignore[union-attr]
        return Pass(gathered, {term.name: total for term, total in zip(self.terms, totals, strict=True)}, norms, finite)

    # --- interface for callbacks and scripts -------------------------------------------------------------

    @property
    def task(self) -> Task:
        """Task of the datamodule, whose prompts the run trains on."""
        task: Task = self.trainer.datamodule.task  # type: ignore[attr-defined]
        return task

    @property
    def seed(self) -> int:
        """Seed of the datamodule, for prompt order and sampling."""
        return int(self.trainer.datamodule.seed)  # type: ignore[attr-defined]

    @property
    def completed_steps(self) -> int:
        """Number of completed optimizer steps, which is also the version of the weights."""
        return self.stream.completed_steps

    @property
    def reference(self) -> Policy | None:
        """Frozen reference model of axis `kl`, or None. It is not among the module's parameters."""
        return self.reference_model.policy if self.choices.kl.where else None

    @property
    def stop_reason(self) -> str | None:
        """Reason to stop at the next clean point, from the launcher or a signal to Lightning; None to continue."""
        return interruption.reason or ("SIGTERM" if self.trainer.received_sigterm else None)

    @property
    def eval_sets(self) -> dict[str, PromptSet]:
        """Held-out prompts for evaluation, by name of the set."""
        return self.sampling.eval_sets

    @property
    def began(self) -> list[str]:
        """Lines to show once at the start of a fit: memory, prompts and their lengths, trial of the verifier."""
        return lines_at_start(self)

    def encode(self, text: str) -> list[int]:
        """Tokenize a text without adding special tokens."""
        tokens: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return tokens

    def sample(self, prompt: Prompt, rollout: Rollout) -> Sample:
        """Return a completion in the form that a grader takes."""
        return self.sampling.rendering.sample(prompt, rollout, self.completed_steps)

    def generating(self) -> AbstractContextManager[Generator]:
        """Lend the run's generator for work other than training; training's rollouts in flight are set aside."""
        return self.sampling.generating()

    def verifying(self) -> AbstractContextManager[Verifiers]:
        """Open the verifiers that grade completions: the driver's in a fit, new ones for `Trainer.validate`."""
        return self.sampling.verifying()

    def save_pretrained(self, directory: str | Path, dtype: str = "fp32", adapter: bool = False) -> Path:
        """Write the policy as a folder for `AutoModelForCausalLM.from_pretrained`, with tokenizer and model card.

        All ranks must call it; rank 0 writes. A critic is not saved. An adapter is merged into the model's weights.

        Args:
            directory: a new or empty folder.
            dtype: type of the saved weights: "fp32", "bf16" or "fp16".
            adapter: write only the adapter, in the form that `PeftModel.from_pretrained` loads onto its base model.

        Raises:
            ConfigurationError: the folder is not empty, the type is unknown, or there is no adapter to write.
            RuntimeError: the merged model computes something else than the trained policy.
        """
        return export(self, directory, dtype, adapter)

    @classmethod
    def load_from_checkpoint(  # type: ignore[override]  # Lightning's version is not a plain classmethod
        cls,
        checkpoint_path: str | Path,
        map_location: Any = None,
        hparams_file: Any = None,
        strict: bool | None = None,
        weights_only: bool | None = None,
        **arguments: Any,
    ) -> Self:
        """Make a module with the weights of a checkpoint, which is a file or a folder of shards.

        Args:
            checkpoint_path, map_location, hparams_file, strict, weights_only: as in Lightning's method.
            arguments: arguments of this class that override those in the checkpoint.

        Raises:
            ConfigurationError: the folder lacks a part, or an argument is missing.
        """
        if is_folder(checkpoint_path):
            return from_folder(cls, Path(checkpoint_path), strict is not False, weights_only is not False, arguments)
        file = (checkpoint_path, map_location, hparams_file, strict, weights_only)
        return super().load_from_checkpoint(*file, **arguments)

    # --- Lightning's hooks, in the order in which they are called ----------------------------------------

    def configure_callbacks(self) -> Sequence[Callback]:
        """Return the recipe's choices for axes that no callback of the Trainer covers; the same objects each time."""
        return supplied_choices(self)

    def setup(self, stage: str) -> None:
        """Resolve the choices and build the data path. Configuration errors are raised here, before any compute."""
        set_up(self, stage)

    def configure_model(self) -> None:
        """Shard the models over the ranks, if the strategy shards."""
        shard_models(self)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore the run from a checkpoint in `fit`; other Trainer methods restore only the weights."""
        load_state(self, checkpoint)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the recipe's optimizer, reused from the last fit if there was one; each step applies the schedule."""
        if self.optimizer is None:
            self.optimizer = build_optimizer(self)
        return self.optimizer

    def on_fit_start(self) -> None:
        """Check that all ranks resume at the same step, and make a final evaluation that is still due."""
        begin_fit(self)

    def on_train_start(self) -> None:
        """Start the compute meter, and publish the weights of a fresh run to the generator."""
        begin_training(self)

    def validation_step(self, sets: list[str], batch_index: int) -> None:
        """Evaluate all held-out sets, for `Evaluate` in a fit or for `Trainer.validate`."""
        validate(self)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the run's state to a checkpoint. All ranks call it."""
        save_state(self, checkpoint)

    def on_fit_end(self) -> None:
        """Stop the compute meter: time between two fits is not counted."""
        end_fit(self)

    def failed(self, error: BaseException) -> None:
        """Stop the meter after an error. Unless it was a clean interruption, the next fit needs a checkpoint."""
        fail(self, error)

    def teardown(self, stage: str) -> None:
        """Close generators that hold processes or memory; another fit starts them again."""
        if stage == "fit":
            close_engines(self)

    def test_step(self, *args: Any) -> None:
        """Do nothing: `setup` refuses Trainer.test and names what to use instead."""

    def on_predict_start(self) -> None:
        """Sample and grade completions of all prompts of `Trainer.predict`."""
        self._predictions = predicted(self)

    def predict_step(self, place: int) -> Prediction:
        """Return one prompt with its completions and their rewards."""
        return self._predictions[place]
