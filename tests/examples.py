"""How many examples a property is tried on, and which cases of many are in every run.

`make test` is run many times a day, `.ci/run` before anything lands, `make test-full` by hand.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import pytest


def examples(count: int) -> int:
    """Return `count` in `make test-full`, and a quarter of it elsewhere."""
    return max(10, count // (1 if os.environ.get("TEST_FULL") == "1" else 4))


def every(step: int, cases: Iterable[Any], mark: pytest.MarkDecorator = pytest.mark.slow) -> list[Any]:
    """Return parameters of which one in `step` is in every run; the others have the mark, and wait for what runs it.

    Args:
        step: 1 keeps all.
        cases: of `pytest.mark.parametrize`; a tuple is one case of several arguments, unless it is
            in a `pytest.param`.
        mark: `slow` leaves the others to .ci/run, `full` to `make test-full`.
    """
    return [case if number % step == 0 else _marked(case, mark) for number, case in enumerate(cases)]


def _marked(case: Any, mark: pytest.MarkDecorator) -> Any:
    """The case with one mark more."""
    if hasattr(case, "marks") and hasattr(case, "values"):  # a pytest.param
        return pytest.param(*case.values, marks=[*case.marks, mark], id=case.id)
    return pytest.param(*case, marks=mark) if isinstance(case, tuple) else pytest.param(case, marks=mark)
