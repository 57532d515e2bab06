"""Common steps of commands about curves: check the options, read the sources, fit each recipe once.

Sources are read before modules are imported that fit, rank or draw, so that an error in a file is reported at once.
Commands call `sweeps.fit` only through this module, and compute their results from its fits.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from sweeps.cli.output import warn
from sweeps.errors import UserError
from sweeps.fit.names import METHOD
from sweeps.report.plain import one_line
from sweeps.run.journal import JournalView, read_journal
from sweeps.source import LoadedStudy, load

if TYPE_CHECKING:
    from sweeps.curve import Curve
    from sweeps.decide.aggregate import Aggregate
    from sweeps.decide.at_k import AtK
    from sweeps.decide.rank import Ranking
    from sweeps.decide.signal import Signal
    from sweeps.fit.fit import Fit
    from sweeps.fit.points import FitOptions


def check_window(options: argparse.Namespace) -> None:
    """Check the compute window of the command line before any data are read.

    Raises:
        UserError: the window is empty.
    """
    low, high = options.min_compute, options.max_compute
    if low is not None and high is not None and low >= high:
        raise UserError(f"--min-compute {low:g} is not below --max-compute {high:g}; nothing lies between them")


def check_writable(path: Path) -> None:
    """Check that an output file can be written. No new file or folder is left behind.

    Raises:
        UserError: the file cannot be written.
    """
    new_folders: list[Path] = []
    try:
        if path.exists():
            if path.is_dir() or path.is_file():  # a pipe must not be opened here, because it can be opened only once
                path.open("ab").close()
            return
        new_folders = [folder for folder in path.parents if not folder.exists()]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("ab").close()
        path.unlink()
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror}); choose another place with -o") from error
    finally:
        for folder in new_folders:
            with suppress(OSError):
                folder.rmdir()


def check_figure(options: argparse.Namespace) -> Path | None:
    """Check that the figure of `-o` has a known format and can be written. Return its path; None without `-o`.

    Raises:
        UserError: the format is unknown, or the path cannot be written.
    """
    if options.output is None:
        return None
    from sweeps.report.drawing import check_format

    path = Path(options.output)
    check_format(path)
    check_writable(path)
    return path


def fit_options(options: argparse.Namespace) -> FitOptions:
    """Convert a command's options to the options of its fits."""
    from sweeps.fit.points import FitOptions

    return FitOptions(
        r0=options.r0,
        min_compute=options.min_compute,
        max_compute=options.max_compute,
        family=getattr(options, "family", "sigmoid").replace("all", "sigmoid"),
        robust=options.robust,
    )


def load_sources(
    options: argparse.Namespace,
    x: str | None = None,
    read: Callable[[Path], JournalView] = read_journal,
    metric: str | None = None,
) -> LoadedStudy:
    """Read the sources of a command.

    Args:
        options: options of the command.
        x, metric: compute axis and reward to read; None for those of `--x` and `--metric`.
        read: function that reads a journal.
    """
    factors = [name for name in (options.size, *options.group) if name is not None]
    return load(
        options.sources,
        metric=options.metric if metric is None else metric,
        x=options.x if x is None else x,
        y=options.y,
        by=options.by,
        factors=factors,
        seed_from=options.seed_from,
        read=read,
        bounds=options.bounds,
        lower_is_better=options.lower_is_better,
        factor_options={getattr(options, name, None) or "": f"--{name}" for name in ("size", "rollouts", "difficulty")},
    )


def source_arguments(options: argparse.Namespace) -> list[str]:
    """Return command line arguments that give the same sources, read and fitted in the same way, and the same margin.

    `--size` becomes `--group`, which makes the same curves but does not compare model sizes.
    """
    words = [*options.sources]
    for name in ("metric", "x", "y", "by", "seed_from", "r0", "min_compute", "max_compute", "margin"):
        value = getattr(options, name)
        if value is not None and (name, value) != ("r0", "first"):
            words.append(f"--{name.replace('_', '-')}={value if isinstance(value, str) else f'{value:.12g}'}")
    words += [f"--group={column}" for column in (options.size, *options.group) if column is not None]
    words += [f"--{name.replace('_', '-')}" for name in ("robust", "lower_is_better") if getattr(options, name)]
    if options.bounds is not None:
        words += ["--bounds", *(f"{end:.12g}" for end in options.bounds)]
    return words


