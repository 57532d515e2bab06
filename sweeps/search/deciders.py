"""Choice of a study's decider, by its launch settings."""

from __future__ import annotations

from collections.abc import Sequence

from sweeps.launch.decider import Decider
from sweeps.launch.planning import plan_apart
from sweeps.launch.settings import LaunchSettings
from sweeps.launch.study import Study
from sweeps.run.spec import RunSpec
from sweeps.search.settings import RaceSettings


def decider_of(study: Study, plan: LaunchSettings) -> Decider | None:
    """Return the decider of a study that was launched as a race; None if all its members are to be run.

    Raises:
        UserError: the settings are out of range, or the study's race was begun by others.
    """
    settings = RaceSettings.of(plan.race)
    if settings.mode == "none":
        return None
    from sweeps.search.race import LiveRace  # NumPy, SciPy and the fits: only where somebody looks

    def planned(overrides: Sequence[Sequence[str]]) -> list[RunSpec]:
        return plan_apart(plan.planner, overrides, study.specs[0].folders, plan.shared)

    return LiveRace(study, settings, planned if plan.planner else None)
