"""Engines that announce themselves in a file: found where they are, by whoever may know, and nowhere else."""

from __future__ import annotations

import os
import signal
import socket
import stat
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from lightning_scalerl.checks import ConfigurationError
from lightning_scalerl.generator import announced, listening, wire
from lightning_scalerl.generator.addresses import Address, addresses_of, check_engines
from lightning_scalerl.generator.announced import Announcement, line_of, listens_at
from lightning_scalerl.generator.engines import GeneratorLostError
from lightning_scalerl.generator.listening import Door
from lightning_scalerl.generator.transport import Given, Surroundings
from lightning_scalerl.stream.drivers import Live
from tests.generator.test_engines import fleet_at

TOKEN = "5ec4e7"
MESSAGE = r"^driver.engines: file:\S+ cannot be reached: "


@pytest.fixture(autouse=True)
def no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """An announcement brings its own."""
    monkeypatch.delenv(wire.TOKEN, raising=False)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "engine"


def door(path: Path, token: str = TOKEN) -> Door:
    """An engine that lets runs in and says nothing, announced."""
    found = Door("127.0.0.1", 0, token.encode())
    Announcement(path).write(line_of("127.0.0.1", found.port, "cpu"), token)
    return found


def within(seconds: float, done: Callable[[], object]) -> None:
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.01)


# --- what a file says ------------------------------------------------------------------------------------------


def test_an_announcement_is_its_users_alone_and_replaced_whole(path: Path) -> None:
    announcement, first = Announcement(path), line_of("n1", 4001, "cuda")
    announcement.write(first, "one")
    assert announcement.read() == ("n1", 4001, b"one")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with path.open() as before:
        announcement.write(line_of("n2", 4002, "cuda"), "two")
        assert listens_at(before.read()) == ("n1", 4001), "what is being read is not written into"
    assert announcement.read() == ("n2", 4002, b"two")
    announcement.remove(first, "one")
    assert path.exists(), "it is another engine's now"
    announcement.remove(line_of("n2", 4002, "cuda"), "two")
    assert list(path.parent.iterdir()) == []
    announcement.remove(first, "one")


def test_where_others_could_read_it_nothing_is_left_there(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = announced.write_atomically

    def everybodys(path: Path, text: str, mode: int) -> None:
        written(path, text, mode)
        path.chmod(0o644)

    monkeypatch.setattr(announced, "write_atomically", everybodys)
    with pytest.raises(ConfigurationError, match=r"^engine: --announce \S+: others could read it .*0644.*tcp://"):
        Announcement(path).write("line", "token")
    assert not path.exists()
    with pytest.raises(ConfigurationError, match=r"^engine: --announce \S+/none/engine: cannot be written"):
        Announcement(path.parent / "none" / "engine").write("line", "token")


def others_file(path: Path) -> None:
    door(path)
    os.chown(path, 12345, -1)


@pytest.mark.parametrize(
    ("put", "says"),
    [
        (lambda path: path.mkdir(), "it is a folder; name the file of each engine"),
        (lambda path: (path.touch(0o600), path.write_text("hello\n")), "it is no announcement"),
        (lambda path: (path.touch(0o600), path.write_bytes(os.urandom(9000))), "it is no announcement"),
        (lambda path: (door(path), path.chmod(0o640)), r"it must belong to this user alone .*0640"),
        (others_file, r"it must belong to this user alone \(it belongs to user 12345"),
    ],
    ids=["folder", "text", "bytes", "mode", "owner"],
)
def test_a_file_that_will_not_do_is_refused_at_once(path: Path, put: Any, says: str) -> None:
    if put is others_file and os.geteuid() != 0:
        pytest.skip("only root gives files away")
    put(path)
    began = time.monotonic()
    with pytest.raises(ConfigurationError, match=MESSAGE + says):
        fleet_at(f"file:{path}", start_s=20.0)
    assert time.monotonic() - began < 10


def test_a_file_that_cannot_be_read_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*given: Any, **more: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refused)
    with pytest.raises(wire.RefusedError, match="must belong to the same user"):
        Announcement(path).read()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("file:engines/0", "names no file by its whole path"),
        ("file://shared/engines/0", "names no file by its whole path"),
        ("file:", "names no file by its whole path"),
        ("file:/shared/engines/", "names no file by its whole path"),
        ("files:/shared/engines/0", "cannot be read; valid: .*file:/PATH"),
    ],
)
def test_a_path_that_is_not_whole_is_refused(text: str, says: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"^driver.engines: '{text}' {says}"):
        Live(engines=[text])


