"""A whole scaling study on one CPU: what `make demo` runs.

Nothing here is special: the same four commands make any study.

    scalerl train --multirun experiment=demo
    scalerl rank outputs/demo
    scalerl report outputs/demo -o outputs/demo/report.html
    scalerl publish outputs/demo --mlflow sqlite:///outputs/demo/mlflow.db

Interrupted at any point, it continues where it was. Arguments are passed on to `scalerl train`.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

OUTPUT = Path("outputs/demo")
SCALERL = str(Path(sys.executable).with_name("scalerl"))
EXPECTED = "about 13 minutes on two cores; less if parts are done already"


def main() -> int:
    """Run the study and show what came of it."""
    begin = time.monotonic()
    print(
        f"Nine recipes that differ, two seeds each: train, fit, rank, report. Expected: {EXPECTED}.\n",
        flush=True,
    )
    commands = [
        ("train every recipe, two seeds each", ["train", "--multirun", "experiment=demo", *sys.argv[1:]]),
        ("report", ["report", str(OUTPUT), "-o", str(OUTPUT / "report.html")]),
        ("publish to MLflow", ["publish", str(OUTPUT), "--mlflow", f"sqlite:///{OUTPUT}/mlflow.db"]),
        ("rank", ["rank", str(OUTPUT)]),
    ]
    for what, command in commands:
        print(f"--- {what}: scalerl {' '.join(command)}", flush=True)
        done = subprocess.run([SCALERL, *command])
        if done.returncode:
            print(f"stopped at: {what}; the same command continues", file=sys.stderr)
            return done.returncode
        print(flush=True)
    minutes = (time.monotonic() - begin) / 60
    print(f"Done in {minutes:.1f} minutes. Open {OUTPUT / 'report.html'}; the table is {OUTPUT / 'ranking.csv'}.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
