"""Memory predictions are within 15% of the live bytes at the peak of a real pass, and advised settings fit."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from lightning_scalerl.checks import ConfigurationError
from lightning_scalerl.composition import load_recipe
from lightning_scalerl.distributed.sharded import local_shard
from lightning_scalerl.measure.memory import LiveBytes, Memory, advice, measure, predict_memory
from lightning_scalerl.model import policy as policy_module
from lightning_scalerl.model.policy import Policy
from lightning_scalerl.model.recompute import recompute
from lightning_scalerl.model.tensor_parallel import parallelize
from lightning_scalerl.recipe import Recipe
from lightning_scalerl.rollouts.rollout import Scored
from lightning_scalerl.stream.credit import assemble
from lightning_scalerl.update.terms import terms
from tests.distributed.test_ranks import one_thread  # noqa: F401
from tests.distributed.test_tensor_parallel import on_mesh
from tests.examples import every
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
    built: nn.Module = getattr(transformers, f"{family}ForCausalLM")(config)
    return built


def recipe(*overrides: str) -> Recipe:
    settings = (
        f"context.max_prompt_tokens={PROMPT}",
        f"context.max_new_tokens={COMPLETION}",
        f"batch.micro_batch={ROWS}",
    )
    thinking = ("thinking.interrupt_from=4", "thinking.interrupt_to=6")
    return load_recipe("scalerl", [*settings, *thinking, "batch.recompute=false", *overrides])


def predicted(make: Callable[[], nn.Module], settings: Recipe, *placement: Any, **more: Any) -> Memory:
    return predict_memory(measure(make, settings), settings, *placement, **more)


def save_in_numpy() -> saved_tensors_hooks:
    """Hooks that keep saved tensors in numpy, where torch does not count them, like the host memory of a GPU."""
    return saved_tensors_hooks(lambda tensor: tensor.detach().numpy().copy(), torch.from_numpy)


def measured_bytes(built: nn.Module, settings: Recipe, split: Callable[[nn.Module], None] | None = None) -> int:
    """Return the peak of live bytes of a training pass on real tensors, without weights and gradients."""
    if settings.batch.recompute:
        recompute(built, save_in_numpy if settings.batch.offload else None)
        for module in built.modules():
            module.training = bool(getattr(module, "gradient_checkpointing", False))
    policy = Policy(built, settings.choices.precision)
    if split is not None:
        split(policy)
    groups = [
        make_group([1.0, 0.0, 1.0, 0.0], admission=number, prompt_length=PROMPT, length=COMPLETION)
        for number in range(ROWS // 4)
    ]
    batch = assemble(groups, settings.choices, COMPLETION)
    batch.group = None  # no shared prompts, which would take less memory
    batch.packed = settings.batch.packed
    assert batch.tokens.shape == (ROWS, PROMPT + COMPLETION)
    for parameter in built.parameters():
        parameter.grad = torch.zeros_like(parameter)
    counted = LiveBytes() if split is None else LiveBytesOfARank()
    for tensor in [*built.parameters(), *built.buffers(), *(parameter.grad for parameter in built.parameters())]:
        counted.watch(local_shard(tensor)[0])  # type: ignore[arg-type]
    with counted:
        bytes_before = counted.now
        logprobs, entropies = policy(batch)
        scored = Scored(batch, logprobs, entropies)
        torch.stack([term.reduce(scored) for term in terms(settings.choices)]).sum().backward()  # type: ignore[no-untyped-call]
        return counted.peak - bytes_before


@pytest.mark.parametrize(
    ("family", "more", "overrides"),
    every(
        6,
        every(
            3,
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
                (
                    "Qwen3Moe",
                    {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
                    ["precision=fp32"],
                ),
                (
                    "Qwen3Moe",
                    {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
                    ["precision=bf16"],
                ),
                ("Mixtral", {"num_local_experts": 4}, ["precision=fp32", "batch.recompute=true"]),
                ("Llama", {"num_hidden_layers": 12}, ["precision=fp32", "batch.recompute=true", "batch.offload=true"]),
                ("Llama", {}, ["precision=fp32", "batch.packed=true"]),
                ("Llama", {"num_hidden_layers": 12}, ["precision=bf16", "batch.recompute=true", "batch.packed=true"]),
                (
                    "Gemma2",
                    {"sliding_window": 32, "query_pre_attn_scalar": 16},
                    ["precision=fp32", "batch.packed=true"],
                ),
            ],
            pytest.mark.full,
        ),
    ),
)
def test_a_pass_takes_the_predicted_memory(family: str, more: dict[str, Any], overrides: list[str]) -> None:
    settings = recipe(*overrides)
    measured = measured_bytes(model(family, **more), settings)
    memory = predicted(partial(model, family, **more), settings)
    assert memory.device["activations of a pass"] == pytest.approx(measured, rel=0.15)


def test_chunked_logits_are_predicted_too(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = recipe("precision=fp32")
    whole = predicted(partial(model, "Llama", vocab_size=8192), settings).device["activations of a pass"]
    monkeypatch.setattr(policy_module, "MAX_LOGITS", 8192 * 16)
    chunked = predicted(partial(model, "Llama", vocab_size=8192), settings).device["activations of a pass"]
    assert chunked < whole / 2
    assert chunked == pytest.approx(measured_bytes(model("Llama", vocab_size=8192), settings), rel=0.15)


class LiveBytesOfARank(LiveBytes):
    """Count the local part of a sharded tensor or of one in communication, not the whole tensor."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor | AsyncCollectiveTensor) for kind in types):
            return NotImplemented
        return super().__torch_dispatch__(func, types, args, kwargs)


