"""Base model of task=arithmetic: trained in about a minute, cached, and able to add, but unreliably.

A small Llama is trained on worked solutions with randomly corrupted digits. It learns the rule, but samples wrong
digits about as often as they occur in the data. Reinforcement learning can then improve the model.

The weights of the demo's base model come with the package, so that every demo starts from the same weights and needs no
training first. `python -m lightning_scalerl.task.arithmetic_base` trains this model and writes the packaged file again.
"""

from __future__ import annotations

import math
import random
from inspect import signature
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_scalerl.checks import ConfigurationError, whole_number
from lightning_scalerl.task.arithmetic import ALPHABET, STOP, draw_number, problem, solution
from lightning_scalerl.task.base_training import (
    FOLDER,
    MADE_WITH,
    PAD,
    base_model,
    check_width,
    model_name,
    small_llama,
    train_model,
    word_tokenizer,
    write_packaged,
)

VOCABULARY = (PAD, *ALPHABET)
# Non-default settings of the base model that comes with the package (conf/sums_of_two_digits.yaml).
SHIPPED: dict[str, Any] = {"digits": 2}


def arithmetic_base_model(
    width: int = 64,
    layers: int = 3,
    batches: int = 1000,
    batch_size: int = 128,
    corruption: float = 0.15,
    learning_rate: float = 3e-3,
    digits: int = 3,
    seed: int = 0,
) -> str:
    """Return the path of the base model with these settings.

    A model that is not in the cache is trained first, in about a minute on one core. The demo's model is not trained,
    because it comes with the package.

    Args:
        width: hidden size, a multiple of 32.
        layers: number of decoder layers.
        batches, batch_size, learning_rate: settings of the training with AdamW. After a warm-up the learning rate falls
            to a tenth along a cosine.
        corruption: probability that a digit of a worked solution is replaced by a random one.
        digits: length of the longest numbers in the training data. No recipe teaches the model to add longer numbers,
            so prompts with longer numbers lower the ceiling of the pass rate.
        seed: seed of weights and data.

    Raises:
        ConfigurationError: a value is invalid; the error names it.
    """
    _check(width, layers, batches, batch_size, corruption, learning_rate, digits)
    settings: dict[str, Any] = dict(
        width=width,
        layers=layers,
        batches=batches,
        batch_size=batch_size,
        corruption=corruption,
        learning_rate=learning_rate,
        digits=digits,
        seed=seed,
    )
    return base_model(
        "arithmetic-base", settings, lambda: new_model(width, layers, seed), lambda: _train(**settings), tokenizer
    )


def make_shipped(folder: Path = FOLDER) -> Path:
    """Train the packaged base model and write its weights; returns the file."""
    defaults = {name: parameter.default for name, parameter in signature(arithmetic_base_model).parameters.items()}
    settings = {**defaults, **SHIPPED}
    return write_packaged(folder, model_name("arithmetic-base", settings), _train(**settings))


def _check(
    width: int, layers: int, batches: int, batch_size: int, corruption: float, learning_rate: float, digits: int
) -> None:
    """Check the settings before a minute is spent on training."""
    whole_numbers = {"width": width, "layers": layers, "batch_size": batch_size, "digits": digits}
    if batches != 0:  # 0 is allowed: random weights without training
        whole_numbers["batches"] = batches
    for name, value in whole_numbers.items():
        whole_number(f"model.{name}", value)
    check_width(width)
    if not isinstance(corruption, int | float) or not 0 <= corruption <= 1:
        raise ConfigurationError(f"model.corruption: {corruption!r} must be a probability, from 0 to 1")
    if not isinstance(learning_rate, int | float) or not 0 < learning_rate < math.inf:
        raise ConfigurationError(f"model.learning_rate: {learning_rate!r} must be above 0, such as 3e-3")


def is_arithmetic_base(model: Any) -> bool:
    """Return whether a path or model object is one of the toy tasks' base models, by the file `MADE_WITH`."""
    path = model if isinstance(model, str) else getattr(getattr(model, "config", None), "name_or_path", "")
    return bool(path) and (Path(path) / MADE_WITH).is_file()


def tokenizer() -> Any:
    """Return a tokenizer with one token per character; the full stop ends a sequence."""
    return word_tokenizer(VOCABULARY, ".", STOP)


def new_model(width: int, layers: int, seed: int) -> Any:
    """Return a Llama with random weights over the character vocabulary."""
    return small_llama(VOCABULARY, STOP, 64, width, layers, seed)


def corrupt(text: str, corruption: float, rng: random.Random) -> str:
    """Return `text` with each digit replaced by a random digit with probability `corruption`."""
    return "".join(
        str(rng.randrange(10)) if character.isdigit() and rng.random() < corruption else character for character in text
    )


def _batch(digits: int, size: int, corruption: float, rng: random.Random) -> Tensor:
    """Draw a batch (size, tokens) of one difficulty, so that no padding is needed."""
    rows = []
    for _ in range(size):
        first, second = draw_number(digits, rng), draw_number(digits, rng)
        text = problem(first, second) + corrupt(solution(first, second, digits), corruption, rng)
        rows.append([VOCABULARY.index(character) for character in text])
    return torch.tensor(rows)


def _train(
    width: int,
    layers: int,
    batches: int,
    batch_size: int,
    corruption: float,
    learning_rate: float,
    digits: int,
    seed: int,
) -> Any:
    rng = random.Random(f"arithmetic base {seed}")
    prompt_tokens = len(problem(0, 0))

    def loss_of(model: Any, number: int) -> Tensor:
        tokens = _batch(1 + number % digits, batch_size, corruption, rng)
        logits = model(tokens[:, :-1], use_cache=False).logits[:, prompt_tokens - 1 :]
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, prompt_tokens:].flatten())

    return train_model(lambda: new_model(width, layers, seed), loss_of, batches, learning_rate)


if __name__ == "__main__":
    print(make_shipped())
