"""Verifiers of short answers in words: exact match, F1, choice by letter.

Normalization is SQuAD's (lower case, without punctuation, articles and needless space), which Natural Questions and
TruthfulQA-style tasks are scored with too. Source: Rajpurkar et al. 2016, its evaluation script.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lightning_scalerl.verify.grade import Grade, Sample

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
# Possessive quantifiers: without them a completion of many spaces takes quadratic time.
_BOXED = re.compile(r"\\boxed\s*+\{\s*+(?:\\text\s*+\{)?\s*+\(?([A-Za-z])(?=\s*+[).:}])")
_LETTER = r"\b\s*+(?i:is\b)?[\s:*]*+\(?((?<=\()[a-z](?=\))|[A-Z](?![A-Za-z']))"
# "answer" takes precedence over "option": a reasoned answer mentions the other options too.
_SAID = re.compile(r"\b(?i:answer(?:\s++(?:choice|option))?)" + _LETTER)
_NAMED = re.compile(r"\b(?i:choice|option)" + _LETTER)
_IN_BRACKETS = re.compile(r"\(([A-Z])\)")
# A letter by itself; but I is mostly the pronoun, and A before a word the article.
_ALONE = re.compile(r"(?<![A-Za-z'])([B-HJ-Z]|A(?!\s+[a-z]))(?![A-Za-z'])")
# Phrases after which the answer follows, to the end of the line.
_FINAL = re.compile(r"\b(?:final answer|the answer|answer)\b\s*+(?:is\b)?\s*+:?", re.IGNORECASE)
# Only so many last characters of a completion are searched.
_LAST = 20_000


def normalized(text: str) -> str:
    """Normalise a text as SQuAD does: lower case, no punctuation, articles or extra white space."""
    bare = text.lower().translate(_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", bare).split())


def final_answer(text: str) -> str:
    """Return a completion's answer: after the last "answer is" or "answer:", else its last line."""
    text = text[-_LAST:]
    asked = [found for found in _FINAL.finditer(text) if found[0].rstrip().lower().endswith((":", "is"))]
    after = text[asked[-1].end() :].strip() if asked else ""
    lines = [line.strip() for line in (after or text).splitlines() if line.strip()]
    if not lines:
        return ""
    return lines[0] if after else lines[-1]


def f1(prediction: str, gold: str) -> float:
    """Return the harmonic mean of precision and recall over the words of two texts, 0 to 1; for two empty texts 1."""
    ours, theirs = normalized(prediction).split(), normalized(gold).split()
    if not ours or not theirs:
        return float(ours == theirs)
    common = sum((Counter(ours) & Counter(theirs)).values())
    if not common:
        return 0.0
    precision, recall = common / len(ours), common / len(theirs)
    return 2 * precision * recall / (precision + recall)


def golds(answer: Any) -> Sequence[str]:
    """Return the accepted answers as a list, whether there is one or several."""
    return [str(each) for each in answer] if isinstance(answer, list | tuple) else [str(answer)]


@dataclass(frozen=True)
class ExactMatch:
    """Rewards 1 if the completion, stripped, is the answer or one of the answers, to the letter."""

    def grade(self, sample: Sample) -> Grade:
        """Compare the text after the thinking with the answers, to the letter."""
        return Grade(float(sample.answer.strip() in [gold.strip() for gold in golds(sample.prompt.answer)]))

    def known(self, answer: Any) -> tuple[str | None, str | None]:
        """Return a right completion and a wrong one."""
        return golds(answer)[0], golds(answer)[0] + " not"


@dataclass(frozen=True)
class QuestionAnswer:
    """Rewards 1 if the final answer is an accepted one after normalization; the best F1 is recorded as `f1`.

    Args:
        partial: whether the reward is F1, 0 to 1, instead of 1 for an exact match.
    """

    partial: bool = False

    def grade(self, sample: Sample) -> Grade:
        """Compare the final answer with the accepted ones, and record the best F1."""
        said = final_answer(sample.answer)
        accepted = golds(sample.prompt.answer)
        exact = float(normalized(said) in [normalized(gold) for gold in accepted])
        nearest = max((f1(said, gold) for gold in accepted), default=0.0)
        return Grade(nearest if self.partial else exact, {"f1": nearest}, correct=bool(exact))

    def known(self, answer: Any) -> tuple[str | None, str | None]:
        """Return a right completion and a wrong one."""
        return f"The answer is {golds(answer)[0]}", "The answer is xyzzy plugh"


@dataclass(frozen=True)
class TruthfulAnswer:
    """Rewards 1 if the final answer is nearer (F1) to one of the true answers than to any of the false ones.

    The answer is {"true": [...], "false": [...]}. A stand-in for the judges of TruthfulQA, which are models.
    """

    def grade(self, sample: Sample) -> Grade:
        """Compare the final answer's best F1 over the true answers with that over the false ones."""
        said = final_answer(sample.answer)
        true = max((f1(said, each) for each in sample.prompt.answer["true"]), default=0.0)
        false = max((f1(said, each) for each in sample.prompt.answer["false"]), default=0.0)
        return Grade(float(true > false), {"f1_true": true, "f1_false": false})

    def known(self, answer: Any) -> tuple[str | None, str | None]:
        """Return a right completion and a wrong one."""
        false = answer["false"][0] if answer["false"] else "xyzzy"
        return f"The answer is {answer['true'][0]}", f"The answer is {false}"


@dataclass(frozen=True)
class Choice:
    """Rewards 1 if the letter that the completion gives is the answer.

    The letter is looked for boxed, after "answer is", after "option", in brackets, else alone.
    """

    def grade(self, sample: Sample) -> Grade:
        """Compare the letter that the text after the thinking gives with the answer."""
        return Grade(float(chosen_letter(sample.answer) == str(sample.prompt.answer).strip().upper()))

    def known(self, answer: Any) -> tuple[str | None, str | None]:
        """Return a right completion and a wrong one."""
        letter = str(answer).strip().upper()
        return f"The answer is ({letter}).", f"The answer is ({'B' if letter == 'A' else 'A'})."


def chosen_letter(text: str) -> str | None:
    """Return the letter that a text chooses; None if it chooses none."""
    for pattern in (_BOXED, _SAID, _NAMED, _IN_BRACKETS, _ALONE):
        found = pattern.findall(text[-_LAST:])
        if found:
            return str(found[-1]).upper()
    return None
