"""Tests of model families: trainer and generator compute equal log-probabilities, or the model is refused.

A refusal names the model and comes before anything is computed. All models are tiny, with random weights that are large
enough for attention to matter.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from lightning.pytorch import Trainer

from lightning_scalerl import ConfigurationError, RolloutDataModule, ScaleRL
from lightning_scalerl.axes.async_mode import OnPolicy
from lightning_scalerl.axes.precision import Precision
from lightning_scalerl.generator.torch import decodable
from lightning_scalerl.measure.probe import P99
from lightning_scalerl.task.arithmetic_base import tokenizer
from tests.examples import every
from tests.helpers import SMALL, CountingTask, quiet
from tests.test_module import Keep

SPECIAL_TOKENS: dict[str, Any] = {"bos_token_id": None, "eos_token_id": 14, "pad_token_id": 0}
LLAMA: dict[str, Any] = {
    "vocab_size": 16,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    **SPECIAL_TOKENS,
}
GPT: dict[str, Any] = {"vocab_size": 16, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, **SPECIAL_TOKENS}
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2}

# Name of the model family, and the arguments of its configuration class.
AGREE: dict[str, dict[str, Any]] = {
    "Llama": LLAMA,
    "Qwen2": LLAMA,
    "Qwen3": {**LLAMA, "head_dim": 8},
    "Mistral": LLAMA,
    "Gemma2": {**LLAMA, "head_dim": 8},  # soft-capped logits
    "Phi3": LLAMA,
    "Granite": LLAMA,  # scaled logits
    "Cohere": LLAMA,
    "Olmo2": LLAMA,
    "Mixtral": {**LLAMA, **EXPERTS, "num_local_experts": 4},
    "Qwen3Moe": {**LLAMA, **EXPERTS, "num_experts": 4, "moe_intermediate_size": 16},
    "GptOss": {**LLAMA, **EXPERTS, "num_local_experts": 4, "head_dim": 8},  # eager only, with sinks
    "DeepseekV3": {
        **LLAMA, **EXPERTS, "num_key_value_heads": 4, "n_routed_experts": 8, "n_group": 2, "topk_group": 1,
        "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16,
        "moe_intermediate_size": 16, "first_k_dense_replace": 1,
    },  # keys and values of different sizes
    "GPT2": GPT,  # learned positions, dropout by default
    "GPTNeo": {
        "vocab_size": 16, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "max_position_embeddings": 64,
        "attention_types": [[["global", "local"], 1]], **SPECIAL_TOKENS,
    },  # eager only
    "GPTJ": {**GPT, "rotary_dim": 8},  # eager only
    "CodeGen": {**GPT, "rotary_dim": 8},  # eager only
    "OPT": {
        "vocab_size": 16, "hidden_size": 32, "ffn_dim": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "max_position_embeddings": 64, "word_embed_proj_dim": 32, **SPECIAL_TOKENS,
    },  # positions with an offset
}  # fmt: skip
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "Bloom": ({"vocab_size": 16, "hidden_size": 32, "n_layer": 2, "n_head": 4}, "positions are ALiBi"),
    "Mpt": ({"vocab_size": 16, "d_model": 32, "n_layers": 2, "n_heads": 4}, "positions are ALiBi"),
    "Falcon": (
        {"vocab_size": 16, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "alibi": True},
        "positions are ALiBi",
    ),
    "Mamba": ({"vocab_size": 16, "hidden_size": 32, "num_hidden_layers": 2}, "no num_attention_heads"),
    "Rwkv": ({"vocab_size": 16, "hidden_size": 32, "num_hidden_layers": 2}, "no num_attention_heads"),
    "Jamba": ({**LLAMA, "num_experts": 2, "use_mamba_kernels": False}, "keep a state from token to token .*mamba"),
    "Lfm2": ({**LLAMA, "layer_types": ["conv", "full_attention"]}, r"keep a state from token to token \(conv\)"),
}


# sdpa, the default implementation, ignores the soft cap and is refused.
ATTENTION = {"Gemma2": {"attn_implementation": "eager"}}


def tiny(family: str, arguments: dict[str, Any], **options: Any) -> Any:
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(
        getattr(transformers, f"{family}Config")(**arguments), dtype=torch.float32, **options
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.mul_(4.0)
    return model


def train(model: Any, keep: Keep, overrides: tuple[str, ...] = (), steps: int = 2) -> ScaleRL:
    module = ScaleRL(model, "scalerl_core", [*SMALL, "optimizer.lr=1e-3", *overrides], tokenizer())
    trainer = Trainer(max_steps=steps, callbacks=[OnPolicy(), Precision("fp32"), keep], **quiet())
    trainer.fit(module, datamodule=RolloutDataModule(CountingTask()))
    return module


@pytest.mark.parametrize(
    "family",
    every(6, every(2, AGREE, pytest.mark.full)),
)
def test_trainer_and_generator_agree(family: str) -> None:
    keep = Keep()
    module = train(tiny(family, AGREE[family], **ATTENTION.get(family, {})), keep)
    assert len(keep.of(P99)) == 2 and max(keep.of(P99)) < 1e-4
    assert max(keep.of("train/logprob_gap")) < 1e-4
    assert max(keep.of("train/entropy")) > 0.1 and not module.policy.training


@pytest.mark.parametrize("family", REFUSED)
def test_a_model_that_cannot_be_decoded_is_refused_by_name_before_any_work(family: str) -> None:
    arguments, reason = REFUSED[family]
    keep = Keep()
    with pytest.raises(ConfigurationError, match=f"model: {family}ForCausalLM .*{reason}") as caught:
        train(tiny(family, arguments), keep)
    assert keep.records == [] and "\n" not in str(caught.value)


def test_a_boolean_mask_under_eager_attention_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eager attention adds the mask to the scores, so a Boolean mask would hide nothing."""
    monkeypatch.setattr("lightning_scalerl.generator.torch.slot_cache._mask", lambda model, visible: visible)
    model = tiny("Llama", LLAMA, attn_implementation="eager")
    with pytest.raises(ConfigurationError, match=r"decoded token by token its log-probabilities differ by 0\.\d+ from"):
        decodable.check_decodable(model, 40)
    decodable.check_decodable(tiny("Llama", LLAMA), 40)


