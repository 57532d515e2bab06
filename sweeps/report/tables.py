"""The tables of the report, as HTML; all text escaped."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from sweeps.decide.next_run import Settlement, Step
from sweeps.decide.rank import Ranking
from sweeps.fit.compare import Comparison
from sweeps.fit.family import FAMILIES
from sweeps.fit.fit import Fit, Interval
from sweeps.fit.history import Snapshot, departure
from sweeps.fit.sensitivity import MAIN, Row, signed
from sweeps.report.drawing import colours
from sweeps.run.journal import JournalView

# Verdicts with a curve beyond its bend: those whose A is worth shaking at.
NAMED = ("identifiable", "open")
# A table of more rows scrolls within the page.
_TALL = 14


def number(value: float | None, digits: int = 3) -> str:
    """A reward with fixed decimals; a dash for what is not there."""
    return "–" if value is None else f"{value:.{digits}f}"


def compact(value: float | None) -> str:
    """Compute or an exponent: three significant digits, or all of a number that is not long."""
    if value is None:
        return "–"
    return f"{value:.0f}" if 100 <= abs(value) < 1e6 else f"{value:.3g}"


def interval(found: Interval | None, shift: bool = False, short: bool = False) -> str:
    """`0.610 [0.600, 0.620]` as HTML, with `open` for an open end."""
    if found is None or found.value is None:
        return "–"

    def text(value: float | None) -> str:
        if value is None:
            return "open"
        return signed(value) if shift else compact(value) if short else number(value)

    bounds = f"{text(found.low)}, {text(found.high)}"
    return f'{text(found.value)} <span class="range">[{bounds}]</span>'


def soft(text: str) -> str:
    """Plain text, set back."""
    return f'<span class="soft">{escape(text)}</span>'


def table(head: Sequence[str], rows: Iterable[Sequence[str]], numeric: Sequence[int], caption: str = "") -> str:
    """A table of cells that are HTML already; `numeric` columns are set flush right, a long one scrolls."""
    kind = [' class="n"' if i in numeric else "" for i in range(len(head))]
    top = "".join(f"<th{kind[i]}>{name}</th>" for i, name in enumerate(head))
    lines = ["<tr>" + "".join(f"<td{kind[i]}>{cell}</td>" for i, cell in enumerate(row)) + "</tr>\n" for row in rows]
    box = '"wide tall" tabindex="0"' if len(lines) > _TALL else '"wide"'
    note = f"<figcaption>{caption}</figcaption>" if caption else ""
    return (
        f'<figure class="table"><div class={box}><table><thead><tr>{top}</tr></thead><tbody>\n{"".join(lines)}'
        f"</tbody></table></div>{note}</figure>"
    )


def ranking_table(fits: Sequence[Fit], ranking: Ranking) -> str:
    """Every recipe's place, or why it has none."""
    colour = colours(ranking)
    head = ["", "Recipe", "P(best A)", "A", "B at shared A", "C_mid at shared A"]
    if ranking.budget is not None:
        head.append(f"R at {compact(ranking.budget)}")
    head.append("Why")
    rows = []
    for entry in ranking.ranking:
        row = [
            "–" if entry.rank is None else str(entry.rank),
            f'<span class="dot" style="background:{colour[entry.recipe]}"></span>{escape(entry.recipe)}',
            "–" if entry.p_best is None else f"{entry.p_best:.2f}",
            interval(entry.A if entry.rank is not None else None),
            interval(entry.B_at_shared_A, short=True),
            interval(entry.C_mid_at_shared_A, short=True),
        ]
        if ranking.budget is not None:
            row.append(interval(entry.R_at_budget))
        refused = "" if entry.rank is not None or entry.verdict == "identifiable" else f"{entry.verdict}: "
        row.append(soft(refused + entry.reason))
        rows.append(row)
    shared = "" if ranking.shared_a is None else f" B is refitted at the tied recipes' mean A, {ranking.shared_a:.3f}."
    spread = fits[0].seed_spread
    between = f"adds the spread of A between seeds (sd {spread.sd:.3f}, {escape(spread.source)})"
    if ranking.pairing is not None:
        between = (
            f"compares recipes seed by seed ({escape(', '.join(ranking.pairing.seeds))}) and adds the spread of A "
            f"that is left between them (sd {ranking.pairing.spread.sd:.3f})"
        )
    caption = (
        f"A with its 95% interval for the runs given; P(best A) {between}. "
        f"Ties: within {ranking.margin:g} of the best.{shared}"
    )
    return table(head, rows, [0, 2, *range(3, len(head) - 1)], caption)


def contrast_table(ranking: Ranking) -> str:
    """Each variant against the baseline."""
    rows = [
        [
            escape(entry.recipe),
            interval(entry.delta_a, shift=True),
            interval(entry.delta_b, shift=True),
            soft(entry.reason),
        ]
        for entry in ranking.leave_one_out
    ]
    caption = f"Each variant less the baseline {escape(ranking.baseline or '')}, with 95% intervals."
    return table(["Variant", "ΔA", "ΔB at shared A", "Note"], rows, [1, 2], caption)


