"""How many examples a property is tried on."""

from __future__ import annotations

import os


def examples(count: int) -> int:
    """Return `count` in .ci/run, and a quarter of it in `make test`, which is run many times a day."""
    return count if os.environ.get("CI_ALL") == "1" else max(10, count // 4)
