"""Single attempt to grade a completion or a group; exceptions become outcomes."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

from lightning_scalerl.checks import error_line
from lightning_scalerl.rollouts.grade import Grade, Grader, Outcome, Sample, charges_of


def attempt(grader: Grader, sample: Sample) -> Outcome:
    """Grade one completion; an exception of the grader becomes an `error` outcome."""
    began = time.perf_counter()
    try:
        grade = grader.grade(sample)
    # Other subclasses of BaseException, such as SystemExit, must end the worker. The pool then replaces it.
    except Exception as error:
        return _error_outcome(error, time.perf_counter() - began)
    return _outcome(grade, began)


def attempt_group(grader: Any, samples: Sequence[Sample]) -> list[Outcome]:
    """Grade the completions of one prompt by one call, whose time is divided equally among their outcomes.

    An exception that the grader raises becomes an `error` outcome of every completion. An exception that it returns
    instead of a grade becomes the outcome of that completion alone.
    """
    began = time.perf_counter()
    try:
        grades = grader.grade_group(samples)
    except Exception as error:
        grades = [error] * len(samples)
    seconds_each = (time.perf_counter() - began) / len(samples)
    began = time.perf_counter() - seconds_each
    return [
        _error_outcome(grade, seconds_each) if isinstance(grade, Exception) else _outcome(grade, began)
        for grade in grades
    ]


def add_function_name(error: Exception, name: str) -> Exception:
    """Add the name of the user's reward function to an error's notes; returns the error."""
    error.add_note(f"{_NOTE_PREFIX}{name}")
    return error


# Beginning of the notes that this module adds to an error; others may add notes too.
_NOTE_PREFIX = "in reward function "


def _error_outcome(error: Exception, seconds: float) -> Outcome:
    notes = [note for note in getattr(error, "__notes__", ()) if note.startswith(_NOTE_PREFIX)]
    reason = f"raised {error_line(error)}{f' ({notes[0]})' if notes else ''}"
    return Outcome("error", why=reason, seconds=seconds, charges=charges_of(error))


def _outcome(grade: Grade, began: float) -> Outcome:
    """Turn a grade into an outcome: a score, an abstention, or an error if its reward is not a finite number."""
    try:
        problem = _reward_problem(grade)
        # Convert inside the `try`: a user's mapping or scalar may raise too.
        parts = {str(name): float(value) for name, value in grade.parts.items() if _finite(value)}
    except Exception as error:
        return _error_outcome(error, time.perf_counter() - began)
    seconds = time.perf_counter() - began
    charges, extra = charges_of(grade), dict(grade.extra)
    if problem:
        return Outcome("error", why=problem, seconds=seconds, charges=charges)
    if grade.reward is None:
        return Outcome("abstain", parts=parts, why=grade.why, seconds=seconds, extra=extra, charges=charges)
    reward, correct = float(grade.reward), None if grade.correct is None else bool(grade.correct)
    terms = {str(name): float(value) for name, value in grade.terms.items()}
    return Outcome(
        kind="score",
        reward=reward,
        parts=parts,
        seconds=seconds,
        correct=correct,
        extra=extra,
        terms=terms,
        answer=grade.answer,
        charges=charges,
    )


def _reward_problem(grade: Grade) -> str:
    """Return a one-line message if the reward is not a finite number, which would ruin the batch; else ""."""
    if grade.reward is None or _finite(grade.reward):
        return ""
    return f"returned {str(grade.reward)[:80]}; a reward must be a finite number, or None to abstain"


def _finite(value: Any) -> bool:
    """Return whether a value is a finite number; scalars of numpy and torch count as numbers."""
    return not isinstance(value, str) and hasattr(value, "__float__") and math.isfinite(float(value))
