"""Walls around a sandboxed process, and their description for a user."""

from __future__ import annotations

from dataclasses import dataclass

BUBBLEWRAP, LANDLOCK, SECCOMP, OWN_USER = "bubblewrap", "Landlock", "seccomp", "a user of its own"
SCRATCH = "a scratch of bounded size"


@dataclass(frozen=True)
class Walls:
    """Walls to use, not those that exist; `protections.py` finds out what works on this machine.

    Args:
        bubblewrap: path of bubblewrap's program; empty for none.
        user_namespace: whether bubblewrap makes a user namespace; else it uses root's own rights.
        landlock: version of Landlock's interface; 0 for none.
        seccomp: whether system calls are filtered.
        own_user: whether the process starts as root and becomes a user that nobody else is.
        bounded: whether the scratch directory is a file system in memory of bounded size; else it is looked at some 50
            times a second, and what a look does not see is refused: deleting, O_TMPFILE, fallocate.
    """

    bubblewrap: str = ""
    user_namespace: bool = True
    landlock: int = 0
    seccomp: bool = False
    own_user: bool = False
    bounded: bool = False

    @property
    def isolated(self) -> bool:
        """Return whether network, files and processes are all out of reach."""
        return bool(self.bubblewrap) or (self.landlock > 0 and self.seccomp)


@dataclass(frozen=True)
class Protections:
    """Protections around foreign code, and those that this machine lacks.

    Args:
        walls: walls in use, which a trial run has passed.
        obstacles: pairs of a protection that is not in use and the reason.
    """

    walls: Walls
    obstacles: tuple[tuple[str, str], ...] = ()

    @property
    def network(self) -> bool:
        """Return whether the network is out of reach."""
        return self.walls.isolated

    @property
    def files(self) -> bool:
        """Return whether all files but the scratch directory, Python and system libraries are out of reach."""
        return self.walls.isolated

    @property
    def processes(self) -> bool:
        """Return whether other processes are out of reach."""
        return self.walls.isolated

    def lines(self) -> list[str]:
        """Return one line for each protection: how it is given, or why it is missing."""
        walls = self.walls
        given = {
            BUBBLEWRAP: "user namespace" if walls.user_namespace else "as root" if walls.bubblewrap else "",
            LANDLOCK: f"version {walls.landlock}",
            SECCOMP: "system calls are filtered",
            OWN_USER: "one for each sandbox",
            SCRATCH: "in memory",
        }
        missing = dict(self.obstacles)
        used = {
            BUBBLEWRAP: bool(walls.bubblewrap),
            LANDLOCK: walls.landlock > 0,
            SECCOMP: walls.seccomp,
            OWN_USER: walls.own_user,
            SCRATCH: walls.bounded,
        }
        absent = {name: f"missing, {missing.get(name, 'not asked for')}" for name in used}
        said = [f"{name}: {given[name] if used[name] else absent[name]}" for name in used]
        return [*said, "limits of time, memory, output and files: always"]
