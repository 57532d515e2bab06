"""Tasks gsm8k, math, polaris, humaneval, arc, ...: rows of a public data set, graded as the data set prescribes."""

from __future__ import annotations

import random
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from lightning_scalerl.checks import ConfigurationError, error_line, lone_surrogate, shown
from lightning_scalerl.rollouts.grade import Grader, Known, Sample
from lightning_scalerl.rollouts.prompt import OPENING_COLUMNS, Prompt
from lightning_scalerl.task.base import PoolTask, file_digest, identity_contents
from lightning_scalerl.task.formats import FAMILY, FORMATS, Columns, NoPromptError, Problem, Row, no_answer
from lightning_scalerl.task.overlap import check_rules, split, without_overlap
from lightning_scalerl.task.rows import fields_of, source_of
from lightning_scalerl.verify.judge import Judge
from lightning_scalerl.verify.programs import Programs
from lightning_scalerl.verify.registry import QUICK_VERIFIERS, as_list, reward_sum
from lightning_scalerl.verify.registry import content as content_of
from lightning_scalerl.verify.rewards import FunctionGrader

# Number of rows on whose answers the verifier is tested before the first step.
NUM_KNOWN_ROWS = 4
_MAX_LISTED = 10  # number of unusable rows that are listed, each with its reason


