"""The Hydra launchers: a `--multirun` grid becomes a study, run on this machine, in this process, or on a cluster.

All members are composed, checked and identified before the first one starts. What an earlier launch of the same
sweep has finished is adopted; what it has under way on a cluster is followed; the rest goes on from its checkpoints.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf

from sweeps.curve import default_axis
from sweeps.errors import UserError
from sweeps.executor.base import Executor, load_entry
from sweeps.executor.failure import NEVER
from sweeps.executor.failure import retries as retry_policy
from sweeps.executor.local import InProcessExecutor, LocalExecutor
from sweeps.executor.scheduler import Scheduler, Slurm
from sweeps.executor.slurm import ClusterExecutor
from sweeps.executor.submission import JobSettings
from sweeps.launch.ledger import MemberState
from sweeps.launch.observer import Observer, Progress
from sweeps.launch.study import Study
from sweeps.redact import MASK, redact
from sweeps.run.files import write_atomically
from sweeps.run.spec import RunSpec

LAUNCH_FILE = "launch.json"


def gpu_here() -> bool:
    """Whether members started here will find an NVIDIA GPU, and so train on it."""
    return os.environ.get("CUDA_VISIBLE_DEVICES") != "" and any(Path("/dev").glob("nvidia[0-9]*"))


class MemberFailedError(UserError):
    """Some members of a study failed; the others are done."""


@dataclass(frozen=True)
class LaunchPlan:
    """How a study is run: all that a later process needs to go on with it.

    Attributes:
        kind: `local`, `debug` or `slurm`.
        entry: `module:function`, runs one member from its directory.
        preload: modules imported once for all members (local).
        max_parallel: members at a time (local).
        threads: of each member.
        tracking: MLflow's address, or None.
        axis: compute axis of MLflow's charts.
        settings: of the cluster's jobs.
        retries: attempts after the first, by kind of failure.
    """

    kind: str
    entry: str
    preload: tuple[str, ...]
    max_parallel: int
    threads: int
    tracking: str | None
    axis: str
    settings: JobSettings = field(default_factory=JobSettings)
    retries: Mapping[str, int | None] = field(default_factory=lambda: dict(NEVER))

    def write(self, study: Path) -> None:
        """Keep it with the study, for its owner alone; a password in MLflow's address is not kept."""
        values = {
            **self.__dict__,
            "settings": self.settings.given(),
            "tracking": self.tracking and redact(self.tracking),
        }
        write_atomically(study / LAUNCH_FILE, json.dumps(values, indent=1), mode=0o600)

    @classmethod
    def read(cls, study: Path) -> LaunchPlan:
        """How the study in a directory was launched.

        Raises:
            UserError: nothing there, not readable, or MLflow's address is to be given again.
        """
        try:
            values = json.loads((study / LAUNCH_FILE).read_text())
            values["settings"] = JobSettings.of(values["settings"])
            values["preload"] = tuple(values["preload"])
            plan = cls(**values)
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise UserError(
                f"{study / LAUNCH_FILE}: does not say how the study was launched ({type(error).__name__}); launch it "
                "again with the command that made it"
            ) from error
        if plan.tracking and MASK in plan.tracking:
            address = os.environ.get("MLFLOW_TRACKING_URI")
            if not address:
                raise UserError(
                    f"mlflow.uri: the login of {plan.tracking} was not kept with the study; set MLFLOW_TRACKING_URI to "
                    "the whole address"
                )
            plan = replace(plan, tracking=address)
        return plan

    @staticmethod
    def kind_of(study: Path) -> str | None:
        """Where a study was launched, or None if nobody knows."""
        try:
            kind = json.loads((study / LAUNCH_FILE).read_text())["kind"]
        except (OSError, ValueError, TypeError, KeyError):
            return None
        return str(kind)

    def executor(self, study: Path, scheduler: Scheduler | None = None) -> Executor:
        """What runs the members."""
        if self.kind == "slurm":
            return ClusterExecutor(
                study.resolve(),
                scheduler or Slurm(),
                self.settings,
                self.entry,
                self.threads,
                title=str(self.settings.resources.get("name") or study.resolve().name),
            )
        if self.kind == "debug":
            return InProcessExecutor(self.entry)
        return LocalExecutor(self.entry, self.max_parallel, self.threads, self.preload)


def run_study(
    study: Study,
    plan: LaunchPlan,
    detach: bool = False,
    again: bool = True,
    scheduler: Scheduler | None = None,
    begin: Callable[[], None] = lambda: None,
) -> dict[str, MemberState]:
    """Run a study as planned, with progress on stderr and MLflow if it is tracked."""
    executor = plan.executor(study.directory, scheduler)
    observers: list[Observer] = [Progress(len(study.specs), max(spec.steps for spec in study.specs))]
    if plan.tracking:
        # MLflow is slow to import and optional.
        from sweeps.launch.tracked import TrackingObserver

        observers.append(TrackingObserver(study, plan.tracking, axis=plan.axis))
    states = study.run(executor, observers, plan.retries, detach, again, begin)
    if plan.tracking and all(state.state == "finished" for state in states.values()):
        _publish(study, plan.tracking)
    return states


