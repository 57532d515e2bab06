"""`Race`: a script's run that watches its rivals and stops when it will not be best."""

from __future__ import annotations

import json
import logging
import re
from dataclasses import replace
from pathlib import Path

import pytest

from lightning_scalerl import ConfigurationError, Evaluate, Race, RunLog
from sweeps.decide.rules import Rules
from sweeps.errors import UserError
from sweeps.run.journal import Journal, read_journal
from sweeps.search.looks import RaceWithoutController
from tests.helpers import SMALL_CORE, fit
from tests.sweeps.search.runners import EVERY, STEPS, evaluation, member

RATE = "eval/heldout/pass_rate"
AXIS = "compute/virtual_device_hours"
BUDGET_STEPS = 24


def rival(study: Path, template: Path, name: str, top: float) -> None:
    """Write a finished run with the evaluations of another run and pass rates that rise to about `top`."""
    journal = Journal(study / name)
    journal.header(**{**read_journal(template).header, "run": name, "recipe": name, "curve": name})
    records = read_journal(template).of_kind("eval")
    end = records[-1].metrics[AXIS]
    for record in records:
        share = record.metrics[AXIS] / end
        rate = 0.0 if share == 0 else top / (1 + (0.25 / share) ** 1.8)
        journal.record("eval", record.step, {**record.metrics, RATE: rate, f"{RATE}_se": 0.01})
    journal.end(records[-1].step, "finished")
    journal.close()


@pytest.fixture(scope="module")
def study(tiny_model_path: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, float]:
    """A folder with one rival that learns, and the compute of a whole run."""
    folder = tmp_path_factory.mktemp("race")
    fit(tiny_model_path, folder / "whole", BUDGET_STEPS)
    (folder / "study").mkdir()
    rival(folder / "study", folder / "whole", "rival", 0.9)
    return folder, read_journal(folder / "whole").of_kind("eval")[-1].metrics[AXIS]


@pytest.mark.slow
def test_a_run_that_will_not_be_best_stops_is_saved_and_can_continue(
    tiny_model_path: str, study: tuple[Path, float], caplog: pytest.LogCaptureFixture
) -> None:
    folder, budget = study
    run_dir = folder / "study" / "mine"
    with caplog.at_level(logging.WARNING):
        fit(tiny_model_path, run_dir, BUDGET_STEPS, [Race(folder / "study", budget, p_ahead=0.2)])
    stopped = read_journal(run_dir)
    last = stopped.records[-1].step
    assert BUDGET_STEPS / 5 <= last < BUDGET_STEPS
    assert stopped.reason == "stopped before max_steps by a callback of the Trainer"
    assert "of ending ahead of rival" in caplog.text
    looks = [json.loads(line)["look"] for line in (run_dir / "race.jsonl").read_text().splitlines()]
    assert looks[-1]["stopped"] == [SMALL_CORE] and all(not look["stopped"] for look in looks[:-1])
    # Continued without the callback, the run equals one that was never stopped.
    fit(tiny_model_path, run_dir, BUDGET_STEPS, resume=True)
    assert read_journal(run_dir).deterministic() == read_journal(folder / "whole").deterministic()


@pytest.mark.full
def test_a_dry_run_says_so_and_stops_nothing(
    tiny_model_path: str, study: tuple[Path, float], caplog: pytest.LogCaptureFixture
) -> None:
    folder, budget = study
    with caplog.at_level(logging.WARNING):
        race = Race(folder / "study", budget, p_ahead=0.2, dry_run=True)
        fit(tiny_model_path, folder / "study" / "dry", BUDGET_STEPS, [race])
    assert read_journal(folder / "study" / "dry").records[-1].step == BUDGET_STEPS
    assert caplog.text.count("race: would be stopped at compute") == 1


@pytest.mark.full
def test_the_leader_is_not_stopped(tiny_model_path: str, study: tuple[Path, float], tmp_path: Path) -> None:
    folder, budget = study
    rival(tmp_path, folder / "whole", "rival", 0.0)
    fit(tiny_model_path, tmp_path / "mine", 12, [Race(tmp_path, budget)])
    assert read_journal(tmp_path / "mine").records[-1].step == 12


