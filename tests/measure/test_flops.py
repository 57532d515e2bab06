"""FLOPs equal torch's count of the same forward pass. Experts count by the share that a token uses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

from lightning_scalerl import ConfigurationError
from lightning_scalerl.axes.precision import Precision
from lightning_scalerl.generator.base import GroupRequest, SamplingSettings, StepReport
from lightning_scalerl.generator.torch.generator import TorchGenerator
from lightning_scalerl.measure.compute_meter import ComputeMeter
from lightning_scalerl.measure.flops import FlopModel
from lightning_scalerl.model.windows import attention_windows, outside
from lightning_scalerl.stream.events import Event
from sweeps.run.activity import activity
from tests.generator.test_architectures import AGREE, EXPERTS, LLAMA, tiny

MIXTURES = ("Mixtral", "Qwen3Moe", "GptOss", "DeepseekV3")
TOKENS = 8


# Models with layers that see only a part of a sequence, in every form of configuration.
WINDOWS: dict[str, dict[str, Any]] = {
    "Gemma3Text": {
        **LLAMA, "head_dim": 8, "sliding_window": 5, "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "Gemma2": {**LLAMA, "head_dim": 8, "sliding_window": 4},
    "Mistral": {**LLAMA, "sliding_window": 6},
    "Qwen2": {**LLAMA, "use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1},
    "Qwen3": {**LLAMA, "sliding_window": 3, "head_dim": 8},  # the window is switched off
    "GptOss": {**AGREE["GptOss"], "sliding_window": 5},
    "Llama4Text": {
        **LLAMA, **EXPERTS, "num_local_experts": 4, "intermediate_size_mlp": 64, "head_dim": 8,
        "attention_chunk_size": 4, "layer_types": ["chunked_attention", "full_attention"],
    },
    "GPTNeo": {**AGREE["GPTNeo"], "window_size": 5},
}  # fmt: skip


def matrix_products(counter: FlopCounterMode) -> int:
    """Return torch's count of matrix products outside of attention, whose products depend on its implementation."""
    counts = counter.get_flop_counts()["Global"]
    return sum(number for operation, number in counts.items() if "mm" in str(operation) and "bmm" not in str(operation))


def counted_by_torch(model: Any) -> int:
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model.eval()(torch.arange(TOKENS).unsqueeze(0), use_cache=False)
    return matrix_products(counter)


@pytest.mark.parametrize("family", [family for family in AGREE if family not in MIXTURES])
def test_a_dense_model_costs_the_flops_that_torch_counts(family: str) -> None:
    model = tiny(family, AGREE[family])
    flop_model = FlopModel.of(model)
    assert flop_model.per_token * TOKENS == counted_by_torch(model)
    assert flop_model.head == 2 * 16 * 32 and flop_model.per_context == 4 * 32 * 2


@pytest.mark.parametrize("family", MIXTURES)
def test_a_mixture_costs_only_the_experts_that_a_token_uses(family: str) -> None:
    """Torch counts experts computed one by one, each on the tokens that chose it."""
    model = tiny(family, AGREE[family], experts_implementation="eager")
    assert FlopModel.of(model).per_token * TOKENS == counted_by_torch(model)
    whole = sum(2 * p.numel() for n, p in model.named_parameters() if p.dim() >= 2 and "embed" not in n)
    assert FlopModel.of(model).per_token < 0.8 * whole


@pytest.mark.parametrize("family", WINDOWS)
def test_windows_count_only_the_visible_tokens(family: str) -> None:
    """Counts equal the positions at which the model's attention is not zero, for prefill, decoding and training."""
    model = tiny(family, WINDOWS[family], attn_implementation="eager").eval()
    with torch.no_grad():
        attentions = model(torch.arange(14).unsqueeze(0), output_attentions=True, use_cache=False).attentions
    # (layers, n): tokens that each token of the sequence attends to.
    visible = torch.stack([(layer[0].abs().amax(0) > 0).sum(-1) for layer in attentions])
    all_visible = torch.arange(1, 15)
    assert bool((visible.sum(0) < len(visible) * all_visible).any()) == (family != "Qwen3")
    windows, flop_model = attention_windows(model.config), FlopModel.of(model)
    per_layer = flop_model.per_context / len(visible)
    for start, end in ((0, 14), (0, 3), (2, 9), (13, 14)):
        missing = int((all_visible - visible)[:, start:end].sum())
        assert outside(windows, start, end) == missing
        context, tokens = int(all_visible[start:end].sum()), end - start
        attended = per_layer * int(visible[:, start:end].sum())
        assert flop_model.decode(tokens, context, missing) == flop_model.per_token * tokens + attended
        assert (
            flop_model.prefill(tokens, context, 2, missing)
            == flop_model.body_per_token * tokens + 2 * flop_model.head + attended
        )
    assert flop_model.body([15]) == flop_model.body_per_token * 14 + per_layer * int(visible.sum())
    assert flop_model.train([15], [10]) == 3 * (flop_model.body([15]) + 5 * flop_model.head)


