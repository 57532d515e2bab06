"""Python functions of the commands, for notebooks: `from sweeps.api import load, fit, rank, plan, compare, effects`.

Each function takes the same sources as the command of its name, or pandas DataFrames, or results of `load` and `fit`.
Options have the names and defaults of the command's options (`max_compute=8000` for `--max-compute 8000`). A result has
`to_json()` (what the command prints with `--json`), `to_frame()` (pandas) and `plot(ax=None)` (matplotlib). A notebook
shows it as a short table. `decide` is for tables of final values; its result has no plot.
"""

from __future__ import annotations

import argparse
import csv
import html
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from sweeps.cli import curves as reading
from sweeps.cli import deciding_commands as deciding
from sweeps.cli.main import make_parser
from sweeps.errors import UserError
from sweeps.parallel import cores
from sweeps.source import LoadedStudy

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from sweeps.decide.keep_discard import ChangeVerdict
    from sweeps.fit.fit import Fit

# Options for reading, and options for fitting. Reading options are fixed once a `Study` was read, and both kinds once
# `Fits` were made, so a function that is given such an object does not accept them again.
READING = ("metric", "x", "y", "by", "seed_from", "size", "group", "bounds", "lower_is_better")
FITTING = ("r0", "robust", "min_compute", "max_compute", "family", "method")
# Number of table rows that a notebook shows.
_SHOWN = 12
_LINE = re.compile(r"(\bline \d+)")
_PLAIN = (str, int, float)


class Result:
    """Base class of results: a table of rows, with remarks."""

    def rows(self) -> list[dict[str, Any]]:
        """Return the rows of the table, as in `to_json`."""
        raise NotImplementedError

    def to_json(self) -> Any:
        """Return the JSON that the command prints with `--json`."""
        raise NotImplementedError

    def remarks(self) -> Sequence[str]:
        """Return what the command prints besides its table: the outcome and warnings."""
        return ()

    def to_frame(self) -> pd.DataFrame:
        """Return the rows as a table. An interval becomes three columns, such as `A`, `A_low` and `A_high`."""
        return pd.DataFrame([flat(row) for row in self.rows()])

    def _repr_html_(self) -> str:
        rows = [flat(row) for row in self.rows()[:_SHOWN]]
        plain = [name for name in (rows[0] if rows else {}) if any(isinstance(row.get(name), _PLAIN) for row in rows)]
        table = pd.DataFrame([{name: row.get(name) for name in plain} for row in rows])
        lines = "".join(f"<p>{html.escape(str(remark))}</p>" for remark in self.remarks())
        return table.to_html(index=False, float_format="{:.4g}".format, border=0, na_rep="") + lines


def flat(row: Mapping[str, Any]) -> dict[str, Any]:
    """Flatten a row of `--json`: {"A": {"value", "low", "high"}} becomes A, A_low, A_high."""
    result: dict[str, Any] = {}
    for name, value in row.items():
        if not isinstance(value, Mapping):
            result[name] = value
            continue
        for key, item in value.items():
            result[name if key == "value" else f"{name}_{key}"] = item
    return result


@dataclass
class Study(Result):
    """Curves read from sources, one per recipe."""

    study: LoadedStudy
    options: argparse.Namespace
    kept: Any = field(default=None, repr=False)  # temporary folder with the DataFrames that were given as sources

    @property
    def mapping(self) -> Sequence[str]:
        """Lines that describe how the columns of the sources were used."""
        return self.study.mapping

    def rows(self) -> list[dict[str, Any]]:
        """Return one row per point: recipe, seed, compute, reward, its standard error if known, and factors."""
        return [
            {
                "recipe": curve.recipe,
                "seed": str(curve.seed[n]),
                "compute": float(curve.compute[n]),
                "reward": float(curve.reward[n]),
                **({} if curve.sd is None else {"sd": float(curve.sd[n])}),
                **curve.factors,
            }
            for curve in self.study.curves
            for n in range(len(curve.compute))
        ]

    def to_json(self) -> list[dict[str, Any]]:
        """Return the points, like `rows`."""
        return self.rows()

    def remarks(self) -> Sequence[str]:
        """Return how the columns were read, and warnings."""
        return [*self.study.shown, *self.study.all_warnings]

    def plot(self, ax: Axes | None = None) -> Axes:
        """Draw the points of every recipe over compute; return the axes."""
        return _draw_curves(ax, self.study, ())


