"""`python -m sweeps` is `scalerl`; `python -m sweeps job FOLDER` is called by batch scripts of earlier versions.

Queued scripts may be older than this version, so this name must stay.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    if sys.argv[1:2] == ["job"]:
        from sweeps.executor.slurm.job import run

        run(sys.argv[2:])
    from sweeps.cli.main import main

    sys.exit(main())
