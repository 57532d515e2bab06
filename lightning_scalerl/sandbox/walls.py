"""Isolation mechanisms ("walls") around a sandboxed process, and the lines that describe them to users."""

from __future__ import annotations

from dataclasses import dataclass

BUBBLEWRAP, LANDLOCK, SECCOMP, OWN_USER = "bubblewrap", "Landlock", "seccomp", "separate user"
SCRATCH = "scratch directory of bounded size"


@dataclass(frozen=True)
class Walls:
    """Isolation mechanisms to use; `protections.py` finds out which of them work on this machine.

    Args:
        bubblewrap: path of the program bubblewrap; empty to do without it.
        user_namespace: whether bubblewrap creates a user namespace; otherwise it uses root's rights.
        landlock: version of Landlock's interface; 0 to do without it.
        seccomp: whether system calls are filtered.
        own_user: whether the process starts as root and switches to a user that no other process has.
        bounded: whether the scratch directory is a file system in memory of bounded size. Otherwise its size is checked
            about 50 times per second, and operations that would escape this check are refused (deleting files,
            O_TMPFILE, fallocate).
    """

    bubblewrap: str = ""
    user_namespace: bool = True
    landlock: int = 0
    seccomp: bool = False
    own_user: bool = False
    bounded: bool = False

    @property
    def isolated(self) -> bool:
        """True if network, files and other processes are all inaccessible."""
        return bool(self.bubblewrap) or (self.landlock > 0 and self.seccomp)


@dataclass(frozen=True)
class Protections:
    """Protections around untrusted code, and those that this machine lacks.

    Args:
        walls: isolation mechanisms in use, which a trial run has tested.
        obstacles: pairs of an unused protection and the reason why it is not used.
    """

    walls: Walls
    obstacles: tuple[tuple[str, str], ...] = ()

    def lines(self) -> list[str]:
        """Return one line per protection: how it is provided, or why it is missing."""
        walls = self.walls
        descriptions = {
            BUBBLEWRAP: "user namespace" if walls.user_namespace else "as root" if walls.bubblewrap else "",
            LANDLOCK: f"version {walls.landlock}",
            SECCOMP: "system calls are filtered",
            OWN_USER: "one for each sandbox",
            SCRATCH: "in memory",
        }
        missing = dict(self.obstacles)
        in_use = {
            BUBBLEWRAP: bool(walls.bubblewrap),
            LANDLOCK: walls.landlock > 0,
            SECCOMP: walls.seccomp,
            OWN_USER: walls.own_user,
            SCRATCH: walls.bounded,
        }
        absent = {name: f"missing, {missing.get(name, 'not requested')}" for name in in_use}
        lines = [f"{name}: {descriptions[name] if in_use[name] else absent[name]}" for name in in_use]
        return [*lines, "limits of time, memory, output and files: always"]
