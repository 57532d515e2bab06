"""Format a ranking as text for a terminal, for `scalerl rank` and the end of a study."""

from __future__ import annotations

from sweeps.decide.aggregate import Aggregate
from sweeps.decide.at_k import AtK
from sweeps.decide.by_axis import ByAxis
from sweeps.decide.rank import Ranking
from sweeps.decide.reward import Rewards
from sweeps.decide.signal import Signal
from sweeps.decide.wording import windows_text
from sweeps.fit.fit import format_interval
from sweeps.report.plain import one_line, table


def ranking_text(ranking: Ranking) -> str:
    """Format the ranking's outcome and its tables, by reward and by asymptote."""
    lines = [one_line(line) for line in ranking.outcome]
    if ranking.rewards is not None and len(ranking.rewards.rows) > 1:
        lines += [one_line(ranking.rewards.sentence), "", table(*reward_rows(ranking.rewards)), "", "by asymptote:"]
    else:
        lines.append("")
    return "\n".join([*lines, table(*ranking_rows(ranking))])


def rank_text(
    ranking: Ranking,
    by_axis: ByAxis | None = None,
    at_k: AtK | None = None,
    signal: Signal | None = None,
    aggregate: Aggregate | None = None,
) -> str:
    """Format the output of `scalerl rank`: the ranking, other axes, pass@k, evaluation sets, variants, the baseline."""
    blocks = [ranking_text(ranking)]
    if by_axis is not None:
        blocks += [one_line(by_axis.sentence), table(*axis_rows(by_axis))]
    if at_k is not None:
        blocks.append(f"{one_line(at_k.sentence)}\n{table(*at_k_rows(at_k))}" if at_k.differs else at_k.sentence)
    if aggregate is not None:
        blocks += [one_line(aggregate.sentence), table(*aggregate_rows(aggregate)), *map(one_line, aggregate.notes)]
    if signal is not None:
        blocks += [one_line(signal.sentence), table(*signal_rows(signal))]
    if ranking.leave_one_out:
        heading = f"against {one_line(ranking.baseline or '')}:"
        blocks.append(f"{heading}\n{table(*leave_one_out_rows(ranking))}")
    return "\n\n".join(blocks)


def ranking_rows(ranking: Ranking) -> tuple[list[str], list[list[str]]]:
    """Return header and rows of the ranking's table."""
    tie = ["compute to 90%", "to 50%"] if ranking.shared_a is not None else []
    horizon = [] if ranking.horizon is None else [f"at {windows_text(ranking.horizon.windows)}"]
    head = ["rank", "recipe", "P(best)", *horizon, "A", *tie, "B at shared A", "why"]
    rows = []
    for entry in ranking.ranking:
        is_ranked = entry.rank is not None
        row = [
            str(entry.rank) if is_ranked else "-",
            entry.recipe,
            "-" if entry.p_best is None else f"{entry.p_best:.2f}",
            *(["-" if entry.p_best_at_horizon is None else f"{entry.p_best_at_horizon:.2f}"] if horizon else []),
            format_interval(entry.A if is_ranked else None, ".3f"),
            *([format_interval(entry.efficiency, ".3g"), format_interval(entry.efficiency_half, ".3g")] if tie else []),
            format_interval(entry.B_at_shared_A, ".3g"),
        ]
        rows.append([*row, entry.reason if is_ranked else f"{entry.verdict}: {entry.reason}"])
    return head, rows


