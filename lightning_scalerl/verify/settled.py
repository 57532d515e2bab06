"""Wrapper around verifiers, for samples whose outcome an environment has already decided (settled outcomes)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from lightning_scalerl.rollouts.grade import Outcome, Sample
from lightning_scalerl.verify.verification import Verifiers, submit_bundle


class SettledFirst:
    """Returns outcomes that are already settled (`Sample.settled`), and passes all other samples to verifiers.

    Args:
        verifiers: grade the samples without a settled outcome.
    """

    def __init__(self, verifiers: Verifiers) -> None:
        self._verifiers = verifiers
        self._settled: dict[int, Outcome] = {}
        self._next_ticket = -1  # tickets of settled outcomes are negative; the verifiers' tickets are not

    def submit(self, sample: Sample) -> int:
        """Queue a sample for grading unless its outcome is settled; return its ticket."""
        if sample.settled is None:
            return self._verifiers.submit(sample)
        ticket = self._next_ticket
        self._next_ticket -= 1
        self._settled[ticket] = sample.settled
        return ticket

    def submit_group(self, samples: Sequence[Sample]) -> Sequence[int]:
        """Queue a group and return all its tickets. Samples without a settled outcome are graded together."""
        if not (unsettled := [sample for sample in samples if sample.settled is None]):
            return [self.submit(sample) for sample in samples]
        graded = iter(submit_bundle(self._verifiers, unsettled))
        return [next(graded) if sample.settled is None else self.submit(sample) for sample in samples]

    def wait(self, ticket: int) -> Outcome:
        """Block until a ticket has an outcome and return it."""
        return self._settled.pop(ticket) if ticket < 0 else self._verifiers.wait(ticket)

    def done(self) -> Sequence[tuple[int, Outcome]]:
        """Return (ticket, outcome) for all outcomes that were not fetched yet, without blocking."""
        settled = list(self._settled.items())
        self._settled.clear()
        return [*settled, *self._verifiers.done()]

    def forget(self, tickets: Iterable[int]) -> None:
        """Drop the outcomes of these tickets."""
        tickets = list(tickets)
        for ticket in tickets:
            self._settled.pop(ticket, None)
        self._verifiers.forget(ticket for ticket in tickets if ticket >= 0)

    def close(self) -> None:
        """End all verifier processes."""
        self._verifiers.close()
