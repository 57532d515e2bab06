"""Record of a translation, and the properties of a run that translations need."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from lightning_scalerl.axes.adapter import NoAdapter
from lightning_scalerl.axes.advantage import GAE, GroupAdvantage
from lightning_scalerl.axes.aggregation import Aggregation, named_aggregation
from lightning_scalerl.axes.async_mode import PPOOffPolicy
from lightning_scalerl.axes.choice import DesignChoice
from lightning_scalerl.axes.critic import NoCritic
from lightning_scalerl.axes.kl import FixedKL, NoKL
from lightning_scalerl.axes.length_control import NoLengthControl
from lightning_scalerl.axes.loss import DAPO, GSPO, PPO, Loss
from lightning_scalerl.axes.normalization import NoNormalization, PromptNormalization
from lightning_scalerl.axes.precision import Precision
from lightning_scalerl.checks import check_layout
from lightning_scalerl.choices import Choices
from lightning_scalerl.composition import build_recipe, compose, use_folders
from lightning_scalerl.model.chat import Chat
from lightning_scalerl.optim import (
    AdamW,
    AdamW8bit,
    AdamWBF16,
    ConstantSchedule,
    CosineSchedule,
    Muon,
    SqrtBatchSchedule,
)
from lightning_scalerl.recipe import Recipe
from lightning_scalerl.task.base import NoReward
from sweeps.run.as_yaml import as_yaml
from sweeps.run.spec import layout_of

# Value of a bound that is never reached, for trainers in which a bound cannot be turned off: gradient norms and ratios
# stay below it (ratios are capped at exp(20) here and in verl).
NO_BOUND = 1e9
# Names of the trainers in printed text.
NAMES = {"trl": "TRL", "verl": "verl", "prime-rl": "prime-rl", "skyrl": "SkyRL"}
# Reason in `Translation.missing` for choices that the user has defined.
USER_CHOICE = "a choice of your own"


@dataclass(frozen=True)
class Missing:
    """Choice or setting without a counterpart in the other trainer.

    Attributes:
        key: configuration key.
        value: its value, as text.
        why: reason why the other trainer has no counterpart.
    """

    key: str
    value: str
    why: str


@dataclass
class Translation:
    """Recipe as settings of another trainer.

    Attributes:
        to: the trainer.
        version: release or commit of the trainer whose settings these are.
        form: format of the text: "yaml", "toml", or "overrides" (one KEY=VALUE per line).
        settings: values by the trainer's names, with dots between levels.
        missing: our choices and settings without a counterpart.
        notes: differences that no setting can remove.
        added: settings that the trainer's code reads although its own configuration file does not list them.
        optimizer: the trainer's optimizer under these settings: "storage" and "states" (types in which weights and
            optimizer states are stored), and "eps".
        settings_by_axis: names of settings by axis, including axes in `missing`. `axes` leaves these axes out.
    """

    to: str
    version: str
    form: str
    settings: dict[str, Any] = field(default_factory=dict)
    missing: list[Missing] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    added: list[str] = field(default_factory=list)
    optimizer: dict[str, Any] = field(default_factory=dict)
    settings_by_axis: dict[str, list[str]] = field(default_factory=dict)

    def set(self, *axes: str, **settings: Any) -> None:
        """Add settings that express the choices on these axes. In a setting's name, `__` stands for a dot."""
        dotted = {name.replace("__", "."): value for name, value in settings.items()}
        self.settings |= dotted
        for axis in axes:
            self.express(axis, *dotted)

    def under(self, prefix: str, *axes: str, **settings: Any) -> None:
        """Add settings below a prefix, as `set` does."""
        self.set(*axes, **{f"{prefix}.{name}": value for name, value in settings.items()})

    def express(self, axis: str, *names: str) -> None:
        """Record which settings express the choice on an axis; give no names if the trainer always behaves like this
        choice.
        """
        self.settings_by_axis.setdefault(axis, []).extend(names)

    @property
    def axes(self) -> dict[str, list[str]]:
        """Names of the settings that express each axis, without axes in `missing`."""
        missing = {entry.key for entry in self.missing}
        return {axis: names for axis, names in self.settings_by_axis.items() if axis not in missing}

    def add(self, name: str, value: Any) -> None:
        """Add a setting that the trainer's own configuration file lacks; it is written as a new key (`+`) for Hydra."""
        self.settings[name] = value
        self.added.append(name)

    def add_missing(self, key: str, value: Any, why: str) -> None:
        """Add a choice or setting without a counterpart."""
        # If the axis is already missing because the user has defined its choice, do not add a second reason.
        if any((entry.key, entry.why) == (key, USER_CHOICE) for entry in self.missing):
            return
        self.missing.append(Missing(key, _as_text(value), why))

    def express_if(self, same: bool, axis: str, value: Any, why: str) -> None:
        """Record whether the trainer always behaves like the choice on an axis (`same`) or cannot express it."""
        if same:
            self.express(axis)
        else:
            self.add_missing(axis, value, why)

    def set_optimizer(self, storage: str, states: str, eps: float) -> None:
        """Record the types in which the optimizer stores weights and states under these settings, and its epsilon."""
        self.optimizer = {"storage": storage, "states": states, "eps": eps}

    def note(self, text: str) -> None:
        """Add a difference that no setting of either trainer can remove."""
        self.notes.append(text)

    def text(self) -> str:
        """Return the settings in the trainer's format; comments list missing choices and other differences."""
        head = [f"# {self.to} {self.version}: {len(self.settings)} settings; written by scalerl translate"]
        head += [f"# without a counterpart: {entry.key}={entry.value}: {entry.why}" for entry in self.missing]
        if without_setting := [axis for axis, names in self.axes.items() if not names]:
            head.append(f"# same behaviour without a setting: {', '.join(without_setting)}")
        if self.optimizer:
            head.append(
                "# optimizer under these settings: weights stored in {storage}, states in {states}, "
                "eps {eps:g}".format_map(self.optimizer)
            )
        head += [f"# no setting covers this: {note}" for note in self.notes]
        marked = {f"{'+' if name in self.added else ''}{name}": value for name, value in self.settings.items()}
        body = {"yaml": _yaml, "toml": _toml, "overrides": _overrides}[self.form](marked)
        return "\n".join([*head, *body]) + "\n"


