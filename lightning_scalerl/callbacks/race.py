"""Early stopping of a run whose recipe is unlikely to be the best: a race of runs that are started one by one."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.pytorch import Trainer

from lightning_scalerl.callbacks.base import Recorder
from lightning_scalerl.callbacks.run import run_of
from lightning_scalerl.callbacks.run_log import RunLog
from lightning_scalerl.checks import ConfigurationError

if TYPE_CHECKING:
    from sweeps.search.looks import RaceWithoutController

log = logging.getLogger(__name__)


class Race(Recorder):
    """Stops the fit if its recipe is too unlikely to end ahead of the study's favourite (docs/guide/race.md).

    Use it in your own script together with `Evaluate` and `RunLog`. After an evaluation it may take a "look" (an
    interim analysis): it reads the journals of all runs in the study's folder, and jointly forecasts their rewards at
    the budget.

    - Runs whose folders exist before the first look use the same evaluations, and come to the same decisions. A run
    that
      starts later does not affect the decisions of earlier runs.
    - A stopped run ends as with Lightning's `EarlyStopping` (`trainer.should_stop`), and is saved. To continue it, call
      `fit(ckpt_path=...)` without this callback.
    - Each look is written to `race.jsonl` in the run's directory. If the journals cannot be compared, a warning says
    why,
      and no look is taken.
    - Runs with the same label are seeds of one recipe, and do not race each other. A warning is logged if all runs have
    the
      same label, or if another run has both label and seed of this one.

    Args:
        study: folder that contains the directories of all runs of the race, including this one's.
        budget: compute of one run at which recipes are compared, in the unit of `axis`.
        p_ahead: the recipe is stopped if its probability of ending ahead of the favourite is below this.
        looks: number of looks in a row that must find it below `p_ahead`.
        first: share of the budget at which the first look is taken.
        growth: factor by which compute grows from one look to the next.
        dry_run: whether to take, record and report looks, but never stop the run.
        metric, axis: metric and compute axis of the evaluations; None for the first set's pass rate and the device's
            default axis.
        loss: limit on the expected loss of reward by all stops together, as a share of the reward's scale; 1 for no
            limit.

    Attributes:
        has_stopped: whether this callback has stopped the present fit.

    Raises:
        ConfigurationError: a value is out of range; at the start of a fit, there is no `RunLog`, or its folder is
            outside of the study's.
    """

    def __init__(
        self,
        study: str | Path,
        budget: float,
        p_ahead: float = 0.1,
        looks: int = 1,
        first: float = 0.2,
        growth: float = 1.05,
        dry_run: bool = False,
        metric: str | None = None,
        axis: str | None = None,
        loss: float = 0.01,
    ) -> None:
        from sweeps.decide.rules import Rules
        from sweeps.errors import UserError

        try:
            self.rules = Rules(budget, p_ahead, looks, first, growth, loss)
        except UserError as error:
            raise ConfigurationError(f"Race: {str(error).removeprefix('--')}") from error
        self.study, self.dry_run, self._metric, self._axis = Path(study), dry_run, metric, axis
        self._looks: RaceWithoutController | None = None
        self._due = False
        self.has_stopped = False

    def on_fit_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Find the run's directory by its `RunLog`, and prepare the looks at the study's journals."""
        from sweeps.errors import UserError
        from sweeps.search.looks import RaceWithoutController

        self.has_stopped = False
        run_logs = [each for each in trainer.callbacks if isinstance(each, RunLog)]  # type: ignore[attr-defined]
        if not run_logs:
            raise ConfigurationError("Race: needs a RunLog beside it, whose journals it reads; add RunLog(run_dir)")
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            return  # there is no journal to look at
        try:
            self._looks = RaceWithoutController(
                self.study, run_logs[0].run_dir, self.rules, self._metric, self._axis, log
            )
        except UserError as error:
            raise ConfigurationError(f"Race: {error}") from error

    def on_record(self, kind: str, step: int, metrics: Mapping[str, float]) -> None:
        """Note that there is a new evaluation, after which `on_train_batch_end` takes a look."""
        self._due = self._due or kind == "eval"

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """After an evaluation, look at the study's journals. Rank 0 decides for all ranks."""
        if self._looks is None:
            return
        why = run_of(pl_module).ranks.agree(self._looks.take() if self._due else None)
        self._due = False
        if why is not None:
            self._looks.warn(f"would be {why}" if self.dry_run else why)
            self.has_stopped = not self.dry_run
            trainer.should_stop = trainer.should_stop or self.has_stopped
