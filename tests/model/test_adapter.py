"""LoRA: only the adapter learns, and the generator and exports get the plain model with the adapter merged in."""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from lightning.pytorch import Callback, Trainer
from safetensors.torch import load_file
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from lightning_scalerl import ConfigurationError, LoRA, NoAdapter, RolloutDataModule, ScaleRL, arithmetic_base_model
from lightning_scalerl.axes.async_mode import OnPolicy
from lightning_scalerl.axes.precision import Precision
from lightning_scalerl.callbacks.checkpointing import newest_checkpoint
from lightning_scalerl.measure.compute_meter import ComputeMeter
from lightning_scalerl.measure.flops import FlopModel
from lightning_scalerl.measure.semantics import resolved_semantics
from lightning_scalerl.member.identify import plan_members
from lightning_scalerl.member.run import run_member
from lightning_scalerl.model import adapter
from lightning_scalerl.model.adapter import (
    add_lora,
    frozen_and_trained,
    has_adapter,
    is_adapter_weight,
    merge,
    merged_copy,
    store_linear_layers_in,
    without_peft_wrapper,
)
from lightning_scalerl.model.head import check_head
from lightning_scalerl.model.load import check_weights, load_model, load_tokenizer
from lightning_scalerl.session import export
from lightning_scalerl.session.models import plain_model
from lightning_scalerl.task.arithmetic_base import tokenizer
from sweeps.run.journal import read_journal
from tests.generator.test_architectures import AGREE, tiny
from tests.helpers import SMALL, CountingTask, fit, quiet

LORA = ("adapter=lora", "adapter.rank=4", "optimizer.lr=3e-2")
TOKENS = torch.tensor([[1, 5, 7, 2, 9, 3, 4, 8]])


def fit_adapted(path: str, **given: Any) -> ScaleRL:
    return fit(path, overrides=[*LORA, "precision=fp32", *given.pop("overrides", ())], **given)


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model.eval()(TOKENS, use_cache=False).logits
    return found


