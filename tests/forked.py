"""Run commands in processes forked from this one, instead of starting a new Python interpreter.

`python -m lightning_scalerl.train` imports Lightning, which takes 12 seconds of CPU. A fork of a process that has
imported it takes milliseconds, and is a real process too: pid, exit code, signals, standard streams, process group.
Use `subprocess` where the test is about the interpreter's start: which modules are imported, or an installed wheel.
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
    """A child process that runs `[sys.executable, "-m", MODULE, ...]`, with those methods of `subprocess.Popen` we use.

    Args:
        command: `sys.executable`, then `-m MODULE` or a script's path, then arguments.
        cwd: working directory of the child.
        env: environment of the child; None to inherit this process's.
        stdout: open binary file for standard output.
        stderr: open binary file for standard error.
        start_new_session: whether the child leads its own process group.
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
        """Return the exit code (negative for a signal), or None while the process runs."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the process to end, and return its exit code.

        Raises:
            subprocess.TimeoutExpired: the process still runs after `timeout` seconds.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            time.sleep(_POLL_S)
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
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
    """Run a command and wait for it, like `subprocess.run(..., capture_output=True, text=True)`.

    Raises:
        subprocess.TimeoutExpired: the command ran longer than `timeout` seconds and was killed.
        subprocess.CalledProcessError: the command failed and `check` is true.
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
    """Reset the forked process to the state of a new interpreter, run the command, and exit without returning."""
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
        # Exit even if flushing fails: the child must not return into the test.
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)


def _forget_pytest(out: int, err: int) -> None:
    """Undo pytest's changes to streams, logging, warnings, signals and exit handlers."""
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
            with suppress(AttributeError):  # a handler that looks up sys.stderr at each call has no stream to set
                handler.stream = sys.stderr  # not `setStream`: that flushes the old stream, which may be closed
    warnings.resetwarnings()
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    warnings.filterwarnings("ignore", category=ResourceWarning)
    warnings.filterwarnings("ignore", message=".*found in sys.modules after import of package.*")
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    atexit._clear()
    if (torch := sys.modules.get("torch")) is not None:
        # torch rebuilds its thread pool at the first use after a fork. Do it now, while there is only one thread.
        torch.set_num_threads(1)
    # The helper processes of `multiprocessing` are children of our parent, so this process cannot wait for them.
    for helper, names in (
        (multiprocessing.forkserver._forkserver, ("_forkserver_address", "_forkserver_alive_fd", "_forkserver_pid")),  # type: ignore[attr-defined]
        (multiprocessing.resource_tracker._resource_tracker, ("_fd", "_pid")),  # type: ignore[attr-defined]
    ):
        for name in names:
            setattr(helper, name, None)


def _forget_hydra() -> None:
    """Make Hydra discover its plugins again. It reloads each module; an old copy would leave every class twice."""
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.hydra_config import HydraConfig
    from hydra.core.plugins import Plugins
    from hydra.core.singleton import Singleton

    for kind in (GlobalHydra, HydraConfig, Plugins):
        Singleton._instances.pop(kind, None)
    for name in [name for name in sys.modules if name.partition(".")[0] == "hydra_plugins"]:
        del sys.modules[name]


def _run(words: list[str]) -> int:
    """Run `python WORDS...` and return its exit code."""
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
