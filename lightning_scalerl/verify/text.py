"""Verifiers of short answers in words: exact match, F1, multiple choice by letter.

Texts are normalised as for SQuAD: lower case, no punctuation or articles, no surplus white space. Natural Questions and
tasks like TruthfulQA are scored this way too. Source: evaluation script of Rajpurkar et al. 2016.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lightning_scalerl.rollouts.grade import Grade, Sample

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
# Possessive quantifiers: without them a completion of many spaces takes quadratic time.
_BOXED_LETTER = re.compile(r"\\boxed\s*+\{\s*+(?:\\text\s*+\{)?\s*+\(?([A-Za-z])(?=\s*+[).:}])")
_LETTER = r"\b\s*+(?i:is\b)?[\s:*]*+\(?((?<=\()[a-z](?=\))|[A-Z](?![A-Za-z']))"
# "answer" takes precedence over "option", because reasoning mentions the other options too.
_ANSWER_LETTER = re.compile(r"\b(?i:answer(?:\s++(?:choice|option))?)" + _LETTER)
_OPTION_LETTER = re.compile(r"\b(?i:choice|option)" + _LETTER)
_BRACKETED_LETTER = re.compile(r"\(([A-Z])\)")
# A single letter, except I, which is mostly the pronoun, and A before a word, where it is the article.
_LONE_LETTER = re.compile(r"(?<![A-Za-z'])([B-HJ-Z]|A(?!\s+[a-z]))(?![A-Za-z'])")
# Phrases that are followed by the answer, up to the end of the line.
_LEAD_IN = re.compile(r"\b(?:final answer|the answer|answer)\b\s*+(?:is\b)?\s*+:?", re.IGNORECASE)
# Number of characters at the end of a completion that are searched for its answer.
_MAX_CHARACTERS = 20_000


def normalize(text: str) -> str:
    """Normalise a text as for SQuAD: lower case, no punctuation, articles or surplus white space."""
    bare = text.lower().translate(_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", bare).split())


def final_answer(text: str) -> str:
    """Return a completion's answer: the line after the last "answer is" or "answer:", else its last line."""
    text = text[-_MAX_CHARACTERS:]
    phrases = [match for match in _LEAD_IN.finditer(text) if match[0].rstrip().lower().endswith((":", "is"))]
    rest_of_text = text[phrases[-1].end() :].strip() if phrases else ""
    lines = [line.strip() for line in (rest_of_text or text).splitlines() if line.strip()]
    if not lines:
        return ""
    return lines[0] if rest_of_text else lines[-1]


def f1(prediction: str, gold: str) -> float:
    """Return the F1 score over the words of two texts, 0 to 1; 1 if both are empty."""
    predicted_words, gold_words = normalize(prediction).split(), normalize(gold).split()
    if not predicted_words or not gold_words:
        return float(predicted_words == gold_words)
    common = sum((Counter(predicted_words) & Counter(gold_words)).values())
    if not common:
        return 0.0
    precision, recall = common / len(predicted_words), common / len(gold_words)
    return 2 * precision * recall / (precision + recall)


def accepted_answers(answer: Any) -> Sequence[str]:
    """Return the accepted answers as a list; a single answer becomes a list of one."""
    return [str(gold) for gold in answer] if isinstance(answer, list | tuple) else [str(answer)]


@dataclass(frozen=True)
class ExactMatch:
    """Rewards 1 if the completion is exactly one of the answers, apart from surrounding white space; else 0."""

    def grade(self, sample: Sample) -> Grade:
        """Compare the text after the thinking with the answers."""
        answer = sample.answer.strip()
        return Grade(float(answer in [gold.strip() for gold in accepted_answers(sample.prompt.answer)]), answer=answer)

    def known(self, answer: Any) -> tuple[str | None, str | None]:
        """Return a right completion and a wrong one."""
        return accepted_answers(answer)[0], accepted_answers(answer)[0] + " not"


@dataclass(frozen=True)
class QuestionAnswer:
    """Rewards 1 if the final answer, normalised, is one of the accepted answers; the best F1 is recorded as `f1`.

    Args:
        partial: whether to use the best F1 (0 to 1) as the reward instead.
    """

    partial: bool = False

    def grade(self, sample: Sample) -> Grade:
        """Compare the final answer with the accepted answers, and record the best F1."""
        answer = final_answer(sample.answer)
        accepted = accepted_answers(sample.prompt.answer)
        exact = float(normalize(answer) in [normalize(gold) for gold in accepted])
        best_f1 = max((f1(answer, gold) for gold in accepted), default=0.0)
        reward = best_f1 if self.partial else exact
        return Grade(reward, {"f1": best_f1}, correct=bool(exact), answer=normalize(answer))

    def known(self, answer: Any) -> tuple[str | None, str | None]:
        """Return a right completion and a wrong one."""
        return f"The answer is {accepted_answers(answer)[0]}", "The answer is xyzzy plugh"


@dataclass(frozen=True)
class TruthfulAnswer:
    """Rewards 1 if the final answer is closer (by F1) to one of the true answers than to all false answers.

    The prompt's answer is {"true": [...], "false": [...]}. TruthfulQA itself uses models as judges; this replaces them.
    """

    def grade(self, sample: Sample) -> Grade:
        """Compare the final answer's best F1 with the true answers and with the false answers."""
        answer = final_answer(sample.answer)
        true = max((f1(answer, gold) for gold in sample.prompt.answer["true"]), default=0.0)
        false = max((f1(answer, gold) for gold in sample.prompt.answer["false"]), default=0.0)
        return Grade(float(true > false), {"f1_true": true, "f1_false": false}, answer=normalize(answer))

    def known(self, answer: Any) -> tuple[str | None, str | None]:
        """Return a right completion and a wrong one."""
        false = answer["false"][0] if answer["false"] else "xyzzy"
        return f"The answer is {answer['true'][0]}", f"The answer is {false}"


@dataclass(frozen=True)
class Choice:
    """Rewards 1 if the completion chooses the letter of the answer, else 0.

    The letter is searched for in this order: boxed, after "answer is", after "option", in brackets, as a single letter.
    """

    def grade(self, sample: Sample) -> Grade:
        """Give reward 1 if the text after the thinking chooses the answer's letter."""
        letter = chosen_letter(sample.answer)
        return Grade(float(letter == str(sample.prompt.answer).strip().upper()), answer=letter or "")

    def known(self, answer: Any) -> tuple[str | None, str | None]:
        """Return a right completion and a wrong one."""
        letter = str(answer).strip().upper()
        return f"The answer is ({letter}).", f"The answer is ({'B' if letter == 'A' else 'A'})."


def chosen_letter(text: str) -> str | None:
    """Return the letter (in upper case) that a text chooses, or None if it chooses none."""
    for pattern in (_BOXED_LETTER, _ANSWER_LETTER, _OPTION_LETTER, _BRACKETED_LETTER, _LONE_LETTER):
        letters = pattern.findall(text[-_MAX_CHARACTERS:])
        if letters:
            return str(letters[-1]).upper()
    return None
