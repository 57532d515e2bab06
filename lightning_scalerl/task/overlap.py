"""Detection of duplicate prompts in a pool, and of prompts that are held out as well, by what they ask."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

from lightning_scalerl.checks import ConfigurationError
from lightning_scalerl.prompt import Prompt

RULES = ("drop", "refuse", "keep")


def check_rules(**rules: str) -> None:
    """Check that each given rule is one of `RULES`.

    Raises:
        ConfigurationError: one is not; named as a field of the task.
    """
    for name, rule in rules.items():
        if rule not in RULES:
            raise ConfigurationError(f"task.{name}: {rule!r} must be one of {', '.join(RULES)}")


def asked(prompt: Prompt) -> str:
    """Return the text that a prompt asks, as a key: without its task's wrapping, with the turns before it.

    Two prompts that differ in case and white space alone have the same key.
    """
    before = [str(each.get("content")) for each in prompt.messages[:-1] if each.get("role") != "system"]
    texts = [*before, prompt.question or prompt.text]
    return " ".join("\n".join(texts).casefold().split())


def split(prompts: Sequence[Prompt], share: float) -> tuple[list[Prompt], list[Prompt]]:
    """Return the prompts to train on, and those that are held out: a share of them, but one at least.

    A prompt's side follows from what it asks, so that neither the order of the rows nor a seed changes it.

    Raises:
        ConfigurationError: too few prompts for both.
    """
    order = sorted({asked(prompt) for prompt in prompts}, key=lambda text: hashlib.sha256(text.encode()).digest())
    apart = set(order[: max(1, round(share * len(order)))])
    kept = [prompt for prompt in prompts if asked(prompt) not in apart]
    if not kept:
        raise ConfigurationError(f"task.heldout: {share:g} of {len(order)} different prompts leaves none to train on")
    return kept, [prompt for prompt in prompts if asked(prompt) in apart]


def without_overlap(
    prompts: Sequence[Prompt], heldout: Mapping[str, Sequence[Prompt]], duplicates: str, leaks: str
) -> tuple[list[Prompt], list[str]]:
    """Return a pool without duplicates and held-out prompts, as the rules say, and a line on each kind found.

    Raises:
        ConfigurationError: something was found that is to be refused, or nothing is left.
    """
    kept_apart = {asked(prompt) for those in heldout.values() for prompt in those}
    seen: set[str] = set()
    kept, twice, leaked = [], [], []
    for prompt in prompts:
        key = asked(prompt)
        if key in kept_apart:
            leaked.append(prompt.prompt_id)
        if key in seen:
            twice.append(prompt.prompt_id)
        if (key in kept_apart and leaks == "drop") or (key in seen and duplicates == "drop"):
            continue
        seen.add(key)
        kept.append(prompt)
    notes = []
    for field, found, rule, what in (
        ("duplicates", twice, duplicates, "occur more than once"),
        ("leaks", leaked, leaks, "are in a held-out set too"),
    ):
        if not found:
            continue
        said = f"{len(found)} of {len(prompts)} training prompts {what} (the first is {found[0]!r})"
        if rule == "refuse":
            raise ConfigurationError(f"task.{field}: {said}; mend the data, or choose drop or keep")
        notes.append(f"task.{field}: {said}; {'left out' if rule == 'drop' else 'kept'}")
    if not kept:
        raise ConfigurationError("task.train: every prompt of it is in a held-out set; nothing is left to train on")
    return kept, notes
