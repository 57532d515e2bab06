"""Members of a study: identify them, and run one.

`identify` composes and checks members, `identity` hashes them, `run` executes one. `command` plans members that are
commands of other trainers. `trust` checks code that a run's folder names before it is imported (for a study's
folder `sweeps/launch/trust.py`; both use `sweeps/run/trust.py`). The others are commands: `export`, `memory`, `noise`,
`rescore`.
"""

from lightning_scalerl.compat.torchao import hide_torchao
from lightning_scalerl.torchmetrics_on_demand import torchmetrics_on_demand

# Both calls must precede the import of Lightning. Only our own commands (`scalerl`, members of a study) import this
# package, so scripts that import the library keep torchmetrics and torchao unchanged.
torchmetrics_on_demand()
hide_torchao()
