"""Settings of verification: processes, timeouts, and how to treat completions that cannot be graded."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol

from lightning_scalerl.checks import CannotGoOnError, ConfigurationError, positive
from lightning_scalerl.rollouts.grade import Grader, Known, Outcome, Sample
from lightning_scalerl.rollouts.prompt import Prompt
from lightning_scalerl.verify.inline import InlineVerifiers
from lightning_scalerl.verify.pool import VerifierPool

# The error rate is the fraction of errors among the last `WINDOW` outcomes. With fewer than `MIN_OUTCOMES` outcomes,
# the number of errors is divided by `MIN_OUTCOMES`.
WINDOW, MIN_OUTCOMES = 1000, 100
ON_ERROR = ("stop", "drop", "zero")
# The first `SHOWN` errors are logged, and then every `LOGGED_EVERY`-th one.
SHOWN, LOGGED_EVERY = 3, 100
# A run ends after this many consecutive batches in which no completion has a score.
MAX_EMPTY_STEPS = 8

log = logging.getLogger(__name__)


class RewardError(CannotGoOnError):
    """Raised when too many completions cannot be graded; the message names prompts and errors."""


class Verifiers(Protocol):
    """Protocol of verifiers: a pool of processes, or the calling process.

    A ticket is the number by which the outcome of one completion is fetched.
    """

    def submit(self, sample: Sample) -> int:
        """Queue a completion for grading and return its ticket."""

    def submit_group(self, samples: Sequence[Sample]) -> Sequence[int]:
        """Queue the completions of a group, to be graded by one call; return their tickets."""

    def wait(self, ticket: int) -> Outcome:
        """Block until a ticket has an outcome and return it. An outcome can be fetched once."""

    def done(self) -> Sequence[tuple[int, Outcome]]:
        """Return (ticket, outcome) for all outcomes that were not fetched yet, without blocking."""

    def forget(self, tickets: Iterable[int]) -> None:
        """Drop the outcomes of these tickets."""

    def close(self) -> None:
        """End all verifier processes."""


def submit_bundle(verifiers: Verifiers, samples: Sequence[Sample]) -> Sequence[int]:
    """Queue one completion, or a whole group to be graded by one call; return the tickets."""
    return [verifiers.submit(samples[0])] if len(samples) == 1 else verifiers.submit_group(samples)


@dataclass(frozen=True)
class Verification:
    """Settings of verification: where verifiers run, and how errors are treated.

    Args:
        workers: number of verifier processes; 0 to grade in the trainer's process, where a verifier that hangs cannot
            be stopped.
        timeout_s: wall-clock timeout of one attempt.
        memory_gib: limit on a worker's data segment in GiB; None for no limit.
        retries: number of further attempts after an error.
        on_error: treatment of a completion that could not be graded: "drop" as if it had not been sampled, "zero" for a
            reward of 0, "stop" to end the run.
        max_error_share: largest allowed fraction of errors among the last 1000 completions (0 to 1); above it the run
            ends, for any `on_error`. Errors among fewer than 100 completions are divided by 100.
    """

    neutral: ClassVar[Mapping[str, Any] | None] = {
        "choice": "Verification", "timeout_s": 10.0, "memory_gib": 4.0, "retries": 1, "on_error": "drop",
        "max_error_share": 0.1,
    }  # fmt: skip
    operational_parameters: ClassVar[tuple[str, ...]] = ("workers",)

    workers: int = 2
    timeout_s: float = 10.0
    memory_gib: float | None = 4.0
    retries: int = 1
    on_error: Literal["stop", "drop", "zero"] = "drop"
    max_error_share: float = 0.1

    def __post_init__(self) -> None:
        for name in ("workers", "retries"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ConfigurationError(f"verify.{name}: {value!r} must be a whole number, 0 or more")
        positive("verify.timeout_s", self.timeout_s)
        if self.memory_gib is not None:
            positive("verify.memory_gib", self.memory_gib)
        if self.on_error not in ON_ERROR:
            raise ConfigurationError(f"verify.on_error: {self.on_error!r} must be one of {', '.join(ON_ERROR)}")
        share = self.max_error_share
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share <= 1:
            raise ConfigurationError(f"verify.max_error_share: {share!r} must be a share, 0 to 1")

    def verifiers(self, grader: Grader, trusted: bool) -> Verifiers:
        """Start verifiers with this grader; a `trusted` grader runs in the trainer's process.

        Raises:
            ConfigurationError: `timeout_s` is shorter than the time that the grader allows itself (`longest_s`).
        """
        longest_s = float(getattr(grader, "longest_s", 0.0))
        if longest_s > self.timeout_s:
            raise ConfigurationError(
                f"verify.timeout_s: {self.timeout_s:g} is less than the {longest_s:g} s that the task's verifiers may "
                "take by their own limits (task.sandbox.wall_s, a judge's timeout_s, and what a start takes); raise it "
                "or lower those"
            )
        if trusted or self.workers == 0:
            return InlineVerifiers(grader, self.retries)
        return VerifierPool(grader, self.workers, self.timeout_s, self.retries, self.memory_gib)


class ErrorWatch:
    """Counts outcomes, and ends a run whose verifiers fail too often.

    Args:
        settings: settings of verification.
    """

    def __init__(self, settings: Verification) -> None:
        self._settings = settings
        self._recent_failures: deque[bool] = deque(maxlen=WINDOW)
        self._latest_errors: list[str] = []
        self._counts = {"scored": 0, "abstained": 0, "errors": 0, "timeouts": 0, "retried": 0}
        self._total_s = 0.0
        self._slowest_s = 0.0
        self._empty_steps = 0

    def observe(self, prompt: Prompt, outcome: Outcome) -> None:
        """Count one outcome.

        Raises:
            RewardError: the outcome is an error and `on_error` is "stop", or the error rate is too high.
        """
        failed = outcome.kind == "error"
        self._recent_failures.append(failed)
        self._counts[{"score": "scored", "abstain": "abstained", "error": "errors"}[outcome.kind]] += 1
        # The reason for a timeout begins with these words (`VerifierPool._handle_timeouts`).
        self._counts["timeouts"] += failed and outcome.why.startswith("timed out")
        self._counts["retried"] += outcome.attempts > 1
        self._total_s += outcome.seconds
        self._slowest_s = max(self._slowest_s, outcome.seconds)
        if not failed:
            return
        self._latest_errors.append(f"prompt {prompt.prompt_id!r}: {outcome.why}")
        if self._counts["errors"] <= SHOWN or self._counts["errors"] % LOGGED_EVERY == 0:
            log.warning("verifier: error %d, %s", self._counts["errors"], self._latest_errors[-1])
        del self._latest_errors[:-SHOWN]
        errors = sum(self._recent_failures)
        if self._settings.on_error == "stop":
            self._stop("one completion could not be graded, and verify.on_error=stop")
        # Divide by at least MIN_OUTCOMES: one error among the first ten outcomes does not make a rate of a tenth.
        if errors > self._settings.max_error_share * max(MIN_OUTCOMES, len(self._recent_failures)):
            self._stop(
                f"{errors} of the last {len(self._recent_failures)} completions could not be graded, more than "
                f"verify.max_error_share={self._settings.max_error_share:g}"
            )

    def check_step(self, scored: int, errors: int, step: int) -> None:
        """Check that a step's batch has scores, because without scores the step would train on nothing.

        Raises:
            RewardError: the batch has errors and no score, or no batch has had a score for `MAX_EMPTY_STEPS` steps.
        """
        self._empty_steps = 0 if scored else self._empty_steps + 1
        if self._empty_steps >= MAX_EMPTY_STEPS:
            raise RewardError(
                f"reward: for {MAX_EMPTY_STEPS} steps no completion has had a score, up to step {step}: the "
                "verifier abstains"
            )
        if not scored and errors:
            self._stop(f"of the batch of step {step} no completion was graded")

    def _stop(self, reason: str) -> None:
        raise RewardError(
            f"reward: {reason} ({'; '.join(self._latest_errors)}); mend the verifier, then the same command goes on"
        )

    @property
    def last_errors(self) -> Sequence[str]:
        """Latest errors, one line per error."""
        return tuple(self._latest_errors)

    def metrics(self) -> dict[str, float]:
        """Return the counts of outcomes since the beginning of the run, and grading times in seconds."""
        graded = max(1, sum(self._counts[name] for name in ("scored", "abstained", "errors")))
        return {
            **{f"verify/{name}": float(count) for name, count in self._counts.items()},
            "time/verify_mean_s": self._total_s / graded,
            "time/verify_slowest_s": self._slowest_s,
            "time/verify_total_s": self._total_s,
        }

    def state_dict(self) -> dict[str, Any]:
        """Return all counts, for a checkpoint."""
        return {
            "recent": list(self._recent_failures),
            "shown": list(self._latest_errors),
            "counts": dict(self._counts),
            "seconds": [self._total_s, self._slowest_s],
            "empty": self._empty_steps,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore all counts from a checkpoint."""
        self._recent_failures = deque(state["recent"], maxlen=WINDOW)
        self._latest_errors = list(state["shown"])
        self._counts |= state["counts"]
        self._total_s, self._slowest_s = state["seconds"]
        self._empty_steps = state.get("empty", 0)