def settlement_table(settlement: Settlement) -> str:
    """What to run next, the most worth its compute first."""

    def gain(step: Step) -> str:
        found = step.expected_gain
        return "not known" if found is None else "&lt; 0.01" if found < 0.01 else f"{found:.2f}"

    what = {"extend": "extend its runs to", "seed": "one more seed, to"}
    rows = [
        [
            escape(step.recipe),
            f"{escape(what.get(step.action, step.action))} {compact(step.compute)}",
            compact(step.cost),
            gain(step),
            soft(step.reason),
        ]
        for step in settlement.steps
    ]
    sentence = f"<p>{escape(settlement.sentence[:1].upper() + settlement.sentence[1:])}.</p>"
    if not rows:
        return sentence
    caption = (
        "Expected gain: by how much the chance of choosing a recipe whose A is lower than the best by more than "
        f"{settlement.margin:g} is expected to fall. Cost: compute added over all of the recipe's runs."
    )
    return sentence + table(["Recipe", "What", "Cost", "Expected gain", "Why"], rows, [2, 3], caption)


def counter_table(counters: Mapping[str, Mapping[str, float]]) -> str:
    """How far each choice acted."""
    axes = sorted({axis for values in counters.values() for axis in values})
    rows = [
        [escape(recipe), *(f"{values[a]:.3f}" if a in values else "–" for a in axes)]
        for recipe, values in sorted(counters.items())
    ]
    caption = "Share of steps in which a choice made a difference, at the end of the runs; 0: it never did."
    return table(["Recipe", *map(escape, axes)], rows, range(1, len(axes) + 1), caption)


def fit_table(fits: Sequence[Fit]) -> str:
    """The fits with their quality."""
    names = list(dict.fromkeys(name for fit in fits for name in FAMILIES[fit.family].names))
    rows = [
        [
            escape(fit.recipe),
            escape(fit.verdict),
            escape(fit.family),
            interval(fit.A),
            *(interval(fit.shape.get(name), short=True) for name in names),
            number(fit.R0),
            "–" if fit.window is None else f"{compact(fit.window[0])} to {compact(fit.window[1])}",
            f"{fit.n} / {fit.seeds}",
            number(fit.r2, 4),
            number(fit.rmse, 4),
            number(fit.extrapolation_error, 4),
        ]
        for fit in fits
    ]
    quality = ["R0", "Window", "Points / seeds", "R²", "RMSE", "Half-run error"]
    head = ["Recipe", "Verdict", "Family", "A", *names, *quality]
    families = sorted({fit.family for fit in fits})
    formulas = "; ".join(f"{name}: R(C) = {FAMILIES[name].formula}" for name in families)
    caption = (
        f"{escape(formulas)}. R² and RMSE are about the curve that a recipe's seeds share. Half-run error: fitted to "
        "the first half of compute, the absolute error of the predicted mean of the last quarter."
    )
    return table(head, rows, range(3, len(head)), caption)


def r0_table(fits: Sequence[Fit]) -> str:
    """A and B refitted with R0 a little lower and higher."""
    rows, step = [], 0.0
    for fit in fits:
        effect = fit.R0_effect
        if effect is None or fit.verdict not in NAMED:
            continue
        step = effect.step
        moved = [None if a is None or fit.A.value is None else a - fit.A.value for a in effect.A]
        rows.append(
            [
                escape(fit.recipe),
                f"{number(fit.R0)} {soft(fit.R0_source)}",
                *(
                    f'{number(a)} <span class="range">{"" if by is None else signed(by)}</span>'
                    for a, by in zip(effect.A, moved, strict=True)
                ),
                compact(effect.B[0]),
                compact(fit.B.value),
                compact(effect.B[1]),
            ]
        )
    head = ["Recipe", "R0", "A, R0 lower", "A, R0 higher", "B, R0 lower", "B", "B, R0 higher"]
    caption = (
        f"The reward before training decides where the curve starts, and by that where it is taken to end: A and B "
        f"refitted with R0 fixed {step:.3g} lower and higher, and how far A moves. A dash: no possible reward."
    )
    return table(head, rows, range(1, len(head)), caption)


# --- sensitivity and families -------------------------------------------------------------------------------


def sensitivity_matrix(found: Mapping[str, Sequence[Row]]) -> str:
    """A recipe a row, a setting a column: A, and below it how far it moved."""
    columns = list(dict.fromkeys(row.short for rows in found.values() for row in rows if row.kind != MAIN))
    lines = []
    for recipe, rows in found.items():
        by_setting = {row.short: row for row in rows}
        cells = [_moved(by_setting.get(name), rows[0]) for name in columns]
        lines.append([escape(recipe), interval(rows[0].A), *cells])
    caption = (
        "A refitted: with the first 5 to 30% of the window's compute cut off, other rules for R0, less weight for "
        "points far off, and with only the first 75 or 50% of the window. Below each, by how much A moved, or the "
        "verdict where it changed."
    )
    head = ["Recipe", "A as fitted", *map(escape, columns)]
    return table(head, lines, range(1, len(head)), caption)


