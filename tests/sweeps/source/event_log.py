"""TensorBoard event files for tests, written by TensorBoard's own writer."""

from __future__ import annotations

import importlib
from pathlib import Path

import numpy as np

TRL_SCALARS = {
    "train/reward": [(s, 0.01 * s) for s in range(1, 21)],
    "train/num_tokens": [(s, 100.0 * s) for s in range(1, 21)],
    "eval/reward": [(s, 0.02 * s) for s in range(0, 21, 5)],
}


def events(folder: Path, scalars: dict[str, list[tuple[int, float]]], tensors: bool = False) -> Path:
    """Write an event file. tensors: store scalars like TensorFlow 2, as tensors; otherwise like PyTorch's writer."""
    proto = importlib.import_module("tensorboard.compat.proto.event_pb2")
    summary = importlib.import_module("tensorboard.compat.proto.summary_pb2")
    tensor_util = importlib.import_module("tensorboard.util.tensor_util")
    writer = importlib.import_module("tensorboard.summary.writer.event_file_writer").EventFileWriter(str(folder))
    for tag, points in scalars.items():
        for step, number in points:
            if tensors:
                meta = summary.SummaryMetadata(plugin_data=summary.SummaryMetadata.PluginData(plugin_name="scalars"))
                tensor = tensor_util.make_tensor_proto(np.float32(number))
                value = summary.Summary.Value(tag=tag, tensor=tensor, metadata=meta)
            else:
                value = summary.Summary.Value(tag=tag, simple_value=number)
            writer.add_event(proto.Event(step=step, wall_time=1e9 + step, summary=summary.Summary(value=[value])))
    writer.close()
    (path,) = folder.glob("*tfevents*")
    return path
