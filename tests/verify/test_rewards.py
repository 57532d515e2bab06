"""Tests of reward functions in TRL's and verl's form, from files independent of this project, in the real pool.

TRL's contract (GRPOTrainer): all arguments are keywords. They are prompts, completions, completion_ids, trainer_state,
log_extra, log_metric, and all columns of the data set except `prompt` and `completion`, as lists. The function returns
a number or None for each completion.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_scalerl.checks import ConfigurationError
from lightning_scalerl.rollouts.grade import Grade, Outcome, Sample
from lightning_scalerl.rollouts.prompt import Prompt
from lightning_scalerl.verify.grade_once import attempt
from lightning_scalerl.verify.pool import VerifierPool
from lightning_scalerl.verify.registry import build_weighted, content, reward_sum
from lightning_scalerl.verify.rewards import RewardSum, Weighted
from tests.examples import every, examples
from tests.paths import ROOT

FILES = ROOT / "tests" / "verify" / "reward_files"
ACCURACY = f"{FILES}/trl_accuracy.py:accuracy_reward"
THINK = f"{FILES}/trl_format.py:think_format_reward"
NO_KWARGS = f"{FILES}/trl_format.py:no_kwargs"
JUDGED = f"{FILES}/trl_async.py:judged_reward"
FLOAT = f"{FILES}/verl_float.py:compute_score"
DICT = f"{FILES}/verl_dict.py:compute_score"
FORMS = [ACCURACY, THINK, NO_KWARGS, JUDGED, FLOAT, DICT]


@contextmanager
def opened(rewards: Any, **settings: Any) -> Iterator[Callable[..., list[Outcome]]]:
    """Yield a function that grades samples in a pool with these rewards."""
    pool = VerifierPool(reward_sum("task.rewards", rewards), 1, **{"timeout_s": 60.0, "retries": 0, **settings})

    def outcomes(*samples: Sample) -> list[Outcome]:
        return [pool.wait(ticket) for ticket in [pool.submit(sample) for sample in samples]]

    try:
        yield outcomes
    finally:
        pool.close()


def talk(completion: str, **columns: Any) -> Sample:
    """Return a sample of a conversation."""
    messages = ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is a half of 3?"})
    row = {"prompt": list(messages), **columns}
    prompt = Prompt("p", "What is a half of 3?", columns.get("answer", ""), messages=messages, columns=row)
    return Sample(prompt, completion, completion, (5, 6, 7), step=3)


def plain(completion: str, **columns: Any) -> Sample:
    return of_row(completion, columns)


def of_row(text: str, columns: dict[str, Any]) -> Sample:
    prompt = Prompt("p", "What is it?", columns.get("answer", ""), columns={"prompt": "What is it?", **columns})
    return Sample(prompt, text, text, (5, 6, 7))


def file_of(folder: Path, text: str, function: str = "reward") -> str:
    path = folder / "mine.py"
    path.write_text(text, encoding="utf-8")
    return f"{path}:{function}"


def grade_here(rewards: Any, sample: Sample) -> Outcome:
    """Grade in this process."""
    return attempt(reward_sum("task.rewards", rewards), sample)


# --- five files, used unchanged ------------------------------------------------------------------------------


def test_the_reward_files_do_not_mention_this_project() -> None:
    texts = [path.read_text(encoding="utf-8") for path in FILES.glob("*.py")]
    assert len(texts) == 5 and not any(re.search("scalerl|sweeps|from tests|import tests", text) for text in texts)


def test_trls_accuracy() -> None:
    """math-verify limits its time with SIGALRM, which works only in a main thread."""
    with opened(ACCURACY) as outcomes:
        right, wrong, abstains, other = outcomes(
            talk("It is $\\boxed{1.5}$.", solution="$\\frac{3}{2}$", level=2),
            talk("It is $\\boxed{1.6}$.", solution="$\\frac{3}{2}$", level=2),
            talk("It is $\\boxed{1.5}$.", solution="", level=2),
            talk("It is $\\boxed{7}$.", solution="$7$"),
        )
    assert [(result.kind, result.reward) for result in (right, wrong, other)] == [
        ("score", 1),
        ("score", 0),
        ("score", 1),
    ]
    assert right.correct is True and wrong.correct is False
    assert abstains.kind == "abstain" and abstains.why


def test_trls_format_reward_for_conversations_and_texts() -> None:
    with opened(THINK) as outcomes:
        good, bad = "<think>\nhalf\n</think>\n1.5", "<think>\n1.5"
        for sample_of in (talk, plain):
            assert [outcome.reward for outcome in outcomes(sample_of(good), sample_of(bad))] == [1.0, 0.0]


def test_trls_function_without_kwargs_gets_its_named_arguments() -> None:
    sample = plain("it is 42", answer="42", difficulty="hard", trainer_state="a column of that name")
    with opened(NO_KWARGS) as outcomes:
        assert [outcome.reward for outcome in outcomes(sample, replace(sample, completion="no"))] == [1.0, 0.0]


def test_trls_asynchronous_function_logs() -> None:
    with opened(JUDGED) as outcomes:
        columns = {"reference": "three halves", "source": "ours"}
        early, late = outcomes(
            talk("three quarters", **columns),
            replace(talk("three halves", **columns), step=11, tokens=tuple(range(9))),
        )
    assert (early.reward, late.reward) == (0.5, 0.5), "after step 10, a long completion loses 0.5"
    assert early.parts == {"mean_length": 3.0, "columns": 1.0} and late.parts["mean_length"] == 9.0
    assert early.extra == {"reference": "three halves", "asked": "What is a half of 3?"}


def verl_row(completion: str, **more: Any) -> Sample:
    row = {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": "6+5?"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "11"},
        "extra_info": {"index": 7, "split": "train"},
        **more,
    }
    prompt = Prompt("p", "6+5?", "11", messages=tuple(row["prompt"]), columns=row)
    return Sample(prompt, completion, completion)


def test_verls_function_that_returns_a_number() -> None:
    with opened(FLOAT) as outcomes:
        right, wrong, none, refused = outcomes(
            verl_row("#### 11"), verl_row("#### 12"), verl_row("eleven"), verl_row("#### 11", data_source="ours")
        )
    assert [result.reward for result in (right, wrong, none)] == [1.0, 0.1, 0.0]
    assert [result.correct for result in (right, wrong, none)] == [True, False, False]
    assert refused.kind == "error" and "NotImplementedError" in refused.why


def test_verls_function_that_returns_a_dict() -> None:
    with opened(DICT) as outcomes:
        right, wrong, long = outcomes(verl_row("Answer: 11"), verl_row("Answer: 12"), verl_row("h" * 52 + "Answer: 11"))
    assert [result.reward for result in (right, wrong, long)] == [1.0, -1.0, pytest.approx(0.45)]
    assert [result.correct for result in (right, wrong, long)] == [True, False, True], "`acc` decides, not the score"
    assert right.parts == {"acc": 1.0, "overlong": 0.0, "index": 7.0} and right.extra == {"pred": "11"}


def test_verls_function_on_rows_of_another_task() -> None:
    """The task's answer is passed as the ground truth, and its name as the data source."""
    sample = plain("#### 42", answer="42")
    sample = replace(sample, prompt=replace(sample.prompt, source="openai/gsm8k"))
    assert grade_here(FLOAT, sample).reward == 1.0