@pytest.mark.slow
def test_a_rival_that_cannot_be_compared_does_not_end_the_fit(
    tiny_model_path: str, study: tuple[Path, float], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, budget = study
    rival(tmp_path, folder / "whole", "rival", 0.9)
    other = Journal(tmp_path / "other")
    other.header(**{**read_journal(folder / "whole").header, "run": "other", "recipe": "other", "curve": "other"})
    other.record("eval", 0, {"eval/elsewhere/pass_rate": 0.5})
    other.close()
    with caplog.at_level(logging.WARNING):
        fit(tiny_model_path, tmp_path / "mine", 12, [Race(tmp_path, budget)])
    assert read_journal(tmp_path / "mine").records[-1].step == 12
    assert caplog.text.count("race: no look: ") == 1 and not (tmp_path / "mine" / "race.jsonl").exists()


@pytest.mark.slow
def test_scripts_that_share_a_label_do_not_race_and_are_warned_once(
    tiny_model_path: str, study: tuple[Path, float], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, budget = study
    rival(tmp_path, folder / "whole", SMALL_CORE, 0.9)
    with caplog.at_level(logging.WARNING):
        fit(tiny_model_path, tmp_path / "mine", 12, [Race(tmp_path, budget)])
    (warning,) = [record.message for record in caplog.records if record.message.startswith("race: ")]
    assert warning.startswith(f"race: 2 runs in {tmp_path.resolve()} have the label {SMALL_CORE!r}, and do not race")
    assert warning.endswith("give each recipe its own label, RunLog(run_dir, {'recipe': NAME})")


def test_a_study_folder_that_is_itself_a_run_is_refused(tmp_path: Path) -> None:
    mine = write_running_run(tmp_path, 0.7, 4)
    Journal(tmp_path).close()
    with pytest.raises(UserError, match=r"is a run itself \(metrics\.jsonl\)"):
        RaceWithoutController(tmp_path, mine, Rules(1.0, 0.05))


def test_runs_with_one_label_need_different_seeds_and_a_rival(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    mine, rules = write_running_run(tmp_path, 0.7, 4), Rules(1.0, 0.05)
    RaceWithoutController(tmp_path, mine, rules).take()
    assert not caplog.text, "a run without rivals gives no warning"
    for name, recipe, seed in (("b", "scalerl+a=0.7", 1), ("c", "other", 0), ("d", "scalerl+a=0.7", 0)):
        journal = Journal(tmp_path / name)
        journal.header(**{**member(0.7).header(), "run": name, "recipe": recipe, "seed": seed})
        journal.close()
        caplog.clear()
        RaceWithoutController(tmp_path, mine, rules).take()
        assert ("have the label" in caplog.text) == (name != "c"), (
            "warn if there is no other label (b) or a seed occurs twice (d)"
        )


@pytest.mark.slow
def test_a_fast_dev_run_takes_no_looks(tiny_model_path: str, study: tuple[Path, float], tmp_path: Path) -> None:
    folder, budget = study
    rival(tmp_path, folder / "whole", "rival", 0.9)
    fit(tiny_model_path, tmp_path / "mine", 12, [Race(tmp_path, budget)], fast_dev_run=4)
    assert not list(tmp_path.rglob("race.jsonl"))


def test_missing_requirements_are_refused(tiny_model_path: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="Race: needs a RunLog beside it"):
        fit(tiny_model_path, callbacks=[Race(tmp_path, 1.0), Evaluate(2, 1)])
    with pytest.raises(ConfigurationError, match=r"Race: study: .*mine is not in .*elsewhere"):
        fit(tiny_model_path, callbacks=[Race(tmp_path / "elsewhere", 1.0), RunLog(tmp_path / "mine"), Evaluate(2, 1)])
    with pytest.raises(ConfigurationError, match=r"Race: p-ahead 0\.9: give a chance"):
        Race(tmp_path, 1.0, p_ahead=0.9)


# --- several runs that look ----------------------------------------------------------------------------------


def write_running_run(study: Path, a: float, last_step: int) -> Path:
    """Write a run that has been evaluated up to a step and is still running."""
    spec = member(a)
    journal = Journal(study / spec.run)
    journal.header(**spec.header(), device="cpu")
    for step in range(0, last_step + 1, EVERY):
        journal.record("eval", step, evaluation(spec, step))
    journal.close()
    return study / spec.run


def test_runs_decide_alike_whenever_they_look(tmp_path: Path) -> None:
    rules = Rules(1.0, 0.05, growth=1.2)
    good, bad = write_running_run(tmp_path, 0.7, 20), write_running_run(tmp_path, 0.4, 6)
    early = RaceWithoutController(tmp_path, good, rules)
    assert early.take() is None and not (good / "race.jsonl").exists(), "the first look waits for the other run"
    for run_dir in (good, bad):
        journal = Journal(run_dir)
        spec = member(0.7 if run_dir == good else 0.4)
        for step in range((20 if run_dir == good else 6) + EVERY, STEPS + 1, EVERY):
            journal.record("eval", step, evaluation(spec, step))
        journal.close()
    assert early.take() is None, "the leader is not stopped"
    late = RaceWithoutController(tmp_path, bad, rules)
    assert "of ending ahead of scalerl+a=0.7" in str(late.take())
    assert (good / "race.jsonl").read_text() == (bad / "race.jsonl").read_text()
    assert RaceWithoutController(tmp_path, bad, rules).take() == late.take(), "a restarted run gets the same answer"
    with pytest.raises(UserError, match="looked by other rules"):
        RaceWithoutController(tmp_path, bad, Rules(1.0, 0.2))
    # Looks recorded before the rule `loss` existed are continued without it.
    path = bad / "race.jsonl"
    path.write_text(re.sub(r',"crc":"\w+"', "", path.read_text().replace(f',"loss":{rules.loss}', "")))
    assert '"loss"' not in path.read_text().split('"look"')[0]
    assert RaceWithoutController(tmp_path, bad, rules).take() == late.take()
    with pytest.raises(UserError, match="looked by other rules"):
        RaceWithoutController(tmp_path, bad, replace(rules, loss=0.5))
    path.write_text(path.read_text().replace('"growth"', '"pace"'))
    with pytest.raises(UserError, match="looked by other rules"):
        RaceWithoutController(tmp_path, bad, rules)


def test_a_look_neither_waits_for_a_failed_run_nor_judges_it(tmp_path: Path) -> None:
    good = write_running_run(tmp_path, 0.7, STEPS)
    write_running_run(tmp_path, 0.65, STEPS)
    failed = Journal(write_running_run(tmp_path, 0.66, 12))
    failed.end(12, "failed", "ValueError: no good")
    failed.close()
    looks = RaceWithoutController(tmp_path, good, Rules(1.0, 0.05, growth=1.2))
    looks.take()
    recorded = [json.loads(line)["look"] for line in (good / "race.jsonl").read_text().splitlines()]
    assert [any(chance["recipe"] == "scalerl+a=0.66" for chance in look["chances"]) for look in recorded] == [
        look["compute"] <= 12 / STEPS for look in recorded
    ]
    assert len(recorded) > 4
