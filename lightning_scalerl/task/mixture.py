"""Task `mixture`: training on several tasks together. Each task keeps its held-out sets, and so has its own curve."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lightning_scalerl.checks import ConfigurationError
from lightning_scalerl.rollouts.grade import Grade, Grader, Known, Sample, check_services, needs_group
from lightning_scalerl.rollouts.prompt import Prompt
from lightning_scalerl.task.base import PoolTask, Task, check_task
from lightning_scalerl.task.overlap import check_rules, without_overlap
from lightning_scalerl.verify.rewards import grade_together


@dataclass(frozen=True)
class MixtureGrader:
    """Grader that forwards each sample to the grader of its task.

    Attributes:
        graders: graders by the source of a prompt.
        correct: functions that decide whether a reward counts as a pass, by source.
        default_grader: grader of prompts from any other source; None if there are no such prompts.
    """

    graders: Mapping[str, Grader]
    correct: Mapping[str, Callable[[float], bool]]
    default_grader: Grader | None = None

    def _grader_of(self, prompt: Prompt) -> Grader:
        return (
            self.graders[prompt.source]
            if self.default_grader is None
            else self.graders.get(prompt.source, self.default_grader)
        )

    @property
    def _all_graders(self) -> list[Grader]:
        return [*self.graders.values(), *([] if self.default_grader is None else [self.default_grader])]

    def prepare(self) -> None:
        """Call the method `prepare` of all graders that have one."""
        for grader in self._all_graders:
            if hasattr(grader, "prepare"):
                grader.prepare()

    def ready(self) -> Sequence[str]:
        """Try the graders that are services; return one line per service."""
        return [line for grader in self._all_graders for line in check_services(grader)]

    @property
    def longest_s(self) -> float:
        """Time limit of one grade in seconds: the largest limit of the tasks."""
        return max(float(getattr(grader, "longest_s", 0.0)) for grader in self._all_graders)

    def needs_s(self, sample: Sample) -> float:
        """Return the seconds that the task's grader may need for this sample; 0 if it does not declare them."""
        grader = self._grader_of(sample.prompt)
        return float(grader.needs_s(sample)) if hasattr(grader, "needs_s") else 0.0

    @property
    def functions(self) -> Sequence[str]:
        """Names of the user's own functions among the rewards of all tasks."""
        return [name for grader in self._all_graders for name in getattr(grader, "functions", ())]

    def needs_group(self, prompt: Prompt) -> bool:
        """Return whether the task's grader is called with all completions of a group at once."""
        return needs_group(self._grader_of(prompt), prompt)

    def grade_group(self, samples: Sequence[Sample]) -> Sequence[Grade | Exception]:
        """Grade all completions of a group with their task's grader."""
        prompt = samples[0].prompt
        grades = grade_together(self._grader_of(prompt), samples)
        return [
            grade if isinstance(grade, Exception) else self._with_task_name(prompt.source, grade) for grade in grades
        ]

    def grade(self, sample: Sample) -> Grade:
        """Grade with the task's grader, and prefix the names of parts and terms with the task's name."""
        return self._with_task_name(sample.prompt.source, self._grader_of(sample.prompt).grade(sample))

    def _with_task_name(self, source: str, grade: Grade) -> Grade:
        """Apply the task's rule for a pass if the grader has not decided, and prefix names with the task's name."""
        if source not in self.graders:
            return grade
        if grade.correct is None and grade.reward is not None:
            grade = replace(grade, correct=self.correct[source](float(grade.reward)))
        parts, terms = (
            {f"{source}/{name}": value for name, value in numbers.items()} for numbers in (grade.parts, grade.terms)
        )
        return replace(grade, parts=parts, terms=terms)


