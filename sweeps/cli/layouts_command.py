"""Command `scalerl layouts`: which split of devices between generators and trainer wastes least."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path

from sweeps.cli.output import print_json
from sweeps.errors import UserError
from sweeps.executor.base import load_entry
from sweeps.report.plain import table

ROWS = 6  # layouts in the table


def layouts_command(options: argparse.Namespace) -> int:
    """Print forecasts of splits, the best first.

    Raises:
        UserError: overrides that do not compose, devices that cannot be split, or a run that has measured nothing.
    """
    if options.run and options.overrides:
        raise UserError("layouts: --run has the configuration of a run already; give overrides without it")
    layouts_of = load_entry("lightning_scalerl.member.layouts:layouts_of")
    run = Path(options.run) if options.run else None
    sizes = options.tensor_parallel or [1]
    found, rates, work = layouts_of(options.overrides, run, options.devices, sizes, options.tokens, options.trust)
    if options.json:
        each = [{**asdict(layout), "device_hours_of_1000_steps": layout.device_hours} for layout in found]
        print_json({"layouts": each, "rates": rates.semantics(), "completion_tokens": work.completion_tokens})
        return 0
    print(
        f"{options.devices} devices, {work.groups} prompts of {work.completions} completions a step, "
        f"{work.completion_tokens:.0f} tokens each, {work.slots} slots an engine; rates: "
        f"{f'measured by {run}' if run else rates.source}\n"
    )
    best = found[0]
    rows = [
        [
            f"{layout.generator_devices} + {layout.trainer_devices}",
            str(layout.tensor_parallel),
            f"{layout.step_s:.3g}",
            f"{layout.generator_idle:.0%}",
            f"{layout.trainer_idle:.0%}",
            f"{layout.device_hours:.3g}",
            f"{best.step_s / layout.step_s:.2f}",
        ]
        for layout in (found if options.all else found[:ROWS])
    ]
    head = ["generators + trainer", "tensor parallel", "seconds a step", "generators idle", "trainer idle"]
    print(table([*head, "device hours of 1,000 steps", "speed"], rows))
    if len(found) > ROWS and not options.all:
        print(f"and {len(found) - ROWS} more (--all)")
    return 0
