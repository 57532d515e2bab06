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
from lightning_scalerl.environment.forms import AnswerError, Factory, properties_of, wrap
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
        """Return the properties of each environment by name, or a one-line error if one cannot be used."""
        try:
            return {name: properties_of(factory()) for name, factory in self._factories.items()}
        except ConfigurationError as error:
            return str(error)
        except Exception as error:
            return f"environment: it cannot be made ({error_line(error)})"

    def open(self, name: str, row: Mapping[str, Any], seed: int, history: History | None) -> Observation | Failure:
        """Make an instance and begin its conversation.

        Returns:
            The first observation; with `history`, the last observation of the replayed conversation, or a failure if
            an observation differs from the recorded one.
        """
        # Environments of TRL's form take no seed and draw from the global generators, so seed these.
        random.seed(seed)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(seed % 2**32)
        user = self._factories[name]()
        if history is not None and history.exchanges and not getattr(user, "replayable", True):
            return Failure("replay", f"{type(user).__name__} cannot be replayed (replayable = False)")
        self._environment = wrap(user)
        last = self._sanitize(self._environment.reset(row, seed))
        if history is None:
            return last
        expected = history.start
        for number, (turn, recorded) in enumerate(history.exchanges):
            if last != expected:
                return _replay_failure(number, expected, last)
            last, expected = self.step(turn), recorded
        return last if last == expected else _replay_failure(len(history.exchanges), expected, last)

    def step(self, turn: Turn) -> Observation:
        """Answer a turn of the model."""
        assert self._environment is not None
        return self._sanitize(self._environment.step(turn))

    def finish(self) -> Observation:
        """End the conversation."""
        assert self._environment is not None
        return self._sanitize(self._environment.finish())

    def close(self) -> None:
        """Drop the instance."""
        self._environment = None

    def _sanitize(self, observation: Observation) -> Observation:
        """Cut an observation's texts to `most_characters` in all, and replace characters that are not Unicode."""
        remaining, cut = self._most_characters, 0

        def shorten(text: str) -> str:
            nonlocal remaining, cut
            head, beyond = text[:remaining], max(0, len(text) - remaining)
            remaining -= len(head)
            cut += beyond
            head = head.encode("utf-8", "replace").decode()
            return f"{head} [{beyond} characters cut]" if beyond else head

        texts = tuple(map(shorten, observation.texts))
        messages = tuple({**message, "content": shorten(message["content"])} for message in observation.messages)
        return replace(observation, texts=texts, messages=messages, cut=cut)


def _replay_failure(number: int, expected: Observation, observed: Observation) -> Failure:
    """Return the failure of a replay whose answer to turn `number` (0 for `reset`) differs from the recorded answer."""
    where = f"its answer to turn {number}" if number else "what reset returned"
    return Failure(
        "replay",
        f"{where} differs in the replay ({str(observed.texts)[:80]} in place of {str(expected.texts)[:80]}): say "
        "replayable = False in the environment, or make it depend on nothing but seed and turns",
    )


def _load_factories(factories: Mapping[str, Any]) -> dict[str, Factory]:
    loaded = {name: factory.load() if isinstance(factory, Source) else factory for name, factory in factories.items()}
    return cast(dict[str, Factory], loaded)


def main() -> None:
    """Answer requests until the pool closes its end of the pipe."""
    connection, content = begin_worker()
    most_characters, pickled = pickle.loads(content)
    try:
        import cloudpickle

        worker = Worker(_load_factories(cloudpickle.loads(pickled)), most_characters)
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
        # Other subclasses of BaseException, such as SystemExit, must end the process. The pool then replaces it.
        try:
            result = getattr(worker, method)(*arguments)
        except AnswerError as error:
            result = Failure("answer", str(error))
        except Exception as error:
            result = Failure("raised", error_line(error))
        connection.send(result)


if __name__ == "__main__":
    main()
