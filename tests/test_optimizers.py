"""Tests of optimizers: steps against reference implementations, and resuming, ranks, shards and settings of runs."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from lightning_scalerl import AdamW, AdamW8bit, AdamWBF16, ConfigurationError, Muon
from lightning_scalerl.compat.imports import show_torchao
from lightning_scalerl.composition import build, compose, names_in
from lightning_scalerl.distributed.sharded import gather_state, shard, shard_like, whole_tensor
from lightning_scalerl.measure.memory import MeasuredModel, predict_memory
from lightning_scalerl.measure.semantics import resolved_choices
from lightning_scalerl.model.load import load_model
from lightning_scalerl.translate.command import translate
from lightning_scalerl.update.muon import hidden_matrices, orthogonalize
from sweeps.run.journal import read_journal
from tests.distributed.test_ranks import fit as fit_on
from tests.distributed.test_ranks import on_ranks, one_thread  # noqa: F401
from tests.distributed.test_sharded import saved_weights, weights
from tests.examples import every
from tests.helpers import fit

SETTINGS: dict[str, Any] = {
    "lr": 0.01,
    "beta1": 0.9,
    "beta2": 0.95,
    "eps": 1e-6,
    "weight_decay": 0.1,
    "clip_norm": None,
}
OPTIMIZERS = names_in("optimizer")
SLOW = pytest.mark.slow
# AdamW8bit is refused with shards: its 8-bit states depend on how a weight is split.
SHARDED = [name for name in OPTIMIZERS if name != "adamw_8bit"]


def bf16(value: float) -> float:
    return float(torch.tensor(value).bfloat16())


def trained(optimizer: AdamW, weight: Tensor, gradients: list[Tensor], hidden: bool = False) -> Tensor:
    """Return the weight after one step per gradient."""
    parameter = nn.Parameter(weight.clone())
    built = optimizer.build([parameter], {id(parameter)} if hidden else set())
    for gradient in gradients:
        parameter.grad = gradient.clone()
        built.step()
    return parameter.detach()


def gradients_like(weight: Tensor, count: int = 3) -> list[Tensor]:
    source = torch.Generator().manual_seed(1)
    return [torch.randn(weight.shape, generator=source) for _ in range(count)]


def adamw_by_hand(
    weight: float, gradients: list[float], rounded: Callable[[float], float] = float, kahan: bool = False
) -> float:
    """Reference AdamW on one number; `keep` rounds a value as storing it does."""
    lr, beta1, beta2, eps, decay, _ = SETTINGS.values()
    weight, mean, square, lost = rounded(weight), 0.0, 0.0, 0.0
    for step, gradient in enumerate(gradients, start=1):
        mean = beta1 * mean + (1 - beta1) * gradient
        square = beta2 * square + (1 - beta2) * gradient**2
        size = math.sqrt(square / (1 - beta2**step)) + eps
        update = -lr * (decay * weight + mean / (1 - beta1**step) / size)
        mean, square = rounded(mean), rounded(square)
        if kahan:
            lost = rounded(lost + update)
            moved = rounded(weight + lost)
            weight, lost = moved, rounded(lost - (moved - weight))
        else:
            weight = rounded(weight + update)
    return weight


@pytest.mark.parametrize("kind", ["fp32", "bf16", "bf16 with Kahan summation"])
def test_adamw_matches_a_reference_in_each_storage(kind: str) -> None:
    rounded, kahan = (float if kind == "fp32" else bf16), kind.endswith("summation")
    weight = torch.linspace(-2, 2, 40)
    gradients = gradients_like(weight, 20)
    optimizer = AdamW(**SETTINGS) if kind == "fp32" else AdamWBF16(**SETTINGS, kahan=kahan)
    start = weight if kind == "fp32" else weight.bfloat16().float()
    ours = trained(optimizer, start, gradients)
    for place in range(len(weight)):
        column = [float(gradient[place]) for gradient in gradients]
        expected = adamw_by_hand(float(start[place]), column, rounded, kahan)
        # BF16 values agree exactly, unless FP32 and FP64 round to two neighbouring values.
        assert float(ours[place]) == pytest.approx(expected, rel=1e-5, abs=1e-6), place


def test_a_small_update_is_lost_in_bf16_and_kept_by_kahan_summation() -> None:
    """The BF16 number after 1 is 1 + 1/128. Updates of 1e-4 are rounded away unless Kahan summation adds them up."""
    small: dict[str, Any] = {**SETTINGS, "lr": 1e-4, "weight_decay": 0.0}
    weight, gradients = torch.ones(4), [torch.ones(4)] * 400
    exact = trained(AdamW(**small), weight, gradients)
    assert torch.allclose(exact, torch.full((4,), 0.96), atol=1e-3)
    assert torch.equal(trained(AdamWBF16(**small), weight, gradients), weight)
    quantized = trained(AdamWBF16(**small, kahan=True), weight, gradients)
    assert float((quantized - exact).abs().max()) < 1 / 256


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("betas", [(0, 0.95), (0.9, 0), (0, 0)], ids=str)
def test_a_whole_number_is_a_valid_beta(name: str, betas: tuple[float, float]) -> None:
    weight = torch.linspace(-2, 2, 4096).reshape(64, 64)
    ints, floats = (
        build({"optimizer": {**compose([f"optimizer={name}"]).optimizer, "beta1": beta1, "beta2": beta2}}, "optimizer")
        for beta1, beta2 in (betas, map(float, betas))
    )
    assert torch.equal(trained(ints, weight, gradients_like(weight)), trained(floats, weight, gradients_like(weight)))


def test_bf16_states_stay_bf16_after_a_checkpoint() -> None:
    parameter = nn.Parameter(torch.ones(4))
    parameter.grad = torch.ones(4)
    first, second = (AdamWBF16(**SETTINGS, kahan=True).build([parameter]) for _ in range(2))
    first.step()
    second.load_state_dict(first.state_dict())
    (state,) = second.state.values()
    assert {name: value.dtype for name, value in state.items() if name != "step"} == dict.fromkeys(
        ("exp_avg", "exp_avg_sq", "compensation"), torch.bfloat16
    )


@pytest.mark.parametrize("grouped", [False, True])
def test_8_bit_states_keep_the_exact_learning_rate(grouped: bool) -> None:
    """torchao's step needs an FP32 tensor, in which 1e-4 is 1.00000000475e-4; the recorded rate must not be that."""
    parameter = nn.Parameter(torch.ones(4))
    parameters: Any = [{"params": [parameter], "lr": 1e-4}] if grouped else [parameter]
    optimizer = AdamW8bit(**{**SETTINGS, "lr": 0.5 if grouped else 1e-4}).build(parameters)
    assert optimizer.param_groups[0]["lr"] == 1e-4
    parameter.grad = torch.ones(4)
    optimizer.step()
    assert optimizer.param_groups[0]["lr"] == 1e-4 and type(optimizer.param_groups[0]["lr"]) is float


