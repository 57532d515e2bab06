"""Executors run members on this machine or on a SLURM cluster, and report how each one ended.

`base` is the protocol with `Launch` and `Outcome`. `local` runs members as child processes or in this process, `slurm/`
runs them as jobs. `failure` lists the kinds of failure, and `error_signatures` the messages that identify them.

To add an executor:

1. a module with the methods of `base.Executor`, and a `kind` in `launch/settings.py`;
2. lines in `tests/sweeps/executor/test_contract.py`, the contract of all executors but `debug`;
3. for `cluster=NAME`: a subclass of `StudyLauncher` in `cli/launchers.py` (`_shared = None` if members are not forks of
   this process), a stub in `hydra_plugins/scalerl_launcher.py`, `conf/hydra/launcher/scalerl_NAME.yaml` and
   `conf/cluster/NAME.yaml` (`debug` is the shortest example). Its own settings are a field of `LaunchSettings`.

A new kind of failure needs an entry in `failure.KINDS`, a retry policy in `conf/hydra/launcher/scalerl_slurm.yaml`, and
messages in `error_signatures` or a case in `slurm/ending.why_ended`.

May import: `run`.
"""
