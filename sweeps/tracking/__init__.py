"""Track studies in MLflow: `store` creates runs, `ship` and `shipper` fill them, `fits` and `views` make charts.

MLflow is a mirror of the journals, and nothing here may stall or fail a training run. A record is sent once, and only
after a checkpoint covers it, because MLflow cannot remove a point. Importing this package does not import mlflow, which
takes seconds; the first use of `Tracker.client` does.

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