class DatasetTask(PoolTask):
    """Prompts of a data set: a training pool and held-out sets, each from a file, a folder, the hub, or in memory.

    Args:
        format: format of the rows: one of `task.formats.FORMATS`, or "columns".
        train: the training rows: a `datasets.Dataset`, a list of dicts, a path, or a mapping {path, split, name,
            revision, rows}. None for a task that is only evaluated (`evaluation.sets`).
        heldout: held-out rows by set name, in the same forms. Fits use the first set by default. A single set in memory
            may be given without a name and is called `heldout`. A number such as 0.1 holds out this share of the
            training prompts, chosen by the text of their questions and not by their order. None disables evaluation; a
            study does not accept it.
        rewards: graders: functions, names, locations (`file.py:function`), or mappings with `use`, `weight`, `name`.
        fields: for format "columns", a mapping of prompt, answer, difficulty and id to column names. By default the
            columns are `prompt` and `answer`; the column `answer` is optional if only functions grade.
        instruction: appended to every question after a line break; empty for nothing.
        prefix: prepended to every question.
        right, wrong: templates of a right and of a wrong completion, with the row's columns as fields, such as
            "\\\\boxed{{{answer}}}". The verifier is tested on a few such completions before the first step.
        duplicates: rule for training prompts that occur twice: "drop" the later one, "refuse" or "keep".
        leaks: rule for training prompts that are also in a held-out set: "drop", "refuse" or "keep".
        sandbox: settings of the verifier `code` (`verify.programs.Programs`), such as {memory_mib: 2048}.
        keep_columns: keep all columns of a row, for an environment's `reset(**row)`. With reward functions all columns
            are kept in any case.

    Raises:
        ConfigurationError: a file, row, field, rule or reward cannot be used; the error names it.
    """

    # A parameter with this value is left out of a run's identity, so runs older than the parameter keep theirs.
    added: ClassVar[Mapping[str, Any]] = {
        "fields": None, "instruction": "", "prefix": "", "right": None, "wrong": None, "duplicates": "drop",
        "leaks": "drop", "sandbox": {}, "keep_columns": False,
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
        keep_columns: bool = False,
    ) -> None:
        check_rules(duplicates=duplicates, leaks=leaks)
        _check_inputs(train, heldout, rewards)
        heldout = _named_sets(heldout)
        self._rewards = reward_sum("task.rewards", _with_sandbox(rewards, dict(sandbox or {})))
        graders = [reward.grader for reward in self._rewards.rewards]
        self.trusted = all(isinstance(grader, QUICK_VERIFIERS) for grader in graders)
        # Columns are sent with every completion and may hold megabytes, so keep them only if a function may read them.
        has_function = any(isinstance(grader, FunctionGrader) for grader in graders)
        self._keeps_columns = keep_columns or has_function
        only_functions = all(isinstance(grader, FunctionGrader) or _ignores_answer(grader) for grader in graders)
        self._reads_all_rows = has_function or all(map(_ignores_answer, graders))
        read = _reader(format, fields)
        # If `fields` names the columns, a function that takes the answer needs the answer's column. Otherwise functions
        # can do without that column.
        function_takes_answer = any(isinstance(grader, FunctionGrader) and grader.takes_answer for grader in graders)
        optional = only_functions and not (fields and function_takes_answer)
        self._read = _OptionalAnswer(read) if optional and isinstance(read, Columns) else read
        self._rewards_config = rewards
        self._prefix, self._instruction = prefix, instruction
        self._templates = right, wrong
        self._known: list[Known] = []
        self._notes: list[str] = []
        sets = {} if heldout is None or isinstance(heldout, float) else heldout
        only_evaluated = train is None
        self._heldout = {
            str(name): self._prompts(f"task.heldout.{name}", rows, remember=only_evaluated)
            for name, rows in sets.items()
        }
        if only_evaluated:
            self._train: Sequence[Prompt] = ()
            return
        train_prompts = self._prompts("task.train", train, remember=True)
        if isinstance(heldout, float):
            train_prompts, self._heldout["heldout"] = split(train_prompts, heldout)
        train_prompts, notes = without_overlap(train_prompts, self._heldout, duplicates, leaks)
        self._train = [replace(prompt, solution="") for prompt in train_prompts]  # only evaluations use solutions
        self._notes += notes

    @staticmethod
    def content(parameters: Mapping[str, Any]) -> dict[str, Any]:
        """Return digests of local files and commits of hub data sets, which represent them in a run's identity.

        Raises:
            ConfigurationError: a file cannot be read.
        """
        rewards = _rewards_content(parameters.get("rewards"))
        heldout = _named_sets(parameters.get("heldout"))
        content = identity_contents(
            {**parameters, "heldout": heldout}, lambda field, location: source_of(field, location).content()
        )
        content |= {"rewards": rewards}
        return content | {"heldout": {"share": heldout}} if isinstance(heldout, float) else content

    def identity(self) -> Any:
        """Return the digests of the reward functions: other functions make another task."""
        return _rewards_content(self._rewards_config)

    def reward(self, prompt: Prompt, completion: str) -> float | None:
        """Return the weighted sum of the rewards, graded in this process."""
        return self._rewards.grade(Sample(prompt, completion, completion)).reward

    def grader(self) -> Grader:
        """Return a grader with the rewards alone: verifier processes do not need the task's prompts."""
        return self._rewards

    def reward_sums(self) -> Sequence[Sequence[str]]:
        """Return the names of the rewards, if there are several."""
        names = [reward.name for reward in self._rewards.rewards]
        return [names] if len(names) > 1 else []

    def known(self) -> Sequence[Known]:
        """Return right and wrong completions for a few rows, on which the verifier is tested."""
        return self._known

    def notes(self) -> Sequence[str]:
        """Return remarks on the data, and the protections of sandboxed verifiers on this machine."""
        graders = [reward.grader for reward in self._rewards.rewards]
        return [*self._notes, *(line for grader in graders if hasattr(grader, "notes") for line in grader.notes())]

    def read(self, rows: Sequence[Row]) -> list[Prompt]:
        """Return prompts for more rows in the task's format, for `Trainer.predict`.

        Raises:
            ConfigurationError: a row cannot be read.
        """
        return self._prompts("predict", list(rows), complete=False)

    def _prompts(self, field: str, location: Any, remember: bool = False, complete: bool = True) -> list[Prompt]:
        """Read the rows of one set as prompts. Rows that cannot be graded are left out and reported in `notes`.

        Args:
            field: the field of the configuration, for errors.
            location: the rows, or where they are.
            remember: whether to collect completions for `known` from these rows.
            complete: whether to refuse a row without the columns that a reward function takes.
        """
        source = source_of(field, location)
        rows = source.read()
        prompts: list[Prompt] = []
        without_prompt: list[int] = []
        unanswered: list[int] = []
        ungradable: list[str] = []
        # A key that only some rows lack is an empty cell in these rows: writers of JSON lines omit keys without a
        # value.
        empty = dict.fromkeys(name for row in rows for name in row)
        for number, row in enumerate(rows):
            try:
                problem = self._read(row if len(row) == len(empty) else {**empty, **row})
            except NoPromptError:
                without_prompt.append(number)
                continue
            except KeyError as error:
                raise ConfigurationError(
                    f"{field}: {source.path}, row {number}: no column {error.args[0]}; its columns are "
                    f"{fields_of(rows)}; name yours with task.format=columns task.fields={{prompt: ..., answer: ...}}"
                ) from error
            except Exception as error:
                raise ConfigurationError(f"{field}: {source.path}, row {number}: {error_line(error)}") from error
            if no_answer(problem.answer) and not self._reads_all_rows:
                unanswered.append(number)
                continue
            if (reason := self._ungradable_reason(problem.answer)) is not None:
                ungradable.append(f"row {number}: {reason}")
                continue
            if complete:
                self._check_arguments(row, "the rows have" if number == 0 else f"row {number} of {field} has")
            self._check_texts(problem, row, f"{field}: {source.path}, row {number}")
            prompts.append(self._prompt(problem, row, number))
        for numbers, lacking in ((without_prompt, "prompt"), (unanswered, "answer")):
            if numbers:
                self._notes.append(
                    f"{field}: {len(numbers)} of {len(rows)} rows have no {lacking} (first row {numbers[0]}); left out"
                )
        self._notes += [f"{field}: {source.path}, {line}; left out" for line in ungradable[:_MAX_LISTED]]
        if len(ungradable) > _MAX_LISTED:
            self._notes.append(
                f"{field}: {source.path}: {len(ungradable) - _MAX_LISTED} more rows cannot be judged; left out"
            )
        if not prompts and ungradable:
            raise ConfigurationError(f"{field}: no row of {source.path} can be judged; {ungradable[0]}")
        if not prompts:
            lacking = "an answer" if unanswered else "a prompt"
            raise ConfigurationError(f"{field}: no row of {source.path} has {lacking}")
        _make_ids_unique(prompts)
        if remember:
            self._collect_known(prompts)
        return [replace(prompt, columns=self._kept_columns(prompt.columns)) for prompt in prompts]

    def _kept_columns(self, row: Row) -> Row:
        return row if self._keeps_columns else {name: row[name] for name in OPENING_COLUMNS if name in row}

    def _check_texts(self, problem: Problem, row: Row, place: str) -> None:
        """Refuse a row with a text that cannot be encoded; `place` begins the error.

        The tests of programs are not checked, because the sandbox can pass on any text.
        """
        answer = None if isinstance(problem.answer, Mapping) else problem.answer
        texts = {
            "prompt": (problem.text, problem.messages), "answer": answer, "difficulty": problem.difficulty,
            "id": problem.name, "solution": problem.right, FAMILY: row.get(FAMILY),
        }  # fmt: skip
        for name, value in [*texts.items(), *self._kept_columns(row).items()]:
            if (reason := lone_surrogate((name, value))) is not None:
                raise ConfigurationError(f"{place}: {shown(name)}: {reason}")

    def _check_arguments(self, row: Row, columns: str) -> None:
        """Check that a row has all columns that the reward functions take; `columns` precedes a list in the error."""
        for reward in self._rewards.rewards:
            if isinstance(reward.grader, FunctionGrader) and (missing := reward.grader.missing(row)):
                raise ConfigurationError(
                    f"task.rewards: {reward.grader.source.function} needs {', '.join(missing)}; {columns}: "
                    f"{fields_of([dict(row)])}"
                )

    def _ungradable_reason(self, answer: Any) -> str | None:
        """Return the reason why a reward cannot grade with this answer, or None if all rewards can."""
        graders = [reward.grader for reward in self._rewards.rewards]
        reasons = (grader.unjudgeable(answer) for grader in graders if isinstance(grader, Programs))
        return next((reason for reason in reasons if reason is not None), None)

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
            family=str(row.get(FAMILY) or ""),
            # A row's solution is right for built-in verifiers, but a user's reward function may check something else.
            solution=(problem.right or "") if hasattr(self._rewards.rewards[0].grader, "known") else "",
        )

    def _collect_known(self, prompts: Sequence[Prompt]) -> None:
        """Collect right and wrong completions of a few random rows, for `known`.

        Both come from the templates if there are any. Otherwise a right completion is the row's solution. Completions
        that are still missing come from the verifier.
        """
        first = self._rewards.rewards[0].grader
        chosen = random.Random(0).sample(range(len(prompts)), min(NUM_KNOWN_ROWS, len(prompts)))
        for number in sorted(chosen):
            prompt = prompts[number]
            by_verifier = first.known(prompt.answer) if hasattr(first, "known") else (None, None)
            right_template, wrong_template = self._templates
            right = prompt.solution or by_verifier[0]
            if right_template is not None:
                right = self._fill_template(right_template, prompt)
            wrong = by_verifier[1] if wrong_template is None else self._fill_template(wrong_template, prompt)
            for text, is_right in ((right, True), (wrong, False)):
                if text:
                    self._known.append(Known(Sample(prompt, text, text), is_right))

    @staticmethod
    def _fill_template(template: str | None, prompt: Prompt) -> str | None:
        if template is None:
            return None
        names = {name for _, name, _, _ in string.Formatter().parse(template) if name}
        missing = sorted(names - {"answer"} - set(prompt.columns))
        if missing:
            raise ConfigurationError(f"task.right or task.wrong: {template!r} asks for a column {missing[0]!r}")
        return template.format(**{**prompt.columns, "answer": prompt.answer})


