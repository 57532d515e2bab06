"""Lightning's features around a run: loggers, callbacks, validate, further fits, loading, refused settings."""

from __future__ import annotations

import csv
import itertools
import math
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningDataModule, Trainer
from lightning.pytorch.callbacks import (
    Callback,
    EarlyStopping,
    LearningRateMonitor,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.loggers import CSVLogger, Logger, MLFlowLogger, TensorBoardLogger

from lightning_scalerl import (
    CISPO,
    ConfigurationError,
    DatasetTask,
    Evaluate,
    Prompt,
    ResumableCheckpoint,
    RolloutDataModule,
    RunLog,
    ScaleRL,
)
from lightning_scalerl.axes.filter import NoFilter
from lightning_scalerl.axes.loss import DAPO
from lightning_scalerl.axes.precision import Precision
from lightning_scalerl.callbacks.base import Recorder
from lightning_scalerl.callbacks.checkpointing import newest_checkpoint
from lightning_scalerl.composition import load_recipe
from lightning_scalerl.model.load import load_model, load_tokenizer
from lightning_scalerl.verify.verification import RewardError
from sweeps.run.journal import read_journal
from tests.distributed.test_ranks import fit as fit_on_ranks
from tests.distributed.test_ranks import on_ranks
from tests.examples import every
from tests.helpers import SMALL, STRICT, CountingTask, fit, quiet

RATE = "eval/heldout/pass_rate"
Cells = dict[tuple[int, str], float]


def journal_cells(run_dir: Path) -> Cells:
    """The journal's values by step and metric. If both records of a step hold a metric (compute), the first counts."""
    cells: Cells = {}
    for record in read_journal(run_dir).records:
        cells = {(record.step, name): value for name, value in record.metrics.items()} | cells
    return cells


def csv_cells(folder: Path) -> Cells:
    cells: Cells = {}
    for path in sorted(folder.rglob("metrics.csv"), key=lambda path: path.stat().st_mtime):
        process_cells: Cells = {}
        for line in csv.DictReader(path.open()):
            step = int(line.pop("step"))
            fresh = {(step, name): float(value) for name, value in line.items() if value and name != "epoch"}
            twice = {key for key in fresh.keys() & process_cells.keys() if not key[1].startswith("lr-")}
            assert not twice, "a cell is written twice"
            process_cells |= fresh
        cells |= process_cells
    return cells


def tensorboard_cells(folder: Path) -> Cells:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    cells: Cells = {}
    for path in sorted(folder.rglob("events.*"), key=lambda path: path.stat().st_mtime):
        events = EventAccumulator(str(path), size_guidance={"scalars": 0})
        events.Reload()
        for name in events.Tags()["scalars"]:
            cells |= {(event.step, name): event.value for event in events.Scalars(name)}
    return {key: value for key, value in cells.items() if key[1] not in ("hp_metric", "epoch")}


def mlflow_cells(uri: str) -> Cells:
    from mlflow import MlflowClient

    client = MlflowClient(uri)
    (experiment,) = [each.experiment_id for each in client.search_experiments() if each.name == "ours"]
    cells: Cells = {}
    for run in sorted(client.search_runs([experiment]), key=lambda run: run.info.start_time):
        for name in run.data.metrics:
            cells |= {(each.step, name): each.value for each in client.get_metric_history(run.info.run_id, name)}
    return cells


def three_loggers(folder: Path) -> list[Logger]:
    return [
        CSVLogger(str(folder), name="csv"),
        TensorBoardLogger(str(folder), name="tensorboard"),
        MLFlowLogger("ours", tracking_uri=f"sqlite:///{folder}/mlflow.db", artifact_location=str(folder)),
    ]


def assert_loggers_hold_the_journal(folder: Path, run_dir: Path) -> None:
    journal = journal_cells(run_dir)
    assert len(journal) > 100 and {step for step, name in journal if name == RATE} == {0, 2, 4, 5}
    assert csv_cells(folder) == journal
    # Lightning's logger drops characters that MLflow does not accept: pass@2 becomes pass2.
    expected = {(step, name.replace("@", "")): value for (step, name), value in journal.items()}
    assert len(expected) == len(journal) and mlflow_cells(f"sqlite:///{folder}/mlflow.db") == expected
    # TensorBoard stores FP32.
    rounded = {key: float(torch.tensor(value, dtype=torch.float32)) for key, value in journal.items()}
    assert tensorboard_cells(folder) == pytest.approx(rounded, rel=1e-7)


class RaisesOnce(CountingTask):
    """A task whose reward raises an error once, in the middle of the run."""

    def __init__(self, after: int) -> None:
        super().__init__()
        self.left = after

    def reward(self, prompt: Any, completion: str) -> float:
        self.left -= 1
        if self.left == 0:
            raise ZeroDivisionError
        return super().reward(prompt, completion)


@pytest.mark.full
def test_every_logger_holds_the_journal_cell_by_cell_across_a_resume(
    tiny_model_path: str, tmp_path: Path, schema: Path
) -> None:
    """The run breaks after a checkpoint at step 3 and a record of step 4, which the resume makes again."""
    shutil.copy(schema, tmp_path / "mlflow.db")
    run_dir = tmp_path / "run"
    with pytest.raises(RewardError):
        fit(
            tiny_model_path,
            run_dir,
            5,
            task=RaisesOnce(87),
            checkpoint_every=3,
            overrides=STRICT,
            logger=three_loggers(tmp_path),
        )
    assert read_journal(run_dir).records[-1].step == 4
    options: dict[str, Any] = {"logger": three_loggers(tmp_path), "checkpoint_every": 3, "resume": True}
    options["overrides"] = STRICT
    module = fit(tiny_model_path, run_dir, 5, **options)
    # Loggers cannot delete the first process's points of step 4 (its own wall-clock times). The later points count.
    assert_loggers_hold_the_journal(tmp_path, run_dir)
    last = {name: value for record in read_journal(run_dir).records for name, value in record.metrics.items()}
    shown = {name: float(value) for name, value in module.trainer.callback_metrics.items()}
    assert shown == last


@pytest.mark.full
def test_two_ranks_log_as_one(tiny_model_path: str, tmp_path: Path, schema: Path) -> None:
    shutil.copy(schema, tmp_path / "mlflow.db")
    three_loggers(tmp_path)[-1].experiment  # noqa: B018  # imports MLflow before the ranks are forked
    run_dir = tmp_path / "run"

    def work(resume: bool) -> Any:
        ready = tmp_path / f"ready-{resume}"

        def on_rank(rank: int) -> str:
            while rank > 0 and not ready.exists():
                time.sleep(0.02)  # two processes cannot create the same MLflow database
            loggers = three_loggers(tmp_path)
            ready.touch()
            try:
                fit_on_ranks(
                    tiny_model_path, run_dir, 2, 5, checkpoint_every=3, resume=resume, logger=loggers,
                    task=CountingTask() if resume else RaisesOnce(87), recipe="scalerl_core", overrides=STRICT,
                )  # fmt: skip
            except Exception as error:
                return type(error).__name__
            return "done"

        return on_rank

    assert on_ranks(2, work(resume=False)) == ["RewardError", "LeaderFailedError"]
    assert on_ranks(2, work(resume=True)) == ["done", "done"]
    assert_loggers_hold_the_journal(tmp_path, run_dir)


def test_log_every_n_steps_thins_training_records_and_never_evaluations(tiny_model_path: str, tmp_path: Path) -> None:
    loggers = [CSVLogger(str(tmp_path), name="csv")]
    fit(tiny_model_path, tmp_path / "run", 5, logger=loggers, log_every_n_steps=3)
    cells = csv_cells(tmp_path)
    assert {step for step, name in cells if name == "train/loss"} == {3}
    assert {step for step, name in cells if name == RATE} == {0, 2, 4, 5}


# --- Lightning's callbacks ---------------------------------------------------------------------------------


class ScriptedPassRates(CountingTask):
    """The pass rate of the n-th held-out evaluation is `passes[n]`. An evaluation grades 3 prompts twice."""

    def __init__(self, passes: Sequence[float]) -> None:
        super().__init__()
        self.passes = itertools.chain.from_iterable([rate] * 6 for rate in passes)

    def reward(self, prompt: Any, completion: str) -> float:
        return next(self.passes) if prompt in self.pool[-3:] else super().reward(prompt, completion)


def test_early_stopping_checks_every_evaluation(tiny_model_path: str, tmp_path: Path) -> None:
    """The second evaluation is the best. After two more the run ends, and its journal says why."""
    stopping = EarlyStopping(RATE, mode="max", patience=2)
    module = fit(tiny_model_path, tmp_path, 40, callbacks=[stopping], task=ScriptedPassRates([0, 1, 0, 0, 1, 1]))
    assert module.completed_steps == 6 == stopping.wait_count * 3
    view = read_journal(tmp_path)
    assert [r.metrics[RATE] for r in view.of_kind("eval")] == [0, 1, 0, 0]
    assert view.status == "finished" and "stopped before max_steps" in str(view.reason)
    assert view.checkpoint_step == 6


class StopAt(Callback):
    """Stop the Trainer after a step, in the way of `max_time` and Timer, or by an error."""

    def __init__(self, step: int, error: bool = False) -> None:
        self.step = step
        self.error = error

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        trainer.should_stop = trainer.should_stop or pl_module.completed_steps == self.step
        if trainer.should_stop and self.error:
            raise InterruptedError


def test_a_run_that_a_callback_stops_is_evaluated_at_its_last_weights(tiny_model_path: str, tmp_path: Path) -> None:
    """It is saved with this evaluation, and continues without repeating it. A failed run is not evaluated."""
    fit(tiny_model_path, tmp_path / "run", 40, callbacks=[StopAt(3)])
    view = read_journal(tmp_path / "run")
    assert [r.step for r in view.of_kind("eval")] == [0, 2, 3] and view.checkpoint_step == 3
    assert (view.status, [r.metrics["eval/weight_version"] for r in view.of_kind("eval")]) == ("finished", [0, 2, 3])
    fit(tiny_model_path, tmp_path / "run", 5, resume=True)
    assert [r.step for r in read_journal(tmp_path / "run").of_kind("eval")] == [0, 2, 3, 4, 5]
    with pytest.raises(InterruptedError):
        fit(tiny_model_path, tmp_path / "failed", 40, callbacks=[StopAt(3, error=True)])
    assert [r.step for r in read_journal(tmp_path / "failed").of_kind("eval")] == [0, 2]
    fit(tiny_model_path, tmp_path / "even", 40, callbacks=[StopAt(2)])
    assert [r.step for r in read_journal(tmp_path / "even").of_kind("eval")] == [0, 2], "once"


class LogsSteps(Callback):
    """Log a metric in every step."""

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        pl_module.log("mine/steps", float(batch_idx))


def test_early_stopping_on_a_users_own_metric_waits_for_the_first_step(tiny_model_path: str) -> None:
    """The evaluation before training comes before the metric exists. Plain Lightning would raise an error there."""
    stopping = EarlyStopping("mine/steps", mode="max", patience=5)
    module = fit(tiny_model_path, steps=4, callbacks=[LogsSteps(), stopping, Evaluate(2, 1)])
    assert module.completed_steps == 4 and stopping.strict and float(stopping.best_score) > 0


@pytest.mark.slow
def test_early_stopping_on_training_metrics_checks_every_step(tiny_model_path: str) -> None:
    stopping = EarlyStopping("train/reward", mode="max", patience=3, min_delta=10.0)
    module = fit(tiny_model_path, steps=20, callbacks=[stopping, Evaluate(2, 1)])
    # The first step counts as best; with min_delta=10, the next three cannot beat it.
    assert module.completed_steps == 4
    patient = EarlyStopping("train/reward", mode="max", patience=30, min_delta=10.0)
    for steps in (3, 5):
        module = fit(tiny_model_path, steps=steps, callbacks=[patient, Evaluate(2, 1)])
    assert patient.wait_count == 2 + 5, "one check per step, also at the end and with another module"


@pytest.mark.slow
def test_the_best_checkpoint_is_that_of_the_best_evaluation(tiny_model_path: str, tmp_path: Path) -> None:
    """A run resumed from a checkpoint that Lightning wrote has the same records as the whole run."""
    best = ModelCheckpoint(tmp_path / "best", filename="{step}", monitor=RATE, mode="max", save_top_k=1)
    steps = ModelCheckpoint(tmp_path / "steps", filename="{step}", monitor="train/reward", mode="max", save_top_k=-1)
    every = ModelCheckpoint(tmp_path / "every", every_n_train_steps=2, save_top_k=-1, filename="{step}")
    options: dict[str, Any] = {"enable_checkpointing": True}
    whole = tmp_path / "whole"
    passes = [0, 0, 1, 0, 0]
    fit(tiny_model_path, whole, 7, callbacks=[best, steps, every], task=ScriptedPassRates(passes), **options)
    assert Path(best.best_model_path).name == "step=4.ckpt" and best.best_model_score == 1
    assert sorted(path.name for path in (tmp_path / "steps").iterdir()) == [f"step={n}.ckpt" for n in range(1, 8)]
    assert sorted(path.name for path in (tmp_path / "every").iterdir()) == [f"step={n}.ckpt" for n in (2, 4, 6)]
    saved = torch.load(best.best_model_path, weights_only=True)
    assert saved["scalerl"]["stream"]["completed_steps"] == 4 and saved["hyper_parameters"]["recipe"] == "scalerl_core"
    for folder in ("best", "steps"):
        module = ScaleRL(tiny_model_path, "scalerl_core", overrides=SMALL)
        log = RunLog(tmp_path / f"again-{folder}")
        trainer = Trainer(max_steps=7, callbacks=[Evaluate(2, 2), log], **quiet())
        data = RolloutDataModule(ScriptedPassRates(passes[3 if folder == "best" else 2 :]))
        trainer.fit(module, datamodule=data, ckpt_path=tmp_path / folder / "step=4.ckpt", weights_only=True)
        resumed = read_journal(log.run_dir).deterministic()
        # The checkpoint in `steps` was saved before the evaluation of step 4, which is then still due.
        first = ("eval", 4) if folder == "steps" else ("train", 5)
        expected = [record for record in read_journal(whole).deterministic() if record[1] > 4 or record[:2] == first]
        assert resumed == expected and resumed[0][:2] == first


class StopInSetup(Callback):
    """End a fit in its setup, before it computes anything."""

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        raise InterruptedError


def test_evaluate_takes_missing_settings_from_the_recipe(tiny_model_path: str) -> None:
    """As on the command line: scale=trial evaluates four prompts once. A given value wins; None means all prompts."""
    limits = ["context.max_new_tokens=17", "context.max_prompt_tokens=8"]
    for evaluation, expected in (
        (Evaluate(), (5, 1, 0, 4)),
        (Evaluate(samples=3, seed=7), (5, 3, 7, 4)),
        (Evaluate(2, prompts=None), (2, 1, 0, None)),
    ):
        module = ScaleRL(tiny_model_path, overrides=["scale=trial", "scaled_for=null", *limits])
        trainer = Trainer(max_steps=1, callbacks=[evaluation, StopInSetup()], **quiet())
        with pytest.raises(InterruptedError):
            trainer.fit(module, datamodule=RolloutDataModule(CountingTask()))
        assert (evaluation.every_n_steps, evaluation.samples, evaluation.seed, evaluation.prompts) == expected
    alone = Evaluate()
    assert (alone.every_n_steps, alone.samples, alone.seed, alone.prompts) == (10, 4, 0, None)


def test_settings_of_the_budget_follow_max_steps(tiny_model_path: str) -> None:
    """`schedule=cosine` and `curriculum=staged_rewards` end with the run, as in `scalerl train`; a given value wins."""
    staged = ["schedule=cosine", "curriculum=staged_rewards"]
    for given, expected in (
        ([], (9, 9, 9)),
        (["schedule.total_steps=7", "curriculum.total_steps=8"], (7, 8, 8)),
        (["curriculum.begins=[0,0.1,0.2]"], (9, 9, 9)),
    ):
        module = ScaleRL(
            tiny_model_path, "scalerl_core", overrides=[*SMALL, "schedule.warmup_steps=1", *staged, *given]
        )
        callbacks = module.recipe.choices
        for steps in (5, 9):
            trainer = Trainer(max_steps=steps, callbacks=[StopInSetup()], **quiet())
            with pytest.raises(InterruptedError):
                trainer.fit(module, datamodule=RolloutDataModule(CountingTask()))
        (curriculum,) = (each for each in trainer.callbacks if getattr(each, "axis", "") == "curriculum")  # type: ignore[attr-defined]
        lengths: list[Any] = [module.recipe.schedule, module.recipe.choices.curriculum, curriculum]
        assert tuple(each.total_steps for each in lengths) == expected
        assert module.recipe.choices is callbacks
    module = ScaleRL(tiny_model_path, "scalerl_core", overrides=[*SMALL, "schedule=cosine", "schedule.warmup_steps=6"])
    with pytest.raises(
        ConfigurationError, match=r"schedule\.total_steps: 6 must be more than schedule\.warmup_steps, 6"
    ):
        Trainer(max_steps=6, **quiet()).fit(module, datamodule=RolloutDataModule(CountingTask()))


def test_without_evaluation_the_default_checkpoint_is_of_the_last_step(tiny_model_path: str, tmp_path: Path) -> None:
    fit(tiny_model_path, steps=3, enable_checkpointing=True, default_root_dir=tmp_path)
    (path,) = (tmp_path / "checkpoints").glob("*.ckpt")
    assert path.name == "epoch=0-step=3.ckpt"


def test_monitoring_a_metric_that_nothing_logs_is_refused(tiny_model_path: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"EarlyStopping monitors 'eval/heldout/pass_rate' and nothing eval"):
        fit(tiny_model_path, callbacks=[EarlyStopping(RATE)])
    evaluation = Evaluate(every_n_steps=2, samples=1)
    for callback in (
        EarlyStopping("val_loss"),
        ModelCheckpoint(monitor="eval/heldout/reward"),
        EarlyStopping("reward"),
    ):
        with pytest.raises(ConfigurationError, match=r"which nothing logs.*valid: eval/heldout/pass_rate, ") as error:
            fit(tiny_model_path, callbacks=[evaluation, callback], enable_checkpointing=True)
        assert f"monitors {callback.monitor!r}" in str(error.value)
    # A known prefix does not make a name valid. The run differs from its recipe on one axis.
    for callback, match in (
        (ModelCheckpoint(monitor="train/los"), r"'train/los', which nothing logs; did you mean train/loss\?; valid: "),
        (EarlyStopping("compute/flop"), r"which nothing logs; did you mean compute/flops\?"),
        (EarlyStopping("mechanism/filter"), r"does not differ from its recipe there; valid: mechanism/loss$"),
    ):
        with pytest.raises(ConfigurationError, match=match):
            callbacks = [CISPO(max_ratio=2.0), evaluation, callback, RunLog(tmp_path)]
            fit(tiny_model_path, callbacks=callbacks, enable_checkpointing=True)
    assert not any(tmp_path.iterdir()), "nothing is computed or written"


def test_rows_without_a_heldout_set_are_trained_on_and_never_evaluated(tiny_model_path: str, tmp_path: Path) -> None:
    rows = [{"prompt": f"{number}+1=", "answer": str(number + 1)} for number in range(8)]
    task = DatasetTask(train=rows, heldout=None, rewards="exact_match")
    assert task.eval_sets() == {} and len(task.train_prompts()) == 8
    log = RunLog(tmp_path / "run")
    module = fit(tiny_model_path, steps=1, task=task, callbacks=[log])
    assert [record.kind for record in read_journal(log.run_dir).records] == ["train"]
    for call in (
        lambda: fit(tiny_model_path, steps=1, task=task, callbacks=[Evaluate()]),
        lambda: Trainer(**quiet()).validate(module, datamodule=RolloutDataModule(task)),
    ):
        with pytest.raises(ConfigurationError, match=r"task\.heldout: the task has no .* or leave Evaluate out"):
            call()


class ValidationHooks(Callback):
    """Record Lightning's validation hooks in the order of their calls."""

    def __init__(self) -> None:
        self.hooks: list[tuple[str, int]] = []

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self.hooks.append(("start", pl_module.completed_steps))

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        assert RATE in trainer.callback_metrics
        self.hooks.append(("end", pl_module.completed_steps))


def test_an_evaluation_calls_lightnings_validation_hooks(tiny_model_path: str) -> None:
    seen = ValidationHooks()
    fit(tiny_model_path, steps=5, callbacks=[Evaluate(2, 1), seen])
    assert seen.hooks == [(hook, step) for step in (0, 2, 4, 5) for hook in ("start", "end")]


@pytest.mark.slow
def test_the_learning_rate_monitor_logs_the_rate_of_each_step(tiny_model_path: str, tmp_path: Path) -> None:
    """Lightning logs the rate at the start of a step, under the number of steps completed before."""
    loggers = [CSVLogger(str(tmp_path), name="csv")]
    overrides = ["schedule.warmup_steps=3"]
    run_dir = tmp_path / "run"
    fit(tiny_model_path, run_dir, 5, callbacks=[LearningRateMonitor()], logger=loggers, overrides=overrides)
    cells = csv_cells(tmp_path)
    (name,) = {name for _, name in cells if name.startswith("lr-")}
    used = {r.step: r.metrics["train/learning_rate"] for r in read_journal(run_dir).of_kind("train")}
    assert {step + 1: cells[step, name] for step in range(5)} == used
    with next(tmp_path.rglob("metrics.csv")).open() as file:
        rows = [(int(row["step"]), float(row[name])) for row in csv.DictReader(file) if row[name]]
    assert rows[0] == (0, used[1]), "also at the start of Lightning's epoch"
    assert len(set(used.values())) == 4


# --- validate, test, fit again, load ------------------------------------------------------------------------


def test_validate_evaluates(tiny_model_path: str) -> None:
    data = RolloutDataModule(CountingTask())
    module = fit(tiny_model_path, steps=4, callbacks=[Evaluate(4, 3)])
    last = float(module.trainer.callback_metrics[RATE])
    (metrics,) = Trainer(callbacks=[Evaluate(4, 3)], **quiet()).validate(module, datamodule=data, verbose=False)
    assert metrics[RATE] == pytest.approx(last) and module.completed_steps == 4
    (other,) = Trainer(**quiet()).validate(module, datamodule=data, verbose=False)
    assert 0 <= other[RATE] <= 1 and RATE + "_se" in other
    fresh = ScaleRL(tiny_model_path, "scalerl_core", overrides=SMALL)
    (start,) = Trainer(callbacks=[Evaluate(4, 3)], **quiet()).validate(fresh, datamodule=data, verbose=False)
    assert 0 <= start[RATE] <= 1


@pytest.mark.slow
def test_validate_before_a_fit_does_not_change_it(tiny_model_path: str, tmp_path: Path) -> None:
    evaluation, log = Evaluate(2, 2), RunLog(tmp_path)
    module = ScaleRL(tiny_model_path, "scalerl_core", overrides=SMALL)
    trainer = Trainer(max_steps=3, callbacks=[evaluation, log], **quiet())
    trainer.validate(module, datamodule=RolloutDataModule(CountingTask()), verbose=False)
    trainer.fit(module, datamodule=RolloutDataModule(CountingTask()))
    assert [record.step for record in read_journal(tmp_path).of_kind("eval")] == [0, 2, 3]
    other = ScaleRL(tiny_model_path, "scalerl_core", overrides=[*SMALL, "context.max_new_tokens=8"])
    trainer = Trainer(max_steps=1, callbacks=[evaluation], **quiet())
    trainer.fit(other, datamodule=RolloutDataModule(CountingTask()))


def test_validate_logs_at_the_modules_step_and_keeps_its_choices(tiny_model_path: str, tmp_path: Path) -> None:
    module = fit(tiny_model_path, steps=3, callbacks=[Precision("bf16")])
    trainer = Trainer(**{**quiet(), "logger": CSVLogger(str(tmp_path), name="csv")})
    (metrics,) = trainer.validate(module, datamodule=RolloutDataModule(CountingTask()), verbose=False)
    cells = csv_cells(tmp_path)
    assert {step for step, _ in cells} == {3} and cells[3, RATE] == pytest.approx(metrics[RATE])
    assert module.choices.precision.policy == "bf16", "scalerl_core itself is in FP32"


def test_trainer_test_points_to_validate(tiny_model_path: str) -> None:
    module = ScaleRL(tiny_model_path, "scalerl_core", overrides=SMALL)
    with pytest.raises(ConfigurationError, match=r"^Trainer.test: .*Trainer.validate"):
        Trainer(**quiet()).test(module, datamodule=RolloutDataModule(CountingTask()))


@pytest.mark.slow
def test_fit_again_continues(tiny_model_path: str, tmp_path: Path) -> None:
    """Fits with more and more steps give one curve, equal to that of an uninterrupted fit."""
    whole = fit(tiny_model_path, tmp_path / "whole", 6, recipe="scalerl")
    module = ScaleRL(tiny_model_path, "scalerl", overrides=SMALL)
    for steps in (2, 2, 3, 6):
        trainer = Trainer(max_steps=steps, callbacks=[Evaluate(2, 2), RunLog(tmp_path / "parts")], **quiet())
        trainer.fit(module, datamodule=RolloutDataModule(CountingTask()))
        assert trainer.global_step == module.completed_steps == steps
    parts = read_journal(tmp_path / "parts")
    assert [record.step for record in parts.of_kind("train")] == [1, 2, 3, 4, 5, 6]
    seen = {(kind, step): metrics for kind, step, metrics in parts.deterministic()}
    for kind, step, metrics in read_journal(tmp_path / "whole").deterministic():
        # The parts evaluated more often, because each fit evaluates at its end.
        assert {**seen[kind, step], "eval_cost/flops": 0} == {**metrics, "eval_cost/flops": 0}
    assert all(map(torch.equal, whole.policy.state_dict().values(), module.policy.state_dict().values()))


@pytest.mark.slow
def test_fit_again_with_the_same_trainer_continues(tiny_model_path: str) -> None:
    module = fit(tiny_model_path, steps=2)
    trainer = module.trainer
    trainer.fit_loop.epoch_loop.max_steps = 5
    trainer.fit(module, datamodule=trainer.datamodule)  # type: ignore[attr-defined]
    assert module.completed_steps == trainer.global_step == 5


@pytest.mark.slow
def test_fit_again_as_another_run_is_refused(tiny_model_path: str) -> None:
    module = fit(tiny_model_path, steps=2)
    with pytest.raises(ConfigurationError, match="this module has trained 2 steps, and choices would change now"):
        Trainer(max_steps=4, callbacks=[NoFilter()], **quiet()).fit(
            module, datamodule=RolloutDataModule(CountingTask())
        )
    with pytest.raises(ConfigurationError, match="2 steps, and task would change now"):
        Trainer(max_steps=4, **quiet()).fit(module, datamodule=RolloutDataModule(CountingTask(20)))
    Trainer(max_steps=4, **quiet()).fit(module, datamodule=RolloutDataModule(CountingTask()))
    assert module.completed_steps == 4


@pytest.mark.slow
def test_a_failed_fit_continues_only_from_a_checkpoint(tiny_model_path: str, tmp_path: Path) -> None:
    module = ScaleRL(tiny_model_path, "scalerl_core", overrides=[*SMALL, *STRICT])

    def attempt(task: CountingTask, **options: Any) -> None:
        settings = {**quiet(), "enable_checkpointing": True}
        callbacks = [RunLog(tmp_path), ResumableCheckpoint(tmp_path / "checkpoints", 2)]
        trainer = Trainer(max_steps=5, callbacks=callbacks, **settings)
        trainer.fit(module, datamodule=RolloutDataModule(task), weights_only=True, **options)

    too_long = CountingTask()
    too_long.pool[0] = Prompt("p0", "1" * 30, "1")
    with pytest.raises(ConfigurationError, match="max_prompt_tokens"):
        attempt(too_long)  # refused during setup, so no fit has failed
    with pytest.raises(RewardError):
        attempt(RaisesOnce(40))
    with pytest.raises(ConfigurationError, match=r"last fit ended with RewardError; go on from a checkpoint"):
        attempt(CountingTask())
    assert len(read_journal(tmp_path).of_kind("train")) == 3, "a refused fit discards no records"
    attempt(CountingTask(), ckpt_path=newest_checkpoint(tmp_path / "checkpoints").path)
    assert module.completed_steps == 5 == len(read_journal(tmp_path).of_kind("train"))


def test_a_new_logger_in_a_second_fit_gets_every_evaluation(tiny_model_path: str, tmp_path: Path) -> None:
    module = fit(tiny_model_path, steps=2, callbacks=[Evaluate(2, 1)])
    trainer = Trainer(
        max_steps=3, callbacks=[Evaluate(2, 1)], **{**quiet(), "logger": CSVLogger(str(tmp_path), name="csv")}
    )
    trainer.fit(module, datamodule=RolloutDataModule(CountingTask()))
    assert {2, 3} == {step for step, name in csv_cells(tmp_path) if name == RATE}


def test_hyper_parameters_reach_the_loggers(tiny_model_path: str, tmp_path: Path) -> None:
    import yaml

    fit(tiny_model_path, steps=1, callbacks=[DAPO()], logger=[CSVLogger(str(tmp_path), name="csv")])
    (path,) = tmp_path.rglob("hparams.yaml")
    hparams = yaml.safe_load(path.read_text())
    assert hparams["choices"]["loss"]["choice"] == "DAPO" and hparams["choices"]["loss"]["clip_high"] == 0.26
    assert hparams["optimizer"]["lr"] == 3e-3 and hparams["seed"] == 0 and hparams["recipe"] == "scalerl_core"


@pytest.mark.slow
def test_a_checkpoint_loads_into_a_module(tiny_model_path: str, tmp_path: Path) -> None:
    trained = fit(tiny_model_path, steps=3, enable_checkpointing=True, default_root_dir=tmp_path)
    (path,) = tmp_path.rglob("*.ckpt")
    loaded = ScaleRL.load_from_checkpoint(path, weights_only=True)
    assert all(map(torch.equal, trained.policy.state_dict().values(), loaded.policy.state_dict().values()))
    assert loaded.recipe.batch == trained.recipe.batch
    Trainer(max_steps=2, **quiet()).fit(loaded, datamodule=RolloutDataModule(CountingTask()))
    assert loaded.completed_steps == 2, "only weights are loaded: a new run from its first step"


@pytest.mark.slow
def test_loading_a_checkpoint_of_a_model_object_names_the_missing_arguments(
    tiny_model_path: str, tmp_path: Path
) -> None:
    tokenizer = load_tokenizer(tiny_model_path)
    module = ScaleRL(load_model(tiny_model_path), "scalerl_core", SMALL, tokenizer)
    trainer = Trainer(max_steps=1, **{**quiet(), "enable_checkpointing": True}, default_root_dir=tmp_path)
    trainer.fit(module, datamodule=RolloutDataModule(CountingTask()))
    (path,) = tmp_path.rglob("*.ckpt")
    with pytest.raises(ConfigurationError, match=r"load_from_checkpoint\(path, model=\.\.\., tokenizer=\.\.\.\)"):
        ScaleRL.load_from_checkpoint(path, weights_only=True)
    ScaleRL.load_from_checkpoint(path, weights_only=True, model=load_model(tiny_model_path), tokenizer=tokenizer)


def test_a_checkpoint_of_a_built_recipe_asks_for_it(tiny_model_path: str, tmp_path: Path) -> None:
    recipe = load_recipe("scalerl_core", SMALL)
    trainer = Trainer(max_steps=1, **{**quiet(), "enable_checkpointing": True}, default_root_dir=tmp_path)
    module = ScaleRL(tiny_model_path, recipe, ["scale=arithmetic"])
    trainer.fit(module, datamodule=RolloutDataModule(CountingTask()))
    (path,) = tmp_path.rglob("*.ckpt")
    with pytest.raises(ConfigurationError, match=r"recipe: not given.*load_from_checkpoint\(path, recipe="):
        ScaleRL.load_from_checkpoint(path, weights_only=True)
    loaded = ScaleRL.load_from_checkpoint(path, weights_only=True, recipe=recipe)
    assert loaded.recipe.batch == recipe.batch
    with pytest.raises(ConfigurationError, match=r"overrides: batch.prompts=8 would have no effect"):
        ScaleRL(tiny_model_path, recipe, ["scale=arithmetic", "batch.prompts=8"])


# --- refused settings ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"accumulate_grad_batches": 4}, r"accumulate_grad_batches: 4 .*batch\.micro_batch"),
        ({"gradient_clip_val": 1.0}, r"gradient_clip_val: 1\.0 .*optimizer\.clip_norm"),
        ({"val_check_interval": 5}, r"val_check_interval: 5 decides nothing here.*Evaluate\(every_n_steps"),
        ({"limit_val_batches": 3}, "limit_val_batches: 3 decides nothing"),
        ({"val_check_interval": 1}, "val_check_interval: 1 decides nothing"),
        ({"limit_val_batches": 1}, "limit_val_batches: 1 decides nothing"),
        ({"overfit_batches": 1}, "overfit_batches: 1"),
        ({"limit_train_batches": 2}, "limit_train_batches: 2 has no meaning"),
        ({"limit_train_batches": 1}, "limit_train_batches: 1 has no meaning"),
    ],
)
def test_trainer_settings_that_conflict_with_ours_are_refused(tiny_model_path: str, options: Any, match: str) -> None:
    with pytest.raises(ConfigurationError, match=match) as caught:
        fit(tiny_model_path, callbacks=[Evaluate(2, 1)], **options)
    assert "automatic optimization" not in str(caught.value) and "\n" not in str(caught.value)


