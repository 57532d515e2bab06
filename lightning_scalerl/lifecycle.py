"""A run under Lightning's Trainer, from construction to end: set-up, state, records, and what it refuses.

The path of a training step is in `module`.
"""

from __future__ import annotations

import copy
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor, nn

from lightning_scalerl.callbacks.base import Recorder
from lightning_scalerl.callbacks.checkpoint_file import IDENTITY
from lightning_scalerl.callbacks.checkpointing import ResumableCheckpoint, check_whole
from lightning_scalerl.callbacks.evaluate import evaluation_of, owed, validate_now
from lightning_scalerl.callbacks.run_log import RunLog
from lightning_scalerl.callbacks.trainer import (
    STAGES,
    check_trainer,
    count_from,
    prepare_trainer,
    refuse_pytorch_lightning,
)
from lightning_scalerl.checks import ConfigurationError
from lightning_scalerl.choice import DesignChoice
from lightning_scalerl.choices import Choices, by_axis
from lightning_scalerl.composer import load_recipe
from lightning_scalerl.distributed.meeting import meet
from lightning_scalerl.distributed.ranks import Follower, Ranks
from lightning_scalerl.generator.base import EndOfThinking, Generator
from lightning_scalerl.generator.channel import DirectChannel
from lightning_scalerl.measure.compute_meter import ComputeMeter
from lightning_scalerl.measure.flops import FlopModel
from lightning_scalerl.measure.mechanism import MechanismCounters
from lightning_scalerl.measure.probe import start_probe
from lightning_scalerl.measure.semantics import own_label, resolved_choices
from lightning_scalerl.measure.truncation_alarm import TruncationAlarm
from lightning_scalerl.model.chat import Rendering, StopTexts, told_of
from lightning_scalerl.model.head import check_head
from lightning_scalerl.model.load import check_weights, fingerprint, load_model, load_tokenizer, stop_tokens
from lightning_scalerl.model.policy import Policy
from lightning_scalerl.model.save import save_model
from lightning_scalerl.model.value import ValueModel
from lightning_scalerl.prompt import Prompt
from lightning_scalerl.recipe import Recipe
from lightning_scalerl.rollout import Rollout
from lightning_scalerl.state import StateRegistry, TorchRandomState
from lightning_scalerl.stream.drivers import Driver
from lightning_scalerl.stream.prompts import PromptSet, PromptSource, fitting
from lightning_scalerl.stream.random_streams import PROMPT_STREAM
from lightning_scalerl.stream.rollout_stream import RolloutStream
from lightning_scalerl.task.arithmetic_base import is_arithmetic_base
from lightning_scalerl.task.base import Task, check_curriculum, passes
from lightning_scalerl.update.health import HealthWatch
from lightning_scalerl.update.loss_scale import LossScale, SkippedUpdates
from lightning_scalerl.update.terms import Term, terms
from lightning_scalerl.verify.grade import Sample
from lightning_scalerl.verify.verification import Verifiers, check_verifiers
from sweeps.run.interruption import RunInterruptedError, interruption

TRAINING = "training"


