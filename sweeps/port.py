"""Find a port for a server that must be told its port number."""

from __future__ import annotations

import random
import socket
from contextlib import suppress
from pathlib import Path

# Ports from `_FIRST` up to the system's own range may be returned; at most `_TRIES` of them are tried.
_FIRST, _TRIES = 10000, 100
_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_port(host: str = "127.0.0.1") -> int:
    """Return a TCP port that is free at `host`.

    A port below the system's own range is returned, if one is free. The system gives ports of its own range to all
    sockets without a fixed port, so it might give away such a port before the server binds it.
    """
    try:
        beyond = int(_RANGE.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        beyond = 32768  # first port of the usual range on Linux; on other systems it is higher
    ports = range(_FIRST, beyond)
    # Not the global generator, because the search for a port must not change a run's random numbers.
    for port in random.SystemRandom().sample(ports, min(_TRIES, len(ports))):
        with suppress(OSError):
            return _bound(host, port)
    return _bound(host, 0)


def _bound(host: str, port: int) -> int:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as free:
        free.bind((host, port))
        return int(free.getsockname()[1])
