"""User entry points: the command `scalerl`, and the launchers that Hydra calls.

`main` parses the command line and imports nothing slow (checked by `tests/sweeps/cli/test_quick.py`). To add a command,
add a parser in `main`, and a function in one of the `*_commands` modules, which are imported when their commands run.
Hydra calls `launchers` through `hydra_plugins/`.
"""