def reward_rows(rewards: Rewards) -> tuple[list[str], list[list[str]]]:
    """Return header and rows of the table of rewards at common compute and budget."""
    head = ["recipe", f"R at {rewards.compute:.4g}", "P(highest)"]
    if rewards.reward is not None:
        head += [f"compute to {rewards.reward:.3f}", "times the least"]
    if rewards.budget is not None:
        head += [f"R at {rewards.budget:.4g}", "P(highest)"]
    rows = []
    for entry in rewards.rows:
        row = [entry.recipe, format_interval(entry.R, ".3f"), f"{entry.p_best:.2f}"]
        if rewards.reward is not None:
            # Compute as a multiple of the fastest recipe's compute, which is 1 for that recipe.
            row += [
                format_interval(entry.C, ".4g"),
                "1" if entry.recipe == rewards.fastest else format_interval(entry.ratio, ".2f"),
            ]
        if rewards.budget is not None:
            p = "-" if entry.p_best_at_budget is None else f"{entry.p_best_at_budget:.2f}"
            row += [format_interval(entry.R_at_budget, ".3f"), p]
        rows.append(row)
    return head, rows


def axis_rows(by_axis: ByAxis) -> tuple[list[str], list[list[str]]]:
    """Return header and rows of a ranking on several axes: each recipe's place, reward and chance of being highest."""
    head = ["recipe", *(f"at {column.compute:.4g} {column.name}" for column in by_axis.columns)]
    rows = []
    for recipe in by_axis.recipes:
        places = [column.row(recipe) for column in by_axis.columns]
        rows.append(
            [
                recipe,
                *(
                    "-" if place is None else f"{place[0]}. {place[1].R.value:.3f} (P {place[1].p_best:.2f})"
                    for place in places
                ),
            ]
        )
    return head, rows


def at_k_rows(at_k: AtK) -> tuple[list[str], list[list[str]]]:
    """Return header and rows of a table with the rankings by pass@1 and by pass@k side by side.

    For each metric, it has the place and the reward at common compute, then the rank and the asymptote.
    """
    names = ("pass@1", f"pass@{at_k.k}")
    head = ["recipe", *(f"{name} at {at_k.compute:.4g}" for name in names), *(f"A of {name}" for name in names)]
    rows = []
    for row in at_k.rows:
        metrics = (row.at_1, row.at_k)
        cells = [
            "-" if metric.R is None else f"{metric.place}. {format_interval(metric.R, '.3f')} (P {metric.p_best:.2f})"
            for metric in metrics
        ]
        cells += [
            "-" if metric.A is None else f"{metric.rank}. {format_interval(metric.A, '.3f')}" for metric in metrics
        ]
        rows.append([row.recipe, *cells])
    return head, rows


def signal_rows(signal: Signal) -> tuple[list[str], list[list[str]]]:
    """Return header and rows of the table of signal and noise by evaluation set."""
    head = ["set", "mean", "signal", "noise", "signal to noise", "without the rise"]
    numbers = [(row.mean, row.signal, row.noise, row.ratio, row.ratio_without_rise) for row in signal.rows]
    return head, [[row.set, *map(_format, values)] for row, values in zip(signal.rows, numbers, strict=True)]


def _format(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def aggregate_rows(aggregate: Aggregate) -> tuple[list[str], list[list[str]]]:
    """Return header and rows of the table of recipes over several evaluation sets."""
    first = aggregate.rows[0].recipe
    head = ["recipe", "runs", "interquartile mean", f"P({first} improves on it)", *aggregate.sets]
    rows = [
        [
            row.recipe,
            str(row.runs),
            format_interval(row.iqm, ".3f"),
            format_interval(row.p_first_improves, ".2f"),
            *(f"{row.by_set[name]:.3f}" for name in aggregate.sets),
        ]
        for row in aggregate.rows
    ]
    return head, rows


def leave_one_out_rows(ranking: Ranking) -> tuple[list[str], list[list[str]]]:
    """Return header and rows of the table of variants against the baseline."""
    head = ["variant", "delta A", "times the compute to 90%", "delta B at shared A", "note"]
    rows = [
        [
            entry.recipe,
            format_interval(entry.delta_a, "+.3f"),
            format_interval(entry.ratio, ".2f"),
            format_interval(entry.delta_b, "+.3g"),
            entry.reason,
        ]
        for entry in ranking.leave_one_out
    ]
    return head, rows
