"""Streamed loading: each rank of a sharded model reads only its own part of every weight from the folder."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from huggingface_hub import constants
from lightning.pytorch import Callback, Trainer
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lightning_scalerl import Evaluate, ResumableCheckpoint, RolloutDataModule, RunLog, ScaleRL
from lightning_scalerl.axes.adapter import LoRA, NoAdapter
from lightning_scalerl.axes.precision import Precision
from lightning_scalerl.callbacks.checkpointing import newest_checkpoint
from lightning_scalerl.distributed.sharded import is_sharded, shard, whole_tensor
from lightning_scalerl.model import files as of_files
from lightning_scalerl.model.adapter import has_adapter
from lightning_scalerl.model.files import WeightFiles, has_no_data, load_blank
from lightning_scalerl.model.load import fingerprint, load_model, load_tokenizer
from lightning_scalerl.model.policy import Policy
from lightning_scalerl.model.value import ValueModel
from lightning_scalerl.session import models, streamed
from lightning_scalerl.session.streamed import empty_or_loaded_model, names_in_files, read_parts
from sweeps.run.journal import read_journal
from tests.distributed.test_ranks import check_same_curve, on_ranks, one_thread  # noqa: F401
from tests.distributed.test_sharded import EVERYTHING, weights
from tests.examples import every
from tests.families import FAMILIES, save
from tests.helpers import SMALL, CountingTask, quiet

# Families that join weights while they load them.
CONVERTED = ("DeepSeek-V3", "Mixtral", "Qwen3-MoE")


@pytest.mark.parametrize("family", every(3, sorted({*FAMILIES} - {*CONVERTED})))
def test_weights_read_in_parts_equal_loaded_weights(family: str, tmp_path: Path) -> None:
    """Equal bit for bit: weights, tied weights, buffers that no file holds, outputs, the critic, the fingerprint."""
    source = str(save(FAMILIES[family], tmp_path / "source"))

    def work(rank: int) -> str:
        # In its own process: a process forked from one that had gloo's threads ends with a segmentation fault.
        dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
        check_parts(source, init_device_mesh("cpu", (1,)))
        return ""

    assert on_ranks(1, work) == [""]


def check_parts(source: str, mesh: DeviceMesh) -> None:
    plain = load_model(source)
    model, files = empty_or_loaded_model(source, NoAdapter())
    assert isinstance(files, WeightFiles) and has_no_data(model) and not has_no_data(plain)
    assert fingerprint(model, files.read) == fingerprint(plain)
    roots = {
        "policy": (Policy(model, Precision("fp32")), Policy(plain, Precision("fp32"))),
        "critic": (ValueModel(model, Precision("fp32")), ValueModel(plain, Precision("fp32"))),
    }
    for name, (root, whole) in roots.items():
        names = names_in_files(root, model, files)
        shard(root, mesh)
        read_parts(root, names, files, torch.device("cpu"))
        ours, theirs = root.state_dict(), whole.state_dict()
        assert ours.keys() == theirs.keys(), name
        assert all(torch.equal(whole_tensor(ours[key]), theirs[key]) for key in theirs), name
        ours, theirs = dict(root.named_buffers()), dict(whole.named_buffers())
        assert ours.keys() == theirs.keys() and all(torch.equal(whole_tensor(ours[key]), theirs[key]) for key in ours)
        assert [key for key, _ in root.named_parameters()] == [key for key, _ in whole.named_parameters()]
    body, plain_body = (root.model.base_model.eval() for root in roots["policy"])
    tokens = torch.arange(3, 33).reshape(2, 15)
    with torch.no_grad():
        # Parameters outside of layers belong to the root, which gathers them only in its own forward pass.
        roots["policy"][0].unshard()  # type: ignore[operator]
        hidden = body(input_ids=tokens).last_hidden_state
        assert torch.equal(hidden, plain_body(input_ids=tokens).last_hidden_state)


def test_a_hub_id_reads_the_files_cached_on_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights are in several files, as for large models."""
    home = tmp_path / "models--owner--name"
    (home / "refs").mkdir(parents=True)
    (home / "refs" / "main").write_text("abc")
    source = save(FAMILIES["Qwen3"], tmp_path / "source")
    model = load_model(str(source))
    model.save_pretrained(home / "snapshots" / "abc", max_shard_size=50_000)  # type: ignore[operator]
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    blank_and_files = load_blank("owner/name")
    assert isinstance(blank_and_files, tuple)
    blank, files = blank_and_files
    assert len({*files.file_of.values()}) > 2 and fingerprint(blank, files.read) == fingerprint(model)


