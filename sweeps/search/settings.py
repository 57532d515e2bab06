"""How a study is raced or a space searched, where neither NumPy nor SciPy need be imported to check it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from sweeps.decide.rules import Rules
from sweeps.errors import UserError

MODES = ("none", "dry_run", "live")
FREED = ("nothing", "plan")


OBJECTIVES = ("reward", "asymptote")
PRUNERS = ("none", "race")


@dataclass(frozen=True)
class Axis:
    """What a search varies: a key of the configuration, and either its values or its range.

    choices: texts as on the command line. low, high: both ends belong to the range; log: searched by ratio.
    """

    key: str
    choices: tuple[str, ...] = ()
    low: float | int = 0
    high: float | int = 0
    log: bool = False

    def __post_init__(self) -> None:
        if not self.choices and not self.low < self.high:
            raise UserError(f"{self.key}: interval({self.low:g},{self.high:g}) holds nothing; give two ends, low first")
        if self.log and not self.low > 0:
            raise UserError(f"{self.key}: tag(log, interval({self.low:g},...)): a logarithm needs ends above 0")


@dataclass(frozen=True)
class SearchSettings:
    """How a space is searched.

    Args:
        n_trials: trials, those of earlier launches into the same folder counted.
        n_jobs: trials at a time.
        objective: what is made large: the lower bound (2.5%) of the `reward` at the budget, or of the `asymptote`
            where it may be named, and of the reward where it may not.
        budget: compute of one run; None: that of the run's own last evaluation.
        prune: `none`, or `race`: a trial is stopped whose chance of ending ahead of the favourite is below `p_ahead`.
        p_ahead, first: as of `sweeps.decide.rules.Rules`.
        seed: of the sampler.

    Raises:
        UserError: one of them is out of range.
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
        for name, valid in (("objective", OBJECTIVES), ("prune", PRUNERS)):
            if getattr(self, name) not in valid:
                raise UserError(f"hydra.sweeper.{name}: {getattr(self, name)!r} is none of {', '.join(valid)}")
        for name, least in (("n_trials", 1), ("n_jobs", 1), ("seed", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise UserError(f"hydra.sweeper.{name}: {value!r} must be a whole number, {least} or more")
        if self.prune == "race" and self.budget is None:
            raise UserError("hydra.sweeper.prune: race needs hydra.sweeper.budget, the compute of one run")
        if self.budget is not None:
            try:
                self.rules()
            except (UserError, TypeError) as error:
                said = str(error).replace("--p-ahead", "hydra.sweeper.p_ahead").replace("--", "hydra.sweeper.", 1)
                raise UserError(said) from error

    def rules(self) -> Rules:
        """Those of its race."""
        assert self.budget is not None
        return Rules(float(self.budget), float(self.p_ahead), first=float(self.first))


@dataclass(frozen=True)
class RaceSettings:
    """How a study is raced.

    Args:
        mode: `none`; `dry_run` (looks are taken and written down, nothing is stopped); `live`.
        budget: compute of one run at which the best recipe is wanted; None: what the recipe that gets the least done
            in its steps will have spent, told from the first tenth of every run.
        p_ahead, looks, first, growth: as of `Rules`.
        ahead: where not all members can be at work, one waits for the others when it is this factor ahead of a look.
        freed: what becomes of the compute that the stopped are spared: `nothing`, or what the `plan` names.

    Raises:
        UserError: one of them is out of range.
    """

    mode: str = "none"
    budget: float | None = None
    p_ahead: float = 0.1
    looks: int = 1
    first: float = 0.2
    growth: float = 1.05
    ahead: float = 1.5
    freed: str = "nothing"

    def __post_init__(self) -> None:
        for name, valid in (("mode", MODES), ("freed", FREED)):
            if getattr(self, name) not in valid:
                raise UserError(f"race.{name}: {getattr(self, name)!r} is none of {', '.join(valid)}")
        for name in ("p_ahead", "first", "growth", "ahead", *(["budget"] if self.budget is not None else [])):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise UserError(f"race.{name}: {value!r} is no number")
        if isinstance(self.looks, bool) or not isinstance(self.looks, int):
            raise UserError(f"race.looks: {self.looks!r} is no whole number")
        if not 1 < self.ahead < float("inf"):
            raise UserError(f"race.ahead: {self.ahead!r} must be a factor above 1")
        try:
            self.rules(self.budget if self.budget is not None else 1.0)
        except UserError as error:
            raise UserError(str(error).replace("--p-ahead", "race.p_ahead").replace("--", "race.", 1)) from error

    @classmethod
    def of(cls, given: Any) -> RaceSettings:
        """From a configuration; None, or none at all, is no race.

        Raises:
            UserError: no mapping, an unknown key, or a value out of range.
        """
        if given is None:
            return cls()
        if not isinstance(given, Mapping):
            raise UserError(f"race: {given!r} must be settings, such as race.mode=live")
        known = [each.name for each in fields(cls)]
        if unknown := [str(key) for key in given if key not in known]:
            raise UserError(f"race.{unknown[0]}: no such setting; valid: {', '.join(known)}")
        return cls(**given)

    def rules(self, budget: float) -> Rules:
        """The rules of a race to a budget."""
        return Rules(float(budget), float(self.p_ahead), self.looks, float(self.first), float(self.growth))
