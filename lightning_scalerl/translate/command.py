"""Entry point of `scalerl translate`, and the trainers that it supports."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from lightning_scalerl.checks import ConfigurationError, did_you_mean
from lightning_scalerl.translate.record import Run, Translation
from lightning_scalerl.translate.to_prime_rl import to_prime_rl
from lightning_scalerl.translate.to_skyrl import to_skyrl
from lightning_scalerl.translate.to_trl import to_trl
from lightning_scalerl.translate.to_verl import to_verl
from sweeps.errors import UserError

TRAINERS: Mapping[str, Callable[[Run], Translation]] = {
    "trl": to_trl,
    "verl": to_verl,
    "prime-rl": to_prime_rl,
    "skyrl": to_skyrl,
}


def translate(overrides: Sequence[str], to: str, folders: Sequence[str] = ()) -> Translation:
    """Translate a recipe into the settings of another trainer.

    Args:
        overrides: overrides of a run, as for `scalerl train`.
        to: the trainer, a key of `TRAINERS`.
        folders: the user's folders of configuration files, in addition to `conf/`.

    Raises:
        UserError: the overrides are invalid, or the trainer is unknown.
    """
    if to not in TRAINERS:
        suggestion = did_you_mean(to, list(TRAINERS))
        raise UserError(f"--to {to}: no such trainer{suggestion}; valid: {', '.join(TRAINERS)}")
    try:
        return TRAINERS[to](Run.of(list(overrides), list(folders)))
    except ConfigurationError as error:
        raise UserError(str(error)) from error
