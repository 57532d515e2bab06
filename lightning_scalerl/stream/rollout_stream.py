"""Ledger of groups, from their admission to the batch that trains on them.

Every async mode uses this ledger with its own rules for admission and publishing. The bound on staleness
(docs/reference/async_modes.md) is enforced here. The ledger has no clock: a driver decides when things happen
(`virtual_driver`, `live_driver`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from lightning_scalerl.axes.curriculum import weighted_sum
from lightning_scalerl.axes.results import check_bool, number, positive_count
from lightning_scalerl.choices import Choices
from lightning_scalerl.generator.base import FinishedRollout, GroupRequest
from lightning_scalerl.rollouts.grade import Charge, Outcome, Sample, needs_group
from lightning_scalerl.rollouts.prompt import Prompt
from lightning_scalerl.rollouts.rollout import Group, Rollout, TrainBatch, packed, unpack_rollouts
from lightning_scalerl.stream.credit import assemble, carries_credit, update_moments
from lightning_scalerl.stream.prompts import PoolExhaustedError, PromptSource
from lightning_scalerl.stream.random_streams import INTERRUPTION_STREAM, TRAINING_STREAM
from lightning_scalerl.task.base import RewardScale, Task, passes
from lightning_scalerl.verify.verification import ErrorWatch, Verification

# Key of a rollout: the admission number of its group, and its index in the group.
RolloutKey = tuple[int, int]


@dataclass
class _OpenGroup:
    """Admitted group that still waits for the outcome of some of its rollouts."""

    prompt: Prompt
    prompt_tokens: list[int]
    version: int  # version of the weights at admission: no token of the group was sampled by older ones
    rollouts: list[Rollout | None]  # None until the rollout is graded
    history: tuple[float, ...]  # pass rates of the prompt's groups that were complete at admission
    # Optimizer steps completed at admission. The curriculum's stage at this step applies to all rewards of the group.
    admitted_at: int


@dataclass
class RolloutStream:
    """Tracks groups from their admission to the batch that trains on them.

    Args:
        prompts: source of prompts; its order is the order of admission.
        task: the task; it provides the grader and decides which rewards are a pass.
        encode: prompt -> token ids.
        sample: (prompt, rollout, completed steps) -> the sample to grade.
        choices: the run's design choices.
        groups_per_step: groups per batch, P.
        completions: rollouts per group, on average.
        max_new_tokens: completion limit in tokens.
        seed: the run's seed.
        reward: scale from the verifier's reward to the training reward.
        verification: settings for completions that cannot be graded.
        phrase_tokens: length in tokens of the phrase that interrupts thinking; 0 without one.
        charged: called with the charges of each graded completion.
    """

    prompts: PromptSource
    task: Task
    encode: Callable[[Prompt], list[int]]
    sample: Callable[[Prompt, Rollout, int], Sample]
    choices: Choices
    groups_per_step: int
    completions: int
    max_new_tokens: int
    seed: int
    reward: RewardScale = RewardScale()  # noqa: RUF009  # frozen
    verification: Verification = Verification()  # noqa: RUF009  # frozen
    phrase_tokens: int = 0
    charged: Callable[[Sequence[Charge]], None] = lambda charges: None
    completed_steps: int = 0
    admitted: int = 0
    dropped: int = 0  # groups dropped by a filter that samples replacements; each lets one more group be admitted
    surplus: int = 0  # rollouts of the admitted groups beyond `completions` per group
    training: bool = False  # the trainer is working on a batch
    dropped_for_batch: int = 0  # dropped groups attributed to the last batch taken
    _dropped_unattributed: int = 0  # dropped groups not yet attributed to a batch
    _steps_when_taken: int = 0  # completed steps when the last batch was taken
    _open: dict[int, _OpenGroup] = field(default_factory=dict)
    # Finished rollouts that wait for their grade, with the number of completed steps when they finished.
    _ungraded: dict[RolloutKey, tuple[Rollout, int]] = field(default_factory=dict)
    _ready: list[Group] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.watch = ErrorWatch(self.verification)
        # Names of the rewards whose weights the curriculum may change.
        self.reward_sums = self.task.reward_sums()
        self._grader = self.task.grader()

    def step_completed(self) -> None:
        """Count an optimizer step as computed. The driver decides when it ends (`training` becomes False)."""
        self.completed_steps += 1

    @property
    def _finished_steps(self) -> int:
        """Number of steps that count as finished for the rules of the async mode.

        The current step counts as finished when the driver ends it: in virtual time that is later than its computation.
        """
        return self._steps_when_taken if self.training else self.completed_steps

    def may_admit(self) -> bool:
        """Return whether to admit another group now: the async mode allows it, and the pool has a prompt."""
        if not self._mode_admits():
            return False
        # With an exhausted pool, first train on the groups in flight or ready; after that let `admit` raise an error.
        return not (self.prompts.exhausted and (self._open or len(self._ready) >= self.groups_per_step))

    def _mode_admits(self) -> bool:
        """Return whether the async mode's rule admits another group; dropped groups do not count as admitted."""
        mode = self.choices.async_mode
        admits = mode.may_admit(self.admitted - self.dropped, self._finished_steps, self.groups_per_step)
        return check_bool(mode, "may_admit", admits)

    def admit(self, version: int) -> GroupRequest:
        """Admit the next prompt's group and return the request for the generator.

        Args:
            version: version of the generator's weights; the group's staleness counts from it.

        Raises:
            PoolExhaustedError: every prompt is retired.
        """
        prompt = self.prompts.next(self.completed_steps)
        tokens = self.encode(prompt)
        key = self.admitted
        history = tuple(self.prompts.history(prompt.prompt_id))
        allocation = self.choices.allocation
        count = positive_count(
            allocation, "completions", allocation.completions(self.completions, history, self.surplus)
        )
        self.surplus += count - self.completions
        self._open[key] = _OpenGroup(prompt, tokens, version, [None] * count, history, self.completed_steps)
        self.admitted += 1
        curriculum = self.choices.curriculum
        limit = positive_count(
            curriculum, "max_new_tokens", curriculum.max_new_tokens(self.max_new_tokens, self.completed_steps)
        )
        points = self.choices.length_control.interrupt_at(count, (self.seed, INTERRUPTION_STREAM, key))
        if limit < self.max_new_tokens and points:
            # The curriculum's stage has a shorter limit: scale the interruption points by the same factor. The phrase
            # and one token of an answer must still fit, or thinking would be truncated instead of interrupted.
            last = max(1, limit - self.phrase_tokens - 1)
            points = tuple(min(last, max(1, point * limit // self.max_new_tokens)) for point in points)
        return GroupRequest(
            key=key,
            prompt_tokens=tuple(tokens),
            completions=count,
            random_key=(self.seed, TRAINING_STREAM, key),
            interrupt_at=points,
            max_new_tokens=limit,
        )

    def prompt_of(self, key: int) -> Prompt:
        """Return the prompt of an open group."""
        return self._open[key].prompt

    def ended(self, finished: FinishedRollout) -> list[tuple[RolloutKey, Sample]]:
        """Record a finished rollout; return the samples to grade now. Pass their outcomes to `graded`.

        By default that is the rollout itself. A group that is graded in one call is returned as a whole, after its last
        rollout has finished; before that, nothing is returned.
        """
        rollout_key = finished.key, finished.index
        finished.rollout.completed_steps = self.completed_steps
        self._ungraded[rollout_key] = finished.rollout, self.completed_steps
        return self._bundle(rollout_key)

    def _sample(self, rollout_key: RolloutKey) -> Sample:
        return self.sample(self._open[rollout_key[0]].prompt, *self._ungraded[rollout_key])

    def by_group(self, key: int) -> bool:
        """Return whether an open group is graded in one call, once all of its rollouts have finished."""
        return needs_group(self._grader, self._open[key].prompt)

    def _bundle(self, rollout_key: RolloutKey) -> list[tuple[RolloutKey, Sample]]:
        """Return the samples that can be graded now that this rollout has finished; see `ended`."""
        key = rollout_key[0]
        if not self.by_group(key):
            return [(rollout_key, self._sample(rollout_key))]
        finished = sorted(other for other in self._ungraded if other[0] == key)
        missing = sum(rollout is None for rollout in self._open[key].rollouts) - len(finished)
        return [] if missing else [(other, self._sample(other)) for other in finished]

    def bundles(self) -> list[list[tuple[RolloutKey, Sample]]]:
        """Return the samples of all finished rollouts without a grade, in bundles as `ended` returns them."""
        # One entry per bundle: a group that is graded in one call appears once.
        by_bundle = {
            (rollout_key[0], 0) if self.by_group(rollout_key[0]) else rollout_key: rollout_key
            for rollout_key in self._ungraded
        }
        return [bundle for rollout_key in by_bundle.values() if (bundle := self._bundle(rollout_key))]

    def graded(self, rollout_key: RolloutKey, outcome: Outcome) -> None:
        """Record the outcome of a finished rollout; the last outcome of a group completes the group.

        Raises:
            RewardError: too many rollouts cannot be graded.
        """
        key, index = rollout_key
        group, (rollout, _) = self._open[key], self._ungraded.pop(rollout_key)
        self.charged(outcome.charges)
        self.watch.observe(group.prompt, outcome)
        scored = outcome.kind == "score" or (outcome.kind == "error" and self.verification.on_error == "zero")
        rollout.outcome = "score" if scored else outcome.kind
        rollout.parts, rollout.extra = dict(outcome.parts), dict(outcome.extra)
        if outcome.why:
            rollout.extra["why"] = outcome.why
        if scored:
            rollout.grade = outcome.reward
            rollout.correct = outcome.kind == "score" and passes(self.task, outcome)
            # The order matters: the curriculum weights the reward's terms, `reward` rescales the sum, the length
            # penalty is added, and axes defined by the user come last.
            factors = self.choices.curriculum.reward_factors(self.reward_sums, group.admitted_at)
            weighted = weighted_sum(outcome.reward, outcome.terms, factors)
            rollout.terms, rollout.staged = dict(outcome.terms), weighted != outcome.reward
            scaled = self.reward.scale(weighted)
            if (conversation := rollout.conversation) is not None:
                rollout.conversation = replace(conversation, scale=conversation.scale * self.reward.slope)
            control = self.choices.length_control
            rollout.reward = number(control, "reward", control.reward(scaled, rollout.correct, rollout.length))
            for axis in self.choices.user_axes.values():
                rollout.reward = number(axis, "adjust_reward", axis.adjust_reward(rollout.reward, rollout))
        group.rollouts[index] = rollout
        rollouts = [rollout for rollout in group.rollouts if rollout is not None]
        if len(rollouts) == len(group.rollouts):
            del self._open[key]
            self._complete(key, group, rollouts)

    def _complete(self, key: int, group: _OpenGroup, rollouts: list[Rollout]) -> None:
        """Record a group's pass rate; then queue the group for training, or drop it if the filter refills."""
        scored = [rollout for rollout in rollouts if rollout.outcome == "score"]
        unscored = [rollout for rollout in rollouts if rollout.outcome != "score"]
        complete = Group(key, group.prompt, group.prompt_tokens, scored, group.history, unscored)
        if complete.comparable:
            self.prompts.resolved(group.prompt.prompt_id, complete.pass_rate)
        if self.choices.filter.refills and not carries_credit(complete, self.choices):
            self._drop()
        else:
            self._ready.append(complete)

    def _drop(self) -> None:
        """Count a dropped group; raise PoolExhaustedError if too many groups were dropped for one batch."""
        self.dropped += 1
        self._dropped_unattributed += 1
        # If the async mode drains, which means that no rollout is in flight when it trains, several batches are sampled
        # first.
        mode = self.choices.async_mode
        batches = mode.max_staleness + 1 if mode.drains else 1
        most_dropped = self.choices.filter.most_dropped * self.groups_per_step * batches
        purpose = "one batch" if batches == 1 else f"{batches} batches"
        if self._dropped_unattributed > most_dropped:
            raise PoolExhaustedError(
                f"filter.most_dropped: {self._dropped_unattributed} groups were dropped for {purpose} of "
                f"{self.groups_per_step}, more than {self.choices.filter.most_dropped} for each: all rollouts of a "
                "prompt get the same reward; use a harder or an easier pool, more completions per prompt, or "
                "filter=zero_variance"
            )

    @property
    def waiting_histories(self) -> list[Sequence[float]]:
        """For each group that is open or ready to train, the pass rates of its prompt when the prompt was drawn."""
        # Copy both at once, since the live driver's thread may change them meanwhile.
        waiting: list[_OpenGroup | Group] = [*self._open.values(), *self._ready]
        return [group.history for group in waiting]

    def batch_due(self) -> bool:
        """Return whether P groups are ready, and training on them now makes no other group too stale.

        If the async mode `drains`, training waits until no rollout is in flight. Otherwise a group sampled by version v
        must be trained on by step v + k (its deadline), with k = `max_staleness`. The groups that are not in this batch
        must fit into later batches before their deadlines. If they do not fit, the trainer waits until more of the
        oldest groups are ready. So few groups are admitted that a batch is always due once all are ready.
        """
        if len(self._ready) < self.groups_per_step:
            return False
        mode = self.choices.async_mode
        if mode.drains:
            more = self._mode_admits() and not self.prompts.exhausted
            return not self._open and not more
        remaining = sorted(group.oldest_version for group in self._ready)[self.groups_per_step :]
        remaining = sorted(remaining + [group.version for group in self._open.values()])
        # Number the groups that are not in the next batch from 0, the oldest first. Group n, sampled by version v,
        # trains at step s + 1 + n // P at the earliest (s: completed steps, P: groups per step). It must train by step
        # v + k (k: max_staleness), so n < P (v + k - s).
        spare = mode.max_staleness - self.completed_steps
        return all(number < self.groups_per_step * (version + spare) for number, version in enumerate(remaining))

    def take(self) -> TrainBatch:
        """Return the batch that is due, made of the oldest groups, and mark the trainer as busy with it.

        Raises:
            RewardError: too many rollouts of the batch could not be graded.
        """
        self._ready.sort(key=lambda group: (group.oldest_version, group.admission))
        # If the async mode drains, several batches are sampled at once: attribute the dropped groups to them evenly.
        batches = max(1, len(self._ready) // self.groups_per_step) if self.choices.async_mode.drains else 1
        groups, self._ready = self._ready[: self.groups_per_step], self._ready[self.groups_per_step :]
        self.training, self._steps_when_taken = True, self.completed_steps
        self.dropped_for_batch = self._dropped_unattributed // batches
        self._dropped_unattributed -= self.dropped_for_batch
        scored = sum(len(group.rollouts) for group in groups)
        errors = sum(rollout.outcome == "error" for group in groups for rollout in group.ungraded)
        self.watch.check_step(scored, errors, self.completed_steps)
        update_moments(groups, self.choices)
        return assemble(groups, self.choices, self.max_new_tokens)

    # --- state -------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the counters, the open groups and the groups ready to train; rollouts are packed into tensors."""
        return {
            "completed_steps": self.completed_steps,
            "admitted": self.admitted,
            "dropped": [self.dropped, self.dropped_for_batch, self._dropped_unattributed],
            "surplus": self.surplus,
            "training": self.training,
            "open": {
                key: {
                    "prompt_id": group.prompt.prompt_id,
                    "version": group.version,
                    "admitted_at": group.admitted_at,
                    "history": list(group.history),
                    "finished": [rollout is not None for rollout in group.rollouts],
                    "ended": [
                        [index, at] for (rollout_key, index), (_, at) in self._ungraded.items() if rollout_key == key
                    ],
                }
                for key, group in self._open.items()
            },
            "ready": [
                {
                    "admission": group.admission,
                    "history": list(group.history),
                    "prompt_id": group.prompt.prompt_id,
                    "completions": len(group.rollouts),
                    "ungraded": len(group.ungraded),
                }
                for group in self._ready
            ],
            "rollouts": packed(
                [*self._graded_rollouts(), *(rollout for group in self._ready for rollout in group.sampled)]
            ),
            "ungraded": packed([self._ungraded[rollout_key][0] for rollout_key in self._ungraded_keys()]),
            "watch": self.watch.state_dict(),
        }

    def _graded_rollouts(self) -> Sequence[Rollout]:
        """Return the graded rollouts of open groups, in the order of the groups."""
        return [rollout for group in self._open.values() for rollout in group.rollouts if rollout is not None]

    def _ungraded_keys(self) -> list[RolloutKey]:
        """Return the keys of finished rollouts without a grade, in the order in which they are saved."""
        return [rollout_key for key in self._open for rollout_key in self._ungraded if rollout_key[0] == key]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the stream exactly as it was when `state_dict` was called."""
        self.completed_steps = state["completed_steps"]
        self.admitted = state["admitted"]
        self.dropped, self.dropped_for_batch, self._dropped_unattributed = state.get("dropped", [0, 0, 0])
        self.surplus = state.get("surplus", 0)
        self.training = state["training"]
        self._steps_when_taken = self.completed_steps - 1  # states are saved between steps
        rollouts = iter(unpack_rollouts(state["rollouts"]))
        ended = iter(unpack_rollouts(state["ungraded"]) if "ungraded" in state else [])
        if "watch" in state:
            self.watch.load_state_dict(state["watch"])
        self._open, self._ungraded = {}, {}
        for key, entry in state["open"].items():
            prompt = self.prompts.by_id(entry["prompt_id"])
            graded = [next(rollouts) if finished else None for finished in entry["finished"]]
            history = tuple(entry["history"])
            # Older checkpoints have no `admitted_at`: the version of the weights is close to it.
            at = entry.get("admitted_at", entry["version"])
            self._open[key] = _OpenGroup(prompt, self.encode(prompt), entry["version"], graded, history, at)
            self._ungraded |= {(key, index): (next(ended), at) for index, at in entry.get("ended", ())}
        self._ready = []
        for entry in state["ready"]:
            prompt = self.prompts.by_id(entry["prompt_id"])
            scored = [next(rollouts) for _ in range(entry["completions"])]
            unscored = [next(rollouts) for _ in range(entry.get("ungraded", 0))]
            tokens, history = self.encode(prompt), tuple(entry["history"])
            self._ready.append(Group(entry["admission"], prompt, tokens, scored, history, unscored))