@dataclass
class Fits(Result):
    """Fits, one per recipe, with their verdicts. `study` has the curves."""

    fits: Sequence[Fit]
    study: Study

    def __iter__(self) -> Any:
        return iter(self.fits)

    def __len__(self) -> int:
        return len(self.fits)

    def __getitem__(self, recipe: str) -> Fit:
        by_recipe = {fit.recipe: fit for fit in self.fits}
        if recipe not in by_recipe:
            raise KeyError(f"{recipe}: no such recipe; there are {', '.join(by_recipe)}")
        return by_recipe[recipe]

    def rows(self) -> list[dict[str, Any]]:
        """Return one row per recipe."""
        return self.to_json()

    def to_json(self) -> list[dict[str, Any]]:
        """Return the JSON that `scalerl fit --json` prints."""
        return [fit.to_json() for fit in self.fits]

    def remarks(self) -> Sequence[str]:
        """Return how the columns were read, and the warnings of the sources and of each fit."""
        from sweeps.fit.fit import warnings_of

        return [*self.study.study.shown, *self.study.study.warnings, *warnings_of(self.fits)]

    def plot(self, ax: Axes | None = None) -> Axes:
        """Draw points, curves and 95% bands of every recipe over compute; return the axes."""
        return _draw_curves(ax, self.study.study, self.fits)


@dataclass
class Decision(Result):
    """Result of rank, plan, compare or effects: what the command prints, and the fits behind it.

    Attributes:
        record: result object of `sweeps.decide`.
        fits: fits from which it was computed.
        table: key in `json` of the rows of the main table.
        json: what the command prints with `--json`.
        said: sentences about the outcome.
    """

    record: Any
    fits: Fits
    table: str
    json: Mapping[str, Any]
    said: Sequence[str] = ()

    def rows(self) -> list[dict[str, Any]]:
        """Return the rows of the command's main table."""
        rows: list[dict[str, Any]] = self.json[self.table]
        return rows

    def to_json(self) -> dict[str, Any]:
        """Return the JSON that the command prints with `--json`."""
        return dict(self.json)

    def remarks(self) -> Sequence[str]:
        """Return the outcome in words, and the warnings of the sources and of each fit."""
        return [*self.said, *self.fits.remarks()]

    def plot(self, ax: Axes | None = None) -> Axes:
        """Draw the first interval of each row, or the fitted curves if rows have no interval; return the axes."""
        rows = [flat(row) for row in self.rows()]
        known = [name for name in (rows[0] if rows else {}) if any(row.get(f"{name}_low") is not None for row in rows)]
        if not known:
            return self.fits.plot(ax)
        ax, name = _axes(ax), known[0]
        for place, row in enumerate(rows):
            if row[name] is not None:
                ends = [row[name] if end is None else end for end in (row[f"{name}_low"], row[f"{name}_high"])]
                ax.plot(ends, [-place, -place], color="#0072B2")
                ax.plot([row[name]], [-place], "o", color="#0072B2")
        names = ("recipe", "other", "axis", "level")
        ax.set_yticks([-place for place in range(len(rows))])
        ax.set_yticklabels([" ".join(str(row[label]) for label in names if label in row) for row in rows])
        ax.set_xlabel(f"{name} (95%)")
        return ax