def test_attention_that_takes_no_mask_is_refused() -> None:
    model = tiny("Llama", LLAMA)
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(ConfigurationError, match="attn_implementation='flash_attention_2' takes no mask"):
        decodable.check_decodable(model, 40)


def test_an_error_in_the_model_becomes_one_line_with_its_name() -> None:
    model = tiny("Llama", LLAMA)
    model.model.layers[1].forward = lambda *args, **kwargs: 1 / 0
    with pytest.raises(ConfigurationError, match=r"fails \(ZeroDivisionError: division by zero"):
        decodable.check_decodable(model, 40)


@pytest.mark.parametrize("family", every(5, ["GPT2", "OPT", "GPTNeo", "GPTJ", "CodeGen"]))
def test_a_context_longer_than_the_models_positions_is_refused(family: str) -> None:
    overrides = ("context.max_prompt_tokens=56",)
    with pytest.raises(ConfigurationError, match=f"make 65 tokens, and {family}.* has 64 positions"):
        train(tiny(family, AGREE[family]), Keep(), overrides)
    train(tiny(family, AGREE[family]), Keep(), ("context.max_prompt_tokens=55",), steps=1)


@pytest.mark.parametrize(
    ("family", "more", "field"),
    [
        ("Mistral", {"sliding_window": 24}, "sliding_window of 24"),
        ("GPTNeo", {"window_size": 24}, "window_size of 24"),
    ],
)
def test_a_window_shorter_than_the_context_is_refused(family: str, more: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigurationError, match=f"does not know sliding windows; the model's {field} tokens"):
        train(tiny(family, {**AGREE[family], **more}), Keep())


@pytest.mark.slow
def test_dropout_is_off_unless_it_is_asked_for() -> None:
    """GPT-2 has dropout 0.1 by default. With dropout, only training differs; the probe compares without it."""
    without_dropout, with_dropout = Keep(), Keep()
    train(tiny("GPT2", AGREE["GPT2"]), without_dropout)
    train(tiny("GPT2", AGREE["GPT2"]), with_dropout, ("optimizer.dropout=true",))
    assert max(without_dropout.of("train/logprob_gap")) < 1e-4 < 0.01 < min(with_dropout.of("train/logprob_gap"))
    assert max(with_dropout.of(P99)) < 1e-4


@pytest.mark.parametrize("dropout", [False, True])
def test_gradient_checkpointing_stays_on_with_and_without_dropout(dropout: bool) -> None:
    model = tiny("Llama", LLAMA)
    model.gradient_checkpointing_enable()
    module = train(model, Keep(), (f"optimizer.dropout={dropout}",))
    layers = module.policy.model.model.layers
    assert all(layer.training and layer.self_attn.training == dropout for layer in layers)


def test_the_check_of_a_model_uses_no_tf32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounded products would make a good model look wrong. The user's setting is restored afterwards."""
    precisions = []
    largest_difference = decodable._largest_difference

    def record(model: Any) -> float:
        precisions.append(torch.get_float32_matmul_precision())
        return largest_difference(model)

    monkeypatch.setattr(decodable, "_largest_difference", record)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        decodable.check_decodable(tiny("Llama", LLAMA), 40)
        assert precisions == ["highest"] and torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(before)


def test_half_precision_weights_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"weights in torch\.bfloat16; master weights are FP32"):
        train(tiny("Llama", LLAMA).to(torch.bfloat16), Keep())
