"""Create runs in MLflow's store: one experiment per study name, one parent run per study, one child run per member.

The controller creates everything before any job starts. Otherwise several jobs could create SQLite's schema and the
experiment at the same time, and each requeue of a job would create its run again.
"""

from __future__ import annotations

import os
import re
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from filelock import FileLock

from sweeps.errors import UserError
from sweeps.run.files import read_json, write_json
from sweeps.tracking.colours import RUN_COLOUR_TAG, recipe_colours
from sweeps.tracking.common import all_runs, now_ms, one_line, quiet_environment, resolve_uri, without_credentials

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

IDS_FILE = "mlflow.json"
SWEEP_TAG = "scalerl.sweep"
RUN_TAG = "scalerl.run"
DEFAULT_AXIS = "compute/flops"
STATUSES = ("SCHEDULED", "RUNNING", "FINISHED", "FAILED", "KILLED")


@dataclass(frozen=True)
class Member:
    """One member of a study.

    Attributes:
        run: identity of the run.
        recipe, seed: label of the curve, and seed.
        run_dir: folder with the journal.
        baseline: recipe with which the member's recipe is compared; None if unknown.
    """

    run: str
    recipe: str
    seed: int
    run_dir: Path
    baseline: str | None = None


@dataclass(frozen=True)
class TrackedMember:
    """A member with the id of its MLflow run."""

    member: Member
    mlflow_run_id: str


@dataclass
class TrackedSweep:
    """A study with its MLflow ids. `key` is the value of the tag `scalerl.sweep` of all its runs."""

    directory: Path
    key: str
    name: str
    experiment_id: str
    parent_id: str
    members: dict[str, TrackedMember] = field(default_factory=dict)


