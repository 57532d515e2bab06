"""Files that a crash leaves whole: written in one step, read as what they are or not at all."""

from __future__ import annotations

import json
import os
import uuid
from pathlib import Path
from typing import Any


def write_atomically(path: Path, text: str, mode: int = 0o666) -> None:
    """Replace a file in one step: a reader sees the old or the new text, never half of one.

    Args:
        path: of the file.
        text: its new content.
        mode: who may read it, less what the process's umask takes away.
    """
    unfinished = path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}")
    descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    with os.fdopen(descriptor, "w", encoding="utf-8") as handle:
        handle.write(text)
        handle.flush()
        os.fsync(handle.fileno())
    unfinished.rename(path)


def write_json(path: Path, content: Any) -> None:
    """Write JSON so that a reader, or the next process after a crash, sees the old or the new file whole."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with temporary.open("w", encoding="utf-8") as handle:
        json.dump(content, handle, indent=1, sort_keys=True, allow_nan=False)
        handle.flush()
        os.fsync(handle.fileno())
    temporary.replace(path)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file we wrote; empty if missing or unreadable (the caller then asks MLflow)."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
