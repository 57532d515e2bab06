"""Run a real race: which members it stops, how much compute it saves, and whether it names the full grid's winner.

Runs three studies of the same members (`conf/experiment/race.yaml`, on the arithmetic task): the full grid, the race,
and the race again with its controller killed by SIGKILL and relaunched several times. Both races must make the same
decisions, and so must `scalerl race` on the full grid. A survivor's journal must not depend on whether
other members were stopped. With `--lab` all three run as jobs of the project's SLURM lab (slurm/lab; needs root).

    python -m benchmarks.live_race [--lab] [--kills 4] [--work DIR] [--out FILE] [OVERRIDE ...]
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from sweeps.curve import Curve
from sweeps.decide.race import Look, run_race
from sweeps.decide.rank import rank
from sweeps.errors import UserError
from sweeps.fit.fit import fit_curves
from sweeps.launch.ledger import Ledger
from sweeps.run.files import append_lines
from sweeps.run.journal import read_journal
from sweeps.search.race_log import RaceRecord
from sweeps.source import load
from tests.slurm.cluster import Lab

ROOT = Path(__file__).resolve().parents[1]
ON_LAB = ("cluster=slurm", "hydra.launcher.poll_s=1", "hydra.launcher.lost_after_s=30", "hydra.launcher.mem_gb=2")


@contextmanager
def lab() -> Iterator[Mapping[str, str]]:
    """Start a lab cluster; yield the environment variables for its commands, and remove it at the end."""
    with tempfile.TemporaryDirectory(prefix="scalerl-lab-") as scratch:
        cluster = Lab(Path(scratch) / "lab", random.Random().randrange(20_000, 30_000))
        try:
            cluster.up()
            yield cluster.environment
        finally:
            cluster.run("down", "--wipe")


class Studies:
    """Launch studies.

    Args:
        work: folder of all studies.
        environment: environment of the processes; None to inherit this process's.
        overrides: overrides of every launch.
    """

    def __init__(self, work: Path, environment: Mapping[str, str] | None, overrides: Sequence[str]) -> None:
        self.work, self.overrides = work, list(overrides)
        self.environment = dict(environment) if environment is not None else None

    def _start(self, name: str, *words: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "lightning_scalerl.train", "--multirun", *words, *self.overrides]
        command += ["mlflow.uri=null", f"output_dir={self.work / name}"]
        with (self.work / f"{name}.log").open("a") as log:
            return subprocess.Popen(command, cwd=ROOT, env=self.environment, stdout=log, stderr=log)

    def run(self, name: str, *words: str) -> None:
        """Run a study to its end. A finished study returns at once.

        Raises:
            UserError: the command failed.
        """
        if code := self._start(name, *words).wait():
            raise UserError(f"{self.work / name}.log: exit code {code}")

    def run_through_deaths(self, name: str, kills: int, each_s: float, *words: str) -> None:
        """Run a study like `run`, but first kill it `kills` times at random moments, `each_s` apart on average."""
        source, deaths = random.Random(0), self.work / f"{name}.deaths"
        while self.deaths(name) < kills:
            process = self._start(name, *words)
            try:
                process.wait(source.uniform(0.4, 1.6) * each_s)
                break
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                append_lines(deaths, [{"time": time.time()}])
        self.run(name, *words)

    def deaths(self, name: str) -> int:
        """Return how often the study's controller was killed."""
        path = self.work / f"{name}.deaths"
        return len(path.read_text().splitlines()) if path.exists() else 0

    def seconds(self, name: str) -> float:
        """Return the seconds from the first to the last entry of the study's ledger."""
        times = [entry["time"] for entry in Ledger(self.work / name).entries()]
        return float(times[-1] - times[0])


def decisions(looks: Sequence[Look]) -> list[tuple[float, tuple[str, ...], dict[str, float | None]]]:
    """Return (compute, stopped members, chances) of each look."""
    return [(look.compute, look.stopped, {each.recipe: each.p_ahead for each in look.chances}) for look in looks]


def spent(study: Path, axis: str) -> float:
    """Return the total compute of a study's members."""
    views = [read_journal(path) for path in (study / "runs").iterdir()]
    return sum(max(record.metrics.get(axis, 0.0) for record in view.records) for view in views)


def same_journals(study: Path, full: Path) -> tuple[int, int]:
    """Count members whose journals agree with the full grid's as far as they go; return that and the total."""
    equal, runs = 0, [path.name for path in (study / "runs").iterdir()]
    for run in runs:
        raced_journal, full_journal = (read_journal(each / "runs" / run).deterministic() for each in (study, full))
        equal += raced_journal == [entry for entry in full_journal if entry in raced_journal] and len(raced_journal) > 0
    return equal, len(runs)


