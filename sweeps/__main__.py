"""`python -m sweeps` is `scalerl`; `python -m sweeps job FOLDER` is what batch scripts of earlier versions call.

Scripts that wait in a queue outlive the version that wrote them: this name stays.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    if sys.argv[1:2] == ["job"]:
        from sweeps.executor.slurm.job import run

        run(sys.argv[2:])
    from sweeps.cli.main import main

    sys.exit(main())
