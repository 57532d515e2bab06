"""Launch settings of a study, stored in `launch.json` so that any later process can continue it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from statistics import mean
from typing import Any

from sweeps.errors import UserError
from sweeps.executor.base import Executor
from sweeps.executor.clusters import CLUSTERS, Cluster, Scheduler, cluster_class
from sweeps.executor.failure import NO_RETRIES
from sweeps.executor.failure import retries as retry_policy
from sweeps.executor.local import InProcessExecutor, LocalExecutor
from sweeps.launch.controller import Controller
from sweeps.launch.decider import Decider
from sweeps.launch.ledger import MemberState
from sweeps.launch.observer import Observer, Progress
from sweeps.launch.study import Study
from sweeps.redact import MASK, redact
from sweeps.run.files import parse_json, read_json

LAUNCH_FILE = "launch.json"


class MemberFailedError(UserError):
    """Error: some members of a study failed. The message gives their names and the reasons."""


@dataclass(frozen=True)
class LaunchSettings:
    """Launch settings of a study: all that a later process needs to continue it.

    Attributes:
        kind: where members run: `local` (child processes), `debug` (in this process) or one of `CLUSTERS`.
        entry: `module:function` that runs one member, given the member's folder.
        preload: modules that the server imports before local members are forked from it.
        max_parallel: number of local members that run at the same time.
        threads: CPU threads of each member.
        tracking: MLflow's tracking URI; None for a study that is not tracked.
        axis: compute axis of MLflow's charts.
        cluster: resources and limits of cluster jobs; None for the other kinds.
        retries: number of attempts after the first, by kind of failure; None for no limit.
        race: settings under `race`, see `sweeps.search.settings`; empty without a race.
        margin: rewards that differ by at most this count as tied in the study's rankings; None for the rankings'
            default.
    """

    kind: str
    entry: str
    preload: tuple[str, ...]
    max_parallel: int
    threads: int
    tracking: str | None
    axis: str
    cluster: Cluster | None = None
    retries: Mapping[str, int | None] = field(default_factory=lambda: dict(NO_RETRIES))
    race: Mapping[str, Any] = field(default_factory=dict)
    margin: float | None = None

    def text(self) -> str:
        """Return the content of `launch.json`, with the password in MLflow's address masked."""
        # The names and the order of fields are those of earlier versions' files.
        values = {"settings" if name == "cluster" else name: value for name, value in self.__dict__.items()}
        settings = {} if self.cluster is None else self.cluster.to_mapping()
        values |= {"settings": settings, "tracking": self.tracking and redact(self.tracking)}
        return json.dumps(values, indent=1)

    @classmethod
    def read(cls, study: Path) -> LaunchSettings:
        """Read the settings with which the study in a directory was launched.

        Raises:
            UserError: the file is missing or unreadable, or MLflow's address must be given again.
        """
        try:
            data = parse_json((study / LAUNCH_FILE).read_text())
            values = {item.name: data[item.name] for item in fields(cls) if item.name in data}
            values["preload"] = tuple(values["preload"])
            if values["kind"] not in ("local", "debug"):
                values["cluster"] = cluster_class(values["kind"]).of(data["settings"])
                # A study of an earlier version may lack some kinds of failure: add them.
                values["retries"] = {**retry_policy(), **values["retries"]}
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

    @property
    def outlives(self) -> bool:
        """True if members are cluster jobs, which continue when this process ends."""
        return self.cluster is not None

    @staticmethod
    def scheduler_of(study: Path) -> Scheduler | None:
        """Return the scheduler of the cluster on which a study was launched; None if it runs without a cluster.

        Raises:
            UserError: the scheduler cannot be reached from here.
        """
        launched = read_json(study / LAUNCH_FILE)
        settings = launched.get("settings")
        if launched.get("kind") not in CLUSTERS or not isinstance(settings, dict):
            return None
        return cluster_class(launched["kind"]).of(settings).scheduler()

    @staticmethod
    def margin_of(study: Path) -> float | None:
        """Return the `margin` with which a study was launched; None if it has none or there is no study."""
        margin = read_json(study / LAUNCH_FILE).get("margin")
        return float(margin) if isinstance(margin, int | float) and margin > 0 else None

    def executor(self, study: Path) -> Executor:
        """Make the executor that runs the study's members."""
        if self.cluster is not None:
            return self.cluster.executor(study, self.entry, self.threads)
        if self.kind == "debug":
            return InProcessExecutor(self.entry)
        return LocalExecutor(self.entry, self.max_parallel, self.threads, self.preload)


def prepare_study(
    study: Study,
    plan: LaunchSettings,
    again: bool = True,
    decider: Decider | None = None,
    preface: Sequence[str] = (),
) -> AbstractContextManager[Controller]:
    """Prepare a launch that shows progress on stderr, and logs to MLflow if the study is tracked.

    Args:
        study: study to run.
        plan: launch settings.
        again, decider: see `Study.prepare`.
        preface: lines to print when the launch is accepted.
    """
    executor = plan.executor(study.directory)
    steps = mean([spec.steps for spec in study.specs] or [0])  # a search begins without members
    observers: list[Observer] = [Progress(len(study.specs), steps, preface=preface, specs=study.specs)]
    if plan.tracking:
        # MLflow is optional and slow to import.
        from sweeps.launch.tracked import TrackingObserver

        observers.append(TrackingObserver(study, plan.tracking, axis=plan.axis))
    return study.prepare(executor, observers, plan.retries, again, decider)


def report_failures(
    study: Study, states: Mapping[str, MemberState], remedy: str = "the same command continues the unfinished members"
) -> None:
    """Raise MemberFailedError with the names and reasons of the failed members, if there are any."""
    failed = [state for state in states.values() if state.state == "failed"]
    if not failed:
        return
    reasons = "; ".join(f"{state.recipe} seed {state.seed}: {state.reason}" for state in failed[:20])
    more = f"; and {len(failed) - 20} more" if len(failed) > 20 else ""
    raise MemberFailedError(
        f"{len(failed)} of {len(states)} members failed ({redact(reasons)}{more}); their logs are in "
        f"{study.directory}/runs/; {remedy}"
    )
