"""Members of a study: identify them, and run one.

`identify` composes and checks members, `identity` hashes them, `run` executes one. `command` plans members that are
commands of other trainers. `trust` checks code that a run's folder names before it is imported (for a study's
folder `sweeps/launch/trust.py`; both use `sweeps/run/trust.py`). The others are commands: `export`, `memory`, `noise`,
`rescore`.
"""

from lightning_scalerl.compat.imports import skip_unneeded_imports

# Only our own commands (`scalerl`, members of a study) import this package.
skip_unneeded_imports()
