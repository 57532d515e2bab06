"""Exclude bad nodes from a study, judged by the failures in its ledger.

A single failure may be the member's own fault. But a node on which two members failed within an hour is excluded for
the whole study, until one hour after its last failure. Failures on such a node do not count against the members'
retries. Exception: if every node that the study used in the last hour had the same failure, the nodes are not to
blame. Then no node is excluded for that failure, and it counts against the members.
"""

from __future__ import annotations

import logging
import re
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

# Two members that fail on a node within this time mark it as bad: long enough for one to run there after the other.
WINDOW_S = 3600.0
# A bad node is excluded for this long after its last failure: short enough that a repaired node is soon used again.
EXCLUDED_S = 3600.0
# A failure that occurred on every node is not blamed on the nodes if there are at least this many. A smaller number may
# all be bad by chance, for example two nodes of a rack.
MIN_NODES = 4
# Largest number of failures on bad nodes that do not count against a member's retries.
MAX_EXCUSED = 8
# Number of newest failures kept per node, because thousands of members may fail on a node within one poll.
STORED_FAILURES = 100

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class NodeFailure:
    """A member's failed attempt, and the node that may have caused the failure.

    Attributes:
        time: when it failed, in seconds.
        run: identity of the member.
        node: name of the node.
        kind: kind of the failure.
        cause: kind and reason of the failure, with numbers and paths masked, so that equal failures have equal causes.
        serial: serial number of the ledger entry.
    """

    time: float
    run: str
    node: str
    kind: str
    cause: str
    serial: int


class NodeBlacklist:
    """Failure history of a study's nodes, and the nodes to exclude because of it.

    Args:
        at_work: returns the names of the nodes on which members run now.
    """

    def __init__(self, at_work: Callable[[], Collection[str]] = tuple) -> None:
        self._at_work = at_work
        self._failures: dict[str, deque[NodeFailure]] = defaultdict(lambda: deque(maxlen=STORED_FAILURES))
        self._finished: dict[str, float] = {}  # by node, time at which a member last finished there
        self._serial = 0
        self._failures_reset_at: dict[
            str, int
        ] = {}  # by run, serial number of the newest entry whose failures no longer count
        self._announced: set[str] = set()  # excluded nodes that were logged

    def add_entry(self, entry: Mapping[str, Any]) -> None:
        """Update the history with one ledger entry."""
        self._serial += 1
        node, event, time = entry.get("node"), entry.get("event"), float(entry.get("time") or 0.0)
        if isinstance(node, str) and event == "finished":
            self._finished[node] = time
        elif isinstance(node, str) and event in ("retried", "failed"):
            kind = str(entry.get("kind"))
            cause = f"{kind}: {_masked(str(entry.get('reason')), node)}"
            self._failures[node].append(NodeFailure(time, entry["run"], node, kind, cause, self._serial))
        if event in ("finished", "failed"):
            self.reset_failures(entry["run"])

    def reset_failures(self, run: str) -> None:
        """Ignore all failures so far of a member that is done or given up: they do not count in a later launch."""
        self._failures_reset_at[run] = self._serial

    def excluded_nodes(self, now: float) -> tuple[str, ...]:
        """Return the nodes that are excluded at the time `now`, and log newly excluded ones."""
        universal = self._universal_causes(now)
        excluded = []
        for node, node_failures in sorted(self._failures.items()):
            times = [failure.time for failure in node_failures if self._is_blamed_on_node(failure, universal)]
            if times and now < max(times) + EXCLUDED_S:
                excluded.append(node)
        for node in set(excluded) - self._announced:
            last = self._failures[node][-1]
            _log.warning("%s is excluded for an hour: several members have failed on it (%s)", node, last.cause)
        self._announced = set(excluded)
        return tuple(excluded)

    def count_excused(self, run: str, now: float) -> dict[str, int]:
        """Count a member's failures blamed on nodes, by kind: at most one per node, and `MAX_EXCUSED` in all."""
        universal, since = self._universal_causes(now), self._failures_reset_at.get(run, 0)
        counts: dict[str, int] = {}
        for node_failures in self._failures.values():
            counted = [failure for failure in node_failures if failure.run == run and failure.serial > since]
            counted = [failure for failure in counted if self._is_blamed_on_node(failure, universal)]
            if counted and sum(counts.values()) < MAX_EXCUSED:
                counts[counted[0].kind] = counts.get(counted[0].kind, 0) + 1
        return counts

    def _is_blamed_on_node(self, failure: NodeFailure, universal: Collection[str]) -> bool:
        """Return whether another member failed on the same node within `WINDOW_S` of this failure.

        Failures whose cause is in `universal` do not count.
        """
        return failure.cause not in universal and any(
            other.run != failure.run and abs(other.time - failure.time) <= WINDOW_S and other.cause not in universal
            for other in self._failures[failure.node]
        )

    def _universal_causes(self, now: float) -> set[str]:
        """Return the causes of failures that occurred on all nodes used in the last hour (`MIN_NODES` or more)."""
        nodes_of: dict[str, set[str]] = defaultdict(set)
        for node, node_failures in self._failures.items():
            for failure in node_failures:
                if now - failure.time <= WINDOW_S:
                    nodes_of[failure.cause].add(node)
        widespread = {cause: nodes for cause, nodes in nodes_of.items() if len(nodes) >= MIN_NODES}
        if not widespread:
            return set()
        known = {node for node, time in self._finished.items() if now - time <= WINDOW_S} | set(self._at_work())
        known |= {node for nodes in nodes_of.values() for node in nodes}
        return {cause for cause, nodes in widespread.items() if nodes >= known}


def _masked(reason: str, node: str) -> str:
    """Mask the parts of a reason that differ between attempts: node, quoted texts, paths, numbers, hashes."""
    reason = re.sub(rf"(?<![\w.-]){re.escape(node)}(?![\w-])", "NODE", reason)
    reason = re.sub(r"'[^']*'|\"[^\"]*\"|(?<![\w.])/\S+", "...", reason)
    return re.sub(r"\b(?=[0-9a-f]*\d)[0-9a-f]{6,}\b|\d+", "#", reason)[:200]
