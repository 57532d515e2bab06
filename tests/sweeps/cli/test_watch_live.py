"""Test of `scalerl watch` in a real terminal, while another process writes the study."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.paths import ROOT
from tests.place import PATIENCE_S

# Writes a study of two runs. It executes each command of its standard input, then prints the command.
WRITER = """
import sys
from pathlib import Path
from sweeps.run.journal import Journal
runs = {name: Journal(Path(sys.argv[1]) / name) for name in ("one", "two")}
for seed, (name, journal) in enumerate(runs.items()):
    journal.header(run=name, curve=name, recipe="scalerl+loss=" + name + "\\x1b[31m", seed=seed, device="cpu")
at = 0
print("begun", flush=True)
for word in iter(sys.stdin.readline, ""):
    word = word.strip()
    if word == "evaluate":
        for at in range(at, at + 6):
            for name, journal in runs.items():
                rate = 0.2 + (0.5 if name == "one" else 0.3) * at / (at + 2)
                spent = {"compute/virtual_device_hours": float(at), "compute/flops": at}
                journal.record("eval", at, {"eval/heldout/pass_rate": rate, **spent})
        at += 1
    elif word == "tear":
        with runs["one"].path.open("a") as handle:
            handle.write('{"kind":"eval","time":1.0,"st')
    elif word == "vanish":
        runs["two"].path.unlink()
    print(word, flush=True)
"""


class Terminal:
    """Run a command in a pseudo-terminal and collect its output."""

    def __init__(self, *words: str, columns: int = 100, rows: int = 24) -> None:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm-256color", "PYTHONUTF8": "1"}
        for name in ("COLUMNS", "LINES", "NO_COLOR"):
            environment.pop(name, None)
        self.pid, self.master = pty.fork()
        if self.pid == 0:
            # Under a background script SIGINT is inherited as ignored. A shell in a terminal would restore it.
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.execve(sys.executable, [sys.executable, "-m", "sweeps", *words], environment)
        self.resize(columns, rows)
        self.seen = b""
        self.code: int | None = None

    def resize(self, columns: int, rows: int) -> None:
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def read(self, timeout_s: float) -> bool:
        """Read the output that arrives within `timeout_s`. False at the end of the output."""
        if select.select([self.master], [], [], timeout_s)[0]:
            try:
                self.seen += os.read(self.master, 65536)
            except OSError:
                return False
        return True

    @property
    def text(self) -> str:
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self.seen.decode(errors="replace"))

    @property
    def frame(self) -> str:
        """The last frame that was drawn, without escape sequences."""
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self.seen.decode(errors="replace").rpartition("\x1b[H")[2])

    def wait_for(self, condition: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline and self.read(1.0), f"no {what} in {self.text[-2000:]}"

    def end(self) -> int:
        """Wait until the command ends and return its exit code."""
        deadline = time.monotonic() + PATIENCE_S
        while self.read(1.0):
            assert time.monotonic() < deadline, f"no end after {self.text[-2000:]}"
        self.code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.code

    def close(self) -> None:
        if self.code is None:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self.master)


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[Callable[[str], None]]:
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path / "study")],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stdin is not None
    assert process.stdout.readline() == "begun\n"

    def do(word: str) -> None:
        assert process.stdout is not None and process.stdin is not None
        process.stdin.write(f"{word}\n")
        process.stdin.flush()
        assert process.stdout.readline() == f"{word}\n"

    yield do
    process.stdin.close()
    process.wait(60)
    process.stdout.close()


@pytest.mark.live
def test_watch_follows_a_study_until_ctrl_c(tmp_path: Path, writer: Callable[[str], None]) -> None:
    terminal = Terminal("watch", str(tmp_path / "study"))
    try:
        terminal.wait_for(lambda: "waiting for the first" in terminal.text, "screen")
        assert b"\x1b[?1049h" in terminal.seen and "2 running" in terminal.text
        writer("evaluate")
        # The escape character in a label is removed, the rest of the label is printed.
        ranked = r"P\(best\)(.|\n)+loss=one \[31m +0\.\d\d +0\.5\d\d +[▁-█]{6} +too_few_points"
        terminal.wait_for(lambda: re.search(ranked, terminal.frame), "ranking")
        assert re.search(r"running +loss=one \[31m +0 +5 +0\.5\d\d +[▁-█]{6}", terminal.frame)
        for word in ("tear", "vanish"):
            writer(word)
        terminal.wait_for(lambda: "1 running" in terminal.frame, "member less")
        terminal.resize(40, 10)
        os.kill(terminal.pid, signal.SIGWINCH)
        terminal.wait_for(lambda: terminal.frame.count("\n") == 9 and "P(best)" in terminal.frame, "small screen")
        assert all(len(line.rstrip("\r")) <= 40 for line in terminal.frame.split("\n"))
        os.write(terminal.master, b"\x03")
        assert terminal.end() == 0
    finally:
        terminal.close()
    screen, _, left = terminal.seen.decode(errors="replace").rpartition("\x1b[?1049l")
    assert screen and "P(best)" in left and "loss=one" in left
    assert "Traceback" not in terminal.text
