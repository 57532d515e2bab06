"""Progress of a run, read from its journal and log."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import dropwhile
from pathlib import Path
from typing import Any

from sweeps.errors import UserError
from sweeps.run import fields
from sweeps.run.files import has_wrong_checksum, lines_from_end, parse_line, read_end
from sweeps.run.journal import JOURNAL_FILE, LOG_FILE, JournalError, JournalView, finite, read_journal
from sweeps.run.provenance import code_changes, code_facts, files_named

_TAIL_BYTES = 65536


def changes_since(view: JournalView, folders: Iterable[str], config: Mapping[str, Any]) -> tuple[str, ...]:
    """Describe how the code differs from that of a run's last steps, see `code_changes`.

    Empty for a run of another trainer's command, because its code is part of the run's identity.

    Args:
        view: the run's journal.
        folders: the user's folders from which the run was composed.
        config: configuration of the run, which may name Python files.
    """
    if not view.code or view.header.get("member") == "command":
        return ()
    return code_changes(view.code[-1][1], code_facts([*folders, *files_named(config)]))


def is_done(run_dir: Path, steps: int, run: str) -> bool:
    """Return whether a run has reached its budget, or ended earlier and cannot be continued, according to its journal.

    The journal is read from its end, because it may have many megabytes. An `end` record does not count if a `resume`
    record follows: the run was continued. A run that has ended is done even if an earlier line is broken;
    `journal_damage` reports such a line.

    Args:
        run_dir: the run's folder.
        steps: the run's budget in optimizer steps.
        run: the run's identity. The result is False if the journal's header has another one.
    """
    if header_of(run_dir).get("run") != run:
        return False
    finished, void_after, broken, end = False, float("inf"), False, -1
    for entry in _from_end(run_dir):
        kind = None if entry is None else entry.get("kind")
        if not finished and (entry is None or kind in ("train", "eval")):
            return False  # the run has no end record yet, or it is damaged
        if entry is None:
            broken = True
        elif kind == "end" and not finished:
            if entry.get("status") != "finished":
                return False
            if entry.get("final") is True:
                return True
            finished, end = True, entry.get("step", -1)
        elif kind in ("resume", "train", "eval"):
            try:
                step = fields.whole(entry, "step", least=-1)
            except ValueError:
                return False
            if kind == "resume":
                if not finished:
                    return False
                # A resume makes earlier lines with later steps void. They come next, because the file is read
                # backwards.
                void_after = min(void_after, step)
            elif step <= void_after:
                # Earlier valid records have smaller steps, but a line that cannot be read may have had a larger one.
                return (max(step, end) if broken and isinstance(end, int) else step) >= steps
    return False


def journal_damage(run_dir: Path, run: str) -> str | None:
    """Describe damage of a member's journal, or that it belongs to another run; None if it is intact or missing."""
    try:
        read_journal(run_dir)
        return _owner_error(run_dir, run)
    except JournalError as error:
        return str(error) if _journal_has_begun(run_dir) else None


def looks_whole(run_dir: Path) -> bool:
    """Return whether all lines of a journal look like records with valid checksums. Faster than parsing them."""
    try:
        raw = (run_dir / JOURNAL_FILE).read_bytes()
    except OSError:
        return True
    begins = raw.count(b'\n{"kind":') + raw.startswith(b'{"kind":')
    # If the last line is torn or still being written, there is one beginning more than there are line ends.
    if raw.count(b"\n") != raw.count(b"}\n") or begins - raw.count(b"\n") not in (0, 1):
        return False
    return not any(map(has_wrong_checksum, raw.split(b"\n")))


def check_journal_owner(run_dir: Path, run: str) -> None:
    """Check that the journal in a member's directory is the member's own. Passes if there is no journal.

    Raises:
        UserError: the journal belongs to another run or has lost its header, and must not be used or overwritten.
    """
    if _journal_has_begun(run_dir) and (error := _owner_error(run_dir, run)) is not None:
        raise UserError(error)


def _journal_has_begun(run_dir: Path) -> bool:
    """Return whether the journal has a valid first line, or a broken first line with others after it."""
    try:
        with (run_dir / JOURNAL_FILE).open("rb") as handle:
            first, second = handle.readline(), handle.readline()
    except OSError:
        return False
    return parse_line(first) is not None or bool(second)