def test_stochastic_weight_averaging_is_refused(tiny_model_path: str) -> None:
    """It hands back the average over the starts of epochs, which in a run of one epoch are the initial weights."""
    with pytest.raises(
        ConfigurationError, match=r"StochasticWeightAveraging averages over epochs.*EMAWeightAveraging$"
    ):
        fit(tiny_model_path, callbacks=[StochasticWeightAveraging(1e-3, swa_epoch_start=1)])


def test_a_class_in_place_of_a_callback_is_refused(tiny_model_path: str) -> None:
    callbacks: list[Any] = [CISPO, Evaluate(2, 1)]
    with pytest.raises(ConfigurationError, match=r"^callbacks: CISPO is a class; give an instance, CISPO\(\.\.\.\)$"):
        fit(tiny_model_path, callbacks=callbacks)


@pytest.mark.parametrize("function", ["fit", "validate", "test", "predict"])
def test_data_that_are_not_of_a_rollout_datamodule_are_refused(tiny_model_path: str, function: str) -> None:
    module = ScaleRL(tiny_model_path, "scalerl_core", overrides=SMALL)
    loader, rows = torch.utils.data.DataLoader([1, 2]), LightningDataModule()  # type: ignore[arg-type,var-annotated]
    for data, description in ([], "none is given"), ([loader], "DataLoader"), ([rows], "LightningDataModule"):
        with pytest.raises(ConfigurationError) as caught:
            getattr(Trainer(max_steps=1, **quiet()), function)(module, *data)
        assert str(caught.value) == (
            f"datamodule: {description}, and ScaleRL generates its data; give RolloutDataModule(task=...) as "
            f"Trainer.{function}(module, datamodule=...)"
        )


