"""Refuse known but unsupported formats, with a hint on what to export instead, before they are read as text."""

from __future__ import annotations

from sweeps.errors import UserError
from sweeps.source.collected import Collected
from sweeps.source.text import File

# First bytes of Office documents before 2007.
_OLE = b"\xd0\xcf\x11\xe0"
_SPREADSHEETS = (".ods", ".xls")


def matches(file: File, into: Collected) -> bool:
    """Return whether the file has an unsupported format, by its first bytes or its ending."""
    return _remedy(file) is not None


def read(file: File, into: Collected) -> None:
    """Refuse the file, and name the format to give instead.

    Raises:
        UserError: always.
    """
    raise UserError(f"{file.path}: {_remedy(file)}")


def _remedy(file: File) -> str | None:
    head = file.raw[:4]
    if file.suffix in _SPREADSHEETS or head == _OLE:
        return "a spreadsheet, which is not read; save its sheet as CSV (UTF-8) and give that file"
    if file.suffix == ".ckpt":
        return "a checkpoint, which holds no curve; give the run's folder, with its metrics.jsonl"
    return None
