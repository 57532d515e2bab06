"""Readers that turn rows of data sets into problems, one function per format.

Each function takes a row and returns a `Problem`, or raises `KeyError` for a missing column. `Columns` reads rows of
any format by column names from the user.
"""

from __future__ import annotations

import base64
import io
import json
import pickle
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from string import ascii_uppercase
from typing import Any

from lightning_scalerl.checks import shown
from lightning_scalerl.sandbox.survey import defined_names, used_names
from lightning_scalerl.verify.mathematics import last_boxed
from sweeps.run.files import parse_json

Row = Mapping[str, Any]
# Column that names the family of a row's prompt, in every format (`Prompt.family`).
FAMILY = "family"


@dataclass(frozen=True)
class Problem:
    """Question and answer of a row.

    Attributes:
        text: the question as plain text; for a conversation, its last message.
        answer: the reference for the verifier.
        messages: the conversation; empty for a plain question.
        difficulty: label of the difficulty; empty if the row has none.
        name: id of the row; empty if it has none.
        right: a completion that is known to be right, if the row has one.
    """

    text: str
    answer: Any
    messages: tuple[Mapping[str, Any], ...] = ()
    difficulty: str = ""
    name: str = ""
    right: str | None = None


class NoPromptError(ValueError):
    """Raised for a row without a question. Such a row is left out, as is a row without an answer."""


def no_answer(answer: Any) -> bool:
    """Return whether an answer is empty, so that completions cannot be graded."""
    if isinstance(answer, Mapping):
        return any(name in answer and not answer[name] for name in ("tests", "calls", "cases", "true"))
    if isinstance(answer, list | tuple):
        return all(map(no_answer, answer))
    return answer is None or answer != answer or (isinstance(answer, str) and not answer.strip())


def _first_column(row: Row, *names: str) -> Any:
    """Return the first of these columns that is not None, or an empty text if all existing ones are None.

    Raises:
        KeyError: none of the columns exists.
    """
    for name in names:
        if row.get(name) is not None:
            return row[name]
    if not any(name in row for name in names):
        raise KeyError(" or ".join(names))
    return ""


def _is_nan(value: Any) -> bool:
    """Return whether a value is NaN, which pandas puts in the place of a missing text."""
    return isinstance(value, float) and value != value


def _question(row: Row, *names: str) -> str:
    """Return the first of these columns as the text of a question.

    Raises:
        KeyError: none of the columns exists.
        NoPromptError: the text is blank.
    """
    text = _first_column(row, *names)
    if _is_nan(text) or not str(text).strip():
        raise NoPromptError(f"{' or '.join(names)}: is blank")
    return str(text)


def _optional(row: Row, *names: str) -> str:
    return next((str(row[name]) for name in names if row.get(name) is not None), "")


def gsm8k(row: Row) -> Problem:
    """Read a row of openai/gsm8k: question, answer (reasoning, then `#### 72`)."""
    solution = str(_first_column(row, "answer"))
    gold = solution.rpartition("####")[2].strip().replace(",", "")
    return Problem(_question(row, "question"), gold, right=solution if "####" in solution else None)


def math(row: Row) -> Problem:
    """Read a row of MATH or a similar data set: problem, level, and an answer or a solution with a boxed answer."""
    text = _question(row, "problem", "Problem", "question")
    solution = _optional(row, "solution", "Solution")
    if not solution:
        _first_column(row, "answer", "Answer", "solution", "Solution")  # raises KeyError if none of them exists
    gold = _optional(row, "answer", "Answer") or last_boxed(solution) or ""
    level = _optional(row, "level", "difficulty")
    return Problem(
        text,
        gold,
        difficulty=level.lower().replace(" ", "_"),
        name=_optional(row, "unique_id", "id", "ID"),
        right=solution if last_boxed(solution) is not None else None,
    )


def polaris(row: Row) -> Problem:
    """Read a row of Polaris-53K or DeepScaleR: problem, answer, and in Polaris the difficulty, such as 3/8.

    The difficulty is the solved share of attempts. The label counts failures instead, `failed_5_of_8`, because for a
    curriculum a larger number means a harder prompt.
    """
    solved = re.fullmatch(r"(\d+)/(\d+)", _optional(row, "difficulty"))
    label = f"failed_{int(solved[2]) - int(solved[1])}_of_{solved[2]}" if solved else _optional(row, "difficulty")
    return Problem(_question(row, "problem", "question"), str(_first_column(row, "answer")), difficulty=label)


