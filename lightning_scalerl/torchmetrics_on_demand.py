"""Import hook that skips the parts of torchmetrics Lightning never uses: two of the seven seconds that Lightning takes.

Lightning needs two classes of torchmetrics. That package's `__init__` imports every metric there is, and with them
scikit-learn, SciPy's signals and all of transformers. With the hook it runs when another name of the package is asked
for. Processes of our own commands install it (`member/__init__.py`, `translate/__init__.py`); importing the library
does not.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

_PACKAGE = "torchmetrics"
_NEEDED = {"Metric": "torchmetrics.metric", "MetricCollection": "torchmetrics.collections"}


def torchmetrics_on_demand() -> None:
    """Install the hook, unless torchmetrics is imported already."""
    if _PACKAGE not in sys.modules:
        sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    """Finds the package once, and replaces its loader by the one below."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _PACKAGE:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _OnDemand(spec.loader)
        return spec


class _OnDemand(Loader):
    """Makes the package without running its `__init__`, which `loader` does when an unknown name is asked for."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        from importlib.metadata import version  # a verifier's process, which never comes here, starts without

        def missing(name: str) -> Any:
            # doctest and inspect ask every module for such names.
            if name.startswith("__"):
                raise AttributeError(f"module {_PACKAGE!r} has no attribute {name!r}")
            if name in _NEEDED:
                # Its modules import each other in a cycle, which works from this module only.
                import_module(f"{_PACKAGE}.utilities")
                vars(module)[name] = vars(import_module(_NEEDED[name]))[name]
            else:
                del vars(module)["__getattr__"]
                self._loader.exec_module(module)
            return getattr(module, name)

        # `_logger` and `__version__` are what its own modules, and Lightning, read before they ask for anything else.
        vars(module).update(__getattr__=missing, __version__=version(_PACKAGE), _logger=logging.getLogger(_PACKAGE))
