"""How long does `scalerl fit` take on 300 recipes, compared with the published procedure on the same curves?

Simulates 300 recipes of 40 evaluations each (parameters near arXiv 2510.13786, Table 1; sampling error 0.006). On one
core with one thread, it times the command from start to exit, its parts in one process, and, on a few of the curves,
our fit and the published grid in turn. Fails if a recipe has no interval for A.

    python -m benchmarks.fit_speed --out docs/measured/fit_speed.md
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.marks import rewrite, wrapped

SCALERL = str(Path(sys.executable).with_name("scalerl"))
ONE_THREAD = {f"{name}_NUM_THREADS": "1" for name in ("OMP", "OPENBLAS", "MKL", "NUMEXPR", "VECLIB_MAXIMUM", "BLIS")}
# A, B and C_mid in GPU-hours (arXiv 2510.13786, Table 1).
TABLE_1 = [
    (0.610, 1.92, 2542.0),
    (0.645, 1.89, 11272.0),
    (0.585, 2.44, 2542.0),
    (0.590, 2.22, 3054.0),
    (0.595, 2.07, 2936.0),
    (0.710, 1.65, 4242.0),
    (0.605, 1.77, 2818.0),
    (0.645, 1.70, 10909.0),
    (0.595, 2.05, 2896.0),
    (0.615, 1.09, 1675.0),
]
R0, NOISE = 0.3, 0.006
# Compute of the last evaluation in units of C_mid; corresponds to the published 16,000 GPU-hours.
END = 6.3


def simulate(path: Path, recipes: int, points: int, seed: int) -> None:
    """Write the table: rows of Table 1 in turn, with small random changes, and evaluations from compute 0."""
    rng = np.random.default_rng(seed)
    with path.open("w", newline="") as handle:
        out = csv.writer(handle)
        out.writerow(["recipe", "seed", "compute", "reward"])
        for k in range(recipes):
            a, b, c_mid = TABLE_1[k % len(TABLE_1)]
            a += 0.01 * rng.standard_normal()
            b *= np.exp(0.05 * rng.standard_normal())
            c_mid *= np.exp(0.1 * rng.standard_normal())
            compute = np.linspace(0.0, END * c_mid, points)
            share = np.zeros(points)
            share[1:] = 1 / (1 + (c_mid / compute[1:]) ** b)
            reward = np.clip(R0 + (a - R0) * share + NOISE * rng.standard_normal(points), 0, 1)
            out.writerows([f"recipe_{k:03d}", 0, f"{c:.6g}", f"{r:.4f}"] for c, r in zip(compute, reward, strict=True))


def cpu() -> float:
    """Return the CPU seconds of all children that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def on_one_core(command: Sequence[str]) -> tuple[str, float, float]:
    """Run a command on one core with one thread; return output, seconds from start to exit, and CPU seconds."""

    def pin() -> None:
        if hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})

    start, used = time.perf_counter(), cpu()
    done = subprocess.run(
        command, env={**os.environ, **ONE_THREAD}, stdout=subprocess.PIPE, text=True, check=True, preexec_fn=pin
    )
    return done.stdout, time.perf_counter() - start, cpu() - used