@pytest.mark.parametrize(
    ("family", "more", "overrides"),
    [
        ("Llama", {}, ["precision=fp32"]),
        *every(
            7,
            every(
                3,
                [
                    ("Llama", {"vocab_size": 8192, "chunk": 16}, ["precision=fp32"]),
                    ("Qwen3", {"tie_word_embeddings": True, "vocab_size": 2048}, ["precision=bf16"]),
                    ("Llama", {"num_hidden_layers": 12}, ["precision=bf16", "batch.recompute=true"]),
                    ("Gemma2", {"sliding_window": 64, "query_pre_attn_scalar": 16}, ["precision=fp32"]),
                    ("Phi3", {"pad_token_id": 0}, ["precision=fp32"]),
                    ("Olmo2", {"vocab_size": 513}, ["precision=fp32"]),
                ],
                pytest.mark.full,
            ),
        ),
    ],
)
def test_a_tensor_parallel_pass_takes_the_predicted_memory(
    family: str, more: dict[str, Any], overrides: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two gloo ranks split each layer. Parameter counts are exact, activations are within 15%."""
    sizes = {name: value for name, value in more.items() if name != "chunk"}
    if "chunk" in more:
        monkeypatch.setattr(policy_module, "MAX_LOGITS", more["vocab_size"] * more["chunk"])
    settings = recipe(*overrides)
    prediction = measure(partial(model, family, **sizes), settings, partners=2)

    def work(mesh: DeviceMesh) -> None:
        split_model = model(family, **sizes)
        measured = measured_bytes(split_model, settings, lambda policy: parallelize(policy, mesh["tensor_parallel"]))
        local_parameters = sum(local_shard(parameter)[0].numel() for parameter in split_model.parameters())
        assert (prediction.whole, prediction.weights, prediction.trained) == (
            4 * local_parameters,
            4 * local_parameters,
            local_parameters,
        )
        assert prediction.activations == pytest.approx(measured, rel=0.15), prediction.activations / measured

    on_mesh(tmp_path, 1, 2, work)


def test_states_are_divided_by_shards_and_not_by_copies() -> None:
    """FP32 weights, gradients and two moments take 16 bytes per parameter, which shards divide and copies do not."""
    settings = recipe("kl=fixed", "advantage=gae", "critic=value_network", "filter=none")
    one, copies, shards = (
        predicted(partial(model, "Llama"), settings, ranks, strategy)
        for ranks, strategy in ((1, "ddp"), (4, "ddp"), (4, "fsdp2"))
    )
    states = ("weights", "gradients", "Adam's moments")
    assert sum(one.device[name] for name in states) == 16 * one.parameters
    assert [copies.device[name] for name in states] == [one.device[name] for name in states]
    for name in (*states, "reference", "critic, its gradients and moments"):
        assert shards.device[name] == pytest.approx(one.device[name] / 4, abs=2)
    assert shards.device["layers made whole"] > 0 and "layers made whole" not in copies.device
    assert shards.host["weights on their way to the generator"] == 4 * one.parameters
    split_prediction = measure(partial(model, "Llama"), settings, partners=2)
    split = predict_memory(split_prediction, settings, 4, "fsdp2")
    assert one.parameters / 2 < split_prediction.trained < 0.51 * one.parameters, "each partner has whole norms"
    assert sum(split.device[name] for name in states) == pytest.approx(16 * split_prediction.trained / 2, abs=4)
    assert split.host == shards.host and split.parameters == one.parameters
    assert split.device["layers made whole"] < 0.51 * shards.device["layers made whole"]
    with pytest.raises(ConfigurationError, match=r"strategy\.tensor_parallel: 3 does not divide the model's num_att"):
        measure(partial(model, "Llama"), settings, partners=3)
    cached = predicted(partial(model, "Llama"), settings, slots=10)
    # Keys and values of 4 layers and 2 heads, 16 numbers each, in the policy's BF16.
    assert cached.leader["its keys and values"] == 4 * 2 * 2 * 16 * 2 * 10 * (PROMPT + COMPLETION)
    assert cached.peak == sum(one.device.values()) + sum(cached.leader.values())


def test_an_adapter_has_few_gradients_and_moments() -> None:
    full = predicted(partial(model, "Llama"), recipe("precision=bf16"))
    lora = predicted(partial(model, "Llama"), recipe("precision=bf16", "adapter=lora", "adapter.rank=2"))
    assert lora.device["gradients"] * 2 == lora.device["Adam's moments"] < full.device["Adam's moments"] / 10
    # The body's matrices are frozen in BF16; embeddings and head, and the adapter, are FP32.
    assert full.device["weights"] / 2 < lora.device["weights"] < full.device["weights"]
    assert lora.parameters == full.parameters


@pytest.mark.full
def test_the_advice_is_the_nearest_setting_that_fits() -> None:
    settings = recipe("precision=fp32")
    make = partial(model, "Llama", num_hidden_layers=4)
    plain = predicted(make, settings).peak
    recomputed = predicted(make, recipe("precision=fp32", "batch.recompute=true")).peak
    assert recomputed < plain
    assert advice(make, settings, 1, "ddp", 0, recomputed) == "it would with batch.recompute=true"
    advised = advice(make, settings, 1, "ddp", 0, recomputed - 1)
    one_row_per_pass = f"it would with batch.recompute=true batch.micro_tokens={PROMPT + COMPLETION}"
    assert advised == one_row_per_pass
    recomputed_row = predicted(make, recipe("precision=fp32", "batch.recompute=true", "batch.micro_batch=1"))
    offloaded_row = predicted(
        make, recipe("precision=fp32", "batch.recompute=null", "batch.offload=true", "batch.micro_batch=1")
    )
    inputs = 4 * (PROMPT + COMPLETION - 1) * SIZES["hidden_size"] * 4
    assert offloaded_row.host["inputs of layers, of each device's pass"] == inputs
    assert recomputed_row.peak > offloaded_row.peak > recomputed_row.peak - inputs
    assert advice(make, settings, 1, "ddp", 0, recomputed_row.peak - 1) == f"{one_row_per_pass} batch.offload=true"
    assert advice(make, settings, 1, "ddp", 0, offloaded_row.peak) == f"{one_row_per_pass} batch.offload=true"
    states = 16 * predicted(make, settings).parameters
    assert "strategy=fsdp2 driver=live on" in advice(make, settings, 1, "ddp", 0, states)
    assert "smaller model" in advice(make, settings, 1, "ddp", 0, 1000)


def test_a_model_that_cannot_be_traced_without_data_is_refused() -> None:
    class Odd(type(model("Llama"))):  # type: ignore[misc]
        def get_output_embeddings(self) -> Any:
            return torch.nonzero(torch.zeros(3)).sum().item()

    def odd() -> nn.Module:
        odd_model = model("Llama")
        odd_model.__class__ = Odd
        return odd_model

    with pytest.raises(ConfigurationError, match=r"^model: "):
        predicted(odd, recipe())
