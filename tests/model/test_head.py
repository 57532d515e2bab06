"""The language-model head, attention in 16 bits, end tokens, and where a model is loaded from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from lightning.pytorch import Trainer
from torch import nn

from lightning_scalerl import RolloutDataModule, ScaleRL
from lightning_scalerl.axes.precision import Precision
from lightning_scalerl.checks import ConfigurationError
from lightning_scalerl.generator.torch.decodable import check_decodable
from lightning_scalerl.generator.torch.policy import GeneratorPolicy
from lightning_scalerl.model import place
from lightning_scalerl.model.head import check_head, eval_mode
from lightning_scalerl.model.load import load_model, load_tokenizer, stop_tokens
from lightning_scalerl.task.arithmetic_base import tokenizer
from tests.generator.test_architectures import AGREE, tiny
from tests.helpers import SMALL, CountingTask, fit, quiet


def test_the_check_of_the_head_does_not_depend_on_the_mode() -> None:
    model = tiny("GPT2", AGREE["GPT2"]).train()
    model.transformer.h[0].eval()
    modes = [module.training for module in model.modules()]
    check_head(model)
    assert [module.training for module in model.modules()] == modes
    with eval_mode(model):
        assert not any(module.training for module in model.modules())
    assert [module.training for module in model.modules()] == modes


def attends_in_16_bit(module: Any, query: Any, key: Any, value: Any, mask: Any, **given: Any) -> tuple[Any, None]:
    """FlashAttention, as far as it matters here: causal, no mask, and no FP32 kernel outside of autocast."""
    if not torch.is_autocast_enabled("cpu"):
        raise ValueError(f"FlashAttention only supports fp16 and bf16, not {query.dtype}")
    assert mask is None
    cast = (tensor.to(torch.get_autocast_dtype("cpu")) for tensor in (query, key, value))
    query, *key_and_value = cast
    grouped = (tensor.repeat_interleave(module.num_key_value_groups, dim=1) for tensor in key_and_value)
    out = nn.functional.scaled_dot_product_attention(query, *grouped, is_causal=True, scale=module.scaling)
    return out.transpose(1, 2).contiguous(), None


def test_attention_without_fp32_is_checked_in_the_policys_type(
    monkeypatch: pytest.MonkeyPatch, tiny_model: Any, tiny_model_path: str
) -> None:
    """The check runs once the model is on its device, not before, and still detects another distribution."""
    attentions = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS
    monkeypatch.setitem(attentions._global_mapping, "flash_attention_2", attends_in_16_bit)
    tiny_model.config._attn_implementation = "flash_attention_2"

    def fit_one_step(precision: str) -> Any:
        overrides = [*SMALL, f"precision={precision}", "batch.packed=true"]
        module = ScaleRL(tiny_model, overrides=overrides, tokenizer=load_tokenizer(tiny_model_path))
        assert not module.policy.tried
        Trainer(max_steps=1, **quiet()).fit(module, datamodule=RolloutDataModule(CountingTask()))
        return module

    with pytest.raises(ConfigurationError, match=r"^precision: fp32, and LlamaForCausalLM has .*; give precision=bf16"):
        fit_one_step("fp32")
    # The check passes, but this generator cannot decode with such attention. Another generator can.
    with pytest.raises(ConfigurationError, match="attn_implementation='flash_attention_2' takes no mask of generator"):
        fit_one_step("bf16")
    check_head(tiny_model, torch.bfloat16)
    forward = type(tiny_model).forward

    def scaled(self: Any, *arguments: Any, **options: Any) -> Any:
        out = forward(self, *arguments, **options)
        out.logits = 1.1 * out.logits
        return out

    monkeypatch.setattr(type(tiny_model), "forward", scaled)
    with pytest.raises(ConfigurationError, match="post-processes its logits in an unknown way"):
        fit_one_step("bf16")


def test_an_fp32_heads_bias_keeps_its_bits() -> None:
    model = tiny("GPTJ", AGREE["GPTJ"])  # its head has a bias
    bias = torch.full((16,), 1.0) + torch.arange(16) * 2**-20  # lost in BF16
    model.lm_head.bias = nn.Parameter(bias)
    copy = GeneratorPolicy(model, Precision())
    assert copy._head_bias is not None and torch.equal(copy._head_bias, bias)
    copy.load({name: 2 * tensor for name, tensor in model.state_dict().items()})
    assert torch.equal(copy._head_bias, 2 * bias)


@pytest.mark.parametrize(
    ("configured", "expected"), [(None, [14]), (14, [14]), ([3, 7], [3, 7, 14]), ((14, 2), [2, 14])]
)
def test_every_configured_end_token_ends_a_completion(configured: Any, expected: list[int]) -> None:
    model = tiny("Llama", AGREE["Llama"])
    model.generation_config.eos_token_id = configured
    assert stop_tokens(model, tokenizer()) == expected


def test_completions_stop_at_every_end_token_of_the_generation_configuration(
    tiny_model_path: str, tmp_path: Any
) -> None:
    """End tokens are saved with the model, as for chat models. The end token is not part of the text."""
    model = load_model(tiny_model_path)
    model.generation_config.eos_token_id = [14, 2]
    model.save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    completions: list[str] = []

    class Watching(CountingTask):
        def reward(self, prompt: Any, completion: str) -> float:
            completions.append(completion)
            return super().reward(prompt, completion)

    module = fit(str(tmp_path), steps=2, task=Watching())
    assert module.stop_tokens == [2, 14] and module.sampling.rendering.decode([5, 6, 2]) == "45"
    # Token 2 is the digit 1. No text contains it, because it always ended the completion.
    assert any(len(text) < 9 for text in completions) and not any("1" in text for text in completions)


def test_a_model_that_is_its_own_base_model_is_supported() -> None:
    """The `base_model` of Llama 4's text model is itself, head included. It must still count as a language model."""
    small = {"attention_chunk_size": 64, "num_local_experts": 2, "intermediate_size_mlp": 64}
    config = transformers.Llama4TextConfig(**{**AGREE["Llama"], **small})
    torch.manual_seed(1)
    model = transformers.Llama4ForCausalLM(config).float()
    check_head(model)
    check_decodable(model, 24)


def test_a_folder_of_an_adapter_is_refused_as_such(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ConfigurationError, match=r"holds an adapter of PEFT and no model.*adapter=lora"):
        load_model(str(tmp_path))


def test_a_local_path_is_not_looked_up_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(place, "_ask_hub", lambda address: pytest.fail(f"asked for {address}"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    for path in ("/nothing/here", "./here", "../here", "~/nothing-here", "some/where/else", "models/here"):
        with pytest.raises(ConfigurationError, match=r"is a place on this machine and holds no config\.json"):
            load_tokenizer(path)


@pytest.mark.parametrize(
    ("answer", "downloaded", "told"),
    [
        ((None, "ConnectError: no network"), False, "does not answer \\(ConnectError: no network\\); give a folder"),
        ((404, ""), False, "is neither a folder here nor a model on"),
        ((None, "ConnectError: no network"), True, None),
        ((200, ""), False, None),
    ],
)
def test_a_hub_that_does_not_answer_is_not_waited_for(
    answer: tuple[int | None, str], downloaded: bool, told: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(place, "_ask_hub", lambda address: answer)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    cached = "/cache/config.json" if downloaded else None
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_: cached)
    if told is None:
        assert place.load_options("owner/name") == ({"local_files_only": True} if answer[0] is None else {})
    else:
        with pytest.raises(ConfigurationError, match=told):
            place.load_options("owner/name")
