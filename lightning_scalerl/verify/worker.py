"""Verifier process, started by `pool`: grades one completion or group at a time.

Grading happens in the main thread, because math-verify and others limit their time with SIGALRM, which only works
there. If that fails, the pool kills the process. The process does not import torch unless the grader does.

Arguments: the descriptor of its pipe, the parent's process id, and the descriptor of a file with the pickled grader.
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
    """Grade completions until the pool closes its end of the pipe."""
    # A grader that hangs would never read the end of the pipe.
    die_with_parent(int(sys.argv[2]))
    os.dup2(2, 1)  # prints of a reward function go to stderr, not into the run's output
    connection: Connection[Any, Any] = Connection(int(sys.argv[1]))
    with os.fdopen(int(sys.argv[3]), "rb") as memory_file:
        path, memory_gib, pickled = pickle.load(memory_file)
    # The trainer's path, so that the grader's modules are found here as well.
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
        # A tuple holds the completions of one group.
        connection.send(attempt_group(grader, sample) if isinstance(sample, tuple) else attempt(grader, sample))


if __name__ == "__main__":
    main()
