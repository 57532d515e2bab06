"""What a command prints."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sweeps.report.text import one_line

if TYPE_CHECKING:
    pass


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, allow_nan=False))


def _warn(notes: Sequence[str]) -> None:
    """Warnings go to stderr, so that what is piped stays data."""
    for note in notes:
        print(f"warning: {one_line(note)}", file=sys.stderr)
