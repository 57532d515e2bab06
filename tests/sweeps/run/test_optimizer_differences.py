"""Tests of the warning of `rank` if trainers of a study store weights in different types or use different epsilons."""

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


def optimizer_settings(**optimizer: Any) -> dict[str, Any]:
    return {"member": "command", "optimizer": {"trainer": "verl", **optimizer}}


@pytest.mark.parametrize(
    ("semantics", "message"),
    [
        (optimizer_settings(storage="bf16"), "storage is fp32 in lightning-scalerl and bf16 in verl"),
        (optimizer_settings(storage="fp32", eps=1e-8), "eps is 1e-15 in lightning-scalerl and 1e-08 in verl"),
        (optimizer_settings(states="bf16"), "states is fp32 in lightning-scalerl and bf16 in verl"),
        (optimizer_settings(storage="fp32", states="fp32", eps="1.0e-15"), None),
        ({"member": "command", "optimizer": {}}, None),
        ({"member": "command"}, None),
        (None, None),
        ([], None),
    ],
)
def test_differences_between_trainers_are_named_in_one_line(
    semantics: Any, message: str | None, tmp_path: Path
) -> None:
    warnings = optimizer_differences([view(tmp_path / "ours", OURS), view(tmp_path / "theirs", semantics)])
    assert len(warnings) == (message is not None)
    assert message is None or message in warnings[0]


def test_optimizer_settings_of_an_adopted_run_are_read_from_its_columns(tmp_path: Path) -> None:
    adopted = view(tmp_path / "theirs", None, storage="bf16", eps="1e-08", trainer="trl")
    (line,) = optimizer_differences([view(tmp_path / "ours", OURS), adopted])
    assert line.endswith(
        "storage is fp32 in lightning-scalerl and bf16 in trl; eps is 1e-15 in lightning-scalerl and 1e-08 in trl"
    )


def test_differences_within_one_trainer_are_not_reported(tmp_path: Path) -> None:
    other = {"choices": {}, "optimizer": {"storage": "bf16", "states": {"exp_avg": "bf16"}, "eps": 1e-8}}
    assert optimizer_differences([view(tmp_path / "one", OURS), view(tmp_path / "two", other)]) == []
