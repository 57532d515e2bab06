"""Tasks gsm8k, math, polaris, humaneval, arc, ...: a data set's rows as they are, graded as that data set is."""

from __future__ import annotations

import random
import string
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from lightning_scalerl.checks import ConfigurationError, said
from lightning_scalerl.prompt import Prompt
from lightning_scalerl.task.base import PoolTask, contents, file_digest
from lightning_scalerl.task.formats import FORMATS, Columns, Problem, Row, no_answer
from lightning_scalerl.task.overlap import check_rules, split, without_overlap
from lightning_scalerl.task.rows import fields_of, source_of
from lightning_scalerl.verify.grade import Grader, Known, Sample
from lightning_scalerl.verify.programs import Programs
from lightning_scalerl.verify.registry import QUICK, listed, reward_sum
from lightning_scalerl.verify.registry import content as content_of
from lightning_scalerl.verify.rewards import FunctionGrader

# Rows whose answers the verifier is tried on before the first step.
TRIED = 4
_SHOWN = 10  # rows whose tests cannot be judged, each with its reason


class DatasetTask(PoolTask):
    """Prompts of a data set: a training pool and held-out sets, each from a file, a folder, the hub, or in memory.

    Args:
        format: how rows are read: one of `task.formats.FORMATS`, or "columns".
        train: the training rows, as a `datasets.Dataset` or a list of dicts, or where they are: a path, or {path,
            split, name, revision, rows}.
        heldout: likewise, by set name; the first is the default of every fit. A single set in memory needs no name: it
            is called `heldout`. Or the share of the training prompts that are held out, such as 0.1: which ones follows
            from what they ask, not from their order. None for no evaluation, which a study does not take.
        rewards: what grades: functions, names, places (`file.py:function`), or mappings with `use`, `weight`, `name`.
        fields: of format "columns", which column is what: prompt, answer, difficulty, id. Without it they are `prompt`
            and `answer`, and a row that functions alone grade needs no answer.
        instruction: put behind every question, after a line break; empty for nothing.
        prefix: put before every question.
        right, wrong: a completion known to be right, or wrong, as a template of the row's columns such as
            "\\\\boxed{{{answer}}}"; the verifier is tried on a few before the first step.
        duplicates: what becomes of a training prompt that occurs twice: "drop" the later one, "refuse", "keep".
        leaks: what becomes of a training prompt that is in a held-out set too, likewise.
        sandbox: settings of the verifier `code` (`verify.programs.Programs`), such as {memory_mib: 2048}.

    Raises:
        ConfigurationError: a file, row, field, rule or reward that cannot be used; named.
    """

    # At these values a task has the identity that it would have without them.
    added: ClassVar[Mapping[str, Any]] = {
        "fields": None, "instruction": "", "prefix": "", "right": None, "wrong": None, "duplicates": "drop",
        "leaks": "drop", "sandbox": {},
    }  # fmt: skip

    def __init__(
        self,
        format: str = "columns",
        train: Any = None,
        heldout: Any = None,
        rewards: Any = None,
        fields: Mapping[str, str] | None = None,
        instruction: str = "",
        prefix: str = "",
        right: str | None = None,
        wrong: str | None = None,
        duplicates: str = "drop",
        leaks: str = "drop",
        sandbox: Mapping[str, Any] | None = None,
    ) -> None:
        check_rules(duplicates=duplicates, leaks=leaks)
        _check_given(train, heldout, rewards)
        heldout = _by_name(heldout)
        self._rewards = reward_sum("task.rewards", _with_sandbox(rewards, dict(sandbox or {})))
        graders = [each.grader for each in self._rewards.rewards]
        self.trusted = all(isinstance(grader, QUICK) for grader in graders)
        # Only where a function may read them: columns travel with every completion, and may hold megabytes.
        self._keeps_columns = any(isinstance(grader, FunctionGrader) for grader in graders)
        own = all(isinstance(grader, FunctionGrader) for grader in graders)
        self._read = _OwnColumns() if format == "columns" and not fields and own else _reader(format, fields)
        self._identity = rewards
        self._prefix, self._instruction = prefix, instruction
        self._templates = right, wrong
        self._known: list[Known] = []
        self._notes: list[str] = []
        sets = {} if heldout is None or isinstance(heldout, float) else heldout
        self._heldout = {str(name): self._prompts(f"task.heldout.{name}", given) for name, given in sets.items()}
        train_prompts = self._prompts("task.train", train, remember=True)
        if isinstance(heldout, float):
            train_prompts, self._heldout["heldout"] = split(train_prompts, heldout)
        self._train, found = without_overlap(train_prompts, self._heldout, duplicates, leaks)
        self._notes += found

    @staticmethod
    def content(parameters: Mapping[str, Any]) -> dict[str, Any]:
        """Return digests of local files and commits of hub data sets, which stand for them in a run's identity.

        Raises:
            ConfigurationError: a file that cannot be read.
        """
        rewards = _rewards_content(parameters.get("rewards"))
        whole = {**parameters, "heldout": _by_name(parameters.get("heldout"))}
        found = contents(whole, lambda field, given: source_of(field, given).content()) | {"rewards": rewards}
        return found | {"heldout": {"share": whole["heldout"]}} if isinstance(whole["heldout"], float) else found

    def identity(self) -> Any:
        """Return the digests of its reward functions, by which two fits of one module are of one task or of two."""
        return _rewards_content(self._identity)

    def reward(self, prompt: Prompt, completion: str) -> float | None:
        """Return the weighted sum of the rewards, graded in this process."""
        return self._rewards.grade(Sample(prompt, completion, completion)).reward

    def grader(self) -> Grader:
        """Return the rewards alone: verifier processes need no prompts."""
        return self._rewards

    def reward_sums(self) -> Sequence[Sequence[str]]:
        """Return the names of its rewards, if it has several."""
        names = [each.name for each in self._rewards.rewards]
        return [names] if len(names) > 1 else []

    def known(self) -> Sequence[Known]:
        """Return right and wrong answers to a few rows, for the verifier's trial."""
        return self._known

    def notes(self) -> Sequence[str]:
        """Return findings in the data, and the protections that sandboxed verifiers run behind."""
        graders = [each.grader for each in self._rewards.rewards]
        return [*self._notes, *(line for grader in graders if hasattr(grader, "notes") for line in grader.notes())]

    def read(self, rows: Sequence[Row]) -> list[Prompt]:
        """Return prompts of more rows of the task's form, for `Trainer.predict`.

        Raises:
            ConfigurationError: a row that cannot be read.
        """
        return self._prompts("predict", list(rows))

    def _prompts(self, field: str, given: Any, remember: bool = False) -> list[Prompt]:
        source = source_of(field, given)
        rows = source.read()
        prompts, rights = [], []
        unanswered: list[int] = []
        refused: list[str] = []
        for number, row in enumerate(rows):
            try:
                problem = self._read(row)
            except KeyError as error:
                raise ConfigurationError(
                    f"{field}: {source.path}, row {number}: no column {error.args[0]}; its columns are "
                    f"{fields_of(rows)}; name yours with task.format=columns task.fields={{prompt: ..., answer: ...}}"
                ) from error
            except Exception as error:
                raise ConfigurationError(f"{field}: {source.path}, row {number}: {said(error)}") from error
            if no_answer(problem.answer) and not self._keeps_columns:
                unanswered.append(number)
                continue
            if (why := self._unjudgeable(problem.answer)) is not None:
                refused.append(f"row {number}: {why}")
                continue
            prompts.append(self._prompt(problem, row, number))
            rights.append(problem.right)
        if unanswered:
            self._notes.append(
                f"{field}: {len(unanswered)} of {len(rows)} rows have no answer (first row {unanswered[0]}); left out"
            )
        self._notes += [f"{field}: {source.path}, {line}; left out" for line in refused[:_SHOWN]]
        if len(refused) > _SHOWN:
            self._notes.append(f"{field}: {source.path}: {len(refused) - _SHOWN} more rows cannot be judged; left out")
        if not prompts and refused:
            raise ConfigurationError(f"{field}: no row of {source.path} can be judged; {refused[0]}")
        if not prompts:
            raise ConfigurationError(f"{field}: no row of {source.path} has an answer")
        _check_ids(prompts)
        if remember:
            self._know(prompts, rights)
        return prompts if self._keeps_columns else [replace(prompt, columns={}) for prompt in prompts]

    def _unjudgeable(self, answer: Any) -> str | None:
        """Return why a reward cannot judge by this answer; None if all can."""
        graders = [each.grader for each in self._rewards.rewards]
        found = (grader.unjudgeable(answer) for grader in graders if isinstance(grader, Programs))
        return next((why for why in found if why is not None), None)

    def _prompt(self, problem: Problem, row: Row, number: int) -> Prompt:
        instruction = f"\n{self._instruction}" if self._instruction else ""
        messages = problem.messages
        if messages and (self._prefix or instruction):
            last = {**messages[-1], "content": f"{self._prefix}{messages[-1]['content']}{instruction}"}
            messages = (*messages[:-1], last)
        return Prompt(
            prompt_id=problem.name or str(number),
            text=f"{self._prefix}{problem.text}{instruction}",
            answer=problem.answer,
            difficulty=problem.difficulty,
            messages=messages,
            columns=row,
            question=problem.text,
        )

    def _know(self, prompts: Sequence[Prompt], rights: Sequence[str | None]) -> None:
        """Collect right and wrong completions for a few random rows: by template, by the row, or by the verifier."""
        first = self._rewards.rewards[0].grader
        chosen = random.Random(0).sample(range(len(prompts)), min(TRIED, len(prompts)))
        for number in sorted(chosen):
            prompt = prompts[number]
            own = first.known(prompt.answer) if hasattr(first, "known") else (None, None)
            # A row's own solution is right for built-in verifiers; a user's reward may look at something else.
            worked = rights[number] if hasattr(first, "known") else None
            right = self._filled(self._templates[0], prompt) if self._templates[0] is not None else worked or own[0]
            wrong = self._filled(self._templates[1], prompt) if self._templates[1] is not None else own[1]
            for text, is_right in ((right, True), (wrong, False)):
                if text:
                    self._known.append(Known(Sample(prompt, text, text), is_right))

    @staticmethod
    def _filled(template: str | None, prompt: Prompt) -> str | None:
        if template is None:
            return None
        names = {name for _, name, _, _ in string.Formatter().parse(template) if name}
        missing = sorted(names - {"answer"} - set(prompt.columns))
        if missing:
            raise ConfigurationError(f"task.right or task.wrong: {template!r} asks for a column {missing[0]!r}")
        return template.format(**{**prompt.columns, "answer": prompt.answer})


