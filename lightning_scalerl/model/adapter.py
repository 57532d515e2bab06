"""Low-rank adapters (LoRA) of peft in transformers models, and the equivalent plain model with the adapter merged.

An adapted layer computes y = W x + s B A x, with the weights `...q_proj.base_layer.weight` (W),
`...q_proj.lora_A.NAME.weight` and `...lora_B.NAME.weight`. Everything outside the trainer (generator, reference,
critic, export) gets the plain model, in which `...q_proj.weight` is W + s B A. There the adapter costs nothing and peft
is not needed.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_scalerl.axes.adapter import ALL_LINEAR, Adapter, LoRA
from lightning_scalerl.checks import ConfigurationError, error_line
from lightning_scalerl.model.recompute import recompute_like

# LoRA's A starts with the same numbers in every run, like the model's own weights. The run's random state does not
# change.
_SEED = 0
_LORA = (".lora_A.", ".lora_B.")
_MERGE = "or merge it and train all weights: model.merge_and_unload()"


def adapted_layers(model: nn.Module) -> dict[str, Any]:
    """Return the layers of a model that have low-rank weights, by name."""
    return {name: module for name, module in model.named_modules() if _has_low_rank(module)}


def has_adapter(model: nn.Module) -> bool:
    """Return whether any layer of the model has low-rank weights."""
    return any(map(_has_low_rank, model.modules()))


def _has_low_rank(module: nn.Module) -> bool:
    return hasattr(module, "lora_A") and hasattr(module, "lora_B")


def is_adapter_weight(name: str) -> bool:
    """Return whether a parameter with this name belongs to an adapter."""
    return any(part in f".{name}" for part in _LORA)


def add_lora(
    model: nn.Module, rank: int, alpha: float, targets: str | Sequence[str], modules_to_save: Sequence[str] = ()
) -> None:
    """Add low-rank weights to the target layers of a model, in place, and freeze all other weights.

    Args:
        model: a causal language model without an adapter.
        rank: rank of the low-rank weights.
        alpha: numerator of their scale, alpha / rank.
        targets: "all-linear", or the last parts of the layers' names.
        modules_to_save: last parts of the names of other modules whose own weights stay trainable.

    Raises:
        ConfigurationError: peft is not installed, the model already has an adapter, a target does not name a linear
            layer, or a module to save does not name another module with weights.
    """
    if has_adapter(model):
        raise ConfigurationError(
            f"adapter: the model has a LoRA adapter already; choose adapter=none to train that one, {_MERGE}"
        )
    peft = _peft()
    # Name the layers one by one: peft's own "all-linear" also takes the weight tables of experts in a mixture model,
    # which are not linear layers.
    target_names = _linear_layers(model) if isinstance(targets, str) else _check_targets(model, targets)
    saved_modules = _modules_to_save(model, modules_to_save)
    config = peft.LoraConfig(
        r=rank, lora_alpha=alpha, target_modules=target_names, lora_dropout=0.0, bias="none", task_type="CAUSAL_LM"
    )
    try:
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            torch.manual_seed(_SEED)
            warnings.simplefilter("ignore")  # a warning on GPT-2's Conv1D, whose transposed layout peft handles
            peft.inject_adapter_in_model(config, model)
    except ValueError as error:
        raise ConfigurationError(
            f"adapter.targets: {targets!r} cannot be adapted in {type(model).__name__} ({error_line(error)}); linear "
            f"layers there: {_list_linear_layers(model)}"
        ) from error
    tables = sorted(name for name, layer in adapted_layers(model).items() if not _is_linear(layer.base_layer))
    if tables:
        raise ConfigurationError(
            f"adapter.targets: {targets!r} takes the experts of {type(model).__name__} too ({tables[0]}), which are no "
            "linear layers; name those of the attention, such as adapter.targets=[q_proj,v_proj], of: "
            f"{_list_linear_layers(model)}"
        )
    check_adapter(model)
    # peft's own `modules_to_save` is not used: it keeps a second copy of each module and hides an output head from
    # other code.
    for module in saved_modules:
        for parameter in module.parameters(recurse=False):
            parameter.requires_grad_(True)


def _modules_to_save(model: nn.Module, names: Sequence[str]) -> list[nn.Module]:
    """Return the modules whose names end in one of `names` and that contain weights directly."""
    linear, model_name = {*_linear_layers(model)}, type(model).__name__
    candidates = {
        name: module
        for name, module in model.named_modules()
        if name not in linear and next(module.parameters(recurse=False), None) is not None
    }
    modules: list[nn.Module] = []
    for end in names:
        matches = [module for name, module in candidates.items() if _ends_in(name, end)]
        if layer := next((name for name in linear if _ends_in(name, end)), None):
            raise ConfigurationError(
                f"adapter.modules_to_save: {end!r} matches {layer}, a linear layer of {model_name}'s body; give it "
                "as one of adapter.targets"
            )
        if not matches:
            valid = ", ".join(sorted({name.rpartition(".")[2] for name in candidates}))
            raise ConfigurationError(
                f"adapter.modules_to_save: {end!r} matches no module of {model_name} with weights of its own; those "
                f"there: {valid}"
            )
        modules += matches
    return modules


def _ends_in(name: str, end: str) -> bool:
    """Return whether the last parts of a dotted name are `end`."""
    return name == end or name.endswith(f".{end}")


def _check_targets(model: nn.Module, targets: Sequence[str]) -> list[str]:
    """Return the targets as a list, or raise a ConfigurationError if one is not a linear layer of the model's body."""
    head = model.get_output_embeddings()  # type: ignore[operator]
    for target in targets:
        matches = {name: module for name, module in model.named_modules() if _ends_in(name, target)}
        if not matches:
            raise ConfigurationError(
                f"adapter.targets: {target!r} matches no module of {type(model).__name__}; linear layers there: "
                f"{_list_linear_layers(model)}; or adapter.targets={ALL_LINEAR}"
            )
        for name, module in matches.items():
            if module is head or not _is_linear(module):
                module_description = "the output head" if module is head else f"a {type(module).__name__}"
                raise ConfigurationError(
                    f"adapter.targets: {target!r} matches {name}, {module_description} of {type(model).__name__}, and "
                    f"LoRA is for the linear layers of its body: {_list_linear_layers(model)}"
                )
    return list(targets)


