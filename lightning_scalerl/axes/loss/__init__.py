"""Axis `loss`: surrogates of the policy's objective, one module each."""

from lightning_scalerl.axes.loss.base import Loss, credited, importance_ratio
from lightning_scalerl.axes.loss.cispo import CISPO, cispo
from lightning_scalerl.axes.loss.dapo import DAPO, dapo
from lightning_scalerl.axes.loss.gspo import GSPO, gspo
from lightning_scalerl.axes.loss.ppo import PPO, ppo
from lightning_scalerl.axes.loss.reinforce import Reinforce, reinforce

__all__ = [
    "CISPO",
    "DAPO",
    "GSPO",
    "PPO",
    "Loss",
    "Reinforce",
    "cispo",
    "credited",
    "dapo",
    "gspo",
    "importance_ratio",
    "ppo",
    "reinforce",
]
