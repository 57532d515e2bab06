"""Show the design of a study before it runs: cost, and the differences it can resolve (`scalerl plan --design`)."""

from __future__ import annotations

from sweeps.cli.output import print_json
from sweeps.errors import UserError
from sweeps.launch.price import Launch
from sweeps.report.plain import one_line

FORMS = ("text", "json")


def show_design(launch: Launch, form: object, like: str | None, margin: float | None) -> None:
    """Print the cost of a planned study; if an earlier study is given, also the differences that it can resolve.

    Args:
        launch: the cost of the planned study.
        form: one of `FORMS`.
        like: earlier study whose fits predict which differences can be resolved; None without one.
        margin: recipes within this distance count as equal, in reward units.

    Raises:
        UserError: an unknown form, or an earlier study that cannot be read.
    """
    if form not in FORMS:
        raise UserError(f"launch.design: {form!r} is none of {', '.join(FORMS)}, null")
    from sweeps.decide.design import foresee
    from sweeps.fit.fit import fit_curves
    from sweeps.source import load

    fits = [] if like is None else fit_curves(load([like]).curves)
    found = foresee(recipes=launch.recipes, seeds=launch.seeds, fits=fits, margin=margin, by=like or "")
    if form == "json":
        print_json({**launch.to_json(), "comparisons": found.to_json()})
        return
    print("\n".join(one_line(line) for line in (*launch.sentences(), found.sentence)))
