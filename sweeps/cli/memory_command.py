"""Command `scalerl memory`: estimate the memory of a run on each device before it is started."""

from __future__ import annotations

import argparse

from sweeps.cli.output import print_json
from sweeps.errors import require_training
from sweeps.executor.base import load_entry
from sweeps.report.plain import table

GIB = 2**30


def memory_command(options: argparse.Namespace) -> int:
    """Print the memory of a run by part and device; the exit code is 1 if it does not fit into `--gib`.

    Raises:
        UserError: the overrides do not compose, or the model's memory cannot be predicted.
    """
    require_training("scalerl memory")
    memory_of = load_entry("lightning_scalerl.member.memory:memory_of")
    limit = None if options.gib is None else round(options.gib * GIB)
    found, devices, strategy, remedy = memory_of(options.overrides, options.devices, limit)
    if options.json:
        parts = {
            "device": dict(found.device),
            "rank 0": dict(found.leader),
            "host of rank 0": dict(found.host),
        }
        totals = {"peak": found.peak, "parameters": found.parameters}
        print_json({"bytes": parts, **totals, "fits": not remedy, "remedy": remedy})
        return 1 if remedy else 0
    print(
        f"{found.parameters / 1e9:.3g} billion parameters, {devices} device{'' if devices == 1 else 's'} ({strategy}), "
        f"{found.tokens} tokens per pass, rows of up to {found.row} tokens\n"
    )
    rows = [
        *([name, f"{size / GIB:.2f}"] for name, size in found.device.items()),
        *([f"rank 0: {name}", f"{size / GIB:.2f}"] for name, size in found.leader.items()),
        ["total of the fullest device", f"{found.peak / GIB:.2f}"],
        *([f"on the host of rank 0: {name}", f"{size / GIB:.2f}"] for name, size in found.host.items()),
    ]
    print(table(["part", "GiB"], rows))
    if limit is not None:
        print(f"\ndoes not fit into {options.gib:g} GiB; {remedy}" if remedy else f"\nfits into {options.gib:g} GiB")
    return 1 if remedy else 0
