"""Task `reasoning_gym`: problems of the package reasoning-gym, graded by the generator that produced them.

A generator derives row i from `seed + i`, so different seeds share most of their rows. Training and held-out rows
therefore come from one list of distinct questions. The digest of a question decides whether it is held out, and the
seed has no part in this.
"""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from types import ModuleType
from typing import Any, ClassVar

from lightning_scalerl.checks import ConfigurationError, did_you_mean, error_line, positive, whole_number
from lightning_scalerl.rollouts.grade import Grade, Grader, Known, Sample
from lightning_scalerl.rollouts.prompt import Prompt
from lightning_scalerl.task.base import PoolTask

PACKAGE = "reasoning-gym"
ANSWERS = ("whole", "number", "tag")
_NUMBER = re.compile(r"(?<![\w.])-?\d[\d,]*(?:\.\d+)?")
# Packages that reasoning-gym imports when it is imported, although only some generators use them. pycosat needs a C
# compiler.
_OPTIONAL_PACKAGES = ("pycosat", "cellpylib", "zss", "bfi", "pytz", "pyfiglet")
# Draws per requested row, and the minimum number of draws, before a generator counts as exhausted.
_DRAWS_PER_ROW, _MIN_DRAWS = 20, 1000
# Limit on the number of levels of difficulty, because metrics are recorded for each level.
_MAX_LEVELS = 30
# Rows on whose answers the verifier is tested before the first step.
_NUM_KNOWN_ROWS = 4
# Settings of a generator that the task sets itself.
_SET_BY_TASK = ("seed", "size")


class _Missing(ModuleType):
    """Placeholder for a package that is not installed: importing it succeeds, using it raises."""

    def __getattr__(self, name: str) -> Any:
        raise ModuleNotFoundError(f"No module named {self.__name__!r}", name=self.__name__)


@contextmanager
def _placeholders() -> Iterator[None]:
    """Register a placeholder for each optional package that is missing, in the `with` block only."""
    missing = [name for name in _OPTIONAL_PACKAGES if name not in sys.modules and find_spec(name) is None]
    sys.modules.update({name: _Missing(name) for name in missing})
    try:
        yield
    finally:
        for name in missing:
            del sys.modules[name]


def _factory() -> Any:
    """Import reasoning-gym's table of generators.

    Raises:
        ConfigurationError: reasoning-gym, or a package that all its generators need, is not installed.
    """
    try:
        with _placeholders():
            from reasoning_gym import factory
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            f"task: reasoning_gym needs the package {error.name}, which is not installed; pip install "
            f"{PACKAGE if error.name == 'reasoning_gym' else error.name} (docs/guide/real_model.md)"
        ) from error
    return factory


@dataclass(frozen=True)
class Generator:
    """One generator of reasoning-gym with its settings.

    Attributes:
        field: field of the configuration, for errors.
        name: name of the generator, such as `chain_sum`.
        settings: settings of the generator without `seed` and `size`.
        seed: seed of its rows.
    """

    field: str
    name: str
    settings: Mapping[str, Any]
    seed: int = 0

    def __reduce__(self) -> Any:
        """Leave out the cached scorer: unpickling it would import reasoning-gym without the placeholders."""
        return Generator, (self.field, self.name, dict(self.settings), self.seed)

    def check(self) -> None:
        """Check the name and the settings.

        Raises:
            ConfigurationError: reasoning-gym has no such generator, or the generator has no such setting or value.
        """
        datasets = _factory().DATASETS
        names = sorted(name for name in datasets if name != "composite")
        if self.name not in names:
            raise ConfigurationError(
                f"{self.field}: {self.name!r} is no generator of {PACKAGE}{did_you_mean(self.name, names)}; valid: "
                f"{', '.join(names)}"
            )
        known = [field.name for field in fields(datasets[self.name][1]) if field.name not in _SET_BY_TASK]
        for setting in self.settings:
            if setting not in known:
                hint = " (the task sets it: task.seed, task.train)" if setting in _SET_BY_TASK else ""
                raise ConfigurationError(
                    f"task.settings.{setting}: {self.name} has no such setting{hint}"
                    f"{did_you_mean(setting, known, 'task.settings.')}; valid: {', '.join(known)}"
                )
        self.make(1)

    def make(self, size: int) -> Any:
        """Return reasoning-gym's data set with `size` rows.

        Raises:
            ConfigurationError: the generator rejects a value, or a package that it needs is not installed.
        """
        with self._clear_errors():
            return _factory().create_dataset(self.name, seed=self.seed, size=size, **self.settings)

    def rows(self, max_draws: int) -> Iterator[Mapping[str, Any]]:
        """Yield rows with distinct questions, from at most `max_draws` draws.

        Raises:
            ConfigurationError: see `make`.
        """
        dataset = self.make(max_draws)
        seen: set[str] = set()
        for number in range(max_draws):
            with self._clear_errors():
                row: Mapping[str, Any] = dataset[number]
            if (key := _question_key(row)) not in seen:
                seen.add(key)
                yield row

    @cached_property
    def scorer(self) -> Any:
        """Data set whose `score_answer` grades completions."""
        return self.make(1)

    @contextmanager
    def _clear_errors(self) -> Iterator[None]:
        """Turn errors of the generator into a ConfigurationError that names the field."""
        try:
            yield
        except ConfigurationError:
            raise
        except ModuleNotFoundError as error:
            compiler = ", which needs a C compiler" if error.name == "pycosat" else ""
            raise ConfigurationError(
                f"{self.field}: {self.name} needs the package {error.name}, which is not installed; pip install "
                f"{error.name}{compiler}, or choose another generator"
            ) from error
        except Exception as error:  # mostly assertions of the generator
            values = dict(self.settings)
            raise ConfigurationError(
                f"task.settings: {self.name} cannot use {values!r} ({error_line(error)})"
            ) from error


