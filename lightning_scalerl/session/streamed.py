"""Weights that each rank reads for itself: its own part of every tensor, from the model's folder.

In come models on the meta device (`model.files`), as policy, critic and reference of a run; out go sharded ones whose
parts are on this rank's device. No rank has any of them whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from lightning_scalerl.axes.adapter import Adapter
from lightning_scalerl.distributed.sharded import own_part
from lightning_scalerl.model.files import WeightFiles, load_blank
from lightning_scalerl.model.head import backbone
from lightning_scalerl.model.load import load_model
from lightning_scalerl.model.value import ValueModel


def blank_or_whole(path: str, adapter: Adapter) -> tuple[nn.Module, WeightFiles | str]:
    """Return a model without data and where its weights are read from; or the whole one, and why it had to be."""
    found = "an adapter is put into it" if adapter.adapts else load_blank(path)
    return found if isinstance(found, tuple) else (load_model(path), found)


def names_in_files(root: nn.Module, model: nn.Module, files: WeightFiles) -> dict[str, str | None]:
    """Return the name of each weight of a policy, reference or critic in the language model; None for a new one.

    Args:
        root: which it is; it is not sharded yet.
        model: the language model that it was made from.
        files: that hold the language model's weights.
    """
    if not isinstance(root, ValueModel):
        return {f"model.{name}": name for name in files.names}
    body = next(name for name, part in model.named_modules() if part is backbone(model))
    inside = {f"body.{name.removeprefix(f'{body}.')}": name for name in files.names if name.startswith(f"{body}.")}
    return {name: inside.get(name) for name in root.state_dict()}


def within(root: nn.Module, work: Callable[[], None]) -> None:
    """Do work in the place of a sharded model's forward pass, where its own weights are whole. All ranks call it."""
    root.forward = work
    try:
        root()
    finally:
        del root.forward


@torch.no_grad()
def read_parts(root: nn.Module, names: Mapping[str, str | None], files: WeightFiles, device: torch.device) -> None:
    """Give a sharded model on the meta device its data: this rank's part of each weight, zeros for new ones.

    Args:
        root: the model; its buffers that are no weights have their data already, on the host.
        names: of `names_in_files`.
        files: that the weights are read from.
        device: of this rank.
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
        own, place = own_part(value)
        stored = names[name]
        if stored is None:
            own.zero_()
        elif own.numel():
            own.copy_(files.read(stored, place))