def _as_text(value: Any) -> str:
    if isinstance(value, DesignChoice):
        parameters = ", ".join(f"{name}={parameter}" for name, parameter in value.parameters().items())
        return f"{type(value).__name__}({parameters})" if parameters else type(value).__name__
    return str(value)


def _json(value: Any) -> str:
    """Return a value as JSON, which TOML and Hydra read the same way.

    Null, which TOML lacks, and infinity do not occur.
    """
    return json.dumps(value)


def _yaml(settings: Mapping[str, Any]) -> list[str]:
    return [f"{name}: {as_yaml(value)}" for name, value in settings.items()]


def _overrides(settings: Mapping[str, Any]) -> list[str]:
    # Lists and mappings are written without spaces and quotes, so that each override is a single word for a shell.
    return [f"{name}={_unquoted(value)}" for name, value in settings.items()]


def _unquoted(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{name}:{_unquoted(entry)}" for name, entry in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(_unquoted, value)) + "]"
    return value if isinstance(value, str) else _json(value)


def _toml(settings: Mapping[str, Any]) -> list[str]:
    tables: dict[str, list[str]] = {}
    for name, value in settings.items():
        table, _, key = name.rpartition(".")
        tables.setdefault(table, []).append(f"{key} = {_json(value)}")
    lines = list(tables.pop("", []))
    for table, entries in tables.items():
        lines += [f"[{table}]", *entries]
    return lines


