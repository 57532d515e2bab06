"""Clean up a study: list files that are no longer needed, with their sizes, and remove them on request.

Never removed: journals, specifications, configurations, `semantics.json`, the ledger, `launch.json`, and checkpoints of
the steps in `checkpoint.keep_steps`. Unfinished members keep all they need to resume. Symbolic links are neither
followed nor removed.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from sweeps.errors import UserError, errors_naming
from sweeps.executor.node.attempts import ATTEMPTS_DIR
from sweeps.executor.node.manifest import JOBS_DIR
from sweeps.launch.ledger import RUNS_DIR, Ledger, MemberState
from sweeps.launch.members import LEASE_NAME, take_lease
from sweeps.run.checkpoint_names import CHECKPOINT, CHECKPOINTS_DIR, step_of
from sweeps.run.journal import LOG_FILE
from sweeps.run.lease import Lease, held_leases
from sweeps.run.progress import is_done
from sweeps.run.rollouts import ROLLOUTS_FILE
from sweeps.run.spec import budget_of, kept_steps_of
from sweeps.run.writer import BEAT_S

# Kinds of removable files, with the descriptions shown to users.
KINDS: Mapping[str, str] = {
    "checkpoints": "checkpoints of finished members",
    "leftovers": "incomplete files of killed processes, and checkpoints that are no longer used",
    "logs": "logs of finished members",
    "attempts": "records of finished members' jobs, and files of submissions that have ended",
    "rollouts": "stored rollouts of finished members",
}
USUAL = ("checkpoints", "leftovers")

_SHARDED = re.compile(r"step-\d+\.")
_LEFTOVER_CHECKPOINT = re.compile(r"step-\d+(\.[0-9a-f]+)?\.(part|void|unrecorded)")
# Names of temporary files of `run.files` and `run.lease`.
_TEMPORARY = re.compile(r"\..+\.[0-9a-f]{12}|\.\w+\.json\.[0-9a-f]{8}")
_LOG = re.compile(rf"{re.escape(LOG_FILE)}|log\.rank\d+\.txt")
# Seconds to watch a lease: long enough for two heartbeats of any holder.
_WATCH_S = 2 * BEAT_S + 1


@dataclass(frozen=True)
class Member:
    """A run's folder, with the facts that decide which of its files can be removed.

    Attributes:
        done: whether the run's journal shows that its budget is reached.
        submitted: whether, according to the ledger, the run has a job or process that has not ended.
    """

    run_dir: Path
    done: bool
    submitted: bool


@dataclass
class Inventory:
    """Removable files of a study, and numbers of its members.

    Attributes:
        removable: sizes in bytes of the removable files, by kind and path.
        finished, others: number of members that have reached their budgets, and of the others.
        at_work: number of members whose folders a process is writing to now; all their files are kept.
        linked: symbolic links found where the study's folders should be; links and targets are kept.
    """

    removable: dict[str, dict[Path, int]] = field(default_factory=lambda: {kind: {} for kind in KINDS})
    finished: int = 0
    others: int = 0
    at_work: int = 0
    linked: list[Path] = field(default_factory=list)

    def size(self, kind: str) -> int:
        """Return the total size in bytes of the files of one kind."""
        return sum(self.removable[kind].values())


def inventory(study: Path, keep: int = 0, sleep: Callable[[float], None] = time.sleep) -> Inventory:
    """List the files of a study that could be removed.

    Args:
        study: the study's folder.
        keep: number of newest checkpoints to keep for each finished member.
        sleep: called with the seconds to wait while heartbeats from other machines are watched.

    Raises:
        UserError: there is no study.
    """
    states = Ledger(study).fold()
    members = _members(study, states)
    result = Inventory()
    if (study / RUNS_DIR).is_symlink():
        result.linked.append(study / RUNS_DIR)
        return result
    run_dirs = [member.run_dir for member in members if not member.run_dir.is_symlink()]
    being_written = held_leases(run_dirs, "writer", _WATCH_S, sleep)
    for member in members:
        result.finished += member.done
        result.others += not member.done
        if member.run_dir.is_symlink():
            result.linked.append(member.run_dir)
        elif member.run_dir in being_written:
            result.at_work += 1
        elif member.done or not member.submitted:
            _add_member_files(member, keep, result)
    _add_submission_files(
        study, states.values(), {member.run_dir.name for member in members if not member.done}, result
    )
    return result


def clean(study: Path, kinds: Sequence[str], keep: int = 0, sleep: Callable[[float], None] = time.sleep) -> Inventory:
    """Remove the removable files of the given kinds.

    The study's lease is held meanwhile, so that no other process runs the study.

    Returns:
        The removed files, in an inventory of the study.

    Raises:
        UserError: there is no study, a controller is running it, or a file cannot be removed.
    """
    _members(study, Ledger(study).fold())  # raises without a study, before the lease is written
    lease = Lease(study, LEASE_NAME)
    with errors_naming("clean"):
        take_lease(lease, f"clean: {study}")
        try:
            result = inventory(study, keep, sleep)  # list again: files may have changed since they were shown
            for kind in KINDS:
                if kind not in kinds:
                    result.removable[kind] = {}
                for path in result.removable[kind]:
                    # Check before each file: if this process was suspended, a controller may have taken the study over.
                    lease.check()
                    if path.is_dir() and not path.is_symlink():
                        shutil.rmtree(path)
                    else:
                        path.unlink(missing_ok=True)
            if "attempts" in kinds:
                _remove_empty_folders(study)
        finally:
            lease.release()
    return result


def _members(study: Path, states: Mapping[str, MemberState]) -> list[Member]:
    """Return the members in the ledger and other runs in the study's folder. Raises UserError if there are neither."""
    runs = study / RUNS_DIR
    with errors_naming("clean"):
        folders = sorted(path.name for path in runs.iterdir()) if runs.is_dir() else []
    if not states and not folders:
        raise UserError(f"{study}: no study here; give the folder that a --multirun wrote to (outputs/<study>)")
    members = []
    for run in dict.fromkeys([*states, *folders]):
        run_dir, state = runs / run, states.get(run)
        steps = budget_of(run_dir)
        done = steps is not None and is_done(run_dir, steps, run)
        members.append(Member(run_dir, done, state is not None and state.state in ("submitting", "started")))
    return members


