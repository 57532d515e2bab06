"""Tracking in MLflow: `store` makes runs, `ship` and `shipper` feed them, `fits`, `views` and `colours` make charts.

MLflow is a mirror. The journals are the source of truth, and nothing here may stall or fail a training run. A record is
sent once, and only after a checkpoint covers it, because MLflow cannot take a point back.
Importing this package does not import mlflow (seconds); the first `Tracker.client` does.

May import: `run`.
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
