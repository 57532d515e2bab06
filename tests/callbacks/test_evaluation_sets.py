"""`evaluation.sets`: further tasks that are evaluated during a training run, each with its own settings."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_scalerl import (
    ConfigurationError,
    DatasetTask,
    Evaluate,
    EvaluationSet,
    MixtureTask,
    ResumableCheckpoint,
    RunLog,
)
from lightning_scalerl.axes.precision import Precision
from lightning_scalerl.callbacks.checkpointing import newest_checkpoint
from lightning_scalerl.callbacks.evaluate import _wrong_answers
from lightning_scalerl.generator.base import GroupRequest, SamplingSettings
from lightning_scalerl.generator.torch.generator import TorchGenerator
from lightning_scalerl.task.beside import TaskWithEvaluationSets
from lightning_scalerl.task.jsonl import read_prompts
from sweeps.run.journal import read_journal
from sweeps.run.passes import read_passes
from tests.helpers import CountingTask, fit

AIME = [{"problem": f"{n}+{n}=", "answer": str(2 * n)} for n in range(3)]
# The prompts are Python comments, in the alphabet of the arithmetic model.
HUMANEVAL = [{"prompt": f"#{n}+{n}=\n", "test": "def check(f):\n    assert f() == 1\n", "entry_point": "f",
              "canonical_solution": "def f():\n    return 1\n"} for n in range(2)]  # fmt: skip
GSM8K = [{"question": f"{n}+1=", "answer": f"so #### {n + 1}"} for n in range(4)]


def sets() -> dict[str, Any]:
    return {
        "aime": {"task": DatasetTask("aime", None, {"2024": AIME}, "math"), "samples": 8, "every_n_steps": 3},
        "gsm8k": EvaluationSet(DatasetTask("gsm8k", None, {"test": GSM8K}, "math"), temperature=0, max_new_tokens=2),
        "letters": DatasetTask("columns", None, {"a": [{"prompt": "3+3=", "answer": "6"}] * 1}, "exact_match"),
    }


def run(
    model: str, run_dir: Path, steps: int, chosen: Mapping[str, Any], resume: bool = False, every: int = 2, **more: Any
) -> Any:
    checkpoint = newest_checkpoint(run_dir / "checkpoints").path if resume else None
    callbacks = [
        Evaluate(every, 2, sets=chosen, **more),
        RunLog(run_dir),
        ResumableCheckpoint(run_dir / "checkpoints", 1),
    ]
    from lightning.pytorch import Trainer

    from lightning_scalerl import RolloutDataModule, ScaleRL
    from tests.helpers import SMALL, quiet

    module = ScaleRL(model, "scalerl_core", overrides=list(SMALL))
    trainer = Trainer(max_steps=steps, callbacks=callbacks, **{**quiet(), "enable_checkpointing": True})
    trainer.fit(module, datamodule=RolloutDataModule(CountingTask()), ckpt_path=checkpoint, weights_only=True)
    return read_journal(run_dir)


@pytest.mark.full
def test_each_set_has_its_own_samples_and_steps_and_training_is_unchanged(tiny_model_path: str, tmp_path: Path) -> None:
    view = run(tiny_model_path, tmp_path / "sets", 5, sets())
    evaluated = {record.step: record.metrics for record in view.of_kind("eval")}
    assert sorted(evaluated) == [0, 2, 3, 4, 5]

    def steps_of(name: str) -> list[int]:
        return [step for step, metrics in sorted(evaluated.items()) if f"eval/{name}/pass_rate" in metrics]

    assert steps_of("heldout") == steps_of("gsm8k") == steps_of("letters") == [0, 2, 4, 5]
    assert "eval/heldout/pass_rate_se" in evaluated[0] and "eval/gsm8k/pass_rate_se" not in evaluated[0]  # greedy
    assert steps_of("aime") == [0, 3, 5]  # every 3 steps, and the first and last weights
    assert {f"eval/aime/pass@{k}" for k in (2, 4, 8)} <= evaluated[3].keys() and "eval/gsm8k/pass@4" not in evaluated[0]
    passes = read_passes(tmp_path / "sets", "aime", sorted(evaluated))
    assert sorted(passes) == [0, 3, 5] and all(each.scored == (8, 8, 8) for each in passes.values())
    # The extra sets change neither training nor the evaluation of the task's own set.
    alone = run(tiny_model_path, tmp_path / "alone", 5, {})
    ours = {record.step: record.metrics for record in view.of_kind("train")}
    for record in alone.of_kind("train"):
        shared_metrics = {
            key: ours[record.step][key] for key in record.metrics if key.startswith(("train/", "compute/flops"))
        }
        assert shared_metrics == {key: value for key, value in record.metrics.items() if key in shared_metrics}
    for record in alone.of_kind("eval"):
        assert record.metrics["eval/heldout/pass_rate"] == evaluated[record.step]["eval/heldout/pass_rate"]
    assert evaluated[5]["eval_cost/flops"] > alone.of_kind("eval")[-1].metrics["eval_cost/flops"]


def test_families_of_rows_are_recorded_with_the_passes(tiny_model_path: str, tmp_path: Path) -> None:
    rows = [{"prompt": f"{number}+1=", "answer": "1", "family": name} for number, name in enumerate("aabb")]
    named = DatasetTask("columns", None, {"a": [*rows, {"prompt": "7+1=", "answer": "8"}]}, "exact_match")
    run(tiny_model_path, tmp_path / "run", 1, {"named": named, "without": CountingTask()}, every=5)
    assert read_passes(tmp_path / "run", "named", [0])[0].families == ("a", "a", "b", "b", "")
    assert read_passes(tmp_path / "run", "without", [0])[0].families is None
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    assert [prompt.family for prompt in read_prompts("task.train", str(file))] == ["a", "a", "b", "b"]


def test_one_more_set_does_not_change_the_random_numbers_of_the_others(tiny_model_path: str, tmp_path: Path) -> None:
    """The further set comes first. Random text passes now and then, so other random numbers would show."""
    run(tiny_model_path, tmp_path / "both", 1, {"one": CountingTask(), "two": CountingTask()}, every=5)
    run(tiny_model_path, tmp_path / "alone", 1, {"two": CountingTask()}, every=5)
    both, alone = (read_passes(tmp_path / name, "two", [0, 1]) for name in ("both", "alone"))
    assert both == alone and both.keys() == {0, 1}
    assert read_passes(tmp_path / "both", "one", [0, 1]) != both, "sets of the same prompts have different numbers"


def test_a_request_has_its_own_temperature(tiny_model_path: str) -> None:
    """Temperature 0 always gives the most likely token, and does not affect other requests in the same batch."""
    from lightning_scalerl.model.load import load_model

    model = load_model(tiny_model_path)
    settings = SamplingSettings(max_prompt_tokens=4, max_new_tokens=6)

    def sampled(*requests: GroupRequest) -> dict[int, list[list[int]]]:
        generator = TorchGenerator(model, Precision("fp32", True, True), settings, slots=8)
        for request in requests:
            generator.submit(request)
        by_group: dict[int, list[list[int]]] = {request.key: [] for request in requests}
        while generator.in_flight:
            for finished in generator.step().finished:
                by_group[finished.key].append(list(finished.rollout.tokens))
        return by_group

    warm = GroupRequest(0, (1, 2), 3, (7,))
    cold = [GroupRequest(key, (1, 2), 2, (key,), temperature=0) for key in (1, 2)]
    together = sampled(warm, *cold)
    assert len({tuple(tokens) for key in (1, 2) for tokens in together[key]}) == 1
    assert together[0] == sampled(warm)[0] and len({tuple(tokens) for tokens in together[0]}) > 1


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"a b": CountingTask()}, "evaluation.sets.a b: a name must be of letters, digits and _"),
        (
            {"a": {"task": CountingTask(), "prompts": 3}},
            "evaluation.sets.a: prompts; an entry is a task and perhaps samples",
        ),
        ({"a": {"samples": 3}}, "evaluation.sets.a: no task; an entry is a task"),
        ({"a": {"task": CountingTask(), "samples": 0}}, r"evaluation.sets.a.samples: 0 must be"),
        (
            {"a": {"task": CountingTask(), "temperature": -1}},
            r"evaluation.sets.a.temperature: -1 must be a number, 0 or more",
        ),
        ({"a": 3}, r"evaluation.sets.a.task: int is no task; give one of conf/task"),
    ],
)
def test_bad_entries(given: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigurationError, match=problem):
        Evaluate(sets=given)


def test_bad_sets_of_a_run(tiny_model_path: str, tmp_path: Path) -> None:
    no_rows = DatasetTask("aime", AIME, None, "math")
    with pytest.raises(ConfigurationError, match=r"evaluation.sets.a: its task has no held-out prompts; give"):
        TaskWithEvaluationSets(CountingTask(), {"a": no_rows})
    with pytest.raises(ConfigurationError, match=r"evaluation.sets.heldout: there is another held-out set heldout"):
        TaskWithEvaluationSets(CountingTask(), {"heldout": CountingTask()})
    long = {"a": EvaluationSet(CountingTask(), max_new_tokens=999)}
    with pytest.raises(
        ConfigurationError, match=r"evaluation.sets.a.max_new_tokens: 999 is above context.max_new_tokens="
    ):
        run(tiny_model_path, tmp_path, 1, long)
    with pytest.raises(ConfigurationError, match=r"task.train: needs a value; DatasetTask has no training prompts"):
        fit(tiny_model_path, steps=1, task=DatasetTask("aime", None, {"2024": AIME}, "math"))


def test_a_monitored_set_must_be_evaluated_whenever_another_is(tiny_model_path: str) -> None:
    """Otherwise EarlyStopping would count an old score again, and ModelCheckpoint would save weights under it."""
    from lightning.pytorch.callbacks import EarlyStopping

    stop = EarlyStopping("eval/heldout/pass_rate", mode="max")
    more_sets = {"a": EvaluationSet(CountingTask(), every_n_steps=3)}
    with pytest.raises(ConfigurationError, match=r"evaluation.sets: a is evaluated every 3 steps, .* a multiple of 2"):
        fit(tiny_model_path, steps=1, callbacks=[Evaluate(2, 1, sets=more_sets), stop])


def test_at_an_early_end_the_sets_that_were_not_due_are_evaluated() -> None:
    """All sets are evaluated then, because a later record of a step replaces an earlier one."""
    evaluation = Evaluate(8, sets={"s": {"task": CountingTask(), "every_n_steps": 16}})
    evaluation.load_state_dict({"last_step": 8, "evaluated": [""]})
    assert not evaluation.owes(8, 100) and evaluation.owes(8, 100, last=True) and evaluation.owes(8, 8)
    evaluation.load_state_dict({"last_step": 16, "evaluated": ["", "s"]})
    assert not evaluation.owes(16, 100, last=True) and evaluation.owes(24, 100)
    alone = Evaluate(8)
    alone.load_state_dict({"last_step": 8})  # a checkpoint of an earlier version
    assert not alone.owes(8, 100, last=True)


def test_validate_and_predict_after_sets(tiny_model_path: str) -> None:
    """Another callback may have other sets or none. Rows to predict are still the task's."""
    from lightning_scalerl import RolloutDataModule

    rows = [{"prompt": f"{n}+{n}=", "answer": str(2 * n)} for n in range(6)]
    task = DatasetTask("columns", rows, {"a": rows[:2]}, "exact_match", leaks="keep")
    data = RolloutDataModule(task, predict=[{"prompt": "5+5=", "answer": "10"}])
    data.set_evaluation_sets({"aime": CountingTask()})
    assert list(data.task.eval_sets()) == ["a", "aime"] and len(data.predicted.prompts) == 1
    data.set_evaluation_sets({})
    assert Evaluate().settings(data.task).keys() == {"a"}


