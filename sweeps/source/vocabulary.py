"""Metric names of known frameworks for reward, compute and step.

A framework's names are the same whichever tracker wrote them down, so they stand here and not in the readers.
Each list is in order of preference: a held-out evaluation before the reward of training. Names in one pattern are
equals (several evaluation sets), and between equals the user chooses.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Vocabulary:
    """The metric names of one framework; patterns match the whole name.

    signature: names that only this framework has. evaluations, training: rewards; a group in the pattern is the
    evaluation set. compute: cumulative counters. per_step: amounts of one step, which are summed. step: what joins
    rows that were logged apart, before the names that trackers use.
    """

    project: str
    signature: str
    evaluations: tuple[str, ...] = ()
    training: tuple[str, ...] = ()
    compute: tuple[str, ...] = ()
    per_step: str = r"(?!)"  # matches nothing
    step: tuple[str, ...] = ()

    def speaks(self, names: Iterable[str]) -> bool:
        """Return whether any of the names is one that only this framework has."""
        return any(re.fullmatch(self.signature, name) for name in names)


def first_match(patterns: Sequence[str], names: Sequence[str]) -> dict[str, str]:
    """Return the names that match the first pattern with a match, each with its group, the evaluation set."""
    for pattern in patterns:
        found = {name: match for name in names if (match := re.fullmatch(pattern, name))}
        if found:
            return {name: next((g for g in match.groups() if g), name) for name, match in found.items()}
    return {}


# Our own names, where another tracker than our journal wrote them down.
SCALERL = Vocabulary(
    "lightning-scalerl",
    signature=r"eval/.+/pass_rate",
    evaluations=(r"eval/(.+)/pass_rate",),
    compute=(r"compute/(?:device_hours|virtual_device_hours|flops)",),
)

# TRL's GRPOTrainer: `eval_` stands before every metric of an evaluation. `num_tokens` counts prompt and completion
# tokens of training since the start of the run.
TRL = Vocabulary(
    "TRL",
    signature=r"(eval_)?rewards/.+|completions/mean_length|completion_length|frac_reward_zero_std|eval_reward",
    evaluations=(r"eval_reward|eval_([^/]+)_reward",),
    training=(r"reward",),
    compute=(r"num_tokens",),
)

# The same through the trackers of transformers, which write `eval/x` for `eval_x` and `train/x` for the rest.
TRL_TRACKED = Vocabulary(
    "TRL",
    signature=r"train/(reward|num_tokens|rewards/.+|completions/mean_length)|eval/(reward|rewards/.+)",
    evaluations=(r"eval/reward|eval/([^/]+)_reward",),
    training=(r"train/reward",),
    compute=(r"train/num_tokens",),
    step=("train/global_step",),
)

# verl: `val-core/<data source>/<variable>/mean@<n>`, before that `val/test_score/<data source>`; MLflow takes no @.
# There is no cumulative counter: perf/total_num_tokens is one batch, timing_s and time_per_step one step.
VERL = Vocabulary(
    "verl",
    signature=r"val-(core|aux)/.+|critic/(score|rewards)/mean|actor/pg_loss|val/test_score/.+",
    evaluations=(r"val-core/(.+)/[^/]+/mean(?:@|_at_)\d+", r"val/test_score/(.+)"),
    training=(r"critic/score/mean", r"critic/rewards/mean"),
    compute=(r"perf/total_num_tokens",),
    per_step=r"perf/total_num_tokens|perf/time_per_step|timing_s/.+",
)

# prime-rl's orchestrator: evaluations are logged apart from training, under one `step`.
PRIME_RL = Vocabulary(
    "prime-rl",
    signature=r"progress/total_tokens|reward/all/mean|eval/.+/avg@\d+",
    evaluations=(r"eval/(.+)/avg(?:@|_at_)\d+",),
    training=(r"reward/all/mean", r"reward/mean"),
    compute=(r"progress/total_tokens",),
    step=("step",),
)

# open-instruct's GRPO: scores may reach 10 (verification_reward), the correct rate lies in [0, 1].
OPEN_INSTRUCT = Vocabulary(
    "open-instruct",
    signature=r"val/num_total_tokens|(eval/)?objective/verifiable_(correct_rate|reward)|eval/scores",
    evaluations=(r"eval/objective/verifiable_correct_rate", r"eval/scores"),
    training=(r"objective/verifiable_correct_rate", r"scores", r"objective/scores"),
    compute=(r"val/num_total_tokens", r"val/total_tokens"),
)

VOCABULARIES = (SCALERL, VERL, PRIME_RL, OPEN_INSTRUCT, TRL_TRACKED, TRL)

# What each calls the learning rate: ours and transformers', verl's, prime-rl's, open-instruct's.
RATE = r"(?:train/)?learning_rate|(?:actor|optim)/lr|lr"

# Steps of an optimizer or a tracker: an order, not compute.
STEP_NAMES = ("_step", "step", "Step", "global_step", "training_step", "trainer/global_step", "train/global_step")

# --x: the number of each row or logged value, for sources without a step or compute.
ORDER = "order"
# --x sum:COLUMN: a column of a log that holds what each step took.
SUM = "sum:"

# Columns that tell the runs of one file apart, in W&B's exports of several runs.
RUN_COLUMNS = ("run_name", "run", "name", "run_id")

# What people call compute in tables of their own.
_COUNTERS = r"(?:total[ _])?(?:tokens|flops)|(?:gpu|device)[ _-]hours"


def counters(names: Sequence[str]) -> list[str]:
    """Return the columns of cumulative compute, by a framework's or a plain name; amounts of one step are left out."""
    patterns = [p for v in VOCABULARIES for p in v.compute if not re.fullmatch(v.per_step, p)]
    return [
        name
        for name in dict.fromkeys(names)
        if any(re.fullmatch(pattern, name.strip(), re.IGNORECASE) for pattern in (_COUNTERS, *patterns))
    ]


def order_warning(axis: str) -> str | None:
    """Return the warning that an axis of steps or row numbers is an order and no compute; None for other axes."""
    if axis == ORDER:
        return f"{axis} numbers the rows as they stand, which is no compute"
    if axis.casefold() not in map(str.casefold, STEP_NAMES):
        return None
    return f"{axis} is an order of steps, not compute: recipes differ in what a step costs"


def vocabulary_of(names: Sequence[str]) -> Vocabulary | None:
    """Return the first framework whose signature matches one of the names; None if there is none."""
    return next((vocabulary for vocabulary in VOCABULARIES if vocabulary.speaks(names)), None)
