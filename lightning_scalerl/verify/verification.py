"""Settings of verification: processes, timeouts, and the treatment of completions that cannot be graded."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol

from lightning_scalerl.checks import CannotGoOnError, ConfigurationError, positive
from lightning_scalerl.prompt import Prompt
from lightning_scalerl.verify.grade import Grader, Known, Outcome, Sample
from lightning_scalerl.verify.inline import InlineVerifiers
from lightning_scalerl.verify.pool import VerifierPool

# The share of errors is taken over so many outcomes, and over no fewer than `FEW`.
WINDOW, FEW = 1000, 100
ON_ERROR = ("stop", "drop", "zero")
# Errors that are shown; of later ones every so many.
SHOWN, TOLD_EVERY = 3, 100
# Batches in a row without a score, of abstentions, after which a run ends.
EMPTY = 8

log = logging.getLogger(__name__)


class RewardError(CannotGoOnError):
    """Raised when too many completions cannot be graded; it names prompts and errors."""


class Verifiers(Protocol):
    """Protocol of verifiers: a pool of processes, or the calling process."""

    def submit(self, sample: Sample) -> int:
        """Queue a completion for grading; return its ticket."""
        ...

    def submit_group(self, samples: Sequence[Sample]) -> Sequence[int]:
        """Queue the completions of a group, to be graded by one call of a grader that needs a group."""
        ...

    def wait(self, ticket: int) -> Outcome:
        """Return the outcome of a ticket, once, as soon as there is one."""
        ...

    def done(self) -> Sequence[tuple[int, Outcome]]:
        """Return all outcomes that were not fetched, with their tickets."""
        ...

    def forget(self, tickets: Iterable[int]) -> None:
        """Drop the outcomes of these tickets."""
        ...

    def close(self) -> None:
        """End all processes that it has started."""
        ...


def submit_bundle(verifiers: Verifiers, samples: Sequence[Sample]) -> Sequence[int]:
    """Queue what is graded together: one completion, or all of a group; return the tickets."""
    return [verifiers.submit(samples[0])] if len(samples) == 1 else verifiers.submit_group(samples)


@dataclass(frozen=True)
class Verification:
    """Settings for where and how verifiers run; a grade is a score, an abstention or an infrastructure error.

    Args:
        workers: number of processes; 0 for the trainer's own, where nothing can stop a verifier that hangs.
        timeout_s: wall-clock seconds for one attempt.
        memory_gib: data that a worker may hold, in GiB; None for no limit.
        retries: number of further attempts after an error.
        on_error: treatment of a completion that could not be graded: "drop" as if it had not been sampled, "zero" for a
            reward of 0, "stop" to end the run.
        max_error_share: share of errors in the last 1000 completions that ends the run, whatever `on_error` says.
    """

    neutral: ClassVar[Mapping[str, Any] | None] = {
        "choice": "Verification", "timeout_s": 10.0, "memory_gib": 4.0, "retries": 1, "on_error": "drop",
        "max_error_share": 0.1,
    }  # fmt: skip
    remarks: ClassVar[tuple[str, ...]] = ("workers",)

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
        """Start verifiers with this grader; a `trusted` one runs in the trainer's own process.

        Raises:
            ConfigurationError: a grader may take longer than it is given.
        """
        longest_s = float(getattr(grader, "longest_s", 0.0))
        if longest_s > self.timeout_s:
            raise ConfigurationError(
                f"verify.timeout_s: {self.timeout_s:g} is less than the {longest_s:g} s that the task's verifiers may "
                "take by their own limits (task.sandbox.wall_s, and what a start takes); raise it or lower those"
            )
        if trusted or self.workers == 0:
            return InlineVerifiers(grader, self.retries)
        return VerifierPool(grader, self.workers, self.timeout_s, self.retries, self.memory_gib)


class ErrorWatch:
    """Counts outcomes, and ends a run whose verifiers fail too often.

    Args:
        settings: gives the treatment of errors and the largest share of them.
    """

    def __init__(self, settings: Verification) -> None:
        self._settings = settings
        self._recent: deque[bool] = deque(maxlen=WINDOW)
        self._shown: list[str] = []
        self._counts = {"scored": 0, "abstained": 0, "errors": 0, "timeouts": 0, "retried": 0}
        self._seconds = 0.0
        self._slowest_s = 0.0
        self._empty = 0

    def observe(self, prompt: Prompt, outcome: Outcome) -> None:
        """Count one outcome, and raise if errors are too many.

        Raises:
            RewardError: an error, and they are to stop the run; or too many.
        """
        failed = outcome.kind == "error"
        self._recent.append(failed)
        self._counts[{"score": "scored", "abstain": "abstained", "error": "errors"}[outcome.kind]] += 1
        # The pool begins the reason of a time-out with these words (`VerifierPool._end_overruns`).
        self._counts["timeouts"] += failed and outcome.why.startswith("timed out")
        self._counts["retried"] += outcome.attempts > 1
        self._seconds += outcome.seconds
        self._slowest_s = max(self._slowest_s, outcome.seconds)
        if not failed:
            return
        self._shown.append(f"prompt {prompt.prompt_id!r}: {outcome.why}")
        if self._counts["errors"] <= SHOWN or self._counts["errors"] % TOLD_EVERY == 0:
            log.warning("verifier: error %d, %s", self._counts["errors"], self._shown[-1])
        del self._shown[:-SHOWN]
        errors = sum(self._recent)
        if self._settings.on_error == "stop":
            self._stop("one completion could not be graded, and verify.on_error=stop")
        # Over FEW outcomes at least: an error among the first ten is no share of a tenth yet.
        if errors > self._settings.max_error_share * max(FEW, len(self._recent)):
            self._stop(
                f"{errors} of the last {len(self._recent)} completions could not be graded, more than "
                f"verify.max_error_share={self._settings.max_error_share:g}"
            )

    def check_step(self, scored: int, errors: int, step: int) -> None:
        """Check a step's batch: one without any score, but with errors, would train on nothing.

        Raises:
            RewardError: there were errors in it, and no score; or none had one for many steps.
        """
        self._empty = 0 if scored else self._empty + 1
        if self._empty >= EMPTY:
            raise RewardError(
                f"reward: for {EMPTY} steps no completion has had a score, up to step {step}: the verifier abstains"
            )
        if not scored and errors:
            self._stop(f"of the batch of step {step} no completion was graded")

    def _stop(self, why: str) -> None:
        raise RewardError(f"reward: {why} ({'; '.join(self._shown)}); mend the verifier, then the same command goes on")

    @property
    def last_errors(self) -> Sequence[str]:
        """Latest errors, one line each."""
        return tuple(self._shown)

    def metrics(self) -> dict[str, float]:
        """Return counts since the run's beginning, and the graders' own seconds."""
        graded = max(1, sum(self._counts[name] for name in ("scored", "abstained", "errors")))
        return {
            **{f"verify/{name}": float(count) for name, count in self._counts.items()},
            "time/verify_mean_s": self._seconds / graded,
            "time/verify_slowest_s": self._slowest_s,
            "time/verify_total_s": self._seconds,
        }

    def state_dict(self) -> dict[str, Any]:
        """Return all counts, for a checkpoint."""
        return {
            "recent": list(self._recent),
            "shown": list(self._shown),
            "counts": dict(self._counts),
            "seconds": [self._seconds, self._slowest_s],
            "empty": self._empty,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore all counts from a checkpoint."""
        self._recent = deque(state["recent"], maxlen=WINDOW)
        self._shown = list(state["shown"])
        self._counts |= state["counts"]
        self._seconds, self._slowest_s = state["seconds"]
        self._empty = state.get("empty", 0)


