"""Events of a rollout stream and the state of its virtual clock."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_scalerl.generator.base import StepReport


@dataclass(frozen=True)
class Event:
    """Event of a rollout stream.

    Attributes:
        kind: `admit` (a group was admitted), `decode` (every rollout in flight gets a token), `answer` (environments
            have answered), `finish` (a rollout was graded), `batch` (a batch went to the trainer), `trained` (an
            optimizer step ended) or `publish` (weights went to the generator).
        time_s: seconds on the driver's clock: virtual, or monotonic in a live run.
        report: the generator's report, for `decode`.
    """

    kind: str
    time_s: float
    report: StepReport | None = None


@dataclass
class VirtualClock:
    """State of trainer and generator, in seconds of virtual time.

    Attributes:
        now_s: time of the last event.
        trainer_until_s: end of the trainer's current or last step.
        trainer_busy_s: total work of the trainer, the current step included.
        generator_until_s: end of the generator's current or last step.
        generator_from_s: earliest start of the generator's next step (until then new weights are arriving).
        generator_busy_s: total work of the generator, the current step included.
        generator_step_s: duration of the generator's current or last step.
    """

    now_s: float = 0.0
    trainer_until_s: float = 0.0
    trainer_busy_s: float = 0.0
    generator_until_s: float = 0.0
    generator_from_s: float = 0.0
    generator_busy_s: float = 0.0
    generator_step_s: float = 0.0
