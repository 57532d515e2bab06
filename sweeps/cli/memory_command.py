"""Command `scalerl memory`: what a run takes on each device, before compute is spent."""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

from sweeps.cli.output import print_json
from sweeps.report.plain import table

GIB = 2**30


def memory_command(options: argparse.Namespace) -> int:
    """Print the memory of a run by part and device; exit code 1 if it does not fit into `--gib`.

    Raises:
        UserError: overrides that do not compose, or a model whose memory cannot be foretold.
    """
    from lightning_scalerl.composition import build_recipe, compose
    from lightning_scalerl.measure.memory import advice, foretell

    config = compose(options.overrides)
    recipe = build_recipe(config, "")
    slots = 0 if str(config.driver._target_).endswith("Live") else int(config.generator.get("slots") or 0)
    strategy = str(config.strategy.name)
    found = foretell(_skeleton(config), recipe, options.devices, strategy, slots)
    limit = None if options.gib is None else round(options.gib * GIB)
    fits = limit is None or found.peak <= limit
    remedy = "" if fits or limit is None else advice(_skeleton(config), recipe, options.devices, strategy, slots, limit)
    if options.json:
        parts = {"device": dict(found.device), "rank 0": dict(found.leader), "host of rank 0": dict(found.host)}
        print_json({"bytes": parts, "peak": found.peak, "parameters": found.parameters, "fits": fits, "remedy": remedy})
        return 0 if fits else 1
    print(
        f"{found.parameters / 1e9:.3g} billion parameters, {options.devices} devices ({strategy}), "
        f"a pass of {found.tokens} tokens, rows of up to {found.row}\n"
    )
    rows = [
        *([name, f"{size / GIB:.2f}"] for name, size in found.device.items()),
        *([f"rank 0: {name}", f"{size / GIB:.2f}"] for name, size in found.leader.items()),
        ["together, on the fullest device", f"{found.peak / GIB:.2f}"],
        *([f"on the host of rank 0: {name}", f"{size / GIB:.2f}"] for name, size in found.host.items()),
    ]
    print(table(["part", "GiB"], rows))
    if limit is not None:
        print(f"\nfits into {options.gib:g} GiB" if fits else f"\ndoes not fit into {options.gib:g} GiB; {remedy}")
    return 0 if fits else 1


def _skeleton(config: Any) -> Any:
    """Return a function that makes the configured model; no weights are read, and none are trained."""
    from lightning_scalerl.measure.memory import from_config, of_arithmetic

    model = config.model
    if "path" in model:
        return from_config(str(model.path))
    return partial(of_arithmetic, int(model.width), int(model.layers))