# --- the arguments of a function -----------------------------------------------------------------------------

ECHO = """
SEEN = {}
def reward(**given):
    raise AssertionError("not called")
def all_of_it(prompts, completions, **rest):
    SEEN.clear()
    SEEN.update(rest, prompts=prompts, completions=completions)
    return [1]
"""


def arguments_of(folder: Path, sample: Sample) -> dict[str, Any]:
    weighted = build_weighted("task.rewards", file_of(folder, ECHO, "all_of_it"))
    assert weighted.grader.grade(sample).reward == 1
    recorded: dict[str, Any] = weighted.grader._function.__globals__["SEEN"]  # type: ignore[attr-defined]
    return recorded


ALWAYS = {"prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric"}


def test_arguments_for_a_conversation(tmp_path: Path) -> None:
    arguments = arguments_of(tmp_path, talk("1.5", solution="3/2", tags=["a", "b"]))
    assert set(arguments) == {*ALWAYS, "solution", "tags"}
    assert arguments["prompts"] == [
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is a half of 3?"}]
    ]
    assert arguments["completions"] == [[{"role": "assistant", "content": "1.5"}]]
    assert arguments["completion_ids"] == [[5, 6, 7]] and arguments["trainer_state"].global_step == 3
    assert (arguments["solution"], arguments["tags"]) == (["3/2"], [["a", "b"]])