@dataclass
class Chosen(Result):
    """Result of `decide`."""

    record: ChangeVerdict

    def rows(self) -> list[dict[str, Any]]:
        """Return one row for each of the two recipes."""
        rows: list[dict[str, Any]] = self.to_json()["recipes"]
        return rows

    def to_json(self) -> dict[str, Any]:
        """Return the JSON that `scalerl decide --json` prints."""
        return self.record.to_json()

    def remarks(self) -> Sequence[str]:
        """Return the verdict with its reason, the remedy, and notes about runs."""
        said = [self.record.sentence, *([] if self.record.remedy is None else [self.record.remedy])]
        return [*said, *self.record.notes]


def load(*sources: Any, **options: Any) -> Study:
    """Read sources into one curve per recipe.

    Args:
        sources: paths, `mlflow:URI#experiment`, or DataFrames with the columns of a table.
        options: options of `scalerl fit`: metric, x, y, by, seed_from, size, group, bounds, lower_is_better.

    Raises:
        UserError: any error that the command would print.
        TypeError: an option is unknown.
    """
    return _study(sources, _options("fit", options, READING))


def fit(*sources: Any, **options: Any) -> Fits:
    """Fit one curve per recipe, like `scalerl fit`.

    Args:
        sources: as for `load`, or one `Study`.
        options: options of the command: r0, robust, min_compute, max_compute, family, method, and those of `load`.
    """
    return _fits(sources, _options("fit", options, (*READING, *FITTING)), options)


def rank(*sources: Any, **options: Any) -> Decision:
    """Rank recipes, like `scalerl rank`.

    Args:
        sources: as for `load`, or one `Study` or `Fits`.
        options: options of the command: budget, baseline, margin, sets (names of evaluation sets), and those of `fit`.
    """
    from sweeps.decide.at_k import study_at_k
    from sweeps.fit.fit import fit_curves

    own_options = ("budget", "baseline", "margin", "sets")
    arguments = _options("rank", options, (*READING, *FITTING, *own_options))
    arguments.json = True
    reading.check_sets(arguments)
    fits = _fits(sources, arguments, options, own_options)
    ranking = deciding.ranked(arguments, fits.fits, _workers())
    read_by = argparse.Namespace(**{**vars(fits.study.options), "sets": arguments.sets})
    at_k = study_at_k(
        fits.study.study, ranking, lambda curves: fit_curves(curves, fits.fits[0].options, workers=_workers())
    )
    signal, aggregate = reading.compare_over_sets(read_by, fits.study.study)
    sentences = [ranking.sentence, *(part.sentence for part in (at_k, aggregate, signal) if part is not None)]
    return Decision(ranking, fits, "ranking", deciding.rank_json(ranking, None, at_k, signal, aggregate), sentences)


def plan(*sources: Any, **options: Any) -> Decision:
    """Plan for a target or a budget, and propose the next runs, like `scalerl plan`.

    Args:
        sources: as for `load`, or one `Study` or `Fits`.
        options: options of the command: target or budget, margin, sizes, rollouts, difficulty, and those of `fit`.
    """
    own_options = ("target", "budget", "margin", "sizes", "rollouts", "difficulty")
    arguments = _options("plan", options, (*READING, *FITTING, *own_options))
    arguments.group = [
        name for name in (arguments.rollouts, arguments.difficulty, *arguments.group) if name is not None
    ]
    fits = _fits(sources, arguments, options, own_options)
    record, commands = deciding.planned(arguments, fits.study.study, fits.fits)
    sentences = [settlement.sentence for settlement in record.settlements]
    return Decision(record, fits, "recipes", deciding.plan_json(record, commands), sentences)


