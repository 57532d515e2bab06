"""Submit members to SLURM in arrays of a size that it accepts, and handle refusals."""

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
from sweeps.executor.slurm.submission import new_folder, write_submission
from sweeps.terminal import counted

_log = logging.getLogger(__name__)

_MAX_PAUSE_S = 300.0
# Shortest and longest wait in minutes before a member is retried while another copy of it runs. Each wait is twice the
# one before.
_FIRST_DELAY_MIN, _MAX_DELAY_MIN = 10, 240


@dataclass
class _Pause:
    """Wait after a refusal. It grows with each refusal in a row.

    Attributes:
        until: time of the next attempt to submit, by the submitter's clock in seconds.
        length_s: length of the wait in seconds.
    """

    until: float = 0.0
    length_s: float = 0.0

    def extend(self, now: float) -> None:
        """Double the wait, from 5 s up to `_MAX_PAUSE_S`."""
        self.length_s = min(_MAX_PAUSE_S, max(5.0, 2 * self.length_s))
        self.until = now + self.length_s

    def reset(self) -> None:
        self.length_s = self.until = 0.0


@dataclass
class Submitter:
    """Submitter of jobs and arrays. It chooses how many members to submit at a time, and how long to wait after a
    refusal.

    Args:
        study, scheduler, settings, entry, threads, title, clock: see `ClusterExecutor`.

    Attributes:
        abandoned: names of submissions that were given up as lost, although the scheduler may have accepted them.
    """

    study: Path
    scheduler: Scheduler
    settings: JobSettings
    entry: str
    threads: int
    title: str
    clock: Callable[[], float]
    abandoned: set[str] = field(default_factory=set, init=False)
    _pause: _Pause = field(default_factory=_Pause, init=False)
    _batch_size: int | None = field(default=None, init=False)
    _max_batch_size: int = field(default=1, init=False)

    def next_batch(self, waiting: Sequence[Launch]) -> int:
        """Return how many waiting members fit into one array and need the same resources; 0 during a backoff."""
        if not waiting or self.clock() < self._pause.until:
            return 0
        if self._batch_size is None:
            self._max_batch_size = self._batch_size = min(
                self.scheduler.array_limit(), self.settings.array_size or 10**6
            )
        first = self._resources(waiting[0])
        size = 0
        while size < min(len(waiting), self._batch_size) and self._resources(waiting[size]) == first:
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
            self._pause.extend(self.clock())
            _log.warning(
                "cluster: no space left on the disk for a submission's files; trying again in %.0f s",
                self._pause.length_s,
            )
            return None
        except RefusedError as refusal:
            try:
                found = self._handle_refusal(refusal, submission, len(members))
            except UserError:
                _remove(folder)
                raise
            if found is None:
                return None
            job = found
            complete(folder, dict(zip(job_ids(job, len(members)), (each.run_dir for each in members), strict=True)))
        else:
            self._pause.reset()
            self._batch_size = min(self._max_batch_size, 2 * (self._batch_size or 1))
        return job

    def _submit(self, folder: Path, members: Sequence[Launch], resources: Mapping[str, Any]) -> str:
        """Write a submission's files, submit it, and return the job's id.

        Raises:
            RefusedError: the scheduler did not accept the submission.
        """
        settings = replace(self.settings, resources=resources)
        request = write_submission(folder, members, settings, self.entry, self.threads, self.title)
        try:
            return self.scheduler.submit(request)
        except RefusedError as refusal:
            # No node may be left because failed nodes are excluded, or because more memory is requested: use the first
            # settings.
            if members[0].excluded and not refusal.retryable:
                original = self._resources(replace(members[0], excluded=()))
            elif not refusal.retryable and resources != (
                base_resources := with_layout(self.settings.resources, members[0].layout)
            ):
                original = base_resources
            else:
                raise
            members = [replace(member, excluded=()) for member in members]
            return self._submit(folder, members, original)

    def _handle_refusal(self, refusal: RefusedError, submission: str, size: int) -> str | None:
        """Handle a refusal: choose a smaller batch or a longer wait.

        Returns:
            The job's id if the submission was accepted after all; None to try again later.

        Raises:
            UserError: the scheduler will never accept the submission.
        """
        if refusal.too_large and size > 1:
            self._max_batch_size = self._batch_size = max(1, size // 2)
            return None
        if not refusal.retryable:
            raise UserError(f"cluster: {with_remedy(str(refusal))}")
        if refusal.uncertain:
            # The answer may have been lost although the submission was accepted: look for its name in the queue.
            queue = self.scheduler.queue()
            if queue is not None and (job := job_ids_by_submission(queue).get(submission)):
                return job
            self.abandoned.add(submission)
        elif size > 1:
            self._batch_size = max(1, size // 2)
        self._pause.extend(self.clock())
        _log.warning(
            "cluster: %s not submitted yet (%s); trying again in %.0f s",
            counted(size, "member"),
            refusal,
            self._pause.length_s,
        )
        return None

    def _resources(self, launch: Launch) -> dict[str, Any]:
        """Return a member's resources, with layout and excluded nodes. Failures raise memory or delay the start."""
        resources = with_layout(self.settings.resources, launch.layout)
        memory_failures = launch.retries_used.get("out_of_memory", 0)
        if memory_failures and resources.get("mem_gb"):
            resources["mem_gb"] = resources["mem_gb"] * MEMORY_GROWTH**memory_failures
        if duplicates := launch.retries_used.get("duplicate", 0):
            # Another copy is running. Each retry occupies an allocation for a while, so delays grow.
            begin = f"now+{min(_FIRST_DELAY_MIN * 2 ** (duplicates - 1), _MAX_DELAY_MIN)}minutes"
            resources["additional_parameters"] = {**(resources.get("additional_parameters") or {}), "begin": begin}
        if launch.excluded:
            nodes = [resources["exclude"]] if resources.get("exclude") else []
            resources["exclude"] = ",".join([*nodes, *launch.excluded])
        return resources

    def nodes(self, launch: Launch) -> int:
        """Return the number of nodes that the job of one member (a run of the study) asks for."""
        return int(self._resources(launch).get("nodes") or 1)


def _remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    with suppress(OSError):
        folder.parent.rmdir()


def with_remedy(message: str) -> str:
    """Append a remedy to sbatch's refusal: a specific one if the message is known, else a general one."""
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
    (
        ("maxwall",),
        "your account or QOS allows only shorter jobs; lower hydra.launcher.timeout_min: a chain of jobs covers the "
        "rest",
    ),
    (("perjob",), "more than your account or QOS allows one job; ask for less"),
    (
        ("time limit",),
        "hydra.launcher.timeout_min is more than the partition allows; lower it: a chain of jobs covers the rest",
    ),
    (("gres",), "hydra.launcher.gres names nothing that the nodes have; `sinfo -o '%N %G'` lists it"),
    (("feature",), "hydra.launcher.constraint names a feature that no node has; `sinfo -o '%N %f'` lists them"),
)


def job_ids(job: str, members: int) -> list[str]:
    """Return the ids of a submission's jobs: `12` for a single job; `12_0`, `12_1`, ... for an array."""
    return [f"{job}_{number}" for number in range(members)] if members > 1 else [job]


def job_ids_by_submission(queue: Mapping[str, JobInfo]) -> dict[str, str]:
    """Return the job or array id of each submission in the queue, by the submission's name."""
    found: dict[str, str] = {}
    for info in queue.values():
        found.setdefault(info.name.rpartition("-")[2], info.job.split("_")[0])
    return found
