"""Compare live runs under FSDP2 with live runs in one process, three seeds each, at the steps that both have done.

    python benchmarks/sharded.py [--steps 150] [--ranks 2]

Takes about ten minutes on two cores. The runs are in outputs/sharded_one and outputs/sharded_two. Generators are
separate processes, so runs are not reproducible: the question is whether the interval of the difference contains 0.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SEEDS = (0, 1, 2)
# The demo's task and model at a third of its learning rate, because live runs are more off-policy than virtual ones.
SETTINGS = ("experiment=demo", "optimizer.lr=1.0e-4", "driver=live")
ONE, SHARDED = "sharded_one", "sharded_two"


def train(study: str, seed: int, steps: int, ranks: int) -> None:
    """Train one run, with torchrun if it has several ranks."""
    start = [sys.executable, "-m"]
    strategy: list[str] = []
    if ranks > 1:
        start += ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m"]
        strategy = ["strategy=fsdp2", f"strategy.devices={ranks}"]
    command = [*start, "lightning_scalerl.train", *SETTINGS, f"budget.steps={steps}", f"seed={seed}", f"study={study}"]
    subprocess.run([*command, *strategy], check=True, cwd=ROOT)


def main() -> None:
    """Train the runs that are not finished, and compare them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--ranks", type=int, default=2)
    options = parser.parse_args()
    for seed in SEEDS:
        train(ONE, seed, options.steps, 1)
        train(SHARDED, seed, options.steps, options.ranks)
    scalerl = str(Path(sys.executable).with_name("scalerl"))
    studies = [f"outputs/{SHARDED}", f"outputs/{ONE}"]
    subprocess.run([scalerl, "compare", *studies, "--group", "study", "--x", "step"], check=True, cwd=ROOT)


if __name__ == "__main__":
    main()
