"""Find files in a submission's folder: the manifest, and the start markers and logs of its jobs."""

from __future__ import annotations

import re
from collections import defaultdict
from functools import cached_property
from pathlib import Path

from sweeps.executor.node.manifest import JOBS_DIR, MANIFEST_FILE
from sweeps.executor.slurm.handover import pickle_of
from sweeps.executor.slurm.submission import STARTED
from sweeps.run.files import parse_json

# <job>_<rank>_log.out; in an array, the job's id has an underscore too.
_LOG = re.compile(r"(.+)_[^_]+_log\..*")


class JobArtifacts:
    """Index of a submission's folder, which is listed only once because it may have thousands of files."""

    def __init__(self, study: Path, submission: str) -> None:
        self.folder = study / JOBS_DIR / submission

    @cached_property
    def _names(self) -> list[str]:
        try:
            return sorted(path.name for path in self.folder.iterdir())
        except OSError:
            return []

    @cached_property
    def _starts(self) -> dict[str, list[int]]:
        found = defaultdict(list)
        for name in self._names:
            job, _, restart = name.removeprefix(STARTED).rpartition("-")
            if name.startswith(STARTED) and restart.isdecimal():
                found[job].append(int(restart))
        return found

    @cached_property
    def _logs(self) -> dict[str, list[Path]]:
        found = defaultdict(list)
        for name in self._names:
            if match := _LOG.fullmatch(name):
                found[match[1]].append(self.folder / name)
        return found

    @cached_property
    def _positions(self) -> dict[str, int]:
        try:
            members = parse_json((self.folder / MANIFEST_FILE).read_text())["members"]
        except (OSError, ValueError, KeyError):
            return {}
        return {run: number for number, run in enumerate(members)}

    def starts(self, job: str) -> list[int]:
        """Return the restart counts of all starts of a job's batch script, from its marker files."""
        return self._starts.get(job, [])

    def logs(self, job: str) -> list[Path]:
        """Return the paths of a job's batch logs, to which SLURM, the set-up commands and srun write."""
        return self._logs.get(job, [])

    def has_pickle(self, job: str) -> bool:
        """Return whether a job's pickle exists or is not needed (earlier versions); True if nothing is listed."""
        return not self._names or pickle_of(job) in self._names or "submit.sh" in self._names

    def id(self) -> str | None:
        """Return the id of the job or array, from the name of a log; None if there is no log."""
        return next((match[0] for job in self._logs if (match := re.match(r"\d+", job))), None)

    def position(self, run: str) -> tuple[int, int] | None:
        """Return a member's index in the submission and the submission's size; None if it is not in the manifest."""
        return (self._positions[run], len(self._positions)) if run in self._positions else None
