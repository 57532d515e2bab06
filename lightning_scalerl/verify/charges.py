"""Ledger of the costs of judges (models that grade), and the setting that adds these costs to a run's device hours."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from lightning_scalerl.checks import ConfigurationError
from lightning_scalerl.rollouts.grade import Charge

DEVICE_HOURS = "device_hours"


@dataclass(frozen=True)
class ComputeAxes:
    """Settings of the compute axes, the x axes of learning curves.

    Args:
        judge: how the cost of judges is added to device hours and virtual device hours. None adds nothing: the cost
            appears only in the metrics `compute/judge_*`. "device_hours" counts one device during the seconds of each
            request. A number is the price of a device hour, by which the judges' price is divided.
    """

    neutral: ClassVar[Mapping[str, Any] | None] = {"choice": "ComputeAxes", "judge": None}

    judge: str | float | None = None

    def __post_init__(self) -> None:
        price = isinstance(self.judge, int | float) and not isinstance(self.judge, bool) and 0 < self.judge < 1e100
        if not (self.judge in (None, DEVICE_HOURS) or price):
            raise ConfigurationError(
                f"compute.judge: {self.judge!r} must be null, device_hours (the judge's seconds), or the price of a "
                "device hour, a number above 0 (the judge's price divided by it)"
            )

    def device_hours(self, totals: Totals) -> float:
        """Convert costs to device hours; 0 if `judge` is None."""
        if self.judge is None:
            return 0.0
        return totals.seconds / 3600.0 if self.judge == DEVICE_HOURS else totals.cost / float(self.judge)


@dataclass
class Totals:
    """Sums of charges: seconds of requests, numbers of tokens, and the cost in the unit of the judge's prices."""

    seconds: float = 0.0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost: float = 0.0

    def add(self, charge: Charge) -> None:
        """Add one charge."""
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(charge, field.name))

    def by_metric_name(self) -> dict[str, float]:
        """Return the sums by metric name."""
        return {
            "hours": self.seconds / 3600.0,
            "tokens": float(self.prompt_tokens + self.completion_tokens),
            "prompt_tokens": float(self.prompt_tokens),
            "completion_tokens": float(self.completion_tokens),
            "cost": self.cost,
        }


class ChargeLedger:
    """Counts the judges' costs of a run, separately for training and evaluation.

    Each answer counts once with its recorded cost, when the run first uses it, even if it comes from the cache. So a
    recipe that reuses answers of an earlier recipe does not look cheaper. A run that resumes after kill -9 has the same
    compute axis as an undisturbed run, although it pays for no answer twice. The number of answers that were paid for
    is counted separately.
    """

    def __init__(self) -> None:
        self.training, self.evaluation = Totals(), Totals()
        # keys of counted charges, in training (False) and evaluation (True)
        self._counted: dict[bool, set[int]] = {False: set(), True: set()}
        self._answers = {"asked": 0, "cached": 0}

    def add(self, charges: Iterable[Charge], evaluation: bool = False) -> None:
        """Count the charges of one completion."""
        totals, counted = self.evaluation if evaluation else self.training, self._counted[evaluation]
        for charge in charges:
            self._answers["asked" if charge.paid else "cached"] += 1
            # 63 bits of the hash: a million answers collide with a chance of 1e-7, and the checkpoint stays small.
            key = int(charge.key[:16] or "0", 16) >> 1
            if not charge.key or key not in counted:
                totals.add(charge)
            if charge.key:
                counted.add(key)

    @property
    def used(self) -> bool:
        """True if an answer of a judge was used, from its service or from the cache."""
        return any(self._answers.values())

    def metrics(self) -> dict[str, float]:
        """Return the judges' costs in training (`compute/judge_*`), and counts of asked and cached answers; empty
        without a judge.
        """
        if not self.used:
            return {}
        axes = {f"compute/judge_{name}": self.training.by_metric_name()[name] for name in self._nonzero_names()}
        return axes | {f"verify/judge_{name}": float(count) for name, count in self._answers.items()}

    def evaluation_metrics(self) -> dict[str, float]:
        """Return the judges' costs in evaluations, which are on no compute axis; empty without a judge."""
        return {f"eval_cost/judge_{name}": self.evaluation.by_metric_name()[name] for name in self._nonzero_names()}

    def _nonzero_names(self) -> list[str]:
        """Return the names of the sums that are not 0. Sums stay 0 without prices, or without reported tokens."""
        training, evaluation = self.training.by_metric_name(), self.evaluation.by_metric_name()
        return [name for name in training if training[name] or evaluation[name]]

    def state_dict(self) -> dict[str, Any]:
        """Return all sums and counted keys, for a checkpoint."""
        return {
            "training": vars(self.training).copy(),
            "evaluation": vars(self.evaluation).copy(),
            "counted": [sorted(self._counted[evaluation]) for evaluation in (False, True)],
            "answers": dict(self._answers),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore all sums and counted keys."""
        self.training, self.evaluation = Totals(**state["training"]), Totals(**state["evaluation"])
        self._counted = dict(zip((False, True), map(set, state["counted"]), strict=True))
        self._answers = dict(state["answers"])