def test_a_mixture_is_refused_as_an_entry() -> None:
    mixture = MixtureTask({"a": CountingTask(), "b": CountingTask()})
    with pytest.raises(ConfigurationError, match=r"evaluation.sets.mix: its task is a mixture; give each of its tasks"):
        TaskWithEvaluationSets(CountingTask(), {"mix": mixture})


def test_a_checkpoint_may_follow_the_interval_of_the_set_that_it_monitors(tiny_model_path: str, tmp_path: Path) -> None:
    from lightning.pytorch.callbacks import ModelCheckpoint

    more_sets = {"s": {"task": CountingTask(), "every_n_steps": 1}}
    saves = ModelCheckpoint(tmp_path, monitor="eval/s/pass_rate", every_n_train_steps=1)
    module = fit(tiny_model_path, steps=1, callbacks=[Evaluate(2, 1, sets=more_sets), saves], enable_checkpointing=True)
    assert module.completed_steps == 1
    with pytest.raises(ConfigurationError, match=r"eval/heldout/gold_logprob.*nothing logs"):
        saves = ModelCheckpoint(tmp_path, monitor="eval/heldout/gold_logprob")
        fit(tiny_model_path, steps=1, callbacks=[Evaluate(2, 1), saves], enable_checkpointing=True)


def test_wrong_answers_are_unknown_if_all_pass_or_answers_are_missing() -> None:
    assert _wrong_answers([Counter(), Counter()]) is None
    assert _wrong_answers([Counter({"7": 2, "": 1}), Counter()]) == ((2,), ())
    assert _wrong_answers([Counter({None: 1}), Counter({"7": 1})]) is None