def test_a_checkpoint_of_8_bit_states_holds_plain_tensors() -> None:
    """Then a process without torchao can read the checkpoint. Loading it restores the same states."""
    parameters = [nn.Parameter(torch.linspace(-1, 1, size)) for size in (4096, 10)]
    first, second = (AdamW8bit(**SETTINGS).build(parameters) for _ in range(2))
    for parameter in parameters:
        parameter.grad = torch.linspace(0, 1, len(parameter)) ** 3
    first.step()
    saved = first.state_dict()
    assert {name: type(value) for name, value in saved["state"][0].items()} == dict.fromkeys(
        ("step", "exp_avg.codes", "exp_avg.scale", "exp_avg_sq.codes", "exp_avg_sq.scale"), Tensor
    )
    assert saved["state"][0]["exp_avg.codes"].dtype == torch.uint8 and "exp_avg" in saved["state"][1]
    second.load_state_dict(saved)
    for parameter in parameters:
        for name, value in first.state[parameter].items():
            other = second.state[parameter][name]
            assert type(other) is type(value)
            assert torch.equal(other.dequantize(), value.dequantize()) if name != "step" else other == value


def test_adamw_in_8_bits_matches_a_reference() -> None:
    """Moments are rounded to 256 values times the largest of their block; small tensors keep FP32 moments."""
    show_torchao()  # tests/conftest.py hides it
    from torchao.optim.quant_utils import create_dynamic_map

    weight = torch.linspace(-2, 2, 4096)
    gradients = gradients_like(weight)
    ours = trained(AdamW8bit(**SETTINGS), weight, gradients)
    lr, beta1, beta2, eps, decay, _ = SETTINGS.values()

    def quantized(values: Tensor, signed: bool) -> Tensor:
        blocks = values.view(-1, 256)
        largest = blocks.abs().amax(-1, keepdim=True)
        table = torch.tensor(create_dynamic_map(signed=signed))
        nearest = ((blocks / largest).unsqueeze(-1) - table).abs().argmin(-1)
        return (table[nearest] * largest).view(-1)

    expected, mean, square = weight.clone(), torch.zeros(4096), torch.zeros(4096)
    for step, gradient in enumerate(gradients, start=1):
        mean = beta1 * mean + (1 - beta1) * gradient
        square = beta2 * square + (1 - beta2) * gradient**2
        size = (square / (1 - beta2**step)).sqrt() + eps
        expected -= lr * decay * expected + lr * mean / (1 - beta1**step) / size
        mean, square = quantized(mean, signed=True), quantized(square, signed=False)
    # A few values lie midway between two entries of the table, and rounding decides.
    close = (ours - expected).abs() < 1e-6
    assert close.float().mean() > 0.99
    assert torch.equal(trained(AdamW8bit(**SETTINGS), weight[:100], []), weight[:100])
    exact = trained(AdamW(**SETTINGS), weight[:100], [gradient[:100] for gradient in gradients])
    assert torch.allclose(trained(AdamW8bit(**SETTINGS), weight[:100], [g[:100] for g in gradients]), exact, atol=1e-6)
    assert not torch.equal(ours[:100], exact)


