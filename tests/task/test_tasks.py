"""Tests of the built-in tasks: exact verifiers, disjoint held-out prompts, and files that are checked."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf
from safetensors.torch import load_file

from lightning_scalerl.axes.resampling import UniformResampling
from lightning_scalerl.checks import ConfigurationError
from lightning_scalerl.composition import build, compose, conf_dir
from lightning_scalerl.data import RolloutDataModule
from lightning_scalerl.rollouts.rollout import Prompt
from lightning_scalerl.stream.prompts import PromptSource
from lightning_scalerl.task import arithmetic_base
from lightning_scalerl.task.arithmetic import STOP, ArithmeticTask, problem, solution
from lightning_scalerl.task.arithmetic_base import arithmetic_base_model, corrupt, tokenizer
from lightning_scalerl.task.base import check_task
from lightning_scalerl.task.beside import TaskWithEvaluationSets
from lightning_scalerl.task.jsonl import JsonlTask, read_prompts
from tests.helpers import CountingTask


@given(st.integers(1, 4).flatmap(lambda n: st.tuples(st.just(n), *[st.integers(0, 10**n - 1)] * 2)))
def test_a_solution_is_the_sum(case: tuple[int, int, int]) -> None:
    digits, first, second = case
    text = solution(first, second, digits)
    thinking, answer = text.removesuffix(STOP).split("#")
    assert int(answer[::-1]) == first + second
    assert len(thinking) == 4 * digits
    for place in range(digits):
        assert thinking[4 * place] == str(first // 10**place % 10)
        assert thinking[4 * place + 1] == str(second // 10**place % 10)
    assert len(problem(first, second)) == 10


def test_heldout_is_held_out_and_the_pool_is_the_same_for_all_runs() -> None:
    one, two = (ArithmeticTask([20, 30, 40], [10, 10, 10], seed=0) for _ in range(2))
    assert one.train_prompts() == two.train_prompts()
    held = {prompt.text for prompt in one.eval_sets()["heldout"]}
    assert len(held) == 30 and not held & {prompt.text for prompt in one.train_prompts()}
    assert ArithmeticTask([20, 30, 40], [10, 10, 10], seed=1).train_prompts() != one.train_prompts()


def test_the_verifier_is_exact() -> None:
    task = ArithmeticTask([5], [5], seed=0)
    for prompt in task.train_prompts():
        assert task.reward(prompt, prompt.answer) == 1.0
        assert task.is_correct(1.0) and not task.is_correct(0.0)
        for place in range(len(prompt.answer)):
            assert task.reward(prompt, prompt.answer[:place] + "x" + prompt.answer[place + 1 :]) == 0.0
        assert task.reward(prompt, prompt.answer + "0") == 0.0


@pytest.mark.parametrize("name", ["arithmetic", "calculator", "jsonl"])
def test_a_set_that_is_only_evaluated_needs_no_training_prompts(tmp_path: Path, name: str) -> None:
    """As an entry of `evaluation.sets` with `train: null`, composed as on the command line."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "1+1=", "answer": "2"}\n')
    heldout, size = {"arithmetic": ("[0,8]", 8), "calculator": ("5", 5), "jsonl": (f"{{test: {rows}}}", 1)}[name]
    task = build(compose([f"task={name}", "task.train=null", f"task.heldout={heldout}"]), "task")
    assert not task.train_prompts()
    evaluated = TaskWithEvaluationSets(ArithmeticTask([5], [5], seed=0), {"hard": task})
    (prompts,) = [prompts for set_name, prompts in evaluated.eval_sets().items() if set_name != "heldout"]
    assert len(prompts) == size and {prompt.source for prompt in prompts} == {"evaluation.sets.hard"}
    with pytest.raises(ConfigurationError, match=r"^task\.train: needs a value"):
        check_task(task)


def test_the_numbers_of_prompts_are_checked() -> None:
    refusals = {
        "null": "null must give 1 to 4 counts, not all 0",
        "5": "5 must give 1 to 4 counts, not all 0",
        "[]": "[] must give 1 to 4 counts, not all 0",
        "[0]": "[0] must give 1 to 4 counts, not all 0",
        "[1, 1, 1, 1, 1]": "[1, 1, 1, 1, 1] must give 1 to 4 counts, not all 0",
        "[1.5]": "1.5 must be a whole number, 0 or more",
        "[-1, 2]": "-1 must be a whole number, 0 or more",
    }
    for counts, refusal in refusals.items():
        with pytest.raises(ConfigurationError) as caught:
            build(compose(["task=arithmetic", f"task.heldout={counts}"]), "task")
        assert str(caught.value) == f"task.heldout: {refusal}"
    with pytest.raises(ConfigurationError, match=r"^task\.train: 1\.5 must be a whole number"):
        ArithmeticTask([1.5], [1], seed=0)  # type: ignore[list-item]


def test_more_problems_than_exist_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="only 100 exist"):
        ArithmeticTask([90], [20], seed=0)


