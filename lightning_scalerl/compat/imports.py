"""Delays imports that other packages make before they are needed, in processes of this project's commands.

Importing Lightning and transformers takes a process 11 seconds of CPU, and more than four of these go into packages
that a run never uses. No setting of these packages prevents that:

- torchmetrics imports all of its metrics, although Lightning needs only two classes of it.
- torchmetrics imports matplotlib, for its plots.
- transformers imports scikit-learn, and with it scipy.stats and pandas, for assisted generation, and scipy.optimize for
  the losses of object detectors.
- transformers 5 reads the list of files of each installed distribution, to look up the names of a few of them.
- transformers imports torchao, for models that torchao has quantized, and prints a warning for each library of torchao
  that the machine cannot load. In this project, only `optimizer=adamw_8bit` uses torchao.

Only processes of our commands (`member/__init__.py`, `translate/__init__.py`, engines) skip these imports. Scripts that
import the library keep all packages unchanged.
"""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import Callable, Sequence
from importlib import import_module, metadata, reload
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_TORCHAO = "torchao"
_NEEDED_METRICS = {"Metric": "torchmetrics.metric", "MetricCollection": "torchmetrics.collections"}
# Imports make many objects and no garbage. By default Python would search for garbage after every 700 new objects.
_COLLECT_EVERY = 10_000
_USUAL_THRESHOLDS = gc.get_threshold()
# In every process, transformers looks up the distributions of these packages, which are named like the packages.
_OWN_DISTRIBUTION = {"accelerate", "mistral_common", "torch"}


def skip_unneeded_imports() -> None:
    """Skip the imports that this module lists, and collect garbage rarely until `collect_garbage_as_usual`.

    Call this before the import of Lightning or transformers; a second call does nothing.
    """
    # An entry of None in `sys.modules` makes Python's import system report that the module does not exist.
    sys.modules.setdefault(_TORCHAO, None)  # type: ignore[arg-type]
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
        gc.set_threshold(_COLLECT_EVERY, *_USUAL_THRESHOLDS[1:])


def collect_garbage_as_usual() -> None:
    """Collect garbage as often as Python does by default, so that a run frees its memory early."""
    gc.set_threshold(*_USUAL_THRESHOLDS)


def show_torchao() -> None:
    """Let torchao be imported after all, for the code that needs it."""
    if sys.modules.get(_TORCHAO, sys) is None:
        del sys.modules[_TORCHAO]


def has_torchao() -> bool:
    """Return whether torchao is installed, skipped or not."""
    try:
        metadata.version(_TORCHAO)
    except metadata.PackageNotFoundError:
        return False
    return True


def _metrics_on_demand(module: ModuleType, loader: Loader) -> None:
    """Delay the `__init__` of torchmetrics until the first access to a name outside `_NEEDED_METRICS`."""

    def missing(name: str) -> Any:
        # doctest and inspect look up such names in every module.
        if name.startswith("__"):
            raise AttributeError(f"module 'torchmetrics' has no attribute {name!r}")
        # The package's modules import each other in a cycle, which works only if this module comes first.
        utilities = import_module("torchmetrics.utilities")
        if name in _NEEDED_METRICS:
            vars(module)[name] = vars(import_module(_NEEDED_METRICS[name]))[name]
        else:
            del vars(module)["__getattr__"]
            loader.exec_module(module)
            vars(utilities.imports)["_MATPLOTLIB_AVAILABLE"] = utilities.imports.RequirementCache("matplotlib")
            # Metrics have imported functions of this module. After the reload these functions find matplotlib in it.
            reload(utilities.plot)
        return getattr(module, name)

    # The package's modules, and Lightning, read `_logger` and `__version__` before any other name.
    version = metadata.version("torchmetrics")
    vars(module).update(__getattr__=missing, __version__=version, _logger=logging.getLogger("torchmetrics"))


def _without_matplotlib(module: ModuleType, loader: Loader) -> None:
    """Make matplotlib seem missing to the modules of torchmetrics, until `_metrics_on_demand` loads all of them."""
    loader.exec_module(module)
    vars(module)["_MATPLOTLIB_AVAILABLE"] = False


def _import_with_check_off(check: str) -> Callable[[ModuleType, Loader], None]:
    """Return a hook that imports a module of transformers while `transformers.utils.<check>` returns False."""

    def hook(module: ModuleType, loader: Loader) -> None:
        utilities = vars(sys.modules["transformers.utils"])
        original = utilities[check]
        utilities[check] = lambda: False
        try:
            loader.exec_module(module)
        finally:
            utilities[check] = original

    return hook


def _distributions_on_demand(module: ModuleType, loader: Loader) -> None:
    """Let transformers read the distributions' files only when it looks up a package of an unknown distribution."""
    read = metadata.packages_distributions
    metadata.packages_distributions = _Distributions
    try:
        loader.exec_module(module)
    finally:
        metadata.packages_distributions = read


class _Distributions(dict[str, list[str]]):
    """Distributions of each importable package, read at the first look-up that needs them."""

    def get(self, package: str, default: Any = None) -> Any:
        if package in _OWN_DISTRIBUTION:
            return [package]
        if not self:
            self.update(metadata.packages_distributions())
        return super().get(package, default)


_HOOKS: dict[str, Callable[[ModuleType, Loader], None]] = {
    "torchmetrics": _metrics_on_demand,
    "torchmetrics.utilities.imports": _without_matplotlib,
    "transformers.generation.candidate_generator": _import_with_check_off("is_sklearn_available"),
    "transformers.loss.loss_utils": _import_with_check_off("is_scipy_available"),
    "transformers.utils.import_utils": _distributions_on_demand,
}


class _Finder(MetaPathFinder):
    """Finds the modules of `_HOOKS` through Python's other finders, and gives each a loader that calls its hook."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in _HOOKS:
            return None
        for finder in sys.meta_path:
            if finder is not self and (spec := finder.find_spec(fullname, path, target)) is not None:
                if spec.loader is not None:
                    spec.loader = _Hooked(spec.loader, _HOOKS[fullname])
                return spec
        return None


class _Hooked(Loader):
    """Loads a module as its own loader does, but lets a hook execute it."""

    def __init__(self, loader: Loader, hook: Callable[[ModuleType, Loader], None]) -> None:
        self._loader, self._hook = loader, hook

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # Restore the module's own loader, because readers of its source, such as inspect, ask the loader for it.
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._hook(module, self._loader)