def check_verifiers(verifiers: Verifiers, known: Sequence[Known], passes: Callable[[Outcome], bool]) -> str:
    """Try the verifiers before the first step, in the processes that will grade: right must pass, wrong must not.

    Args:
        verifiers: the verifiers that will grade the run.
        known: completions known to be right or wrong.
        passes: whether an outcome counts as a pass.

    Returns:
        One line on what was tried.

    Raises:
        ConfigurationError: the verifier calls right wrong or wrong right, or cannot grade.
    """
    if not known:
        return "verifier: not tried beforehand, for no completion is known to be right or wrong"
    # All before any is waited for, so that workers grade them in parallel.
    tickets = [verifiers.submit(each.sample) for each in known]
    for each, ticket in zip(known, tickets, strict=True):
        outcome = verifiers.wait(ticket)
        passed = outcome.kind == "score" and passes(outcome)
        said = {"score": f"rewards it with {outcome.reward:g}", "abstain": "abstains"}.get(outcome.kind, outcome.why)
        if outcome.kind == "error" or passed != each.right:
            shown = " ".join(each.sample.completion.split())[-120:]
            raise ConfigurationError(
                f"task: its verifier is wrong before the first step: prompt {each.sample.prompt.prompt_id!r}, a "
                f"completion known to be {'right' if each.right else 'wrong'} ({shown!r}): {said}"
            )
    right = sum(each.right for each in known)
    return f"verifier: {right} completions known to be right and {len(known) - right} known to be wrong were told apart"