def _is_linear(module: nn.Module) -> bool:
    """Return whether a module is `nn.Linear` or GPT-2's `Conv1D`, with floating-point (not quantized) weights."""
    weight = getattr(module, "weight", None)
    linear_type = isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"
    return linear_type and isinstance(weight, Tensor) and weight.is_floating_point()


def _linear_layers(model: nn.Module) -> list[str]:
    """Return the names of a model's linear layers except the output head."""
    head = model.get_output_embeddings()  # type: ignore[operator]
    return [name for name, module in model.named_modules() if _is_linear(module) and module is not head]


def _list_linear_layers(model: nn.Module) -> str:
    """Return the last parts of the names of a model's linear layers, as text for an error."""
    return ", ".join(sorted({name.rpartition(".")[2] for name in _linear_layers(model)})) or "none"


def _peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise ConfigurationError(
            f'adapter: LoRA needs the package peft ({error_line(error)}); pip install "lightning-scalerl[lora]"'
        ) from error
    return peft


def adapt(model: nn.Module, choice: Adapter) -> None:
    """Add the adapter of a choice on axis `adapter` to a model, in place; raises like `add_lora`."""
    if isinstance(choice, LoRA):
        add_lora(model, choice.rank, choice.alpha, choice.targets, choice.modules_to_save)


def frozen_and_trained(model: nn.Module, choice: LoRA) -> tuple[int, int]:
    """Return the number of weights that `store_linear_layers_in` may store in a smaller type, and the number that LoRA
    trains.

    The model is not changed and may be on the meta device.
    """
    modules = dict(model.named_modules())
    linear = {name: modules[name] for name in _linear_layers(model)}
    names = linear if isinstance(choice.targets, str) else _check_targets(model, choice.targets)
    targets = [name for name in linear if any(_ends_in(name, end) for end in names)]
    frozen = sum(parameter.numel() for module in linear.values() for parameter in module.parameters(recurse=False))
    # A set, because a tied weight is in several modules but is trained once.
    saved_parameters = {
        parameter for module in _modules_to_save(model, choice.modules_to_save) for parameter in module.parameters()
    }
    # LoRA's A has shape (rank, in), and B has shape (out, rank).
    low_rank = sum(choice.rank * sum(linear[name].weight.shape) for name in targets)
    return frozen, low_rank + sum(parameter.numel() for parameter in saved_parameters)


