"""Tiny models with random weights, one folder per model family, each with its kind of tokenizer and chat template.

They differ as real model folders do: whether the tokenizer, the template, both or neither adds the first token, which
tokens end a turn and where that is configured, whether there is a padding token, whether embeddings are tied, how large
the embedding table is, the dtype of the saved weights, and which messages a template accepts.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

# Factor on the initial weights. Unscaled they are so small that attention is nearly uniform.
LARGER = 8.0
REWARD = '''"""A reward that random models already vary in."""


def vowels(completion: str, answer: str) -> float:
    return sum(letter in "aeiou" for letter in completion) / max(1, len(completion))
'''


def rows() -> list[dict[str, str]]:
    """Return rows in the format of GSM8K. Lengths differ, so that rollouts in one batch are at different positions."""
    rows_made = []
    for number in range(20):
        a, b = 2 + number % 5, 3 + number // 5
        name = ("Tom", "Alexandra", "Mr. Featherstonehaugh")[number % 3]
        question = f"{name} has {a} apples and buys {b} more{' at the market' * (number % 2)}. How many are there?"
        rows_made.append(
            {"question": question, "answer": f"{a} + {b} = <<{a}+{b}={a + b}>>{a + b} apples.\n#### {a + b}"}
        )
    return rows_made


def write_task(folder: Path) -> None:
    """Write `train.jsonl`, `test.jsonl` and `reward.py`."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(row) + "\n" for row in rows()]
    (folder / "train.jsonl").write_text("".join(lines[:16]))
    (folder / "test.jsonl").write_text("".join(lines[16:]))
    (folder / "reward.py").write_text(REWARD)


@dataclass(frozen=True)
class Style:
    """A tokenizer and its chat template.

    Args:
        special: special tokens in the order of their ids, which come after the ids of text tokens.
        eos: EOS token of the tokenizer.
        bos, pad: BOS and padding token; None if the tokenizer has none.
        ends: tokens that end a completion according to `generation_config.json`; empty for the tokenizer's EOS only.
        adds_bos: the tokenizer puts BOS before every text.
        template: chat template; None for a base model, which has none.
        spare: number of ids in the embedding table that the tokenizer does not use.
    """

    special: Sequence[str]
    eos: str
    bos: str | None = None
    pad: str | None = None
    ends: Sequence[str] = ()
    adds_bos: bool = False
    template: str | None = None
    spare: int = 0


def _turns(begin: str, end: str, before: str = "", generation: str = "", assistant: str = "assistant") -> str:
    """Return a template that writes every message between the same markers."""
    role = f"('{assistant}' if message['role'] == 'assistant' else message['role'])" if assistant else "message['role']"
    turn = begin.replace("ROLE", "' + role + '")
    return (
        f"{before}{{% for message in messages %}}{{% set role = {role} %}}"
        f"{{{{ '{turn}' + message['content'] | trim + '{end}' }}}}{{% endfor %}}"
        f"{{% if add_generation_prompt %}}{{{{ '{begin.replace('ROLE', assistant)}' }}}}{generation}{{% endif %}}"
    )


