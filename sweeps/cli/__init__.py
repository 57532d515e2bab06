"""The two front doors: the command `scalerl`, and the launchers that Hydra calls."""
