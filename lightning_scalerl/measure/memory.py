"""Memory that a run takes on each device, foretold before compute is spent: a step is gone through without any data.

Models and one step are made of tensors that have a shape and no content (torch's `FakeTensorMode`), so a model of 70
billion parameters is measured in seconds on a laptop. What is alive at the same time is counted at every operation: the
peak is that of the project's own forward pass, head and backward pass, whatever the architecture. Weights, gradients
and optimizer states are counted beside it, by their numbers.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from lightning_scalerl.axes.adapter import LoRA
from lightning_scalerl.axes.precision import Precision
from lightning_scalerl.checks import ConfigurationError, said
from lightning_scalerl.distributed.ranks import BUFFER
from lightning_scalerl.distributed.sharded import blocks
from lightning_scalerl.generator.memory import GIB, cache_gib
from lightning_scalerl.model import policy as policies
from lightning_scalerl.model.adapter import frozen_and_trained
from lightning_scalerl.model.head import backbone, output_head, token_scores
from lightning_scalerl.model.packed import row_mask
from lightning_scalerl.model.place import load_options, model_path
from lightning_scalerl.model.policy import Policy
from lightning_scalerl.model.recompute import can_recompute, recompute, set_mode
from lightning_scalerl.model.tensor_parallel import narrow
from lightning_scalerl.recipe import Recipe


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts bytes of all tensor storages that are alive, at every operation; `peak` is the most since `reset`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._known: set[int] = set()

    def reset(self) -> None:
        """Let the peak begin anew at what is alive now."""
        self.peak = self.now

    def _forget(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size

    def watch(self, tensor: Tensor) -> None:
        """Count a tensor's storage, once, until it is freed."""
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key not in self._known:
            self._known.add(key)
            self.now += size
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._forget, key, size)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        called = _grouped(func) if func in _GROUPED and isinstance(args[0], FakeTensor) else func
        result = called(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.watch(leaf)
        return result


# A product for each expert of a mixture.
_GROUPED = frozenset({torch.ops.aten._grouped_mm.default})


def _grouped(func: Any) -> Callable[..., Any]:
    """Return a product by groups for tensors without data: torch knows the shape of its result for BF16 alone."""

    def shaped(one: Tensor, two: Tensor, *args: Any, **kwargs: Any) -> Any:
        return func(one.bfloat16(), two.bfloat16(), *args, **kwargs).to(one.dtype)

    return shaped


@dataclass(frozen=True)
class Memory:
    """Memory of a run in bytes, by part: on each training device, on rank 0's beside that, and on its host.

    `tokens` is the size of the pass that was gone through, rows x (prompt and completion); `row` one row of it.
    """

    device: Mapping[str, int]
    leader: Mapping[str, int]
    host: Mapping[str, int]
    parameters: int
    tokens: int
    row: int

    @property
    def peak(self) -> int:
        """Most that any device needs: rank 0's, which generates as well."""
        return sum(self.device.values()) + sum(self.leader.values())


@dataclass(frozen=True)
class Measured:
    """Sizes of a model and of one of its passes, in bytes, whatever devices there are.

    `parameters` counts the model's numbers. Of one of `partners` ranks that split its layers are all others: `trained`
    counts numbers, `weights` are bytes as they are kept, `whole`, `body` and `layers` FP32 bytes of everything, without
    the head, and of each block. `activations` are those of the pass that was gone through, of `tokens` tokens in rows
    of up to `row`; `on_host` those kept on the host meanwhile. `cache` are keys and values of one token.
    """

    parameters: int
    trained: int
    weights: int
    body: int
    layers: tuple[int, ...]
    activations: int
    cache: int
    tokens: int
    row: int
    on_host: int
    whole: int
    partners: int = 1


def measure(skeleton: Callable[[], nn.Module], recipe: Recipe, partners: int = 1) -> Measured:
    """Go through a pass with rows of full length, without data.

    Args:
        skeleton: makes the language model, with FP32 weights; called without memory for them.
        recipe: gives precision, batch, context and adapter.
        partners: ranks that split each layer between them.

    Raises:
        ConfigurationError: a model that so many cannot split, or whose step cannot be gone through without data.
    """
    choices, context = recipe.choices, recipe.context
    kind = choices.precision.policy_dtype
    length = context.max_prompt_tokens + context.max_new_tokens
    size = recipe.batch.a_pass
    rows = size.rollouts if size.tokens is None else max(1, min(size.rollouts, size.tokens // length))
    rows = min(rows, recipe.batch.prompts * recipe.batch.completions)
    on_host: list[int] = []
    try:
        with FakeTensorMode():
            model = skeleton()
            parameters = _bytes(model) // 4
            cache = round(cache_gib(model, kind, 1) * GIB)
            vocabulary = output_head(model).weight.shape[0]
            if partners > 1:
                narrow(model, partners)
            parts = vocabulary // output_head(model).weight.shape[0]
            whole = _bytes(model)
            body, layers = _bytes(backbone(model)), tuple(_bytes(block) for block in blocks(model))
            weights, trained = whole, whole // 4
            if isinstance(choices.adapter, LoRA):
                frozen, trained = frozen_and_trained(model, choices.adapter)
                # What a pass has alive is taken to be the full model's: it is a little less.
                weights += 4 * trained - frozen * (4 - kind.itemsize)
            if recipe.batch.recomputes(parameters) and can_recompute(model):
                recompute(model, partial(_elsewhere, on_host) if recipe.batch.offload else None)
            set_mode(model, recipe.optimizer.dropout)
            policy = Policy(model, choices.precision, context.temperature)
            lengths = (context.max_prompt_tokens, context.max_new_tokens)
            activations = _pass_bytes(policy, rows, *lengths, packed=recipe.batch.packed, parts=parts)
    except (RuntimeError, NotImplementedError, TypeError) as error:
        raise ConfigurationError(f"model: its memory cannot be foretold ({said(error)})") from error
    sizes = (activations, cache, rows * length, length, sum(on_host), whole, partners)
    return Measured(parameters, trained, weights, body, layers, *sizes)


def _elsewhere(sizes: list[int]) -> saved_tensors_hooks:
    """Return hooks that keep nothing of a saved tensor but its size, as if it were in another memory."""

    def pack(tensor: Tensor) -> tuple[torch.Size, torch.dtype]:
        sizes.append(tensor.numel() * tensor.itemsize)
        return tensor.shape, tensor.dtype

    def unpack(about: tuple[torch.Size, torch.dtype]) -> Tensor:
        return torch.empty(about[0], dtype=about[1])

    return saved_tensors_hooks(pack, unpack)


def foretell(of: Measured, recipe: Recipe, ranks: int = 1, strategy: str = "ddp", slots: int = 0) -> Memory:
    """Return the memory that training takes on each device.

    Args:
        of: the model and a pass, as `measure` has found them under this recipe.
        recipe: says whether there are critic and reference, and in which type the generator works.
        ranks: devices that train the run, tensor-parallel partners among them.
        strategy: how they share the model: "ddp" or "fsdp2".
        slots: rollouts that rank 0 generates at a time; 0 if the generator has devices of its own.
    """
    choices, whole = recipe.choices, of.whole
    sharded = strategy == "fsdp2" and ranks > 1
    share = ranks // of.partners if sharded else 1
    device = {
        "weights": -(-of.weights // share),
        "gradients": -(-4 * of.trained // share),
        "Adam's moments": -(-8 * of.trained // share),
        "activations of a pass": of.activations,
    }
    if choices.kl.where:
        device["reference"] = -(-whole // share)
    if choices.critic.has_values:
        device["critic, its gradients and moments"] = -(-4 * of.body // share)
    if sharded:
        # The root's weights and two layers' at a time, whole, and the gradients of as many before they are parted.
        device["layers made whole"] = 2 * (whole - sum(of.layers)) + 4 * max(of.layers, default=0)
    elif ranks > 1:
        device["gradients on their way"] = min(4 * of.trained, 4 * BUFFER)
    width = choices.precision.policy_dtype.itemsize
    generator = {"the generator's weights": width * of.parameters, "its keys and values": slots * of.row * of.cache}
    host = {"weights on their way to the generator": 4 * of.parameters} if sharded else {}
    if of.on_host:
        host["inputs of layers, of each device's pass"] = of.on_host
    return Memory(device, generator if slots else {}, host, of.parameters, of.tokens, of.row)


def fitted(
    skeleton: Callable[[], nn.Module],
    recipe: Recipe,
    ranks: int,
    strategy: str,
    slots: int,
    most_gib: float | None,
    limit: int | None,
    partners: int = 1,
) -> tuple[Memory, str]:
    """Return the memory of a run, and a setting with which it fits into `limit` bytes a device; empty where it does.

    Args:
        skeleton, recipe: as of `measure`.
        ranks, strategy: as of `foretell`.
        slots: of a generator on rank 0's device; 0 if the generator has devices of its own.
        most_gib: GiB that its keys and values may take (`generator.cache_gib`); None for what all slots need.
        limit: bytes of a device; None for no limit.
        partners: as of `measure`; they are among the ranks.

    Raises:
        ConfigurationError: a model that so many cannot split, or whose step cannot be gone through without data.
    """
    measured = measure(skeleton, recipe, partners)
    slots = decoded_together(measured, slots, most_gib)
    found = foretell(measured, recipe, ranks, strategy, slots)
    fits = limit is None or found.peak <= limit
    return found, "" if fits or limit is None else advice(skeleton, recipe, ranks, strategy, slots, limit, partners)


def decoded_together(of: Measured, slots: int, most_gib: float | None) -> int:
    """Return how many rollouts an engine decodes together: its slots, or fewer where keys and values may take less.

    Args:
        of: the model, as `measure` has found it.
        slots: of the generator.
        most_gib: GiB that its keys and values may take (`generator.cache_gib`); None for what all slots need.
    """
    if not slots or most_gib is None:
        return slots
    return max(1, min(slots, int(most_gib * GIB / (of.row * of.cache))))


def _bytes(module: nn.Module) -> int:
    """Return the FP32 bytes of a module's parameters."""
    return 4 * sum(parameter.numel() for parameter in module.parameters())


def _pass_bytes(policy: Policy, rows: int, prompt: int, completion: int, packed: bool, parts: int) -> int:
    """Return the most that is alive in a forward and backward pass beyond weights and gradients, in bytes."""
    model: nn.Module = policy.model
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    live = LiveBytes()
    for tensor in [*model.parameters(), *model.buffers(), *(parameter.grad for parameter in model.parameters())]:
        if tensor is not None:
            live.watch(tensor)
    with live:
        live.reset()
        before = live.now
        tokens = torch.zeros(rows, prompt + completion, dtype=torch.int64)
        inner, length = backbone(model), prompt + completion - 1
        given: dict[str, Any] = {"input_ids": tokens[:, :-1]}
        if packed:
            with unset_fake_temporarily():  # a tensor of its own kind, without content as it is
                mask = row_mask(inner, [length] * rows, torch.device("cpu"))
            given = {"input_ids": tokens[:, :-1].reshape(1, -1), "attention_mask": mask}
            given["position_ids"] = torch.arange(length).repeat(1, rows)
        with policy.autocast(policy.precision):
            hidden = inner(**given, use_cache=False).last_hidden_state
        states = hidden.view(rows, length, -1)[:, prompt - 1 :].reshape(-1, hidden.shape[-1])
        score = policy._score if parts == 1 else partial(_score_in_parts, policy, parts)
        logprobs, _ = score(states, tokens[:, prompt:].reshape(-1), policy.precision, False)
        logprobs.sum().backward()  # type: ignore[no-untyped-call]
        return live.peak - before


def _score_in_parts(
    policy: Policy, parts: int, hidden: Tensor, targets: Tensor, precision: Precision, entropy_gradient: bool
) -> tuple[Tensor, Tensor]:
    """Do what `Policy._score` does on a rank with one of so many parts of the vocabulary: each chunk is made again."""
    dtype = precision.head_dtype(precision.fp32_head_trainer)

    def score(states: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
        return token_scores(policy.model, states, wanted, dtype, policy.temperature, entropy_gradient)

    chunk = max(1, policies.MAX_LOGITS // (parts * output_head(policy.model).weight.shape[0]))
    if len(hidden) <= chunk:
        return score(hidden, targets)
    pieces = zip(torch.split(hidden, chunk), torch.split(targets, chunk), strict=True)
    scored = [checkpoint(score, states, wanted, use_reentrant=False) for states, wanted in pieces]
    return torch.cat([each[0] for each in scored]), torch.cat([each[1] for each in scored])


def from_config(path: str) -> Callable[[], nn.Module]:
    """Return a function that makes the model of a folder or hub id from its configuration alone.

    Raises:
        ConfigurationError: there is no configuration of a causal language model.
    """
    options, path = load_options(path), model_path(path)
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(path, **options)
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"model.path: {path!r} holds no readable configuration ({said(error)})") from error
    return partial(AutoModelForCausalLM.from_config, config, dtype=torch.float32)


def advice(
    skeleton: Callable[[], nn.Module],
    recipe: Recipe,
    ranks: int,
    strategy: str,
    slots: int,
    limit: int,
    partners: int = 1,
) -> str:
    """Return the nearest setting with which a run fits into a device of `limit` bytes, in one line.

    Tried in this order: activations recomputed, a pass of one row, its layers' inputs on the host, fewer rollouts at a
    time, the model sharded, more devices.
    """
    once = replace(recipe, batch=replace(recipe.batch, recompute=True))
    length = recipe.context.max_prompt_tokens + recipe.context.max_new_tokens
    one_row = replace(once, batch=replace(once.batch, micro_tokens=length))
    if foretell(measure(skeleton, once, partners), once, ranks, strategy, slots).peak <= limit:
        return "it would with batch.recompute=true"
    words = f"batch.recompute=true batch.micro_tokens={length}"
    a_row = measure(skeleton, one_row, partners)
    offloaded = replace(one_row, batch=replace(one_row.batch, offload=True))
    tries = [(words, a_row, ranks, strategy, slots)]
    tries.append((f"{words} batch.offload=true", measure(skeleton, offloaded, partners), ranks, strategy, slots))
    if slots > 1:
        fewer = max(1, slots // 4)
        tries.append((f"{words} generator.slots={fewer}", a_row, ranks, strategy, fewer))
    counts = (2, 4, 8, 16, 32, 64, 128, 256)
    more = [ranks, *(count for count in counts if count > ranks and count % partners == 0)]
    tries += [
        (f"{words} strategy=fsdp2 driver=live on {count} devices", a_row, count, "fsdp2", 0)
        for count in more
        if count > 1
    ]
    for text, measured, devices, by, at_a_time in tries:
        if foretell(measured, one_row, devices, by, at_a_time).peak <= limit:
            return f"it would with {text}"
    return "it would not on 256 devices either: lower context.max_new_tokens, or take a smaller model"