class MixtureTask(PoolTask):
    """Union of the pools of several tasks; an epoch is a pass over all of them.

    A held-out set is named TASK_SET (`math_test`), or TASK if the task has only one set. Fits use the first set of the
    first task by default; `--metric eval/<set>/pass_rate` selects another.

    Args:
        tasks: the tasks by name.
        repeat: number of times that each prompt of a task is in the pool, by task name; 1 by default. The copies are
            retired together (axis `resampling`).
        leaks: rule for training prompts that are in another task's held-out set: "drop", "refuse" or "keep".

    Raises:
        ConfigurationError: there is no task, or a name is invalid.
    """

    def __init__(self, tasks: Mapping[str, Task], repeat: Mapping[str, int] | None = None, leaks: str = "drop") -> None:
        check_rules(leaks=leaks)
        if not isinstance(tasks, Mapping) or not tasks:
            raise ConfigurationError("task.tasks: give at least one task by its name")
        invalid_names = [name for name in tasks if not str(name).replace("_", "").isalnum()]
        if invalid_names:
            raise ConfigurationError(
                f"task.tasks: {invalid_names[0]!r} must be of letters, digits and _: metrics bear it"
            )
        self._tasks = {str(name): check_task(task) for name, task in tasks.items()}
        nested = [name for name, task in self._tasks.items() if isinstance(task, MixtureTask)]
        if nested:
            raise ConfigurationError(f"task.tasks: {nested[0]} is a mixture itself; give its tasks in its place")
        all_set_names = [set_name for name, task in self._tasks.items() for set_name in set_names(name, task)]
        duplicates = sorted({name for name in all_set_names if all_set_names.count(name) > 1})
        if duplicates:
            raise ConfigurationError(f"task.tasks: two held-out sets would be called {duplicates[0]}; rename a task")
        repeats = dict(repeat or {})
        for name, count in repeats.items():
            if name not in self._tasks or isinstance(count, bool) or not isinstance(count, int) or count < 1:
                raise ConfigurationError(
                    f"task.repeat: {name}: {count!r} must be a whole number, 1 or more, and {name} one of "
                    f"{', '.join(self._tasks)}"
                )
        self.trusted = all(task.trusted for task in self._tasks.values())
        self._train = [
            replace(
                prompt,
                prompt_id=f"{name}/{prompt.prompt_id}{f'#{copy}' if copy else ''}",
                source=name,
                copy_of=f"{name}/{prompt.prompt_id}" if copy else "",
            )
            for name, task in self._tasks.items()
            for copy in range(repeats.get(name, 1))
            for prompt in task.train_prompts()
        ]
        self._heldout = {
            set_name: [replace(prompt, prompt_id=f"{name}/{prompt.prompt_id}", source=name) for prompt in prompts]
            for name, task in self._tasks.items()
            for set_name, prompts in set_names(name, task).items()
        }

        # Each task has already checked its pool against its own held-out sets. Check it against the other tasks' sets.
        self._notes: list[str] = []
        remaining: list[Prompt] = []
        for name in self._tasks:
            other_sets = {
                key: prompts for key, prompts in self._heldout.items() if prompts and prompts[0].source != name
            }
            task_prompts = [prompt for prompt in self._train if prompt.source == name]
            without_leaks, notes = without_overlap(task_prompts, other_sets, "keep", leaks)
            remaining += without_leaks
            self._notes += [f"{name}: {line}" for line in notes if line.startswith("task.leaks")]
        self._train = remaining

    @staticmethod
    def content(parameters: Mapping[str, Any]) -> dict[str, Any]:
        """Return an empty dict: each task is identified by its own content."""
        return {}

    def identity(self) -> Any:
        """Return the identity of every task, by name."""
        return {name: task.identity() for name, task in self._tasks.items()}

    def reward(self, prompt: Prompt, completion: str) -> float | None:
        """Return the reward from the prompt's task."""
        return self._tasks[prompt.source].reward(prompt, completion)

    def grader(self) -> Grader:
        """Return one grader over the graders of all tasks."""
        graders = {name: task.grader() for name, task in self._tasks.items()}
        return MixtureGrader(graders, {name: rule_for_passes(task) for name, task in self._tasks.items()})

    def reward_sums(self) -> Sequence[Sequence[str]]:
        """Return the reward names in all tasks' weighted sums, prefixed with the task's name."""
        return [
            [f"{name}/{reward}" for reward in rewards]
            for name, task in self._tasks.items()
            for rewards in task.reward_sums()
        ]

    def known(self) -> Sequence[Known]:
        """Return the known right and wrong completions of all tasks."""
        return [
            replace(known, sample=replace(known.sample, prompt=replace(known.sample.prompt, source=name)))
            for name, task in self._tasks.items()
            for known in task.known()
        ]

    def notes(self) -> Sequence[str]:
        """Return the number of prompts from each task, and the remarks of all tasks."""
        counts: dict[str, int] = {}
        for prompt in self._train:
            counts[prompt.source] = counts.get(prompt.source, 0) + 1
        shares = ", ".join(f"{count} of {name}" for name, count in counts.items())
        return [
            f"mixture: {shares}",
            *self._notes,
            *(f"{name}: {line}" for name, task in self._tasks.items() for line in task.notes()),
        ]


def _is_default_pass(reward: float) -> bool:
    return reward >= 1.0


def rule_for_passes(task: Task) -> Callable[[float], bool]:
    """Return the function that decides whether a task's reward counts as a pass.

    For a task without a rule of its own this is a plain function, because a bound method would be sent to the verifier
    processes together with the whole task.
    """
    return _is_default_pass if type(task).is_correct is Task.is_correct else task.is_correct


def set_names(name: str, task: Task) -> dict[str, Sequence[Prompt]]:
    """Return a task's held-out sets, named NAME if there is only one set, else NAME_SET."""
    sets = task.eval_sets()
    return {name if len(sets) == 1 else f"{name}_{set_name}": prompts for set_name, prompts in sets.items()}
