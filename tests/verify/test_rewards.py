"""Reward functions in TRL's form and in verl's, from files that know nothing of us, in the very pool that grades.

TRL's contract (GRPOTrainer): keywords alone; prompts, completions, completion_ids, trainer_state, log_extra and
log_metric; every column of the data set but `prompt` and `completion`, as lists; a number or None for each completion.
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
    """A pool that grades with these; called with samples."""
    pool = VerifierPool(reward_sum("task.rewards", rewards), 1, **{"timeout_s": 60.0, "retries": 0, **settings})

    def outcomes(*samples: Sample) -> list[Outcome]:
        return [pool.wait(ticket) for ticket in [pool.submit(sample) for sample in samples]]

    try:
        yield outcomes
    finally:
        pool.close()


def talk(completion: str, **columns: Any) -> Sample:
    """Of a conversation."""
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


def here(rewards: Any, sample: Sample) -> Outcome:
    """In this process."""
    return attempt(reward_sum("task.rewards", rewards), sample)


# --- five files, unchanged -----------------------------------------------------------------------------------


def test_the_files_know_nothing_of_us() -> None:
    texts = [path.read_text(encoding="utf-8") for path in FILES.glob("*.py")]
    assert len(texts) == 5 and not any(re.search("scalerl|sweeps|from tests|import tests", text) for text in texts)


def test_trls_accuracy() -> None:
    """math-verify stops itself by SIGALRM, which works in a main thread alone."""
    with opened(ACCURACY) as outcomes:
        right, wrong, abstains, other = outcomes(
            talk("It is $\\boxed{1.5}$.", solution="$\\frac{3}{2}$", level=2),
            talk("It is $\\boxed{1.6}$.", solution="$\\frac{3}{2}$", level=2),
            talk("It is $\\boxed{1.5}$.", solution="", level=2),
            talk("It is $\\boxed{7}$.", solution="$7$"),
        )
    assert [(each.kind, each.reward) for each in (right, wrong, other)] == [("score", 1), ("score", 0), ("score", 1)]
    assert right.correct is True and wrong.correct is False
    assert abstains.kind == "abstain" and abstains.why


def test_trls_format_of_conversations_and_of_texts() -> None:
    with opened(THINK) as outcomes:
        good, bad = "<think>\nhalf\n</think>\n1.5", "<think>\n1.5"
        for of in (talk, plain):
            assert [outcome.reward for outcome in outcomes(of(good), of(bad))] == [1.0, 0.0]


def test_trls_function_without_kwargs_is_given_what_it_names() -> None:
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
    assert (early.reward, late.reward) == (0.5, 0.5), "late and long"
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


def test_verls_number() -> None:
    with opened(FLOAT) as outcomes:
        right, wrong, none, refused = outcomes(
            verl_row("#### 11"), verl_row("#### 12"), verl_row("eleven"), verl_row("#### 11", data_source="ours")
        )
    assert [each.reward for each in (right, wrong, none)] == [1.0, 0.1, 0.0]
    assert [each.correct for each in (right, wrong, none)] == [True, False, False]
    assert refused.kind == "error" and "NotImplementedError" in refused.why


def test_verls_dict() -> None:
    with opened(DICT) as outcomes:
        right, wrong, long = outcomes(verl_row("Answer: 11"), verl_row("Answer: 12"), verl_row("h" * 52 + "Answer: 11"))
    assert [each.reward for each in (right, wrong, long)] == [1.0, -1.0, pytest.approx(0.45)]
    assert [each.correct for each in (right, wrong, long)] == [True, False, True], "`acc` says so, not the score"
    assert right.parts == {"acc": 1.0, "overlong": 0.0, "index": 7.0} and right.extra == {"pred": "11"}


def test_verls_function_on_other_rows() -> None:
    """Of a task that is not of verl's rows: its answer is the ground truth, its name the data source."""
    sample = plain("#### 42", answer="42")
    sample = replace(sample, prompt=replace(sample.prompt, source="openai/gsm8k"))
    assert here(FLOAT, sample).reward == 1.0