def _check_given(train: Any, heldout: Any, rewards: Any) -> None:
    """Check that rows and rewards are given, and what is said of held-out sets.

    Raises:
        ConfigurationError: one is missing, or held-out sets are given in no known form.
    """
    if train is None:
        raise ConfigurationError("task.train: needs a value; give a file, a datasets.Dataset or a list of dicts")
    if isinstance(heldout, float):
        if not 0 < heldout < 1:
            raise ConfigurationError(f"task.heldout: {heldout!r} is no share of the training prompts; give e.g. 0.1")
    elif heldout is not None and (not isinstance(_by_name(heldout), Mapping) or not len(heldout)):
        problem = (
            f"task.heldout: {heldout!r} must name at least one set, such as {{test: test.jsonl}}, or be the share of "
            "the training prompts to hold out, such as 0.1, or None for no evaluation in a script"
        )
        if isinstance(heldout, Sequence) and heldout and all(isinstance(each, int) for each in heldout):
            problem += "; numbers of prompts are the arithmetic task's, as scale=tiny sets them: choose another scale"
        raise ConfigurationError(problem)
    if rewards is None:
        raise ConfigurationError(
            "task.rewards: needs a value; give a function, a list of them, a name such as math, or file.py:function"
        )


def _by_name(heldout: Any) -> Any:
    """Return held-out sets by name; a single one in memory is called `heldout`, a file has to be given a name."""
    rows = isinstance(heldout, list | tuple) and all(isinstance(row, Mapping) for row in heldout)
    single = not isinstance(heldout, Mapping) and (rows or hasattr(heldout, "column_names"))
    return {"heldout": heldout} if single else heldout


