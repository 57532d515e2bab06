"""Translation of recipes into the settings of other trainers, and training of our arithmetic task by TRL.

A run's overrides become a `Translation`: the other trainer's settings with the same meaning, and a list of all choices
without a counterpart. A setting of the same name but with another meaning counts as no counterpart.

`record.py` has the record. `to_trl.py`, `to_verl.py`, `to_prime_rl.py` and `to_skyrl.py` translate for one trainer
each. `command.py` is the entry of the command line. `trl_member.py` lets TRL train a whole run: `trl_run.py` does so in
TRL's interpreter and imports nothing of this package.
"""

from lightning_scalerl.compat.torchao import hide_torchao
from lightning_scalerl.torchmetrics_on_demand import torchmetrics_on_demand

# Must run before Lightning is imported. Only our own commands (`scalerl`, members of a study) import this package, so
# that torchmetrics and torchao are unchanged in scripts that import the library.
torchmetrics_on_demand()
hide_torchao()