class Tracker:
    """Client of one experiment in one MLflow store. The constructor does not connect to the store; `prepare` does.

    Args:
        uri: `sqlite:///path` (artifacts go to `mlartifacts` next to the file), a server, or another database.
        experiment: name of the experiment, the study's name.
        axis: compute axis in the journal from which `eval/<set>/log10_compute` is computed.

    Raises:
        UserError: MLflow cannot open the URI. From methods: the store cannot be reached.
    """

    def __init__(self, uri: str, experiment: str, axis: str = DEFAULT_AXIS) -> None:
        self.uri = resolve_uri(uri)
        self.experiment = experiment
        self.axis = axis
        self._client: MlflowClient | None = None
        self._schema_lock: AbstractContextManager[object] = nullcontext()
        if self.database_file is not None:
            self._schema_lock = FileLock(f"{self.database_file}.init.lock")

    @property
    def client(self) -> MlflowClient:
        """MLflow's client. Its first use imports mlflow and creates the schema of a database."""
        if self._client is None:
            quiet_environment()
            if self.uri != without_credentials(self.uri):
                # MLflow prints the address of every run that ends, with a login that it contains.
                os.environ["MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT"] = "true"
            from mlflow import MlflowClient

            if self.database_file is not None:
                self.database_file.parent.mkdir(parents=True, exist_ok=True)
            with self._schema_lock:
                self._client = MlflowClient(tracking_uri=self.uri)
        return self._client

    @property
    def database_file(self) -> Path | None:
        """Path of the SQLite file named by the URI; None for other stores."""
        scheme, _, rest = self.uri.partition(":///")
        return Path(rest) if scheme.split("+")[0] == "sqlite" else None

    @contextmanager
    def store_errors(self, doing: str) -> Iterator[None]:
        """In a `with` block, convert any error of MLflow's client to a UserError that names the store and a remedy."""
        try:
            yield
        except UserError:
            raise
        except Exception as error:  # the client passes SQL, HTTP and OS errors through
            raise UserError(
                f"MLflow at {without_credentials(self.uri)}: {doing} failed ({one_line(error)}); "
                "check that the store is there, or train without tracking and publish later"
            ) from error

    def prepare(self) -> str:
        """Create schema and experiment if missing, and return the experiment's id. Safe in concurrent processes."""
        with self.store_errors("opening the store"):
            client = self.client
            with self._schema_lock:
                return self._get_or_create_experiment(client)

    def _get_or_create_experiment(self, client: MlflowClient) -> str:
        from mlflow.exceptions import MlflowException

        location = None
        if self.database_file is not None:
            folder = re.sub(r"[^\w.-]+", "_", self.experiment)[:80]
            location = (self.database_file.parent / "mlartifacts" / folder).as_uri()
        experiment = client.get_experiment_by_name(self.experiment)
        if experiment is None:
            try:
                return str(client.create_experiment(self.experiment, artifact_location=location))
            except MlflowException as error:
                if error.error_code != "RESOURCE_ALREADY_EXISTS":
                    raise
                experiment = client.get_experiment_by_name(self.experiment)  # another controller created it first
        if experiment is None or experiment.lifecycle_stage == "deleted":
            raise UserError(
                f"experiment {self.experiment!r} was deleted in MLflow; bring it back with "
                f"`mlflow experiments restore`, or give the study another name"
            )
        return str(experiment.experiment_id)

    def open_sweep(
        self,
        sweep_dir: str | Path,
        members: Iterable[Member],
        name: str | None = None,
        reopen: bool = True,
    ) -> TrackedSweep:
        """Create the study's parent run and one child run per member, or find the existing ones.

        Ids are stored in `<sweep_dir>/mlflow.json`. Runs are also found by their tags, so that the runs that a killed
        controller has created are not created again. With `reopen`, the parent run of an existing study gets the status
        RUNNING. Existing members keep their status; new members are SCHEDULED.

        Raises:
            UserError: the store cannot be reached.
        """
        directory = Path(sweep_dir).resolve()
        directory.mkdir(parents=True, exist_ok=True)
        experiment_id = self.prepare()
        store = f"{without_credentials(self.uri)}#{self.experiment}"
        known = read_json(directory / IDS_FILE)
        entry = known.setdefault("stores", {}).setdefault(store, {})
        if "sweep" not in entry:  # the key is stored before any run is created with it
            entry["sweep"] = uuid.uuid4().hex[:12]
            write_json(directory / IDS_FILE, known)
        sweep = TrackedSweep(directory, entry["sweep"], name or directory.name, experiment_id, "")
        with self.store_errors("creating the sweep's runs"):
            runs = self.sweep_runs(sweep)
            parents = [run.info.run_id for run in runs if run.data.tags.get("kind") == "sweep"]
            if parents:
                sweep.parent_id = str(parents[-1])
                if reopen:
                    self.client.update_run(sweep.parent_id, status="RUNNING")
            else:
                tags = {"kind": "sweep", SWEEP_TAG: sweep.key, "compute.axis": self.axis}
                parent = self.client.create_run(experiment_id, run_name=sweep.name, tags=tags)
                sweep.parent_id = str(parent.info.run_id)
            self._add(sweep, members, runs)
        return sweep

    def add_members(self, sweep: TrackedSweep, members: Iterable[Member]) -> None:
        """Create runs for members that were added to the study later, such as trials of a search."""
        with self.store_errors("creating member runs"):
            self._add(sweep, members, self.sweep_runs(sweep))

    def _add(self, sweep: TrackedSweep, members: Iterable[Member], runs: Sequence[Run]) -> None:
        members = list(members)
        ids = {r.data.tags[RUN_TAG]: str(r.info.run_id) for r in runs if RUN_TAG in r.data.tags}
        series = {r.data.tags.get("series") for r in runs}
        counts = Counter(member.baseline for member in members if member.baseline)
        baseline = counts.most_common(1)[0][0] if counts else None
        colours = recipe_colours((member.recipe for member in members), run_colours(runs), baseline)
        for member in members:
            run_id = ids.get(member.run)
            if run_id is None:
                label = f"{member.recipe} seed {member.seed}"
                if label in series:  # the chart would mix up two runs with the same series
                    label += f" ({member.run[:8]})"
                series.add(label)
                tags = {
                    "mlflow.parentRunId": sweep.parent_id,
                    "kind": "member",
                    "recipe": member.recipe,
                    "seed": str(member.seed),
                    "series": label,
                    RUN_TAG: member.run,
                    SWEEP_TAG: sweep.key,
                    "compute.axis": self.axis,
                    RUN_COLOUR_TAG: colours[member.recipe],
                    **({"baseline": member.baseline} if member.baseline else {}),
                }
                run = self.client.create_run(sweep.experiment_id, run_name=label, tags=tags)
                run_id = ids[member.run] = str(run.info.run_id)
                self.client.update_run(run_id, status="SCHEDULED")
            sweep.members[member.run] = TrackedMember(member, run_id)
        known = read_json(sweep.directory / IDS_FILE)
        store = f"{without_credentials(self.uri)}#{self.experiment}"
        entry = known.setdefault("stores", {}).setdefault(store, {"sweep": sweep.key})
        entry["experiment_id"], entry["parent"] = sweep.experiment_id, sweep.parent_id
        entry.setdefault("members", {}).update({k: m.mlflow_run_id for k, m in sweep.members.items()})
        write_json(sweep.directory / IDS_FILE, known)

    def sweep_runs(self, sweep: TrackedSweep) -> list[Run]:
        """Return all runs of a study that are not deleted, newest first."""
        wanted = f"tags.`{SWEEP_TAG}` = '{sweep.key}'"
        return all_runs(self.client, sweep.experiment_id, wanted, "attributes.start_time DESC")

    def set_status(self, mlflow_run_id: str, status: str, at_ms: int | None = None) -> None:
        """Set a run's status. RUNNING reopens the run; FINISHED, FAILED and KILLED end it (at `at_ms`, or now).

        Raises:
            UserError: the status does not exist, or the store cannot be reached.
        """
        if status not in STATUSES:
            raise UserError(f"run status {status!r} is not one of {', '.join(STATUSES)}")
        with self.store_errors("setting a run's status"):
            if status in ("SCHEDULED", "RUNNING"):
                self.client.update_run(mlflow_run_id, status=status)
            else:
                self.client.set_terminated(mlflow_run_id, status=status, end_time=at_ms or now_ms())

    def set_tags(self, mlflow_run_id: str, tags: Mapping[str, str]) -> None:
        """Set tags in requests of up to 100, with values cut at MLflow's limit."""
        from mlflow.entities import RunTag

        items = [RunTag(key, str(value)[:8000]) for key, value in tags.items()]
        for start in range(0, len(items), 100):
            self.client.log_batch(mlflow_run_id, tags=items[start : start + 100])

    def remove_tag(self, mlflow_run_id: str, name: str) -> None:
        """Remove a tag from a run, if present."""
        if name in self.client.get_run(mlflow_run_id).data.tags:
            self.client.delete_tag(mlflow_run_id, name)


def run_colours(runs: Sequence[Run]) -> dict[str, str]:
    """Return the colour of each recipe's oldest member, by recipe. `runs` must be sorted newest first."""
    tags = [run.data.tags for run in runs if run.data.tags.get("kind") == "member"]
    return {entry["recipe"]: entry[RUN_COLOUR_TAG] for entry in tags if {"recipe", RUN_COLOUR_TAG} <= entry.keys()}


# Tag for the reason why the study stopped a member.
STOPPED_TAG = "stopped.reason"
STATUS = {"finished": "FINISHED", "failed": "FAILED", "cancelled": "KILLED", "stopped": "KILLED"}
