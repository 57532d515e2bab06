"""Shared prompts: one forward pass over a prompt serves all its rollouts, with unchanged values and gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from transformers import (
    GemmaConfig,
    GemmaForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from lightning_scalerl.axes.precision import Precision
from lightning_scalerl.model import policy as policy_module
from lightning_scalerl.model.policy import Policy
from lightning_scalerl.model.shared_prompt import shares_prompts, sharing_pays_off
from lightning_scalerl.rollouts.prompt import Prompt
from lightning_scalerl.rollouts.rollout import Group, PassSize, Rollout, TrainBatch
from lightning_scalerl.stream.credit import to_tensors

SMALL: dict[str, Any] = {
    "vocab_size": 48,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
    "attention_dropout": 0.0,
}
FAMILIES: dict[str, Callable[[], nn.Module]] = {
    "llama, grouped heads": lambda: LlamaForCausalLM(LlamaConfig(**SMALL, num_key_value_heads=1)),
    "llama, eager": lambda: LlamaForCausalLM(LlamaConfig(**SMALL, attn_implementation="eager")),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SMALL, num_key_value_heads=1, head_dim=8)),
    "gemma": lambda: GemmaForCausalLM(GemmaConfig(**SMALL, num_key_value_heads=1, head_dim=8)),
    "gpt-neox": lambda: GPTNeoXForCausalLM(GPTNeoXConfig(**SMALL)),
    "gpt-2, learned positions": lambda: GPT2LMHeadModel(
        GPT2Config(vocab_size=48, n_embd=16, n_layer=2, n_head=2, n_positions=64)
    ),
    "opt, learned positions": lambda: OPTForCausalLM(OPTConfig(**{**SMALL, "ffn_dim": 32}, word_embed_proj_dim=16)),
}
WINDOWED = MistralConfig(**SMALL, num_key_value_heads=1, sliding_window=4)


def batch_of(prompts: list[list[int]], completions: list[list[int]]) -> TrainBatch:
    """A batch of random completions with these numbers of tokens for each prompt."""
    rows: list[Any] = []
    source = torch.Generator().manual_seed(sum(map(len, prompts)))
    for number, (tokens, lengths) in enumerate(zip(prompts, completions, strict=True)):
        rollouts = []
        for length in lengths:
            sampled = torch.randint(1, 48, (length,), generator=source).tolist()
            rollouts.append(Rollout(sampled, [0.0] * length, [0] * length, [False] * length, "stop"))
        group = Group(number, Prompt(str(number), "", "", ""), tokens, rollouts)
        rows += [(group, rollout, [0.0], 0, len(rows) + at) for at, rollout in enumerate(rollouts)]
    return to_tensors(rows)


def plain_and_shared(
    model: nn.Module, batch: TrainBatch, monkeypatch: pytest.MonkeyPatch
) -> list[tuple[torch.Tensor, ...]]:
    """Log-probabilities, entropies and the gradient of a sum of both, without and with shared prompts."""
    policy = Policy(model, Precision("fp32", False, False)).eval()
    results = []
    for share in (False, True):
        monkeypatch.setattr(policy_module, "sharing_pays_off", lambda batch, share=share: share)
        policy.zero_grad()
        logprobs, entropies = policy(batch, entropy_gradient=True)
        weights = torch.linspace(0.5, 2.0, logprobs.numel()).reshape(logprobs.shape)
        (weights * logprobs + 0.3 * entropies).sum().backward()
        gradient = torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None])
        results.append((logprobs.detach(), entropies.detach(), gradient))
    return results


@pytest.mark.parametrize("family", FAMILIES)
def test_sharing_changes_no_values_or_gradients(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts have unequal lengths, one completion has one token, and one prompt has a single rollout."""
    torch.manual_seed(0)
    model = FAMILIES[family]()
    batch = batch_of([[5, 6, 7, 8, 9], [5, 6], [11] * 7], [[4, 1, 6], [3, 3, 2, 5], [2]])
    assert shares_prompts(model)
    plain, shared = plain_and_shared(model, batch, monkeypatch)
    for ours, theirs in zip(shared, plain, strict=True):
        assert float((ours - theirs).norm()) <= 2e-6 * max(float(theirs.norm()), 1.0)


