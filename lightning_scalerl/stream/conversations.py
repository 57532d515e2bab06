"""Conversations of rollouts with environments. They connect the generator, where rollouts wait, with the processes.

A rollout that has ended a turn waits in the generator (`GroupRequest.waits`). Its turn goes to the environment, and the
observation comes back as tokens to insert, or the rollout ends. All limits on turns are applied here, so that they are
the same for every generator. The order of calls for a waiting rollout:

    start     its turn is sent to the environment
    replies   the environment has answered: insert tokens, end the rollout, or sample it again
    conclude  the generator has reported it as finished: it gets the record of its conversation
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, replace
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
from lightning_scalerl.rollouts.prompt import Prompt
from lightning_scalerl.rollouts.rollout import Conversation, Rollout

Place = tuple[int, int]


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
        pool: processes in which the environments are tried.
        sets: prompts by name of the set. Their environments are reset once, to get their first observations.

    Attributes:
        prompts: the sets, with the first observations of the environments.

    Raises:
        ConfigurationError: an environment cannot be used, or fails at a prompt; or the chat template cannot.
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
        for name, one in self.declared.items():
            if settings.reward == "environment" and not one.owns_reward:
                raise ConfigurationError(
                    f"environment.reward: environment, but {name or 'the environment'} has no get_reward(); give it "
                    "one, or set environment.reward=task"
                )
        name = convention_of(rendering.template) if settings.convention == "auto" else settings.convention
        self.convention = CONVENTIONS[name]
        self._turns = {name: self._turns_of(one) for name, one in self.declared.items()}
        rendering.tools_of = self._in_template
        self.prompts: dict[str, Sequence[Prompt]] = {name: self._begun(prompts, pool) for name, prompts in sets.items()}

    def _turns_of(self, declared: Declared) -> Turns:
        """Check the chat template over several turns with an environment's tools."""
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

    def _in_template(self, prompt: Prompt) -> Sequence[Mapping[str, Any]]:
        return self._template_tools(self.declared_of(prompt))

    def close(self) -> None:
        """End the processes in which the chat template runs."""
        for turns in self._turns.values():
            turns.close()

    def _begun(self, prompts: Sequence[Prompt], pool: EnvironmentPool) -> list[Prompt]:
        """Reset each prompt's environment once, and return the prompts with its first observation."""
        openings = [_opening(prompt) for prompt in prompts]
        numbers = [pool.open(row, seed) for row, seed in openings]
        begun = []
        for prompt, (row, seed), number in zip(prompts, openings, numbers, strict=True):
            start = pool.wait(number)
            pool.close(number)
            if isinstance(start, Failure):
                columns = ", ".join(row) or "no columns"
                raise ConfigurationError(
                    f"environment: it fails at prompt {prompt.prompt_id!r} before the first step ({start.kind}: "
                    f"{start.why}); its row has {columns} (all columns of the data with task.keep_columns=true)"
                )
            begun.append(replace(self._shown(prompt, start), opening=(row, seed, start)))
        return begun

    def _shown(self, prompt: Prompt, start: Observation) -> Prompt:
        """Return a prompt with the tools and the environment's first observation, as part of its last message."""
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

    def turn(self, prompt: Prompt, sampled: Sequence[int]) -> Turn:
        """Return the model's turn: its text after the thinking, and the tool calls in it."""
        text = self.rendering.answer(prompt, sampled)
        declared = self.declared_of(prompt)
        return Turn(text, tuple(self.convention.parse(text, declared.tools)) if declared.form == "tools" else ())

    def sample(self, prompt: Prompt, rollout: Rollout, step: int) -> Sample:
        """Return a rollout in the form that a grader takes: its last turn, and in addition the whole conversation.

        The outcome is settled if the environment has failed, or gives the reward (`environment.reward`).
        """
        conversation = rollout.conversation
        if conversation is None:
            return self.rendering.sample(prompt, rollout, step)
        last = replace(rollout, tokens=rollout.tokens[conversation.starts[-1] :])
        sample = self.rendering.sample(prompt, last, step)
        texts = tuple(
            (source.name.lower(), self.rendering.decode(rollout.tokens[start:end]))
            for source, start, end in rollout.by_source
        )
        settled = None
        if conversation.failed:
            settled = Outcome("error", why=f"environment: {conversation.failed}")
        elif self.settings.reward == "environment":
            if conversation.rewarded:
                settled = Outcome("score", sum(conversation.rewards), parts=conversation.info)
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
        """Return the tokens to insert behind the sampled turns, given the texts of the observations."""
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
    """Consequence of an environment's answer for a waiting rollout.

    `kind` is "insert" (continue behind `tokens`), "end" (`truncated`: by a limit) or "restart" (sample it again).
    """

    kind: Literal["insert", "end", "restart"]
    tokens: tuple[int, ...] = ()
    truncated: bool = False

    def apply(self, generator: TurnGenerator, place: Place) -> None:
        """Apply it to the rollout in the generator."""
        if self.kind == "insert":
            generator.insert(*place, self.tokens)
        elif self.kind == "end":
            generator.end(*place, truncated=self.truncated)
        else:
            generator.restart(*place)


