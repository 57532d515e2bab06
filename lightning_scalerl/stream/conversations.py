"""Conversations of rollouts with environments, between the generator and the environments' processes.

A rollout that has ended a turn waits in the generator (`GroupRequest.waits`). The turn is sent to the environment. Then
the environment's observation is inserted as tokens, or the rollout ends. All limits on turns are applied here, so that
they are the same for every generator. The order of calls for a waiting rollout:

    start     send the turn to the environment
    replies   wait for the environment's answer: insert tokens, end the rollout, or sample it again
    conclude  store the record of the conversation in a finished rollout
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from numbers import Integral, Real
from typing import Any, Literal

from lightning_scalerl.checks import ConfigurationError
from lightning_scalerl.environment.calls import CONVENTIONS, convention_of, description
from lightning_scalerl.environment.pool import Answer, EnvironmentPool
from lightning_scalerl.environment.protocol import Call, Declared, Failure, History, Observation, Turn
from lightning_scalerl.environment.settings import EnvironmentSettings
from lightning_scalerl.generator.base import FinishedRollout, GroupRequest, TurnGenerator, WaitingRollout
from lightning_scalerl.model.chat import Rendering
from lightning_scalerl.model.turns import Turns
from lightning_scalerl.rollouts.grade import Outcome, Sample
from lightning_scalerl.rollouts.prompt import OPENING_COLUMNS, Prompt
from lightning_scalerl.rollouts.rollout import Conversation, Rollout, Source

RolloutKey = tuple[int, int]


@dataclass(frozen=True)
class Limits:
    """Limits of a conversation: `context.max_turns` and `context.max_turn_tokens`."""

    turns: int
    turn_tokens: int | None


class Dialogue:
    """Translates between a model's tokens and an environment's turns; the same for all conversations of a run.

    Args:
        settings: the run's environments.
        rendering: tokenizer and chat template.
        pool: processes that open the environments for their properties and first observations.
        sets: prompts by name of the set. The environment of each prompt is reset once, to get its first observation.

    Attributes:
        prompts: the sets, in which each prompt contains its environment's first observation.

    Raises:
        ConfigurationError: an environment or the chat template cannot be used, or an environment fails at a prompt.
    """

    def __init__(
        self,
        settings: EnvironmentSettings,
        rendering: Rendering,
        pool: EnvironmentPool,
        sets: Mapping[str, Sequence[Prompt]],
    ) -> None:
        self.settings, self.rendering = settings, rendering
        self.declared = pool.declare()
        for name, declared in self.declared.items():
            if settings.reward == "environment" and not declared.owns_reward:
                raise ConfigurationError(
                    f"environment.reward: environment, but {name or 'the environment'} has no get_reward(); give it "
                    "one, or set environment.reward=task"
                )
        name = convention_of(rendering.template) if settings.convention == "auto" else settings.convention
        self.convention = CONVENTIONS[name]
        self._turns: dict[str, Turns] = {}
        rendering.tools_of = self._tools_of
        try:
            for name, declared in self.declared.items():
                self._turns[name] = self._turns_of(declared)
            self.prompts: dict[str, Sequence[Prompt]] = {
                name: self._with_first_observations(prompts, pool) for name, prompts in sets.items()
            }
        except BaseException:
            self.close()
            raise

    def _turns_of(self, declared: Declared) -> Turns:
        """Return the `Turns` of an environment; raise an error if the chat template cannot show its tools and turns."""
        example = ""
        if declared.tools:
            tool = declared.tools[0]
            arguments = dict.fromkeys(tool["function"]["parameters"]["properties"], "1")
            example = self.convention.write(Call(tool["function"]["name"], arguments), tool)
        role = self.convention.role if declared.tools else "user"
        return Turns(self.rendering, self._template_tools(declared), role, example)

    def _template_tools(self, declared: Declared) -> Sequence[Mapping[str, Any]]:
        """Return the tools that the chat template shows; with the convention "plain" the prompt describes them."""
        return () if self.convention.name == "plain" else declared.tools

    def _tools_of(self, prompt: Prompt) -> Sequence[Mapping[str, Any]]:
        return self._template_tools(self.declared_of(prompt))

    def close(self) -> None:
        """End the processes in which the chat template runs."""
        for turns in self._turns.values():
            turns.close()

    def _with_first_observations(self, prompts: Sequence[Prompt], pool: EnvironmentPool) -> list[Prompt]:
        """Reset each prompt's environment once, and return each prompt with the first observation."""
        openings = [self._opening(prompt) for prompt in prompts]
        numbers = [pool.open(row, seed) for row, seed in openings]
        prompts_with_start = []
        for prompt, (row, seed), number in zip(prompts, openings, numbers, strict=True):
            start = pool.wait(number)
            pool.close(number)
            if isinstance(start, Failure):
                columns = ", ".join(row) or "no columns"
                raise ConfigurationError(
                    f"environment: it fails at prompt {prompt.prompt_id!r} before the first step ({start.kind}: "
                    f"{start.why}); its row has {columns} (all columns of the data with task.keep_columns=true)"
                )
            prompts_with_start.append(replace(self._with_start(prompt, start), opening=(row, seed, start)))
        return prompts_with_start

    def _with_start(self, prompt: Prompt, start: Observation) -> Prompt:
        """Return the prompt with the environment's first observation and, if enabled, a description of its tools."""
        tools = self.declared_of(prompt).tools
        described = self.settings.describe_tools and tools and self.convention.name == "plain"
        added = [text for text in (description(tools) if described else "", *start.texts) if text]
        text = "\n\n".join([*([prompt.text] if prompt.text else []), *added])
        messages = list(prompt.messages)
        if not messages and not start.messages:
            return replace(prompt, text=text)
        messages = messages or ([{"role": "user", "content": text}] if text else [])
        if prompt.messages and added:
            last = messages[-1]
            messages[-1] = {**last, "content": "\n\n".join([*filter(None, [last["content"]]), *added])}
        messages += start.messages
        return replace(prompt, text=str(messages[-1]["content"]), messages=tuple(messages))

    def name_of(self, prompt: Prompt) -> str:
        """Return the name of a prompt's environment; empty if there is only one."""
        return str(prompt.columns.get("environment", "")) if isinstance(self.settings.factory, Mapping) else ""

    def declared_of(self, prompt: Prompt) -> Declared:
        """Return the properties of a prompt's environment."""
        return self.declared[self.name_of(prompt)]

    def _opening(self, prompt: Prompt) -> tuple[dict[str, Any], int]:
        """Return the row and the seed for resetting a prompt's environment; neither depends on the run's seed.

        Raises:
            ConfigurationError: the environment is in text form, and the row's column `seed` is not a whole number.
        """
        row = dict(prompt.columns)
        if set(row) <= set(OPENING_COLUMNS):  # the other columns were not kept
            selects = isinstance(self.settings.factory, Mapping) and "environment" in row
            selected = {"environment": row["environment"]} if selects else {}
            row = {"prompt": prompt.text, "answer": prompt.answer, **selected}
        value = prompt.columns.get("seed")
        seed = _whole_number(value)
        if seed is not None:
            return row, seed
        declared = self.declared.get(self.name_of(prompt))
        missing = value is None or (isinstance(value, float) and math.isnan(value)) or value == ""
        # Only the text form gets the seed; another form may use the name for something else.
        if declared is not None and declared.form == "text" and not missing:
            raise ConfigurationError(
                f"environment: prompt {prompt.prompt_id!r} has {value!r} in its column seed, which reset(seed) gets; "
                "give a whole number, or leave it empty for a seed made from the prompt's id"
            )
        return row, int.from_bytes(hashlib.sha256(prompt.prompt_id.encode()).digest()[:4])

    def turn(self, prompt: Prompt, sampled: Sequence[int]) -> Turn:
        """Return the model's turn: its text after the thinking, and the tool calls in it."""
        text = self.rendering.answer(prompt, sampled)
        declared = self.declared_of(prompt)
        return Turn(text, tuple(self.convention.parse(text, declared.tools)) if declared.form == "tools" else ())

    def sample(self, prompt: Prompt, rollout: Rollout, step: int) -> Sample:
        """Return a rollout as the argument of a grader: its last turn, and in addition the whole conversation.

        `Sample.settled` is set, so that nothing is graded, if the environment failed or gives the reward itself
        (`environment.reward`).
        """
        conversation = rollout.conversation
        if conversation is None:
            return self.rendering.sample(prompt, rollout, step)
        last = replace(rollout, tokens=rollout.tokens[conversation.starts[-1] :])
        sample = self.rendering.sample(prompt, last, step)
        decoders = {source: self.rendering.read for source in Source} | {Source.SAMPLED: self.rendering.decode}
        texts = tuple(
            (source.name.lower(), decoders[source](rollout.tokens[start:end]))
            for source, start, end in rollout.source_spans
        )
        settled = None
        if conversation.failed:
            settled = Outcome("error", why=f"environment: {conversation.failed}")
        elif self.settings.reward == "environment":
            if conversation.rewarded:
                settled = Outcome("score", math.fsum(conversation.rewards), parts=conversation.info)
            else:
                settled = Outcome("abstain", why="the environment gave no reward")
        return replace(sample, turns=texts, settled=settled)

    def insertions(
        self,
        prompts: Sequence[Prompt],
        replies: Sequence[Sequence[str]],
        turns_of: Sequence[Turn],
        sampled: Sequence[Sequence[int]],
    ) -> list[list[int]]:
        """Return the tokens to insert after each rollout's sampled turn.

        Args:
            prompts: prompt of each rollout.
            replies: texts of the observations.
            turns_of: the turns that the observations answer.
            sampled: tokens of these turns.
        """
        tokens: list[list[int]] = [[] for _ in prompts]
        for name, turns in self._turns.items():
            rows = [row for row, prompt in enumerate(prompts) if self.name_of(prompt) == name]
            # Make one call for all conversations, because each call starts a process.
            if rows:
                called = [[call.name for call in turns_of[row].calls] for row in rows]
                written = turns.following_tokens([replies[row] for row in rows], [sampled[row] for row in rows], called)
                for row, ids in zip(rows, written, strict=True):
                    tokens[row] = ids
        return tokens


