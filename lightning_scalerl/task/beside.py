"""A task combined with the held-out sets of other tasks, which are only evaluated (`evaluation.sets`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from lightning_scalerl.checks import ConfigurationError
from lightning_scalerl.rollouts.grade import Grader, Known
from lightning_scalerl.rollouts.prompt import Prompt
from lightning_scalerl.task.base import Task
from lightning_scalerl.task.mixture import MixtureGrader, MixtureTask, rule_for_passes, set_names
from lightning_scalerl.task.overlap import question_key


class TaskWithEvaluationSets(Task):
    """The task that a run trains on, with held-out sets of other tasks in addition to its own.

    A set of another task has the name of the task's entry in `evaluation.sets`. If the entry's task has several
    held-out sets, their names are ENTRY_SET (`aime_2024`). Training prompts that also occur in such a set stay in
    training, because an evaluation must not change what a run trains on. `notes` reports their number.

    Args:
        trained: the task that the run trains on.
        sets: tasks with held-out sets, by name of the entry in `evaluation.sets`.

    Raises:
        ConfigurationError: a task has no held-out prompts, or two sets have the same name.
    """

    def __init__(self, trained: Task, sets: Mapping[str, Task]) -> None:
        self.trained, self._sets = trained, dict(sets)
        self.trusted = trained.trusted and all(task.trusted for task in sets.values())
        self._heldout = dict(trained.eval_sets())
        # Names of the sets, by the entry that they come from.
        self.names: dict[str, list[str]] = {}
        for name, task in sets.items():
            field = f"evaluation.sets.{name}"
            if isinstance(task, MixtureTask):
                raise ConfigurationError(f"{field}: its task is a mixture; give each of its tasks an entry of its own")
            heldout = set_names(name, task)
            if not heldout or not all(heldout.values()):
                raise ConfigurationError(f"{field}: its task has no held-out prompts; give {field}.task.heldout")
            if duplicates := sorted(set(heldout) & set(self._heldout)):
                raise ConfigurationError(f"{field}: there is another held-out set {duplicates[0]}; rename this one")
            self.names[name] = list(heldout)
            self._heldout |= {
                set_name: [replace(prompt, prompt_id=f"{name}/{prompt.prompt_id}", source=field) for prompt in prompts]
                for set_name, prompts in heldout.items()
            }

    def train_prompts(self) -> Sequence[Prompt]:
        """Return the prompts that the run trains on."""
        return self.trained.train_prompts()

    def eval_sets(self) -> Mapping[str, Sequence[Prompt]]:
        """Return the task's own held-out sets, then the others."""
        return self._heldout

    def reward(self, prompt: Prompt, completion: str) -> float | None:
        """Return the reward of the task that the prompt comes from."""
        return self._by_source.get(prompt.source, self.trained).reward(prompt, completion)

    def grader(self) -> Grader:
        """Return a grader that forwards each sample to the grader of its task."""
        graders = {source: task.grader() for source, task in self._by_source.items()}
        correct = {source: rule_for_passes(task) for source, task in self._by_source.items()}
        return MixtureGrader(graders, correct, self.trained.grader())

    def known(self) -> Sequence[Known]:
        """Return the known right and wrong completions of all tasks."""
        known_of_sets = [
            replace(known, sample=replace(known.sample, prompt=replace(known.sample.prompt, source=source)))
            for source, task in self._by_source.items()
            for known in task.known()
        ]
        return [*self.trained.known(), *known_of_sets]

    def notes(self) -> Sequence[str]:
        """Return the remarks of all tasks, and how many training prompts are in a set that is only evaluated."""
        pool = {question_key(prompt) for prompt in self.train_prompts()}
        own_sets = set(self.trained.eval_sets())
        lines = list(self.trained.notes())
        for name, task in self._sets.items():
            lines += [f"evaluation.sets.{name}: {line}" for line in task.notes()]
        for set_name, prompts in self._heldout.items():
            shared = 0 if set_name in own_sets else sum(question_key(prompt) in pool for prompt in prompts)
            if shared:
                lines.append(
                    f"warning: {shared} of {len(prompts)} prompts of the held-out set {set_name} are training prompts"
                )
        return lines

    def reward_sums(self) -> Sequence[Sequence[str]]:
        """Return the weighted sums of rewards of the task that the run trains on."""
        return self.trained.reward_sums()

    def identity(self) -> Any:
        """Return the identity of the task that the run trains on."""
        return self.trained.identity()

    def is_correct(self, reward: float) -> bool:
        """Return whether a reward counts as a pass in the task that the run trains on."""
        return self.trained.is_correct(reward)

    @property
    def _by_source(self) -> dict[str, Task]:
        """Tasks of the sets, by the source of their prompts."""
        return {f"evaluation.sets.{name}": task for name, task in self._sets.items()}
