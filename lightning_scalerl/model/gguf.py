"""Converts models in GGUF, the format of llama.cpp: dequantises their weights once into a folder of the cache.

The folder is in the format of `save_pretrained`, with weights in FP32, and is named by the digest of the GGUF file.
Dequantising does not restore precision: the weights are as coarse as the quantised ones.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lightning_scalerl.cache import cache_dir
from lightning_scalerl.checks import ConfigurationError, error_line
from sweeps.terminal import Bar

SUFFIX = ".gguf"
# Version of the conversion: folders of other versions are not read.
CONVERSION_VERSION = 1
# File in the folder that describes its source. Written last, so a folder without it is incomplete.
SOURCE_FILE = "made_of.json"


def gguf_file(path: str) -> Path | None:
    """Return the GGUF file at a model path, or the only GGUF file in the folder there; None for other models.

    Raises:
        ConfigurationError: the file does not exist, or the folder has several GGUF files.
    """
    location = Path(path).expanduser()
    if path.endswith(SUFFIX) and not location.is_dir():
        if not location.is_file():
            raise ConfigurationError(f"model.path: there is no file {path!r}; give a GGUF file, or a folder with one")
        return location
    if not location.is_dir() or (location / "config.json").is_file():
        return None
    files = sorted(location.glob(f"*{SUFFIX}"))
    if len(files) > 1:
        names = ", ".join(file.name for file in files[:4])
        raise ConfigurationError(
            f"model.path: {path!r} holds {len(files)} GGUF files ({names}); give one of them. A model in several "
            "files has to be merged first (llama-gguf-split --merge)"
        )
    return files[0] if files else None


def digest(file: Path) -> str:
    """Return the SHA-256 of a file, which identifies the model in run identities and in the cache."""
    stat = file.stat()
    return _digest(file.resolve(), stat.st_size, stat.st_mtime_ns)


# Size and modification time are part of the cache key, so that a rewritten file is read again.
@lru_cache(maxsize=64)
def _digest(file: Path, size: int, changed_ns: int) -> str:
    with file.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def converted(file: Path) -> Path:
    """Return the folder of a converted GGUF file. The first call converts it, which takes about a minute.

    Raises:
        ConfigurationError: the package gguf is missing, or transformers cannot convert the file.
    """
    from filelock import FileLock

    folder = cache_dir() / "gguf" / f"{digest(file)[:24]}-{CONVERSION_VERSION}"
    if (folder / SOURCE_FILE).is_file():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if not (folder / SOURCE_FILE).is_file():
            unfinished = folder.with_name(f"{folder.name}.part")
            shutil.rmtree(unfinished, ignore_errors=True)
            _convert(file, unfinished)
            unfinished.rename(folder)
    return folder


def _convert(file: Path, folder: Path) -> None:
    """Write a GGUF file's model and tokenizer into a folder, or raise a ConfigurationError."""
    if find_spec("gguf") is None:
        raise ConfigurationError(
            f"model.path: {str(file)!r} is read by the package gguf, which is not installed; pip install gguf"
        )
    progress = Bar(f"converting {file.name} (once)", 3)
    description: dict[str, Any] = {}
    try:
        description = _describe_file(file)
        progress.update(1)
        _write_model(file, folder)
        progress.update(2)
        from transformers import AutoTokenizer

        AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name).save_pretrained(folder)
        progress.update(3)
    except MemoryError:
        raise
    except Exception as error:  # gguf and transformers raise all kinds of errors
        import transformers

        shutil.rmtree(folder, ignore_errors=True)
        contents = (
            f"architecture {description['architecture']}, tensors {description['tensors']}; " if description else ""
        )
        raise ConfigurationError(
            f"model.path: transformers {transformers.__version__} cannot convert {str(file)!r} "
            f"({contents}{error_line(error)}); give a file of another architecture or quantisation, or the model's own "
            "folder of safetensors"
        ) from error
    finally:
        progress.close()
    (folder / SOURCE_FILE).write_text(json.dumps({"file": file.name, "sha256": digest(file), **description}, indent=1))


def _describe_file(file: Path) -> dict[str, Any]:
    from gguf import GGUFReader

    reader = GGUFReader(file)
    types = [tensor.tensor_type.name for tensor in reader.tensors]
    field = reader.fields["general.architecture"]
    architecture = bytes(field.parts[field.data[0]]).decode()
    return {"architecture": architecture, "tensors": {name: types.count(name) for name in sorted(set(types))}}


def _write_model(file: Path, folder: Path) -> None:
    """Dequantise a file's weights and write them as a plain transformers model."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging, quantization_config

    # Recent versions of transformers keep weights packed if they find a kernel for packed weights, so ask for plain
    # ones.
    gguf_config = getattr(quantization_config, "GgufConfig", None)
    options = {} if gguf_config is None else {"quantization_config": gguf_config(dequantize=True)}
    bars, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        quantised: Any = AutoModelForCausalLM.from_pretrained(
            str(file.parent), gguf_file=file.name, dtype=torch.float32, **options
        )
        config = quantised.config
        if hasattr(config, "quantization_config"):
            del config.quantization_config  # otherwise saving and loading refuse the model as quantised
        with torch.device("meta"):
            model = type(quantised)(config)
        model.load_state_dict(quantised.state_dict(), assign=True)
        model.tie_weights()
        model.generation_config = quantised.generation_config
        model.save_pretrained(folder)
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