def test_the_tokenizer_has_one_token_per_character() -> None:
    text = problem(12, 34) + solution(12, 34, 2)
    encoder = tokenizer()
    tokens = encoder.encode(text, add_special_tokens=False)
    assert len(tokens) == len(text)
    assert encoder.decode(tokens, skip_special_tokens=True) == text.removesuffix(STOP)


def test_corruption_changes_only_digits_at_the_given_rate() -> None:
    text = "0123456789#." * 500
    changed = corrupt(text, 0.2, random.Random(0))
    assert [c for c in changed if not c.isdigit()] == [c for c in text if not c.isdigit()]
    share = sum(a != b for a, b in zip(text, changed, strict=True)) / 5000
    assert share == pytest.approx(0.18, abs=0.02)  # one replacement in ten is the digit itself


def test_the_base_model_is_trained_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCALERL_CACHE", str(tmp_path))
    small = {"width": 32, "layers": 1, "batches": 2, "batch_size": 4}
    first = arithmetic_base_model(**small)
    stamp = (Path(first) / "model.safetensors").stat().st_mtime_ns
    assert arithmetic_base_model(**small) == first
    assert (Path(first) / "model.safetensors").stat().st_mtime_ns == stamp
    assert arithmetic_base_model(**small, seed=1) != first


def test_the_demos_base_model_comes_with_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCALERL_CACHE", str(tmp_path))
    monkeypatch.setattr(arithmetic_base, "_train", lambda **_: pytest.fail("it was trained here"))
    conf = conf_dir()
    usual, demo = (OmegaConf.load(conf / name) for name in ("model/arithmetic_base.yaml", "sums_of_two_digits.yaml"))
    settings = {str(name): value for name, value in {**usual, **demo.model}.items() if name != "_target_"}
    before = torch.get_rng_state()
    path = Path(arithmetic_base_model(**settings))
    assert torch.equal(before, torch.get_rng_state())
    (shipped,) = arithmetic_base.FOLDER.glob("arithmetic*.safetensors")
    weights, packaged = load_file(path / "model.safetensors"), load_file(shipped)
    assert weights.keys() == packaged.keys() and all(torch.equal(weights[name], packaged[name]) for name in packaged)
    assert shipped.stat().st_size < 1_000_000


@pytest.mark.full
def test_the_packaged_base_model_can_be_made_again(tmp_path: Path) -> None:
    (shipped,) = arithmetic_base.FOLDER.glob("arithmetic*.safetensors")
    made = arithmetic_base.make_shipped(tmp_path)
    assert made.name == shipped.name
    settings = {"width": 64, "layers": 3, "seed": 0}
    losses = []
    for file in (made, shipped):
        model = arithmetic_base.new_model(**settings)
        model.load_state_dict(load_file(file))
        tokens = arithmetic_base._batch(2, 256, 0.15, random.Random(0))
        # As in training, the loss leaves out the prompt: predictions of its tokens are untrained and mere rounding.
        labels = tokens.clone()
        labels[:, : len(problem(0, 0))] = -100
        with torch.no_grad():
            losses.append(float(model(tokens, labels=labels).loss))
    # Another processor rounds differently, so weights drift apart, but the loss stays nearly the same.
    assert losses[0] == pytest.approx(losses[1], rel=0.01)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ('{"prompt": "1+1=", "answer": null}', "answer: null must be a text or a finite number"),
        ('{"prompt": "1+1=", "answer": NaN}', "answer: nan must be a text or a finite number"),
        ('{"prompt": "1+1=", "answer": 1e999}', "answer: inf must be a text or a finite number"),
        ('{"prompt": "1+1=", "answer": ["2", "two"]}', r"answer: \['2', 'two'\] must be a text or a finite number"),
        ('{"prompt": "1+1=", "answer": true}', "answer: true must be"),
        ('{"prompt": "  ", "answer": "2"}', "prompt: is empty"),
        ('{"prompt": ["1+1="], "answer": "2"}', r"prompt: \['1\+1='\] must be"),
        ('{"prompt": "1+1=", "answer": "2", "id": [1]}', r"id: \[1\] must be"),
        ('{"prompt": "1+1="}', "answer: is missing"),
        ("[" * 100_000, "nested too deep"),
    ],
    ids=lambda text: text[:40],
)
def test_a_line_with_an_invalid_value_is_refused(tmp_path: Path, row: str, message: str) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(f'{{"prompt": "1+2=", "answer": 3}}\n{row}\n')
    with pytest.raises(ConfigurationError, match=f"task.train: .*rows.jsonl, line 2: {message}.*; each line is"):
        read_prompts("task.train", str(file))


def test_numbers_become_texts_as_written(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "1+2=", "answer": 3, "id": null, "difficulty": null}\n{"prompt": "p", "answer": 0.5}\n')
    first, second = read_prompts("task.train", str(file))
    assert (first.answer, first.prompt_id, first.difficulty, second.answer) == ("3", "1", "", "0.5")


