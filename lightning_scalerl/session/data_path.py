"""Data path of a fit: all parts that produce a batch, and the checks on them. Only rank 0 has one.

    task -> prompts -> rollout stream <- driver <- generator, verifiers
                                           |
                                           v
                                       TrainBatch -> ScaleRL.training_step -> weights to the generator

`build_data_path` builds a `DataPath` from the stage's resolved choices (`sampling.Inputs`) and the compute meter.
"""

from __future__ import annotations

from dataclasses import dataclass

from lightning_scalerl.generator.base import Generator
from lightning_scalerl.generator.channel import DirectChannel
from lightning_scalerl.measure.compute_meter import ComputeMeter
from lightning_scalerl.measure.mechanism import MechanismCounters
from lightning_scalerl.measure.truncation_alarm import TruncationAlarm
from lightning_scalerl.session.sampling import TRAINING, Inputs, Sampling, new_generator, new_verifiers
from lightning_scalerl.state import StateRegistry, TorchRandomState
from lightning_scalerl.stream.drivers import Driver
from lightning_scalerl.stream.prompts import PromptSource
from lightning_scalerl.stream.random_streams import PROMPT_STREAM
from lightning_scalerl.stream.rollout_stream import RolloutStream


@dataclass(frozen=True)
class DataPath:
    """Parts of a run before and after the training step; `state` is their state in a checkpoint."""

    sampling: Sampling
    prompts: PromptSource
    stream: RolloutStream
    generator: Generator
    driver: Driver
    mechanism: MechanismCounters
    alarm: TruncationAlarm
    state: StateRegistry
    tried: str

    @property
    def began(self) -> list[str]:
        """Lines to show once at the start: prompt lengths, one prompt as the model reads it, the verifier trial."""
        sampling = self.sampling
        shown = sampling.rendering.text(sampling.sets[TRAINING].prompts[0])
        return [
            *(each.describes(name) for name, each in sampling.sets.items()),
            f"prompts: {sampling.rendering.describes}; the first of them as the model reads it:",
            *(f"  | {line}" for line in (shown if len(shown) < 2000 else f"{shown[:2000]} ...").splitlines()),
            *sampling.rendering.notes(sampling.sets[TRAINING].prompts),
            *sampling.inputs.task.notes(),
            self.tried,
        ]


def build_data_path(inputs: Inputs, meter: ComputeMeter) -> DataPath:
    """Build the parts of a run before and after the training step, and register their state.

    Raises:
        ConfigurationError: prompts, verifiers, generator or driver are invalid; no process is left running.
    """
    recipe, choices, task, seed = inputs.recipe, inputs.choices, inputs.task, inputs.seed
    sampling = Sampling(inputs, training=True)
    pool = sampling.sets[TRAINING]
    prompts = PromptSource(pool.prompts, (seed, PROMPT_STREAM), choices.resampling, choices.curriculum)
    stream = RolloutStream(
        prompts=prompts,
        task=task,
        encode=pool.tokens_of,
        sample=sampling.rendering.sample,
        choices=choices,
        reward=recipe.reward,
        verification=recipe.verify,
        phrase_tokens=len(inputs.encode(choices.length_control.phrase)),
        groups_per_step=recipe.batch.prompts,
        completions=recipe.batch.completions,
        max_new_tokens=recipe.context.max_new_tokens,
        seed=seed,
    )
    # Start these after all other checks, because they may start processes.
    verifiers, tried = new_verifiers(inputs)
    try:
        generator = new_generator(inputs)
    except BaseException:
        verifiers.close()
        raise
    channel = DirectChannel(inputs.trained.weights, generator)
    driver = recipe.driver.driver(stream, generator, channel, recipe.cost_model, verifiers, [meter.on_event])
    sampling.driver = driver
    mechanism = MechanismCounters(choices, recipe.choices, stream, inputs.trained, inputs.tokenizer.decode)
    alarm = TruncationAlarm()
    state = StateRegistry()
    state.register("prompts", prompts)
    state.register("stream", stream)
    state.register("driver", driver)
    state.register("generator", generator)
    state.register("meter", meter)
    state.register("mechanism", mechanism)
    state.register("alarm", alarm)
    state.register("random", TorchRandomState())
    return DataPath(
        sampling=sampling,
        prompts=prompts,
        stream=stream,
        generator=generator,
        driver=driver,
        mechanism=mechanism,
        alarm=alarm,
        state=state,
        tried=tried,
    )
