"""Members of a study, which are its runs: plan them before the launch, and execute one.

`identify` composes and checks members, `identity` hashes them, `run` executes one. `branch` starts a run from another
run's checkpoint. `command` and `trl` plan members that run another trainer's command. `trust` checks the code that a
run's folder names, before that code is imported; `sweeps/launch/trust.py` does this for a study's folder. The other
modules are commands of `scalerl`: `export`, `memory`, `noise`, `rescore`.
"""

from lightning_scalerl.compat.imports import skip_unneeded_imports

# Only commands of this project import this package (`scalerl`, members of a study), so a user's script is not affected.
skip_unneeded_imports()
