"""Tensor parallelism: split layers train as whole ones do, and their checkpoints fit any strategy."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, _redistribute
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_scalerl import ConfigurationError, RolloutDataModule
from lightning_scalerl.axes.precision import Precision
from lightning_scalerl.distributed.sharded import ShardedStrategy, local_shard, shard, shard_like, whole_tensor
from lightning_scalerl.distributed.start import trainer_settings
from lightning_scalerl.member.identify import plan_members
from lightning_scalerl.model import head
from lightning_scalerl.model.head import check_head
from lightning_scalerl.model.load import load_model
from lightning_scalerl.model.policy import Policy
from lightning_scalerl.model.tensor_parallel import check_tensor_parallel, parallelize
from lightning_scalerl.model.value import ValueModel
from lightning_scalerl.session import trials
from lightning_scalerl.task.arithmetic_base import tokenizer
from sweeps.run.journal import read_journal
from tests.axes.test_contract import batch_of
from tests.distributed.test_ranks import check_same_curve, fit, on_ranks, one_thread  # noqa: F401
from tests.distributed.test_sharded import EVERYTHING, callbacks, check_same_weights, weights
from tests.distributed.test_streamed import check_same_either_way
from tests.distributed.test_streamed import fit as streamed_fit
from tests.examples import every
from tests.families import FAMILIES, save
from tests.helpers import CountingTask, quiet

# Families with a supported plan. Gemma2 caps its logits, Granite scales them, OLMo2 has an odd vocabulary size.
SPLIT = ("Gemma2", "Granite", "Qwen3", "Llama", "OLMo2", "Qwen2", "Phi3", "Mistral")


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random Llama for the arithmetic task, with four attention heads and two key-value heads."""
    torch.manual_seed(3)
    words = tokenizer()
    config = LlamaConfig(
        vocab_size=len(words), hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.1, bos_token_id=None,
        eos_token_id=words.eos_token_id, pad_token_id=words.pad_token_id,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("models") / "heads"
    LlamaForCausalLM(config).save_pretrained(path)
    words.save_pretrained(path)
    return str(path)


SPLIT_IN_TWO = ("strategy=fsdp2", "strategy.tensor_parallel=2")


def small(**given: Any) -> LlamaConfig:
    sizes = {"vocab_size": 16, "hidden_size": 16, "intermediate_size": 16}
    return LlamaConfig(**{**sizes, "num_hidden_layers": 1, "num_attention_heads": 2, **given})


def split(partners: int = 2, **given: Any) -> ShardedStrategy:
    return ShardedStrategy(tensor_parallel=partners, **given)


# --- models without a run -----------------------------------------------------------------------------------------


def on_mesh(tmp_path: Path, others: int, partners: int, work: Callable[[DeviceMesh], None]) -> None:
    """Run `work` on every rank of a mesh of `others` x `partners`. An error on any rank fails the test."""

    def on_one(rank: int) -> str:
        dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=rank, world_size=others * partners)
        names = ("data_parallel", "tensor_parallel")
        work(init_device_mesh("cpu", (others, partners), mesh_dim_names=names))
        return ""

    assert on_ranks(others * partners, on_one) == [""] * (others * partners)


def outputs_after_passes(root: nn.Module, entropy_gradient: bool) -> tuple[Tensor, ...]:
    """Return the outputs of a policy or critic for some rows, after two forward and backward passes."""
    for _ in range(2):  # two passes, so that gradients accumulate
        if isinstance(root, ValueModel):
            outputs: tuple[Tensor, ...] = (root(batch_of(4)),)
        else:
            outputs = root(batch_of(4), entropy_gradient=entropy_gradient)
        loss = sum(value.exp().sum() for value in outputs if value.requires_grad)
        assert isinstance(loss, Tensor)
        loss.backward()  # type: ignore[no-untyped-call]
    return tuple(value.detach() for value in outputs)