def read_study(options: argparse.Namespace) -> LoadedStudy:
    """Check the compute window, read the sources, and print how sources of other programs were read."""
    check_window(options)
    study = load_sources(options)
    for line in study.shown:
        print(f"source: {one_line(line)}", file=sys.stderr)
    return study


def fit_all(curves: Sequence[Curve], options: argparse.Namespace, workers: int | None = None) -> list[Fit]:
    """Fit every curve with the method of the options. `workers` is the number of processes; None for all cores."""
    if getattr(options, "method", "posterior") == METHOD:
        from sweeps.fit.published import fit_literal

        if any(curve.lower_is_better for curve in curves):
            raise UserError(f"--method {METHOD}: its grid of A is of pass rates; leave out it or --lower-is-better")
        return [fit_literal(curve, fit_options(options)) for curve in curves]
    from sweeps.fit.fit import fit_curves
    from sweeps.parallel import cores

    return fit_curves(curves, fit_options(options), workers=cores() if workers is None else workers)


def fit_study(options: argparse.Namespace, study: LoadedStudy) -> list[Fit]:
    """Fit every recipe of a study, and print the warnings of its sources and of each fit to stderr."""
    fits = fit_all(study.curves, options)
    from sweeps.fit.fit import warnings_of

    warn([*study.warnings, *warnings_of(fits)])
    return fits


def read_and_fit(options: argparse.Namespace) -> tuple[LoadedStudy, list[Fit]]:
    """Read the sources and fit every recipe once. Print warnings to stderr."""
    study = read_study(options)
    return study, fit_study(options, study)


def compared_at_k(options: argparse.Namespace, study: LoadedStudy, ranking: Ranking) -> AtK | None:
    """Compare the ranking with that by pass@k; None unless all runs have several completions per prompt."""
    from sweeps.decide.at_k import study_at_k

    return study_at_k(study, ranking, lambda curves: fit_all(curves, options))


def check_sets(options: argparse.Namespace) -> None:
    """Check `--sets` before any data are read.

    Raises:
        UserError: `--sets` names fewer than two sets, or `--lower-is-better` is given as well.
    """
    if options.sets is None:
        return
    if len(set(set_names(options))) < 2:
        raise UserError(f"--sets {options.sets}: name two sets or more: --sets math,code; for one set use --metric")
    if options.lower_is_better:
        raise UserError("--sets: of pass rates, where higher is better; leave out --lower-is-better")


def set_names(options: argparse.Namespace) -> list[str]:
    """Return the evaluation sets of `--sets`, which is a string or, from `sweeps.api`, a sequence."""
    names = options.sets.split(",") if isinstance(options.sets, str) else options.sets
    return [name.strip() for name in names if name.strip()]


def compare_over_sets(options: argparse.Namespace, study: LoadedStudy) -> tuple[Signal | None, Aggregate | None]:
    """Compare recipes over a study's evaluation sets.

    Returns:
        The signal to noise of each set (None if there are no curves by set), and the comparison over all sets of
        `--sets` together (None without that option).

    Raises:
        UserError: a set of `--sets` is missing.
    """
    from sweeps.decide.aggregate import aggregate
    from sweeps.decide.signal import signal_to_noise
    from sweeps.source.collected import ALL
    from sweeps.source.journals import curves_by_set

    factors = [name for name in (options.size, *options.group) if name is not None]
    curves = curves_by_set(study.runs, study.curves[0].axis, factors) if study.runs else []
    if options.sets is not None and not study.runs:  # sets in logs of other programs are read only on request
        curves = load_sources(options, metric=ALL).curves
    signal = signal_to_noise(curves) if curves else None
    return signal, None if options.sets is None else aggregate(curves, set_names(options))


def margin(options: argparse.Namespace) -> float | None:
    """Return `--margin`, else the margin with which the only source was launched; None if neither is given."""
    if options.margin is not None or len(options.sources) != 1:
        given: float | None = options.margin
        return given
    from sweeps.launch.settings import LaunchSettings

    return LaunchSettings.margin_of(Path(options.sources[0]))
