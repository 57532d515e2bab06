"""`scalerl rescore RUN --reward ...`: grades stored rollouts again, without generating anything."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from lightning_scalerl.checks import ConfigurationError
from lightning_scalerl.composition import build, use_folders
from lightning_scalerl.member.trust import check_run
from lightning_scalerl.rollouts.grade import Grader, Outcome, Sample, needs_group
from lightning_scalerl.rollouts.prompt import Prompt
from lightning_scalerl.task.base import Task, passes
from lightning_scalerl.verify.registry import reward_sum
from lightning_scalerl.verify.settled import SettledFirst
from lightning_scalerl.verify.verification import Verification, submit_bundle
from sweeps.errors import UserError
from sweeps.run.files import append_lines
from sweeps.run.rollouts import Group, read_groups
from sweeps.run.spec import RunSpec

REASONS = 3  # number of error reasons that are returned, the most frequent first


def rescore_run(
    run_dir: Path, reward: str | None = None, out: Path | None = None, trust: bool = False
) -> list[dict[str, Any]]:
    """Grade the stored rollouts of a run again.

    Args:
        run_dir: directory of a run of `scalerl train`.
        reward: name or location of a verifier (`math`, `file.py:function`); None for the task's verifier.
        out: file to write the groups with their new grades to; None to write nothing.
        trust: run any code that the run names, without the checks of `member.trust`.

    Returns:
        One row per task: number of rollouts, mean rewards before and after, number of rollouts that were graded both
        times and changed from right to wrong or the reverse, and the most frequent reasons of errors. Means are None if
        no rollout has a grade.

    Raises:
        UserError: there are no rollouts, a prompt or the verifier does not exist, `out` exists, or the run names
            untrusted code.
    """
    spec, groups = RunSpec.read(run_dir), read_groups(run_dir)
    if out is not None and out.exists():
        raise UserError(f"--out {out}: is there already; give a new file")
    if not trust:
        check_run(run_dir, spec)
    environment = spec.config.get("environment") or {}
    if reward is None and environment.get("factory") and environment.get("reward") == "environment":
        raise UserError(
            f"{run_dir}: its rewards are those of its environment ({environment['factory']}), which is not run again; "
            "give --reward to grade the conversations by a verifier"
        )
    try:
        use_folders(spec.folders)
        config = OmegaConf.create(dict(spec.config))
        if reward is not None:
            reward_sum("--reward", reward)  # raises an error that names the option, before anything is built
        uses_task_grader = reward is None or _set_reward(config.task, reward)
        task = build(config, "task")
        settings = build(config, "verify") if "verify" in config else Verification()
        grader = task.grader() if uses_task_grader else reward_sum("--reward", str(reward))
        prompts = {prompt.prompt_id: prompt for prompt in task.train_prompts()}
        missing_prompts = [
            group["prompt_id"]
            for group in groups
            if group["prompt_id"] not in prompts or not _is_of(group, prompts[group["prompt_id"]])
        ]
        if missing_prompts:
            raise UserError(
                f"{run_dir}: its task holds no prompt {missing_prompts[0]!r} any more; the data has changed"
            )
        outcomes = _grade(groups, prompts, grader, settings, trusted=uses_task_grader and task.trusted)
    except ConfigurationError as error:
        raise UserError(str(error)) from error
    if out is not None:
        append_lines(
            out,
            [
                _with_outcomes(group, task, group_outcomes)
                for group, group_outcomes in zip(groups, outcomes, strict=True)
            ],
        )
    sources = sorted({group["source"] for group in groups})
    pairs = list(zip(groups, outcomes, strict=True))
    return [_row(source, [pair for pair in pairs if pair[0]["source"] == source], task) for source in sources]


def _is_of(group: Group, prompt: Prompt) -> bool:
    """Return whether a stored group is of this prompt. An environment may have appended its first observation."""
    if _has_conversations(group):
        texts = [str(message["content"]) for message in group.get("messages", ())] or [str(group["prompt"])]
        return any(text.startswith(prompt.text) for text in texts)
    return bool(group["prompt"] == prompt.text)


def _has_conversations(group: Group) -> bool:
    return any("conversation" in rollout for rollout in group["rollouts"])


def prompt_of(group: Group, prompt: Prompt) -> Prompt:
    """Return the row's prompt as training's verifier got it: with its environment's first observation and tools."""
    if not _has_conversations(group):
        return prompt
    messages = tuple(group.get("messages", ()))
    if not messages and prompt.messages:  # runs of older versions stored only the text of the last message
        messages = (*prompt.messages[:-1], {**prompt.messages[-1], "content": group["prompt"]})
    return replace(prompt, text=group["prompt"], messages=messages)


