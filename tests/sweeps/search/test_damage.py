"""Tests of damaged files of a study: only damaged lines are lost, and the damage is reported or refused in one line."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend

from sweeps.errors import UserError
from sweeps.launch.ledger import LEDGER_FILE, Ledger
from sweeps.run.files import append_lines, dump_line
from sweeps.run.journal import Journal, JournalError, read_journal
from sweeps.run.progress import is_done, last_metrics
from sweeps.run.spec import RunSpec
from sweeps.search.race_log import RACE_FILE, RaceRecord
from sweeps.search.trials import TRIALS_FILE, _open_study
from sweeps.stopping import RacingRun
from tests.sweeps.search.runners import member

CHANCE = {
    "p_best": 0.5,
    "p_ahead": None,
    "R": {"value": 0.5, "low": None, "high": 0.6},
    "verdict": "ok",
    "below": 0,
}
LOOKS = [
    {
        "compute": float(n),
        "favourite": "a",
        "chances": [{"recipe": name, **CHANCE} for name in "abc"],
        "stopped": ["b"] if n == 4 else [],
        "loss": 0.0,
    }
    for n in range(2, 8)
]
RULES = {"budget": 10.0, "p_ahead": 0.1, "looks": 1, "first": 0.2, "growth": 1.05, "loss": 0.01}
LINES: list[dict[str, Any]] = [
    {"time": 1.0, "kind": "members", "runs": ["r1", "r2", "r3"]},
    {
        "time": 2.0,
        "kind": "race",
        "rules": RULES,
        "axis": "compute/flops",
        "metric": "eval/x/pass_rate",
        "mode": "live",
    },
    *({"time": 3.0, "kind": "look", "mode": "live", "look": look} for look in LOOKS),
    {"kind": "pruned", "run": "r3", "why": "stopped", "look": LOOKS[0]},
    {"kind": "freed", "compute": 3.0, "steps": [{"recipe": "a", "action": "seed", "members": [["r1", "seed=2"]]}]}
    | {"sentence": "one more seed"},
]
# Values that are invalid in every field of a recorded line.
WRONG: list[Any] = [None, True, -1, 2**70, 1e999, "", "x" * 300, "../..", [], [1], {}, {"a": 1}]


def damaged(rng: random.Random, raw: bytes) -> bytes:
    """Return the bytes with flipped bits, a piece removed, the end cut off, or zeros at the start."""
    at = rng.randrange(len(raw))
    changed = bytearray(raw)
    for _ in range(rng.choice((1, 1, 3, 30))):
        changed[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
    return [bytes(changed), raw[:at], raw[:at] + raw[at + rng.randrange(60) :], b"\0" * at + raw[at:]][rng.randrange(4)]


def with_wrong_field(rng: random.Random, entry: Any) -> Any:
    """Return the entry with one invalid field, at any depth."""
    if isinstance(entry, dict) and entry:
        name = rng.choice(sorted(entry))
        wrong = rng.choice(WRONG) if rng.random() < 0.5 else with_wrong_field(rng, entry[name])
        return {**{key: value for key, value in entry.items() if key != name or rng.random() < 0.9}, name: wrong}
    if isinstance(entry, list) and entry and rng.random() < 0.7:
        return [with_wrong_field(rng, entry[0]), *entry[1:]]
    return rng.choice(WRONG)


@pytest.mark.parametrize("checksum", [True, False])
def test_damaged_lines_of_a_race_are_left_out(tmp_path: Path, checksum: bool) -> None:
    rng, path = random.Random(1), tmp_path / RACE_FILE
    raw = b"".join(dump_line(line, checksum) for line in LINES)
    path.write_bytes(raw)
    whole = RaceRecord.read(tmp_path)
    assert (len(whole.looks), list(whole.pruned), whole.members) == (6, ["r3"], ("r1", "r2", "r3"))
    assert whole.trouble is None and set(whole.stopped) == {"b"}
    for _ in range(300):
        if checksum or rng.random() < 0.5:
            path.write_bytes(damaged(rng, raw))
        else:
            lines = [*LINES]
            at = rng.randrange(len(lines))
            lines[at] = with_wrong_field(rng, lines[at])
            path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        race_record = RaceRecord.read(tmp_path)
        assert race_record.sentence and (not checksum or set(race_record.looks) <= set(whole.looks))
    # One damaged line loses only that line, and its number is reported.
    for at in range(2, 8):
        lines = raw.split(b"\n")
        lines[at] = lines[at].replace(b"compute", b"computf")
        path.write_bytes(b"\n".join(lines))
        race_record = RaceRecord.read(tmp_path)
        assert race_record.looks == (*whole.looks[: at - 2], *whole.looks[at - 1 :]) and race_record.damaged == (
            at + 1,
        )
        assert f"race.jsonl: line {at + 1} torn or damaged" in race_record.sentence


def refused_in_a_journal(tmp_path: Path, name: str, wrong: Any) -> None:
    journal = Journal(tmp_path)
    journal.header(**{"run": "a", "recipe": "b", "seed": 0} | ({name: wrong} if name != "step" else {}))
    journal.close()
    line = {"kind": "eval", "time": 1.0, "step": wrong if name == "step" else 3, "metrics": {}}
    raw = dump_line(line) + dump_line({"kind": "end", "time": 2.0, "step": 3, "status": "finished"})
    (tmp_path / "metrics.jsonl").open("ab").write(raw)
    with pytest.raises(
        JournalError, match=rf"^\S+metrics.jsonl, line {1 + (name == 'step')}: not a journal .*{name}: "
    ):
        read_journal(tmp_path)
    assert name != "step" or not is_done(tmp_path, 3, "a")


def refused_in_a_ledger(tmp_path: Path, name: str, wrong: Any) -> None:
    name, wrong = (
        ("time", "3") if name == "step" else (name, wrong)
    )  # a ledger has no steps, so its time is damaged instead
    ledger = Ledger(tmp_path)
    ledger.append("planned", "a", recipe="b", seed=0)
    append_lines(ledger.path, [{"time": 1.0, "event": "planned", "run": "c", "recipe": "d", "seed": 1, name: wrong}])
    assert set(ledger.fold()) == {"a"} and ledger.damaged() == [2]


def refused_in_a_specification(tmp_path: Path, name: str, wrong: Any) -> None:
    member(0.5).write(tmp_path)
    content = json.loads((tmp_path / "spec.json").read_text())
    (tmp_path / "spec.json").write_text(json.dumps({**content, "steps" if name == "step" else name: wrong}))
    with pytest.raises(UserError, match=rf"^\S+spec.json: not a run's frozen specification \({name}s?: ") as caught:
        RunSpec.read(tmp_path)
    assert len(str(caught.value)) < 400 + len(str(tmp_path))


FIELDS: list[tuple[str, tuple[Any, ...]]] = [
    ("recipe", (True, 3, ["a"])),
    ("run", ("x" * 300, "é" * 200, "../a", "", ".", "a\nb", 7)),
    ("seed", (True, 2**70, 0.5, "0")),
    ("step", (2**70, True, 1e300, "3")),
]


@pytest.mark.parametrize("refused", [refused_in_a_journal, refused_in_a_ledger, refused_in_a_specification])
@pytest.mark.parametrize(("name", "values"), FIELDS)
def test_a_field_of_the_wrong_type_is_refused_in_one_line(
    tmp_path: Path, refused: Callable[[Path, str, Any], None], name: str, values: Sequence[Any]
) -> None:
    for number, wrong in enumerate(values):
        folder = tmp_path / str(number)
        folder.mkdir()
        refused(folder, name, wrong)


def test_a_step_that_is_not_a_number_is_ignored(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"kind":"eval","time":1,"step":NaN,"metrics":{}}\n')
    assert last_metrics(tmp_path) == {}


def test_a_training_loop_that_reports_an_impossible_step_continues(tmp_path: Path) -> None:
    run = RacingRun(tmp_path, "a", 0, budget=10.0)
    for step in (2**70, float("inf"), float("nan"), -1):
        assert run.should_stop(step, 0.5, compute=1.0) is None  # type: ignore[arg-type]
    run.should_stop(1, 0.5, compute=1.0)
    run.end()
    assert [record.step for record in read_journal(run.run_dir).records] == [1]


def test_lines_have_checksums_and_optuna_still_reads_its_journal(tmp_path: Path) -> None:
    Ledger(tmp_path).append("planned", "a", recipe="b", seed=0)
    study = _open_study(tmp_path / TRIALS_FILE)
    for value in (0.25, 0.5):
        trial = study.ask()
        trial.suggest_float("x", 0, 1)
        study.tell(trial, value)
    for name in (LEDGER_FILE, TRIALS_FILE):
        assert all(b',"crc":"' in line for line in (tmp_path / name).read_bytes().splitlines())
    storage = JournalStorage(JournalFileBackend(str(tmp_path / TRIALS_FILE)))
    optuna_study = optuna.load_study(storage=storage, study_name="search")
    assert [one_trial.value for one_trial in optuna_study.trials] == [
        one_trial.value for one_trial in _open_study(tmp_path / TRIALS_FILE).trials
    ]
    optuna_study.tell(optuna_study.ask(), 0.75)  # Optuna writes no checksum, like earlier versions of this project
    assert [one_trial.value for one_trial in study.trials] == [0.25, 0.5, 0.75]


def test_a_damaged_journal_of_trials_is_refused_with_its_line(tmp_path: Path) -> None:
    rng, path = random.Random(2), tmp_path / TRIALS_FILE
    study = _open_study(path)
    for value in (0.25, 0.5):
        trial = study.ask()
        trial.suggest_float("x", 0, 1)
        study.tell(trial, value)
    raw = path.read_bytes()
    for at in range(raw.count(b"\n")):
        lines = raw.split(b"\n")
        changed = bytearray(lines[at])
        changed[rng.randrange(len(changed))] ^= 1
        path.write_bytes(b"\n".join([*lines[:at], bytes(changed), *lines[at + 1 :]]))
        with pytest.raises(UserError, match=rf"^\S+optuna.jsonl, line {at + 1}: damaged; restore the file, or move it"):
            _open_study(path)
    path.write_text('{"op_code": 4, "study_id": 0}\n')
    with pytest.raises(UserError, match=r"^\S+optuna.jsonl: no journal of a search \(.*\); restore the file"):
        _open_study(path)
