"""A port that a server can bind a moment later, whatever else asks for any port meanwhile."""

from __future__ import annotations

import socket

import pytest

from sweeps import port
from sweeps.port import free_port


def test_no_socket_that_asks_for_any_port_gets_it() -> None:
    given = {free_port() for _ in range(20)}
    assert len(given) > 10
    held = []
    for _ in range(200):
        other = socket.socket()
        other.bind(("127.0.0.1", 0))
        held.append(other)
    assert given.isdisjoint(other.getsockname()[1] for other in held)
    lowest = min(other.getsockname()[1] for other in held)
    assert max(given) < lowest, "below the system's own range"
    for other in held:
        other.close()


def test_a_port_that_is_taken_is_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", free_port())) as taken:
        monkeypatch.setattr(port, "_FIRST", taken.getsockname()[1])
        # Two ports: the taken one and its neighbour, or any port if that one is taken too.
        monkeypatch.setattr(port, "_RANGE", port.Path("/nowhere"))
        assert all(free_port() != taken.getsockname()[1] for _ in range(50))
