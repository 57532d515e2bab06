"""Limits on what one run of foreign code may take of this machine."""

from __future__ import annotations

from dataclasses import dataclass, fields

from lightning_scalerl.checks import ConfigurationError, positive, whole_number

# With less the interpreter itself does not start.
_LEAST_MEMORY_MIB = 64


@dataclass(frozen=True)
class Limits:
    """Limits of one process each, unless a field says otherwise.

    Args:
        wall_s: wall-clock seconds from the start of foreign code; for a judgement, of all its calls together.
        cpu_s: seconds of processor time, rounded up to a whole second.
        memory_mib: address space in MiB.
        output_kib: KiB that are kept of standard output, and of standard error; more ends the program.
        file_mib: MiB of the largest file, and of the scratch directory as a whole (looked at some 50 times a second).
        processes: number of threads, where the sandbox has a user of its own; otherwise that many beyond those that the
            user has now, and 200 for what it starts elsewhere meanwhile. New processes are never allowed.
    """

    wall_s: float = 10
    cpu_s: float = 10
    memory_mib: int = 1024
    output_kib: int = 256
    file_mib: int = 16
    processes: int = 32

    def __post_init__(self) -> None:
        for field in fields(self):
            name, value = f"task.sandbox.{field.name}", getattr(self, field.name)
            (positive if field.name.endswith("_s") else whole_number)(name, value)
        if self.memory_mib < _LEAST_MEMORY_MIB:
            raise ConfigurationError(
                f"task.sandbox.memory_mib: {self.memory_mib!r} must be at least {_LEAST_MEMORY_MIB}: "
                "Python itself takes some"
            )
