"""Tests of free_port: a server can still bind the port later, even if other sockets request any port meanwhile."""

from __future__ import annotations

import socket

import pytest

from sweeps import port
from sweeps.port import free_port


def test_free_ports_are_outside_the_systems_ephemeral_range() -> None:
    ports = {free_port() for _ in range(20)}
    assert len(ports) > 10
    sockets = []
    for _ in range(200):
        other = socket.socket()
        other.bind(("127.0.0.1", 0))
        sockets.append(other)
    assert ports.isdisjoint(other.getsockname()[1] for other in sockets)
    lowest = min(other.getsockname()[1] for other in sockets)
    assert max(ports) < lowest, "below the system's own range"
    for other in sockets:
        other.close()


def test_a_port_in_use_is_not_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", free_port())) as taken:
        monkeypatch.setattr(port, "_FIRST", taken.getsockname()[1])
        # Two ports: the taken one and its neighbour, or any port if that one is taken too.
        monkeypatch.setattr(port, "_RANGE", port.Path("/nowhere"))
        assert all(free_port() != taken.getsockname()[1] for _ in range(50))
