"""Where Hydra looks for plugins: only this namespace may hold them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, open_dict

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
        """Hydra makes the study's directory; before that it is made for its owner alone."""
        make_private(Path(self.config.hydra.sweep.dir))
        results: list[object] = super().sweep(arguments)
        return results

    def validate_batch_is_legal(self, batch: Sequence[Sequence[str]]) -> None:
        """Left to the planner."""
