"""Tests of task=reasoning_gym: distinct rows, split the same way for every seed, graded by their generator."""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Iterator
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import pytest

from lightning_scalerl.axes.curriculum import LinearCurriculum
from lightning_scalerl.checks import ConfigurationError
from lightning_scalerl.composition import build, compose
from lightning_scalerl.member.identity import group_identity
from lightning_scalerl.rollouts.grade import Sample
from lightning_scalerl.rollouts.prompt import Prompt
from lightning_scalerl.task.reasoning_gym import PACKAGE, ReasoningGymTask, _factory, read_answer
from lightning_scalerl.verify.pool import VerifierPool

SMALL = {"min_terms": 2, "max_terms": 3, "max_digits": 1}


@pytest.fixture(scope="module", autouse=True)
def package() -> None:
    """Skip the tests without the package reasoning-gym, or fail where CI_ALL demands every component."""
    if find_spec("reasoning_gym") is None:
        (pytest.fail if os.environ.get("CI_ALL") == "1" else pytest.skip)(f"{PACKAGE} is not installed")


def texts_of(prompts: Any) -> set[str]:
    return {prompt.text for prompt in prompts}


def test_a_question_is_on_the_same_side_for_every_seed() -> None:
    sides = []
    for seed in (0, 1):
        task = ReasoningGymTask("chain_sum", SMALL, train=200, heldout=50, seed=seed)
        train, heldout = texts_of(task.train_prompts()), texts_of(task.eval_sets()["heldout"])
        assert (len(train), len(heldout)) == (200, 50)
        sides.append((train, heldout))
    (train, heldout), (other_train, other_heldout) = sides
    assert train & other_train, "row i of a seed is row i - 1 of the next: the two seeds share rows"
    assert not train & (heldout | other_heldout) and not other_train & heldout


def test_a_task_that_is_only_evaluated_has_no_training_prompts() -> None:
    task = ReasoningGymTask("chain_sum", SMALL, train=None, heldout=30, difficulty="num_terms")
    assert not task.train_prompts() and len(texts_of(task.eval_sets()["heldout"])) == 30
    assert [known.sample.prompt for known in task.known()] == list(task.eval_sets()["heldout"][:4])
    assert task.notes()[0].endswith(": 30 of chain_sum")
    with pytest.raises(ConfigurationError, match=r"task.difficulty: n takes .* values"):
        ReasoningGymTask("count_bits", train=None, heldout=400, difficulty="n")


def test_the_generators_score_is_the_reward() -> None:
    task = ReasoningGymTask("chain_sum", SMALL, 20, 5, instruction="Answer with the number only.")
    prompt = task.train_prompts()[0]
    assert prompt.text == f"{prompt.question}\nAnswer with the number only."
    answer = prompt.answer
    assert [task.reward(prompt, text) for text in (answer, f" {answer}\n", "", "no number")] == [1, 1, 0, 0]
    partial = task.reward(prompt, f"The answer is {answer}")
    assert partial is not None and 0 < partial < 1 and not task.is_correct(partial) and task.is_correct(1.0)
    tagged = ReasoningGymTask("chain_sum", SMALL, 20, 5, answer="tag")
    assert [tagged.reward(prompt, text) for text in (answer, f"So <answer>{answer}</answer>")] == [0, 1]
    assert all(tagged.reward(example.sample.prompt, example.sample.completion) == 1 for example in tagged.known())


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("4 - 1 = 3.", "3"),
        ("5-7", "7"),
        ("-12 - 3 = -15", "-15"),
        ("1,234.50", "1,234.50"),
        ("in total 7, then", "7"),
        ("none", None),
    ],
)
def test_the_last_number_is_the_answer(text: str, number: str | None) -> None:
    assert read_answer(text, "number") == number


def test_a_scorer_that_raises_on_a_malformed_answer_gives_no_reward() -> None:
    task = ReasoningGymTask("prime_factorization", {"max_value": 200}, 20, 5)
    prompt = task.train_prompts()[0]
    grade = task.grader().grade(Sample(prompt, "two primes", "two primes"))
    assert grade.reward == 0 and "ValueError" in grade.extra["scorer"]


def test_verifier_processes_grade_as_the_trainers_process() -> None:
    task = ReasoningGymTask({"chain_sum": 1, "gcd": 1}, None, 10, 4)
    samples = [Sample(prompt, prompt.answer, prompt.answer) for prompt in task.train_prompts()]
    assert task.reward(samples[0].prompt, "0") is not None, "this scorer is not sent to the workers"
    pool = VerifierPool(task.grader(), workers=1, timeout_s=60.0)
    try:
        assert [pool.wait(pool.submit(sample)).reward for sample in samples[::5]] == [1.0, 1.0]
    finally:
        pool.close()


