"""Export of a trained model as a folder for `from_pretrained`: weights, tokenizer, and a model card with provenance."""

from __future__ import annotations

import copy
import json
import re
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from lightning_scalerl.axes.precision import DTYPES
from lightning_scalerl.checks import ConfigurationError
from lightning_scalerl.compat import transformers as compat
from sweeps.redact import redact

# Size of one weight file when weights are fetched one after the other.
FILE_BYTES = 4 * 10**9


def save_model(
    model: Any, tokenizer: Any, directory: str | Path, dtype: str = "fp32", card: Mapping[str, Any] | None = None
) -> Path:
    """Write model, generation configuration, tokenizer (with chat template) and README.md, or nothing if that fails.

    Args:
        model: a transformers model; it is not changed.
        tokenizer: the model's tokenizer.
        directory: folder to create. If it exists it must be empty, and files are then moved into it one by one.
        dtype: type of the saved weights: "fp32" as trained, "bf16" or "fp16" for serving.
        card: lines of the model card, by name, in addition to the type of the weights; None for none.

    Returns:
        The directory.

    Raises:
        ConfigurationError: the directory is not empty, the type is unknown, or the model cannot be saved.
    """
    with _model_folder(model, tokenizer, directory, dtype, card) as (unfinished, target):
        model_to_save = model if dtype == "fp32" else copy.deepcopy(model).to(DTYPES[dtype])
        with _valid_generation_config(model_to_save):
            model_to_save.save_pretrained(unfinished)
    return target


def save_in_parts(
    blank: Any,
    weight: Callable[[str], Tensor],
    tokenizer: Any,
    directory: str | Path,
    dtype: str = "fp32",
    card: Mapping[str, Any] | None = None,
    max_file_bytes: int = FILE_BYTES,
) -> Path:
    """Write the same files as `save_model` for a sharded model, one weight file after the other.

    At any time, memory holds only the weights of one file and of the layer that is being fetched for it.

    Args:
        blank: the model on the meta device; it is changed.
        weight: returns an unsharded weight of the model by its name, in host memory.
        tokenizer, directory, dtype, card: as in `save_model`.
        max_file_bytes: largest size of a weight file, unless a single weight is larger.

    Returns:
        The directory.

    Raises:
        ConfigurationError: the directory is not empty, the type is unknown, or the model cannot be saved.
    """
    with _model_folder(blank, tokenizer, directory, dtype, card) as (unfinished, target):
        blank = blank.to(DTYPES[dtype])
        with _valid_generation_config(blank):
            blank.save_pretrained(unfinished, state_dict={})  # everything except the weights
        for empty in unfinished.glob("*.safetensors"):
            empty.unlink()
        _write_weights(blank, weight, unfinished, max_file_bytes)
    return target


@contextmanager
def _model_folder(
    model: Any, tokenizer: Any, directory: str | Path, dtype: str, card: Mapping[str, Any] | None
) -> Iterator[tuple[Path, Path]]:
    """Yield a temporary folder for the model and its final path; add tokenizer and card at the end of the block."""
    check_dtype(dtype)
    if not hasattr(model, "save_pretrained"):
        raise ConfigurationError(f"model: {type(model).__name__} has no save_pretrained; models of transformers do")
    with _atomic_folder(free(directory)) as (unfinished, target):
        yield unfinished, target
        tokenizer.save_pretrained(unfinished)
        (unfinished / "README.md").write_text(_card({"weights": dtype, **(card or {})}))


