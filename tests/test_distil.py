"""Tests of distillation: gradients, the cost of a teacher, refused settings, and resumed runs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from omegaconf import OmegaConf
from torch import Tensor

from lightning_scalerl import ConfigurationError, ScaleRL
from lightning_scalerl.axes.advantage import GAE
from lightning_scalerl.axes.aggregation import SumAggregation, TokenAggregation
from lightning_scalerl.axes.choice import DesignChoice
from lightning_scalerl.axes.critic import ValueNetwork
from lightning_scalerl.axes.kl import GRADIENT_BY_ESTIMATE, FixedKL
from lightning_scalerl.axes.loss import CISPO, GMPO, GSPO, ClipCov, KLCov, Reinforce
from lightning_scalerl.axes.precision import Precision
from lightning_scalerl.choices import Choices
from lightning_scalerl.composition import compose, load_recipe
from lightning_scalerl.distributed.ranks import Ranks
from lightning_scalerl.distributed.sharded import is_sharded
from lightning_scalerl.measure.flops import FlopModel
from lightning_scalerl.measure.memory import measure, predict_memory
from lightning_scalerl.measure.semantics import resolved_semantics
from lightning_scalerl.member.identify import plan_members
from lightning_scalerl.member.identity import identity_of
from lightning_scalerl.model import policy as policies
from lightning_scalerl.model.load import load_model
from lightning_scalerl.model.policy import Policy
from lightning_scalerl.rollouts.rollout import PassSize, Scored, TrainBatch
from lightning_scalerl.stream.credit import assemble
from lightning_scalerl.task.arithmetic_base import new_model, tokenizer
from lightning_scalerl.update.before import run_forward_passes
from lightning_scalerl.update.terms import terms
from lightning_scalerl.update.token_credit import token_advantages
from sweeps.run.journal import read_journal
from tests.axes.test_terms import check_two_ranks
from tests.distributed.test_ranks import fit as fit_on_ranks
from tests.distributed.test_ranks import on_ranks
from tests.helpers import SMALL, fit, make_group, row
from tests.test_recipes import members, train

FP32 = Precision("fp32")
ALONE = ("reward=none", "filter=none", "loss=reinforce")


@pytest.fixture(scope="module")
def teacher_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random Llama, wider than the tiny one, over the same characters."""
    path = tmp_path_factory.mktemp("teachers") / "teacher"
    new_model(width=64, layers=2, seed=5).save_pretrained(path)
    tokenizer().save_pretrained(path)
    return str(path)


def batch_of() -> TrainBatch:
    groups = [make_group([1.0, 0.0, 1.0], 0, prompt_length=3), make_group([0.0, 1.0, 0.0], 1, prompt_length=5)]
    groups[0].rollouts[0].sources[-1] = 1  # an inserted token, which was not sampled
    return assemble(groups, row(), max_new_tokens=8)


def kl_term(choices: Choices, scored: Scored) -> Tensor:
    (term,) = (each for each in terms(choices) if each.name == "kl")
    return term.reduce(scored)


def gradients(model: torch.nn.Module) -> list[Tensor]:
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def exact_loop(student: Any, teacher: Any, batch: TrainBatch, temperature: float) -> Tensor:
    """Reverse KL over the vocabulary at every sampled token, computed row by row and token by token."""
    total = torch.zeros(())
    for number in range(batch.rollouts):
        start, end = int(batch.completion_start[number]), int(batch.lengths[number])
        tokens = batch.tokens[number : number + 1, :end]
        ours = F.log_softmax(student(input_ids=tokens).logits[0] / temperature, -1)
        theirs = F.log_softmax(teacher(input_ids=tokens).logits[0].detach() / temperature, -1)
        for place in range(start, end):
            if batch.loss_mask[number, place - start]:
                p, q = ours[place - 1], theirs[place - 1]
                total = total + sum(p[token].exp() * (p[token] - q[token]) for token in range(len(p)))
    return 0.5 * total / batch.denominators.tokens