def merged_by_peft(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the weights of the plain model as peft itself merges them."""
    copied: Any = copy.deepcopy(model).float()
    with torch.no_grad():
        for layer in list(copied.modules()):
            if isinstance(layer, peft.tuners.lora.Linear):
                layer.merge()
    state = copied.state_dict()
    return {name.replace(".base_layer.", "."): value for name, value in state.items() if ".lora_" not in name}


def randomize(model: nn.Module) -> nn.Module:
    """Fill the adapter with random weights. B starts at zero, so a new adapter has no effect."""
    source = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if is_adapter_weight(name):
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=source))
    return model


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_adapter_alone_learns(precision: str, tiny_model_path: str) -> None:
    """The model's own weights do not change, apart from being rounded to the policy's type."""
    module = fit_adapted(tiny_model_path, steps=3, overrides=[f"precision={precision}"])
    base_weights = load_model(tiny_model_path).state_dict()
    initial = load_model(tiny_model_path)
    add_lora(initial, 4, 32.0, "all-linear")
    moved = 0
    for name, parameter in module.policy.model.named_parameters():
        if is_adapter_weight(name):
            assert parameter.requires_grad and parameter.dtype == torch.float32
            moved += not torch.equal(parameter, initial.get_parameter(name))
            continue
        base_weight = base_weights[name.replace(".base_layer.", ".")]
        linear = "_proj" in name
        assert parameter.dtype == (Precision(precision).policy_dtype if linear else torch.float32), name
        assert not parameter.requires_grad and torch.equal(parameter, base_weight.to(parameter.dtype)), name
    assert moved == 2 * 14  # A and B of seven layers in each of two blocks
    (optimizer,) = module.trainer.optimizers
    assert sum(len(group["params"]) for group in optimizer.param_groups) == 2 * 14
    assert resolved_semantics(module)["trained_parameters"] == sum(
        parameter.numel() for name, parameter in module.policy.named_parameters() if is_adapter_weight(name)
    )
    assert resolved_semantics(module)["parameters"] == sum(
        parameter.numel() for parameter in load_model(tiny_model_path).parameters()
    )


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_modules_to_save_learn_together_with_the_adapter(precision: str, tiny_model_path: str) -> None:
    """They train in FP32, and no others do: `norm` means the last norm, not every module whose name ends in it."""
    overrides = [f"precision={precision}", "adapter.modules_to_save=[norm,lm_head]"]
    module = fit_adapted(tiny_model_path, steps=2, overrides=overrides)
    base_weights = load_model(tiny_model_path).state_dict()
    saved = {"model.norm.weight", "lm_head.weight"}
    for name, parameter in module.policy.model.named_parameters():
        if not is_adapter_weight(name):
            base_weight = base_weights[name.replace(".base_layer.", ".")]
            assert parameter.requires_grad == (name in saved), name
            assert torch.equal(parameter, base_weight.to(parameter.dtype)) == (name not in saved), name
            assert parameter.dtype == torch.float32 or name not in saved
    semantics = resolved_semantics(module)
    low_rank = sum(parameter.numel() for name, parameter in module.policy.named_parameters() if is_adapter_weight(name))
    assert semantics["trained_parameters"] == low_rank + sum(base_weights[name].numel() for name in saved)
    assert semantics["choices"]["adapter"]["modules_to_save"] == ["norm", "lm_head"]
    _, trained = frozen_and_trained(load_model(tiny_model_path), module.choices.adapter)  # type: ignore[arg-type]
    assert trained == semantics["trained_parameters"], "what `scalerl memory` counts"


class RecordPublished(Callback):
    """Record the generator's weights and the trainer's merged weights, on each batch before its step."""

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.weights = {name: value.clone() for name, value in pl_module.generator.policy.model.state_dict().items()}
        self.expected = merged_by_peft(pl_module.policy.model)


def test_published_weights_are_merged(tiny_model_path: str) -> None:
    published = RecordPublished()
    fit_adapted(tiny_model_path, steps=3, callbacks=[OnPolicy(), published])
    base_weights = load_model(tiny_model_path).state_dict()
    assert published.weights.keys() == base_weights.keys()
    for name, value in published.weights.items():
        assert torch.allclose(value, published.expected[name], atol=1e-7), name
        assert torch.equal(value, base_weights[name]) == ("_proj" not in name), name


@pytest.mark.parametrize("family", ["GPT2", "Qwen2", "Gemma2", "Mixtral"])
def test_merged_weights_compute_the_same(family: str) -> None:
    """Conv1D layers, biases, tied embeddings and experts are merged as peft does, and logits are the same."""
    model: Any = tiny(family, AGREE[family])
    random_state = torch.random.get_rng_state()
    add_lora(model, 3, 6.0, "all-linear")
    randomize(model)
    plain = merged_copy(model)
    assert torch.equal(random_state, torch.random.get_rng_state()), "the run's random state does not change"
    assert type(plain) is type(model) and not has_adapter(plain)
    for name, value in merged_by_peft(model).items():
        assert torch.allclose(plain.state_dict()[name], value, atol=1e-6), name
    assert torch.allclose(logits(plain), logits(model), atol=1e-4, rtol=1e-5)
    assert merge({}, model) == {}, "a rank that needs no result gets none"


def test_experts_stored_as_tables_are_refused_as_targets() -> None:
    """peft would select them by a name that linear layers of other models have (`gate_proj`)."""
    model: Any = tiny("DeepseekV3", AGREE["DeepseekV3"])
    add_lora(copy.deepcopy(model), 3, 6.0, ["o_proj"])
    with pytest.raises(ConfigurationError, match=r"adapter\.targets: 'all-linear' takes the experts of DeepseekV3"):
        add_lora(model, 3, 6.0, "all-linear")


def test_a_new_adapter_does_not_change_the_model(tiny_model: Any) -> None:
    base_logits, one, two = logits(tiny_model), copy.deepcopy(tiny_model), copy.deepcopy(tiny_model)
    add_lora(one, 4, 8.0, "all-linear")
    torch.rand(3)
    add_lora(two, 4, 8.0, ["q_proj", "v_proj"])
    assert torch.equal(logits(one), base_logits) and torch.equal(logits(two), base_logits)
    assert {name.rpartition(".")[2] for name in adapter.adapted_layers(two)} == {"q_proj", "v_proj"}
    # The initial weights do not depend on random numbers drawn before.
    later = copy.deepcopy(tiny_model)
    add_lora(later, 4, 8.0, "all-linear")
    assert all(torch.equal(value, later.state_dict()[name]) for name, value in one.state_dict().items())


def test_weights_in_a_smaller_type_compute_what_autocast_does(tiny_model: Any) -> None:
    """They are equal bit for bit under autocast. Without it they compute what FP32 does with rounded weights."""
    add_lora(tiny_model, 4, 8.0, "all-linear")
    randomize(tiny_model)
    kept = copy.deepcopy(tiny_model)
    store_linear_layers_in(kept, torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(logits(kept), logits(tiny_model))
    rounded = copy.deepcopy(kept).float()
    assert torch.equal(logits(kept), logits(rounded)) and not torch.equal(logits(kept), logits(tiny_model))
    head = kept.get_output_embeddings().weight
    assert head.dtype == kept.get_input_embeddings().weight.dtype == torch.float32
    check_weights(kept)
    kept.get_parameter("model.layers.0.self_attn.q_proj.lora_A.default.weight").data = torch.zeros(4, 32).half()
    with pytest.raises(ConfigurationError, match=r"model: weights in torch\.float16; master weights are FP32"):
        check_weights(kept)
    with pytest.raises(ConfigurationError, match=r"weights in torch\.bfloat16"):
        check_weights(copy.deepcopy(load_model_in(torch.bfloat16)))


def load_model_in(dtype: torch.dtype) -> nn.Module:
    """A model without an adapter, with frozen weights."""
    model: nn.Module = tiny("Llama", AGREE["Llama"]).to(dtype).requires_grad_(False)
    return model


# --- export --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_exported_models_compute_what_was_trained(precision: str, tiny_model_path: str, tmp_path: Path) -> None:
    module = fit_adapted(tiny_model_path, steps=3, overrides=[f"precision={precision}"])
    trained = logits(module.policy.model)
    assert not torch.allclose(trained, logits(load_model(tiny_model_path)), atol=1e-3), "it has learned something"
    module.save_pretrained(tmp_path / "model")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert torch.allclose(logits(merged), trained, atol=1e-5)
    module.save_pretrained(tmp_path / "adapter", adapter=True)
    assert sorted(path.name for path in (tmp_path / "adapter").iterdir()) == [
        "README.md",
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    assert "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight" in load_file(
        tmp_path / "adapter" / "adapter_model.safetensors"
    )
    card = (tmp_path / "adapter" / "README.md").read_text()
    assert "library_name: peft" in card and "| optimizer steps | 3 |" in card
    assert ("| frozen linear layers | rounded to bfloat16 in training" in card) == (precision == "bf16")
    base = load_model(tiny_model_path)
    if precision == "bf16":  # as docs/guide/adapters.md shows
        for module_of_base in base.modules():
            if isinstance(module_of_base, torch.nn.Linear) and module_of_base is not base.get_output_embeddings():
                module_of_base.weight.data = module_of_base.weight.data.bfloat16().float()
    loaded = peft.PeftModel.from_pretrained(base, str(tmp_path / "adapter"))
    assert torch.allclose(logits(loaded), trained, atol=1e-5)
    with pytest.raises(ConfigurationError, match="dtype: 'int8' is unknown"):
        module.save_pretrained(tmp_path / "other", "int8", adapter=True)
    with pytest.raises(ConfigurationError, match="something is there already"):
        module.save_pretrained(tmp_path / "adapter", adapter=True)


@pytest.mark.parametrize("family", ["Llama", pytest.param("Gemma2", marks=pytest.mark.slow)])
def test_modules_to_save_are_exported(family: str, tiny_model_path: str, tmp_path: Path) -> None:
    """They are in merged models and in adapters loaded by peft. Tied embeddings (Gemma 2) are trained as one weight."""
    base: Any = tiny(family, AGREE[family], attn_implementation="eager")
    trained_model = copy.deepcopy(base)
    assert base.config.tie_word_embeddings == (family == "Gemma2")
    choice = LoRA(4, modules_to_save=["lm_head", "norm"])
    module = ScaleRL(
        trained_model, "scalerl_core", [*SMALL, "precision=fp32", "optimizer.lr=3e-2"], load_tokenizer(tiny_model_path)
    )
    Trainer(max_steps=2, callbacks=[choice], **quiet()).fit(module, datamodule=RolloutDataModule(CountingTask()))
    assert not torch.equal(trained_model.get_output_embeddings().weight, base.get_output_embeddings().weight)
    assert not torch.allclose(logits(trained_model), logits(base), atol=1e-3)
    module.save_pretrained(tmp_path / "model")
    assert torch.allclose(
        logits(AutoModelForCausalLM.from_pretrained(tmp_path / "model")), logits(trained_model), atol=1e-5
    )
    module.save_pretrained(tmp_path / "adapter", adapter=True)
    loaded = peft.PeftModel.from_pretrained(copy.deepcopy(base), str(tmp_path / "adapter"))
    assert torch.allclose(logits(loaded), logits(trained_model), atol=1e-5)
    embedded = ["model.embed_tokens"] if family == "Gemma2" else []
    assert loaded.peft_config["default"].modules_to_save == ["lm_head", *embedded, "model.norm"]


def test_a_merged_model_that_differs_from_the_policy_is_not_written(
    tiny_model_path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = fit_adapted(tiny_model_path, steps=1)
    plain = load_model(tiny_model_path)
    monkeypatch.setattr(module.trained, "whole_model", lambda: plain)
    with pytest.raises(RuntimeError, match=r"differs from the trained policy by 0\.\d+ in log-probability"):
        module.save_pretrained(tmp_path / "model")
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(export, "MERGED_BOUND", 10.0)
    module.save_pretrained(tmp_path / "model")
    with pytest.raises(ConfigurationError, match="adapter: this model has none; leave adapter=True out"):
        fit(tiny_model_path, steps=1).save_pretrained(tmp_path / "none", adapter=True)


# --- a model that comes with an adapter ----------------------------------------------------------------------


def lora(**more: Any) -> Any:
    return peft.LoraConfig(**{"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "up_proj"], **more})


def train_given(model: Any, path: str, overrides: tuple[str, ...] = (), steps: int = 3) -> ScaleRL:
    module = ScaleRL(
        model, "scalerl_core", [*SMALL, "precision=fp32", "optimizer.lr=3e-2", *overrides], load_tokenizer(path)
    )
    Trainer(max_steps=steps, **quiet()).fit(module, datamodule=RolloutDataModule(CountingTask()))
    return module


def with_peft(model: Any) -> Any:
    return peft.get_peft_model(model, lora(), adapter_name="mine")


def with_transformers(model: Any) -> Any:
    model.add_adapter(lora(), adapter_name="mine")
    return model


@pytest.mark.parametrize("make", [with_peft, with_transformers])
def test_a_model_that_comes_with_an_adapter_is_trained(
    make: Callable[[Any], Any], tiny_model: Any, tiny_model_path: str, tmp_path: Path
) -> None:
    adapted_model = randomize(make(tiny_model))
    initial_weights = {name: value.clone() for name, value in adapted_model.named_parameters()}
    module = train_given(adapted_model, tiny_model_path)
    assert module.policy.model is tiny_model, "the model is trained in place"
    changed = {
        name for name, value in adapted_model.named_parameters() if not torch.equal(value, initial_weights[name])
    }
    assert changed == {name for name in initial_weights if is_adapter_weight(name)} != set()
    semantics = resolved_semantics(module)
    assert semantics["choices"]["adapter"] == {"choice": "NoAdapter"}
    assert semantics["model_adapter"]["targets"] == ["q_proj", "up_proj"] and semantics["model_adapter"]["scales"] == [
        2.0
    ]
    assert module.hparams["model_adapter"]["ranks"] == [4]
    assert module.began[0].startswith(
        "adapter: the model already has one, which is trained: {'method': 'LoRA', 'ranks'"
    )
    module.save_pretrained(tmp_path / "merged")
    module.save_pretrained(tmp_path / "adapter", adapter=True)
    trained = logits(module.policy.model)
    assert torch.allclose(logits(load_model(str(tmp_path / "merged"))), trained, atol=1e-5)
    loaded = peft.PeftModel.from_pretrained(load_model(tiny_model_path), str(tmp_path / "adapter"))
    assert torch.allclose(logits(loaded), trained, atol=1e-5)
    with pytest.raises(ConfigurationError, match=r"adapter: the model that was handed in has a LoRA adapter already"):
        ScaleRL(adapted_model, "scalerl_core", [*SMALL, "adapter=lora"], load_tokenizer(tiny_model_path))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_model_below_an_adapter_may_be_in_bf16(precision: str, tiny_model: Any, tiny_model_path: str) -> None:
    """peft keeps the type of a model loaded in BF16. Weights outside of linear layers become FP32."""
    adapted_model = peft.get_peft_model(tiny_model.bfloat16(), lora())
    initial_weights = {name: value.clone() for name, value in adapted_model.get_base_model().named_parameters()}
    module = train_given(adapted_model, tiny_model_path, (f"precision={precision}",))
    for name, value in module.policy.model.named_parameters():
        kept = "_proj" in name and not is_adapter_weight(name) and precision == "bf16"
        assert value.dtype == (torch.bfloat16 if kept else torch.float32), name
        assert torch.equal(value.float(), initial_weights[name].float()) != is_adapter_weight(name), name


def two_adapters(model: Any) -> Any:
    adapted_model = with_peft(model)
    adapted_model.add_adapter("other", lora())
    return adapted_model


def merged_in_place(model: Any) -> Any:
    adapted_model = with_peft(model)
    adapted_model.merge_adapter()
    return adapted_model


def embedding_trainable(model: Any) -> Any:
    adapted_model = with_peft(model)
    model.get_input_embeddings().weight.requires_grad_(True)
    return adapted_model


REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "another method": (
        lambda m: peft.get_peft_model(m, peft.IA3Config(target_modules=["q_proj"], feedforward_modules=[])),
        "is an adapter of kind IA3",
    ),
    "another method in place": (
        lambda m: peft.inject_adapter_in_model(peft.IA3Config(target_modules=["q_proj"], feedforward_modules=[]), m),
        "has an adapter of kind IA3",
    ),
    "a prefix": (
        lambda m: peft.get_peft_model(m, peft.PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")),
        "is an adapter of kind PROMPT_TUNING",
    ),
    "DoRA": (lambda m: peft.get_peft_model(m, lora(use_dora=True)), r"use_dora=True \(DoRA\)"),
    "several": (two_adapters, r"has several adapters \(mine, other"),
    "more modules": (
        lambda m: peft.get_peft_model(m, lora(modules_to_save=["embed_tokens"])),
        r"modules_to_save=\['embed_tokens'\]",
    ),
    "dropout": (lambda m: peft.get_peft_model(m, lora(lora_dropout=0.1)), r"has dropout .*lora_dropout > 0"),
    "a bias": (lambda m: peft.get_peft_model(m, lora(lora_bias=True)), r"with a bias at .*lora_bias=True"),
    "embeddings": (lambda m: peft.get_peft_model(m, lora(target_modules=["embed_tokens"])), "which is its Embedding"),
    "the head": (lambda m: peft.get_peft_model(m, lora(target_modules=["lm_head"])), "which is its output head"),
    "merged": (merged_in_place, "has its adapter merged or disabled"),
    "frozen": (lambda m: with_peft(m).requires_grad_(False), "that are frozen .*is_trainable=True"),
    "trains more": (embedding_trainable, "trains other weights beside its adapter .*embed_tokens"),
}


@pytest.mark.parametrize(("make", "told"), REFUSED.values(), ids=REFUSED)
def test_other_adapters_are_refused_by_name_with_the_remedy(
    make: Callable[[Any], Any], told: str, tiny_model: Any, tiny_model_path: str
) -> None:
    adapted_model = make(tiny_model)
    with pytest.raises(ConfigurationError, match=rf"^model: \w+ .*{told}.*merge_and_unload\(\)$"):
        ScaleRL(adapted_model, "scalerl_core", [*SMALL], load_tokenizer(tiny_model_path))


def test_a_plain_model_is_left_alone(tiny_model: Any) -> None:
    assert without_peft_wrapper(tiny_model) is tiny_model
    check_head(tiny_model)


# --- bad input -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"rank": 0}, "adapter.rank: 0 must be a whole number, 1 or more"),
        ({"rank": 4.0}, "adapter.rank: 4.0 must be a whole number"),
        ({"alpha": 0}, "adapter.alpha: 0 must be a number above 0"),
        ({"targets": "q_proj"}, r"adapter.targets: 'q_proj' must be all-linear, or a list of names"),
        ({"targets": []}, r"adapter.targets: \[\] must be all-linear"),
        ({"targets": ["q_proj", 3]}, "adapter.targets: .* must be all-linear"),
        ({"targets": 3}, "adapter.targets: 3 must be all-linear"),
        ({"modules_to_save": "lm_head"}, r"adapter.modules_to_save: 'lm_head' must be a list .*=\[lm_head\]"),
    ],
)
def test_bad_settings_name_field_value_and_remedy(given: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigurationError, match=told):
        LoRA(**given)


@pytest.mark.parametrize(
    ("targets", "told"),
    [
        ("[query]", r"adapter.targets: 'query' matches no module of LlamaForCausalLM; linear layers there: down_proj,"),
        ("[q_proj,embed_tokens]", r"'embed_tokens' matches model\.embed_tokens, a Embedding of .*: down_proj,"),
        ("[lm_head]", r"'lm_head' matches lm_head, the output head of LlamaForCausalLM"),
        ("[self_attn]", r"'self_attn' matches model\.layers\.0\.self_attn, a LlamaAttention"),
    ],
)
def test_targets_that_are_not_linear_layers_are_named(targets: str, told: str, tiny_model_path: str) -> None:
    with pytest.raises(ConfigurationError, match=told):
        ScaleRL(tiny_model_path, "scalerl_core", [*SMALL, "adapter=lora", f"adapter.targets={targets}"])


@pytest.mark.parametrize(
    ("modules", "told"),
    [
        ("[head]", r"modules_to_save: 'head' matches no module of LlamaForCausalLM .*; those there: .*lm_head, norm,"),
        ("[q_proj]", r"'q_proj' matches \S*\.q_proj, a linear layer of LlamaForCausalLM's body; give it as one of"),
        ("[lm_head,self_attn]", r"modules_to_save: 'self_attn' matches no module of LlamaForCausalLM with weights of"),
    ],
)
def test_modules_without_weights_of_their_own_are_named(modules: str, told: str, tiny_model_path: str) -> None:
    with pytest.raises(ConfigurationError, match=told):
        ScaleRL(tiny_model_path, "scalerl_core", [*SMALL, "adapter=lora", f"adapter.modules_to_save={modules}"])


def test_without_peft_the_error_says_what_to_install(tiny_model_path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ConfigurationError, match=r'adapter: LoRA needs the package peft .*"lightning-scalerl\[lora\]"'):
        ScaleRL(tiny_model_path, "scalerl_core", [*SMALL, "adapter=lora"])
    fit(tiny_model_path, steps=1)  # a run without an adapter does not need peft


def test_another_choice_than_the_module_has_is_refused(tiny_model_path: str) -> None:
    module = ScaleRL(tiny_model_path, "scalerl_core", [*SMALL, *LORA, "precision=fp32"])
    for other in (LoRA(8), NoAdapter()):
        with pytest.raises(
            ConfigurationError, match=r"adapter: this module's model has the adapter choice=LoRA, rank=4"
        ):
            Trainer(max_steps=1, callbacks=[other], **quiet()).fit(module, datamodule=RolloutDataModule(CountingTask()))
    with pytest.raises(ConfigurationError, match="adapter: the model has a LoRA adapter already"):
        add_lora(module.policy.model, 4, 8.0, "all-linear")


# --- checkpoints ---------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "callback", [pytest.param(False, marks=pytest.mark.full), True], ids=["the recipe's", "a callback's"]
)
def test_a_run_resumes_from_its_checkpoint(callback: bool, tiny_model_path: str, tmp_path: Path) -> None:
    """The curve equals the undisturbed one, with BF16 weights and a reference. The weights can be loaded alone, too."""
    adapter_overrides = () if callback else ("adapter=lora", "adapter.rank=4", "adapter.modules_to_save=[lm_head]")

    def run(folder: Path, steps: int, resume: bool = False) -> ScaleRL:
        overrides = [*adapter_overrides, "optimizer.lr=3e-2", "kl=fixed", "precision=bf16"]
        choices = [LoRA(4, modules_to_save=["lm_head"])] if callback else []
        return fit(tiny_model_path, folder, steps, choices, overrides, resume=resume, checkpoint_every=2)

    whole = run(tmp_path / "whole", 4)
    run(tmp_path / "parts", 2)
    parts = run(tmp_path / "parts", 4, resume=True)
    resumed, undisturbed = (read_journal(tmp_path / name).deterministic() for name in ("parts", "whole"))
    assert resumed == undisturbed
    for name, value in whole.policy.state_dict().items():
        assert torch.equal(value, parts.policy.state_dict()[name]), name
    newest = newest_checkpoint(tmp_path / "whole" / "checkpoints").path
    assert newest is not None
    loaded = ScaleRL.load_from_checkpoint(newest, weights_only=True)
    assert torch.allclose(logits(plain_model(loaded.policy)), logits(plain_model(whole.policy)), atol=1e-6)
    assert loaded.policy.model.get_output_embeddings().weight.requires_grad, "the head stays trainable"
    trainer = Trainer(callbacks=[], **quiet())
    rates = trainer.validate(loaded, datamodule=RolloutDataModule(CountingTask()), verbose=False)
    assert any(name.startswith("eval/") for name in rates[0])


def test_a_loaded_module_keeps_the_initial_reference(tiny_model_path: str, tmp_path: Path) -> None:
    """The reference is read from the model's folder again and rounded as in the run."""
    overrides = [*LORA, "kl=fixed", "precision=bf16"]
    fit(tiny_model_path, tmp_path, 2, overrides=overrides)
    newest = newest_checkpoint(tmp_path / "checkpoints").path
    assert newest is not None
    module = ScaleRL.load_from_checkpoint(newest, weights_only=True)
    trainer = Trainer(max_steps=3, **quiet())
    trainer.fit(module, datamodule=RolloutDataModule(CountingTask()), ckpt_path=newest, weights_only=True)
    assert module.completed_steps == 3 and module.reference is not None
    base_weights = load_model(tiny_model_path).state_dict()
    for name, value in module.reference.model.state_dict().items():
        assert torch.equal(value, base_weights[name].bfloat16().float() if "_proj" in name else base_weights[name]), (
            name
        )


def test_reference_and_critic_have_no_adapter(tiny_model_path: str) -> None:
    """The reference has the initial weights. The critic trains all of its weights."""
    at_start: dict[str, Any] = {}

    class RecordCritic(Callback):
        def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
            at_start["critic"] = {name: value.clone() for name, value in pl_module.critic.named_parameters()}

    overrides = ["advantage=gae", "critic=value_network", "kl=fixed", "filter=none"]
    module = fit_adapted(tiny_model_path, steps=2, callbacks=[RecordCritic()], overrides=overrides)
    assert module.reference is not None and module.critic is not None
    assert not has_adapter(module.reference) and not has_adapter(module.critic)
    base = load_model(tiny_model_path).state_dict()
    assert all(torch.equal(value, base[name]) for name, value in module.reference.model.state_dict().items())
    trained = dict(module.critic.named_parameters())
    assert trained.keys() == at_start["critic"].keys()
    assert all(
        value.requires_grad and not torch.equal(value, at_start["critic"][name]) for name, value in trained.items()
    )


# --- learning ------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_lora_with_a_trained_head_learns_the_arithmetic_task(tmp_path: Path) -> None:
    """After a fifth of `experiment=adapter`, full fine-tuning is at 0.55 and LoRA without the head at 0.32."""
    experiment = ["experiment=adapter", "adapter=lora", "adapter.modules_to_save=[lm_head]", "optimizer.lr=1e-3"]
    overrides = [*experiment, "budget.steps=60", "mlflow.uri=null", f"output_dir={tmp_path}"]
    (spec,) = plan_members([overrides])
    spec.write(tmp_path / "run")
    run_member(tmp_path / "run")
    rates = [record.metrics["eval/heldout/pass_rate"] for record in read_journal(tmp_path / "run").of_kind("eval")]
    assert rates[0] < 0.3 and rates[-1] >= 0.65, rates


def test_the_frozen_head_limits_the_probability_of_a_digit() -> None:
    """Even the best hidden state gives a digit a probability below 0.93. This is why LoRA needs a trained head here."""
    model: Any = load_model(arithmetic_base_model(digits=2))
    head = model.lm_head.weight.detach()
    states = head.clone().requires_grad_(True)
    optimizer = torch.optim.Adam([states], 0.05)
    for _ in range(1500):
        optimizer.zero_grad()
        logprobs = (model.model.norm(states) @ head.T).log_softmax(-1).diagonal()
        (-logprobs.sum()).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    digits = [tokenizer().convert_tokens_to_ids(digit) for digit in "0123456789"]
    assert logprobs[digits].exp().min() > 0.89 and logprobs[digits].exp().max() < 0.93


# --- compute -------------------------------------------------------------------------------------------------


def check_update_flops(model: Any) -> FlopModel:
    """Compare the FLOPs of an update, without attention, with torch's count of matrix products; return our counts."""
    flops = FlopModel.of(model)
    length = TOKENS.shape[1]
    with FlopCounterMode(display=False) as counter:
        model(TOKENS, use_cache=False).logits.sum().backward()
    counts = counter.get_flop_counts()["Global"]
    counted_by_torch = sum(
        number for operation, number in counts.items() if "mm" in str(operation) and "bmm" not in str(operation)
    )
    # `forward` counts a sequence with one more token, whose last token is only predicted. Here all tokens have logits.
    lengths, prompts = [length + 1], [1]
    ours = 3 * flops.forward(lengths, prompts) + flops.partial_training(lengths, prompts, updates=1, forwards=0)
    ours -= (3 * flops.layers - 2 * flops.layers_below) * flops.per_layer * length * (length + 1) // 2
    assert ours == counted_by_torch
    return flops


@pytest.mark.parametrize("targets", ["all-linear", ["v_proj", "down_proj"], ["1.mlp.up_proj"], ["o_proj"]])
def test_flops_equal_the_counts_of_torch(targets: Any) -> None:
    """Generation costs as for the plain model. Updates skip gradients of frozen weights and below the first adapter."""
    model: Any = tiny("Llama", AGREE["Llama"])
    plain = FlopModel.of(model)
    add_lora(model, 4, 8.0, targets)
    adapted_flops = check_update_flops(model)
    assert (adapted_flops.per_token, adapted_flops.head, adapted_flops.per_layer) == (
        plain.per_token,
        plain.head,
        plain.per_layer,
    )
    assert adapted_flops.layers_below == (targets == ["1.mlp.up_proj"])
    lengths, prompts = [TOKENS.shape[1] + 1], [1]
    assert plain.partial_training(lengths, prompts, 1, 1) == 0.0


@pytest.mark.parametrize(
    ("trained", "layers_below"),
    [
        ("", 0),
        (r"lm_head", 2),
        (r"model\.norm", 2),
        (r"model\.layers\.1\.", 1),
        (r".*(layers\.1\.mlp|lm_head)", 1),
        (r".*(layers|lm_head|norm)", 0),
        (r".*embed_tokens", 0),
        (r"(?!lm_head)", 0),
    ],
)
def test_flops_of_a_model_with_frozen_weights_equal_the_counts_of_torch(trained: str, layers_below: int) -> None:
    model: Any = tiny("Llama", AGREE["Llama"])
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(re.match(trained, name) is not None)
    flops = check_update_flops(model)
    assert flops.layers_below == layers_below


def test_the_meter_charges_an_update_of_an_adapter_less(tiny_model_path: str) -> None:
    flops = {}
    for overrides in (["precision=fp32"], [*LORA, "precision=fp32"]):
        module = fit(tiny_model_path, steps=1, overrides=overrides)
        assert isinstance(module.meter, ComputeMeter)
        flops[len(overrides)] = module.meter.metrics()
    full, lora = flops[1], flops[4]  # by number of overrides
    assert lora["compute/flops_generate"] == full["compute/flops_generate"]
    assert 0.6 * full["compute/flops_train"] < lora["compute/flops_train"] < full["compute/flops_train"]
