"""Weights of a model as they lie in a folder of safetensors, read part by part into a model that has none yet."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_scalerl.model.load import blank_copy, load_model
from lightning_scalerl.model.place import model_path

_ONE, _INDEX = "model.safetensors", "model.safetensors.index.json"


@dataclass(frozen=True)
class WeightFiles:
    """Weights of a model in its folder.

    Attributes:
        file_of: by name of a tensor in the folder, its file.
        names: by name of a weight of the model, that of its tensor; tied weights have one.
    """

    file_of: Mapping[str, Path]
    names: Mapping[str, str]

    def read(self, name: str, part: tuple[slice, ...] | None = None) -> Tensor:
        """Return a weight of the model on the host, in FP32: whole, or a part of it, of which no more is read."""
        from safetensors import safe_open

        stored = self.names[name]
        with safe_open(self.file_of[stored], framework="pt") as file:
            value: Tensor = file.get_tensor(stored) if part is None else file.get_slice(stored)[part]
        return value.float() if value.is_floating_point() else value


def is_blank(model: nn.Module) -> bool:
    """Return whether a model has weights without data, on the meta device."""
    return any(parameter.is_meta for parameter in model.parameters())


def load_blank(path: str) -> tuple[nn.Module, WeightFiles] | str:
    """Make a model from its folder without reading weights: parameters are on the meta device, all else is in place.

    Args:
        path: of the model: a folder, or a hub id.

    Returns:
        The model, and where its weights are read from; or why it is to be loaded whole, in a few words.
    """
    model: Any = load_model(path, blank=True)
    file_of = _files(_folder(path))
    if not file_of:
        return "its folder holds no safetensors"
    if getattr(model.config, "quantization_config", None) is not None:
        return "its weights are quantized"
    if getattr(model, "_weight_conversions", None):
        return "its family converts weights as they are loaded"
    names = _names(model, file_of)
    if isinstance(names, str):
        return names
    files = WeightFiles(file_of, names)
    return _make_buffers(model) or (model, files)


def _folder(path: str) -> Path:
    """Return the folder of a model that has been loaded: its own, or the hub's copy of it on this machine."""
    own = Path(model_path(path))
    if own.is_dir():
        return own
    from huggingface_hub import try_to_load_from_cache

    return Path(str(try_to_load_from_cache(path, "config.json"))).parent


def _files(folder: Path) -> dict[str, Path]:
    """Return the file of each tensor in a folder of safetensors."""
    if (folder / _INDEX).is_file():
        index = json.loads((folder / _INDEX).read_text())["weight_map"]
        return {str(name): folder / str(file) for name, file in index.items()}
    if not (folder / _ONE).is_file():
        return {}
    from safetensors import safe_open

    with safe_open(folder / _ONE, framework="pt") as file:
        return dict.fromkeys(file.keys(), folder / _ONE)


def _names(model: nn.Module, file_of: Mapping[str, Path]) -> dict[str, str] | str:
    """Return the tensor in the folder for each weight of a model, or why that is not plain."""
    own: Mapping[str, Tensor] = model.state_dict()
    tied = _tied(model)
    if tied != _tied(blank_copy(model)):  # transformers compares the two, and ties them if they are alike
        return "its folder has tied weights twice"
    names: dict[str, str] = {}
    for together in tied:
        there = [name for name in together if name in file_of]
        if len(there) != 1:
            return f"its folder has {together[0]} {'twice' if there else 'under another name'}"
        names |= dict.fromkeys(together, there[0])
    return {name: names[name] for name in own}


def _tied(model: nn.Module) -> list[list[str]]:
    """Return the names of a model's weights, those of one weight together."""
    together: dict[int, list[str]] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        together.setdefault(id(value), []).append(name)
    return list(together.values())


def _make_buffers(model: Any) -> str | None:
    """Compute buffers that no file holds (rotary tables), as transformers does; return why that is not known how."""
    made: list[list[Tensor]] = []
    owners = _owners(model)
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
                    owner._init_weights(module)
            filled += [module._buffers[name] for name in names]
        made.append(filled)
    # What was not computed is as it was filled.
    same = all(torch.equal(one, other) for one, other in zip(*made, strict=True))
    return None if same else "its family computes tables in a way of its own"


def _owners(model: Any) -> list[tuple[Any, Any]]:
    """Return all modules, each with the model of transformers that it is the nearest part of."""
    found: list[tuple[Any, Any]] = []

    def look(module: Any, owner: Any) -> None:
        owner = module if hasattr(module, "_init_weights") else owner
        found.append((module, owner))
        for child in module.children():
            look(child, owner)

    look(model, model)
    return found