@dataclass(frozen=True)
class Run:
    """Run to translate: the composed configuration, and the recipe built from it."""

    config: Any
    recipe: Recipe

    @classmethod
    def of(cls, overrides: list[str], folders: list[str]) -> Run:
        """Compose the run that overrides describe.

        Raises:
            ConfigurationError: the overrides are invalid, or choices contradict each other.
        """
        config = compose(overrides, use_folders(folders))
        check_layout(config.strategy)
        recipe = build_recipe(config, "")
        recipe.check(recipe.choices)
        return cls(config, recipe)

    @property
    def choices(self) -> Choices:
        """The choice on every axis."""
        return self.recipe.choices

    @property
    def steps(self) -> int:
        """Steps of the budget. Each is one batch, independent of the number of passes over it."""
        return int(self.config.budget.steps)

    @property
    def seed(self) -> int:
        """Random seed of the run."""
        return int(self.config.seed)

    @property
    def rollouts(self) -> int:
        """Number of rollouts per step."""
        return self.recipe.batch.prompts * self.recipe.batch.completions

    @property
    def k(self) -> int:
        """Number of steps that train on samples of the same version of the weights."""
        mode = self.choices.async_mode
        return mode.k if isinstance(mode, PPOOffPolicy) else 1

    @property
    def evaluation(self) -> tuple[int, int]:
        """Number of steps between evaluations (0 for none), and samples per held-out prompt."""
        evaluation = self.recipe.evaluation
        return int(evaluation.get("every_n_steps", 0)), int(evaluation.get("samples", 1))

    @property
    def dtype(self) -> str:
        """Type that the policy computes in, by its full name."""
        return {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}[self.choices.precision.policy]

    @property
    def vllm(self) -> bool:
        """True if vLLM samples, so that the generator's log-probabilities differ from the trainer's."""
        return "VLLM" in str(self.config.generator.get("_target_", ""))

    @property
    def processes(self) -> int:
        """Training processes, one per device of `strategy`; 1 if `strategy.devices` is not set."""
        return math.prod(layout_of(self.config) or (1, 1))

    @cached_property
    def micro_batch(self) -> int:
        """Rollouts per pass: the largest number up to `batch.micro_batch` that divides the rollouts of a step."""
        return self.micro_batch_of(self.rollouts)

    @property
    def is_one_micro_batch(self) -> bool:
        """True if all rollouts of a step are in one pass of one process."""
        return self.micro_batch == self.rollouts and self.processes == 1

    def micro_batch_of(self, rollouts: int) -> int:
        """Return the largest number up to `batch.micro_batch` that divides this number of rollouts."""
        limit = min(self.recipe.batch.micro_batch, rollouts)
        return next(size for size in range(limit, 0, -1) if rollouts % size == 0)

    @property
    def lr(self) -> float:
        """Learning rate after warm-up, including the schedule's factor for the batch size."""
        schedule, lr = self.recipe.schedule, self.recipe.optimizer.lr
        return lr * schedule.factor(schedule.warmup_steps) if isinstance(schedule, SqrtBatchSchedule) else lr

    @property
    def cosine(self) -> CosineSchedule | None:
        """The schedule if it is a cosine, else None."""
        return self.recipe.schedule if isinstance(self.recipe.schedule, CosineSchedule) else None

    @property
    def clips(self) -> tuple[float, float] | None:
        """Lower and upper clip of the loss; None if the loss does not have two bounds."""
        loss: Loss = self.choices.loss
        if isinstance(loss, DAPO | GSPO):
            return loss.clip_low, loss.clip_high
        return (loss.clip, loss.clip) if isinstance(loss, PPO) else None

    def aggregation_of(self, term: Any) -> type[Aggregation]:
        """Return the aggregation that a term of the loss names; if it names none, the choice of axis `aggregation`."""
        return type(named_aggregation("", term.aggregation) or self.choices.aggregation)

    @property
    def head(self) -> bool | None:
        """True if trainer and generator both have an FP32 head under a 16-bit policy; None if only one has."""
        precision: Precision = self.choices.precision
        if precision.policy == "fp32":
            return False
        head_types = {precision.fp32_head_trainer, precision.fp32_head_generator}
        return head_types.pop() if len(head_types) == 1 else None


