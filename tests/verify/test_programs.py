"""Tests of grading programs by a data set's tests: extraction of the program, forms of tests, and settings."""

from __future__ import annotations

import json
import marshal
from typing import Any

import pytest

from lightning_scalerl.checks import ConfigurationError
from lightning_scalerl.rollouts.grade import Grade, Sample
from lightning_scalerl.rollouts.prompt import Prompt
from lightning_scalerl.task.dataset import DatasetTask
from lightning_scalerl.task.formats import FORMATS
from lightning_scalerl.verify import programs
from lightning_scalerl.verify.pool import VerifierPool
from lightning_scalerl.verify.programs import Programs, program_of
from lightning_scalerl.verify.registry import reward_sum
from lightning_scalerl.verify.verification import Verification
from tests.examples import every

HUMANEVAL = {
    "task_id": "Ours/0",
    "prompt": 'from typing import List\n\n\ndef add_all(xs: List[int]) -> int:\n    """The sum of all."""\n',
    "entry_point": "add_all",
    "canonical_solution": "    return sum(xs)\n",
    "test": "def check(candidate):\n    assert candidate([1, 2]) == 3\n    assert candidate([]) == 0\n",
}
MBPP = {
    "text": "Write a function that finds the smaller of two numbers.",
    "task_id": 3,
    "code": "def helper(x):\n    return x\n\ndef smaller(a, b):\n    return helper(min(a, b))",
    "test_list": ["assert smaller(1, 2) == 1", "assert smaller(5, 2) == 2"],
    "test_setup_code": "",
}
METHOD = {
    "question_content": "Add two numbers.",
    "starter_code": "class Solution:\n    def add(self, a: int, b: int) -> int:\n        ",
    "public_test_cases": json.dumps([{"input": "1\n[2, 3]", "output": "[3, 4]", "testtype": "functional"}]),
    "metadata": json.dumps({"func_name": "add"}),
}
READING = {
    "question_content": "Add two numbers.",
    "starter_code": "",
    "public_test_cases": json.dumps(
        [{"input": f"{n} 2\n", "output": f"{n + 2}\n", "testtype": "stdin"} for n in (1, 5)]
    ),
    "metadata": "{}",
}


def block(code: str, language: str = "python") -> str:
    return f"Let me think.\n```{language}\n{code}\n```\nThat is it."


def grade(format: str, row: dict[str, Any], completion: str) -> Grade:
    problem = FORMATS[format](row)
    return Programs().grade(Sample(Prompt("p", problem.text, problem.answer), completion, completion))


RIGHT = [
    ("humaneval", HUMANEVAL, HUMANEVAL["prompt"] + HUMANEVAL["canonical_solution"]),
    ("humaneval", HUMANEVAL, "    return sum(xs)\n"),  # a base model continues the prompt
    (
        "humaneval",
        HUMANEVAL,
        block("def add_all(xs: List[int]) -> int:\n    return sum(xs)"),
    ),  # List is imported by the prompt
    ("mbpp", MBPP, block(str(MBPP["code"]))),
    ("mbpp", MBPP, block("def smaller(a, b):\n    return a if a < b else b", "")),
    (
        "livecodebench",
        METHOD,
        block("class Solution:\n    def add(s, a, b):\n        return tuple(a + x for x in b)"),
    ),
    ("livecodebench", READING, block("print(sum(map(int, input().split())))")),
    # in a numbered list, and with Windows line ends
    ("humaneval", HUMANEVAL, "1. So:\n   ```python\n   def add_all(xs):\n       return sum(xs)\n   ```\n2. Done."),
    ("humaneval", HUMANEVAL, "So:\r\n```python\r\ndef add_all(xs):\r\n    return sum(xs)\r\n```\r\n"),
    # lines that must come first in a file
    ("humaneval", HUMANEVAL, block("from __future__ import annotations\ndef add_all(xs):\n    return sum(xs)")),
    (
        "livecodebench",
        METHOD,
        block(
            "from __future__ import (\n    annotations,\n)\n"
            "class Solution:\n    def add(s, a, b):\n        return [a + x for x in b]"
        ),
    ),
    # functions not defined by `def`, after setup code that ends without a line feed
    ("mbpp", MBPP | {"test_setup_code": "import math"}, block("smaller = lambda a, b: math.floor(min(a, b))")),
    ("mbpp", MBPP | {"test_setup_code": "import math"}, block("from builtins import min as smaller")),
]
WRONG = [
    ("humaneval", HUMANEVAL, "    return 3\n", "AssertionError in line 3"),
    ("humaneval", HUMANEVAL, "import os; os._exit(0)", "the program ended"),
    ("humaneval", HUMANEVAL, "", "no program"),
    ("humaneval", HUMANEVAL, block("def add_all(xs:\n    return"), "SyntaxError"),
    ("mbpp", MBPP, block("def other(a, b):\n    return min(a, b)"), "smaller"),
    ("mbpp", MBPP, block("def smaller(a, b):\n    raise ValueError"), "ValueError"),
    ("livecodebench", METHOD, block("class Solution:\n    def add(self, a, b):\n        return b"), "AssertionError"),
    ("livecodebench", READING, block("print(3)"), "case 2: wrong output"),
    ("livecodebench", READING, block("while True: pass"), "timeout"),
]


