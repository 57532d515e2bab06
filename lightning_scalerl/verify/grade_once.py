"""Single attempt to grade a completion, with any exception turned into an outcome."""

from __future__ import annotations

import math
import time
from typing import Any

from lightning_scalerl.checks import said
from lightning_scalerl.verify.grade import Grade, Grader, Outcome, Sample


def attempt(grader: Grader, sample: Sample) -> Outcome:
    """Grade one completion; an exception of the grader becomes an `error` outcome, unless it ends the process."""
    began = time.perf_counter()
    try:
        grade = grader.grade(sample)
        problem = _problem(grade)
        # Converted within the `try`: a user's mapping or scalar may raise as well as the grader.
        parts = {str(name): float(value) for name, value in grade.parts.items() if _finite(value)}
    # Not BaseException: what ends a process has to end the worker, which the pool replaces.
    except Exception as error:
        return Outcome("error", why=f"raised {said(error)}", seconds=time.perf_counter() - began)
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
