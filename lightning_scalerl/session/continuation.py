"""Continuation of runs: whether a fit goes on with the module's last one, or with the run of a checkpoint.

In come the resolved settings of a fit, how the last one ended, and the identity that a checkpoint carries; out goes
whether they are of one run, or an error that says what differs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_scalerl.callbacks.run_log import RunLog
from lightning_scalerl.checks import ConfigurationError
from lightning_scalerl.choices import AXES, axis_class
from lightning_scalerl.measure.semantics import own_label
from sweeps.run.interruption import RunInterruptedError

if TYPE_CHECKING:
    from lightning_scalerl.session.parts import Parts


class Continuation:
    """Record of a module's last fit: what it was a fit of, and how it ended.

    `meaning` holds the settings, choices, seed and task by which two fits are of the same run, None before the first
    fit; `failure` is the name of the error that the last fit ended with, None if it ended well or was interrupted.
    `generator` is the state of the generator from a checkpoint that holds no weights of it: it is restored once the
    trainer has its own, which are published.
    """

    def __init__(self) -> None:
        self.meaning: dict[str, Any] | None = None
        self.failure: str | None = None
        self.generator: dict[str, Any] | None = None
        self._under_way = False

    def goes_on(self, meaning: dict[str, Any], steps: int) -> bool:
        """Return whether a fit of this meaning continues the last one, which has trained so many steps.

        Raises:
            ConfigurationError: with other choices, another task or seed it would be another run.
        """
        if self.meaning is None or steps == 0:
            return False
        if self.failure is not None:
            return False  # a checkpoint has to be given; `check_checkpoint` knows whether it is
        other = sorted(key for key in meaning if meaning[key] != self.meaning[key])
        if other:
            raise ConfigurationError(
                f"fit: this module has trained {steps} steps, and {', '.join(other)} would change now; "
                "another run begins with another module: ScaleRL(module.policy.model, tokenizer=module.tokenizer, ...)"
            )
        return True

    def check_checkpoint(self, ckpt_path: Any) -> None:
        """Refuse a new fit after a failed one without a checkpoint.

        Raises:
            ConfigurationError: the last fit of this module has failed, and there is no checkpoint to go on from.
        """
        if self.failure is not None and ckpt_path is None:
            raise ConfigurationError(
                f"fit: this module's last fit ended with {self.failure}; go on from a checkpoint, fit(ckpt_path=...), "
                "or begin with another module"
            )
        self.failure = None

    def fit_began(self) -> None:
        """Note that training is under way: from here on an error leaves the module in the middle of something."""
        self._under_way = True

    def fit_ended(self, error: BaseException | None = None) -> None:
        """Note how the fit ended; unless that was a clean interruption, an error asks for a checkpoint next time."""
        if self._under_way and error is not None and not isinstance(error, RunInterruptedError | SIGTERMException):
            self.failure = type(error).__name__
        self._under_way = False


def identity(module: Parts) -> dict[str, Any]:
    """Return the identity kept in checkpoints: the study's name of the run, if any, recipe, seed and choices."""
    logs = [each for each in module.trainer.callbacks if isinstance(each, RunLog)]  # type: ignore[attr-defined]
    given = logs[0].identity if logs else {}
    choices = {axis: str(choice.semantics()["choice"]) for axis, choice in module.choices.items()}
    named = {"run": given.get("run"), "title": str(given.get("recipe", own_label(module)))}
    return {**named, "recipe": own_label(module), "seed": module.seed, "choices": choices}


def check_identity(own: dict[str, Any], theirs: Any, ckpt_path: Any) -> None:
    """Refuse a checkpoint of another run; one of an earlier version carries no identity and is taken.

    Args:
        own: identity of this run.
        theirs: that of the checkpoint.
        ckpt_path: of the checkpoint, for the error.

    Raises:
        ConfigurationError: it is another run's; both are named.
    """
    if not isinstance(theirs, dict):
        return
    # For two members of studies the run names decide: a version may have renamed choices.
    named = None not in (own["run"], theirs.get("run"))
    keys = ("run",) if named else ("recipe", "seed", "choices")
    # An axis that the version of the checkpoint did not have yet has its neutral choice there.
    theirs = {**theirs, "choices": {**_neutral(), **(theirs.get("choices") or {})}}
    if all(own[key] == theirs.get(key) for key in keys):
        return
    both = [f"{each.get('title')} seed {each.get('seed')}" for each in (theirs, own)]
    if named:
        both = [f"{text} ({each['run']})" for text, each in zip(both, (theirs, own), strict=True)]
    now, saved = own["choices"], theirs.get("choices") or {}
    other = [axis for axis in now if saved.get(axis) not in (None, now[axis])]
    differ = ", ".join(f"{axis} {saved[axis]}, not {now[axis]}" for axis in other)
    raise ConfigurationError(
        f"ckpt_path: {ckpt_path} is of another run, {both[0]}, and this one is {both[1]}"
        f"{differ and f' ({differ})'}; give a checkpoint of this run, or begin another with the weights: "
        "ScaleRL.load_from_checkpoint(path)"
    )


def _neutral() -> dict[str, str]:
    """Return the name of the neutral choice of every axis that has one."""
    neutral = {axis: axis_class(axis).neutral for axis in AXES}
    return {axis: str(semantics["choice"]) for axis, semantics in neutral.items() if semantics is not None}
