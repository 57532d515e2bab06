"""Supervised training of the small base models that come with the toy tasks, and their cache."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections.abc import Callable, Mapping
from typing import Any

import torch
from filelock import FileLock
from torch import Tensor

from lightning_scalerl.cache import cache_dir
from sweeps.terminal import Bar

# File with the settings of a model, next to its weights.
MADE_WITH = "made_with.json"


def model_name(kind: str, settings: Mapping[str, Any]) -> str:
    """Return the name of a base model with these settings."""
    return f"{kind}-{hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:12]}"


def cached(name: str, settings: Mapping[str, Any], make: Callable[[], Any], tokenizer: Callable[[], Any]) -> str:
    """Return the path of a base model in the cache; if it is not there, create it with `make` and `tokenizer`."""
    path = cache_dir() / name
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{path}.lock"):
        if not (path / "config.json").exists():
            unfinished = path.with_suffix(".part")
            shutil.rmtree(unfinished, ignore_errors=True)
            make().save_pretrained(unfinished)
            tokenizer().save_pretrained(unfinished)
            (unfinished / MADE_WITH).write_text(json.dumps(settings, indent=1))
            unfinished.rename(path)
    return str(path)


def train_model(
    make: Callable[[], Any], loss_of: Callable[[Any, int], Tensor], batches: int, learning_rate: float
) -> Any:
    """Train a model with AdamW and return it. After a warm-up the learning rate falls to a tenth along a cosine.

    Args:
        make: makes the model with its initial weights.
        loss_of: (model, number of the batch) -> loss of the batch.
        batches: number of batches.
        learning_rate: highest learning rate.
    """
    threads = torch.get_num_threads()
    # Use one thread: a second one gains little at this size, and the weights must not depend on the number of threads.
    torch.set_num_threads(1)
    rng_state = torch.get_rng_state()
    try:
        model = make()
        optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.01)
        progress = Bar("making the base model (once)", batches)
        for number in range(batches):
            decay = 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * number / batches))
            for group in optimizer.param_groups:
                group["lr"] = learning_rate * min(1.0, (number + 1) / 50) * decay
            loss = loss_of(model, number)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            progress.update(number + 1)
        progress.close()
        return model
    finally:
        torch.set_num_threads(threads)
        torch.set_rng_state(rng_state)
