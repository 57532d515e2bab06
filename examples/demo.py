"""The scaling study on one CPU that `make demo` runs.

The same five commands make any study:

    scalerl train --multirun experiment=demo
    scalerl report outputs/demo -o outputs/demo/report.html
    scalerl publish outputs/demo --mlflow sqlite:///outputs/demo/mlflow.db
    scalerl rank outputs/demo
    scalerl compare outputs/demo

If interrupted at any point, run it again to continue. Arguments are passed on to `scalerl train`.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

OUTPUT = Path("outputs/demo")
SCALERL = str(Path(sys.executable).with_name("scalerl"))
EXPECTED = "about 7 minutes on two cores; less on fast ones, or if parts are done already"


def learned(rank: dict[str, Any], compare: dict[str, Any]) -> str:
    """Summarize the study: recipes that share the highest ceiling, that lower it, and that only take longer.

    Args:
        rank, compare: output of the commands with `--json`.
    """
    asymptotes = {each["recipe"]: each["A"]["value"] for each in rank["ranking"] if each["rank"] is not None}
    top = [each["recipe"] for each in rank["ranking"] if each["tied_with_best"]]
    if not top:
        return "no asymptote can be named yet: run longer, with a larger budget.steps"
    findings = [f"{', '.join(top)}: the highest ceiling, {max(asymptotes[recipe] for recipe in top):.2f}"]
    findings += [f"{recipe} lowers it to {value:.2f}" for recipe, value in asymptotes.items() if recipe not in top]
    for each in compare["comparisons"]:
        ratio = each["ratio"]
        if each["recipe"] in top and ratio and ratio["value"] is not None and (ratio["low"] or 0) > 1:
            findings.append(f"{each['recipe']} takes {ratio['value']:.1f} times the compute of {each['other']}")
    return "; ".join(findings)


def json_of(*words: str) -> dict[str, Any]:
    """Return the output of a command with `--json`."""
    done = subprocess.run([SCALERL, *words, "--json"], capture_output=True, text=True, check=True)
    parsed: dict[str, Any] = json.loads(done.stdout)
    return parsed


def show(title: str, *command: str) -> int:
    """Run a command with its output shown, and return its exit code."""
    print(f"--- {title}: scalerl {' '.join(command)}", flush=True)
    code = subprocess.run([SCALERL, *command]).returncode
    if code:
        print(f"stopped at: {title}; the same command continues", file=sys.stderr)
    else:
        print(flush=True)
    return code


def main() -> int:
    """Run the study and show its results."""
    begin = time.monotonic()
    print(
        f"Six recipes that differ, two seeds each: train, fit, rank, report. Expected: {EXPECTED}.\n",
        flush=True,
    )
    study = str(OUTPUT)
    if code := show("train every recipe, two seeds each", "train", "--multirun", "experiment=demo", *sys.argv[1:]):
        return code
    commands = [
        ("report", ["report", study, "-o", str(OUTPUT / "report.html")]),
        ("publish to MLflow", ["publish", study, "--mlflow", f"sqlite:///{OUTPUT}/mlflow.db"]),
        ("rank", ["rank", study]),
        ("compare", ["compare", study]),
    ]
    with ThreadPoolExecutor() as pool:
        answers = [pool.submit(json_of, command, study) for command in ("rank", "compare")]
        for title, command in commands:
            if code := show(title, *command):
                return code
    print(f"Learned: {learned(*(each.result() for each in answers))}.")
    minutes = (time.monotonic() - begin) / 60
    print(f"Done in {minutes:.1f} minutes. The study in one figure: {OUTPUT / 'report_overlay.png'}; all of it:")
    print(f"{OUTPUT / 'report.html'}; the table: {OUTPUT / 'ranking.csv'}.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