def _set_reward(task: Any, reward: str) -> bool:
    """Set the verifier in the configuration of a `DatasetTask` or of a mixture of them.

    The task then keeps the columns of its rows that this verifier reads.

    Returns:
        Whether all tasks are `DatasetTask`s; others are not changed.
    """
    if "tasks" in task:
        # A list, not a generator: all tasks must be changed.
        return all([_set_reward(part, reward) for part in task.tasks.values()])
    if not str(task.get("_target_", "")).endswith("DatasetTask"):
        return False
    task.rewards = reward
    if reward != "code":
        task.pop("sandbox", None)
    return True


def _grade(
    groups: Sequence[Group], prompts: dict[str, Prompt], grader: Grader, settings: Verification, trusted: bool
) -> list[list[Outcome]]:
    verifiers = SettledFirst(settings.verifiers(grader, trusted))
    try:
        tickets = []
        for group in groups:
            prompt = prompt_of(group, prompts[group["prompt_id"]])
            samples = [sample_of(prompt, rollout, group["step"]) for rollout in group["rollouts"]]
            bundles = [samples] if needs_group(grader, prompt) else [[sample] for sample in samples]
            tickets.append([ticket for bundle in bundles if bundle for ticket in submit_bundle(verifiers, bundle)])
        return [[verifiers.wait(ticket) for ticket in group_tickets] for group_tickets in tickets]
    finally:
        verifiers.close()


def sample_of(prompt: Prompt, stored: dict[str, Any], step: int) -> Sample:
    """Return a stored rollout as the argument of a grader, as in training (`Dialogue.sample`).

    Args:
        prompt: prompt of the rollout; see `prompt_of`.
        stored: the rollout's record.
        step: optimizer step that was trained on the rollout.
    """
    truncated = stored["finish_reason"] == "length"
    answer = stored.get("answer", stored["completion"])
    turns = tuple((source, text) for source, text in stored.get("turns", ()))
    # As in training, a sample has only the tokens of the conversation's last turn.
    conversation = stored.get("conversation", {})
    last_turn = conversation["starts"][-1] if conversation else 0
    failed = conversation.get("failed", "")
    return Sample(
        prompt,
        stored["completion"],
        answer,
        tuple(stored["ids"][last_turn:]),
        truncated,
        _completed_steps(stored, step),
        turns,
        Outcome("error", why=f"environment: {failed}") if failed else None,
    )


def _completed_steps(stored: dict[str, Any], step: int) -> int:
    """Return the number of optimizer steps that were completed when a rollout finished.

    Runs of older versions did not store this number. Without asynchronous training it equals the weights' version.
    """
    versions = stored.get("versions") or [[step - 1, 0]]
    return int(stored.get("completed_steps", versions[-1][0]))


def _with_outcomes(group: Group, task: Task, outcomes: Sequence[Outcome]) -> Group:
    rollouts = [
        {
            **rollout,
            "grade": outcome.reward if outcome.kind == "score" else None,
            "correct": outcome.kind == "score" and passes(task, outcome),
            "outcome": outcome.kind,
            "parts": dict(outcome.parts),
            "extra": {**outcome.extra, **({"why": outcome.why} if outcome.why else {})},
        }
        for rollout, outcome in zip(group["rollouts"], outcomes, strict=True)
    ]
    return {**group, "rollouts": rollouts}


def _row(source: str, pairs: Sequence[tuple[Group, list[Outcome]]], task: Task) -> dict[str, Any]:
    before = [rollout for group, _ in pairs for rollout in group["rollouts"]]
    after = [rollout for group, outcomes in pairs for rollout in _with_outcomes(group, task, outcomes)["rollouts"]]
    both = [
        (old, group_outcomes)
        for old, group_outcomes in zip(before, after, strict=True)
        if old["outcome"] == group_outcomes["outcome"] == "score"
    ]
    return {
        "source": source,
        "rollouts": len(before),
        "before": _means(before),
        "after": _means(after),
        "changed": sum(old["correct"] != group_outcomes["correct"] for old, group_outcomes in both),
        "reasons": _reasons(after),
    }


def _means(rollouts: Sequence[dict[str, Any]]) -> dict[str, float | None]:
    """Return mean reward and pass rate of the graded rollouts, and the numbers of abstentions and errors.

    The means are None if no rollout was graded.
    """
    scored = [rollout for rollout in rollouts if rollout["outcome"] == "score"]
    count = len(scored)
    return {
        "reward": sum(rollout["grade"] for rollout in scored) / count if count else None,
        "pass_rate": sum(rollout["correct"] for rollout in scored) / count if count else None,
        "abstained": sum(rollout["outcome"] == "abstain" for rollout in rollouts),
        "errors": sum(rollout["outcome"] == "error" for rollout in rollouts),
    }


def _reasons(rollouts: Sequence[dict[str, Any]]) -> list[str]:
    reasons = Counter(str(rollout["extra"].get("why", "")) for rollout in rollouts if rollout["outcome"] == "error")
    return [reason for reason, _ in reasons.most_common(REASONS)]
