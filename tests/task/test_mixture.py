"""Tests of several tasks as one: prompts keep their source, and sets and graders belong to their tasks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lightning_scalerl.checks import ConfigurationError
from lightning_scalerl.composition import build, compose, use_folders
from lightning_scalerl.member.identify import plan_members
from lightning_scalerl.rollouts.grade import Sample
from lightning_scalerl.task.base import Task, check_task
from lightning_scalerl.task.dataset import DatasetTask
from lightning_scalerl.task.mixture import MixtureTask
from lightning_scalerl.verify.inline import InlineVerifiers
from lightning_scalerl.verify.pool import VerifierPool
from lightning_scalerl.verify.verification import check_verifiers


def write(path: Path, *rows: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def gsm8k(*sums: tuple[int, int]) -> list[dict[str, Any]]:
    return [{"question": f"What is {a}+{b}?", "answer": f"{a}+{b}={a + b}\n#### {a + b}"} for a, b in sums]


def words(*pairs: tuple[str, str]) -> list[dict[str, Any]]:
    return [{"question": f"Who is {who}?", "answer": [whom]} for who, whom in pairs]


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    return {
        "sums": write(tmp_path / "sums.jsonl", *gsm8k((1, 2), (3, 4), (5, 6))),
        "sums_test": write(tmp_path / "sums_test.jsonl", *gsm8k((7, 8))),
        "hard_test": write(tmp_path / "hard_test.jsonl", *gsm8k((70, 80), (71, 82))),
        "names": write(tmp_path / "names.jsonl", *words(("Ada", "the countess"), ("Kay", "a cook"))),
        "names_test": write(tmp_path / "names_test.jsonl", *words(("Lu", "a clerk"))),
    }


@pytest.fixture
def parts(files: dict[str, str]) -> dict[str, Task]:
    return {
        "math": DatasetTask("gsm8k", files["sums"], {"easy": files["sums_test"], "hard": files["hard_test"]}, "math"),
        "people": DatasetTask("natural_questions", files["names"], {"dev": files["names_test"]}, "question_answer"),
    }


def test_prompts_know_their_source(parts: dict[str, Task]) -> None:
    task = check_task(MixtureTask(parts))
    assert [(prompt.prompt_id, prompt.source) for prompt in task.train_prompts()] == [
        ("math/0", "math"),
        ("math/1", "math"),
        ("math/2", "math"),
        ("people/0", "people"),
        ("people/1", "people"),
    ]
    assert [prompt.text for prompt in task.train_prompts()[3:]] == ["Who is Ada?", "Who is Kay?"]
    assert list(task.notes()) == ["mixture: 3 of math, 2 of people"]
    assert task.trusted is False and MixtureTask({"people": parts["people"]}).trusted is True


def test_held_out_sets_are_named_after_their_tasks(parts: dict[str, Task]) -> None:
    sets = MixtureTask(parts).eval_sets()
    assert {name: [prompt.prompt_id for prompt in prompts] for name, prompts in sets.items()} == {
        "math_easy": ["math/0"],
        "math_hard": ["math/0", "math/1"],
        "people": ["people/0"],
    }
    assert next(iter(sets)) == "math_easy", "fits use the first set by default"
    assert all(prompt.source == name.partition("_")[0] for name, prompts in sets.items() for prompt in prompts)


def test_each_prompt_has_its_own_grader(parts: dict[str, Task]) -> None:
    task = MixtureTask(parts)
    grader = task.grader()
    first, person = task.train_prompts()[0], task.train_prompts()[3]
    for prompt, text, reward, parts_by_name in (
        (first, "\\boxed{3.0}", 1.0, {"math/math_unstated": 0.0}),
        (first, "Countess", 0.0, {"math/math_unstated": 0.0}),
        (person, "The answer is Countess", 1.0, {"people/f1": 1.0}),
        (person, "\\boxed{3.0}", 0.0, {"people/f1": 0.0}),
    ):
        grade = grader.grade(Sample(prompt, text, text))
        assert (grade.reward, grade.parts) == (reward, parts_by_name)
        assert task.reward(prompt, text) == reward


def test_grading_in_verifier_processes(parts: dict[str, Task]) -> None:
    task = MixtureTask(parts)
    pool = VerifierPool(task.grader(), workers=1, timeout_s=60.0)
    try:
        assert (
            check_verifiers(pool, task.known(), lambda outcome: outcome.reward >= 1)
            == "verifier: graded all test completions correctly (5 known to be right, 5 known to be wrong)"
        )
    finally:
        pool.close()


def test_examples_for_the_verifier_keep_their_source(parts: dict[str, Task]) -> None:
    task = MixtureTask(parts)
    assert [example.sample.prompt.source for example in task.known()] == ["math"] * 6 + ["people"] * 4
    check_verifiers(InlineVerifiers(task.grader()), task.known(), lambda outcome: outcome.reward >= 1)


def test_repeat(parts: dict[str, Task]) -> None:
    task = MixtureTask(parts, {"people": 3})
    ids = [prompt.prompt_id for prompt in task.train_prompts()]
    assert len(ids) == len(set(ids)) == 3 + 3 * 2
    assert ids[3:] == ["people/0", "people/1", "people/0#1", "people/1#1", "people/0#2", "people/1#2"]
    assert [prompt.copy_of for prompt in task.train_prompts()] == [""] * 5 + ["people/0", "people/1"] * 2
    assert len(task.eval_sets()["people"]) == 1, "held-out prompts are not repeated"
    assert list(task.notes()) == ["mixture: 3 of math, 6 of people"]


def test_notes_of_the_parts_are_passed_on(files: dict[str, str], tmp_path: Path) -> None:
    twice = write(tmp_path / "twice.jsonl", *gsm8k((1, 2), (1, 2), (7, 8)))
    task = MixtureTask({"math": DatasetTask("gsm8k", twice, {"test": files["sums_test"]}, "math")})
    assert list(task.notes()) == [
        "mixture: 1 of math",
        "math: task.duplicates: 1 of 3 training prompts occur more than once (the first is '1'); left out",
        "math: task.leaks: 1 of 3 training prompts are in a held-out set too (the first is '2'); left out",
    ]


def test_a_leak_between_two_tasks_is_found(files: dict[str, str], tmp_path: Path) -> None:
    leaky = write(tmp_path / "leaky.jsonl", *gsm8k((9, 9), (7, 8)))
    tasks = {
        "one": DatasetTask("gsm8k", files["sums"], {"test": files["sums_test"]}, "math"),
        "two": DatasetTask("gsm8k", leaky, {"test": files["hard_test"]}, "math"),
    }
    assert any("task.leaks: 1 of" in note for note in MixtureTask(tasks).notes())


@pytest.mark.parametrize(
    ("tasks", "repeat", "message"),
    [
        ({}, None, r"task\.tasks: give at least one task by its name"),
        (None, None, r"task\.tasks: give at least one task"),
        ("math", None, r"task\.tasks: give at least one task"),
        (["math/one"], None, r"task\.tasks: 'math/one' must be of letters, digits and _"),
        (["math"], {"maths": 2}, r"task\.repeat: maths: 2 must be a whole number, 1 or more, and maths one of math"),
        (["math"], {"math": 0}, r"task\.repeat: math: 0 must be"),
        (["math"], {"math": 1.5}, r"task\.repeat: math: 1\.5 must be"),
        (["math"], {"math": True}, r"task\.repeat: math: True must be"),
    ],
)
def test_invalid_settings_are_refused(tasks: Any, repeat: Any, message: str, parts: dict[str, Task]) -> None:
    chosen = {name: parts["math"] for name in tasks} if isinstance(tasks, list) else tasks
    with pytest.raises(ConfigurationError, match=message):
        MixtureTask(chosen, repeat)


def test_a_part_that_is_not_a_task_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="task: dict has no method for a verifier"):
        MixtureTask({"math": {"format": "gsm8k"}})  # type: ignore[dict-item]


# --- in a user's file ----------------------------------------------------------------------------------------

CHOSEN = """
defaults:
  - mixture
  - gsm8k@tasks.math
  - natural_questions@tasks.people
  - _self_