# --- what exactly a function is given ------------------------------------------------------------------------

ECHO = """
SEEN = {}
def reward(**given):
    raise AssertionError("not called")
def all_of_it(prompts, completions, **rest):
    SEEN.clear()
    SEEN.update(rest, prompts=prompts, completions=completions)
    return [1]
"""


def seen(folder: Path, sample: Sample) -> dict[str, Any]:
    weighted = build_weighted("task.rewards", file_of(folder, ECHO, "all_of_it"))
    assert weighted.grader.grade(sample).reward == 1
    found: dict[str, Any] = weighted.grader._function.__globals__["SEEN"]  # type: ignore[attr-defined]
    return found


ALWAYS = {"prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric"}


def test_everything_of_a_conversation(tmp_path: Path) -> None:
    given = seen(tmp_path, talk("1.5", solution="3/2", tags=["a", "b"]))
    assert set(given) == {*ALWAYS, "solution", "tags"}
    assert given["prompts"] == [
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is a half of 3?"}]
    ]
    assert given["completions"] == [[{"role": "assistant", "content": "1.5"}]]
    assert given["completion_ids"] == [[5, 6, 7]] and given["trainer_state"].global_step == 3
    assert (given["solution"], given["tags"]) == (["3/2"], [["a", "b"]])


def test_everything_of_a_text(tmp_path: Path) -> None:
    columns = {"completion": "of the row", "trainer_state": "of the row", "completion_ids": 4, "answer": None}
    given = seen(tmp_path, of_row("42", columns))
    assert set(given) == {*ALWAYS, "answer"}, "neither prompt nor completion, nor what has a meaning of its own"
    assert given["prompts"] == ["What is it?"] and given["completions"] == ["42"]
    assert given["completion_ids"] == [[5, 6, 7]] and given["trainer_state"].global_step == 0
    assert given["answer"] == [None]


NAMES = st.text("abcdefghijklmnopqrstuvwxyz_", min_size=1, max_size=8).filter(lambda name: name not in ALWAYS)


@given(st.dictionaries(NAMES, st.one_of(st.none(), st.integers(), st.text(max_size=5), st.lists(st.integers()))))
def test_every_column_but_the_prompt_comes_as_a_list_of_one(
    tmp_path_factory: pytest.TempPathFactory, columns: dict[str, Any]
) -> None:
    given = seen(tmp_path_factory.getbasetemp(), of_row("42", columns))
    expected = {name: [value] for name, value in columns.items() if name not in ("prompt", "completion")}
    assert {name: value for name, value in given.items() if name not in ALWAYS} == expected


@pytest.mark.parametrize(
    "text",
    [
        "def reward(completion_ids, **kwargs):\n    return [float(len(ids)) for ids in completion_ids]\n",
        "def reward(**kwargs):\n    return [float(len(c)) for c in kwargs['completions']]\n",
    ],
    ids=["completion_ids", "kwargs"],
)
def test_a_function_of_trls_need_not_name_completions(text: str, tmp_path: Path) -> None:
    assert here(file_of(tmp_path, text), plain("abc")).reward == 3.0


def test_a_file_may_hold_a_dataclass(tmp_path: Path) -> None:
    text = (
        "from __future__ import annotations\n"
        "from dataclasses import dataclass\n"
        "@dataclass\nclass Found:\n    value: float = 1.0\n"
        "def reward(completions, **kwargs):\n    return [Found().value for _ in completions]\n"
    )
    assert here(file_of(tmp_path, text), plain("x")).reward == 1.0


def test_a_file_may_import_its_neighbour(tmp_path: Path) -> None:
    (tmp_path / "beside_my_rewards.py").write_text("BONUS = 0.5\n")
    text = "from beside_my_rewards import BONUS\ndef reward(completions, **kwargs):\n    return [BONUS]\n"
    assert here(file_of(tmp_path, text), plain("x")).reward == 0.5