def test_arguments_for_a_text(tmp_path: Path) -> None:
    columns = {"completion": "of the row", "trainer_state": "of the row", "completion_ids": 4, "answer": None}
    arguments = arguments_of(tmp_path, of_row("42", columns))
    assert set(arguments) == {*ALWAYS, "answer"}, (
        "no prompt, no completion, and no column with the name of another argument"
    )
    assert arguments["prompts"] == ["What is it?"] and arguments["completions"] == ["42"]
    assert arguments["completion_ids"] == [[5, 6, 7]] and arguments["trainer_state"].global_step == 0
    assert arguments["answer"] == [None]


NAMES = st.text("abcdefghijklmnopqrstuvwxyz_", min_size=1, max_size=8).filter(lambda name: name not in ALWAYS)


@given(st.dictionaries(NAMES, st.one_of(st.none(), st.integers(), st.text(max_size=5), st.lists(st.integers()))))
def test_every_other_column_is_passed_as_a_list_of_one(
    tmp_path_factory: pytest.TempPathFactory, columns: dict[str, Any]
) -> None:
    arguments = arguments_of(tmp_path_factory.getbasetemp(), of_row("42", columns))
    expected = {name: [value] for name, value in columns.items() if name not in ("prompt", "completion")}
    assert {name: value for name, value in arguments.items() if name not in ALWAYS} == expected


@pytest.mark.parametrize(
    "text",
    [
        "def reward(completion_ids, **kwargs):\n    return [float(len(ids)) for ids in completion_ids]\n",
        "def reward(**kwargs):\n    return [float(len(c)) for c in kwargs['completions']]\n",
    ],
    ids=["completion_ids", "kwargs"],
)
def test_a_function_in_trls_form_need_not_name_completions(text: str, tmp_path: Path) -> None:
    assert grade_here(file_of(tmp_path, text), plain("abc")).reward == 3.0


def test_a_file_may_hold_a_dataclass(tmp_path: Path) -> None:
    text = (
        "from __future__ import annotations\n"
        "from dataclasses import dataclass\n"
        "@dataclass\nclass Found:\n    value: float = 1.0\n"
        "def reward(completions, **kwargs):\n    return [Found().value for _ in completions]\n"
    )
    assert grade_here(file_of(tmp_path, text), plain("x")).reward == 1.0


def test_a_file_may_import_a_module_next_to_it(tmp_path: Path) -> None:
    (tmp_path / "beside_my_rewards.py").write_text("BONUS = 0.5\n")
    text = "from beside_my_rewards import BONUS\ndef reward(completions, **kwargs):\n    return [BONUS]\n"
    assert grade_here(file_of(tmp_path, text), plain("x")).reward == 0.5


