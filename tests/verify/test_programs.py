"""Programs graded by their data set's tests: what a completion holds, three shapes of tests, who is told what."""

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
    ("humaneval", HUMANEVAL, "    return sum(xs)\n"),  # a base model goes on where the prompt ends
    ("humaneval", HUMANEVAL, block("def add_all(xs: List[int]) -> int:\n    return sum(xs)")),  # List is the prompt's
    ("mbpp", MBPP, block(str(MBPP["code"]))),
    ("mbpp", MBPP, block("def smaller(a, b):\n    return a if a < b else b", "")),
    (
        "livecodebench",
        METHOD,
        block("class Solution:\n    def add(s, a, b):\n        return tuple(a + x for x in b)"),
    ),
    ("livecodebench", READING, block("print(sum(map(int, input().split())))")),
    # in a list, and as Windows ends lines
    ("humaneval", HUMANEVAL, "1. So:\n   ```python\n   def add_all(xs):\n       return sum(xs)\n   ```\n2. Done."),
    ("humaneval", HUMANEVAL, "So:\r\n```python\r\ndef add_all(xs):\r\n    return sum(xs)\r\n```\r\n"),
    # what has to stand first does
    ("humaneval", HUMANEVAL, block("from __future__ import annotations\ndef add_all(xs):\n    return sum(xs)")),
    (
        "livecodebench",
        METHOD,
        block(
            "from __future__ import (\n    annotations,\n)\n"
            "class Solution:\n    def add(s, a, b):\n        return [a + x for x in b]"
        ),
    ),
    # not made by `def`, behind something that ends without a line of its own
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


@pytest.mark.parametrize(("format", "row", "completion", "said"), WRONG)
def test_wrong_programs_fail_and_say_why(
    format: str, row: dict[str, Any], completion: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = FORMATS[format](row)
    grader = Programs(wall_s=2.0 if said == "timeout" else 6.0)
    graded = grader.grade(Sample(Prompt("p", problem.text, problem.answer), completion, completion))
    assert graded.reward == 0.0 and said in graded.extra["tests"]


LONG = "1" + "0" * 4999
# What a function returns and what is expected, as JSON, then whether they are the same.
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


def test_what_functions_return_is_compared_as_json_that_a_float_may_round() -> None:
    right = [returned for returned, _, same in RETURNED if same]
    cases = [{"input": str(right.index(r)), "output": e, "testtype": "functional"} for r, e, same in RETURNED if same]
    row = METHOD | {"public_test_cases": json.dumps(cases), "metadata": json.dumps({"func_name": "pick"})}
    code = f"class Solution:\n    def pick(self, n):\n        return [{', '.join(right)}][n]"
    assert grade("livecodebench", row, block(code)).reward == 1.0
    for returned, expected, same in RETURNED:  # Each of these would cost two processes.
        cases = [{"input": "", "output": expected, "testtype": "functional"}]
        calls = FORMATS["livecodebench"](row | {"public_test_cases": json.dumps(cases)}).answer["calls"]
        names: dict[str, Any] = {}
        exec(programs._CALLS.format(calls=marshal.dumps(calls)), names)
        try:
            names["check"](lambda: eval(returned))  # noqa: B023
        except AssertionError:
            assert not same, returned
        else:
            assert same, returned


def test_whole_numbers_of_any_length_are_read_and_printed() -> None:
    row = READING | {"public_test_cases": json.dumps([{"input": LONG, "output": LONG, "testtype": "stdin"}])}
    assert grade("livecodebench", row, block("print(int(input()) + 0)")).reward == 1.0


def test_an_object_that_equals_everything_is_equal_to_nothing() -> None:
    liar = "class Liar:\n    def __eq__(self, other):\n        return True\n\ndef smaller(a, b):\n    return Liar()"
    assert grade("mbpp", MBPP, block(liar)).reward == 0.0


def test_the_function_under_test_is_named_where_the_solution_tells_which() -> None:
    """Else a program could answer for what the tests compare with."""
    assert FORMATS["mbpp"](MBPP).answer["entry_point"] == "smaller"
    assert FORMATS["mbpp"]({**MBPP, "code": None}).answer["entry_point"] is None


def test_rows_whose_tests_cannot_be_judged_are_left_out_and_named() -> None:
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
def test_the_program_is_the_last_block_of_python(text: str, code: str) -> None:
    assert program_of(text) == code


def test_settings_go_through_and_bad_ones_name_themselves() -> None:
    (weighted,) = reward_sum("task.rewards", [{"use": "code", "memory_mib": 2048, "wall_s": 3}]).rewards
    grader = weighted.grader
    assert isinstance(grader, Programs) and grader.limits.memory_mib == 2048 and grader.longest_s == 5.0
    with pytest.raises(ConfigurationError, match=r"task\.sandbox\.memory_mib"):
        reward_sum("task.rewards", [{"use": "code", "memory_mib": 0}])
    with pytest.raises(ConfigurationError, match="code has no such setting"):
        reward_sum("task.rewards", [{"use": "code", "memory": 1}])


@pytest.mark.slow
@pytest.mark.live
def test_a_completion_with_many_cases_is_given_its_time() -> None:
    """40 cases of a third of a second are more than a verifier's usual time."""
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


def test_a_grader_that_may_take_longer_than_its_worker_is_given_is_refused() -> None:
    rewards = reward_sum("task.rewards", [{"use": "code", "wall_s": 30}])
    with pytest.raises(ConfigurationError, match=r"verify\.timeout_s: 10 is less than the 32 s"):
        Verification().verifiers(rewards, trusted=False)


def test_where_nothing_shuts_programs_in_they_do_not_run_unless_told_to() -> None:
    with pytest.raises(ConfigurationError, match=r"task\.sandbox.*unprotected=true"):
        Programs(mode="none").notes()
    assert any("missing" in line for line in Programs(mode="none", unprotected=True).notes())
