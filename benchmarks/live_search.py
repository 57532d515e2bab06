"""Run a real search on a SLURM cluster and kill its controller repeatedly: is a trial lost, or run twice?

Sixty trials of a tiny study run as jobs of the project's SLURM lab (slurm/lab; needs root). Optuna proposes them; its
journal is in the study's folder. The command that runs the search is killed with SIGKILL at random moments and started
again. Then Optuna's journal, the ledger and the runs' journals are compared.

    python -m benchmarks.live_search [--trials 60] [--kills 6] [--work DIR] [--out FILE]
"""

from __future__ import annotations

import argparse
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import optuna
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend

from benchmarks.live_race import ON_LAB, Studies, lab
from sweeps.executor.node.attempts import attempts
from sweeps.launch.ledger import Ledger
from sweeps.run.journal import read_journal
from sweeps.search.trials import TRIALS_FILE

SPACE = ("loss=dapo,gspo,cispo,reinforce", "optimizer.lr=tag(log,interval(1e-4,1e-2))")
TINY = (
    *("model.batches=2", "model.width=32", "model.layers=1", "batch.prompts=2", "batch.completions=4"),
    *("async_mode.k=2", "budget.steps=6", "checkpoint.every_n_steps=2", "evaluation.samples=1"),
)


def page_lines(studies: Studies, trial_count: int) -> Iterator[str]:
    """Yield the lines of the page."""
    study = studies.work / "search"
    storage = JournalStorage(JournalFileBackend(str(study / TRIALS_FILE)))
    trials = optuna.load_study(study_name="search", storage=storage).get_trials()
    runs = [str(trial.user_attrs.get("run")) for trial in trials]
    ledger = Ledger(study)
    events = Counter((entry["event"], entry["run"]) for entry in ledger.entries())
    states = ledger.fold()
    finished = {run: sum(each.outcome == "finished" for each in attempts(study / "runs" / run)) for run in states}
    views = [read_journal(study / "runs" / run) for run in states]
    steps = [[record.step for record in view.of_kind("train")] for view in views]
    repeated = sum(len(each) - len(set(each)) for each in steps)
    count = Counter(trial.state.name for trial in trials)
    yield f"Written by `python -m benchmarks.live_search --trials {trial_count}`, on the SLURM lab."
    yield ""
    ended = ", ".join(f"{number} {state}" for state, number in sorted(count.items()))
    yield f"- Trials in Optuna's journal: {len(trials)} of {trial_count} ({ended})."
    lost, orphans = len(set(runs) - set(states)), len(set(states) - set(runs))
    members = f"Members in the ledger: {len(states)}"
    yield f"- {members}. Trials without a member: {lost}. Members without a trial: {orphans}."
    twice, by_jobs = sum(events["finished", run] > 1 for run in states), sum(n > 1 for n in finished.values())
    yield f"- Members that finished more than once: {twice} by the ledger, {by_jobs} by the records of their jobs."
    restarted = sum(state.attempts > 1 for state in states.values())
    yield f"- Members with more than one job: {restarted}. Steps that a journal contains twice: {repeated}."
    deaths, seconds = studies.deaths("search"), studies.seconds("search")
    yield f"- The controller was killed {deaths} times. Total time: {seconds:.0f} s."
    yield ""


def main() -> None:
    """Run the search, and print or write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=60)
    parser.add_argument("--kills", type=int, default=6)
    parser.add_argument("--work", type=Path)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    work = (options.work or Path(tempfile.mkdtemp(prefix="live-search-"))).resolve()
    work.mkdir(parents=True, exist_ok=True)
    with lab() as environment:
        studies = Studies(work, environment, [*ON_LAB, *TINY])
        settings = (f"hydra.sweeper.n_trials={options.trials}", "hydra.sweeper.n_jobs=4")
        words = ("hydra/sweeper=scalerl_optuna", *settings, *SPACE)
        studies.run_through_deaths("search", options.kills, 45.0, *words)
    text = "\n".join(page_lines(studies, options.trials))
    print(text)
    if options.out is not None:
        options.out.write_text(text)


if __name__ == "__main__":
    main()
