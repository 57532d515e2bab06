"""Do the shares of held-out prompts at 0, in between and at 1 improve forecasts of late rises? Simulated and real runs.

Relays follow arXiv 2602.14872: harder prompts become learnable once easier ones are learned. Here a prompt of L steps
passes if all its steps do, with probability p = exp(-q L), where q is the error per step. Gradient ascent on the mean
pass rate decreases log q at the rate of the mean of -p log p, so prompts at 0 and at 1 teach nothing. Levels of L that
are close to each other give a steady rise, distant ones a plateau before each rise. Controls are saturating curves.

    python -m benchmarks.prompt_shares [STUDY ...] [--out docs/measured/prompt_shares.md]
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy.special import expit

from sweeps.curve import FLOPS, Array, make_curve
from sweeps.fit.fit import fit_curve
from sweeps.fit.predict import predict_mean
from sweeps.run.journal import read_journal
from sweeps.source.held_out import prompt_shares

PROMPTS, CURVES, LATE_RISE = 128, 10, 0.1
COMPUTE: Array = np.linspace(0, 1, 25)
METRIC = "eval/heldout/pass_rate"
SMOOTH, GAPS = "relay, levels close", "relay, levels distant"
SATURATING, LOW, HOPELESS = "saturating", "saturating, from near 0", "saturating, some never learned"
CONTROLS = (SATURATING, LOW, HOPELESS)


@dataclass(frozen=True)
class Setting:
    """A kind of simulated curves.

    Attributes:
        value: of a relay, the ratio of lengths between levels; of `HOPELESS`, the share of prompts that are never
            learned; of the others, the standard deviation of difficulty in logits.
        completions: completions per prompt in each evaluation.
        levels: number of levels of a relay.
    """

    kind: str
    value: float
    completions: int
    levels: int = 0


# In turn, settings belong to the first and to the second half.
SETTINGS = (
    *(Setting(SMOOTH, *each) for each in ((1.6, 4, 9), (2.2, 4, 6), (2.8, 16, 5), (3.5, 16, 4))),
    *(Setting(GAPS, *each) for each in ((25.0, 4, 2), (50.0, 4, 2), (100.0, 16, 2), (35.0, 16, 3))),
    *(Setting(SATURATING, *each) for each in ((1.5, 4), (2.5, 4), (3.5, 16), (0.5, 16))),
    *(Setting(LOW, *each) for each in ((1.5, 4), (2.5, 4), (3.5, 16), (0.5, 16))),
    *(Setting(HOPELESS, *each) for each in ((0.2, 4), (0.35, 4), (0.5, 16), (0.1, 16))),
)


def pass_rates(setting: Setting, rng: np.random.Generator) -> Array:
    """Draw the true pass rate of each prompt at each evaluation of one run, (evaluations, prompts)."""
    wander = np.zeros(len(COMPUTE))
    for i in range(1, len(wander)):
        wander[i] = 0.7 * wander[i - 1] + 0.05 * rng.standard_normal()
    if not setting.levels:
        hard = rng.normal(0, 2.0 if setting.kind == HOPELESS else setting.value, PROMPTS)
        middle, steep = 0.3 * np.exp(rng.normal(0, 0.5)), rng.uniform(1, 2)
        start = rng.uniform(-6, -4) if setting.kind == LOW else rng.uniform(-2, -1)
        skill = start + rng.uniform(2, 5) * COMPUTE**steep / (COMPUTE**steep + middle**steep)
        learned = rng.random(PROMPTS) >= (setting.value if setting.kind == HOPELESS else 0.0)
        return np.asarray(expit((skill + wander)[:, None] + hard) * learned)
    level = rng.integers(setting.levels, size=PROMPTS)
    length = setting.value**level * np.exp(rng.normal(0, 0.2, PROMPTS))
    log_q = np.log(rng.uniform(0.7, 2.0)) - np.linspace(0, (setting.levels - 1) * np.log(setting.value) + 6, 4000)
    load = np.exp(log_q)[:, None] * length
    passed = np.exp(-load)
    time = np.cumsum((log_q[0] - log_q[1]) / (load * passed).mean(axis=1))
    # The hardest level is half learned before the cut, after it, or beyond the end of the run.
    hardest = passed[:, level == setting.levels - 1].mean(axis=1)
    end = time[np.argmax(hardest >= 0.5)] / rng.uniform(0.3, 1.5)
    q = np.exp(np.interp(COMPUTE * end, time, log_q) - wander)
    return np.asarray(np.exp(-q[:, None] * length))


@dataclass(frozen=True)
class Run:
    """Evaluations of one run, (n,) each: pass rate, its standard error, and the shares of prompts at 0 and at 1."""

    compute: Array
    rate: Array
    sd: Array
    never: Array
    always: Array


def simulate(setting: Setting, number: int) -> Run:
    """Draw a run, which depends only on the setting and the number."""
    rng = np.random.default_rng((sum(map(ord, setting.kind)), round(100 * setting.value), number))
    share = rng.binomial(setting.completions, pass_rates(setting, rng)) / setting.completions
    smoothed = (share * setting.completions + 0.5) / (setting.completions + 1)
    sd = np.sqrt((smoothed * (1 - smoothed)).mean(axis=1) / (PROMPTS * setting.completions))
    return Run(COMPUTE, share.mean(axis=1), sd, (share == 0).mean(axis=1), (share == 1).mean(axis=1))


@dataclass(frozen=True)
class Cut:
    """A run cut at half of its compute: the engine's forecast, the result, and the terms of each correction.

    Attributes:
        late: whether the reward rises after the cut by `LATE_RISE` more than in the quarter of compute before it.
    """

    kind: str
    engine: float
    result: float
    late: bool
    terms: Mapping[str, Array]


def cut(kind: str, run: Run) -> Cut | None:
    """Forecast the mean of the last quarter from the first half; None if the engine has too few points."""
    end = run.compute.max()
    seen, later = run.compute <= end / 2, run.compute > 0.75 * end
    fit = fit_curve(make_curve(kind, run.compute[seen], run.rate[seen], sd=run.sd[seen]))
    if fit.outlook is None:
        return None
    quarter = int(np.searchsorted(run.compute, end / 4))

    def at_cut(values: Array) -> tuple[float, float]:
        """Return the value at the cut and its change since a quarter of the compute, as means of 3 evaluations."""
        value = float(values[seen][-3:].mean())
        return value, value - float(values[quarter - 1 : quarter + 2].mean())

    (rate, rise), (never, change), (always, _) = at_cut(run.rate), at_cut(run.never), at_cut(run.always)
    terms = {
        "at 0": [never, -change],
        "at 0 and between": [never, -change, 1 - never - always],
        "leaving 0": [max(-change - rise, 0.0)],
        "pass rate": [1 - rate, rise],
    }
    result = float(run.rate[later].mean())
    late = result - rate > rise + LATE_RISE
    return Cut(kind, predict_mean(fit, run.compute[later])[0], result, late, {k: np.array(v) for k, v in terms.items()})


def weights(cuts: Sequence[Cut], name: str) -> Array:
    """Fit the numbers of a correction to the engine's errors by least absolute deviations."""
    x, y = np.stack([each.terms[name] for each in cuts]), np.array([each.result - each.engine for each in cuts])
    numbers: Array = np.zeros(x.shape[1])
    scale: Array = np.ones(len(y))
    for _ in range(100):  # iteratively reweighted least squares
        numbers = np.asarray(np.linalg.lstsq(x * scale[:, None], y * scale, rcond=None)[0], dtype=float)
        scale = 1 / np.sqrt(np.maximum(np.abs(y - x @ numbers), 1e-4))
    return numbers


