"""Data path of a fit: all objects that produce training batches. Only rank 0 has one.

    task -> prompts -> rollout stream <- driver <- generator, verifiers
                                           |
                                           v
                                       TrainBatch -> ScaleRL.training_step -> weights to the generator

A `DataPath` is built for each fit, from its `Stage` and its compute meter.
"""

from __future__ import annotations

from contextlib import ExitStack, nullcontext
from functools import partial
from typing import Any

from lightning_scalerl.measure.compute_meter import ComputeMeter
from lightning_scalerl.measure.mechanism import MechanismCounters
from lightning_scalerl.measure.truncation_alarm import TruncationAlarm
from lightning_scalerl.session.sampling import TRAINING, Sampling, Stage
from lightning_scalerl.state import StateRegistry, TorchRandomState
from lightning_scalerl.stream.conversations import Conversations
from lightning_scalerl.stream.drivers import Virtual
from lightning_scalerl.stream.live_driver import LiveDriver
from lightning_scalerl.stream.prompts import PromptSource
from lightning_scalerl.stream.random_streams import PROMPT_STREAM
from lightning_scalerl.stream.rollout_stream import RolloutStream


class DataPath:
    """Objects of a run that produce batches and receive the trained weights. `state` registers those that a checkpoint
    saves.

    Args:
        stage: choices and models of the fit.
        meter: compute meter of the fit.

    Raises:
        ConfigurationError: prompts, verifiers, generator or driver are invalid. Processes started until then are
            closed.
    """

    def __init__(self, stage: Stage, meter: ComputeMeter) -> None:
        self.stage, self.meter = stage, meter
        self.sampling = Sampling(stage, training=True)
        with ExitStack() as started:
            started.callback(self.sampling.close)
            self._build(stage, started)
            started.pop_all()

    def _build(self, stage: Stage, started: ExitStack) -> None:
        """Build the remaining objects of the data path from `self.sampling`.

        Objects that start processes are registered in `started`, which closes them if a later one fails.
        """
        recipe, choices, models, meter = stage.recipe, stage.choices, stage.models, self.meter
        pool = self.sampling.sets[TRAINING]
        self.prompts = PromptSource(pool.prompts, (stage.seed, PROMPT_STREAM), choices.resampling, choices.curriculum)
        self.stream = RolloutStream(
            prompts=self.prompts,
            task=stage.task,
            encode=pool.tokens_of,
            sample=self.sampling.sample,
            choices=choices,
            reward=recipe.reward,
            verification=recipe.verify,
            phrase_tokens=len(models.encode(choices.length_control.phrase)),
            groups_per_step=recipe.batch.prompts,
            completions=recipe.batch.completions,
            max_new_tokens=recipe.context.max_new_tokens,
            seed=stage.seed,
            charged=meter.judged,
        )
        # Start verifiers and generator after all other checks, because they may start processes.
        verifiers, self._trial_lines = self.sampling.new_verifiers()
        started.callback(verifiers.close)
        self.generator = self.sampling.new_generator()
        started.callback(self.generator.close)
        self.driver = recipe.driver.driver(
            self.stream,
            self.generator,
            models.trained.weights,
            recipe.cost_model,
            verifiers,
            [meter.on_event],
            self._conversations(),
        )
        self.sampling.driver = self.driver
        decode = models.tokenizer.decode
        self.mechanism = MechanismCounters(choices, recipe.choices, self.stream, models.trained, decode)
        self.alarm = TruncationAlarm()
        self.state = StateRegistry()
        self.state.register("prompts", self.prompts)
        self.state.register("stream", self.stream)
        self.state.register("driver", self.driver)
        self.state.register("generator", self.generator)
        self.state.register("meter", meter)
        self.state.register("mechanism", self.mechanism)
        self.state.register("alarm", self.alarm)
        self.state.register("random", TorchRandomState())
        self._state_without_weights: dict[str, Any] | None = None

    def _conversations(self) -> Conversations | None:
        """Return the training conversations, in a process pool of their own; None without environments."""
        dialogue = self.sampling.dialogue
        if dialogue is None:
            return None
        stream, pool = self.stream, dialogue.settings.pool()
        # With the virtual driver the trainer waits for environments, which is idle time.
        idle = partial(self.meter.phase, "idle") if isinstance(self.stage.recipe.driver, Virtual) else nullcontext
        return Conversations(dialogue, pool, self.sampling.limits, stream.prompt_of, idle)

    def close(self) -> None:
        """End all processes of the data path."""
        self.driver.close()
        self.sampling.close()

    @property
    def notes(self) -> list[str]:
        """Lines to show once at the start: prompt lengths, one prompt as the model reads it, verifier test."""
        return [*self.sampling.notes, *self._trial_lines.splitlines()]

    def compute(self) -> dict[str, Any]:
        """Return all compute axes (FLOPs, device hours, ...) by name. Every record contains them."""
        axes = {**self.meter.metrics(), **self.driver.metrics()}
        # Unlike the meter, the virtual clock leaves out the device hours of judge models.
        if "compute/virtual_device_hours" in axes:
            axes["compute/virtual_device_hours"] += self.meter.judge_device_hours
        return axes

    def saved(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        with self.driver.quiet():
            state = self.state.state_dict()
        # With the virtual driver, later rollouts depend on the last published weights, which may differ from the
        # trainer's, so they are saved. The live driver does not need them, and in a folder of shards they would add a
        # whole model.
        if self.stage.models.ranks.writes_shards and isinstance(self.driver, LiveDriver):
            state["generator"]["weights"] = None
        return state

    def restore(self, state: dict[str, Any], from_parent: bool = False) -> None:
        """Restore a state that `saved` returned. A generator without saved weights is restored by
        `restore_generator_weights`.

        `from_parent`: whether the state is that of the parent from which this run branches. Then the mechanism counters
        are not restored, because the parent's counters are for other axes.
        """
        if from_parent:
            state = {**state, "mechanism": self.mechanism.state_dict()}
        generator = state["generator"]
        has_weights = generator.get("weights", ...) is not None
        self.state.load_state_dict(state, skipped=() if has_weights else ("generator",))
        self._state_without_weights = None if has_weights else generator

    def restore_generator_weights(self) -> None:
        """Restore a generator whose weights were not saved, with the trainer's weights after the last step.

        Call this once the trainer's weights are loaded.
        """
        state, self._state_without_weights = self._state_without_weights, None
        if state is not None:
            weights_and_version = {
                "weights": self.stage.models.trained.weights(),
                "version": self.stream.completed_steps,
            }
            self.generator.load_state_dict({**state, **weights_and_version})
