"""The language-model head, and what ends a completion."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lightning_scalerl.axes.precision import Precision
from lightning_scalerl.generator.torch_policy import GeneratorPolicy
from lightning_scalerl.model.head import check_head, eval_mode
from lightning_scalerl.model.load import load_model, stop_tokens
from lightning_scalerl.task.arithmetic_base import tokenizer
from tests.generator.test_architectures import AGREE, tiny
from tests.helpers import CountingTask, fit


def test_the_check_of_the_head_does_not_depend_on_the_mode() -> None:
    model = tiny("GPT2", AGREE["GPT2"]).train()
    model.transformer.h[0].eval()
    modes = [module.training for module in model.modules()]
    check_head(model)
    assert [module.training for module in model.modules()] == modes
    with eval_mode(model):
        assert not any(module.training for module in model.modules())
    assert [module.training for module in model.modules()] == modes


def test_an_fp32_heads_bias_keeps_its_bits() -> None:
    model = tiny("GPTJ", AGREE["GPTJ"])  # its head has one
    bias = torch.full((16,), 1.0) + torch.arange(16) * 2**-20  # lost in BF16
    model.lm_head.bias = nn.Parameter(bias)
    copy = GeneratorPolicy(model, Precision())
    assert copy._head_bias is not None and torch.equal(copy._head_bias, bias)
    copy.load({name: 2 * tensor for name, tensor in model.state_dict().items()})
    assert torch.equal(copy._head_bias, 2 * bias)


@pytest.mark.parametrize(
    ("configured", "expected"), [(None, [14]), (14, [14]), ([3, 7], [3, 7, 14]), ((14, 2), [2, 14])]
)
def test_every_configured_end_ends_a_completion(configured: Any, expected: list[int]) -> None:
    model = tiny("Llama", AGREE["Llama"])
    model.generation_config.eos_token_id = configured
    assert stop_tokens(model, tokenizer()) == expected


def test_completions_stop_at_every_end_of_the_generation_configuration(tiny_model_path: str, tmp_path: Any) -> None:
    """Saved with the model, as chat models are; what ended a completion is not part of its text."""
    model = load_model(tiny_model_path)
    model.generation_config.eos_token_id = [14, 2]
    model.save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    seen: list[str] = []

    class Watching(CountingTask):
        def reward(self, prompt: Any, completion: str) -> float:
            seen.append(completion)
            return super().reward(prompt, completion)

    module = fit(str(tmp_path), steps=2, task=Watching())
    assert module.stop_tokens == [2, 14] and module._rendering.decode([5, 6, 2]) == "45"
    # Token 2 is the digit 1: it can only have been the end.
    assert any(len(text) < 9 for text in seen) and not any("1" in text for text in seen)
