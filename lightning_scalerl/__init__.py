"""lightning-scalerl: RL post-training with verifiable rewards as a Lightning plugin.

Every design choice (loss, aggregation, normalization, filter, ...) is a swappable Lightning callback.

Public names are imported from here, each on first use: `import lightning_scalerl` alone costs nothing. Configurations
and the files of recorded studies use these names too, so a name stays when its class or function moves to another
module.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from sweeps import __version__ as __version__

if TYPE_CHECKING:
    from lightning_scalerl.axes.choice import DesignChoice
    from lightning_scalerl.callbacks.checkpointing import ResumableCheckpoint
    from lightning_scalerl.callbacks.evaluate import Evaluate
    from lightning_scalerl.callbacks.evaluation_set import EvaluationSet
    from lightning_scalerl.callbacks.race import Race
    from lightning_scalerl.callbacks.run_log import RunLog
    from lightning_scalerl.checks import ConfigurationError
    from lightning_scalerl.choices import Choices
    from lightning_scalerl.data import RolloutDataModule
    from lightning_scalerl.module import ScaleRL
    from lightning_scalerl.rollouts.prompt import Prompt
    from lightning_scalerl.rollouts.rollout import Group, Rollout, TrainBatch
    from lightning_scalerl.task.base import Task

# Maps each public name to its module, which is imported when the name is first used.
_HOME_OF = {
    "ResumableCheckpoint": "callbacks.checkpointing",
    "Evaluate": "callbacks.evaluate",
    "EvaluationSet": "callbacks.evaluation_set",
    "Completion": "callbacks.predict",
    "Prediction": "callbacks.predict",
    "Race": "callbacks.race",
    "RolloutLog": "callbacks.rollout_log",
    "RunLog": "callbacks.run_log",
    "ConfigurationError": "checks",
    "DesignChoice": "axes.choice",
    "Choices": "choices",
    "RolloutDataModule": "data",
    "Generator": "generator.base",
    "TorchGenerator": "generator.torch.generator",
    "VLLMGenerator": "generator.vllm.generator",
    "VLLMServerGenerator": "generator.vllm.client",
    "Branch": "member.branch",
    "plan_commands": "member.command",
    "plan_members": "member.identify",
    "plan_trl": "member.trl",
    "run_member": "member.run",
    "EnvironmentSettings": "environment.settings",
    "Chat": "model.chat",
    "model_path": "model.place",
    "ScaleRL": "module",
    "AdamW": "optim",
    "AdamW8bit": "optim",
    "AdamWBF16": "optim",
    "ConstantSchedule": "optim",
    "CosineSchedule": "optim",
    "Muon": "optim",
    "SqrtBatchSchedule": "optim",
    "BatchSettings": "recipe",
    "ContextSettings": "recipe",
    "Recipe": "recipe",
    "Prompt": "rollouts.prompt",
    "Group": "rollouts.rollout",
    "Rollout": "rollouts.rollout",
    "TrainBatch": "rollouts.rollout",
    "ComputeAxes": "verify.charges",
    "CostModel": "stream.cost_model",
    "Live": "stream.drivers",
    "Virtual": "stream.drivers",
    "ArithmeticTask": "task.arithmetic",
    "arithmetic_base_model": "task.arithmetic_base",
    "CalculatorTask": "task.calculator",
    "calculator_base_model": "task.calculator_base",
    "RewardScale": "task.base",
    "NoReward": "task.base",
    "Task": "task.base",
    "DatasetTask": "task.dataset",
    "JsonlTask": "task.jsonl",
    "MixtureTask": "task.mixture",
    "ReasoningGymTask": "task.reasoning_gym",
    "Health": "update.health",
    "Grade": "rollouts.grade",
    "Sample": "rollouts.grade",
    "Verification": "verify.verification",
    # The design space, axis by axis: the axis's class, then its choices.
    "Resampling": "axes.resampling",
    "NoPositiveResampling": "axes.resampling",
    "UniformResampling": "axes.resampling",
    "Curriculum": "axes.curriculum",
    "NoCurriculum": "axes.curriculum",
    "LinearCurriculum": "axes.curriculum",
    "ExponentialCurriculum": "axes.curriculum",
    "StagedLength": "axes.curriculum",
    "StagedRewards": "axes.curriculum",
    "Allocation": "axes.allocation",
    "FixedAllocation": "axes.allocation",
    "AllocationByDifficulty": "axes.allocation",
    "AsyncMode": "axes.async_mode.base",
    "OnPolicy": "axes.async_mode.ppo_off_policy",
    "PPOOffPolicy": "axes.async_mode.ppo_off_policy",
    "Pipeline": "axes.async_mode.pipeline",
    "LengthControl": "axes.length_control",
    "Interruption": "axes.length_control",
    "Penalty": "axes.length_control",
    "NoLengthControl": "axes.length_control",
    "Truncated": "axes.truncated",
    "MaskTruncated": "axes.truncated",
    "KeepTruncated": "axes.truncated",
    "Filter": "axes.filter",
    "ZeroVariance": "axes.filter",
    "DynamicSampling": "axes.filter",
    "NoFilter": "axes.filter",
    "Advantage": "axes.advantage",
    "GroupAdvantage": "axes.advantage",
    "GAE": "axes.advantage",
    "Credit": "axes.credit",
    "OutcomeCredit": "axes.credit",
    "TurnCredit": "axes.credit",
    "Normalization": "axes.normalization",
    "BatchNormalization": "axes.normalization",
    "BatchRewardNormalization": "axes.normalization",
    "PromptNormalization": "axes.normalization",
    "MaxRLNormalization": "axes.normalization",
    "RunningNormalization": "axes.normalization",
    "NoNormalization": "axes.normalization",
    "Moments": "axes.normalization",
    "Precision": "axes.precision",
    "Correction": "axes.correction",
    "Behaviour": "axes.correction",
    "Proximal": "axes.correction",
    "Critic": "axes.critic",
    "NoCritic": "axes.critic",
    "ValueNetwork": "axes.critic",
    "Loss": "axes.loss.base",
    "CISPO": "axes.loss.cispo",
    "DAPO": "axes.loss.dapo",
    "ClipCov": "axes.loss.clip_cov",
    "CovarianceLoss": "axes.loss.covariance",
    "DPPO": "axes.loss.dppo",
    "GMPO": "axes.loss.gmpo",
    "GSPO": "axes.loss.gspo",
    "KLCov": "axes.loss.kl_cov",
    "PPO": "axes.loss.ppo",
    "Reinforce": "axes.loss.reinforce",
    "SAPO": "axes.loss.sapo",
    "KL": "axes.kl",
    "NoKL": "axes.kl",
    "FixedKL": "axes.kl",
    "KLByDifficulty": "axes.kl",
    "Entropy": "axes.entropy",
    "NoEntropyBonus": "axes.entropy",
    "FixedEntropy": "axes.entropy",
    "EntropyByDifficulty": "axes.entropy",
    "Aggregation": "axes.aggregation",
    "PromptAggregation": "axes.aggregation",
    "SampleAggregation": "axes.aggregation",
    "TokenAggregation": "axes.aggregation",
    "SumAggregation": "axes.aggregation",
    "ConstantAggregation": "axes.aggregation",
    "Epochs": "axes.epochs",
    "Adapter": "axes.adapter",
    "NoAdapter": "axes.adapter",
    "LoRA": "axes.adapter",
}

__all__ = [
    "Choices",
    "ConfigurationError",
    "DesignChoice",
    "Evaluate",
    "EvaluationSet",
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
# Add the names that are not imported under `TYPE_CHECKING`, so that `import *` gives every public name.
__all__ += [name for name in _HOME_OF if name not in __all__]


def axis_names() -> frozenset[str]:
    """Return the names of the public classes of `axes/`, which are the choices that a configuration may name."""
    return frozenset(name for name, module in _HOME_OF.items() if module.startswith("axes.") and name != "DesignChoice")


def public_names() -> frozenset[str]:
    """Return every name that configurations and recorded studies may import from this package."""
    return frozenset(_HOME_OF)


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *public_names()})
