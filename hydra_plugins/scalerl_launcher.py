"""Hydra plugin stubs: Hydra discovers plugins only in this namespace; the code is in `sweeps.cli.launchers`."""

from sweeps.cli.launchers import ClusterStudyLauncher, DebugStudyLauncher, StudyLauncher


class ScaleRLLauncher(StudyLauncher):
    """Launcher of a study on this machine, selected by `hydra/launcher=scalerl`."""


class ScaleRLClusterLauncher(ClusterStudyLauncher):
    """Launcher of a study on the kind of cluster that its key `kind` names."""


class ScaleRLSlurmLauncher(ClusterStudyLauncher):
    """Launcher of a study on a SLURM cluster, selected by `hydra/launcher=scalerl_slurm`."""

    kind = "slurm"


class ScaleRLDebugLauncher(DebugStudyLauncher):
    """Launcher that runs members one by one in this process, selected by `hydra/launcher=scalerl_debug`."""
