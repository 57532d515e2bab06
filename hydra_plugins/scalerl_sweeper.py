"""Where Hydra looks for plugins: only this namespace may hold them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict

from sweeps.cli.launchers import StudyLauncher
from sweeps.errors import UserError
from sweeps.launch.study import make_private
from sweeps.redact import redact


class ScaleRLSweeper(BasicSweeper):  # type: ignore[misc]
    """`hydra/sweeper=scalerl`: Hydra's own grid, but no job is composed before the launcher gets it.

    Hydra composes every job once to find errors early, at a tenth of a second each. Our launcher's planner composes
    and checks all of them too, before anything runs, and faster.

    Args:
        max_batch_size: members a launch; None for all in one.
        params: the grid, as in Hydra.
        rows: lists of overrides; the grid is run with each of them in turn, so that a study can hold members that are
            no product of a few keys. Of a key that is given more than once a row's value wins over the grid's, and the
            command line's over both.
    """

    def __init__(
        self,
        max_batch_size: int | None,
        params: Mapping[str, str] | None = None,
        rows: Sequence[Sequence[str]] | None = None,
    ) -> None:
        super().__init__(max_batch_size, params)
        self.rows = rows

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """The launcher gets the configuration as it is; the copy that Hydra writes into the study has no login."""
        super().setup(hydra_context=hydra_context, task_function=task_function, config=config)
        self.config = config.copy()
        with open_dict(self.config):
            if self.config.mlflow.uri:
                self.config.mlflow.uri = redact(self.config.mlflow.uri)
            for given in (self.config.hydra.overrides.task, self.config.hydra.overrides.hydra):
                for number, word in enumerate(given):
                    given[number] = redact(word)
            if self.config.hydra.job.get("override_dirname"):
                self.config.hydra.job.override_dirname = redact(self.config.hydra.job.override_dirname)

    def sweep(self, arguments: list[str]) -> list[object]:
        """As Hydra's, but nothing is written before the launcher has accepted the members.

        A launcher that is not ours gets the study's directory beforehand, as from Hydra, for its owner alone.
        """
        if not isinstance(self.launcher, StudyLauncher):
            if _checked(self.rows) != [[]]:
                raise UserError("hydra.sweeper.rows: they need a launcher of ours: cluster=local, slurm or debug")
            make_private(Path(self.config.hydra.sweep.dir))
            others: list[object] = super().sweep(arguments)
            return others
        self.launcher.accepted = self._keep_configuration
        parser = OverridesParser.create(config_loader=self.hydra_context.config_loader)
        members: list[list[str]] = []
        for row in _checked(self.rows):
            overrides = parser.parse_overrides([*self._parse_config(), *row, *arguments])
            members += self.split_arguments(overrides, None)[0]
        self.overrides = list(self.split_overrides_to_chunks(members, self.max_batch_size))
        results: list[object] = []
        launched = 0
        while not self.is_done():
            batch = self.get_job_batch()
            results.append(self.launcher.launch(batch, initial_job_idx=launched))
            launched += len(batch)
        return results

    def _keep_configuration(self) -> None:
        """What Hydra was asked for, as `multirun.yaml`."""
        directory = Path(self.config.hydra.sweep.dir)
        make_private(directory)
        OmegaConf.save(self.config, directory / "multirun.yaml")

    def validate_batch_is_legal(self, batch: Sequence[Sequence[str]]) -> None:
        """Left to the planner."""


def _checked(rows: Any) -> list[list[str]]:
    """Rows as plain lists; none is one that changes nothing.

    Raises:
        UserError: not lists of overrides.
    """
    given = OmegaConf.to_container(rows, resolve=True) if OmegaConf.is_config(rows) else rows
    if not given:
        return [[]]
    good = isinstance(given, list) and all(isinstance(row, list) for row in given)
    if not good or not all(isinstance(each, str) and "=" in each for row in given for each in row):
        raise UserError(
            f"hydra.sweeper.rows: {given!r} must be a list of lists of overrides, such as [[], [loss=dapo], "
            "[model.width=32, seed=0]]"
        )
    return [[str(each) for each in row] for row in given]
