"""Tests of a run whose prompt pool is exhausted: it is evaluated, saved, marked finished, and never continued."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_scalerl.rollouts.prompt import Prompt
from lightning_scalerl.stream.prompts import PoolExhaustedError
from sweeps.run.journal import JournalView, read_journal
from sweeps.run.progress import final_reason, is_done
from tests.helpers import CountingTask, fit

# A prompt retires as soon as its pass rate reaches 0.1.
RUNS_DRY = ("resampling=no_positive", "resampling.pass_rate=0.1")
STEPS = 40


def check_ended(run_dir: Path) -> JournalView:
    view = read_journal(run_dir)
    step = max(record.step for record in view.of_kind("train"))
    assert 0 < step < STEPS
    assert view.of_kind("eval")[-1].step == view.checkpoint_step == step, "the last weights are evaluated, and saved"
    assert (view.status, view.final) == ("finished", True)
    assert str(view.reason).startswith("pool exhausted, which a larger budget does not change: ")
    assert final_reason(run_dir) == view.reason and is_done(run_dir, STEPS, str(view.header["run"]))
    return view


def test_a_run_whose_prompts_are_all_retired_is_finished(tiny_model_path: str, tmp_path: Path) -> None:
    fit(tiny_model_path, tmp_path, steps=STEPS, overrides=RUNS_DRY)
    view = check_ended(tmp_path)
    assert "all 8 prompts of the pool are retired" in str(view.reason)
    # Without the last journal line, as after a kill, and with a larger budget the resumed run ends again.
    path = view.path
    path.write_bytes(b"".join(line + b"\n" for line in path.read_bytes().splitlines()[:-1]))
    fit(tiny_model_path, tmp_path, steps=2 * STEPS, overrides=RUNS_DRY, resume=True)
    resumed_view = check_ended(tmp_path)
    assert resumed_view.deterministic() == view.deterministic() and resumed_view.reason == view.reason


def test_an_exhausted_pool_is_an_error_if_the_trainer_must_continue(tiny_model_path: str) -> None:
    with pytest.raises(PoolExhaustedError, match="all 8 prompts"):
        fit(tiny_model_path, steps=STEPS, overrides=RUNS_DRY, min_steps=STEPS)


class Fading(CountingTask):
    """Task in which every completion is right from the 40th graded one on."""

    left = 40

    def reward(self, prompt: Prompt, completion: str) -> float:
        self.left -= 1
        return super().reward(prompt, completion) if self.left > 0 else 1.0


def test_a_filter_that_drops_every_group_ends_the_run(tiny_model_path: str, tmp_path: Path) -> None:
    fit(
        tiny_model_path,
        tmp_path,
        steps=STEPS,
        overrides=["filter=dynamic_sampling", "filter.most_dropped=2"],
        task=Fading(),
    )
    assert "filter.most_dropped: " in str(check_ended(tmp_path).reason)
