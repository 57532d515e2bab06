"""Weights by vLLM's own trainer engines (CUDA IPC, NCCL): the real engines of the installed version, without a GPU.

What would touch a GPU is replaced by a fake that checks how it is called against the signature of what it replaces. The
server is a stand-in. CUDA IPC was run on a GPU by benchmarks/gpu/engine.py; NCCL was not yet.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_scalerl.generator.vllm.engine import meta_model
from lightning_scalerl.generator.vllm.http import Connection, EngineLostError
from lightning_scalerl.generator.vllm.weights import Control, EngineSender
from tests.generator.stand_in import TOKEN, StandIn
from tests.generator.test_vllm import new_model

pytestmark = pytest.mark.vllm


@pytest.fixture
def server() -> Iterator[StandIn]:
    stand_in = StandIn()
    yield stand_in
    stand_in.close()


@pytest.fixture
def control(server: StandIn) -> Iterator[Control]:
    connection = Connection(server.address, TOKEN)
    yield Control(connection, 10.0)
    connection.close()


@pytest.fixture(scope="module")
def model() -> Any:
    return new_model("Qwen2, tied")


def faked(monkeypatch: pytest.MonkeyPatch, module: Any, name: str, work: Any) -> None:
    """Replace a function by one that is called with arguments that the real one takes."""
    signature = inspect.signature(getattr(module, name))

    def fake(*args: Any, **kwargs: Any) -> Any:
        return work(**signature.bind(*args, **kwargs).arguments)

    monkeypatch.setattr(module, name, fake)


def sender(control: Control, backend: str, model: Any, bucket_bytes: int = 50_000) -> EngineSender:
    return EngineSender(
        control,
        backend,
        "http://127.0.0.1:80",
        model=meta_model(model),
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
        bucket_bytes=bucket_bytes,
    )


def sent_names(model: Any) -> set[str]:
    return {name for name in model.state_dict() if name != "lm_head.weight"}  # tied


def test_nccl(monkeypatch: pytest.MonkeyPatch, server: StandIn, control: Control, model: Any) -> None:
    from vllm.distributed.weight_transfer import nccl_engine

    taken: list[tuple[str, torch.Tensor]] = []
    group = SimpleNamespace(destroy=lambda: taken.append(("destroyed", torch.empty(0))))

    def joined(init_info: Any) -> Any:
        assert (init_info.world_size, init_info.rank) == (3, 0), "two workers, and the trainer"
        return group

    def broadcast(iterator: Any, src: int, post_iter_func: Any, **rest: Any) -> None:
        assert rest["group"] is group and src == 0 and rest["buffer_size_bytes"] == 50_000
        taken.extend((item[0], post_iter_func(item)) for item in iterator)

    faked(monkeypatch, nccl_engine, "open_trainer_endpoint", joined)
    faked(monkeypatch, nccl_engine, "packed_nccl_broadcast_producer", broadcast)
    ours = sender(control, "nccl", model)
    (init,) = server.inits
    # As the worker of the installed version reads it.
    info = nccl_engine.NCCLWeightTransferInitInfo(**init)
    assert (info.rank_offset, info.world_size, info.packed, info.packed_buffer_size_bytes) == (1, 3, True, 50_000)
    assert info.master_address == "127.0.0.1" and ours.method == f"NCCL from 127.0.0.1:{info.master_port}"
    server.calls.clear()
    ours.send(meta_model(model), dict(model.state_dict()), "4")
    assert server.calls == ["/start_weight_update", "/update_weights", "/finish_weight_update"] and server.label == "4"
    update = nccl_engine.NCCLWeightTransferUpdateInfo(**server.updates[-1])
    assert update.names == [name for name, _ in taken] and {*update.names} == sent_names(model)
    assert {*update.dtype_names} == {"bfloat16"} and {tensor.dtype for _, tensor in taken} == {torch.bfloat16}
    for (name, tensor), shape in zip(taken, update.shapes, strict=True):
        assert list(tensor.shape) == shape and torch.equal(tensor, model.state_dict()[name].bfloat16())
    assert ours.bytes_sent == sum(tensor.numel() * 2 for _, tensor in taken)
    ours.close()
    assert taken[-1][0] == "destroyed"


@pytest.mark.parametrize("bucket_bytes", [50_000, 1_000])
def test_cuda_ipc(
    monkeypatch: pytest.MonkeyPatch, server: StandIn, control: Control, model: Any, bucket_bytes: int
) -> None:
    from vllm.distributed.weight_transfer import ipc_engine
    from vllm.distributed.weight_transfer.packed_tensor import packed_ipc_producer

    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid="GPU-7"))
    collected: list[int] = []
    monkeypatch.setattr(torch.cuda, "ipc_collect", lambda: collected.append(len(server.updates)))
    taken: dict[str, torch.Tensor] = {}
    assert {"names", "shapes", "dtype_names", "tensor_sizes", "ipc_handle"} <= {
        *inspect.signature(inspect.signature(packed_ipc_producer).return_annotation.__args__[0]).parameters
    }

    def chunks(iterator: Any, gpu_uuid: str, post_iter_func: Any, buffer_size_bytes: int) -> Iterator[Any]:
        assert gpu_uuid == "GPU-7" and buffer_size_bytes == max(bucket_bytes, largest)
        for item in iterator:
            tensor = taken[item[0]] = post_iter_func(item)
            yield SimpleNamespace(
                names=[item[0]],
                shapes=[list(tensor.shape)],
                dtype_names=["bfloat16"],
                tensor_sizes=[tensor.numel() * 2],
                ipc_handle={"GPU-7": ("rebuild", item[0])},
            )

    largest = max(2 * tensor.numel() for tensor in model.state_dict().values())  # vLLM refuses one above its buffer
    assert 1_000 < largest < 50_000
    faked(monkeypatch, ipc_engine, "packed_ipc_producer", chunks)
    ours = sender(control, "ipc", model, bucket_bytes)
    assert ours.method == "CUDA IPC" and ipc_engine.IPCWeightTransferInitInfo(**server.inits[-1]).packed
    server.calls.clear()
    ours.send(meta_model(model), dict(model.state_dict()), "5")
    assert server.calls == ["/start_weight_update", *["/update_weights"] * len(taken), "/finish_weight_update"]
    assert server.label == "5" and {*taken} == sent_names(model)
    for update in server.updates:
        # Handles are pickled for HTTP, and read back by the worker of the installed version.
        info = ipc_engine.IPCWeightTransferUpdateInfo(**update)
        assert info.ipc_handles == {"GPU-7": ("rebuild", info.names[0])}
    assert collected[:2] == [1, 2], "each bucket is read before the next is written"


def test_a_broken_group_is_a_lost_engine(
    monkeypatch: pytest.MonkeyPatch, server: StandIn, control: Control, model: Any
) -> None:
    from vllm.distributed.weight_transfer import nccl_engine

    def broken(**rest: Any) -> None:
        raise RuntimeError("NCCL error: unhandled system error")

    faked(monkeypatch, nccl_engine, "open_trainer_endpoint", lambda init_info: SimpleNamespace())
    faked(monkeypatch, nccl_engine, "packed_nccl_broadcast_producer", broken)
    ours = sender(control, "nccl", model)
    with pytest.raises(EngineLostError, match=r"weights by NCCL .*: RuntimeError: NCCL error"):
        ours.send(meta_model(model), dict(model.state_dict()), "4")
    assert server.label == "default"


def test_sleep_and_wake_are_routes_of_the_installed_version() -> None:
    """What the connector asks for is what they take: level 1, and requests aborted."""
    from vllm.entrypoints.serve.dev.sleep import api_router

    routes = {route.path: route for route in api_router.router.routes}
    assert "POST" in routes["/sleep"].methods and "POST" in routes["/wake_up"].methods
    assert {"level", "mode"} <= {*inspect.signature(api_router.sleep).parameters}