def common(run: Run, into: Translation) -> None:
    """Record the choices that no trainer supports, and neutral choices that need no setting in any trainer."""
    choices, name = run.choices, NAMES[into.to]
    untranslated = {
        "resampling": ("uniform", f"{name} never retires prompts"),
        "curriculum": ("none", f"{name} draws prompts regardless of their difficulty"),
        "allocation": ("fixed", f"{name} samples the same number of completions for every prompt"),
        "credit": ("outcome", f"{name} gives all turns of a rollout the same advantage"),
        "critic": ("none", "a critic is not translated"),
        "advantage": ("group", "advantages of a critic are not translated"),
    }
    neutral = ("UniformResampling", "NoCurriculum", "FixedAllocation", "OutcomeCredit", "NoCritic", "GroupAdvantage")
    for axis, (neutral_name, why) in untranslated.items():
        choice = choices.on(axis)
        if type(choice).__name__ not in neutral:
            into.add_missing(axis, choice, f"{why}; {axis}={neutral_name} can be translated")
        elif axis != "advantage":
            into.express(axis)
    for axis, choice in choices.items():
        if axis in choices.user_axes:
            into.add_missing(axis, choice, "an axis of your own")
        elif not type(choice).__module__.startswith("lightning_scalerl."):
            # This includes a subclass of one of this project's choices, because its changes are unknown.
            into.add_missing(axis, choice, USER_CHOICE)
    if type(choices.length_control).__name__ == "Interruption":
        into.add_missing("length_control", choices.length_control, f"{name} never forces tokens into a completion")
    elif isinstance(choices.length_control, NoLengthControl):
        into.express("length_control")
    if isinstance(choices.adapter, NoAdapter):
        into.express("adapter")
    if not isinstance(choices.async_mode, PPOOffPolicy):
        into.add_missing("async_mode", choices.async_mode, _ASYNC_MODES[into.to])
    _check_optimizer(run, into)
    if choices.precision.policy == "fp16":
        into.add_missing(
            "precision.policy",
            "fp16",
            f"the initial value and the growth of {name}'s loss scale were not compared with this project's",
        )
    for part, acts in {
        "value": not isinstance(choices.critic, NoCritic),
        "advantage": True,
        "kl": not isinstance(choices.kl, NoKL),
    }.items():
        if acts and choices.precision.policy != "fp32" and not getattr(choices.precision, f"fp32_{part}"):
            into.add_missing(
                f"precision.fp32_{part}",
                False,
                f"{name} does not round it; precision.fp32_{part}=true can be translated",
            )
    if (teacher := choices.kl.reference) is not None:
        into.add_missing("kl.reference", teacher, _DISTILLATION[into.to])
    if isinstance(run.recipe.reward, NoReward):
        into.add_missing("reward", "none", f"{name} takes your reward functions; reward=zero_one can be translated")
    if other_sets := run.recipe.evaluation.get("sets"):
        into.add_missing(
            "evaluation.sets", sorted(other_sets), "sets of other tasks cannot be translated; evaluation.sets={} can"
        )
    if run.recipe.evaluation.get("gold_logprob"):
        into.add_missing("evaluation.gold_logprob", True, f"{name} does not score known solutions")
    _check_groups(run, into)
    into.note(
        f"set the model, the data and the reward functions in {name}; the reward of a completion is "
        f"{run.recipe.reward.correct:g} if it is correct, else {run.recipe.reward.incorrect:g}"
    )
    into.note(
        "each trainer orders prompts and samples tokens with its own random numbers: the same seed does not give the "
        "same run"
    )


def _check_groups(run: Run, into: Translation) -> None:
    """Add to `missing` the settings that change a run but are not on an axis: environment, chat, health and branch."""
    name, context, chat = NAMES[into.to], run.recipe.context, run.recipe.chat
    if (factory := run.config.environment.get("factory")) is not None:
        kind, limit = _ENVIRONMENTS[into.to]
        into.add_missing(
            "environment", factory, f"{name}'s environments ({kind}) were not compared with this project's"
        )
        for key in ("max_turns", "max_turn_tokens"):
            if (value := getattr(context, key)) is not None:
                into.add_missing(f"context.{key}", value, f"a limit of the environment's conversations ({limit})")
    for key, neutral in (Chat.neutral or {}).items():
        value = getattr(chat, key, neutral)  # the key `choice` is the class's name, not an attribute
        value = list(value) if key == "stop" else value
        if value != neutral:
            into.add_missing(f"chat.{key}", value, _CHAT.get(key, f"{name} renders prompts by its own settings"))
    if run.recipe.health.stop:
        into.add_missing("health.stop", True, f"{name} does not end a collapsed run; health=watch can be translated")
    if (parent := run.config.get("branch", {}).get("run")) is not None:
        into.add_missing("branch.run", parent, f"{name} cannot read this project's checkpoints")
    if (prompts := run.recipe.evaluation.get("prompts")) is not None:
        into.note(
            f"evaluation: this project evaluates at most {prompts} prompts of each set; shorten the sets yourself"
        )