def humaneval(row: Row) -> Problem:
    """Read a row of openai_humaneval: prompt, test, entry_point, canonical_solution."""
    prompt = _question(row, "prompt")
    answer = {
        "tests": str(_first_column(row, "test")),
        "entry_point": str(_first_column(row, "entry_point")),
        "prelude": prompt,
    }
    solution = _optional(row, "canonical_solution")
    return Problem(prompt, answer, name=_optional(row, "task_id"), right=prompt + solution if solution else None)


def mbpp(row: Row) -> Problem:
    """Read a row of mbpp, full or sanitized: text or prompt, test_list, test_setup_code or test_imports, code."""
    tests = [str(test) for test in _first_column(row, "test_list")]
    prelude = _optional(row, "test_setup_code") or "\n".join(map(str, row.get("test_imports") or ()))
    text = f"{_question(row, 'text', 'prompt')}\nYour code should pass these tests:\n\n" + "\n".join(tests)
    # The tests see only these names of the program, so the program cannot replace anything else that the tests rely on.
    names_in_tests = used_names("\n".join(tests))
    program_names = [name for name in defined_names(_optional(row, "code")) if name in names_in_tests]
    called_names = [name for name in program_names if re.search(rf"\b{name}\s*\(", "\n".join(tests))]
    entry_point = called_names[0] if len(called_names) == 1 else None
    answer: dict[str, Any] = {"tests": "\n".join(tests), "prelude": prelude, "entry_point": entry_point}
    if names := [name for name in program_names if name != entry_point]:
        answer["names"] = names
    return Problem(text, answer, name=_optional(row, "task_id"), right=_optional(row, "code") or None)


def livecodebench(row: Row) -> Problem:
    """Read a row of livecodebench/code_generation: question_content, starter_code, test cases, metadata."""
    cases = _cases(_first_column(row, "public_test_cases")) + _cases(row.get("private_test_cases") or "[]")
    metadata = row.get("metadata") or "{}"
    function = (parse_json(metadata) if isinstance(metadata, str) else metadata).get("func_name")
    starter = _optional(row, "starter_code")
    text = _question(row, "question_content")
    if starter:
        text += f"\n\nUse this starter code:\n\n```python\n{starter}\n```"
    answer: dict[str, Any]
    if function is None:
        answer = {"cases": [[str(case["input"]), str(case["output"])] for case in cases]}
    else:
        calls = [[_arguments(case["input"]), _json(case["output"])] for case in cases]
        answer = {"calls": calls, "entry_point": f"Solution().{function}"}
    return Problem(text, answer, difficulty=_optional(row, "difficulty"), name=_optional(row, "question_id"))


def _arguments(text: str) -> list[Any]:
    """Parse arguments that are written as one JSON value per line."""
    return [_json(line) for line in text.splitlines() if line.strip()]


def _json(text: str) -> Any:
    """Parse JSON, including integers of more than 4,300 digits, which Python's `int` refuses to read.

    Raises:
        ValueError: the text is not JSON.
    """
    try:
        return parse_json(text)
    except ValueError:
        return json.loads(text, parse_int=lambda digits: int(Decimal(digits)))


def _cases(column: Any) -> list[dict[str, Any]]:
    """Parse test cases: JSON, or for private ones a pickled JSON text, compressed by zlib and encoded in base 64."""
    if not isinstance(column, str):
        return list(column)
    try:
        cases: list[dict[str, Any]] = _json(column)
    except ValueError:
        try:
            packed = zlib.decompress(base64.b64decode(column))
        except (ValueError, zlib.error) as error:  # zlib.error is not a ValueError
            raise ValueError(f"test cases are neither JSON nor packed by zlib in base 64 ({error})") from error
        cases = _json(_TextOnly(io.BytesIO(packed)).load())
    return cases


class _TextOnly(pickle.Unpickler):
    """Unpickler that accepts only plain texts: a pickle that names a class could run any code."""

    def find_class(self, module: str, name: str) -> Any:
        """Refuse any class that the pickle names.

        Raises:
            UnpicklingError: always.
        """
        raise pickle.UnpicklingError(f"a data set's file holds {module}.{name} in the place of a text")


def arc(row: Row) -> Problem:
    """Read a row of allenai/ai2_arc: question, choices {text, label}, answerKey.

    Labels become letters, as some rows have digits instead.
    """
    choices = _first_column(row, "choices")
    labels = [str(label) for label in choices["label"]]
    key = str(_first_column(row, "answerKey"))
    return _choice(_question(row, "question"), list(choices["text"]), labels.index(key), _optional(row, "id"))