@pytest.mark.parametrize(("format", "row", "completion"), every(4, RIGHT))
def test_right_programs_pass(format: str, row: dict[str, Any], completion: str) -> None:
    graded = grade(format, row, completion)
    assert graded.reward == 1.0, graded.extra


@pytest.mark.parametrize(("format", "row", "completion", "message"), WRONG)
def test_wrong_programs_fail_with_the_reason(
    format: str, row: dict[str, Any], completion: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = FORMATS[format](row)
    grader = Programs(wall_s=2.0 if message == "timeout" else 6.0)
    graded = grader.grade(Sample(Prompt("p", problem.text, problem.answer), completion, completion))
    assert graded.reward == 0.0 and message in graded.extra["tests"]


LONG = "1" + "0" * 4999
# A returned value and the expected JSON, and whether they count as equal.
RETURNED = [
    ("0.1 + 0.2", "0.3", True),
    ("[1 / 3, (0.1 + 0.2,)]", "[0.333333333333, [0.3]]", True),
    ("123456789012.5", "123456789012.4999", True),
    ("0.3001", "0.3", False),
    ("1234567891.0", "1234567890.0", False),
    ("2.5", "2", False),
    ("10**17 + 1", str(10**17), False),
    ("float('nan')", "0.5", False),
    ("float('inf')", "0.5", False),
    ("'0.3'", "0.3", False),
    ("{1: 0.1 + 0.2, True: 0.3, None: [{2.5: 1}]}", '{"1": 0.3, "null": [{"2.5": 1}]}', True),
    ("{2: 2}", '{"1": 2}', False),
    ("{1: 2, '1': 2}", '{"1": 2}', False),
    ("10**4999", LONG, True),
    ("10**4999 + 1", LONG, False),
]


def test_returned_values_are_compared_as_json_with_rounding_of_floats() -> None:
    right = [returned for returned, _, same in RETURNED if same]
    cases = [{"input": str(right.index(r)), "output": e, "testtype": "functional"} for r, e, same in RETURNED if same]
    row = METHOD | {"public_test_cases": json.dumps(cases), "metadata": json.dumps({"func_name": "pick"})}
    code = f"class Solution:\n    def pick(self, n):\n        return [{', '.join(right)}][n]"
    assert grade("livecodebench", row, block(code)).reward == 1.0
    for returned, expected, same in RETURNED:  # in this process: the sandbox would need two processes per case
        cases = [{"input": "", "output": expected, "testtype": "functional"}]
        calls = FORMATS["livecodebench"](row | {"public_test_cases": json.dumps(cases)}).answer["calls"]
        names: dict[str, Any] = {}
        exec(programs._CALLS_TEST_SOURCE.format(calls=marshal.dumps(calls)), names)
        try:
            names["check"](lambda: eval(returned))  # noqa: B023
        except AssertionError:
            assert not same, returned
        else:
            assert same, returned


def test_whole_numbers_of_any_length_are_supported() -> None:
    row = READING | {"public_test_cases": json.dumps([{"input": LONG, "output": LONG, "testtype": "stdin"}])}
    assert grade("livecodebench", row, block("print(int(input()) + 0)")).reward == 1.0


def test_an_object_with_a_lying_equality_does_not_pass() -> None:
    liar = "class Liar:\n    def __eq__(self, other):\n        return True\n\ndef smaller(a, b):\n    return Liar()"
    assert grade("mbpp", MBPP, block(liar)).reward == 0.0


def test_the_function_under_test_is_taken_from_the_solution() -> None:
    """Otherwise a program could replace the functions that the tests compare with."""
    assert FORMATS["mbpp"](MBPP).answer["entry_point"] == "smaller"
    assert FORMATS["mbpp"]({**MBPP, "code": None}).answer["entry_point"] is None


def test_rows_with_unusable_tests_are_left_out_with_the_reason() -> None:
    idle = MBPP | {"task_id": 4, "test_list": ["smaller(1, 2) == 1"]}
    lacking = MBPP | {"task_id": 5, "text": "Another.", "test_list": ["assert same(smaller(1, 2), 1)"]}
    task = DatasetTask("mbpp", [MBPP, idle, lacking], [MBPP | {"text": "Held out."}], "code")
    assert [prompt.prompt_id for prompt in task.train_prompts()] == ["3"]
    notes = [note for note in task.notes() if "left out" in note]
    assert (
        len(notes) == 2
        and "row 1: tests: line 1 compares" in notes[0]
        and "row 2: tests: the tests use same" in notes[1]
    )
    with pytest.raises(ConfigurationError, match="row 0: tests: line 1 compares"):
        DatasetTask("mbpp", [idle], [MBPP], "code")
    helped = MBPP | {"test_list": ["assert smaller(1, 2) == helper(1)"]}
    assert FORMATS["mbpp"](helped).answer["entry_point"] is None
    assert FORMATS["mbpp"](helped).answer["names"] == ["helper", "smaller"]
    assert Programs().unjudgeable("print(1)") == "the answer holds no tests, calls or cases"


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("```python\nx = 1\n```", "x = 1\n"),
        ("```\nx = 1\n```", "x = 1\n"),
        ("```py\na\n```\nor\n```python\nb\n```", "b\n"),
        ("```bash\nls\n```\n```python\nb\n```\n```text\nout\n```", "b\n"),
        ("```python\nnever closed", "never closed"),
        ("plain code", "plain code"),
    ],
)
def test_the_program_is_the_last_python_block(text: str, code: str) -> None:
    assert program_of(text) == code