# For each trainer: where it has environments, and its limit on turns.
_ENVIRONMENTS = {
    "trl": ("environment_factory of GRPOTrainer", "in TRL max_tool_calling_iterations, which counts rounds of calls"),
    "verl": ("rollout.multi_turn and agent loops", "in verl rollout.multi_turn.max_assistant_turns"),
    "prime-rl": ("packages of verifiers", "in prime-rl a setting of the environment's package"),
    "skyrl": ("classes of skyrl_gym", "in SkyRL generator.max_turns"),
}
_CHAT = {
    "stop": "stop texts are not translated",
    "end_of_thinking": "reward functions get the whole completion; remove the thinking there",
}


def _check_optimizer(run: Run, into: Translation) -> None:
    """Add the optimizer to `missing` if it is not AdamW with FP32 weights and moments, and the trainer lacks it."""
    optimizer_class = type(run.recipe.optimizer)
    if optimizer_class is AdamW or (optimizer_class, into.to) in _SAME_OPTIMIZERS:
        return
    why = _OPTIMIZERS.get(optimizer_class, "an optimizer of your own").format(trainer=NAMES[into.to])
    setting = _OPTIMIZER_SETTINGS.get((optimizer_class, into.to), "no setting")
    into.add_missing("optimizer", optimizer_class.__name__, f"{why} ({setting}); optimizer=adamw can be translated")


# TRL's optim=adamw_torch_8bit is the same class of torchao.
_SAME_OPTIMIZERS = {(AdamW8bit, "trl")}
_OPTIMIZERS: dict[type[AdamW], str] = {
    AdamWBF16: "with a model in BF16, {trainer}'s AdamW also rounds within a step, and computes norms in BF16",
    AdamW8bit: "{trainer}'s 8-bit moments were not compared with this project's",
    Muon: "the weights that {trainer} trains by Muon, and their rates, were not compared with this project's",
}
_OPTIMIZER_SETTINGS: dict[tuple[type[AdamW], str], str] = {
    (AdamWBF16, "trl"): "model_init_kwargs.dtype",
    (AdamWBF16, "verl"): "actor.fsdp_config.model_dtype",
    (AdamWBF16, "prime-rl"): "trainer.model.optimization_dtype",
    (AdamW8bit, "verl"): "actor.optim.optimizer_impl",
    (Muon, "verl"): "actor.optim.optimizer_impl",
    (Muon, "prime-rl"): "trainer.optim.type",
}


def estimator(run: Run) -> str | None:
    """Return the name of the advantage estimator in verl and SkyRL; None for one that the user has defined.

    GAE is named although `common` lists it as missing: without a name, the trainer would use its default estimator.
    """
    return {GroupAdvantage: "grpo", GAE: "gae"}.get(type(run.choices.advantage))


# Each trainer's way to distil from a teacher on the policy's own rollouts. None was compared with this project's way.
_DISTILLATION = {
    "trl": "TRL has a teacher in its DistillationTrainer, not in its GRPOTrainer",
    "verl": "verl sets a teacher under distillation.*; kl.estimate=k1 corresponds to loss_mode=k1 with "
    "use_policy_gradient=true",
    "prime-rl": "prime-rl sets a teacher in orchestrator.algo.teacher, with another loss",
    "skyrl": "SkyRL distils in a separate example (on_policy_distillation)",
}

_ASYNC_MODES = {
    "trl": "TRL's GRPOTrainer samples and trains in turns; its asynchronous trainer discards rollouts that are too "
    "old, and has only one loss",
    "verl": "verl's asynchronous trainers discard or abort rollouts that are too old; this project discards none",
    "prime-rl": "orchestrator.max_off_policy_steps discards rollouts beyond the bound; this project discards none",
    "skyrl": "fully_async, a separate trainer, bounds the staleness of whole rollouts by another admission rule "
    "(max_staleness_steps)",
}


def on_policy(run: Run) -> bool:
    """Return whether each batch is sampled by the weights that it updates."""
    return isinstance(run.choices.async_mode, PPOOffPolicy) and run.k == 1