def _check_inputs(train: Any, heldout: Any, rewards: Any) -> None:
    """Check that training rows and rewards are given, and that `heldout` has a valid form.

    Raises:
        ConfigurationError: an argument is missing or invalid.
    """
    if train is None and (heldout is None or isinstance(heldout, float)):
        raise ConfigurationError("task.train: needs a value; give a file, a datasets.Dataset or a list of dicts")
    if isinstance(heldout, float):
        if not 0 < heldout < 1:
            raise ConfigurationError(f"task.heldout: {heldout!r} is no share of the training prompts; give e.g. 0.1")
    elif heldout is not None and (not isinstance(_named_sets(heldout), Mapping) or not len(heldout)):
        problem = (
            f"task.heldout: {heldout!r} must name at least one set, such as {{test: test.jsonl}}, or be the share of "
            "the training prompts to hold out, such as 0.1, or None for no evaluation in a script"
        )
        if isinstance(heldout, Sequence) and heldout and all(isinstance(count, int) for count in heldout):
            problem += "; numbers of prompts are the arithmetic task's, as scale=tiny sets them: choose another scale"
        raise ConfigurationError(problem)
    if rewards is None:
        raise ConfigurationError(
            "task.rewards: needs a value; give a function, a list of them, a name such as math, or file.py:function"
        )


