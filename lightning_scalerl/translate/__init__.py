"""A recipe of ours in another trainer's words, and our arithmetic task trained by TRL.

In come a run's overrides; out comes a `Translation`: the settings that say the same over there, and by name every
choice for which nothing does. A name that means another thing there is left out, not translated: `record.py` has the
record, `to_trl.py`, `to_verl.py`, `to_prime_rl.py` and `to_skyrl.py` one trainer each, `command.py` what the command
line asks. `trl_member.py` hands a whole run to TRL: under its interpreter `trl_run.py` trains, which imports nothing of
ours.
"""

from lightning_scalerl.torchmetrics_on_demand import torchmetrics_on_demand

# Before anything here imports Lightning. Only processes of our own commands import this room (`scalerl`, members of a
# study): a script that imports the library keeps torchmetrics as it is.
torchmetrics_on_demand()