def errors(cuts: Sequence[Cut], numbers: Mapping[str, Array]) -> Array:
    """Return absolute errors of the engine and of each correction, (cuts, 1 + corrections)."""
    engine, result = np.array([each.engine for each in cuts]), np.array([each.result for each in cuts])
    shifts = [np.stack([each.terms[name] for each in cuts]) @ coefficients for name, coefficients in numbers.items()]
    forecasts = np.stack([np.clip(engine + shift, 0, 1) for shift in (0.0, *shifts)], axis=1)
    return np.asarray(np.abs(forecasts - result[:, None]))


def real_cuts(study: Path) -> tuple[list[Cut], str]:
    """Cut the runs of a study that have passes per prompt, and describe the runs left out."""
    cuts, without, short = [], 0, 0
    folders = sorted(path.parent for path in study.glob("runs/*/metrics.jsonl"))
    for folder in folders:
        view = read_journal(folder)
        shares = prompt_shares([view], FLOPS, METRIC)
        if not shares:
            without += 1
            continue
        records = {record.metrics[FLOPS]: record.metrics for record in view.of_kind("eval")}
        compute = shares[0].compute
        rate, sd = (np.array([records[at][name] for at in compute]) for name in (METRIC, f"{METRIC}_se"))
        run = Run(np.array(compute), rate, sd, np.array(shares[0].never), np.array(shares[0].always))
        cut_found = cut(study.name, run)
        short += cut_found is None
        cuts += [cut_found] if cut_found else []
    late = sum(each.late for each in cuts)
    counts = f"{without} without recorded passes per prompt, {short} with too few evaluations, {late} that rise late"
    return cuts, f"`{study.name}`: {len(folders)} runs; of these {counts}."


