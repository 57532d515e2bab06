"""conf/ -> objects: configurations composed by Hydra, and what they stand for."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lightning_scalerl.choice import AXES, ConfigurationError, by_axis
from lightning_scalerl.recipe import Recipe


def conf_dir() -> Path:
    """The configuration folder: inside the package when installed from a wheel, else beside it.

    Raises:
        ConfigurationError: neither exists.
    """
    here = Path(__file__).resolve().parent
    for candidate in (here / "conf", here.parent / "conf"):
        if (candidate / "train.yaml").is_file():
            return candidate
    raise ConfigurationError(f"conf: no configuration folder in {here} or beside it; reinstall lightning-scalerl")


def compose(overrides: Sequence[str]) -> Any:
    """Compose `conf/train.yaml` with Hydra overrides.

    Raises:
        ConfigurationError: an unknown key, group or choice; one line that lists what is valid.
    """
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    # Inside a Hydra application its own state must survive our composing.
    outer = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(conf_dir()), version_base="1.3"):
            return hydra_compose("train", overrides=list(overrides))
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigurationError(explain(error)) from error
    finally:
        GlobalHydra.instance().clear()
        GlobalHydra.instance().hydra = outer


def _valid_keys(error: Exception) -> str:
    """For a key that does not exist: the keys that do, at the same place."""
    unknown = re.search(r"Could not override '([^']+)'", str(error))
    if not unknown:
        return ""
    node: Any = compose([])
    for part in unknown[1].split(".")[:-1]:
        node = node.get(part) if part in node else {}
    return f"; valid here: {', '.join(map(str, node))}"


def explain(error: Exception) -> str:
    """Hydra's error in one line: what was wrong, with what would be valid."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    cause = error.__cause__
    if cause is not None:
        lines += [line.strip() for line in str(cause).splitlines() if line.strip() and line.strip() not in lines]
    kept = [line for line in lines if not line.startswith(("full_key", "object_type", "reference_type", "Set the env"))]
    return "; ".join(kept).replace(":;", ":").replace(".;", ";") + _valid_keys(error)


def build(config: Any, group: str) -> Any:
    """Instantiate one group of a composed configuration.

    Raises:
        ConfigurationError: in one line, whatever the constructor had to say.
    """
    from hydra.errors import InstantiationException
    from hydra.utils import instantiate

    node = config[group]
    if not node or "_target_" not in node:
        raise ConfigurationError(f"{group}: nothing chosen; select one of the files in conf/{group}/")
    try:
        return instantiate(node, _convert_="all")
    except InstantiationException as error:
        cause = error.__cause__
        if isinstance(cause, ConfigurationError):
            raise cause from None
        first = str(cause or error).splitlines()[0]
        raise ConfigurationError(f"{group}: {first}") from error


def build_recipe(config: Any, name: str, build: Callable[[Any, str], Any] = build) -> Recipe:
    """Instantiate a composed configuration; `build` makes one group of it.

    Raises:
        ConfigurationError: a value that a choice or setting refuses.
    """
    return Recipe(
        name=name,
        choices=by_axis(build(config, axis) for axis in AXES),
        optimizer=build(config, "optimizer"),
        schedule=build(config, "schedule"),
        batch=build(config, "batch"),
        context=build(config, "context"),
        cost_model=build(config, "cost_model"),
        generator=build(config, "generator"),
    )


def load_recipe(name: str, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe `conf/recipe/<name>.yaml`, with overrides such as `optimizer.lr=1e-3`.

    Raises:
        ConfigurationError: an unknown recipe, key or value.
    """
    return build_recipe(compose([f"recipe={name}", *overrides]), name)
