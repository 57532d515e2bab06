"""The path of one training step, top to bottom.

prompts -> generator -> length control -> reward                                       (rollout_stream)
        -> filter -> advantage, normalization -> truncated -> TrainBatch               (credit)
        -> trainer logprobs -> loss (per token) -> aggregation -> optimizer step       (here)
        -> weights to the generator                                                    (rollout_stream)

With several ranks, rank 0 does what stands in other files and hands the batch to all; each trains on its rows of
it, and their gradients add up to the batch's (distributed).
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn

from lightning_scalerl.callbacks.base import Recorder
from lightning_scalerl.checks import ConfigurationError
from lightning_scalerl.choice import DesignChoice
from lightning_scalerl.choices import Choices, by_axis
from lightning_scalerl.composition import load_recipe
from lightning_scalerl.distributed.ranks import Follower, Ranks, check_strategy
from lightning_scalerl.generator.base import Generator
from lightning_scalerl.measure.compute_meter import ComputeMeter
from lightning_scalerl.measure.flops import FlopModel
from lightning_scalerl.measure.mechanism import MechanismCounters
from lightning_scalerl.measure.step_metrics import step_metrics
from lightning_scalerl.measure.truncation_alarm import TruncationAlarm
from lightning_scalerl.model.head import check_head
from lightning_scalerl.model.load import load_model, load_tokenizer
from lightning_scalerl.model.policy import Policy
from lightning_scalerl.recipe import Recipe
from lightning_scalerl.rollout import Part, TrainBatch, whole
from lightning_scalerl.state import StateRegistry, TorchRandomState
from lightning_scalerl.stream.prompts import PromptSource
from lightning_scalerl.stream.random_streams import PROMPT_STREAM
from lightning_scalerl.stream.rollout_stream import RolloutStream
from lightning_scalerl.task.base import Task


class ScaleRL(LightningModule):
    """RL post-training with verifiable rewards; every design choice is a callback.

    The recipe supplies a choice for each axis that no callback of the Trainer claims. With several ranks only rank 0
    (`ranks.leads`) has `generator`, `prompts`, `mechanism` and `alarm`, and only its records are made.

    Args:
        model: a local folder or hub id of a causal language model, or the model itself.
        recipe: a name in `conf/recipe/`, or a built recipe.
        overrides: Hydra overrides of a named recipe, such as "optimizer.lr=1e-3".
        tokenizer: needed if `model` is not a path.

    Raises:
        ConfigurationError: an unknown recipe, key or value, or a model that cannot be loaded.
    """

    stream: RolloutStream

    def __init__(
        self,
        model: str | nn.Module,
        recipe: str | Recipe = "scalerl",
        overrides: Sequence[str] = (),
        tokenizer: Any = None,
    ) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.recipe = load_recipe(recipe, overrides) if isinstance(recipe, str) else recipe
        if isinstance(model, str):
            self.tokenizer = tokenizer or load_tokenizer(model)
            model = load_model(model)
        elif tokenizer is None:
            raise ConfigurationError("tokenizer: a model object comes without one; pass tokenizer=")
        else:
            self.tokenizer = tokenizer
        check_head(model)
        self.policy = Policy(model.train(), self.recipe.choices.precision, self.recipe.context.temperature)
        self.choices = self.recipe.choices
        self.ranks = Ranks()
        self._state = StateRegistry()
        self._random = TorchRandomState()

    # --- the training step -------------------------------------------------------------------------------

    def next_batch(self) -> TrainBatch:
        """Generate until a batch is due: on rank 0, for all."""
        with self.meter.phase("generate"):
            return self.ranks.share_batch(lambda: self.stream.next_batch())

    def training_step(self, batch: TrainBatch, batch_index: int) -> None:
        """One optimizer step."""
        batch = batch.to(self.device)
        optimizer = self.optimizers()
        with self.meter.phase("train"):
            optimizer.zero_grad(set_to_none=False)  # type: ignore[union-attr]
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
            learning_rate = self._set_learning_rate(optimizer)
            if self.ranks.leads and self.mechanism.axes:
                self.mechanism.observe(batch, whole(batch, parts)[0])
            optimizer.step()  # type: ignore[union-attr]
            self.meter.trained(batch)
        self.stream.step_completed()
        optimized = {
            "train/loss": total,
            "train/gradient_norm": gradient_norm,
            "train/learning_rate": learning_rate,
        }
        self.ranks.share(lambda: self._record_step(optimized, batch, parts))

    def _record_step(self, optimized: dict[str, Any], batch: TrainBatch, parts: Sequence[Part]) -> None:
        """What the step on `batch` looked like, on rank 0."""
        metrics = step_metrics(batch, parts, self.choices, self.completed_steps - 1)
        self.record(
            "train",
            {
                **optimized,
                "train/epoch": self.prompts.epoch,
                "train/prompts_retired": self.prompts.retired,
                **metrics,
                **self.alarm.observe(metrics["train/truncated"], self.completed_steps),
                **self.mechanism.metrics(),
            },
        )
        if self.completed_steps == 1:
            check_first_step(metrics["train/logprob_gap"])

    # --- set-up ------------------------------------------------------------------------------------------

    def configure_callbacks(self) -> Sequence[Callback]:
        """The recipe's choices for every axis that the Trainer's callbacks leave open; the same ones each time."""
        own = set(map(id, self.recipe.choices))
        given = [c for c in self.trainer.callbacks if isinstance(c, DesignChoice) and id(c) not in own]  # type: ignore[attr-defined]
        claimed = by_axis(given)
        return [choice for axis, choice in self.recipe.choices.items() if axis not in claimed]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """The recipe's optimizer; the schedule is applied in the step."""
        return self.recipe.optimizer.build(self.policy.parameters())

    def setup(self, stage: str) -> None:
        """Resolve the choices and build the data path; every mistake surfaces here, before any compute."""
        self._check_trainer()
        self._on_sigterm = signal.getsignal(signal.SIGTERM)
        self.choices = Choices.of(c for c in self.trainer.callbacks if isinstance(c, DesignChoice))  # type: ignore[attr-defined]
        self.recipe.check(self.choices)
        self.policy.precision = self.choices.precision
        # Lightning moves the module to its device after this hook; the generator copies it in this one.
        self.policy.to(self.trainer.strategy.root_device)
        self.meter = ComputeMeter(FlopModel.of(self.policy.model), devices=self.trainer.world_size)
        self.ranks = Ranks.of(self.trainer)
        self.ranks.share(self._build_data_path)
        if not self.ranks.leads:
            self.stream = Follower()  # type: ignore[assignment]  # all that is asked of it is to count
            # One seed for all ranks would give dropout the same masks on different rows.
            torch.manual_seed((torch.initial_seed() + self.ranks.number) % 2**63)

    def _build_data_path(self) -> None:
        """All that comes before and after the training step, and its state."""
        self.generator = self.new_generator()
        self.prompts = PromptSource(self.task.train_prompts(), (self.seed, PROMPT_STREAM), self.choices.resampling)
        self.stream = RolloutStream(
            prompts=self.prompts,
            task=self.task,
            encode=self.encode,
            decode=self.decode,
            generator=self.generator,
            choices=self.choices,
            weights=self._weights,
            cost_model=self.recipe.cost_model,
            groups_per_step=self.recipe.batch.prompts,
            completions=self.recipe.batch.completions,
            max_new_tokens=self.recipe.context.max_new_tokens,
            seed=self.seed,
            listeners=[self.meter.on_event],
        )
        self.mechanism = MechanismCounters(
            self.choices, self.recipe.choices, self.stream, self.policy, self.tokenizer.decode
        )
        self.alarm = TruncationAlarm()
        self._state = StateRegistry()
        self._state.register("prompts", self.prompts)
        self._state.register("stream", self.stream)
        self._state.register("generator", self.generator)
        self._state.register("meter", self.meter)
        self._state.register("mechanism", self.mechanism)
        self._state.register("alarm", self.alarm)
        self._state.register("random", self._random)

    def _check_trainer(self) -> None:
        if not hasattr(getattr(self.trainer, "datamodule", None), "task"):
            raise ConfigurationError("datamodule: ScaleRL needs a RolloutDataModule; pass datamodule= to Trainer.fit")
        if str(self.trainer.precision) != "32-true":
            raise ConfigurationError(
                f"precision: Trainer(precision={self.trainer.precision!r}) would fight the precision axis; leave it at "
                "32-true and choose e.g. precision=bf16 in the recipe"
            )
        if self.trainer.max_steps < 1:
            raise ConfigurationError("max_steps: the rollout stream has no end; give Trainer(max_steps=...)")
        check_strategy(self.trainer.strategy)

    @property
    def task(self) -> Task:
        """The datamodule's task."""
        task: Task = self.trainer.datamodule.task  # type: ignore[attr-defined]
        return task

    @property
    def seed(self) -> int:
        """The datamodule's seed."""
        return int(self.trainer.datamodule.seed)  # type: ignore[attr-defined]

    @property
    def completed_steps(self) -> int:
        """Optimizer steps done: the version of the weights."""
        return self.stream.completed_steps

    def encode(self, text: str) -> list[int]:
        """Prompt text to tokens."""
        tokens: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return tokens

    def decode(self, tokens: list[int]) -> str:
        """Completion tokens to text, without special tokens."""
        text: str = self.tokenizer.decode(tokens, skip_special_tokens=True)
        return text

    def new_generator(self) -> Generator:
        """A generator with a copy of the current weights."""
        control = self.choices.length_control
        phrase = self.encode(control.phrase) if control.phrase else []
        problem = control.check_limit(self.recipe.context.max_new_tokens, len(phrase))
        if problem:
            raise ConfigurationError(problem)
        return self.recipe.generator(
            model=self.policy.model,
            precision=self.choices.precision,
            max_prompt_tokens=self.recipe.context.max_prompt_tokens,
            max_new_tokens=self.recipe.context.max_new_tokens,
            stop_tokens=[self.tokenizer.eos_token_id],
            temperature=self.recipe.context.temperature,
            phrase=phrase,
            thinking_ended=lambda tokens: control.end_of_thinking in self.tokenizer.decode(tokens),
        )

    def _weights(self) -> dict[str, Tensor]:
        return dict(self.policy.model.state_dict())

    def _set_learning_rate(self, optimizer: Any) -> float:
        rate = self.recipe.optimizer.lr * self.recipe.schedule.factor(self.completed_steps)
        for group in optimizer.param_groups:
            group["lr"] = rate
        return rate

    # --- state -------------------------------------------------------------------------------------------

    def on_fit_start(self) -> None:
        """Every rank has read the same checkpoint, or none."""
        self.ranks.check_alike("checkpoint: completed steps", self.completed_steps)

    def on_train_start(self) -> None:
        """The clock of the compute meter starts; the generator of a fresh run gets the weights as they are now."""
        if self.ranks.leads and self.completed_steps == 0:
            self.generator.publish(self._weights(), 0)
        self.ranks.restore_sigterm(self._on_sigterm)
        self.meter.start()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Everything that the registry holds on rank 0, and the random state of the other ranks. All ranks call it."""
        _, *others = self.ranks.gather(self._random.state_dict())
        if self.ranks.leads:
            checkpoint["scalerl"] = self._state.state_dict()
            checkpoint["scalerl_followers"] = others

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Put it back. A rank that the saved run did not have keeps the random state of a fresh run."""
        if self.ranks.leads:
            self._state.load_state_dict(checkpoint["scalerl"])
            return
        self.stream.completed_steps = checkpoint["scalerl"]["stream"]["completed_steps"]
        states = checkpoint.get("scalerl_followers", [])
        if self.ranks.number <= len(states):
            self._random.load_state_dict(states[self.ranks.number - 1])

    # --- what is recorded --------------------------------------------------------------------------------

    def record(self, kind: str, metrics: dict[str, Any]) -> None:
        """Send one step's metrics, with all compute axes, to Lightning's loggers and to every `Recorder`."""
        compute = {**self.meter.metrics(), **self.stream.virtual_metrics()}
        values = {name: float(value) for name, value in {**metrics, **compute}.items()}
        # Lightning's logging costs a quarter of a millisecond a metric: training metrics go there only when its
        # loggers would write them, evaluations always.
        if kind == "eval" or self.completed_steps % self.trainer.log_every_n_steps == 0:  # type: ignore[attr-defined]
            # Only rank 0 logs: with the two marks Lightning neither waits for the others nor warns that it should.
            several = self.ranks.count > 1
            self.log_dict(values, batch_size=1, sync_dist=several, rank_zero_only=several)
        for callback in self.trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, Recorder):
                callback.on_record(kind, self.completed_steps, values)


# A mean difference of log-probabilities beyond rounding of any type: wrong weights, temperature or alignment.
MAX_FIRST_GAP = 0.3


def check_first_step(logprob_gap: float) -> None:
    """The first batch was sampled by the very weights that train on it: trainer and generator must agree.

    Raises:
        ConfigurationError: they differ by more than rounding explains.
    """
    if logprob_gap > MAX_FIRST_GAP:
        raise ConfigurationError(
            f"generator: on the first batch its log-probabilities differ from the trainer's by {logprob_gap:.3g} on "
            f"average (allowed {MAX_FIRST_GAP}); compare precision, temperature and tokenizer on both sides"
        )