@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    rollouts=st.lists(st.lists(st.integers(1, 7), min_size=1, max_size=5), min_size=5, max_size=5),
)
def test_sharing_changes_nothing_in_any_batch(lengths: list[int], rollouts: list[list[int]]) -> None:
    torch.manual_seed(1)
    model = LlamaForCausalLM(LlamaConfig(**SMALL, num_key_value_heads=1))
    batch = batch_of([list(range(1, length + 1)) for length in lengths], rollouts[: len(lengths)])
    with pytest.MonkeyPatch.context() as patch:
        plain, shared = plain_and_shared(model, batch, patch)
    for ours, theirs in zip(shared, plain, strict=True):
        torch.testing.assert_close(ours, theirs, atol=3e-6, rtol=3e-5)


def test_prompts_are_not_shared_if_results_could_differ_or_nothing_is_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    """A window that a prompt may exceed, training mode (dropout), too little to save, unknown groups."""
    assert not shares_prompts(MistralForCausalLM(WINDOWED))
    model = FAMILIES["llama, grouped heads"]()
    policy = Policy(model, Precision("fp32", False, False))
    assert not policy.train().shares_prompts
    assert policy.eval().shares_prompts
    assert sharing_pays_off(batch_of([[1, 2, 3, 4]], [[4] * 4]))
    assert not sharing_pays_off(batch_of([[1, 2, 3, 4], [5, 6]], [[4], [5]]))
    assert not sharing_pays_off(batch_of([[1]], [[30] * 4]))
    unknown = batch_of([[1, 2, 3, 4]], [[4] * 4])
    unknown.group = None
    assert not sharing_pays_off(unknown)


def test_a_shared_prompt_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixteen rollouts of a prompt of twenty tokens pass it through the model once."""
    model = FAMILIES["llama, grouped heads"]()
    policy = Policy(model, Precision("fp32", False, False)).eval()
    assert policy.shares_prompts
    token_counts: list[int] = []
    model.get_input_embeddings().register_forward_hook(
        lambda module, inputs, output: token_counts.append(inputs[0].numel())
    )
    policy(batch_of([list(range(1, 21))], [[5] * 16]))
    assert token_counts == [20, 16 * 4]


def test_micro_batches_keep_groups_together() -> None:
    batch = batch_of([[1, 2], [3], [4, 5, 6]], [[2, 9, 3, 4], [7, 7, 1, 2], [3, 3, 3, 3]])
    assert batch.group is not None
    parts = [batch.group[rows].tolist() for rows in batch.cut(PassSize(4))]
    assert parts == [[0] * 4, [1] * 4, [2] * 4]
    assert sorted(torch.cat(list(batch.cut(PassSize(5)))).tolist()) == list(range(12))


@given(
    st.lists(st.lists(st.integers(1, 12), min_size=1, max_size=5), min_size=1, max_size=6),
    st.integers(1, 8),
    st.integers(1, 60),
)
def test_passes_stay_within_their_limits(groups: list[list[int]], rollouts: int, tokens: int) -> None:
    """Each rollout is in one pass, padded rows stay within the token limit, and a pass ends only if it must."""
    batch = batch_of([[1, 2]] * len(groups), groups)
    size = PassSize(rollouts, tokens)
    parts = list(batch.cut(size))
    assert sorted(torch.cat(parts).tolist()) == list(range(batch.rollouts))

    def too_much(rows: list[int]) -> bool:
        return len(rows) > rollouts or len(rows) * int(batch.lengths[rows].max()) > tokens

    for number, part in enumerate(parts):
        rows = part.tolist()
        assert len(rows) == 1 or not too_much(rows)
        if number + 1 < len(parts):
            assert too_much([*rows, int(parts[number + 1][0])])


def test_a_pass_without_a_limit_of_tokens_is_cut_by_rollouts_alone() -> None:
    batch = batch_of([[1, 2], [3]], [[2, 9, 3, 4], [7, 7, 1]])
    assert [len(rows) for rows in batch.cut(PassSize(3))] == [3, 3, 1]
