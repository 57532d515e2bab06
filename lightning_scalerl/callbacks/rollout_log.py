"""Readable log of sampled groups, `rollouts.jsonl`, next to the journal."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, Trainer

from lightning_scalerl.callbacks.run import Run, run_of
from lightning_scalerl.checks import whole_number
from lightning_scalerl.rollouts.grade import Sample
from lightning_scalerl.rollouts.rollout import Group, Rollout, TrainBatch
from sweeps.run.rollouts import cut_groups, write_groups


class RolloutLog(Callback):
    """Callback that writes some rollout groups of step 1 and of every n-th step to a file.

    Groups with ungraded rollouts are chosen first, then others at random.

    Args:
        run_dir: the run's directory.
        groups: number of groups per logged step; 0 to log nothing.
        every_n_steps: optimizer steps between logged steps.
        guard: called before every write. It raises if another process has taken over the run.
    """

    def __init__(
        self, run_dir: str | Path, groups: int = 1, every_n_steps: int = 8, guard: Callable[[], None] | None = None
    ) -> None:
        self.run_dir = Path(run_dir)
        self.groups = whole_number("rollouts.groups", groups, least=0)
        self.every_n_steps = whole_number("rollouts.every_n_steps", every_n_steps)
        self._guard = guard or (lambda: None)

    def on_fit_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Remove groups of steps after the one from which the run resumes, because these steps are repeated."""
        run = run_of(pl_module)
        if run.ranks.leads and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            cut_groups(self.run_dir, run.completed_steps, self._guard)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: Any, outputs: Any, batch: TrainBatch, batch_idx: int
    ) -> None:
        """Write this step's groups if they are due. Only rank 0 has groups."""
        run = run_of(pl_module)
        step = run.completed_steps
        due = step == 1 or step % self.every_n_steps == 0
        if not self.groups or not due or not run.ranks.leads or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        self._guard()
        self.run_dir.mkdir(parents=True, exist_ok=True)
        write_groups(self.run_dir, [entry(group, run, step) for group in self._chosen(batch.groups, run, step)])

    def _chosen(self, groups: Sequence[Group], run: Run, step: int) -> list[Group]:
        shuffled = random.Random(f"{run.seed} {step}").sample(list(groups), len(groups))
        # Groups with ungraded rollouts first. The sort is stable, so the order is otherwise random.
        chosen = sorted(shuffled, key=lambda group: not group.ungraded)[: self.groups]
        return sorted(chosen, key=lambda group: group.admission)


def entry(group: Group, run: Run, step: int) -> dict[str, Any]:
    """Return a group as one JSON record of `rollouts.jsonl`."""
    prompt = group.prompt
    rollouts = group.sampled
    return {
        "step": step,
        "admission": group.admission,
        "prompt_id": prompt.prompt_id,
        "source": prompt.source,
        "difficulty": prompt.difficulty,
        "prompt": prompt.text,
        # With an environment, these messages may differ from the row's, because `reset` may add some.
        **({"messages": list(prompt.messages)} if prompt.opening is not None and prompt.messages else {}),
        "answer": prompt.answer if isinstance(prompt.answer, str) else repr(prompt.answer)[:2000],
        "rollouts": [_rollout(run.sample(prompt, rollout), rollout) for rollout in rollouts],
    }


def _rollout(sample: Sample, rollout: Rollout) -> dict[str, Any]:
    """Return a rollout's record. `answer`, the text after the thinking, is left out if it is the whole text."""
    return {
        "completion": sample.completion,
        **({} if sample.answer == sample.completion else {"answer": sample.answer}),
        "reward": rollout.reward if rollout.outcome == "score" else None,
        "grade": rollout.grade if rollout.outcome == "score" else None,
        "correct": rollout.correct,
        "outcome": rollout.outcome,
        "parts": rollout.parts,
        "extra": rollout.extra,
        "finish_reason": rollout.finish_reason,
        "tokens": len(rollout.tokens),
        "ids": rollout.tokens,
        "forced": sum(rollout.forced),
        **_conversation(sample, rollout),
        **({} if rollout.completed_steps is None else {"completed_steps": rollout.completed_steps}),
        "versions": [[version, len(list(same))] for version, same in groupby(rollout.weight_versions)],
    }


def _conversation(sample: Sample, rollout: Rollout) -> dict[str, Any]:
    conversation = rollout.conversation
    if conversation is None:
        return {}
    return {"turns": list(sample.turns), "conversation": {**asdict(conversation), "turns": conversation.turns}}
