"""Published weights: in the generators' types, tied tensors once, bucket by bucket, and under a digest."""

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
    """Counts the bytes of new memory that each operation of torch takes on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {each.untyped_storage().data_ptr() for each in tree_leaves((args, kwargs)) if torch.is_tensor(each)}
        result = func(*args, **(kwargs or {}))
        for each in tree_leaves(result):
            if torch.is_tensor(each) and each.untyped_storage().data_ptr() not in given:
                self.sizes.append(each.untyped_storage().nbytes())
        return result


def stored(model: Any, precision: Precision | None, bucket_mib: float = 64.0) -> WeightStore:
    return WeightStore(model, precision, bucket_mib)


def moved(model: Any) -> dict[str, torch.Tensor]:
    """Weights after a step; what was tied stays tied."""
    source, new = torch.Generator().manual_seed(7), {}
    found = {}
    for name, tensor in model.state_dict().items():
        key = tensor.data_ptr()
        if key not in new:
            new[key] = tensor + 0.01 * torch.randn(tensor.shape, generator=source)
        found[name] = new[key]
    return found


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize(
    "precision", PRECISIONS, ids=lambda p: f"{p.policy}-{'fp32' if p.fp32_head_generator else 'same'}"
)
def test_an_engine_samples_the_same_bits_as_one_that_is_handed_the_masters(precision: Precision, tied: bool) -> None:
    """Under an FP32 head its weights are published whole, and nothing else is."""
    model = new_model(width=32, layers=2, seed=3)
    if tied:
        model.config.tie_word_embeddings = True
        model.lm_head.weight = model.model.embed_tokens.weight
    weights = moved(model)
    direct, published = (generator_of(model, precision=precision) for _ in range(2))
    store = stored(model, precision)
    try:
        direct.publish(weights, 1)
        sent = store.publish(weights, 1)
        tensors = load_file(sent.path)
        published.publish(tensors, 1)
        for request in requests():
            direct.submit(request)
            published.submit(request)
        ours, theirs = drain(direct), drain(published)
        assert {key: each.rollout for key, each in ours.items()} == {key: each.rollout for key, each in theirs.items()}
        head = precision.head_dtype(precision.fp32_head_generator)
        name = "model.embed_tokens.weight" if tied else "lm_head.weight"
        assert tensors[name].dtype == head and ("lm_head.weight" in tensors) != tied
        rest = {tensor.dtype for each, tensor in tensors.items() if each != name}
        assert rest == {precision.policy_dtype}
    finally:
        store.close()


def test_without_a_precision_nothing_is_cast() -> None:
    model = new_model(width=32, layers=1, seed=3)
    store = stored(model, None)
    for name, tensor in load_file(store.current.path).items():
        assert torch.equal(tensor, model.state_dict()[name])
    store.close()


@pytest.mark.parametrize("bucket_mib", every(2, [64.0, 100 / MIB, 8 / MIB], pytest.mark.full))
def test_the_size_of_buckets_changes_no_byte(bucket_mib: float) -> None:
    model = new_model(width=32, layers=1, seed=3)
    stores = [stored(model, Precision("bf16"), size) for size in (64.0, bucket_mib)]
    one, other = (store.current for store in stores)
    assert one.path.read_bytes() == other.path.read_bytes()
    assert one.digest == other.digest == other.digest_of_file()
    for store in stores:
        store.close()


def test_a_digest_changes_with_the_weights_and_only_with_them() -> None:
    model = new_model(width=32, layers=1, seed=3)
    store, weights = stored(model, Precision("bf16")), dict(model.state_dict())
    first, again = store.current, store.publish(weights, 1)
    assert first.digest == again.digest and first.number != again.number
    weights["model.norm.weight"] = weights["model.norm.weight"] * 1.01
    assert store.publish(weights, 2).digest not in (first.digest,)
    assert store.digests[1] == store.digests[2] != store.digests[3]
    store.close()


def test_publishing_13_million_parameters_takes_one_bucket_and_their_own_bytes() -> None:
    """Counted: the bytes of the file, and what is allocated on the host while it is written."""
    model = new_model(width=512, layers=4, seed=0)
    parameters = {tensor.data_ptr(): tensor for tensor in model.parameters()}
    count, head = sum(tensor.numel() for tensor in parameters.values()), model.lm_head.weight.numel()
    assert 13e6 < count < 14.5e6
    bucket = MIB // 2
    given = with_sampling(precision=Precision("bf16"), max_prompt_tokens=8, max_new_tokens=4, stop_tokens=[STOP])
    fleet = Fleet(
        *(partial(TorchGenerator, slots=2), model, given),
        **{"generators": 1, "silence_s": 60, "start_s": 100, "bucket_mib": bucket / MIB},
    )
    with closing(fleet):
        (engine,) = fleet._engines
        fleet.publish(dict(model.state_dict()), 0)  # that of its start is behind it
        weights = moved(model)
        tracemalloc.start()
        with Allocations() as allocations:
            fleet.publish(weights, 1)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        # Two bytes a parameter, four in the head that stays FP32, and a header.
        assert 0 <= fleet._store.current.path.stat().st_size - (2 * count + 2 * head) < 8192
        assert 0 < sum(allocations.sizes) <= bucket < 2 * count / 20
        assert peak < bucket
        # And it has arrived: each engine says which bits it holds.
        assert engine.acknowledged == fleet._store.current.number and fleet.version == 1
        here = generator_of(model, precision=Precision("bf16"), max_new_tokens=4, slots=2)
        here.publish(weights, 1)
        for request in requests(1):  # at several, how they are batched is a matter of time
            here.submit(request)
            fleet.submit(request)
        expected = {place: each.rollout for place, each in drain(here).items()}
        assert {(each.key, each.index): each.rollout for each in drained(fleet)} == expected


@pytest.mark.parametrize("fp32_head", [False, True])
def test_an_engine_never_holds_a_model_in_fp32(fp32_head: bool) -> None:
    """Neither while it is made nor later: the weights in their type, once, and one tensor that is being cast."""
    made = new_model(256, 6, seed=0)
    parameters = sum(each.numel() for each in made.parameters())
    largest = max(each.numel() for each in made.parameters())
    head = output_head(made).weight.numel() if fp32_head else 0
    arguments = {
        "precision": Precision("bf16", fp32_head_generator=fp32_head),
        **with_sampling(slots=1, max_prompt_tokens=4, max_new_tokens=4, stop_tokens=[1]),
    }
    blueprint = Blueprint(TorchGenerator, arguments, type(made), made.config, "cpu")
    with LiveBytes() as live:
        generator = blueprint.build()
    assert {each.dtype for each in generator.policy.model.parameters()} == {torch.bfloat16}  # type: ignore[attr-defined]
    buffers = sum(each.numel() * 4 for each in made.buffers())
    wanted = 2 * parameters + 4 * head
    assert parameters > 4_000_000 and wanted <= live.now < 1.02 * wanted + buffers
    # Whichever tensor is cast is there twice: in FP32, and in its own type.
    assert live.peak < 1.05 * wanted + 4 * largest + buffers < 4 * parameters


def test_a_model_that_is_not_the_engines_own_is_copied() -> None:
    made = new_model(32, 1, seed=0)
    before = {name: tensor.clone() for name, tensor in made.state_dict().items()}
    policy = GeneratorPolicy(made, Precision("bf16"))
    policy.load({name: torch.ones_like(tensor) for name, tensor in before.items()})
    assert all(torch.equal(made.state_dict()[name], tensor) for name, tensor in before.items())
    assert {each.dtype for each in made.parameters()} == {torch.float32}


def test_what_cannot_be_decoded_is_refused_by_the_trainer_with_its_own_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An engine's rounded weights would hide a gap that FP32 shows; and nothing has been started yet."""
    seen = []

    def look(model: Any, capacity: int) -> None:
        seen.append((next(model.parameters()).dtype, capacity))
        raise ConfigurationError("model: it cannot be decoded")

    monkeypatch.setattr("lightning_scalerl.generator.torch.generator.check_decodable", look)
    arguments = with_sampling(precision=Precision("bf16"), max_prompt_tokens=3, max_new_tokens=4)
    limits: dict[str, Any] = {"generators": 1, "silence_s": 5.0, "start_s": 5.0}
    with pytest.raises(ConfigurationError, match="it cannot be decoded"):
        Fleet(partial(TorchGenerator, slots=2), new_model(32, 1, seed=0), arguments, **limits)
    assert seen == [(torch.float32, 7)]


def test_what_a_checkpoint_holds_goes_on_exactly(tmp_path: Path) -> None:
    """Weights of a version in the policy's type, or whole as earlier checkpoints have them: the same bits."""
    model = new_model(width=32, layers=2, seed=3)
    weights = moved(model)
    store = stored(model, Precision("bf16"))
    sent = store.publish(weights, 1)
    torch.save(sent.read(), tmp_path / "saved")
    again = store.publish(torch.load(tmp_path / "saved"), 1)
    assert again.digest == sent.digest == store.publish(weights, 1).digest
    store.close()


def test_what_a_killed_trainer_left_in_memory_goes_and_nothing_else_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "SHARED_MEMORY", tmp_path)
    model = new_model(width=32, layers=1, seed=3)
    alive, dead = stored(model, None), stored(model, None)
    (tmp_path / "scalerl-of-another-kind").mkdir()
    dead._lock.close()  # as its process's end does
    last = stored(model, None)
    assert alive.folder.is_dir() and last.folder.is_dir() and not dead.folder.exists()
    assert (tmp_path / "scalerl-of-another-kind").is_dir()
    for store in (alive, last):
        store.close()