def _rewards_content(rewards: Any) -> Any:
    return content_of(rewards, lambda path: file_digest("task.rewards", path))


class _OwnColumns:
    """Reader of rows that functions alone grade: `prompt` has to be there, and `answer` may be."""

    def __call__(self, row: Row) -> Problem:
        return Columns(answer="answer" if "answer" in row else None)(row)


def _reader(format: str, fields: Mapping[str, str] | None) -> Any:
    if format == "columns":
        try:
            return Columns(**(fields or {}))
        except TypeError as error:
            raise ConfigurationError(
                f"task.fields: {dict(fields or {})!r} must name columns for prompt, answer, difficulty or id"
            ) from error
    if format not in FORMATS:
        raise ConfigurationError(f"task.format: {format!r} must be one of columns, {', '.join(FORMATS)}")
    if fields:
        raise ConfigurationError(
            f"task.fields: {dict(fields)!r} is for task.format=columns; format {format} knows its own columns"
        )
    return FORMATS[format]


def _with_sandbox(rewards: Any, settings: dict[str, Any]) -> Any:
    """Return the rewards with the sandbox's settings, for those that run programs.

    Raises:
        ConfigurationError: no program is.
    """
    if not settings:
        return rewards
    found = [dict(entry) if isinstance(entry, Mapping) else {"use": entry} for entry in listed(rewards)]
    if not any(entry.get("use") == "code" for entry in found):
        raise ConfigurationError(f"task.sandbox: {settings!r}: task.rewards has no `code`, which alone runs programs")
    return [{**settings, **entry} if entry.get("use") == "code" else entry for entry in found]


def _check_ids(prompts: list[Prompt]) -> None:
    """Make ids of rows unique by adding the row's number: duplicates are the data's, and no error."""
    taken = {prompt.prompt_id for prompt in prompts}
    seen: set[str] = set()
    for number, prompt in enumerate(prompts):
        name = prompt.prompt_id
        if name in seen:
            name = f"{name}/{number}"
            while name in taken:
                name += "'"
            prompts[number] = replace(prompt, prompt_id=name)
            taken.add(name)
        seen.add(name)
