"""Weights in a folder of safetensors, read tensor by tensor into a model on the meta device."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_scalerl.compat import transformers as compat
from lightning_scalerl.model.load import blank_copy, load_model
from lightning_scalerl.model.place import model_path

_SINGLE_FILE, _INDEX_FILE = "model.safetensors", "model.safetensors.index.json"


@dataclass(frozen=True)
class WeightFiles:
    """Weights of a model in its folder.

    Attributes:
        file_of: file of each tensor in the folder, by the tensor's name.
        names: for each weight of the model, the name of its tensor in the folder; tied weights share one tensor.
        in_bf16: whether weights are rounded to BF16 values when they are read, for a run that stores BF16 values.
    """

    file_of: Mapping[str, Path]
    names: Mapping[str, str]
    in_bf16: bool = False

    def read(self, name: str, part: tuple[slice, ...] | None = None) -> Tensor:
        """Read one weight of the model, or only the slices `part` of it, into host memory in FP32."""
        from safetensors import safe_open

        stored = self.names[name]
        with safe_open(self.file_of[stored], framework="pt") as file:
            value: Tensor = file.get_tensor(stored) if part is None else file.get_slice(stored)[part]
        if not value.is_floating_point():
            return value
        return value.bfloat16().float() if self.in_bf16 else value.float()


def has_no_data(model: nn.Module) -> bool:
    """Return whether a model has weights on the meta device, which have no data."""
    return any(parameter.is_meta for parameter in model.parameters())


def load_blank(path: str) -> tuple[nn.Module, WeightFiles] | str:
    """Make a model from its folder without reading weights: parameters are on the meta device, buffers are computed.

    Args:
        path: folder or hub id of the model.

    Returns:
        The model and its weight files, or a short reason why the model cannot be loaded this way.
    """
    model: Any = load_model(path, blank=True)
    file_of = _files(_folder(path))
    if not file_of:
        return "its folder holds no safetensors"
    if getattr(model.config, "quantization_config", None) is not None:
        return "its weights are quantized"
    if compat.converts_weights(model):
        return "its family converts weights while loading them"
    names = _names(model, file_of)
    if isinstance(names, str):
        return names
    files = WeightFiles(file_of, names)
    return _compute_buffers(model) or (model, files)


def _folder(path: str) -> Path:
    """Return the folder of a model that has been loaded, which may be the hub's cache on this machine."""
    local = Path(model_path(path))
    if local.is_dir():
        return local
    from huggingface_hub import try_to_load_from_cache

    return Path(str(try_to_load_from_cache(path, "config.json"))).parent


def _files(folder: Path) -> dict[str, Path]:
    if (folder / _INDEX_FILE).is_file():
        index = json.loads((folder / _INDEX_FILE).read_text())["weight_map"]
        return {str(name): folder / str(file) for name, file in index.items()}
    if not (folder / _SINGLE_FILE).is_file():
        return {}
    from safetensors import safe_open

    with safe_open(folder / _SINGLE_FILE, framework="pt") as file:
        return dict.fromkeys(file.keys(), folder / _SINGLE_FILE)


def _names(model: nn.Module, file_of: Mapping[str, Path]) -> dict[str, str] | str:
    """Map each weight of a model to its tensor's name in the folder; return the reason if there is no such mapping."""
    weights: Mapping[str, Tensor] = model.state_dict()
    tied_groups = _tied_names(model)
    # transformers unties weights that the folder contains twice with different values. Only reading both would show
    # whether they differ, so give up.
    if tied_groups != _tied_names(blank_copy(model)):
        return "its folder has tied weights twice"
    names: dict[str, str] = {}
    for tied_names in tied_groups:
        stored = [name for name in tied_names if name in file_of]
        if len(stored) != 1:
            return f"its folder has {tied_names[0]} {'twice' if stored else 'under another name'}"
        names |= dict.fromkeys(tied_names, stored[0])
    return {name: names[name] for name in weights}


def _tied_names(model: nn.Module) -> list[list[str]]:
    """Return the names of a model's weights, grouped by weight: tied names are in one list."""
    groups: dict[int, list[str]] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        groups.setdefault(id(value), []).append(name)
    return list(groups.values())


def _compute_buffers(model: Any) -> str | None:
    """Compute buffers that are not in files (rotary tables), as transformers does; return the reason if that fails."""
    results: list[list[Tensor]] = []
    owners = _owners(model)
    # Fill the buffers twice with different values: a buffer that `_init_weights` does not compute keeps its fill value.
    for value in (0, 1):
        filled: list[Tensor] = []
        for module, owner in owners:
            names = sorted(
                module._non_persistent_buffers_set & {k for k, v in module._buffers.items() if v is not None}
            )
            for name in names:
                module._buffers[name] = torch.full_like(module._buffers[name], value, device="cpu")
            if names:
                with torch.random.fork_rng(devices=[]):
                    compat.initialize(owner, module)
            filled += [module._buffers[name] for name in names]
        results.append(filled)
    all_computed = all(torch.equal(first, second) for first, second in zip(*results, strict=True))
    return None if all_computed else "its family computes its buffers in an unknown way"


def _owners(model: Any) -> list[tuple[Any, Any]]:
    """Return all modules, each with the innermost transformers model that contains it."""
    pairs: list[tuple[Any, Any]] = []

    def visit(module: Any, owner: Any) -> None:
        owner = module if compat.initializes(module) else owner
        pairs.append((module, owner))
        for child in module.children():
            visit(child, owner)

    visit(model, model)
    return pairs
