"""Kinds of failure of a member, and whether a retry can help.

Preemption, a time limit and a lost node do not depend on the recipe, so the member continues from its checkpoint. An
error in the recipe's own code would recur, so it is not retried.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Mapping

from sweeps.errors import UserError
from sweeps.executor.error_signatures import classify_exception
from sweeps.redact import redact

# By kind: description, and default number of retries (None for no limit).
KINDS: Mapping[str, tuple[str, int | None]] = {
    "error": ("an error of the program or its configuration", 0),
    "out_of_memory": ("out of memory", 1),
    "disk_full": ("no space left on the disk", 0),
    "preempted": ("preempted", None),
    "time_limit": ("the job's time limit", None),
    "gave_up": ("the chain of jobs was given up", 0),
    "node": ("the node failed", 5),
    "hang": ("no sign of life for a long time", 3),
    "gpu": ("a GPU or its driver failed, or is not there", 3),
    "storage": ("a file system failed on the node", 5),
    "collective": ("a rank waited too long for another rank", 3),
    "network": ("the hub or the network did not answer", 5),
    "killed": ("killed from outside", 2),
    "duplicate": ("another copy of the job is running", None),
    "launch": ("the job ended before the member began", 1),
    "half_submitted": ("the controller ended while it submitted the job", None),
    "lost": ("the scheduler no longer knows the job", 5),
    "cancelled": ("cancelled", 0),
    "stopped": ("stopped by its study", 0),
    "outgrown": ("the budget was raised while the job ran", 3),
}

# After a failure of these kinds, the next attempt avoids the node.
BLAMES_NODE = frozenset({"node", "killed", "launch", "hang", "gpu", "storage", "collective"})

# After a member ran out of host memory, its next attempt requests this many times as much.
MEMORY_GROWTH = 1.5

# A member is given up after this many attempts in a row without a new checkpoint.
MAX_IDLE_ATTEMPTS = 5


def retries(changes: Mapping[str, int | None] | None = None) -> dict[str, int | None]:
    """Return the number of retries by kind of failure. `changes` replace the defaults of single kinds.

    Raises:
        UserError: a kind is unknown, or a number is below 0.
    """
    policy = {kind: number for kind, (_, number) in KINDS.items()}
    for kind, number in (changes or {}).items():
        if kind not in policy:
            raise UserError(f"retries.{kind}: no such reason for a failure; valid: {', '.join(KINDS)}")
        if number is not None and (isinstance(number, bool) or not isinstance(number, int) or number < 0):
            raise UserError(f"retries.{kind}: {number!r} must be a whole number from 0 on, or null for no limit")
        policy[kind] = number
    return policy


NO_RETRIES: dict[str, int | None] = dict.fromkeys(KINDS, 0)


def may_retry(policy: Mapping[str, int | None], kind: str, retries_used: Mapping[str, int], excused: int = 0) -> bool:
    """Return whether a member may be retried after a failure of this kind.

    Args:
        policy: allowed number of retries, by kind; None for no limit.
        kind: kind of this failure.
        retries_used: number of retries so far, by kind of failure.
        excused: number of failures of this kind, including this one, that do not count because a node is to blame.
    """
    limit = policy.get(kind, 0)
    return limit is None or (limit > 0 and retries_used.get(kind, 0) - excused < limit)


def kind_of(error: BaseException) -> str:
    """Return the kind of failure of an exception that ended a member; `error` if no pattern matches.

    In the chain of causes, the outermost exception that matches a pattern decides. Exception: a network failure that
    was raised explicitly (`raise from`) from an error of the program counts as that error. For example, the hub has
    answered, or offline mode forbids the request.
    """
    result: str | None = None
    for link, explicit in _chain(error):
        kind = classify_exception(link)
        if result is None or (result == "network" and kind == "error" and explicit):
            result = kind
    return result or "error"


def _chain(error: BaseException) -> Iterator[tuple[BaseException, bool]]:
    """Yield an exception and its causes, each with a flag: whether all links up to it are explicit (`raise from`)."""
    seen: list[BaseException] = []
    link: BaseException | None = error
    explicit = True
    while link is not None and link not in seen:
        yield link, explicit
        seen.append(link)
        explicit = explicit and link.__cause__ is not None
        link = link.__cause__ or link.__context__


def failure_text(error: BaseException) -> str:
    """Return the text about a member's error for its log: the traceback, redacted.

    If the error has the attribute `is_explained`, it is only the error's message. Such an error reports that a user's
    program failed: the program's own output is in the log already, and our traceback would hide its last lines.
    """
    if getattr(error, "is_explained", False):
        return redact(f"{error}\n")
    return redact("".join(traceback.format_exception(error)))


def first_line(error: BaseException) -> str:
    """Format an exception as one line with type and message, of at most 500 characters."""
    message = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {message}"[:500] if message else type(error).__name__
