"""Engine process, started by `transport.Child`: `python -m lightning_scalerl.generator.fleet FD FOLDER`."""

from __future__ import annotations

import sys
from multiprocessing.connection import Connection
from pathlib import Path

from lightning_scalerl.compat.imports import collect_garbage_as_usual, skip_unneeded_imports


def main() -> int:
    """Serve the parent process until it sends `stop` or ends."""
    skip_unneeded_imports()
    from lightning_scalerl.generator.fleet.server import serve_parent

    collect_garbage_as_usual()
    return serve_parent(Connection(int(sys.argv[1])), Path(sys.argv[2]))


if __name__ == "__main__":
    sys.exit(main())
