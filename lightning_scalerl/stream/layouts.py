"""Forecast of layouts: how devices that are split between generators and a trainer would be used.

The ledger of a run and its virtual clock are stepped without a model: rollouts are lengths, and a decoding step is
several tokens at once. What it takes are the rates of a cost model, measured on one node.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch import Tensor

from lightning_scalerl.axes.allocation import FixedAllocation
from lightning_scalerl.axes.curriculum import NoCurriculum
from lightning_scalerl.axes.filter import NoFilter
from lightning_scalerl.axes.length_control import NoLengthControl
from lightning_scalerl.axes.resampling import UniformResampling
from lightning_scalerl.choices import Choices
from lightning_scalerl.generator.base import FinishedRollout, GroupRequest, StepReport, set_aside
from lightning_scalerl.generator.channel import DirectChannel
from lightning_scalerl.prompt import Prompt
from lightning_scalerl.rollout import Rollout
from lightning_scalerl.stream.cost_model import CostModel
from lightning_scalerl.stream.prompts import PromptSource
from lightning_scalerl.stream.rollout_stream import RolloutStream
from lightning_scalerl.stream.virtual_driver import VirtualDriver
from lightning_scalerl.task.base import Task
from lightning_scalerl.verify.grade import Sample
from lightning_scalerl.verify.inline import InlineVerifiers

# Tokens of a mean completion that are decoded one by one; of longer ones several count as one step.
GRAIN = 24
# Optimizer steps that are counted, after those in which the queues fill.
STEPS = 24
# Rounds of finding the rates under which the clock spends as long on a step as was measured.
ROUNDS = 4
# Most layouts that are looked at in one pass; the second pass is between the neighbours of the best of them.
PLACES = 9


@dataclass(frozen=True)
class Workload:
    """Work of one optimizer step, and the rules by which it is shared: the same in every layout.

    Attributes:
        choices: of the run; its async mode and the passes of a step count.
        groups, completions: prompts of a batch, and completions of each.
        slots: rollouts that an engine decodes together.
        prompt_tokens, completion_tokens: mean lengths; completions are drawn around theirs (gamma, deviation of half
            the mean) up to the limit.
        max_new_tokens: limit of a completion in tokens.
    """

    choices: Choices
    groups: int
    completions: int
    slots: int
    prompt_tokens: float
    completion_tokens: float
    max_new_tokens: int


@dataclass(frozen=True)
class Layout:
    """Forecast of how one layout would be used.

    Attributes:
        generator_devices, trainer_devices, tensor_parallel: the split, and generator devices of an engine.
        step_s: seconds of an optimizer step.
        trainer_idle, generator_idle: shares of time in which trainer and generators have nothing to do.
        trainer_s, generator_s: seconds of a step in which they work.
    """

    generator_devices: int
    trainer_devices: int
    tensor_parallel: int
    step_s: float
    trainer_idle: float
    generator_idle: float
    trainer_s: float
    generator_s: float

    @property
    def devices(self) -> int:
        """Number of devices, generators and trainer together."""
        return self.generator_devices + self.trainer_devices

    @property
    def device_hours(self) -> float:
        """Device hours of a thousand optimizer steps."""
        return self.devices * self.step_s * 1000 / 3600


@dataclass(frozen=True)
class Measured:
    """Measurement of a live run: seconds of an optimizer step, both idle shares, the pause of a publish."""

    step_s: float
    trainer_idle: float
    generator_idle: float
    publish_s: float


def foretell(workload: Workload, cost_model: CostModel, seed: int = 0) -> Layout:
    """Return how a layout would be used: that of the cost model, with its rates."""
    grain = max(1, round(workload.completion_tokens / GRAIN))
    engines = cost_model.generator_devices // cost_model.tensor_parallel
    generator = _Lengths(workload, grain, workload.slots * engines, seed)
    stream = _stream(workload, grain)
    # A step of the generator is `grain` tokens of each rollout; a token of the ledger stands for as many.
    scaled = {name: grain * getattr(cost_model, name) for name in (*_DECODING, "train_token_s", "tensor_parallel_s")}
    driver = VirtualDriver(
        stream,
        generator,
        DirectChannel(dict, generator),
        replace(cost_model, **scaled),
        InlineVerifiers(stream.task.grader()),
    )
    warm = 2 * (workload.choices.async_mode.max_staleness + 2)
    before = (0.0, 0.0, 0.0)
    for step in range(warm + STEPS + 1):
        driver.next_batch()
        now = _times(driver)
        if step == warm:
            before = now
        stream.step_completed()
    passed, trained, generated = (later - earlier for later, earlier in zip(now, before, strict=True))
    return Layout(
        cost_model.generator_devices,
        cost_model.trainer_devices,
        cost_model.tensor_parallel,
        step_s=passed / STEPS,
        trainer_idle=max(0.0, 1 - trained / passed),
        generator_idle=max(0.0, 1 - generated / passed),
        trainer_s=trained / STEPS,
        generator_s=generated / STEPS,
    )


def calibrated(workload: Workload, cost_model: CostModel, measured: Measured) -> CostModel:
    """Return a cost model under which its layout spends as long on a step as was measured of the same layout.

    The rates keep their proportions among those of decoding, and among those of training; the two are scaled.
    """
    found = replace(cost_model, publish_s=measured.publish_s)
    for _ in range(ROUNDS):
        now = foretell(workload, found)
        decode = measured.step_s * (1 - measured.generator_idle) / now.generator_s
        train = measured.step_s * (1 - measured.trainer_idle) / now.trainer_s
        found = replace(
            found,
            **{name: decode * getattr(found, name) for name in (*_DECODING, "prefill_token_s")},
            **{name: train * getattr(found, name) for name in ("train_s", "train_token_s")},
        )
    return found


def splits(
    workload: Workload, cost_model: CostModel, devices: int, tensor_parallel: Sequence[int] = (1,)
) -> list[Layout]:
    """Return forecasts of splits of so many devices, the one that wastes least first.

    Args:
        workload: of the run.
        cost_model: rates; its own split is not used.
        devices: number of devices to split.
        tensor_parallel: numbers of generator devices of an engine to look at.
    """
    found: dict[tuple[int, int], Layout] = {}

    def look(partners: int, generators: int) -> None:
        if (partners, generators) not in found:
            split = replace(
                cost_model,
                generator_devices=generators,
                trainer_devices=devices - generators,
                tensor_parallel=partners,
                colocated=False,
            )
            found[partners, generators] = foretell(workload, split)

    for partners in tensor_parallel:
        places = [*range(partners, devices, partners)]
        first = _spread(places)
        for generators in first:
            look(partners, generators)
        if first:
            best = min(first, key=lambda generators: found[partners, generators].step_s)
            at = first.index(best)
            low, high = first[max(0, at - 1)], first[min(len(first) - 1, at + 1)]
            for generators in _spread([place for place in places if low < place < high]):
                look(partners, generators)
    return sorted(found.values(), key=lambda layout: (layout.step_s, layout.generator_devices))


def _spread(places: Sequence[int]) -> list[int]:
    """Return `PLACES` of the places at most, evenly spread."""
    if len(places) <= PLACES:
        return [*places]
    return [places[round(number * (len(places) - 1) / (PLACES - 1))] for number in range(PLACES)]


_DECODING = ("decode_s", "decode_rollout_s", "decode_context_s")


def _times(driver: VirtualDriver) -> tuple[float, float, float]:
    """Return the virtual time, and how long trainer and generators have worked by then."""
    clock = driver.clock
    now_s = clock.now_s
    under_way_s = min(clock.generator_step_s, max(0.0, clock.generator_until_s - now_s))
    return now_s, clock.trainer_busy_s - max(0.0, clock.trainer_until_s - now_s), clock.generator_busy_s - under_way_s


class _Nothing(Task):
    """Task whose rewards differ within every group, whatever is sampled."""

    trusted = True

    def train_prompts(self) -> Sequence[Prompt]:
        """Return a prompt: it is sampled again and again."""
        return [Prompt("p", "", "")]

    def eval_sets(self) -> Mapping[str, Sequence[Prompt]]:
        """Return none: nothing is evaluated."""
        return {}

    def reward(self, prompt: Prompt, completion: str) -> float:
        """Return 1 for completions of even length, 0 for others."""
        return float(len(completion) % 2 == 0)


def _stream(workload: Workload, grain: int) -> RolloutStream:
    task = _Nothing()
    choices = workload.choices
    for choice in (UniformResampling(), FixedAllocation(), NoFilter(), NoLengthControl(), NoCurriculum()):
        choices = choices.having(choice)
    prompt = [1] * max(1, round(workload.prompt_tokens / grain))
    return RolloutStream(
        prompts=PromptSource(task.train_prompts(), (0,), choices.resampling),
        task=task,
        encode=lambda _: prompt,
        sample=lambda prompt, rollout, step: Sample(prompt, "1" * len(rollout.tokens), "", (), False, step),
        choices=choices,
        groups_per_step=workload.groups,
        completions=workload.completions,
        max_new_tokens=math.ceil(workload.max_new_tokens / grain),
        seed=0,
    )


class _Lengths:
    """Generator without a model: a rollout is its length, and each step of it is `grain` tokens.

    Everything that decodes moves on together, so a step costs what starts and ends in it, however much is in flight.
    """

    def __init__(self, workload: Workload, grain: int, slots: int, seed: int) -> None:
        self._grain, self._slots = grain, slots
        self._random = np.random.default_rng(seed)
        self._workload = workload
        self._waiting: list[tuple[GroupRequest, int]] = []
        self._ending: dict[int, list[tuple[GroupRequest, int, int]]] = defaultdict(list)  # with their first steps
        self._versions: list[int] = []  # of the weights, by step
        self._active = 0
        self._context = 0.0  # tokens in the caches of all that decode
        self.version = 0

    @property
    def in_flight(self) -> int:
        """Number of rollouts submitted and not finished."""
        return len(self._waiting) + self._active

    @property
    def free_slots(self) -> int:
        """Number of slots that no rollout has or waits for."""
        return max(0, self._slots - self.in_flight)

    def submit(self, request: GroupRequest) -> None:
        """Queue all rollouts of a group."""
        self._waiting += [(request, index) for index in range(request.completions)]

    def publish(self, weights: dict[str, Tensor], version: int, recompute_kv: bool = False) -> None:
        """Mark tokens with this version from now on."""
        self.version = version

    def step(self) -> StepReport:
        """Decode `grain` tokens of everything that has a slot."""
        now = len(self._versions)
        self._versions.append(self.version)
        room = self._slots - self._active
        started, self._waiting = self._waiting[:room], self._waiting[room:]
        for request, index in started:
            self._ending[now + self._steps() - 1].append((request, index, now))
        self._active += len(started)
        prompt = self._workload.prompt_tokens
        self._context += prompt * len(started)
        groups = len({request.key for request, _ in started})
        decoded, context = self._active, self._context + self._active * self._grain / 2
        self._context += self._active * self._grain
        finished = []
        for request, index, first in self._ending.pop(now, ()):
            length = now + 1 - first
            self._active -= 1
            self._context -= prompt + length * self._grain
            # No model has sampled these tokens: any number stands for a log-probability.
            versions = self._versions[first:]
            rollout = Rollout([2] * length, [-1.0] * length, versions, [False] * length, "stop")
            finished.append(FinishedRollout(request.key, index, rollout))
        return StepReport(finished, round(groups * prompt), 0, decoded, round(context))

    def _steps(self) -> int:
        length = self._random.gamma(4.0, self._workload.completion_tokens / 4)
        return max(1, round(min(length, self._workload.max_new_tokens) / self._grain))

    def aside(self) -> AbstractContextManager[None]:
        """Lend the generator for other work, which there is none."""
        return set_aside(self, self.close)

    def close(self) -> None:
        """Do nothing: there is nothing to release."""

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: a forecast is never saved."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore nothing."""
