"""Watch a running study: repeat fits as compute grows, and check forecasts against later evaluations.

A snapshot is the fit to evaluations up to some compute C, with a check: the mean of the evaluations from C / 1.1 to C
is compared with its prediction by the fit up to C / 1.5. A snapshot depends on the evaluations and on C only, not on
when it was computed. A run has departed from its forecast if all checks over a factor of 1.15 in C are outside the 95%
interval, on the same side. docs/measured/watch.md has the rate of such alarms for runs that follow their curve and for
runs that fall (`benchmarks/watch.py`).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sweeps.curve import Curve
from sweeps.errors import UserError
from sweeps.fit.fit import FitOptions
from sweeps.fit.history import GROWTH, Snapshot, departure, iter_snapshots
from sweeps.run.files import append_lines, parse_lines
from sweeps.run.journal import JOURNAL_FILE, JournalError, read_journal
from sweeps.source import LoadedStudy
from sweeps.source.places import Kind, Place

FITS_FILE = "fits.jsonl"


@dataclass(frozen=True)
class SnapshotEvent:
    """A snapshot, and a warning if the recipe had departed from its forecast by then, else None."""

    snapshot: Snapshot
    warning: str | None


class Watch:
    """Observer of sources that takes a snapshot of a recipe whenever it has new evaluations.

    Snapshots are appended to a file, one flushed JSON object per line. A restarted or second watcher reads them from
    there, so that no snapshot is computed or written twice.

    Args:
        load: function that reads the sources, such as `sweeps.source.load` with its arguments bound.
        sources: paths as given by the user; changes are detected by the files' sizes and modification times.
        options: options of every fit; None for the default `FitOptions()`.
        path: file to append snapshots to, see `default_path`; None to keep them in memory only.
        every: factor of compute between snapshots, see `sweeps.fit.history`.
        clock: function that returns wall-clock seconds, replaceable in tests.
    """

    def __init__(
        self,
        load: Callable[[], LoadedStudy],
        sources: Sequence[str | Path],
        options: FitOptions | None = None,
        path: Path | None = None,
        every: float = GROWTH,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._load, self._sources, self._every, self._clock = load, list(sources), every, clock
        self._options = options or FitOptions()
        self._path = path
        self._snapshots: dict[str, list[Snapshot]] = {}
        self._yielded_counts: dict[str, int] = {}
        self._sizes: dict[str, tuple[int, float]] = {}
        self._last_state: object = None

    def poll(self) -> Iterator[SnapshotEvent]:
        """Yield each snapshot once: those read from the file, and new ones after they are written.

        Raises:
            UserError: the sources cannot be read, or the file cannot be written.
        """
        state = sources_state(self._sources)
        if state is not None and state == self._last_state:
            return
        for curve in self._load().curves:
            yield from self.follow(curve)
        # Set last: if the caller stops half-way, the next poll yields the rest.
        self._last_state = state

    def follow(self, curve: Curve) -> Iterator[SnapshotEvent]:
        """Yield news of one curve, which the caller has loaded.

        Raises:
            UserError: the file cannot be written.
        """
        if self._sizes.get(curve.recipe) != _evaluation_key(curve):
            yield from self._follow_locked(curve)
            self._sizes[curve.recipe] = _evaluation_key(curve)

    def _follow_locked(self, curve: Curve) -> list[SnapshotEvent]:
        """Follow a curve under a file lock, so that two watchers of one study do not both write a snapshot."""
        if self._path is None:
            return self._follow(curve)
        from filelock import FileLock  # needed only for writing

        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(f"{self._path}.lock"):
                return self._follow(curve)
        except OSError as error:
            reason = error.strerror or error
            raise UserError(f"{self._path}: cannot be written ({reason}); give another file with --out") from error

    def _follow(self, curve: Curve) -> list[SnapshotEvent]:
        """Take a curve's new snapshots; return those from the file that were not yielded yet, then the new ones."""
        identity = self._identity(curve)
        snapshots = (
            self._snapshots.setdefault(curve.recipe, [])
            if self._path is None
            else _read_snapshots(self._path, identity)
        )
        yielded = self._yielded_counts.get(curve.recipe, 0)
        news = [
            SnapshotEvent(snapshots[number], departure(snapshots[: number + 1]))
            for number in range(yielded, len(snapshots))
        ]
        for snapshot in iter_snapshots(curve, self._options, self._every, snapshots):
            snapshots.append(snapshot)
            news.append(SnapshotEvent(snapshot, departure(snapshots)))
            if self._path is not None:
                line = {"time": self._clock(), **identity, **snapshot.to_json(), "warning": news[-1].warning}
                append_lines(self._path, [line])
        self._yielded_counts[curve.recipe] = len(snapshots)
        return news

    def _identity(self, curve: Curve) -> dict[str, Any]:
        """Return the fields by which a line of the file is recognized as one of this curve and these options."""
        return {
            "recipe": curve.recipe,
            "compute_axis": curve.axis,
            "metric": curve.metric,
            "options": asdict(self._options),
            # For rewards in [0, 1] None is written, so that lines of older versions, without `bounds`, still match.
            "bounds": None if curve.limits in (None, (0.0, 1.0)) else list(curve.limits),
        }


def _evaluation_key(curve: Curve) -> tuple[int, float]:
    """Return the number of evaluations and the largest compute. New evaluations change this pair."""
    return len(curve.compute), float(curve.compute.max())


def default_path(sources: Sequence[str | Path]) -> Path | None:
    """Return the path of `fits.jsonl` in a run's or study's folder if that is the only source, else None."""
    folder = Place(sources[0]).folder if len(sources) == 1 else None
    return None if folder is None else folder / FITS_FILE


def waiting(sources: Sequence[str | Path]) -> bool:
    """Return whether all sources are runs or studies without any evaluation yet, which is not an error."""
    for source in sources:
        runs = Place(source).run_folders
        if not runs:
            return False
        for run in runs:
            try:
                if read_journal(run).of_kind("eval"):
                    return False
            except JournalError:
                # If the file has no complete line, its header is still being written. Otherwise it is damaged, which is
                # an error.
                if b"\n" in (run / JOURNAL_FILE).read_bytes():
                    return False
    return True


def sources_state(sources: Sequence[str | Path]) -> object:
    """Return sizes and modification times of the files behind the sources, to detect changes; None if unknown."""
    files: list[Path] = []
    for source in sources:
        place = Place(source)  # created again at every poll, because a study gains runs
        if place.kind is not Kind.FOLDER:
            files.append(place.path)
        elif place.run_folders:
            files += [run / JOURNAL_FILE for run in place.run_folders]
        else:
            return None
    try:
        return [(str(file), (stat := file.stat()).st_size, stat.st_mtime_ns) for file in files]
    except (OSError, ValueError):
        return None


def _read_snapshots(path: Path, identity: Mapping[str, Any]) -> list[Snapshot]:
    """Read the snapshots of one curve and its options (`identity`) in the order written. Invalid lines are skipped."""
    if not path.exists():
        return []
    label = json.dumps(identity["recipe"]).encode()
    # Search the raw lines first: parsing every recipe's lines for each recipe would be slow.
    lines = b"\n".join(line for line in path.read_bytes().split(b"\n") if label in line)
    snapshots = []
    for entry in parse_lines(lines):
        if all(entry.get(key) == value for key, value in identity.items()):
            with suppress(KeyError, TypeError, ValueError):
                snapshots.append(Snapshot.from_json(entry))
    return snapshots
