"""Compare a training batch end to end: ours, a hand-written loop, and TRL if PEERS_PYTHON names its interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

from benchmarks.speed.pairs import Record, compared, in_turns
from benchmarks.speed.setting import save_model

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
# Model size, prompt tokens, number of timed batches.
SETTINGS = (("0.5M", 8, 6), ("0.5M", 64, 4), ("0.5M", 256, 2), ("10M", 8, 2), ("10M", 64, 1))


def seconds(command: list[str], folder: Path, prompt_tokens: int, batches: int) -> float:
    """Return the seconds per batch, which a single-threaded process prints last."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    run = subprocess.run(
        [*command, str(folder), str(prompt_tokens), str(batches)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    if run.returncode:
        raise RuntimeError(f"{' '.join(command)} failed: {run.stderr.strip()[-2000:]}")
    return float(run.stdout.split()[-1])


def measure(rounds: int) -> list[Record]:
    """Return one record per setting and other side."""
    peer = os.environ.get("PEERS_PYTHON")
    commands = {
        "ours": [sys.executable, "-m", "benchmarks.speed.train_ours"],
        "a loop by hand": [sys.executable, "-m", "benchmarks.speed.train_bare"],
        **({"TRL's GRPOTrainer": [peer, str(HERE / "train_trl.py")]} if peer else {}),
    }
    records = []
    for size, prompt_tokens, batches in SETTINGS:
        with tempfile.TemporaryDirectory() as folder:
            save_model(Path(folder), size)
            sides: dict[str, Callable[[], float]] = {
                name: partial(seconds, command, Path(folder), prompt_tokens, batches)
                for name, command in commands.items()
            }
            seconds_by_side = in_turns(sides, rounds)
        records += compared(seconds_by_side, "ours", f"training, {size} parameters, prompts of {prompt_tokens} tokens")
    return records
