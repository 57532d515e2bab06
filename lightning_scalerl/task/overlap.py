"""Detection of duplicate prompts, and of training prompts that are also held out, by the text of their questions."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

from lightning_scalerl.checks import ConfigurationError
from lightning_scalerl.rollouts.prompt import Prompt

RULES = ("drop", "refuse", "keep")


def check_rules(**rules: str) -> None:
    """Check that each rule, passed under the name of its field, is one of `RULES`.

    Raises:
        ConfigurationError: a rule is not in `RULES`.
    """
    for name, rule in rules.items():
        if rule not in RULES:
            raise ConfigurationError(f"task.{name}: {rule!r} must be one of {', '.join(RULES)}")


def question_key(prompt: Prompt) -> str:
    """Return a prompt's question as a key, with earlier turns and without instructions that the task added.

    Prompts that differ only in case and white space have the same key.
    """
    earlier_turns = [str(message.get("content")) for message in prompt.messages[:-1] if message.get("role") != "system"]
    texts = [*earlier_turns, prompt.question or prompt.text]
    return " ".join("\n".join(texts).casefold().split())


def split(prompts: Sequence[Prompt], share: float) -> tuple[list[Prompt], list[Prompt]]:
    """Split prompts; return the training prompts and the held-out prompts.

    A share of the distinct questions, at least one, is held out with all prompts that ask them. The split depends on
    the text of the questions alone, not on the order of the rows or a seed.

    Raises:
        ConfigurationError: there are too few prompts for both parts.
    """
    order = sorted(
        {question_key(prompt) for prompt in prompts}, key=lambda text: hashlib.sha256(text.encode()).digest()
    )
    heldout = set(order[: max(1, round(share * len(order)))])
    remaining = [prompt for prompt in prompts if question_key(prompt) not in heldout]
    if not remaining:
        raise ConfigurationError(f"task.heldout: {share:g} of {len(order)} different prompts leaves none to train on")
    return remaining, [prompt for prompt in prompts if question_key(prompt) in heldout]


def without_overlap(
    prompts: Sequence[Prompt], heldout: Mapping[str, Sequence[Prompt]], duplicates: str, leaks: str
) -> tuple[list[Prompt], list[str]]:
    """Apply the rules for duplicate and held-out prompts to a pool; return the pool and a line per rule that applied.

    Args:
        prompts: the training prompts.
        heldout: held-out prompts by set name.
        duplicates: rule (in `RULES`) for prompts that occur twice.
        leaks: rule (in `RULES`) for prompts that are in a held-out set.

    Raises:
        ConfigurationError: a prompt was found that the rule refuses, or no prompt is left.
    """
    heldout_keys = {question_key(prompt) for heldout_set in heldout.values() for prompt in heldout_set}
    seen: set[str] = set()
    remaining, duplicate_ids, leaked_ids = [], [], []
    for prompt in prompts:
        key = question_key(prompt)
        if key in heldout_keys:
            leaked_ids.append(prompt.prompt_id)
        if key in seen:
            duplicate_ids.append(prompt.prompt_id)
        if (key in heldout_keys and leaks == "drop") or (key in seen and duplicates == "drop"):
            continue
        seen.add(key)
        remaining.append(prompt)
    notes = []
    for field, ids, rule, problem in (
        ("duplicates", duplicate_ids, duplicates, "occur more than once"),
        ("leaks", leaked_ids, leaks, "are in a held-out set too"),
    ):
        if not ids:
            continue
        summary = f"{len(ids)} of {len(prompts)} training prompts {problem} (the first is {ids[0]!r})"
        if rule == "refuse":
            raise ConfigurationError(f"task.{field}: {summary}; mend the data, or choose drop or keep")
        notes.append(f"task.{field}: {summary}; {'left out' if rule == 'drop' else 'kept'}")
    if not remaining:
        raise ConfigurationError("task.train: every prompt of it is in a held-out set; nothing is left to train on")
    return remaining, notes
