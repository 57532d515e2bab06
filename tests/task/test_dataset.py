"""Tests of a data set as a task: rows that are left out, how prompts are built, and how the verifier is checked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightning_scalerl.checks import ConfigurationError
from lightning_scalerl.composition import build, compose
from lightning_scalerl.data import RolloutDataModule
from lightning_scalerl.task.dataset import DatasetTask
from lightning_scalerl.verify.inline import InlineVerifiers
from lightning_scalerl.verify.rewards import RewardSum
from lightning_scalerl.verify.verification import check_verifiers
from tests.examples import examples
from tests.paths import ROOT

QUIET = settings(max_examples=examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture])


def rows(*texts: str) -> list[dict[str, Any]]:
    return [{"prompt": text, "answer": f"answer of {text.strip().lower()}"} for text in texts]


def task_of(folder: Path, train: list[Any], heldout: list[Any], **more: Any) -> DatasetTask:
    """Task of these rows, in the format `columns` and graded by `exact_match` unless `more` says otherwise."""
    paths = []
    for name, part in (("train", train), ("test", heldout)):
        path = folder / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in part), encoding="utf-8")
        paths.append(str(path))
    settings = {"format": "columns", "rewards": "exact_match", **more}
    return DatasetTask(train=paths[0], heldout={"test": paths[1]}, **settings)


def texts(task: DatasetTask) -> list[str]:
    return [prompt.text for prompt in task.train_prompts()]


# --- duplicates and leaks ------------------------------------------------------------------------------------

# "b" occurs twice more, with different case and space; "c" and "C" are held out.
TRAIN = rows("a", "b", "c", " B", "d", "b\n", "C")
HELDOUT = rows("c", "x")
DUPLICATES = "task.duplicates: {} of 7 training prompts occur more than once (the first is '3'); {}"
LEAKS = "task.leaks: 2 of 7 training prompts are in a held-out set too (the first is '2'); {}"


@pytest.mark.parametrize(
    ("duplicates", "leaks", "kept", "notes"),
    [
        ("drop", "drop", ["a", "b", "d"], [DUPLICATES.format(2, "left out"), LEAKS.format("left out")]),
        ("keep", "drop", ["a", "b", " B", "d", "b\n"], [DUPLICATES.format(2, "kept"), LEAKS.format("left out")]),
        ("drop", "keep", ["a", "b", "c", "d"], [DUPLICATES.format(3, "left out"), LEAKS.format("kept")]),
        ("keep", "keep", ["a", "b", "c", " B", "d", "b\n", "C"], [DUPLICATES.format(3, "kept"), LEAKS.format("kept")]),
    ],
)
def test_duplicates_and_leaks_are_dropped_or_kept(
    duplicates: str, leaks: str, kept: list[str], notes: list[str], tmp_path: Path
) -> None:
    task = task_of(tmp_path, TRAIN, HELDOUT, duplicates=duplicates, leaks=leaks)
    assert texts(task) == kept
    assert list(task.notes()) == notes
    assert [prompt.text for prompt in task.eval_sets()["test"]] == ["c", "x"], "held-out rows are not removed"


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        (
            {"duplicates": "refuse"},
            r"^task\.duplicates: 2 of 7 training prompts .*'3'\); mend the data, or choose drop",
        ),
        ({"leaks": "refuse"}, r"^task\.leaks: 2 of 7 training prompts .*'2'\); mend the data, or choose drop or keep$"),
        ({"duplicates": "refuse", "leaks": "keep"}, r"^task\.duplicates: 3 of 7"),
        ({"duplicates": "sometimes"}, r"^task\.duplicates: 'sometimes' must be one of drop, refuse, keep$"),
        ({"leaks": None}, r"^task\.leaks: None must be one of"),
    ],
)
def test_duplicates_and_leaks_can_be_refused(rules: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=message):
        task_of(tmp_path, TRAIN, HELDOUT, **rules)


def test_clean_data_has_no_notes(tmp_path: Path) -> None:
    task = task_of(tmp_path, rows("a", "b"), rows("c"), duplicates="refuse", leaks="refuse")
    assert texts(task) == ["a", "b"] and list(task.notes()) == []


def test_a_pool_whose_prompts_are_all_held_out_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"task\.train: every prompt of it is in a held-out set"):
        task_of(tmp_path, rows("a", "b"), rows("A", "b "))


@QUIET
@given(
    st.lists(st.sampled_from("abcdefABCDEF"), min_size=1, max_size=12),
    st.lists(st.sampled_from("abcXYZ"), min_size=1, max_size=4),
)
def test_kept_prompts_occur_once_and_are_not_held_out(tmp_path: Path, train: list[str], heldout: list[str]) -> None:
    lower = [text.lower() for text in train]
    held = {text.lower() for text in heldout}
    expected = [text for place, text in enumerate(lower) if text not in held and text not in lower[:place]]
    if not expected:
        with pytest.raises(ConfigurationError, match="nothing is left"):
            task_of(tmp_path, rows(*train), rows(*heldout))
        return
    task = task_of(tmp_path, rows(*train), rows(*heldout))
    assert [text.lower() for text in texts(task)] == expected
    leaked = sum(text in held for text in lower)
    twice = sum(text not in held and text in lower[:place] for place, text in enumerate(lower))
    message = " ".join(task.notes())
    assert (f"{leaked} of {len(train)} training prompts are in" in message) == (leaked > 0)
    assert (f"{twice} of {len(train)} training prompts occur" in message) == (twice > 0)


def conversation(*contents: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(contents)]


def test_conversations_with_the_same_last_message_are_not_duplicates(tmp_path: Path) -> None:
    train = [
        {"prompt": conversation("What is 2+2?", "4", "Are you sure?"), "answer": "yes"},
        {"prompt": conversation("What is 2+3?", "6", "Are you sure?"), "answer": "no"},
    ]
    assert len(task_of(tmp_path, train, rows("x")).train_prompts()) == 2


# --- rows ----------------------------------------------------------------------------------------------------


def test_rows_without_an_answer_are_left_out_and_counted(tmp_path: Path) -> None:
    train = [*rows("a"), {"prompt": "b", "answer": ""}, *rows("c"), {"prompt": "d", "answer": ""}]
    task = task_of(tmp_path, train, rows("x"))
    assert texts(task) == ["a", "c"] and [prompt.prompt_id for prompt in task.train_prompts()] == ["0", "2"]
    assert list(task.notes()) == ["task.train: 2 of 4 rows have no answer (first row 1); left out"]
    with pytest.raises(ConfigurationError, match=r"task\.heldout\.test: no row of .*test\.jsonl has an answer"):
        task_of(tmp_path, rows("a"), [{"prompt": "x", "answer": ""}])


@pytest.mark.parametrize(
    ("format", "good", "bad"),
    [
        ("natural_questions", {"question": "a", "answer": ["1"]}, [{"answer": []}, {"answer": None}, {"answer": [""]}]),
        ("truthfulqa", {"question": "a", "best_answer": "1"}, [{"best_answer": ""}, {"best_answer": None}]),
        ("math", {"problem": "a", "solution": "\\boxed{1}"}, [{"solution": "\\boxed 5"}, {"solution": None}]),
        (
            "verl",
            {"prompt": [{"role": "user", "content": "a"}], "reward_model": {"ground_truth": "1"}},
            [{"reward_model": {"ground_truth": None}}, {"reward_model": {"ground_truth": "  "}}],
        ),
        ("mbpp", {"text": "a", "test_list": ["assert f(1)"], "code": "def f(x): ..."}, [{"test_list": []}]),
        (
            "livecodebench",
            {"question_content": "a", "public_test_cases": '[{"input": "1", "output": "1"}]'},
            [{"public_test_cases": "[]"}],
        ),
    ],
)
def test_rows_without_a_usable_answer_are_left_out(
    tmp_path: Path, format: str, good: dict[str, Any], bad: list[dict[str, Any]]
) -> None:
    rewards = {"mbpp": "code", "livecodebench": "code", "math": "math"}.get(format, "exact_match")
    train = [good, *({**good, **changed} for changed in bad)]
    task = task_of(tmp_path, train, [good], format=format, rewards=rewards, duplicates="keep", leaks="keep")
    assert len(task.train_prompts()) == 1
    assert f"{len(bad)} of {len(bad) + 1} rows have no answer (first row 1)" in task.notes()[0]


@pytest.mark.parametrize(
    ("format", "good", "bad"),
    [
        ("columns", {"prompt": "a", "answer": "1"}, [{"prompt": None}, {"prompt": " "}, {"prompt": float("nan")}]),
        (
            "columns",
            {"prompt": "a", "answer": "1"},
            [{"prompt": [{"role": "user", "content": text}]} for text in ("", None)],
        ),
        ("gsm8k", {"question": "a", "answer": "#### 1"}, [{"question": None}, {"question": ""}]),
        ("math", {"problem": "a", "answer": "1"}, [{"problem": ""}]),
        ("polaris", {"problem": "a", "answer": "1"}, [{"problem": None}]),
        ("natural_questions", {"question": "a", "answer": ["1"]}, [{"question": None}]),
        ("truthfulqa", {"question": "a", "best_answer": "1"}, [{"question": "\n"}]),
        (
            "arc",
            {"question": "a", "choices": {"text": ["x", "y"], "label": ["A", "B"]}, "answerKey": "A"},
            [{"question": ""}],
        ),
        ("hellaswag", {"ctx": "a", "endings": ["x", "y"], "label": "0"}, [{"ctx": None}]),
        ("mbpp", {"text": "a", "test_list": ["assert f(1)"], "code": "def f(x): ..."}, [{"text": None}]),
        (
            "livecodebench",
            {"question_content": "a", "starter_code": "x", "public_test_cases": '[{"input": "1", "output": "1"}]'},
            [{"question_content": ""}],
        ),
        (
            "verl",
            {"prompt": [{"role": "user", "content": "a"}], "reward_model": {"ground_truth": "1"}},
            [{"prompt": [{"role": "user", "content": None}]}],
        ),
    ],
)
def test_rows_without_a_prompt_are_left_out_and_counted(
    tmp_path: Path, format: str, good: dict[str, Any], bad: list[dict[str, Any]]
) -> None:
    rewards = {"mbpp": "code", "livecodebench": "code", "math": "math"}.get(format, "exact_match")
    train = [good, *({**good, **changed} for changed in bad)]
    task = task_of(tmp_path, train, [good], format=format, rewards=rewards, duplicates="keep", leaks="keep")
    assert len(task.train_prompts()) == 1
    assert f"task.train: {len(bad)} of {len(train)} rows have no prompt (first row 1); left out" == task.notes()[0]
    with pytest.raises(ConfigurationError, match=r"task\.train: no row of .*train\.jsonl has a prompt"):
        task_of(tmp_path, train[1:], [good], format=format, rewards=rewards)


def test_null_is_a_missing_answer(tmp_path: Path) -> None:
    task = task_of(tmp_path, [*rows("a"), {"prompt": "b", "answer": None}], rows("x"))
    assert list(task.notes()) == ["task.train: 1 of 2 rows have no answer (first row 1); left out"]


def test_a_users_reward_may_need_no_answer(tmp_path: Path) -> None:
    place = tmp_path / "mine.py"
    place.write_text("def reward(completions, wish, **kwargs):\n    return [float(wish[0] in completions[0])]\n")
    train = [{"ask": "a", "wish": "yes"}, {"ask": "b", "wish": "no"}]
    heldout = [{"ask": "x", "wish": "yes"}]
    fields = {"prompt": "ask", "answer": None}
    task = task_of(tmp_path, train, heldout, fields=fields, rewards=f"{place}:reward")
    assert not task.trusted and list(task.known()) == []
    first, second = task.train_prompts()
    assert task.reward(first, "oh yes") == 1.0 and task.reward(second, "oh yes") == 0.0


@pytest.mark.parametrize(
    ("ids", "unique"),
    [
        (["p", "q", "r"], ["p", "q", "r"]),
        (["p", "p", "q", "p"], ["p", "p/1", "q", "p/3"]),
        pytest.param(["p", "p/2", "p"], None),
        pytest.param(["p", "p", "p/1"], None),
    ],
)
def test_ids_that_repeat_are_made_unique(ids: list[str], unique: list[str] | None, tmp_path: Path) -> None:
    train = [{"prompt": f"q{n}", "answer": "a", "id": row_id} for n, row_id in enumerate(ids)]
    task = task_of(
        tmp_path, train, [{"prompt": "x", "answer": "a", "id": "p"}], fields={"prompt": "prompt", "id": "id"}
    )
    prompt_ids = [prompt.prompt_id for prompt in task.train_prompts()]
    assert len(set(prompt_ids)) == len(prompt_ids)
    assert unique is None or prompt_ids == unique


@QUIET
@given(st.lists(st.sampled_from(["p", "q", "r", "s"]), min_size=1, max_size=8))
def test_ids_are_unique_and_first_occurrences_keep_theirs(tmp_path: Path, ids: list[str]) -> None:
    train = [{"prompt": f"q{n}", "answer": "a", "id": row_id} for n, row_id in enumerate(ids)]
    task = task_of(
        tmp_path, train, [{"prompt": "x", "answer": "a", "id": "p"}], fields={"prompt": "prompt", "id": "id"}
    )
    prompt_ids = [prompt.prompt_id for prompt in task.train_prompts()]
    assert len(set(prompt_ids)) == len(prompt_ids) and set(ids) <= set(prompt_ids)


# --- how a prompt is built -----------------------------------------------------------------------------------


def test_fields_of_any_row(tmp_path: Path) -> None:
    train = [{"q": "why", "a": 4, "level": 3, "key": "k1", "more": 1}]
    fields = {"prompt": "q", "answer": "a", "difficulty": "level", "id": "key"}
    (prompt,) = task_of(
        tmp_path, train, [{"q": "x", "a": 5, "level": 1, "key": "k"}], fields=fields, prefix="P: ", instruction="Go."
    ).train_prompts()
    assert (prompt.prompt_id, prompt.text, prompt.answer, prompt.difficulty) == ("k1", "P: why\nGo.", 4, "3")


def test_prefix_and_instruction_of_a_conversation(tmp_path: Path) -> None:
    turns = conversation("first", "then", "last")
    (prompt,) = task_of(
        tmp_path, [{"prompt": turns, "answer": "a"}], rows("x"), prefix="P: ", instruction="Go."
    ).train_prompts()
    assert prompt.text == "P: last\nGo."
    assert list(prompt.messages) == [*turns[:2], {"role": "user", "content": "P: last\nGo."}]
    (bare,) = task_of(tmp_path, [{"prompt": turns, "answer": "a"}], rows("x")).train_prompts()
    assert list(bare.messages) == turns


@pytest.mark.parametrize(
    ("row", "name"),
    [
        ({"prompt": "a \ud800 b"}, "prompt"),
        ({"prompt": [{"role": "system", "content": "\udfff"}, {"role": "user", "content": "a"}]}, "prompt"),
        ({"answer": "\ud800"}, "answer"),
        ({"family": "\ud800"}, "family"),
        ({"id": "\ud800"}, "id"),
        ({"note": [{"\ud800": 1}]}, "note"),
    ],
)
def test_a_lone_surrogate_is_refused_by_row(row: dict[str, Any], name: str, tmp_path: Path) -> None:
    fields = {"id": "id", "prompt": "prompt"}
    training = [{"id": f"{number}", **entry} for number, entry in enumerate(rows("a", "b"))]
    training[1] |= row
    message = rf"^task\.train: .*train\.jsonl, row 1: '{name}': '.*' has a lone surrogate, .*; remove it, or write"
    with pytest.raises(ConfigurationError, match=message) as error:
        task_of(tmp_path, training, [{"id": "0", **rows("x")[0]}], keep_columns=True, fields=fields)
    assert str(error.value).isprintable()
    if name == "note":
        task_of(tmp_path, training, rows("x"))  # this column is not kept


def test_a_whole_character_from_two_escapes_is_accepted(tmp_path: Path) -> None:
    assert texts(task_of(tmp_path, rows("\U0001f600"), rows("x"))) == ["\U0001f600"]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            {"fields": {"question": "prompt"}},
            r"task\.fields: .* must name columns for prompt, answer, difficulty or id",
        ),
        (
            {"fields": {"prompt": "q"}},
            r"task\.heldout\.test: .*test\.jsonl, row 0: no column q; its columns are prompt",
        ),
        ({"fields": {"prompt": "prompt", "id": "key"}}, r"row 0: no column key; its columns are prompt, answer"),
        ({"format": "gsm8k", "fields": {"prompt": "q"}}, r"task\.fields: .* is for task\.format=columns; format gsm8k"),
        ({"format": "gsm9k"}, r"task\.format: 'gsm9k' must be one of columns, gsm8k, math"),
        ({"rewards": "exact"}, r"task\.rewards: 'exact' is none of exact_match, math, .*and no file\.py:function"),
        ({"rewards": []}, r"task\.rewards: give at least one of exact_match"),
    ],
)
def test_invalid_settings_are_refused_in_one_line(more: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=message) as error:
        task_of(tmp_path, rows("a"), rows("x"), **more)
    assert "\n" not in str(error.value)


def test_a_key_that_only_some_rows_lack_is_null(tmp_path: Path) -> None:
    lacking: list[dict[str, Any]] = [{"prompt": "b"}, {"answer": "1"}, {"prompt": "d", "answer": None}]
    task = task_of(tmp_path, [*rows("a"), *lacking], rows("x"))
    assert texts(task) == ["a"] and [prompt.columns for prompt in task.train_prompts()] == [{}]
    assert list(task.notes()) == [
        "task.train: 1 of 4 rows have no prompt (first row 2); left out",
        "task.train: 2 of 4 rows have no answer (first row 1); left out",
    ]
    first = task_of(tmp_path, [lacking[0], *rows("a")], rows("x"))
    assert texts(first) == ["a"]
    named = {"prompt": "prompt", "answer": "answer", "difficulty": "level"}
    levels = task_of(tmp_path, [{**rows("a")[0], "level": 3}, *rows("b")], [{**rows("x")[0], "level": 1}], fields=named)
    assert [prompt.difficulty for prompt in levels.train_prompts()] == ["3", ""]
    with pytest.raises(ConfigurationError, match=r"row 0: no column answer; its columns are prompt"):
        task_of(tmp_path, [{"prompt": "a"}, {"prompt": "b"}], rows("x"))


@pytest.mark.parametrize("heldout", [{}, "test.jsonl", ["test.jsonl"]])
def test_a_task_names_its_heldout_sets(heldout: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"task\.heldout: .* must name at least one set"):
        DatasetTask("columns", "train.jsonl", heldout, "exact_match")


def test_a_share_of_the_prompts_is_held_out() -> None:
    """The same prompts for any order of rows; equal prompts are on the same side; the share is part of the identity."""
    all_rows = [{"prompt": f"What is {number}?", "answer": str(number)} for number in range(40)]
    all_rows.append({"prompt": "what is  3?", "answer": "3"})

    def sides(rows: list[dict[str, str]], share: float) -> list[set[str]]:
        task = DatasetTask(train=rows, heldout=share, rewards="exact_match")
        return [{each.answer for each in part} for part in (task.eval_sets()["heldout"], task.train_prompts())]

    apart, kept = sides(all_rows, 0.1)
    assert len(apart) == 4 and len(kept) == 36 and not apart & kept
    assert sides(all_rows[::-1], 0.1) == [apart, kept] and apart < sides(all_rows, 0.2)[0]
    shares = [
        DatasetTask.content({"train": all_rows, "heldout": share, "rewards": "exact_match"})["heldout"]
        for share in (0.1, 0.2)
    ]
    assert shares[0] != shares[1]
    for wrong in (0.0, 1.0, 1.5, -0.1):
        with pytest.raises(ConfigurationError, match=r"task\.heldout: .* is no share"):
            DatasetTask(train=all_rows, heldout=wrong, rewards="exact_match")
    with pytest.raises(ConfigurationError, match="leaves none to train on"):
        DatasetTask(train=all_rows[:1], heldout=0.5, rewards="exact_match")
    with pytest.raises(ConfigurationError, match=r"RolloutDataModule\(DatasetTask\(train=rows, heldout=0\.1"):
        RolloutDataModule(all_rows)  # type: ignore[arg-type]


def test_all_heldout_sets_are_read_and_leaks_into_each_are_found(tmp_path: Path) -> None:
    paths = {}
    for name, part in (("train", "abc"), ("one", "xb"), ("two", "yc")):
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows(*part)))
        paths[name] = str(path)
    task = DatasetTask("columns", paths["train"], {"one": paths["one"], "two": paths["two"]}, "exact_match")
    assert texts(task) == ["a"]
    assert {name: [each.text for each in part] for name, part in task.eval_sets().items()} == {
        "one": ["x", "b"],
        "two": ["y", "c"],
    }


def test_from_yaml(tmp_path: Path) -> None:
    """task=dataset is configured by overrides alone."""
    task_of(tmp_path, [{"q": "why", "a": "so"}], [{"q": "x", "a": "y"}], fields={"prompt": "q", "answer": "a"})
    config = compose(
        [
            "task=dataset",
            f"task.train={{path: {tmp_path}/train.jsonl, rows: 1}}",
            f"task.heldout={{test: {tmp_path}/test.jsonl}}",
            "task.fields={prompt: q, answer: a}",
            "task.rewards=[exact_match,{use: question_answer, weight: 0.5, name: close}]",
            "task.leaks=refuse",
        ]
    )
    task = build(config, "task")
    assert texts(task) == ["why"]
    grader = task.grader()
    assert isinstance(grader, RewardSum)
    assert [(term.name, term.weight) for term in grader.rewards] == [("exact_match", 1.0), ("close", 0.5)]
    assert task.reward(task.train_prompts()[0], "so") == 1.5
    assert task.reward(task.train_prompts()[0], "The answer is so.") == 0.5


# --- what the verifier is checked on --------------------------------------------------------------------------


def test_examples_for_the_verifier_come_from_the_answers(tmp_path: Path) -> None:
    task = task_of(tmp_path, rows(*"abcdefgh"), rows("x"))
    known = task.known()
    assert len(known) == 8 and [example.right for example in known] == [True, False] * 4
    assert all(
        (example.sample.completion == example.sample.prompt.answer) == example.right and example.sample.answer
        for example in known
    )
    assert "graded all test completions correctly (4 known to be right, 4 known to be wrong)" in check_verifiers(
        InlineVerifiers(task.grader()), known, lambda outcome: outcome.reward >= 1
    )


def test_examples_for_the_verifier_come_from_templates(tmp_path: Path) -> None:
    train = [{"prompt": "a", "answer": "4", "other": "5"}]
    task = task_of(
        tmp_path, train, rows("x"), rewards="math", right="So \\boxed{{{answer}}}", wrong="So \\boxed{{{other}}}"
    )
    assert [(example.sample.completion, example.right) for example in task.known()] == [
        ("So \\boxed{4}", True),
        ("So \\boxed{5}", False),
    ]
    with pytest.raises(ConfigurationError, match=r"task\.right or task\.wrong: .* asks for a column 'gold'"):
        task_of(tmp_path, train, rows("x"), wrong="{gold}")


def test_a_verifier_that_does_not_fit_its_rows_is_refused(tmp_path: Path) -> None:
    """The verifier expects letters, but the answers are texts."""
    task = task_of(tmp_path, rows("a"), rows("x"), rewards="choice")
    with pytest.raises(ConfigurationError, match="its verifier is wrong before the first step: prompt '0'"):
        check_verifiers(InlineVerifiers(task.grader()), task.known(), lambda outcome: outcome.reward >= 1)
    backwards = task_of(tmp_path, rows("a"), rows("x"), right="no", wrong="{answer}")
    with pytest.raises(ConfigurationError, match=r"known to be right \('no'\): rewards it with 0"):
        check_verifiers(InlineVerifiers(backwards.grader()), backwards.known(), lambda outcome: outcome.reward >= 1)


@pytest.mark.parametrize(
    ("rewards", "trusted"),
    [
        ("exact_match", True),
        (["exact_match", "choice", "question_answer"], True),
        ("math", False),
        (["exact_match", "math"], False),
        (["exact_match", f"{ROOT}/tests/verify/reward_files/trl_format.py:think_format_reward"], False),
    ],
)
def test_only_rewards_that_cannot_hang_are_trusted(rewards: Any, trusted: bool, tmp_path: Path) -> None:
    assert task_of(tmp_path, rows("a"), rows("x"), rewards=rewards).trusted is trusted


# --- columns that rewards take -------------------------------------------------------------------------------

SOLVED = [{"prompt": f"{n}+{n}=", "solution": str(2 * n)} for n in range(20)]


def configured(folder: Path, *overrides: str) -> DatasetTask:
    """Return a composed task whose rows have the columns prompt and solution."""
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in SOLVED))
    (folder / "my_rewards.py").write_text(
        "def reward(completions, **kwargs):\n    return [0.0 for _ in completions]\n"
        "def vowels(completions, answer, **kwargs):\n    return [0.0 for _ in completions]\n"
        "def ours(completion, answer):\n    return 0.0\n"
    )
    composed = ["task=dataset", f"task.train={path}", "task.heldout=0.2", *overrides]
    built: DatasetTask = build(compose(composed), "task")
    return built


def test_a_configured_task_needs_an_answer_only_if_a_reward_takes_it(tmp_path: Path) -> None:
    rewards = f"task.rewards={tmp_path}/my_rewards.py"
    task = configured(tmp_path, f"{rewards}:reward")
    assert len(task.train_prompts()) + len(task.eval_sets()["heldout"]) == 20
    named = configured(tmp_path, f"{rewards}:ours", "task.fields.answer=solution")
    assert {prompt.answer for prompt in named.train_prompts()} <= {row["solution"] for row in SOLVED}
    for verifier in ("task.rewards=exact_match", f"{rewards}:ours"):
        with pytest.raises(ConfigurationError, match=r"no column answer; .* name yours with .*task\.fields="):
            configured(tmp_path, verifier)
    with pytest.raises(ConfigurationError, match="no column gold"):
        configured(tmp_path, f"{rewards}:reward", "task.fields.answer=gold")


def test_a_reward_function_that_takes_a_missing_column_is_refused_at_once(tmp_path: Path) -> None:
    message = r"^task\.rewards: vowels needs answer; the rows have: prompt, solution$"
    with pytest.raises(ConfigurationError, match=message):
        configured(tmp_path, f"task.rewards={tmp_path}/my_rewards.py:vowels")


def test_a_row_without_a_column_that_a_reward_takes_is_refused() -> None:
    def reward(completions: list[str], solution: list[str], weight: float = 1.0, *more: Any) -> list[float]:
        return [0.0 for _ in completions]

    complete, rewards = SOLVED[:3], [reward]
    with pytest.raises(ConfigurationError, match=r"reward needs solution; row 3 of task\.train has: prompt$"):
        DatasetTask(train=[*complete, {"prompt": "x"}], rewards=rewards)
    task = DatasetTask(train=complete, rewards=rewards)
    assert [prompt.text for prompt in task.read([{"prompt": "x"}])] == ["x"], "sampling needs no columns for rewards"
    with pytest.raises(ConfigurationError, match=r"<lambda> needs prompt|reward needs prompt"):
        DatasetTask(train=complete, rewards=lambda completions, prompt: [0.0 for _ in completions])