def _owner_error(run_dir: Path, run: str) -> str | None:
    """Return an error message if the journal's header names another run or none; else None."""
    header, path = header_of(run_dir), run_dir / JOURNAL_FILE
    owner = header.get("run")
    if owner == run:
        return None
    if owner is None:
        return f"{path}, line 1: no header that says whose journal it is; restore the line, or move the file away"
    return f"{path}: the journal of another run, {owner}, in the folder of {run}; move it away, and try again"


def how_it_failed(run_dir: Path) -> str | None:
    """Return why a run failed, from its journal; None if it has not failed or gives no reason."""
    end = _end_of(run_dir)
    return str(end["reason"]) if end.get("status") == "failed" and end.get("reason") else None


def final_reason(run_dir: Path) -> str | None:
    """Return why a run finished before its budget for good; None if it did not, or can be continued."""
    end = _end_of(run_dir)
    return str(end.get("reason")) if end.get("status") == "finished" and end.get("final") is True else None


def has_finished(run_dir: Path) -> bool:
    """Return whether a run has finished under the budget that it had, and has not continued since."""
    return _end_of(run_dir).get("status") == "finished"


def _end_of(run_dir: Path) -> Mapping[str, Any]:
    """Return the journal's `end` record; empty if the run has not ended, or has continued since."""
    for entry in _from_end(run_dir):
        if entry is None or entry.get("kind") in ("train", "eval", "resume", "attempt"):
            break
        if entry.get("kind") == "end":
            return entry
    return {}


def header_of(run_dir: Path) -> Mapping[str, Any]:
    """Return the header record in the journal's first line; empty if it is missing or damaged."""
    try:
        with (run_dir / JOURNAL_FILE).open("rb") as handle:
            first = parse_line(handle.readline())
    except OSError:
        return {}
    return first if first is not None and first.get("kind") == "run" else {}


def _from_end(run_dir: Path, most_bytes: int | None = None) -> Iterator[Mapping[str, Any] | None]:
    """Yield a journal's entries, the newest first. A damaged line gives None, but one at the file's end is left out."""
    try:
        with (run_dir / JOURNAL_FILE).open("rb") as handle:
            entries = (parse_line(line) for line in lines_from_end(handle, most_bytes))
            yield from dropwhile(lambda entry: entry is None, entries)
    except OSError:
        return


def journal_or_none(run_dir: Path) -> JournalView | None:
    """Read the journal; return None if it does not exist yet or cannot be read."""
    try:
        return read_journal(run_dir)
    except JournalError:
        return None


def file_sizes(run_dir: Path) -> tuple[int, int]:
    """Return the sizes of journal and log in bytes; 0 for a missing file."""
    files = (run_dir / JOURNAL_FILE, run_dir / LOG_FILE)
    journal, log = (path.stat().st_size if path.exists() else 0 for path in files)
    return journal, log


def why_failed(run_dir: Path, fallback: str, sizes_before: tuple[int, int] = (0, 0)) -> str:
    """Return why a run failed: the reason in the journal, else the log's last line, else `fallback`.

    Args:
        run_dir: the member's folder.
        fallback: description of how the process ended, such as "exit code 1".
        sizes_before: `file_sizes` before the attempt started, so that the reason of an earlier attempt is not used.
    """
    has_written = file_sizes(run_dir)[0] != sizes_before[0]
    if has_written and (reason := how_it_failed(run_dir)):
        return reason
    log = read_end(run_dir / LOG_FILE, _TAIL_BYTES, sizes_before[1])
    lines = [line for line in log.splitlines() if line.strip()]
    # If the process was killed, the log's last line shows what it was doing, not why it ended.
    if lines and not fallback.startswith("killed"):
        return lines[-1].strip()[:500]
    return fallback


def last_metrics(run_dir: Path, tail_bytes: int = _TAIL_BYTES) -> dict[str, float]:
    """Return the newest metrics in the last `tail_bytes` of a journal; empty if there is no record.

    Returns:
        The newest step as `step`, the `live/` metrics of the newest record, and the `eval/` metrics of the newest
        evaluation.
    """
    newest: dict[str, float] = {}
    measured = False
    for entry in _from_end(run_dir, tail_bytes):
        if entry is None or entry.get("kind") not in ("train", "eval"):
            continue
        step, metrics = finite(entry.get("step")), entry.get("metrics")
        if step is None or not isinstance(metrics, Mapping):
            continue  # foreign or damaged: `read_journal` reports that
        newest.setdefault("step", step)
        if not measured:
            newest |= {key: value for key, value in metrics.items() if key.startswith("live/")}
        measured = True
        if entry["kind"] == "eval":
            return newest | {key: value for key, value in metrics.items() if key.startswith("eval/")}
    return newest
