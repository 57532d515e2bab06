"""Loading of models and tokenizers from a folder or a hub id."""

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
from lightning_scalerl.compat import transformers as compat
from lightning_scalerl.model.adapter import has_adapter
from lightning_scalerl.model.head import text_config
from lightning_scalerl.model.place import load_options, model_path


def load_model(path: str, blank: bool = False) -> nn.Module:
    """Load a causal language model in FP32.

    Args:
        path: a local directory in the transformers format, or a hub id.
        blank: whether to leave the model's tensors on the meta device, without data.

    Raises:
        ConfigurationError: there is no loadable model at `path`.
    """
    # Check the path before the import of transformers, which takes seconds.
    options, path = load_options(path), model_path(path)
    if blank:
        options["device_map"] = "meta"
    from transformers import AutoModelForCausalLM

    try:
        with _without_weights_bar():
            model: nn.Module = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **options)
    except (OSError, ValueError) as error:
        raise ConfigurationError(_load_error_text("model", path, error)) from error
    if _ignored_settings(model):
        model.set_attn_implementation("eager")  # type: ignore[operator]
    return model


@contextmanager
def _without_weights_bar() -> Iterator[None]:
    """Hide transformers' progress bar for loading weights, but not the hub's for downloads; restore both afterwards."""
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars
    from transformers.utils import logging

    if not logging.is_progress_bar_enabled():
        yield
        return
    downloads = not are_progress_bars_disabled()
    # This also disables the hub's bars, so they are enabled again.
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
    """Check that a model's attention implementation honours its configuration.

    transformers passes the soft cap of attention logits to every implementation, but its default, `sdpa`, ignores it.

    Raises:
        ConfigurationError: the model uses `sdpa` and its configuration sets such a cap.
    """
    if ignored := _ignored_settings(model):
        raise ConfigurationError(
            f"model: attn_implementation='sdpa' ignores {', '.join(ignored)} of {type(model).__name__}, so what is "
            'trained would be another function; load the model with attn_implementation="eager", or call its '
            'set_attn_implementation("eager")'
        )


# Settings that transformers' sdpa accepts and ignores. Other unsupported features, such as attention sinks, belong to
# model families that declare no support for sdpa; transformers uses eager attention for those.
_IGNORED_BY_SDPA = ("attn_logit_softcapping",)


def _ignored_settings(model: nn.Module) -> list[str]:
    """Return the settings that a model's attention implementation ignores, as NAME=VALUE."""
    config = text_config(model)
    if compat.attention_implementation(config) != "sdpa":
        return []
    return [f"{name}={getattr(config, name)}" for name in _IGNORED_BY_SDPA if getattr(config, name, None)]


def blank_copy(model: Any) -> Any:
    """Return a model of the same class and configuration on the meta device: names and shapes without data."""
    with torch.device("meta"):
        copied = type(model)(copy.deepcopy(model.config))
    copied.generation_config = model.generation_config
    compat.copy_weight_conversions(model, copied)  # map from names in its files to names of its weights
    return copied


def check_weights(model: nn.Module) -> None:
    """Check that the master weights are FP32, whatever type the policy computes in.

    The frozen weights under an adapter are not master weights, so they may have another floating-point type.

    Raises:
        ConfigurationError: some master weights are not FP32.
    """
    adapted = has_adapter(model)
    floating = [weight for weight in model.parameters() if weight.is_floating_point()]
    masters = [weight for weight in floating if weight.requires_grad or not adapted]
    other_dtypes = sorted({str(weight.dtype) for weight in masters if weight.dtype != torch.float32})
    if other_dtypes:
        raise ConfigurationError(
            f"model: weights in {', '.join(other_dtypes)}; master weights are FP32: load it with dtype=torch.float32 "
            "(the precision axis says what it computes in)"
        )


def fingerprint(model: nn.Module, weight_by_name: Callable[[str], Tensor] | None = None) -> str:
    """Return a digest of the bytes of all weights, the same on any device. It takes about a second per gigabyte.

    Args:
        model: the model to digest.
        weight_by_name: returns a weight by its name, for a model on the meta device; None to use the model's tensors.
    """
    digest = hashlib.sha256()
    for name, value in model.state_dict().items():
        weights: Any = value if weight_by_name is None else weight_by_name(name)
        digest.update(f"{name} {tuple(weights.shape)} {weights.dtype};".encode())
        # View the weights as bytes, because numpy has no bfloat16.
        digest.update(weights.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


def load_tokenizer(path: str) -> Any:
    """Load the tokenizer that belongs to the model at `path`.

    Raises:
        ConfigurationError: there is no loadable tokenizer at `path`, or it has no end-of-sequence token.
    """
    # Check the path before the import of transformers, which takes seconds.
    options, path = load_options(path), model_path(path)
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(path, **options)
    except (OSError, ValueError) as error:
        raise ConfigurationError(_load_error_text("tokenizer", path, error)) from error
    if tokenizer.eos_token_id is None:
        raise ConfigurationError(f"model.path: the tokenizer of {path} has no eos_token; completions could never end")
    return tokenizer


def stop_tokens(model: nn.Module, tokenizer: Any) -> list[int]:
    """Return all token ids that end a completion, from the tokenizer and the model's generation configuration.

    A chat model ends a turn and a text with different tokens. Both are in `generation_config.json`.
    """
    configured = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    configured_tokens = configured if isinstance(configured, list | tuple) else [configured]
    return sorted({int(token) for token in [tokenizer.eos_token_id, *configured_tokens] if token is not None})


def _load_error_text(object_name: str, path: str, error: Exception) -> str:
    """Return the message for a path without a loadable model or tokenizer, with the first line of the error."""
    first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    location = "a folder without a" if Path(path).is_dir() else "neither a folder nor a reachable hub id of a"
    return f"model.path: {path!r} is {location} loadable {object_name} ({first})"