# --- what comes back -----------------------------------------------------------------------------------------


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
@pytest.mark.parametrize("how", ["def", "async def"])
def test_what_a_function_may_return(how: str, expression: str, kind: str, why: str, tmp_path: Path) -> None:
    place = file_of(tmp_path, f"{how} reward(completions, **kwargs):\n    return {expression}\n")
    outcome = here(place, plain("x"))
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
def test_what_verls_may_return(expression: str, kind: str, reward: float, tmp_path: Path) -> None:
    text = f"def reward(data_source, solution_str, ground_truth, extra_info=None):\n    return {expression}\n"
    outcome = here(file_of(tmp_path, text), verl_row("x"))
    assert (outcome.kind, outcome.reward) == (kind, reward)


def test_verls_numbers_of_any_library_and_a_pass_of_one_or_more(tmp_path: Path) -> None:
    text = (
        "import numpy as np, torch\n"
        "def reward(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    numbers = {'length': np.float32(3), 'count': np.int64(3), 'part': torch.tensor(1.5), 'all': np.zeros(2)}\n"
        "    return {'score': 0.25, 'acc': float(solution_str), **numbers}\n"
    )
    place = file_of(tmp_path, text)
    part, whole = here(place, verl_row("0.25")), here(place, verl_row("1.0"))
    assert part.parts == {"acc": 0.25, "length": 3.0, "count": 3.0, "part": 1.5}
    assert (part.correct, whole.correct) == (False, True), "a fraction of the accuracy is no pass"


def test_our_own_forms(tmp_path: Path) -> None:
    text = (
        "def of_answer(completion, answer):\n    return float(completion == answer)\n"
        "async def of_sample(sample):\n    return float(len(sample.tokens))\n"
    )
    assert here(file_of(tmp_path, text, "of_answer"), plain("42", answer="42")).reward == 1.0
    assert here(file_of(tmp_path, text, "of_sample"), plain("42")).reward == 3.0


# --- several of them -----------------------------------------------------------------------------------------


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
    assert unparsable.correct is True, "where the first abstains, the next says what is a pass"


class Says:
    """Always the same."""

    def __init__(self, reward: float | None, correct: bool | None = None) -> None:
        self.given = Grade(reward, why="" if reward is not None else "says nothing", correct=correct)

    def grade(self, sample: Sample) -> Grade:
        return self.given


class Unwilling:
    def __float__(self) -> float:
        raise OverflowError("too long")


@pytest.mark.parametrize("parts", [["length"], {"length": Unwilling()}])
def test_parts_that_cannot_be_read_are_an_error_of_that_completion(parts: Any) -> None:
    """And no end of the run: a verifier's faults are its completion's."""

    class Measures:
        def grade(self, sample: Sample) -> Grade:
            return Grade(1.0, parts)

    outcome = attempt(Measures(), plain("x"))
    assert outcome.kind == "error" and outcome.why.startswith("raised ")


def summed(*rewards: tuple[float | None, float]) -> Outcome:
    entries = [Weighted(f"r{number}", Says(reward), weight) for number, (reward, weight) in enumerate(rewards)]
    return attempt(RewardSum(entries), plain("x"))


REWARD = st.one_of(st.none(), st.floats(-10, 10))


@given(st.lists(st.tuples(REWARD, st.floats(-3, 3)), min_size=1, max_size=5))
def test_abstentions_are_left_out_and_if_all_abstain_so_does_the_sum(rewards: list[tuple[float | None, float]]) -> None:
    outcome = summed(*rewards)
    scored = [(reward, weight) for reward, weight in rewards if reward is not None]
    assert outcome.kind == ("score" if scored else "abstain")
    assert outcome.reward == pytest.approx(sum(reward * weight for reward, weight in scored))
    if scored:
        assert outcome.correct == (scored[0][0] >= 1.0), "of the first that does not abstain"
    else:
        assert outcome.why == "says nothing"
    if len(rewards) > 1:
        assert outcome.parts == {f"r{n}": reward for n, (reward, _) in enumerate(rewards) if reward is not None}


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("weight", [1.0, 0.0, -1.0])
def test_one_that_is_no_number_is_an_error_whatever_its_weight(bad: float, weight: float) -> None:
    assert summed((1.0, 1.0), (bad, weight)).kind == "error"


