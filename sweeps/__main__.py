"""`python -m sweeps` is `scalerl`. Batch scripts of earlier versions, which may be queued, call `... job FOLDER`."""

from __future__ import annotations

import sys

if __name__ == "__main__":
    if sys.argv[1:2] == ["job"]:
        from sweeps.executor.slurm.job import run

        run(sys.argv[2:])
    from sweeps.cli.main import main

    sys.exit(main())
