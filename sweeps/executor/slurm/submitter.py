"""Submission of members to SLURM in arrays of an accepted size, and the handling of refusals."""

from __future__ import annotations

import errno
import logging
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sweeps.errors import UserError
from sweeps.executor.base import Launch
from sweeps.executor.failure import MEMORY_GROWTH
from sweeps.executor.slurm.handover import complete
from sweeps.executor.slurm.scheduler import JobInfo, RefusedError, Scheduler
from sweeps.executor.slurm.settings import JobSettings, with_layout
from sweeps.executor.slurm.submission import freeze, new_folder

_log = logging.getLogger(__name__)

_LONGEST_PAUSE_S = 300.0
# Minutes until the retry of a member of which another copy was running. They double each time, up to the second value.
_FIRST_LOOK_MIN, _LAST_LOOK_MIN = 10, 240


@dataclass
class _Pause:
    """Backoff after a refusal: time of the next attempt to submit."""

    until: float = 0.0
    length_s: float = 0.0

    def longer(self, now: float) -> None:
        """Double the pause after a refusal, from 5 s up to `_LONGEST_PAUSE_S`."""
        self.length_s = min(_LONGEST_PAUSE_S, max(5.0, 2 * self.length_s))
        self.until = now + self.length_s

    def over(self) -> None:
        """Reset the pause after a success."""
        self.length_s = self.until = 0.0


