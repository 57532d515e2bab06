"""Run conversations in the Python that has the environments' packages: `python converse.py REQUEST ANSWER`.

The interpreter needs cloudpickle, and transformers for the schemas of tools. Both files are pickles.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from lightning_scalerl.environment.forms import properties_of
from lightning_scalerl.environment.pool import EnvironmentPool
from lightning_scalerl.environment.protocol import Declared, Failure, History, Observation, Turn

Answer = Observation | Failure


@dataclass(frozen=True)
class Conversation:
    """Conversation with a scripted model, whose turns are fixed.

    Attributes:
        turns: the model's turns. Turns after the end of the conversation are not sent.
        seed, row: as for `EnvironmentPool.open`.
        environment: name in the request.
        replays: index of an earlier conversation of the request, and how many of its turns to replay first.
    """

    turns: Sequence[Turn] = ()
    seed: int = 0
    row: Mapping[str, Any] = field(default_factory=dict)
    environment: str = ""
    replays: tuple[int, int] | None = None


@dataclass(frozen=True)
class Request:
    """Conversations, and environments by name. An environment is MODULE:CLASS and attributes to set in a subclass."""

    environments: Mapping[str, tuple[str, Mapping[str, Any]]]
    conversations: Sequence[Conversation]


def converse(request: Request) -> tuple[dict[str, Declared], list[list[Answer]]]:
    """Run the conversations in one process, one after another.

    Returns:
        Declaration of each environment, and the answers of each conversation.
    """
    factories = {}
    for name, (path, attributes) in request.environments.items():
        module, _, base = path.partition(":")
        factories[name] = type(base, (getattr(import_module(module), base),), dict(attributes))
    pool = EnvironmentPool(factories, most=1, timeout_s=240.0, memory_gib=4.0)
    answers: list[list[Answer]] = []
    try:
        for conversation in request.conversations:
            history = None
            if conversation.replays is not None:
                index, number = conversation.replays
                history = _history(request.conversations[index].turns[:number], answers[index])
            answers.append(_answers(pool, conversation, history))
    finally:
        pool.shutdown()
    return {name: properties_of(factory()) for name, factory in factories.items()}, answers


def _history(turns: Sequence[Turn], answers: Sequence[Answer]) -> History:
    start, *later_answers = answers
    return History(start, tuple(zip(turns, later_answers, strict=False)))  # type: ignore[arg-type]


def _answers(pool: EnvironmentPool, conversation: Conversation, history: History | None) -> list[Answer]:
    row = {**conversation.row, "environment": conversation.environment}
    number = pool.open(row, conversation.seed, history)
    answers = [pool.wait(number)]
    for turn in conversation.turns:
        last = answers[-1]
        if isinstance(last, Failure) or last.terminated or last.truncated:
            break
        pool.act(number, turn)
        answers.append(pool.wait(number))
    pool.close(number)
    return answers


if __name__ == "__main__":
    # Pickles name classes by module. The reader knows this module as tests.environments.converse, not as `__main__`.
    from tests.environments import converse as module

    request = pickle.loads(Path(sys.argv[1]).read_bytes())
    Path(sys.argv[2]).write_bytes(pickle.dumps(module.converse(request)))