@pytest.mark.parametrize("family", every(1, CONVERTED))
def test_families_that_convert_weights_are_loaded_whole(family: str, tmp_path: Path) -> None:
    source = str(save(FAMILIES[family], tmp_path / "source"))
    model, why = empty_or_loaded_model(source, NoAdapter())
    assert why == "its family converts weights while loading them" and not has_no_data(model)


def test_unsupported_weights_and_buffers_are_loaded_whole(
    tiny_model_path: str, tmp_path: Path, monkeypatch: Any
) -> None:
    """A tied weight stored twice, a renamed weight, .bin files, and buffers computed in an unknown way."""
    source = tmp_path / "source"

    def reason_after(change: Any) -> str:
        shutil.rmtree(source, ignore_errors=True)
        save(FAMILIES["Qwen3"], source)
        tensors = load_file(source / "model.safetensors")
        change(tensors)
        save_file(tensors, source / "model.safetensors", {"format": "pt"})
        reason = load_blank(str(source))
        assert isinstance(reason, str)
        return reason

    tied = "model.embed_tokens.weight"
    assert isinstance(load_blank(tiny_model_path), tuple)
    assert reason_after(lambda tensors: tensors.update({"lm_head.weight": tensors[tied].clone()})).endswith("twice")
    assert "under another name" in reason_after(lambda tensors: tensors.pop("model.norm.weight"))
    torch.save(load_model(str(source)).state_dict(), source / "pytorch_model.bin")
    (source / "model.safetensors").unlink()
    assert load_blank(str(source)) == "its folder holds no safetensors"
    kind = type(load_model(tiny_model_path)).__mro__[1]
    monkeypatch.setattr(kind, "_init_weights", lambda self, module: None)
    assert load_blank(tiny_model_path) == "its family computes its buffers in an unknown way"


# --- a run --------------------------------------------------------------------------------------------------------


def fit(
    path: str, run_dir: Path, streams: bool, overrides: Sequence[str] = (), steps: int = 4, resume: bool = False,
    callbacks: Sequence[Callback] = (), **options: Any,
) -> ScaleRL:  # fmt: skip
    torch.manual_seed(7)
    all_overrides = [*SMALL, "precision=fp32", *overrides]
    module = ScaleRL(path, "scalerl", all_overrides, load_tokenizer(path), streamed=streams)
    directory = run_dir / "checkpoints"
    all_callbacks = [*callbacks, Evaluate(2, 2), RunLog(run_dir), ResumableCheckpoint(directory, 1000)]
    trainer = Trainer(max_steps=steps, callbacks=all_callbacks, **{**quiet(), "enable_checkpointing": True, **options})
    newest = newest_checkpoint(directory).path if resume else None
    trainer.fit(module, datamodule=RolloutDataModule(CountingTask()), ckpt_path=newest, weights_only=True)
    return module


SHARDED: dict[str, Any] = {"devices": 2, "strategy": "fsdp2"}


def count_reads(patch: pytest.MonkeyPatch) -> tuple[list[str], list[int]]:
    """Record the models that are loaded whole from now on in this process, and the bytes of each part that is read."""
    loaded: list[str] = []
    parts: list[int] = []
    load, read = models.load_model, WeightFiles.read

    def loads(path: str, blank: bool = False) -> Any:
        if not blank:
            loaded.append(path)
        return load(path, blank)

    def reads(self: WeightFiles, name: str, part: Any = None) -> torch.Tensor:
        value = read(self, name, part)
        parts.append(value.nbytes)
        return value

    for module in (models, streamed, of_files):
        patch.setattr(module, "load_model", loads)
    patch.setattr(WeightFiles, "read", reads)
    return loaded, parts


