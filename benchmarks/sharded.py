"""Live runs under FSDP2 beside those of one process: three seeds each, compared at the steps that both have done.

    python benchmarks/sharded.py [--steps 150] [--ranks 2]

Some ten minutes of two cores; outputs/sharded_one and outputs/sharded_two keep the runs. Generators are processes of
their own, so no two runs are alike: what is asked is whether the interval of the difference holds 0.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SEEDS = (0, 1, 2)
# The demo's task and model at a third of its rate: live runs are further off-policy than virtual ones.
SETTINGS = ("experiment=demo", "optimizer.lr=1.0e-4", "driver=live")
ONE, SHARDED = "sharded_one", "sharded_two"


def train(study: str, seed: int, steps: int, ranks: int) -> None:
    """Train one run, under torchrun where it has several ranks."""
    start = [sys.executable, "-m"]
    strategy: list[str] = []
    if ranks > 1:
        start += ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m"]
        strategy = ["strategy=fsdp2", f"strategy.devices={ranks}"]
    command = [*start, "lightning_scalerl.train", *SETTINGS, f"budget.steps={steps}", f"seed={seed}", f"study={study}"]
    subprocess.run([*command, *strategy], check=True, cwd=ROOT)


def main() -> None:
    """Train what is not done yet, and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--ranks", type=int, default=2)
    given = parser.parse_args()
    for seed in SEEDS:
        train(ONE, seed, given.steps, 1)
        train(SHARDED, seed, given.steps, given.ranks)
    scalerl = str(Path(sys.executable).with_name("scalerl"))
    studies = [f"outputs/{SHARDED}", f"outputs/{ONE}"]
    subprocess.run([scalerl, "compare", *studies, "--group", "study", "--x", "step"], check=True, cwd=ROOT)


if __name__ == "__main__":
    main()
