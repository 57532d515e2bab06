"""Axis `loss`: policy surrogates."""

from lightning_scalerl.loss.base import Loss, importance_ratio
from lightning_scalerl.loss.cispo import CISPO, cispo
from lightning_scalerl.loss.dapo import DAPO, dapo
from lightning_scalerl.loss.gspo import GSPO, gspo

__all__ = ["CISPO", "DAPO", "GSPO", "Loss", "cispo", "dapo", "gspo", "importance_ratio"]
