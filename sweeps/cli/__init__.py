"""User entry points: the command `scalerl`, and the launchers that Hydra calls.

`main` parses and imports nothing heavy (`tests/sweeps/cli/test_quick.py` checks that). A command is a parser in `main`
and a function in one of the `*_commands` modules, imported when it runs. `launchers` is called by Hydra through
`hydra_plugins/`.
"""
