"""The contract of every axis and of every choice in `conf/`. A new choice is tested without a change here."""

from __future__ import annotations

import inspect
import json
import math
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

import lightning_scalerl
from lightning_scalerl import Choices, ConfigurationError, DesignChoice
from lightning_scalerl.choices import AXES, NEUTRAL, axis_class
from lightning_scalerl.compat.hydra import locate
from lightning_scalerl.composition import SETTINGS, build, build_recipe, compose, conf_dir
from lightning_scalerl.session.setup import resolve_choices
from tests.examples import every
from tests.helpers import row

IN_CONF = [(axis, path.stem) for axis in AXES for path in sorted((conf_dir() / axis).glob("*.yaml"))]

# Overrides that a choice needs: GAE and the value network need each other, distillation needs a teacher.
PARTNER = {
    "gae": ["critic=value_network"],
    "value_network": ["advantage=gae"],
    "distil": ["kl.reference=teacher"],
}


@pytest.mark.parametrize("axis", AXES)
def test_every_axis_has_a_class_a_module_and_a_conf_folder(axis: str) -> None:
    kind = axis_class(axis)
    assert kind.axis == axis and issubclass(kind, DesignChoice)
    assert kind.__module__.startswith(f"lightning_scalerl.axes.{axis}")
    assert any((conf_dir() / axis).glob("*.yaml"))
    assert kind.__doc__
    neutral = kind.neutral_choice()
    assert (neutral is None) == (kind.neutral is None)
    assert (neutral is None) == (NEUTRAL[axis] is None)
    if neutral is not None:
        file = OmegaConf.load(conf_dir() / axis / f"{NEUTRAL[axis]}.yaml")
        assert build({axis: file}, axis).same_as(neutral)
        assert neutral.semantics() | dict(kind.neutral or {}) == neutral.semantics()


@pytest.mark.parametrize("axis", every(10, every(5, AXES, pytest.mark.full)))
def test_every_choice_in_conf_builds_and_has_the_defaults_of_its_class(axis: str) -> None:
    """Each file builds within a whole recipe. Each class's defaults equal one of its files (with `scale=paper`)."""
    built = []
    for name in (name for where, name in IN_CONF if where == axis):
        config = compose([f"{axis}={name}", "scale=paper", *PARTNER.get(name, [])])
        choice = build_recipe(config, "scalerl").choices.on(axis)
        assert isinstance(choice, axis_class(axis))
        assert choice.same_as(choice) and choice.state_key == f"{axis}:{type(choice).__name__}"
        assert json.loads(json.dumps(choice.semantics()))["choice"] == type(choice).__name__
        assert getattr(lightning_scalerl, type(choice).__name__) is type(choice), "public under its name"
        built.append(choice)
    for kind in {type(choice) for choice in built}:
        assert any(choice.same_as(kind()) for choice in built), f"{kind.__name__}() is in no file of conf/{axis}/"


def test_a_missing_axis_gets_its_neutral_choice() -> None:
    whole = row()
    completed = Choices.of(choice for choice in whole if choice.axis not in ("filter", "truncated"))
    assert [type(choice) for choice in completed] == [type(choice) for choice in whole]
    with pytest.raises(ConfigurationError, match="axes: nothing chosen for loss"):
        Choices.of(choice for choice in whole if choice.axis != "loss")


def test_a_choice_that_lacks_a_method_of_its_axis_is_refused_before_compute() -> None:
    from lightning_scalerl.axes.loss import Loss

    class NoClip(Loss):
        def per_token(self, trainer_logprobs: Any, anchor_logprobs: Any, advantages: Any, mask: Any) -> Any:
            return -advantages * trainer_logprobs

    with pytest.raises(ConfigurationError, match=r"^loss: NoClip lacks clipped, which every choice on this axis"):
        Choices.of([*(choice for choice in row() if choice.axis != "loss"), NoClip()])


def test_a_choice_with_the_name_of_one_of_ours_is_refused() -> None:
    """A script's label contains the class's name, so its runs would be fitted together with those of our class."""

    class NoFilter(lightning_scalerl.NoFilter):
        pass

    with pytest.raises(ConfigurationError, match=r"\.NoFilter: bears the name of lightning_scalerl\.NoFilter.*rename"):
        Choices.of([*(choice for choice in row() if choice.axis != "filter"), NoFilter()])


