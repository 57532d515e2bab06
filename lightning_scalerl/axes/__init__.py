"""Axes of the design space, one module or folder each. A module holds pure functions and the callbacks that call them.

Each axis also declares its neutral choice, and how to detect in a step that two of its choices differ. `choices.py` has
one typed field per axis, which also names the file of the axis's neutral choice. `hydra_plugins/scalerl_axes.py` passes
these files to Hydra, so `conf/train.yaml` and recipes do not name axes that stay neutral. docs/guide/extend.md lists
the steps for a new choice and a new axis.

May import: `choice`, `results`, `checks`, `rollout`, never another axis.
"""
