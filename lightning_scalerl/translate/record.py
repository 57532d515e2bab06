"""The record of a translation, and what a run is asked for to make one."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from lightning_scalerl.axes.adapter import NoAdapter
from lightning_scalerl.axes.advantage import GAE, GroupAdvantage
from lightning_scalerl.axes.aggregation import Aggregation, named_aggregation
from lightning_scalerl.axes.async_mode import PPOOffPolicy
from lightning_scalerl.axes.critic import NoCritic
from lightning_scalerl.axes.kl import FixedKL, NoKL
from lightning_scalerl.axes.length_control import NoLengthControl
from lightning_scalerl.axes.loss import DAPO, GSPO, PPO, Loss
from lightning_scalerl.axes.normalization import NoNormalization, PromptNormalization
from lightning_scalerl.axes.precision import Precision
from lightning_scalerl.choice import DesignChoice
from lightning_scalerl.choices import Choices
from lightning_scalerl.composition import build_recipe, compose
from lightning_scalerl.optim import ConstantSchedule, CosineSchedule, SqrtBatchSchedule
from lightning_scalerl.recipe import Recipe

# A bound that never acts, where a trainer knows no word for none: no gradient is that long, and no ratio that large
# (ours and verl's end at exp(20), below it).
NEVER = 1e9
OWN = "a choice of your own"


@dataclass(frozen=True)
class Missing:
    """A choice or setting of ours without a counterpart: its key, its value, and why nothing there says it."""

    key: str
    value: str
    why: str


@dataclass
class Translation:
    """A recipe in another trainer's words.

    Attributes:
        to: the trainer; `version` is the release or commit whose names and semantics these are.
        form: how its settings are written: "yaml", "toml", or "overrides" (one KEY=VALUE a line).
        settings: by the trainer's names, dots between the levels.
        missing: what of ours has no counterpart.
        notes: in what the two differ beyond any setting.
        added: settings that the trainer's own file does not list, though its code reads them.
        said: names of settings by axis; read it as `axes`.
    """

    to: str
    version: str
    form: str
    settings: dict[str, Any] = field(default_factory=dict)
    missing: list[Missing] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    added: list[str] = field(default_factory=list)
    said: dict[str, list[str]] = field(default_factory=dict)

    def set(self, *axes: str, **settings: Any) -> None:
        """Add settings by name; two underscores stand for a dot. Together they carry the choices on these axes."""
        named = {name.replace("__", "."): value for name, value in settings.items()}
        self.settings |= named
        for axis in axes:
            self.says(axis, *named)

    def under(self, prefix: str, *axes: str, **settings: Any) -> None:
        """Add settings below a prefix, as `set` does."""
        self.set(*axes, **{f"{prefix}.{name}": value for name, value in settings.items()})

    def says(self, axis: str, *names: str) -> None:
        """Record which settings carry the choice on an axis; without names, the trainer does the same by itself."""
        self.said.setdefault(axis, []).extend(names)

    @property
    def axes(self) -> dict[str, list[str]]:
        """Settings by the axis whose choice they carry; an axis that is listed in `missing` as a whole is left out."""
        missing = {each.key for each in self.missing}
        return {axis: names for axis, names in self.said.items() if axis not in missing}

    def add(self, name: str, value: Any) -> None:
        """Add a setting that the trainer's own file leaves out: it is written as a new key, by Hydra's mark."""
        self.settings[name] = value
        self.added.append(name)

    def lacks(self, key: str, value: Any, why: str) -> None:
        """Add a choice or setting that has no counterpart; of a choice of the user's own no more is said."""
        if any((each.key, each.why) == (key, OWN) for each in self.missing):
            return
        self.missing.append(Missing(key, _shown(value), why))

    def note(self, text: str) -> None:
        """Add a difference that no setting of either trainer decides."""
        self.notes.append(text)

    def text(self) -> str:
        """Return the settings as the trainer reads them; comments say what is missing and what differs besides."""
        head = [f"# {self.to} {self.version}: {len(self.settings)} settings; written by scalerl translate"]
        head += [f"# without a counterpart: {each.key}={each.value}: {each.why}" for each in self.missing]
        if alike := [axis for axis, names in self.axes.items() if not names]:
            head.append(f"# the same there without a setting: {', '.join(alike)}")
        head += [f"# beyond any setting: {each}" for each in self.notes]
        marked = {f"{'+' if name in self.added else ''}{name}": value for name, value in self.settings.items()}
        body = {"yaml": _yaml, "toml": _toml, "overrides": _overrides}[self.form](marked)
        return "\n".join([*head, *body]) + "\n"


def _shown(value: Any) -> str:
    if isinstance(value, DesignChoice):
        parameters = ", ".join(f"{name}={each}" for name, each in value.parameters().items())
        return f"{type(value).__name__}({parameters})" if parameters else type(value).__name__
    return str(value)


def _plain(value: Any) -> str:
    """Write a value as JSON, which YAML and TOML read as the same, but for null in TOML, which none of ours is."""
    return json.dumps(value)


