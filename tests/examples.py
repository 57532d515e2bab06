"""Number of examples that a property test draws, and selection of the parametrized cases that run every time.

`make test` runs many times a day, `.ci/run` before each merge, `make test-full` by hand.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import pytest


def examples(count: int) -> int:
    """Return `count` in `make test-full`, otherwise a quarter of it but at least 10."""
    return max(10, count // (1 if os.environ.get("TEST_FULL") == "1" else 4))


def every(step: int, cases: Iterable[Any], mark: pytest.MarkDecorator = pytest.mark.slow) -> list[Any]:
    """Mark all cases but every `step`-th, so that only the unmarked ones run every time.

    Args:
        step: 1 marks none.
        cases: the cases of `pytest.mark.parametrize`; a tuple is one case with several arguments, unless it is
            inside a `pytest.param`.
        mark: `slow` for cases that run in .ci/run, `full` for cases that run in `make test-full`.
    """
    return [case if number % step == 0 else _marked(case, mark) for number, case in enumerate(cases)]


def _marked(case: Any, mark: pytest.MarkDecorator) -> Any:
    """Return the case with `mark` added."""
    if hasattr(case, "marks") and hasattr(case, "values"):  # a pytest.param
        return pytest.param(*case.values, marks=[*case.marks, mark], id=case.id)
    return pytest.param(*case, marks=mark) if isinstance(case, tuple) else pytest.param(case, marks=mark)
