"""Settings of SLURM jobs: resources, limits, and the user's own set-up commands."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from sweeps.errors import UserError

# Options of sbatch, under the keys of hydra-submitit-launcher, which is Hydra's own launcher.
RESOURCES = (
    *("timeout_min", "cpus_per_task", "gpus_per_node", "tasks_per_node", "mem_gb", "nodes", "name", "stderr_to_stdout"),
    # the following are for SLURM only
    *("partition", "qos", "comment", "constraint", "exclude", "nodelist", "exclusive", "gres", "cpus_per_gpu"),
    *("gpus_per_task", "mem_per_gpu", "mem_per_cpu", "account", "dependency", "mail_type", "mail_user", "wckey"),
    *("signal_delay_s", "array_parallelism", "additional_parameters", "srun_args", "clusters"),
)


# A key of hydra-submitit-launcher that has no effect here, because all files are in the study's folder.
_UNUSED = ("submitit_folder",)


@dataclass(frozen=True)
class JobSettings:
    """Settings of a study's jobs on a SLURM cluster. Each job runs one member.

    Attributes:
        resources: options of the jobs under the keys of hydra-submitit-launcher, see `RESOURCES`.
        setup, teardown: shell commands of the batch script before and after the member.
        python: command with which a job starts Python: a path, or a container's command that ends in a path; None for
            this interpreter.
        require_gpu: whether a job that requests GPUs but sees none must fail, so that its node is excluded.
        max_num_timeout: how often a member's job may reach its time limit; None for any number of times.
        array_size: largest number of members in one array; None for the cluster's own limit.
        poll_s: seconds between two queries of the queue.
        lost_after_s: seconds after which a job that the scheduler does not list counts as lost.
    """

    resources: Mapping[str, Any] = field(default_factory=dict)
    setup: tuple[str, ...] = ()
    teardown: tuple[str, ...] = ()
    python: str | None = None
    require_gpu: bool = True
    max_num_timeout: int | None = None
    array_size: int | None = None
    poll_s: float = 10.0
    lost_after_s: float = 120.0

    @property
    def timeout_min(self) -> int:
        """Time limit of a job in minutes; default 60."""
        return int(self.resources.get("timeout_min") or 60)

    @property
    def asks_for_gpus(self) -> bool:
        """True if a job requests GPUs through any of sbatch's options."""
        options = {**self.resources, **(self.resources.get("additional_parameters") or {})}
        set_options = {str(key).replace("-", "_"): value for key, value in options.items() if value}
        return bool(_GPU_OPTIONS & set_options.keys()) or any(
            "gpu" in str(set_options.get(key, "")) for key in _GENERAL_OPTIONS
        )

    @property
    def needs_gpu(self) -> bool:
        """True if a job that sees no GPU must fail: it requests GPUs, and `require_gpu` is set."""
        return self.require_gpu and self.asks_for_gpus

    @property
    def clusters(self) -> str:
        """Names of clusters of a federation to which jobs are submitted, comma-separated; "" for the local cluster."""
        return str(self.resources.get("clusters") or "")

    @property
    def signal_delay_s(self) -> int:
        """Seconds before its time limit at which a job gets the warning signal; default 120."""
        return int(self.resources.get("signal_delay_s") or 120)

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Self:
        """Make settings from the launcher's keys (those of hydra-submitit-launcher and our own), and check them.

        Raises:
            UserError: a value cannot work. The message says which values can.
        """
        rest = {key: value for key, value in given.items() if value is not None and key not in _UNUSED}
        try:
            settings = cls(
                setup=_commands("setup", rest.pop("setup", ())),
                teardown=_commands("teardown", rest.pop("teardown", ())),
                python=rest.pop("python", None),
                require_gpu=rest.pop("require_gpu", True),
                max_num_timeout=rest.pop("max_num_timeout", None),
                array_size=rest.pop("array_size", None),
                poll_s=float(rest.pop("poll_s", cls.poll_s)),
                lost_after_s=float(rest.pop("lost_after_s", cls.lost_after_s)),
                resources=rest,
            )
        except (TypeError, ValueError) as error:
            raise UserError(
                f"cluster: {error}; poll_s and lost_after_s are seconds, setup and teardown lists"
            ) from error
        settings.check()
        return settings

    def to_mapping(self) -> dict[str, Any]:
        """Return the settings as a flat mapping of keys, the inverse of `of`."""
        own = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "resources"}
        return {**self.resources, **{key: list(v) if isinstance(v, tuple) else v for key, v in own.items()}}

    def commands(self) -> dict[str, Any]:
        """Return the settings that are commands which the batch script runs, or that can contain such commands."""
        return {key: value for key, value in self.to_mapping().items() if key in _COMMANDS}

    def check(self) -> None:
        """Check that the settings can work, before anything is submitted.

        Raises:
            UserError: a setting cannot work. The message says which values can.
        """
        unknown = sorted(set(self.resources) - set(RESOURCES))
        if unknown:
            own = set(self.__dataclass_fields__) - {"resources"}
            raise UserError(
                f"cluster: {unknown[0]} is no setting of a job; valid: {', '.join(sorted({*RESOURCES, *own}))}"
            )
        for name in ("timeout_min", "nodes", "tasks_per_node"):
            value = self.resources.get(name, 1)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise UserError(f"cluster: {name} is {value!r}; it must be a whole number, 1 or more")
        for name, value in self.resources.items():
            if isinstance(value, str) and not value.isprintable():
                raise UserError(f"cluster: {name} is {value!r}; a line break has no place in an option of sbatch")
        taken = {
            str(key).replace("_", "-") for key in self.resources.get("additional_parameters") or {}
        } & _RESERVED_OPTIONS
        if taken:
            raise UserError(f"cluster: additional_parameters.{min(taken)} is set by the launcher itself; leave it out")
        for name, kind, what in _TYPES:
            value = self.resources.get(name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, kind)):
                raise UserError(f"cluster: {name} is {value!r}; it must be {what}")
        for name, value in self.resources.items():
            if isinstance(value, float) and not math.isfinite(value):
                raise UserError(f"cluster: {name} is {value!r}; it must be a finite number")
        for name in ("array_parallelism", "mem_gb", "cpus_per_task"):
            if self.resources.get(name) is not None and self.resources[name] <= 0:
                raise UserError(f"cluster: {name} is {self.resources[name]!r}; it must be above 0")
        if not 0 < self.poll_s < math.inf or not 0 <= self.lost_after_s < math.inf:
            raise UserError(
                f"cluster: poll_s is {self.poll_s:g}, lost_after_s {self.lost_after_s:g}; both are seconds, poll_s > 0"
            )
        if 2 * self.signal_delay_s > self.timeout_min * 60:
            raise UserError(
                f"cluster: signal_delay_s={self.signal_delay_s} leaves a job of timeout_min={self.timeout_min} less "
                "than half of its time to work; lower signal_delay_s or raise timeout_min"
            )
        if not isinstance(self.require_gpu, bool):
            raise UserError(f"cluster: require_gpu is {self.require_gpu!r}; it must be true or false")
        for name, least in (("array_size", 1), ("max_num_timeout", 0)):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
                raise UserError(f"cluster: {name} is {value!r}; it must be a whole number from {least} on, or null")