@pytest.mark.parametrize(
    ("given", "said"),
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
def test_mistakes(given: Any, said: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"^task\.rewards.*({said})") as error:
        reward_sum("task.rewards", given)
    assert "\n" not in str(error.value)


def test_a_file_that_cannot_be_loaded_is_said_before_anything_starts(tmp_path: Path) -> None:
    for text, said in (("import not_there_at_all\n", "ModuleNotFoundError"), ("def reward(:\n", "SyntaxError")):
        with pytest.raises(ConfigurationError, match=rf"task\.rewards: .*mine\.py:reward cannot be loaded \({said}"):
            reward_sum("task.rewards", file_of(tmp_path, text))


def test_a_files_bytes_are_its_identity() -> None:
    def digest(path: str) -> str:
        return f"digest of {Path(path).name}"

    assert content(["math", {"use": THINK, "weight": 0.5}], digest) == [
        "math",
        {"use": {"file": "digest of trl_format.py", "function": "think_format_reward"}, "weight": 0.5},
    ]
    assert content("mine.rewards:reward", digest) == "mine.rewards:reward"


@pytest.mark.slow
@pytest.mark.parametrize("place", every(100, FORMS, pytest.mark.full), ids=lambda place: place.rpartition("/")[2])
def test_ten_thousand_completions_each_have_an_outcome(place: str) -> None:
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
    of = verl_row if "verl" in place else plain if place == NO_KWARGS else talk
    columns = {} if "verl" in place else {"answer": "1.5", "solution": "$1.5$", "reference": "three halves"}
    with opened(place, memory_gib=2.0) as outcomes:
        samples = [
            of("".join(source.choices(pieces, k=source.randint(0, 12))), **columns) for _ in range(examples(10_000))
        ]
        found = outcomes(*samples)
    assert {outcome.kind for outcome in found} <= {"score", "abstain"}
    assert max(outcome.seconds for outcome in found) < 6.0


def ends_with(completion: str, answer: str, end: str = "", worth: float = 1.0) -> float:
    """Worth something if the completion ends so."""
    return worth if completion.endswith(answer + end) else 0.0


class Ending:
    """A reward that is an object, or a method of one."""

    def __init__(self, worth: float) -> None:
        self.worth = worth
        self.opaque = object()

    def __call__(self, completion: str, answer: str) -> float:
        return ends_with(completion, answer, worth=self.worth)

    def graded(self, completion: str, answer: str) -> float:
        return self(completion, answer)


def test_what_is_called_like_a_function_is_a_reward_with_an_identity() -> None:
    """A partial, an object, a method: the source text counts, and the plain values that they hold."""
    of = {
        "ends_with": lambda worth: partial(ends_with, worth=worth),
        "Ending": Ending,
        "graded": lambda worth: Ending(worth).graded,
    }
    for name, make in of.items():
        (reward,) = reward_sum("task.rewards", make(0.5)).rewards
        prompt = Prompt("p", "q", "4")
        assert reward.name == name and reward.grader.grade(Sample(prompt, "so 4", "so 4")).reward == 0.5
        ours, same, other = (content(make(worth), str) for worth in (0.5, 0.5, 0.25))
        assert ours == same != other
    assert content(partial(ends_with, end="."), str) != content(ends_with, str) != content(Ending(1.0), str)
    assert content(Ending(1.0), str) != content(Ending(1.0).graded, str)