def check_alike(root: nn.Module, plain: nn.Module, mesh: DeviceMesh, entropy_gradient: bool = False) -> None:
    """Split and shard `root`, and compare values, gradients and their norm with `plain`, the same model whole."""
    parallelize(root, mesh["tensor_parallel"])
    shard(root, mesh["data_parallel"])
    with torch.no_grad():
        for (name, split), value in zip(root.state_dict().items(), plain.state_dict().values(), strict=True):
            assert torch.equal(whole_tensor(split), value), name
    for split, value in zip(
        outputs_after_passes(root, entropy_gradient), outputs_after_passes(plain, entropy_gradient), strict=True
    ):
        assert split.allclose(value, rtol=1e-6, atol=4e-6)
    others = mesh.size(0)  # all data-parallel ranks compute the same rows, and FSDP sums their gradients
    whole_parameters = dict(plain.named_parameters())
    for name, parameter in root.named_parameters():
        assert (parameter.grad is None) == (whole_parameters[name].grad is None), name
        if parameter.grad is not None:
            expected = whole_parameters[name].grad * others  # type: ignore[operator]
            gap = (whole_tensor(parameter.grad) - expected).abs().max()
            assert gap <= 5e-6 * expected.abs().max(), f"{name}: {gap}"
    norm, expected = (nn.utils.clip_grad_norm_(model.parameters(), 1.0) for model in (root, plain))
    assert float(whole_tensor(norm)) == pytest.approx(float(expected) * others, rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("family", every(4, SPLIT, pytest.mark.full))
def test_families_that_have_a_plan_compute_the_same(family: str, tmp_path: Path) -> None:
    """Log-probabilities, entropies, values and all gradients, also with tied weights and capped logits."""
    path = str(save(FAMILIES[family], tmp_path / "model"))

    def work(mesh: DeviceMesh) -> None:
        model, plain = load_model(path), load_model(path)
        check_tensor_parallel(model, 2)
        critics = [ValueModel(either, Precision("fp32")) for either in (model, plain)]
        for critic in critics:
            torch.manual_seed(0)
            nn.init.normal_(critic.head.weight, std=0.1)
        check_alike(*(Policy(either, Precision("fp32"), 0.7) for either in (model, plain)), mesh, True)
        tied = plain.get_input_embeddings().weight is plain.get_output_embeddings().weight  # type: ignore[operator]
        assert (model.get_input_embeddings().weight is model.get_output_embeddings().weight) == tied  # type: ignore[operator]
        check_alike(*critics, mesh)

    on_mesh(tmp_path, 1, 2, work)


@pytest.mark.full
@pytest.mark.parametrize("family", ["Qwen3", "Gemma2"])
def test_two_by_two_compute_the_same(family: str, tmp_path: Path) -> None:
    path = str(save(FAMILIES[family], tmp_path / "model"))

    def work(mesh: DeviceMesh) -> None:
        check_alike(*(Policy(load_model(path), Precision("fp32")) for _ in range(2)), mesh)

    on_mesh(tmp_path, 2, 2, work)


@pytest.mark.parametrize("vocabulary", [24, 25], ids=["split", "odd, so whole"])
def test_a_head_split_over_the_vocabulary_computes_the_same(vocabulary: int, tmp_path: Path) -> None:
    """No rank has all logits. Values and gradients match the whole head, with bias, cap, temperature and chunks."""

    def work(mesh: DeviceMesh) -> None:
        torch.manual_seed(0)
        config = small(vocab_size=vocabulary, initializer_range=0.5)
        config.logit_scale, config.final_logit_softcapping = 2.0, 3.0
        model = LlamaForCausalLM(config)
        model.lm_head = nn.Linear(16, vocabulary)  # with bias
        model.model.norm.requires_grad_(False)
        plain = copy.deepcopy(model)
        parallelize(model, mesh["tensor_parallel"])
        assert [each.requires_grad for each in model.parameters()] == [
            each.requires_grad for each in plain.parameters()
        ]
        hidden = torch.randn(7, 16)
        wanted = torch.tensor([0, 1, 11, 12, 13, vocabulary - 2, vocabulary - 1])
        widths: set[int] = set()
        logits = head.head_logits

        def counted_logits(*given: Any) -> Tensor:
            values = logits(*given)
            widths.add(values.shape[-1])
            return values

        for entropy_gradient in (False, True):
            results = []
            for each in (model, plain):
                states = hidden.clone().requires_grad_()
                each.zero_grad()
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(head, "head_logits", counted_logits if each is model else logits)
                    patch.setattr("lightning_scalerl.model.policy.MAX_LOGITS", (3 if each is model else 7) * vocabulary)
                    policy = Policy(each, Precision("fp32"), 0.7)
                    logprobs, entropies = policy._score(states, wanted, policy.precision, entropy_gradient)
                assert entropies.requires_grad == entropy_gradient
                (logprobs * torch.arange(7)).sum().add((entropies**2).sum() if entropy_gradient else 0.0).backward()
                gradients = [states.grad, each.lm_head.weight.grad, each.lm_head.bias.grad]
                results.append([logprobs, entropies, *(whole_tensor(each) for each in gradients)])  # type: ignore[arg-type]
            for own, expected in zip(*results, strict=True):
                assert own.shape == expected.shape
                assert (own - expected).abs().max() <= 1e-6 * expected.abs().max().clamp(min=1.0)
            assert results[1][3].abs().max() > 0.1
        assert widths == ({12} if vocabulary == 24 else set())  # a whole head in chunks does not call `head_logits`

    on_mesh(tmp_path, 1, 2, work)


@pytest.mark.slow
def test_uneven_weights_are_gathered_and_cut_again(tmp_path: Path) -> None:
    """On a mesh of two dimensions, weights can be gathered, cut like another tensor, and put back in place."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 3)

    def work(mesh: DeviceMesh) -> None:
        torch.manual_seed(0)
        plain = Model()
        model = parallelize_module(
            copy.deepcopy(plain), mesh["tensor_parallel"], {"up": ColwiseParallel(), "down": RowwiseParallel()}
        )
        shard(model, mesh["data_parallel"])
        whole = plain.state_dict()
        for name, split in model.state_dict().items():
            assert isinstance(split, DTensor) and split.device_mesh.ndim == 2
            assert torch.equal(whole_tensor(split), whole[name]), name
            rebuilt = shard_like(whole[name], split)
            assert rebuilt.placements == split.placements and torch.equal(rebuilt.to_local(), split.to_local()), name
            part, place = local_shard(split)
            assert place is not None and torch.equal(whole[name][place], part), name

    on_mesh(tmp_path, 2, 2, work)


# --- refused models and settings ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "why"),
    [
        ("GPT2", "GPT2LMHeadModel has no plan of how its layers are split"),
        ("Gemma3", "does not divide the model's num_key_value_heads=1"),
        ("Qwen3-MoE", r"splits layers in ways not supported here \(moe_tp_experts, packed_colwise\)"),
        ("Cohere", "splits layers beside model.layers.0.self_attn.q_norm, of which it says nothing"),
    ],
)
def test_models_that_cannot_be_split_are_refused(family: str, why: str, tmp_path: Path) -> None:
    model = load_model(str(save(FAMILIES[family], tmp_path / "model")))
    with pytest.raises(ConfigurationError, match=f"^strategy.tensor_parallel: 2.*{why}.*; give .*1$"):
        check_tensor_parallel(model, 2)


def test_sizes_that_are_not_divisible_are_refused(model_path: str) -> None:
    with pytest.raises(ConfigurationError, match=r"^strategy.tensor_parallel: 4 .*num_key_value_heads=2; give"):
        check_tensor_parallel(load_model(model_path), 4)
    odd = LlamaForCausalLM(small(intermediate_size=45))
    with pytest.raises(ConfigurationError, match=r"layers.0.mlp.gate_proj has 45 output features"):
        check_tensor_parallel(odd, 2)


@pytest.mark.slow
def test_settings_that_cannot_be_combined_are_refused(
    model_path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bad numbers, indivisible numbers of ranks, dropout and an adapter give a one-line error before the first step."""
    for bad_settings in (0, True, "2"):
        with pytest.raises(
            ConfigurationError, match=r"^strategy.tensor_parallel: .* must be a whole number, 1 or more"
        ):
            ShardedStrategy(tensor_parallel=bad_settings)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=r"^strategy.tensor_parallel: 2 does not divide the 1 device\(s\)"):
        trainer_settings("fsdp2", checkpoint="shards", tensor_parallel=2)
    assert trainer_settings("fsdp2", tensor_parallel=1)
    with pytest.raises(ConfigurationError, match=r"^strategy.tensor_parallel: 0 must be a whole number, 1 or more"):
        plan_members([["recipe=scalerl", "strategy=fsdp2", "strategy.tensor_parallel=0"]])
    (plain,), (split_member,) = (plan_members([["recipe=scalerl", *more]]) for more in ([], [*SPLIT_IN_TWO]))
    assert plain.run == split_member.run
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    for name, value in {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4", "RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    assert trainer_settings("fsdp2", tensor_parallel=2)["strategy"].tensor_parallel == 2
    monkeypatch.undo()
    refused = {
        "does not divide the 2 device(s) of the run": {"strategy": lambda: split(3)},
        "the model has an adapter": {"strategy": split, "overrides": ["adapter=lora"]},
        "optimizer.dropout is on": {"strategy": split, "dropout": 0.1},
    }
    for reason, bad_settings in refused.items():

        def work(rank: int, bad_settings: Any = bad_settings) -> str:
            fit(model_path, tmp_path / "run", 2, **{**bad_settings, "strategy": bad_settings["strategy"]()})
            return "trained"

        results = on_ranks(2, work)
        assert all(line.startswith("ConfigurationError: strategy.tensor_parallel: ") for line in results), results
        assert all(reason in line and "; give " in line for line in results), results


# --- runs ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_two_partners_train_as_one(model_path: str, tmp_path: Path) -> None:
    """Rollouts, losses, gradient norms and counters match a run on one rank. Each rank has half of a split weight."""
    options: dict[str, Any] = {"steps": 3, "overrides": ["optimizer.lr=1e-2"]}
    one = fit(model_path, tmp_path / "one", 1, callbacks=callbacks(), **options)

    def work(rank: int) -> str:
        warnings: list[logging.LogRecord] = []
        handler = logging.Handler()
        handler.emit = warnings.append  # type: ignore[method-assign]
        logging.getLogger(_redistribute.__name__).addHandler(handler)
        module = fit(model_path, tmp_path / "two", 2, callbacks=callbacks(), strategy=split(), **options)
        digest = weights(module)
        assert not warnings  # torch would warn if it summed or gathered over one dimension at a time
        for name, parameter in module.policy.named_parameters():
            assert isinstance(parameter, DTensor)
            share = 1 if "norm" in name else 2
            assert parameter.to_local().numel() * share == parameter.numel(), name
        return digest

    results = on_ranks(2, work)
    assert results[0] == results[1] and len(results[0]) == 64, results
    view = read_journal(tmp_path / "two")
    assert view.status == "finished"
    check_same_curve(read_journal(tmp_path / "one"), view, steps=3)
    assert any(record.metrics["mechanism/loss"] for record in view.of_kind("train"))
    check_same_weights(one, tmp_path / "two")


@pytest.mark.full
@pytest.mark.parametrize("overrides", [("resampling=uniform",), EVERYTHING], ids=["alone", "a critic and a reference"])
def test_two_by_two_train_as_one(overrides: Sequence[str], model_path: str, tmp_path: Path) -> None:
    """Twenty steps on four ranks."""
    options: dict[str, Any] = {"steps": 20, "overrides": overrides}
    one = fit(model_path, tmp_path / "one", 1, **options)
    results = on_ranks(4, lambda rank: weights(fit(model_path, tmp_path / "four", 4, strategy=split(), **options)))
    assert set(results) == {results[0]} and len(results[0]) == 64, results
    check_same_curve(read_journal(tmp_path / "one"), read_journal(tmp_path / "four"), steps=20)
    check_same_weights(one, tmp_path / "four")


@pytest.mark.slow
@pytest.mark.parametrize(
    "layouts",
    [
        pytest.param(("one", "split", "fsdp2", "split"), id="short", marks=pytest.mark.full),
        pytest.param(
            ("two by two", "one", "two by two", "ddp", "two by two", "fsdp2"), id="there", marks=pytest.mark.full
        ),
        pytest.param(("fsdp2", "two by two", "split whole", "ddp"), id="back", marks=pytest.mark.full),
    ],
)
def test_a_run_resumes_in_another_layout(layouts: Sequence[str], model_path: str, tmp_path: Path) -> None:
    """Two steps in each layout give one curve, and finally the weights of one process."""
    options: dict[str, Any] = {"overrides": EVERYTHING}
    whole = fit(model_path, tmp_path / "one", 1, steps=2 * len(layouts), **options)
    run = tmp_path / "moved"
    strategies: dict[str, Callable[[], Any]] = {
        "ddp": lambda: "ddp", "fsdp2": lambda: "fsdp2", "split": split, "two by two": split,
        "split whole": lambda: split(checkpoint="whole"),
    }  # fmt: skip
    for number, layout in enumerate(layouts):
        fit_options = {"steps": 2 * (number + 1), "resume": number > 0, **options}
        if layout == "one":
            fit(model_path, run, 1, **fit_options)
            continue
        ranks = 4 if layout == "two by two" else 2

        def work(rank: int, fit_options: Any = fit_options, layout: str = layout, ranks: int = ranks) -> str:
            return weights(fit(model_path, run, ranks, strategy=strategies[layout](), **fit_options))

        results = on_ranks(ranks, work)
        assert set(results) == {results[0]} and len(results[0]) == 64, results
    check_same_curve(read_journal(tmp_path / "one"), read_journal(run), steps=2 * len(layouts))
    check_same_weights(whole, run)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=pytest.mark.full)])