def test_the_same_file_in_other_words_is_there_twice() -> None:
    with pytest.raises(ConfigurationError, match=r"^driver.engines: file:/shared/a/../0 is there twice"):
        check_engines(["file:///shared/0", "file:/shared/a/../0"])
    (address,) = addresses_of(["file:///shared/engines/0"], 1)
    assert str(address) == "file:/shared/engines/0" and address.given
    assert Live(engines=["file:/a", "file:/b"], tensor_parallel=2).engine_devices == 4


# --- which engine is reached -----------------------------------------------------------------------------------


def test_each_attempt_reads_the_file_anew(path: Path, tmp_path: Path) -> None:
    """Not there yet, of an engine that is gone, of one whose port another one has now: it goes on looking."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        gone = taken.getsockname()[1]
    stranger = Door("127.0.0.1", 0, b"another")
    around = Surroundings(tmp_path, b"", wire.Caller("run", 5.0), 30.0, threading.Event())
    given = Given(Address("file", path=str(path)), around)
    try:
        within(10, lambda: "no engine has announced itself there" in given.last_words())
        Announcement(path).write(line_of("127.0.0.1", gone, "cpu"), TOKEN)
        within(10, lambda: "refused" in given.last_words())
        Announcement(path).write(line_of("127.0.0.1", stranger.port, "cpu"), TOKEN)
        within(10, lambda: f"another is at 127.0.0.1:{stranger.port}" in given.last_words())
        assert given.gone() is None and not given.refused
        there = door(path)
        assert there.next(10.0) is not None
        within(10, lambda: given._line.opened)
    finally:
        given.stop()


def test_one_that_never_announces_itself_ends_the_run_with_a_line(path: Path) -> None:
    with pytest.raises(GeneratorLostError, match=r"^generator: file:\S+ .*no engine has announced itself there"):
        fleet_at(f"file:{path}", start_s=0.5)


def test_one_of_another_version_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    door(path)
    own = wire.versions()
    of_engine = {**own, "lightning-scalerl": "0.0.1"}
    monkeypatch.setattr(wire, "versions", lambda: of_engine if "_let_in" in threading.current_thread().name else own)
    with pytest.raises(ConfigurationError, match=MESSAGE + r"it has lightning-scalerl 0.0.1, and here it is "):
        fleet_at(f"file:{path}")


def test_one_that_works_for_another_run_is_refused(path: Path) -> None:
    """As for two members of a study that name the same file."""
    there, place = door(path), Announcement(path)
    host, port, token = place.read()
    with closing(wire.call(host, port, token, wire.Caller("the other member", 60.0))):
        assert there.next(5.0) is not None
        with pytest.raises(
            ConfigurationError, match=MESSAGE + "it works for another run; give each run engines of its"
        ):
            fleet_at(f"file:{path}", silence_s=0.1)


# --- the engine's side -----------------------------------------------------------------------------------------


def test_it_is_announced_by_the_name_of_its_node_while_it_listens(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SLURMD_NODENAME", "n7")
    told: list[Any] = []
    monkeypatch.setattr(listening.signal, "signal", lambda number, what: told.append((number, what)))
    found: list[tuple[str, int, bytes]] = []
    work = listening._work
    monkeypatch.setattr(listening, "_work", lambda *given: (found.append(Announcement(path).read()), work(*given))[1])
    for host, name in (("0.0.0.0", "n7"), ("127.0.0.1", "127.0.0.1")):
        assert listening.listen(host, 0, "cpu", 0.05, path) == 0
        assert not path.exists(), "it has ended: no run has come"
        place = found[-1]
        assert place[0] == name and capsys.readouterr().out.startswith(line_of(name, place[1], "cpu"))
    assert found[0][2] != found[1][2], "each start makes a token"
    assert {number for number, _ in told} == {signal.SIGTERM}, "it is nobody's step: signals are for it"
