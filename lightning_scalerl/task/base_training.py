"""Supervised training of the small base models that come with the toy tasks, and their cache."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from safetensors.torch import load_file, save_file
from torch import Tensor

from lightning_scalerl.cache import cache_dir
from lightning_scalerl.checks import ConfigurationError
from sweeps.terminal import Bar

# File with the settings of a model, next to its weights.
MADE_WITH = "made_with.json"
# Folder of the weights that come with the package.
FOLDER = Path(__file__).parent / "base_models"
PAD = "<pad>"
HEAD_SIZE = 32  # a size that other engines support as well


def model_name(kind: str, settings: Mapping[str, Any]) -> str:
    """Return the name of a base model with these settings."""
    return f"{kind}-{hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:12]}"


def check_width(width: int) -> None:
    """Raise ConfigurationError unless the hidden size is a multiple of the heads' size."""
    if width % HEAD_SIZE:
        above = HEAD_SIZE * (width // HEAD_SIZE + 1)
        raise ConfigurationError(f"model.width: {width} is no multiple of {HEAD_SIZE}, the size of a head; say {above}")


def word_tokenizer(vocabulary: Sequence[str], pattern: str, end: str) -> Any:
    """Return a tokenizer of fixed words.

    Args:
        vocabulary: the tokens, in the order of their ids; the first is the padding token.
        pattern: regular expression of a token in a text.
        end: the token that ends a sequence.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({token: number for number, token in enumerate(vocabulary)}, unk_token=PAD))
    words.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    words.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token=PAD, eos_token=end)


def small_llama(vocabulary: Sequence[str], end: str, positions: int, width: int, layers: int, seed: int) -> Any:
    """Return a Llama with random weights over a vocabulary, in which the token `end` ends a sequence."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(vocabulary),
            hidden_size=width,
            intermediate_size=3 * width,
            num_hidden_layers=layers,
            num_attention_heads=width // HEAD_SIZE,
            num_key_value_heads=width // HEAD_SIZE,
            head_dim=HEAD_SIZE,
            max_position_embeddings=positions,
            tie_word_embeddings=False,
            pad_token_id=0,
            bos_token_id=None,
            eos_token_id=vocabulary.index(end),
        )
    )


def load_packaged(name: str, make: Callable[[], Any]) -> Any:
    """Return the packaged model of this name, or None; its weights are loaded into a model that `make` returns."""
    file = FOLDER / f"{name}.safetensors"
    if not file.is_file():
        return None
    with torch.random.fork_rng(devices=[]):  # the caller's random state must not change
        model = make()
    model.load_state_dict(load_file(file))
    return model


def write_packaged(folder: Path, name: str, model: Any) -> Path:
    """Write the weights of a model that is to come with the package; returns the file."""
    folder.mkdir(exist_ok=True)
    file = folder / f"{name}.safetensors"
    save_file(model.state_dict(), file, {"format": "pt"})
    return file


def cached_model(name: str, settings: Mapping[str, Any], make: Callable[[], Any], tokenizer: Callable[[], Any]) -> str:
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


def base_model(
    kind: str,
    settings: Mapping[str, Any],
    make: Callable[[], Any],
    train: Callable[[], Any],
    tokenizer: Callable[[], Any],
) -> str:
    """Return the path of a base model with these settings: cached, else from the package, else trained.

    Args:
        kind: beginning of the model's name.
        settings: settings of the model; with `kind` they determine its name.
        make: makes a model with any weights, into which packaged weights are loaded.
        train: makes the trained model.
        tokenizer: makes the tokenizer.
    """
    name = model_name(kind, settings)
    return cached_model(name, settings, lambda: load_packaged(name, make) or train(), tokenizer)


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