def test_recomputed_activations_train_the_same(precision: str, model_path: str, tmp_path: Path) -> None:
    """Recomputation covers split layers and their collectives. In BF16 both ranks end with the same weights."""
    options: dict[str, Any] = {"overrides": [*EVERYTHING, "batch.recompute=true", f"precision={precision}"], "steps": 2}
    results = on_ranks(2, lambda rank: weights(fit(model_path, tmp_path / "two", 2, strategy=split(), **options)))
    assert results[0] == results[1] and len(results[0]) == 64, results
    one = fit(model_path, tmp_path / "one", 1, **options)
    if precision == "fp32":
        check_same_curve(read_journal(tmp_path / "one"), read_journal(tmp_path / "two"), steps=2)
        check_same_weights(one, tmp_path / "two")


@pytest.mark.full
def test_streamed_weights_train_the_same(model_path: str, tmp_path: Path) -> None:
    """Weights streamed onto a mesh of two dimensions train bit for bit the same. The head is checked before that."""
    overrides = ("kl=fixed", "critic=value_network", "advantage=gae", "filter=none", "batch.packed=true")

    def work(rank: int, streams: bool) -> str:
        with pytest.MonkeyPatch.context() as patch:
            checked: list[bool] = []

            def checks(model: Any, *types: Any) -> None:
                checked.append(isinstance(model.lm_head.weight, DTensor))
                check_head(model, *types)

            patch.setattr(trials, "check_head", checks)
            module = streamed_fit(
                model_path, tmp_path / f"{streams}", streams, overrides, steps=2, devices=2, strategy=split()
            )
        assert module.models.why_not_streamed is None and checked == [streams] and module.policy.packs
        return weights(module)

    check_same_either_way(work, tmp_path)