@dataclass(frozen=True)
class Reply:
    """Treatment of a waiting rollout after its environment has answered.

    `kind` is "insert" (append `tokens` and continue), "end" (end the rollout, which counts as truncated if `truncated`
    is True) or "restart" (sample the rollout again from its prompt).
    """

    kind: Literal["insert", "end", "restart"]
    tokens: tuple[int, ...] = ()
    truncated: bool = False

    def apply(self, generator: TurnGenerator, rollout_key: RolloutKey) -> None:
        """Apply the reply to the rollout in the generator."""
        if self.kind == "insert":
            generator.insert(*rollout_key, self.tokens)
        elif self.kind == "end":
            generator.end(*rollout_key, truncated=self.truncated)
        else:
            generator.restart(*rollout_key)


@dataclass
class _OpenConversation:
    """Conversation of one rollout, from the end of its first turn until the rollout has finished."""

    prompt: Prompt
    starts: list[int] = field(default_factory=lambda: [0])  # index of each turn's first token in the rollout
    exchanges: list[tuple[Turn, Observation]] = field(default_factory=list)
    ending: Observation | None = None  # the answer to `finish`
    failure: Failure | None = None
    # The fields below belong to the current turn. They are not saved: after a resume the turn is sent again.
    rollout: Rollout | None = None  # copy of the waiting rollout
    turn: Turn | None = None  # turn to be answered; None once it is answered, or if a limit has cut it off
    cut: bool = False  # a limit on turns or tokens ends the conversation
    over: bool = False  # no turn follows the current one
    request: str = ""  # pending request: "open", "step" or "finish"; empty for none
    number: int | None = None  # number of the conversation in the pool; None if it has no process

    @property
    def sampled(self) -> list[int]:
        """Tokens of the current turn."""
        assert self.rollout is not None
        return self.rollout.tokens[self.starts[-1] :]


