"""Tests of races and searches on a cluster: decisions and trials do not change when the controller is killed."""

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


def read_looks(study: Path) -> list[Any]:
    path = study / "race.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [line["look"] for line in lines if line["kind"] == "look"]


@pytest.mark.full
def test_a_race_decides_as_on_one_machine_although_controllers_are_killed(place: Place, ready_lab: Lab) -> None:
    study = (
        *("variant=none,loss_dapo,loss_gspo,async_mode_ppo_off_policy", "seed=0,1", "budget.steps=40"),
        # A study this small decides little. With p_ahead=0.3, one recipe is stopped at look 6 and one at look 8.
        *("race.budget=45", "race.p_ahead=0.3", "race.growth=1.2"),
    )
    local_command = [sys.executable, *place.study("dry", *study, "race.mode=dry_run")]
    subprocess.run(
        local_command, cwd=place.root, env=place.environment(), check=True, capture_output=True, timeout=PATIENCE_S
    )
    sweep = Sweep(place, ready_lab, (*study, "race.mode=live"))
    for level in (1, 2):
        with sweep.launched(verifier_s=0.02) as process:
            eventually(lambda level=level: len(read_looks(sweep.directory)) >= level, "a look")  # type: ignore[misc]
            process.send_signal(signal.SIGKILL)
    assert sweep.launch(verifier_s=0.02) == 0, sweep.said()
    assert read_looks(sweep.directory) == read_looks(place.root / "dry")
    assert [len(look["stopped"]) for look in read_looks(sweep.directory)] == [0, 0, 0, 0, 0, 1, 0, 1, 0]
    stopped = {name for look in read_looks(sweep.directory) for name in look["stopped"]}
    states = sweep.states()
    assert stopped and {state.recipe for state in states if state.state == "stopped"} <= stopped
    assert {state.recipe for state in states if state.state == "finished"} >= {each.recipe for each in states} - stopped
    # Stopped or not, every journal equals the beginning of the undisturbed one.
    undisturbed = by_run(place.root / "dry")
    for run, journal in by_run(sweep.directory).items():
        assert journal == undisturbed[run][: len(journal)]
    assert sweep.status()["counts"]["finished"] >= 2


def trials(study: Path) -> list[FrozenTrial]:
    storage = JournalStorage(JournalFileBackend(str(study / "optuna.jsonl")))
    return optuna.load_study(study_name="search", storage=storage).get_trials()


@pytest.mark.full
def test_a_search_loses_no_trial_and_runs_none_twice(place: Place, ready_lab: Lab) -> None:
    space = ("loss=dapo,gspo,cispo", "optimizer.lr=tag(log,interval(1e-4,1e-2))")
    settings = ("hydra/sweeper=scalerl_optuna", "hydra.sweeper.n_trials=16", "hydra.sweeper.n_jobs=4")
    sweep = Sweep(place, ready_lab, (*settings, *space))

    def finished() -> int:
        return sum(state.state == "finished" for state in sweep.states())

    for count in (1, 5, 9):
        with sweep.launched(verifier_s=0.05) as process:
            eventually(lambda count=count: finished() >= count, "a trial")  # type: ignore[misc]
            process.send_signal(signal.SIGKILL)
    assert sweep.launch() == 0, sweep.said()
    all_trials = trials(sweep.directory)
    assert len(all_trials) == 16 and {each.state for each in all_trials} == {TrialState.COMPLETE}
    runs = {each.user_attrs["run"] for each in all_trials}
    assert runs == {state.run for state in sweep.states()}
    events = Counter(entry["event"] for entry in Ledger(sweep.directory).entries())
    assert events["finished"] == events["planned"] == len(runs)
    for run in runs:
        assert [each.outcome for each in attempts(sweep.directory / "runs" / run)] == ["finished"]
    assert "16 of 16 trials finished" in sweep.said()