def modules_saved(model: nn.Module) -> list[str]:
    """Return the names of an adapted model's modules that are trained in addition to the adapter.

    If such a weight is tied, the names of all modules that share it are returned.
    """
    parameters = model.named_parameters(remove_duplicate=False)
    trained = (name for name, parameter in parameters if parameter.requires_grad)
    return sorted({name.rpartition(".")[0] for name in trained if not is_adapter_weight(name)})


# --- a model that comes with an adapter --------------------------------------------------------------------------


def _is_from_peft(model: nn.Module) -> bool:
    return any(base_class.__module__.partition(".")[0] == "peft" for base_class in type(model).__mro__)


def without_peft_wrapper(model: nn.Module) -> nn.Module:
    """Return the transformers model inside a `PeftModel`, with its adapter in place; return other models unchanged.

    Raises:
        ConfigurationError: the adapter is of a kind that cannot be trained here.
    """
    configs = getattr(model, "peft_config", None)
    if not _is_from_peft(model):
        if configs or has_adapter(model):
            check_adapter(model)
        return model
    kinds = {_method_name(config) for config in (configs or {}).values()}
    if kinds - {"LORA"} or not hasattr(model, "get_base_model"):
        raise _refusal(type(model).__name__, f"is an adapter of kind {', '.join(sorted(kinds)) or 'unknown'}")
    base: nn.Module = model.get_base_model()  # type: ignore[operator]
    check_adapter(base)
    return base


def _method_name(config: Any) -> str:
    """Return the name of the peft method of an adapter configuration, such as "LORA"."""
    return str(getattr(config.peft_type, "value", config.peft_type)).upper()


def _refusal(subject: str, reason: str) -> ConfigurationError:
    return ConfigurationError(
        f"model: {subject} {reason}; one LoRA adapter on linear layers, without dropout, can be trained here: make it "
        f"so, {_MERGE}"
    )


def check_adapter(model: nn.Module) -> None:
    """Refuse a model whose adapter computes more than W x + s B A x, or whose low-rank weights are frozen.

    Raises:
        ConfigurationError: the adapter cannot be trained here; the message names the reason and the remedy.
    """
    model_name = type(model).__name__
    configs = dict(getattr(model, "peft_config", None) or {})
    if len(configs) > 1:
        raise _refusal(model_name, f"has several adapters ({', '.join(configs)}; see model.delete_adapter)")
    for name, config in configs.items():
        if _method_name(config) != "LORA":
            raise _refusal(model_name, f"has an adapter of kind {_method_name(config)}")
        if getattr(config, "modules_to_save", None):
            raise _refusal(model_name, f"has an adapter ({name}) with modules_to_save={config.modules_to_save}")
        if getattr(config, "use_dora", False):
            raise _refusal(model_name, f"has an adapter ({name}) with use_dora=True (DoRA)")
    layers = adapted_layers(model)
    if not layers:
        raise _refusal(model_name, "has a configuration of LoRA and no layer with low-rank weights")
    head = model.get_output_embeddings()  # type: ignore[operator]
    for name, layer in layers.items():
        if not _is_linear(layer.base_layer) or layer is head:
            what = "output head" if layer is head else type(layer.base_layer).__name__
            raise _refusal(model_name, f"has low-rank weights on {name}, which is its {what}")
        active = list(layer.active_adapters)
        if len(active) != 1 or set(layer.lora_A) != set(active):
            raise _refusal(model_name, f"has several adapters at {name} ({', '.join(layer.lora_A)}; active: {active})")
        (adapter,) = active
        if getattr(layer, "lora_variant", None) or layer.use_dora.get(adapter, False):
            raise _refusal(model_name, f"has a variant of LoRA at {name} (DoRA or another)")
        if layer.lora_bias.get(adapter, False):
            raise _refusal(model_name, f"has low-rank weights with a bias at {name} (lora_bias=True)")
        if getattr(layer.lora_dropout[adapter], "p", 0.0) > 0:
            raise _refusal(model_name, f"has dropout before the low-rank weights at {name} (lora_dropout > 0)")
        if layer.merged or layer.disable_adapters:
            raise _refusal(model_name, f"has its adapter merged or disabled at {name}")
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    frozen = [name for name, _ in model.named_parameters() if is_adapter_weight(name) and name not in trained]
    if frozen:
        raise _refusal(
            model_name, f"has low-rank weights that are frozen ({frozen[0]}; load it with is_trainable=True)"
        )
    other_weights = sorted(name for name in trained if not is_adapter_weight(name))
    if other_weights:
        raise _refusal(model_name, f"trains other weights beside its adapter ({', '.join(other_weights[:3])})")


