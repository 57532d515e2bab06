"""The scheduler, with scripted generators: staleness, order, nothing lost, one rule at a time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lightning_scalerl.advantage import GroupAdvantage
from lightning_scalerl.async_mode import OnPolicy, PPOOffPolicy
from lightning_scalerl.async_mode.base import AsyncMode
from lightning_scalerl.choice import ConfigurationError
from lightning_scalerl.clock import ManualClock
from lightning_scalerl.filter import NoFilter
from lightning_scalerl.generator.base import GroupRequest
from lightning_scalerl.generator.scripted import ScriptedGenerator
from lightning_scalerl.normalization import NoNormalization
from lightning_scalerl.prompts import PromptSource
from lightning_scalerl.rollout_stream import Event, RewardError, RolloutStream
from tests.helpers import CountingTask


class StreamingMode(AsyncMode):
    """A mode that never drains: publishes every step, may run k steps ahead. Exercises the waiting rule."""

    def __init__(self, k: int) -> None:
        self.k = k

    @property
    def max_staleness(self) -> int:
        return self.k

    @property
    def drains(self) -> bool:
        return False

    def may_admit(self, admission: int, completed_steps: int, groups_per_step: int) -> bool:
        return admission // groups_per_step <= completed_steps + self.k

    def publishes(self, completed_steps: int) -> bool:
        return True

    def scheduled_staleness(self, completed_steps: int) -> int:
        return self.k


def stream_of(
    mode: AsyncMode,
    lengths: Mapping[tuple[int, int], int] | None = None,
    slots: int = 5,
    groups: int = 2,
    size: int = 3,
) -> tuple[RolloutStream, list[Event]]:
    def script(request: GroupRequest, index: int) -> list[int]:
        default = 1 + (request.key * 5 + index * 3) % 7
        return [2] * (lengths.get((request.key, index), default) if lengths else default)

    task = CountingTask()
    events: list[Event] = []
    stream = RolloutStream(
        prompts=PromptSource(task.train_prompts(), (0,)),
        task=task,
        encode=lambda text: [1, 2],
        decode=lambda tokens: "1" * (len(tokens) % 2) + "0" * 3,
        generator=ScriptedGenerator(script, slots),
        choices={
            "async_mode": mode,
            "filter": NoFilter(),
            "advantage": GroupAdvantage(),
            "normalization": NoNormalization(),
        },
        groups_per_step=groups,
        completions=size,
        max_new_tokens=100,
        seed=0,
        clock=ManualClock(),
        listeners=[events.append],
    )
    return stream, events


def train(stream: RolloutStream, steps: int) -> list[Any]:
    batches = []
    for _ in range(steps):
        batches.append(stream.next_batch())
        stream.step_completed(dict)
    return batches


@settings(max_examples=200, deadline=None)
@example(k=4, slots=5, groups=1, seed=2, streaming=True, giant=True)  # two late groups of one version, one place
@given(
    k=st.integers(1, 5),
    slots=st.integers(1, 9),
    groups=st.integers(1, 4),
    seed=st.integers(0, 10**6),
    streaming=st.booleans(),
    giant=st.booleans(),
)
def test_staleness_bounded_nothing_lost_nothing_stuck(
    k: int, slots: int, groups: int, seed: int, streaming: bool, giant: bool
) -> None:
    """Invariant 4, for random lengths and rates, also with one rollout a hundred times longer than the rest."""
    source = torch.Generator().manual_seed(seed)
    lengths = {(g, i): int(torch.randint(1, 9, (1,), generator=source)) for g in range(80) for i in range(2)}
    if giant:
        lengths[3, 1] = 800
    mode = StreamingMode(k) if streaming else PPOOffPolicy(k)
    stream, _ = stream_of(mode, lengths, slots, groups, size=2)
    steps = 12
    seen = []
    for step, batch in enumerate(train(stream, steps)):
        for group in batch.groups:
            assert step - group.oldest_version <= mode.max_staleness
            seen.append(group.admission)
        assert len(batch.groups) == groups
    assert len(seen) == len(set(seen))
    # Nothing waits for ever: whatever was admitted k + 1 steps before the end has been trained.
    overdue = max(0, steps - 1 - k) * groups if streaming else (steps - steps % k) * groups
    assert set(range(overdue)) <= set(seen)


@pytest.mark.parametrize("k", [1, 2, 8])
def test_ppo_off_policy_generates_for_k_steps_then_trains_k_steps(k: int) -> None:
    stream, events = stream_of(PPOOffPolicy(k))
    batches = train(stream, 2 * k)
    staleness = [[step - g.oldest_version for g in batch.groups] for step, batch in enumerate(batches)]
    assert staleness == [[step % k] * 2 for step in range(2 * k)]
    order = [event.kind for event in events if event.kind in ("admit", "batch", "publish")]
    phase = ["admit"] * (2 * k) + ["batch"] * k + ["publish"]
    assert order == phase * 2
    # Batches come in order of admission: none is short of long completions.
    assert [g.admission for batch in batches for g in batch.groups] == list(range(4 * k))


def test_on_policy_is_k_one() -> None:
    assert OnPolicy().max_staleness == 0
    assert OnPolicy().parameters() == {}
    assert OnPolicy().state_key == "async_mode:OnPolicy"


@pytest.mark.parametrize("k", [0, -1, 1.5, True, "8"])
def test_k_must_be_a_whole_number_above_zero(k: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"async_mode\.k"):
        PPOOffPolicy(k)


def test_every_epoch_has_every_prompt_once() -> None:
    task = CountingTask()
    source = PromptSource(task.train_prompts(), (3, 1))
    epochs = [[source.next().prompt_id for _ in range(8)] for _ in range(3)]
    assert all(sorted(epoch) == sorted(p.prompt_id for p in task.train_prompts()) for epoch in epochs)
    assert epochs[0] != epochs[1]
    assert source.epoch == 3


@pytest.mark.parametrize("taken", [0, 3, 8, 13])
def test_prompt_order_resumes(taken: int) -> None:
    pool = CountingTask().train_prompts()
    one, two = PromptSource(pool, (5,)), PromptSource(pool, (5,))
    for _ in range(taken):
        one.next()
    two.load_state_dict(one.state_dict())
    assert [one.next() for _ in range(20)] == [two.next() for _ in range(20)]


@pytest.mark.parametrize("bad", ["raises", "nan", "text"])
def test_a_broken_verifier_names_its_prompt(bad: str) -> None:
    stream, _ = stream_of(OnPolicy())

    def reward(prompt: Any, completion: str) -> Any:
        if bad == "raises":
            raise KeyError("gone")
        return float("nan") if bad == "nan" else "good"

    stream.task.reward = reward  # type: ignore[method-assign]
    with pytest.raises(RewardError, match=r"reward of prompt 'p\d+'"):
        stream.next_batch()