def test_generators_with_weights_a_difficulty_and_additional_sets() -> None:
    task = ReasoningGymTask(
        {"chain_sum": 3, "products": 1},
        {"chain_sum": SMALL, "products": {"max_digits": 2}},
        train=80,
        heldout=20,
        difficulty="num_terms",
        carry_over={"longer": {"dataset": "chain_sum", "settings": {"min_terms": 5}, "rows": 7}},
    )
    train, sets = task.train_prompts(), task.eval_sets()
    assert {name: len(prompts) for name, prompts in sets.items()} == {"heldout": 20, "longer": 7}
    assert [sum(each.columns["generator"] == name for each in train) for name in ("chain_sum", "products")] == [60, 20]
    assert {each.difficulty for each in train} == {"2_num_terms", "3_num_terms"}
    assert all(task.reward(each, each.answer) == 1 for each in [train[0], train[-1], sets["longer"][0]])
    places = LinearCurriculum(start=0.5, over_steps=4).places(list(train))
    easy = [place for prompt, place in zip(train, places, strict=True) if prompt.difficulty == "2_num_terms"]
    assert max(easy) == len(easy) - 1, "a curriculum opens the rows of two terms first"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"dataset": "chain_sums"},
            r"task.dataset: 'chain_sums' .*did you mean chain_sum\?; valid: ab, acre, .*sorting",
        ),
        ({"settings": {"max_term": 3}}, r"task.settings.max_term: .*max_terms\?; valid: min_terms, max_terms, min_dig"),
        ({"settings": {"seed": 3}}, "task.settings.seed: chain_sum has no such setting .*task.seed"),
        ({"settings": {"max_terms": 0}}, "task.settings: chain_sum cannot use .*max_terms must be >= min_terms"),
        (
            {"settings": {**SMALL, "max_terms": 2}},
            "gave 175 and 25 different rows in 48000 draws, and 2000 and 400 are",
        ),
        ({"dataset": {"chain_sum": 0}}, "task.dataset.chain_sum: 0 must be a number above 0"),
        ({"dataset": {"chain_sum": 1}, "settings": SMALL}, "task.settings.min_terms: .*valid: chain_sum"),
        (
            {"difficulty": "terms"},
            "task.difficulty: 'terms' is no number that chain_sum .*valid: num_terms, num_digits",
        ),
        ({"dataset": "count_bits", "difficulty": "n"}, "task.difficulty: n takes 19.. values"),
        ({"answer": "last"}, "task.answer: 'last' must be one of whole, number, tag"),
        ({"carry_over": {"a": {"rows": 3}}}, "task.carry_over.a: .*dataset, settings and rows"),
        ({"train": 0}, "task.train: 0 must be a whole number"),
    ],
)
def test_invalid_arguments_are_refused_in_one_line(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message) as refused:
        ReasoningGymTask(**{"dataset": "chain_sum", **arguments})
    assert "\n" not in str(refused.value)


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return a function that hides a package, and unloads reasoning-gym and all of its modules."""
    kept = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "reasoning_gym"}
    our_find_spec = "lightning_scalerl.task.reasoning_gym.find_spec"

    def hide(name: str) -> None:
        for loaded in kept:
            monkeypatch.delitem(sys.modules, loaded)
        monkeypatch.delitem(sys.modules, name, raising=False)
        monkeypatch.setattr(our_find_spec, lambda requested: None if requested == name else find_spec(requested))

    yield hide
    for loaded in [loaded for loaded in sys.modules if loaded.partition(".")[0] == "reasoning_gym"]:
        del sys.modules[loaded]
    sys.modules.update(kept)


def test_a_missing_package_of_one_generator_affects_only_that_generator(without: Any) -> None:
    without("pycosat")
    assert len(ReasoningGymTask("chain_sum", SMALL, 10, 4).train_prompts()) == 10, "the other generators work"
    assert "pycosat" not in sys.modules, "the stand-in for the package is removed after the import"
    with pytest.raises(ConfigurationError, match=r"zebra_puzzles needs the package pycosat, .*needs a C compiler"):
        ReasoningGymTask("zebra_puzzles", None, 4, 2)


def test_a_missing_reasoning_gym_is_an_error_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ConfigurationError, match=r"needs the package reasoning_gym, .*pip install reasoning-gym"):
        ReasoningGymTask("chain_sum")


def test_identity_includes_generator_version_and_settings() -> None:
    def part(*overrides: str) -> Any:
        return group_identity(
            "task", dict(compose(["task=reasoning_gym", "task.dataset=chain_sum", "scale=trial", *overrides]).task)
        )

    plain = part()
    assert plain["version"] == version(PACKAGE) and plain["dataset"] == "chain_sum"
    assert "carry_over" not in plain and "difficulty" not in plain
    others = [part("task.settings={max_terms: 3}"), part("task.seed=1"), part("task.dataset=products")]
    assert all(other != plain for other in others)


def test_the_task_is_composed_from_conf() -> None:
    rows = ['task.settings={max_digits: 1, operators: ["+"]}', "task.train=12", "task.heldout=3"]
    config = compose(["task=reasoning_gym", "task.dataset=basic_arithmetic", "scale=trial", *rows])
    task = build(config, "task")
    assert isinstance(task, ReasoningGymTask) and len(task.train_prompts()) == 12
    assert [type(value) for value in task.grader().generators["basic_arithmetic"].settings.values()] == [int, list]
    assert all(isinstance(prompt, Prompt) for prompt in task.eval_sets()["heldout"])


@pytest.mark.full
def test_every_generator_draws_and_grades() -> None:
    """Every generator, except one whose package needs a C compiler, scores unreadable answers without an error."""
    left_out = []
    for name in sorted(_factory().DATASETS.keys() - {"composite"}):
        try:
            task = ReasoningGymTask(name, None, 6, 2)
        except ConfigurationError as error:
            left_out.append((name, "pycosat" in str(error)))
            continue
        prompt = task.train_prompts()[0]
        assert all(task.reward(example.sample.prompt, example.sample.completion) == 1 for example in task.known()), name
        rewards = [task.reward(pickle.loads(pickle.dumps(prompt)), text) for text in ("", "abc", "[1", "12")]
        assert all(reward is not None and 0 <= reward <= 1 for reward in rewards), name
    assert left_out in ([], [("zebra_puzzles", True)])
