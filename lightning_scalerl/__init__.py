"""lightning-scalerl: RL post-training with verifiable rewards as a Lightning plugin.

Every design choice (loss, aggregation, normalization, filter, ...) is a swappable Lightning callback.

What is public is imported from here, on first use: `import lightning_scalerl` alone costs nothing. Configurations and
frozen studies name things by these names too, so a name stays when what it names moves to another module.
"""

from __future__ import annotations

import re
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_scalerl.torchmetrics_on_demand import torchmetrics_on_demand

if TYPE_CHECKING:
    from lightning_scalerl.callbacks.checkpointing import ResumableCheckpoint
    from lightning_scalerl.callbacks.evaluate import Evaluate
    from lightning_scalerl.callbacks.race import Race
    from lightning_scalerl.callbacks.run_log import RunLog
    from lightning_scalerl.checks import ConfigurationError
    from lightning_scalerl.choice import DesignChoice
    from lightning_scalerl.choices import Choices
    from lightning_scalerl.data import RolloutDataModule
    from lightning_scalerl.module import ScaleRL
    from lightning_scalerl.prompt import Prompt
    from lightning_scalerl.rollout import Group, Rollout, TrainBatch
    from lightning_scalerl.task.base import Task

__version__ = "0.2.0"

torchmetrics_on_demand()

# Public names by module. The choices of all axes are public too, and found by their class in `axes/`.
_HOMES = {
    "callbacks.checkpointing": ["ResumableCheckpoint"],
    "callbacks.evaluate": ["Evaluate"],
    "callbacks.race": ["Race"],
    "callbacks.rollout_log": ["RolloutLog"],
    "callbacks.run_log": ["RunLog"],
    "checks": ["ConfigurationError"],
    "choice": ["DesignChoice"],
    "choices": ["Choices"],
    "data": ["RolloutDataModule"],
    "generator.base": ["Generator"],
    "generator.torch_generator": ["TorchGenerator"],
    "generator.vllm_generator": ["VLLMGenerator"],
    "member.identify": ["plan_members"],
    "member.run": ["run_member"],
    "model.chat": ["Chat"],
    "model.place": ["model_path"],
    "module": ["ScaleRL"],
    "optim": ["AdamW", "ConstantSchedule", "CosineSchedule", "SqrtBatchSchedule"],
    "recipe": ["BatchSettings", "ContextSettings", "Recipe"],
    "prompt": ["Prompt"],
    "rollout": ["Group", "Rollout", "TrainBatch"],
    "stream.cost_model": ["CostModel"],
    "stream.drivers": ["Live", "Virtual"],
    "task.arithmetic": ["ArithmeticTask"],
    "task.arithmetic_base": ["arithmetic_base_model"],
    "task.base": ["RewardScale", "Task"],
    "task.dataset": ["DatasetTask"],
    "task.jsonl": ["JsonlTask"],
    "task.mixture": ["MixtureTask"],
    "update.health": ["Health"],
    "verify.grade": ["Grade", "Sample"],
    "verify.verification": ["Verification"],
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "Choices",
    "ConfigurationError",
    "DesignChoice",
    "Evaluate",
    "Group",
    "Prompt",
    "Race",
    "ResumableCheckpoint",
    "Rollout",
    "RolloutDataModule",
    "RunLog",
    "ScaleRL",
    "Task",
    "TrainBatch",
]


@cache
def _axes() -> dict[str, str]:
    """Map each public class of `axes/` to its module, by scanning the sources: nothing is imported."""
    here = Path(__file__).parent
    found: dict[str, str] = {}
    for path in sorted((here / "axes").rglob("*.py")):
        names = re.findall(r"^class ([A-Z]\w*)\b", path.read_text(encoding="utf-8"), re.MULTILINE)
        found |= dict.fromkeys(names, ".".join(path.relative_to(here).with_suffix("").parts))
    return found


def axis_names() -> frozenset[str]:
    """Return the public classes of `axes/`: the choices that a configuration may name."""
    return frozenset(_axes())


def public_names() -> frozenset[str]:
    """Return every name that configurations and frozen studies may import from this package."""
    return frozenset({*_HOME_OF, *_axes()})


def __getattr__(name: str) -> Any:
    module = _HOME_OF.get(name) or (_axes().get(name) if name[:1].isupper() else None)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{module}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *public_names()})
