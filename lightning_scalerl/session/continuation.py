"""Continuation of runs: whether a fit continues the module's last one.

The input is the resolved settings of a fit and how the last one ended; the result is whether both are of one run, or an
error that says what differs.
"""

from __future__ import annotations

from typing import Any

from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_scalerl.checks import ConfigurationError
from sweeps.run.interruption import RunInterruptedError


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
