"""Tests of published weights: dtypes of the generators, tied tensors once, bounded memory, and a digest."""

from __future__ import annotations

import tracemalloc
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_scalerl.axes.precision import Precision
from lightning_scalerl.checks import ConfigurationError
from lightning_scalerl.generator.fleet import weights
from lightning_scalerl.generator.fleet.fleet import Fleet
from lightning_scalerl.generator.fleet.server import Blueprint
from lightning_scalerl.generator.fleet.weights import MIB, WeightStore
from lightning_scalerl.generator.torch.generator import TorchGenerator
from lightning_scalerl.generator.torch.policy import GeneratorPolicy
from lightning_scalerl.measure.memory import LiveBytes
from lightning_scalerl.model.head import output_head
from lightning_scalerl.task.arithmetic_base import new_model
from tests.examples import every
from tests.generator.sampling import with_sampling
from tests.generator.test_fleet import drained
from tests.generator.test_torch_generator import STOP, drain, generator_of, requests

PRECISIONS = [
    Precision(policy, fp32_head_generator=head) for policy in ("bf16", "fp16", "fp32") for head in (True, False)
]


class Allocations(TorchDispatchMode):
    """Records the bytes that each torch operation newly allocates on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = {leaf.untyped_storage().data_ptr() for leaf in tree_leaves((args, kwargs)) if torch.is_tensor(leaf)}
        result = func(*args, **(kwargs or {}))
        for output in tree_leaves(result):
            if torch.is_tensor(output) and output.untyped_storage().data_ptr() not in inputs:
                self.sizes.append(output.untyped_storage().nbytes())
        return result


def open_store(model: Any, precision: Precision | None, bucket_mib: float = 64.0) -> WeightStore:
    return WeightStore(model, precision, bucket_mib)


def changed_weights(model: Any) -> dict[str, torch.Tensor]:
    """Weights after a step; tied tensors stay tied."""
    source, new = torch.Generator().manual_seed(7), {}
    changed = {}
    for name, tensor in model.state_dict().items():
        key = tensor.data_ptr()
        if key not in new:
            new[key] = tensor + 0.01 * torch.randn(tensor.shape, generator=source)
        changed[name] = new[key]
    return changed


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize(
    "precision", PRECISIONS, ids=lambda p: f"{p.policy}-{'fp32' if p.fp32_head_generator else 'same'}"
)
def test_published_weights_give_the_same_samples_as_the_masters(precision: Precision, tied: bool) -> None:
    """With an FP32 head, its weights are published in FP32 and all others in the policy's dtype."""
    model = new_model(width=32, layers=2, seed=3)
    if tied:
        model.config.tie_word_embeddings = True
        model.lm_head.weight = model.model.embed_tokens.weight
    weights = changed_weights(model)
    direct, published = (generator_of(model, precision=precision) for _ in range(2))
    store = open_store(model, precision)
    try:
        direct.publish(weights, 1)
        sent = store.publish(weights, 1)
        tensors = load_file(sent.path)
        published.publish(tensors, 1)
        for request in requests():
            direct.submit(request)
            published.submit(request)
        ours, theirs = drain(direct), drain(published)
        assert {key: entry.rollout for key, entry in ours.items()} == {
            key: entry.rollout for key, entry in theirs.items()
        }
        head = precision.head_dtype(precision.fp32_head_generator)
        name = "model.embed_tokens.weight" if tied else "lm_head.weight"
        assert tensors[name].dtype == head and ("lm_head.weight" in tensors) != tied
        other_dtypes = {tensor.dtype for tensor_name, tensor in tensors.items() if tensor_name != name}
        assert other_dtypes == {precision.policy_dtype}
    finally:
        store.close()


def test_without_a_precision_weights_are_not_cast() -> None:
    model = new_model(width=32, layers=1, seed=3)
    store = open_store(model, None)
    for name, tensor in load_file(store.current.path).items():
        assert torch.equal(tensor, model.state_dict()[name])
    store.close()


@pytest.mark.parametrize("bucket_mib", every(2, [64.0, 100 / MIB, 8 / MIB], pytest.mark.full))
def test_the_bucket_size_does_not_change_the_published_bytes(bucket_mib: float) -> None:
    model = new_model(width=32, layers=1, seed=3)
    stores = [open_store(model, Precision("bf16"), size) for size in (64.0, bucket_mib)]
    one, other = (store.current for store in stores)
    assert one.path.read_bytes() == other.path.read_bytes()
    assert one.digest == other.digest == other.digest_of_file()
    for store in stores:
        store.close()


def test_the_digest_changes_exactly_when_the_weights_do() -> None:
    model = new_model(width=32, layers=1, seed=3)
    store, weights = open_store(model, Precision("bf16")), dict(model.state_dict())
    first, republished = store.current, store.publish(weights, 1)
    assert first.digest == republished.digest and first.number != republished.number
    weights["model.norm.weight"] = weights["model.norm.weight"] * 1.01
    assert store.publish(weights, 2).digest not in (first.digest,)
    assert store.digests[1] == store.digests[2] != store.digests[3]
    store.close()


