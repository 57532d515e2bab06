"""Exclusion of bad nodes from a study, by the failures of its members' attempts in the ledger.

A single failure may be the member's own fault. A node on which two members failed within an hour is excluded for the
whole study, until one hour after the last failure; then it is tried again. Attempts that failed there do not count
against the members. But if every node that the study used in the last hour failed in the same way, the nodes are not at
fault: none is excluded for it, and the attempts count.
"""

from __future__ import annotations

import logging
import re
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

# Time window: long enough for two members to run on a node, short enough that a repaired node is soon used again.
TOGETHER_S = 3600.0
OUT_S = 3600.0
# Fewer nodes than this may all be bad in the same way by chance, for example two nodes of a rack.
ALIKE = 4
# Largest number of attempts that a member may lose on bad nodes without counting them.
MOST_FREE = 8
# Number of newest failures kept per node: thousands of members may fail on a node within one poll.
REMEMBERED = 100

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Blame:
    """A member's failed attempt on a node, for a reason that may be the node's fault."""

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
        self._blames: dict[str, deque[Blame]] = defaultdict(lambda: deque(maxlen=REMEMBERED))
        self._finished: dict[str, float] = {}
        self._serial = 0
        self._ended: dict[str, int] = {}
        self._announced: set[str] = set()

    def note(self, entry: Mapping[str, Any]) -> None:
        """Update the history by one ledger entry."""
        self._serial += 1
        node, event, time = entry.get("node"), entry.get("event"), float(entry.get("time") or 0.0)
        if isinstance(node, str) and event == "finished":
            self._finished[node] = time
        elif isinstance(node, str) and event in ("retried", "failed"):
            kind = str(entry.get("kind"))
            cause = f"{kind}: {_masked(str(entry.get('reason')), node)}"
            self._blames[node].append(Blame(time, entry["run"], node, kind, cause, self._serial))
        if event in ("finished", "failed"):
            self.over(entry["run"])

    def over(self, run: str) -> None:
        """Record that a member is done or given up: its earlier failures do not count if it is launched again."""
        self._ended[run] = self._serial

    def out(self, now: float) -> tuple[str, ...]:
        """Return the nodes that are excluded at this time, and log newly excluded ones."""
        universal = self._of_no_node(now)
        excluded = []
        for node, blames in sorted(self._blames.items()):
            since = [blame.time for blame in blames if self._is_bad(blame, universal)]
            if since and now < max(since) + OUT_S:
                excluded.append(node)
        for node in set(excluded) - self._announced:
            last = self._blames[node][-1]
            _log.warning("%s is kept off for an hour: it has failed several members (%s)", node, last.cause)
        self._announced = set(excluded)
        return tuple(excluded)

    def excused(self, run: str, now: float) -> dict[str, int]:
        """Count a member's failed attempts that are blamed on nodes, by kind: one per node, at most `MOST_FREE`."""
        universal, since = self._of_no_node(now), self._ended.get(run, 0)
        counts: dict[str, int] = {}
        for blames in self._blames.values():
            failures = [blame for blame in blames if blame.run == run and blame.serial > since]
            failures = [blame for blame in failures if self._is_bad(blame, universal)]
            if failures and sum(counts.values()) < MOST_FREE:
                counts[failures[0].kind] = counts.get(failures[0].kind, 0) + 1
        return counts

    def _is_bad(self, blame: Blame, universal: Collection[str]) -> bool:
        """Return whether another member failed on the node within `TOGETHER_S`, for causes that are not universal."""
        return blame.cause not in universal and any(
            other.run != blame.run and abs(other.time - blame.time) <= TOGETHER_S and other.cause not in universal
            for other in self._blames[blame.node]
        )

    def _of_no_node(self, now: float) -> set[str]:
        """Return the causes of failure that occurred on every node used in the last hour, `ALIKE` nodes or more."""
        nodes_of: dict[str, set[str]] = defaultdict(set)
        for node, blames in self._blames.items():
            for blame in blames:
                if now - blame.time <= TOGETHER_S:
                    nodes_of[blame.cause].add(node)
        widespread = {cause: nodes for cause, nodes in nodes_of.items() if len(nodes) >= ALIKE}
        if not widespread:
            return set()
        known = {node for node, time in self._finished.items() if now - time <= TOGETHER_S} | set(self._at_work())
        known |= {node for nodes in nodes_of.values() for node in nodes}
        return {cause for cause, nodes in widespread.items() if nodes >= known}


def _masked(reason: str, node: str) -> str:
    """Normalize a reason by masking the parts that differ between attempts: node, paths, numbers, identities."""
    reason = re.sub(rf"(?<![\w.-]){re.escape(node)}(?![\w-])", "NODE", reason)
    reason = re.sub(r"'[^']*'|\"[^\"]*\"|(?<![\w.])/\S+", "...", reason)
    return re.sub(r"\b(?=[0-9a-f]*\d)[0-9a-f]{6,}\b|\d+", "#", reason)[:200]
