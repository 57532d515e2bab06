"""Choose the decider of a study, from its launch settings."""

from __future__ import annotations

from sweeps.launch.decider import Decider
from sweeps.launch.settings import LaunchSettings
from sweeps.launch.study import Study
from sweeps.search.settings import RaceSettings


def decider_of(study: Study, plan: LaunchSettings) -> Decider | None:
    """Return the decider of a study that was launched as a race; None for any other study, all of whose members run.

    Raises:
        UserError: the settings are out of range, or the study's race was begun with other settings.
    """
    settings = RaceSettings.recorded(plan.race)
    if settings.mode == "none":
        return None
    from sweeps.search.race import LiveRace  # imports NumPy, SciPy and the fits, which only a race needs

    return LiveRace(study, settings)
