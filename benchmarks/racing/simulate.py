"""Simulate many studies of a setting in parallel, and keep the results on disk."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import count, takewhile
from pathlib import Path

import numpy as np

from benchmarks.racing.studies import EVALUATIONS, Outcome, Setting, Study, by_last, judge, make_study
from sweeps.curve import Array
from sweeps.parallel import cores, parallel_map
from sweeps.run.files import append_lines, parse_lines

# Number of studies for Syne Tune. Its Gaussian processes take ten times as long as everything else together.
SYNE_STUDIES = 50


def of_syne_tune(python: str, study: Study) -> dict[str, Outcome]:
    """Run DyHPO and MOBSTER with the Python of the environment that has Syne Tune."""
    script = Path(__file__).with_name("syne.py")
    rates_json = json.dumps(study.rate[:, 1:].tolist())
    done = subprocess.run([python, str(script)], input=rates_json + "\n", capture_output=True, text=True, check=True)
    outcomes_by_method = {}
    for name, steps in json.loads(done.stdout.splitlines()[-1]).items():
        spent = np.array(steps) / EVALUATIONS
        outcomes_by_method[name] = judge(study, by_last(study, spent), spent)
    return outcomes_by_method


def _one(method: Callable[[Study], dict[str, Outcome]], setting: Setting, number: int) -> dict[str, list[float]]:
    outcomes = method(make_study(setting, number))
    return {name: [each.regret, each.compute, each.kills, each.false] for name, each in outcomes.items()}


def simulate(
    part: str, method: Callable[[Study], dict[str, Outcome]], setting: Setting, studies: int, work: Path
) -> list[dict[str, list[float]]]:
    """Return outcomes by method for `studies` studies, or more if `work` already has more.

    An outcome is [regret, compute, kills, false kills].
    """
    path = work / f"{setting.name.replace(' ', '-')}.{part}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    done = {line["number"]: line for line in parse_lines(path.read_bytes())} if path.exists() else {}
    todo = [number for number in range(studies) if number not in done]
    at_once = 80  # a new pool of processes is started for each batch
    for first in range(0, len(todo), at_once):
        numbers = todo[first : first + at_once]
        batch_outcomes = parallel_map(partial(_one, method, setting), numbers, cores())
        lines = [{"number": number, "outcomes": each} for number, each in zip(numbers, batch_outcomes, strict=True)]
        append_lines(path, lines)
        done |= {line["number"]: line for line in lines}
        print(f"{setting.name}, {part}: {min(len(done), studies)} of {studies}", flush=True)
    return [done[number]["outcomes"] for number in takewhile(done.__contains__, count())]


def together(*parts: Sequence[Mapping[str, list[float]]]) -> dict[str, Array]:
    """Combine the studies that all parts have into one (n, 4) array per method."""
    rows: list[dict[str, list[float]]] = [
        {name: row for part in same for name, row in part.items()} for same in zip(*parts, strict=False)
    ]
    return {name: np.array([row[name] for row in rows]) for name in rows[0]}
