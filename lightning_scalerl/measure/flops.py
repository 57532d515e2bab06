"""FLOPs by formula: a forward pass costs two FLOPs per weight and token, plus attention over the context.

Only useful work counts. Padding does not, so the result does not depend on how a batch is split into passes. A training
token costs three forward passes: the forward itself, and twice that for the backward. In a layer with an attention
window only the tokens inside the window count.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_scalerl.checks import ConfigurationError, error_line
from lightning_scalerl.model.adapter import is_adapter_weight
from lightning_scalerl.model.head import backbone, eval_mode, key_and_value_sizes, output_head, text_config
from lightning_scalerl.model.windows import Window, attention_windows, outside

# Matches parameters of one routed expert; most models keep all experts in one three-dimensional tensor instead. Shared
# experts, which every token uses, have other names.
_EXPERT = re.compile(r"\.experts\.\d+\.")
# Matches the layer in a parameter's name: "model.layers.3" in "model.layers.3.mlp.up_proj.weight".
_LAYER = re.compile(r"\w+(\.\w+)*?\.(?P<number>\d+)(?=\.)")
# Configuration fields, by model family: experts per token, and experts in total.
_EXPERTS_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts", "moe_top_k")
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")


@dataclass(frozen=True)
class FlopModel:
    """FLOPs of one forward pass: `per_token` * tokens + `per_layer` * attended tokens, summed over tokens and layers.

    In the methods, `context` is the number of attended tokens, summed over tokens, as if no layer had a window.
    `outside` is the number of attended tokens that windows exclude, summed over tokens and layers (`model.windows`).

    Attributes:
        per_token: FLOPs per token in the plain model without an adapter, as the generator runs it; attention excluded.
        head: part of `per_token` in the language-model head. A prompt needs it for the last token only.
        per_layer: FLOPs per token and attended token in one layer.
        layers: number of layers.
        windows: attention windows of the layers.
        adapter: FLOPs per token that low-rank weights add in the trainer.
        frozen: FLOPs per token of the body's weights that get no gradient.
        frozen_head: FLOPs per token of the head if its weights or its inputs need no gradient, else 0.
        flops_below: FLOPs per token of the matrices before the first trained weight; their inputs need no gradient
            either.
        layers_below: number of whole layers before the first trained weight.
    """

    per_token: float
    head: float
    per_layer: float
    layers: int
    windows: tuple[Window, ...] = ()
    adapter: float = 0.0
    frozen: float = 0.0
    frozen_head: float = 0.0
    flops_below: float = 0.0
    layers_below: int = 0

    @classmethod
    def of(cls, model: nn.Module) -> FlopModel:
        """Count the FLOPs of a transformer from its parameters.

        A matrix costs two FLOPs per weight and token, regardless of its module. Experts count in proportion to the
        number that a token uses. Embeddings are only looked up and cost nothing, except if they are tied to the head.

        Raises:
            ConfigurationError: the model's configuration lacks the number of layers, of heads, or of experts per token.
        """
        try:
            return cls._of(model)
        except (AttributeError, TypeError) as error:
            raise ConfigurationError(
                f"model: {type(model).__name__} says what it is in an unknown way ({error_line(error)}); its FLOPs "
                "cannot be counted"
            ) from error

    @classmethod
    def _of(cls, model: nn.Module) -> FlopModel:
        config = text_config(model)
        head = output_head(model).weight
        # Count only the language model of a multimodal model.
        decoder = model if config is model.config else model.get_decoder()  # type: ignore[operator]
        embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)} - {id(head)}
        experts_per_token, experts = _first_number(config, _EXPERTS_PER_TOKEN), _first_number(config, _EXPERTS)
        has_head = any(parameter is head for parameter in decoder.parameters())
        per_token, adapter, frozen = 0.0 if has_head else 2.0 * head.numel(), 0.0, 0.0
        flops_by_id: dict[int, float] = {}  # FLOPs per token by the parameter's id
        for name, parameter in decoder.named_parameters():
            # A two-dimensional bias has one row per expert; it is added, not multiplied.
            if parameter.dim() < 2 or id(parameter) in embeddings or name.endswith("bias"):
                continue
            share = 1.0
            is_expert_table = parameter.dim() == 3 and (".experts." in name or parameter.shape[0] == experts)
            if is_expert_table or _EXPERT.search(name):
                if not experts_per_token or not experts:
                    raise ConfigurationError(
                        f"model: {type(model).__name__} has experts, and its configuration does not say how many of "
                        f"them a token uses (looked for {', '.join(_EXPERTS_PER_TOKEN)}; "
                        f"{', '.join(_EXPERTS)}); its FLOPs cannot be counted"
                    )
                share = experts_per_token / experts
            flops = flops_by_id[id(parameter)] = 2.0 * parameter.numel() * share
            if is_adapter_weight(name):
                adapter += flops
                continue
            per_token += flops
            frozen += 0.0 if parameter.requires_grad or parameter is head else flops
        heads, layers = _config_number(model, "num_attention_heads"), _config_number(model, "num_hidden_layers")
        keys, values = key_and_value_sizes(config)
        # q k^T and the weighted sum of v: 2 FLOPs each per head dimension, head, layer and attended token.
        per_layer = 2.0 * heads * (keys + values)
        plain = cls(per_token, 2.0 * head.numel(), per_layer, layers, attention_windows(config))
        if head.requires_grad and all(parameter.requires_grad for parameter in decoder.parameters()):
            return plain
        flops_below, layers_below, head_is_first = _flops_below_trained(model, decoder, flops_by_id)
        return replace(
            plain,
            adapter=adapter,
            frozen=frozen,
            frozen_head=plain.head if head_is_first or not head.requires_grad else 0.0,
            flops_below=flops_below,
            layers_below=layers_below,
        )

    @property
    def body_per_token(self) -> float:
        """FLOPs per token without the head and without attention."""
        return self.per_token - self.head

    @property
    def per_context(self) -> float:
        """FLOPs per token and attended token, in all layers."""
        return self.per_layer * self.layers

    def prefill(self, tokens: int, context: int, heads: int = 0, outside: int = 0) -> float:
        """Return the FLOPs of prompt tokens, and of the head for the first token after each of `heads` prompts."""
        return self.body_per_token * tokens + self.head * heads + self._attention(context, outside)

    def decode(self, tokens: int, context: int, outside: int = 0) -> float:
        """Return the FLOPs of completion tokens, each decoded by one forward pass."""
        return self.per_token * tokens + self._attention(context, outside)

    def body(self, lengths: list[int]) -> float:
        """Return the FLOPs of a forward pass over whole sequences, without the head."""
        return self.forward(lengths, lengths)

    def forward(self, lengths: list[int], prompt_lengths: list[int]) -> float:
        """Return the FLOPs of a forward pass over whole sequences, with the head on completion tokens only.

        Args:
            lengths: tokens of each sequence, prompt included. The last token is a target only and is not an input.
            prompt_lengths: prompt tokens of each sequence.
        """
        tokens = sum(length - 1 for length in lengths)
        completion = sum(length - prompt for length, prompt in zip(lengths, prompt_lengths, strict=True))
        return self.body_per_token * tokens + self.head * completion + self._attention_of(lengths)

    def train(self, lengths: list[int], prompt_lengths: list[int]) -> float:
        """Return the FLOPs of a forward and backward pass: three forward passes."""
        return 3.0 * self.forward(lengths, prompt_lengths)

    def partial_training(self, lengths: list[int], prompt_lengths: list[int], updates: int, forwards: int) -> float:
        """Return the FLOPs that an adapter and frozen weights add to those of full training; usually negative.

        The adapter's weights cost as much as any other weights. An update costs as much as three forward passes: one
        forward, one for the gradients of inputs, and one for the gradients of weights. A frozen weight saves the third
        pass. Layers before the first trained weight need no gradients at all, so their weights and their attention save
        the second pass and the third. The result is 0 if there is neither an adapter nor a frozen weight.

        Args:
            lengths: tokens of each sequence, prompt included.
            prompt_lengths: prompt tokens of each sequence.
            updates: forward and backward passes over these sequences.
            forwards: forward passes without a backward pass.
        """
        tokens = sum(length - 1 for length in lengths)
        completion = sum(length - prompt for length, prompt in zip(lengths, prompt_lengths, strict=True))
        added = (3.0 * updates + forwards) * self.adapter * tokens
        added -= updates * (self.frozen * tokens + self.frozen_head * completion)
        attention = self._attention_of(lengths) * self.layers_below / self.layers
        return added - updates * (self.flops_below * tokens + 2.0 * attention)

    def _attention_of(self, lengths: list[int]) -> float:
        context = sum((length - 1) * length // 2 for length in lengths)
        excluded = sum(outside(self.windows, 0, length - 1) for length in lengths) if self.windows else 0
        return self._attention(context, excluded)

    def _attention(self, context: int, outside: int) -> float:
        return self.per_context * context - self.per_layer * outside


class _FirstLayerDoneError(Exception):
    """Raised by a hook to stop a forward pass after the first layer with a trained weight."""


def _flops_below_trained(
    model: nn.Module, decoder: nn.Module, flops_by_id: Mapping[int, float]
) -> tuple[float, int, bool]:
    """Measure the part of a model before its first trained weight, which needs no gradient.

    Return the FLOPs per token of the matrices whose input needs no gradient, the number of layers with such inputs, and
    whether the head's input needs none either. Hooks measure this in a forward pass of two tokens, which stops after
    the first layer with a trained weight. If the pass fails, return (0, 0, False). It fails on fake tensors (without
    data) if a router has to choose experts.
    """
    base, flops_below = backbone(model), 0.0
    ids = {id(parameter) for parameter in decoder.parameters()}
    layers = [
        (match, parameter)
        for name, parameter in base.named_parameters()
        if id(parameter) in ids and (match := _LAYER.match(name))
    ]
    trained_layers = [match for match, parameter in layers if parameter.requires_grad]
    if not layers:
        return 0.0, 0, False
    # Without a trained layer, the pass goes through all layers.
    first = min(trained_layers or [match for match, _ in layers], key=lambda match: int(match["number"]))
    first_layer_needs_gradient: list[bool] = []

    def needs_gradient(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        return any(isinstance(value, Tensor) and value.requires_grad for value in (*args, *kwargs.values()))

    def count_matrices(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal flops_below
        if not needs_gradient(module, args, kwargs):
            flops_below += sum(flops_by_id.get(id(parameter), 0.0) for parameter in module.parameters(recurse=False))

    def stop(*_: Any) -> None:
        raise _FirstLayerDoneError

    modules_with_matrices = [
        module
        for module in base.modules()
        if any(id(parameter) in flops_by_id for parameter in module.parameters(recurse=False))
    ]
    hooks = [module.register_forward_pre_hook(count_matrices, with_kwargs=True) for module in modules_with_matrices]
    layer = base.get_submodule(first[0])
    hooks.append(
        layer.register_forward_pre_hook(
            lambda *call: first_layer_needs_gradient.append(needs_gradient(*call)), with_kwargs=True
        )
    )
    if trained_layers:
        hooks.append(layer.register_forward_hook(stop))
    try:
        with eval_mode(model), torch.enable_grad():
            device = next(base.parameters()).device
            output = base(input_ids=torch.zeros(1, 2, dtype=torch.long, device=device), use_cache=False)
    except _FirstLayerDoneError:
        # The layers before this one need no gradient only if this layer's input needs none.
        return flops_below, 0 if any(first_layer_needs_gradient) else int(first["number"]), False
    except (NotImplementedError, RuntimeError):
        return 0.0, 0, False
    finally:
        for hook in hooks:
            hook.remove()
    num_layers = 1 + max(int(match["number"]) for match, _ in layers)
    return flops_below, 0 if any(first_layer_needs_gradient) else num_layers, not output[0].requires_grad


def _first_number(config: Any, keys: Sequence[str]) -> int | None:
    return next((value for key in keys if isinstance(value := getattr(config, key, None), int)), None)


def _config_number(model: nn.Module, field: str) -> int:
    value = getattr(text_config(model), field, None)
    if not isinstance(value, int):
        raise ConfigurationError(
            f"model: {type(model).__name__} has no {field} in its configuration; its FLOPs cannot be counted"
        )
    return value
