"""What lies in the folder of a submission: its members, and what its jobs have left there. Looked at once for all."""

from __future__ import annotations

import re
from collections import defaultdict
from functools import cached_property
from pathlib import Path

from sweeps.executor.script import STARTED
from sweeps.executor.submission import JOBS_DIR, MANIFEST_FILE
from sweeps.run.files import parse_json

# <job>_<rank>_log.out; a task of an array has an underscore of its own.
_LOG = re.compile(r"(.+)_[^_]+_log\..*")


class Remains:
    """A submission's folder, listed when it is first asked for: an array of a thousand leaves thousands of files."""

    def __init__(self, study: Path, submission: str) -> None:
        self._folder = study / JOBS_DIR / submission

    @cached_property
    def _names(self) -> list[str]:
        try:
            return sorted(path.name for path in self._folder.iterdir())
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
                found[match[1]].append(self._folder / name)
        return found

    @cached_property
    def _places(self) -> dict[str, int]:
        try:
            members = parse_json((self._folder / MANIFEST_FILE).read_text())["members"]
        except (OSError, ValueError, KeyError):
            return {}
        return {run: number for number, run in enumerate(members)}

    def starts(self, job: str) -> list[int]:
        """The starts of a job, by the count of restarts that its batch script has seen."""
        return self._starts.get(job, [])

    def logs(self, job: str) -> list[Path]:
        """What SLURM, the set-up commands and srun have written for a job."""
        return self._logs.get(job, [])

    def id(self) -> str | None:
        """The id of the job or array, by the logs that SLURM made for it."""
        return next((match[0] for job in self._logs if (match := re.match(r"\d+", job))), None)

    def place(self, run: str) -> tuple[int, int] | None:
        """A member's place in the submission, and the submission's size."""
        return (self._places[run], len(self._places)) if run in self._places else None
