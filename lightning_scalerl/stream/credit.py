"""From groups to a TrainBatch: filter -> credit -> advantage -> normalization -> truncated -> tensors.

`assemble` is a pure function of the groups and the choices. The mechanism counters (`measure.mechanism`) rely on this:
they assemble the same groups again with another choice, to see whether a variant changed anything.

Here credit depends on rewards only; no forward pass is made. Estimators that need a model (`Advantage.after_forward`)
compute advantages later, in `update.token_credit`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_scalerl.axes.credit import turn_of_tokens
from lightning_scalerl.axes.filter import has_variance
from lightning_scalerl.axes.normalization import Moments
from lightning_scalerl.axes.results import check_bool, check_shape, check_shapes
from lightning_scalerl.choices import Choices
from lightning_scalerl.rollouts.rollout import Denominators, Group, Rollout, Source, TrainBatch


def assemble(groups: list[Group], choices: Choices, max_new_tokens: int) -> TrainBatch:
    """Compute advantages for groups and pack the rollouts that carry credit into tensors.

    Args:
        groups: the groups of one optimizer step, as sampled.
        choices: the run's design choices; `filter`, `credit`, `advantage`, `normalization`, `truncated` and the user's
            own axes are used.
        max_new_tokens: the completion limit in tokens, for aggregations that divide by a constant.

    Returns:
        A batch of the rollouts that carry credit; its attribute `groups` has all sampled groups.
    """
    # Use indices, not groups, because `first_row` below counts all sampled rollouts, including those of dropped groups.
    kept_indices = [group_index for group_index, group in enumerate(groups) if carries_credit(group, choices)]
    comparisons = [
        (group_index, one) for group_index in kept_indices for one in choices.credit.comparisons(groups[group_index])
    ]
    values = [comparison.values for _, comparison in comparisons]
    if choices.advantage.after_forward:
        # Placeholders: `update.token_credit` fills them in after the forward pass.
        advantages = [torch.zeros_like(part) for part in values]
    else:
        scaled = choices.normalization.scale([_estimate(part, choices) for part in values], values)
        advantages = check_shapes(choices.normalization, "scale", scaled, values)
        # Axes defined by the user adjust the result last.
        for axis in choices.user_axes.values():
            adjusted = axis.adjust_advantages(advantages, [groups[group_index] for group_index, _ in comparisons])
            advantages = check_shapes(axis, "adjust_advantages", adjusted, values)
    # Advantages by group and rollout: one value, or one value per turn in the order of turns.
    advantages_of: dict[int, list[list[float]]] = {
        group_index: [[] for _ in groups[group_index].rollouts] for group_index in kept_indices
    }
    for (group_index, comparison), advantage in zip(comparisons, advantages, strict=True):
        for index, value in zip(comparison.rows, advantage.tolist(), strict=True):
            advantages_of[group_index][index].append(value)
    first_row = _offsets(groups)
    rows = []
    prompts = 0
    for group_index in kept_indices:
        group = groups[group_index]
        credited = [
            index
            for index, rollout in enumerate(group.rollouts)
            if check_bool(choices.truncated, "credits", choices.truncated.credits(rollout))
        ]
        # Inserted tokens were not sampled, so they do not count in any denominator.
        group_tokens = sum(group.rollouts[index].sources.count(Source.SAMPLED) for index in credited)
        # A group whose rollouts are all masked as truncated does not count as a prompt of the loss.
        prompts += bool(credited)
        for index in credited:
            rows.append(
                (
                    group,
                    group.rollouts[index],
                    advantages_of[group_index][index],
                    group_tokens,
                    first_row[group_index] + index,
                )
            )
    batch = to_tensors(rows)
    batch.groups = groups
    batch.denominators = Denominators(
        prompts=float(prompts),
        samples=float(len(rows)),
        tokens=float(batch.loss_mask.sum()),
        max_tokens=float(max_new_tokens),
        scored_samples=float(sum(len(group.rollouts) for group in groups)),
    )
    return batch


def _estimate(values: Tensor, choices: Choices) -> Tensor:
    """Return the advantages (G,) of the values (G,) that are compared."""
    return check_shape(choices.advantage, "estimate", choices.advantage.estimate(values), values.shape)


def _by_token(rollout: Rollout, advantages: list[float]) -> list[float]:
    """Return the advantage of each token: its turn's advantage, or the rollout's if there is only one."""
    return (
        [advantages[turn] for turn in turn_of_tokens(rollout)]
        if len(advantages) > 1
        else advantages * len(rollout.tokens)
    )


def carries_credit(group: Group, choices: Choices) -> bool:
    """Return whether a group carries credit: enough of its rollouts have a score, and the filter keeps it.

    A filter by variance also keeps a group with equal rewards if the values that axis `credit` compares differ. With
    credit by turn, rollouts may receive equal rewards in different turns.
    """
    if not group.comparable:
        return False
    if check_bool(choices.filter, "keep", choices.filter.keep(group)):
        return True
    return choices.filter.by_variance and any(
        has_variance(comparison.values) for comparison in choices.credit.comparisons(group)
    )


def update_moments(groups: list[Group], choices: Choices) -> None:
    """Update the running moments of the normalization, if it has any, with the moments of this batch.

    Call it once per batch, before `assemble`, which is pure and cannot update them.
    """
    if choices.advantage.after_forward:
        return

    # The moments are passed as a function, because a normalization without running moments never needs them.
    def moments() -> Moments:
        comparisons = [
            part for group in groups if carries_credit(group, choices) for part in choices.credit.comparisons(group)
        ]
        estimates = [_estimate(part.values, choices) for part in comparisons]
        return Moments.of(torch.cat(estimates)) if estimates else Moments()

    choices.normalization.remember(moments)


def _offsets(groups: list[Group]) -> list[int]:
    """Return the index of each group's first rollout among all rollouts of the batch."""
    offsets, total = [], 0
    for group in groups:
        offsets.append(total)
        total += len(group.rollouts)
    return offsets


