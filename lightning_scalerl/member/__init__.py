"""Members of a study: their identification (`identify`, `identity`, `command`) and their execution (`run`).

`trust` checks a run's folder before any code that it names is imported. `export`, `rescore`, `noise` and `memory`
implement the commands of these names.
"""

from lightning_scalerl.torchmetrics_on_demand import torchmetrics_on_demand

# Must run before Lightning is imported. Only our own commands (`scalerl`, members of a study) import this package, so
# that torchmetrics is unchanged in scripts that import the library.
torchmetrics_on_demand()
