"""Entry point of a sandboxed process: it confines itself (`jail.py`), reports to the parent, then performs its role.

Runs inside the child only (standard library only).
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # `signal` would import `enum`
import _socket
import builtins
import os
import struct
import sys
from typing import Any

from lightning_scalerl.sandbox.examine import examine
from lightning_scalerl.sandbox.jail import enter, watch_over_a_child
from lightning_scalerl.sandbox.serve import run_script, serve

READY = b"ready\n"


def main(config: dict[str, Any]) -> None:
    """Confine this process, then perform `config["role"]`: `script`, `program` or `judge`."""
    status = config["status"]
    try:
        if config["watched"]:
            watch_over_a_child()
        _prepare(config)
        scratch = enter(config["jail"])
    except BaseException as error:
        os.write(status, f"{type(error).__name__}: {error}"[:1000].encode("utf-8", "replace"))
        # EX_SOFTWARE in sysexits.h
        os._exit(70)
    # Until now, standard error went to the parent as part of the status. From here on it is the program's.
    os.dup2(1 if config["stderr"] is None else config["stderr"], 2)
    # Sending raises an error if the parent has died meanwhile.
    line = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM, 0, status)
    if scratch is None:
        line.send(READY)
    else:
        line.sendmsg([READY], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, struct.pack("i", scratch))])
        os.close(scratch)
    line.close()
    role = config["role"]
    if role == "script":
        run_script(config["source"])
        return
    try:
        if role == "program":
            serve(config["source"], *config["pipes"])
        else:
            examine(config, *config["pipes"])
    finally:
        os._exit(0)


def _prepare(config: dict[str, Any]) -> None:
    """Set up the interpreter and signals as a program expects them, and hide the modules of this package."""
    # This process was started with both signals blocked. A program may end its own children by SIGTERM, so the children
    # must not inherit the block. Ignoring SIGTERM discards one that came in the meantime.
    _signal.signal(_signal.SIGUSR2, _signal.SIG_IGN)
    _signal.signal(_signal.SIGTERM, _signal.SIG_IGN)
    _signal.pthread_sigmask(_signal.SIG_UNBLOCK, (_signal.SIGUSR2, _signal.SIGTERM))
    _signal.signal(_signal.SIGTERM, _signal.SIG_DFL)
    # Python's limit of 4,300 digits protects servers from slow conversions of integers. Here, time limits are enough.
    sys.set_int_max_str_digits(0)
    sys.path.extend(config["sys_path"])
    if not hasattr(builtins, "exit"):  # Python runs without `site`, whose import takes half of the start-up time
        from _sitebuiltins import Quitter

        for name in ("exit", "quit"):
            setattr(builtins, name, Quitter(name, "Ctrl-D"))
    for name in [n for n in sys.modules if n.partition(".")[0] == "lightning_scalerl"]:
        del sys.modules[name]
