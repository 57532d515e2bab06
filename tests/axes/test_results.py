"""A choice's method that returns nothing or a wrong shape is refused by name; broadcasting would hide it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_scalerl import DAPO, DesignChoice, NoFilter, NoNormalization
from lightning_scalerl.axes.results import check_bool, check_shape, check_shapes, number, positive_count
from lightning_scalerl.checks import CannotGoOnError
from lightning_scalerl.choices import Choices
from lightning_scalerl.measure.step_metrics import Pass, _ratio_metrics
from lightning_scalerl.rollouts.rollout import Scored
from lightning_scalerl.stream.credit import assemble
from lightning_scalerl.update.terms import terms, with_selection
from tests.helpers import make_group, row

GROUPS = [make_group([0.0, 1.0]), make_group([1.0, 0.0])]


class Bend(DesignChoice):
    """Axis of the user. `method` returns `bent` of the right value."""

    axis = "bend"
    neutral = {"choice": "Straight"}  # noqa: RUF012


class Straight(Bend):
    pass


def with_results(base: type[DesignChoice], method: str, bent: Any) -> Choices:
    """Return choices, one of which is a subclass of `base` whose `method` bends the right value."""
    right = getattr(base, method)
    choice = type("Mine", (base,), {method: lambda self, *tables: bent(right(self, *tables))})
    return row(choice())


def trained(choices: Choices) -> Tensor:
    """Return the loss of a batch, and compute the metrics of the ratio."""
    batch = with_selection(assemble(GROUPS, choices, max_new_tokens=8), choices, (0,))
    logprobs = batch.generator_logprobs.clone()
    part = (batch, logprobs, torch.zeros_like(logprobs))
    _ratio_metrics(batch, [Pass([part], {}, {}, True)], choices)
    return terms(choices)[0].reduce(Scored(*part))


def nothing(_: Any) -> None:
    return None


@pytest.mark.parametrize(
    ("base", "method", "bent", "message"),
    [
        (
            DAPO,
            "per_token",
            Tensor.sum,
            r"loss: Mine\.per_token returned shape \(\) \(.*\), and must return shape \(4,",
        ),
        (DAPO, "per_token", lambda table: table.sum(1, keepdim=True), r"per_token returned shape \(4, 1\), and must"),
        (DAPO, "per_token", nothing, r"per_token returned None \(is a `return` missing\?\), and must return shape"),
        (DAPO, "clipped", nothing, r"loss: Mine\.clipped returned None"),
        (DAPO, "clipped", Tensor.any, r"clipped returned shape \(\) \(False\), and must"),
        (DAPO, "select", lambda _: [True], r"select returned \[True\], and must return shape \(4, "),
        (DAPO, "select", lambda _: torch.ones(4, 3), r"select returned torch.float32, and must return torch.bool"),
        (NoFilter, "keep", nothing, r"filter: Mine\.keep returned None .*, and must return True or False"),
        (NoFilter, "keep", lambda _: torch.ones(2) > 0, r"keep returned shape \(2,\), and must"),
        (NoNormalization, "scale", nothing, r"normalization: Mine\.scale returned None .* a list of 2 tensors"),
        (NoNormalization, "scale", lambda groups: groups[:1], r"scale returned a list of 1, and must"),
        (NoNormalization, "scale", lambda groups: [group.mean() for group in groups], r"returned shape \(\) .*\(2,\)$"),
        (Bend, "adjust_advantages", nothing, r"bend: Mine\.adjust_advantages returned None"),
        (Bend, "adjust_advantages", lambda groups: groups[1:], r"adjust_advantages returned a list of 1"),
        (Bend, "adjust_loss", Tensor.mean, r"bend: Mine\.adjust_loss returned shape \(\)"),
        (Bend, "adjust_loss", nothing, r"bend: Mine\.adjust_loss returned None"),
    ],
)
def test_a_wrong_result_is_refused_by_class_and_method(
    base: type[DesignChoice], method: str, bent: Any, message: str
) -> None:
    with pytest.raises(CannotGoOnError, match=message) as refusal:
        trained(with_results(base, method, bent))
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(("base", "method"), [(DAPO, "per_token"), (Bend, "adjust_loss")])
def test_a_detached_loss_is_refused_although_other_terms_have_gradients(base: type[DesignChoice], method: str) -> None:
    choices = with_results(base, method, Tensor.detach)
    batch = assemble(GROUPS, choices, max_new_tokens=8)
    logprobs = batch.generator_logprobs.clone().requires_grad_()
    scored = Scored(batch, logprobs, torch.zeros_like(logprobs))
    with pytest.raises(
        CannotGoOnError, match=rf"Mine\.{method} returned a tensor without a gradient, and must return one"
    ):
        terms(choices)[0].reduce(scored)
    with torch.no_grad():  # as the metrics of a step do
        assert terms(choices)[0].reduce(scored).shape == ()


def test_right_results_pass() -> None:
    assert trained(row(DAPO())).shape == ()
    ours = with_results(NoFilter, "keep", torch.tensor)
    assert torch.equal(trained(ours), trained(row(NoFilter())))
    generator = with_results(NoNormalization, "scale", lambda groups: (group * 1 for group in groups))
    assert torch.equal(trained(generator), trained(row(NoNormalization())))


def test_scalars_are_checked() -> None:
    straight = Straight()
    assert number(straight, "adjust_reward", torch.tensor(0.5)) == 0.5
    assert positive_count(straight, "completions", 3) == 3 and check_bool(straight, "keep", False) is False
    for wrong in (None, float("nan"), torch.ones(2), "1"):
        with pytest.raises(CannotGoOnError, match=r"^bend: Straight\.adjust_reward returned .* must return a finite"):
            number(straight, "adjust_reward", wrong)
    for wrong in (None, 0, 2.0, True):
        with pytest.raises(CannotGoOnError, match="must return a whole number, 1 or more"):
            positive_count(straight, "completions", wrong)
    assert check_shape(straight, "x", torch.ones(2), (2,)).sum() == 2
    assert check_shapes(straight, "x", (torch.ones(1),), [torch.ones(1)])[0] == 1
