"""Tracking in MLflow: `store` makes runs, `ship` and `shipper` fill them, `fits` and `views` make charts.

MLflow is a mirror of the journals, which remain the source of truth, and must never stall or fail a training run.
Importing this package does not import mlflow (which takes seconds); the first `Tracker.client` does.
"""

from sweeps.tracking.fits import FitSummary, Published, publish
from sweeps.tracking.ship import ship
from sweeps.tracking.shipper import Shipper
from sweeps.tracking.store import Member, TrackedMember, TrackedSweep, Tracker
from sweeps.tracking.views import UiCommand, ui_command

__all__ = [
    "FitSummary",
    "Member",
    "Published",
    "Shipper",
    "TrackedMember",
    "TrackedSweep",
    "Tracker",
    "UiCommand",
    "publish",
    "ship",
    "ui_command",
]
