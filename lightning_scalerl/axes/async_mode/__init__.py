"""Axis `async_mode`: how far generation may run ahead of training."""

from lightning_scalerl.axes.async_mode.base import AsyncMode
from lightning_scalerl.axes.async_mode.pipeline import Pipeline
from lightning_scalerl.axes.async_mode.ppo_off_policy import OnPolicy, PPOOffPolicy

__all__ = ["AsyncMode", "OnPolicy", "PPOOffPolicy", "Pipeline"]
