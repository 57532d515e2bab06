"""Single attempt to grade a completion, or those of a group by one call, with any exception turned into an outcome."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

from lightning_scalerl.checks import said
from lightning_scalerl.verify.grade import Grade, Grader, Outcome, Sample


def attempt(grader: Grader, sample: Sample) -> Outcome:
    """Grade one completion; an exception of the grader becomes an `error` outcome, unless it ends the process."""
    began = time.perf_counter()
    try:
        grade = grader.grade(sample)
    # Not BaseException: what ends a process has to end the worker, which the pool replaces.
    except Exception as error:
        return _raised(error, time.perf_counter() - began)
    return _outcome(grade, began)


def attempt_group(grader: Any, samples: Sequence[Sample]) -> list[Outcome]:
    """Grade the completions of one prompt by one call; each has its share of the time.

    An exception of the grader is an `error` outcome of all of them, one that it returns in a grade's place of that one.
    """
    began = time.perf_counter()
    try:
        grades = grader.grade_group(samples)
    except Exception as error:
        grades = [error] * len(samples)
    share_s = (time.perf_counter() - began) / len(samples)
    began = time.perf_counter() - share_s
    return [_raised(each, share_s) if isinstance(each, Exception) else _outcome(each, began) for each in grades]


def in_function(error: Exception, name: str) -> Exception:
    """Note on an error which of a user's reward functions it comes from; return the error."""
    error.add_note(f"{_IN}{name}")
    return error


# Before the function's name in an error's notes, where others may write too.
_IN = "in reward function "


def _raised(error: Exception, seconds: float) -> Outcome:
    named = [note for note in getattr(error, "__notes__", ()) if note.startswith(_IN)]
    return Outcome("error", why=f"raised {said(error)}{f' ({named[0]})' if named else ''}", seconds=seconds)


def _outcome(grade: Grade, began: float) -> Outcome:
    """Return the outcome of a grade: a score, an abstention, or an error where its reward is no number."""
    try:
        problem = _problem(grade)
        # Converted within the `try`: a user's mapping or scalar may raise as well as the grader.
        parts = {str(name): float(value) for name, value in grade.parts.items() if _finite(value)}
    except Exception as error:
        return _raised(error, time.perf_counter() - began)
    seconds = time.perf_counter() - began
    if problem:
        return Outcome("error", why=problem, seconds=seconds)
    if grade.reward is None:
        return Outcome("abstain", parts=parts, why=grade.why, seconds=seconds, extra=dict(grade.extra))
    reward, correct = float(grade.reward), None if grade.correct is None else bool(grade.correct)
    terms = {str(name): float(value) for name, value in grade.terms.items()}
    return Outcome("score", reward, parts, seconds=seconds, correct=correct, extra=dict(grade.extra), terms=terms)


def _problem(grade: Grade) -> str:
    """Return one line if the reward is not finite, which would spoil the whole batch; else an empty text."""
    if grade.reward is None or _finite(grade.reward):
        return ""
    return f"returned {str(grade.reward)[:80]}; a reward must be a finite number, or None to abstain"


def _finite(value: Any) -> bool:
    """Return whether a value is a finite number, numpy's and torch's scalars included."""
    return not isinstance(value, str) and hasattr(value, "__float__") and math.isfinite(float(value))
