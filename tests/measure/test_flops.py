"""FLOPs are what torch counts in the same forward pass; a mixture's experts count by their share."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from lightning_scalerl import ConfigurationError
from lightning_scalerl.generator.base import StepReport
from lightning_scalerl.measure.compute_meter import ComputeMeter
from lightning_scalerl.measure.flops import FlopModel
from lightning_scalerl.stream.events import Event
from sweeps.run.activity import activity
from tests.generator.test_architectures import AGREE, tiny

MIXTURES = ("Mixtral", "Qwen3Moe", "GptOss", "DeepseekV3")
TOKENS = 8


def counted(model: Any) -> int:
    """By torch, matrix products alone: attention's own are left out, whichever way a model computes them."""
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model.eval()(torch.arange(TOKENS).unsqueeze(0), use_cache=False)
    counts = counter.get_flop_counts()["Global"]
    return sum(number for operation, number in counts.items() if "mm" in str(operation) and "bmm" not in str(operation))


@pytest.mark.parametrize("family", [family for family in AGREE if family not in MIXTURES])
def test_a_dense_model_costs_what_torch_counts(family: str) -> None:
    model = tiny(family, AGREE[family])
    found = FlopModel.of(model)
    assert found.per_token * TOKENS == counted(model)
    assert found.head == 2 * 16 * 32 and found.per_context == 4 * 32 * 2


@pytest.mark.parametrize("family", MIXTURES)
def test_a_mixture_costs_the_experts_that_a_token_uses(family: str) -> None:
    """Counted with experts computed one by one. All tokens together use at most as many as are chosen for each."""
    model = tiny(family, AGREE[family], experts_implementation="eager")
    assert FlopModel.of(model).per_token * TOKENS == counted(model)
    whole = sum(2 * p.numel() for n, p in model.named_parameters() if p.dim() >= 2 and "embed" not in n)
    assert FlopModel.of(model).per_token < 0.8 * whole


def test_keys_and_values_of_unlike_size() -> None:
    found = FlopModel.of(tiny("DeepseekV3", AGREE["DeepseekV3"]))
    assert found.per_context == 2 * (16 + 16) * 4 * 2  # 8 + 8 of a key, 16 of a value, 4 heads, 2 layers


def test_a_tied_head_is_counted_and_the_embedding_it_is_tied_to_is_not() -> None:
    untied = FlopModel.of(tiny("Llama", {**AGREE["Llama"], "tie_word_embeddings": False}))
    assert FlopModel.of(tiny("Llama", {**AGREE["Llama"], "tie_word_embeddings": True})) == untied


def test_experts_by_another_name() -> None:
    """JetMoe keeps them in tables without `experts` in their names."""
    arguments = {**AGREE["Llama"], "num_local_experts": 8, "num_experts_per_tok": 2, "kv_channels": 8}
    model = tiny("JetMoe", arguments)
    tables = sum(2 * p.numel() for p in model.parameters() if p.dim() == 3 and p.shape[0] == 8)
    left_out = ("embed", "bias")
    plain = [p for n, p in model.named_parameters() if p.dim() == 2 and not any(each in n for each in left_out)]
    head = model.get_output_embeddings().weight
    others = sum(2 * p.numel() for p in {id(p): p for p in [*plain, head]}.values())
    assert tables and FlopModel.of(model).per_token == others + tables / 4


def test_experts_of_which_nobody_says_how_many_are_used_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_scalerl.measure.flops._CHOSEN", ("experts_in_use",))
    model = tiny("Mixtral", AGREE["Mixtral"])
    with pytest.raises(ConfigurationError, match=r"MixtralForCausalLM has experts, and .* does not say how many"):
        FlopModel.of(model)


def test_a_generator_that_is_only_asked_how_it_is_gives_no_sign_of_life(monkeypatch: pytest.MonkeyPatch) -> None:
    """A live driver asks twenty times a second, whatever has become of the trainer."""
    noted: list[str] = []
    monkeypatch.setattr(activity, "note", noted.append)
    meter = ComputeMeter(FlopModel.of(tiny("Llama", AGREE["Llama"])))
    meter.on_event(Event("decode", 0.0, StepReport((), 0, 0, 0, 0)))
    assert noted == []
    meter.on_event(Event("decode", 0.0, StepReport((), 0, 0, 3, 30)))
    assert noted == ["decode"]