def check_same_either_way(work: Callable[[int, bool], str], folder: Path) -> None:
    """Check that two ranks get the same weights and records, bit for bit, from streamed and from whole loading.

    Args:
        work: trains on a rank, streamed or not, in the folder `True` or `False`; returns `weights`.
        folder: parent of both folders.
    """
    results = [on_ranks(2, lambda rank, streams=streams: work(rank, streams)) for streams in (False, True)]  # type: ignore[misc]
    assert results[0] == results[1] and results[0][0] == results[0][1] and len(results[0][0]) == 64, results
    whole, parts = (read_journal(folder / f"{streams}") for streams in (False, True))
    assert whole.status == parts.status == "finished" and whole.deterministic() == parts.deterministic()


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param(("batch.packed=true", "batch.micro_tokens=24"), id="the policy, packed", marks=pytest.mark.full),
        pytest.param(EVERYTHING, id="a critic and a reference", marks=pytest.mark.full),
        pytest.param(("optimizer=adamw_bf16_kahan", "kl=fixed"), id="rounded weights, and a reference like them"),
    ],
)
def test_a_streamed_run_trains_the_same_bit_for_bit(
    overrides: Sequence[str], tiny_model_path: str, tmp_path: Path
) -> None:
    """No rank reads more than its part, except rank 0, which loads the model for its generator."""
    whole = sum(parameter.nbytes for parameter in load_model(tiny_model_path).parameters())
    roots = 3 if overrides is EVERYTHING else 1 + ("kl=fixed" in overrides)

    def work(rank: int, streams: bool) -> str:
        with pytest.MonkeyPatch.context() as patch:
            loaded, parts = count_reads(patch)
            module = fit(tiny_model_path, tmp_path / f"{streams}", streams, overrides, **SHARDED)
        if streams:
            assert len(loaded) == (rank == 0)  # rank 0, for its generator
            assert is_sharded(module.policy) and module.models.why_not_streamed is None
            # The reference is read once more for its fingerprint, one weight at a time.
            assert sum(parts) < 0.6 * whole * roots + (whole if "kl=fixed" in overrides else 0)
        else:
            assert len(loaded) == 1
        assert module.policy.packs == ("batch.packed=true" in overrides)
        return weights(module)

    check_same_either_way(work, tmp_path)


@pytest.mark.full
def test_the_model_is_loaded_whole_if_it_cannot_be_streamed(tiny_model_path: str, tmp_path: Path) -> None:
    """A run of one process and a run with an adapter cannot stream. The run says why once and trains as usual."""
    plain = fit(tiny_model_path, tmp_path / "plain", False, steps=2)
    module = fit(tiny_model_path, tmp_path / "asked", True, steps=2)
    assert not has_no_data(module.policy)
    notices = [line for line in module.began if "every rank reads the whole" in line]
    assert len(notices) == 1 and notices[0].endswith('because only Trainer(strategy="fsdp2") shards it')
    one, two = (read_journal(tmp_path / name) for name in ("plain", "asked"))
    assert one.deterministic() == two.deterministic()
    assert all(torch.equal(value, plain.state_dict()[name]) for name, value in module.state_dict().items())

    def work(rank: int, by_callback: bool) -> str:
        adapter: dict[str, Any] = {"callbacks": [LoRA()]} if by_callback else {"overrides": ["adapter=lora"]}
        adapted = fit(tiny_model_path, tmp_path / f"adapted {by_callback}", True, steps=1, **adapter, **SHARDED)
        assert has_adapter(adapted.policy.model)
        return str(adapted.models.why_not_streamed)

    for by_callback in (False, True):
        reasons = on_ranks(2, lambda rank, by_callback=by_callback: work(rank, by_callback))  # type: ignore[misc]
        assert reasons == ["it gets an adapter"] * 2


@pytest.mark.full
def test_a_streamed_run_resumes(tiny_model_path: str, tmp_path: Path) -> None:
    """It resumes from its checkpoint folder, with a reference that is identified by its initial weights."""
    options: dict[str, Any] = {"overrides": ["kl=fixed"]}
    fit(tiny_model_path, tmp_path / "one", False, **options)
    for steps in (2, 4):

        def work(rank: int, steps: int = steps) -> str:
            module = fit(tiny_model_path, tmp_path / "run", True, steps=steps, resume=steps > 2, **options, **SHARDED)
            return weights(module)

        results = on_ranks(2, work)
        assert results[0] == results[1] and len(results[0]) == 64, results
    check_same_curve(read_journal(tmp_path / "one"), read_journal(tmp_path / "run"), steps=4)