@pytest.mark.full
def test_publishing_13_million_parameters_allocates_one_bucket_and_writes_only_their_bytes() -> None:
    """Counts the bytes of the file, and the bytes allocated on the host while it is written."""
    model = new_model(width=512, layers=4, seed=0)
    parameters = {tensor.data_ptr(): tensor for tensor in model.parameters()}
    count, head = sum(tensor.numel() for tensor in parameters.values()), model.lm_head.weight.numel()
    assert 13e6 < count < 14.5e6
    bucket = MIB // 2
    generator_settings = with_sampling(
        precision=Precision("bf16"), max_prompt_tokens=8, max_new_tokens=4, stop_tokens=[STOP]
    )
    fleet = Fleet(
        *(partial(TorchGenerator, slots=2), model, generator_settings),
        **{"generators": 1, "silence_s": 60, "start_s": 100, "bucket_mib": bucket / MIB},
    )
    with closing(fleet):
        (engine,) = fleet._engines
        fleet.publish(dict(model.state_dict()), 0)  # the publish at the start is done
        weights = changed_weights(model)
        tracemalloc.start()
        with Allocations() as allocations:
            fleet.publish(weights, 1)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        # Two bytes per parameter, four in the FP32 head, and a header.
        assert 0 <= fleet._store.current.path.stat().st_size - (2 * count + 2 * head) < 8192
        assert 0 < sum(allocations.sizes) <= bucket < 2 * count / 20
        assert peak < bucket
        # The engine has acknowledged the new weights.
        assert engine.acknowledged == fleet._store.current.number and fleet.version == 1
        local = generator_of(model, precision=Precision("bf16"), max_new_tokens=4, slots=2)
        local.publish(weights, 1)
        for request in requests(1):  # with several requests, batching would depend on timing
            local.submit(request)
            fleet.submit(request)
        expected = {place: entry.rollout for place, entry in drain(local).items()}
        assert {(entry.key, entry.index): entry.rollout for entry in drained(fleet)} == expected


@pytest.mark.parametrize("fp32_head", [False, True])
def test_an_engine_never_holds_a_whole_model_in_fp32(fp32_head: bool) -> None:
    """Neither during construction nor later: only the weights in their dtype, and one tensor while it is cast."""
    model_ = new_model(256, 6, seed=0)
    parameters = sum(parameter.numel() for parameter in model_.parameters())
    largest = max(parameter.numel() for parameter in model_.parameters())
    head = output_head(model_).weight.numel() if fp32_head else 0
    arguments = {
        "precision": Precision("bf16", fp32_head_generator=fp32_head),
        **with_sampling(slots=1, max_prompt_tokens=4, max_new_tokens=4, stop_tokens=[1]),
    }
    blueprint = Blueprint(TorchGenerator, arguments, type(model_), model_.config, "cpu")
    with LiveBytes() as live:
        generator = blueprint.build()
    assert {parameter.dtype for parameter in generator.policy.model.parameters()} == {torch.bfloat16}  # type: ignore[attr-defined]
    buffers = sum(buffer.numel() * 4 for buffer in model_.buffers())
    expected_bytes = 2 * parameters + 4 * head
    assert parameters > 4_000_000 and expected_bytes <= live.now < 1.02 * expected_bytes + buffers
    # The tensor being cast exists twice: in FP32 and in its own dtype.
    assert live.peak < 1.05 * expected_bytes + 4 * largest + buffers < 4 * parameters


def test_a_model_passed_to_a_generator_policy_is_copied() -> None:
    model_ = new_model(32, 1, seed=0)
    before = {name: tensor.clone() for name, tensor in model_.state_dict().items()}
    policy = GeneratorPolicy(model_, Precision("bf16"))
    policy.load({name: torch.ones_like(tensor) for name, tensor in before.items()})
    assert all(torch.equal(model_.state_dict()[name], tensor) for name, tensor in before.items())
    assert {parameter.dtype for parameter in model_.parameters()} == {torch.float32}


def test_the_trainer_checks_a_model_with_its_own_weights_before_any_engine_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An engine's rounded weights could hide a difference that is visible in FP32."""
    checked = []

    def refuse(model: Any, capacity: int) -> None:
        checked.append((next(model.parameters()).dtype, capacity))
        raise ConfigurationError("model: it cannot be decoded")

    monkeypatch.setattr("lightning_scalerl.generator.torch.generator.check_decodable", refuse)
    arguments = with_sampling(precision=Precision("bf16"), max_prompt_tokens=3, max_new_tokens=4)
    limits: dict[str, Any] = {"generators": 1, "silence_s": 5.0, "start_s": 5.0}
    with pytest.raises(ConfigurationError, match="it cannot be decoded"):
        Fleet(partial(TorchGenerator, slots=2), new_model(32, 1, seed=0), arguments, **limits)
    assert checked == [(torch.float32, 7)]


def test_restored_weights_are_bit_for_bit_the_same(tmp_path: Path) -> None:
    """Checkpoints hold weights in the policy's dtype, or in FP32 if they are older; both give the same digest."""
    model = new_model(width=32, layers=2, seed=3)
    weights = changed_weights(model)
    store = open_store(model, Precision("bf16"))
    sent = store.publish(weights, 1)
    torch.save(sent.read(), tmp_path / "saved")
    republished = store.publish(torch.load(tmp_path / "saved"), 1)
    assert republished.digest == sent.digest == store.publish(weights, 1).digest
    store.close()


def test_weights_of_a_killed_trainer_are_deleted_from_shared_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "SHARED_MEMORY", tmp_path)
    model = new_model(width=32, layers=1, seed=3)
    alive, dead = open_store(model, None), open_store(model, None)
    (tmp_path / "scalerl-of-another-kind").mkdir()
    dead._lock.close()  # as when its process ends
    last = open_store(model, None)
    assert alive.folder.is_dir() and last.folder.is_dir() and not dead.folder.exists()
    assert (tmp_path / "scalerl-of-another-kind").is_dir()
    for store in (alive, last):
        store.close()