def _publish(study: Study, tracking: str) -> None:
    """The finished chart in MLflow, and the link to it; a study that cannot be fitted yet is no failure."""
    from sweeps.report.publish import publish

    try:
        publish([str(study.directory)], tracking)
    except UserError as error:
        print(f"no chart in MLflow yet: {error}", file=sys.stderr)


class StudyLauncher(Launcher):  # type: ignore[misc]
    """Runs a grid as a study, on this machine.

    Args:
        planner: `module:function`, from a list of override lists to run specs; checks everything.
        entry: `module:function`, runs one member from its directory.
        preload: modules imported once for all members.
    """

    kind = "local"

    def __init__(self, planner: str, entry: str, preload: Sequence[str] = (), **settings: Any) -> None:
        self._planner = planner
        self._entry = entry
        self._preload = tuple(preload)
        self._tracking: str | None = None
        self._settings: dict[str, Any] = {
            key: OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
            for key, value in settings.items()
        }

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Keep MLflow's address as it was given: a member's frozen configuration holds it without a login."""
        self._tracking = OmegaConf.select(config, "mlflow.uri")

    def plan(self, config: Mapping[str, Any]) -> LaunchPlan:
        """How to run the members, from the configuration that they share and our own settings."""
        return LaunchPlan(
            kind=self.kind,
            entry=self._entry,
            preload=self._preload,
            max_parallel=config["launch"]["max_parallel"],
            threads=config["launch"]["threads"],
            tracking=self._tracking,
            axis=default_axis(gpu_here()),
        )

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Plan, check, run what is not done.

        Raises:
            UserError: a member that cannot run; nothing is started then.
            MemberFailedError: after all others are done, if some member failed.
        """
        # Where a member runs is no part of what it is.
        lists = [[each for each in overrides if not each.startswith("cluster=")] for overrides in job_overrides]
        specs: list[RunSpec] = load_entry(self._planner)(lists)
        config = specs[0].config
        plan = self.plan(config)
        study = Study(Path(config["output_dir"]), specs)
        detach = bool(self._settings.get("detach"))
        try:
            states = run_study(study, plan, detach=detach, begin=lambda: plan.write(study.directory))
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            if plan.kind == "slurm":
                print(_on_its_own(study), file=sys.stderr)
            raise
        report_failures(study, states)
        if detach and any(state.state not in ("finished", "failed") for state in states.values()):
            print(_on_its_own(study), file=sys.stderr)
        return [_job_return(spec, overrides) for spec, overrides in zip(specs, job_overrides, strict=True)]


class SlurmStudyLauncher(StudyLauncher):
    """Runs a grid as a study on a SLURM cluster.

    Takes the keys of `hydra-submitit-launcher` (`partition`, `timeout_min`, `gpus_per_node`, ...) and a few more:
    `detach`, `python`, `teardown`, `srun_args`, `array_size`, `retries`, `poll_s`, `lost_after_s`.
    """

    kind = "slurm"

    def plan(self, config: Mapping[str, Any]) -> LaunchPlan:
        """The jobs' settings, checked before anything is submitted."""
        given = {key: value for key, value in self._settings.items() if key not in ("detach", "retries")}
        settings = JobSettings.of(given)
        return replace(
            super().plan(config),
            axis=default_axis(asks_for_gpus(settings.resources)),
            settings=settings,
            retries=retry_policy(self._settings.get("retries")),
        )


class DebugStudyLauncher(StudyLauncher):
    """Runs a grid as a study in this process, one member after the other: for a debugger."""

    kind = "debug"


def asks_for_gpus(resources: Mapping[str, Any]) -> bool:
    """Whether a job with these resources gets GPUs."""
    named = any(resources.get(key) for key in ("gpus_per_node", "gpus_per_task"))
    return named or "gpu" in str(resources.get("gres") or "")


def report_failures(study: Study, states: Mapping[str, MemberState]) -> None:
    """Nothing if no member failed.

    Raises:
        MemberFailedError: which, and why.
    """
    failed = [state for state in states.values() if state.state == "failed"]
    if not failed:
        return
    reasons = "; ".join(f"{state.recipe} seed {state.seed}: {state.reason}" for state in failed[:20])
    more = f"; and {len(failed) - 20} more" if len(failed) > 20 else ""
    raise MemberFailedError(
        f"{len(failed)} of {len(states)} members failed ({redact(reasons)}{more}); their logs are in "
        f"{study.directory}/runs/; the same command continues what is not done"
    )


def _on_its_own(study: Study) -> str:
    return (
        f"The jobs go on without this process. See how they are with\n    scalerl status {study.directory}\n"
        f"and gather what they have brought, or submit what is left, with\n    scalerl collect {study.directory}"
    )


def _job_return(spec: RunSpec, overrides: Sequence[str]) -> JobReturn:
    result = JobReturn()
    result.overrides = list(overrides)
    result.cfg = DictConfig(dict(spec.config))
    result.status = JobStatus.COMPLETED
    result.return_value = None
    return result