def test_gemma_3_by_hand() -> None:
    """Five of six layers have a window of 1,024 tokens. Without it, attention over 16k would cost 4.0 times as much."""
    shape = {
        "vocab_size": 1000, "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 34, "head_dim": 64,
        "num_attention_heads": 8, "num_key_value_heads": 4, "sliding_window": 1024, "tie_word_embeddings": True,
    }  # fmt: skip
    with torch.device("meta"):
        model = transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**shape))
    projections = 256 * (8 * 64) + 2 * 256 * (4 * 64) + (8 * 64) * 256  # queries, keys and values, output
    weights = 34 * (projections + 3 * 256 * 1024)
    length, window = 16384, 1024
    full = sum(range(1, length + 1))
    sliding = sum(min(place, window) for place in range(1, length + 1))
    attended = 5 * full + 29 * sliding  # every sixth of the 34 layers sees all tokens
    attention = 4 * 8 * 64 * attended  # scores and weighted sum: two products with two FLOPs per number
    flop_model = FlopModel.of(model)
    missing = outside(attention_windows(model.config), 0, length)
    assert flop_model.prefill(length, full, 1, missing) == 2 * weights * length + 2 * 256 * 1000 + attention
    assert flop_model.train([length + 1], [length - 99]) == 3 * (
        2 * weights * length + 100 * 2 * 256 * 1000 + attention
    )
    assert 34 * full / attended == pytest.approx(4.0, abs=0.15)


def test_generation_costs_what_torch_counts_including_the_head_of_the_first_token() -> None:
    """Prompts of equal length need no padding. Each passes through the model and its head once."""
    model = tiny("Llama", AGREE["Llama"])
    generator = TorchGenerator(
        model, Precision("fp32"), SamplingSettings(max_prompt_tokens=8, max_new_tokens=6, stop_tokens=[14]), slots=8
    )
    meter, flop_model = ComputeMeter(FlopModel.of(model)), FlopModel.of(model)
    attended = 0
    with FlopCounterMode(display=False) as counter:
        for number in range(3):
            generator.submit(GroupRequest(number, (1, 2, 3, 4 + number), 4, (0, number)))
        while generator.in_flight:
            report = generator.step()
            attended += report.prefill_context + report.decoded_context
            meter.on_event(Event("decode", 0.0, report))
    assert meter.metrics()["compute/flops_generate"] == matrix_products(counter) + flop_model.per_context * attended


def test_keys_and_values_of_different_sizes() -> None:
    flop_model = FlopModel.of(tiny("DeepseekV3", AGREE["DeepseekV3"]))
    assert flop_model.per_context == 2 * (16 + 16) * 4 * 2  # 8 + 8 numbers per key, 16 per value, 4 heads, 2 layers


def test_a_tied_head_is_counted_and_the_embedding_it_is_tied_to_is_not() -> None:
    untied = FlopModel.of(tiny("Llama", {**AGREE["Llama"], "tie_word_embeddings": False}))
    assert FlopModel.of(tiny("Llama", {**AGREE["Llama"], "tie_word_embeddings": True})) == untied


def test_experts_by_another_name() -> None:
    """JetMoe stores experts in tables without `experts` in their names."""
    arguments = {**AGREE["Llama"], "num_local_experts": 8, "num_experts_per_tok": 2, "kv_channels": 8}
    model = tiny("JetMoe", arguments)
    tables = sum(2 * p.numel() for p in model.parameters() if p.dim() == 3 and p.shape[0] == 8)
    left_out = ("embed", "bias")
    plain = [p for n, p in model.named_parameters() if p.dim() == 2 and not any(part in n for part in left_out)]
    head = model.get_output_embeddings().weight
    others = sum(2 * p.numel() for p in {id(p): p for p in [*plain, head]}.values())
    assert tables and FlopModel.of(model).per_token == others + tables / 4


def test_experts_without_a_configured_number_per_token_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_scalerl.measure.flops._EXPERTS_PER_TOKEN", ("experts_in_use",))
    model = tiny("Mixtral", AGREE["Mixtral"])
    with pytest.raises(ConfigurationError, match=r"MixtralForCausalLM has experts, and .* does not say how many"):
        FlopModel.of(model)


def test_polling_an_idle_generator_does_not_count_as_activity(monkeypatch: pytest.MonkeyPatch) -> None:
    """A live driver polls twenty times per second, even if the trainer hangs."""
    noted: list[str] = []
    monkeypatch.setattr(activity, "note", noted.append)
    meter = ComputeMeter(FlopModel.of(tiny("Llama", AGREE["Llama"])))
    meter.on_event(Event("decode", 0.0, StepReport((), 0, 0, 0, 0)))
    assert noted == []
    meter.on_event(Event("decode", 0.0, StepReport((), 0, 0, 3, 30)))
    assert noted == ["decode"]


def test_a_generators_steps_cost_only_tokens_inside_its_windows() -> None:
    """Tokens that a report counts as outside of windows (prompts and completions together) cost nothing."""
    flop_model = FlopModel.of(tiny("Mistral", WINDOWS["Mistral"]))
    costs = []
    for outside_tokens in (0, 31):
        meter = ComputeMeter(flop_model)
        meter.on_event(Event("decode", 0.0, StepReport((), 10, 55, 3, 36, prefilled=1, outside=outside_tokens)))
        costs.append(meter.metrics()["compute/flops_generate"])
    assert costs[0] == flop_model.prefill(10, 55, 1) + flop_model.decode(3, 36)
    assert costs[0] - costs[1] == 31 * flop_model.per_context / flop_model.layers > 0