@pytest.mark.parametrize("shape", [(24, 8), (8, 24), (16, 16)])
@pytest.mark.parametrize("adjust", ["match_rms_adamw", "original"])
def test_muon_matches_torch_on_matrices(shape: tuple[int, int], adjust: str) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    optimizer = Muon(**SETTINGS, momentum=0.9, ns_steps=4, adjust_lr_fn=adjust)
    ours = trained(optimizer, weight, gradients_like(weight), hidden=True)
    parameter = nn.Parameter(weight.clone())
    theirs = torch.optim.Muon([parameter], lr=0.01, weight_decay=0.1, momentum=0.9, ns_steps=4, adjust_lr_fn=adjust)
    for gradient in gradients_like(weight):
        parameter.grad = gradient
        theirs.step()
    assert torch.equal(ours, parameter)
    assert not torch.equal(ours, trained(AdamW(**SETTINGS), weight, gradients_like(weight)))


def test_muon_is_adamw_with_its_own_rate_on_other_parameters() -> None:
    weight = torch.linspace(-1, 1, 6).view(2, 3)
    ours = trained(Muon(**SETTINGS, adamw_ratio=0.5), weight, gradients_like(weight))
    expected = trained(AdamW(**{**SETTINGS, "lr": 0.005}), weight, gradients_like(weight))
    assert torch.equal(ours, expected)


def test_orthogonalize_matches_a_reference() -> None:
    """On a diagonal matrix the iteration acts on each singular value separately, in BF16."""
    values = torch.tensor([3.0, 2.0, 1.0])
    by_value = values / values.norm()
    for _ in range(5):
        by_value = 3.4445 * by_value - 4.7750 * by_value**3 + 2.0315 * by_value**5
    ours = orthogonalize(torch.diag(values), 5).float()
    assert torch.allclose(ours.diagonal(), by_value, atol=0.05)
    assert torch.equal(ours, torch.diag(ours.diagonal())) and float(ours.diagonal().min()) > 0.6


