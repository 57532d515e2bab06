"""Commands in real processes that are forked from this one, instead of starting Python anew.

`python -m lightning_scalerl.train` imports Lightning, which costs 12 seconds of CPU; a process forked from one that has
imported it costs milliseconds, and is as real: it has a pid, an exit code, signals, standard streams, a process group.
Use `subprocess` where the interpreter's start is the truth of the test: what is imported, an installed wheel.
"""

from __future__ import annotations

import atexit
import logging
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, NoReturn

_POLL_S = 0.005


class Forked:
    """A child process that runs `[sys.executable, "-m", MODULE, ...]`, with the methods of `subprocess.Popen` in use.

    Args:
        command: interpreter (which is this one), `-m` or a script's path, and arguments.
        cwd: working directory of the child.
        env: environment of the child; None for this process's.
        stdout: an open binary file for its standard output.
        stderr: the same for its standard error.
        start_new_session: whether it leads a process group of its own.
    """

    def __init__(
        self,
        command: Sequence[str | Path],
        *,
        cwd: str | Path | None = None,
        env: Mapping[str, str] | None = None,
        stdout: IO[bytes],
        stderr: IO[bytes],
        start_new_session: bool = False,
    ) -> None:
        self.args = [str(word) for word in command]
        assert self.args[0] == sys.executable, f"only this interpreter can be forked, not {self.args[0]}"
        self.returncode: int | None = None
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            _child(self.args[1:], cwd, env, stdout.fileno(), stderr.fileno(), start_new_session)

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal; None while it runs."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end, and return the exit code.

        Raises:
            subprocess.TimeoutExpired: it still runs after `timeout` seconds.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            time.sleep(_POLL_S)
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)


def run(
    command: Sequence[str | Path],
    *,
    cwd: str | Path | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float = 600.0,
    check: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, as `subprocess.run(..., capture_output=True, text=True)` does.

    Raises:
        subprocess.TimeoutExpired: it was killed after `timeout` seconds.
        subprocess.CalledProcessError: it failed, and `check` asks for that.
    """
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = Forked(command, cwd=cwd, env=env, stdout=out, stderr=err)
        try:
            process.wait(timeout)
        finally:
            process.kill()
            process.wait()
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode(errors="replace"))
    done = subprocess.CompletedProcess(process.args, process.wait(), *texts)
    if check:
        done.check_returncode()
    return done


def _child(
    words: list[str], cwd: str | Path | None, env: Mapping[str, str] | None, out: int, err: int, lead: bool
) -> NoReturn:
    """Become a process as a new interpreter would be, run, and never return into the test."""
    code = 1
    try:
        if lead:
            os.setsid()
        _forget_pytest(out, err)
        if "hydra.core.plugins" in sys.modules:
            _forget_hydra()
        if env is not None:
            os.environ.clear()
            os.environ.update(env)
        if cwd is not None:
            os.chdir(cwd)
        code = _run(words)
    except BaseException:
        traceback.print_exc()
    finally:
        # Whatever goes wrong here, this process must not return into the test.
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)


def _forget_pytest(out: int, err: int) -> None:
    """Take back what pytest has done to streams, logs, warnings, signals and exit handlers."""
    with Path(os.devnull).open("rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(out, 1)
    os.dup2(err, 2)
    standard = {sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__}
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    logging.root.handlers.clear()
    for reference in list(logging._handlerList):  # type: ignore[attr-defined]
        handler: Any = reference()
        stream = getattr(handler, "stream", None)
        if stream in standard or type(stream).__module__.startswith("_pytest"):
            with suppress(AttributeError):  # one that looks sys.stderr up each time has no stream to set
                handler.stream = sys.stderr  # not `setStream`: that flushes the old stream, which may be closed
    warnings.resetwarnings()
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    warnings.filterwarnings("ignore", category=ResourceWarning)
    warnings.filterwarnings("ignore", message=".*found in sys.modules after import of package.*")
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    atexit._clear()
    if (torch := sys.modules.get("torch")) is not None:
        # Its pool of threads is made anew at the first use after a fork: here, where no other thread sees it half made.
        torch.set_num_threads(1)
    # The helpers of `multiprocessing` are children of the process before the fork, which this one cannot wait for.
    for helper, names in (
        (multiprocessing.forkserver._forkserver, ("_forkserver_address", "_forkserver_alive_fd", "_forkserver_pid")),  # type: ignore[attr-defined]
        (multiprocessing.resource_tracker._resource_tracker, ("_fd", "_pid")),  # type: ignore[attr-defined]
    ):
        for name in names:
            setattr(helper, name, None)


def _forget_hydra() -> None:
    """Let Hydra look for its plugins anew: it loads each module again, and its classes must not be two."""
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.hydra_config import HydraConfig
    from hydra.core.plugins import Plugins
    from hydra.core.singleton import Singleton

    for kind in (GlobalHydra, HydraConfig, Plugins):
        Singleton._instances.pop(kind, None)
    for name in [name for name in sys.modules if name.partition(".")[0] == "hydra_plugins"]:
        del sys.modules[name]


def _run(words: list[str]) -> int:
    """Return the exit code of `python WORDS...`."""
    try:
        try:
            if words[0] == "-m":
                sys.argv = words[1:]
                sys.path.insert(0, str(Path.cwd()))
                runpy.run_module(words[1], run_name="__main__", alter_sys=True)
            else:
                sys.argv = words
                sys.path.insert(0, str(Path(words[0]).resolve().parent))
                runpy.run_path(words[0], run_name="__main__")
        finally:
            atexit._run_exitfuncs()
    except SystemExit as stop:
        if stop.code is None or isinstance(stop.code, int):
            return stop.code or 0
        print(stop.code, file=sys.stderr)
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0