def _write_weights(blank: Any, weight: Callable[[str], Tensor], folder: Path, max_file_bytes: int) -> None:
    """Write a model's weights in transformers' layout: without tied duplicates, under the names used in files."""
    from huggingface_hub import split_torch_state_dict_into_shards
    from transformers.core_model_loading import revert_weight_conversion
    from transformers.modeling_utils import remove_tied_weights_from_state_dict

    weights = remove_tied_weights_from_state_dict(dict(blank.state_dict()), blank)
    for name in compat.ignored_on_save(blank):
        weights.pop(name, None)
    # Some families join weights of a layer on loading (experts) and must split them again on saving, so weights are
    # grouped by layer. In all other families each weight is saved by itself.
    layers: dict[str, list[str]] = {}
    for name in weights:
        numbered = re.match(r"(.*?\.\d+)\.", name)
        layers.setdefault(numbered[1] if numbered else name, []).append(name)
    shapes: dict[str, Tensor] = {}
    layer_of: dict[str, list[str]] = {}
    for names in layers.values():
        parts = revert_weight_conversion(blank, {name: weights[name] for name in names})
        # `empty_like` has the size of the tensor itself, even if `part` is a view of a larger one.
        shapes |= {name: torch.empty_like(part) for name, part in parts.items()}
        separate = parts.keys() == {*names}
        layer_of |= {name: [name] if separate else names for name in parts}
    split = split_torch_state_dict_into_shards(
        shapes, filename_pattern="model{suffix}.safetensors", max_shard_size=max_file_bytes
    )

    def fetch(names: list[str]) -> dict[str, Tensor]:
        parts: dict[str, Tensor] = revert_weight_conversion(
            blank, {name: weight(name).to(weights[name].dtype) for name in names}
        )
        return parts

    fetched: dict[str, Tensor] = {}
    for file, names in split.filename_to_tensors.items():
        content: dict[str, Tensor] = {}
        for name in names:
            if name not in fetched:
                fetched |= fetch(layer_of[name])
            content[name] = fetched.pop(name).contiguous()
        save_file(content, folder / file, {"format": "pt"})
    if split.is_sharded:
        metadata = {"total_parameters": blank.num_parameters(), **split.metadata}
        index = {"metadata": metadata, "weight_map": split.tensor_to_filename}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def save_adapter(
    config: Any,
    weights: Mapping[str, Tensor],
    directory: str | Path,
    dtype: str = "fp32",
    card: Mapping[str, Any] | None = None,
    modules_to_save: Sequence[str] = (),
) -> Path:
    """Write an adapter in the format of `PeftModel.from_pretrained`, or nothing if that fails.

    Args:
        config: a peft configuration.
        weights: weights of the adapter, by their names in the model.
        directory, dtype, card: as in `save_model`.
        modules_to_save: names of the modules whose own weights are saved with the adapter.

    Returns:
        The directory.

    Raises:
        ConfigurationError: the directory is not empty, or the type is unknown.
    """
    check_dtype(dtype)
    config = copy.deepcopy(config)
    config.inference_mode = True
    # Use full names, because peft matches any module whose name ends in a given name: `norm` would match each
    # layernorm.
    config.modules_to_save = list(modules_to_save) or None
    base = (card or {}).get("trained from")
    config.base_model_name_or_path = str(base) if base else config.base_model_name_or_path
    # Names of weights contain the adapter's name in a model, but not in a file.
    weights_in_file = {
        re.sub(r"(\.lora_[AB])\.[^.]+\.weight$", r"\1.weight", name): value for name, value in weights.items()
    }
    with _atomic_folder(free(directory)) as (unfinished, target):
        unfinished.mkdir()
        config.save_pretrained(unfinished)
        content = {
            # Copy each weight: weights that are tied in the model are saved separately, once per module, as peft does.
            f"base_model.model.{name}": value.detach().to("cpu", DTYPES[dtype], copy=True).contiguous()
            for name, value in weights_in_file.items()
        }
        save_file(content, unfinished / "adapter_model.safetensors", {"format": "pt"})
        (unfinished / "README.md").write_text(_card({"weights": f"a LoRA adapter, {dtype}", **(card or {})}, "peft"))
    return target


def check_dtype(dtype: str) -> None:
    """Raise a ConfigurationError if weights cannot be saved in this type."""
    if dtype not in DTYPES:
        raise ConfigurationError(f"dtype: {dtype!r} is unknown; valid: {', '.join(DTYPES)}")


@contextmanager
def _atomic_folder(target: Path) -> Iterator[tuple[Path, Path]]:
    """Yield a temporary folder to fill and the target, which it becomes if the `with` block ends without an error."""
    target.parent.mkdir(parents=True, exist_ok=True)
    # Create it next to the target, because renaming is atomic only within a file system.
    unfinished = target.with_name(f"{target.name}.{uuid.uuid4().hex[:8]}.part")
    try:
        yield unfinished, target
        if not target.exists():
            unfinished.rename(target)
        else:  # an existing folder is kept, since it may be the working directory of a process
            for path in unfinished.iterdir():
                path.rename(target / path.name)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


# Sampling settings that transformers refuses to save without `do_sample`.
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff")


@contextmanager
def _valid_generation_config(model: Any) -> Iterator[None]:
    """Make the generation configuration valid for saving in the `with` block.

    Many configurations have a temperature that greedy sampling does not use, and transformers refuses to save them.
    """
    original = getattr(model, "generation_config", None)
    if original is not None and original.do_sample is not True:
        model.generation_config = copy.deepcopy(original)
        for name in _SAMPLING:
            setattr(model.generation_config, name, None)
    try:
        yield
    finally:
        if original is not None:
            model.generation_config = original


def free(directory: str | Path) -> Path:
    """Check that a folder is new or empty, and return its absolute path.

    Raises:
        ConfigurationError: the path exists and is not an empty folder.
    """
    target = Path(directory).resolve()  # follows links, and gives `.` a name
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigurationError(f"{target}: something is there already; give a folder that is new or empty")
    return target


def _card(facts: Mapping[str, Any], library: str = "transformers") -> str:
    """Return the model card: YAML for the hub and a table for readers. Values are single lines without secrets."""
    rows = [(name, redact(" ".join(str(value).split())).replace("|", "\\|")) for name, value in facts.items()]
    lines = [
        "---",
        f"library_name: {library}",
        "pipeline_tag: text-generation",
        "tags: [reinforcement-learning, lightning-scalerl]",
        "---",
        "",
        "# Trained with lightning-scalerl",
        "",
        "| property | value |",
        "|---|---|",
        *(f"| {name} | {value} |" for name, value in rows if value),
        "",
    ]
    return "\n".join(lines)