def test_hidden_matrices_are_the_linear_layers_of_the_blocks(tiny_model: Any) -> None:
    names = {id(weight): name for name, weight in tiny_model.named_parameters()}
    hidden_names = sorted(names[id(weight)] for weight in hidden_matrices(tiny_model))
    layers = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
    layers += ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    assert hidden_names == sorted(f"model.layers.{block}.{layer}.weight" for block in range(2) for layer in layers)


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=() if each in ("muon", "adamw_bf16_kahan") else SLOW) for each in OPTIMIZERS]
)
def test_a_run_resumes_bit_for_bit(name: str, tiny_model_path: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"overrides": [f"optimizer={name}", "epochs.count=2"]}
    whole = fit(tiny_model_path, tmp_path / "whole", 4, **options)
    fit(tiny_model_path, tmp_path / "parts", 2, **options)
    parts = fit(tiny_model_path, tmp_path / "parts", 4, resume=True, **options)
    assert read_journal(tmp_path / "whole").deterministic() == read_journal(tmp_path / "parts").deterministic()
    for key, value in whole.policy.state_dict().items():
        assert torch.equal(value, parts.policy.state_dict()[key]), key
    stored = list(whole.policy.parameters())
    if name.startswith("adamw_bf16"):
        assert all(torch.equal(each, each.bfloat16().float()) for each in stored)
    else:
        assert not all(torch.equal(each, each.bfloat16().float()) for each in stored)


def test_the_reference_of_rounded_weights_is_rounded(tiny_model_path: str) -> None:
    """Otherwise the policy would start at a distance from it. A resumed run must round the reloaded reference too."""
    module = fit(tiny_model_path, steps=1, overrides=["optimizer=adamw_bf16", "kl=fixed"])
    assert module.reference is not None
    reloaded = module.models.load().state_dict()
    for name, value in module.reference.model.state_dict().items():
        assert torch.equal(value, value.bfloat16().float()) and torch.equal(value, reloaded[name]), name