def _ignores_answer(grader: Grader) -> bool:
    """Return whether a grader is a judge whose prompt does not show the row's answer."""
    return isinstance(grader, Judge) and not grader.needs_answer


def _named_sets(heldout: Any) -> Any:
    """Return held-out sets by name. A single set in memory gets the name `heldout`; other forms are unchanged."""
    rows = isinstance(heldout, list | tuple) and all(isinstance(row, Mapping) for row in heldout)
    single = not isinstance(heldout, Mapping) and (rows or hasattr(heldout, "column_names"))
    return {"heldout": heldout} if single else heldout


def _rewards_content(rewards: Any) -> Any:
    return content_of(rewards, lambda path: file_digest("task.rewards", path))


@dataclass(frozen=True)
class _OptionalAnswer:
    """Reader of rows whose graders need no answer.

    The default column `answer` may be missing from a row. A column that the user has named may not.
    """

    columns: Columns

    def __call__(self, row: Row) -> Problem:
        lacks_answer = self.columns.answer == Columns.answer and Columns.answer not in row
        return (replace(self.columns, answer=None) if lacks_answer else self.columns)(row)


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
    """Add the sandbox's settings to the rewards that run programs (`code`).

    Raises:
        ConfigurationError: there are settings, but no such reward.
    """
    if not settings:
        return rewards
    entries = [dict(entry) if isinstance(entry, Mapping) else {"use": entry} for entry in as_list(rewards)]
    if not any(entry.get("use") == "code" for entry in entries):
        raise ConfigurationError(f"task.sandbox: {settings!r}: task.rewards has no `code`, which alone runs programs")
    return [{**settings, **entry} if entry.get("use") == "code" else entry for entry in entries]


def _make_ids_unique(prompts: list[Prompt]) -> None:
    """Make prompt ids unique by appending the row's number. Data sets may repeat ids, so this is not an error."""
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
