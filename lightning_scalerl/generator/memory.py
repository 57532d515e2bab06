"""Memory needed by the KV cache, and free memory of a device."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lightning_scalerl.model.head import key_and_value_sizes, text_config

GIB = 2**30


def cache_gib(model: nn.Module, dtype: torch.dtype, tokens: int) -> float:
    """Return the size in GiB of the keys and values of `tokens` tokens in all layers."""
    config: Any = text_config(model)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    # layers x KV heads x (key size + value size) x bytes per number x tokens.
    return int(config.num_hidden_layers) * int(heads) * sum(key_and_value_sizes(config)) * dtype.itemsize * tokens / GIB


def free_gib(device: torch.device) -> float:
    """Return the free memory of a device in GiB; for the CPU, the memory that the kernel can make available."""
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0]) / GIB
    # MemAvailable, not MemFree: the kernel releases the page cache on demand.
    meminfo = Path("/proc/meminfo")
    for line in meminfo.read_text().splitlines() if meminfo.exists() else ():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024 / GIB
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / GIB