@pytest.mark.slow
@pytest.mark.parametrize("name", every(4, reversed(OPTIMIZERS[1:]), pytest.mark.full))
def test_two_ranks_train_like_one(name: str, tiny_model_path: str, tmp_path: Path) -> None:
    rank_options: dict[str, Any] = {"overrides": [f"optimizer={name}"], "steps": 3}
    one = fit_on(tiny_model_path, tmp_path / "one", 1, **rank_options)
    digests = on_ranks(2, lambda rank: weights(fit_on(tiny_model_path, tmp_path / "two", 2, **rank_options)))
    assert digests[0] == digests[1] and len(digests[0]) == 64, digests
    check_close(one, tmp_path, tiny_model_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", every(3, reversed(SHARDED[1:]), pytest.mark.full))
def test_two_shards_train_like_one_process_and_resume_in_one(name: str, tiny_model_path: str, tmp_path: Path) -> None:
    """Two shards train like one process, and their checkpoint resumes in one process. With reference and critic."""
    shard_options: dict[str, Any] = {
        "overrides": [f"optimizer={name}", "kl=fixed", "advantage=gae", "critic=value_network", "filter=none"]
    }
    one = fit_on(tiny_model_path, tmp_path / "one", 1, steps=4, **shard_options)
    run = tmp_path / "two"
    shard_digests = on_ranks(
        2, lambda rank: weights(fit_on(tiny_model_path, run, 2, 2, strategy="fsdp2", **shard_options))
    )
    assert shard_digests[0] == shard_digests[1] and len(shard_digests[0]) == 64, shard_digests
    fit_on(tiny_model_path, run, 1, 4, resume=True, **shard_options)
    check_close(one, tmp_path, tiny_model_path)


def check_close(one: Any, folder: Path, model_path: str) -> None:
    """Check that two runs made the same steps: their weights differ much less than they moved.

    The order of a sum changes the last bit of a gradient. Storing in BF16 can turn that into a difference of 1/256.
    """
    first, second = read_journal(folder / "one"), read_journal(folder / "two")
    assert first.status == second.status == "finished"
    for kind in ("train", "eval"):
        assert [record.step for record in first.of_kind(kind)] == [record.step for record in second.of_kind(kind)]
    initial, trained_alone, trained_on_two = (
        load_model(model_path).state_dict(),
        one.policy.model.state_dict(),
        saved_weights(folder / "two"),
    )
    difference = torch.stack(
        [(trained_on_two[f"policy.model.{name}"] - trained_alone[name]).norm() for name in trained_alone]
    ).norm()
    moved = torch.stack([(initial[name] - trained_alone[name]).norm() for name in trained_alone]).norm()
    assert float(difference) < 0.05 * float(moved)


@pytest.mark.parametrize("name", SHARDED)
def test_a_step_on_two_shards_equals_an_unsharded_step(name: str, tiny_model_path: str) -> None:
    """One weight has an odd number of rows, so the two ranks hold parts of different size."""
    optimizer = build(compose([f"optimizer={name}", "optimizer.lr=0.01"]), "optimizer")

    def step(rank: int | None) -> str:
        model: Any = load_model(tiny_model_path)
        model.odd = nn.Parameter(torch.linspace(-1, 1, 35).view(7, 5))
        if rank is not None:
            torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
            shard(model, init_device_mesh("cpu", (2,)))
        hidden = {id(weight) for weight in hidden_matrices(model)}
        built = optimizer.build(list(model.parameters()), hidden)
        for seed in range(3):
            source = torch.Generator().manual_seed(seed)
            for parameter in model.parameters():
                parameter.grad = shard_like(torch.randn(parameter.shape, generator=source), parameter)
            built.step()
        digest = hashlib.sha256()
        for tensor in gather_state(model.state_dict(), keep=True).values():
            digest.update(tensor.numpy().tobytes())
        return digest.hexdigest()

    def on_rank(rank: int) -> str:
        try:
            return step(rank)
        finally:
            torch.distributed.destroy_process_group()

    assert on_ranks(2, on_rank) == [step(None)] * 2


def test_muon_on_tensor_parallel_ranks_equals_muon_on_the_whole() -> None:
    """The matrix is split by rows and by columns."""
    weight = torch.randn(6, 10, generator=torch.Generator().manual_seed(0))
    expected = trained(Muon(**SETTINGS), weight, gradients_like(weight), hidden=True)

    def on_rank(rank: int) -> str:
        torch.distributed.init_process_group("gloo", rank=rank, world_size=4)
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data_parallel", "tensor_parallel"))
        parts = [distribute_tensor(each, mesh, [Shard(0), Shard(1)]) for each in (weight, *gradients_like(weight))]
        try:
            ours = trained(Muon(**SETTINGS), parts[0], parts[1:], hidden=True)
            return str(torch.equal(whole_tensor(ours), expected))
        finally:
            torch.distributed.destroy_process_group()

    assert on_ranks(4, on_rank) == ["True"] * 4


def test_semantics_describe_the_optimizer() -> None:
    from lightning_scalerl.composition import load_recipe

    described = {}
    for name in OPTIMIZERS:
        recipe = load_recipe("scalerl", [f"optimizer={name}"])
        described[name] = resolved_choices(recipe, recipe.choices)["optimizer"]
    assert {name: (each["name"], each["storage"], each["eps"]) for name, each in described.items()} == {
        "adamw": ("AdamW", "fp32", 1e-15),
        "adamw_8bit": ("AdamW8bit", "fp32", 1e-15),
        "adamw_bf16": ("AdamWBF16", "bf16", 1e-15),
        "adamw_bf16_kahan": ("AdamWBF16", "bf16", 1e-15),
        "muon": ("Muon", "fp32", 1e-15),
    }
    assert described["adamw_bf16_kahan"]["states"] == dict.fromkeys(("exp_avg", "exp_avg_sq", "compensation"), "bf16")
    assert described["muon"]["states"]["momentum_buffer"] == "fp32"


def test_memory_counts_the_bytes_of_the_states() -> None:
    from lightning_scalerl.composition import load_recipe

    measured = MeasuredModel(1000, 1000, 4000, 4000, (), 0, 0, 0, 0, 0, 4000, 1)
    states = {
        name: predict_memory(measured, load_recipe("scalerl", [f"optimizer={name}"])).device["Adam's moments"]
        for name in OPTIMIZERS
    }
    assert states == {"adamw": 8000, "adamw_8bit": 2000, "adamw_bf16": 4000, "adamw_bf16_kahan": 6000, "muon": 8000}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["optimizer=muon", "optimizer.momentum=1"], r"optimizer.momentum: 1 must be in \[0, 1\)"),
        (["optimizer=muon", "optimizer.ns_steps=100"], "optimizer.ns_steps: 100 must be below 100"),
        (["optimizer=muon", "optimizer.adjust_lr_fn=rms"], "adjust_lr_fn: 'rms' is unknown; valid: match_rms_adamw"),
        (["optimizer=muon", "optimizer.adamw_ratio=0"], "optimizer.adamw_ratio: 0"),
        (["optimizer=adamw_bf16", "optimizer.kahan=1"], "optimizer.kahan: 1"),
        *(
            ([f"optimizer={name}", f"optimizer.weight_decay={value}"], "optimizer.weight_decay: .* must be a number")
            for name in ("adamw_bf16", "muon")
            for value in ("-0.1", "nan", "inf")
        ),
    ],
)
def test_a_value_out_of_range_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        build(compose(overrides), "optimizer")


