"""A study of a thousand members: seconds and memory of what the controller does about them, phase by phase.

    python benchmarks/thousand.py [--members 1000] [--workers 2] [--rows]

Nothing trains. Every phase runs in a child process of its own, so that its peak memory is its own (`ru_maxrss` never
falls again) and its seconds begin when its imports are done; what the imports alone take stands in columns of their
own. The phases share one folder: planning leaves the specs, simulated journals stand for what the members would have
written. Numbers depend on what else the machine is doing: the load is printed beside them.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import pickle
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path

import numpy as np

SEEDS = 3
EVALUATIONS = 33
# A base model that is made in a moment: making it is no part of planning.
QUICK = ["model.batches=1", "model.width=32", "model.layers=1"]
SPECS = "specs.pickle"

Phase = Callable[[argparse.Namespace], str]


def peak_mb(who: int = resource.RUSAGE_SELF) -> float:
    """The most memory held so far: of this process, or of the largest child."""
    return resource.getrusage(who).ru_maxrss / (1 << 20 if sys.platform == "darwin" else 1 << 10)


def grid(members: int) -> list[list[str]]:
    """Learning rates for two recipes, three seeds each."""
    recipes = -(-members // SEEDS)
    rows = [
        [
            f"variant={('none', 'loss_dapo')[number % 2]}",
            f"optimizer.lr={1e-4 * (1 + number / 100):.6g}",
            f"seed={seed}",
        ]
        for number in range(recipes)
        for seed in range(SEEDS)
    ]
    return [["experiment=leave_one_out", *row, *QUICK] for row in rows[:members]]


def leave_one_out(members: int) -> list[list[str]]:
    """The nine recipes of the leave-one-out, and seeds enough."""
    variants = [
        *("none", "loss_dapo", "precision_bf16_head", "length_control_penalty", "normalization_prompt"),
        *("resampling_uniform", "filter_none", "async_mode_ppo_off_policy", "aggregation_sample"),
    ]
    rows = [
        [f"variant={variant}", f"seed={seed}"] for seed in range(-(-members // len(variants))) for variant in variants
    ]
    return [["experiment=leave_one_out", *row, *QUICK] for row in rows[:members]]


def write_journals(folder: Path, members: int) -> None:
    """What the members would have written: 33 evaluations and 32 train records each."""
    from sweeps import journal

    journal.os.fsync = lambda _: None  # type: ignore[attr-defined]  # nothing here must outlive a power cut
    rng = np.random.default_rng(2510)
    recipes = -(-members // SEEDS)
    curves = [(0.5 + 0.35 * rng.random(), 1.3 + rng.random(), 2 + 2 * rng.random()) for _ in range(recipes)]
    for number in range(members):
        recipe, seed = divmod(number, SEEDS)
        a, b, c_mid = curves[recipe]
        own = a + 0.01 * rng.standard_normal()
        label = "scalerl" if recipe == 0 else f"scalerl+optimizer.lr={1e-4 * (1 + recipe / 100):.6g}"
        ticks = map(float, count())
        written = journal.Journal(folder / "runs" / f"{number:012x}", clock=ticks.__next__)
        written.header(
            run=f"{number:012x}", curve=f"{recipe:012x}", recipe=label, seed=seed, baseline="scalerl", device="cpu"
        )
        for point, hours in enumerate(np.linspace(0.0, 16.0, EVALUATIONS).tolist()):
            compute = {"compute/virtual_device_hours": hours, "compute/flops": hours * 1e15}
            if hours:
                written.record("train", 10 * point, {f"train/{k}": rng.random() for k in range(12)} | compute)
            rate = rng.binomial(2000, 0.15 + (own - 0.15) * (1 / (1 + (c_mid / hours) ** b) if hours else 0.0)) / 2000
            error = float(np.sqrt(rate * (1 - rate) / 2000))
            written.record(
                "eval", 10 * point, {"eval/heldout/pass_rate": rate, "eval/heldout/pass_rate_se": error} | compute
            )
        written.checkpoint(10 * (EVALUATIONS - 1))
        written.end(10 * (EVALUATIONS - 1), "finished")
        written.close()


# Phases. Each imports what it needs before `started()`, so that seconds are those of the work.


def started() -> None:
    """Imports are done: the clock starts."""
    _marks.append((time.perf_counter(), peak_mb(), peak_mb(resource.RUSAGE_CHILDREN)))


_marks: list[tuple[float, float, float]] = []


def _planned(lists: list[list[str]], folder: Path | None) -> str:
    import lightning_scalerl.plan as planner

    planner.plan(lists[:1])  # makes the base model
    started()
    specs = planner.plan(lists)
    seconds = time.perf_counter() - _marks[0][0]
    if folder is not None:
        (folder / SPECS).write_bytes(pickle.dumps(specs))
    recipes = len({spec.curve for spec in specs})
    return f"{len(specs)} members of {recipes} recipes, {1e3 * seconds / len(specs):.2f} ms each"


def planning_seeds(options: argparse.Namespace) -> str:
    """Nine recipes, many seeds."""
    return _planned(leave_one_out(options.members), None)


def planning_values(options: argparse.Namespace) -> str:
    """Many recipes that differ in a value."""
    return _planned(grid(options.members), options.folder)


def planning_rows(options: argparse.Namespace) -> str:
    """Many recipes that differ in their groups, each of which Hydra must compose: the slow case."""
    from itertools import islice, product

    from lightning_scalerl.recipe import conf_dir

    axes = ("loss", "aggregation", "normalization", "filter", "truncated", "resampling", "correction", "precision")
    files = [[f"{axis}={path.stem}" for path in sorted((conf_dir() / axis).glob("*.yaml"))] for axis in axes]
    rows = islice(product(*files), -(-options.members // SEEDS))
    return _planned([[*row, f"seed={seed}", *QUICK] for row in rows for seed in range(SEEDS)][: options.members], None)


def reading(options: argparse.Namespace) -> str:
    """All journals into curves."""
    from sweeps.source.study import load

    started()
    study = load([options.folder])
    return f"{len(study.runs)} journals, {len(study.curves)} curves"


def fitting(options: argparse.Namespace) -> str:
    """Reading, and every curve fitted."""
    from sweeps.fit import fit_curves
    from sweeps.source.study import load

    started()
    fits = fit_curves(load([options.folder]).curves, workers=options.workers, regions=False)
    return f"{sum(fit.identifiable for fit in fits)} of {len(fits)} identifiable"


def ranking(options: argparse.Namespace) -> str:
    """Reading, fitting, comparing the families of curves on each recipe, ranking."""
    from sweeps.fit import fit_curves
    from sweeps.rank import rank
    from sweeps.source.study import load

    started()
    fits = fit_curves(load([options.folder]).curves, workers=options.workers, regions=False)
    found = rank(fits, workers=options.workers)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        print(json.dumps(found.to_json()))
    return f"{len(found.ranking)} recipes, {len(printed.getvalue()) // 1024} KiB of JSON"


# To be added here, with the fake executor: `ledger` (a study of the planned specs, `options.folder / SPECS`, run to
# its end), `status`, `collecting`. A phase takes the options, calls `started()`, and says what it did.

PHASES: dict[str, Phase] = {
    "planning, 9 recipes": planning_seeds,
    "planning, values": planning_values,
    "planning, rows": planning_rows,
    "reading": reading,
    "reading + fits": fitting,
    "reading + fits + rank": ranking,
}
SLOW = ("planning, rows",)


def run_phase(options: argparse.Namespace) -> None:
    """In a child: one phase, and what it took, as JSON on the last line."""
    began = time.perf_counter()
    with contextlib.redirect_stdout(sys.stderr):
        what = PHASES[options.phase](options)
    ready, imports_mb, children_mb = _marks[-1]
    workers_mb = peak_mb(resource.RUSAGE_CHILDREN)
    found = {
        "imports_s": ready - began,
        "imports_mb": imports_mb,
        "s": time.perf_counter() - ready,
        "peak_mb": peak_mb(),
        "workers_mb": workers_mb if workers_mb > children_mb else 0.0,  # imports run programs too
        "what": what,
    }
    print(json.dumps(found))


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--members", type=int, default=1000)
    parser.add_argument("--workers", type=int, default=2, help="processes that share fits and comparisons")
    parser.add_argument("--rows", action="store_true", help="also plan a grid of groups: the slow case")
    parser.add_argument("--phase", choices=PHASES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.phase:
        run_phase(options)
        return
    with tempfile.TemporaryDirectory() as folder:
        write_journals(Path(folder), options.members)
        print(
            f"{options.members} members, {options.workers} workers, load {os.getloadavg()[0]:.1f} of {os.cpu_count()}"
        )
        print(f"{'phase':24}{'s':>8}{'peak MB':>9}{'imports s':>11}{'MB':>6}{'worker MB':>11}  what")
        for name in PHASES:
            if name in SLOW and not options.rows:
                continue
            command = [sys.executable, __file__, "--phase", name, "--folder", folder]
            command += ["--members", str(options.members), "--workers", str(options.workers)]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                sys.exit(f"{name} failed:\n{done.stderr}")
            row = json.loads(done.stdout.splitlines()[-1])
            print(
                f"{name:24}{row['s']:8.2f}{row['peak_mb']:9.0f}{row['imports_s']:11.2f}{row['imports_mb']:6.0f}"
                f"{row['workers_mb']:11.0f}  {row['what']}",
                flush=True,
            )


if __name__ == "__main__":
    main()