def _add_member_files(member: Member, keep: int, result: Inventory) -> None:
    """Add a member's removable files to the inventory: all kinds if it has finished, else leftovers only."""
    checkpoints, logs = _files(member.run_dir / CHECKPOINTS_DIR, result), _files(member.run_dir, result)
    _add_matching(result, "leftovers", checkpoints, _LEFTOVER_CHECKPOINT)
    _add_matching(result, "leftovers", logs, _TEMPORARY)
    if not member.done:
        return
    # Steps are zero-padded in names (`step-00000120.ckpt`), so names sort like steps.
    newest = sorted((path for path in checkpoints if CHECKPOINT.fullmatch(path.name)), reverse=True)
    kept = kept_steps_of(member.run_dir) if newest[keep:] else ()
    old = {path: checkpoints[path] for path in newest[keep:] if step_of(path) not in kept}
    _add_matching(result, "checkpoints", old, CHECKPOINT)
    _add_matching(result, "logs", logs, _LOG)
    _add_matching(result, "rollouts", logs, re.compile(re.escape(ROLLOUTS_FILE)))
    _add_matching(result, "attempts", _files(member.run_dir / ATTEMPTS_DIR, result), re.compile(".*"))


def _add_matching(result: Inventory, kind: str, files: Mapping[Path, int], names: re.Pattern[str]) -> None:
    result.removable[kind] |= {path: size for path, size in files.items() if names.fullmatch(path.name)}


def _add_submission_files(study: Path, states: Iterable[MemberState], unfinished: set[str], result: Inventory) -> None:
    """Add the files of submissions that no member needs. An unfinished member needs its last submission's log."""
    needed = {
        state.submission for state in states if state.run in unfinished or state.state in ("submitting", "started")
    }
    needed |= {name for state in states for name in state.unanswered}
    jobs = study / JOBS_DIR
    if jobs.is_symlink():
        result.linked.append(jobs)
    elif jobs.is_dir():
        for folder in sorted(jobs.iterdir()):
            if folder.is_symlink():
                result.linked.append(folder)
            elif folder.is_dir() and folder.name not in needed:
                result.removable["attempts"] |= _files(folder, result)


def _files(folder: Path, result: Inventory) -> dict[Path, int]:
    """Return the sizes in bytes of the regular files in a folder, by path.

    A sharded checkpoint, which is a folder of files, counts as one file. Symbolic links are left out.
    """
    if folder.is_symlink():
        result.linked.append(folder)
        return {}
    try:
        entries = list(os.scandir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return {}
    sizes = ((Path(entry.path), entry.stat(follow_symlinks=False)) for entry in entries)
    files = {path: about.st_size for path, about in sizes if stat.S_ISREG(about.st_mode)}
    sharded = [
        Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False) and _SHARDED.match(entry.name)
    ]
    return files | {path: sum(_files(path, result).values()) for path in sharded}


def _remove_empty_folders(study: Path) -> None:
    for folder in [*study.glob(f"{RUNS_DIR}/*/{ATTEMPTS_DIR}"), *study.glob(f"{JOBS_DIR}/*")]:
        if not folder.is_symlink() and folder.is_dir() and not any(folder.iterdir()):
            shutil.rmtree(folder, ignore_errors=True)


def format_size(size: int) -> str:
    """Format a number of bytes with a decimal unit, such as `3.2 MB`."""
    number, unit = float(size), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if number < 999.5:
            break
        number, unit = number / 1000, larger
    return f"{number:.0f} {unit}" if unit == "B" else f"{number:.3g} {unit}"
