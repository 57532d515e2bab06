"""The prompt record. It has a module of its own so that verifier processes can import it without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Prompt:
    """One problem whose answer can be verified.

    Attributes:
        prompt_id: identifier, unique in its pool.
        text: the prompt as plain text; the last message if it is a conversation.
        answer: the reference answer, in the form that the task's verifier needs.
        difficulty: a label such as a number of digits, for metrics by difficulty.
        messages: the conversation as {"role", "content"} mappings; empty if the prompt is plain text.
        columns: all columns of the data row it comes from, by name.
        source: name of the data set it comes from, in a mixture of several.
        question: the text without the instructions that the task adds before and after it; empty if there are none.
        family: name of the prompts that were made alike (one template, one text), for errors of other prompts; empty if
            the row names none.
        opening: row, seed and first observation of its environment; None without one.
        solution: a completion that is known to be right, for its log-likelihood at evaluations; empty if there is none.
    """

    prompt_id: str
    text: str
    answer: Any = ""
    difficulty: str = ""
    messages: tuple[Mapping[str, Any], ...] = field(default=(), compare=False)
    columns: Mapping[str, Any] = field(default_factory=dict, compare=False)
    source: str = ""
    question: str = field(default="", compare=False)
    solution: str = field(default="", compare=False)
    opening: Any = field(default=None, compare=False)
    family: str = field(default="", compare=False)
