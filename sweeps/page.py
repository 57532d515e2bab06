"""The report as HTML: no script, nothing external, light and dark, printable; all text escaped."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from sweeps.curve import Curve
from sweeps.figures import colours, inline_svg
from sweeps.fit import Fit, Interval
from sweeps.journal import JournalView
from sweeps.mechanism import idle_variants, mechanism_counters, truncation_alarms
from sweeps.rank import Ranking

_CSS = """
:root{color-scheme:light dark;--ink:#1b1f24;--soft:#5b636e;--rule:#d7dadf;--page:#fff;
--card:#f6f7f9;--mark:#9a5b00}
@media (prefers-color-scheme:dark){:root{--ink:#e6e8eb;--soft:#9aa3ad;--rule:#363c44;--page:#14171a;
--card:#1c2024;--mark:#e0a648}}
*{box-sizing:border-box}body{margin:0 auto;padding:2.5rem 1.5rem 4rem;max-width:68rem;background:var(--page);
color:var(--ink);font:16px/1.55 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif}
h1{font-size:1.9rem;line-height:1.2;margin:0 0 .5rem;letter-spacing:-.01em}
h2{font-size:1.2rem;margin:2.6rem 0 .6rem}
.outcome{font-size:1.2rem;margin:0 0 .4rem}.soft,caption,figcaption{color:var(--soft);font-size:.9rem}
.undecided{border-left:4px solid var(--mark);padding-left:.8rem}
figure{margin:1rem 0;overflow-x:auto}.figure{width:100%;height:auto;color:var(--ink)}
.figure text{font-family:inherit!important}
.wide{overflow-x:auto}
table{border-collapse:collapse;font-size:.92rem;font-variant-numeric:tabular-nums;width:100%}
caption{caption-side:bottom;text-align:left;padding-top:.5rem}
th,td{padding:.35rem .8rem .35rem 0;border-bottom:1px solid var(--rule);text-align:left;vertical-align:top}
th{font-weight:600;border-bottom-width:2px;white-space:nowrap}td.n,th.n{text-align:right;white-space:nowrap}
td.reason{color:var(--soft);min-width:14rem}.dot{display:inline-block;width:.7em;height:.7em;border-radius:50%;
margin-right:.5em}.range{color:var(--soft);font-size:.86em}code{font-size:.88em;overflow-wrap:anywhere}
ul.warnings{background:var(--card);border-radius:6px;padding:.8rem 1rem .8rem 2rem;margin:0}
@media print{:root{color-scheme:light;--ink:#000;--soft:#444;--rule:#bbb;--page:#fff;--card:#fff}
body{max-width:none;padding:0;font-size:11px}h2{break-after:avoid}figure,tr{break-inside:avoid}}
"""


def render(
    title: str,
    curves: Sequence[Curve],
    fits: Sequence[Fit],
    ranking: Ranking,
    runs: Sequence[JournalView],
    documents: Mapping[str, str],
    warnings: Sequence[str],
) -> str:
    """The whole page; documents are the figures as SVG. The rest is as for `report.write_report`."""
    counters = mechanism_counters(runs)
    notes = [*idle_variants(counters), *truncation_alarms(runs), *warnings]
    notes += [f"{fit.recipe}: {note}" for fit in fits for note in fit.warnings]
    points, seeds = sum(fit.n for fit in fits), sum(fit.seeds for fit in fits)
    outcome = "outcome undecided" if ranking.undecided else "outcome"
    parts = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="{outcome}">{escape(ranking.sentence)}.</p>',
        f'<p class="soft">{len(fits)} recipes, {seeds} runs, {points} evaluations of '
        f"<code>{escape(curves[0].metric)}</code> against {escape(curves[0].unit)}.</p>",
        "<h2>Curves</h2>",
        _figure(
            documents,
            "curves",
            "Reward against compute, a panel a recipe",
            "Points: evaluations, a marker a seed, hollow at the left edge for compute 0. Line: the fit, "
            "dashed beyond the data. Band: 95%. Thin grey: the baseline. Dotted: A, where it may be named.",
        ),
        "<h2>Ranking</h2>",
        _ranking_table(fits, ranking),
    ]
    if "asymptotes" in documents:
        parts.append(
            _figure(
                documents,
                "asymptotes",
                "Asymptotes with intervals",
                "Thick: 95% for the runs given. Thin: with the spread of A between seeds.",
            )
        )
    if ranking.leave_one_out:
        parts += ["<h2>Leave one out</h2>", _contrast_table(ranking)]
    if counters:
        parts += ["<h2>Did the choices act?</h2>", _counter_table(counters)]
    if notes:
        items = "".join(f"<li>{escape(note)}</li>" for note in notes)
        parts += ["<h2>Warnings</h2>", f'<ul class="warnings">{items}</ul>']
    parts += ["<h2>Fits</h2>", _fit_table(fits)]
    if runs:
        parts += ["<h2>Provenance</h2>", _provenance_table(runs)]
    body = "\n".join(parts)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_CSS}</style></head>\n<body>\n{body}\n</body></html>\n"
    )


def _figure(documents: Mapping[str, str], name: str, description: str, caption: str) -> str:
    drawing = inline_svg(documents[name], name, escape(description))
    return f"<figure>{drawing}<figcaption>{escape(caption)}</figcaption></figure>"


def _number(value: float | None, digits: int = 3) -> str:
    """A reward with fixed decimals; a dash for what is not there."""
    return "–" if value is None else f"{value:.{digits}f}"


def _compact(value: float | None) -> str:
    """Compute or an exponent: three significant digits."""
    return "–" if value is None else f"{value:.3g}"


def _interval(interval: Interval | None, signed: bool = False, compact: bool = False) -> str:
    """`0.610 [0.600, 0.620]` as HTML, with `open` for an open end."""
    if interval is None or interval.value is None:
        return "–"

    def text(value: float | None) -> str:
        if value is None:
            return "open"
        return f"{value:+.3f}" if signed else _compact(value) if compact else _number(value)

    bounds = f"{text(interval.low)}, {text(interval.high)}"
    return f'{text(interval.value)} <span class="range">[{bounds}]</span>'


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], numeric: Sequence[int], caption: str = "") -> str:
    """A table of cells that are HTML already; `numeric` columns are set flush right."""
    kind = [' class="n"' if i in numeric else "" for i in range(len(head))]
    top = "".join(f"<th{kind[i]}>{name}</th>" for i, name in enumerate(head))
    body = "".join(
        "<tr>" + "".join(f"<td{kind[i]}>{cell}</td>" for i, cell in enumerate(row)) + "</tr>\n" for row in rows
    )
    note = f"<caption>{caption}</caption>" if caption else ""
    return f'<div class="wide"><table>{note}<thead><tr>{top}</tr></thead><tbody>\n{body}</tbody></table></div>'


def _ranking_table(fits: Sequence[Fit], ranking: Ranking) -> str:
    colour = colours(ranking)
    head = ["", "Recipe", "P(best A)", "A", "B at shared A"]
    if ranking.budget is not None:
        head.append(f"R at {_compact(ranking.budget)}")
    head.append("Why")
    rows = []
    for entry in ranking.ranking:
        row = [
            "–" if entry.rank is None else str(entry.rank),
            f'<span class="dot" style="background:{colour[entry.recipe]}"></span>{escape(entry.recipe)}',
            "–" if entry.p_best is None else f"{entry.p_best:.2f}",
            _interval(entry.A if entry.rank is not None else None),
            _interval(entry.B_at_shared_A, compact=True),
        ]
        if ranking.budget is not None:
            row.append(_interval(entry.R_at_budget))
        verdict = "" if entry.rank is not None else f"<b>{escape(entry.verdict)}</b>: "
        row.append(f'<span class="soft">{verdict}{escape(entry.reason)}</span>')
        rows.append(row)
    shared = "" if ranking.shared_a is None else f" B is refitted at the tied recipes' mean A, {ranking.shared_a:.3f}."
    spread = fits[0].seed_spread
    caption = (
        f"A with its 95% interval for the runs given; P(best A) adds the spread of A between seeds "
        f"(sd {spread.sd:.3f}, {escape(spread.source)}). Ties: within {ranking.margin:g} of the best.{shared}"
    )
    return _table(head, rows, [0, 2, *range(3, len(head) - 1)], caption)


def _contrast_table(ranking: Ranking) -> str:
    rows = [
        [
            escape(entry.recipe),
            _interval(entry.delta_a, signed=True),
            _interval(entry.delta_b, signed=True),
            f'<span class="soft">{escape(entry.reason)}</span>',
        ]
        for entry in ranking.leave_one_out
    ]
    caption = f"Each variant less the baseline {escape(ranking.baseline or '')}, with 95% intervals."
    return _table(["Variant", "ΔA", "ΔB at shared A", "Note"], rows, [1, 2], caption)


def _counter_table(counters: Mapping[str, Mapping[str, float]]) -> str:
    axes = sorted({axis for values in counters.values() for axis in values})
    rows = [
        [escape(recipe), *(f"{values[a]:.3f}" if a in values else "–" for a in axes)]
        for recipe, values in sorted(counters.items())
    ]
    caption = "Share of steps in which a choice made a difference, at the end of the runs; 0: it never did."
    return _table(["Recipe", *map(escape, axes)], rows, range(1, len(axes) + 1), caption)


def _fit_table(fits: Sequence[Fit]) -> str:
    rows = [
        [
            escape(fit.recipe),
            escape(fit.verdict),
            _interval(fit.A),
            _interval(fit.B, compact=True),
            _interval(fit.C_mid, compact=True),
            _number(fit.R0),
            "–" if fit.window is None else f"{fit.window[0]:.3g} to {fit.window[1]:.3g}",
            f"{fit.n} / {fit.seeds}",
            _number(fit.rmse, 4),
            _number(fit.extrapolation_error),
        ]
        for fit in fits
    ]
    head = [
        "Recipe",
        "Verdict",
        "A",
        "B",
        "C_mid",
        "R0",
        "Window",
        "Points / seeds",
        "RMSE",
        "Half-run error",
    ]
    caption = (
        "R(C) = R0 + (A - R0) / (1 + (C_mid / C)^B). Half-run error: fitted to the first half of compute, "
        "the absolute error of the predicted mean of the last quarter."
    )
    return _table(head, rows, range(2, 10), caption)


def _provenance_table(runs: Sequence[JournalView]) -> str:
    """Every header field of every run; a value all runs share is named once, in the caption's list."""
    names = sorted({name for view in runs for name in view.header} - {"kind", "time"})
    texts = {name: [_plain(view.header.get(name)) for view in runs] for name in names}
    common = [name for name in names if len(runs) > 1 and len(set(texts[name])) == 1]
    varying = [name for name in names if name not in common]
    rows = [
        [
            f"<code>{escape(view.path.parent.name)}</code>",
            escape(view.status + (f": {view.reason}" if view.reason else "")),
            *(f"<code>{escape(texts[name][i])}</code>" for name in varying),
        ]
        for i, view in enumerate(runs)
    ]
    shared = ""
    if common:
        lines = [[escape(name), f"<code>{escape(texts[name][0])}</code>"] for name in common]
        shared = _table(["In all runs", ""], lines, [])
    return shared + _table(["Run", "Status", *map(escape, varying)], rows, [])


def _plain(value: Any) -> str:
    """A header field as short text."""
    text = "" if value is None else value if isinstance(value, str) else json.dumps(value, sort_keys=True)
    return text if len(text) <= 200 else text[:199] + "…"
