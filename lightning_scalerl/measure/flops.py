"""FLOPs by formula: two per weight and token forward, and attention over the tokens in reach.

Useful work only: padding is not counted, so the number does not depend on how a batch was cut. A training token
costs three forward passes (forward, and twice that for the backward). Where a layer has a window, only tokens inside it
count.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_scalerl.checks import ConfigurationError, said
from lightning_scalerl.model.adapter import of_adapter
from lightning_scalerl.model.head import backbone, eval_mode, head_sizes, output_head, text_config
from lightning_scalerl.model.windows import Window, attention_windows, outside

# One of the experts that are chosen from; most models have them in one table of three dimensions. Shared ones, which
# every token uses, are called otherwise.
_EXPERT = re.compile(r"\.experts\.\d+\.")
# A layer of the stack, in the name of a parameter of its.
_LAYER = re.compile(r"\w+(\.\w+)*?\.(?P<number>\d+)(?=\.)")
_CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts", "moe_top_k")
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")


@dataclass(frozen=True)
class FlopModel:
    """FLOPs of one forward pass: `per_token` * tokens + `per_layer` * (tokens attended to, over all tokens and layers).

    `head` is the part of `per_token` that the language-model head costs; of a prompt the last token alone pays it.
    `context` is everywhere what tokens would attend to without windows, and `outside` the part of it that windows leave
    out, summed over layers (`model.windows`).

    All of this is of the plain model, as it generates. `adapter` is what low-rank weights add to a token in the
    trainer; `frozen` and `frozen_head` are the parts of body and head whose weights get no gradient beside them, and
    `below` is the part of all of it whose input gets none: what comes before the first trained weight, `layers_below`
    whole layers among it.
    """

    per_token: float
    head: float
    per_layer: float
    layers: int
    windows: tuple[Window, ...] = ()
    adapter: float = 0.0
    frozen: float = 0.0
    frozen_head: float = 0.0
    below: float = 0.0
    layers_below: int = 0

    @classmethod
    def of(cls, model: nn.Module) -> FlopModel:
        """Count a transformer, by parameter.

        A matrix costs two FLOPs a weight, whatever module holds it. Of a mixture's experts a token uses its share. What
        is only looked up (embeddings) costs nothing, unless it is the head as well.

        Raises:
            ConfigurationError: the configuration does not say how many layers or heads there are, or how many of its
                experts a token uses.
        """
        try:
            return cls._of(model)
        except (AttributeError, TypeError) as error:
            raise ConfigurationError(
                f"model: {type(model).__name__} says what it is in an unknown way ({said(error)}); its FLOPs cannot be "
                "counted"
            ) from error

    @classmethod
    def _of(cls, model: nn.Module) -> FlopModel:
        config = text_config(model)
        head = output_head(model).weight
        # Of a model that also sees or hears, the part that writes.
        whole = model if config is model.config else model.get_decoder()  # type: ignore[operator]
        looked_up = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)} - {id(head)}
        chosen, experts = _first(config, _CHOSEN), _first(config, _EXPERTS)
        inside = any(parameter is head for parameter in whole.parameters())
        per_token, adapter, frozen = 0.0 if inside else 2.0 * head.numel(), 0.0, 0.0
        counted: dict[int, float] = {}  # by the parameter's id
        for name, parameter in whole.named_parameters():
            # A bias that is a table has a row an expert: it is added, not multiplied with.
            if parameter.dim() < 2 or id(parameter) in looked_up or name.endswith("bias"):
                continue
            share = 1.0
            table = parameter.dim() == 3 and (".experts." in name or parameter.shape[0] == experts)
            if table or _EXPERT.search(name):
                if not chosen or not experts:
                    raise ConfigurationError(
                        f"model: {type(model).__name__} has experts, and its configuration does not say how many of "
                        f"them a token uses (looked for {', '.join(_CHOSEN)}; {', '.join(_EXPERTS)}); its FLOPs cannot "
                        "be counted"
                    )
                share = chosen / experts
            flops = counted[id(parameter)] = 2.0 * parameter.numel() * share
            if of_adapter(name):
                adapter += flops
                continue
            per_token += flops
            frozen += 0.0 if parameter.requires_grad or parameter is head else flops
        heads, layers = _number(model, "num_attention_heads"), _number(model, "num_hidden_layers")
        keys, values = head_sizes(config)
        # q k^T and the weighted sum of v: 2 FLOPs each a head dimension, head, layer and token attended to.
        per_layer = 2.0 * heads * (keys + values)
        plain = cls(per_token, 2.0 * head.numel(), per_layer, layers, attention_windows(config))
        if not adapter:
            return plain
        below, layers_below = _below(model, counted)
        return replace(
            plain,
            adapter=adapter,
            frozen=frozen,
            frozen_head=0.0 if head.requires_grad else plain.head,
            below=below,
            layers_below=layers_below,
        )

    @property
    def body_per_token(self) -> float:
        """FLOPs of a token without the head and without attention over its context."""
        return self.per_token - self.head

    @property
    def per_context(self) -> float:
        """FLOPs of attending to one token of the context, in all layers."""
        return self.per_layer * self.layers

    def prefill(self, tokens: int, context: int, heads: int = 0, outside: int = 0) -> float:
        """Return FLOPs of prompt tokens, and of the head for the first token after each of `heads` prompts."""
        return self.body_per_token * tokens + self.head * heads + self._attention(context, outside)

    def decode(self, tokens: int, context: int, outside: int = 0) -> float:
        """Return FLOPs of completion tokens that go through the model, one forward pass each."""
        return self.per_token * tokens + self._attention(context, outside)

    def body(self, lengths: list[int]) -> float:
        """Return FLOPs of a forward pass over whole sequences, without the head."""
        return self.forward(lengths, lengths)

    def forward(self, lengths: list[int], prompt_lengths: list[int]) -> float:
        """Return FLOPs of a forward pass over whole sequences; the head on completion tokens only."""
        tokens = sum(length - 1 for length in lengths)
        completion = sum(length - prompt for length, prompt in zip(lengths, prompt_lengths, strict=True))
        return self.body_per_token * tokens + self.head * completion + self._attention_of(lengths)

    def train(self, lengths: list[int], prompt_lengths: list[int]) -> float:
        """Return FLOPs of a forward and backward pass: three forward passes."""
        return 3.0 * self.forward(lengths, prompt_lengths)

    def adapting(self, lengths: list[int], prompt_lengths: list[int], updates: int, forwards: int) -> float:
        """Return what an adapter adds to the FLOPs of so many updates and forward passes; often less than nothing.

        Its own weights cost what other weights do. Of a frozen weight's three forward passes an update leaves one out:
        there is a gradient for what goes through it, and none for itself. Before the first trained weight there is none
        for what goes through either, nor for attention.
        """
        tokens = sum(length - 1 for length in lengths)
        completion = sum(length - prompt for length, prompt in zip(lengths, prompt_lengths, strict=True))
        added = (3.0 * updates + forwards) * self.adapter * tokens
        added -= updates * (self.frozen * tokens + self.frozen_head * completion)
        attention = self._attention_of(lengths) * self.layers_below / self.layers
        return added - updates * (self.below * tokens + 2.0 * attention)

    def _attention_of(self, lengths: list[int]) -> float:
        """Return FLOPs of attention in a forward pass over whole sequences."""
        context = sum((length - 1) * length // 2 for length in lengths)
        missing = sum(outside(self.windows, 0, length - 1) for length in lengths) if self.windows else 0
        return self._attention(context, missing)

    def _attention(self, context: int, outside: int) -> float:
        return self.per_context * context - self.per_layer * outside


class _SeenError(Exception):
    """Ends a forward pass whose first part was all that was asked for."""


def _below(model: nn.Module, counted: Mapping[int, float]) -> tuple[float, int]:
    """Return FLOPs a token of the matrices whose input gets no gradient, and how many whole layers get none.

    Tried on two tokens, up to the first layer with a trained weight. Nothing where that cannot be done, as without data
    where a mixture chooses experts.

    Args:
        model: with an adapter.
        counted: FLOPs a token of its matrices, by their id.
    """
    base, below = backbone(model), 0.0
    layers = [match for name, each in base.named_parameters() if each.requires_grad and (match := _LAYER.match(name))]
    if not layers:
        return 0.0, 0
    first = min(layers, key=lambda match: int(match["number"]))
    graded: list[bool] = []

    def asks(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        return any(isinstance(each, Tensor) and each.requires_grad for each in (*args, *kwargs.values()))

    def matrix(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal below
        if not asks(module, args, kwargs):
            below += sum(counted.get(id(each), 0.0) for each in module.parameters(recurse=False))

    def seen(*_: Any) -> None:
        raise _SeenError

    owners = [each for each in base.modules() if any(id(own) in counted for own in each.parameters(recurse=False))]
    hooks = [each.register_forward_pre_hook(matrix, with_kwargs=True) for each in owners]
    layer = base.get_submodule(first[0])
    hooks.append(layer.register_forward_pre_hook(lambda *given: graded.append(asks(*given)), with_kwargs=True))
    hooks.append(layer.register_forward_hook(seen))
    try:
        with eval_mode(model), torch.enable_grad():
            base(input_ids=torch.zeros(1, 2, dtype=torch.long, device=next(base.parameters()).device), use_cache=False)
    except _SeenError:
        return below, 0 if graded[0] else int(first["number"])
    except (NotImplementedError, RuntimeError):
        return 0.0, 0
    finally:
        for hook in hooks:
            hook.remove()
    return below, 0


def _first(config: Any, keys: Sequence[str]) -> int | None:
    return next((value for key in keys if isinstance(value := getattr(config, key, None), int)), None)


def _number(model: nn.Module, field: str) -> int:
    value = getattr(text_config(model), field, None)
    if not isinstance(value, int):
        raise ConfigurationError(
            f"model: {type(model).__name__} has no {field} in its configuration; its FLOPs cannot be counted"
        )
    return value
