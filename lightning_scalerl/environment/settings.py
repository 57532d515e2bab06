"""Settings of environments, `environment` in a configuration.

The limits on turns are in `context` (`ContextSettings`), next to those on tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from lightning_scalerl.checks import ConfigurationError, positive, whole_number
from lightning_scalerl.environment.calls import CONVENTIONS
from lightning_scalerl.environment.pool import MAX_CHARACTERS, EnvironmentPool
from lightning_scalerl.user_code import FunctionObject, Source

Location = str | Callable[[], Any]
_CHOICES = {
    "convention": ("auto", *CONVENTIONS),
    "reward": ("environment", "task"),
    "at_max_turns": ("truncated", "answer"),
    "at_max_turn_tokens": ("truncated", "go_on"),
}


@dataclass(frozen=True)
class EnvironmentSettings:
    """Environment of a run, and the limits of a conversation with it.

    Args:
        factory: class or function that makes an environment, in TRL's form or in text form: "file.py:Class",
            "module:Class" or an object (docs/guide/environments.md). A mapping has several factories by name, and the
            data's column `environment` selects one. None for completions of one turn.
        convention: format in which the model writes tool calls: "hermes", "llama", "plain", or "auto" for the format
            that the chat template describes.
        describe_tools: whether a description of the tools is appended to the prompt, with the convention "plain".
        reward: reward of a rollout: "environment" for the sum of the environment's rewards, "task" for the reward that
            the task's verifier gives to the last turn.
        at_max_turns: treatment of a conversation that is not over after `context.max_turns`: "truncated" treats it as
            at the token limit; "answer" takes the last turn as the answer, and appends `last_turn` to the message
            before that turn.
        last_turn: text that announces the last turn, for "answer".
        at_max_turn_tokens: treatment of a turn of `context.max_turn_tokens` tokens: "truncated" ends the rollout;
            "go_on" passes the unfinished turn to the environment.
        timeout_s: wall-clock limit of one call. If a call takes longer, the rollout abstains.
        memory_gib: limit on a process's data segment in GiB; None for no limit.
        max_characters: largest number of characters of all observations of a turn; the rest is cut off.
        processes: number of processes. With more conversations than processes, some conversations are replayed in
            another process. Environments that cannot be replayed need one process for each rollout in flight.
    """

    neutral: ClassVar[Mapping[str, Any] | None] = {
        "choice": "EnvironmentSettings", "factory": None, "convention": "auto", "describe_tools": True,
        "reward": "environment", "at_max_turns": "truncated", "last_turn": "",
        "at_max_turn_tokens": "truncated", "timeout_s": 10.0, "max_characters": MAX_CHARACTERS,
    }  # fmt: skip
    operational_parameters: ClassVar[tuple[str, ...]] = ("processes", "memory_gib")

    factory: Location | Mapping[str, Location] | None = None
    convention: str = "auto"
    describe_tools: bool = True
    reward: Literal["environment", "task"] = "environment"
    at_max_turns: Literal["truncated", "answer"] = "truncated"
    last_turn: str = ""
    at_max_turn_tokens: Literal["truncated", "go_on"] = "truncated"
    timeout_s: float = 10.0
    memory_gib: float | None = 4.0
    max_characters: int = MAX_CHARACTERS
    processes: int = 8

    def __post_init__(self) -> None:
        for name, valid in _CHOICES.items():
            if getattr(self, name) not in valid:
                raise ConfigurationError(
                    f"environment.{name}: {getattr(self, name)!r} must be one of {', '.join(valid)}"
                )
        for name in ("max_characters", "processes"):
            whole_number(f"environment.{name}", getattr(self, name))
        positive("environment.timeout_s", self.timeout_s)
        if self.memory_gib is not None:
            positive("environment.memory_gib", self.memory_gib)
        if not isinstance(self.last_turn, str):
            raise ConfigurationError(f"environment.last_turn: {self.last_turn!r} must be a text; put it in quotes")
        if self.last_turn and self.at_max_turns != "answer":
            raise ConfigurationError(
                f"environment.last_turn: {self.last_turn!r} would never be said; set environment.at_max_turns=answer"
            )
        if self.factory is not None:
            self._sources()

    @property
    def acts(self) -> bool:
        """True if rollouts have conversations with an environment."""
        return self.factory is not None

    @property
    def gives_reward(self) -> bool:
        """True if a rollout's reward comes from the environment, so that the task's verifier grades nothing."""
        return self.acts and self.reward == "environment"

    def pool(self) -> EnvironmentPool:
        """Return a pool of processes for these environments; processes start when they are needed.

        Raises:
            ConfigurationError: the factory cannot be loaded, or cannot be sent to another process.
        """
        factories: dict[str, Any] = {}
        for name, source in self._sources().items():
            try:
                # The source is loaded here only to find mistakes early; the environment's process loads it again.
                loaded = source.load()
            except Exception as error:
                raise ConfigurationError(
                    f"environment.factory: {source.function!r} of {source.place} cannot be loaded "
                    f"({type(error).__name__}: {error})"
                ) from error
            factories[name] = source if isinstance(source, Source) else loaded
        factory = factories if isinstance(self.factory, Mapping) else factories[""]
        return EnvironmentPool(factory, self.processes, self.timeout_s, self.memory_gib, self.max_characters)

    def _sources(self) -> dict[str, Source | FunctionObject]:
        """Return the factories by name; a single factory has the name "".

        Raises:
            ConfigurationError: a location is invalid.
        """
        by_name = self.factory if isinstance(self.factory, Mapping) else {"": self.factory}
        if not by_name:
            raise ConfigurationError("environment.factory: an empty mapping; give at least one, or null for none")
        sources: dict[str, Source | FunctionObject] = {}
        for name, factory in by_name.items():
            field = f"environment.factory{f'.{name}' if name else ''}"
            if not isinstance(factory, str) and not callable(factory):
                raise ConfigurationError(
                    f"{field}: {factory!r} must be file.py:Class, module:Class, a class or function"
                )
            sources[str(name)] = (
                Source.of(field, factory) if isinstance(factory, str) else FunctionObject(field, factory)
            )
        return sources

    @staticmethod
    def content(parameters: Mapping[str, Any]) -> dict[str, Any]:
        """Return the factories' entry in a run's identity: files by their content, not by their path."""
        factory = parameters.get("factory")
        if factory is None:
            return {}
        sources = EnvironmentSettings(factory=factory)._sources()
        by_name = {
            name: {"file": digest, "function": source.function} if (digest := source.digest()) else
            f"{source.place}:{source.function}"
            for name, source in sources.items()
        }  # fmt: skip
        return {"factory": by_name if isinstance(factory, Mapping) else by_name[""]}

    def semantics(self) -> dict[str, Any]:
        """Return all settings, and the treatment of failures, as plain values for `semantics.json`."""
        values = {name: getattr(self, name) for name in self.__dataclass_fields__}
        factories = {name: f"{source.place}:{source.function}" for name, source in self._sources().items()}
        return {
            **values,
            "factory": factories if isinstance(self.factory, Mapping) else factories[""],
            "at_max_new_tokens": "truncated",
            "a_tool_that_raises": "its error is the answer to the model",
            "a_malformed_call": "answered to the model",
            "an_environment_that_fails": "the rollout has no reward and is not trained on (verify.on_error)",
        }
