"""Hides torchao from transformers, because only `optimizer=adamw_8bit` uses it.

transformers imports torchao wherever it is installed, for models that torchao has quantized. The import
takes two seconds in every process, and prints a warning for each library of torchao that the machine cannot load.
transformers has no setting that prevents it (5.19, quantizers/quantizer_torchao.py).
"""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError, version

_PACKAGE = "torchao"


def hide_torchao() -> None:
    """Make torchao look absent to other packages in this process; only processes of our commands call this."""
    # An entry of None in `sys.modules` makes Python's import system report that the module does not exist.
    sys.modules.setdefault(_PACKAGE, None)  # type: ignore[arg-type]


def show_torchao() -> None:
    """Undo `hide_torchao`, for the code that needs the package."""
    if sys.modules.get(_PACKAGE, sys) is None:
        del sys.modules[_PACKAGE]


def has_torchao() -> bool:
    """Return whether torchao is installed, hidden or not."""
    try:
        version(_PACKAGE)
    except PackageNotFoundError:
        return False
    return True
