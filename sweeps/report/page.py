"""The report as HTML: no script, nothing external, light and dark, printable; all text escaped."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape

from sweeps.curve import Curve
from sweeps.decide.next_run import Settlement
from sweeps.decide.rank import Ranking
from sweeps.fit.compare import Comparison
from sweeps.fit.fit import Fit
from sweeps.fit.history import Snapshot, departure
from sweeps.fit.sensitivity import Row, summary
from sweeps.report import tables
from sweeps.report.drawing import inline_svg
from sweeps.run.health import idle_variants, mechanism_counters, truncation_alarms
from sweeps.run.journal import JournalView

_CSS = """
:root{color-scheme:light dark;--ink:#1b1f24;--soft:#5b636e;--rule:#d7dadf;--page:#fff;
--card:#f6f7f9;--mark:#9a5b00}
@media (prefers-color-scheme:dark){:root{--ink:#e6e8eb;--soft:#9aa3ad;--rule:#363c44;--page:#14171a;
--card:#1c2024;--mark:#e0a648}}
*{box-sizing:border-box}body{margin:0 auto;padding:2.5rem 1.5rem 4rem;max-width:78rem;background:var(--page);
color:var(--ink);font:16px/1.55 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif}
h1{font-size:1.9rem;line-height:1.2;margin:0 0 .5rem;letter-spacing:-.01em;overflow-wrap:anywhere}
h2{font-size:1.2rem;margin:2.6rem 0 .6rem}h3{font-size:1rem;margin:1.4rem 0 .4rem}
.outcome{font-size:1.2rem;margin:0 0 .4rem;max-width:60rem;overflow-wrap:anywhere}
.soft,figcaption{color:var(--soft);font-size:.9rem}
.undecided{border-left:4px solid var(--mark);padding-left:.8rem}
nav{display:flex;flex-wrap:wrap;gap:.2rem 1.1rem;margin:1.2rem 0 0;padding:.6rem 0;border:solid var(--rule);
border-width:1px 0;font-size:.92rem}nav a{color:inherit;text-decoration:none}nav a:hover{text-decoration:underline}
figure{margin:1rem 0;overflow-x:auto}.figure{width:100%;height:auto;color:var(--ink)}
.figure text{font-family:inherit!important}
figure.table{overflow:visible}.wide{overflow-x:auto}figcaption{padding-top:.5rem;max-width:52rem}
.tall{max-height:30rem;overflow-y:auto}.tall th{position:sticky;top:0;background:var(--page)}
table{border-collapse:separate;border-spacing:0;font-size:.92rem;font-variant-numeric:tabular-nums;width:100%}
th,td{padding:.35rem .8rem .35rem 0;border-bottom:1px solid var(--rule);text-align:left;vertical-align:top}
th{font-weight:600;border-bottom-width:2px;white-space:nowrap}td.n,th.n{text-align:right;white-space:nowrap}
td{white-space:nowrap}td .soft{display:inline-block;min-width:15rem;font-size:.97em;white-space:normal}
td.n .soft{min-width:0}td code{white-space:normal}
.dot{display:inline-block;width:.7em;height:.7em;border-radius:50%;margin-right:.5em;print-color-adjust:exact}
.range{color:var(--soft);font-size:.86em}code{font-size:.88em;overflow-wrap:anywhere}
ul.plain{background:var(--card);border-radius:6px;padding:.8rem 1rem .8rem 2rem;margin:0;overflow-wrap:anywhere}
@page{margin:14mm}
@media print{:root{color-scheme:light;--ink:#000;--soft:#444;--rule:#bbb;--page:#fff;--card:#fff;--mark:#777}
body{max-width:none;padding:0;font-size:10.5px}nav{display:none}h2,h3{break-after:avoid}figure:not(.table),tr{
break-inside:avoid}figure,.wide{overflow:visible}.tall{max-height:none}.tall th{position:static}
table{font-size:8.5px}th,td,td.n,th.n{white-space:normal;padding-right:.5rem}
td:not(.n){overflow-wrap:break-word}td:first-child{overflow-wrap:anywhere}td .soft{min-width:0}
.soft,figcaption{font-size:9px}}
"""


@dataclass(frozen=True)
class Findings:
    """What a report shows beyond the fits and their ranking.

    sensitivity: rows a recipe. settlements: what to run next, one a group of comparable recipes. comparisons: of
    families. histories: snapshots a recipe. mapping: a line a source, on how it was read. Each may be empty.
    """

    sensitivity: Mapping[str, Sequence[Row]] = field(default_factory=dict)
    settlements: Sequence[Settlement] = ()
    comparisons: Sequence[Comparison] = ()
    histories: Mapping[str, Sequence[Snapshot]] = field(default_factory=dict)
    mapping: Sequence[str] = ()


def render(
    title: str,
    curves: Sequence[Curve],
    fits: Sequence[Fit],
    ranking: Ranking,
    runs: Sequence[JournalView],
    documents: Mapping[str, str],
    warnings: Sequence[str],
    findings: Findings | None = None,
) -> str:
    """The whole page; documents are the figures as SVG. The rest is as for `report.write_report`."""
    points, seeds = sum(fit.n for fit in fits), sum(fit.seeds for fit in fits)
    outcome = "outcome undecided" if ranking.undecided else "outcome"
    sections = list(_sections(fits, ranking, runs, documents, warnings, findings or Findings()))
    links = [(f"section-{index}", heading) for index, (heading, _) in enumerate(sections)]
    parts = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="{outcome}">{escape(ranking.sentence)}.</p>',
        f'<p class="soft">{len(fits)} recipes, {seeds} runs, {points} evaluations of '
        f"<code>{escape(curves[0].metric)}</code> against {escape(curves[0].unit)}.</p>",
        "<nav>" + "".join(f'<a href="#{at}">{escape(heading)}</a>' for at, heading in links) + "</nav>",
    ]
    for (at, heading), (_, content) in zip(links, sections, strict=True):
        parts += [f'<h2 id="{at}">{escape(heading)}</h2>', *content]
    body = "\n".join(parts)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_CSS}</style></head>\n<body>\n{body}\n</body></html>\n"
    )


def _sections(
    fits: Sequence[Fit],
    ranking: Ranking,
    runs: Sequence[JournalView],
    documents: Mapping[str, str],
    warnings: Sequence[str],
    found: Findings,
) -> Iterator[tuple[str, list[str]]]:
    """Headings and what stands below each: first what was found, then what it rests on."""
    counters = mechanism_counters(runs)
    yield "Curves", _figure(documents, "curves")
    yield (
        "Ranking",
        [tables.ranking_table(fits, ranking), *_figure(documents, "asymptotes"), *_figure(documents, "profile")],
    )
    if ranking.leave_one_out:
        yield "Leave one out", [tables.contrast_table(ranking)]
    if found.settlements:
        yield "What to run next", [tables.settlement_table(settlement) for settlement in found.settlements]
    if counters:
        yield "Did the choices act?", [tables.counter_table(counters)]
    notes = _notes(fits, runs, counters, warnings, found)
    if notes:
        yield "Warnings", [_list(notes)]
    yield "Fits", [tables.fit_table(fits)]
    if "residuals" in documents:
        yield "Residuals", _figure(documents, "residuals")
    if any(fit.R0_effect is not None and fit.verdict in tables.NAMED for fit in fits):
        yield "What R0 does", [tables.r0_table(fits)]
    if found.sensitivity:
        sentences = [f"{recipe}: {summary(rows)}" for recipe, rows in found.sensitivity.items()]
        yield (
            "Sensitivity",
            [
                _list(sentences),
                tables.sensitivity_matrix(found.sensitivity),
                tables.sensitivity_table(found.sensitivity),
            ],
        )
    if any(comparison.rows for comparison in found.comparisons):
        sentences = [f"{comparison.recipe}: {comparison.sentence}" for comparison in found.comparisons]
        yield "Families", [_list(sentences), tables.family_table(found.comparisons)]
    if found.histories:
        yield "A over time", [*_figure(documents, "history"), tables.history_table(found.histories)]
    sources = [f"<p>{escape(tables.options_line(fits[0]))}</p>"]
    if found.mapping:
        sources += ["<h3>How the sources were read</h3>", _list(found.mapping)]
    if runs:
        sources += ["<h3>Runs</h3>", tables.provenance_table(runs)]
    yield "Provenance", sources


def _notes(
    fits: Sequence[Fit],
    runs: Sequence[JournalView],
    counters: Mapping[str, Mapping[str, float]],
    warnings: Sequence[str],
    found: Findings,
) -> list[str]:
    departed = {recipe: departure(snapshots) for recipe, snapshots in found.histories.items()}
    return [
        *idle_variants(runs),
        *truncation_alarms(runs),
        *warnings,
        *(f"{fit.recipe}: {note}" for fit in fits for note in fit.warnings),
        *(f"{recipe}: {note}" for recipe, note in departed.items() if note),
    ]


def _list(lines: Sequence[str]) -> str:
    return '<ul class="plain">' + "".join(f"<li>{escape(line)}</li>" for line in lines) + "</ul>"


# What a screen reader says of each figure, and what stands below it.
_CAPTIONS = {
    "curves": (
        "Reward against compute, a panel a recipe",
        "Points: evaluations, a marker a seed, hollow at the left edge for compute 0. Line: the fit, "
        "dashed beyond the data. Band: 95%. Thin grey: the baseline. Dotted: A, where it may be named.",
    ),
    "asymptotes": (
        "Asymptotes with intervals",
        "Thick: 95% for the runs given. Thin: with the spread of A between seeds.",
    ),
    "profile": (
        "Confidence curves of the asymptote",
        "How well each value of A agrees with the data, for the runs given. A curve cuts the dotted line (0.05) at the "
        "ends of the 95% interval; one that ends above it in a dashed mark never does, and A is open there.",
    ),
    "residuals": (
        "Residuals against compute, a panel a recipe",
        "Evaluations less the fitted curve, a marker a seed, hollow for compute 0; shaded: two standard deviations of "
        "a point. Lag 1: the correlation between neighbouring evaluations of a run. Recipes whose reward does "
        "not rise have no curve to depart from and are left out.",
    ),
    "history": (
        "Asymptote as fitted at growing compute, a panel a recipe",
        "The A that a fit to the evaluations up to each compute gave, with its 95% interval. Hollow and grey: not "
        "identifiable then; dotted: open to that side. Dotted line: A at the end.",
    ),
}


def _figure(documents: Mapping[str, str], name: str) -> list[str]:
    """The figure and its caption, if it was drawn."""
    if name not in documents:
        return []
    description, caption = _CAPTIONS[name]
    drawing = inline_svg(documents[name], name, escape(description))
    return [f"<figure>{drawing}<figcaption>{escape(caption)}</figcaption></figure>"]
