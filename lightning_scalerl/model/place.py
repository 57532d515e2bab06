"""Location of a model: a local folder, a GGUF file or a hub id. It is checked before transformers is imported."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from lightning_scalerl.checks import ConfigurationError, error_line, looks_local
from lightning_scalerl.model.gguf import converted, digest, gguf_file

# Timeout of one request to the hub, and number of attempts. transformers itself asks six times for each file, which
# takes minutes without a network.
HUB_TIMEOUT_S = 10.0
HUB_TRIES = 2


def model_path(path: str) -> str:
    """Return the path to load a model from: `path`, or for a GGUF model the cache folder with its conversion.

    `conf/model/path.yaml` has this function as its target.

    Raises:
        ConfigurationError: a local path has no model, or a GGUF model cannot be converted.
    """
    if (file := gguf_file(path)) is not None:
        return str(converted(file))
    local = looks_local(path)
    if local and (Path(path).expanduser() / "adapter_config.json").is_file():
        raise ConfigurationError(
            f"model.path: {path!r} holds an adapter of PEFT and no model; give the folder of its model, with "
            "adapter=lora for a new one. To train this one further, in a script: "
            "ScaleRL(model=PeftModel.from_pretrained(MODEL, "
            f"{path!r}, is_trainable=True), tokenizer=...)"
        )
    if local and not (Path(path).expanduser() / "config.json").is_file():
        raise ConfigurationError(
            f"model.path: {path!r} is a place on this machine and holds no config.json; give a folder saved by "
            "save_pretrained, a GGUF file, or a hub id: OWNER/NAME"
        )
    return str(Path(path).expanduser()) if local else path


def load_options(path: str) -> dict[str, Any]:
    """Return options for `from_pretrained`, so that it does not wait for a hub that does not answer.

    Args:
        path: a folder or a hub id.

    Raises:
        ConfigurationError: a folder has no model, the hub does not know the id, or the hub cannot be reached and the
            model has not been downloaded.
    """
    if Path(model_path(path)).is_dir():
        return {}
    from huggingface_hub import constants, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        address = hf_hub_url(path, "config.json")
        downloaded = isinstance(try_to_load_from_cache(path, "config.json"), str)
    except HFValidationError as error:
        raise ConfigurationError(f"model.path: {path!r} is neither a folder nor a hub id ({error})") from error
    if constants.HF_HUB_OFFLINE:
        return {"local_files_only": True}
    status, reason = _ask_hub(address)
    if status is None and not downloaded:
        raise ConfigurationError(
            f"model.path: {path!r} is no folder here, has not been downloaded, and {constants.ENDPOINT} does not "
            f"answer ({reason}); give a folder, or a hub id where there is a network"
        )
    if status == 404:
        raise ConfigurationError(f"model.path: {path!r} is neither a folder here nor a model on {constants.ENDPOINT}")
    return {"local_files_only": True} if status is None else {}


def _ask_hub(address: str) -> tuple[int | None, str]:
    """Return the status of the hub's answer; None and the reason if it does not answer."""
    from huggingface_hub import get_session
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

    reason = ""
    for _ in range(HUB_TRIES):
        try:
            return get_session().head(address, headers=build_hf_headers(), timeout=HUB_TIMEOUT_S).status_code, ""
        except Exception as error:  # depends on the HTTP library that huggingface_hub uses
            reason = error_line(error)
    return None, reason


def _content(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return fingerprints of a local model's files for run identities, independent of where the files are."""
    if (file := gguf_file(str(parameters["path"]))) is not None:
        return {"path": {"gguf": digest(file)}}
    folder = Path(model_path(str(parameters["path"])))
    if not folder.is_dir():
        return {}
    files = sorted(path for path in folder.iterdir() if path.is_file() and not path.name.startswith("."))
    stats = {path: path.stat() for path in files}
    return {"path": {path.name: _fingerprint(path, stat.st_size, stat.st_mtime_ns) for path, stat in stats.items()}}


model_path.content = _content  # type: ignore[attr-defined]


def content(path: str, setting: str = "model.path") -> Any:
    """Return a model's entry in a run's identity: digests of its files, or its hub id.

    Raises:
        ConfigurationError: a local path has no model. The message names the configuration key `setting`.
    """
    try:
        return _content({"path": path}).get("path", path)
    except ConfigurationError as error:
        raise ConfigurationError(str(error).replace("model.path", setting)) from error


def digest_of(path: str) -> str:
    """Return a single digest of `content(path)`, which identifies the model."""
    return hashlib.sha256(json.dumps(content(path), sort_keys=True).encode()).hexdigest()


# Number and size in bytes of the samples that are read from a large file. Reading all weights would take too long.
_SAMPLES, _SAMPLE = 256, 2**16


# Size and modification time are part of the cache key, so that a rewritten file is read again.
@lru_cache(maxsize=256)
def _fingerprint(path: Path, size: int, changed_ns: int) -> str:
    """Return a digest of a file's size and bytes; for a large file, of evenly spaced samples of its bytes."""
    read_whole = size <= _SAMPLES * _SAMPLE
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as handle:
        for number in range(1 if read_whole else _SAMPLES):
            handle.seek(0 if read_whole else (size - _SAMPLE) * number // (_SAMPLES - 1))
            digest.update(handle.read(size if read_whole else _SAMPLE))
    return digest.hexdigest()