class Conversations:
    """Conversations of the rollouts in flight.

    Args:
        dialogue: translates turns and observations.
        pool: processes of the environments; closed by `close`.
        limits: limits of a conversation.
        prompt_of: key of a group -> its prompt.
        idle: returns a context manager in which time counts as idle; used while waiting for environments.
    """

    def __init__(
        self,
        dialogue: Dialogue,
        pool: EnvironmentPool,
        limits: Limits,
        prompt_of: Callable[[int], Prompt],
        idle: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._dialogue, self._pool, self._limits, self._idle = dialogue, pool, limits, idle
        self._prompt_of, self._settings = prompt_of, dialogue.settings
        self._conversations: dict[RolloutKey, _OpenConversation] = {}
        # Rollouts that wait for an answer, in the order of `start`, each with the number of tokens that still fit.
        self._pending: dict[RolloutKey, int] = {}
        self._backlog: list[RolloutKey] = []  # pending, but without a process yet

    def request(self, request: GroupRequest) -> GroupRequest:
        """Return a group's request, changed so that its rollouts wait after each turn and their turns are limited."""
        return replace(request, waits=True, turn_tokens=self._limits.turn_tokens or 0)

    def start(self, waiting: WaitingRollout) -> float:
        """Send a rollout's turn to its environment; do nothing if that turn was sent before.

        Returns:
            The seconds that the environment declares for its answer, for virtual time; 0 if nothing was sent.
        """
        rollout_key = waiting.key, waiting.index
        earlier = self._conversations.get(rollout_key)
        if rollout_key in self._pending and earlier is not None:
            if earlier.rollout is not None and earlier.rollout.tokens == waiting.rollout.tokens:
                return 0.0
            self.leave(rollout_key)
        conversation = self._conversations.setdefault(rollout_key, _OpenConversation(self._prompt_of(waiting.key)))
        rollout = waiting.rollout
        if waiting.answers < len(conversation.starts) - 1:
            # The rollout's engine was lost, and the rollout was sampled again from its prompt.
            self.leave(rollout_key)
            conversation = self._conversations[rollout_key] = _OpenConversation(conversation.prompt)
        conversation.rollout = rollout
        conversation.cut = rollout.truncated and (waiting.room == 0 or self._settings.at_max_turn_tokens == "truncated")
        conversation.turn = None if conversation.cut else self._dialogue.turn(conversation.prompt, conversation.sampled)
        self._pending[rollout_key] = waiting.room
        declared = self._dialogue.declared_of(conversation.prompt)
        seconds = 0.0
        if (
            conversation.turn is not None
            and declared.form == "tools"
            and not conversation.turn.calls
            and not declared.owns_reward
        ):
            # Without a tool call and without a reward from the environment, there is nothing to send.
            conversation.exchanges.append((conversation.turn, Observation(terminated=True)))
            conversation.turn, conversation.over = None, True
        elif conversation.turn is not None:
            seconds = declared.seconds * max(1, len(conversation.turn.calls))
            self._ask(rollout_key)
        elif self._needs_finish(conversation):
            self._ask(rollout_key)
        else:
            conversation.over = True
        return seconds

    def replies(self, rollout_keys: Iterable[RolloutKey]) -> dict[RolloutKey, Reply]:
        """Wait for the environments of these rollouts, and return the replies."""
        rollout_keys = list(rollout_keys)
        with self._idle():
            for rollout_key in rollout_keys:
                self._wait_for_answers(rollout_key)
            replies = self._take_replies(rollout_keys)
            # Wait for the environments of rollouts without room for the observation: they have now been asked for a
            # last reward.
            for rollout_key in rollout_keys:
                if rollout_key not in replies:
                    self._wait_for_answers(rollout_key)
        return {
            **replies,
            **self._take_replies([rollout_key for rollout_key in rollout_keys if rollout_key not in replies]),
        }

    def ready(self) -> dict[RolloutKey, Reply]:
        """Return the replies for all rollouts whose environment has answered, without waiting."""
        keys_by_number = {
            conversation.number: rollout_key
            for rollout_key, conversation in self._conversations.items()
            if conversation.request
        }
        for number, answer in self._pool.done():
            if number in keys_by_number:
                self._handle_answer(keys_by_number[number], answer)
        self._ask_backlog()
        waiting_keys = {
            rollout_key for rollout_key, conversation in self._conversations.items() if conversation.request
        } | set(self._backlog)
        return self._take_replies([rollout_key for rollout_key in self._pending if rollout_key not in waiting_keys])

    def answer(self, generator: TurnGenerator, waiting: Sequence[WaitingRollout]) -> None:
        """Send the turns of waiting rollouts, wait for the answers, and continue the rollouts; used by evaluations."""
        for rollout in waiting:
            self.start(rollout)
        for rollout_key, reply in self.replies((rollout.key, rollout.index) for rollout in waiting).items():
            reply.apply(generator, rollout_key)

    def store_record(self, finished: FinishedRollout) -> None:
        """Store the record of a finished rollout's conversation in the rollout, and forget the conversation here."""
        rollout_key = finished.key, finished.index
        conversation = self._conversations.pop(rollout_key)
        finished.rollout.conversation = self._record(conversation, finished.rollout)

    def leave(self, rollout_key: RolloutKey) -> None:
        """Forget a conversation that does not continue."""
        conversation = self._conversations.pop(rollout_key, None)
        self._pending.pop(rollout_key, None)
        if rollout_key in self._backlog:
            self._backlog.remove(rollout_key)
        if conversation is not None and conversation.number is not None:
            self._pool.close(conversation.number)

    def clear(self) -> None:
        """Forget all conversations."""
        for rollout_key in list(self._conversations):
            self.leave(rollout_key)

    def close(self) -> None:
        """End all processes."""
        self._pool.shutdown()

    # --- requests to the pool ------------------------------------------------------------------------------

    def _needs_finish(self, conversation: _OpenConversation) -> bool:
        """Return whether to ask the environment for a reward when a limit ends the conversation."""
        declared = self._dialogue.declared_of(conversation.prompt)
        return declared.form == "tools" and declared.owns_reward

    def _ask(self, rollout_key: RolloutKey) -> None:
        """Send the next request of a conversation; without a free process, put the conversation into the backlog."""
        conversation = self._conversations[rollout_key]
        if conversation.number is None and not self._free_process():
            self._backlog.append(rollout_key)
            return
        if conversation.number is None:
            row, seed, start = conversation.prompt.opening
            conversation.number, conversation.request = (
                self._pool.open(row, seed, History(start, tuple(conversation.exchanges))),
                "open",
            )
        elif conversation.turn is not None:
            self._pool.act(conversation.number, conversation.turn)
            conversation.request = "step"
        else:
            self._pool.finish(conversation.number)
            conversation.request = "finish"

    def _free_process(self) -> bool:
        """Return whether a process is free for another conversation.

        If none is free, take the process of a replayable conversation that has no pending request.
        """
        keys_with_process = [
            rollout_key for rollout_key, conversation in self._conversations.items() if conversation.number is not None
        ]
        if len(keys_with_process) < self._settings.processes:
            return True
        for rollout_key in keys_with_process:
            conversation = self._conversations[rollout_key]
            # The conversation is replayed in another process when its next turn ends.
            if not conversation.request and self._dialogue.declared_of(conversation.prompt).replayable:
                assert conversation.number is not None
                self._pool.close(conversation.number)
                conversation.number = None
                return True
        return False

    def _ask_backlog(self) -> None:
        for _ in range(len(self._backlog)):
            before = len(self._backlog)
            self._ask(self._backlog.pop(0))
            if len(self._backlog) == before:
                return

    def _wait_for_answers(self, rollout_key: RolloutKey) -> None:
        """Wait until the environment has answered all requests of the current turn."""
        conversation = self._conversations[rollout_key]
        while True:
            if rollout_key in self._backlog:
                if self._free_process():
                    self._backlog.remove(rollout_key)
                    self._ask(rollout_key)
                    continue
                # Handle the answer to another conversation first, so that its process becomes free.
                busy = next(
                    (other for other, other_conversation in self._conversations.items() if other_conversation.request),
                    None,
                )
                if busy is None:
                    raise RuntimeError(
                        f"environment.processes: all {self._settings.processes} are held by conversations that cannot "
                        "be replayed; give as many processes as rollouts are in flight"
                    )
                number = self._conversations[busy].number
                assert number is not None
                self._handle_answer(busy, self._pool.wait(number))
            elif conversation.request:
                assert conversation.number is not None
                self._handle_answer(rollout_key, self._pool.wait(conversation.number))
            else:
                return

    def _handle_answer(self, rollout_key: RolloutKey, answer: Answer) -> None:
        """Record an answer of the pool; send the next request if the turn needs another one."""
        conversation = self._conversations[rollout_key]
        request, conversation.request = conversation.request, ""
        if isinstance(answer, Failure):
            conversation.number, conversation.failure, conversation.over = None, answer, True
        elif request == "open":
            self._ask(rollout_key)
        elif request == "step":
            assert conversation.turn is not None
            conversation.exchanges.append((conversation.turn, answer))
            conversation.turn = None
            conversation.over = answer.terminated or answer.truncated
            if not conversation.over and len(conversation.exchanges) >= self._limits.turns:
                self._end_by_limit(rollout_key)
        else:
            conversation.ending, conversation.over = answer, True

    def _end_by_limit(self, rollout_key: RolloutKey) -> None:
        """End a conversation because of a limit, after asking the environment for a last reward if it gives rewards."""
        conversation = self._conversations[rollout_key]
        conversation.cut = True
        if self._needs_finish(conversation):
            self._ask(rollout_key)
        else:
            conversation.over = True

    # --- replies ---------------------------------------------------------------------------------------------

    def _take_replies(self, rollout_keys: Sequence[RolloutKey]) -> dict[RolloutKey, Reply]:
        """Return replies for conversations without a pending request; end those without room for their observation."""
        replies: dict[RolloutKey, Reply] = {}
        continuing = []
        for rollout_key in rollout_keys:
            conversation = self._conversations[rollout_key]
            if not conversation.over:
                continuing.append(rollout_key)
                continue
            replayable = self._dialogue.declared_of(conversation.prompt).replayable
            if conversation.failure is not None and conversation.failure.kind == "replay" and not replayable:
                replies[rollout_key] = Reply("restart")
                self.leave(rollout_key)
                continue
            replies[rollout_key] = Reply("end", truncated=self._truncated(conversation))
        if continuing:
            waiting = [self._conversations[rollout_key] for rollout_key in continuing]
            inserted = self._dialogue.insertions(
                [conversation.prompt for conversation in waiting],
                [self._observation_texts(conversation) for conversation in waiting],
                [conversation.exchanges[-1][0] for conversation in waiting],
                [conversation.sampled for conversation in waiting],
            )
            for rollout_key, tokens in zip(continuing, inserted, strict=True):
                conversation = self._conversations[rollout_key]
                assert conversation.rollout is not None
                if len(tokens) >= self._pending[rollout_key]:
                    self._end_by_limit(rollout_key)
                    if conversation.over:
                        replies[rollout_key] = Reply("end", truncated=True)
                    continue
                conversation.starts.append(len(conversation.rollout.tokens) + len(tokens))
                replies[rollout_key] = Reply("insert", tuple(tokens))
        for rollout_key, reply in replies.items():
            self._pending.pop(rollout_key, None)
            remaining = self._conversations.get(rollout_key)
            if reply.kind == "end" and remaining is not None and remaining.number is not None:
                self._pool.close(remaining.number)
                remaining.number = None
        return replies

    def _observation_texts(self, conversation: _OpenConversation) -> tuple[str, ...]:
        """Return the texts of the last observation. Before the last turn, the setting `last_turn` is appended."""
        texts = conversation.exchanges[-1][1].texts
        last = len(conversation.exchanges) == self._limits.turns - 1
        if last and self._settings.last_turn:
            return (*texts[:-1], "\n".join([*texts[-1:], self._settings.last_turn]))
        return texts

    def _truncated(self, conversation: _OpenConversation) -> bool:
        if (
            conversation.exchanges
            and conversation.exchanges[-1][1].truncated
            and conversation.turn is None
            and not conversation.cut
        ):
            return True
        assert conversation.rollout is not None
        by_turns = (
            conversation.cut
            and len(conversation.exchanges) >= self._limits.turns
            and not conversation.rollout.truncated
        )
        return conversation.cut and not (by_turns and self._settings.at_max_turns == "answer")

    def _record(self, conversation: _OpenConversation, rollout: Rollout) -> Conversation:
        observations = [observation for _, observation in conversation.exchanges]
        rewards = [observation.reward for observation in observations]
        # A turn that was cut off has no observation. The reward of `finish` is added to the last turn.
        rewards += [None] * (len(conversation.starts) - len(rewards))
        ending = [] if conversation.ending is None else [conversation.ending]
        final = conversation.ending.reward if conversation.ending is not None else None
        by_turn = [reward or 0.0 for reward in rewards]
        by_turn[-1] += final or 0.0
        # In text form the reward is a sum over steps. It is 0 if a limit ends the conversation before a step gives a
        # reward. Without a reward, such rollouts would be missing in pass rates. If the environment itself ends the
        # conversation and gives no reward, there is none.
        ended_by_environment = bool(observations) and (observations[-1].terminated or observations[-1].truncated)
        cut_off = rollout.truncated and conversation.failure is None and not ended_by_environment
        is_text = self._dialogue.declared_of(conversation.prompt).form == "text"
        last_info = (observations + ending)[-1].info if observations or ending else {}
        return Conversation(
            starts=tuple(conversation.starts),
            rewards=tuple(by_turn),
            rewarded=(is_text and cut_off) or any(reward is not None for reward in (*rewards, final)),
            scale=1.0 if self._settings.reward == "environment" else 0.0,
            calls=sum(len(turn.calls) for turn, _ in conversation.exchanges),
            malformed=sum(observation.malformed for observation in observations),
            raised=sum(observation.raised for observation in observations),
            cut=sum(observation.cut for observation in observations),
            failed="" if conversation.failure is None else f"{conversation.failure.kind}: {conversation.failure.why}",
            environment=self._dialogue.name_of(conversation.prompt),
            info={name: value for name, value in last_info.items() if isinstance(value, float)},
        )

    # --- state -------------------------------------------------------------------------------------------

    def state_dict(self) -> list[dict[str, Any]]:
        """Return all conversations. Pending turns are left out, because they are sent again after a resume."""
        state = []
        for rollout_key, conversation in self._conversations.items():
            is_pending = rollout_key in self._pending
            exchanges = conversation.exchanges[: len(conversation.starts) - 1] if is_pending else conversation.exchanges
            entry = {
                "place": list(rollout_key),
                "starts": list(conversation.starts),
                "exchanges": [(asdict(turn), asdict(observation)) for turn, observation in exchanges],
                "ending": None if is_pending or conversation.ending is None else asdict(conversation.ending),
                "failure": None if is_pending or conversation.failure is None else asdict(conversation.failure),
            }
            state.append(entry)
        return state

    def load_state_dict(self, state: Sequence[dict[str, Any]]) -> None:
        """Restore the conversations. An environment is replayed when its rollout waits again."""
        self.clear()
        for entry in state:
            key, index = entry["place"]
            conversation = _OpenConversation(self._prompt_of(key), list(entry["starts"]))
            conversation.exchanges = [
                (_turn(turn), _observation(observation)) for turn, observation in entry["exchanges"]
            ]
            conversation.ending = None if entry["ending"] is None else _observation(entry["ending"])
            conversation.failure = None if entry["failure"] is None else Failure(**entry["failure"])
            self._conversations[key, index] = conversation


def _whole_number(value: Any) -> int | None:
    """Return a whole number in any form that data files have (7, 7.0, "7" or "7.0"), else None."""
    if isinstance(value, str):
        written = re.fullmatch(r"\s*([+-]?[0-9]{1,100})(?:\.0*)?\s*", value)
        return None if written is None else int(written[1])
    if isinstance(value, bool) or not isinstance(value, Real):
        return None
    if isinstance(value, Integral):
        return int(value)
    return int(float(value)) if float(value).is_integer() else None


def _turn(values: Mapping[str, Any]) -> Turn:
    return Turn(values["text"], tuple(Call(**call) for call in values["calls"]))


def _observation(values: Mapping[str, Any]) -> Observation:
    return Observation(**{**values, "texts": tuple(values["texts"]), "messages": tuple(values["messages"])})
