"""Data class of a prompt, in a module of its own, so that verifier processes can import it without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# Columns of a data row from which a prompt's environment is created: its name and its seed. `Prompt.columns` always
# keeps them.
OPENING_COLUMNS = ("environment", "seed")


@dataclass(frozen=True)
class Prompt:
    """One problem whose answer can be verified.

    Attributes:
        prompt_id: identifier, unique in its pool.
        text: the prompt as plain text; the last message if it is a conversation.
        answer: the reference answer, in the form that the task's verifier needs.
        difficulty: a label such as a number of digits, for metrics by difficulty.
        messages: the conversation as {"role", "content"} mappings; empty if the prompt is plain text.
        columns: all columns of the prompt's data row, by name; or only those of `OPENING_COLUMNS`, if neither the
            verifier nor the environment is declared to read the row.
        source: in a mixture of several tasks, the name of the prompt's task.
        question: the text without the instructions that the task adds before and after it; "" if the task adds none.
        family: label of prompts with a common origin (one template, one text), for clustered standard errors; "" if the
            row has no label.
        opening: row, seed and first observation of the prompt's environment; None without an environment.
        solution: a completion that is known to be right, for its log-likelihood at evaluations; empty if there is none.
        copy_of: id of the prompt that this one is a copy of; "" if none. Both are retired together.
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
    copy_of: str = field(default="", compare=False)