def hellaswag(row: Row) -> Problem:
    """Read a row of Rowan/hellaswag: ctx, endings, label."""
    text = f"How does this go on?\n\n{_question(row, 'ctx')}"
    label, name = str(_first_column(row, "label")), _optional(row, "source_id", "ind")
    endings = list(_first_column(row, "endings"))
    if label == "":  # labels of the test set are secret
        return Problem(text, "", name=name)
    return _choice(text, endings, int(label), name)


def _choice(question: str, options: Sequence[Any], right: int, name: str) -> Problem:
    answer_list = "\n".join(f"{letter}) {option}" for letter, option in zip(ascii_uppercase, options, strict=False))
    return Problem(f"{question}\n\n{answer_list}", ascii_uppercase[right], name=name)


def truthfulqa(row: Row) -> Problem:
    """Read a row of truthfulqa/truthful_qa (generation): question, best_answer, correct_answers, incorrect_answers."""
    true = [_first_column(row, "best_answer"), *(row.get("correct_answers") or ())]
    true = [str(answer) for answer in true if not no_answer(answer)]
    false = [str(answer) for answer in row.get("incorrect_answers") or () if not no_answer(answer)]
    return Problem(_question(row, "question"), {"true": true, "false": false}, difficulty="")


def natural_questions(row: Row) -> Problem:
    """Read a row of nq_open or a similar data set: question, answer (a list of accepted answers)."""
    answers = _first_column(row, "answer", "answers")
    answer_list = answers if isinstance(answers, list | tuple) else [answers]
    return Problem(_question(row, "question"), [str(answer) for answer in answer_list if not no_answer(answer)])


def _messages(column: str, value: Any) -> tuple[dict[str, Any], ...]:
    """Return a column's list of chat messages.

    Raises:
        ValueError: it is not a list of messages with a content.
    """
    # Arrays, which Parquet readers return for lists, are accepted too.
    messages = [] if isinstance(value, str | Mapping) or not hasattr(value, "__iter__") else list(value)
    if not messages or not all(isinstance(message, Mapping) and "content" in message for message in messages):
        raise ValueError(f"{column}: {shown(value)[:60]} must be a text or a list of messages with role and content")
    return tuple(dict(message) for message in messages)


def _last_content(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return the text of the last message.

    Raises:
        NoPromptError: the text is blank.
    """
    content = messages[-1]["content"]
    if content is None or not str(content).strip():
        raise NoPromptError("the last message is blank")
    return str(content)


def verl(row: Row) -> Problem:
    """Read a row of verl: data_source, prompt (messages), ability, reward_model {style, ground_truth}, extra_info."""
    messages = _messages("prompt", _first_column(row, "prompt"))
    model = _first_column(row, "reward_model")
    extra = row.get("extra_info") or {}
    level = _optional(row, "level").lower().replace(" ", "_")
    # verl's GSM8K rows keep the worked solution in `extra_info`.
    solution = extra.get("answer") if isinstance(extra, Mapping) else None
    right = str(solution) if isinstance(solution, str) and "####" in solution else None
    gold = model["ground_truth"]
    return Problem(_last_content(messages), gold, messages, difficulty=level, right=right)


FORMATS: Mapping[str, Callable[[Row], Problem]] = {
    "gsm8k": gsm8k,
    "math": math,
    "aime": math,
    "polaris": polaris,
    "deepscaler": polaris,
    "humaneval": humaneval,
    "mbpp": mbpp,
    "livecodebench": livecodebench,
    "arc": arc,
    "hellaswag": hellaswag,
    "truthfulqa": truthfulqa,
    "natural_questions": natural_questions,
    "verl": verl,
}


@dataclass(frozen=True)
class Columns:
    """Reader of rows by column names.

    Args:
        prompt: column with texts or lists of messages.
        answer: column with answers; None if a reward function reads the row itself.
        difficulty, id: columns with the label of difficulty and the id; None if there is no such column.
    """

    prompt: str = "prompt"
    answer: str | None = "answer"
    difficulty: str | None = None
    id: str | None = None

    def __call__(self, row: Row) -> Problem:
        """Read one row by the named columns."""
        prompt = _first_column(row, self.prompt)
        is_text = isinstance(prompt, str) or _is_nan(prompt)
        messages = () if is_text else _messages(self.prompt, prompt)
        text = _question(row, self.prompt) if is_text else _last_content(messages)
        answer = "" if self.answer is None else _first_column(row, self.answer)
        label = "" if self.difficulty is None else str(_first_column(row, self.difficulty))
        return Problem(text, answer, messages, label, "" if self.id is None else str(_first_column(row, self.id)))
