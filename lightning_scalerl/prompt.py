"""The prompt record, which the data path begins with; apart from the others, as verifier processes need no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Prompt:
    """One problem whose answer can be verified.

    Attributes:
        prompt_id: unique in its pool.
        text: what is asked, as plain text; of a conversation its last message.
        answer: whatever the task's verifier needs.
        difficulty: a label such as a number of digits, for metrics by difficulty.
        messages: the conversation, {"role", "content"} each; empty if the prompt is plain text.
        columns: every column of the row that it comes from, by name.
        source: the data set it comes from, in a mixture of several.
        question: what is asked, without what its task puts before and behind it; empty if that is `text`.
    """

    prompt_id: str
    text: str
    answer: Any = ""
    difficulty: str = ""
    messages: tuple[Mapping[str, Any], ...] = field(default=(), compare=False)
    columns: Mapping[str, Any] = field(default_factory=dict, compare=False)
    source: str = ""
    question: str = field(default="", compare=False)