class OtherOptimizers(ScaleRL):
    """Returns what `form` makes of the recipe's optimizer."""

    form: Callable[[Any], Any] = staticmethod(lambda recipes: recipes)

    def configure_optimizers(self) -> Any:
        return self.form(super().configure_optimizers())


def fit_with(model_path: str, run_dir: Path, form: Callable[[Any], Any]) -> ScaleRL:
    module = OtherOptimizers(model_path, "scalerl_core", overrides=SMALL)
    module.form = form
    trainer = Trainer(max_steps=1, callbacks=[Evaluate(1, 1), RunLog(run_dir)], **quiet())
    trainer.fit(module, datamodule=RolloutDataModule(CountingTask()))
    return module


def step_lr(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.1)


@pytest.mark.parametrize(
    "form",
    [
        lambda recipes: {"optimizer": recipes, "lr_scheduler": {"scheduler": step_lr(recipes), "interval": "step"}},
        lambda recipes: ([recipes], [step_lr(recipes)]),
    ],
)
def test_a_scheduler_of_the_user_is_refused(tiny_model_path: str, tmp_path: Path, form: Any) -> None:
    with pytest.raises(ConfigurationError) as caught:
        fit_with(tiny_model_path, tmp_path, form)
    assert str(caught.value) == (
        "configure_optimizers: OtherOptimizers returns a scheduler, StepLR, and the recipe's schedule sets the rate of "
        'every step; return the optimizer alone and choose a schedule with overrides=["schedule=..."]'
    )
    assert list(tmp_path.iterdir()) == [], "refused before anything is evaluated or written"


