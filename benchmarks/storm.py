"""A study in a storm: random faults into a real SLURM cluster until every member is done, then the journals compared.

    python benchmarks/storm.py [--seeds 4] [--every-s 15] [--random 0]

The long variant of tests/slurm. Needs root and the developer's environment; starts a cluster of its own (slurm/lab)
and ends it. Members are small real runs. Faults: kill -9 of a member, a warning as before a time limit, a node powered
off, a slurmd killed, slurmctld killed, the controller killed; what is broken is mended before the next. Exits with 1
unless all members are finished, each once, with the journals of an undisturbed local run, bit for bit.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from sweeps.executor.attempts import attempts
from sweeps.launch.ledger import Ledger
from tests.place import Place
from tests.slurm.cluster import Lab, Sweep, baseline, by_run

FAULTS = ("kill a member", "warn a job", "power a node off", "kill a slurmd", "kill slurmctld", "kill the controller")
# Bad luck may strike one member many times; what is tested here is that nothing is lost.
PATIENT = "hydra.launcher.retries={killed:50,node:50,lost:50,launch:50}"


def strike(fault: str, sweep: Sweep, controller: subprocess.Popen[str], luck: random.Random) -> None:
    """Break something."""
    node = luck.randint(1, 4)
    if fault == "kill a member" and (pids := sweep.processes()):
        os.kill(luck.choice(pids), signal.SIGKILL)
    elif fault == "warn a job" and (jobs := sweep.lab.jobs()):
        subprocess.run(["scancel", "--signal=USR2", luck.choice(jobs)], env=sweep.lab.environment, check=False)
    elif fault == "power a node off":
        sweep.lab.run("node-off", str(node))
        time.sleep(luck.choice((0, 20)))
    elif fault == "kill a slurmd":
        sweep.lab.run("kill", f"slurmd:n{node}")
        time.sleep(luck.choice((0, 20)))
    elif fault == "kill slurmctld":
        sweep.lab.run("kill", "slurmctld")
    elif fault == "kill the controller":
        controller.kill()
        controller.wait()
    sweep.lab.up()


def main() -> int:
    """One storm."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=4, help="of two recipes")
    parser.add_argument("--every-s", type=float, default=15.0)
    parser.add_argument("--random", type=int, default=0, help="the storm's own seed")
    options = parser.parse_args()
    luck = random.Random(options.random)
    study = ("variant=none,loss_dapo", f"seed={','.join(map(str, range(options.seeds)))}")
    root = Path(tempfile.mkdtemp(prefix="scalerl-storm-"))
    lab = Lab(root / "lab", port=28800)
    done: Counter[str] = Counter()
    try:
        lab.up()
        (root / "place").mkdir()
        sweep = Sweep(Place(root / "place"), lab, study)
        truth = baseline(sweep.place, *study)
        code: int | None = None
        while code is None:
            with sweep.launched(PATIENT, verifier_s=0.15) as controller:
                while (code := controller.poll()) is None:
                    time.sleep(options.every_s)
                    fault = luck.choice(FAULTS)
                    done[fault] += 1
                    finished = sum(state.state == "finished" for state in sweep.states())
                    print(f"{fault}; {finished} members are done", flush=True)
                    strike(fault, sweep, controller, luck)
            code = None if code == -signal.SIGKILL else code
        states = sweep.states()
        ends = Counter(entry["run"] for entry in Ledger(sweep.directory).entries() if entry["event"] == "finished")
        tries = sum(len(attempts(sweep.run_dir(state))) for state in states)
        same = by_run(sweep.directory) == truth
        once = len(ends) == len(states) and set(ends.values()) == {1}
        print(f"{sum(done.values())} faults {dict(done)}; exit code {code}; {len(states)} members in {tries} attempts")
        print(f"each finished once: {once}; journals as without faults: {same}")
        return int(not (code == 0 and same and once))
    finally:
        lab.run("down", "--wipe")
        shutil.rmtree(root, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
