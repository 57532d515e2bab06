"""Where Hydra looks for plugins: only this namespace may hold them. The launcher itself is `sweeps.launch`."""

from sweeps.launch import StudyLauncher


class ScaleRLLauncher(StudyLauncher):
    """`hydra/launcher=scalerl`."""
