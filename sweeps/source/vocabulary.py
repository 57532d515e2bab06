"""Names that known frameworks give to the metrics of reward, compute and step.

A framework uses the same names with every tracker, so they are listed here and not in the readers. Patterns are in
order of preference. Held-out evaluations are preferred to training rewards. Names that match the same pattern are
equivalent (several evaluation sets): the user chooses between them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Vocabulary:
    """The metric names of one framework, as patterns that match whole names.

    Attributes:
        project: name of the framework.
        signature: names that only this framework uses.
        evaluations, training: held-out and training rewards; a group in a pattern matches the evaluation set.
        compute: cumulative counters.
        per_step: amounts per step, which have to be summed.
        step: columns of steps, by which separately logged rows are joined; tried before `STEP_NAMES`.
    """

    project: str
    signature: str
    evaluations: tuple[str, ...] = ()
    training: tuple[str, ...] = ()
    compute: tuple[str, ...] = ()
    per_step: str = r"(?!)"  # matches nothing
    step: tuple[str, ...] = ()

    def recognizes(self, names: Iterable[str]) -> bool:
        """Return whether any of the names is used only by this framework."""
        return any(re.fullmatch(self.signature, name) for name in names)


def first_match(patterns: Sequence[str], names: Sequence[str]) -> dict[str, str]:
    """Return the names matched by the first pattern that matches any.

    The values are evaluation sets, from its group.
    """
    for pattern in patterns:
        matched = {name: match for name in names if (match := re.fullmatch(pattern, name))}
        if matched:
            return {name: next((g for g in match.groups() if g), name) for name, match in matched.items()}
    return {}


# Names of this project's trainer's metrics, as other trackers record them.
SCALERL = Vocabulary(
    "lightning-scalerl",
    signature=r"eval/.+/pass_rate",
    evaluations=(r"eval/(.+)/pass_rate",),
    compute=(r"compute/(?:device_hours|virtual_device_hours|flops)", r"compute/tokens"),
)

# TRL's GRPOTrainer: evaluation metrics have the prefix `eval_`. `num_tokens` counts the prompt and completion tokens
# trained on since the start of the run.
TRL = Vocabulary(
    "TRL",
    signature=r"(eval_)?rewards/.+|completions/mean_length|completion_length|frac_reward_zero_std|eval_reward",
    evaluations=(r"eval_reward|eval_([^/]+)_reward",),
    training=(r"reward",),
    compute=(r"num_tokens",),
)

# The same metrics in transformers' trackers, where `eval_x` is `eval/x`, and any other metric `x` is `train/x`.
TRL_TRACKED = Vocabulary(
    "TRL",
    signature=r"train/(reward|num_tokens|rewards/.+|completions/mean_length)|eval/(reward|rewards/.+)",
    evaluations=(r"eval/reward|eval/([^/]+)_reward",),
    training=(r"train/reward",),
    compute=(r"train/num_tokens",),
    step=("train/global_step",),
)

# verl: `val-core/<data source>/<variable>/mean@<n>`, formerly `val/test_score/<data source>`; MLflow does not allow @.
# There is no cumulative counter: perf/total_num_tokens counts one batch, timing_s and time_per_step one step.
VERL = Vocabulary(
    "verl",
    signature=r"val-(core|aux)/.+|critic/(score|rewards)/mean|actor/pg_loss|val/test_score/.+",
    evaluations=(r"val-core/(.+)/[^/]+/mean(?:@|_at_)\d+", r"val/test_score/(.+)"),
    training=(r"critic/score/mean", r"critic/rewards/mean"),
    compute=(r"perf/total_num_tokens",),
    per_step=r"perf/total_num_tokens|perf/time_per_step|timing_s/.+",
)

# prime-rl's orchestrator logs evaluations separately from training, under one `step`.
PRIME_RL = Vocabulary(
    "prime-rl",
    signature=r"progress/total_tokens|reward/all/mean|eval/.+/avg@\d+",
    evaluations=(r"eval/(.+)/avg(?:@|_at_)\d+",),
    training=(r"reward/all/mean", r"reward/mean"),
    compute=(r"progress/total_tokens",),
    step=("step",),
)

# open-instruct's GRPO: scores may reach 10 (verification_reward); the correct rate is in [0, 1].
OPEN_INSTRUCT = Vocabulary(
    "open-instruct",
    signature=r"val/num_total_tokens|(eval/)?objective/verifiable_(correct_rate|reward)|eval/scores",
    evaluations=(r"eval/objective/verifiable_correct_rate", r"eval/scores"),
    training=(r"objective/verifiable_correct_rate", r"scores", r"objective/scores"),
    compute=(r"val/num_total_tokens", r"val/total_tokens"),
)

VOCABULARIES = (SCALERL, VERL, PRIME_RL, OPEN_INSTRUCT, TRL_TRACKED, TRL)

# Names of the learning rate in this project's trainer and transformers, in verl, prime-rl and open-instruct.
RATE = r"(?:train/)?learning_rate|(?:actor|optim)/lr|lr"

# Names of columns that count steps of an optimizer or a tracker. They give the order of rows, but do not measure
# compute.
STEP_NAMES = ("_step", "step", "Step", "global_step", "training_step", "trainer/global_step", "train/global_step")

# Value of --x that numbers the rows or logged values, for sources without a step or compute.
ORDER = "order"
# Prefix in --x sum:COLUMN, which sums a log's amounts per step.
SUM = "sum:"

# Columns that distinguish the runs in one file, as in W&B's exports of several runs.
RUN_COLUMNS = ("run_name", "run", "name", "run_id")

# Common names of compute in users' own tables.
_COUNTERS = r"(?:total[ _])?(?:tokens|flops)|(?:gpu|device)[ _-]hours"


def counters(names: Sequence[str]) -> list[str]:
    """Return the columns of cumulative compute, by a framework's name or a common one.

    Amounts per step are left out.
    """
    patterns = [p for v in VOCABULARIES for p in v.compute if not re.fullmatch(v.per_step, p)]
    return [
        name
        for name in dict.fromkeys(names)
        if any(re.fullmatch(pattern, name.strip(), re.IGNORECASE) for pattern in (_COUNTERS, *patterns))
    ]


def order_warning(axis: str) -> str | None:
    """Return a warning if an axis counts steps or rows, which give an order but not compute; None for other axes."""
    if axis == ORDER:
        return f"{axis} numbers the rows from top to bottom, which is not compute"
    if axis.casefold() not in map(str.casefold, STEP_NAMES):
        return None
    return f"{axis} counts steps, not compute: the compute of a step differs between recipes"


def vocabulary_of(names: Sequence[str]) -> Vocabulary | None:
    """Return the first framework of which one of the names is characteristic; None without one."""
    return next((vocabulary for vocabulary in VOCABULARIES if vocabulary.recognizes(names)), None)


def step_column(names: Sequence[str], step: str | None = None) -> str | None:
    """Find the column of steps: the given name or, if that is None, a framework's or a tracker's; None without one."""
    framework = vocabulary_of(names) if step is None else None
    known = (*(framework.step if framework else ()), *STEP_NAMES) if step is None else (step,)
    return next((candidate for candidate in known if candidate in names), None)
