"""Common steps of all commands about curves: check the options, read the sources, fit every recipe once.

Sources are read before anything that fits, ranks or draws is imported, so that a wrong file fails at once. Commands
call `sweeps.fit` only through this module; their results are computed from the fits returned here.
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


def check_place(path: Path) -> None:
    """Check that the output file can be written, before the fits. The probe file and folders are removed again.

    Raises:
        UserError: the file cannot be written.
    """
    made: list[Path] = []
    try:
        if path.exists():
            if path.is_dir() or path.is_file():  # a pipe can be opened only once, for the output
                path.open("ab").close()
            return
        made = [folder for folder in path.parents if not folder.exists()]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("ab").close()
        path.unlink()
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror}); choose another place with -o") from error
    finally:
        for folder in made:
            with suppress(OSError):
                folder.rmdir()


def check_figure(options: argparse.Namespace) -> Path | None:
    """Check before the fits that the figure of `-o` has a known format and can be written; None without `-o`.

    Raises:
        UserError: an unknown format, or a path that cannot be written.
    """
    if options.output is None:
        return None
    from sweeps.report.drawing import check_format

    path = Path(options.output)
    check_format(path)
    check_place(path)
    return path


def fit_options(options: argparse.Namespace) -> FitOptions:
    """Return the options of every fit of a command."""
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
    """Read the sources of a command. `x` replaces the compute axis of `--x`, and `metric` the reward of `--metric`."""
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
    )


def reading_words(options: argparse.Namespace) -> list[str]:
    """Return the words of a command line that name the sources, how to read and fit them, and the margin.

    `--size` becomes `--group`, which splits the points into the same curves and asks for nothing else.
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


def shown_study(options: argparse.Namespace) -> LoadedStudy:
    """Check the window, read the sources, and print how sources of other programs were interpreted."""
    check_window(options)
    study = load_sources(options)
    for line in study.shown:
        print(f"source: {one_line(line)}", file=sys.stderr)
    return study


def fit_all(curves: Sequence[Curve], options: argparse.Namespace, workers: int | None = None) -> list[Fit]:
    """Fit every recipe of the sources with the method of the options."""
    if getattr(options, "method", "posterior") == METHOD:
        from sweeps.fit.published import fit_literal

        if any(curve.lower_is_better for curve in curves):
            raise UserError(f"--method {METHOD}: its grid of A is of pass rates; leave out it or --lower-is-better")
        return [fit_literal(curve, fit_options(options)) for curve in curves]
    from sweeps.fit.fit import fit_curves
    from sweeps.parallel import cores

    return fit_curves(curves, fit_options(options), workers=cores() if workers is None else workers)


def fit_study(options: argparse.Namespace, study: LoadedStudy) -> list[Fit]:
    """Fit every recipe of the sources that were read, and print the warnings of the sources and of each fit."""
    fits = fit_all(study.curves, options)
    from sweeps.fit.fit import warnings_of

    warn([*study.warnings, *warnings_of(fits)])
    return fits


def fitted(options: argparse.Namespace) -> tuple[LoadedStudy, list[Fit]]:
    """Read the sources and fit every recipe once, for all results of the command. Prints warnings to stderr."""
    study = shown_study(options)
    return study, fit_study(options, study)


def compared_at_k(options: argparse.Namespace, study: LoadedStudy, ranking: Ranking) -> AtK | None:
    """Compare the ranking with that by pass@k, if every run was evaluated with several completions per prompt."""
    from sweeps.decide.at_k import study_at_k

    return study_at_k(study, ranking, lambda curves: fit_all(curves, options))


def check_sets(options: argparse.Namespace) -> None:
    """Check `--sets` before any data are read.

    Raises:
        UserError: it names fewer than two sets, or `--lower-is-better` is given as well.
    """
    if options.sets is None:
        return
    if len(set(set_names(options))) < 2:
        raise UserError(f"--sets {options.sets}: name two sets or more: --sets math,code; for one set use --metric")
    if options.lower_is_better:
        raise UserError("--sets: of pass rates, where higher is better; leave out --lower-is-better")


def set_names(options: argparse.Namespace) -> list[str]:
    """Return the evaluation sets of `--sets`, a text or, from `sweeps.api`, a sequence."""
    names = options.sets.split(",") if isinstance(options.sets, str) else options.sets
    return [name.strip() for name in names if name.strip()]


def over_sets(options: argparse.Namespace, study: LoadedStudy) -> tuple[Signal | None, Aggregate | None]:
    """Compare a study's evaluation sets: signal to noise where runs have two sets or more, and `--sets` as one.

    Raises:
        UserError: `--sets` names a set that is not there.
    """
    from sweeps.decide.aggregate import aggregate
    from sweeps.decide.signal import signal_to_noise
    from sweeps.source.collected import ALL
    from sweeps.source.journals import curves_by_set

    factors = [name for name in (options.size, *options.group) if name is not None]
    curves = curves_by_set(study.runs, study.curves[0].axis, factors) if study.runs else []
    if options.sets is not None and not study.runs:  # sets of other programs' logs are read only on request
        curves = load_sources(options, metric=ALL).curves
    signal = signal_to_noise(curves) if curves else None
    return signal, None if options.sets is None else aggregate(curves, set_names(options))


def margin(options: argparse.Namespace) -> float | None:
    """Return `--margin`, else the margin that the only source was launched with; None if neither is known."""
    if options.margin is not None or len(options.sources) != 1:
        given: float | None = options.margin
        return given
    from sweeps.launch.settings import LaunchSettings

    return LaunchSettings.margin_of(Path(options.sources[0]))