class Lifecycle(LightningModule):
    """Base of `ScaleRL` with everything but its training step."""

    stream: RolloutStream
    driver: Driver

    def __init__(
        self,
        model: str | nn.Module | None = None,
        recipe: str | Recipe | None = "scalerl",
        overrides: Sequence[str] = (),
        tokenizer: Any = None,
        config_dir: str | Path | None = None,
    ) -> None:
        super().__init__()
        refuse_pytorch_lightning(Lifecycle)
        self.automatic_optimization = False
        if recipe is None:
            raise ConfigurationError(
                "recipe: not given; the checkpoint of a run that was given a built recipe does not hold it: "
                "ScaleRL.load_from_checkpoint(path, recipe=...)"
            )
        if model is None:
            raise ConfigurationError(
                "model: not given; a folder, a hub id, or a model with its tokenizer. The checkpoint of a run that was "
                "given a model object holds weights only: ScaleRL.load_from_checkpoint(path, model=..., tokenizer=...)"
            )
        folders = () if config_dir is None else (config_dir,)
        self.recipe = load_recipe(recipe, overrides, folders) if isinstance(recipe, str) else recipe
        self._constructed = {
            **({"model": model} if isinstance(model, str) else {}),
            "recipe": recipe if isinstance(recipe, str) else None,
            "recipe_name": self.recipe.name,
            "overrides": list(overrides),
            "config_dir": None if config_dir is None else str(config_dir),
        }
        if isinstance(model, str):
            self.tokenizer = tokenizer or load_tokenizer(model)
        elif tokenizer is None:
            raise ConfigurationError("tokenizer: a model object comes without one; pass tokenizer=")
        else:
            self.tokenizer = tokenizer
        if not any(override.startswith("scale=") for override in overrides):
            self.recipe.check_scale(is_arithmetic_base(model))
        model = load_model(model) if isinstance(model, str) else model
        check_weights(model)
        check_head(model)
        # Ids that end a completion.
        self.stop_tokens = stop_tokens(model, self.tokenizer)
        self.policy = Policy(model, self.recipe.choices.precision, self.recipe.context.temperature)
        self.choices = self.recipe.choices
        self.ranks = Ranks()
        # The critic is trained and saved; the reference is neither, so a list hides it from `nn.Module`.
        self.critic: ValueModel | None = None
        self._reference: list[Policy] = []
        self._began_with: str | None = None  # the reference's fingerprint, once somebody has asked for it
        self.terms: list[Term] = []
        self.loss_scale = LossScale(acts=False)
        self.skipped = SkippedUpdates()
        self.health = HealthWatch(self.recipe.health, self.recipe.reward.incorrect)
        self._state = StateRegistry()
        self._random = TorchRandomState()
        self._optimizer: torch.optim.Optimizer | None = None
        self._latest: dict[str, float] = {}
        self._meaning: dict[str, Any] | None = None
        self._logged: tuple[int, set[str]] = (-1, set())
        self._under_way = False
        self._broken: str | None = None
        self.save_hyperparameters(self._constructed)

    def test_step(self, *args: Any) -> None:
        """Do nothing: `setup` refuses Trainer.test and names what to use instead."""

    def predict_step(self, *args: Any) -> None:
        """Do nothing: `setup` refuses Trainer.predict and names what to use instead."""

    # --- set-up ------------------------------------------------------------------------------------------

    def configure_callbacks(self) -> Sequence[Callback]:
        """Return the recipe's choices for axes that the Trainer's callbacks leave open; the same ones each time."""
        evaluation = evaluation_of(self.trainer)
        if evaluation is not None:
            evaluation.follow(self.recipe.evaluation)
        check_trainer(self.trainer)
        meet(self.trainer)
        if self.trainer.state.fn == "fit":
            prepare_trainer(self.trainer)
        # Trainer.validate after a fit uses the choices of that fit, whatever callbacks this Trainer has.
        base = self.choices if self._meaning is not None and self.trainer.state.fn != "fit" else self.recipe.choices
        own = {*map(id, self.recipe.choices), *map(id, base)}
        given = [c for c in self.trainer.callbacks if isinstance(c, DesignChoice) and id(c) not in own]  # type: ignore[attr-defined]
        claimed = by_axis(given)
        return [choice for axis, choice in base.items() if axis not in claimed]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the recipe's optimizer, that of the last fit if there was one; the schedule is applied in the step."""
        if self._optimizer is None:
            groups = [{"params": list(self.policy.parameters()), "lr": self.recipe.optimizer.lr}]
            if self.critic is not None:
                groups.append({"params": list(self.critic.parameters()), "lr": self.learning_rates[1]})
            self._optimizer = self.recipe.optimizer.build(groups)
        return self._optimizer

    @property
    def learning_rates(self) -> list[float]:
        """Learning rates of the policy and, if there is one, of the critic, before the schedule's factor."""
        rate = self.recipe.optimizer.lr
        own = getattr(self.choices.critic, "lr", None)
        return [rate] if self.critic is None else [rate, rate if own is None else own]

    def setup(self, stage: str) -> None:
        """Resolve the choices and build the data path; every mistake surfaces here, before any compute."""
        if stage in STAGES:
            raise ConfigurationError(STAGES[stage])
        vars(self).pop("_sets", None)  # of the last stage's task and evaluation
        self._on_sigterm = signal.getsignal(signal.SIGTERM)
        chosen = Choices.of(c for c in self.trainer.callbacks if isinstance(c, DesignChoice))  # type: ignore[attr-defined]
        self.recipe.check(chosen)
        self.choices = chosen
        self.policy.precision = chosen.precision
        # Lightning warns of modules that are not; what they train in is decided in `on_train_start`.
        self.policy.train()
        if self.critic is not None:
            self.critic.train()
        # Lightning moves the module to its device after this hook; the generator copies it in this one.
        self.policy.to(self.trainer.strategy.root_device)
        resolved = {**resolved_choices(self.recipe, chosen), **self._constructed, "seed": self.seed}
        self.save_hyperparameters(resolved)
        devices = self.trainer.world_size + self.recipe.driver.generators
        self.meter = ComputeMeter(FlopModel.of(self.policy.model), devices=devices)
        self.ranks = Ranks.of(self.trainer)
        if stage == "validate":
            # Evaluation asks the stream for the step alone; what a fit has left behind stays for the next one.
            self.stream = vars(self).get("stream", Follower())
            return
        check_curriculum(self.task, chosen.curriculum)
        meaning = self._meant(resolved)
        before = self._trained(meaning)
        self._build_update(anew=before is None)
        self.ranks.share(self._build_data_path)
        if not self.ranks.leads:
            self.stream = Follower()  # type: ignore[assignment]  # all that is asked of it is to count
            # One seed for all ranks would give dropout the same masks on different rows.
            torch.manual_seed((torch.initial_seed() + self.ranks.number) % 2**63)
        self._meaning = meaning
        if before is not None:
            self._go_on(*before)
        else:
            self._optimizer = None

    def _build_update(self, anew: bool) -> None:
        """Build critic, reference and loss terms, on all ranks. `anew`: discard those of an earlier fit."""
        choices, device = self.choices, self.trainer.strategy.root_device
        if anew:
            self.critic = None
            if self._broken is None:  # else the run resumes from a checkpoint, and keeps its reference
                self._reference = []
            for row in (choices, self.recipe.choices):
                row.normalization.forget()
            self.loss_scale = LossScale(acts=choices.precision.policy == "fp16")
            self.skipped = SkippedUpdates()
            self.health = HealthWatch(self.recipe.health, self.recipe.reward.incorrect)
        if choices.critic.has_values and self.critic is None:
            self.critic = ValueModel(self.policy.model, choices.precision).to(device)
        if choices.kl.where and not self._reference:
            self._refer_to(copy.deepcopy(self.policy.model))
        self.terms = terms(choices)

    def _refer_to(self, model: nn.Module) -> None:
        """Freeze this model and make it the reference of axis `kl`."""
        self._began_with = None
        frozen = Policy(model, self.choices.precision, self.policy.temperature)
        self._reference = [frozen.requires_grad_(False).eval().to(self.trainer.strategy.root_device)]

    def _reference_fingerprint(self) -> str:
        """Return the reference's fingerprint; computed once and only for a checkpoint, as it reads all weights."""
        if self._began_with is None:
            self._began_with = fingerprint(self._reference[0].model)
        return self._began_with

    def _refer_as_the_run_did(self, began_with: str | None) -> None:
        """Restore the reference that the resumed run began with, whatever weights this module was made with.

        Args:
            began_with: that model's fingerprint; None if the run measured no distance, and began with who knows what.

        Raises:
            ConfigurationError: it is neither this module's nor the one that the module names.
        """
        if not self.choices.kl.where or self._reference_fingerprint() == began_with:
            return
        if "model" in self._constructed:
            self._refer_to(load_model(str(self._constructed["model"])))
            if began_with in (None, self._reference_fingerprint()):
                return
        raise ConfigurationError(
            "kl: the reference is the model that training began with, and this module was made with other weights than "
            "the run of this checkpoint; go on with a module made as that run's was: ScaleRL(model=...), or "
            "ScaleRL.load_from_checkpoint(path) of the checkpoint whose weights it began with"
        )

    @property
    def reference(self) -> Policy | None:
        """Frozen reference model of axis `kl`, or None; kept out of the module's own parameters."""
        return self._reference[0] if self._reference and self.choices.kl.where else None

    def _meant(self, resolved: dict[str, Any]) -> dict[str, Any]:
        """Return the settings, choices, seed and task by which two fits are of the same run."""
        prompts = [(prompt.prompt_id, prompt.text) for prompt in self.task.train_prompts()]
        return {**resolved, "task": (type(self.task).__name__, prompts)}

    def _trained(self, meaning: dict[str, Any]) -> tuple[int, dict[str, Any]] | None:
        """Return the steps and the state of an earlier fit of this module; None if there is none to continue.

        Raises:
            ConfigurationError: with other choices, another task or seed it would be another run.
        """
        if self._meaning is None or self.completed_steps == 0:
            return None
        if self._broken is not None:
            return None  # a checkpoint has to be given; `check_goes_on` knows whether it is
        other = sorted(key for key in meaning if meaning[key] != self._meaning[key])
        if other:
            raise ConfigurationError(
                f"fit: this module has trained {self.completed_steps} steps, and {', '.join(other)} would change now; "
                "another run begins with another module: ScaleRL(module.policy.model, tokenizer=module.tokenizer, ...)"
            )
        return self.completed_steps, self._state.state_dict() if self.ranks.leads else {}

    def _go_on(self, steps: int, state: dict[str, Any]) -> None:
        """Continue where the last fit ended: the same stream, optimizer and counters."""
        if self.ranks.leads:
            self._state.load_state_dict(state)
        self.stream.completed_steps = steps
        count_from(self.trainer, steps)

    def _build_data_path(self) -> None:
        """Build the parts of the run before and after the training step, and register their state."""
        self._prepare_prompts(training=True)
        key = (self.seed, PROMPT_STREAM)
        pool = self._sets[TRAINING]
        tokens = {prompt.prompt_id: ids for prompt, ids in zip(pool.prompts, pool.tokens, strict=True)}
        self.prompts = PromptSource(pool.prompts, key, self.choices.resampling, self.choices.curriculum)
        self.stream = RolloutStream(
            prompts=self.prompts,
            task=self.task,
            encode=lambda prompt: tokens[prompt.prompt_id],
            sample=self._rendering.sample,
            choices=self.choices,
            reward=self.recipe.reward,
            verification=self.recipe.verify,
            phrase_tokens=len(self.encode(self.choices.length_control.phrase)),
            groups_per_step=self.recipe.batch.prompts,
            completions=self.recipe.batch.completions,
            max_new_tokens=self.recipe.context.max_new_tokens,
            seed=self.seed,
        )
        # Last of what can be refused: they may have processes.
        verifiers = self._new_verifiers()
        try:
            self.generator = self._new_generator()
        except BaseException:
            verifiers.close()
            raise
        channel = DirectChannel(self._weights, self.generator)
        self.driver = self.recipe.driver.driver(
            self.stream, self.generator, channel, self.recipe.cost_model, verifiers, [self.meter.on_event]
        )
        self.mechanism = MechanismCounters(
            self.choices, self.recipe.choices, self.stream, self.policy, self.tokenizer.decode
        )
        self.alarm = TruncationAlarm()
        self._state = StateRegistry()
        self._state.register("prompts", self.prompts)
        self._state.register("stream", self.stream)
        self._state.register("driver", self.driver)
        self._state.register("generator", self.generator)
        self._state.register("meter", self.meter)
        self._state.register("mechanism", self.mechanism)
        self._state.register("alarm", self.alarm)
        self._state.register("random", self._random)

    def _prepare_prompts(self, *, training: bool) -> None:
        """Render, tokenise and measure all prompts before any compute.

        One that is too long would else end the run when it is drawn, and every resume of it.
        """
        evaluation = evaluation_of(self.trainer)
        limit = None if evaluation is None else evaluation.prompts
        sets = {TRAINING: self.task.train_prompts()} if training else {}
        sets |= {f"held-out ({name})": prompts[:limit] for name, prompts in self.task.eval_sets().items()}
        context = self.recipe.context
        control = self.choices.length_control.end_of_thinking
        self._rendering = Rendering(self.tokenizer, self.recipe.chat, self.stop_tokens, control)
        tokens = self._rendering.encode_all(sets)
        self._sets = fitting(sets, tokens, context.max_prompt_tokens, context.too_long)

    @property
    def eval_sets(self) -> dict[str, PromptSet]:
        """Held-out prompts that are evaluated, by the name of their set."""
        if "_sets" not in vars(self):
            self._prepare_prompts(training=False)
        return {name: self._sets[f"held-out ({name})"] for name in self.task.eval_sets()}

    def _new_verifiers(self) -> Verifiers:
        """Start the verifiers that grade completions, and try them on known answers first."""
        verifiers = self.recipe.verify.verifiers(self.task.grader(), self.task.trusted)
        try:
            self._tried = check_verifiers(verifiers, self.task.known(), lambda outcome: passes(self.task, outcome))
        except BaseException:
            verifiers.close()
            raise
        return verifiers

    @property
    def began(self) -> list[str]:
        """Lines to show once at the start: prompt lengths, a prompt as it is read, the trial of the verifier."""
        pool = self._sets[TRAINING]
        shown = self._rendering.text(pool.prompts[0])
        return [
            *(each.describes(name) for name, each in self._sets.items()),
            f"prompts: {self._rendering.describes}; the first of them as the model reads it:",
            *(f"  | {line}" for line in (shown if len(shown) < 2000 else f"{shown[:2000]} ...").splitlines()),
            *self.task.notes(),
            self._tried,
        ]

    @property
    def task(self) -> Task:
        """Task of the datamodule, whose prompts are trained on."""
        task: Task = self.trainer.datamodule.task  # type: ignore[attr-defined]
        return task

    @property
    def seed(self) -> int:
        """Seed of the datamodule, for prompt order and sampling."""
        return int(self.trainer.datamodule.seed)  # type: ignore[attr-defined]

    @property
    def completed_steps(self) -> int:
        """Number of optimizer steps done, which is the version of the weights."""
        return self.stream.completed_steps

    def encode(self, text: str) -> list[int]:
        """Tokenize a text without adding special tokens."""
        tokens: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return tokens

    @property
    def stop_reason(self) -> str | None:
        """Reason to stop at the next clean border, from the launcher or a signal to Lightning; None without one."""
        return interruption.reason or ("SIGTERM" if self.trainer.received_sigterm else None)

    def _new_generator(self) -> Generator:
        """Build a generator with a copy of the current weights."""
        given, ranks = self._generator_arguments(), self.trainer.num_devices
        return self.recipe.driver.generator(self.recipe.generator, self.policy.model, given, ranks)

    def _generator_arguments(self) -> dict[str, Any]:
        """Return the arguments of a generator besides the model."""
        control = self.choices.length_control
        phrase = self.encode(control.phrase) if control.phrase else []
        problem = control.check_limit(self.recipe.context.max_new_tokens, len(phrase))
        if problem:
            raise ConfigurationError(problem)
        stop = tuple(self.recipe.chat.stop)
        return {
            **({"stop_text": StopTexts(self.tokenizer, stop)} if stop else {}),
            "precision": self.choices.precision,
            "max_prompt_tokens": self.recipe.context.max_prompt_tokens,
            "max_new_tokens": self.recipe.context.max_new_tokens,
            "stop_tokens": self.stop_tokens,
            "temperature": self.recipe.context.temperature,
            "phrase": phrase,
            "thinking_ended": EndOfThinking(self.tokenizer, control.end_of_thinking),
        }

    @contextmanager
    def generating(self) -> Iterator[Generator]:
        """Lend the run's generator with nothing in flight, for other work than training; rollouts in flight wait.

        In a fit there is one engine, with one copy of weights and cache; `Trainer.validate` makes one for this.
        """
        if self.trainer.state.fn == "fit":
            with self.driver.quiet(), self.generator.aside():
                yield self.generator
            return
        generator = self._new_generator()
        try:
            yield generator
        finally:
            generator.close()

    @contextmanager
    def verifying(self) -> Iterator[Verifiers]:
        """Open the verifiers that grade completions: the driver's in a fit, new ones for `Trainer.validate`."""
        if self.trainer.state.fn == "fit":
            yield self.driver.verifiers
            return
        verifiers = self._new_verifiers()
        try:
            yield verifiers
        finally:
            verifiers.close()

    def sample(self, prompt: Prompt, rollout: Rollout) -> Sample:
        """Return a completion in the form that a grader takes."""
        return self._rendering.sample(prompt, rollout, self.completed_steps)

    def _weights(self) -> dict[str, Tensor]:
        return dict(self.policy.model.state_dict())

    def save_pretrained(self, directory: str | Path, dtype: str = "fp32") -> Path:
        """Write the policy as a folder that `AutoModelForCausalLM.from_pretrained` loads, with tokenizer and a card.

        All ranks call it, and rank 0 writes. A critic stays behind.

        Args:
            directory: new or empty.
            dtype: of the saved weights: "fp32", "bf16" or "fp16".

        Raises:
            ConfigurationError: something is there already, or the type is unknown.
        """
        steps = vars(self)["stream"].completed_steps if "stream" in vars(self) else 0
        card = {"recipe": self.recipe.name, "optimizer steps": steps, "trained from": self._constructed.get("model")}
        choices = {axis: type(choice).__name__ for axis, choice in self.choices.items()}
        card["choices"] = ", ".join(f"{axis}: {name}" for axis, name in choices.items())
        rendering = Rendering(self.tokenizer, self.recipe.chat)
        card |= told_of(rendering)
        self.ranks.share(lambda: str(save_model(self.policy.model, rendering.to_save(), directory, dtype, card)))
        return Path(directory)

    # --- state -------------------------------------------------------------------------------------------

    def check_goes_on(self) -> None:
        """Refuse a new fit after a failed one without a checkpoint, before any callback overwrites records.

        Raises:
            ConfigurationError: the last fit of this module has failed, and there is no checkpoint to go on from.
        """
        if self._broken is not None and self.trainer.ckpt_path is None:
            raise ConfigurationError(
                f"fit: this module's last fit ended with {self._broken}; go on from a checkpoint, fit(ckpt_path=...), "
                "or begin with another module"
            )
        self._broken = None

    def on_fit_start(self) -> None:
        """Check that all ranks resume at the same step; make an evaluation after the last step that is still due."""
        self.ranks.check_alike("checkpoint: completed steps", self.completed_steps)
        self._logged = (-1, set())
        self.trainer.callback_metrics.update(_tensors(self._latest))
        if self.completed_steps >= self.trainer.max_steps and owed(self.trainer, self.completed_steps):
            self.meter.start()
            if not validate_now(self.trainer):
                # Nothing new to save; and Lightning's counters are not restored yet.
                raise RunInterruptedError(f"step {self.completed_steps}: {self.stop_reason}")

    def on_train_start(self) -> None:
        """Start the compute meter; publish the current weights to the generator of a fresh run."""
        # The model's own dropout would make trainer and generator two policies.
        self.policy.train(self.recipe.optimizer.dropout)
        if self.critic is not None:
            self.critic.train(False)
        for module in self.policy.modules():
            # Layers that recompute their activations do so in training mode only; what is in them stays as it is.
            module.training = module.training or bool(getattr(module, "gradient_checkpointing", False))
        self.ranks.share(self._probe)
        if self.ranks.leads and self.completed_steps == 0 and self.trainer.ckpt_path is None:
            self.generator.publish(self._weights(), 0)
        self.ranks.restore_sigterm(self._on_sigterm)
        self.meter.start()
        self._under_way = True

    def _probe(self) -> None:
        """Check that trainer and generator compute the same, before any compute is counted."""
        given, tokens = self._generator_arguments(), self._sets[TRAINING].tokens[0]
        interruption = (given["phrase"], given["thinking_ended"])
        with self.generating() as generator:
            start_probe(generator, self.policy, tokens, self.completed_steps, *interruption)

    def on_fit_end(self) -> None:
        """Stop the compute meter; time between two fits is not charged."""
        self.meter.stop()
        self._under_way = False

    def teardown(self, stage: str) -> None:
        """Close generators with processes or memory of their own; another fit starts them again."""
        if stage == "fit" and "driver" in vars(self):
            self.driver.close()

    def failed(self, error: BaseException) -> None:
        """Stop the meter after an error; unless it was a clean interruption, the next fit needs a checkpoint."""
        if "meter" in vars(self):
            self.meter.stop()
        self.teardown("fit")
        if self._under_way and not isinstance(error, RunInterruptedError | SIGTERMException):
            self._broken = type(error).__name__
        self._under_way = False

    def _stop_between_steps(self) -> Any:
        """Save the stream in the middle of a generation, and end the run.

        Raises:
            RunInterruptedError: the run can be continued from there.
            SIGTERMException: Lightning's own way, where the run keeps no checkpoints that could be continued.
        """
        for callback in self.trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, ResumableCheckpoint):
                callback.stop_between_steps(self.trainer, self)
        if self.trainer.received_sigterm:
            raise SIGTERMException
        raise RunInterruptedError(f"step {self.completed_steps}: {self.stop_reason}")

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Save the registry's state of rank 0 and the random state of the other ranks. All ranks call it."""
        _, *others = self.ranks.gather(self._random.state_dict())
        if self.ranks.leads:
            with self.driver.quiet():
                checkpoint["scalerl"] = self._state.state_dict()
            checkpoint[IDENTITY] = self._identity()
            checkpoint["scalerl_followers"] = others
            checkpoint["scalerl_update"] = {
                "loss_scale": self.loss_scale.state_dict(),
                "skipped": self.skipped.state_dict(),
                "health": self.health.state_dict(),
                "reference": None if self.reference is None else self._reference_fingerprint(),
            }
            checkpoint["scalerl_metrics"] = dict(self._latest)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore the run from a checkpoint; a rank that the saved run did not have keeps fresh random state.

        `Trainer.fit(ckpt_path=...)` goes on with the run. `load_from_checkpoint` and `Trainer.validate` take its
        weights alone, and a later fit begins with them.
        """
        check_whole(self._trainer.ckpt_path if self._trainer is not None else None)
        if self.critic is None:
            # The critic's weights are of no use to an evaluation, or to a new run that begins with this policy.
            weights = checkpoint["state_dict"]
            for name in [name for name in weights if name.startswith("critic.")]:
                del weights[name]
        if self._trainer is None or self.trainer.state.fn != "fit":
            self._meaning = None
            steps = checkpoint.get("scalerl", {}).get("stream", {}).get("completed_steps", 0)
            self.stream = Follower(steps)  # type: ignore[assignment]
            return
        if "scalerl" not in checkpoint:
            raise ConfigurationError(
                "ckpt_path: this checkpoint holds no run to go on with; begin one with its weights: "
                "ScaleRL.load_from_checkpoint(path)"
            )
        self._check_identity(checkpoint.get(IDENTITY))
        self._latest = dict(checkpoint.get("scalerl_metrics", {}))
        # Lightning restores its own counters later, and an evaluation that is still owed asks for the step before.
        count_from(self.trainer, checkpoint["scalerl"]["stream"]["completed_steps"])
        update = checkpoint.get("scalerl_update")
        if update is not None:
            self.loss_scale.load_state_dict(update["loss_scale"])
            self.skipped.load_state_dict(update["skipped"])
            self.health.load_state_dict(update["health"])
            self._refer_as_the_run_did(update.get("reference"))
        if self.ranks.leads:
            self._state.load_state_dict(checkpoint["scalerl"])
            return
        self.stream.completed_steps = checkpoint["scalerl"]["stream"]["completed_steps"]
        states = checkpoint.get("scalerl_followers", [])
        if self.ranks.number <= len(states):
            self._random.load_state_dict(states[self.ranks.number - 1])

    def _identity(self) -> dict[str, Any]:
        """Return the identity kept in checkpoints: the study's name of the run, if any, recipe, seed and choices."""
        logs = [each for each in self.trainer.callbacks if isinstance(each, RunLog)]  # type: ignore[attr-defined]
        given = logs[0].identity if logs else {}
        choices = {axis: str(choice.semantics()["choice"]) for axis, choice in self.choices.items()}
        named = {"run": given.get("run"), "title": str(given.get("recipe", own_label(self)))}
        return {**named, "recipe": own_label(self), "seed": self.seed, "choices": choices}

    def _check_identity(self, theirs: Any) -> None:
        """Refuse a checkpoint of another run; one of an earlier version carries no identity and is taken.

        Raises:
            ConfigurationError: it is another run's; both are named.
        """
        if not isinstance(theirs, dict):
            return
        own = self._identity()
        # For two members of studies the run names decide: a version may have renamed choices.
        named = None not in (own["run"], theirs.get("run"))
        keys = ("run",) if named else ("recipe", "seed", "choices")
        if all(own[key] == theirs.get(key) for key in keys):
            return
        both = [f"{each.get('title')} seed {each.get('seed')}" for each in (theirs, own)]
        if named:
            both = [f"{text} ({each['run']})" for text, each in zip(both, (theirs, own), strict=True)]
        now, saved = own["choices"], theirs.get("choices") or {}
        other = [axis for axis in now if saved.get(axis) not in (None, now[axis])]
        differ = ", ".join(f"{axis} {saved[axis]}, not {now[axis]}" for axis in other)
        raise ConfigurationError(
            f"ckpt_path: {self.trainer.ckpt_path} is of another run, {both[0]}, and this one is {both[1]}"
            f"{differ and f' ({differ})'}; give a checkpoint of this run, or begin another with the weights: "
            "ScaleRL.load_from_checkpoint(path)"
        )

    # --- what is recorded --------------------------------------------------------------------------------

    def record(self, kind: str, measure: Callable[[], dict[str, Any]]) -> dict[str, float]:
        """Measure on rank 0, send that with all compute axes to every logger and `Recorder`, and return it.

        All ranks call it: every rank's callbacks may monitor what was measured. Lightning's own `log` would write at
        the end of its epoch what was true at its beginning.

        Args:
            kind: "train" or "eval".
            measure: the metrics by name, called on rank 0 only.
        """
        values = self.ranks.share(lambda: self._write(kind, measure()))
        self._latest |= values
        tensors = _tensors(values)
        self.trainer.callback_metrics.update(tensors)
        self.trainer.logged_metrics.update(tensors)
        return values

    def _write(self, kind: str, metrics: dict[str, Any]) -> dict[str, float]:
        step = self.completed_steps
        compute = {**self.meter.metrics(), **self.driver.metrics()}
        values = {name: float(value) for name, value in {**metrics, **compute}.items()}
        for callback in self.trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, Recorder):
                callback.on_record(kind, step, values)
        every = self.trainer.log_every_n_steps  # type: ignore[attr-defined]
        if kind == "eval" or (every and step % every == 0):
            # The train and eval records of a step both hold the compute axes; a logger gets each metric once a step.
            self._logged = self._logged if self._logged[0] == step else (step, set())
            fresh = {name: value for name, value in values.items() if name not in self._logged[1]}
            self._logged[1].update(fresh)
            for logger in self.trainer.loggers:
                logger.log_metrics(fresh, step)
                logger.save()
        return values


def _tensors(values: dict[str, float]) -> dict[str, Tensor]:
    """Convert metrics to FP64 tensors, as Lightning's callbacks expect them, without rounding."""
    return {name: torch.tensor(value, dtype=torch.float64) for name, value in values.items()}