@dataclass
class Submitter:
    """Submits members as jobs or arrays: chooses how many at a time, and how long to wait after a refusal.

    Args:
        study, scheduler, settings, entry, threads, title, clock: as of `ClusterExecutor`.
    """

    study: Path
    scheduler: Scheduler
    settings: JobSettings
    entry: str
    threads: int
    title: str
    clock: Callable[[], float]
    # Names of submissions that were given up as lost, but that the scheduler may have accepted.
    abandoned: set[str] = field(default_factory=set, init=False)
    _pause: _Pause = field(default_factory=_Pause, init=False)
    _chunk: int | None = field(default=None, init=False)
    _most: int = field(default=1, init=False)

    def next_batch(self, waiting: Sequence[Launch]) -> int:
        """Return how many members fit one array and ask for the same resources; 0 during a backoff."""
        if not waiting or self.clock() < self._pause.until:
            return 0
        if self._chunk is None:
            self._most = self._chunk = min(self.scheduler.array_limit(), self.settings.array_size or 10**6)
        first = self._resources(waiting[0])
        size = 0
        while size < min(len(waiting), self._chunk) and self._resources(waiting[size]) == first:
            size += 1
        return size

    def submit(self, submission: str, members: Sequence[Launch]) -> str | None:
        """Submit members as one job, or one array, and return its id; None if the scheduler cannot accept them now.

        Raises:
            UserError: the scheduler will never accept them; nothing of this batch was submitted.
        """
        self.abandoned.update(name for member in members for name in member.unanswered)
        try:
            folder = new_folder(self.study, submission)
            job = self._submit(folder, members, self._resources(members[0]))
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            self._pause.longer(self.clock())
            _log.warning(
                "cluster: no space left for what is to be submitted; trying again in %.0f s", self._pause.length_s
            )
            return None
        except RefusedError as refusal:
            try:
                found = self._refused(refusal, submission, len(members))
            except UserError:
                _remove(folder)
                raise
            if found is None:
                return None
            job = found
            complete(folder, dict(zip(names_of(job, len(members)), (each.run_dir for each in members), strict=True)))
        else:
            self._pause.over()
            self._chunk = min(self._most, 2 * (self._chunk or 1))
        return job

    def _submit(self, folder: Path, members: Sequence[Launch], resources: Mapping[str, Any]) -> str:
        """Write the submission's files, submit it and return the job's id; raise RefusedError."""
        settings = replace(self.settings, resources=resources)
        request = freeze(folder, members, settings, self.entry, self.threads, self.title)
        try:
            return self.scheduler.submit(request)
        except RefusedError as refusal:
            # With failed nodes excluded or memory raised, no node may be left: retry with the original request.
            if members[0].excluded and not refusal.later:
                everywhere = self._resources(replace(members[0], excluded=()))
            elif not refusal.later and resources != (plain := with_layout(self.settings.resources, members[0].layout)):
                everywhere = plain
            else:
                raise
            members = [replace(member, excluded=()) for member in members]
            return self._submit(folder, members, everywhere)

    def _refused(self, refusal: RefusedError, submission: str, size: int) -> str | None:
        """Handle a refusal: return the job's id if it was accepted after all, None to try later, or raise."""
        if refusal.too_large and size > 1:
            self._most = self._chunk = max(1, size // 2)
            return None
        if not refusal.later:
            raise UserError(f"cluster: {with_remedy(str(refusal))}")
        if refusal.uncertain:
            # It may have been accepted although the answer was lost. Then the queue lists it by its name.
            queue = self.scheduler.queue()
            if queue is not None and (job := ids_in(queue).get(submission)):
                return job
            self.abandoned.add(submission)
        elif size > 1:
            self._chunk = max(1, size // 2)
        self._pause.longer(self.clock())
        _log.warning(
            "cluster: %d members wait to be submitted (%s); trying again in %.0f s",
            size,
            refusal,
            self._pause.length_s,
        )
        return None

    def _resources(self, launch: Launch) -> dict[str, Any]:
        """Return a member's resources, with its layout, excluded nodes, and memory and delay grown by its failures."""
        resources = with_layout(self.settings.resources, launch.layout)
        grown = launch.retries_used.get("out_of_memory", 0)
        if grown and resources.get("mem_gb"):
            resources["mem_gb"] = resources["mem_gb"] * MEMORY_GROWTH**grown
        if waits := launch.retries_used.get("duplicate", 0):
            # Another copy is running. Each retry costs an allocation for a while, so the delays grow.
            begin = f"now+{min(_FIRST_LOOK_MIN * 2 ** (waits - 1), _LAST_LOOK_MIN)}minutes"
            resources["additional_parameters"] = {**(resources.get("additional_parameters") or {}), "begin": begin}
        if launch.excluded:
            given = [resources["exclude"]] if resources.get("exclude") else []
            resources["exclude"] = ",".join([*given, *launch.excluded])
        return resources

    def nodes(self, launch: Launch) -> int:
        """Return the number of nodes that a member's job asks for."""
        return int(self._resources(launch).get("nodes") or 1)


def _remove(folder: Path) -> None:
    """Remove the folder of a refused submission, and its parent if that is then empty."""
    shutil.rmtree(folder, ignore_errors=True)
    with suppress(OSError):
        folder.parent.rmdir()


def with_remedy(message: str) -> str:
    """Return sbatch's refusal with a remedy, a specific one where the message is known."""
    low = message.lower()
    for words, remedy in _REMEDIES:
        if all(word in low for word in words):
            return f"{message} -- {remedy}"
    return f"{message} -- sbatch refused the job; `sinfo` and `scontrol show partition` say what the cluster has"


_REMEDIES: tuple[tuple[tuple[str, ...], str], ...] = (
    (("invalid partition",), "hydra.launcher.partition names no partition of this cluster; `sinfo` lists them"),
    (("account",), "hydra.launcher.account is not yours to use; `sacctmgr show associations user=$USER` lists yours"),
    (("qos",), "hydra.launcher.qos is not yours to use; `sacctmgr show associations user=$USER` lists yours"),
    (("node configuration",), "no node has what the job asks for; lower gpus_per_node, cpus_per_task or mem_gb"),
    (("node count",), "fewer nodes than hydra.launcher.nodes asks for; `sinfo` lists them"),
    (("maxwall",), "your account or QOS allows shorter jobs; lower hydra.launcher.timeout_min: jobs are chained"),
    (("perjob",), "more than your account or QOS allows one job; ask for less"),
    (("time limit",), "hydra.launcher.timeout_min is more than the partition allows; chains of jobs make up for it"),
    (("gres",), "hydra.launcher.gres names nothing that the nodes have; `sinfo -o '%N %G'` lists it"),
    (("feature",), "hydra.launcher.constraint names a feature that no node has; `sinfo -o '%N %f'` lists them"),
)


def names_of(job: str, members: int) -> list[str]:
    """Return the ids of a submission's jobs: `12`, or `12_0` and so on in an array."""
    return [f"{job}_{number}" for number in range(members)] if members > 1 else [job]


def ids_in(queue: Mapping[str, JobInfo]) -> dict[str, str]:
    """Return the job or array id of each submission in the queue, by the submission's name."""
    found: dict[str, str] = {}
    for info in queue.values():
        found.setdefault(info.name.rpartition("-")[2], info.job.split("_")[0])
    return found
