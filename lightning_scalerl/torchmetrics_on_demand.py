"""Import hook that delays the import of torchmetrics, which saves two of Lightning's seven seconds of import time.

Lightning needs two classes of torchmetrics, but that package's `__init__` imports every metric, and with them
scikit-learn, scipy.signal and all of transformers. With this hook, the `__init__` runs only when another name of the
package is accessed. Only processes of our commands install the hook (`member/__init__.py`, `translate/__init__.py`);
importing the library does not.
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
    """Install the hook, unless torchmetrics is already imported."""
    if _PACKAGE not in sys.modules:
        sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    """Finds torchmetrics once, and replaces its loader with `_OnDemand`."""

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
    """Creates the package without running its `__init__`. The first access to a name outside `_NEEDED` runs it."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        from importlib.metadata import version  # imported here, as a verifier's process never needs it

        def missing(name: str) -> Any:
            # doctest and inspect look up such names in every module.
            if name.startswith("__"):
                raise AttributeError(f"module {_PACKAGE!r} has no attribute {name!r}")
            if name in _NEEDED:
                # The package's modules import each other in a cycle, which works only if this module comes first.
                import_module(f"{_PACKAGE}.utilities")
                vars(module)[name] = vars(import_module(_NEEDED[name]))[name]
            else:
                del vars(module)["__getattr__"]
                self._loader.exec_module(module)
            return getattr(module, name)

        # The package's modules, and Lightning, read `_logger` and `__version__` before any other name.
        vars(module).update(__getattr__=missing, __version__=version(_PACKAGE), _logger=logging.getLogger(_PACKAGE))
