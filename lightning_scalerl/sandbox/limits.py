"""Limits on the resources of one run of untrusted code."""

from __future__ import annotations

from dataclasses import dataclass, fields

from lightning_scalerl.checks import ConfigurationError, positive, whole_number

# With less memory the interpreter itself does not start.
_LEAST_MEMORY_MIB = 64


@dataclass(frozen=True)
class Limits:
    """Limits per process, unless a field says otherwise.

    Args:
        wall_s: wall-clock seconds from the start of the untrusted code; for `judge`, for all calls together.
        cpu_s: seconds of processor time, rounded up to a whole second.
        memory_mib: address space in MiB.
        output_kib: limit on standard output and on standard error in KiB; exceeding it ends the program.
        file_mib: limit in MiB on the largest file and on the whole scratch directory, which is checked about 50 times
            per second.
        processes: number of threads, if the sandbox has its own user. Otherwise the number of threads in addition to
            the user's present threads and 200 threads that the user may start elsewhere meanwhile. New processes are
            never allowed.
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
