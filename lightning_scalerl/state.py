"""Registry of the state that a checkpoint must hold besides weights, optimizer and callbacks."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Protocol

import torch

from lightning_scalerl.checks import ConfigurationError, error_line


class Stateful(Protocol):
    """Object with state made of plain types and tensors (loadable with `weights_only=True`)."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state as a copy, not as a view of objects that keep changing."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state that `state_dict` returned."""
        ...


class StateRegistry:
    """Named parts of a run's state. A part that is not registered here is not saved or restored."""

    def __init__(self) -> None:
        self._parts: dict[str, Stateful] = {}

    def register(self, name: str, part: Stateful) -> None:
        """Add a part of the run under a unique name.

        Raises:
            ValueError: the name is already in use.
        """
        if name in self._parts:
            raise ValueError(f"state: {name!r} is registered twice")
        self._parts[name] = part

    def state_dict(self) -> dict[str, Any]:
        """Return the state of every registered part, by name."""
        return {name: part.state_dict() for name, part in self._parts.items()}

    def load_state_dict(self, state: Mapping[str, Any], skipped: Collection[str] = ()) -> None:
        """Restore the registered parts from a checkpoint, except parts named in `skipped`.

        Raises:
            ConfigurationError: saved and registered parts differ (the message lists both), or a saved state does not
                fit its part.
        """
        if set(state) != set(self._parts):
            raise ConfigurationError(
                f"checkpoint: holds state of {sorted(state)}, this run has {sorted(self._parts)}; "
                "it comes from another version or configuration"
            )
        for name, part in self._parts.items():
            if name in skipped:
                continue
            try:
                part.load_state_dict(state[name])
            except (KeyError, IndexError, TypeError, AttributeError) as error:
                raise ConfigurationError(
                    f"checkpoint: its state of {name!r} does not fit this run ({error_line(error)}); it comes from "
                    "another task, version or configuration"
                ) from error


class TorchRandomState:
    """Torch's global random state as a part of a checkpoint, because dropout draws from it."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the CPU's random generator and, if there is a GPU, of the current CUDA device's."""
        cuda = [torch.cuda.get_rng_state()] if torch.cuda.is_available() else []
        return {"cpu": torch.get_rng_state(), "cuda": cuda}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the CPU's random generator and, if there is a GPU and a state was saved for it, the GPU's."""
        torch.set_rng_state(state["cpu"])
        # The run may resume on a machine without a GPU.
        if state["cuda"] and torch.cuda.is_available():
            torch.cuda.set_rng_state(state["cuda"][0])