@pytest.mark.parametrize("extra", [False, True])
def test_an_optimizer_of_the_user_is_refused(tiny_model_path: str, tmp_path: Path, extra: bool) -> None:
    def form(recipes: torch.optim.Optimizer) -> Any:
        other = torch.optim.SGD(recipes.param_groups[0]["params"], lr=1e-3)
        return [recipes, other] if extra else other

    with pytest.raises(ConfigurationError) as caught:
        fit_with(tiny_model_path, tmp_path, form)
    assert str(caught.value) == (
        f"configure_optimizers: OtherOptimizers returns {'AdamW, SGD' if extra else 'SGD'}, and only the recipe's own "
        'optimizer can train; leave the method out and choose an optimizer with overrides=["optimizer=..."]'
    )
    assert list(tmp_path.iterdir()) == []


def test_the_recipes_optimizer_may_be_returned_in_another_form(tiny_model_path: str, tmp_path: Path) -> None:
    assert fit_with(tiny_model_path, tmp_path, lambda recipes: {"optimizer": recipes}).completed_steps == 1


def test_a_trainer_that_is_used_again_needs_the_datamodule_again(tiny_model_path: str) -> None:
    trainer = fit(tiny_model_path, steps=1).trainer
    for data in [], [torch.utils.data.DataLoader([1, 2])]:  # type: ignore[arg-type,var-annotated]
        with pytest.raises(ConfigurationError, match=r"^datamodule: "):
            trainer.validate(trainer.lightning_module, *data)


