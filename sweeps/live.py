"""A running study watched: its fit re-done as compute grows, and every forecast held against what then came.

A snapshot is the fit up to some compute C, and a check: the evaluations of the last tenth (C / 1.1 to C) against
what the fit up to C / 1.5 predicted of their mean. It depends on the evaluations and on C alone, not on when
anybody looked. A run has departed if two snapshots apart by a factor 1.15, and all between them, lie on one side
of a 95% interval widened by a quarter. On simulated runs (31 to 75 evaluations, one or two seeds, a policy that
wanders with lag-1 correlation 0.6, looked at after every evaluation) that rang in 1 to 3% of 150 that follow the
law and in 92 to 100% of 50 that fall by 0.1 after half their compute; `tests/sweeps/test_live.py` measures it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock

from sweeps.curve import Curve
from sweeps.errors import UserError
from sweeps.fit import Fit, FitOptions, Interval, fit_curve
from sweeps.predict import predict, predict_mean
from sweeps.run.journal import JOURNAL_FILE, JournalError, find_runs, read_journal
from sweeps.source import LoadedStudy
from sweeps.verdict import MIN_COMPUTES

FITS_FILE = "fits.jsonl"
# Compute grows by this factor from one snapshot to the next; also how far apart two must be to confirm another.
GROWTH = 1.15
# A check looks at the evaluations of the last tenth; a forecast reaches half as far again as its fit.
RECENT = 1.1
REACH = 1.5
# How far outside the 95% interval counts, in units of the interval's half. Snapshots are correlated and many, so
# the interval itself would ring in every fifth good run.
_WIDER = 1.25


@dataclass(frozen=True)
class Check:
    """A forecast and what came: means over `evaluations`, predicted (95%) by the fit up to compute `made_at`."""

    made_at: float
    evaluations: int
    actual: float
    predicted: float
    low: float
    high: float

    @property
    def inside(self) -> bool:
        """Whether the interval held what came."""
        return self.low <= self.actual <= self.high

    @property
    def side(self) -> int:
        """1 or -1 where what came lies clearly above or below the forecast, else 0."""
        if self.actual > self.predicted + _WIDER * (self.high - self.predicted):
            return 1
        return -1 if self.actual < self.predicted - _WIDER * (self.predicted - self.low) else 0


@dataclass(frozen=True)
class Snapshot:
    """One recipe's fit up to `compute_end`, with `n` evaluations up to there, over all seeds.

    ahead: compute and one evaluation's predicted reward there, 95%. ahead and check are None where a fit names
    no curve to predict from.
    """

    recipe: str
    compute_end: float
    n: int
    verdict: str
    A: Interval
    ahead: tuple[float, Interval] | None = None
    check: Check | None = None

    def to_json(self) -> dict[str, Any]:
        """What a line of `fits.jsonl` says of the fit."""
        ahead, check = self.ahead, self.check
        return {
            "recipe": self.recipe,
            "compute": self.compute_end,
            "n": self.n,
            "verdict": self.verdict,
            "A": self.A.to_json(),
            "next": None if ahead is None else {"compute": ahead[0], **ahead[1].to_json()},
            "check": None
            if check is None
            else {
                "made_at": check.made_at,
                "evaluations": check.evaluations,
                "actual": check.actual,
                "predicted": check.predicted,
                "low": check.low,
                "high": check.high,
                "inside": check.inside,
            },
        }

    @staticmethod
    def from_json(entry: Mapping[str, Any]) -> Snapshot:
        """The snapshot of a line.

        Raises:
            KeyError, TypeError, ValueError: it is none.
        """
        ahead, check = entry["next"], entry["check"]
        return Snapshot(
            str(entry["recipe"]),
            float(entry["compute"]),
            int(entry["n"]),
            str(entry["verdict"]),
            _interval(entry["A"]),
            None if ahead is None else (float(ahead["compute"]), _interval(ahead)),
            None
            if check is None
            else Check(
                float(check["made_at"]),
                int(check["evaluations"]),
                *(float(check[key]) for key in ("actual", "predicted", "low", "high")),
            ),
        )


def _interval(entry: Mapping[str, Any]) -> Interval:
    return Interval(*(None if entry[key] is None else float(entry[key]) for key in ("value", "low", "high")))


# --- snapshots ----------------------------------------------------------------------------------------------


def history(
    curve: Curve,
    options: FitOptions | None = None,
    every: float = GROWTH,
    known: Sequence[Snapshot] = (),
) -> list[Snapshot]:
    """The fit re-done at growing compute, to the curve's end; only what is not known yet.

    Args:
        curve: a recipe's evaluations so far.
        options: as for a fit; `max_compute` ends the history.
        every: compute grows at least by this factor from one snapshot to the next (a dozen for 40 evenly
            spaced evaluations, 5 more for each doubling), the last excepted; 1: after every evaluation.
        known: the snapshots taken so far, the oldest first. What came since is added after them; once more at
            the last one's compute if all that came lies below it (a seed that lags behind).

    Raises:
        UserError: `every` is below 1, or as of `fit_curve`.
    """
    return list(_history(curve, options or FitOptions(), every, known))


def _history(curve: Curve, options: FitOptions, every: float, known: Sequence[Snapshot]) -> Iterator[Snapshot]:
    """One by one, for who writes each down before the next is computed."""
    if not every >= 1:
        raise UserError(f"every {every:g}: compute cannot shrink between snapshots; give a factor of 1 or more")
    fits = _Fits(curve, options)
    for end in _ends(fits.computes, curve, every, known):
        yield fits.snapshot(end)


def _ends(computes: list[float], curve: Curve, every: float, known: Sequence[Snapshot]) -> list[float]:
    """Where to take snapshots; a rule that looks only backwards, so that growth does not move earlier ones."""
    if not computes:
        return []
    last = known[-1].compute_end if known else 0.0
    ends: list[float] = []
    for at, compute in enumerate(computes):
        if compute > last and (at + 1 >= MIN_COMPUTES or known) and compute >= every * last:
            ends.append(compute)
            last = compute
    end = computes[-1]
    lagging = not ends and end == last and int((curve.compute <= end).sum()) > known[-1].n
    if end > last or lagging or not (ends or known):
        ends.append(end)
    return ends


class _Fits:
    """Fits of one curve up to any compute, each done once."""

    def __init__(self, curve: Curve, options: FitOptions) -> None:
        low = 0.0 if options.min_compute is None else options.min_compute
        high = np.inf if options.max_compute is None else options.max_compute
        within = (curve.compute > 0) & (curve.compute >= low) & (curve.compute <= high)
        self.computes: list[float] = np.unique(curve.compute[within]).tolist()
        self._curve, self._options = curve, options
        self._fits: dict[float, Fit] = {}

    def up_to(self, end: float) -> Fit:
        if end not in self._fits:
            self._fits[end] = fit_curve(self._curve, replace(self._options, max_compute=end))
        return self._fits[end]

    def snapshot(self, end: float) -> Snapshot:
        fit = self.up_to(end)
        ahead = None
        if _names_a_curve(fit):
            band = predict(fit, [REACH * end], observations=1)
            ahead = REACH * end, Interval(float(band.mean[0]), float(band.low[0]), float(band.high[0]))
        n = int((self._curve.compute <= end).sum())
        return Snapshot(fit.recipe, end, n, fit.verdict, fit.A, ahead, self._check(end))

    def _check(self, end: float) -> Check | None:
        """The latest evaluations against a fit that has not seen them."""
        earlier = [compute for compute in self.computes if compute <= end / RECENT]
        if not earlier:
            return None
        # Sparse evaluations: the latest earlier one, though its forecast has to reach further.
        made_at = next((compute for compute in earlier if compute >= end / REACH), earlier[-1])
        fit = self.up_to(made_at)
        if not _names_a_curve(fit):
            return None
        came = (self._curve.compute > end / RECENT) & (self._curve.compute <= end)
        value, low, high = predict_mean(fit, self._curve.compute[came])
        # Where some seeds have ended, the mean of those left is off from the mean of all by the seeds' spread.
        seen = len(np.unique(self._curve.seed[self._curve.compute <= made_at]))
        left = len(np.unique(self._curve.seed[came]))
        if left < seen:
            reach = fit.seed_spread.quantile() * fit.seed_spread.sd * np.sqrt(1 / left - 1 / seen)
            low, high = value - float(np.hypot(value - low, reach)), value + float(np.hypot(high - value, reach))
        return Check(made_at, int(came.sum()), float(self._curve.reward[came].mean()), value, low, high)


def _names_a_curve(fit: Fit) -> bool:
    """Whether there is something to predict from: to data that fall or stay level a sigmoid is not a law."""
    return fit.draws is not None and fit.A.value is not None


def departure(snapshots: Sequence[Snapshot]) -> str | None:
    """A warning if the run's latest evaluations lie outside what earlier fits predicted, else None.

    Two snapshots in a row, at compute apart by `GROWTH`, are needed, and the same side throughout; false alarms
    and misses are given in the module's docstring.

    Args:
        snapshots: of one recipe, the oldest first.
    """
    if not snapshots or snapshots[-1].check is None:
        return None
    last, check = snapshots[-1], snapshots[-1].check
    since = last
    for snapshot in reversed(snapshots):
        if snapshot.check is None or snapshot.check.side != check.side or not check.side:
            break
        since = snapshot
    if since.compute_end * GROWTH > last.compute_end * (1 + 1e-9):
        return None
    where, remedy = (
        ("above", "the law of its beginning no longer holds; fit the later part with --min-compute")
        if check.side > 0
        else ("below", "look at the run's health (entropy, truncation, KL)")
    )
    return (
        f"reward lies {where} its forecast since compute {since.compute_end:.4g}: {check.actual:.3f} at "
        f"{last.compute_end:.4g}, where the fit up to {check.made_at:.4g} gave {check.predicted:.3f} "
        f"[{check.low:.3f}, {check.high:.3f}]; {remedy}"
    )


# --- watching -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class News:
    """A snapshot, and the warning if the run had departed by then."""

    snapshot: Snapshot
    warning: str | None


class Watch:
    """Follows sources; takes a snapshot of a recipe whenever it has new evaluations.

    Snapshots are appended to a file, one flushed JSON object a line, and adopted from it, so that stopping and
    starting again, or a second watcher, neither computes nor writes one twice.

    Args:
        load: reads the sources, as `sweeps.source.load` with its arguments bound.
        sources: paths, as the user gave them: they tell cheaply whether anything is new.
        options: as for a fit.
        path: file to append to (see `default_path`), or None.
        every: see `history`.
        clock: wall-clock seconds, replaceable in tests.
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
        self._known: dict[str, list[Snapshot]] = {}
        self._given: dict[str, int] = {}
        self._sizes: dict[str, tuple[int, float]] = {}
        self._seen: object = None

    def poll(self) -> Iterator[News]:
        """Give what was not given yet: adopted snapshots, and those that new evaluations call for, once written.

        Raises:
            UserError: the sources cannot be read, or the file cannot be written.
        """
        seen = _state(self._sources)
        if seen is not None and seen == self._seen:
            return
        for curve in self._load().curves:
            if self._sizes.get(curve.recipe) != _size(curve):
                yield from self._locked(curve)
                self._sizes[curve.recipe] = _size(curve)
        # Only now: whoever stopped half-way through sees the rest at the next poll.
        self._seen = seen

    def _locked(self, curve: Curve) -> list[News]:
        """Two who watch one study must not both write a snapshot."""
        if self._path is None:
            return self._follow(curve)
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(f"{self._path}.lock"):
                return self._follow(curve)
        except OSError as error:
            reason = error.strerror or error
            raise UserError(f"{self._path}: cannot be written ({reason}); give another file with --out") from error

    def _follow(self, curve: Curve) -> list[News]:
        mine = self._identity(curve)
        if self._path is None:
            known = self._known.setdefault(curve.recipe, [])
        else:
            known = _snapshots(_read(self._path, curve.recipe), mine) if self._path.exists() else []
        given = self._given.get(curve.recipe, 0)
        news = [News(known[at], departure(known[: at + 1])) for at in range(given, len(known))]
        for snapshot in _history(curve, self._options, self._every, known):
            known.append(snapshot)
            news.append(News(snapshot, departure(known)))
            if self._path is not None:
                line = {"time": self._clock(), **mine, **snapshot.to_json(), "warning": news[-1].warning}
                _append(self._path, line)
        self._given[curve.recipe] = len(known)
        return news

    def _identity(self, curve: Curve) -> dict[str, Any]:
        """What a line must share with this curve and these options to be adopted."""
        return {
            "recipe": curve.recipe,
            "compute_axis": curve.axis,
            "metric": curve.metric,
            "options": asdict(self._options),
        }