@pytest.mark.parametrize("chunks", [False, True])
def test_full_has_the_gradient_of_an_explicit_loop(chunks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if chunks:
        monkeypatch.setattr(policies, "MAX_LOGITS", 100)
    student, teacher = new_model(32, 2, seed=1), new_model(64, 1, seed=2).requires_grad_(False)
    batch, choices = batch_of(), row(FixedKL(0.5, estimate="full"), TokenAggregation())
    logprobs, entropies, divergences = Policy(student, FP32, 0.7)(batch, teacher=Policy(teacher, FP32, 0.7))
    loss = kl_term(choices, Scored(batch, logprobs, entropies, divergences=divergences))
    loss.backward()  # type: ignore[no-untyped-call]
    gradients_of_full = gradients(student)
    student.zero_grad(set_to_none=True)
    expected = exact_loop(student, teacher, batch, 0.7)
    expected.backward()  # type: ignore[no-untyped-call]
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-5)
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(gradients_of_full, gradients(student), strict=True))
    assert max(float(each.abs().max()) for each in gradients_of_full) > 1e-3


@pytest.mark.parametrize("loss", [Reinforce(), CISPO(5.0)], ids=["reinforce", "cispo"])
@pytest.mark.parametrize("estimate", ["k1", "k2", "k3"])
def test_sampled_estimates_have_the_gradient_that_semantics_states(estimate: str, loss: Any) -> None:
    """In expectation over one token, k1 and k2 have the gradient of the reverse KL, and k3 has the forward KL's."""
    source = torch.Generator().manual_seed(0)
    logits = torch.randn(7, generator=source, dtype=torch.float64).requires_grad_(True)
    reference = torch.randn(7, generator=source, dtype=torch.float64).log_softmax(0)
    logprobs = logits.log_softmax(0)
    batch = assemble([make_group([0.0] * 7, length=1)], row(), max_new_tokens=1)
    here = logprobs.detach().unsqueeze(1)
    batch = replace(batch, generator_logprobs=here, reference_logprobs=reference.unsqueeze(1))
    choices = row(FixedKL(1.0, estimate=estimate), loss, SumAggregation())
    (term,) = (each for each in terms(choices) if each.name == "kl")
    by_token = term.per_token(Scored(batch, logprobs.unsqueeze(1), torch.zeros(7, 1)))
    # Row i samples token i. Weighting rows by the token probabilities gives the exact expectation.
    (gradient,) = torch.autograd.grad((by_token * here.exp()).sum(), logits, retain_graph=True)
    reverse, forward = (logprobs.exp() * (logprobs - reference)).sum(), -(reference.exp() * logprobs).sum()
    (of_reverse,), (of_forward,) = (torch.autograd.grad(each, logits, retain_graph=True) for each in (reverse, forward))
    assert torch.allclose(gradient, of_forward if estimate == "k3" else of_reverse, atol=1e-6)
    assert not torch.allclose(of_forward, of_reverse, atol=1e-2)
    (plain,) = torch.autograd.grad(((logprobs - reference) * here[:, 0].exp()).sum(), logits)
    assert torch.allclose(plain, torch.zeros_like(plain), atol=1e-12), (
        "the gradient of k1 itself vanishes, so it cannot be a loss"
    )
    stated = choices.kl.semantics()["gradient"]
    assert stated == GRADIENT_BY_ESTIMATE[estimate] and ("forward" in stated) == (estimate == "k3")


def test_k1_is_weighted_by_the_ratio_of_the_loss() -> None:
    """For tokens sampled by older weights, k1's score function has the importance weight of the policy loss."""
    batch = batch_of()
    logprobs = (batch.generator_logprobs - 0.5).requires_grad_(True)
    batch = replace(batch, reference_logprobs=batch.generator_logprobs + 1.0)
    (gradient,) = torch.autograd.grad(
        kl_term(row(FixedKL(2.0, estimate="k1"), CISPO(5.0), SumAggregation()), Scored(batch, logprobs, logprobs)),
        logprobs,
    )
    # The distance d is -1.5, so the advantage -d is 1.5. The ratio exp(-0.5) is its weight.
    expected = -2.0 * 1.5 * torch.exp(torch.tensor(-0.5)) * batch.loss_mask
    assert torch.allclose(gradient, expected, atol=1e-5)