# --- returned values -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("expression", "kind", "why"),
    [
        ("[1.0]", "score", ""),
        ("(True,)", "score", ""),
        ("__import__('numpy').ones(1)", "score", ""),
        ("__import__('numpy').ones(1, dtype='float32').tolist()", "score", ""),
        ("[None]", "abstain", ""),
        ("[1.0, 0.0]", "error", "2 rewards for one completion"),
        ("[]", "error", "0 rewards for one completion"),
        ("1.0", "error", "returns a list, not float"),
        ("None", "error", "returns a list, not NoneType"),
        ("[float('nan')]", "error", "returned nan"),
        ("[float('inf')]", "error", "returned inf"),
        ("['much']", "error", "TypeError: a reward is a number"),
        ("[[1.0]]", "error", "TypeError"),
        ("1 / 0", "error", "ZeroDivisionError"),
        ("['1']", "error", "TypeError"),
        ("{0: 1.0}", "error", "TypeError: a reward function of TRL's form returns a list, not dict"),
        ("{1.0}", "error", "TypeError: a reward function of TRL's form returns a list, not set"),
    ],
)
@pytest.mark.parametrize("definition", ["def", "async def"])
def test_values_that_a_function_in_trls_form_may_return(
    definition: str, expression: str, kind: str, why: str, tmp_path: Path
) -> None:
    place = file_of(tmp_path, f"{definition} reward(completions, **kwargs):\n    return {expression}\n")
    outcome = grade_here(place, plain("x"))
    assert outcome.kind == kind and why in outcome.why
    assert outcome.reward == (1.0 if kind == "score" else 0.0)


@pytest.mark.parametrize(
    ("expression", "kind", "reward"),
    [
        ("0.5", "score", 0.5),
        ("True", "score", 1.0),
        ("{'score': 0.25}", "score", 0.25),
        ("{'score': None, 'why': 'no gold'}", "abstain", 0.0),
        ("{'acc': 1.0}", "error", 0.0),
        ("None", "abstain", 0.0),
        ("{'score': float('nan')}", "error", 0.0),
        ("{'score': 1.0, 'length': float('inf')}", "score", 1.0),
        ("[1.0]", "error", 0.0),
    ],
)
def test_values_that_a_function_in_verls_form_may_return(
    expression: str, kind: str, reward: float, tmp_path: Path
) -> None:
    text = f"def reward(data_source, solution_str, ground_truth, extra_info=None):\n    return {expression}\n"
    outcome = grade_here(file_of(tmp_path, text), verl_row("x"))
    assert (outcome.kind, outcome.reward) == (kind, reward)


def test_verls_numbers_of_any_library_and_an_accuracy_below_one(tmp_path: Path) -> None:
    text = (
        "import numpy as np, torch\n"
        "def reward(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    numbers = {'length': np.float32(3), 'count': np.int64(3), 'part': torch.tensor(1.5), 'all': np.zeros(2)}\n"
        "    return {'score': 0.25, 'acc': float(solution_str), **numbers}\n"
    )
    place = file_of(tmp_path, text)
    part, whole = grade_here(place, verl_row("0.25")), grade_here(place, verl_row("1.0"))
    assert part.parts == {"acc": 0.25, "length": 3.0, "count": 3.0, "part": 1.5}
    assert (part.correct, whole.correct) == (False, True), "an accuracy below 1 does not pass"


def test_functions_in_our_own_forms(tmp_path: Path) -> None:
    text = (
        "def of_answer(completion, answer):\n    return float(completion == answer)\n"
        "async def of_sample(sample):\n    return float(len(sample.tokens))\n"
    )
    assert grade_here(file_of(tmp_path, text, "of_answer"), plain("42", answer="42")).reward == 1.0
    assert grade_here(file_of(tmp_path, text, "of_sample"), plain("42")).reward == 3.0


# --- several rewards -----------------------------------------------------------------------------------------


