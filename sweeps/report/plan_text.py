"""Format a plan as text for a terminal: the output of `scalerl plan`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sweeps.decide.plan import Plan
from sweeps.decide.rollout_counts import RolloutPlan
from sweeps.decide.sizes import Sizes
from sweeps.fit.fit import format_interval
from sweeps.report.plain import one_line, table
from sweeps.terminal import counted

# A section's heading, and its table's header and rows. Without rows, only the heading is printed.
Section = tuple[str, list[str], list[list[str]]]


def plan_text(plan: Plan, commands: Sequence[str | None]) -> str:
    """Format a plan, followed by the commands that run the next steps, one per line, for pasting."""
    blocks = [one_line(heading) + ("\n" + table(head, rows) if rows else "") for heading, head, rows in sections(plan)]
    if any(commands):
        # Commands to paste must stay on one line, so they are not in a table.
        blocks.append("\n".join(["to paste:", *(f"  {one_line(line)}" for line in commands if line)]))
    return "\n\n".join(blocks)


def sections(plan: Plan) -> Iterator[Section]:
    """Yield the sections of a plan that `scalerl plan` prints, in order."""
    if plan.target is not None:
        yield _target_section(plan)
    elif plan.budget is not None:
        yield _budget_section(plan)
    for sizes in plan.sizes:
        yield from _size_sections(sizes)
    for rollouts in plan.rollouts:
        yield _rollout_section(rollouts)
    if not plan.sizes and not plan.rollouts:
        for settlement in plan.settlements:
            yield settlement.sentence, [], []
    if plan.next:
        head = ["recipe", "action", "compute", "cost", "expected gain", "why"]
        rows = [
            [s.recipe, s.action, f"{s.compute:.4g}", f"{s.cost:.4g}", gain(s.expected_gain), s.reason]
            for s in plan.next
        ]
        yield "what to run next (gain: expected reduction of the distance to the best A):", head, rows
    if plan.split is not None:
        yield plan.split.sentence, [], []


def gain(expected: float | None) -> str:
    """Format a step's expected gain in reward: `not known` for None, `< 0.001` for smaller values."""
    return "not known" if expected is None else "< 0.001" if expected < 0.001 else f"{expected:.3f}"


def _target_section(plan: Plan) -> Section:
    head = ["recipe", f"compute to {plan.target:g}", "for a new run", "near its asymptote", "why"]
    rows = []
    for row in plan.rows:
        assert row.reach is not None
        compute, new_run = format_interval(row.compute, ".4g"), format_interval(row.reach.new_run, ".4g")
        rows.append([row.recipe, compute, new_run, row.asymptote.verdict, row.reason])
    unit = "" if plan.unit == "compute" else f", in {plan.unit}"
    return f"compute to reach {plan.target:g}{unit}, 95% intervals:", head, rows


def _budget_section(plan: Plan) -> Section:
    head = ["recipe", "gets", "to compute", "R there", "near its asymptote", "why"]
    rows = []
    for row in plan.rows:
        assert row.compute is not None and row.compute.value is not None
        amount, to = f"{row.compute.value:.4g}", "-" if row.to is None else f"{row.to:.4g}"
        rows.append([row.recipe, amount, to, format_interval(row.R, ".3f"), row.asymptote.verdict, row.reason])
    meaning = "compute still to spend" if plan.split is not None else "compute of one run"
    unit = "" if plan.unit == "compute" else f"{plan.unit}; "
    return f"a budget of {plan.budget:.4g} ({unit}{meaning}), 95% intervals:", head, rows


def _size_sections(sizes: Sizes) -> Iterator[Section]:
    law = sizes.law
    yield (
        f"{sizes.recipe}: log loss = E(N) - k(N) log compute, k(N) = k_max / (1 + N_0 / N): "
        f"k_max {format_interval(law.k_max, '.3f')}, N_0 {format_interval(law.N_0, '.3g')}; "
        f"{counted(law.points, 'point')}",
        [],
        [],
    )
    if sizes.joint is not None:
        powers = sizes.joint.exponents
        rows = [
            [
                f"{size:.4g}",
                format_interval(sizes.joint.ceiling(size), ".3f"),
                format_interval(sizes.joint.half_gain(size), ".4g"),
            ]
            for size in sizes.joint.sizes.tolist()
        ]
        yield (
            "sigmoids of all sizes together: 1 - A is proportional to "
            f"N^{format_interval(powers['one_minus_A'], '.3f')}, C_mid to N^{format_interval(powers['C_mid'], '.3f')}:",
            ["size", "A", "C_mid"],
            rows,
        )
    if sizes.choices:
        head = ["size", "was run", "R, power law", "P(best)", "R, sigmoid", "P(best)"]
        rows = [
            [
                f"{choice.size:.4g}",
                "no: extrapolation" if choice.extrapolation else "yes",
                format_interval(choice.R, ".3f"),
                f"{choice.p_best:.2f}",
                format_interval(choice.R_sigmoid, ".3f"),
                "-" if choice.p_best_sigmoid is None else f"{choice.p_best_sigmoid:.2f}",
            ]
            for choice in sizes.choices
        ]
        yield sizes.sentence, head, rows
    if sizes.reach:
        head = ["size", "was run", "compute, power law", "compute, sigmoid"]
        rows = [
            [
                f"{reach.size:.4g}",
                "no: extrapolation" if reach.extrapolation else "yes",
                format_interval(reach.power_law, ".4g"),
                format_interval(reach.sigmoid, ".4g"),
            ]
            for reach in sizes.reach
        ]
        yield "compute to the target by size:", head, rows
    rows = [
        [
            f"{c.smaller:.4g}",
            f"{c.larger:.4g}",
            format_interval(c.power_law, ".4g"),
            format_interval(c.sigmoid, ".4g"),
            c.reason,
        ]
        for c in sizes.crossovers
    ]
    head = ["smaller", "larger", "power law", "sigmoid", "why"]
    yield "compute from which the larger size wins:", head, rows
    errors = sizes.held_out
    if errors.power_law is None or errors.sigmoid is None:
        yield "forecasts of the held-out last quarter: too few data to compare the two laws", [], []
    else:
        yield (
            f"forecasts of the held-out last quarter: error {errors.power_law:.4f} (power law), {errors.sigmoid:.4f} "
            f"(sigmoid) over {counted(errors.runs, 'run')}; better: {errors.better.replace('_', ' ')}",
            [],
            [],
        )


def _rollout_section(plan: RolloutPlan) -> Section:
    where = plan.recipe if plan.difficulty is None else f"{plan.recipe}, {plan.difficulty}"
    head = ["rollouts per prompt", "R at the budget", "P(best)", "why"]
    rows = [
        [str(v.rollouts), format_interval(v.R, ".3f"), "-" if v.p_best is None else f"{v.p_best:.2f}", v.reason or "-"]
        for v in plan.values
    ]
    return f"{where}: {plan.sentence}", head, rows