def test_a_fast_dev_run_takes_one_step_and_leaves_nothing(tiny_model_path: str, tmp_path: Path) -> None:
    module = fit(tiny_model_path, tmp_path, 9, fast_dev_run=True)
    assert module.completed_steps == 1 and list(tmp_path.iterdir()) == []
    fit(tiny_model_path, tmp_path, 1)


@pytest.mark.parametrize(
    ("checkpoint", "match"),
    [
        ({"every_n_train_steps": 3, "monitor": RATE}, r"every_n_train_steps=3.*under the score of earlier ones"),
        ({"train_time_interval": timedelta(seconds=1)}, "use every_n_train_steps"),
    ],
)
def test_model_checkpoints_that_would_save_the_wrong_weights_are_refused(
    tiny_model_path: str, tmp_path: Path, checkpoint: Any, match: str
) -> None:
    with pytest.raises(ConfigurationError, match=match):
        callbacks = [Evaluate(2, 1), ModelCheckpoint(tmp_path, **checkpoint)]
        fit(tiny_model_path, callbacks=callbacks, enable_checkpointing=True)


@pytest.mark.parametrize("options", every(3, [{"log_every_n_steps": 0}, {"barebones": True}]))
def test_without_logs_it_trains(tiny_model_path: str, options: Any) -> None:
    plain = {name: None for name in ("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing")}
    more = {**plain, **options} if "barebones" in options else options
    assert fit(tiny_model_path, steps=2, **more).completed_steps == 2


