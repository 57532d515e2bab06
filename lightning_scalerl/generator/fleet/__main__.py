"""Process of an engine, as `transport.Child` starts it: `python -m lightning_scalerl.generator.fleet FD FOLDER`."""

from __future__ import annotations

import sys
from multiprocessing.connection import Connection
from pathlib import Path

from lightning_scalerl.torchmetrics_on_demand import torchmetrics_on_demand


def main() -> int:
    """Serve the parent process until it says stop or is gone."""
    torchmetrics_on_demand()  # before anything imports Lightning, which takes two seconds more without it
    from lightning_scalerl.generator.fleet.server import serve_parent

    return serve_parent(Connection(int(sys.argv[1])), Path(sys.argv[2]))


if __name__ == "__main__":
    sys.exit(main())
