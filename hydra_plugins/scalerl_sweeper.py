"""Hydra sweeper for grids and lists of members: Hydra discovers plugins only in this namespace."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf

from sweeps.cli.launchers import StudyLauncher
from sweeps.errors import UserError
from sweeps.redact import redact, redact_config, redact_override
from sweeps.run.files import make_private


class ScaleRLSweeper(BasicSweeper):  # type: ignore[misc]
    """Sweeper for Hydra's own grid that leaves composing jobs to the launcher, selected by `hydra/sweeper=scalerl`.

    Hydra composes every job once to find errors early, at a tenth of a second each. Our launcher's planner composes
    and checks all of them too, before anything runs, and faster.

    Args:
        max_batch_size: members per launch; None for all in one.
        params: the grid, as in Hydra.
        rows: lists of overrides. The grid is run with each of them in turn, so that a study can have members that are
            not a product of a few keys. If a key is given more than once, a row's value overrides the grid's, and the
            command line's overrides both.
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
        """Set up as Hydra does; the launcher gets the full configuration, the copy written to disk is redacted."""
        super().setup(hydra_context=hydra_context, task_function=task_function, config=config)
        self.config = without_secrets(config)

    def sweep(self, arguments: list[str]) -> list[object]:
        """Launch the grid in batches, as Hydra does, but write nothing before the launcher has accepted the members.

        If the launcher is not ours, the study's directory is made first, as by Hydra, readable only by its owner.
        """
        if not isinstance(self.launcher, StudyLauncher):
            if _checked(self.rows) != [[]]:
                raise UserError(f"hydra.sweeper.rows: they need {self.launchers_of_ours()}")
            directory = Path(self.config.hydra.sweep.dir)
            make_private(directory)
            (directory / "multirun.yaml").touch(mode=0o600)
            others: list[object] = super().sweep(arguments)
            return others
        if self.max_batch_size is not None and OmegaConf.select(self.config, "race.mode") not in (None, "none"):
            raise UserError("hydra.sweeper.max_batch_size: members race against all others; leave it at null")
        self.launcher.files = self.kept()
        parser = OverridesParser.create(config_loader=self.hydra_context.config_loader)
        members: list[list[str]] = []
        for row in _checked(self.rows):
            overrides = parser.parse_overrides([*self._parse_config(), *row, *arguments])
            members += self.split_arguments(overrides, None)[0]
            if empty := [each.input_line for each in overrides if _stands_for_nothing(each)]:
                raise UserError(f"{empty[0]}: stands for no value, so the grid is empty; give it one, or leave it out")
        self.overrides = list(self.split_overrides_to_chunks(members, self.max_batch_size))
        results: list[object] = []
        launched = 0
        while not self.is_done():
            batch = self.get_job_batch()
            results.append(self.launcher.launch(batch, initial_job_idx=launched))
            launched += len(batch)
        return results

    def launchers_of_ours(self) -> str:
        """Describe how to select one of our launchers, by the files of the group `cluster`, including the user's."""
        names = self.hydra_context.config_loader.get_group_options("cluster")
        return f"a launcher of ours: cluster={' or '.join(names)}"

    def kept(self) -> dict[Path, str]:
        """Return the redacted text of `multirun.yaml` by path. Only the owner may read it: it may hold a secret."""
        return {Path(self.config.hydra.sweep.dir) / "multirun.yaml": OmegaConf.to_yaml(self.config)}

    def validate_batch_is_legal(self, batch: Sequence[Sequence[str]]) -> None:
        """Skip Hydra's early composition of every job: the launcher's planner composes and checks them all."""


def without_secrets(config: DictConfig) -> DictConfig:
    """Return a copy of Hydra's configuration with secrets redacted; `hydra.sweep.dir` stays as in the original."""
    plain: Any = redact_config(OmegaConf.to_container(config, enum_to_str=True))
    given: Any = config.hydra.overrides
    plain["hydra"]["overrides"] = {of: [redact_override(word) for word in given[of]] for of in given}
    if name := config.hydra.job.get("override_dirname"):
        # This field joins all overrides with commas. Mask each by its key: a value alone may not look like a secret.
        for word in (*given.task, *given.hydra):
            name = name.replace(word, redact_override(word))
        plain["hydra"]["job"]["override_dirname"] = redact(name)
    rows: Any = config.hydra.sweeper.get("rows")
    if rows:
        plain["hydra"]["sweeper"]["rows"] = [[redact_override(str(word)) for word in row] for row in rows]
    safe: DictConfig = OmegaConf.create(plain)
    if safe.hydra.sweep.dir != config.hydra.sweep.dir:
        safe.hydra.sweep.dir = config.hydra.sweep.dir
    return safe


def _stands_for_nothing(override: Override) -> bool:
    return override.is_sweep_override() and next(iter(override.sweep_string_iterator()), None) is None


def _checked(rows: Any) -> list[list[str]]:
    """Return rows as plain lists; without rows, one empty row, which changes nothing.

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
