"""What a command prints."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sweeps.errors import UserError
from sweeps.report.plain import one_line


def print_json(value: Any) -> None:
    """To stdout; raises ValueError rather than print NaN or infinity."""
    print(json.dumps(value, indent=2, allow_nan=False))


def warn(notes: Sequence[str]) -> None:
    """Warnings go to stderr, so that what is piped stays data."""
    for note in notes:
        print(f"warning: {one_line(note)}", file=sys.stderr)


def show_chart(study: Path, tracking: str) -> None:
    """The finished chart in MLflow, and the link to it; a study that cannot be fitted yet is no failure."""
    # MLflow is slow to import and optional.
    from sweeps.report.publish import publish

    try:
        publish([str(study)], tracking)
    except UserError as error:
        print(f"no chart in MLflow yet: {error}", file=sys.stderr)