@dataclass
class _OpenConversation:
    """Conversation of one rollout, from the end of its first turn to its own end."""

    prompt: Prompt
    starts: list[int] = field(default_factory=lambda: [0])
    exchanges: list[tuple[Turn, Observation]] = field(default_factory=list)
    ending: Observation | None = None  # the answer to `finish`
    failure: Failure | None = None
    # The fields below belong to the current turn. They are not saved: after a resume the turn is sent again.
    rollout: Rollout | None = None  # copy of the waiting rollout
    turn: Turn | None = None  # turn to be answered; None once it is answered, or if a limit has cut it off
    cut: bool = False
    over: bool = False
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
        idle: returns a context manager that records its duration as idle time, for waits on environments.
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
        self._of: dict[Place, _OpenConversation] = {}
        # Rollouts that wait for an answer, in the order of `start`, each with the number of tokens that still fit.
        self._pending: dict[Place, int] = {}
        self._backlog: list[Place] = []  # pending, but without a process yet

    def request(self, request: GroupRequest) -> GroupRequest:
        """Return a group's request, with rollouts that wait after each turn."""
        return replace(request, waits=True, turn_tokens=self._limits.turn_tokens or 0)

    def start(self, waiting: WaitingRollout) -> float:
        """Send a rollout's turn to its environment; return the declared seconds until the answer.

        A rollout whose turn was sent before is ignored.
        """
        place = waiting.key, waiting.index
        known = self._of.get(place)
        if place in self._pending and known is not None:
            if known.rollout is not None and known.rollout.tokens == waiting.rollout.tokens:
                return 0.0
            self.leave(place)
        one = self._of.setdefault(place, _OpenConversation(self._prompt_of(waiting.key)))
        rollout = waiting.rollout
        if waiting.answers < len(one.starts) - 1:
            # The rollout's engine was lost, and the rollout was sampled again from its prompt.
            self.leave(place)
            one = self._of[place] = _OpenConversation(one.prompt)
        one.rollout = rollout
        one.cut = rollout.truncated and (waiting.room == 0 or self._settings.at_max_turn_tokens == "truncated")
        one.turn = None if one.cut else self._dialogue.turn(one.prompt, one.sampled)
        self._pending[place] = waiting.room
        declared = self._dialogue.declared_of(one.prompt)
        seconds = 0.0
        if one.turn is not None and declared.form == "tools" and not one.turn.calls and not declared.owns_reward:
            # The turn has no call and the environment gives no reward, so there is nothing to ask it.
            one.exchanges.append((one.turn, Observation(terminated=True)))
            one.turn, one.over = None, True
        elif one.turn is not None:
            seconds = declared.seconds * max(1, len(one.turn.calls))
            self._ask(place)
        elif self._needs_finish(one):
            self._ask(place)
        else:
            one.over = True
        return seconds

    def replies(self, places: Iterable[Place]) -> dict[Place, Reply]:
        """Wait for the environments of these rollouts, and return the replies."""
        places = list(places)
        with self._idle():
            for place in places:
                self._settle(place)
            replies = self._replied(places)
            # Some have no room for the observation, and ask their environment for its last reward.
            for place in places:
                if place not in replies:
                    self._settle(place)
        return {**replies, **self._replied([place for place in places if place not in replies])}

    def ready(self) -> dict[Place, Reply]:
        """Return the replies for all rollouts whose environment has answered, without waiting."""
        by_number = {one.number: place for place, one in self._of.items() if one.request}
        for number, answer in self._pool.done():
            if number in by_number:
                self._answered(by_number[number], answer)
        self._ask_backlog()
        waits = {place for place, one in self._of.items() if one.request} | set(self._backlog)
        return self._replied([place for place in self._pending if place not in waits])

    def answer(self, generator: TurnGenerator, waiting: Sequence[WaitingRollout]) -> None:
        """Send the turns of waiting rollouts, wait for the answers, and continue the rollouts; used by evaluations."""
        for one in waiting:
            self.start(one)
        for place, reply in self.replies((one.key, one.index) for one in waiting).items():
            reply.apply(generator, place)

    def conclude(self, finished: FinishedRollout) -> None:
        """Give a finished rollout the record of its conversation, which is forgotten here."""
        place = finished.key, finished.index
        one = self._of.pop(place)
        finished.rollout.conversation = self._record(one)

    def leave(self, place: Place) -> None:
        """Forget a conversation that does not continue."""
        one = self._of.pop(place, None)
        self._pending.pop(place, None)
        if place in self._backlog:
            self._backlog.remove(place)
        if one is not None and one.number is not None:
            self._pool.close(one.number)

    def clear(self) -> None:
        """Forget all conversations."""
        for place in list(self._of):
            self.leave(place)

    def close(self) -> None:
        """End all processes."""
        self._pool.shutdown()

    # --- requests to the pool ------------------------------------------------------------------------------

    def _needs_finish(self, one: _OpenConversation) -> bool:
        """Return whether the environment has a reward to give when a limit ends the conversation."""
        declared = self._dialogue.declared_of(one.prompt)
        return declared.form == "tools" and declared.owns_reward

    def _ask(self, place: Place) -> None:
        """Send the next request of a conversation, if there is a process for it; else put it into the backlog."""
        one = self._of[place]
        if one.number is None and not self._room():
            self._backlog.append(place)
            return
        if one.number is None:
            row, seed, start = one.prompt.opening
            one.number, one.request = self._pool.open(row, seed, History(start, tuple(one.exchanges))), "open"
        elif one.turn is not None:
            self._pool.act(one.number, one.turn)
            one.request = "step"
        else:
            self._pool.finish(one.number)
            one.request = "finish"

    def _room(self) -> bool:
        """Return whether another conversation can be opened; one whose model is sampling may give up its process."""
        holding = [place for place, one in self._of.items() if one.number is not None]
        if len(holding) < self._settings.processes:
            return True
        for place in holding:
            one = self._of[place]
            # The conversation is replayed in another process when its next turn ends.
            if not one.request and self._dialogue.declared_of(one.prompt).replayable:
                assert one.number is not None
                self._pool.close(one.number)
                one.number = None
                return True
        return False

    def _ask_backlog(self) -> None:
        for _ in range(len(self._backlog)):
            before = len(self._backlog)
            self._ask(self._backlog.pop(0))
            if len(self._backlog) == before:
                return

    def _settle(self, place: Place) -> None:
        """Wait until the environment has answered all requests of the current turn."""
        one = self._of[place]
        while True:
            if place in self._backlog:
                if self._room():
                    self._backlog.remove(place)
                    self._ask(place)
                    continue
                # Another one must be answered first, so that its process becomes free.
                busy = next((other for other, its in self._of.items() if its.request), None)
                if busy is None:
                    raise RuntimeError(
                        f"environment.processes: all {self._settings.processes} are held by conversations that cannot "
                        "be replayed; give as many processes as rollouts are in flight"
                    )
                number = self._of[busy].number
                assert number is not None
                self._answered(busy, self._pool.wait(number))
            elif one.request:
                assert one.number is not None
                self._answered(place, self._pool.wait(one.number))
            else:
                return

    def _answered(self, place: Place, answer: Answer) -> None:
        """Take an answer of the pool; send the next request if the turn has one."""
        one = self._of[place]
        request, one.request = one.request, ""
        if isinstance(answer, Failure):
            one.number, one.failure, one.over = None, answer, True
        elif request == "open":
            self._ask(place)
        elif request == "step":
            assert one.turn is not None
            one.exchanges.append((one.turn, answer))
            one.turn = None
            one.over = answer.terminated or answer.truncated
            if not one.over and len(one.exchanges) >= self._limits.turns:
                self._end_by_limit(place)
        else:
            one.ending, one.over = answer, True

    def _end_by_limit(self, place: Place) -> None:
        """End a conversation by a limit on turns or tokens; the environment may still give a reward."""
        one = self._of[place]
        one.cut = True
        if self._needs_finish(one):
            self._ask(place)
        else:
            one.over = True

    # --- replies ---------------------------------------------------------------------------------------------

    def _replied(self, places: Sequence[Place]) -> dict[Place, Reply]:
        """Return the replies of settled conversations; one without room for its observation is ended first."""
        replies: dict[Place, Reply] = {}
        continuing = []
        for place in places:
            one = self._of[place]
            if not one.over:
                continuing.append(place)
                continue
            replayable = self._dialogue.declared_of(one.prompt).replayable
            if one.failure is not None and one.failure.kind == "replay" and not replayable:
                replies[place] = Reply("restart")
                self.leave(place)
                continue
            replies[place] = Reply("end", truncated=self._truncated(one))
        if continuing:
            waiting = [self._of[place] for place in continuing]
            inserted = self._dialogue.insertions(
                [one.prompt for one in waiting],
                [self._texts(one) for one in waiting],
                [one.exchanges[-1][0] for one in waiting],
                [one.sampled for one in waiting],
            )
            for place, tokens in zip(continuing, inserted, strict=True):
                one = self._of[place]
                assert one.rollout is not None
                if len(tokens) >= self._pending[place]:
                    self._end_by_limit(place)
                    if one.over:
                        replies[place] = Reply("end", truncated=True)
                    continue
                one.starts.append(len(one.rollout.tokens) + len(tokens))
                replies[place] = Reply("insert", tuple(tokens))
        for place, reply in replies.items():
            self._pending.pop(place, None)
            one_left = self._of.get(place)
            if reply.kind == "end" and one_left is not None and one_left.number is not None:
                self._pool.close(one_left.number)
                one_left.number = None
        return replies

    def _texts(self, one: _OpenConversation) -> tuple[str, ...]:
        """Return the texts of the last observation; before the last turn, `last_turn` is appended."""
        texts = one.exchanges[-1][1].texts
        last = len(one.exchanges) == self._limits.turns - 1
        if last and self._settings.last_turn:
            return (*texts[:-1], "\n".join([*texts[-1:], self._settings.last_turn]))
        return texts

    def _truncated(self, one: _OpenConversation) -> bool:
        """Return whether a conversation that is over counts as truncated."""
        if one.exchanges and one.exchanges[-1][1].truncated and one.turn is None and not one.cut:
            return True
        assert one.rollout is not None
        by_turns = one.cut and len(one.exchanges) >= self._limits.turns and not one.rollout.truncated
        return one.cut and not (by_turns and self._settings.at_max_turns == "answer")

    def _record(self, one: _OpenConversation) -> Conversation:
        """Return the record of a conversation that is over."""
        observations = [observation for _, observation in one.exchanges]
        rewards = [observation.reward for observation in observations]
        # A turn that was cut off has no observation. `finish` has no turn of its own.
        rewards += [None] * (len(one.starts) - len(rewards))
        ending = [] if one.ending is None else [one.ending]
        final = one.ending.reward if one.ending is not None else None
        by_turn = [reward or 0.0 for reward in rewards]
        by_turn[-1] += final or 0.0
        last_info = (observations + ending)[-1].info if observations or ending else {}
        return Conversation(
            starts=tuple(one.starts),
            rewards=tuple(by_turn),
            rewarded=any(reward is not None for reward in (*rewards, final)),
            calls=sum(len(turn.calls) for turn, _ in one.exchanges),
            malformed=sum(observation.malformed for observation in observations),
            raised=sum(observation.raised for observation in observations),
            cut=sum(observation.cut for observation in observations),
            failed="" if one.failure is None else f"{one.failure.kind}: {one.failure.why}",
            environment=self._dialogue.name_of(one.prompt),
            info={name: value for name, value in last_info.items() if isinstance(value, float)},
        )

    # --- state -------------------------------------------------------------------------------------------

    def state_dict(self) -> list[dict[str, Any]]:
        """Return the conversations; a turn that waits for its environment is left out, because it is sent again."""
        state = []
        for place, one in self._of.items():
            waits = place in self._pending
            exchanges = one.exchanges[: len(one.starts) - 1] if waits else one.exchanges
            entry = {
                "place": list(place),
                "starts": list(one.starts),
                "exchanges": [(asdict(turn), asdict(observation)) for turn, observation in exchanges],
                "ending": None if waits or one.ending is None else asdict(one.ending),
                "failure": None if waits or one.failure is None else asdict(one.failure),
            }
            state.append(entry)
        return state

    def load_state_dict(self, state: Sequence[dict[str, Any]]) -> None:
        """Restore the conversations. Environments are replayed when their rollouts wait again."""
        self.clear()
        for entry in state:
            key, index = entry["place"]
            one = _OpenConversation(self._prompt_of(key), list(entry["starts"]))
            one.exchanges = [(_turn(turn), _observation(observation)) for turn, observation in entry["exchanges"]]
            one.ending = None if entry["ending"] is None else _observation(entry["ending"])
            one.failure = None if entry["failure"] is None else Failure(**entry["failure"])
            self._of[key, index] = one


def _opening(prompt: Prompt) -> tuple[dict[str, Any], int]:
    """Return the row and the seed with which a prompt's environment is reset; neither depends on the run's seed."""
    row = dict(prompt.columns) or {"prompt": prompt.text, "answer": prompt.answer}
    seed = row.get("seed")
    if isinstance(seed, bool) or not isinstance(seed, int):
        seed = int.from_bytes(hashlib.sha256(prompt.prompt_id.encode()).digest()[:4])
    return row, seed


def _turn(values: Mapping[str, Any]) -> Turn:
    return Turn(values["text"], tuple(Call(**call) for call in values["calls"]))


def _observation(values: Mapping[str, Any]) -> Observation:
    return Observation(**{**values, "texts": tuple(values["texts"]), "messages": tuple(values["messages"])})
