"""Continuation of runs: decides whether a fit continues the run of the module's last fit.

The inputs are the resolved settings of a fit, and how the last fit ended. If the two fits do not belong to the same
run, an error names the differences.
"""

from __future__ import annotations

from typing import Any

from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_scalerl.checks import ConfigurationError
from sweeps.run.interruption import RunInterruptedError


class Continuation:
    """Record of a module's last fit: its settings, and how it ended.

    Attributes:
        run_settings: settings, choices, seed and task; two fits with equal values belong to the same run. None before
            the first fit.
        failure: class name of the error that ended the last fit; None if it finished or was interrupted.
    """

    def __init__(self) -> None:
        self.run_settings: dict[str, Any] | None = None
        self.failure: str | None = None
        self._training = False

    def resumes(self, run_settings: dict[str, Any], steps: int) -> bool:
        """Return whether a fit with these settings continues the last one, which has trained `steps` steps.

        Raises:
            ConfigurationError: settings, choices, task or seed differ, so that it would be another run.
        """
        if self.run_settings is None or steps == 0:
            return False
        if self.failure is not None:
            return False  # after a failure a fit needs a checkpoint, which `require_checkpoint_after_failure` checks
        changed = sorted(key for key in run_settings if run_settings[key] != self.run_settings[key])
        if changed:
            raise ConfigurationError(
                f"fit: this module has trained {steps} steps, and {', '.join(changed)} would change now; "
                "another run begins with another module: ScaleRL(module.policy.model, tokenizer=module.tokenizer, ...)"
            )
        return True

    def require_checkpoint_after_failure(self, ckpt_path: Any) -> None:
        """Refuse to fit again after a failed fit, unless a checkpoint is given.

        Raises:
            ConfigurationError: the last fit of this module failed, and no checkpoint is given to continue from.
        """
        if self.failure is not None and ckpt_path is None:
            raise ConfigurationError(
                f"fit: this module's last fit ended with {self.failure}; go on from a checkpoint, fit(ckpt_path=...), "
                "or begin with another module"
            )
        self.failure = None

    def fit_began(self) -> None:
        """Record that training has started: from now on an error leaves the module in an inconsistent state."""
        self._training = True

    def fit_ended(self, error: BaseException | None = None) -> None:
        """Record how the fit ended. After an error other than a clean interruption, the next fit needs a checkpoint."""
        if self._training and error is not None and not isinstance(error, RunInterruptedError | SIGTERMException):
            self.failure = type(error).__name__
        self._training = False
