"""Tests of the real model's page: its tables come from journals, and only finished runs are copied."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from sweeps.run.journal import Journal
from tests.paths import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
import real_model

from benchmarks.gpu import real_model as on_gpu


def run(folder: Path, name: str, seed: int, rates: tuple[float, ...], ended: bool = True) -> None:
    """Write a run's journal and rollouts: an evaluation every ten steps, with half the pass rate on the second set."""
    place = folder / "runs" / name
    journal = Journal(place, clock=lambda: 60.0 * seed)
    journal.header(recipe="scalerl+length_control=none+truncated=keep+precision=fp32+loss=dapo", seed=seed, run=name)
    for number, rate in enumerate(rates):
        step, spent = 10 * number, 3600.0
        compute = {"compute/flops": 1e12 * number, "compute/device_hours_generate": 20 * number / spent}
        costs = {**compute, "compute/device_hours_train": 50 * number / spent, "time/evaluate_s": 30.0 * (number + 1)}
        if number:
            journal.record("train", step, costs)
        journal.record("eval", step, {real_model.PASS: rate, real_model.CARRIED: rate / 2, **costs})
    if ended:
        journal.end(step, "finished")
    journal.close()
    groups = [
        {"step": step, "prompt": "Calculate 4 - 1.", "answer": "3", "rollouts": [{"completion": text}] * 8}
        for step, text in ((1, "4 - 1 | is\n"), (step, "3"))
    ]
    (place / "rollouts.jsonl").write_text("".join(json.dumps(group) + "\n" for group in groups))


def test_tables_come_from_finished_journals(tmp_path: Path) -> None:
    run(tmp_path / "study", "a", 0, (0.1, 0.2, 0.4))
    run(tmp_path / "study", "b", 1, (0.1, 0.3, 0.6))
    run(tmp_path / "study", "c", 2, (0.1, 0.3), ended=False)
    assert real_model.copy_finished(tmp_path / "study", tmp_path / "kept") == 2
    assert real_model.copy_finished(tmp_path / "study", tmp_path / "kept") == 0, "none of them is new"
    members = real_model.finished(tmp_path / "kept")
    assert [member.folder.name for member in members] == ["a", "b"]
    *_, row = real_model.results(members)
    assert row == "| scalerl+loss=dapo | 2 | 20 | 0.100 | 0.500 | +0.400 ± 0.100 | 0.050 | 0.250 |"
    *_, row = real_model.times(members)
    assert row == "| scalerl+loss=dapo, 1 | 20.0 | 50.0 | 30 | 0 |"
    first, last = list(real_model.completions(members[0]))[2:]
    assert first.startswith("| 1 | Calculate 4 - 1. | 3 | `4 - 1 / is`, ") and last.endswith("| `3`, `3`, `3`, `3` |")
    real_model.draw(members, tmp_path / "curves.svg")
    assert "held-out pass rate" in (tmp_path / "curves.svg").read_text()


def test_the_page_has_the_markers_of_every_table() -> None:
    page = real_model.PAGE.read_text()
    for mark in ("results", "ranking", "completions", "times"):
        page = real_model.between(page, mark, [f"{mark} are here"])
        assert f"<!-- {mark} -->\n{mark} are here\n<!-- /{mark} -->" in page
    with pytest.raises(SystemExit, match="lacks the marks of findings"):
        real_model.between(page, "findings", [])


def test_the_gpu_script_joins_halves_and_summarizes_a_run(tmp_path: Path) -> None:
    for name, content in (("a", b"GGUF first"), ("b", b" second")):
        (tmp_path / name).write_bytes(content)
    folder = on_gpu.joined([tmp_path / "a", tmp_path / "b"], tmp_path / "model")
    assert (folder / "model.gguf").read_bytes() == b"GGUF first second"
    journal = Journal(tmp_path / "run")
    journal.header(recipe="scalerl", seed=0)
    for step, tokens in ((1, 8.0), (2, 4.0)):
        spent = {"compute/device_hours_generate": step / 3600, "compute/device_hours_train": 2 * step / 3600}
        journal.record("train", step, {"train/completion_tokens": tokens, "verify/scored": 50.0 * step, **spent,
                                       "compute/flops_train": 989e12 * step})  # fmt: skip
        journal.record("eval", step, {real_model.PASS: 0.25 * step})
    journal.end(2, "finished")
    journal.close()
    gpu_summary = on_gpu.summary(real_model.read_journal(tmp_path / "run"))
    assert gpu_summary["tokens_a_second"] == pytest.approx(100 * 6 / 2)
    assert gpu_summary["share_of_the_peak_in_training"] == pytest.approx(0.5)
    assert (gpu_summary["status"], gpu_summary["pass_rate"]) == ("finished", [[1, 0.25], [2, 0.5]])