@pytest.mark.parametrize("estimate", GRADIENT_BY_ESTIMATE)
def test_every_estimate_can_be_deducted_from_rewards(estimate: str) -> None:
    student, teacher = Policy(new_model(32, 1, seed=1), FP32), Policy(new_model(64, 1, seed=2), FP32)
    kl = FixedKL(0.3, "reward", reference="elsewhere", estimate=estimate)
    choices = row(kl, GAE(1.0, 0.0), ValueNetwork())
    batch = run_forward_passes(batch_of(), choices, student, teacher, None, PassSize(4), Ranks())
    batch = replace(batch, values=torch.zeros_like(batch.generator_logprobs))
    credited = token_advantages(batch, choices, lambda numbers: numbers).advantages
    with torch.no_grad():
        ours, _, exact = student(batch, teacher=teacher)
        gap = ours - teacher(batch)[0]
    by_hand = {"k1": gap, "k2": gap**2 / 2, "k3": torch.exp(-gap) + gap - 1, "full": exact}[estimate]
    inside = batch.loss_mask > 0
    last = inside & (inside.flip(1).cumsum(1).flip(1) == 1)
    expected = torch.where(last, batch.rewards.unsqueeze(1), torch.zeros(())) - 0.3 * by_hand
    assert torch.allclose(credited[inside], expected[inside], atol=1e-5)


# --- runs ----------------------------------------------------------------------------------------------------


def overrides_for(teacher: str, *more: str) -> list[str]:
    return ["kl=distil", f"kl.reference={teacher}", *ALONE, *more]


@pytest.mark.parametrize("estimate", ["k1", "full"])
def test_a_run_comes_closer_to_its_teacher_and_resumes_exactly(
    estimate: str, tiny_model_path: str, teacher_path: str, tmp_path: Path
) -> None:
    """The verifier's reward is not used (reward=none), but pass rates are still recorded."""

    def run(place: str, steps: int, resume: bool = False) -> ScaleRL:
        options: dict[str, Any] = {"checkpoint_every": 3, "resume": resume}
        run_overrides = overrides_for(teacher_path, f"kl.estimate={estimate}")
        return fit(tiny_model_path, tmp_path / place, steps, overrides=run_overrides, **options)

    whole = run("whole", 6)
    run("parts", 3)
    parts = run("parts", 6, resume=True)
    records = [read_journal(tmp_path / place).deterministic() for place in ("whole", "parts")]
    train = [[metrics for kind, _, metrics in each if kind == "train"] for each in records]
    assert train[0] == train[1] and len(train[0]) == 6
    state = parts.policy.state_dict()
    assert all(torch.equal(state[name], value) for name, value in whole.policy.state_dict().items())
    assert train[0][-1]["train/kl"] < 0.9 * train[0][0]["train/kl"]
    assert {each["train/reward"] for each in train[0]} == {0.0}
    assert max(each["train/pass_rate"] for each in train[0]) > 0
    semantics = resolved_semantics(whole)
    assert semantics["teacher"]["model"] == teacher_path and semantics["reward"]["choice"] == "NoReward"
    assert semantics["teacher"]["parameters"] == sum(each.numel() for each in load_model(teacher_path).parameters())


@pytest.mark.full
def test_costs_of_a_teacher_depend_on_its_own_size(tiny_model_path: str, teacher_path: str, tmp_path: Path) -> None:
    """FLOPs, virtual time and memory use the teacher's size. The first step of each run has the same rollouts."""

    def first(*overrides: str) -> tuple[Any, dict[str, float]]:
        place = tmp_path / str(len(list(tmp_path.iterdir())))
        module = fit(tiny_model_path, place, 1, overrides=["loss=reinforce", "filter=none", *overrides])
        (record,) = read_journal(place).of_kind("train")
        return module, record.metrics

    _, plain = first()
    _, with_initial_model = first("kl=fixed")
    module, with_teacher = first("kl=distil", f"kl.reference={teacher_path}")
    _, exact = first("kl=distil", f"kl.reference={teacher_path}", "kl.estimate=full", "epochs.count=2")
    policy_flops, teacher = FlopModel.of(load_model(tiny_model_path)), FlopModel.of(load_model(teacher_path))
    train = {
        name: each["compute/flops_train"]
        for name, each in (("plain", plain), ("start", with_initial_model), ("taught", with_teacher))
    }
    # An update is three forward passes, and the initial model is as large as the policy.
    assert train["start"] == pytest.approx(train["plain"] * 4 / 3)
    ratio = (train["taught"] - train["plain"]) / (train["start"] - train["plain"])
    assert ratio == pytest.approx(teacher.per_token / policy_flops.per_token, rel=0.05) and ratio > 2
    assert module.choices.passes.relative == pytest.approx(1 + teacher.per_token / policy_flops.per_token / 3)
    assert exact["compute/flops_train"] == pytest.approx(2 * train["taught"]), "it runs in each of the two updates"
    assert with_teacher["compute/virtual_device_hours"] > with_initial_model["compute/virtual_device_hours"]
    recipe = load_recipe("scalerl_core", [*SMALL, "kl=distil", f"kl.reference={teacher_path}", "filter=none"])
    memory = predict_memory(measure(lambda: new_model(32, 2, 3), recipe), recipe)
    assert memory.device["reference"] == 4 * sum(each.numel() for each in load_model(teacher_path).parameters())


