"""User entry points: the command `scalerl`, and the launchers that Hydra calls."""
