"""Settings of races and searches. This module imports neither NumPy nor SciPy, so that importing it is fast."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

from sweeps.decide.rules import NO_LIMIT, Rules
from sweeps.errors import UserError

log = logging.getLogger(__name__)

MODES = ("none", "dry_run", "live")

FREED = "the key was removed; leave it out, and ask `scalerl plan` what saved compute is best spent on"

OBJECTIVES = ("reward", "asymptote")
PRUNERS = ("none", "race")


@dataclass(frozen=True)
class Axis:
    """One axis of a search space: a configuration key with either its values or its range.

    Attributes:
        key: dotted key of the configuration.
        choices: values as on the command line; empty for a range.
        low, high: ends of the range, both inclusive; if both are integers, the values are integers.
        log: whether the range is searched on a logarithmic scale.
    """

    key: str
    choices: tuple[str, ...] = ()
    low: float | int = 0
    high: float | int = 0
    log: bool = False

    def __post_init__(self) -> None:
        if not self.choices and not (math.isfinite(self.low) and math.isfinite(self.high)):
            raise UserError(f"{self.key}: interval({self.low:g},{self.high:g}) has no end; give two that are finite")
        if not self.choices and not self.low < self.high:
            raise UserError(f"{self.key}: interval({self.low:g},{self.high:g}) holds nothing; give two ends, low first")
        if self.log and not self.low > 0:
            raise UserError(f"{self.key}: tag(log, interval({self.low:g},...)): a logarithm needs ends above 0")

    @property
    def first(self) -> str:
        """First value of the axis, as a command-line override."""
        return f"{self.key}={self.choices[0] if self.choices else repr(self.low)}"

    def __str__(self) -> str:
        if self.choices:
            return f"{self.key}={','.join(self.choices)}"
        interval = f"interval({self.low!r},{self.high!r})"
        whole = isinstance(self.low, int) and isinstance(self.high, int)
        interval = f"int({interval})" if whole else interval
        return f"{self.key}={f'tag(log,{interval})' if self.log else interval}"


@dataclass(frozen=True)
class SearchSettings:
    """Settings of a search over a space by Optuna.

    Args:
        n_trials: number of trials, including those of earlier launches into the same folder.
        n_jobs: number of trials that run at the same time.
        objective: value to maximize: `reward`, the lower bound (2.5%) of the reward at the budget; or `asymptote`, the
            lower bound of the asymptote or, if that is not identifiable, of the reward.
        budget: compute of one run at which rewards are compared; None for the compute of the run's last evaluation.
        prune: `none`, or `race` to stop a trial whose probability of ending ahead of the favourite is below `p_ahead`.
        p_ahead, first: see `sweeps.decide.rules.Rules`.
        seed: random seed of the sampler.

    Raises:
        UserError: a setting is out of range.
    """

    n_trials: int = 20
    n_jobs: int = 2
    objective: str = "reward"
    budget: float | None = None
    prune: str = "none"
    p_ahead: float = 0.1
    first: float = 0.2
    seed: int = 0

    def __post_init__(self) -> None:
        where = "hydra.sweeper"
        _check_choices(self, where, objective=OBJECTIVES, prune=PRUNERS)
        for name, least in (("n_trials", 1), ("n_jobs", 1), ("seed", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise UserError(f"{where}.{name}: {value!r} must be a whole number, {least} or more")
        _check_numbers(self, where, "budget", "p_ahead", "first")
        if self.prune == "race" and self.budget is None:
            raise UserError("hydra.sweeper.prune: race needs hydra.sweeper.budget, the compute of one run")
        with _rename_options(where):
            self.rules()

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> SearchSettings:
        """Make the settings from a configuration's mapping.

        Raises:
            UserError: an unknown key, or a value out of range.
        """
        return cls(**_check_keys(cls, "hydra.sweeper", given))

    def rules(self) -> Rules:
        """Return the rules for pruning trials, with a budget of 1 if none is set."""
        budget = 1.0 if self.budget is None else float(self.budget)
        # Trials are judged one at a time, so `loss`, which limits the cost of all stops of a race together, sets no
        # limit.
        return Rules(budget, float(self.p_ahead), first=float(self.first), loss=NO_LIMIT)


@dataclass(frozen=True)
class RaceSettings:
    """Settings of a study's race, from `race.*` of the configuration.

    Args:
        mode: `none`; `dry_run`, which takes and records looks but stops nothing; or `live`.
        budget: compute of one run at which the best recipe is wanted. None for the smallest compute of any member at
            the end of its steps, estimated when all members have completed a tenth of their steps.
        p_ahead, looks, first, growth, loss: see `sweeps.decide.rules.Rules`.
        ahead: factor between successive levels of compute at which members wait for each other, if not all can run at
            once.

    Raises:
        UserError: a setting is out of range.
    """

    mode: str = "none"
    budget: float | None = None
    p_ahead: float = 0.1
    looks: int = 1
    first: float = 0.2
    growth: float = 1.05
    loss: float = 0.01
    ahead: float = 1.5

    def __post_init__(self) -> None:
        _check_choices(self, "race", mode=MODES)
        _check_numbers(self, "race", "budget", "p_ahead", "first", "growth", "loss", "ahead")
        if isinstance(self.looks, bool) or not isinstance(self.looks, int):
            raise UserError(f"race.looks: {self.looks!r} is no whole number")
        if not 1 < self.ahead < float("inf"):
            raise UserError(f"race.ahead: {self.ahead!r} must be a factor above 1")
        with _rename_options("race"):
            # `Rules` checks the values. While the budget is unknown, the others are checked with a budget of 1.
            self.rules(self.budget if self.budget is not None else 1.0)

    @classmethod
    def of(cls, given: Any) -> RaceSettings:
        """Make the settings from a configuration's value; None means no race.

        Raises:
            UserError: the value is not a mapping, a key is unknown, or a value is out of range.
        """
        if given is None:
            return cls()
        if not isinstance(given, Mapping):
            raise UserError(f"race: {given!r} must be settings, such as race.mode=live")
        if "freed" in given:
            raise UserError(f"race.freed: {FREED}")
        return cls(**_check_keys(cls, "race", given))

    @classmethod
    def recorded(cls, given: Any) -> RaceSettings:
        """Make the settings with which a study was launched. Like `of`, but a key that this version removed is ignored.

        Raises:
            UserError: as for `of`.
        """
        if not isinstance(given, Mapping):
            return cls.of(given)
        if given.get("freed", "nothing") != "nothing":
            log.warning("race.freed: %r is ignored; %s", given["freed"], FREED)
        return cls.of({key: value for key, value in given.items() if key != "freed"})

    def rules(self, budget: float) -> Rules:
        """Return the rules of a race to this budget."""
        return Rules(
            float(budget), float(self.p_ahead), self.looks, float(self.first), float(self.growth), float(self.loss)
        )


def _check_choices(settings: Any, where: str, **valid: Sequence[str]) -> None:
    for name, choices in valid.items():
        if getattr(settings, name) not in choices:
            raise UserError(f"{where}.{name}: {getattr(settings, name)!r} is none of {', '.join(choices)}")


def _check_numbers(settings: Any, where: str, *names: str) -> None:
    """Check that these settings are numbers. None is valid only as the default value."""
    for name in names:
        value = getattr(settings, name)
        absent = value is None and getattr(type(settings), name) is None
        if not absent and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise UserError(f"{where}.{name}: {value!r} is no number")


def _check_keys(settings: Any, where: str, given: Mapping[str, Any]) -> dict[str, Any]:
    known = [each.name for each in fields(settings)]
    if unknown := [str(key) for key in given if key not in known]:
        raise UserError(f"{where}.{unknown[0]}: no such setting; valid: {', '.join(known)}")
    return dict(given)


@contextmanager
def _rename_options(where: str) -> Iterator[None]:
    """In a `with` block, replace the names of command-line options in error messages by the names of these settings."""
    try:
        yield
    except UserError as error:
        raise UserError(str(error).replace("--p-ahead", "--p_ahead").replace("--", f"{where}.", 1)) from error