def test_a_weighted_sum_in_the_pool() -> None:
    rewards = [{"use": ACCURACY, "weight": 2.0}, {"use": THINK, "weight": 0.5, "name": "form"}]
    with opened(rewards) as outcomes:
        both, one, unparsable = outcomes(
            talk("<think>\n3/2\n</think>\n$\\boxed{1.5}$", solution="$1.5$"),
            talk("<think>\n3/2\n</think>\n$\\boxed{1.4}$", solution="$1.5$"),
            talk("<think>\n3/2\n</think>\n$\\boxed{1.5}$", solution=""),
        )
    assert both.reward == 2.5 and both.parts == {"accuracy_reward": 1.0, "form": 1.0} and both.correct is True
    assert one.reward == 0.5 and one.correct is False
    assert (unparsable.kind, unparsable.reward, unparsable.parts) == ("score", 0.5, {"form": 1.0})
    assert unparsable.correct is True, "if the first reward abstains, the next one decides about a pass"


class ConstantGrader:
    """Grader that always returns the same grade."""

    def __init__(self, reward: float | None, correct: bool | None = None) -> None:
        self.constant_grade = Grade(reward, why="" if reward is not None else "says nothing", correct=correct)

    def grade(self, sample: Sample) -> Grade:
        return self.constant_grade


class NotConvertible:
    def __float__(self) -> float:
        raise OverflowError("too long")


@pytest.mark.parametrize("parts", [["length"], {"length": NotConvertible()}])
def test_unreadable_parts_of_a_grade_are_an_error_of_one_completion(parts: Any) -> None:
    """A fault of a verifier must not end the run."""

    class Measures:
        def grade(self, sample: Sample) -> Grade:
            return Grade(1.0, parts)

    outcome = attempt(Measures(), plain("x"))
    assert outcome.kind == "error" and outcome.why.startswith("raised ")


def summed(*rewards: tuple[float | None, float]) -> Outcome:
    entries = [
        Weighted(f"r{number}", ConstantGrader(reward), weight) for number, (reward, weight) in enumerate(rewards)
    ]
    return attempt(RewardSum(entries), plain("x"))


def test_a_weighted_sum_is_exact() -> None:
    assert summed((1.0, 0.7), (1.0, 0.2), (1.0, 0.1)).reward == 1.0, "0.9999999999999999 from left to right"


REWARD = st.one_of(st.none(), st.floats(-10, 10))


@given(st.lists(st.tuples(REWARD, st.floats(-3, 3)), min_size=1, max_size=5))
def test_a_sum_leaves_out_abstentions_and_abstains_if_all_rewards_do(rewards: list[tuple[float | None, float]]) -> None:
    outcome = summed(*rewards)
    scored = [(reward, weight) for reward, weight in rewards if reward is not None]
    assert outcome.kind == ("score" if scored else "abstain")
    assert outcome.reward == pytest.approx(sum(reward * weight for reward, weight in scored))
    if scored:
        assert outcome.correct == (scored[0][0] >= 1.0), "the first reward that does not abstain decides"
    else:
        assert outcome.why == "says nothing"
    if len(rewards) > 1:
        assert outcome.parts == {f"r{n}": reward for n, (reward, _) in enumerate(rewards) if reward is not None}


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("weight", [1.0, 0.0, -1.0])
def test_a_reward_that_is_not_finite_is_an_error_for_every_weight(bad: float, weight: float) -> None:
    assert summed((1.0, 1.0), (bad, weight)).kind == "error"


@pytest.mark.parametrize(
    ("invalid", "message"),
    [
        (f"{FILES}/trl_format.py:nothing", r"cannot be loaded \(AttributeError"),
        (f"{FILES}/trl_format.py", r"is none of exact_match.*and no file\.py:function|names no|neither one of ours"),
        (f"{FILES}/not_there.py:reward", r"there is no file '.*not_there\.py'"),
        ("json:nothing", r"cannot be loaded \(AttributeError"),
        ("json:dumps", r"its parameters \(obj, .*\) are of no known form; TRL's takes completions"),
        ({"use": THINK, "start": 3}, "start: a function of yours has no settings here"),
        ({"use": "math", "cpu": 3}, "math has no such setting"),
        ({"use": THINK, "weight": "much"}, "weight: 'much' must be a number"),
        ({"weight": 1.0}, "names no verifier"),
        ([THINK, THINK], "two are called 'think_format_reward'; give one of them a name of its own"),
        ([], "give at least one"),
    ],
)
def test_invalid_rewards_are_refused_in_one_line(invalid: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"^task\.rewards.*({message})") as error:
        reward_sum("task.rewards", invalid)
    assert "\n" not in str(error.value)


