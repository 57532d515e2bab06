"""Records of a conversation, and the protocol of environments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

Schema = Mapping[str, Any]


@dataclass(frozen=True)
class Call:
    """Tool call of the model.

    Attributes:
        name: name of the tool; empty if it cannot be read.
        arguments: values by argument name.
        error: error in a malformed call, as one line for the model; empty for a valid call.
    """

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    error: str = ""


@dataclass(frozen=True)
class Turn:
    """One turn of the model: its text without thinking, and the calls in it."""

    text: str
    calls: Sequence[Call] = ()


@dataclass(frozen=True)
class Observation:
    """Answer of an environment to a turn.

    Attributes:
        texts: texts for the model: at most one text from `reset`; after a turn one text per call, in order, or a single
            text.
        messages: messages that `reset` returned in place of a text.
        reward: reward of this turn; None for no reward. The rewards of all turns are added up.
        terminated, truncated: whether the conversation has come to its own end, or was ended by a limit of the
            environment (Gymnasium's terms).
        info: numbers and texts to report.
        malformed: number of malformed calls in the turn.
        raised: number of calls whose tool raised an exception.
        cut: number of characters that were cut off `texts` and `messages`.
    """

    texts: tuple[str, ...] = ()
    messages: tuple[Mapping[str, str], ...] = ()
    reward: float | None = None
    terminated: bool = False
    truncated: bool = False
    info: Mapping[str, float | str] = field(default_factory=dict)
    malformed: int = 0
    raised: int = 0
    cut: int = 0


# "raised": an exception outside of a tool; "answer": an unusable answer; "timeout", "died": the process timed out or
# died; "replay": the conversation cannot be replayed.
Trouble = Literal["raised", "answer", "timeout", "died", "replay"]


@dataclass(frozen=True)
class Failure:
    """Failure of an environment. Its rollout has no reward (it abstains), which differs from a reward of 0.

    Attributes:
        kind: see `Trouble`.
        why: reason in one line.
    """

    kind: Trouble
    why: str


@dataclass(frozen=True)
class History:
    """Earlier part of a conversation, to replay it: the result of `reset`, then each turn with its observation."""

    start: Observation
    exchanges: tuple[tuple[Turn, Observation], ...] = ()


@dataclass(frozen=True)
class Declared:
    """Properties of an environment that are known before a conversation.

    Attributes:
        form: "tools" for TRL's form, "text" for text in, text out.
        tools: schemas of its tools, as chat templates take them (`tools=`).
        owns_reward: whether the environment computes a reward itself.
        replayable: whether the same seed, row and turns give the same observations.
        seconds: declared seconds per call, for virtual clocks.
    """

    form: Literal["tools", "text"]
    tools: tuple[Schema, ...] = ()
    owns_reward: bool = True
    replayable: bool = True
    seconds: float = 0.0


class Environment(Protocol):
    """Protocol of an environment: one instance has one conversation."""

    def reset(self, row: Mapping[str, Any], seed: int) -> Observation:
        """Begin the conversation about a row of the data set."""
        ...

    def step(self, turn: Turn) -> Observation:
        """Answer a turn of the model."""
        ...

    def finish(self) -> Observation:
        """End a conversation that has reached a limit; the observation has the reward, if there is one."""
        ...
