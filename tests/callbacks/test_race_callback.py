"""`race_callback` with transformers' Trainer: it reports evaluations, is stopped and saved, and can continue."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

from sweeps.errors import UserError
from sweeps.launch.adoption import adopt
from sweeps.run.journal import read_journal
from sweeps.source import load
from sweeps.stopping import race_callback
from tests.paths import ROOT

STEPS, EVERY = 20, 2


class Line(torch.nn.Module):
    """A model of two weights with a squared loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """Shapes: both (R, 1)."""
        guess = self.layer(input_ids.float())
        return {"loss": (guess - labels).square().mean(), "logits": guess}


def trainer(folder: Path, reward: float, callbacks: list[Any], steps: int = STEPS) -> Trainer:
    """A Trainer whose evaluations report a reward that rises towards `reward`."""
    data = [{"input_ids": torch.tensor([n % 3]), "labels": torch.tensor([1.0])} for n in range(8)]
    arguments = TrainingArguments(
        output_dir=str(folder), max_steps=steps, eval_strategy="steps", eval_steps=EVERY, save_strategy="steps",
        save_steps=10**6, per_device_train_batch_size=2, report_to=[], use_cpu=True, disable_tqdm=True,
        logging_strategy="no", include_num_input_tokens_seen="all", eval_on_start=True,
    )  # fmt: skip
    hf_trainer: Trainer

    def reward_now(_: Any) -> dict[str, float]:
        step = hf_trainer.state.global_step
        return {"reward": 0.2 + (reward - 0.2) * step / (step + 4) + 0.004 * (-1) ** (step // EVERY)}

    hf_trainer = Trainer(
        model=Line(), args=arguments, train_dataset=data, eval_dataset=data[:2], compute_metrics=reward_now,
        callbacks=callbacks,
    )  # fmt: skip
    return hf_trainer


@pytest.fixture
def study(tmp_path: Path) -> Path:
    """A study with one adopted rival whose reward rises towards 0.9."""
    rows = [
        {"recipe": "rival", "seed": 0, "tokens": 2.0 * n, "reward": 0.2 + 0.7 * n / (n + 4)}
        for n in range(0, STEPS + 1, EVERY)
    ]
    (tmp_path / "rival.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    adopt(tmp_path / "study", [str(tmp_path / "rival.jsonl")], ["recipe,seed"])
    return tmp_path / "study"


def test_a_training_that_will_not_be_best_is_stopped_saved_and_can_continue(
    study: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    race = race_callback(study, "mine", 1, budget=2.0 * STEPS, p_ahead=0.1, growth=1.5, wait_s=60)
    assert isinstance(race, TrainerCallback)
    with caplog.at_level(logging.WARNING):
        first = trainer(tmp_path / "out", 0.3, [race])
        first.train()
    reached = first.state.global_step
    assert STEPS / 5 <= reached < STEPS and "of ending ahead of rival" in caplog.text
    assert (tmp_path / "out" / f"checkpoint-{reached}").is_dir(), "saved where it was stopped"
    (mine,) = [curve for curve in load([study]).curves if curve.recipe == "mine"]
    assert mine.axis == "compute/tokens" and len(mine.compute) == reached // EVERY + 1
    assert mine.compute.tolist() == [2.0 * step for step in range(0, reached + 1, EVERY)]
    trainer(tmp_path / "out", 0.3, []).train(resume_from_checkpoint=True)


def test_the_leader_runs_to_its_end(study: Path, tmp_path: Path) -> None:
    hf_trainer = trainer(
        tmp_path / "out", 0.95, [race_callback(study, "mine", 1, budget=2.0 * STEPS, growth=3, wait_s=60)]
    )
    hf_trainer.train()
    assert hf_trainer.state.global_step == STEPS
    (view,) = [v for path in (study / "runs").iterdir() if (v := read_journal(path)).header["recipe"] == "mine"]
    assert view.status == "finished" and view.records[-1].step == STEPS


def test_a_label_that_is_taken_is_refused_before_training(study: Path, tmp_path: Path) -> None:
    hf_trainer = trainer(tmp_path / "out", 0.5, [race_callback(study, "rival", 0, budget=9.0)])
    with pytest.raises(UserError, match=r"is a member of .* already"):
        hf_trainer.train()
    assert hf_trainer.state.global_step == 0


@pytest.mark.full
def test_all_ranks_stop_at_the_same_step(study: Path, tmp_path: Path) -> None:
    code = f"""
import os
from pathlib import Path
from sweeps.stopping import race_callback
from tests.paths import ROOT
from tests.callbacks.test_race_callback import STEPS, trainer
race = race_callback(Path({str(study)!r}), "mine", 1, budget=2.0 * STEPS, growth=1.5, wait_s=60)
made = trainer(Path({str(tmp_path / "out")!r}), 0.3, [race])
made.train()
Path({str(tmp_path)!r}, "rank" + os.environ["RANK"]).write_text(str(made.state.global_step))
"""
    (tmp_path / "ranks.py").write_text(code)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, str(tmp_path / "ranks.py")], cwd=ROOT, capture_output=True, text=True, timeout=300,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    first, second = ((tmp_path / f"rank{n}").read_text() for n in (0, 1))
    assert first == second and int(first) < STEPS