def check_verifiers(verifiers: Verifiers, known: Sequence[Known], passes: Callable[[Outcome], bool]) -> str:
    """Test the verifiers before the first step: completions known to be right must pass, and wrong ones must not.

    Args:
        verifiers: the verifiers of the run, so that the test happens in their processes.
        known: completions known to be right or wrong.
        passes: returns whether an outcome counts as a pass.

    Returns:
        One line about the result of the test.

    Raises:
        ConfigurationError: a right completion does not pass, a wrong one passes, or a completion cannot be graded.
    """
    if not known:
        return "verifier: not tested before the first step, because no completion is known to be right or wrong"
    # Submit all before waiting for any, so that workers grade them in parallel.
    tickets = [verifiers.submit(completion.sample) for completion in known]
    for completion, ticket in zip(known, tickets, strict=True):
        outcome = verifiers.wait(ticket)
        passed = outcome.kind == "score" and passes(outcome)
        result = {"score": f"rewards it with {outcome.reward:g}", "abstain": "abstains"}.get(outcome.kind, outcome.why)
        if outcome.kind == "error" or passed != completion.right:
            excerpt = " ".join(completion.sample.completion.split())[-120:]
            raise ConfigurationError(
                f"task: its verifier is wrong before the first step: prompt {completion.sample.prompt.prompt_id!r}, a "
                f"completion known to be {'right' if completion.right else 'wrong'} ({excerpt!r}): {result}"
            )
    right_count = sum(completion.right for completion in known)
    wrong_count = len(known) - right_count
    return (
        f"verifier: graded all test completions correctly ({right_count} known to be right, {wrong_count} known to be "
        "wrong)"
    )