def to_tensors(rows: list[tuple[Group, Any, list[float], int, int]]) -> TrainBatch:
    """Return rollouts as tensors, padded on the right. The caller fills in `groups` and `denominators`.

    Args:
        rows: one tuple per rollout: its group, the rollout, its advantage (one, or one per turn), the number of tokens
            of its group in the loss mask, and its index among all rollouts of the batch.
    """
    count = len(rows)
    longest = max((len(rollout.tokens) for _, rollout, *_ in rows), default=0)
    sequences = [group.prompt_tokens + rollout.tokens for group, rollout, *_ in rows]

    def padded(values: list[list[Any]], width: int, dtype: torch.dtype) -> Tensor:
        table = [value + [0] * (width - len(value)) for value in values]
        return torch.tensor(table, dtype=dtype).reshape(count, width)

    rollouts = [rollout for _, rollout, *_ in rows]
    numbers: dict[int, int] = {}
    inserted = padded([rollout.sources for rollout in rollouts], longest, torch.int8) != Source.SAMPLED
    lengths = torch.tensor([len(rollout.tokens) for rollout in rollouts], dtype=torch.long)
    sampled = (torch.arange(longest) < lengths.unsqueeze(1)) & ~inserted
    # Rewards and advantages are float64 up to this point (`Group.rewards`), so that they are rounded only once.
    if all(len(credit) == 1 for _, _, credit, *_ in rows):
        advantages = torch.tensor([credit for _, _, credit, *_ in rows], dtype=torch.float32)
        advantages = advantages.reshape(count, 1).expand(-1, longest).contiguous()
    else:
        by_token = [_by_token(rollout, credit) for _, rollout, credit, *_ in rows]
        advantages = padded(by_token, longest, torch.float32)
    return TrainBatch(
        tokens=padded(sequences, max(map(len, sequences), default=0), torch.long),
        lengths=torch.tensor([len(sequence) for sequence in sequences], dtype=torch.long),
        completion_start=torch.tensor([len(group.prompt_tokens) for group, *_ in rows], dtype=torch.long),
        generator_logprobs=padded([rollout.generator_logprobs for rollout in rollouts], longest, torch.float32),
        weight_versions=padded([rollout.weight_versions for rollout in rollouts], longest, torch.long),
        loss_mask=sampled.float(),
        forced_mask=inserted,
        advantages=advantages,
        sample_tokens=sampled.sum(1).float(),
        group_tokens=torch.tensor([tokens for *_, tokens, _ in rows], dtype=torch.float32),
        row=torch.tensor([row for *_, row in rows], dtype=torch.long),
        rewards=torch.tensor([rollout.reward for rollout in rollouts], dtype=torch.float32),
        pass_rates=torch.tensor([group.pass_rate_so_far for group, *_ in rows], dtype=torch.float32),
        # Groups are numbered by object, not by prompt: a batch may hold two groups of the same prompt.
        group=torch.tensor([numbers.setdefault(id(group), len(numbers)) for group, *_ in rows], dtype=torch.long),
        denominators=Denominators(0.0, 0.0, 0.0, 0.0),
    )
