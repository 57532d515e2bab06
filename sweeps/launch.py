"""The Hydra launcher: a `--multirun` grid becomes a study, run on this machine.

All members are composed, checked and identified before the first one starts. What an earlier launch of the same
sweep has finished is adopted; the rest goes on from its checkpoints.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

from sweeps.curve import default_axis
from sweeps.errors import UserError
from sweeps.executor import LocalExecutor, load_entry
from sweeps.spec import RunSpec
from sweeps.study import Observer, Progress, Study


def gpu_here() -> bool:
    """Whether members started here will find an NVIDIA GPU, and so train on it."""
    return os.environ.get("CUDA_VISIBLE_DEVICES") != "" and any(Path("/dev").glob("nvidia[0-9]*"))


class MemberFailedError(UserError):
    """Some members of a study failed; the others are done."""


class StudyLauncher(Launcher):  # type: ignore[misc]
    """Runs a grid as a study.

    Args:
        planner: `module:function`, from a list of override lists to run specs; checks everything.
        entry: `module:function`, runs one member from its directory.
        preload: modules imported once for all members.
    """

    def __init__(self, planner: str, entry: str, preload: Sequence[str]) -> None:
        self._planner = planner
        self._entry = entry
        self._preload = list(preload)

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Nothing to keep: the job overrides say everything."""

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Plan, check, run what is not done.

        Raises:
            UserError: a member that cannot run; nothing is started then.
            MemberFailedError: after all others are done, if some member failed.
        """
        specs: list[RunSpec] = load_entry(self._planner)([list(overrides) for overrides in job_overrides])
        settings = specs[0].config
        study = Study(Path(settings["output_dir"]), specs)
        observers: list[Observer] = [Progress(len(study.specs), max(spec.steps for spec in specs))]
        tracking = settings["mlflow"]["uri"]
        if tracking:
            # MLflow is slow to import and optional.
            from sweeps.publish import TrackingObserver

            observers.append(TrackingObserver(study, tracking, axis=default_axis(gpu_here())))
        executor = LocalExecutor(
            self._entry, settings["launch"]["max_parallel"], settings["launch"]["threads"], self._preload
        )
        states = study.run(executor, observers)
        failed = [state for state in states.values() if state.state != "finished"]
        if failed:
            reasons = "; ".join(f"{state.recipe} seed {state.seed}: {state.reason}" for state in failed)
            raise MemberFailedError(
                f"{len(failed)} of {len(states)} members failed ({reasons}); their logs are in "
                f"{study.directory}/runs/; the same command continues what is not done"
            )
        results = []
        for number, overrides in enumerate(job_overrides):
            result = JobReturn()
            result.overrides = list(overrides)
            result.cfg = DictConfig(dict(specs[number].config))
            result.status = JobStatus.COMPLETED
            result.return_value = None
            results.append(result)
        return results