def compare(*sources: Any, recipes: Sequence[str] = (), **options: Any) -> Decision:
    """Compare two recipes, or all recipes with one, like `scalerl compare`.

    Args:
        sources: as for `load`, or one `Study` or `Fits`.
        recipes: two recipes to compare, or one to compare all others with; empty to compare all others with the
            baseline.
        options: options of the command: budget, margin, and those of `fit`.
    """
    own_options = ("budget", "margin")
    arguments = _options("compare", options, (*READING, *FITTING, *own_options))
    fits = _fits(sources, arguments, options, own_options)
    record = deciding.compared(arguments, fits.study.study, fits.fits, recipes)
    sentences = [row.sentence for row in record.rows]
    return Decision(record, fits, "comparisons", record.to_json(), [*sentences, *record.notes])


def effects(*sources: Any, interactions: Sequence[tuple[str, str]] = (), **options: Any) -> Decision:
    """Estimate the effect of each axis of a grid, like `scalerl effects`.

    Args:
        sources: as for `load`, or one `Study` or `Fits`.
        interactions: pairs of axes whose interaction is estimated as well.
        options: the options of `fit`.
    """
    from sweeps.decide.effects import effects as computed

    arguments = _options("effects", options, (*READING, *FITTING))
    fits = _fits(sources, arguments, options)
    record = computed(fits.fits, interactions)
    return Decision(record, fits, "effects", record.to_json(), record.notes)


def decide(baseline: str, candidate: str, source: Any, **options: Any) -> Chosen:
    """Decide from the final values of a few runs whether to keep or discard a change, like `scalerl decide`.

    Args:
        baseline: recipe that is kept so far.
        candidate: recipe that may replace it.
        source: path of a table, or a DataFrame, with one row per run.
        options: options of the command: by, y, status, failed, lower_is_better, margin.
    """
    known = ("by", "y", "status", "failed", "lower_is_better", "margin")
    with tempfile.TemporaryDirectory(prefix="scalerl-") as kept:
        frames: dict[Path, pd.DataFrame] = {}
        if isinstance(source, pd.DataFrame):
            path = Path(kept) / "table.csv"
            source.to_csv(path, index=False)
            frames[path] = source
            source = path
        words = [baseline, candidate, "--from", str(source)]
        with _name_frames_in_errors(frames):
            return Chosen(deciding.decided(_parsed_options("decide", words, options, known)))


def _options(command: str, given: Mapping[str, Any], known: Sequence[str]) -> argparse.Namespace:
    """Return the options of a command: its defaults, updated with those of the caller, `given`.

    Raises:
        TypeError: an option is unknown.
    """
    options = _parsed_options(command, ["."], given, known)
    if isinstance(options.group, str):
        options.group = [options.group]
    reading.check_window(options)
    return options


def _parsed_options(
    command: str, words: Sequence[str], given: Mapping[str, Any], known: Sequence[str]
) -> argparse.Namespace:
    for name in given:
        if name not in known:
            raise TypeError(f"{command}: no option {name!r}; valid: {', '.join(known)}")
    options = make_parser().parse_args([command, *words])
    for name, value in given.items():
        setattr(options, name, value)
    return options


def _study(sources: Sequence[Any], options: argparse.Namespace) -> Study:
    """Read the sources. DataFrames are written to files, and then read like other tables."""
    if not sources:
        raise UserError("give a source: a path, mlflow:URI#experiment, or a DataFrame")
    kept = None
    frames: dict[Path, pd.DataFrame] = {}
    options.sources = []
    for number, source in enumerate(sources):
        if isinstance(source, pd.DataFrame):
            kept = kept or tempfile.TemporaryDirectory(prefix="scalerl-")
            path = Path(kept.name) / f"table{number or ''}.csv"
            source.to_csv(path, index=False)
            frames[path] = source
            source = path
        options.sources.append(str(source))
    with _name_frames_in_errors(frames):
        study = reading.load_sources(options)
    for lines in (study.warnings, study.mapping, study.shown):
        lines[:] = [_name_frames(line, frames) for line in lines]
    return Study(study, options, kept)


