"""FSDP2: a model sharded over ranks trains as a whole one does, and its checkpoints fit any strategy."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from safetensors.torch import load_file

from lightning_scalerl import RolloutDataModule, ScaleRL
from lightning_scalerl.axes.aggregation import TokenAggregation
from lightning_scalerl.axes.loss import DAPO
from lightning_scalerl.callbacks.checkpointing import newest_checkpoint
from lightning_scalerl.distributed.shard_files import read_whole
from lightning_scalerl.distributed.sharded import gather_state
from lightning_scalerl.model import policy
from lightning_scalerl.model.load import load_model
from lightning_scalerl.update import trained
from sweeps.run.journal import read_journal
from tests.distributed.test_ranks import check_same_curve, fit, on_ranks, one_thread  # noqa: F401
from tests.helpers import CountingTask, quiet

# A critic, a reference and an anchor: everything that can be sharded in addition to the policy.
EVERYTHING = (
    "advantage=gae",
    "critic=value_network",
    "filter=none",
    "kl=fixed",
    "entropy=fixed",
    "correction=proximal",
)


def weights(module: ScaleRL) -> str:
    """Return a digest of all weights, gathered on every rank."""
    digest = hashlib.sha256()
    for tensor in gather_state(module.policy.state_dict(), keep=True).values():
        digest.update(tensor.float().numpy().tobytes())
    return digest.hexdigest()


def saved_weights(run_dir: Path) -> dict[str, Any]:
    """Return the whole weights of a run's newest checkpoint, which may be a folder or a file."""
    path = newest_checkpoint(run_dir / "checkpoints").path
    assert path is not None
    saved = read_whole(path) if path.is_dir() else torch.load(path, weights_only=True)
    return dict(saved["state_dict"])


def check_same_weights(one: ScaleRL, run: Path) -> None:
    """Check that a run's last checkpoint holds the weights of a module."""
    saved = saved_weights(run)
    for name, tensor in one.state_dict().items():
        assert saved[name].allclose(tensor, rtol=1e-4, atol=1e-5), name


def callbacks() -> list[Callback]:
    return [DAPO(clip_low=0.05, clip_high=0.05), TokenAggregation()]


