"""Prediction of the memory that a run needs on each device, before any compute is spent.

One training pass runs on tensors that have a shape but no data (torch's `FakeTensorMode`), so a model of 70 billion
parameters is measured in seconds on a laptop. The bytes that are alive are counted at every operation. The peak is
therefore that of the project's real forward pass, head and backward pass, for any architecture. Weights, gradients and
optimizer states are added by formula.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from lightning_scalerl.axes.adapter import LoRA
from lightning_scalerl.axes.kl import KL
from lightning_scalerl.axes.precision import Precision
from lightning_scalerl.checks import ConfigurationError, error_line
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
from lightning_scalerl.model.tensor_parallel import shrink_to_one_rank
from lightning_scalerl.recipe import Recipe


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of all live tensor storages at every operation; `peak` is the maximum since `reset`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._storages: set[int] = set()

    def reset(self) -> None:
        """Set the peak to the bytes that are alive now."""
        self.peak = self.now

    def _subtract(self, key: int, size: int) -> None:
        self._storages.discard(key)
        self.now -= size

    def watch(self, tensor: Tensor) -> None:
        """Count a tensor's storage until it is freed; storages that are already counted are ignored."""
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key not in self._storages:
            self._storages.add(key)
            self.now += size
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._subtract, key, size)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        operation = _grouped(func) if func in _GROUPED and isinstance(args[0], FakeTensor) else func
        result = operation(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.watch(leaf)
        return result


# Operations that compute the matrix products of all experts of a mixture at once.
_GROUPED = frozenset({torch.ops.aten._grouped_mm.default})


def _grouped(func: Any) -> Callable[..., Any]:
    """Return a grouped product that works on fake tensors of any type: torch's own supports BF16 only."""

    def in_bf16(left: Tensor, right: Tensor, *args: Any, **kwargs: Any) -> Any:
        return func(left.bfloat16(), right.bfloat16(), *args, **kwargs).to(left.dtype)

    return in_bf16


@dataclass(frozen=True)
class Memory:
    """Predicted memory of a run in bytes, by purpose (weights, gradients, ...).

    Attributes:
        device: bytes on each training device.
        leader: additional bytes on the device of rank 0, if rank 0 generates.
        host: bytes on the host.
        parameters: number of the model's parameters.
        tokens: size of the measured pass in tokens, rows x (prompt and completion).
        row: tokens of one row of the measured pass.
    """

    device: Mapping[str, int]
    leader: Mapping[str, int]
    host: Mapping[str, int]
    parameters: int
    tokens: int
    row: int

    @property
    def peak(self) -> int:
        """Bytes on the fullest device, which is rank 0's."""
        return sum(self.device.values()) + sum(self.leader.values())


@dataclass(frozen=True)
class MeasuredModel:
    """Sizes of a model and of one of its training passes, independent of the number of devices.

    With tensor parallelism, `partners` ranks split each layer between them. All values except `parameters` and `cache`
    are for one of these ranks.

    Attributes:
        parameters: number of the whole model's parameters.
        trained: number of trained parameters.
        weights: bytes of the weights in the type in which they are stored.
        body: FP32 bytes of the model without the head.
        layers: FP32 bytes of each block.
        activations: peak bytes of the measured pass beyond weights and gradients.
        cache: bytes of the keys and values of one token.
        tokens: size of the measured pass in tokens.
        row: tokens of one row of that pass.
        on_host: bytes of activations that the pass keeps on the host.
        whole: FP32 bytes of the model.
        partners: number of tensor-parallel ranks.
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


def measure(skeleton: Callable[[], nn.Module], recipe: Recipe, partners: int = 1) -> MeasuredModel:
    """Measure a model and one training pass over rows of full length, on fake tensors.

    Args:
        skeleton: returns the language model with FP32 weights; called under `FakeTensorMode`.
        recipe: gives precision, batch, context and adapter.
        partners: number of ranks that split each layer between them (tensor parallelism).

    Raises:
        ConfigurationError: the model cannot be split between `partners` ranks, or does not run on fake tensors.
    """
    choices, context = recipe.choices, recipe.context
    dtype = choices.precision.policy_dtype
    length = context.max_prompt_tokens + context.max_new_tokens
    size = recipe.batch.pass_size
    rows = size.rollouts if size.tokens is None else max(1, min(size.rollouts, size.tokens // length))
    rows = min(rows, recipe.batch.prompts * recipe.batch.completions)
    on_host: list[int] = []
    try:
        with FakeTensorMode():
            model = skeleton()
            parameters = _fp32_bytes(model) // 4
            cache = round(cache_gib(model, dtype, 1) * GIB)
            vocabulary = output_head(model).weight.shape[0]
            if partners > 1:
                shrink_to_one_rank(model, partners)
            vocabulary_parts = vocabulary // output_head(model).weight.shape[0]
            whole = _fp32_bytes(model)
            body, layers = _fp32_bytes(backbone(model)), tuple(_fp32_bytes(block) for block in blocks(model))
            weights, trained = whole, whole // 4
            if isinstance(choices.adapter, LoRA):
                frozen, trained = frozen_and_trained(model, choices.adapter)
                # Activations are measured for full training, which slightly overestimates those with an adapter.
                weights += 4 * trained - frozen * (4 - dtype.itemsize)
            if recipe.batch.recomputes(parameters) and can_recompute(model):
                recompute(model, partial(_on_host_hooks, on_host) if recipe.batch.offload else None)
            set_mode(model, recipe.optimizer.dropout)
            policy = Policy(model, choices.precision, context.temperature)
            lengths = (context.max_prompt_tokens, context.max_new_tokens)
            activations = _pass_bytes(
                policy, rows, *lengths, packed=recipe.batch.packed, vocabulary_parts=vocabulary_parts
            )
    except (RuntimeError, NotImplementedError, TypeError) as error:
        raise ConfigurationError(f"model: its memory cannot be predicted ({error_line(error)})") from error
    sizes = (activations, cache, rows * length, length, sum(on_host), whole, partners)
    return MeasuredModel(parameters, trained, weights, body, layers, *sizes)


def _on_host_hooks(sizes: list[int]) -> saved_tensors_hooks:
    """Return hooks that free saved tensors and record their sizes, as if they were offloaded to the host."""

    def pack(tensor: Tensor) -> tuple[torch.Size, torch.dtype]:
        sizes.append(tensor.numel() * tensor.itemsize)
        return tensor.shape, tensor.dtype

    def unpack(packed: tuple[torch.Size, torch.dtype]) -> Tensor:
        return torch.empty(packed[0], dtype=packed[1])

    return saved_tensors_hooks(pack, unpack)


def predict_memory(
    measured: MeasuredModel, recipe: Recipe, ranks: int = 1, strategy: str = "ddp", slots: int = 0
) -> Memory:
    """Predict the memory that training needs on each device.

    Args:
        measured: result of `measure` for this recipe.
        recipe: decides whether there is a critic and a reference, and the generator's precision.
        ranks: number of training devices, tensor-parallel partners included.
        strategy: "ddp" or "fsdp2".
        slots: number of rollouts that rank 0 generates at a time; 0 if the generator has its own devices.
    """
    choices, whole = recipe.choices, measured.whole
    sharded = strategy == "fsdp2" and ranks > 1
    num_shards = ranks // measured.partners if sharded else 1  # each rank holds one of this many shards
    # -(-a // b) rounds up. Gradients are FP32 (4 bytes).
    states = recipe.optimizer.state_bytes
    device = {
        "weights": -(-measured.weights // num_shards),
        "gradients": -(-4 * measured.trained // num_shards),
        "Adam's moments": -(-states * measured.trained // num_shards),
        "activations of a pass": measured.activations,
    }
    if choices.kl.where:
        device["reference"] = -(-_reference_bytes(choices.kl, measured) // num_shards)
    if choices.critic.has_values:
        device["critic, its gradients and moments"] = -(-(8 + states) * measured.body // (4 * num_shards))
    if sharded:
        # FSDP2 gathers the root and up to two layers at a time, and their gradients are whole until reduce-scatter.
        device["layers made whole"] = 2 * (whole - sum(measured.layers)) + 4 * max(measured.layers, default=0)
    elif ranks > 1:
        device["gradients on their way"] = min(4 * measured.trained, 4 * BUFFER)
    width = choices.precision.policy_dtype.itemsize
    generator = {
        "the generator's weights": width * measured.parameters,
        "its keys and values": slots * measured.row * measured.cache,
    }
    host = {"weights on their way to the generator": 4 * measured.parameters} if sharded else {}
    if measured.on_host:
        host["inputs of layers, of each device's pass"] = measured.on_host
    return Memory(device, generator if slots else {}, host, measured.parameters, measured.tokens, measured.row)


def _reference_bytes(kl: KL, measured: MeasuredModel) -> int:
    """Return the FP32 bytes of the reference on one of the tensor-parallel partners."""
    if kl.reference is None:
        return measured.whole
    return 0 if kl.is_served else -(-4 * _parameters_of(kl.reference) // measured.partners)


@lru_cache(maxsize=8)
def _parameters_of(path: str) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in model_builder(path)().parameters())


def memory_and_advice(
    skeleton: Callable[[], nn.Module],
    recipe: Recipe,
    ranks: int,
    strategy: str,
    slots: int,
    cache_limit_gib: float | None,
    limit: int | None,
    partners: int = 1,
) -> tuple[Memory, str]:
    """Return the memory of a run, and advice on a setting that fits; the advice is "" if the run already fits.

    Args:
        skeleton, recipe: as in `measure`.
        ranks, strategy: as in `predict_memory`.
        slots: slots of a generator on rank 0's device; 0 if the generator has its own devices.
        cache_limit_gib: limit in GiB on the generator's keys and values (`generator.cache_gib`); None for no limit.
        limit: bytes of one device; None for no limit.
        partners: as in `measure`; included in `ranks`.

    Raises:
        ConfigurationError: the model cannot be split between `partners` ranks, or does not run on fake tensors.
    """
    measured = measure(skeleton, recipe, partners)
    slots = concurrent_rollouts(measured, slots, cache_limit_gib)
    memory = predict_memory(measured, recipe, ranks, strategy, slots)
    fits = limit is None or memory.peak <= limit
    return memory, "" if fits or limit is None else advice(skeleton, recipe, ranks, strategy, slots, limit, partners)


def concurrent_rollouts(measured: MeasuredModel, slots: int, cache_limit_gib: float | None) -> int:
    """Return the number of rollouts that an engine decodes at a time: its slots, or fewer if its cache is limited.

    Args:
        measured: result of `measure`.
        slots: slots of the generator.
        cache_limit_gib: limit in GiB on its keys and values (`generator.cache_gib`); None for no limit.
    """
    if not slots or cache_limit_gib is None:
        return slots
    return max(1, min(slots, int(cache_limit_gib * GIB / (measured.row * measured.cache))))


def _fp32_bytes(module: nn.Module) -> int:
    """Return the FP32 bytes of a module's parameters."""
    return 4 * sum(parameter.numel() for parameter in module.parameters())


def _pass_bytes(policy: Policy, rows: int, prompt: int, completion: int, packed: bool, vocabulary_parts: int) -> int:
    """Return the peak bytes of a forward and backward pass beyond weights and gradients."""
    model: nn.Module = policy.model
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    live = LiveBytes()
    for tensor in [*model.parameters(), *model.buffers(), *(parameter.grad for parameter in model.parameters())]:
        if tensor is not None:
            live.watch(tensor)
    with live:
        live.reset()
        bytes_before = live.now
        tokens = torch.zeros(rows, prompt + completion, dtype=torch.int64)
        inner, length = backbone(model), prompt + completion - 1
        inputs: dict[str, Any] = {"input_ids": tokens[:, :-1]}
        if packed:
            # The mask is a special tensor subclass without data, so make it outside the fake mode.
            with unset_fake_temporarily():
                mask = row_mask(inner, [length] * rows, torch.device("cpu"))
            inputs = {"input_ids": tokens[:, :-1].reshape(1, -1), "attention_mask": mask}
            inputs["position_ids"] = torch.arange(length).repeat(1, rows)
        with policy.autocast(policy.precision):
            hidden = inner(**inputs, use_cache=False).last_hidden_state
        states = hidden.view(rows, length, -1)[:, prompt - 1 :].reshape(-1, hidden.shape[-1])
        score = policy._score if vocabulary_parts == 1 else partial(_score_in_parts, policy, vocabulary_parts)
        logprobs, _ = score(states, tokens[:, prompt:].reshape(-1), policy.precision, False)
        logprobs.sum().backward()  # type: ignore[no-untyped-call]
        return live.peak - bytes_before


def _score_in_parts(
    policy: Policy, vocabulary_parts: int, hidden: Tensor, targets: Tensor, precision: Precision, entropy_gradient: bool
) -> tuple[Tensor, Tensor]:
    """Score as `Policy._score` does on a rank that holds one of `vocabulary_parts` parts of the vocabulary.

    Chunks are recomputed in the backward pass, as in `Policy._score`.
    """
    dtype = precision.head_dtype(precision.fp32_head_trainer)

    def score(states: Tensor, chunk_targets: Tensor) -> tuple[Tensor, Tensor]:
        return token_scores(policy.model, states, chunk_targets, dtype, policy.temperature, entropy_gradient)

    chunk = max(1, policies.MAX_LOGITS // (vocabulary_parts * output_head(policy.model).weight.shape[0]))
    if len(hidden) <= chunk:
        return score(hidden, targets)
    pieces = zip(torch.split(hidden, chunk), torch.split(targets, chunk), strict=True)
    scored = [checkpoint(score, *piece, use_reentrant=False) for piece in pieces]
    return torch.cat([logprobs for logprobs, _ in scored]), torch.cat([entropies for _, entropies in scored])


def model_builder(path: str) -> Callable[[], nn.Module]:
    """Return a function that builds the model of a folder or hub id from its configuration, without its weights.

    Raises:
        ConfigurationError: no configuration can be read there.
    """
    options, path = load_options(path), model_path(path)
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(path, **options)
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"model.path: {path!r} holds no readable configuration ({error_line(error)})"
        ) from error
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
    """Return one line that names the closest setting with which a run fits into a device of `limit` bytes.

    Settings are tried in this order: recompute activations; passes of one row; offload the layers' inputs to the host;
    generate fewer rollouts at a time; shard the model; use more devices.
    """
    recomputed = replace(recipe, batch=replace(recipe.batch, recompute=True))
    length = recipe.context.max_prompt_tokens + recipe.context.max_new_tokens
    one_row = replace(recomputed, batch=replace(recomputed.batch, micro_tokens=length))
    if predict_memory(measure(skeleton, recomputed, partners), recomputed, ranks, strategy, slots).peak <= limit:
        return "it would with batch.recompute=true"
    overrides = f"batch.recompute=true batch.micro_tokens={length}"
    measured_row = measure(skeleton, one_row, partners)
    offloaded = replace(one_row, batch=replace(one_row.batch, offload=True))
    candidates = [(overrides, measured_row, ranks, strategy, slots)]
    candidates.append(
        (f"{overrides} batch.offload=true", measure(skeleton, offloaded, partners), ranks, strategy, slots)
    )
    if slots > 1:
        fewer = max(1, slots // 4)
        candidates.append((f"{overrides} generator.slots={fewer}", measured_row, ranks, strategy, fewer))
    counts = (2, 4, 8, 16, 32, 64, 128, 256)
    more = [ranks, *(count for count in counts if count > ranks and count % partners == 0)]
    candidates += [
        (f"{overrides} strategy=fsdp2 driver=live on {count} devices", measured_row, count, "fsdp2", 0)
        for count in more
        if count > 1
    ]
    for text, measured, devices, candidate_strategy, candidate_slots in candidates:
        if predict_memory(measured, one_row, devices, candidate_strategy, candidate_slots).peak <= limit:
            return f"it would with {text}"
    return "it would not on 256 devices either: lower context.max_new_tokens, or take a smaller model"