def adapter_description(model: nn.Module) -> dict[str, Any]:
    """Return a model's adapter as plain values: its ranks, scales, targets and number of layers."""
    layers = adapted_layers(model)
    ranks = sorted({int(layer.r[_active(layer)]) for layer in layers.values()})
    scales = sorted({float(layer.scaling[_active(layer)]) for layer in layers.values()})
    return {
        "method": "LoRA",
        "ranks": ranks,
        "scales": scales,
        "targets": sorted({name.rpartition(".")[2] for name in layers}),
        "layers": len(layers),
    }


def _active(layer: Any) -> str:
    """Return the name of a layer's only adapter."""
    (name,) = layer.active_adapters
    return str(name)


# --- types of the weights ----------------------------------------------------------------------------------------


class _LowPrecisionLinear(nn.Linear):
    """Linear layer whose weights may be stored in fewer bits than its input has."""

    def forward(self, x: Tensor) -> Tensor:
        """Return W x + b in autocast's type, or in the input's type without autocast."""
        if torch.is_autocast_enabled(x.device.type):
            return F.linear(x, self.weight, self.bias)
        return F.linear(x, self.weight.to(x.dtype), None if self.bias is None else self.bias.to(x.dtype))


def store_linear_layers_in(model: nn.Module, dtype: torch.dtype) -> None:
    """Store the linear layers of a model's body in `dtype`, in place, and all other weights in FP32.

    Low-rank weights, embeddings, norms and the output head stay FP32. Under autocast to the same type the results do
    not change, because autocast casts these weights in each pass anyway.
    """
    head = model.get_output_embeddings()  # type: ignore[operator]
    for name, module in model.named_modules():
        body = isinstance(module, nn.Linear) and module is not head and not is_adapter_weight(f"{name}.weight")
        for parameter in module.parameters(recurse=False):
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(dtype if body else torch.float32)
        if body and dtype != torch.float32 and type(module) is nn.Linear:
            module.__class__ = _LowPrecisionLinear


# --- the plain model ---------------------------------------------------------------------------------------------


@torch.no_grad()
def merge(state: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Merge the adapter: return the state dict of the plain model, with W + s B A in FP32 for each adapted layer.

    Args:
        state: unsharded tensors of the adapted model, by name; empty on a rank that does not need the result.
        model: the adapted model, for the layers and scales of its adapter. Its weights are not read, so they may be
            sharded.
    """
    if not state:
        return {}
    merged = {name.replace(".base_layer.", "."): value for name, value in state.items() if not is_adapter_weight(name)}
    for name, layer in adapted_layers(model).items():
        adapter = _active(layer)
        a, b = (state[f"{name}.lora_{part}.{adapter}.weight"].float() for part in "AB")
        change = b @ a * layer.scaling[adapter]
        base = state[f"{name}.base_layer.weight"].float()
        merged[f"{name}.weight"] = base + (change.T if layer.fan_in_fan_out else change)
    return merged


def merged_copy(model: nn.Module, weights: Mapping[str, Tensor] | None = None) -> nn.Module:
    """Return a new model of the same class and configuration with merged weights, in host memory.

    Args:
        model: an adapted model.
        weights: merged weights as returned by `merge`; None to merge the model's current weights.
    """
    adapted: Any = model
    # The constructor draws initial weights, which are replaced. The draw must not change the run's random state.
    with torch.random.fork_rng(devices=[]):
        copied: Any = type(adapted)(adapted.config)
    copied.load_state_dict(merge(model.state_dict(), model) if weights is None else weights)
    copied.generation_config = adapted.generation_config
    recompute_like(copied, adapted)
    result: nn.Module = copied.train(model.training)
    return result
