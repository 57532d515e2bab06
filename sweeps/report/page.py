"""Render the HTML report from the templates in `sweeps/report/templates`.

Text and markup are in the templates, which escape all values. This module prepares the values, and has the functions
that the templates call.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from sweeps.curve import Curve
from sweeps.decide.aggregate import Aggregate
from sweeps.decide.at_k import AtK
from sweeps.decide.next_run import NextSteps, Step
from sweeps.decide.rank import Ranking
from sweeps.decide.signal import Signal
from sweeps.decide.wording import headline
from sweeps.fit.compare import Comparison
from sweeps.fit.family import FAMILIES
from sweeps.fit.fit import Fit, warnings_of
from sweeps.fit.history import Snapshot, departure
from sweeps.fit.sensitivity import MAIN, Row, signed, summary
from sweeps.report.drawing import Panels, colours, inline_svg
from sweeps.report.facts import Facts
from sweeps.report.interactive import library, study_data
from sweeps.report.labels import cut, shorten_labels
from sweeps.report.plan_text import gain
from sweeps.run.health import code_changes, idle_variants, mechanism_counters, truncation_alarms
from sweeps.run.journal import JournalView
from sweeps.run.rollouts import ExamplePrompt
from sweeps.search.race_log import RaceRecord
from sweeps.source.held_out import PromptShares
from sweeps.terminal import counted

# Verdicts under which A is reported, so that its sensitivity is computed.
NAMED = ("identifiable", "open")
# Length to which a recipe's name is cut in the headline.
_HEADLINE_NAME = 22
# A table with more rows than this scrolls within the page.
_TALL = 14


@dataclass(frozen=True)
class Findings:
    """Content of a report besides the fits and their ranking. Any of it may be empty.

    Attributes:
        sensitivity: refits under other settings, by recipe.
        settlements: state of the choice, and runs to make next, for each group of comparable recipes.
        comparisons: comparisons of families.
        histories: snapshots by recipe.
        mapping: one line per source on how it was read.
        commands: command line for each step, if this package launched the study.
        rollouts: a few completions, as samples.
        races: records of studies that were run as races or searches.
        at_k: the ranking by pass@k next to that by pass@1.
        prompts: by recipe, the fractions of held-out prompts that never and always pass.
        signal, aggregate: signal to noise by evaluation set, and recipes over several sets.
    """

    sensitivity: Mapping[str, Sequence[Row]] = field(default_factory=dict)
    settlements: Sequence[NextSteps] = ()
    comparisons: Sequence[Comparison] = ()
    histories: Mapping[str, Sequence[Snapshot]] = field(default_factory=dict)
    mapping: Sequence[str] = ()
    commands: Mapping[Step, str] = field(default_factory=dict)
    rollouts: Sequence[ExamplePrompt] = ()
    races: Sequence[RaceRecord] = ()
    at_k: AtK | None = None
    prompts: Sequence[PromptShares] = ()
    signal: Signal | None = None
    aggregate: Aggregate | None = None


@dataclass(frozen=True)
class OtherStudy:
    """Another study shown next to the reported one, with the fits and the ranking of its curves."""

    title: str
    curves: Sequence[Curve]
    fits: Sequence[Fit]
    ranking: Ranking


def render(
    title: str,
    curves: Sequence[Curve],
    fits: Sequence[Fit],
    ranking: Ranking,
    runs: Sequence[JournalView],
    documents: Mapping[str, str],
    warnings: Sequence[str],
    findings: Findings | None = None,
    dots: Mapping[str, int] | None = None,
    panels: Mapping[str, Panels] | None = None,
    beside: OtherStudy | None = None,
) -> str:
    """Render the whole page.

    Args:
        documents: SVG of each figure, by name.
        findings: further content; None for none.
        dots: by figure, the number of points drawn as dots instead of markers, see `thinning`; None for none.
        panels: by figure, the panels to stack on a narrow screen; None for none.

    Other arguments are as for `report.write_report`.
    """
    all_findings = findings or Findings()
    facts = Facts(runs)
    short = shorten_labels([entry.recipe for entry in ranking.ranking])
    script = library()
    study = (
        None if script is None else study_data(curves, fits, ranking, runs, short, all_findings.rollouts, facts.rate)
    )
    counters = mechanism_counters(runs)
    departures = {recipe: departure(snapshots) for recipe, snapshots in all_findings.histories.items()}
    notes = [
        *idle_variants(runs),
        *truncation_alarms(runs),
        *code_changes(runs),
        *warnings,
        *warnings_of(fits),
        *(f"{recipe}: {note}" for recipe, note in departures.items() if note),
    ]
    names = [*short, *short.values(), *cut(list(short.values()), _HEADLINE_NAME).values()]
    return _templates(names).get_template("page.html").render(
        title=title,
        curves=curves,
        fits=fits,
        ranking=ranking,
        runs=runs,
        documents=documents,
        findings=all_findings,
        counters=counters,
        notes=notes,
        departures=departures,
        headers=_headers(runs),
        dots=dots or {},
        panels=panels or {},
        headline=_headline(ranking, short),
        beside=beside,
        facts=facts,
        short=short,
        study="" if study is None else _inert_json(study),
        library=script or "",
    )  # fmt: skip


def _headline(ranking: Ranking, short: Mapping[str, str]) -> str:
    if ranking.standing is None:
        return ranking.sentence
    names = cut(list(short.values()), _HEADLINE_NAME)
    return headline(ranking.standing, {recipe: names[name] for recipe, name in short.items()})


def _inert_json(content: Any) -> str:
    """Encode JSON for a script element. `<` is escaped, so that no text can end the element."""
    return json.dumps(content, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _as_sentence(text: str, names: Sequence[str]) -> str:
    """Return a text as a sentence. A recipe's name at its start keeps its case, in which another name may differ."""
    starts_with_name = any(re.match(rf"{re.escape(name)}(?![\w+=.-])", text) for name in names)
    return f"{text if starts_with_name else text[:1].upper() + text[1:]}."


