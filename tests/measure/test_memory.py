"""Memory is foretold to within 15% of what a pass on real tensors has alive at its peak, and advice fits."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from lightning_scalerl.checks import ConfigurationError
from lightning_scalerl.composer import load_recipe
from lightning_scalerl.measure.memory import LiveBytes, Memory, advice, foretell, measure
from lightning_scalerl.model import policy as policy_module
from lightning_scalerl.model.policy import Policy
from lightning_scalerl.recipe import Recipe
from lightning_scalerl.rollout import Scored
from lightning_scalerl.stream.credit import assemble
from lightning_scalerl.update.terms import terms
from tests.helpers import make_group

PROMPT, COMPLETION, ROWS = 24, 40, 8
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 512,
    "max_position_embeddings": 128,
}


def model(family: str, **more: Any) -> nn.Module:
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **more})
    made: nn.Module = getattr(transformers, f"{family}ForCausalLM")(config)
    return made


def recipe(*overrides: str) -> Recipe:
    settings = (
        f"context.max_prompt_tokens={PROMPT}",
        f"context.max_new_tokens={COMPLETION}",
        f"batch.micro_batch={ROWS}",
    )
    thinking = ("thinking.interrupt_from=4", "thinking.interrupt_to=6")
    return load_recipe("scalerl", [*settings, *thinking, "batch.recompute=false", *overrides])


def foretold(make: Callable[[], nn.Module], given: Recipe, *place: Any, **more: Any) -> Memory:
    return foretell(measure(make, given), given, *place, **more)


def live(made: nn.Module, given: Recipe) -> int:
    """Peak of a pass of the training step on real tensors, beyond weights and gradients."""
    if given.batch.recompute:
        made.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
        for module in made.modules():
            module.training = bool(getattr(module, "gradient_checkpointing", False))
    policy = Policy(made, given.choices.precision)
    groups = [
        make_group([1.0, 0.0, 1.0, 0.0], admission=number, prompt_length=PROMPT, length=COMPLETION)
        for number in range(ROWS // 4)
    ]
    batch = assemble(groups, given.choices, COMPLETION)
    batch.group = None  # a shared prompt takes less
    batch.packed = given.batch.packed
    assert batch.tokens.shape == (ROWS, PROMPT + COMPLETION)
    for parameter in made.parameters():
        parameter.grad = torch.zeros_like(parameter)
    counted = LiveBytes()
    for tensor in [*made.parameters(), *made.buffers(), *(parameter.grad for parameter in made.parameters())]:
        counted.watch(tensor)  # type: ignore[arg-type]
    with counted:
        before = counted.now
        logprobs, entropies = policy(batch)
        scored = Scored(batch, logprobs, entropies)
        torch.stack([term.reduce(scored) for term in terms(given.choices)]).sum().backward()  # type: ignore[no-untyped-call]
        return counted.peak - before


@pytest.mark.parametrize(
    ("family", "more", "overrides"),
    [
        ("Llama", {}, ["precision=fp32"]),
        ("Llama", {}, ["precision=bf16"]),
        ("Llama", {}, ["precision=fp32", "batch.recompute=true"]),
        ("Llama", {"num_hidden_layers": 12}, ["precision=bf16", "batch.recompute=true"]),
        ("Qwen3", {}, ["precision=bf16"]),
        ("Qwen3", {"tie_word_embeddings": True, "vocab_size": 2048}, ["precision=fp32"]),
        ("Qwen2", {"vocab_size": 4096}, ["precision=bf16_head"]),
        ("Mistral", {"sliding_window": None}, ["precision=fp32", "batch.recompute=true"]),
        ("Gemma2", {"sliding_window": 64, "query_pre_attn_scalar": 16}, ["precision=fp32"]),
        ("Olmo2", {}, ["precision=bf16"]),
        ("Qwen3Moe", {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}, ["precision=fp32"]),
        ("Qwen3Moe", {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}, ["precision=bf16"]),
        ("Mixtral", {"num_local_experts": 4}, ["precision=fp32", "batch.recompute=true"]),
        ("Llama", {}, ["precision=fp32", "batch.packed=true"]),
        ("Llama", {"num_hidden_layers": 12}, ["precision=bf16", "batch.recompute=true", "batch.packed=true"]),
        ("Gemma2", {"sliding_window": 32, "query_pre_attn_scalar": 16}, ["precision=fp32", "batch.packed=true"]),
    ],
)
def test_a_pass_takes_what_was_foretold(family: str, more: dict[str, Any], overrides: list[str]) -> None:
    given = recipe(*overrides)
    there = live(model(family, **more), given)
    memory = foretold(partial(model, family, **more), given)
    assert memory.device["activations of a pass"] == pytest.approx(there, rel=0.15)


def test_logits_in_chunks_are_foretold_too(monkeypatch: pytest.MonkeyPatch) -> None:
    given = recipe("precision=fp32")
    whole = foretold(partial(model, "Llama", vocab_size=8192), given).device["activations of a pass"]
    monkeypatch.setattr(policy_module, "MAX_LOGITS", 8192 * 16)
    chunked = foretold(partial(model, "Llama", vocab_size=8192), given).device["activations of a pass"]
    assert chunked < whole / 2
    assert chunked == pytest.approx(live(model("Llama", vocab_size=8192), given), rel=0.15)


def test_states_and_shares() -> None:
    """FP32 weights, gradients and two moments are 16 bytes a parameter; shards divide them, copies do not."""
    given = recipe("kl=fixed", "advantage=gae", "critic=value_network", "filter=none")
    one, copies, shards = (
        foretold(partial(model, "Llama"), given, ranks, strategy)
        for ranks, strategy in ((1, "ddp"), (4, "ddp"), (4, "fsdp2"))
    )
    states = ("weights", "gradients", "Adam's moments")
    assert sum(one.device[name] for name in states) == 16 * one.parameters
    assert [copies.device[name] for name in states] == [one.device[name] for name in states]
    for name in (*states, "reference", "critic, its gradients and moments"):
        assert shards.device[name] == pytest.approx(one.device[name] / 4, abs=2)
    assert shards.device["layers made whole"] > 0 and "layers made whole" not in copies.device
    assert shards.host["weights on their way to the generator"] == 4 * one.parameters
    cached = foretold(partial(model, "Llama"), given, slots=10)
    # Keys and values of 4 layers, 2 heads, 16 numbers, in the policy's BF16.
    assert cached.leader["its keys and values"] == 4 * 2 * 2 * 16 * 2 * 10 * (PROMPT + COMPLETION)
    assert cached.peak == sum(one.device.values()) + sum(cached.leader.values())


def test_an_adapter_has_few_gradients_and_moments() -> None:
    full = foretold(partial(model, "Llama"), recipe("precision=bf16"))
    lora = foretold(partial(model, "Llama"), recipe("precision=bf16", "adapter=lora", "adapter.rank=2"))
    assert lora.device["gradients"] * 2 == lora.device["Adam's moments"] < full.device["Adam's moments"] / 10
    # The body's matrices are frozen in BF16; embeddings and head, and the adapter, are FP32.
    assert full.device["weights"] / 2 < lora.device["weights"] < full.device["weights"]
    assert lora.parameters == full.parameters


def test_the_advice_is_the_nearest_setting_that_fits() -> None:
    given = recipe("precision=fp32")
    make = partial(model, "Llama", num_hidden_layers=12)
    plain = foretold(make, given).peak
    recomputed = foretold(make, recipe("precision=fp32", "batch.recompute=true")).peak
    assert recomputed < plain
    assert advice(make, given, 1, "ddp", 0, recomputed) == "it would with batch.recompute=true"
    said = advice(make, given, 1, "ddp", 0, recomputed - 1)
    assert said == f"it would with batch.recompute=true batch.micro_tokens={PROMPT + COMPLETION}"
    states = 16 * foretold(make, given).parameters
    assert "strategy=fsdp2 driver=live on" in advice(make, given, 1, "ddp", 0, states)
    assert "smaller model" in advice(make, given, 1, "ddp", 0, 1000)


def test_a_model_that_cannot_be_gone_through_without_data_is_said_to_be_one() -> None:
    class Odd(type(model("Llama"))):  # type: ignore[misc]
        def get_output_embeddings(self) -> Any:
            return torch.nonzero(torch.zeros(3)).sum().item()

    def odd() -> nn.Module:
        made = model("Llama")
        made.__class__ = Odd
        return made

    with pytest.raises(ConfigurationError, match=r"^model: "):
        foretold(odd, recipe())