def test_a_file_that_cannot_be_loaded_is_refused_at_the_start(tmp_path: Path) -> None:
    for text, message in (("import not_there_at_all\n", "ModuleNotFoundError"), ("def reward(:\n", "SyntaxError")):
        with pytest.raises(ConfigurationError, match=rf"task\.rewards: .*mine\.py:reward cannot be loaded \({message}"):
            reward_sum("task.rewards", file_of(tmp_path, text))


def test_the_identity_of_a_file_is_its_content() -> None:
    def digest(path: str) -> str:
        return f"digest of {Path(path).name}"

    assert content(["math", {"use": THINK, "weight": 0.5}], digest) == [
        "math",
        {"use": {"file": "digest of trl_format.py", "function": "think_format_reward"}, "weight": 0.5},
    ]
    assert content("mine.rewards:reward", digest) == "mine.rewards:reward"


@pytest.mark.slow
@pytest.mark.parametrize("place", every(100, FORMS, pytest.mark.full), ids=lambda place: place.rpartition("/")[2])
def test_ten_thousand_completions_get_an_outcome(place: str) -> None:
    import random

    source = random.Random(3)
    pieces = [
        "<think>",
        "</think>",
        "\n",
        "####",
        " 11",
        "Answer:",
        "$",
        "\\boxed{",
        "}",
        "1.5",
        "\x00",
        "é",
        "{",
        "three",
    ]
    make_sample = verl_row if "verl" in place else plain if place == NO_KWARGS else talk
    columns = {} if "verl" in place else {"answer": "1.5", "solution": "$1.5$", "reference": "three halves"}
    with opened(place, memory_gib=2.0) as outcomes:
        samples = [
            make_sample("".join(source.choices(pieces, k=source.randint(0, 12))), **columns)
            for _ in range(examples(10_000))
        ]
        graded_samples = outcomes(*samples)
    assert {outcome.kind for outcome in graded_samples} <= {"score", "abstain"}
    assert max(outcome.seconds for outcome in graded_samples) < 6.0


def ends_with(completion: str, answer: str, end: str = "", worth: float = 1.0) -> float:
    """Return `worth` if the completion ends with the answer."""
    return worth if completion.endswith(answer + end) else 0.0


class Ending:
    """A reward that is a callable object, with another reward as a method."""

    def __init__(self, worth: float) -> None:
        self.worth = worth
        self.opaque = object()

    def __call__(self, completion: str, answer: str) -> float:
        return ends_with(completion, answer, worth=self.worth)

    def graded(self, completion: str, answer: str) -> float:
        return self(completion, answer)


def test_callables_are_rewards_with_an_identity() -> None:
    """For a partial, an object and a method, the identity is the source text and the plain values that they hold."""
    makers = {
        "ends_with": lambda worth: partial(ends_with, worth=worth),
        "Ending": Ending,
        "graded": lambda worth: Ending(worth).graded,
    }
    for name, make in makers.items():
        (reward,) = reward_sum("task.rewards", make(0.5)).rewards
        prompt = Prompt("p", "q", "4")
        assert reward.name == name and reward.grader.grade(Sample(prompt, "so 4", "so 4")).reward == 0.5
        first, same, other = (content(make(worth), str) for worth in (0.5, 0.5, 0.25))
        assert first == same != other
    assert content(partial(ends_with, end="."), str) != content(ends_with, str) != content(Ending(1.0), str)
    assert content(Ending(1.0), str) != content(Ending(1.0).graded, str)
