"""Predict the memory of models from 0.6 to 70 billion parameters on 1, 8 and 64 devices, like `scalerl memory`.

    python benchmarks/memory.py

Writes the table of docs/guide/large_models.md between its marks, in some minutes on one core. Nothing is trained or
downloaded: the models are built from their published configurations, without data.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import transformers
from torch import nn

from lightning_scalerl.composition import load_recipe
from lightning_scalerl.measure.memory import measure, predict_memory

PAGE = Path(__file__).resolve().parent.parent / "docs" / "guide" / "large_models.md"
GIB = 2**30
DEVICE_GIB = 80
# Number of devices and strategy. With several devices, the generator has separate ones.
PLACES = ((1, "ddp"), (8, "fsdp2"), (64, "fsdp2"))


def qwen3(hidden: int, inner: int, layers: int, heads: int, key_heads: int = 8, tied: bool = False) -> dict[str, Any]:
    """Return the configuration of a dense Qwen3, as published with the models."""
    return {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": key_heads,
        "head_dim": 128,
        "vocab_size": 151936,
        "tie_word_embeddings": tied,
    }


MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen3-0.6B": ("Qwen3", qwen3(1024, 3072, 28, 16, tied=True)),
    "Qwen3-1.7B": ("Qwen3", qwen3(2048, 6144, 28, 16, tied=True)),
    "Qwen3-8B": ("Qwen3", qwen3(4096, 12288, 36, 32)),
    "Qwen3-30B-A3B, a mixture": (
        "Qwen3Moe",
        {
            **qwen3(2048, 6144, 48, 32, key_heads=4),
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "norm_topk_prob": True,
        },
    ),
    "Qwen3-32B": ("Qwen3", qwen3(5120, 25600, 64, 64)),
    "Llama-3.1-70B": (
        "Llama",
        {
            "hidden_size": 8192,
            "intermediate_size": 28672,
            "num_hidden_layers": 80,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "vocab_size": 128256,
        },
    ),
}


def model(family: str, sizes: dict[str, Any]) -> nn.Module:
    """Build a model from its configuration."""
    built: nn.Module = getattr(transformers, f"{family}ForCausalLM")(getattr(transformers, f"{family}Config")(**sizes))
    return built


def cells(family: str, sizes: dict[str, Any], tokens: int) -> list[str]:
    """Return the GiB of the fullest device for each of PLACES, in bold if they fit."""
    context = (f"context.max_prompt_tokens={tokens // 8}", f"context.max_new_tokens={tokens - tokens // 8}")
    recipe = load_recipe("scalerl", ["scale=8b", *context, "batch.micro_batch=1", "batch.recompute=true"])
    measured = measure(partial(model, family, sizes), recipe)
    # A single device also generates, 32 rollouts at a time.
    needed = [predict_memory(measured, recipe, *place, 32 if place[0] == 1 else 0).peak / GIB for place in PLACES]
    return [f"**{gib:.0f}**" if gib <= DEVICE_GIB else f"{gib:.0f}" for gib in needed]


def main() -> None:
    """Write the table into the page."""
    contexts = (4096, 16384)
    heads = [f"{tokens // 1024}k tokens, {ranks} x {strategy}" for tokens in contexts for ranks, strategy in PLACES]
    rows = ["| model | " + " | ".join(heads) + " |", "|---" * (len(heads) + 1) + "|"]
    for name, (family, sizes) in MODELS.items():
        rows.append(
            f"| {name} | " + " | ".join(cell for tokens in contexts for cell in cells(family, sizes, tokens)) + " |"
        )
        print(rows[-1], flush=True)
    text = PAGE.read_text()
    page_start, after_begin_mark = text.split("<!-- memory -->\n")
    page_end = after_begin_mark.split("<!-- /memory -->\n")[1]
    PAGE.write_text(page_start + "<!-- memory -->\n" + "\n".join(rows) + "\n<!-- /memory -->\n" + page_end)


if __name__ == "__main__":
    main()
