"""Events of a rollout stream, and their place in virtual time."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_scalerl.generator.base import StepReport


@dataclass(frozen=True)
class Event:
    """Event in a rollout stream, at `time_s` of virtual time.

    `kind`: `admit` a group; `decode` one token of everything in flight; `finish` a rollout; `batch` handed to the
    trainer; `trained` an optimizer step; `publish` weights to the generator.
    """

    kind: str
    time_s: float
    report: StepReport | None = None


@dataclass
class VirtualClock:
    """State of trainer and generator in seconds of virtual time.

    `now_s` is the last event; the trainer is busy until `trainer_until_s`, the generator until
    `generator_until_s`, and it may not start before `generator_from_s` (weights are arriving). `*_busy_s` add up
    what each has worked, work under way included; the generator's last step took `generator_step_s`.
    """

    now_s: float = 0.0
    trainer_until_s: float = 0.0
    trainer_busy_s: float = 0.0
    generator_until_s: float = 0.0
    generator_from_s: float = 0.0
    generator_busy_s: float = 0.0
    generator_step_s: float = 0.0
