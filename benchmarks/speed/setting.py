"""Model and prompts for all trainers in a comparison: a Llama with random weights, and prompts of random words."""

from __future__ import annotations

import random
from pathlib import Path

ANSWER_TOKENS = 5
PROMPTS, COMPLETIONS = 32, 8  # per batch: 256 completions, used for two optimizer steps
VOCABULARY = 512
# Width, layers and heads by approximate number of parameters.
SIZES = {"0.5M": (128, 2, 4), "10M": (320, 8, 5)}


def words(seed: int, prompt_tokens: int) -> list[str]:
    """Make prompts of exactly `prompt_tokens` tokens."""
    source = random.Random(seed)
    return [
        " ".join(f"w{source.randrange(1, VOCABULARY - 1)}" for _ in range(prompt_tokens)) for _ in range(8 * PROMPTS)
    ]


def reward(completion: str) -> float:
    """Return 1 if the answer has more words with an even number than with an odd one: cheap, and learnable."""
    numbers = [int(word[1:]) for word in completion.split() if word[1:].isdigit()]
    return float(2 * sum(number % 2 == 0 for number in numbers) > len(numbers))


def save_model(folder: Path, size: str) -> None:
    """Write model and tokenizer for `from_pretrained`."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    width, layers, heads = SIZES[size]
    torch.manual_seed(0)
    last = VOCABULARY - 1
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=width,
            intermediate_size=3 * width,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=heads,
            max_position_embeddings=1024,
            tie_word_embeddings=True,
            pad_token_id=0,
            bos_token_id=None,
            eos_token_id=last,
        )
    )
    model.save_pretrained(folder)
    by_word = Tokenizer(models.WordLevel({f"w{number}": number for number in range(VOCABULARY)}, unk_token="w0"))
    by_word.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=by_word, pad_token="w0", eos_token=f"w{last}").save_pretrained(folder)