def _yaml(settings: Mapping[str, Any]) -> list[str]:
    return [f"{name}: {_in_yaml(value)}" for name, value in settings.items()]


def _in_yaml(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{json.dumps(name)}: {_in_yaml(each)}" for name, each in value.items()) + "}"
    # With a point: 1e-15 is a text for YAML 1.1.
    return re.sub(r"^(-?\d+)e", r"\1.0e", _plain(value)) if isinstance(value, float) else _plain(value)


def _overrides(settings: Mapping[str, Any]) -> list[str]:
    # Lists and mappings without blanks and quotes: one word of a shell, and what Hydra and OmegaConf read.
    return [f"{name}={_bare(value)}" for name, value in settings.items()]


def _bare(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{name}:{_bare(each)}" for name, each in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(_bare, value)) + "]"
    return value if isinstance(value, str) else _plain(value)


def _toml(settings: Mapping[str, Any]) -> list[str]:
    tables: dict[str, list[str]] = {}
    for name, value in settings.items():
        table, _, key = name.rpartition(".")
        tables.setdefault(table, []).append(f"{key} = {_plain(value)}")
    lines = list(tables.pop("", []))
    for table, entries in tables.items():
        lines += [f"[{table}]", *entries]
    return lines


@dataclass(frozen=True)
class Run:
    """A run to be translated: its configuration as composed, and the recipe that it makes."""

    config: Any
    recipe: Recipe

    @classmethod
    def of(cls, overrides: list[str], folders: list[str]) -> Run:
        """Compose the run that overrides describe.

        Raises:
            ConfigurationError: overrides that do not compose, or choices that contradict each other.
        """
        config = compose(overrides, folders)
        recipe = build_recipe(config, "")
        recipe.check(recipe.choices)
        return cls(config, recipe)

    @property
    def choices(self) -> Choices:
        """The choice on every axis."""
        return self.recipe.choices

    @property
    def steps(self) -> int:
        """Optimizer steps of the budget, each one batch, whatever its number of passes."""
        return int(self.config.budget.steps)

    @property
    def seed(self) -> int:
        """Random seed of the run."""
        return int(self.config.seed)

    @property
    def rollouts(self) -> int:
        """Number of rollouts that a step trains on."""
        return self.recipe.batch.prompts * self.recipe.batch.completions

    @property
    def k(self) -> int:
        """Steps that are trained on what one version of the weights sampled."""
        mode = self.choices.async_mode
        return mode.k if isinstance(mode, PPOOffPolicy) else 1

    @property
    def vllm(self) -> bool:
        """Return whether an engine samples, whose log-probabilities are not the trainer's."""
        return "VLLM" in str(self.config.generator.get("_target_", ""))

    @cached_property
    def micro_batch(self) -> int:
        """Rollouts of a pass: the largest number up to `batch.micro_batch` that divides those of a step."""
        most = min(self.recipe.batch.micro_batch, self.rollouts)
        return next(size for size in range(most, 0, -1) if self.rollouts % size == 0)

    @property
    def lr(self) -> float:
        """The learning rate after warm-up, with what the schedule multiplies it by for the batch."""
        schedule, lr = self.recipe.schedule, self.recipe.optimizer.lr
        return lr * schedule.factor(schedule.warmup_steps) if isinstance(schedule, SqrtBatchSchedule) else lr

    @property
    def cosine(self) -> CosineSchedule | None:
        """The schedule, if it falls along a cosine."""
        return self.recipe.schedule if isinstance(self.recipe.schedule, CosineSchedule) else None

    @property
    def clips(self) -> tuple[float, float] | None:
        """Lower and upper clip of a loss with two bounds."""
        loss: Loss = self.choices.loss
        if isinstance(loss, DAPO | GSPO):
            return loss.clip_low, loss.clip_high
        return (loss.clip, loss.clip) if isinstance(loss, PPO) else None

    def aggregation_of(self, term: Any) -> type[Aggregation]:
        """Return how a term of the loss is averaged: its own way, or else the run's."""
        return type(named_aggregation("", term.aggregation) or self.choices.aggregation)

    @property
    def head(self) -> bool | None:
        """Return whether the heads of both sides are in FP32 beside a 16-bit policy; None where only one is."""
        precision: Precision = self.choices.precision
        if precision.policy == "fp32":
            return False
        both = {precision.fp32_head_trainer, precision.fp32_head_generator}
        return both.pop() if len(both) == 1 else None