@pytest.mark.full
def test_export_and_another_fit_after_a_split_fit(model_path: str, tmp_path: Path) -> None:
    """The model is exported whole and trained further. Another number of partners is refused."""
    whole = fit(model_path, tmp_path / "one", 1, steps=2)

    def work(rank: int) -> str:
        module = fit(model_path, tmp_path / "two", 2, steps=2, strategy=split())
        module.save_pretrained(tmp_path / "exported")
        second = Trainer(max_steps=4, strategy=split(), devices=2, **quiet())
        second.fit(module, datamodule=RolloutDataModule(CountingTask()))
        assert module.completed_steps == 4
        digest = weights(module)
        with pytest.raises(ConfigurationError, match=r"^strategy.tensor_parallel: 1, and an earlier fit .* over 2"):
            third = Trainer(max_steps=6, strategy="fsdp2", devices=2, **quiet())
            third.fit(module, datamodule=RolloutDataModule(CountingTask()))
        dist.barrier()  # the rendezvous store, which the other rank still needs, ends with this process
        return digest

    results = on_ranks(2, work)
    assert results[0] == results[1] and len(results[0]) == 64, results
    exported, one = load_model(str(tmp_path / "exported")).state_dict(), whole.policy.model.state_dict()
    assert exported.keys() == one.keys()
    assert all(exported[name].allclose(one[name], rtol=1e-4, atol=1e-5) for name in one)