@pytest.mark.parametrize("estimate", ["k2", "full"])
def test_the_mechanism_counter_of_kl_sees_a_teacher(estimate: str, tiny_model_path: str, teacher_path: str) -> None:
    """It counts a teacher against no KL, the initial model or another coefficient, and ignores a negligible change."""
    ours = FixedKL(0.5, reference=teacher_path, estimate=estimate)
    same = [f"kl.reference={teacher_path}", f"kl.estimate={estimate}"]
    for overrides, acted in (
        (["kl=none"], 1.0),
        (["kl=fixed"], 1.0),
        (["kl=fixed", *same, "kl.coefficient=0.50000001"], 0.0),
        (["kl=fixed", *same, "kl.coefficient=0.4"], 1.0),
    ):
        module = fit(tiny_model_path, steps=1, callbacks=[ours], overrides=["filter=none", *overrides])
        assert module.mechanism.metrics() == {"mechanism/kl": acted}, overrides


def test_a_teacher_with_other_tokens_is_refused(tiny_model_path: str, teacher_path: str, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(teacher_path, other)
    content = json.loads((other / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["1"], vocabulary["2"] = vocabulary["2"], vocabulary["1"]
    (other / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(
        ConfigurationError, match=r"kl\.reference: .* another tokenizer .*2 tokens differ.*'1'"
    ) as error:
        fit(tiny_model_path, steps=1, overrides=overrides_for(str(other)))
    assert "\n" not in str(error.value)


def test_a_checkpoint_does_not_resume_with_another_teacher(
    tiny_model_path: str, teacher_path: str, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    new_model(width=64, layers=2, seed=6).save_pretrained(other)
    tokenizer().save_pretrained(other)
    fit(tiny_model_path, tmp_path / "run", 1, overrides=overrides_for(teacher_path), checkpoint_every=1)
    with pytest.raises(ConfigurationError, match=r"kl\.reference: .*other has other weights"):
        fit(tiny_model_path, tmp_path / "run", 2, overrides=overrides_for(str(other)), resume=True)


ADDRESS = "http://127.0.0.1:9"


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"estimate": "k4"}, r"kl\.estimate: 'k4' is unknown; valid: k1, k2, k3, full"),
        ({"reference": 3}, r"kl\.reference: 3 names no model"),
        ({"reference": ADDRESS}, r"kl\.served: needed with kl\.reference=http"),
        ({"reference": "folder", "served": "folder"}, r"kl\.served: 'folder', and kl\.reference is no address"),
        ({"reference": ADDRESS, "served": "m", "estimate": "full"}, r"kl\.estimate: full .* choose kl\.estimate=k1"),
        ({"reference": ADDRESS, "served": "m", "served_devices": -1}, r"kl\.served_devices: -1"),
        ({"reference": ADDRESS, "served": "m", "timeout_s": 0}, r"kl\.timeout_s: 0"),
    ],
)
def test_invalid_kl_settings_are_refused(given: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigurationError, match=match) as error:
        FixedKL(**given)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("choices", "match"),
    [
        ([FixedKL(estimate="k1"), GSPO()], r"kl\.estimate: k1 .* loss=gspo .* kl\.estimate=k2"),
        ([FixedKL(estimate="k1"), GMPO()], r"kl\.estimate: k1 .* loss=gmpo .* kl\.estimate=k2"),
        ([FixedKL(estimate="k1"), ClipCov()], r"kl\.estimate: k1 .* loss=clip_cov .* kl\.estimate=k2"),
        ([FixedKL(estimate="k1"), KLCov()], r"kl\.estimate: k1 .* loss=kl_cov .* kl\.estimate=k2"),
        ([FixedKL(where="reward", reference="m")], r"kl\.where: 'reward' needs advantages per token"),
    ],
)
def test_incompatible_choices_are_refused(choices: Sequence[DesignChoice], match: str) -> None:
    with pytest.raises(ConfigurationError, match=match):
        row(*choices)


