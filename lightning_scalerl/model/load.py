"""Models and tokenizers from a folder or hub id."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lightning_scalerl.checks import ConfigurationError


def model_path(path: str) -> str:
    """The path itself: what `model=path` builds, as other files in `conf/model/` build one that they make.

    Raises:
        ConfigurationError: it looks like a local path and nothing is there.
    """
    local = path.startswith((".", "/", "~")) or path.count("/") > 1
    if local and not (Path(path).expanduser() / "config.json").is_file():
        raise ConfigurationError(f"model.path: {path!r} holds no config.json; give a folder saved by save_pretrained")
    return str(Path(path).expanduser()) if local else path


def _content(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """What stands for a model in an identity: of a local one a fingerprint of its files, wherever they lie."""
    folder = Path(model_path(str(parameters["path"])))
    if not folder.is_dir():
        return {}
    files = sorted(path for path in folder.iterdir() if path.is_file() and not path.name.startswith("."))
    about = {path: path.stat() for path in files}
    return {"path": {path.name: _fingerprint(path, a.st_size, a.st_mtime_ns) for path, a in about.items()}}


model_path.content = _content  # type: ignore[attr-defined]

# Weights are many gigabytes: of a larger file only this many samples of this many bytes are read.
_SAMPLES, _SAMPLE = 256, 2**16


@lru_cache(maxsize=256)
def _fingerprint(path: Path, size: int, changed_ns: int) -> str:
    """Of a file's size and bytes, of a large file's bytes at even distances, its first and last among them."""
    whole = size <= _SAMPLES * _SAMPLE
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as handle:
        for number in range(1 if whole else _SAMPLES):
            handle.seek(0 if whole else (size - _SAMPLE) * number // (_SAMPLES - 1))
            digest.update(handle.read(size if whole else _SAMPLE))
    return digest.hexdigest()


def load_model(path: str) -> nn.Module:
    """Load a causal language model in FP32.

    Args:
        path: a local directory in the transformers format, or a hub id.

    Raises:
        ConfigurationError: nothing loadable there.
    """
    from transformers import AutoModelForCausalLM

    try:
        model: nn.Module = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    except (OSError, ValueError) as error:
        raise ConfigurationError(_unusable("model", path, error)) from error
    return model


def check_weights(model: nn.Module) -> None:
    """Master weights are FP32, whatever type the policy computes in.

    Raises:
        ConfigurationError: some are not.
    """
    others = sorted({str(p.dtype) for p in model.parameters() if p.is_floating_point() and p.dtype != torch.float32})
    if others:
        raise ConfigurationError(
            f"model: weights in {', '.join(others)}; master weights are FP32: load it with dtype=torch.float32 (the "
            "precision axis says what it computes in)"
        )


def fingerprint(model: nn.Module) -> str:
    """What tells these weights from others, on any device: a digest of their bytes (a second for every gigabyte)."""
    digest = hashlib.sha256()
    for name, weights in model.state_dict().items():
        digest.update(f"{name} {tuple(weights.shape)} {weights.dtype};".encode())
        digest.update(weights.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


def load_tokenizer(path: str) -> Any:
    """Load the tokenizer that belongs to the model at `path`.

    Raises:
        ConfigurationError: nothing loadable there, or it has no end-of-sequence token.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise ConfigurationError(_unusable("tokenizer", path, error)) from error
    if tokenizer.eos_token_id is None:
        raise ConfigurationError(f"model.path: the tokenizer of {path} has no eos_token; completions could never end")
    return tokenizer


def stop_tokens(model: nn.Module, tokenizer: Any) -> list[int]:
    """Every id that ends a completion: the tokenizer's and all of the model's generation configuration.

    A chat model ends its turn with another token than a text: both are in `generation_config.json`.
    """
    configured = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    listed = configured if isinstance(configured, list | tuple) else [configured]
    return sorted({int(token) for token in [tokenizer.eos_token_id, *listed] if token is not None})


def _unusable(what: str, path: str, error: Exception) -> str:
    first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    place = "a folder without a" if Path(path).is_dir() else "neither a folder nor a reachable hub id of a"
    return f"model.path: {path!r} is {place} loadable {what} ({first})"
