"""Races and searches on a cluster: what is decided, and what is run, does not depend on who is killed."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, TrialState

from sweeps.executor.node.attempts import attempts
from sweeps.launch.ledger import Ledger
from tests.place import Place
from tests.slurm.cluster import PATIENCE_S, Lab, Sweep, by_run, eventually

pytestmark = [pytest.mark.slurm, pytest.mark.slow]


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path, light=True)


def looks(study: Path) -> list[Any]:
    path = study / "race.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [line["look"] for line in lines if line["kind"] == "look"]


@pytest.mark.full
def test_a_race_on_a_cluster_decides_as_on_one_machine_whoever_is_killed(place: Place, whole: Lab) -> None:
    study = (
        *("variant=none,loss_dapo,loss_gspo,async_mode_ppo_off_policy", "seed=0,1", "budget.steps=40"),
        # So small a study decides little: at a chance of 0.3 one is stopped at the sixth look, and one at the eighth.
        *("race.budget=45", "race.p_ahead=0.3", "race.growth=1.2"),
    )
    here = [sys.executable, *place.study("dry", *study, "race.mode=dry_run")]
    subprocess.run(here, cwd=place.root, env=place.environment(), check=True, capture_output=True, timeout=PATIENCE_S)
    sweep = Sweep(place, whole, (*study, "race.mode=live"))
    for level in (1, 2):
        with sweep.launched(verifier_s=0.02) as process:
            eventually(lambda level=level: len(looks(sweep.directory)) >= level, "a look")  # type: ignore[misc]
            process.send_signal(signal.SIGKILL)
    assert sweep.launch(verifier_s=0.02) == 0, sweep.said()
    assert looks(sweep.directory) == looks(place.root / "dry")
    assert [len(look["stopped"]) for look in looks(sweep.directory)] == [0, 0, 0, 0, 0, 1, 0, 1, 0]
    stopped = {name for look in looks(sweep.directory) for name in look["stopped"]}
    states = sweep.states()
    assert stopped and {state.recipe for state in states if state.state == "stopped"} <= stopped
    assert {state.recipe for state in states if state.state == "finished"} >= {each.recipe for each in states} - stopped
    # Stopped or not, what was learnt is what is learnt undisturbed.
    undisturbed = by_run(place.root / "dry")
    for run, journal in by_run(sweep.directory).items():
        assert journal == undisturbed[run][: len(journal)]
    assert sweep.status()["counts"]["finished"] >= 2


def trials(study: Path) -> list[FrozenTrial]:
    storage = JournalStorage(JournalFileBackend(str(study / "optuna.jsonl")))
    return optuna.load_study(study_name="search", storage=storage).get_trials()


@pytest.mark.full
def test_a_search_on_a_cluster_loses_no_trial_and_runs_none_twice(place: Place, whole: Lab) -> None:
    space = ("loss=dapo,gspo,cispo", "optimizer.lr=tag(log,interval(1e-4,1e-2))")
    settings = ("hydra/sweeper=scalerl_optuna", "hydra.sweeper.n_trials=16", "hydra.sweeper.n_jobs=4")
    sweep = Sweep(place, whole, (*settings, *space))

    def finished() -> int:
        return sum(state.state == "finished" for state in sweep.states())

    for done in (1, 5, 9):
        with sweep.launched(verifier_s=0.05) as process:
            eventually(lambda done=done: finished() >= done, "a trial")  # type: ignore[misc]
            process.send_signal(signal.SIGKILL)
    assert sweep.launch() == 0, sweep.said()
    found = trials(sweep.directory)
    assert len(found) == 16 and {each.state for each in found} == {TrialState.COMPLETE}
    runs = {each.user_attrs["run"] for each in found}
    assert runs == {state.run for state in sweep.states()}
    events = Counter(entry["event"] for entry in Ledger(sweep.directory).entries())
    assert events["finished"] == events["planned"] == len(runs)
    for run in runs:
        assert [each.outcome for each in attempts(sweep.directory / "runs" / run)] == ["finished"]
    assert "16 of 16 trials finished" in sweep.said()