@pytest.mark.parametrize(
    ("to", "name", "said"),
    [
        ("trl", "adamw", None),
        ("trl", "adamw_8bit", None),
        ("trl", "adamw_bf16", "AdamWBF16: with a model in BF16, TRL's AdamW also rounds within a step"),
        (
            "verl",
            "adamw_8bit",
            "AdamW8bit: verl's 8-bit moments were not compared with this project's (actor.optim.optimizer_impl)",
        ),
        (
            "prime-rl",
            "muon",
            "Muon: the weights that prime-rl trains by Muon, and their rates, were not compared with this project's",
        ),
        ("skyrl", "muon", "(no setting); optimizer=adamw can be translated"),
    ],
)
def test_translation_lists_what_is_stored_and_refuses_other_optimizers(to: str, name: str, said: str | None) -> None:
    translation = translate([f"optimizer={name}"], to, [])
    missing = "".join(f"{entry.value}: {entry.why}" for entry in translation.missing if entry.key == "optimizer")
    assert missing == "" if said is None else said in missing
    eps = 1e-8 if to in ("skyrl", "prime-rl") else 1e-15
    states = "8 bits, blocks of 256" if (to, name) == ("trl", "adamw_8bit") else "fp32"
    assert translation.optimizer == {"storage": "fp32", "states": states, "eps": eps}
    assert (
        f"# optimizer under these settings: weights stored in fp32, states in {states}, eps {eps:g}\n"
        in translation.text()
    )
    if to == "trl":
        assert translation.settings["optim"] == {"adamw_8bit": "adamw_torch_8bit"}.get(name, "adamw_torch")


def test_without_torchao_8_bit_states_are_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_scalerl.compat.imports._TORCHAO", "a_package_that_is_not_there")
    with pytest.raises(ConfigurationError, match=r"AdamW8bit needs torchao; install lightning-scalerl\[8bit\]"):
        AdamW8bit(**SETTINGS)


def test_8_bit_states_are_not_sharded(tiny_model_path: str, tmp_path: Path) -> None:
    sharded_options: dict[str, Any] = {"overrides": ["optimizer=adamw_8bit"], "strategy": "fsdp2"}
    errors = on_ranks(2, lambda rank: weights(fit_on(tiny_model_path, tmp_path, 2, **sharded_options)))
    assert all(
        each.startswith("ConfigurationError: optimizer: AdamW8bit scales its states in blocks") for each in errors
    )
