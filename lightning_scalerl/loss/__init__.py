"""Axis `loss`: policy surrogates."""

from lightning_scalerl.loss.base import Loss, importance_ratio
from lightning_scalerl.loss.cispo import CISPO, cispo
from lightning_scalerl.loss.dapo import DAPO, dapo

__all__ = ["CISPO", "DAPO", "Loss", "cispo", "dapo", "importance_ratio"]
