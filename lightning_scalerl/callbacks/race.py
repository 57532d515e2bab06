"""Early stopping of a run whose recipe will not be the best: racing for runs that are started one by one."""

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
    from sweeps.search.run_observer import RunObserver

log = logging.getLogger(__name__)


class Race(Recorder):
    """Ends the fit when the recipe's chance of ending ahead of its study's favourite is too small (docs/guide/race.md).

    For a script of one's own, beside `Evaluate` and `RunLog`: after each evaluation the journals of all runs in the
    study's folder are looked at, and the joint forecast of their rewards at the budget. Runs whose folders are there
    before the first look decide by the same evaluations, and so alike; one that begins later looks at rivals that the
    others did not see. A stopped run ends as by Lightning's `EarlyStopping` (`trainer.should_stop`), is saved, and can
    be continued with `fit(ckpt_path=...)` without this callback. Each look is in `race.jsonl` in the run's directory.
    Where the journals cannot be compared a warning says why, and no look is taken. Runs of one label are seeds of one
    recipe and do not race each other; a warning says so of those that nothing else tells apart.

    Args:
        study: folder that holds the directories of all runs that race, this one's among them.
        budget: compute of one run at which the best recipe is wanted, in the unit of `axis`.
        p_ahead: chance below which the recipe is stopped.
        looks: at so many looks in a row.
        first: share of the budget at which the first look is taken.
        growth: compute grows by this factor from one look to the next.
        dry_run: look, write down and say what would be done, and stop nothing.
        metric, axis: of the evaluations; None for the first set's pass rate and the default axis of the device.
        loss: the most that all stops together may be expected to cost, as a share of the reward's scale; 1: no limit.

    Raises:
        ConfigurationError: a value out of range; at the start of a fit, no `RunLog`, or one outside of the folder.
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
        self._observer: RunObserver | None = None
        self._due = self._said = self._told_namesakes = False
        self._trouble: str | None = None

    def on_fit_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Find the run's own directory through its `RunLog`, and set up the looks at the study's journals."""
        from sweeps.errors import UserError
        from sweeps.search.run_observer import RunObserver

        found = [each for each in trainer.callbacks if isinstance(each, RunLog)]  # type: ignore[attr-defined]
        if not found:
            raise ConfigurationError("Race: needs a RunLog beside it, whose journals it reads; add RunLog(run_dir)")
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            return  # nothing is written then, and so there is nothing to look at
        try:
            self._observer = RunObserver(self.study, found[0].run_dir, self.rules, self._metric, self._axis)
        except UserError as error:
            raise ConfigurationError(f"Race: {error}") from error
        if self._observer.damaged is not None:
            log.warning("race: %s", self._observer.damaged)

    def on_record(self, kind: str, step: int, metrics: Mapping[str, float]) -> None:
        """Note a new evaluation: the next step then looks whether the run is still in the race."""
        self._due = self._due or kind == "eval"

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Look at the study's journals after an evaluation; rank 0's view decides for all ranks."""
        if self._observer is None:
            return
        why = self._observer.look() if self._due else None
        self._due = False
        if self._observer.trouble not in (None, self._trouble):
            log.warning("race: no look: %s", self._observer.trouble)
        self._trouble = self._observer.trouble
        if self._observer.namesakes is not None and not self._told_namesakes:
            self._told_namesakes = True
            log.warning("race: %s", self._observer.namesakes)
        why = run_of(pl_module).ranks.agree(why)
        if why is None:
            return
        if not self._said:
            log.warning("race: %s%s", "would be " if self.dry_run else "", why)
        self._said = True
        if not self.dry_run:
            trainer.should_stop = True
