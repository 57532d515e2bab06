"""My rewards, in TRL's form: called with all completions of a prompt, and with every column of its row as a list."""

from typing import Any


def accuracy(completions: list[str], answer: list[str], **kwargs: Any) -> list[float]:
    """Return 1 for the whole worked solution, else 0; the first reward of a task decides what counts as a pass."""
    return [float(text == gold) for text, gold in zip(completions, answer, strict=True)]


def ends(completions: list[str], **kwargs: Any) -> list[float]:
    """Return 1 for a completion that ends with `#` and a number, right or wrong, else 0."""
    return [float(text.rpartition("#")[2].isdigit()) for text in completions]