def parts(path: Path, compared: int) -> dict[str, Any]:
    """Return CPU seconds of the command's parts in this process, and of both procedures per curve."""
    start = time.process_time()
    # All that the command imports, early or late.
    import sweeps.cli.fitting_commands
    import sweeps.cli.main
    import sweeps.fit.compare
    import sweeps.fit.sensitivity
    import sweeps.report.fit_text  # noqa: F401
    from sweeps.fit.fit import fit_curve, fit_curves
    from sweeps.source import load

    imported = time.process_time()
    from sweeps.fit.published import fit_literal

    before = time.process_time()
    curves = load([path]).curves
    loaded = time.process_time()
    fits = fit_curves(curves)
    fitted = time.process_time()
    for fit in fits:
        json.dumps(fit.to_json())
    written = time.process_time()
    ours, theirs = [], []
    fit_literal(curves[0], c_mid_grid=[1000.0])  # warm-up: the time of its imports does not count
    for curve in curves[:: max(1, len(curves) // compared)][:compared]:
        moments = [time.process_time()]
        for procedure in (fit_curve, fit_literal):
            procedure(curve)
            moments.append(time.process_time())
        ours.append(moments[1] - moments[0])
        theirs.append(moments[2] - moments[1])
    return {
        "import": imported - start,
        "read": loaded - before,
        "fit": fitted - loaded,
        "json": written - fitted,
        "ours": ours,
        "theirs": theirs,
    }


def check(printed: str, recipes: int) -> dict[str, int]:
    """Count the verdicts that the command printed. Every recipe must have an interval."""
    fits = json.loads(printed)
    assert len(fits) == recipes, f"{len(fits)} fits of {recipes}"
    bare = [fit["recipe"] for fit in fits if fit["A"]["low"] is None or fit["A"]["high"] is None]
    assert not bare, f"no interval for A: {', '.join(bare)}"
    verdicts = [fit["verdict"] for fit in fits]
    return {name: verdicts.count(name) for name in sorted(set(verdicts))}


def row(label: str, values: Sequence[float], unit: str = "s", scale: float = 1.0) -> str:
    """Return a line of the table, with median and range."""
    median, low, high = (
        f"{value:.3g}" if value < 1000 else f"{value:.0f}"
        for value in (scale * float(f(values)) for f in (np.median, min, max))
    )
    return f"| {label} | {median} {unit} | {low} to {high} |"


def processor() -> str:
    """Return the processor's name, as far as the system provides it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def set_up(recipes: int, points: int, repeats: int, verdicts: dict[str, int]) -> list[str]:
    """Return the text that explains the table."""
    counted = ", ".join(f"{n} {name}" for name, n in verdicts.items())
    return wrapped(
        f"The {recipes} simulated recipes have {points} evaluations each, and are fitted on one core with one thread. "
        f"Every row was measured in each of {repeats} rounds. All {recipes} recipes have an interval for A. Number of "
        f"recipes by verdict: {counted}. All rows but the first show CPU time, so other work on the machine does not "
        "count."
    )


def main() -> int:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", type=int, default=300)
    parser.add_argument("--points", type=int, default=40)
    parser.add_argument("--repeats", type=int, default=5, help="of everything; medians are printed")
    parser.add_argument("--compared", type=int, default=5, help="curves given to the published procedure")
    parser.add_argument("--seed", type=int, default=2510)
    parser.add_argument("--out", help="also write the table to this Markdown file")
    parser.add_argument("--parts", metavar="FILE", help=argparse.SUPPRESS)  # used by this script's child process
    options = parser.parse_args()
    if options.parts:
        print(json.dumps(parts(Path(options.parts), options.compared)))
        return 0
    whole, cpu_seconds, parts_by_round = [], [], []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "curves.csv"
        simulate(path, options.recipes, options.points, options.seed)
        child = [sys.executable, "-m", "benchmarks.fit_speed"]
        child += ["--parts", str(path), "--compared", str(options.compared)]
        for _ in range(options.repeats):
            printed, seconds, used = on_one_core([SCALERL, "fit", str(path), "--json"])
            verdicts = check(printed, options.recipes)
            whole.append(seconds)
            cpu_seconds.append(used)
            parts_by_round.append(json.loads(on_one_core(child)[0]))
    ours = [value for part in parts_by_round for value in part["ours"]]
    theirs = [value for part in parts_by_round for value in part["theirs"]]
    batch = [part["fit"] / options.recipes for part in parts_by_round]
    ratio = [float(np.median(part["theirs"]) / np.median(part["ours"])) for part in parts_by_round]
    batched = [
        float(np.median(part["theirs"])) / per_curve_s for part, per_curve_s in zip(parts_by_round, batch, strict=True)
    ]
    text = "\n".join(
        [
            *set_up(options.recipes, options.points, options.repeats, verdicts),
            "",
            f"{processor()}, {os.cpu_count()} cores; Python {platform.python_version()}, NumPy {np.__version__}.",
            "",
            "| task | median | range |",
            "|---|---|---|",
            row("`scalerl fit FILE --json`, start to exit", whole),
            row("CPU time of this command", cpu_seconds),
            row("part of it: imports", [part["import"] for part in parts_by_round]),
            row("part of it: reading the table", [part["read"] for part in parts_by_round]),
            row("part of it: all fits, with intervals and verdicts", [part["fit"] for part in parts_by_round]),
            row(
                "part of it: extrapolation errors and effects of R0, then writing the JSON",
                [part["json"] for part in parts_by_round],
            ),
            row(f"fit of one curve, among the {options.recipes}", batch, "ms", 1000),
            row("fit of one curve alone", ours, "ms", 1000),
            row("published procedure (`--method scalerl-a5`), one curve", theirs, "ms", 1000),
            row("published procedure, relative to our fit of one curve alone", ratio, "times"),
            row(f"published procedure, relative to our fit of one curve among the {options.recipes}", batched, "times"),
        ]
    )
    print(text)
    if options.out:
        rewrite(Path(options.out), "measured", text.splitlines())
    return 0


if __name__ == "__main__":
    sys.exit(main())
