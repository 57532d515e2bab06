"""Engines with addresses: links that are cut, servers that stop or are killed, strangers at the port."""

from __future__ import annotations

import json
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from multiprocessing.connection import Connection, deliver_challenge
from pathlib import Path
from typing import Any

import pytest

from lightning_scalerl.axes.async_mode import Pipeline
from lightning_scalerl.checks import ConfigurationError
from lightning_scalerl.generator import wire
from lightning_scalerl.generator.addresses import check_engines
from lightning_scalerl.generator.announced import Announcement
from lightning_scalerl.generator.base import StepReport
from lightning_scalerl.generator.channel import DirectChannel
from lightning_scalerl.generator.engines import Engine, GeneratorLostError
from lightning_scalerl.generator.fleet import Fleet
from lightning_scalerl.generator.listening import Door
from lightning_scalerl.generator.weights import WeightStore
from lightning_scalerl.stream.live_driver import LiveDriver
from sweeps.run.activity import activity
from tests.examples import every
from tests.generator.engines import TOKEN, Listening, Network, far_away, listening
from tests.generator.slow import Size, SlowGenerator, Weights, weights_of
from tests.generator.test_fleet import check, drained, submit
from tests.generator.threads import Threads
from tests.helpers import inline
from tests.stream.test_live_driver import once, train
from tests.stream.test_rollout_stream import stream_of

SILENCE_S = 3.0


class Twice(SlowGenerator):
    """Says everything twice."""

    def step(self) -> StepReport:
        report = super().step()
        return StepReport([*report.finished, *report.finished], *report.computed)


@pytest.fixture(autouse=True)
def token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(wire.TOKEN, TOKEN)


@pytest.fixture(scope="module")
def near(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Listening]:
    """An engine at this node's own address, for one test after the other."""
    with listening(tmp_path_factory.mktemp("near")) as engine:
        yield engine


@pytest.fixture
def network() -> Iterator[Network]:
    with far_away() as there:
        yield there


@pytest.fixture
def far(network: Network, tmp_path: Path) -> Iterator[Listening]:
    with listening(tmp_path, network.there, network.prefix) as engine:
        yield engine


def fleet_at(*engines: str, factory: Any = SlowGenerator, most_s: float = 0.01, **limits: float) -> Fleet:
    limits = {"silence_s": SILENCE_S, "start_s": 60.0, **limits}
    arguments = {"slots": 4, "most_s": most_s}
    return Fleet(factory, Weights(Size()), arguments, generators=1, engines=engines, **limits)  # type: ignore[arg-type]


def driver_at(*engines: str, **options: Any) -> LiveDriver:
    stream, fleet = stream_of(Pipeline(2)), fleet_at(*engines, **options)
    return LiveDriver(stream, fleet, DirectChannel(lambda: weights_of(stream.completed_steps), fleet), inline(stream))


def engine_at(driver: LiveDriver, address: str) -> Engine | None:
    return next((engine for engine in driver.generator._engines if engine.name == address), None)