def test_settings_reach_the_grader_and_bad_ones_are_named() -> None:
    (weighted,) = reward_sum("task.rewards", [{"use": "code", "memory_mib": 2048, "wall_s": 3}]).rewards
    grader = weighted.grader
    assert isinstance(grader, Programs) and grader.limits.memory_mib == 2048 and grader.longest_s == 5.0
    with pytest.raises(ConfigurationError, match=r"task\.sandbox\.memory_mib"):
        reward_sum("task.rewards", [{"use": "code", "memory_mib": 0}])
    with pytest.raises(ConfigurationError, match="code has no such setting"):
        reward_sum("task.rewards", [{"use": "code", "memory": 1}])


@pytest.mark.slow
@pytest.mark.live
def test_the_timeout_grows_with_the_number_of_cases() -> None:
    """40 cases of a third of a second take longer than the pool's usual timeout."""
    answer = {"cases": [["", "1"]] * 40}
    rewards = reward_sum("task.rewards", [{"use": "code", "wall_s": 1.0}])
    sample = Sample(Prompt("p", "?", answer), *[block("import time\ntime.sleep(0.1)\nprint(1)")] * 2)
    assert 40 < rewards.needs_s(sample) < 70  # type: ignore[attr-defined]
    pool = VerifierPool(rewards, workers=1, timeout_s=3.0)
    try:
        outcome = pool.wait(pool.submit(sample))
    finally:
        pool.close()
    assert (outcome.kind, outcome.reward) == ("score", 1.0), outcome
    assert outcome.seconds > 3.0


def test_a_program_limit_above_the_workers_timeout_is_refused() -> None:
    rewards = reward_sum("task.rewards", [{"use": "code", "wall_s": 30}])
    with pytest.raises(ConfigurationError, match=r"verify\.timeout_s: 10 is less than the 32 s"):
        Verification().verifiers(rewards, trusted=False)


def test_without_a_sandbox_programs_run_only_if_allowed() -> None:
    with pytest.raises(ConfigurationError, match=r"task\.sandbox.*unprotected=true"):
        Programs(mode="none").notes()
    assert any("missing" in line for line in Programs(mode="none", unprotected=True).notes())