def rewards(curves: Sequence[Curve], budget: float) -> dict[str, float]:
    """Return each recipe's fitted reward at the budget, the best first."""
    entries = [(each.recipe, each.R_at_budget) for each in rank(fit_curves(curves), budget=budget).ranking]
    known = {recipe: at.value for recipe, at in entries if at is not None and at.value is not None}
    return dict(sorted(known.items(), key=lambda entry: -entry[1]))


def page_lines(studies: Studies, place_title: str) -> Iterator[str]:
    """Yield the lines of the page for one machine or cluster."""
    work = studies.work
    record = RaceRecord.read(work / "race")
    assert record.rules is not None and record.axis is not None
    budget = record.rules.budget
    curves = load([work / "full"], record.metric, record.axis).curves
    reward = rewards(curves, budget)
    states = Ledger(work / "race").fold().values()
    finishers = sorted({each.recipe for each in states if each.state == "finished"} - set(record.stopped))
    raced_curves = load([work / "race"], record.metric, record.axis).curves
    named_winner = next(name for name in rewards(raced_curves, budget) if name in finishers)
    best = next(iter(reward))
    after = run_race(curves, record.rules, ended=[curve.recipe for curve in curves])
    decided = decisions(record.looks)
    full, raced = spent(work / "full", record.axis), spent(work / "race", record.axis)
    yield f"## {place_title}"
    yield ""
    yield (
        f"Budget: {budget:.4g} virtual device hours per run. This is the compute of the member that spends the least "
        "on its steps."
    )
    yield ""
    yield "| recipe | stopped at | chance of ending ahead | reward at the budget, from the full grid |"
    yield "|---|---|---|---|"
    for name in reward:
        look = record.stopped.get(name)
        stopped_at = "-" if look is None else f"{look.compute / budget:.0%} of the budget"
        chance = "-" if look is None else f"{look.of(name).p_ahead:.2f}"
        yield f"| {name} | {stopped_at} | {chance} | {reward[name]:.3f} |"
    yield ""
    yield f"- Recipes that the race ran to the end: {', '.join(finishers)}."
    yield f"- Best recipe: {named_winner} by the race, {best} by the full grid."
    saved = f"{1 - raced / full:.0%}"
    yield f"- Compute: {raced:.4g} for the race and {full:.4g} for the full grid, so the race saves {saved}."
    yield (
        f"- Time: {studies.seconds('full'):.0f} s for the full grid, {studies.seconds('race'):.0f} s for the race, and "
        f"{studies.seconds('killed'):.0f} s for the race whose controller was killed {studies.deaths('killed')} times."
    )
    same = {
        "the race whose controller was killed": decisions(RaceRecord.read(work / "killed").looks) == decided,
        "`scalerl race` on the full grid": decisions(after.looks) == decided,
    }
    for other, agrees in same.items():
        yield (
            f"- At all {len(record.looks)} looks, the decisions of the race and of {other} are "
            f"{'the same' if agrees else 'NOT the same'}."
        )
    for folder, name in (("race", "the race"), ("killed", "the race whose controller was killed")):
        equal, runs = same_journals(work / folder, work / "full")
        yield f"- Runs of {name}: {equal} of {runs} journals equal those of the full grid, as far as they go."
    yield ""


def main() -> None:
    """Run the studies, and print or write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lab", action="store_true")
    parser.add_argument("--kills", type=int, default=4)
    parser.add_argument("--work", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("overrides", nargs="*", metavar="OVERRIDE")
    options = parser.parse_args()
    work = (options.work or Path(tempfile.mkdtemp(prefix="live-race-"))).resolve()
    work.mkdir(parents=True, exist_ok=True)

    def perform(environment: Mapping[str, str] | None) -> list[str]:
        studies = Studies(work, environment, [*(ON_LAB if options.lab else ()), *options.overrides])
        race = ("experiment=race",)
        studies.run("full", "experiment=demo")
        studies.run("race", *race)
        studies.run_through_deaths("killed", options.kills, studies.seconds("race") / (options.kills + 1), *race)
        return list(page_lines(studies, "On the SLURM lab" if options.lab else "On one machine"))

    if options.lab:
        with lab() as environment:
            lines = perform(environment)
    else:
        lines = perform(None)
    text = "\n".join(lines)
    print(json.dumps({"work": str(work)}))
    if options.out is not None:
        options.out.write_text(text)
    else:
        print(text)


if __name__ == "__main__":
    main()
