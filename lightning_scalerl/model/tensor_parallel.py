"""Tensor parallelism: each layer of a model is split over several ranks, by the plan of its transformers class.

The plan names the linear layers that are split by output features (`colwise`) or by input features (`rowwise`). The
embedding and the output head are split over the vocabulary. All other weights, such as norms, are whole on each rank
and have the same gradient everywhere. Between the layers all ranks have the same activations.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from lightning_scalerl.checks import ConfigurationError
from lightning_scalerl.model.head import text_config

FIELD = "strategy.tensor_parallel"


class _Replicated(ParallelStyle):
    """Style of a layer that is not split: every rank computes it with all weights, from the same activations."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return distribute_module(module, device_mesh, None, self._enter, self._leave)  # type: ignore[arg-type]

    @staticmethod
    def _enter(module: nn.Module, inputs: tuple[Any, ...], mesh: DeviceMesh) -> tuple[Any, ...]:
        def replicate(value: Any) -> Any:
            is_local = isinstance(value, Tensor) and not isinstance(value, DTensor)
            return DTensor.from_local(value, mesh, [Replicate()], run_check=False) if is_local else value

        return tuple(replicate(value) for value in inputs)

    @staticmethod
    def _leave(module: nn.Module, output: Any, mesh: DeviceMesh) -> Any:
        return output.to_local() if isinstance(output, DTensor) else output


# torch's equivalents of the styles in transformers' plans.
STYLES: dict[str, ParallelStyle] = {
    "colwise": ColwiseParallel(),
    "colwise_gather_output": ColwiseParallel(output_layouts=Replicate()),
    "rowwise": RowwiseParallel(),
    "rowwise_split_input": RowwiseParallel(input_layouts=Replicate()),
    "embedding_rowwise": RowwiseParallel(input_layouts=Replicate()),
    # Norms that act on one attention head at a time. Each rank sees only its own heads, so gradients must be summed.
    # SequenceParallel does that, and splits along `sequence_dim`. Dimension 0, the rows, is safe: no norm reduces it.
    "replicated_with_grad_allreduce": SequenceParallel(sequence_dim=0, use_local_output=True),
}


def check_tensor_parallel(model: nn.Module, size: int) -> None:
    """Check that a causal language model can be split over `size` ranks, without changing it.

    Raises:
        ConfigurationError: the model cannot be split.
    """
    config = text_config(model)
    for name in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, name, None) or size
        if heads % size:
            raise ConfigurationError(
                f"{FIELD}: {size} does not divide the model's {name}={heads}; give a number that does, or 1"
            )
    _styles(model, size)


def parallelize(root: nn.Module, mesh: DeviceMesh) -> None:
    """Split a model over the ranks of a one-dimensional mesh: all of its weights become DTensors on it.

    Args:
        root: `Policy` or `ValueModel`, before it is sharded by FSDP.
        mesh: the ranks that share each layer.

    Raises:
        ConfigurationError: the model has no plan, or a plan that is not supported.
    """
    owners: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in root.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                owners.setdefault(id(parameter), []).append((module, name))
    frozen = {id(parameter) for parameter in root.parameters() if not parameter.requires_grad}
    parallelize_module(root, mesh, _styles(root, mesh.size()), src_data_rank=None)
    for original, uses in owners.items():
        # torch has made new parameters, so restore tied weights and `requires_grad`.
        new_parameters: list[Any] = [module._parameters[name] for module, name in uses]
        assert all(parameter.placements == new_parameters[0].placements for parameter in new_parameters)
        new_parameters[0].requires_grad_(original not in frozen)
        for module, name in uses[1:]:
            module._parameters[name] = new_parameters[0]