def test_evaluation_prompts_that_are_also_trained_on_are_reported_and_kept() -> None:
    trained = DatasetTask(
        "columns", [{"prompt": "1+1=", "answer": "2"}, {"prompt": "5+1=", "answer": "6"}], 0.5, "math"
    )
    (kept,) = trained.train_prompts()
    rows = [{"prompt": kept.text, "answer": "?"}, {"prompt": "9+9=", "answer": "18"}]
    task = TaskWithEvaluationSets(trained, {"new": DatasetTask("columns", None, {"x": rows}, "exact_match")})
    assert list(task.train_prompts()) == [kept] and list(task.eval_sets()) == ["heldout", "new"]
    assert "warning: 1 of 2 prompts of the held-out set new are training prompts" in task.notes()
    grader = task.grader()
    from lightning_scalerl.rollouts.grade import Sample

    first, second = task.eval_sets()["new"]
    assert (
        grader.grade(Sample(second, "18", "18")).reward == 1.0 and grader.grade(Sample(first, "x", "x")).reward == 0.0
    )
    (own_prompt,) = task.eval_sets()["heldout"]
    answer = f"\\boxed{{{own_prompt.answer}}}"
    assert grader.grade(Sample(own_prompt, answer, answer)).reward == 1.0


def test_gold_logprob_equals_that_of_a_forward_pass(tiny_model_path: str, tmp_path: Path) -> None:
    """It is the mean over prompts of the mean over a solution's tokens. Prompts without a solution do not count."""
    from lightning_scalerl.model.load import load_model, load_tokenizer

    view = run(tiny_model_path, tmp_path, 1, {"gsm8k": sets()["gsm8k"]}, every=5, gold_logprob=True)
    recorded = {record.step: record.metrics for record in view.of_kind("eval")}
    assert "eval/heldout/gold_logprob" not in recorded[0]
    model, tokenizer = load_model(tiny_model_path), load_tokenizer(tiny_model_path)
    means = []
    for row in GSM8K:
        prompt, solution = (tokenizer.encode(row[key], add_special_tokens=False) for key in ("question", "answer"))
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *solution]])).logits[0].float()
        logprobs = torch.log_softmax(logits, -1)[len(prompt) - 1 : -1]
        means.append(float(logprobs.gather(1, torch.tensor(solution).unsqueeze(1)).mean()))
    assert recorded[0]["eval/gsm8k/gold_logprob"] == pytest.approx(sum(means) / len(means), abs=1e-4)
    assert recorded[1]["eval/gsm8k/gold_logprob"] != recorded[0]["eval/gsm8k/gold_logprob"]