LLAMA3 = Style(
    special=("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    bos="<|begin_of_text|>",
    eos="<|eot_id|>",
    ends=("<|end_of_text|>", "<|eot_id|>"),
    adds_bos=True,
    template=_turns(
        "<|start_header_id|>ROLE<|end_header_id|>\\n\\n",
        "<|eot_id|>",
        "{{ bos_token }}{% if date_string is not defined %}{{ raise_exception('which day is it?') }}{% endif %}",
    ),
)
CHATML = ("<|im_start|>ROLE\\n", "<|im_end|>\\n")
QWEN2 = Style(
    special=("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    eos="<|im_end|>",
    pad="<|endoftext|>",
    ends=("<|im_end|>", "<|endoftext|>"),
    template=_turns(
        *CHATML,
        "{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\\nYou are helpful.<|im_end|>\\n' }}{% endif %}",
    ),
    spare=40,
)
QWEN3 = Style(
    special=(*QWEN2.special, "<think>", "</think>"),
    eos=QWEN2.eos,
    pad=QWEN2.pad,
    ends=QWEN2.ends,
    template=_turns(
        *CHATML,
        generation="{% if enable_thinking is defined and enable_thinking is false %}"
        "{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}",
    ),
    spare=40,
)
GEMMA = Style(
    special=("<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>"),
    bos="<bos>",
    eos="<eos>",
    pad="<pad>",
    ends=("<eos>", "<end_of_turn>"),
    adds_bos=True,
    template=_turns(
        "<start_of_turn>ROLE\\n",
        "<end_of_turn>\\n",
        "{{ bos_token }}{% if messages[0]['role'] == 'system' %}"
        "{{ raise_exception('System role not supported') }}{% endif %}",
        assistant="model",
    ),
)
PHI = Style(
    special=("<|endoftext|>", "<|assistant|>", "<|system|>", "<|end|>", "<|user|>"),
    bos="<|endoftext|>",
    eos="<|endoftext|>",
    pad="<|endoftext|>",
    ends=("<|endoftext|>", "<|end|>", "<|assistant|>"),
    template=_turns("<|ROLE|>\\n", "<|end|>\\n"),
)
# Role markers such as <|user|> are ordinary text here, not special tokens.
OLMO = Style(
    special=("<|endoftext|>", "<|pad|>"),
    bos="<|endoftext|>",
    eos="<|endoftext|>",
    pad="<|pad|>",
    template=_turns("<|ROLE|>\\n", "\\n", "{{ bos_token }}"),
)
PLAIN = Style(special=("<|endoftext|>",), bos="<|endoftext|>", eos="<|endoftext|>")
MISTRAL = Style(
    special=("<s>", "</s>", "[INST]", "[/INST]"),
    bos="<s>",
    eos="</s>",
    adds_bos=True,
    template="{{ bos_token }}{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{{ '[INST] ' + message['content'] + ' [/INST]' if message['role'] == 'user' else message['content'] + eos_token }}"
    "{% endfor %}",
)
DEEPSEEK = Style(
    special=(
        "<｜begin▁of▁sentence｜>",
        "<｜end▁of▁sentence｜>",
        "<｜User｜>",
        "<｜Assistant｜>",
        "<think>",
        "</think>",
    ),
    bos="<｜begin▁of▁sentence｜>",
    eos="<｜end▁of▁sentence｜>",
    pad="<｜end▁of▁sentence｜>",
    adds_bos=True,
    template="{{ bos_token }}{% for message in messages %}"
    "{{ ('<｜User｜>' if message['role'] == 'user' else '') + message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<｜Assistant｜><think>\\n' }}{% endif %}",  # the template opens the thinking
)
COHERE = Style(
    special=("<PAD>", "<BOS_TOKEN>", "<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>", "<|USER|>", "<|CHATBOT|>"),
    bos="<BOS_TOKEN>",
    eos="<|END_OF_TURN_TOKEN|>",
    pad="<PAD>",
    adds_bos=True,
    template=_turns(
        "<|START_OF_TURN_TOKEN|><|ROLE|>", "<|END_OF_TURN_TOKEN|>", "{{ bos_token }}", assistant="CHATBOT"
    ).replace("message['role'])", "message['role'] | upper)"),
)
GRANITE = Style(
    special=("<|end_of_text|>", "<|start_of_role|>", "<|end_of_role|>"),
    bos="<|end_of_text|>",
    eos="<|end_of_text|>",
    pad="<|end_of_text|>",
    template=_turns("<|start_of_role|>ROLE<|end_of_role|>", "<|end_of_text|>\\n"),
)

LLAMA: Mapping[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
}
EXPERTS: Mapping[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}


@dataclass(frozen=True)
class Family:
    """A model family.

    Args:
        config: name of the configuration class, without "Config".
        style: its tokenizer and chat template.
        settings: arguments of the configuration.
        tied: head and embeddings share their weights.
        dtype: of the saved weights.
        overrides: overrides that only runs of this family need.
    """

    config: str
    style: Style
    settings: Mapping[str, Any]
    tied: bool = False
    dtype: torch.dtype = torch.bfloat16
    overrides: Sequence[str] = field(default_factory=list)


FAMILIES: Mapping[str, Family] = {
    "Llama": Family("Llama", LLAMA3, LLAMA),
    "Qwen2": Family("Qwen2", QWEN2, LLAMA, tied=True),
    "Qwen3": Family("Qwen3", QWEN3, {**LLAMA, "head_dim": 16}, tied=True),
    "Gemma2": Family(
        "Gemma2",
        GEMMA,
        {
            **LLAMA, "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 2048,
            "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
        },
        tied=True,
    ),
    "Gemma3": Family(
        "Gemma3Text",
        GEMMA,
        {
            **LLAMA, "head_dim": 16, "query_pre_attn_scalar": 16, "num_key_value_heads": 1, "sliding_window": 512,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        tied=True,
        overrides=["context.max_prompt_tokens=256"],
    ),
    "Phi3": Family("Phi3", PHI, {**LLAMA, "sliding_window": 2047}),  # queries, keys and values in one matrix
    "OLMo2": Family("Olmo2", OLMO, LLAMA, dtype=torch.float32),
    "GPT2": Family(
        "GPT2",
        PLAIN,
        {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 1024},
        tied=True,
        dtype=torch.float32,
        overrides=["context.max_prompt_tokens=256"],
    ),
    "Mixtral": Family("Mixtral", MISTRAL, {**LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "Qwen3-MoE": Family("Qwen3Moe", QWEN3, {**LLAMA, **EXPERTS, "num_experts": 4, "head_dim": 16}),
    "DeepSeek-V3": Family(
        "DeepseekV3",
        DEEPSEEK,
        {
            **LLAMA, **EXPERTS, "num_key_value_heads": 4, "n_routed_experts": 8, "n_group": 2, "topk_group": 1,
            "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16,
            "first_k_dense_replace": 1,
        },
    ),
    "Cohere": Family(
        "Cohere", COHERE, {**LLAMA, "use_qk_norm": True, "logit_scale": 0.5}, tied=True, dtype=torch.float16
    ),
    "Granite": Family(
        "Granite",
        GRANITE,
        {
            **LLAMA, "embedding_multiplier": 12.0, "attention_multiplier": 0.2, "residual_multiplier": 0.5,
            "logits_scaling": 1.5,
        },
        tied=True,
    ),
    "Mistral": Family("Mistral", MISTRAL, {**LLAMA, "sliding_window": None, "head_dim": 16}),
}  # fmt: skip
# Families that generator=torch does not support.
STRANGERS: Mapping[str, Family] = {
    "Bloom": Family("Bloom", PLAIN, {"hidden_size": 32, "n_layer": 2, "n_head": 4}),
    "Mamba": Family("Mamba", PLAIN, {"hidden_size": 32, "num_hidden_layers": 2}),
}


@lru_cache
def _text_tokenizer() -> str:
    """Train a byte-level BPE on the text of the rows, without special tokens. Returns it as JSON."""
    bpe = tokenizers.Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    texts = [text for row in rows() for text in row.values()]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=360, initial_alphabet=alphabet, show_progress=False))
    return str(bpe.to_str())


def tokenizer_of(style: Style) -> Any:
    backend = tokenizers.Tokenizer.from_str(_text_tokenizer())
    backend.add_special_tokens([tokenizers.AddedToken(token, special="think" not in token) for token in style.special])
    if style.adds_bos:
        bos = str(style.bos)
        backend.post_processor = processors.Sequence(
            [
                processors.ByteLevel(trim_offsets=False),
                processors.TemplateProcessing(f"{bos} $A", special_tokens=[(bos, backend.token_to_id(bos))]),
            ]
        )
    special_tokens_by_role = {"bos_token": style.bos, "eos_token": style.eos, "pad_token": style.pad}
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, **{name: token for name, token in special_tokens_by_role.items() if token is not None}
    )
    if style.template is not None:
        tokenizer.chat_template = style.template
    return tokenizer


def save(family: Family, folder: Path, **more: Any) -> Path:
    """Write the model and its tokenizer with `save_pretrained`. `more`: further arguments of the configuration."""
    tokenizer = tokenizer_of(family.style)
    identity = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    settings = {"vocab_size": len(tokenizer) + family.style.spare, **identity, **family.settings, **more}
    config = getattr(transformers, f"{family.config}Config")(tie_word_embeddings=family.tied, **settings)
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() >= 2 and "norm" not in name:
                parameter.mul_(LARGER)
    if family.style.ends:
        model.generation_config.eos_token_id = [tokenizer.convert_tokens_to_ids(token) for token in family.style.ends]
    with _silently():
        model.to(family.dtype).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return folder


@contextmanager
def _silently() -> Iterator[None]:
    """Hide the progress bars of saving."""
    shown = transformers.utils.logging.is_progress_bar_enabled()
    transformers.utils.logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers.utils.logging.enable_progress_bar()
