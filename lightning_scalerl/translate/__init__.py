"""Translation of recipes into the settings of other trainers, and training of our arithmetic task by TRL.

A run's overrides become a `Translation`: the other trainer's settings with the same meaning, and a list of all choices
without a counterpart. A setting with the same name but another meaning is not a counterpart.

`record.py` defines `Translation`. `to_trl.py`, `to_verl.py`, `to_prime_rl.py` and `to_skyrl.py` translate for one
trainer each. `command.py` is the entry of the command line. `trl_member.py` starts `trl_run.py` in TRL's interpreter,
to train a whole run; `trl_run.py` imports nothing of this package.
"""

from lightning_scalerl.compat.imports import skip_unneeded_imports

# Only commands of this project import this package (`scalerl`, members of a study), so a user's script is not affected.
skip_unneeded_imports()