def test_an_argument_that_is_not_stored_under_its_name_is_refused() -> None:
    """It would be missing in a script's label, and runs with other values would be fitted together."""

    class Hidden(lightning_scalerl.NoFilter):
        def __init__(self, weight: float = 1.0, *more: float, **others: float) -> None:
            self._weight = weight

    class Described(Hidden):
        def semantics(self) -> dict[str, Any]:
            return {**super().semantics(), "weight": self._weight}

    others = [choice for choice in row() if choice.axis != "filter"]
    with pytest.raises(ConfigurationError, match=r"^filter\.weight: Hidden does not store .*self\.weight = weight$"):
        Choices.of([*others, Hidden(2.0)])
    assert Choices.of([*others, Described(2.0)]).filter.semantics()["weight"] == 2.0


@pytest.mark.parametrize("value", [len, {"a": [torch.ones(2)]}, float("inf"), {1}, torch.ones(99)])
def test_an_argument_that_cannot_be_stored_with_the_run_is_refused(value: Any) -> None:
    class Weighted(lightning_scalerl.NoFilter):
        def __init__(self, weight: Any) -> None:
            self.weight = weight

    others = [choice for choice in row() if choice.axis != "filter"]
    with pytest.raises(
        ConfigurationError, match=r"^filter\.weight: .* of Weighted cannot be stored with the run"
    ) as refusal:
        Choices.of([*others, Weighted(value)])
    assert "\n" not in str(refusal.value)
    assert Choices.of([*others, Weighted({"a": [1, None, "x", (True, 0.5)]})])


def test_a_user_axis_needs_a_neutral_choice() -> None:
    class Typo(DesignChoice):
        axis = "los"

    with pytest.raises(ConfigurationError, match=r"'los' of Typo is unknown; valid: resampling.*neutral choice"):
        Choices.of([*row(), Typo()])


def test_an_axis_of_the_user_needs_a_name_that_is_not_taken() -> None:
    class SecondLoss(DesignChoice):
        axis = "loss"
        neutral = {"choice": "SecondLoss"}  # noqa: RUF012

    class Nameless(DesignChoice):
        neutral = {"choice": "Nameless"}  # noqa: RUF012

    class Batch(DesignChoice):
        axis = "batch"
        neutral = {"choice": "Batch"}  # noqa: RUF012

    others = [choice for choice in row() if choice.axis != "loss"]
    with pytest.raises(ConfigurationError, match=r"^loss: SecondLoss is no choice on this axis.*from.*\.Loss, or name"):
        Choices.of([*others, SecondLoss()])
    assert Nameless().state_key == "None:Nameless"  # Lightning's Trainer reads it before any of our checks
    with pytest.raises(ConfigurationError, match="axis: None of Nameless is unknown"):
        Choices.of([*row(), Nameless()])
    trainer: Any = SimpleNamespace(callbacks=[*row(), Batch()])
    with pytest.raises(ConfigurationError, match=r"^axis: 'batch' of Batch is a group of settings; name the axis"):
        resolve_choices(trainer, SimpleNamespace(check=lambda choices: None), "fit")  # type: ignore[arg-type]


class Shift(DesignChoice):
    """Axis `shift`: a constant that is added to every reward, advantage and loss."""

    axis = "shift"
    neutral = {"choice": "NoShift"}  # noqa: RUF012


class NoShift(Shift):
    """Add nothing."""


class By(Shift):
    """Add `much`."""

    def __init__(self, much: float) -> None:
        self.much = much

    def adjust_loss(self, per_token_loss: Any, batch: Any, trainer_logprobs: Any) -> Any:
        return per_token_loss + self.much


def test_a_user_axis_joins_the_choices() -> None:
    ours = Choices.of([*row(), By(2.0)])
    assert ours.on("shift") is ours.user_axes["shift"] and row().on("shift") is None
    assert type(By(1.0).neutral_choice()) is NoShift
    assert [axis for axis, _ in ours.items()] == [*AXES, "shift"]
    assert ours.replacing(NoShift()).user_axes["shift"].same_as(NoShift())
    assert By(1.0).adjust_reward(0.5, None) == 0.5  # type: ignore[arg-type]


def test_one_class_can_be_an_axis_and_its_neutral_choice() -> None:
    class Scale(DesignChoice):
        axis = "scale_of_mine"
        neutral = {"choice": "Scale", "much": 1.0}  # noqa: RUF012

        def __init__(self, much: float) -> None:
            self.much = much

    neutral = Scale(2.0).neutral_choice()
    assert neutral is not None and neutral.much == 1.0

    class Lost(Scale):
        axis = "lost"
        neutral = {"choice": "Nowhere"}  # noqa: RUF012

    with pytest.raises(ConfigurationError, match="lost: its neutral choice, Nowhere, is not to be found"):
        Lost(1.0).neutral_choice()


