"""Loading of models and tokenizers from a folder or hub id."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_scalerl.checks import ConfigurationError
from lightning_scalerl.model.adapter import has_adapter
from lightning_scalerl.model.head import text_config
from lightning_scalerl.model.place import load_options, model_path


def load_model(path: str, blank: bool = False) -> nn.Module:
    """Load a causal language model in FP32.

    Args:
        path: a local directory in the transformers format, or a hub id.
        blank: leave its tensors on the meta device, without data.

    Raises:
        ConfigurationError: nothing loadable there.
    """
    # Before transformers, which takes seconds to import.
    options, path = load_options(path), model_path(path)
    if blank:
        options["device_map"] = "meta"
    from transformers import AutoModelForCausalLM

    try:
        with _without_bar_of_weights():
            model: nn.Module = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **options)
    except (OSError, ValueError) as error:
        raise ConfigurationError(_unusable("model", path, error)) from error
    if _ignored_settings(model):
        model.set_attn_implementation("eager")  # type: ignore[operator]
    return model


@contextmanager
def _without_bar_of_weights() -> Iterator[None]:
    """Hide transformers' bar of loading weights, not the hub's of a download; both are as before afterwards."""
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars
    from transformers.utils import logging

    if not logging.is_progress_bar_enabled():
        yield
        return
    downloads = not are_progress_bars_disabled()
    logging.disable_progress_bar()
    if downloads:
        enable_progress_bars()
    try:
        yield
    finally:
        logging.enable_progress_bar()
        if not downloads:
            disable_progress_bars()


def check_attention(model: nn.Module) -> None:
    """Check that a model's attention computes what its configuration says.

    transformers passes a soft cap of attention logits to every implementation, and `sdpa`, its default, drops it.

    Raises:
        ConfigurationError: `sdpa`, and a configuration with such a setting.
    """
    if ignored := _ignored_settings(model):
        raise ConfigurationError(
            f"model: attn_implementation='sdpa' ignores {', '.join(ignored)} of {type(model).__name__}, so what is "
            'trained would be another function; load the model with attn_implementation="eager", or call its '
            'set_attn_implementation("eager")'
        )


# Settings that transformers' sdpa takes and drops. The others that it lacks, such as attention sinks, belong to
# families that declare no support for sdpa; transformers gives those eager attention by itself.
_IGNORED_BY_SDPA = ("attn_logit_softcapping",)


def _ignored_settings(model: nn.Module) -> list[str]:
    """Return the settings of a model's configuration that its attention implementation drops, with their values."""
    config = text_config(model)
    if getattr(config, "_attn_implementation", None) != "sdpa":
        return []
    return [f"{name}={getattr(config, name)}" for name in _IGNORED_BY_SDPA if getattr(config, name, None)]


def blank_copy(model: Any) -> Any:
    """Return a model of the same class and configuration on the meta device: shapes and names, without data."""
    with torch.device("meta"):
        copied = type(model)(copy.deepcopy(model.config))
    copied.generation_config = model.generation_config
    if hasattr(model, "_weight_conversions"):  # how the names of its files become those of its weights
        copied._weight_conversions = model._weight_conversions
    return copied


def check_weights(model: nn.Module) -> None:
    """Check that the master weights are FP32, whatever type the policy computes in.

    The frozen weights below an adapter may have any type that can be computed with: they are no master weights.

    Raises:
        ConfigurationError: some are not.
    """
    adapted = has_adapter(model)
    masters = [each for each in model.parameters() if each.is_floating_point() and (each.requires_grad or not adapted)]
    others = sorted({str(each.dtype) for each in masters if each.dtype != torch.float32})
    if others:
        raise ConfigurationError(
            f"model: weights in {', '.join(others)}; master weights are FP32: load it with dtype=torch.float32 (the "
            "precision axis says what it computes in)"
        )


def fingerprint(model: nn.Module, read: Callable[[str], Tensor] | None = None) -> str:
    """Return a digest of all weights' bytes, the same on any device; about a second for every gigabyte.

    Args:
        model: whose weights these are.
        read: returns a weight by its name, one after the other, where the model has no data.
    """
    digest = hashlib.sha256()
    for name, held in model.state_dict().items():
        weights: Any = held if read is None else read(name)
        digest.update(f"{name} {tuple(weights.shape)} {weights.dtype};".encode())
        # Viewed as bytes: numpy has no bfloat16.
        digest.update(weights.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


def load_tokenizer(path: str) -> Any:
    """Load the tokenizer that belongs to the model at `path`.

    Raises:
        ConfigurationError: nothing loadable there, or it has no end-of-sequence token.
    """
    # Before transformers, which takes seconds to import.
    options, path = load_options(path), model_path(path)
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(path, **options)
    except (OSError, ValueError) as error:
        raise ConfigurationError(_unusable("tokenizer", path, error)) from error
    if tokenizer.eos_token_id is None:
        raise ConfigurationError(f"model.path: the tokenizer of {path} has no eos_token; completions could never end")
    return tokenizer


def stop_tokens(model: nn.Module, tokenizer: Any) -> list[int]:
    """Return every id that ends a completion: the tokenizer's and all of the model's generation configuration.

    A chat model ends its turn with another token than a text: both are in `generation_config.json`.
    """
    configured = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    listed = configured if isinstance(configured, list | tuple) else [configured]
    return sorted({int(token) for token in [tokenizer.eos_token_id, *listed] if token is not None})


def _unusable(what: str, path: str, error: Exception) -> str:
    first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    place = "a folder without a" if Path(path).is_dir() else "neither a folder nor a reachable hub id of a"
    return f"model.path: {path!r} is {place} loadable {what} ({first})"
