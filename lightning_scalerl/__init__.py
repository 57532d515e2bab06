"""lightning-scalerl: RL post-training with verifiable rewards as a Lightning plugin.

Every design choice (loss, aggregation, normalization, filter, ...) is a swappable Lightning callback.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_scalerl.choice import ConfigurationError, DesignChoice
    from lightning_scalerl.data import RolloutDataModule
    from lightning_scalerl.module import ScaleRL

__all__ = ["ConfigurationError", "DesignChoice", "RolloutDataModule", "ScaleRL"]
__version__ = "0.1.0"

_HOMES = {
    "ConfigurationError": "choice",
    "DesignChoice": "choice",
    "RolloutDataModule": "data",
    "ScaleRL": "module",
}


def __getattr__(name: str) -> Any:
    """Public names are imported on first use: `import lightning_scalerl` alone costs nothing."""
    if name in _HOMES:
        from importlib import import_module

        return getattr(import_module(f"lightning_scalerl.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
