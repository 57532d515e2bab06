"""Tests of the data sets' formats: rows are read through their configurations and graded correctly.

The rows are our own, in the schemas of the real data sets (tests/data/tasks).
"""

from __future__ import annotations

import base64
import json
import os
import pickle
import zlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_scalerl.checks import ConfigurationError
from lightning_scalerl.composition import build, compose
from lightning_scalerl.rollouts.grade import Sample
from lightning_scalerl.rollouts.prompt import Prompt
from lightning_scalerl.task.base import check_task
from lightning_scalerl.task.dataset import DatasetTask
from lightning_scalerl.task.formats import FORMATS, livecodebench
from lightning_scalerl.verify.inline import InlineVerifiers
from lightning_scalerl.verify.verification import check_verifiers
from tests.examples import every
from tests.paths import ROOT

ROWS = ROOT / "tests" / "data" / "tasks"


def rows_of(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (ROWS / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]


def write_rows(rows: list[dict[str, Any]], path: Path) -> Path:
    """Write rows in the format of the path's suffix; return the path."""
    if path.suffix == ".parquet":
        import pyarrow as pa
        import pyarrow.parquet as pq

        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def load_task(task: str, fixture: str, folder: Path, *more: str, suffix: str = ".jsonl") -> DatasetTask:
    """Build conf/task/<task>.yaml on a fixture, with the fixture's last row held out."""
    *train, last = rows_of(fixture)
    paths = [write_rows(rows, folder / f"{name}{suffix}") for name, rows in (("train", train), ("test", [last]))]
    config = compose([f"task={task}", f"task.train={paths[0]}", f"task.heldout={{test: {paths[1]}}}", *more])
    built: DatasetTask = build(config, "task")
    assert check_task(built) is built
    assert len(built.train_prompts()) == len(train) and len(built.eval_sets()["test"]) == 1
    return built


def all_of(task: DatasetTask) -> list[Prompt]:
    return [*task.train_prompts(), *task.eval_sets()["test"]]


def reward(task: DatasetTask, prompt: Prompt, text: str) -> float | None:
    return task.grader().grade(Sample(prompt, text, text)).reward


@dataclass(frozen=True)
class Case:
    """A task's configuration, a fixture, and for each row a right answer and one that is nearly right."""

    task: str
    fixture: str
    right: tuple[str, ...]
    wrong: tuple[str, ...]


BOX = "\\boxed{{{}}}".format
CASES = [
    Case(
        "gsm8k",
        "gsm8k",
        ("36 - 9 makes 27.\n#### 27", BOX("1{,}240"), BOX("7.0"), BOX("-5")),
        ("#### 28", BOX("124"), BOX("-7"), BOX("5")),
    ),
    Case(
        "math",
        "math",
        (BOX("0.875"), BOX("x \\in (-3, 3)"), BOX("\\sqrt{72}"), BOX("\\begin{bmatrix} 0 \\\\ 1 \\end{bmatrix}")),
        (BOX("\\frac{8}{7}"), BOX("(-3,3]"), BOX("6\\sqrt{3}"), BOX("\\begin{pmatrix}1\\\\0\\end{pmatrix}")),
    ),
    Case(
        "math",
        "math500",
        (BOX("2^7"), BOX("120"), BOX("1/6")),
        (BOX("2^8"), BOX("-120"), BOX("1/3")),
    ),
    Case("aime", "aime_capitals", (BOX("060"), BOX("465"), BOX("24")), (BOX("600"), BOX("464"), BOX("1024"))),
    Case("aime", "aime", (BOX("9"), BOX("289"), BOX("126")), (BOX("90"), BOX("17"), BOX("\\binom{9}{3}"))),
    Case("polaris", "polaris", (BOX("8"), BOX("0.5"), BOX("\\frac52")), (BOX("-8"), BOX("0.6"), BOX("\\frac25"))),
    Case(
        "deepscaler",
        "deepscaler",
        (BOX("91"), BOX("5^{1/2}"), BOX("0.125")),
        (BOX("19"), BOX("\\pm\\sqrt{5}"), BOX("\\frac{1}{9}")),
    ),
    Case(
        "arc",
        "arc",
        ("The answer is (B).", "It lives: A", "\\boxed{E}", "The answer is D"),
        ("The answer is (A).", "It lives: B", "\\boxed{D}", "The answer is 4"),
    ),
    Case(
        "hellaswag",
        "hellaswag",
        ("The answer is (B).", "(A)", "The answer is **D**."),
        ("The answer is (C).", "(B)", "no idea"),
    ),
    Case(
        "truthfulqa",
        "truthfulqa",
        ("The answer is nothing bad happens", "Stones are not alive.", "The answer is: it does nothing!"),
        ("The answer is that a dragon wakes up", "Yes, stones grow at night.", "The answer is: it brings luck!"),
    ),
    Case(
        "natural_questions",
        "nq_open",
        ("The answer is anna lindqvist.", "Answer: May 14, 2071", "The answer is The Silent City"),
        ("The answer is Anna", "Answer: May 15, 2071", "The answer is Loud City"),
    ),
    Case("verl", "verl", ("#### 11", BOX("32"), "so it is\n#### 45"), ("#### 12", BOX("23"), "so it is\n#### 54")),
]


@pytest.mark.parametrize("suffix", [".jsonl", pytest.param(".parquet", marks=pytest.mark.full)])
@pytest.mark.parametrize("case", every(3, CASES), ids=lambda case: case.fixture)
def test_right_answers_are_right_and_others_wrong(case: Case, suffix: str, tmp_path: Path) -> None:
    task = load_task(case.task, case.fixture, tmp_path, suffix=suffix)
    prompts = all_of(task)
    assert [reward(task, *pair) for pair in zip(prompts, case.right, strict=True)] == [1.0] * len(prompts)
    assert [reward(task, *pair) for pair in zip(prompts, case.wrong, strict=True)] == [0.0] * len(prompts)


@pytest.mark.parametrize("case", every(6, CASES), ids=lambda case: case.fixture)
def test_verifiers_pass_their_check(case: Case, tmp_path: Path) -> None:
    """A row's own solution must be graded as right, and the wrong answers made from the row as wrong."""
    task = load_task(case.task, case.fixture, tmp_path)
    known = task.known()
    assert {example.right for example in known} == {True, False} and len(known) == 2 * len(task.train_prompts())
    report = check_verifiers(InlineVerifiers(task.grader()), known, lambda outcome: outcome.reward >= 1)
    assert report.startswith("verifier: graded all test completions correctly (")


def test_every_format_has_a_configuration_and_a_fixture() -> None:
    files = (ROOT / "conf" / "task").glob("*.yaml")
    configured = {path.stem: yaml.safe_load(path.read_text(encoding="utf-8")).get("format") for path in files}
    assert set(FORMATS) <= set(configured.values())
    tried = {configured[case.task] for case in CASES}
    assert set(FORMATS) - tried == {"humaneval", "mbpp", "livecodebench"}, "these have tests of their own below"


@pytest.mark.slow
def test_prompts_of_several_formats(tmp_path: Path) -> None:
    task = load_task("gsm8k", "gsm8k", tmp_path)
    first, second, _ = task.train_prompts()
    instruction = "\nPlease reason step by step, and put your final answer within \\boxed{}."
    assert (
        first.text
        == f"A baker fills 3 trays with 12 rolls each and sells 9 rolls. How many rolls are left?{instruction}"
    )
    assert (first.prompt_id, second.answer, first.messages, first.columns) == ("0", "1240", (), {})
    levels = load_task("math", "math", tmp_path)
    assert [prompt.difficulty for prompt in levels.train_prompts()] == ["level_1", "level_3", "level_2"]
    assert [prompt.answer for prompt in levels.train_prompts()] == ["\\frac{7}{8}", "(-3,3)", "6\\sqrt{2}"]
    assert [prompt.prompt_id for prompt in load_task("math", "math500", tmp_path).train_prompts()] == [
        "test/algebra/1.json",
        "test/counting/2.json",
    ]
    capitals = load_task("aime", "aime_capitals", tmp_path).train_prompts()[0]
    assert (capitals.prompt_id, capitals.answer) == ("2091-I-1", "60")
    assert load_task("polaris", "polaris", tmp_path).train_prompts()[0].difficulty == "failed_5_of_8"


def test_choices_get_letters_whatever_the_data_calls_them(tmp_path: Path) -> None:
    letters, digits, five = load_task("arc", "arc", tmp_path, "task.instruction=''").train_prompts()
    assert letters.text == "Which of these melts first?\n\nA) iron\nB) butter\nC) stone\nD) glass"
    assert digits.text == "Which of these is alive?\n\nA) a moss\nB) a pebble\nC) a cloud"
    assert (letters.answer, digits.answer, five.answer) == ("B", "A", "E")
    hellaswag = load_task("hellaswag", "hellaswag", tmp_path).train_prompts()
    assert "A man kneads dough. he\n\nA) sings to the moon.\nB) puts it into the oven." in hellaswag[0].text
    assert [prompt.prompt_id for prompt in hellaswag] == ["ours~1", "ours~1/1"], "the ids of the data repeat"


def test_an_answer_key_that_matches_no_choice_is_refused(tmp_path: Path) -> None:
    (row,) = rows_of("arc")[:1]
    path = write_rows([row, {**row, "answerKey": "E"}], tmp_path / "arc.jsonl")
    with pytest.raises(ConfigurationError, match=r"task\.heldout\.a: .*arc\.jsonl, row 1: ValueError"):
        DatasetTask("arc", str(path), {"a": str(path)}, "choice")


def test_conversations_of_verl_stay_conversations(tmp_path: Path) -> None:
    task = load_task("verl", "verl", tmp_path, "+task.instruction=Go.", suffix=".parquet")
    plain, led = task.train_prompts()
    assert [message["role"] for message in led.messages] == ["system", "user"]
    assert led.messages[0]["content"] == "You are careful."
    assert led.messages[1]["content"] == led.text and led.text.endswith('answer after "####".\nGo.')
    assert plain.messages[0]["content"] == plain.text and plain.answer == "11"


# --- code: how rows are read; tests/sandbox tests how programs run ----------------------------------------------


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_humaneval(suffix: str, tmp_path: Path) -> None:
    task = load_task("humaneval", "humaneval", tmp_path, "task.rewards=exact_match", suffix=suffix)
    first, row = task.train_prompts()[0], rows_of("humaneval")[0]
    assert first.prompt_id == "Ours/0" and first.text.startswith(row["prompt"])
    assert first.answer == {"tests": row["test"], "entry_point": "double", "prelude": row["prompt"]}
    rights = [example.sample.completion for example in task.known() if example.right]
    assert rights[0] == row["prompt"] + row["canonical_solution"]
    space: dict[str, Any] = {}
    exec(rights[0] + row["test"], space)
    space["check"](space["double"])


@pytest.mark.parametrize("fixture", ["mbpp_full", "mbpp_sanitized"])
@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_mbpp(fixture: str, suffix: str, tmp_path: Path) -> None:
    task = load_task("mbpp", fixture, tmp_path, "task.rewards=exact_match", suffix=suffix)
    rights = [example.sample.completion for example in task.known() if example.right]
    for prompt, row, right in zip(task.train_prompts(), rows_of(fixture), rights, strict=False):
        assert prompt.prompt_id == str(row["task_id"])
        assert (row.get("text") or row["prompt"]) in prompt.text
        assert all(test in prompt.text for test in row["test_list"])
        assert right == row["code"]
        exec(f"{prompt.answer['prelude']}\n{right}\n{prompt.answer['tests']}", {})
    if fixture == "mbpp_full":
        assert task.train_prompts()[1].answer["prelude"].startswith("class Node")
    else:
        assert task.train_prompts()[0].answer["prelude"] == "import math"


def pack_cases(cases: list[dict[str, str]]) -> str:
    """Pack private cases as the real data set does."""
    return base64.b64encode(zlib.compress(pickle.dumps(json.dumps(cases)))).decode()


@pytest.mark.parametrize("pack", [json.dumps, pack_cases], ids=["plain", "packed"])
def test_livecodebench(pack: Any, tmp_path: Path) -> None:
    for fixture in ("livecodebench_stdin", "livecodebench_functional"):
        rows = [{**row, "private_test_cases": pack(json.loads(row["private_test_cases"]))} for row in rows_of(fixture)]
        files = [str(write_rows(part, tmp_path / f"{i}.parquet")) for i, part in enumerate((rows[:-1], rows[-1:]))]
        task = DatasetTask("livecodebench", files[0], {"test": files[1]}, "exact_match")
        first, second = task.train_prompts()
        assert (first.prompt_id, first.difficulty) == (rows[0]["question_id"], "easy")
        if fixture == "livecodebench_stdin":
            assert first.answer == {"cases": [["1 2\n", "3\n"], ["5 7\n", "12\n"]]}
            assert first.text == "Read two numbers, print their sum."
        else:
            assert first.answer == {"calls": [[[1, 2], 3], [[-4, 4], 0]], "entry_point": "Solution().add"}
            assert second.answer["calls"] == [[[["a", "b"]], "ab"]]
            assert "```python\nclass Solution:\n    def add" in first.text
            assert all_of(task)[2].answer["calls"] == [[[4], True]]


class Malice:
    """Object that runs a command when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.marker}",)


def test_a_pickle_that_would_run_a_command_is_refused(tmp_path: Path) -> None:
    marker = tmp_path / "was here"
    evil = base64.b64encode(zlib.compress(pickle.dumps(Malice(marker)))).decode()
    row = {**rows_of("livecodebench_stdin")[0], "private_test_cases": evil}
    with pytest.raises(pickle.UnpicklingError, match="in the place of a text"):
        livecodebench(row)
    path = str(write_rows([row], tmp_path / "evil.jsonl"))
    with pytest.raises(ConfigurationError, match=r"task\.heldout\.a: .*evil\.jsonl, row 0: UnpicklingError.*system"):
        DatasetTask("livecodebench", path, {"a": path}, "exact_match")
    assert not marker.exists()


@pytest.mark.parametrize(
    ("cases", "expected"),
    [
        ("no base 64!", "neither JSON nor packed by zlib in base 64"),
        (base64.b64encode(b"no zlib").decode(), "neither JSON nor packed by zlib .*incorrect header"),
        (base64.b64encode(zlib.compress(b"a" * 99)[:-5]).decode(), "neither JSON nor packed by zlib .*incomplete"),
        (base64.b64encode(zlib.compress(b"no pickle")).decode(), "UnpicklingError"),
    ],
)
def test_private_cases_that_cannot_be_read_are_refused(cases: str, expected: str, tmp_path: Path) -> None:
    path = str(write_rows([{**rows_of("livecodebench_stdin")[0], "private_test_cases": cases}], tmp_path / "x.jsonl"))
    with pytest.raises(ConfigurationError, match=rf"x\.jsonl, row 0: .*{expected}"):
        DatasetTask("livecodebench", path, {"a": path}, "exact_match")


@pytest.mark.parametrize("format", sorted(FORMATS))
def test_a_row_of_another_format_names_the_missing_column(format: str, tmp_path: Path) -> None:
    path = str(write_rows([{"colour": "red", "weight": 3}], tmp_path / "other.jsonl"))
    with pytest.raises(
        ConfigurationError,
        match=r"task\.heldout\.a: .*other\.jsonl, row 0: no column \w+.*; its columns are colour, weight; "
        r"name yours with task\.format=columns",
    ):
        DatasetTask(format, path, {"a": path}, "exact_match")


@pytest.mark.parametrize("prompt", [3, [], ["Hello"], [{"role": "user"}], {"content": "Hello"}])
def test_a_prompt_is_a_text_or_messages(prompt: object, tmp_path: Path) -> None:
    path = str(write_rows([{"prompt": prompt, "answer": "4"}], tmp_path / "rows.jsonl"))
    expected = r"rows\.jsonl, row 0: ValueError: prompt: .* must be a text or a list of messages"
    with pytest.raises(ConfigurationError, match=expected):
        DatasetTask("columns", path, {"a": path}, "exact_match")


def test_math_without_an_answer_is_refused(tmp_path: Path) -> None:
    path = str(write_rows([{"problem": "Why?", "solution": "Because."}], tmp_path / "math.jsonl"))
    with pytest.raises(ConfigurationError, match=r"task\.heldout\.a: no row of .*math\.jsonl has an answer"):
        DatasetTask("math", path, {"a": path}, "math")


def test_prompts_keep_columns_only_for_reward_functions(tmp_path: Path) -> None:
    task = load_task("verl", "verl", tmp_path)
    assert all(prompt.columns == {} for prompt in all_of(task))
    rows = [{"prompt": "a", "answer": "b", "seed": "7", "environment": "x", "more": 1}]
    (opens,) = DatasetTask("columns", rows, None, "exact_match").train_prompts()
    assert opens.columns == {"seed": "7", "environment": "x"}, "these open an environment and are always kept"
    place = f"{ROOT}/tests/verify/reward_files/verl_float.py:compute_score"
    *train, last = rows_of("verl")
    files = [str(write_rows(rows, tmp_path / f"{i}.parquet")) for i, rows in enumerate((train, [last]))]
    kept = DatasetTask("verl", files[0], {"test": files[1]}, place)
    assert kept.train_prompts()[0].columns["extra_info"]["index"] == 0
    assert [replace(prompt, columns={}) for prompt in kept.train_prompts()] == list(task.train_prompts())