def shrink_to_one_rank(model: nn.Module, size: int) -> None:
    """Reduce a model on the meta device to the shapes on one of `size` ranks, to measure that rank's forward pass.

    Tensors that ranks exchange get buffers of the same sizes as on a real rank.

    Raises:
        ConfigurationError: the model cannot be split over `size` ranks.
    """
    check_tensor_parallel(model, size)
    narrowed: dict[int, nn.Parameter] = {}  # by id of the original, so that tied weights stay tied
    for name, style in _styles(model, size).items():
        module = model.get_submodule(name)
        rows = isinstance(style, RowwiseParallel) and isinstance(module, nn.Linear)
        if not isinstance(style, ColwiseParallel | RowwiseParallel):
            continue
        for key, parameter in list(module.named_parameters(recurse=False)):
            if not (rows and key == "bias"):  # a bias is added after the sum over ranks, so it is not split
                part = parameter.chunk(size, dim=int(rows))[0]
                module._parameters[key] = narrowed.setdefault(id(parameter), nn.Parameter(torch.empty_like(part)))
        if style is STYLES["rowwise_split_input"]:
            module.register_forward_pre_hook(lambda _, inputs: (inputs[0].chunk(size, dim=-1)[0], *inputs[1:]))
        if style is STYLES["colwise_gather_output"] and module is not model.get_output_embeddings():  # type: ignore[operator]
            module.register_forward_hook(lambda _, inputs, output: torch.cat([output] * size, dim=-1))
        elif isinstance(style, RowwiseParallel):
            module.register_forward_hook(lambda _, inputs, output: output.clone())


def _styles(root: nn.Module, size: int) -> dict[str, ParallelStyle]:
    """Return the style of each layer with weights, by its name in `root`."""
    owner: tuple[str, Any] = next((name, module) for name, module in root.named_modules() if hasattr(module, "tp_plan"))
    prefix, model = f"{owner[0]}." if owner[0] else "", owner[1]
    plan: dict[str, str] = {f"{prefix}{name}": style for name, style in (model.tp_plan or {}).items()}
    model_name = type(model).__name__
    if not any(style.startswith(("colwise", "rowwise")) for name, style in plan.items() if ".*." in name):
        raise _refusal(size, f"{model_name} has no plan of how its layers are split")
    if unknown := sorted(set(plan.values()) - STYLES.keys()):
        raise _refusal(
            size, f"the plan of {model_name} splits layers in ways not supported here ({', '.join(unknown)})"
        )
    styles: dict[str, ParallelStyle] = {}
    for name, module in root.named_modules():
        weights = [f"{name}.{weight}" for weight, _ in module.named_parameters(recurse=False)]
        if not weights:
            continue
        if next(module.children(), None) is not None or any(_wildcard(weight) in plan for weight in weights):
            raise _refusal(size, f"{model_name} has weights outside of plain layers ({weights[0]})")
        if (vocabulary_style := _vocabulary_style(model, module)) is not None:
            divided = module.get_parameter("weight").shape[0] % size == 0
            styles[name] = STYLES[vocabulary_style] if divided else _Replicated()
        elif (style := plan.get(_wildcard(name))) is not None:
            _check_layer(f"{model_name}'s {name}", module, style, size)
            styles[name] = STYLES[style]
        elif any(style == "colwise" and _parent(layer) == _parent(_wildcard(name)) for layer, style in plan.items()):
            # The layer may see only this rank's features. Its gradient would silently be only a part of the whole.
            raise _refusal(size, f"the plan of {model_name} splits layers beside {name}, of which it says nothing")
        else:
            styles[name] = _Replicated()
    return styles


def _vocabulary_style(model: Any, module: nn.Module) -> str | None:
    """Return the style of the embedding or the output head; None for other layers.

    It overrides the plan, because both must be split alike if their weight is tied.
    """
    if module is model.get_output_embeddings() and isinstance(module, nn.Linear):
        return "colwise_gather_output"
    return "embedding_rowwise" if module is model.get_input_embeddings() and isinstance(module, nn.Embedding) else None


def _check_layer(name: str, module: nn.Module, style: str, size: int) -> None:
    """Raise a ConfigurationError if the layer cannot be split in this style over `size` ranks."""
    if style == "replicated_with_grad_allreduce":
        return
    if not isinstance(module, nn.Linear):
        raise _refusal(size, f"{name} is no linear layer that could be split")
    side, features = ("input", module.in_features) if style.startswith("rowwise") else ("output", module.out_features)
    if features % size:
        raise _refusal(size, f"{name} has {features} {side} features, which that does not divide")


def _refusal(size: int, reason: str) -> ConfigurationError:
    return ConfigurationError(f"{FIELD}: {size}, and {reason}; give {FIELD}=1")


def _parent(name: str) -> str:
    return name.rpartition(".")[0]


def _wildcard(name: str) -> str:
    """Return a module's name as plans write it, with a star for the number of a layer."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)
