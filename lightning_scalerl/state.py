"""One registry of everything that must survive a checkpoint besides weights, optimizer and callbacks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch

from lightning_scalerl.checks import ConfigurationError, said


class Stateful(Protocol):
    """Something with state made of plain types and tensors (loadable with `weights_only=True`)."""

    def state_dict(self) -> dict[str, Any]:
        """The state, safe to keep: a copy, not a view of what goes on changing."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put the state back."""
        ...


class StateRegistry:
    """Named parts of a run's state. A part that is not registered here is not resumable, by construction."""

    def __init__(self) -> None:
        self._parts: dict[str, Stateful] = {}

    def register(self, name: str, part: Stateful) -> None:
        """Add a part.

        Raises:
            ValueError: the name is taken.
        """
        if name in self._parts:
            raise ValueError(f"state: {name!r} is registered twice")
        self._parts[name] = part

    def state_dict(self) -> dict[str, Any]:
        """All parts by name."""
        return {name: part.state_dict() for name, part in self._parts.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore all parts.

        Raises:
            ConfigurationError: the parts saved and the parts registered differ (both lists are named), or one of them
                was saved by a run that had something else there.
        """
        if set(state) != set(self._parts):
            raise ConfigurationError(
                f"checkpoint: holds state of {sorted(state)}, this run has {sorted(self._parts)}; "
                "it comes from another version or configuration"
            )
        for name, part in self._parts.items():
            try:
                part.load_state_dict(state[name])
            except (KeyError, IndexError, TypeError, AttributeError) as error:
                raise ConfigurationError(
                    f"checkpoint: its state of {name!r} does not fit this run ({said(error)}); it comes from another "
                    "task, version or configuration"
                ) from error


class TorchRandomState:
    """Torch's global random state, which dropout draws from."""

    def state_dict(self) -> dict[str, Any]:
        """Of the CPU and of the CUDA device in use, if there is one."""
        cuda = [torch.cuda.get_rng_state()] if torch.cuda.is_available() else []
        return {"cpu": torch.get_rng_state(), "cuda": cuda}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put it back."""
        torch.set_rng_state(state["cpu"])
        # The run may go on on another kind of device, or see other numbers of them.
        if state["cuda"] and torch.cuda.is_available():
            torch.cuda.set_rng_state(state["cuda"][0])