@dataclass(frozen=True)
class ReasoningGymGrader:
    """Grader that uses the score of the generator that produced the prompt.

    Attributes:
        generators: generators by the name in a prompt's column `generator`.
        answer: part of a completion that is scored; see `ReasoningGymTask`.
    """

    generators: Mapping[str, Generator]
    answer: str

    def prepare(self) -> None:
        """Import the generators before the first completion is timed."""
        for generator in self.generators.values():
            generator.make(1)

    def grade(self, sample: Sample) -> Grade:
        """Return the generator's score, which may be partial. An answer that the generator cannot read scores 0."""
        row = sample.prompt.columns
        scorer = self.generators[row["generator"]].scorer
        answer = read_answer(sample.answer, self.answer)
        try:
            return Grade(float(scorer.score_answer(answer, row)), answer=answer or "")
        except (ImportError, MemoryError):
            raise
        except Exception as error:  # several scorers raise for an answer in the wrong format
            return Grade(0.0, extra={"scorer": error_line(error)}, answer=answer or "")


def read_answer(text: str, part: str) -> str | None:
    """Extract the answer from a completion's text; `part` is one of `ANSWERS`. Return None if there is no answer."""
    if part == "tag":
        from reasoning_gym.utils import extract_answer

        answer: str | None = extract_answer(text)
        return answer
    if part == "number":
        numbers = _NUMBER.findall(text)
        return numbers[-1].rstrip(",") if numbers else None
    return text.strip()


