"""How far a run has come, read from its journal and log."""

from __future__ import annotations

from pathlib import Path

from sweeps.run.files import parse_lines
from sweeps.run.journal import JOURNAL_FILE, LOG_FILE, JournalError, JournalView, read_journal


def is_done(run_dir: Path, steps: int) -> bool:
    """Whether the journal says that the run has reached its budget."""
    view = journal_or_none(run_dir)
    return view is not None and view.status == "finished" and max((r.step for r in view.records), default=-1) >= steps


def journal_or_none(run_dir: Path) -> JournalView | None:
    """The journal, or None if there is none yet or it cannot be read."""
    try:
        return read_journal(run_dir)
    except JournalError:
        return None


def written(run_dir: Path) -> tuple[int, int]:
    """Bytes of journal and log so far."""
    files = (run_dir / JOURNAL_FILE, run_dir / LOG_FILE)
    journal, log = (path.stat().st_size if path.exists() else 0 for path in files)
    return journal, log


def why_failed(run_dir: Path, fallback: str, earlier: tuple[int, int] = (0, 0)) -> str:
    """The reason in the journal if the run wrote one, else the log's last line, else how the process ended.

    Args:
        run_dir: of the member.
        fallback: how its process ended.
        earlier: what was `written` before it started: the reason of an earlier attempt is not this one's.
    """
    view = journal_or_none(run_dir)
    spoke = written(run_dir)[0] != earlier[0]
    if spoke and view is not None and view.status == "failed" and view.reason:
        return view.reason
    try:
        log = (run_dir / LOG_FILE).read_bytes()[earlier[1] :].decode(errors="replace")
    except OSError:
        log = ""
    lines = [line for line in log.splitlines() if line.strip()]
    if lines and not fallback.startswith("killed"):
        return lines[-1].strip()[:500]
    return fallback


def last_metrics(run_dir: Path, tail_bytes: int = 65536) -> dict[str, float]:
    """The newest step and the newest evaluation, from the end of the journal (never the whole file)."""
    found: dict[str, float] = {}
    try:
        with (run_dir / JOURNAL_FILE).open("rb") as handle:
            handle.seek(0, 2)
            handle.seek(max(0, handle.tell() - tail_bytes))
            entries = parse_lines(handle.read())
    except OSError:
        return found
    for entry in entries:
        if entry.get("kind") in ("train", "eval"):
            found["step"] = float(entry["step"])
            found |= {key: value for key, value in entry["metrics"].items() if key.startswith("eval/")}
    return found
