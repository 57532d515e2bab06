"""Show a planned study: its cost, and the differences between recipes that it can detect (`scalerl plan --design`)."""

from __future__ import annotations

from sweeps.cli.output import print_json
from sweeps.errors import UserError
from sweeps.launch.price import Launch
from sweeps.report.plain import one_line

FORMS = ("text", "json")


def show_design(launch: Launch, form: object, like: str | None, margin: float | None) -> None:
    """Print the cost of a planned study and, with an earlier study, the differences that it can detect.

    Args:
        launch: the cost of the planned study.
        form: format, one of `FORMS`.
        like: earlier study whose fits predict which differences can be detected; None if there is none.
        margin: recipes whose rewards differ by at most this count as equal.

    Raises:
        UserError: the format is unknown, or the earlier study cannot be read.
    """
    if form not in FORMS:
        raise UserError(f"launch.design: {form!r} is none of {', '.join(FORMS)}, null")
    from sweeps.decide.design import predict_resolution
    from sweeps.fit.fit import fit_curves
    from sweeps.source import load

    fits = [] if like is None else fit_curves(load([like]).curves)
    found = predict_resolution(recipes=launch.recipes, seeds=launch.seeds, fits=fits, margin=margin, by=like or "")
    if form == "json":
        print_json({**launch.to_json(), "comparisons": found.to_json()})
        return
    print("\n".join(one_line(line) for line in (*launch.sentences(), found.sentence)))
