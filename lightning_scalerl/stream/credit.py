"""Credit of groups as a TrainBatch: filter -> advantage -> normalization -> truncated -> tensors.

A pure function of the groups and the choices, so that the same batch can be credited a second time with
another choice: that is how a mechanism counter knows whether a variant changed anything (`mechanism`).

This is the credit that rewards alone decide, before any forward pass. An estimator that asks a model
(`Advantage.after_forward`) gives its advantages later, in `update.token_credit`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_scalerl.axes.normalization import Moments
from lightning_scalerl.choices import Choices
from lightning_scalerl.rollout import Denominators, Group, TrainBatch


def assemble(groups: list[Group], choices: Choices, max_new_tokens: int) -> TrainBatch:
    """Assign credit to groups and lay their rollouts out as tensors.

    Args:
        groups: the groups of one optimizer step, as sampled.
        choices: the run's design choices; `filter`, `advantage`, `normalization`, `truncated` and the user's own axes
            are used.
        max_new_tokens: the completion limit in tokens, for aggregations that divide by a constant.

    Returns:
        A batch of the rollouts that carry credit; `groups` keeps all of them.
    """
    kept = [number for number, group in enumerate(groups) if enters(group, choices)]
    rewards = [groups[number].rewards for number in kept]
    if choices.advantage.after_forward:
        advantages = [torch.zeros_like(reward) for reward in rewards]
    else:
        advantages = choices.normalization.scale([choices.advantage.estimate(r) for r in rewards], rewards)
        for own in choices.own.values():
            advantages = own.adjust_advantages(advantages, [groups[number] for number in kept])
    first_row = _offsets(groups)
    rows = []
    prompts = 0
    for number, credit in zip(kept, advantages, strict=True):
        group = groups[number]
        credited = [index for index, rollout in enumerate(group.rollouts) if choices.truncated.credits(rollout)]
        # Sampled tokens of rollouts with credit: forced ones were not sampled, and are in no denominator.
        group_tokens = sum(group.rollouts[index].forced.count(False) for index in credited)
        # A group of which all rollouts are masked as truncated is no prompt of the loss.
        prompts += bool(credited)
        for index in credited:
            rows.append((group, group.rollouts[index], float(credit[index]), group_tokens, first_row[number] + index))
    batch = lay_out(rows)
    batch.groups = groups
    batch.denominators = Denominators(
        prompts=float(prompts),
        samples=float(len(rows)),
        tokens=float(batch.loss_mask.sum()),
        max_tokens=float(max_new_tokens),
        sampled=float(sum(len(group.rollouts) for group in groups)),
    )
    return batch


def enters(group: Group, choices: Choices) -> bool:
    """Return whether a group carries credit: the filter keeps it, and enough of its rollouts have a score."""
    return group.comparable and choices.filter.keep(group)


def remember(groups: list[Group], choices: Choices) -> None:
    """Show a normalization with a memory the moments of the batch that is about to be assembled; once a batch."""
    if choices.advantage.after_forward:
        return

    def moments() -> Moments:
        kept = [choices.advantage.estimate(group.rewards) for group in groups if enters(group, choices)]
        return Moments.of(torch.cat(kept)) if kept else Moments()

    choices.normalization.remember(moments)


def _offsets(groups: list[Group]) -> list[int]:
    offsets, total = [], 0
    for group in groups:
        offsets.append(total)
        total += len(group.rollouts)
    return offsets


def lay_out(rows: list[tuple[Group, Any, float, int, int]]) -> TrainBatch:
    """Return tensors of rollouts, padded at the right; the caller fills in `groups` and `denominators`.

    Each row is (group, rollout, advantage, loss-mask tokens of the group, place among all rollouts).
    """
    count = len(rows)
    longest = max((len(rollout.tokens) for _, rollout, *_ in rows), default=0)
    sequences = [group.prompt_tokens + rollout.tokens for group, rollout, *_ in rows]

    def padded(values: list[list[Any]], width: int, dtype: torch.dtype) -> Tensor:
        table = [value + [0] * (width - len(value)) for value in values]
        return torch.tensor(table, dtype=dtype).reshape(count, width)

    rollouts = [rollout for _, rollout, *_ in rows]
    numbers: dict[int, int] = {}
    forced = padded([rollout.forced for rollout in rollouts], longest, torch.bool)
    lengths = torch.tensor([len(rollout.tokens) for rollout in rollouts], dtype=torch.long)
    sampled = (torch.arange(longest) < lengths.unsqueeze(1)) & ~forced
    # In float64 until here (`Group.rewards`), rounded once.
    advantages = torch.tensor([credit for _, _, credit, *_ in rows], dtype=torch.float32)
    return TrainBatch(
        tokens=padded(sequences, max(map(len, sequences), default=0), torch.long),
        lengths=torch.tensor([len(sequence) for sequence in sequences], dtype=torch.long),
        completion_start=torch.tensor([len(group.prompt_tokens) for group, *_ in rows], dtype=torch.long),
        generator_logprobs=padded([rollout.generator_logprobs for rollout in rollouts], longest, torch.float32),
        weight_versions=padded([rollout.weight_versions for rollout in rollouts], longest, torch.long),
        loss_mask=sampled.float(),
        forced_mask=forced,
        advantages=advantages.unsqueeze(1).expand(-1, longest).contiguous(),
        sample_tokens=sampled.sum(1).float(),
        group_tokens=torch.tensor([tokens for *_, tokens, _ in rows], dtype=torch.float32),
        row=torch.tensor([row for *_, row in rows], dtype=torch.long),
        rewards=torch.tensor([rollout.reward for rollout in rollouts], dtype=torch.float32),
        pass_rates=torch.tensor([group.pass_rate_so_far for group, *_ in rows], dtype=torch.float32),
        # By the group's identity: a batch may hold two groups of one prompt.
        group=torch.tensor([numbers.setdefault(id(group), len(numbers)) for group, *_ in rows], dtype=torch.long),
        denominators=Denominators(0.0, 0.0, 0.0, 0.0),
    )