@contextmanager
def _name_frames_in_errors(frames: Mapping[Path, pd.DataFrame]) -> Iterator[None]:
    """In errors, name DataFrames as `_name_frames` does."""
    try:
        yield
    except UserError as error:
        if (text := _name_frames(str(error), frames)) == str(error):
            raise
        raise UserError(text) from error


def _name_frames(text: str, frames: Mapping[Path, pd.DataFrame]) -> str:
    """Replace the paths of temporary files in a message by `DataFrame`, and their line numbers by rows' labels."""
    for number, (path, frame) in enumerate(frames.items(), start=1):
        if str(path) in text:
            text = text.replace(str(path), "DataFrame" if len(frames) == 1 else f"DataFrame {number}")
            if _LINE.search(text):  # the labels take a pass over the whole file
                labels = _labels_by_line(path, frame)
                text = "".join(labels.get(part, part) for part in _LINE.split(text))
    return text


def _labels_by_line(path: Path, frame: pd.DataFrame) -> dict[str, str]:
    """Return `row LABEL` for each row of a DataFrame, by `line N`, the row's first line in the CSV file."""
    labels, line = {}, 1
    with path.open(newline="") as file:
        reader = csv.reader(file)
        for number, _ in enumerate(reader):
            if number:
                labels[f"line {line}"] = f"row {frame.index[number - 1]}"
            line = reader.line_num + 1
    return labels


def _fits(
    sources: Sequence[Any], options: argparse.Namespace, given: Mapping[str, Any], own: Sequence[str] = ()
) -> Fits:
    """Return the fits if the only source is `Fits`; otherwise fit the curves of the `Study` or of the sources.

    Raises:
        TypeError: an option in `given` was already fixed by `load` or `fit`.
    """
    done = sources[0] if len(sources) == 1 and isinstance(sources[0], Study | Fits) else None
    settled = () if done is None else READING if isinstance(done, Study) else (*READING, *FITTING)
    late = [name for name in given if name in settled and name not in own]
    if late:
        raise TypeError(f"{late[0]}: has been settled by {'fit' if isinstance(done, Fits) else 'load'}; give it there")
    if isinstance(done, Fits):
        options.sources = done.study.options.sources
        return done
    study = done if isinstance(done, Study) else _study(sources, options)
    options.sources = study.options.sources
    return Fits(reading.fit_all(study.study.curves, options, workers=_workers()), study)


def _workers() -> int:
    """Return the number of processes for fits: in a script 1, because each process would run the script again."""
    return 1 if hasattr(sys.modules["__main__"], "__file__") else cores()


def _axes(ax: Axes | None) -> Axes:
    from matplotlib import pyplot

    axes: Axes = pyplot.subplots(layout="constrained")[1] if ax is None else ax
    return axes


def _draw_curves(ax: Axes | None, study: LoadedStudy, fits: Sequence[Fit]) -> Axes:
    import numpy as np

    from sweeps.decide.rank import named_baseline
    from sweeps.fit.predict import predict
    from sweeps.report.drawing import limits, styles

    ax = _axes(ax)
    left, right = limits(study.curves)
    fitted = {fit.recipe: fit for fit in fits}
    drawn = styles((curve.recipe for curve in study.curves), named_baseline(study.curves))
    for curve in study.curves:
        colour = drawn[curve.recipe].colour
        ax.plot(np.maximum(curve.compute, left), curve.reward, ".", color=colour, alpha=0.6, label=curve.recipe)
        one = fitted.get(curve.recipe)
        if one is not None and one.draws is not None:
            x = np.geomspace(left, right, 120)
            band = predict(one, x)
            ax.plot(x, band.value, color=colour)
            ax.fill_between(x, band.low, band.high, color=colour, alpha=0.16, linewidth=0)
    ax.set_xscale("log")
    ax.set_xlabel(study.curves[0].unit)
    ax.set_ylabel(study.curves[0].metric)
    ax.legend(frameon=False)
    return ax
