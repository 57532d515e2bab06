"""Axis `loss`: surrogates of the policy's objective, one module each."""

from lightning_scalerl.axes.loss.base import Loss, importance_ratio, masked_inputs
from lightning_scalerl.axes.loss.cispo import CISPO, cispo
from lightning_scalerl.axes.loss.clip_cov import ClipCov
from lightning_scalerl.axes.loss.dapo import DAPO, dapo
from lightning_scalerl.axes.loss.dppo import DPPO
from lightning_scalerl.axes.loss.gmpo import GMPO, gmpo
from lightning_scalerl.axes.loss.gspo import GSPO, gspo
from lightning_scalerl.axes.loss.kl_cov import KLCov
from lightning_scalerl.axes.loss.ppo import PPO, ppo
from lightning_scalerl.axes.loss.reinforce import Reinforce, reinforce
from lightning_scalerl.axes.loss.sapo import SAPO, sapo

__all__ = [
    "CISPO",
    "DAPO",
    "DPPO",
    "GMPO",
    "GSPO",
    "PPO",
    "SAPO",
    "ClipCov",
    "KLCov",
    "Loss",
    "Reinforce",
    "cispo",
    "dapo",
    "gmpo",
    "gspo",
    "importance_ratio",
    "masked_inputs",
    "ppo",
    "reinforce",
    "sapo",
]
