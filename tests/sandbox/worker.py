"""Runs the sandbox for tests that start it as another user: requests and answers are lines of JSON."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from typing import Any

from lightning_scalerl.sandbox import Limits, check_protections, judge, judge_stdio, run_program
from lightning_scalerl.sandbox.run import run_in
from lightning_scalerl.sandbox.walls import Protections, Walls

PROTECTIONS: dict[str, Protections] = {}


def protections(mode: str) -> Protections:
    if mode not in PROTECTIONS:
        PROTECTIONS[mode] = check_protections(False, mode)  # type: ignore[arg-type]
    return PROTECTIONS[mode]


def perform(what: str, mode: str, limits: dict[str, Any], asked: dict[str, Any]) -> Any:
    """Perform one request in the current process."""
    allowed = Limits(**limits)
    if what == "behind":
        return run_in(Walls(**asked["walls"]), asked["source"], "", allowed)
    tested = protections(mode)
    if what == "protections":
        return tested
    if what == "judge":
        return judge(**asked, limits=allowed, protections=tested)
    if what == "stdio":
        return judge_stdio(asked["program"], [(i, o) for i, o in asked["cases"]], allowed, tested, asked["total_s"])
    return run_program(asked["source"], asked["stdin"], allowed, tested)


def main() -> None:
    print(os.getpid(), flush=True)
    for line in sys.stdin:
        try:
            answer = {"gave": dataclasses.asdict(perform(**json.loads(line)))}
        except Exception as error:
            answer = {"raised": [type(error).__name__, str(error)]}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
