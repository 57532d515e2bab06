"""Where Hydra looks for plugins: only this namespace may hold them. The launchers are in `sweeps.cli.launchers`."""

from sweeps.cli.launchers import DebugStudyLauncher, SlurmStudyLauncher, StudyLauncher


class ScaleRLLauncher(StudyLauncher):
    """`hydra/launcher=scalerl`."""


class ScaleRLSlurmLauncher(SlurmStudyLauncher):
    """`hydra/launcher=scalerl_slurm`."""


class ScaleRLDebugLauncher(DebugStudyLauncher):
    """`hydra/launcher=scalerl_debug`."""
