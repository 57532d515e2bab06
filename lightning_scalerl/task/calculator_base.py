"""Base model of task=calculator: it can call the calculator but seldom does, and mostly guesses wrong sums.

A small Llama is trained on conversations with and without a call. Its weights come with the package.
`python -m lightning_scalerl.task.calculator_base` trains it and writes the packaged file again.
"""

from __future__ import annotations

import random
from inspect import signature
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_scalerl.checks import ConfigurationError, positive, whole_number
from lightning_scalerl.task.base_training import (
    FOLDER,
    PAD,
    base_model,
    check_width,
    model_name,
    small_llama,
    train_model,
    word_tokenizer,
    write_packaged,
)
from lightning_scalerl.task.calculator import MAX_DIGITS, draw_number

STOP = "."
VOCABULARY = (PAD, *"0123456789+=?()", STOP, "<call>", "</call>", "calculate")
_ID = {token: number for number, token in enumerate(VOCABULARY)}
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ m.content }}.{% else %}"
    "{{ '' if loop.first else '?' }}{{ m.content }}={% endif %}{% endfor %}"
)


def calculator_base_model(
    width: int = 64,
    layers: int = 2,
    batches: int = 1000,
    batch_size: int = 128,
    calls: float = 0.06,
    corruption: float = 0.02,
    learning_rate: float = 3e-3,
    seed: int = 0,
) -> str:
    """Return the path of the base model with these settings.

    A model that is not in the cache is trained first, in about a minute on one core. The default model is not trained,
    because it comes with the package.

    Args:
        width: hidden size, a multiple of 32.
        layers: number of decoder layers.
        batches, batch_size, learning_rate: settings of the training with AdamW.
        calls: probability with which the model calls the calculator.
        corruption: probability that a copied digit in the training data is replaced by a random one.
        seed: seed of weights and data.

    Raises:
        ConfigurationError: a value is invalid; the error names it.
    """
    settings: dict[str, Any] = dict(locals())
    for name in ("width", "layers", "batch_size"):
        whole_number(f"model.{name}", settings[name])
    whole_number("model.batches", batches, least=0)
    check_width(width)
    positive("model.learning_rate", learning_rate)
    for name in ("calls", "corruption"):
        if not 0 <= settings[name] <= 1:
            raise ConfigurationError(f"model.{name}: {settings[name]!r} must be a probability, from 0 to 1")
    return base_model(
        "calculator-base", settings, lambda: new_model(width, layers, seed), lambda: _train(**settings), tokenizer
    )


def make_shipped(folder: Path = FOLDER) -> Path:
    """Train the packaged base model and write its weights; returns the file."""
    settings = {name: parameter.default for name, parameter in signature(calculator_base_model).parameters.items()}
    return write_packaged(folder, model_name("calculator-base", settings), _train(**settings))


def tokenizer() -> Any:
    """Return a tokenizer with one token per digit, sign and tag; the full stop ends a turn."""
    # A run of letters is one token, so that a message in words becomes only a few unknown tokens.
    made = word_tokenizer(VOCABULARY, "</?call>|[A-Za-z ]+|.", STOP)
    made.chat_template = TEMPLATE
    return made


def new_model(width: int, layers: int, seed: int) -> Any:
    """Return a Llama with random weights over the vocabulary."""
    return small_llama(VOCABULARY, STOP, 128, width, layers, seed)


def _conversation(calls: bool, corruption: float, rng: random.Random) -> tuple[list[str], list[float]]:
    """Return the tokens of a conversation, and a mask with 1 for the model's tokens."""

    def copy_digits(text: str, probability: float) -> list[str]:
        return [str(rng.randrange(10)) if sign != "+" and rng.random() < probability else sign for sign in text]

    first, second = draw_number(1, MAX_DIGITS, rng), draw_number(1, MAX_DIGITS, rng)
    question, result = f"{first}+{second}", str(first + second)
    turns: list[tuple[list[str], float]] = [([*question, "="], 0.0)]
    if calls:
        call = copy_digits(question, corruption)
        answer = str(sum(map(int, "".join(call).split("+"))))
        turns += [(["<call>", "calculate", "(", *call, ")", "</call>", STOP], 1.0), (["?", *answer, "="], 0.0)]
        turns += [([*copy_digits(answer, corruption), STOP], 1.0)]
    else:
        turns += [([*copy_digits(result, 0.5), STOP], 1.0)]
    return [token for part, _ in turns for token in part], [mask for part, mask in turns for _ in part]


def _train(
    width: int,
    layers: int,
    batches: int,
    batch_size: int,
    calls: float,
    corruption: float,
    learning_rate: float,
    seed: int,
) -> Any:
    rng = random.Random(f"calculator base {seed}")

    def loss_of(model: Any, number: int) -> Tensor:
        # Every second conversation has a call, so that calls are learned quickly. The model's first token decides
        # whether there is a call. Its loss is weighted so that the model calls with probability `calls`.
        rows = [_conversation(row % 2 == 0, corruption, rng) for row in range(batch_size)]
        width = max(len(tokens) for tokens, _ in rows)
        tokens = torch.tensor([[_ID[token] for token in row] + [0] * (width - len(row)) for row, _ in rows])
        mask = torch.tensor([masks + [0.0] * (width - len(masks)) for _, masks in rows])
        is_deciding_token = (mask.cumsum(1) == 1) & (mask > 0)
        has_call = (torch.arange(batch_size) % 2 == 0).unsqueeze(1)
        weights = torch.where(is_deciding_token, torch.where(has_call, 2 * calls, 2 * (1 - calls)), mask)[:, 1:]
        logits = model(tokens[:, :-1], use_cache=False).logits
        losses = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
        return (losses * weights.flatten()).sum() / mask.sum()

    return train_model(lambda: new_model(width, layers, seed), loss_of, batches, learning_rate)


if __name__ == "__main__":
    print(make_shipped())
