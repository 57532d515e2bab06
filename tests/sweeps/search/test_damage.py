"""Truths about damaged records of a study: only what is damaged is lost, and that is said or refused in one line."""

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
# What no field of a recorded line may be.
WRONG: list[Any] = [None, True, -1, 2**70, 1e999, "", "x" * 300, "../..", [], [1], {}, {"a": 1}]


def damaged(luck: random.Random, raw: bytes) -> bytes:
    """Some bits flipped, a piece taken out, or the end cut off."""
    at = luck.randrange(len(raw))
    changed = bytearray(raw)
    for _ in range(luck.choice((1, 1, 3, 30))):
        changed[luck.randrange(len(raw))] ^= 1 << luck.randrange(8)
    return [bytes(changed), raw[:at], raw[:at] + raw[at + luck.randrange(60) :], b"\0" * at + raw[at:]][
        luck.randrange(4)
    ]


def with_wrong_field(luck: random.Random, entry: Any) -> Any:
    """The entry with one field of another kind, at any depth."""
    if isinstance(entry, dict) and entry:
        name = luck.choice(sorted(entry))
        wrong = luck.choice(WRONG) if luck.random() < 0.5 else with_wrong_field(luck, entry[name])
        return {**{key: value for key, value in entry.items() if key != name or luck.random() < 0.9}, name: wrong}
    if isinstance(entry, list) and entry and luck.random() < 0.7:
        return [with_wrong_field(luck, entry[0]), *entry[1:]]
    return luck.choice(WRONG)


@pytest.mark.parametrize("checksum", [True, False])
def test_a_damaged_race_is_read_without_its_damaged_lines(tmp_path: Path, checksum: bool) -> None:
    luck, path = random.Random(1), tmp_path / RACE_FILE
    raw = b"".join(dump_line(line, checksum) for line in LINES)
    path.write_bytes(raw)
    whole = RaceRecord.read(tmp_path)
    assert (len(whole.looks), list(whole.pruned), whole.members) == (6, ["r3"], ("r1", "r2", "r3"))
    assert whole.trouble is None and set(whole.stopped) == {"b"}
    for _ in range(300):
        if checksum or luck.random() < 0.5:
            path.write_bytes(damaged(luck, raw))
        else:
            lines = [*LINES]
            at = luck.randrange(len(lines))
            lines[at] = with_wrong_field(luck, lines[at])
            path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        found = RaceRecord.read(tmp_path)
        assert found.sentence and (not checksum or set(found.looks) <= set(whole.looks))
    # One damaged line costs nothing but what stood there, which is named.
    for at in range(2, 8):
        lines = raw.split(b"\n")
        lines[at] = lines[at].replace(b"compute", b"computf")
        path.write_bytes(b"\n".join(lines))
        found = RaceRecord.read(tmp_path)
        assert found.looks == (*whole.looks[: at - 2], *whole.looks[at - 1 :]) and found.damaged == (at + 1,)
        assert f"race.jsonl: line {at + 1} torn or damaged" in found.sentence


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
    name, wrong = ("time", "3") if name == "step" else (name, wrong)  # a ledger has no steps
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
def test_a_field_of_another_kind_is_refused_in_one_line(
    tmp_path: Path, refused: Callable[[Path, str, Any], None], name: str, values: Sequence[Any]
) -> None:
    for number, wrong in enumerate(values):
        folder = tmp_path / str(number)
        folder.mkdir()
        refused(folder, name, wrong)


def test_a_step_that_is_no_number_is_none(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"kind":"eval","time":1,"step":NaN,"metrics":{}}\n')
    assert last_metrics(tmp_path) == {}


def test_a_loop_that_reports_a_step_that_none_can_have_goes_on(tmp_path: Path) -> None:
    run = RacingRun(tmp_path, "a", 0, budget=10.0)
    for step in (2**70, float("inf"), float("nan"), -1):
        assert run.should_stop(step, 0.5, compute=1.0) is None  # type: ignore[arg-type]
    run.should_stop(1, 0.5, compute=1.0)
    run.end()
    assert [record.step for record in read_journal(run.run_dir).records] == [1]


def test_lines_of_ledger_race_and_trials_have_checksums_and_optuna_reads_its_own(tmp_path: Path) -> None:
    Ledger(tmp_path).append("planned", "a", recipe="b", seed=0)
    study = _open_study(tmp_path / TRIALS_FILE)
    for value in (0.25, 0.5):
        trial = study.ask()
        trial.suggest_float("x", 0, 1)
        study.tell(trial, value)
    for name in (LEDGER_FILE, TRIALS_FILE):
        assert all(b',"crc":"' in line for line in (tmp_path / name).read_bytes().splitlines())
    storage = JournalStorage(JournalFileBackend(str(tmp_path / TRIALS_FILE)))
    theirs = optuna.load_study(storage=storage, study_name="search")
    assert [each.value for each in theirs.trials] == [each.value for each in _open_study(tmp_path / TRIALS_FILE).trials]
    theirs.tell(theirs.ask(), 0.75)  # without a checksum, as in a journal of an earlier version
    assert [each.value for each in study.trials] == [0.25, 0.5, 0.75]


def test_a_damaged_journal_of_trials_is_refused_with_its_line(tmp_path: Path) -> None:
    luck, path = random.Random(2), tmp_path / TRIALS_FILE
    study = _open_study(path)
    for value in (0.25, 0.5):
        trial = study.ask()
        trial.suggest_float("x", 0, 1)
        study.tell(trial, value)
    raw = path.read_bytes()
    for at in range(raw.count(b"\n")):
        lines = raw.split(b"\n")
        changed = bytearray(lines[at])
        changed[luck.randrange(len(changed))] ^= 1
        path.write_bytes(b"\n".join([*lines[:at], bytes(changed), *lines[at + 1 :]]))
        with pytest.raises(UserError, match=rf"^\S+optuna.jsonl, line {at + 1}: damaged; restore the file, or move it"):
            _open_study(path)
    path.write_text('{"op_code": 4, "study_id": 0}\n')
    with pytest.raises(UserError, match=r"^\S+optuna.jsonl: no journal of a search \(.*\); restore the file"):
        _open_study(path)