def test_a_choice_without_effect_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    class Typo(Shift):
        def adjust_rewards(self, reward: float, rollout: Any) -> float:
            return 0.0

    class Hook(Shift):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            """Act."""

    recipe: Any = SimpleNamespace(check=lambda choices: None)
    for choice in (By(1.0), NoShift(), Hook(), Typo()):
        assert not caplog.messages
        resolve_choices(SimpleNamespace(callbacks=[*row(), choice]), recipe, "fit")  # type: ignore[arg-type]
    (message,) = caplog.messages
    assert message.startswith("shift: Typo has no effect: it defines none of adjust_reward, adjust_advantages, adjust_")


def test_a_neutral_choice_that_acts_is_refused() -> None:
    """A neutral choice is left out of labels and identities, so its runs would count as runs without the axis."""

    class Halved(DesignChoice):
        axis = "halved"
        neutral = {"choice": "Halved"}  # noqa: RUF012

        def adjust_reward(self, reward: float, rollout: Any) -> float:
            return reward / 2

    with pytest.raises(ConfigurationError, match=r"^halved: its neutral choice, Halved, defines adjust_reward; .*"):
        Choices.of([*row(), Halved()])

    class Scaled(DesignChoice):
        axis = "scaled"
        neutral = {"choice": "Scaled", "factor": 1.0}  # noqa: RUF012

        def __init__(self, factor: float) -> None:
            self.factor = factor

        def adjust_reward(self, reward: float, rollout: Any) -> float:
            return self.factor * reward

    class Templated(Halved):
        axis = "templated"
        neutral = {"choice": "Plain"}  # noqa: RUF012

    class Plain(Templated):
        pass

    for right in (Scaled(1.0), Scaled(2.0), Plain(), By(1.0), NoShift()):
        assert Choices.of([*row(), right])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["zero_variance", "dynamic_sampling"])
def test_a_filter_that_would_drop_every_group_is_refused(name: str) -> None:
    """With a critic a group may have one completion. Its rewards cannot differ, so these filters drop it."""
    ppo = ["recipe=ppo", "batch.completions=1"]
    valid, dropped = (build_recipe(compose([*ppo, *more]), "ppo") for more in ([], [f"filter={name}"]))
    valid.check(valid.choices)
    with pytest.raises(ConfigurationError, match=f"batch.completions: 1 .*filter={name} drops every one"):
        dropped.check(dropped.choices)


WITH_CLASS = [
    (path.parent.name, path.stem)
    for path in sorted(conf_dir().glob("*/*.yaml"))
    if path.parent.name in {*AXES, *SETTINGS} and "_target_" in OmegaConf.load(path)
]
# Valid in a script. In a study they are refused by `make_spec`, because JSON has no infinity.
VALID_INFINITIES = {
    # An open interval without an end.
    ("loss.low", -math.inf),
    ("loss.high", math.inf),
    # No limit of memory. The generator itself refuses -inf; it is built when the model is known.
    ("generator.cache_gib", math.inf),
    ("generator.cache_gib", -math.inf),
}


@pytest.mark.parametrize(("group", "name"), every(7, WITH_CLASS, pytest.mark.full))
def test_a_setting_that_is_not_finite_is_refused_by_name(group: str, name: str) -> None:
    config = compose([f"{group}={name}", "scale=paper", *PARTNER.get(name, [])])
    for key in OmegaConf.missing_keys(config[group]):
        OmegaConf.update(config, key, "x")
    parameters = inspect.signature(locate(config[group]._target_)).parameters.values()
    for parameter in parameters:
        if not re.search(r"\b(int|float)\b", str(parameter.annotation)):
            continue
        field = f"{group}.{parameter.name}"
        container = re.match("(Mapping|Sequence|list|tuple|dict)", str(parameter.annotation))
        for value in (math.nan, math.inf, -math.inf):
            if (field, value) in VALID_INFINITIES:
                continue
            settings = OmegaConf.to_container(config[group], resolve=True)
            given: Any = value
            if container is not None:
                count = len(settings.get(parameter.name) or "1")
                given = {"a": value} if container[1] in ("Mapping", "dict") else [value] * count
            node = {**settings, parameter.name: given}
            with pytest.raises(ConfigurationError, match=re.escape(field)) as error:
                build({group: node}, group)
            assert "\n" not in str(error.value)