@pytest.mark.slow
def test_pytorch_lightning_is_warned_of_and_refused(tiny_model_path: str, caplog: pytest.LogCaptureFixture) -> None:
    other = pytest.importorskip("pytorch_lightning")
    module = ScaleRL(tiny_model_path, "scalerl_core", overrides=SMALL)
    assert "use from lightning.pytorch import Trainer" in caplog.text
    data = RolloutDataModule(CountingTask())
    with pytest.raises(TypeError, match="ScaleRL"):
        other.Trainer(max_steps=1, **quiet()).fit(module, datamodule=data)
    callback = sys.modules["pytorch_lightning"].callbacks.EarlyStopping(RATE)
    with pytest.raises(ConfigurationError, match=r"EarlyStopping is of pytorch_lightning.*import it from lightning"):
        Trainer(max_steps=1, callbacks=[callback], **quiet()).fit(module, datamodule=data)


def test_prompts_that_are_too_long_are_counted_before_training(tiny_model_path: str) -> None:
    class Long(CountingTask):
        def __init__(self) -> None:
            super().__init__()
            for place in (1, 4, -1):
                prompt = self.pool[place]
                self.pool[place] = type(prompt)(prompt.prompt_id, "1" * 20, "1")

    recorder = Record()
    with pytest.raises(
        ConfigurationError,
        match=r"max_prompt_tokens: 2 of 8 training prompts and 1 of 3 held-out \(heldout\) prompts have more than 16 "
        r"tokens, the longest 20",
    ):
        fit(tiny_model_path, task=Long(), callbacks=[recorder, Evaluate(1, 1)])
    assert recorder.steps == []
    fit(tiny_model_path, steps=1, task=Long(), overrides=["context.max_prompt_tokens=20"])


class Record(Recorder):
    """Keep the numbers of recorded steps."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def on_record(self, kind: str, step: int, metrics: Any) -> None:
        assert all(math.isfinite(value) for value in metrics.values())
        self.steps.append(step)


@pytest.mark.slow
def test_settings_of_the_toy_model_are_refused_for_another_model(tiny_model_path: str) -> None:
    from lightning_scalerl.member.identify import plan_members

    with pytest.raises(ConfigurationError, match=r"scale: .*made for arithmetic_base_model, and this is another model"):
        ScaleRL(tiny_model_path)
    with pytest.raises(ConfigurationError, match=r"scale: .*choose scale=trial for a first try, 0\.6b, 1\.7b"):
        plan_members([["model=path", f"model.path={tiny_model_path}"]])
    ScaleRL(tiny_model_path, overrides=["scale=arithmetic"])
    plan_members([["model=path", f"model.path={tiny_model_path}", "scale=paper"]])
