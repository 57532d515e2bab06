"""Commands `report`, `watch` and `publish`, which show a study."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from sweeps.cli.curves import (
    check_sets,
    check_window,
    check_writable,
    compare_over_sets,
    compared_at_k,
    fit_options,
    fit_study,
    load_sources,
    margin,
    read_and_fit,
    read_study,
)
from sweeps.cli.output import print_json, warn
from sweeps.errors import UserError, require
from sweeps.parallel import cores
from sweeps.report.plain import one_line
from sweeps.source import LoadedStudy
from sweeps.source.places import Place
from sweeps.terminal import is_interactive

if TYPE_CHECKING:
    from sweeps.decide.watch import SnapshotEvent
    from sweeps.report.page import OtherStudy


def report_command(options: argparse.Namespace) -> None:
    """Write the HTML report with its figures and `ranking.csv` (`scalerl report`)."""
    page = Path(options.output)
    check_writable(page)
    check_sets(options)
    study = read_study(options)
    signal, aggregate = compare_over_sets(options, study)
    fits = fit_study(options, study)
    # Imported here, because Matplotlib takes a second.
    from sweeps.decide.rank import rank
    from sweeps.report.drawing import not_in_font
    from sweeps.report.interactive import library
    from sweeps.report.write import all_comparisons, histories, write_ranking_csv, write_report

    workers = cores()
    ranking = rank(fits, margin=margin(options), budget=options.budget, baseline=options.baseline, workers=workers)
    written = write_report(
        page,
        curves=study.curves,
        fits=fits,
        ranking=ranking,
        runs=study.runs,
        title=options.title or Place(options.sources[0]).title,
        warnings=study.warnings,
        comparisons=all_comparisons(fits, ranking, workers),
        mapping=study.mapping,
        histories=histories(fits) if options.history else None,
        workers=workers,
        beside=None if options.beside is None else _other_study(options),
        at_k=compared_at_k(options, study, ranking),
        signal=signal,
        aggregate=aggregate,
    )
    written.append(write_ranking_csv(page.with_name("ranking.csv"), fits, ranking))
    if library() is None:
        print("the page's first figure is static; pip install vl-convert-python makes it interactive", file=sys.stderr)
    if missing := not_in_font(fit.recipe for fit in fits):
        warn([f"the font of the PNG and PDF figures lacks {missing}: names show boxes there (not in the page)"])
    print(one_line(ranking.sentence))
    for path in written:
        print(path)


def _other_study(options: argparse.Namespace) -> OtherStudy:
    from sweeps.decide.rank import rank
    from sweeps.report.page import OtherStudy

    study, fits = read_and_fit(argparse.Namespace(**vars(options) | {"sources": [options.beside]}))
    ranking = rank(fits, margin=margin(options), budget=options.budget, workers=cores())
    return OtherStudy(Place(options.beside).title, study.curves, fits, ranking)


def watch_command(options: argparse.Namespace) -> None:
    """Fit whenever evaluations arrive, until Ctrl-C: on a live screen, or one line per snapshot (`scalerl watch`)."""
    from sweeps.decide.watch import Watch, default_path, waiting
    from sweeps.run.tail import Tails

    if not options.interval > 0:
        raise UserError(f"--interval {options.interval:g}: must be positive; give seconds")
    path = default_path(options.sources) if options.out is None else Path(options.out)
    if not options.once and not options.json and is_interactive(sys.stdout):
        from sweeps.cli.watch_live import watch_live

        check_window(options)
        watch_live(options, path)
        return
    noted: set[str] = set()
    journals = Tails({"train": sys.maxsize})  # do not store train records, because only evaluations are fitted

    def read() -> LoadedStudy:
        """Load the sources. Each note about them is printed only once."""
        study = load_sources(options, read=journals)
        for note in (*(f"source: {line}" for line in study.shown), *(f"warning: {note}" for note in study.warnings)):
            if note not in noted:
                noted.add(note)
                print(one_line(note), file=sys.stderr)
        return study

    check_window(options)
    watch = Watch(read, options.sources, fit_options(options), path)
    last_warning: str | None = None
    started = False
    try:
        while True:
            try:
                if options.once or started or not waiting(options.sources):
                    for news in watch.poll():
                        _print_news(news, options.json)
                    started, last_warning = True, None
                elif last_warning is None:
                    last_warning = "no evaluation yet; waiting for the first"
                    warn([last_warning])
            except UserError as error:
                # A source may be unreadable while it is being rewritten. But at the start, an unreadable source is an
                # error.
                if options.once or not started:
                    raise
                if str(error) != last_warning:
                    last_warning = str(error)
                    warn([last_warning])
            if options.once:
                return
            time.sleep(options.interval)
    except KeyboardInterrupt:
        # Ctrl-C is the normal way to stop watching.
        return


def _print_news(news: SnapshotEvent, as_json: bool) -> None:
    """Print one snapshot in one line, and flush it, because stdout may be a pipe."""
    from sweeps.report.fit_text import snapshot_line

    if as_json:
        print_json({**news.snapshot.to_json(), "warning": news.warning}, indent=None)
    else:
        print(snapshot_line(news.snapshot), flush=True)
    if news.warning:
        warn([f"{news.snapshot.recipe}: {news.warning}"])


def publish_command(options: argparse.Namespace) -> None:
    """Log fits, bands and the ranking to MLflow and print the link to the chart (`scalerl publish`)."""
    require("mlflow", "scalerl publish")
    # MLflow is slow to import and not needed elsewhere.
    from sweeps.report.publish import publish

    publish(options.sources, options.mlflow)