def deviation(eps: float) -> str:
    """Return the reason why a standard deviation cannot be translated, and which form of it can."""
    return (
        f"the standard deviation is the unbiased one plus {eps:g}; normalization.ddof=1 with normalization.eps={eps:g} "
        "can be translated"
    )


def divides_by_deviation(run: Run, into: Translation, eps: float, why: str) -> bool | None:
    """Return whether the run divides advantages by their group's standard deviation (True) or not at all (False).

    Args:
        run: the run to translate.
        into: gets an entry in `missing` if the run normalizes in another way; then the result is None.
        eps: the trainer's fixed addition to the deviation.
        why: reason for that entry with group advantages. With GAE the reason is another: verl and SkyRL always whiten.
    """
    scale = run.choices.normalization
    if isinstance(run.choices.advantage, GAE):
        why = (
            f"with gae, {NAMES[into.to]} always subtracts the mean of a generation batch's advantages and divides by "
            "their standard deviation"
        )
    elif isinstance(scale, PromptNormalization) and (scale.ddof, scale.eps) != (1, eps):
        why = deviation(eps)
    elif isinstance(scale, PromptNormalization | NoNormalization):
        return isinstance(scale, PromptNormalization)
    into.add_missing("normalization", scale, why)
    return None


def kl_coefficient(run: Run) -> float | None:
    """Return the coefficient of a k3 KL term relative to the initial model; 0 without KL, None for any other KL."""
    kl = run.choices.kl
    if isinstance(kl, NoKL):
        return 0.0
    if isinstance(kl, FixedKL) and (kl.where, kl.estimate, kl.reference) == ("loss", "k3", None):
        return kl.coefficient
    return None


def kl_term(run: Run, into: Translation, aggregation: type[Aggregation], why: str) -> float | None:
    """Return the coefficient of the KL term, for trainers with one coefficient and a fixed aggregation of the term.

    Args:
        run: the run to translate.
        into: gets an entry in `missing` for any other KL; then the result is None.
        aggregation: the trainer's aggregation of the term.
        why: reason for an entry in `missing` if the run aggregates the term in another way.
    """
    kl, beta = run.choices.kl, kl_coefficient(run)
    if beta is None:
        into.add_missing(
            "kl",
            kl,
            f"{NAMES[into.to]} has one coefficient for all tokens, in the loss, with the k3 estimate; kl=fixed can be "
            "translated",
        )
    elif beta and run.aggregation_of(kl) is not aggregation:
        into.add_missing("kl.aggregation", kl, why)
    return beta


def evaluation_interval(run: Run, into: Translation) -> int:
    """Return the number of batches of `run.k` steps between evaluations; 0 for none, or if it would be a fraction."""
    interval, _ = run.evaluation
    if interval % run.k:
        into.add_missing(
            "evaluation.every_n_steps", interval, f"{NAMES[into.to]} evaluates only after multiples of {run.k} steps"
        )
        return 0
    return interval // run.k


def refuse_adapter(run: Run, into: Translation, name: str) -> None:
    """Add LoRA, if the run has it, to `missing`; `name` is the trainer's setting for an adapter."""
    if not isinstance(run.choices.adapter, NoAdapter):
        into.add_missing(
            "adapter",
            run.choices.adapter,
            f"the initial values of {NAMES[into.to]}'s adapter ({name}) were not compared with this project's",
        )


def translate_schedule(run: Run, into: Translation, by_step: bool) -> tuple[bool, bool]:
    """Return whether to translate a warm-up and whether to translate a cosine schedule.

    Args:
        run: the run to translate.
        into: gets an entry in `missing` if the schedule cannot be translated; then both results are False.
        by_step: whether the trainer's schedule advances once per step of the run.
    """
    schedule = run.recipe.schedule
    has_warmup, has_decay = bool(schedule.warmup_steps), run.cosine is not None
    if type(schedule) not in (ConstantSchedule, CosineSchedule, SqrtBatchSchedule):
        into.add_missing("schedule", type(schedule).__name__, "a schedule of your own")
        return False, False
    if (has_warmup or has_decay) and not by_step:
        into.add_missing(
            "schedule", type(schedule).__name__, f"{NAMES[into.to]}'s schedule does not advance once per step"
        )
        return False, False
    return has_warmup, has_decay