@pytest.mark.parametrize(
    ("mistake", "expected"),
    [
        ({"width": 16}, r"model\.width: 16 is no multiple of 32.*say 32"),
        ({"width": 33}, r"model\.width: 33 .*say 64"),
        ({"width": 32.0}, r"model\.width: 32\.0 must be a whole number"),
        ({"layers": 0}, r"model\.layers: 0"),
        ({"batches": -1}, r"model\.batches: -1"),
        ({"batch_size": 0}, r"model\.batch_size: 0"),
        ({"digits": 0}, r"model\.digits: 0"),
        ({"corruption": 2}, r"model\.corruption: 2 must be a probability"),
        ({"learning_rate": 0.0}, r"model\.learning_rate: 0\.0 must be above 0"),
    ],
)
def test_invalid_settings_of_a_base_model_are_refused_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mistake: dict[str, float], expected: str
) -> None:
    monkeypatch.setenv("SCALERL_CACHE", str(tmp_path))
    with pytest.raises(ConfigurationError, match=expected):
        arithmetic_base_model(**mistake)  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


def test_an_interrupted_base_model_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCALERL_CACHE", str(tmp_path))
    small = {"width": 32, "layers": 1, "batches": 2, "batch_size": 4}
    made = Path(arithmetic_base_model(**small))
    made.rename(made.with_suffix(".part"))
    (made.with_suffix(".part") / "config.json").unlink()
    assert (Path(arithmetic_base_model(**small)) / "config.json").exists()


def write(path: Path, *rows: object) -> str:
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return str(path)


def test_jsonl(tmp_path: Path) -> None:
    train = write(
        tmp_path / "train.jsonl", {"prompt": "2+2", "answer": " 4 ", "id": "sum"}, "", {"prompt": "x", "answer": 1}
    )
    heldout = write(tmp_path / "test.jsonl", {"prompt": "1+1", "answer": "2", "difficulty": "easy"})
    Path(heldout).write_bytes(b"\xef\xbb\xbf" + Path(heldout).read_bytes())  # a byte order mark
    task = JsonlTask(train, {"test": heldout}, "lightning_scalerl.task.jsonl:exact_match")
    assert [p.prompt_id for p in task.train_prompts()] == ["sum", "3"], (
        "ids are line numbers, so that a renamed file holds the same prompts"
    )
    assert task.reward(task.train_prompts()[0], "4\n") == 1.0
    assert task.reward(task.train_prompts()[0], "5") == 0.0


@pytest.mark.parametrize(
    ("rows", "match"),
    [
        ([{"prompt": "a"}], r"train.jsonl, line 1: answer: is missing"),
        ([{"prompt": "a", "answer": "\ud800"}], r"train.jsonl, line 1: answer: .* has a lone surrogate"),
        ([{"prompt": "a", "answer": "b"}, "{broken"], "line 2"),
        ([[1, 2]], "line 1"),
        ([], "holds no prompts"),
    ],
)
def test_broken_jsonl_names_file_and_line(tmp_path: Path, rows: list[object], match: str) -> None:
    with pytest.raises(ConfigurationError, match=match):
        JsonlTask(write(tmp_path / "train.jsonl", *rows), {}, "lightning_scalerl.task.jsonl:exact_match")


@pytest.mark.parametrize("name", ["nothing:here", "json:nothing", "json", "json:__name__"])
def test_an_invalid_verifier_is_refused(tmp_path: Path, name: str) -> None:
    train = write(tmp_path / "train.jsonl", {"prompt": "a", "answer": "b"})
    with pytest.raises(ConfigurationError, match=r"task\.verifier"):
        JsonlTask(train, {}, name)


def test_a_task_without_heldout_prompts_cannot_be_evaluated(tmp_path: Path) -> None:
    """Studies need held-out prompts. `tests/callbacks/test_lightning.py` tests scripts that do not evaluate."""
    train = write(tmp_path / "train.jsonl", {"prompt": "a", "answer": "b"})
    task = JsonlTask(train, {}, "lightning_scalerl.task.jsonl:exact_match")
    with pytest.raises(ConfigurationError, match="no held-out prompts"):
        check_task(task)
    with pytest.raises(ConfigurationError, match=r"predict: the task has no held-out prompts; give predict="):
        _ = RolloutDataModule(task).predicted
    empty = CountingTask()
    empty.eval_sets = lambda: {"empty": []}  # type: ignore[method-assign]
    with pytest.raises(ConfigurationError, match="no held-out prompts"):
        RolloutDataModule(empty)


def test_prompt_pools_are_checked() -> None:
    prompt = Prompt("a", "", "")
    with pytest.raises(ConfigurationError, match="empty"):
        PromptSource([], (0,), UniformResampling())
    with pytest.raises(ConfigurationError, match="'a' occurs twice"):
        PromptSource([prompt, prompt], (0,), UniformResampling())