tasks:
  math:
    train: {sums}
    heldout: {{easy: {sums_test}, hard: {hard_test}}}
  people:
    train: {names}
    heldout: {{dev: {names_test}}}
repeat: {{people: 2}}
"""
SPELT_OUT = """
_target_: lightning_scalerl.MixtureTask
tasks:
  math:
    _target_: lightning_scalerl.DatasetTask
    format: gsm8k
    train: {sums}
    heldout: {{easy: {sums_test}, hard: {hard_test}}}
    rewards: math
  people:
    _target_: lightning_scalerl.DatasetTask
    format: natural_questions
    train: {names}
    heldout: {{dev: {names_test}}}
    rewards: question_answer
repeat: {{people: 2}}
"""


@pytest.mark.slow
@pytest.mark.parametrize("form", [CHOSEN, SPELT_OUT], ids=["chosen", "spelt out"])
def test_a_mixture_in_a_users_folder(form: str, files: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "task").mkdir()
    (tmp_path / "task" / "both.yaml").write_text(form.format(**files), encoding="utf-8")
    folders = use_folders([tmp_path])
    task = build(compose(["task=both"], folders), "task")
    assert isinstance(task, MixtureTask)
    assert len(task.train_prompts()) == 3 + 2 * 2 and list(task.eval_sets()) == ["math_easy", "math_hard", "people"]
    question = task.train_prompts()[0].text
    assert ("\\boxed" in question) == (form is CHOSEN), "only gsm8k.yaml adds its instruction"
    override = ["task=both", "+task.tasks.math.prefix='Q: '", "task.repeat.people=1"]
    changed = build(compose(override, folders), "task")
    assert len(changed.train_prompts()) == 5 and changed.train_prompts()[0].text == f"Q: {question}"


@pytest.mark.slow
def test_a_mixtures_identity_depends_on_contents_and_not_on_paths(
    files: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    monkeypatch.setenv("SCALERL_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
    (tmp_path / "task").mkdir()
    moved, changed = tmp_path / "moved.jsonl", tmp_path / "changed.jsonl"
    moved.write_bytes(Path(files["names"]).read_bytes())
    changed.write_bytes(moved.read_bytes().replace(b"a cook", b"a book"))
    plans = []
    for name, path in (("before", files["names"]), ("elsewhere", moved), ("otherwise", changed)):
        text = CHOSEN.format(**{**files, "names": path})
        (tmp_path / "task" / f"{name}.yaml").write_text(text, encoding="utf-8")
        plans.append(["model.batches=1", "model.width=32", "model.layers=1", f"task={name}"])
    before, elsewhere, otherwise = (spec.run for spec in plan_members(plans, use_folders([tmp_path])))
    assert before == elsewhere != otherwise