@pytest.mark.parametrize(
    ("overrides", "match"),
    [
        (["kl=fixed"], r"reward: none makes the rewards of a group equal, and filter ZeroVariance .* filter=none"),
        (["kl=fixed", "filter=dynamic_sampling"], r"reward: none .* DynamicSampling drops such groups; filter=none"),
        (["filter=none"], r"reward: none leaves nothing to learn from; choose kl=distil"),
    ],
)
def test_no_reward_is_refused_where_nothing_would_be_learnt(
    overrides: list[str], match: str, tiny_model_path: str
) -> None:
    with pytest.raises(ConfigurationError, match=match):
        fit(tiny_model_path, steps=1, recipe="scalerl", overrides=["reward=none", *overrides])


def test_identity_depends_on_the_teachers_content_but_not_its_path(teacher_path: str, tmp_path: Path) -> None:
    def identity(*overrides: str) -> Any:
        return identity_of(OmegaConf.to_container(compose(overrides), resolve=True))["kl"]  # type: ignore[arg-type]

    moved, other = tmp_path / "moved", tmp_path / "other"
    shutil.copytree(teacher_path, moved)
    shutil.copytree(teacher_path, other)
    new_model(width=64, layers=2, seed=6).save_pretrained(other)
    identities = [identity("kl=distil", f"kl.reference={place}") for place in (teacher_path, moved, other)]
    assert identities[0] == identities[1] != identities[2] and "model.safetensors" in identities[0]["reference"]
    assert "served" not in identities[0] and "timeout_s" not in identities[0] and identities[0]["estimate"] == "k1"
    served = [
        identity("kl=distil", f"kl.reference=http://{host}:8000", f"kl.served={place}", f"kl.timeout_s={limit}")
        for host, place, limit in (("a", teacher_path, 3), ("b", moved, 4), ("a", other, 3))
    ]
    assert served[0] == served[1] != served[2] and served[0] != identities[0]
    assert identity("kl=fixed") == {"choice": "FixedKL", "coefficient": 0.05, "where": "loss", "aggregation": None}


@pytest.mark.slow
@pytest.mark.parametrize("estimate", [pytest.param("k1", marks=pytest.mark.full), "full"])
def test_two_ranks_distil_like_one(estimate: str, tiny_model_path: str, teacher_path: str, tmp_path: Path) -> None:
    check_two_ranks(tiny_model_path, tmp_path, overrides_for(teacher_path, f"kl.estimate={estimate}"), steps=2)


@pytest.mark.full
def test_a_sharded_teacher_works_except_with_full_estimates(
    tiny_model_path: str, teacher_path: str, tmp_path: Path
) -> None:
    def work(rank: int) -> str:
        module = fit_on_ranks(
            tiny_model_path, tmp_path / "run", 2, 1, overrides=overrides_for(teacher_path), strategy="fsdp2"
        )
        try:
            whole = overrides_for(teacher_path, "kl.estimate=full")
            fit_on_ranks(tiny_model_path, tmp_path / "whole", 2, 1, overrides=whole, strategy="fsdp2")
        except ConfigurationError as error:
            return f"{is_sharded(module.reference)} {error}"
        except Exception:  # the other rank was refused and left before this rank reached the check
            return f"{is_sharded(module.reference)} alone"
        return "not refused"

    results = on_ranks(2, work)
    refused = "True kl.estimate: full compares whole vocabularies, and strategy=fsdp2"
    assert all(each.startswith(refused) or each == "True alone" for each in results), results
    assert any(each.startswith(refused) for each in results), results


@pytest.mark.slow
def test_the_experiment_trains(teacher_path: str, tmp_path: Path) -> None:
    rows = [
        [entry.replace("outputs/teacher", teacher_path) for entry in overrides if not entry.startswith("budget")]
        for overrides in members("distil_or_rl")
    ]
    specs = plan_members([[*overrides, "scale=tiny"] for overrides in rows])
    assert len({spec.run for spec in specs}) == len(specs) == 6
    train(rows[-1], tmp_path)
