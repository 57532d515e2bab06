"""Verifiers in the trainer's process, for trusted graders. They grade completions immediately."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from lightning_scalerl.rollouts.grade import Grader, Outcome, Sample
from lightning_scalerl.verify.grade_once import attempt, attempt_group
from sweeps.run.activity import activity


class InlineVerifiers:
    """Grades completions in the calling thread, where a grader that hangs cannot be stopped.

    Args:
        grader: the grader.
        retries: number of further attempts after an error.
    """

    def __init__(self, grader: Grader, retries: int = 1) -> None:
        self._grader = grader
        self._retries = retries
        self._outcomes: dict[int, Outcome] = {}
        self._next_ticket = 0

    def submit(self, sample: Sample) -> int:
        """Grade a completion and return the ticket of its outcome."""
        ticket, self._next_ticket = self._next_ticket, self._next_ticket + 1
        activity.note("grade")
        outcome = attempt(self._grader, sample)
        while outcome.kind == "error" and outcome.attempts <= self._retries:
            retry = attempt(self._grader, sample)
            outcome = _merge_attempts(outcome, retry)
        self._outcomes[ticket] = outcome
        return ticket

    def submit_group(self, samples: Sequence[Sample]) -> list[int]:
        """Grade the completions of a group by one call and return the tickets of their outcomes."""
        activity.note("grade")
        outcomes = attempt_group(self._grader, samples)
        for _ in range(self._retries):
            if not any(outcome.kind == "error" for outcome in outcomes):
                break
            outcomes = list(map(_merge_attempts, outcomes, attempt_group(self._grader, samples)))
        tickets = list(range(self._next_ticket, self._next_ticket + len(samples)))
        self._next_ticket += len(samples)
        self._outcomes |= dict(zip(tickets, outcomes, strict=True))
        return tickets

    def wait(self, ticket: int) -> Outcome:
        """Return the outcome of a ticket. It can be fetched once."""
        return self._outcomes.pop(ticket)

    def done(self) -> Sequence[tuple[int, Outcome]]:
        """Return (ticket, outcome) for all outcomes that were not fetched yet."""
        fetched = list(self._outcomes.items())
        self._outcomes.clear()
        return fetched

    def forget(self, tickets: Iterable[int]) -> None:
        """Drop the outcomes of these tickets."""
        for ticket in tickets:
            self._outcomes.pop(ticket, None)

    def close(self) -> None:
        """Do nothing: there are no processes to end."""


def _merge_attempts(earlier: Outcome, later: Outcome) -> Outcome:
    """Return the later attempt's outcome, with the time and the charges of all attempts added up."""
    return replace(
        later,
        seconds=earlier.seconds + later.seconds,
        attempts=earlier.attempts + 1,
        charges=earlier.charges + later.charges,
    )