class ReasoningGymTask(PoolTask):
    """Prompts from one or more generators of reasoning-gym, with the generators' scores as rewards.

    Args:
        dataset: a generator such as `chain_sum`, or several with weights, such as {chain_sum: 2, products: 1}.
        settings: settings of the generator, such as {max_terms: 3}; with several generators, by generator.
        train: number of training prompts, all different; None for a task that is only evaluated.
        heldout: number of held-out prompts, all different and none of them a training prompt.
        seed: seed of the rows. With the same ratio of `train` to `heldout`, a question that is held out under one seed
            is never a training prompt under another.
        instruction: appended to every question after a line break; empty for nothing.
        answer: part of the completion (after its thinking) that is scored: "whole", all of it; "number", its last
            number; "tag", the text between <answer> and </answer>.
        difficulty: name of a number in each row's metadata, such as num_terms, to use as the difficulty of prompts,
            which curricula and metrics read. None for no difficulty.
        carry_over: further held-out sets by name, from other generators or settings: {longer: {dataset: chain_sum,
            settings: {min_terms: 5}, rows: 200}}.

    Raises:
        ConfigurationError: a generator or setting does not exist, a package is missing, or the generator has fewer
            different rows than requested.
    """

    added: ClassVar[Mapping[str, Any]] = {"instruction": "", "answer": "whole", "difficulty": None, "carry_over": None}

    def __init__(
        self,
        dataset: str | Mapping[str, float],
        settings: Mapping[str, Any] | None = None,
        train: int | None = 2000,
        heldout: int = 400,
        seed: int = 0,
        instruction: str = "",
        answer: str = "whole",
        difficulty: str | None = None,
        carry_over: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        num_train = 0 if train is None else whole_number("task.train", train)
        whole_number("task.heldout", heldout)
        whole_number("task.seed", seed, least=0)
        if answer not in ANSWERS:
            raise ConfigurationError(f"task.answer: {answer!r} must be one of {', '.join(ANSWERS)}")
        self._instruction, self._answer, self._difficulty = instruction, answer, difficulty
        self._generators: dict[str, Generator] = {}
        self._train: list[Prompt] = []
        heldout_prompts: list[Prompt] = []
        weights = _weights(dataset)
        for name, train_rows, heldout_rows in zip(
            weights, _split_count(num_train, weights), _split_count(heldout, weights), strict=True
        ):
            generator_settings = settings if isinstance(dataset, str) else (settings or {}).get(name)
            generator = self._register(name, Generator("task.dataset", name, generator_settings or {}, seed))
            sides = self._split(generator, train_rows, heldout_rows, num_train, heldout)
            self._train += self._prompts(name, sides[0])
            heldout_prompts += self._prompts(name, sides[1])
        unknown = [] if isinstance(dataset, str) else [name for name in settings or {} if name not in weights]
        if unknown:
            raise ConfigurationError(
                f"task.settings.{unknown[0]}: no generator of task.dataset; valid: {', '.join(weights)}"
            )
        self._heldout = {"heldout": heldout_prompts}
        for name, set_config in (carry_over or {}).items():
            self._heldout[str(name)] = self._carry_over(str(name), set_config, seed)
        if difficulty is not None:
            self._check_levels(difficulty)

    @staticmethod
    def content(parameters: Mapping[str, Any]) -> dict[str, Any]:
        """Return the version of reasoning-gym: another version may draw other rows from the same settings.

        Raises:
            ConfigurationError: reasoning-gym is not installed.
        """
        try:
            return {"version": version(PACKAGE)}
        except PackageNotFoundError as error:
            raise ConfigurationError(
                f"task: reasoning_gym needs the package {PACKAGE}, which is not installed; pip install {PACKAGE} "
                "(docs/guide/real_model.md)"
            ) from error

    def identity(self) -> Any:
        """Return the version of reasoning-gym: scores may change with it."""
        return self.content({})

    def reward(self, prompt: Prompt, completion: str) -> float | None:
        """Return the generator's score, graded in this process."""
        return self.grader().grade(Sample(prompt, completion, completion)).reward

    def grader(self) -> Grader:
        """Return a grader with the generators alone: verifier processes do not need the task's prompts."""
        return ReasoningGymGrader(self._generators, self._answer)

    def known(self) -> Sequence[Known]:
        """Return right answers to a few rows, if the generator has answers as text."""
        prompts_with_solution = [prompt for prompt in self._own_prompts if prompt.solution][:_NUM_KNOWN_ROWS]
        return [Known(Sample(prompt, prompt.solution, prompt.solution), True) for prompt in prompts_with_solution]

    def _known_completion(self, answer: Any) -> str:
        """Return a completion with the generator's answer; empty if that is not a text."""
        if not isinstance(answer, str):
            return ""
        return f"<answer>{answer}</answer>" if self._answer == "tag" else answer

    def notes(self) -> Sequence[str]:
        """Return the package's version and the number of prompts from each generator."""
        counts: dict[str, int] = {}
        for prompt in self._own_prompts:
            counts[prompt.columns["generator"]] = counts.get(prompt.columns["generator"], 0) + 1
        shares = ", ".join(f"{count} of {name}" for name, count in counts.items())
        return [f"{PACKAGE} {version(PACKAGE)}: {shares}"]

    @property
    def _own_prompts(self) -> Sequence[Prompt]:
        """The training prompts, or in a task that is only evaluated, the held-out prompts of the same generators."""
        return self._train or self._heldout["heldout"]

    def _register(self, name: str, generator: Generator) -> Generator:
        generator.check()
        self._generators[name] = generator
        return generator

    def _split(
        self, generator: Generator, train: int, heldout: int, all_train: int, all_heldout: int
    ) -> tuple[list[Mapping[str, Any]], list[Mapping[str, Any]]]:
        """Draw training rows and held-out rows. The digest of its question decides which of the two a row is.

        Args:
            generator: the generator.
            train, heldout: numbers of rows to draw from this generator.
            all_train, all_heldout: numbers of rows over all generators. A question is held out with probability
                all_heldout / (all_train + all_heldout).
        """
        share = all_heldout / (all_train + all_heldout)
        sides: tuple[list[Mapping[str, Any]], list[Mapping[str, Any]]] = ([], [])
        max_draws = max(_MIN_DRAWS, _DRAWS_PER_ROW * (train + heldout))
        for row in generator.rows(max_draws):
            is_heldout = _hash_fraction(_question_key(row)) < share
            if len(sides[is_heldout]) < (heldout if is_heldout else train):
                sides[is_heldout].append(row)
            if len(sides[0]) == train and len(sides[1]) == heldout:
                return sides
        raise ConfigurationError(
            f"task.train, task.heldout: {generator.name} with settings {dict(generator.settings)!r} gave "
            f"{len(sides[0])} and {len(sides[1])} different rows in {max_draws} draws, and {train} and {heldout} are "
            "asked for; ask for fewer, or widen task.settings"
        )

    def _carry_over(self, name: str, set_config: Mapping[str, Any], seed: int) -> list[Prompt]:
        field = f"task.carry_over.{name}"
        if (
            not isinstance(set_config, Mapping)
            or "dataset" not in set_config
            or set(set_config) - {"dataset", "settings", "rows"}
        ):
            raise ConfigurationError(f"{field}: {set_config!r} must be a mapping of dataset, settings and rows")
        if not name.replace("_", "").isalnum() or name in self._heldout or name in self._generators:
            raise ConfigurationError(
                f"{field}: the name must be of letters, digits and _, and neither heldout nor a generator of "
                "task.dataset: metrics bear it"
            )
        rows = whole_number(f"{field}.rows", set_config.get("rows", 200))
        generator = self._register(
            name, Generator(field, str(set_config["dataset"]), set_config.get("settings") or {}, seed)
        )
        trained_on = {_question_key(prompt.columns) for prompt in self._train}
        max_draws = max(_MIN_DRAWS, _DRAWS_PER_ROW * rows)
        new_rows: list[Mapping[str, Any]] = []
        for row in generator.rows(max_draws):
            if _question_key(row) not in trained_on:
                new_rows.append(row)
            if len(new_rows) == rows:
                return self._prompts(name, new_rows)
        raise ConfigurationError(
            f"{field}.rows: {generator.name} gave {len(new_rows)} different rows in {max_draws} draws that are not "
            f"trained on, and {rows} are asked for; ask for fewer, or widen its settings"
        )

    def _prompts(self, name: str, rows: Sequence[Mapping[str, Any]]) -> list[Prompt]:
        suffix = f"\n{self._instruction}" if self._instruction else ""
        return [
            Prompt(
                prompt_id=f"{name}/{hashlib.sha256(_question_key(row).encode()).hexdigest()[:16]}",
                text=f"{row['question']}{suffix}",
                answer=str(row["answer"] if row["answer"] is not None else ""),
                difficulty=self._level(name, row),
                columns={**row, "generator": name},
                question=row["question"],
                solution=self._known_completion(row["answer"]),
            )
            for row in rows
        ]

    def _level(self, name: str, row: Mapping[str, Any]) -> str:
        """Return the label of a row's difficulty, such as `3_num_terms`."""
        if self._difficulty is None:
            return ""
        numbers = {
            key: value
            for key, value in row["metadata"].items()
            if isinstance(value, int | float) and not isinstance(value, bool)
        }
        if self._difficulty not in numbers:
            valid_names = ", ".join(key for key in numbers if key != "source_index") or "none"
            raise ConfigurationError(
                f"task.difficulty: {self._difficulty!r} is no number that {self._generators[name].name} states of a "
                f"row{did_you_mean(self._difficulty, numbers)}; valid: {valid_names}"
            )
        return f"{numbers[self._difficulty]:g}_{self._difficulty}"

    def _check_levels(self, difficulty: str) -> None:
        levels = {prompt.difficulty for prompt in self._own_prompts}
        if len(levels) > _MAX_LEVELS:
            raise ConfigurationError(
                f"task.difficulty: {difficulty} takes {len(levels)} values, and a pass rate is recorded for each; name "
                f"a number of the rows that takes at most {_MAX_LEVELS}"
            )


def _question_key(row: Mapping[str, Any]) -> str:
    """Return a row's question as a key; rows that differ only in case and white space have the same key."""
    return " ".join(str(row["question"]).casefold().split())


def _hash_fraction(key: str) -> float:
    """Return a pseudo-random number from 0 to 1 that depends on the question alone."""
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") / 2**64


def _weights(dataset: Any) -> dict[str, float]:
    """Return the generators with their weights.

    Raises:
        ConfigurationError: `dataset` is neither a generator nor a mapping of generators to weights above 0.
    """
    if isinstance(dataset, str):
        return {dataset: 1.0}
    if not isinstance(dataset, Mapping) or not dataset:
        raise ConfigurationError(
            f"task.dataset: {dataset!r} must be a generator such as chain_sum, or several with weights: "
            "{chain_sum: 2, products: 1}"
        )
    return {str(name): positive(f"task.dataset.{name}", weight) for name, weight in dataset.items()}


def _split_count(count: int, weights: Mapping[str, float]) -> list[int]:
    """Split `count` rows in proportion to the weights; the parts add up to `count`."""
    total, taken, shares = sum(weights.values()), 0.0, []
    for weight in weights.values():
        start = round(count * taken / total)
        taken += weight
        shares.append(round(count * taken / total) - start)
    return shares
