"""Hydra launchers. They run a `--multirun` grid as a study: on this machine, in this process, or on a cluster.

All members are composed, checked and identified before the first of them starts. If the same grid was launched before,
finished members are not run again, jobs on a cluster are followed, and all other members resume from checkpoints.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf

from sweeps.cli.output import show_results
from sweeps.errors import UserError, require
from sweeps.executor.base import load_entry
from sweeps.executor.clusters import cluster_class
from sweeps.executor.failure import retries as retry_policy
from sweeps.launch.controller import Controller
from sweeps.launch.decider import Decider
from sweeps.launch.labels import labelled_as_before
from sweeps.launch.ledger import Ledger, MemberState, all_finished_or_stopped
from sweeps.launch.planning import Planner, plan_in_subprocess
from sweeps.launch.settings import LAUNCH_FILE, LaunchSettings, prepare_study, report_failures
from sweeps.launch.study import Study
from sweeps.run.spec import RunSpec
from sweeps.run.user_config_dirs import study_files, user_folders
from sweeps.search.deciders import decider_of
from sweeps.search.settings import Axis, RaceSettings, SearchSettings

_COMPOSED_EARLY = 4  # number of members that are composed before slow imports
STOCK = "submitit_slurm"  # name of Hydra's own launcher for SLURM, whose keys mean the same here
_NOT_BEGUN = "As far as is known, nothing of this launch was submitted. The same command continues it."
SEARCH_JOBS = 8  # number of parallel trials of a search on a cluster


def gpu_here() -> bool:
    """Return whether this machine has an NVIDIA GPU that is not hidden, judged by device files and environment."""
    return os.environ.get("CUDA_VISIBLE_DEVICES") != "" and any(Path("/dev").glob("nvidia[0-9]*"))


class StudyLauncher(Launcher):  # type: ignore[misc]
    """Launcher that runs a grid as a study on this machine.

    Args:
        planner: `module:function` that makes checked run specs from lists of overrides and the user's folders.
        entry: `module:function` that runs one member, given the member's folder.
        preload: modules that are imported once for all members.
        settings: further settings of the launcher.

    Attributes:
        files: texts of files, by path, that a sweeper stores with the study. They are written when the launch is
            accepted (members checked, the study's lease held, the first members submitted). A refused launch changes
            nothing.
    """

    kind = "local"
    starts_ranks = False  # members on this machine are single processes

    def __init__(self, planner: str, entry: str, preload: Sequence[str] = (), **settings: Any) -> None:
        self._planner = planner
        self._entry = entry
        self._preload = tuple(preload)
        self._tracking: str | None = None
        self._folders: list[str] = []
        self._preface: list[str] = []
        self._translation_note = ""
        self.kind = settings.pop("kind", self.kind)
        self.files: dict[Path, str] = {}
        self._settings: dict[str, Any] = {
            key: OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
            for key, value in settings.items()
        }

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Store Hydra's context, and MLflow's address with its login, which stored configurations mask."""
        self._context, self._config = hydra_context, config
        self._folders = [*user_folders(config.hydra), *study_files(config.hydra)]
        self._tracking = OmegaConf.select(config, "mlflow.uri")
        if OmegaConf.select(config, "hydra.runtime.choices")["hydra/launcher"] == STOCK:
            self._translation_note = f"hydra/launcher={STOCK} is treated as cluster=slurm"

    def plan(self, config: Mapping[str, Any]) -> LaunchSettings:
        """Make the launch settings from the members' common configuration and the launcher's settings."""
        # Imported here, because it needs NumPy, and Hydra imports this module at every start.
        from sweeps.curve import default_axis

        return LaunchSettings(
            kind=self.kind,
            entry=self._entry,
            preload=self._preload,
            max_parallel=config["launch"]["max_parallel"],
            threads=config["launch"]["threads"],
            tracking=self._tracking,
            axis=_axis(config) or default_axis(gpu_here()),
            race=self._race(config.get("race")),
            margin=_margin(config["launch"].get("margin")),
        )

    def _race(self, race: Any) -> dict[str, Any]:
        """Check the settings under `race` and return them as a dict; empty without a race."""
        settings = RaceSettings.of(race)
        if settings.mode != "none" and self._settings.get("detach"):
            raise UserError(f"race.mode: {settings.mode} needs this process to look; leave --detach away")
        return dict(settings.__dict__) if settings.mode != "none" else {}

    def plan_members(self, override_lists: Sequence[Sequence[str]]) -> list[RunSpec]:
        """Compose and check the members in another process, so that this one does not import torch."""
        if self._shared:
            self._compose_some(override_lists)
        return plan_in_subprocess(self._planner, override_lists, self._folders, self._shared)

    def _compose_some(self, override_lists: Sequence[Sequence[str]]) -> None:
        """Compose some members here, so that a wrong key or choice is reported before the planner's slow imports.

        Composing takes a third of a second, the imports a dozen seconds. Only the first few members with new overrides
        are composed here. The planner composes all members.
        """
        seen: set[str] = set()
        tried = 0
        for words in override_lists:
            if tried < _COMPOSED_EARLY and not seen.issuperset(words):
                tried += 1
                self._context.config_loader.load_sweep_config(self._config, list(words))
            seen.update(words)

    def _search_planner(self) -> AbstractContextManager[Callable[[Sequence[Sequence[str]]], list[RunSpec]]]:
        """Return a planner that lives as long as the search, because its imports take longer than some trials."""
        return Planner(self._planner, self._folders, self._shared)

    @property
    def _shared(self) -> tuple[str, ...] | None:
        """Modules that the planner and the members share; None if members are not forked on this machine."""
        return self._preload

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Plan and check the grid, then run all members that are not finished.

        Raises:
            UserError: a member cannot run. No member was started.
            MemberFailedError: a member failed; raised after all members have ended.
        """
        # Leave `cluster=...` out, because the cluster is not part of a member's identity.
        lists = [[each for each in overrides if not each.startswith("cluster=")] for overrides in job_overrides]
        specs = self.plan_members(lists)
        self._check_ranks(specs)
        config = specs[0].config
        specs = labelled_as_before(Path(config["output_dir"]), specs)
        study = Study(Path(config["output_dir"]), specs)
        if self._check_cost(specs, study.directory, config["launch"]):
            return []
        self._count_adopted(study)
        plan = self.plan(config)
        self._preface = [*self._preface, *_pause_warnings(study.specs, plan)]
        states = self._run(study, plan)
        report_failures(study, states)
        if any(state.state not in ("finished", "failed", "stopped") for state in states.values()):
            print(_detached_note(study), file=sys.stderr)
        return [_job_return(spec, overrides) for spec, overrides in zip(specs, job_overrides, strict=True)]

    def _count_adopted(self, study: Study) -> None:
        if not any(state.adopted for state in study.ledger.fold().values()):
            return
        from sweeps.launch.adopted import substitute_adopted_runs

        study.specs, notes = substitute_adopted_runs(study.directory, study.specs, _measurement)
        self._preface = [*self._preface, *notes]

    def _check_ranks(self, specs: Sequence[RunSpec]) -> None:
        """Raise UserError if a member needs several ranks, but members here are single processes."""
        for spec in specs:
            nodes, ranks = spec.layout or (1, 1)
            if nodes * ranks > 1 and not self.starts_ranks:
                raise UserError(
                    f"strategy.devices: {spec.title} asks for {nodes * ranks} ranks, and a member of a study on this "
                    "machine is one process; launch with cluster={' or '.join(CLUSTERS)}, or one run by torchrun "
                    f"(torchrun --nproc-per-node {ranks} -m lightning_scalerl.train ...)"
                )

    def _check_cost(self, specs: Sequence[RunSpec], directory: Path, settings: Mapping[str, Any]) -> bool:
        """Check `launch.max_device_hours`. With `launch.design`, print the design and return True: do not launch.

        Raises:
            UserError: the launch takes more device hours than allowed, or a setting is invalid.
        """
        from sweeps.launch.adopted import replaced_members
        from sweeps.launch.price import check_hours, estimate_launch

        elsewhere = replaced_members(directory, specs)
        launch = estimate_launch(specs, directory, settings.get("like"), settings.get("rate"), elsewhere)
        check_hours(launch, settings.get("max_device_hours"))
        if (form := settings.get("design")) is None:
            # Printed when the launch is accepted, so that a refused launch prints only one line.
            cautions = dict.fromkeys(line for spec in specs for line in spec.cautions)
            takes = launch.sentences(show_unknown=settings.get("rate") is not None)
            self._preface = [*takes, *cautions] if launch.left else takes
            return False
        from sweeps.cli.design import show_design

        show_design(launch, form, settings.get("like"), settings.get("margin"))
        return True

    def search(
        self,
        base: Sequence[str],
        space: Sequence[Axis],
        settings: Mapping[str, Any],
        sampler: Callable[[int], Any],
    ) -> None:
        """Search a space: whenever a slot is free, the sampler proposes a member.

        Args:
            base: overrides that all trials share.
            space: axes to search.
            settings: values for `SearchSettings`. If `n_jobs` is None, a default is used.
            sampler: makes Optuna's sampler from a seed.

        Raises:
            UserError: as for `launch`, or a setting is out of range.
            MemberFailedError: trials failed, and none finished; raised after all have ended.
        """
        lists = [[each for each in base if not each.startswith("cluster=")]]
        # Trials set the values that the file leaves open (`???`). To check all other settings before the search, plan
        # one member with the first value of each open axis.
        open_axes = [axis for axis in space if _is_open(self._config, axis.key)]
        (spec,) = self.plan_members([[*lists[0], *(axis.first for axis in open_axes)]])
        self._check_ranks([spec])
        plan = self.plan(spec.config)
        if plan.race:
            raise UserError("race.mode: a search races its trials by hydra.sweeper.prune=race; leave race.mode at none")
        if self._settings.get("detach"):
            raise UserError("hydra.launcher.detach: a search needs this process to keep running; remove --detach")
        jobs = SEARCH_JOBS if plan.outlives else plan.max_parallel
        checked = SearchSettings.of({**settings, **({"n_jobs": jobs} if settings.get("n_jobs") is None else {})})
        directory = Path(spec.config["output_dir"])
        study = Study.read(directory) if Ledger(directory).fold() else Study(directory, [])
        trials = [replace(spec, run=f"{spec.run}/{n}") for n in range(len(study.specs), checked.n_trials)]
        if self._check_cost(trials, directory, spec.config["launch"]):
            return
        from sweeps.launch.adopted import find_substitutes, substitute_adopted_runs

        require("optuna", "hydra/sweeper: a search")
        from sweeps.search.optuna_search import Search  # Optuna takes a second to import

        find = None
        if "command" in spec.config and any(state.adopted for state in study.ledger.fold().values()):
            substitute_adopted_runs(directory, [spec], _measurement)  # raises if trials measure compute in another way
            find = partial(find_substitutes, directory, measurement_of=_measurement)
        with self._search_planner() as planner:
            search = Search(
                study=study,
                space=space,
                settings=checked,
                base=lists[0],
                planner=planner,
                sampler=sampler,
                find_substitutes=find,
                open_axes=open_axes,
            )
            states = self._run(study, plan, search)
        if any(state.state == "finished" for state in states.values()):
            show_results(study.directory, plan.tracking)  # even if some trials failed, as they may in a search
        else:
            report_failures(study, states, "a larger hydra.sweeper.n_trials adds trials with other values")
            if refusals := search.trials.refusals():
                raise UserError(f"{search.trials.sentence()}: {refusals[0]}")
        print(search.trials.sentence(), file=sys.stderr)

    def _run(self, study: Study, plan: LaunchSettings, search: Decider | None = None) -> dict[str, MemberState]:
        """Prepare and run the launch. Show the results of a finished study, unless it is a search."""
        prepared: Controller | None = None
        # A later process needs the settings to continue the study.
        files = {study.directory / LAUNCH_FILE: plan.text(), **self.files}
        try:
            decider = search or decider_of(study, plan)
            preface = [*filter(None, [self._translation_note]), *self._preface]
            with prepare_study(study, plan, decider=decider, preface=preface) as prepared:
                states = prepared.commit(files, detach=bool(self._settings.get("detach")))
            if search is None and all_finished_or_stopped(states):
                show_results(study.directory, plan.tracking)
            return states
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            if plan.outlives:
                begun = prepared is not None and prepared.records.accepted
                print(_detached_note(study) if begun else _NOT_BEGUN, file=sys.stderr)
            raise


class ClusterStudyLauncher(StudyLauncher):
    """Launcher that runs a grid as a study on a cluster.

    Args:
        kind: kind of cluster, one of `sweeps.executor.clusters.CLUSTERS`; required unless the class sets it.
        detach: whether to return when everything is submitted.
        retries: number of attempts after the first, by kind of failure.
        arguments: arguments of `StudyLauncher`, and settings of the cluster's jobs.
    """

    starts_ranks = True
    _shared = None

    def plan_members(self, override_lists: Sequence[Sequence[str]]) -> list[RunSpec]:
        """Check access to the cluster, which is fast; then compose and check the members.

        Raises:
            UserError: the cluster cannot be reached (not checked for a design, which needs no cluster).
        """
        if OmegaConf.select(self._config, "launch.design") is None:
            try:
                cluster_class(self.kind).of({}).scheduler()
            except UserError as error:
                raise UserError(": ".join(filter(None, [self._translation_note, str(error)]))) from None
        return super().plan_members(override_lists)

    def plan(self, config: Mapping[str, Any]) -> LaunchSettings:
        """Make the launch settings, with resources and retries of the jobs, checked before anything is submitted."""
        from sweeps.curve import default_axis

        job_settings = {key: value for key, value in self._settings.items() if key not in ("detach", "retries")}
        cluster = cluster_class(self.kind).of(job_settings)
        return replace(
            super().plan(config),
            axis=_axis(config) or default_axis(cluster.asks_for_gpus),
            cluster=cluster,
            retries=retry_policy(self._settings.get("retries")),
        )


class DebugStudyLauncher(StudyLauncher):
    """Launcher that runs a grid as a study in this process, one member after the other, for debugging."""

    kind = "debug"
    _shared = None

    def plan_members(self, override_lists: Sequence[Sequence[str]]) -> list[RunSpec]:
        """Compose and check the members in this process, so that a debugger can step into it."""
        specs: list[RunSpec] = load_entry(self._planner)(override_lists, self._folders)
        return specs

    def _search_planner(self) -> AbstractContextManager[Callable[[Sequence[Sequence[str]]], list[RunSpec]]]:
        return nullcontext(self.plan_members)


def _pause_warnings(specs: Sequence[RunSpec], plan: LaunchSettings) -> list[str]:
    """Return a warning, in a list, if a race will pause members whose commands cannot resume; else an empty list."""
    specs = [spec for spec in specs if "adopted" not in spec.config]  # adopted runs never run here
    lost = [spec for spec in specs if (spec.config.get("command") or {}).get("resume", {}).get("anew")]
    at_once = not plan.outlives and plan.max_parallel >= len(specs)
    if plan.race.get("mode") != "live" or at_once or not lost:
        return []
    remedy = "one node for each" if plan.outlives else f"launch.max_parallel={len(specs)}"
    return [
        "warning: race.mode: live: a member that waits for others is stopped, and with command.resume.anew it starts "
        f"again from zero; run all {len(specs)} members at once ({remedy}), or configure how they resume"
    ]


def _axis(config: Mapping[str, Any]) -> str | None:
    """Return the compute axis of members that run another trainer's command; None for our own members."""
    if "command" not in config:
        return None
    from sweeps.command.compute import AXIS_OF

    return AXIS_OF[config["command"]["compute"]["unit"]]


def _measurement(spec: RunSpec) -> tuple[str, str, str]:
    """Return a command member's compute axis, description of measured compute, and reward metric."""
    from sweeps.command.settings import command_of

    command = command_of(spec.config, "", spec.run)
    return command.compute.axis, command.compute.text, f"eval/{next(iter(command.rewards))}/pass_rate"


def _is_open(config: DictConfig, key: str) -> bool:
    """Return whether a configuration leaves a value open (`???`)."""
    group, _, name = key.rpartition(".")
    part = OmegaConf.select(config, group, throw_on_missing=False) if group else config
    return isinstance(part, DictConfig) and OmegaConf.is_missing(part, name)


def _margin(value: Any) -> float | None:
    """Return `launch.margin`, None for the rankings' default. Raises UserError if it is not a positive number."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise UserError(f"launch.margin: {value!r}: must be a positive number in reward units, or null for the default")
    return float(value)


def _detached_note(study: Study) -> str:
    return (
        f"The jobs continue without this process. To see their state:\n    scalerl status {study.directory}\n"
        f"To collect results and submit what is left:\n    scalerl collect {study.directory}"
    )


def _job_return(spec: RunSpec, overrides: Sequence[str]) -> JobReturn:
    result = JobReturn()
    result.overrides = list(overrides)
    result.cfg = DictConfig(dict(spec.config))
    result.status = JobStatus.COMPLETED
    result.return_value = None
    return result