def _size(curve: Curve) -> tuple[int, float]:
    return len(curve.compute), float(curve.compute.max())


def default_path(sources: Sequence[str | Path]) -> Path | None:
    """`fits.jsonl` in the run or sweep directory, if the source is one; None for a table or several sources."""
    if len(sources) != 1:
        return None
    path = Path(sources[0])
    if path.name == JOURNAL_FILE:
        path = path.parent
    return path / FITS_FILE if _is_dir(path) else None


def waiting(sources: Sequence[str | Path]) -> bool:
    """Whether all sources are runs or sweeps without an evaluation yet: nothing is wrong, it is only early."""
    for source in sources:
        runs = find_runs(source) if _is_dir(Path(source)) else []
        if not runs:
            return False
        for run in runs:
            try:
                if read_journal(run).of_kind("eval"):
                    return False
            except JournalError:
                # A header that is still being written; a file with a whole line is damaged.
                if b"\n" in (run / JOURNAL_FILE).read_bytes():
                    return False
    return True


def _is_dir(path: Path) -> bool:
    try:
        return path.is_dir()
    except (OSError, ValueError):  # a name too long, or with a NUL in it
        return False


def _state(sources: Sequence[str | Path]) -> object:
    """Sizes and times of the files behind the sources; None where that cannot be told."""
    files: list[Path] = []
    for source in sources:
        path = Path(source)
        found = [run / JOURNAL_FILE for run in find_runs(path)] if _is_dir(path) else [path]
        if not found:
            return None
        files += found
    try:
        return [(str(file), (stat := file.stat()).st_size, stat.st_mtime_ns) for file in files]
    except (OSError, ValueError):
        return None


def _read(path: Path, recipe: str) -> list[dict[str, Any]]:
    """The file's entries of one recipe; a torn line, and what is no entry, are passed over."""
    entries = []
    label = json.dumps(recipe).encode()
    for line in path.read_bytes().split(b"\n"):
        if label not in line:  # spares parsing every recipe's lines for each recipe
            continue
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if isinstance(entry, dict):
            entries.append(entry)
    return entries


def _snapshots(entries: Sequence[dict[str, Any]], identity: Mapping[str, Any]) -> list[Snapshot]:
    """Those of one recipe and one way to fit it, in order of writing."""
    found = []
    for entry in entries:
        if all(entry.get(key) == value for key, value in identity.items()):
            try:
                found.append(Snapshot.from_json(entry))
            except (KeyError, TypeError, ValueError):
                continue
    return found


def _append(path: Path, entry: Mapping[str, Any]) -> None:
    line = json.dumps(entry, allow_nan=False, separators=(",", ":")).encode() + b"\n"
    with path.open("a+b") as handle:
        # A torn line of an earlier process must not swallow this one.
        if handle.tell():
            handle.seek(-1, 2)
            if handle.read(1) != b"\n":
                line = b"\n" + line
        handle.write(line)