PAGE = """# Shares of prompts at 0, and late rises

Some rewards stay level for long and rise late. Each evaluation also gives the shares of held-out prompts that no
completion, some completions, or all completions pass. Do these shares improve forecasts of late rises?

```
make demo
python -m benchmarks.prompt_shares {studies} --out docs/measured/prompt_shares.md
```

**`scalerl fit` does not use these shares**: each correction by them that improves late rises makes forecasts of other
curves worse. This was tested as follows. Each curve is cut at half of its compute, and the mean reward over its last
quarter is forecast twice: by our fit alone (*the engine*), and with a correction added. A correction is a linear
function of the shares or of the pass rate before the cut ([list](#corrections)). Its coefficients are fitted by least
absolute deviations on one half of the simulated settings, and tested on the other half. For real runs they are fitted
on all simulated curves.

- **Rows**: simulated curves are [relays or controls](#curves). Relays rise in steps, often late. Controls (rows
  *saturating*) approach a ceiling. *All that rise late* are the simulated curves whose reward rises after the cut by
  {late:g} more than in the quarter of compute before it.
- **engine's error**: mean absolute error of the engine's forecasts.
- **Columns of corrections**: error with this correction minus the engine's error, on the same curves, ± its standard
  error over curves at fixed coefficients. If the difference is negative, the correction is better.
- **enters the engine**: yes, if the correction improves forecasts of late rises by two standard errors or more, and
  makes neither a control nor a real study worse by two standard errors.

| curves | runs | engine's error | {names} |
|---|---|---{rule}|
{rows}
| enters the engine | | | {enters} |

## Corrections

The share *at 0* is the share of held-out prompts that no completion passes. The share *in between* is that of prompts
that some completions pass. An increase or decrease is measured from a quarter to a half of the compute.

{corrections}

The correction *pass rate* uses no shares. It shows how much the pass rate alone achieves. Before these corrections were
chosen, about fifteen forms (also with constants, products and least squares) were compared on other random draws. Each
form that improved relays made controls worse.

## Curves

- **Relays** follow arXiv 2602.14872, of which only the abstract was available: easier prompts become learnable first
  and make slightly harder ones learnable. If the levels of difficulty are far apart, the reward stays on a plateau
  before it rises again. The equations are this project's:
    - A prompt of L steps passes with probability p = exp(-q L), where q is the error per step.
    - log q falls at the rate of the mean of -p log p, which is the gradient of the mean pass rate.
    - From one level to the next, L grows by a factor of 1.6 to 3.5 (*levels close*) or 25 to 100 (*levels distant*).
    - Half of the last level is learned at 0.3 to 1.5 times the compute of the run.
- **Controls** saturate. The logits of all prompts rise together: from a pass rate near 0, from one well above it, or
  with 10 to 50% of the prompts never learned.
- Each setting has {curves} runs with {prompts} prompts and 25 evaluations. An evaluation has 4 or 16 completions per
  prompt.

## Real studies

{left_out}
- The runs of `real_model` have one completion per prompt. The share at 0 is then one minus the pass rate, and adds
  no information. At half of their compute these runs have three evaluations, too few for a forecast.
- The study `replication` has seeds 0 and 1. It was run by `python benchmarks/replication.py --run --seeds 0,1`.

## Why

- On relays, a rise follows if the share of prompts at 0 falls faster than the pass rate rises. So *leaving 0* is the
  best correction there. But a saturating curve that starts near 0 looks the same at the cut.
- If a share of prompts stays at 0, the curve is on a plateau before the next level, or these prompts are never learned.
  No data before the cut separate the two cases.
- So whether a correction helps depends on how many curves are relays. In the simulated mixture two curves in five are
  relays. Over all simulated curves, no correction is better than the engine by two standard errors.
"""
CORRECTIONS = {
    "at 0": "share at 0, and its decrease",
    "at 0 and between": "share at 0, its decrease, and the share in between",
    "leaving 0": "decrease of the share at 0 minus the increase of the pass rate, or 0 if that is negative",
    "pass rate": "one minus the pass rate, and its increase",
}