def test_two_shards_train_as_one(tiny_model_path: str, tmp_path: Path) -> None:
    """Rollouts, losses, gradient norms and counters match a run on one rank. Each rank has half of the weights."""
    fit(tiny_model_path, tmp_path / "one", 1, callbacks=callbacks())

    def work(rank: int) -> str:
        module = fit(tiny_model_path, tmp_path / "two", 2, callbacks=callbacks(), strategy="fsdp2")
        whole_size = sum(parameter.numel() for parameter in module.policy.parameters())
        rank_size = sum(parameter.to_local().numel() for parameter in module.policy.parameters())  # type: ignore[attr-defined]
        assert rank_size < 0.6 * whole_size
        return weights(module)

    results = on_ranks(2, work)
    assert results[0] == results[1] and len(results[0]) == 64, results
    view = read_journal(tmp_path / "two")
    assert view.status == "finished"
    check_same_curve(read_journal(tmp_path / "one"), view, steps=4)
    assert any(record.metrics["mechanism/loss"] for record in view.of_kind("train"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "given",
    [
        pytest.param({"overrides": EVERYTHING}, id="a critic and a reference", marks=pytest.mark.full),
        pytest.param(
            {"recipe": "scalerl_core", "overrides": ["batch.prompts=1", "batch.completions=3"]},
            id="few rows",
            marks=pytest.mark.full,
        ),
        pytest.param(
            {"overrides": ["batch.micro_batch=1", "epochs.count=2"]},
            id="passes of one row, two epochs",
            marks=pytest.mark.full,
        ),
        pytest.param({"overrides": [*EVERYTHING, "batch.recompute=true"]}, id="activations recomputed"),
        pytest.param(
            {"overrides": ["adapter=lora", "adapter.modules_to_save=[lm_head,norm]", "batch.offload=true"]},
            id="an adapter with a head, inputs of layers on the host",
        ),
    ],
)
def test_shards_train_as_one_with_every_feature(given: dict[str, Any], tiny_model_path: str, tmp_path: Path) -> None:
    fit(tiny_model_path, tmp_path / "one", 1, **given)
    results = on_ranks(2, lambda rank: weights(fit(tiny_model_path, tmp_path / "two", 2, strategy="fsdp2", **given)))
    assert results[0] == results[1] and len(results[0]) == 64, results
    check_same_curve(read_journal(tmp_path / "one"), read_journal(tmp_path / "two"), steps=4)


@pytest.mark.full
def test_shards_train_as_one_with_a_chunked_head(
    tiny_model_path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The head is sharded again between the forward and the backward pass, which recomputes the logits."""
    fit(tiny_model_path, tmp_path / "one", 1)
    monkeypatch.setattr(policy, "MAX_LOGITS", 64)
    results = on_ranks(2, lambda rank: weights(fit(tiny_model_path, tmp_path / "two", 2, strategy="fsdp2")))
    assert results[0] == results[1] and len(results[0]) == 64, results
    check_same_curve(read_journal(tmp_path / "one"), read_journal(tmp_path / "two"), steps=4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategies", [("one", "fsdp2", "ddp"), pytest.param(("fsdp2", "one"), marks=pytest.mark.full)], ids="-".join
)
def test_a_run_resumes_under_another_strategy(strategies: Sequence[str], tiny_model_path: str, tmp_path: Path) -> None:
    """Two steps under each strategy give one curve, and finally the weights of one process."""
    options: dict[str, Any] = {"overrides": EVERYTHING}
    whole = fit(tiny_model_path, tmp_path / "one", 1, steps=2 * len(strategies), **options)
    run = tmp_path / "moved"
    for number, strategy in enumerate(strategies):
        more = {"steps": 2 * (number + 1), "resume": number > 0, **options}
        if strategy == "one":
            fit(tiny_model_path, run, 1, **more)
            continue
        results = on_ranks(
            2,
            lambda rank, more=more, by=strategy: weights(fit(tiny_model_path, run, 2, strategy=by, **more)),  # type: ignore[misc]
        )
        assert results[0] == results[1] and len(results[0]) == 64, results
    check_same_curve(read_journal(tmp_path / "one"), read_journal(run), steps=2 * len(strategies))
    check_same_weights(whole, run)


@pytest.mark.slow
def test_export_validate_and_another_fit_after_a_sharded_fit(tiny_model_path: str, tmp_path: Path) -> None:
    """The model is exported whole, evaluated by `Trainer.validate`, and trained further by a second `Trainer.fit`."""
    whole = fit(tiny_model_path, tmp_path / "one", 1, steps=2)

    def work(rank: int) -> str:
        module = fit(tiny_model_path, tmp_path / "two", 2, steps=2, strategy="fsdp2")
        gathered_at_once: list[int] = []

        def count_gathered(state: Any, keep: bool) -> dict[str, Any]:
            gathered_at_once.append(len(state))
            return gather_state(state, keep)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(trained, "gather_state", count_gathered)
            module.save_pretrained(tmp_path / "exported")
        assert set(gathered_at_once) == {1} and len(gathered_at_once) == len(module.policy.model.state_dict())
        trainer = module.trainer
        rates = trainer.validate(module, datamodule=trainer.datamodule, verbose=False)
        trainer = Trainer(max_steps=4, strategy="fsdp2", devices=2, **quiet())
        trainer.fit(module, datamodule=RolloutDataModule(CountingTask()))
        assert module.completed_steps == 4
        return f"{weights(module)} {sorted(rates[0])[:1]}"

    results = on_ranks(2, work)
    assert results[0] == results[1] and "eval/" in results[0], results
    exported, one = load_model(str(tmp_path / "exported")).state_dict(), whole.policy.model.state_dict()
    assert exported.keys() == one.keys()
    assert all(exported[name].allclose(one[name], rtol=1e-4, atol=1e-5) for name in one)
    whole.save_pretrained(tmp_path / "plain")
    files = {path.name for path in (tmp_path / "plain").iterdir()}
    assert {path.name for path in (tmp_path / "exported").iterdir()} == files
    for name in files - {"model.safetensors"}:
        assert (tmp_path / "exported" / name).read_bytes() == (tmp_path / "plain" / name).read_bytes(), name
    assert load_model(str(tmp_path / "exported")).generation_config.eos_token_id is not None


# LoRA: the frozen base weights have the policy's type, the low-rank weights are FP32.
ADAPTED = ("adapter=lora", "adapter.rank=3", "optimizer.lr=3e-2")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("more", "strategy"),
    [
        pytest.param((), "ddp", id="alone-ddp", marks=pytest.mark.full),
        pytest.param((*EVERYTHING, "critic.lr=3e-3"), "fsdp2", id="a critic and a reference-fsdp2"),
        pytest.param((), "fsdp2", id="alone-fsdp2", marks=pytest.mark.full),
        pytest.param((*EVERYTHING, "critic.lr=3e-3"), "ddp", id="a critic and a reference-ddp", marks=pytest.mark.full),
    ],
)
def test_an_adapter_trains_on_two_ranks_as_on_one(
    more: Sequence[str], strategy: str, tiny_model_path: str, tmp_path: Path
) -> None:
    """The curve, checkpoint and export match a run on one rank. Frozen weights stay bit for bit the same."""
    options: dict[str, Any] = {"overrides": [*ADAPTED, *more]}
    whole = fit(tiny_model_path, tmp_path / "one", 1, **options)
    whole.save_pretrained(tmp_path / "exported one")

    def work(rank: int) -> str:
        module = fit(tiny_model_path, tmp_path / "two", 2, strategy=strategy, **options)
        module.save_pretrained(tmp_path / "exported two")
        module.save_pretrained(tmp_path / "adapter", adapter=True)
        return weights(module)

    results = on_ranks(2, work)
    assert results[0] == results[1] and len(results[0]) == 64, results
    check_same_curve(read_journal(tmp_path / "one"), read_journal(tmp_path / "two"), steps=4)
    one, two = (load_model(str(tmp_path / f"exported {name}")).state_dict() for name in ("one", "two"))
    base = load_model(tiny_model_path).state_dict()
    for name, value in one.items():
        assert value.allclose(two[name], rtol=1e-4, atol=1e-5), name
        assert torch.equal(two[name], base[name]) == ("_proj" not in name), name
    saved = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert len(saved) == 2 * 14
    checkpoint = saved_weights(tmp_path / "two")
    for name, value in whole.state_dict().items():
        assert checkpoint[name].allclose(value, rtol=1e-4, atol=1e-5), name


@pytest.mark.full
def test_an_adapter_in_bf16_is_sharded_and_resumes(tiny_model_path: str, tmp_path: Path) -> None:
    """Layers with BF16 and FP32 weights, recomputed: sharded, gathered, saved, and resumed by one process."""
    options: dict[str, Any] = {"overrides": [*ADAPTED, "precision=bf16", "kl=fixed", "batch.recompute=true"]}

    def work(rank: int) -> str:
        module = fit(tiny_model_path, tmp_path / "run", 2, steps=2, strategy="fsdp2", **options)
        types = {name: value.dtype for name, value in gather_state(module.policy.model.state_dict(), keep=True).items()}
        assert {types[name] for name in types if "base_layer" in name} == {torch.bfloat16}
        assert {types[name] for name in types if "base_layer" not in name} == {torch.float32}
        return weights(module)

    results = on_ranks(2, work)
    assert results[0] == results[1] and len(results[0]) == 64, results
    assert fit(tiny_model_path, tmp_path / "run", 1, steps=4, resume=True, **options).completed_steps == 4