# Options that the launcher itself sets, so that it finds its jobs and their logs.
_RESERVED_OPTIONS = frozenset(
    {"array", "clusters", "cluster", "M", "output", "error", "job-name", "open-mode", "signal"}
)


# Settings whose wrong values sbatch would misread, or reject only at submission: key, type, description of valid
# values.
_TYPES: tuple[tuple[str, Any, str], ...] = (
    ("signal_delay_s", int, "a whole number of seconds"),
    ("array_parallelism", int, "a whole number"),
    ("mem_gb", int | float, "a number of gigabytes"),
    ("gpus_per_node", int | str, "a whole number, or a kind and a number such as 'a100:2'"),
    ("cpus_per_task", int, "a whole number"),
    ("additional_parameters", Mapping, "a mapping of sbatch's options"),
    ("srun_args", list | tuple, "a list of srun's options"),
    ("clusters", str, "names with commas between them"),
)


# Settings that are commands of a job, or in which a command can be hidden.
_COMMANDS = ("setup", "teardown", "python", "srun_args", "additional_parameters")


# Options of sbatch that always request GPUs, and options that request GPUs with some values, such as gres=gpu:2.
_GPU_OPTIONS = frozenset({"gpus", "gpus_per_node", "gpus_per_task", "gpus_per_socket"})
_GENERAL_OPTIONS = frozenset({"gres", "tres_per_node", "tres_per_task", "tres_per_job"})


def with_layout(resources: Mapping[str, Any], layout: tuple[int, int] | None) -> dict[str, Any]:
    """Return a job's resources with this layout: one task per rank, and if GPUs are requested, at least one GPU per
    rank.

    If more GPUs per node are requested than there are ranks, their number is kept, because the generators of a live
    driver run on the others.

    Args:
        resources: options of the jobs, see `RESOURCES`.
        layout: number of nodes, and of ranks per node; None to leave the resources unchanged.
    """
    if layout is None:
        return dict(resources)
    nodes, ranks = layout
    kind, colon, count = str(resources.get("gpus_per_node") or "").rpartition(":")
    gpus = {}
    if count.isdigit() and 0 < int(count) < ranks:
        gpus = {"gpus_per_node": f"{kind}{colon}{ranks}" if colon else ranks}
    return {**resources, "nodes": nodes, "tasks_per_node": ranks, **gpus}


def _commands(name: str, given: Any) -> tuple[str, ...]:
    if isinstance(given, str) or not isinstance(given, list | tuple):
        raise UserError(f"cluster: {name} is {given!r}; it must be a list of commands, such as ['module load cuda']")
    return tuple(map(str, given))
