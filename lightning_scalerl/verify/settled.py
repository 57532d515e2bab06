"""Verifiers in front of others: an outcome that is settled already, as by an environment, needs no verifier."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from lightning_scalerl.rollouts.grade import Outcome, Sample
from lightning_scalerl.verify.verification import Verifiers, submit_bundle


class SettledFirst:
    """Returns settled outcomes (`Sample.settled`), and passes other samples to the verifiers.

    Args:
        verifiers: grade the samples without an outcome.
    """

    def __init__(self, verifiers: Verifiers) -> None:
        self._verifiers = verifiers
        self._settled: dict[int, Outcome] = {}
        self._next = -1  # our tickets are below 0, the verifiers' are not

    def submit(self, sample: Sample) -> int:
        """Return a ticket for a sample's outcome."""
        if sample.settled is None:
            return self._verifiers.submit(sample)
        ticket = self._next
        self._next -= 1
        self._settled[ticket] = sample.settled
        return ticket

    def submit_group(self, samples: Sequence[Sample]) -> Sequence[int]:
        """Return tickets for a group; its samples without an outcome are graded together."""
        if not (open_ones := [sample for sample in samples if sample.settled is None]):
            return [self.submit(sample) for sample in samples]
        graded = iter(submit_bundle(self._verifiers, open_ones))
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
