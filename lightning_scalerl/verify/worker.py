"""Process of a verifier: one completion or group at a time in its main thread; `pool` starts it with two descriptors.

Its main thread, because math-verify and others stop themselves with SIGALRM, which works nowhere else. It is killed
from outside if that does not help. It needs no torch, unless what it grades with does.
"""

from __future__ import annotations

import os
import pickle
import resource
import sys
from multiprocessing.connection import Connection
from typing import Any

from sweeps.process import die_with_parent


def main() -> None:
    """Grade completions until the other end is closed."""
    die_with_parent(int(sys.argv[2]))
    os.dup2(2, 1)  # what a reward function prints is not the run's own output
    connection: Connection[Any, Any] = Connection(int(sys.argv[1]))
    with os.fdopen(int(sys.argv[3]), "rb") as handed:
        path, memory_gib, pickled = pickle.load(handed)
    # The trainer's own, so that the grader's modules are found where they were pickled.
    sys.path[:] = path
    if memory_gib is not None:
        limit = int(memory_gib * 2**30)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    try:
        import cloudpickle

        from lightning_scalerl.verify.grade_once import attempt, attempt_group

        grader = cloudpickle.loads(pickled)
        if hasattr(grader, "prepare"):
            grader.prepare()
    except BaseException as error:
        connection.send(f"{type(error).__name__}: {error}")
        return
    connection.send(None)
    while True:
        try:
            sample = connection.recv()
        except EOFError:
            return
        # Several are the completions of one group.
        connection.send(attempt_group(grader, sample) if isinstance(sample, tuple) else attempt(grader, sample))


if __name__ == "__main__":
    main()