def train_until(driver: LiveDriver, done: Callable[[], object], batches: list[Any], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline, "it did not come to that"
        batches += train(driver, 1, 0.02)


# --- outages ---------------------------------------------------------------------------------------------------


def comes_back(driver: LiveDriver, address: str, hurt: Callable[[], None], heal: Callable[[], None]) -> None:
    """An engine is away for longer than the limit: the run goes on, and later with it; each group counts once."""
    batches = train(driver, 3)
    hurt()
    train_until(driver, lambda: driver.generator.lost, batches)
    batches += train(driver, 4)
    away = engine_at(driver, address)
    assert away is not None and not away.ready, "the others did that"
    heal()
    train_until(driver, lambda: (back := engine_at(driver, address)) and back.ready, batches)
    back = engine_at(driver, address)
    assert back is not None
    before = driver.generator.work[back.number].tokens
    train_until(driver, lambda: driver.generator.work[back.number].tokens > before, batches)
    batches += train(driver, 4)
    once(batches, driver.stream)
    assert back.acknowledged == driver.generator._store.current.number


@pytest.mark.full
def test_a_link_that_is_cut_and_comes_back(network: Network, far: Listening, near: Listening) -> None:
    """Nobody is told of the cut (no FIN): it is noticed by silence."""
    with closing(driver_at(far.address, near.address)) as driver:
        comes_back(driver, far.address, network.cut, network.mend)
        assert driver.generator.lost == 1


@pytest.mark.full
def test_a_server_that_is_stopped_and_goes_on(far: Listening, near: Listening) -> None:
    with closing(driver_at(far.address, near.address)) as driver:
        comes_back(driver, far.address, lambda: far.signal(signal.SIGSTOP), lambda: far.signal(signal.SIGCONT))


@pytest.mark.full
def test_a_server_that_is_killed_and_started_again(far: Listening, near: Listening) -> None:
    with closing(driver_at(far.address, near.address)) as driver:
        comes_back(driver, far.address, far.end, far.start)


@pytest.mark.slow
def test_one_that_is_lost_and_announces_itself_elsewhere(tmp_path: Path, near: Listening) -> None:
    """The file stays as it was until the engine is back at another port, with another token."""
    path = tmp_path / "engine"
    with listening(tmp_path, announce=path) as moved, closing(driver_at(moved.address, near.address)) as driver:
        before = Announcement(path).read()
        comes_back(driver, moved.address, moved.end, moved.start)
        host, port, token = Announcement(path).read()
        assert (host, port) == ("127.0.0.1", moved.port) and port != before[1] and token != before[2]
        moved.signal(signal.SIGTERM)
        assert moved.process.wait(30) == 128 + signal.SIGTERM and not path.exists()


@pytest.mark.full
def test_the_only_link_is_cut_for_a_while(network: Network, far: Listening) -> None:
    """Nobody is left meanwhile; the run waits, and goes on with what comes back."""
    with closing(driver_at(far.address)) as driver:
        batches = train(driver, 3)
        network.cut()
        began = time.monotonic()
        while time.monotonic() - began < 2 * SILENCE_S:
            driver.generator.wait(0.1)
        network.mend()
        batches += train(driver, 6)
        once(batches, driver.stream)
        assert driver.generator.lost >= 1


@pytest.mark.full
def test_a_cut_that_is_shorter_than_the_limit_costs_nothing(network: Network, far: Listening) -> None:
    with closing(fleet_at(far.address, silence_s=8.0)) as fleet:
        submit(fleet)
        found = list(fleet.step().finished)
        network.cut()
        time.sleep(1.5)
        network.mend()
        check(found + drained(fleet), 0)
        assert fleet.lost == 0


@pytest.mark.slow
def test_one_that_stays_away_is_left_out_and_the_last_one_ends_the_run(tmp_path: Path, near: Listening) -> None:
    with listening(tmp_path) as other, closing(driver_at(other.address, near.address, start_s=4.0)) as driver:
        batches = train(driver, 2)
        other.end()
        train_until(driver, lambda: driver.generator.generators == 1, batches)
        batches += train(driver, 3)
        assert activity.facts()["engines"] == [
            {"where": other.address, "state": "left out"},
            {"where": near.address, "state": "up"},
        ]
        once(batches, driver.stream)
    assert "engines" not in activity.facts(), "the run is over"
    with listening(tmp_path) as alone, closing(fleet_at(alone.address, start_s=2.0)) as fleet:
        submit(fleet)
        alone.end()
        with pytest.raises(GeneratorLostError, match=r"tcp://127.0.0.1:\d+ .*refused.* no other engine is left"):
            drained(fleet)


@pytest.mark.slow
def test_one_that_answers_twice(near: Listening) -> None:
    with closing(fleet_at(near.address, "local", factory=Twice)) as fleet:
        submit(fleet)
        check(drained(fleet), 0)
        with fleet.aside():
            fleet.publish(weights_of(3), 3)
            submit(fleet, 3)
            check(drained(fleet), 3, 3)


@pytest.mark.parametrize("seed", every(20, range(20), pytest.mark.full))
@pytest.mark.slow
def test_random_delays_on_either_side(seed: int, near: Listening) -> None:
    """No token is older than the mode allows (`train` looks at each batch), whichever engine sampled it."""
    import random

    delays = random.Random(1000 + seed)
    mode = Pipeline(delays.choice([1, 2, 3, 5]))
    engines = [near.address, "local"] if seed % 4 == 3 else [near.address]
    stream = stream_of(mode)
    fleet = fleet_at(*engines, most_s=delays.choice([0.0, 0.005, 0.03]), silence_s=60.0)
    driver = LiveDriver(stream, fleet, DirectChannel(lambda: weights_of(stream.completed_steps), fleet), inline(stream))
    with closing(driver):
        once(train(driver, 15, delays.choice([0.0, 0.02, 0.1]), seed), stream)
        metrics = driver.metrics()
    assert metrics["live/trainer_tokens_s"] > 0
    assert metrics["live/engine0_tokens_s"] > 0 and 0 <= metrics["live/engine0_idle"] <= 1


# --- who may speak ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_strangers_are_sent_away_in_a_line_and_harm_nobody(near: Listening, monkeypatch: pytest.MonkeyPatch) -> None:
    silent = socket.create_connection((near.host, near.port))
    rude = socket.create_connection((near.host, near.port))
    rude.sendall(b"GET / HTTP/1.1\r\nHost: here\r\n\r\n")
    large = socket.create_connection((near.host, near.port))
    large.sendall(b"\xff" * 4096)
    monkeypatch.setenv(wire.TOKEN, "another")
    with pytest.raises(
        ConfigurationError, match=r"^driver.engines: tcp://\S+ .*another token \(SCALERL_ENGINE_TOKEN\)$"
    ):
        fleet_at(near.address)
    monkeypatch.delenv(wire.TOKEN)
    with pytest.raises(ConfigurationError, match=r"^driver.engines: tcp://\S+ needs the engine's token in SCALERL_ENG"):
        fleet_at(near.address)
    monkeypatch.setenv(wire.TOKEN, TOKEN)
    with closing(fleet_at(near.address)) as fleet:
        with pytest.raises(ConfigurationError, match=r"^driver.engines: tcp://\S+ .*it works for another run"):
            fleet_at(near.address, silence_s=0.1)
        submit(fleet)
        check(drained(fleet), 0)
    own = wire.versions()
    monkeypatch.setattr(wire, "versions", lambda: {**own, "lightning-scalerl": "0.0.1"})
    with pytest.raises(
        ConfigurationError, match=r"it has lightning-scalerl \S+, and here it is 0.0.1; use one version"
    ):
        fleet_at(near.address)
    for each in (silent, rude, large):
        each.close()
    assert "GET" not in near.log.read_text()


def test_nothing_is_unpickled_of_a_stranger(monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes before the token is known is bytes of a challenge, and JSON."""

    def unpickled(*args: Any) -> None:
        raise AssertionError("unpickled")

    monkeypatch.setattr(wire.pickle, "loads", unpickled)
    door = Door("127.0.0.1", 0, b"right")
    for token in (b"right", b"wrong"):
        if token == b"wrong":
            with pytest.raises(wire.RefusedError, match="another token"):
                wire.call("127.0.0.1", door.port, token, wire.Caller("run", 5.0))
            continue
        with closing(wire.call("127.0.0.1", door.port, token, wire.Caller("run", 5.0))):
            connection = door.next(5.0)
            assert connection is not None
        door.leave()


def test_one_that_does_not_know_the_token_and_goes_on_all_the_same_does_not_get_in() -> None:
    """The engine's own look at the answer counts, not what the other side makes of it."""
    door = Door("127.0.0.1", 0, b"right")
    connection = Connection(socket.create_connection(("127.0.0.1", door.port)).detach())
    with closing(connection):
        connection.recv_bytes(256)  # the challenge
        connection.send_bytes(b"no digest of it")
        with suppress(EOFError, OSError):  # it may be gone by any of these
            connection.recv_bytes(256)
            deliver_challenge(connection, b"right")
            said = {"versions": wire.versions(), "run": "run", "silence_s": 5.0}
            connection.send_bytes(json.dumps(said).encode())
        assert door.next(1.0) is None
        with pytest.raises((EOFError, OSError)):
            while True:
                connection.recv_bytes(4096)


def test_a_listener_without_a_token_is_refused_in_a_line() -> None:
    with pytest.raises(ConfigurationError, match=r"^engine: SCALERL_ENGINE_TOKEN is not set; .*secrets.token_hex"):
        Door("0.0.0.0", 0, b"")


def test_one_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(GeneratorLostError, match=rf"^generator: tcp://127.0.0.1:{port} .*refused"):
        fleet_at(f"tcp://127.0.0.1:{port}", start_s=0.5)


@pytest.mark.parametrize(
    ("engines", "says"),
    [
        (["tcp://here"], "'tcp://here' cannot be read; valid: local, srun, tcp://HOST:PORT"),
        (["here:123"], "cannot be read"),
        (["tcp://here:99999"], "cannot be read"),
        (["udp://here:123"], "cannot be read"),
        (["tcp://here:123/path"], "cannot be read"),
        (["tcp://here:123", "local", "tcp://here:123"], "tcp://here:123 is there twice"),
        (["srun", "srun"], "srun is there twice"),
    ],
)
def test_addresses_that_say_nothing_are_refused(engines: list[str], says: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"^driver.engines: .*{says}"):
        check_engines(engines)


def test_srun_is_for_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    with pytest.raises(ConfigurationError, match="srun is for a job of SLURM"):
        fleet_at("srun")
    with pytest.raises(ConfigurationError, match="use it with generator=vllm"):
        fleet_at("http://127.0.0.1:8000")


@pytest.mark.slow
def test_damaged_weights_are_an_error_that_names_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    Threads(monkeypatch)
    write = WeightStore._write

    def damaged(self: WeightStore, *args: Any) -> Any:
        published = write(self, *args)
        if published.version == 2:
            data = bytearray(published.path.read_bytes())
            data[-1] ^= 1
            published.path.write_bytes(data)
        return published

    monkeypatch.setattr(WeightStore, "_write", damaged)
    with closing(fleet_at("local")) as fleet:
        fleet.publish(weights_of(1), 1)
        with pytest.raises(GeneratorLostError, match=r"^generator: process 0 holds weights with the digest \w+, and"):
            fleet.publish(weights_of(2), 2)