def page(studies: Sequence[Path]) -> str:
    """Simulate, test the corrections and write the page."""
    cuts_by_setting = [
        [cut(each.kind, simulate(each, number)) for number in range(100, 100 + CURVES)] for each in SETTINGS
    ]
    halves = [
        [each for part_cuts in cuts_by_setting[half::2] for each in part_cuts if each is not None] for half in (0, 1)
    ]
    names = list(CORRECTIONS)
    tested = [(halves[half], {name: weights(halves[1 - half], name) for name in names}) for half in (0, 1)]
    cuts = [each for part_cuts, _ in tested for each in part_cuts]
    error = np.concatenate([errors(part_cuts, numbers) for part_cuts, numbers in tested])
    groups: list[tuple[str, Array]] = [
        (kind, error[[each.kind == kind for each in cuts]]) for kind in (SMOOTH, GAPS, *CONTROLS)
    ]
    groups += [("all that rise late", error[[each.late for each in cuts]]), ("all simulated", error)]
    left_out = []
    for study in studies:
        real_cuts_found, text = real_cuts(study)
        left_out.append(f"- {text}")
        if len(real_cuts_found) > 1:
            numbers = {name: weights(cuts, name) for name in names}
            groups.append((f"real: {study.name}", errors(real_cuts_found, numbers)))
    rows, helps, harms = [], np.zeros(len(names), bool), np.zeros(len(names), bool)
    for label, part_cuts in groups:
        differences = part_cuts[:, 1:] - part_cuts[:, :1]
        mean, se = differences.mean(axis=0), differences.std(axis=0, ddof=1) / np.sqrt(len(differences))
        helps |= (label == "all that rise late") & (mean < -2 * se)
        harms |= (label in CONTROLS or label.startswith("real")) & (mean > 2 * se)
        cells = [f"{a:+.4f} ± {b:.4f}" for a, b in zip(mean, se, strict=True)]
        rows.append(f"| {label} | {len(part_cuts)} | {part_cuts[:, 0].mean():.4f} | {' | '.join(cells)} |")
    enters = ["yes" if good and not bad else "no" for good, bad in zip(helps, harms, strict=True)]
    corrections = [
        f"- **{name}**: {text}; coefficients fitted on all simulated curves: "
        f"{', '.join(f'{x:+.2f}' for x in weights(cuts, name))}"
        for name, text in CORRECTIONS.items()
    ]
    return PAGE.format(
        studies=" ".join(map(str, studies)),
        names=" | ".join(names),
        rule="|---" * len(names),
        rows="\n".join(rows),
        enters=" | ".join(enters),
        corrections="\n".join(corrections),
        left_out="\n".join(left_out),
        curves=CURVES,
        prompts=PROMPTS,
        late=LATE_RISE,
    )


def main() -> None:
    """Print or write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("studies", type=Path, nargs="*", default=[Path("docs/measured/real_model")], metavar="STUDY")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    text = page(options.studies)
    if options.out is None:
        print(text)
    else:
        options.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
