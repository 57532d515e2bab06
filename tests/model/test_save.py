"""A model that no rank holds whole is written as transformers writes a whole one, one weight file at a time."""

from __future__ import annotations

import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_scalerl.checks import ConfigurationError
from lightning_scalerl.model.load import blank_copy, load_model, load_tokenizer
from lightning_scalerl.model.save import save_in_parts, save_model
from tests.examples import every
from tests.families import FAMILIES, save


class Fetched:
    """Return copies of a model's weights and count the bytes of copies that are still alive."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.alive = self.most = 0

    def __call__(self, name: str) -> Tensor:
        value: Tensor = self.model.state_dict()[name].clone()
        self.alive += value.nbytes
        self.most = max(self.most, self.alive)
        weakref.finalize(value, self._gone, value.nbytes)
        return value

    def _gone(self, size: int) -> None:
        self.alive -= size


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("family", every(3, sorted(FAMILIES)))
def test_families_are_written_byte_for_byte_as_if_whole(family: str, dtype: str, tmp_path: Path) -> None:
    """Tied weights are written once, experts under their names in files; configuration and card are the same."""
    source = str(save(FAMILIES[family], tmp_path / "source"))
    model, tokenizer = load_model(source), load_tokenizer(source)
    for blank, name in ((blank_copy(model), "copied"), (load_model(source, blank=True), "loaded")):
        assert all(parameter.is_meta for parameter in blank.parameters())
        save_in_parts(blank, Fetched(model), tokenizer, tmp_path / name, dtype, {"recipe": "r"})
    save_model(model, tokenizer, tmp_path / "whole", dtype, {"recipe": "r"})
    whole = contents(tmp_path / "whole")
    assert "model.safetensors" in whole
    for name in ("copied", "loaded"):
        parts = contents(tmp_path / name)
        assert parts.keys() == whole.keys()
        assert not [file for file in whole if parts[file] != whole[file]]


@pytest.mark.parametrize("family", ["Qwen3", pytest.param("Qwen3-MoE", marks=pytest.mark.full)])
def test_no_more_than_a_file_and_a_layer_is_held(family: str, tmp_path: Path) -> None:
    """The files and their index are laid out as by transformers, and loading them returns the same weights."""
    source = str(save(FAMILIES[family], tmp_path / "source"))
    model, tokenizer = load_model(source), load_tokenizer(source)
    fetched = Fetched(model)
    total = sum(parameter.nbytes for parameter in model.parameters())
    experts = model.model.layers[0].mlp if "MoE" in family else None  # type: ignore[union-attr]
    layer_bytes = 0 if experts is None else 2 * sum(parameter.nbytes for parameter in experts.parameters())
    largest = max(parameter.nbytes for parameter in model.parameters())
    max_bytes = max(total // 6, largest)
    save_in_parts(blank_copy(model), fetched, tokenizer, tmp_path / "parts", max_file_bytes=max_bytes)
    assert fetched.most <= max_bytes + layer_bytes < total and fetched.alive == 0
    files = sorted(path.name for path in (tmp_path / "parts").glob("*.safetensors"))
    assert len(files) >= 2 and files[0] == f"model-00001-of-{len(files):05}.safetensors"
    index = json.loads((tmp_path / "parts" / "model.safetensors.index.json").read_text())
    assert {*index["weight_map"].values()} == {*files}
    assert index["metadata"]["total_size"] == total
    if (
        experts is None
    ):  # transformers counts the joint size of a layer's experts once per expert, and so makes more files
        model.save_pretrained(tmp_path / "theirs", max_shard_size=max_bytes)  # type: ignore[operator]
        from_transformers = contents(tmp_path / "theirs")
        assert all(contents(tmp_path / "parts")[name] == from_transformers[name] for name in from_transformers)
    loaded = load_model(str(tmp_path / "parts")).state_dict()
    assert all(torch.equal(loaded[name], value) for name, value in model.state_dict().items())


def test_a_failed_save_leaves_no_files(tiny_model: Any, tmp_path: Path) -> None:
    def broken(name: str) -> Tensor:
        raise OSError("a rank is gone")

    with pytest.raises(OSError, match="a rank is gone"):
        save_in_parts(blank_copy(tiny_model), broken, None, tmp_path / "model")
    assert not any(tmp_path.iterdir())
    with pytest.raises(ConfigurationError, match="dtype: 'int8' is unknown"):
        save_in_parts(tiny_model, broken, None, tmp_path / "model", dtype="int8")
    with pytest.raises(ConfigurationError, match="has no save_pretrained"):
        save_in_parts(torch.nn.Linear(1, 1), broken, None, tmp_path / "model")
