"""Environment process, started by `pool`: one instance at a time, one request at a time.

A request is (method of `Worker`, arguments), and its answer is the result of the method. Calls are made in the main
thread, because some environments limit their time with SIGALRM, which only works there.
"""

from __future__ import annotations

import pickle
import random
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

from lightning_scalerl.checks import ConfigurationError, error_line
from lightning_scalerl.environment.forms import AnswerError, Factory, declared, wrapped
from lightning_scalerl.environment.protocol import Declared, Environment, Failure, History, Observation, Turn
from lightning_scalerl.user_code import Source
from sweeps.process import begin_worker


class Worker:
    """Instance of the user's environment, and the methods that the pool calls.

    Args:
        factories: the user's factories by name.
        most_characters: characters of an observation's texts that are kept.
    """

    def __init__(self, factories: Mapping[str, Factory], most_characters: int) -> None:
        self._factories, self._most_characters = factories, most_characters
        self._environment: Environment | None = None

    def declare(self) -> dict[str, Declared] | str:
        """Return the properties of each environment, or one line if one cannot be used."""
        try:
            return {name: declared(factory()) for name, factory in self._factories.items()}
        except ConfigurationError as error:
            return str(error)
        except Exception as error:
            return f"environment: it cannot be made ({error_line(error)})"

    def open(self, name: str, row: Mapping[str, Any], seed: int, history: History | None) -> Observation | Failure:
        """Make an instance and begin its conversation; with `history`, replay that and return its last observation."""
        # Environments of TRL's form have no seed: they draw from the global generators.
        random.seed(seed)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(seed % 2**32)
        user = self._factories[name]()
        if history is not None and history.exchanges and not getattr(user, "replayable", True):
            return Failure("replay", f"{type(user).__name__} cannot be replayed (replayable = False)")
        self._environment = wrapped(user)
        last = self._sanitized(self._environment.reset(row, seed))
        if history is None:
            return last
        expected = history.start
        for number, (turn, following) in enumerate(history.exchanges):
            if last != expected:
                return _differs(number, expected, last)
            last, expected = self.step(turn), following
        return last if last == expected else _differs(len(history.exchanges), expected, last)

    def step(self, turn: Turn) -> Observation:
        """Answer a turn of the model."""
        assert self._environment is not None
        return self._sanitized(self._environment.step(turn))

    def finish(self) -> Observation:
        """End the conversation."""
        assert self._environment is not None
        return self._sanitized(self._environment.finish())

    def close(self) -> None:
        """Drop the instance."""
        self._environment = None

    def _sanitized(self, observation: Observation) -> Observation:
        """Cut an observation's texts to `most_characters` in all, and replace characters that are not Unicode."""
        left, cut = self._most_characters, 0

        def kept(text: str) -> str:
            nonlocal left, cut
            head, beyond = text[:left], max(0, len(text) - left)
            left -= len(head)
            cut += beyond
            head = head.encode("utf-8", "replace").decode()
            return f"{head} [{beyond} characters cut]" if beyond else head

        texts = tuple(map(kept, observation.texts))
        messages = tuple({**message, "content": kept(message["content"])} for message in observation.messages)
        return replace(observation, texts=texts, messages=messages, cut=cut)


def _differs(number: int, expected: Observation, observed: Observation) -> Failure:
    """Return the failure of a replay whose answer to turn `number` (0: `reset`) differs from the recorded one."""
    where = f"its answer to turn {number}" if number else "what reset returned"
    return Failure(
        "replay",
        f"{where} differs in the replay ({str(observed.texts)[:80]} in place of {str(expected.texts)[:80]}): say "
        "replayable = False in the environment, or make it depend on nothing but seed and turns",
    )


def _loaded(factories: Mapping[str, Any]) -> dict[str, Factory]:
    """Load the factories that are given by their location."""
    loaded = {name: one.load() if isinstance(one, Source) else one for name, one in factories.items()}
    return cast(dict[str, Factory], loaded)


def main() -> None:
    """Answer requests until the pool closes its end of the pipe."""
    connection, content = begin_worker()
    most_characters, pickled = pickle.loads(content)
    try:
        import cloudpickle

        worker = Worker(_loaded(cloudpickle.loads(pickled)), most_characters)
    except BaseException as error:
        connection.send(error_line(error))
        return
    connection.send(None)
    while True:
        try:
            method, arguments = connection.recv()
        except EOFError:
            return
        result: object
        # BaseException is not caught: SystemExit and the like must end the process, which the pool replaces.
        try:
            result = getattr(worker, method)(*arguments)
        except AnswerError as error:
            result = Failure("answer", str(error))
        except Exception as error:
            result = Failure("raised", error_line(error))
        connection.send(result)


if __name__ == "__main__":
    main()
