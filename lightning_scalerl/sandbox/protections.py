"""Finds the protections that work on this machine, by running a program that tries to get around them."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Literal, get_args

from lightning_scalerl.checks import ConfigurationError
from lightning_scalerl.sandbox.jail import landlock_abi, seccomp_obstacle
from lightning_scalerl.sandbox.launch import SandboxError, user_range
from lightning_scalerl.sandbox.limits import Limits
from lightning_scalerl.sandbox.run import run_in
from lightning_scalerl.sandbox.walls import BUBBLEWRAP, LANDLOCK, OWN_USER, SCRATCH, SECCOMP, Protections, Walls

Mode = Literal["auto", "bubblewrap", "landlock", "none"]

# Kernel settings that forbid user namespaces, with the value that does so.
_SETTINGS = (
    ("/proc/sys/kernel/unprivileged_userns_clone", "0"),
    ("/proc/sys/user/max_user_namespaces", "0"),
    ("/proc/sys/kernel/apparmor_restrict_unprivileged_userns", "1"),
)
_PROBE_LIMITS = Limits(wall_s=20, cpu_s=10, memory_mib=512, output_kib=16, file_mib=1, processes=16)

# Each line that this program prints, except the last, names an action that should have been denied.
_PROBE = """
import os, socket

def tried(what, act):
    try:
        act()
    except OSError:
        return
    print(what)

tried("files", lambda: open({secret!r}).read())
tried("files", lambda: open({target!r}, "w"))
tried("network", lambda: socket.create_connection(("127.0.0.1", {port}), 2))
tried("processes", lambda: os.kill({pid}, 0))
open("scratch", "w").close()
print("done")
"""


def check_protections(allow_unprotected: bool, mode: Mode = "auto") -> Protections:
    """Return the best protections that work on this machine, as shown by trial runs.

    Args:
        allow_unprotected: whether to accept incomplete isolation (`task.sandbox.unprotected`).
        mode: `auto` for the best protections, or only `bubblewrap` (with everything that works inside it), `landlock`
            (with seccomp, without bubblewrap) or `none`.

    Raises:
        ConfigurationError: network, files and processes cannot all be isolated, and this is not allowed.
    """
    if mode not in get_args(Mode):
        raise ConfigurationError(f"task.sandbox.mode: {mode!r} must be one of {', '.join(get_args(Mode))}")
    obstacles: dict[str, str] = {}
    walls = next((w for w in _candidates(mode, obstacles) if _works(w, obstacles)), Walls())
    if mode == "none":
        obstacles = dict.fromkeys((BUBBLEWRAP, LANDLOCK, SECCOMP, SCRATCH), "left out")
    protections = Protections(walls, tuple(obstacles.items()))
    if not (walls.isolated or allow_unprotected):
        missing = "; ".join(
            f"{name}: {reason}" for name, reason in obstacles.items() if name not in (OWN_USER, SCRATCH)
        )
        raise ConfigurationError(
            f"task.sandbox: this machine cannot shut foreign code in ({missing or mode}); install bubblewrap, or use "
            "Linux 5.13 with Landlock and seccomp, or set task.sandbox.unprotected=true to run it without protection"
        )
    return protections


def _candidates(mode: Mode, obstacles: dict[str, str]) -> list[Walls]:
    """Return sets of isolation mechanisms to try, best first; record protections known to be missing in `obstacles`."""
    landlock = landlock_abi() if mode != "none" else 0
    if not landlock:
        obstacles[LANDLOCK] = "the kernel does not have it, or it is turned off"
    no_seccomp = seccomp_obstacle() if mode != "none" else "left out"
    if no_seccomp:
        obstacles[SECCOMP] = no_seccomp
    seccomp = not no_seccomp
    root = os.geteuid() == 0
    own_user = root and user_range() is not None
    if not own_user:
        obstacles[OWN_USER] = "no user id is free" if root else "only root can assign one"
    candidates = []
    program = shutil.which("bwrap")
    if program is None:
        obstacles[BUBBLEWRAP] = "bwrap is not installed"
    elif mode in ("auto", "bubblewrap"):
        inner = [(landlock, seccomp), (0, seccomp), (0, False)]
        as_root = [Walls(program, False, *pair, own_user=True) for pair in inner] if own_user else []
        candidates += _bounded_first([*as_root, *(Walls(program, True, *pair) for pair in inner)])
    if mode in ("auto", "landlock") and landlock and seccomp:
        owners = (True, False) if own_user else (False,)
        candidates += _bounded_first([Walls("", True, landlock, True, own_user_option) for own_user_option in owners])
    if mode in ("auto", "none"):
        weaker = [(landlock, False), (0, seccomp), (0, False)] if mode == "auto" else [(0, False)]
        candidates += [
            Walls("", True, *pair, own_user=own_user_option)
            for pair in weaker
            for own_user_option in {own_user: 0, False: 0}
        ]
    # Remove duplicates: without Landlock, several candidates are the same.
    return list(dict.fromkeys(candidates))


def _bounded_first(candidates: list[Walls]) -> list[Walls]:
    """Return the candidates with a scratch directory of bounded size, then the same candidates without it."""
    return [replace(walls, bounded=bounded) for bounded in (True, False) for walls in candidates]


def _works(walls: Walls, obstacles: dict[str, str]) -> bool:
    """Return whether a program starts behind these walls and cannot escape them; record failures in `obstacles`."""
    try:
        reachable = _escapes(walls)
        # Without complete isolation, it is enough that the program starts.
        if not (reachable and walls.isolated):
            return True
        reason = ", ".join(f"{action} in reach" for action in reachable)
    except SandboxError as error:
        reason = str(error).removeprefix("the sandbox does not start: ")
    if walls.bounded:
        # The same walls are tried again without a bounded scratch directory, and any other failure is recorded then.
        obstacles.setdefault(SCRATCH, f"{reason}; programs cannot delete files in it")
    elif walls.bubblewrap:
        obstacles.setdefault(BUBBLEWRAP, reason + _namespace_settings())
    elif walls.isolated:
        obstacles.setdefault(LANDLOCK, reason)
    return False


def _escapes(walls: Walls) -> list[str]:
    """Run a program that tries forbidden actions behind these walls; return the actions that succeeded.

    Raises:
        SandboxError: the program did not start or did not finish.
    """
    with tempfile.TemporaryDirectory(prefix="scalerl-probe-") as folder, socket.socket() as listener:
        secret = Path(folder, "secret")
        secret.write_text("secret")
        # World-readable, so that only the walls can deny access.
        secret.chmod(0o644)
        Path(folder).chmod(0o777)
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        source = _PROBE.format(
            secret=str(secret), target=str(Path(folder, "made")), port=listener.getsockname()[1], pid=os.getpid()
        )
        result = run_in(walls, source, "", _PROBE_LIMITS)
    reachable = result.stdout.split()
    if result.status != "ok" or reachable[-1:] != ["done"]:
        message = " ".join(result.stderr_tail.split())[-200:]
        raise SandboxError(f"a trial run ended with {result.status}: {message}")
    return list(dict.fromkeys(reachable[:-1]))


def _namespace_settings() -> str:
    """Return the kernel settings that forbid user namespaces, to append to an error."""
    settings = []
    for path, forbidding in _SETTINGS:
        try:
            value = Path(path).read_text().strip()
        except OSError:
            continue
        if value == forbidding:
            settings.append(f"{path} is {value}")
    return f" ({', '.join(settings)})" if settings else ""
