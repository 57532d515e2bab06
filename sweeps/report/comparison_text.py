"""Format the output of `scalerl compare`, `scalerl decide`, `scalerl effects` and `scalerl race` for a terminal."""

from __future__ import annotations

from sweeps.curve import Curve
from sweeps.decide.effects import Effects
from sweeps.decide.keep_discard import UNDECIDED, ChangeVerdict
from sweeps.decide.pairwise import Comparisons
from sweeps.decide.race import Race
from sweeps.fit.fit import format_interval
from sweeps.report.plain import one_line, table, units

# Explains the columns `best` and `ahead` of a race.
CHANCES = "best, ahead: probability of being the best and of ending ahead of the favourite, at the recipe's last look"


def comparisons_text(comparisons: Comparisons, curve: Curve) -> str:
    """Format differences of pairs of recipes: a table, the units of `curve`, and a sentence per pair."""
    pairs = comparisons.rows
    columns = {
        "recipe": [row.recipe for row in pairs],
        "against": [row.other for row in pairs],
        "compute": [f"{row.compute:.4g}" for row in pairs],
        "reward": [format_interval(row.R, "+.3f") for row in pairs],
    }
    if any("prompt" in row.paired for row in pairs):
        columns["on other prompts"] = [format_interval(row.R_on_prompts, "+.3f") for row in pairs]
    if comparisons.budget is not None:
        columns[f"at {comparisons.budget:.4g}"] = [format_interval(row.R_at_budget, "+.3f") for row in pairs]
    columns["asymptote"] = [format_interval(row.A, "+.3f") for row in pairs]
    columns["times the compute"] = [format_interval(row.ratio, ".2f") for row in pairs]
    joint_note = f"; bounds hold for all {len(pairs)} pairs together" if comparisons.simultaneous else ""
    lines = [
        table(list(columns), [list(cells) for cells in zip(*columns.values(), strict=True)]),
        "",
        "; ".join([*units(curve.unit, curve.metric), f"95% intervals, over all seeds{joint_note}"]),
        *(one_line(row.sentence) for row in pairs),
    ]
    return "\n".join(lines)


def choice_text(choice: ChangeVerdict) -> str:
    """Format a decision: both recipes, difference, noise floor, verdict and, if undecided, what to run."""

    def number(value: float | None) -> str:
        return "-" if value is None else f"{value:.6g}"

    head = ["", "recipe", "runs", "failed", f"mean {choice.value}", "spread"]
    rows = [
        [role, side.recipe, str(side.runs), str(side.failed), number(side.mean), number(side.spread)]
        for role, side in zip(("A", "B"), choice.sides, strict=True)
    ]
    direction = "lower is better" if choice.lower_is_better else "higher is better"
    details = [
        ["noise floor", format_interval(choice.noise_floor, ".4g"), _degrees(choice.degrees)],
        ["gain of B over A", format_interval(choice.difference, "+.4g"), direction + _spread_of(choice.spread)],
    ]
    if choice.verdict == UNDECIDED:
        run_count = "unknown" if choice.runs_needed is None else f"{choice.runs_needed} of each"
        purpose = choice.margin_text and f"to detect {choice.margin_text} at the 5% level with 80% power"
        details.append(["runs needed", run_count, purpose])
    width = max(len(detail[1]) for detail in details)
    lines = [f"{name:16}  {value:{width}}  {remark}".rstrip() for name, value, remark in details]
    blocks = [table(head, rows), "\n".join(lines), one_line(choice.sentence)]
    if choice.remedy is not None:
        blocks[-1] += f"\n{one_line(choice.remedy)}"
    return "\n\n".join(blocks)


def _spread_of(spread: str | None) -> str:
    """Describe the source of an interval's spread, see `ChangeVerdict.spread`; "" without an interval."""
    if spread is None:
        return ""
    return "; interval from the spread of each recipe's runs" if spread == "own" else "; interval from the noise floor"


def _degrees(count: int) -> str:
    return f"{count} degree{'' if count == 1 else 's'} of freedom"


def effects_text(effects: Effects) -> str:
    """Format the effects of a grid's axes, and the combinations of choices to run next."""
    head = ["axis", "choice", "against", "recipes", "asymptote", "P(raises A)", "times the compute to half the gain"]
    rows = [
        [
            effect.axis,
            effect.level,
            effect.against,
            str(effect.cells),
            format_interval(effect.A, "+.3f"),
            f"{effect.p_positive:.2f}",
            format_interval(effect.compute, ".2f"),
        ]
        for effect in effects.effects
    ]
    blocks = [
        table(head, rows),
        f"averages over {effects.cells} recipes with 95% intervals; effects are shrunk towards zero, more so if the "
        f"others are small; a standard deviation of {effects.residual_sd:.3f} between recipes remains unexplained",
    ]
    if not effects.effects:
        blocks = [one_line(note) for note in effects.notes]
    if effects.next:
        axes = list(effects.next[0].levels)
        cells = table([*axes, "gain"], [[*cell.levels.values(), f"{cell.gain:.0%}"] for cell in effects.next])
        blocks.append(f"what to run next (gain: expected reduction of the main effects' variance):\n{cells}")
    return "\n\n".join(blocks)


def race_text(race: Race) -> str:
    """Format a race: where each recipe stopped, its chances and the reason, and the compute that was saved."""
    head = ["recipe", "stopped at", "best", "ahead", f"reward at {race.rules.budget:.4g}", "spent"]
    rows = [
        [
            runner.recipe,
            "-" if runner.stopped_at is None else f"{runner.stopped_at:.4g}",
            "-" if runner.p_best is None else f"{runner.p_best:.2f}",
            "-" if runner.p_ahead is None else f"{runner.p_ahead:.2f}",
            "-" if runner.R is None else format_interval(runner.R, ".3f"),
            f"{runner.spent:.4g}",
        ]
        for runner in race.runners
    ]
    lines = [
        table(head, rows),
        "",
        "; ".join([*units(race.unit), CHANCES]),
        *(f"{one_line(runner.recipe)}: {one_line(runner.reason)}" for runner in race.runners),
        one_line(race.sentence),
    ]
    return "\n".join(lines)