def common(run: Run, into: Translation) -> None:
    """List what none of the trainers has a word for."""
    choices = run.choices
    absent = {
        "resampling": ("uniform", "prompts are never retired there"),
        "curriculum": ("none", "prompts are drawn without regard to their difficulty there"),
        "allocation": ("fixed", "every prompt has the same number of completions there"),
        "critic": ("none", "a critic is not translated"),
        "advantage": ("group", "advantages of a critic are not translated"),
    }
    neutral = ("UniformResampling", "NoCurriculum", "FixedAllocation", "NoCritic", "GroupAdvantage")
    for axis, (plain, why) in absent.items():
        choice = choices.on(axis)
        if type(choice).__name__ not in neutral:
            into.lacks(axis, choice, f"{why}; {axis}={plain} is translated")
        elif axis != "advantage":
            into.says(axis)
    for axis, choice in choices.items():
        if axis in choices.own:
            into.lacks(axis, choice, "an axis of your own")
        elif not type(choice).__module__.startswith("lightning_scalerl."):
            # Also one that is derived from a choice of ours: what it has changed nobody knows here.
            into.lacks(axis, choice, OWN)
    if type(choices.length_control).__name__ == "Interruption":
        into.lacks("length_control", choices.length_control, "nothing is forced into a completion there")
    elif isinstance(choices.length_control, NoLengthControl):
        into.says("length_control")
    if isinstance(choices.adapter, NoAdapter):
        into.says("adapter")
    if not isinstance(choices.async_mode, PPOOffPolicy):
        into.lacks("async_mode", choices.async_mode, _PIPELINE[into.to])
    if choices.precision.policy == "fp16":
        into.lacks("precision.policy", "fp16", "the start and growth of the loss's scale are not compared with ours")
    for part, acts in {
        "value": not isinstance(choices.critic, NoCritic),
        "advantage": True,
        "kl": not isinstance(choices.kl, NoKL),
    }.items():
        if acts and choices.precision.policy != "fp32" and not getattr(choices.precision, f"fp32_{part}"):
            into.lacks(f"precision.fp32_{part}", False, f"there is no rounding of it there; precision.fp32_{part}=true")
    if run.recipe.chat.stop:
        into.lacks("chat.stop", list(run.recipe.chat.stop), "texts that end a completion are not translated")
    into.note(
        "model, data and reward functions are yours to name there; the reward of a completion is "
        f"{run.recipe.reward.correct:g} if it is correct, else {run.recipe.reward.incorrect:g}"
    )
    into.note(
        "orders of prompts and sampled tokens follow from each trainer's own random numbers: the same seed is not the "
        "same run"
    )


def estimator(run: Run) -> str | None:
    """Return the name that verl and SkyRL have for the advantage; None for one of the user's own.

    GAE is named though `common` lists it as missing: without the name the trainer would use another estimator.
    """
    return {GroupAdvantage: "grpo", GAE: "gae"}.get(type(run.choices.advantage))


_PIPELINE = {
    "trl": "its GRPOTrainer samples and trains in turns; its asynchronous trainer drops what is too old, and has one "
    "loss",
    "verl": "its asynchronous trainers drop or abort what is too old; nothing is discarded here",
    "prime-rl": "orchestrator.max_off_policy_steps drops rollouts beyond the bound; nothing is discarded here",
    "skyrl": "fully_async bounds the staleness of whole rollouts by another rule of admission "
    "(max_staleness_steps), in a trainer of its own",
}


def on_policy(run: Run) -> bool:
    """Return whether each batch is sampled by the weights that it trains."""
    return isinstance(run.choices.async_mode, PPOOffPolicy) and run.k == 1


def by_deviation(run: Run, into: Translation, eps: float, others: str) -> bool | None:
    """Return whether advantages are divided by their group's deviation, plus `eps`, in a trainer that knows no other.

    None where they are divided otherwise: what has no counterpart is added, with what `others` says of it.
    """
    scale = run.choices.normalization
    if isinstance(scale, PromptNormalization) and (scale.ddof, scale.eps) != (1, eps):
        others = f"the deviation is unbiased, plus {eps:g}: normalization.ddof=1 and eps={eps:g}"
    elif isinstance(scale, PromptNormalization | NoNormalization):
        return isinstance(scale, PromptNormalization)
    into.lacks("normalization", scale, others)
    return None


def distance(run: Run) -> float | None:
    """Return the coefficient of a KL that is the same for all tokens and a term of the loss; None for another one."""
    kl = run.choices.kl
    if isinstance(kl, NoKL):
        return 0.0
    return kl.coefficient if isinstance(kl, FixedKL) and kl.where == "loss" else None


def lasting(run: Run, into: Translation, by_step: bool) -> tuple[bool, bool]:
    """Return whether warm-up and cosine can be said, given that the schedule there advances as ours does.

    Args:
        run: what is translated.
        into: where what cannot be said is listed.
        by_step: whether the trainer's schedule advances once for each of our steps.
    """
    schedule = run.recipe.schedule
    warms, falls = bool(schedule.warmup_steps), run.cosine is not None
    if type(schedule) not in (ConstantSchedule, CosineSchedule, SqrtBatchSchedule):
        into.lacks("schedule", type(schedule).__name__, "a schedule of your own")
        return False, False
    if (warms or falls) and not by_step:
        into.lacks("schedule", type(schedule).__name__, "the schedule advances at other times there")
        return False, False
    return warms, falls
