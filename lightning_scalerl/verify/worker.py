"""Verifier process, started by `pool`: grades one completion or group at a time.

Grading happens in the main thread, because graders may limit their time by signals, which only arrive there: SIGPROF in
`mathematics`, SIGALRM where a user's function calls math-verify. If such a limit fails, the pool kills the process. The
process does not import torch unless the grader does.
"""

from __future__ import annotations

from sweeps.process import begin_worker


def main() -> None:
    """Grade completions until the pool closes its end of the pipe."""
    connection, pickled = begin_worker()
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
