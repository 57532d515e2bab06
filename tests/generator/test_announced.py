"""Tests of servers that announce their address and token in a file, for runs of the same user only."""

from __future__ import annotations

import os
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from lightning_scalerl.axes.precision import Precision
from lightning_scalerl.checks import CannotGoOnError, ConfigurationError
from lightning_scalerl.generator.base import GroupRequest
from lightning_scalerl.generator.fleet.addresses import addresses_of, check_engines
from lightning_scalerl.generator.fleet.fleet import Fleet
from lightning_scalerl.generator.vllm import announced
from lightning_scalerl.generator.vllm.announced import Announcement, address_in, address_line
from lightning_scalerl.generator.vllm.generator import VLLMGenerator
from lightning_scalerl.model.load import load_model
from lightning_scalerl.stream.drivers import Live
from tests.generator.sampling import with_sampling
from tests.generator.stand_in import TOKEN, StandIn
from tests.generator.test_fleet import drained

ONE, TWO = "http://n1:4001", "http://n2:4002"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "engine"


@pytest.fixture
def server() -> Iterator[StandIn]:
    with closing(StandIn()) as stand_in:
        yield stand_in


def test_an_announcement_is_private_and_replaced_atomically(path: Path) -> None:
    announcement = Announcement(path)
    announcement.write(ONE, "one")
    assert announcement.read() == (ONE, "one")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with path.open() as before:
        announcement.write(TWO, "two")
        assert address_in(before.read()) == ONE, "an open file keeps its content when the announcement is replaced"
    assert announcement.read() == (TWO, "two")
    announcement.remove(ONE, "one")
    assert path.exists(), "the file now belongs to another server"
    announcement.remove(TWO, "two")
    assert list(path.parent.iterdir()) == []
    announcement.remove(ONE, "one")


def test_an_announcement_that_others_could_read_is_removed(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = announced.write_atomically

    def write_readable(path: Path, text: str, mode: int) -> None:
        original(path, text, mode)
        path.chmod(0o644)

    monkeypatch.setattr(announced, "write_atomically", write_readable)
    with pytest.raises(ConfigurationError, match=r"^--announce \S+: others could read it .*0644.*http://HOST:PORT"):
        Announcement(path).write(ONE, "token")
    assert not path.exists()
    with pytest.raises(ConfigurationError, match=r"^--announce \S+/none/engine: cannot be written"):
        Announcement(path.parent / "none" / "engine").write(ONE, "token")


def others_file(path: Path) -> None:
    Announcement(path).write(ONE, "token")
    os.chown(path, 12345, -1)


@pytest.mark.parametrize(
    ("put", "message"),
    [
        (lambda path: path.mkdir(), "is a folder; name the file of each engine"),
        (lambda path: (path.touch(0o600), path.write_text("hello\n")), "is not an announcement"),
        (lambda path: (path.touch(0o600), path.write_bytes(os.urandom(9000))), "is not an announcement"),
        (lambda path: (Announcement(path).write(ONE, "t"), path.chmod(0o640)), r"must belong to this user .*0640"),
        (others_file, r"must belong to this user alone \(it belongs to user 12345"),
    ],
    ids=["folder", "text", "bytes", "mode", "owner"],
)
def test_a_file_that_cannot_be_used_is_refused_at_once(path: Path, put: Any, message: str) -> None:
    if put is others_file and os.geteuid() != 0:
        pytest.skip("only root can change the owner of a file")
    put(path)
    began = time.monotonic()
    with pytest.raises(ConfigurationError, match=r"^driver.engines: file:\S+ " + message):
        Announcement(path).find(20.0)
    assert time.monotonic() - began < 10


def test_a_file_that_cannot_be_read_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*args: Any, **kwargs: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refused)
    with pytest.raises(ConfigurationError, match="must belong to the same user"):
        Announcement(path).read()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("file:engines/0", "is not the whole path of a file"),
        ("file://shared/engines/0", "is not the whole path of a file"),
        ("file:", "is not the whole path of a file"),
        ("file:/shared/engines/", "is not the whole path of a file"),
        ("files:/shared/engines/0", "cannot be read; valid: .*file:/PATH"),
    ],
)
def test_an_incomplete_path_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"^driver.engines: '{text}' {message}"):
        Live(engines=[text])


def test_the_same_file_under_two_spellings_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"^driver.engines: file:/shared/a/../0 is there twice"):
        check_engines(["file:///shared/0", "file:/shared/a/../0"])
    (address,) = addresses_of(["file:///shared/engines/0"], 1)
    assert str(address) == "file:/shared/engines/0"
    assert Live(engines=["file:/a", "file:/b"], tensor_parallel=2).engine_devices == 4


def test_each_attempt_reads_the_announcement_again(
    path: Path, server: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No file yet, a server that is gone, and a port that another server has now: the file is read again each time."""
    monkeypatch.setattr(announced, "REREAD_S", 0.02)
    reads: list[str] = []
    files = iter([None, ("http://127.0.0.1:9", TOKEN), (server.address, "another"), (server.address, TOKEN)])
    read = Announcement.read

    def write_next(self: Announcement) -> tuple[str, str]:
        if (announced_now := next(files)) is not None:
            self.write(*announced_now)
        reads.append("read")
        return read(self)

    monkeypatch.setattr(Announcement, "read", write_next)
    assert Announcement(path).find(20.0) == (server.address, TOKEN)
    assert len(reads) == 4


def test_a_server_that_never_answers_is_an_error_with_the_reason(path: Path) -> None:
    with pytest.raises(CannotGoOnError, match=r"^driver.engines: file:\S+ .* for 0 s: no server has announced itself"):
        Announcement(path).find(0.0)
    Announcement(path).write("http://127.0.0.1:9", TOKEN)
    with pytest.raises(CannotGoOnError, match=r"for 0 s: http://127.0.0.1:9 does not answer \(URLError"):
        Announcement(path).find(0.0)


@pytest.mark.slow
def test_a_run_finds_a_server_that_has_moved(path: Path, tiny_model_path: str, tmp_path: Path) -> None:
    """The file names the old server until the next server has announced itself at another port."""
    arguments = with_sampling(precision=Precision("fp32"), max_prompt_tokens=16, max_new_tokens=6, stop_tokens=[1])
    factory = partial(VLLMGenerator, slots=4)
    with closing(StandIn()) as one, closing(StandIn()) as two:
        one.delay_s = 0.2
        Announcement(path).write(one.address, TOKEN)
        fleet = Fleet(
            *(factory, load_model(tiny_model_path), arguments),
            **{"generators": 1, "silence_s": 60.0, "start_s": 100.0, "engines": [f"file:{path}"]},
        )
        with closing(fleet):
            for key in range(4):
                fleet.submit(GroupRequest(key, (5, 9, 20), 2, (0, key)))
            while not one.sampled:
                time.sleep(0.01)
            one.down()
            timer = threading.Timer(1.0, Announcement(path).write, (two.address, TOKEN))
            timer.start()
            finished = drained(fleet)
            timer.join()
            assert sorted((rollout.key, rollout.index) for rollout in finished) == [
                (k, i) for k in range(4) for i in range(2)
            ]
            assert two.sampled and fleet.lost == 1


def test_the_address_line_is_found_among_other_lines() -> None:
    text = f"INFO something\n{address_line(TWO)}\nINFO engine: http://n1:4001 is no line of its own\n"
    assert address_in(text) == TWO and address_in("engine: nothing") is None
