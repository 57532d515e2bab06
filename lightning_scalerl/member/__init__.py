"""Members of a study: which they are, and one of them run."""

from lightning_scalerl.torchmetrics_on_demand import torchmetrics_on_demand

# Before anything here imports Lightning. Only processes of our own commands import this room (`scalerl`, members of a
# study): a script that imports the library keeps torchmetrics as it is.
torchmetrics_on_demand()
