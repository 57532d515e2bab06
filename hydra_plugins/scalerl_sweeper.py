"""Where Hydra looks for plugins: only this namespace may hold them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict

from sweeps.cli.launchers import StudyLauncher
from sweeps.launch.study import make_private
from sweeps.redact import redact


class ScaleRLSweeper(BasicSweeper):  # type: ignore[misc]
    """`hydra/sweeper=scalerl`: Hydra's own grid, but no job is composed before the launcher gets it.

    Hydra composes every job once to find errors early, at a tenth of a second each. Our launcher's planner composes
    and checks all of them too, before anything runs, and faster.
    """

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
            make_private(Path(self.config.hydra.sweep.dir))
            others: list[object] = super().sweep(arguments)
            return others
        self.launcher.accepted = self._keep_configuration
        parser = OverridesParser.create(config_loader=self.hydra_context.config_loader)
        overrides = parser.parse_overrides([*self._parse_config(), *arguments])
        self.overrides = self.split_arguments(overrides, self.max_batch_size)
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
