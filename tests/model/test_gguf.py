"""GGUF models: weights are dequantised once into the cache and equal those in the file."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from lightning_scalerl.checks import ConfigurationError
from lightning_scalerl.model import gguf as ours
from lightning_scalerl.model.place import model_path


@pytest.fixture(scope="module", autouse=True)
def package() -> None:
    """Skip the tests without the package gguf, or fail them if every component is required (CI_ALL)."""
    if find_spec("gguf") is None:
        (pytest.fail if os.environ.get("CI_ALL") == "1" else pytest.skip)("the package gguf is not installed")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SCALERL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


LAYER = {
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj", "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
}  # fmt: skip


def llama() -> Any:
    """A random Llama of two layers, with row lengths that are multiples of the block size, 32."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=32,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
            tie_word_embeddings=True,
            bos_token_id=1,
            eos_token_id=2,
        )
    )


def write(model: Any, path: Path, architecture: str = "llama", raw: int | None = None) -> Path:
    """Write a Llama as llama.cpp's converter does: matrices in blocks of 8 bits, and a tokenizer of 32 tokens."""
    import gguf
    import numpy as np

    config, weights = model.config, {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(64)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(32)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(
        ["<unk>", "<|im_start|>", "<|im_end|>", *[chr(ord("a") + number) for number in range(26)], "ab", "Ġ", "Ċ"]
    )
    writer.add_token_types([3, 3, 3, *[1] * 29])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template("{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}")
    names = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
    for layer in range(2):
        names |= {f"blk.{layer}.{short}": f"model.layers.{layer}.{long}" for short, long in LAYER.items()}
    for short, long in names.items():
        value = weights[f"{long}.weight"]
        for kind, heads in (("attn_q", 4), ("attn_k", 2)):
            if short.endswith(kind):  # llama.cpp rotates neighbouring pairs, transformers halves
                value = value.reshape(heads, 2, -1, 64).swapaxes(1, 2).reshape(value.shape)
        if value.ndim == 1:
            writer.add_tensor(f"{short}.weight", value)
        elif raw is not None and short == "blk.0.ffn_up":
            kind = gguf.GGMLQuantizationType(raw)
            block, size = gguf.GGML_QUANT_SIZES[kind]
            rows = np.zeros((block, size), np.uint8)
            writer.add_tensor(f"{short}.weight", rows, raw_dtype=kind)
        else:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(f"{short}.weight", gguf.quantize(value, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_weights_tokenizer_and_template_come_from_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from lightning_scalerl.model.load import load_model, load_tokenizer

    original = llama()
    file = write(original, tmp_path / "tiny.gguf")
    folder = model_path(str(file))
    read, tokenizer = load_model(str(file)), load_tokenizer(str(file))
    assert isinstance(read, type(original)) and read.config.tie_word_embeddings
    tokens = torch.arange(32)[None]
    with torch.no_grad():
        assert (read(tokens).logits - original(tokens).logits).abs().max() < 0.02, "8 bits per weight"
    assert (tokenizer.encode("abc"), tokenizer.eos_token, tokenizer.bos_token) == (
        [29, 5],
        "<|im_end|>",
        "<|im_start|>",
    )
    messages = [{"role": "user", "content": "abc"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == "<|im_start|>abc<|im_end|>"

    # Loading it again converts neither weights nor tokenizer again, even if the file has another name.
    monkeypatch.setattr(ours, "_convert", lambda *arguments: pytest.fail("it was converted a second time"))
    assert model_path(str(tmp_path)) == folder and load_tokenizer(str(tmp_path)).eos_token_id == 2
    moved = file.rename(tmp_path / "other.gguf")
    assert model_path(str(moved)) == folder
    assert model_path.content({"path": str(moved)}) == model_path.content({"path": str(tmp_path)})


@pytest.mark.parametrize(
    ("architecture", "raw", "message"),
    [
        ("mamba9", None, r"cannot convert .*architecture mamba9, tensors \{'F32': 5, 'Q8_0': 15\}; .*mamba9"),
        ("llama", 15, r"cannot convert .*'Q8_K': 1.*give a file of another architecture or quantisation"),
    ],
)
def test_files_that_transformers_cannot_convert_are_refused(
    tmp_path: Path, cache: Path, architecture: str, raw: int, message: str
) -> None:
    file = write(llama(), tmp_path / "tiny.gguf", architecture, raw)
    with pytest.raises(ConfigurationError, match=message) as refused:
        model_path(str(file))
    assert "\n" not in str(refused.value)
    assert [path.name for path in (cache / "gguf").iterdir() if path.is_dir()] == [], "no partial folder is left"


def test_other_unusable_files_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigurationError, match=r"there is no file 'nowhere\.gguf'"):
        model_path("nowhere.gguf")
    (tmp_path / "a.gguf").write_bytes(b"GGUF\x00")
    with pytest.raises(ConfigurationError, match="cannot convert"):
        model_path(str(tmp_path))
    monkeypatch.setattr(ours, "find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match="package gguf, which is not installed; pip install gguf"):
        model_path(str(tmp_path / "a.gguf"))
    (tmp_path / "b.gguf").write_bytes(b"")
    with pytest.raises(ConfigurationError, match=r"holds 2 GGUF files \(a.gguf, b.gguf\); give one of them"):
        model_path(str(tmp_path))
