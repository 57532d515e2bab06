"""Axis `loss`: policy surrogates."""

from lightning_scalerl.axes.loss.base import Loss, importance_ratio
from lightning_scalerl.axes.loss.cispo import CISPO, cispo
from lightning_scalerl.axes.loss.dapo import DAPO, dapo
from lightning_scalerl.axes.loss.gspo import GSPO, gspo

__all__ = ["CISPO", "DAPO", "GSPO", "Loss", "cispo", "dapo", "gspo", "importance_ratio"]
