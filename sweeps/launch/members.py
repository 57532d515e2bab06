"""Members of a study: their specifications and their ledger."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from sweeps.errors import UserError
from sweeps.launch.ledger import RUNS_DIR, Ledger, read_checked_spec
from sweeps.run.files import named_lines
from sweeps.run.lease import Lease, LeaseHeldError
from sweeps.run.spec import RunSpec, check_distinct

_log = logging.getLogger(__name__)

LEASE_NAME = "controller"


def take_lease(lease: Lease, subject: str) -> None:
    """Acquire a study's lease. Wait up to 2 s for it, because some processes hold it only briefly.

    Raises:
        UserError: another process runs the study; the message begins with `subject`.
    """
    try:
        lease.acquire(2.0)
    except LeaseHeldError as error:
        raise UserError(
            f"{subject} is being run by another process ({lease.holder()}); wait for it, or end it first"
        ) from error


class Members:
    """Members of a study, in `directory/runs/<identity>`, and the study's ledger.

    Args:
        directory: the study's folder, created when the study runs.
        specs: specifications of the members; duplicates are dropped.
    """

    def __init__(self, directory: Path, specs: Sequence[RunSpec]) -> None:
        self.directory = directory
        self.specs = check_distinct(specs)
        self.ledger = Ledger(directory)
        # Whether the members were read from the study's folder, into which several launches may have written.
        self.was_read = False

    @classmethod
    def read(cls, directory: Path) -> Self:
        """Read the study in a directory: its ledger and the members' specifications.

        Raises:
            UserError: there is no study, or a specification was changed after the launch.
        """
        study = cls(directory, [])
        study.was_read = True
        states = study.ledger.fold()
        if not states:
            raise UserError(f"{directory}: no ledger of a study here; give the folder that a --multirun wrote to")
        study.warn_of_damage()
        # `check_distinct` is not called: labels are distinct within one launch, but not over all launches into this
        # folder.
        known: dict[str, Any] = {}
        # An adopted run is a member only once it has finished, because it is never started here.
        members = {run: state for run, state in states.items() if not state.adopted or state.state == "finished"}
        study.specs = [read_checked_spec(directory / RUNS_DIR / run, state, known) for run, state in members.items()]
        return study

    def run_dir(self, spec: RunSpec) -> Path:
        """Return the folder that a member writes to, `runs/<identity>`."""
        return self.directory / RUNS_DIR / spec.run

    def warn_of_damage(self) -> None:
        """Log a warning with the numbers of ledger lines that cannot be read, if there are any."""
        if damaged := self.ledger.damaged():
            _log.warning(
                "%s: %s torn or damaged; entries that were only there are lost, except for members that have a folder",
                self.ledger.path,
                named_lines(damaged),
            )