def _templates(names: Sequence[str]) -> Environment:
    """Make the environment of the templates, in which an undefined name raises instead of becoming an empty cell.

    Args:
        names: names of recipes that texts may begin with.
    """
    templates = Environment(
        loader=PackageLoader("sweeps.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    functions = (number, compact, counted, gain, signed, summary, colours, inline_svg, columns, identifiable_from)
    templates.globals |= {function.__name__: function for function in functions}
    templates.globals |= {"NAMED": NAMED, "MAIN": MAIN, "TALL": _TALL, "FAMILIES": FAMILIES}
    assert templates.loader is not None
    templates.globals["own_script"] = templates.loader.get_source(templates, "report.js")[0]
    templates.filters["shape_names"] = lambda family: FAMILIES[family].names
    templates.filters["sentence"] = partial(_as_sentence, names=names)
    return templates


def number(value: float | None, digits: int = 3) -> str:
    """Format a reward with fixed decimals; a dash for None."""
    return "–" if value is None else f"{value:.{digits}f}"


def compact(value: float | None) -> str:
    """Format compute or an exponent with three significant digits, and numbers from 100 to 1e6 as integers."""
    if value is None:
        return "–"
    return f"{value:.0f}" if 100 <= abs(value) < 1e6 else f"{value:.3g}"


def columns(groups: Iterable[Iterable[Any]], attribute: str) -> list[Any]:
    """Return the distinct values of an attribute over the rows of all groups, in order of first appearance."""
    return list(dict.fromkeys(getattr(row, attribute) for rows in groups for row in rows))


def identifiable_from(snapshots: Sequence[Snapshot]) -> float | None:
    """Return the compute from which on every fit was identifiable; None if the last fit was not."""
    since = None
    for snapshot in reversed(snapshots):
        if snapshot.verdict != "identifiable":
            break
        since = snapshot.compute_end
    return since


def _headers(runs: Sequence[JournalView]) -> dict[str, Mapping[str, Any]]:
    """Return the header fields of all runs as text: `common` fields once, `varying` fields with a text per run.

    Fields that are empty in every run are left out.
    """
    # A run's name that equals its folder's name is left out, because the table has the folder.
    redundant = {"run"} if all(view.header.get("run") == view.path.parent.name for view in runs) else set()
    names = sorted({name for view in runs for name in view.header} - {"kind", "time"} - redundant)
    texts = {name: [_plain(view.header.get(name)) for view in runs] for name in names}
    texts = {name: values for name, values in texts.items() if any(values)}
    common = {name: values[0] for name, values in texts.items() if len(runs) > 1 and len(set(values)) == 1}
    return {"common": common, "varying": {name: values for name, values in texts.items() if name not in common}}


def _plain(value: Any) -> str:
    if value is None or value in ({}, []):
        return ""
    text = value if isinstance(value, str) else json.dumps(value, sort_keys=True)
    return text if len(text) <= 200 else text[:199] + "…"