def _moved(row: Row | None, main: Row) -> str:
    if row is None:
        return "–"
    below = row.verdict if row.verdict != main.verdict or row.shift is None else signed(row.shift)
    return f'{number(row.A.value)}<br><span class="range">{escape(below)}</span>'


def sensitivity_table(found: Mapping[str, Sequence[Row]]) -> str:
    """Every refit with its intervals."""
    lines = [
        [
            escape(recipe) if row.kind == MAIN else "",
            escape(row.setting),
            interval(row.A),
            "" if row.shift is None or row.kind == MAIN else signed(row.shift),
            interval(row.B, short=True),
            interval(row.C_mid, short=True),
            str(row.n),
            escape(row.verdict),
        ]
        for recipe, rows in found.items()
        for row in rows
    ]
    head = ["Recipe", "Setting", "A", "Shift", "B", "C_mid", "Points", "Verdict"]
    return table(head, lines, range(2, 7), "Every refit with its 95% intervals.")


def family_table(comparisons: Sequence[Comparison]) -> str:
    """A recipe a row, a family a column: error on later compute, and below it AICc above the least."""
    names = list(dict.fromkeys(row.family for found in comparisons for row in found.rows))
    lines = []
    for found in comparisons:
        rows = {row.family: row for row in found.rows}
        errors = [row.held_out for row in found.rows if row.held_out is not None]
        cells = []
        for name in names:
            row = rows.get(name)
            if row is None:
                cells.append("–")
                continue
            error = number(row.held_out, 4)
            if errors and row.held_out == min(errors):
                error = f"<b>{error}</b>"
            cells.append(f'{error}<br><span class="range">AICc {row.delta_aicc:+.1f}</span>')
        lines.append([escape(found.recipe), *cells, number(found.last_value, 4)])
    caption = (
        "Mean absolute error on later compute that the fit has not seen (from 50 to 90% of the window on, up to twice "
        "as far), the least in bold; below it AICc above the best family's. Last value: taking the latest "
        "evaluation for the future. A curve that foretells no better than that carries no forecast."
    )
    head = ["Recipe", *map(escape, names), "Last value"]
    return table(head, lines, range(1, len(head)), caption)


def history_table(histories: Mapping[str, Sequence[Snapshot]]) -> str:
    """What the fits along the way foretold, and what came."""
    lines = []
    for recipe, snapshots in histories.items():
        checks = [snapshot.check for snapshot in snapshots if snapshot.check is not None]
        since = None
        for snapshot in reversed(snapshots):
            if snapshot.verdict != "identifiable":
                break
            since = snapshot.compute_end
        last = checks[-1] if checks else None
        held = f"{sum(check.inside for check in checks)} of {len(checks)}" if checks else "–"
        foretold = None if last is None else Interval(last.predicted, last.low, last.high)
        lines.append(
            [
                escape(recipe),
                str(len(snapshots)),
                "not yet" if since is None else compact(since),
                held,
                interval(foretold),
                number(None if last is None else last.actual),
                "departed" if departure(snapshots) else "",
            ]
        )
    head = ["Recipe", "Fits", "Identifiable from", "Forecasts that held", "Latest forecast", "What came", ""]
    caption = (
        "Each fit's forecast of the next evaluations, half as far again as it had seen, against what came. "
        "95% intervals, which a good run leaves now and then; departed: it left them lastingly."
    )
    return table(head, lines, range(1, 6), caption)


# --- provenance ---------------------------------------------------------------------------------------------


def options_line(fit: Fit) -> str:
    """How the fits were made."""
    options = fit.options
    low = "the first evaluation" if options.min_compute is None else f"compute {options.min_compute:g}"
    high = "the last" if options.max_compute is None else f"compute {options.max_compute:g}"
    r0 = options.r0 if isinstance(options.r0, str) else f"{options.r0:g}"
    robust = ", points far off count less" if options.robust else ""
    return f"Fitted: {options.family}, from {low} to {high}, R0 {r0}{robust}; compute axis {fit.curve.axis}."


def provenance_table(runs: Sequence[JournalView]) -> str:
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
        shared = table(["In all runs", ""], lines, [])
    return shared + table(["Run", "Status", *map(escape, varying)], rows, [])


def _plain(value: Any) -> str:
    """A header field as short text."""
    text = "" if value is None else value if isinstance(value, str) else json.dumps(value, sort_keys=True)
    return text if len(text) <= 200 else text[:199] + "…"
