"""Streamed weights: each rank reads its own part of every tensor from the model's folder.

Policy, critic and reference start on the meta device (`model.files`) and are sharded. Then each rank loads its parts
onto its device. No rank ever has a whole model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from lightning_scalerl.axes.adapter import Adapter
from lightning_scalerl.distributed.sharded import local_shard
from lightning_scalerl.model.files import WeightFiles, load_blank
from lightning_scalerl.model.head import backbone
from lightning_scalerl.model.load import load_model
from lightning_scalerl.model.value import ValueModel


def empty_or_loaded_model(path: str, adapter: Adapter) -> tuple[nn.Module, WeightFiles | str]:
    """Return a model without data and the files of its weights.

    If that is impossible, return the whole model and the reason.
    """
    model_and_files = "it gets an adapter" if adapter.adapts else load_blank(path)
    return model_and_files if isinstance(model_and_files, tuple) else (load_model(path), model_and_files)


def names_in_files(root: nn.Module, model: nn.Module, files: WeightFiles) -> dict[str, str | None]:
    """Map each weight name of a policy, reference or critic to its name in the files; None for a new weight.

    Args:
        root: the policy, reference or critic, not sharded yet.
        model: the language model that it was made from.
        files: files of the language model's weights.
    """
    if not isinstance(root, ValueModel):
        return {f"model.{name}": name for name in files.names}
    body = next(name for name, part in model.named_modules() if part is backbone(model))
    body_names = {f"body.{name.removeprefix(f'{body}.')}": name for name in files.names if name.startswith(f"{body}.")}
    return {name: body_names.get(name) for name in root.state_dict()}


def within(root: nn.Module, work: Callable[[], None]) -> None:
    """Call `work` as a sharded model's forward pass, for which root weights are gathered. All ranks call this."""
    root.forward = work
    try:
        root()
    finally:
        del root.forward


@torch.no_grad()
def read_parts(root: nn.Module, names: Mapping[str, str | None], files: WeightFiles, device: torch.device) -> None:
    """Fill a sharded model on the meta device: read this rank's part of each weight, and set new weights to zero.

    Args:
        root: the model. Its non-persistent buffers already have their data, on the host.
        names: result of `names_in_files`.
        files: files that the weights are read from.
        device: device of this rank.
    """
    tables = [
        (part, name, table)
        for part in root.modules()
        for name, table in part._buffers.items()
        if table is not None and not table.is_meta
    ]
    root.to_empty(device=device)
    for part, name, table in tables:
        part._buffers[name] = table.to(device)
    state: dict[str, Any] = root.state_dict()
    for name, value in state.items():
        part_of_rank, place = local_shard(value)
        name_in_file = names[name]
        if name_in_file is None:
            part_of_rank.zero_()
        elif part_of_rank.numel():
            part_of_rank.copy_(files.read(name_in_file, place))
