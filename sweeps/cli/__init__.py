"""User entry points: the command `scalerl`, and the launchers that Hydra calls.

`main` parses and imports nothing heavy (checked by `tests/sweeps/cli/test_quick.py`). A command is a parser in `main`
and a function in one of the `*_commands` modules, which is imported when the command runs. Hydra calls `launchers`
through `hydra_plugins/`.
"""
