"""Engine process, started by `transport.Child`: `python -m lightning_scalerl.generator.fleet FD FOLDER`."""

from __future__ import annotations

import sys
from multiprocessing.connection import Connection
from pathlib import Path

from lightning_scalerl.compat.torchao import hide_torchao
from lightning_scalerl.torchmetrics_on_demand import torchmetrics_on_demand


def main() -> int:
    """Serve the parent process until it sends `stop` or ends."""
    hide_torchao()
    torchmetrics_on_demand()  # must precede the import of Lightning, which takes two seconds longer without it
    from lightning_scalerl.generator.fleet.server import serve_parent

    return serve_parent(Connection(int(sys.argv[1])), Path(sys.argv[2]))


if __name__ == "__main__":
    sys.exit(main())
