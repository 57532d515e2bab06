"""Training step of a run, top to bottom.

prompts -> generator -> length control -> reward                       (rollout_stream, virtual_driver)
        -> filter -> advantage, normalization -> truncated -> TrainBatch               (credit)
        -> passes before the update -> per-token credit                                (update.before, token_credit)
        -> trainer logprobs -> terms of the loss (per token) -> aggregation -> optimizer step   (here, update.terms)
        -> weights to the generator                                                    (virtual_driver)

With several ranks, rank 0 makes the batch and shares it. Each rank trains on some rows of the batch, and the ranks'
gradients add up to the batch's gradient (`distributed`).

The objects that the module is composed of (`Models`, `DataPath`, `Updates`, `Records`, `Continuation`) are in
`session`. Lightning's hooks are at the end of the class.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from lightning.pytorch import Callback, LightningModule
from torch import nn

from lightning_scalerl.callbacks.base import filter_lightning_tips
from lightning_scalerl.callbacks.evaluate import Evaluate, evaluation_due, evaluation_of, validate_now
from lightning_scalerl.callbacks.predict import Prediction, predicted
from lightning_scalerl.callbacks.trainer import set_step_counter, warn_of_pytorch_lightning
from lightning_scalerl.distributed.checkpoint_folder import is_folder
from lightning_scalerl.distributed.ranks import Follower, Ranks
from lightning_scalerl.distributed.sharded import whole_tensor
from lightning_scalerl.generator.base import Generator
from lightning_scalerl.measure.compute_meter import ComputeMeter
from lightning_scalerl.measure.flops import FlopModel
from lightning_scalerl.measure.mechanism import MechanismCounters
from lightning_scalerl.measure.probe import check_probe, probe_metrics
from lightning_scalerl.measure.semantics import resolved_choices
from lightning_scalerl.measure.step_metrics import Pass
from lightning_scalerl.model.policy import Policy
from lightning_scalerl.model.recompute import set_mode
from lightning_scalerl.recipe import Recipe
from lightning_scalerl.rollouts.grade import Sample
from lightning_scalerl.rollouts.prompt import Prompt
from lightning_scalerl.rollouts.rollout import Part, Rollout, Scored, TrainBatch
from lightning_scalerl.session.checkpoint_state import (
    branches_from,
    check_run,
    from_folder,
    identity_of,
    load_state,
    prepare_weights,
    save_state,
    steps_of,
)
from lightning_scalerl.session.continuation import Continuation
from lightning_scalerl.session.data_path import DataPath
from lightning_scalerl.session.export import export, model_card_entries
from lightning_scalerl.session.fit import end_exhausted, end_stopped, next_batch_or_reason, probe, stop_between_steps
from lightning_scalerl.session.models import make
from lightning_scalerl.session.placement import shard_models
from lightning_scalerl.session.records import Records
from lightning_scalerl.session.sampling import Sampling
from lightning_scalerl.session.setup import place_models, resolve_choices, set_up_fit, stage_of, supplied_choices
from lightning_scalerl.session.step import count_mechanisms, generator_gaps, metrics_of
from lightning_scalerl.session.updates import Updates
from lightning_scalerl.stream.conversations import Conversations
from lightning_scalerl.stream.drivers import Driver
from lightning_scalerl.stream.prompts import PromptSet
from lightning_scalerl.stream.random_streams import SELECTION_STREAM
from lightning_scalerl.stream.rollout_stream import RolloutStream
from lightning_scalerl.task.base import Task
from lightning_scalerl.update.before import run_forward_passes
from lightning_scalerl.update.terms import Term, terms, with_selection
from lightning_scalerl.update.token_credit import token_advantages
from lightning_scalerl.verify.verification import Verifiers
from sweeps.run.interruption import RunInterruptedError, interruption
from sweeps.run.journal import LABEL

if TYPE_CHECKING:
    from lightning_scalerl.generator.vllm.teacher import VLLMTeacher


class ScaleRL(LightningModule):
    """RL post-training with verifiable rewards, in which every design choice is a callback.

    The module is composed of the objects of `session`. The recipe supplies a choice for each axis that no callback of
    the Trainer covers. With several ranks only rank 0 (`ranks.leads`) has a data path, with `generator`, `driver` and
    `mechanism`, and only rank 0 writes records.

    Calling `Trainer.fit` again with a larger `max_steps` continues the run. `Trainer.validate` evaluates.

    Args:
        model: a local folder or hub id of a causal language model, or the model itself.
        recipe: a name in `conf/recipe/`, or a built recipe.
        overrides: Hydra overrides of a named recipe, such as "optimizer.lr=1e-3".
        config_dir: your own folder, in which recipes and choices are looked up as well (docs/guide/extend.md).
        tokenizer: needed if `model` is not a path.
        streamed: do not read the model's weights until `Trainer(strategy="fsdp2")` shards the model. Each rank then
            reads only its shard. A model that does not support this is loaded at once.

    Raises:
        ConfigurationError: a recipe, key or value is unknown, the model cannot be loaded, or the settings were made for
            another model.
    """

    # Set by `setup`, on every rank.
    meter: ComputeMeter
    updates: Updates
    terms: list[Term]
    sigterm_handler: Any
    # Set by `setup`, on rank 0.
    sampling: Sampling

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
        filter_lightning_tips()
        warn_of_pytorch_lightning()
        self.automatic_optimization = False
        self.recipe, self.models, self.arguments = make(model, recipe, overrides, tokenizer, config_dir, streamed)
        self.tokenizer, self.stop_tokens = self.models.tokenizer, self.models.stop_tokens
        # Child modules: their weights are trained, and saved under the names of these attributes.
        self.policy = self.models.policy
        self.critic = self.models.critic
        self.trained = self.models.trained
        # Set anew by `setup` for every fit.
        self.choices = self.recipe.choices
        self.stream: RolloutStream = Follower()  # type: ignore[assignment]  # no step is completed yet
        self.memory = ""  # a line for the user about device memory
        # Only rank 0 has a data path. The `stream` of other ranks only counts the steps.
        self._data_path: DataPath | None = None
        # Not reset between two fits.
        self.continuation = Continuation()
        self.records = Records()
        self.exhausted: str | None = None
        self.save_hyperparameters(self.arguments)

    # --- the path of one training step -------------------------------------------------------------------

    def next_batch(self) -> TrainBatch | None:
        """Generate on rank 0 until a batch is ready, and share it with all ranks.

        Returns:
            The batch; None to end the fit, because no prompts are left or a signal asked to stop.
        """
        # Set the rates before the step starts, because callbacks such as LearningRateMonitor read them when it starts.
        self.updates.set_learning_rates(self.completed_steps)
        with self.meter.phase("generate"):
            batch = self.ranks.share_batch(lambda: next_batch_or_reason(self.data_path, lambda: self.stop_reason))
        if isinstance(batch, str):
            end_exhausted(self.trainer, self, batch)
            return None
        return batch if batch is not None else stop_between_steps(self.trainer, self)

    def training_step(self, batch: TrainBatch, batch_index: int) -> None:
        """Take one training step on a batch, with one update per pass of axis `epochs`."""
        batch = replace(batch.to(self.device), packed=self.policy.packs)
        optimizer = self.optimizers()
        with self.meter.phase("train"):
            size = self.recipe.batch.pass_size
            rows = self._credited(self.ranks.rows(batch, size))
            batch = self.ranks.gather_rows(batch, rows)
            key = (self.seed, SELECTION_STREAM, self.completed_steps)
            batch = with_selection(batch, self.choices, key)
            if batch.selected is not None:
                # Every rank has selected from the whole batch: take this rank's rows again, now with the selection.
                rows = self.ranks.rows(batch, size)
            passes: list[Pass] = []
            for number in range(self.choices.epochs.count):
                # Set gradients to None, not zero: AdamW skips parameters without a gradient, so after an empty batch
                # not even momentum moves the weights.
                optimizer.zero_grad(set_to_none=True)  # type: ignore[union-attr]
                passes.append(self._backward(batch, rows))
                # Compare with the generator in the first pass only: later passes have weights that no generator had.
                if number == 0:
                    gaps = self.ranks.share(lambda: generator_gaps(self.data_path, batch, passes[0]))
                # All updates but the last bypass Lightning, which would count each of them as a global step.
                if number + 1 < self.choices.epochs.count:
                    self.optimizers(use_pl_optimizer=False).step()  # type: ignore[union-attr]
            self.ranks.share(lambda: count_mechanisms(self.data_path, batch, passes))
            optimizer.step()  # type: ignore[union-attr]
            self.meter.trained(batch, self.choices.passes)
        self.stream.step_completed()
        recorded = self.records.record(
            "train", lambda: {**metrics_of(self.data_path, self.updates, batch, passes), **probe_metrics(gaps)}
        )
        check_probe(recorded, self.choices.precision, self.completed_steps - 1)
        self.updates.health.check(recorded, self.completed_steps)

    def _credited(self, rows: TrainBatch) -> TrainBatch:
        """Add to the rows the results of the forward passes before the first update, and per-token credit."""
        size = self.recipe.batch.pass_size
        rows = run_forward_passes(rows, self.choices, self.policy, self.reference, self.critic, size, self.ranks)
        return token_advantages(rows, self.choices, self.ranks.sum, update_statistics=True)

    def _backward(self, batch: TrainBatch, rows: TrainBatch) -> Pass:
        """Make one pass over the batch, which leaves the summed and clipped gradients of all loss terms.

        Args:
            batch: the whole batch, for the returned measurements.
            rows: this rank's rows, for the gradients.

        Returns:
            The pass. If a loss or a gradient is not finite, all gradients are dropped.
        """
        parts: list[Part] = []
        totals = torch.zeros(len(self.terms), device=self.device)
        teacher = self.reference if self.choices.kl_in_update else None
        measured = torch.zeros_like(rows.generator_logprobs)  # divergences from the teacher over the vocabulary
        with self.ranks.unsynchronized():
            for numbers, micro_batch in self.ranks.passes(rows, self.recipe.batch.pass_size):
                with_gradient = self.choices.entropy.acts
                logprobs, entropies, *more = self.policy(micro_batch, entropy_gradient=with_gradient, teacher=teacher)
                values = None if self.critic is None else self.critic(micro_batch)
                scored = Scored(micro_batch, logprobs, entropies, values, *more)
                losses = torch.stack([term.reduce(scored) for term in self.terms])
                self.manual_backward(self.updates.loss_scale.scaled(losses.sum()))
                totals += losses.detach()
                # A pass without rows has weight 0; a sharded model needs it, as all ranks must make the same passes.
                if numbers.numel():
                    for divergences in more:
                        measured[numbers, : divergences.shape[1]] = divergences.detach()
                        micro_batch = replace(micro_batch, divergences=divergences.detach())
                    parts.append((micro_batch, logprobs.detach(), entropies.detach()))
        self.ranks.sum_gradients(self.parameters())
        totals = self.ranks.sum(totals)
        if teacher is not None:
            batch = self.ranks.gather_rows(batch, replace(rows, divergences=measured))
        gathered = self.ranks.gather_parts(batch, parts)
        self.updates.loss_scale.unscale(self.parameters())
        # Without clipping the bound is infinite: the norm is measured and the gradient stays unchanged.
        clip = math.inf if self.recipe.optimizer.clip_norm is None else self.recipe.optimizer.clip_norm
        norms = {"gradient_norm": whole_tensor(nn.utils.clip_grad_norm_(self.policy.parameters(), clip))}
        if self.critic is not None:
            norms["value_gradient_norm"] = whole_tensor(nn.utils.clip_grad_norm_(self.critic.parameters(), clip))
        finite = bool(torch.stack([totals.sum(), *norms.values()]).isfinite().all())
        self.updates.skipped.observe(finite, self.updates.loss_scale, self.completed_steps)
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
    def reference(self) -> Policy | VLLMTeacher | None:
        """Frozen reference model or teacher of axis `kl`, or None. It is not among the module's parameters."""
        return self.models.reference

    @property
    def ranks(self) -> Ranks:
        """Ranks of the Trainer; a single one before `setup`."""
        return self.models.ranks

    @property
    def data_path(self) -> DataPath:
        """Data path of the fit, on rank 0. Other ranks raise AttributeError, so that `hasattr(module, ...)` works."""
        if self._data_path is None:
            raise AttributeError("data_path: rank 0 has it, from the setup of a fit on")
        return self._data_path

    @property
    def generator(self) -> Generator:
        """Generator of the fit; only on rank 0."""
        return self.data_path.generator

    @property
    def driver(self) -> Driver:
        """Driver of the fit; only on rank 0."""
        return self.data_path.driver

    @property
    def mechanism(self) -> MechanismCounters:
        """Counters of the axes on which the run differs from the recipe; only on rank 0."""
        return self.data_path.mechanism

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
        """Lines to print once at the start of a fit, about memory, prompt lengths and the test of the verifier."""
        memory = [self.memory] if self.memory else []
        return [] if self._data_path is None else [*self.models.notes, *memory, *self._data_path.notes]

    def encode(self, text: str) -> list[int]:
        """Tokenize a text without adding special tokens."""
        return self.models.encode(text)

    def sample(self, prompt: Prompt, rollout: Rollout) -> Sample:
        """Return a completion as a `Sample`, the argument of a grader."""
        return self.sampling.sample(prompt, rollout, self.completed_steps)

    def conversations(self, prompts: Sequence[Prompt]) -> Conversations | None:
        """Return the conversations for evaluating these prompts; None if the run has no environments."""
        return self.sampling.conversations(prompts)

    def generating(self) -> AbstractContextManager[Generator]:
        """Lend the run's generator for work other than training. Rollouts in flight are paused until it is returned."""
        return self.sampling.lend_generator()

    def verifying(self) -> AbstractContextManager[Verifiers]:
        """Open the verifiers that grade completions: the driver's in a fit, new verifiers for `Trainer.validate`."""
        return self.sampling.lend_verifiers()

    def save_pretrained(self, directory: str | Path, dtype: str = "fp32", adapter: bool = False) -> Path:
        """Write the policy as a folder for `AutoModelForCausalLM.from_pretrained`, with tokenizer and model card.

        All ranks must call it; rank 0 writes. A critic is not saved. An adapter is merged into the model's weights.

        Args:
            directory: a new or empty folder.
            dtype: type of the saved weights: "fp32", "bf16" or "fp16".
            adapter: write only the adapter, in the form that `PeftModel.from_pretrained` loads onto its base model.

        Raises:
            ConfigurationError: the folder is not empty, the type is unknown, or there is no adapter to write.
            RuntimeError: the merged model's log-probabilities differ from the trained policy's.
        """
        card = model_card_entries(self.recipe, self.choices, self.completed_steps, self.models.path)
        return export(self.models, card, self.recipe.chat, directory, dtype, adapter)

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
        fitted = None if self.continuation.run_settings is None else self.choices
        return supplied_choices(self.trainer, self.recipe, fitted)

    def setup(self, stage: str) -> None:
        """Resolve the choices and build the data path. Configuration errors are raised here, before any compute."""
        # Save the handler here: Lightning installs its own after this hook.
        self.sigterm_handler = signal.getsignal(signal.SIGTERM)
        self.choices = resolve_choices(self.trainer, self.recipe, stage)
        settings = {**resolved_choices(self.recipe, self.choices), **self.arguments, "seed": self.seed}
        self.save_hyperparameters({**settings, LABEL: identity_of(self.trainer, self)["title"]})
        self.memory = place_models(self.models, self.recipe, self.choices, self.trainer)
        devices = self.ranks.count + self.recipe.driver.engine_devices + self.choices.kl.devices
        self.meter = ComputeMeter(FlopModel.of(self.policy.model), devices=devices, axes=self.recipe.compute)
        made_for = stage_of(self.trainer, self.recipe, self.choices, self.models)
        if stage != "fit":
            # Evaluation reads only the number of steps from the stream. Keep the last fit's state for the next fit.
            sampling = self.ranks.on_leader(partial(Sampling, made_for, training=False))
            if sampling is not None:
                self.sampling = sampling
            return
        steps = self.completed_steps
        self._data_path, resumes = set_up_fit(made_for, self.meter, settings, self.continuation, self._data_path, steps)
        self.critic = self.models.critic
        self.terms = terms(self.choices)
        if self._data_path is None:
            self.stream = Follower()  # type: ignore[assignment]  # it only counts steps
        else:
            self.sampling, self.stream = self._data_path.sampling, self._data_path.stream
        if resumes:
            self.stream.completed_steps = steps
            set_step_counter(self.trainer, steps)
        else:
            self.updates = Updates(self.recipe, self.choices)

    def configure_model(self) -> None:
        """Shard the models over the ranks, if the strategy shards."""
        shard_models(self.models)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore the run from a checkpoint in `fit`; other Trainer methods restore only the weights.

        Raises:
            ConfigurationError: the file is incomplete, contains no run, or contains another run.
        """
        trainer = self._trainer
        fits = trainer is not None and trainer.state.fn == "fit"
        ckpt_path = None if trainer is None else trainer.ckpt_path
        prepare_weights(checkpoint, self.models, self, ckpt_path, fits)
        if not fits:
            self.continuation.run_settings = None
            self.stream = Follower(steps_of(checkpoint))  # type: ignore[assignment]
            return
        identity = identity_of(trainer, self, self.continuation.run_settings)
        check_run(identity, checkpoint, ckpt_path)
        # Set the step now: Lightning restores its counters only after the evaluation that may still be due.
        self.stream.completed_steps = steps_of(checkpoint)
        set_step_counter(self.trainer, self.completed_steps)
        branch = branches_from(identity, checkpoint)
        if branch is not None:
            self.updates.branch(checkpoint, branch["optimizer"])
        load_state(checkpoint, self._data_path, self.models, self.updates, self.records, branch is not None)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the recipe's optimizer, reused from the last fit if there was one; each step applies the schedule."""
        return self.updates.optimizer(self.models)

    def on_fit_start(self) -> None:
        """Check that all ranks resume at the same step, and make a final evaluation that is still due."""
        steps = self.completed_steps
        self.exhausted = None
        self.ranks.check_alike("checkpoint: completed steps", steps)
        self.records.begin(self.trainer, self.ranks, self._data_path)
        self.ranks.share(lambda: self.data_path.restore_generator_weights())
        if steps >= self.trainer.max_steps and evaluation_due(self.trainer, steps):
            self.meter.start()
            if not validate_now(self.trainer, last=True):
                # Do not save: nothing is new, and Lightning's counters are not restored yet.
                raise RunInterruptedError(f"step {steps}: {self.stop_reason}")

    def on_train_start(self) -> None:
        """Probe the generator, publish the weights to it in a fresh run, and start the compute meter."""
        # The model's own dropout settings would make the trainer's policy differ from the generator's.
        set_mode(self.policy, self.recipe.optimizer.dropout)
        self.updates.begin()
        # LearningRateMonitor logs the rates when Lightning's epoch starts, before the first step.
        self.updates.set_learning_rates(self.completed_steps)
        if self.critic is not None:
            set_mode(self.critic, False)
        self.ranks.share(lambda: probe(self.data_path))
        if self.completed_steps == 0 and self.trainer.ckpt_path is None:
            self.ranks.share(lambda: self.generator.publish(self.trained.weights(), 0))
        self.ranks.restore_sigterm(self.sigterm_handler)
        self.meter.start()
        self.continuation.fit_began()

    def validation_step(self, sets: list[str], batch_index: int) -> None:
        """Evaluate all held-out sets: in a fit, write a record of the run; for `Trainer.validate`, log to Lightning."""
        evaluation = evaluation_of(self.trainer)
        if evaluation is None:
            evaluation = Evaluate()
            evaluation.follow(self.recipe.evaluation)
        fits = self.trainer.state.fn == "fit"
        metrics = evaluation.measure(self, in_fit=fits)
        if fits:
            self.records.record("eval", lambda: metrics)
            return
        set_step_counter(self.trainer, self.completed_steps)
        several = self.ranks.count > 1
        self.log_dict(metrics, batch_size=1, sync_dist=several, rank_zero_only=several)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the run's state to a checkpoint. All ranks call it."""
        identity = identity_of(self.trainer, self, self.continuation.run_settings)
        save_state(checkpoint, self._data_path, self.models, self.updates, self.records, identity)

    def on_train_end(self) -> None:
        """Evaluate the last weights if a callback has stopped the fit. Not called after an interruption or an error."""
        end_stopped(self.trainer, self)

    def on_fit_end(self) -> None:
        """Stop the compute meter: time between two fits is not counted."""
        self.meter.stop()
        self.continuation.fit_ended()

    def failed(self, error: BaseException) -> None:
        """Stop the meter and close the data path. The next fit then needs a checkpoint, except after a clean
        interruption.
        """
        if hasattr(self, "meter"):  # `setup` creates the meter, and may have failed before that
            self.meter.stop()
        self.teardown("fit")
        self.continuation.fit_ended(error)

    def teardown(self, stage: str) -> None:
        """Close generators and verifiers that hold processes or memory; another fit starts them again."""
        self.models.disconnect()
        if stage == "fit" and self._data_path is not None:
            self._data_path.close()
        elif stage != "fit" and hasattr(self, "sampling"):
            self.sampling.close()

    def test_step(self, *args: Any) -> None:
        """Do nothing: `setup` refuses Trainer.test and names what to use instead."""

    def on_predict_start(self) -> None:
        """Sample and grade completions of all prompts of `Trainer.predict`."""
        self._predictions = predicted(self)

    def predict_step(self, index: int) -> Prediction:
        """Return one prompt with its completions and their rewards."""
        return self._predictions[index]
