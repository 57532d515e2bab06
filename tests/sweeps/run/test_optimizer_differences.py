"""`rank` warns if the trainers of a study store weights in different types, or have different epsilons."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sweeps.run.health import optimizer_differences
from sweeps.run.journal import JournalView

OURS = {
    "choices": {},
    "optimizer": {"storage": "fp32", "states": {"exp_avg": "fp32", "exp_avg_sq": "fp32"}, "eps": 1e-15},
}


def view(folder: Path, semantics: dict[str, Any] | None, **settings: str) -> JournalView:
    folder.mkdir()
    if semantics is not None:
        (folder / "semantics.json").write_text(json.dumps(semantics))
    return JournalView(folder / "metrics.jsonl", {"recipe": folder.name, "settings": settings})


def stated(**optimizer: Any) -> dict[str, Any]:
    return {"member": "command", "optimizer": {"trainer": "verl", **optimizer}}


@pytest.mark.parametrize(
    ("theirs", "said"),
    [
        (stated(storage="bf16"), "storage is fp32 in lightning-scalerl and bf16 in verl"),
        (stated(storage="fp32", eps=1e-8), "eps is 1e-15 in lightning-scalerl and 1e-08 in verl"),
        (stated(states="bf16"), "states is fp32 in lightning-scalerl and bf16 in verl"),
        (stated(storage="fp32", states="fp32", eps="1.0e-15"), None),
        ({"member": "command", "optimizer": {}}, None),
        ({"member": "command"}, None),
        (None, None),
        ([], None),
    ],
)
def test_trainers_that_differ_are_told_in_one_line(theirs: Any, said: str | None, tmp_path: Path) -> None:
    found = optimizer_differences([view(tmp_path / "ours", OURS), view(tmp_path / "theirs", theirs)])
    assert len(found) == (said is not None)
    assert said is None or said in found[0]


def test_an_adopted_run_states_it_in_its_columns(tmp_path: Path) -> None:
    adopted = view(tmp_path / "theirs", None, storage="bf16", eps="1e-08", trainer="trl")
    (line,) = optimizer_differences([view(tmp_path / "ours", OURS), adopted])
    assert line.endswith(
        "storage is fp32 in lightning-scalerl and bf16 in trl; eps is 1e-15 in lightning-scalerl and 1e-08 in trl"
    )


def test_optimizers_of_one_trainer_are_what_a_study_varies(tmp_path: Path) -> None:
    other = {"choices": {}, "optimizer": {"storage": "bf16", "states": {"exp_avg": "bf16"}, "eps": 1e-8}}
    assert optimizer_differences([view(tmp_path / "one", OURS), view(tmp_path / "two", other)]) == []
