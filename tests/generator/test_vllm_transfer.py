"""Tests of vLLM's weight transfer engines (CUDA IPC, NCCL) of the installed version, without a GPU.

Functions that need a GPU are replaced by fakes, which check each call against the signature of the real function. The
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
from lightning_scalerl.generator.vllm.weights import EngineSender, TransferRoutes
from tests.generator.stand_in import TOKEN, StandIn
from tests.generator.test_vllm import new_model

pytestmark = pytest.mark.vllm


@pytest.fixture
def server() -> Iterator[StandIn]:
    stand_in = StandIn()
    yield stand_in
    stand_in.close()


@pytest.fixture
def control(server: StandIn) -> Iterator[TransferRoutes]:
    connection = Connection(server.address, TOKEN)
    yield TransferRoutes(connection, 10.0)
    connection.close()


@pytest.fixture(scope="module")
def model() -> Any:
    return new_model("Qwen2, tied")


def replace_checked(monkeypatch: pytest.MonkeyPatch, module: Any, name: str, work: Any) -> None:
    """Replace a function by `work`; check the arguments of each call against the signature of the original."""
    signature = inspect.signature(getattr(module, name))

    def fake(*args: Any, **kwargs: Any) -> Any:
        return work(**signature.bind(*args, **kwargs).arguments)

    monkeypatch.setattr(module, name, fake)


def sender(control: TransferRoutes, backend: str, model: Any, bucket_bytes: int = 50_000) -> EngineSender:
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


def test_nccl_sends_all_weights_in_the_policys_dtype(
    monkeypatch: pytest.MonkeyPatch, server: StandIn, control: TransferRoutes, model: Any
) -> None:
    from vllm.distributed.weight_transfer import nccl_engine

    sent: list[tuple[str, torch.Tensor]] = []
    group = SimpleNamespace(destroy=lambda: sent.append(("destroyed", torch.empty(0))))

    def open_endpoint(init_info: Any) -> Any:
        assert (init_info.world_size, init_info.rank) == (3, 0), "two workers, and the trainer"
        return group

    def broadcast(iterator: Any, src: int, post_iter_func: Any, **keywords: Any) -> None:
        assert keywords["group"] is group and src == 0 and keywords["buffer_size_bytes"] == 50_000
        sent.extend((item[0], post_iter_func(item)) for item in iterator)

    replace_checked(monkeypatch, nccl_engine, "open_trainer_endpoint", open_endpoint)
    replace_checked(monkeypatch, nccl_engine, "packed_nccl_broadcast_producer", broadcast)
    weight_sender = sender(control, "nccl", model)
    (init,) = server.inits
    # Read by the installed version's own class, as its worker does.
    info = nccl_engine.NCCLWeightTransferInitInfo(**init)
    assert (info.rank_offset, info.world_size, info.packed, info.packed_buffer_size_bytes) == (1, 3, True, 50_000)
    assert info.master_address == "127.0.0.1" and weight_sender.method == f"NCCL from 127.0.0.1:{info.master_port}"
    server.calls.clear()
    weight_sender.send(meta_model(model), dict(model.state_dict()), "4")
    assert server.calls == ["/start_weight_update", "/update_weights", "/finish_weight_update"] and server.label == "4"
    update = nccl_engine.NCCLWeightTransferUpdateInfo(**server.updates[-1])
    assert update.names == [name for name, _ in sent] and {*update.names} == sent_names(model)
    assert {*update.dtype_names} == {"bfloat16"} and {tensor.dtype for _, tensor in sent} == {torch.bfloat16}
    for (name, tensor), shape in zip(sent, update.shapes, strict=True):
        assert list(tensor.shape) == shape and torch.equal(tensor, model.state_dict()[name].bfloat16())
    assert weight_sender.bytes_sent == sum(tensor.numel() * 2 for _, tensor in sent)
    weight_sender.close()
    assert sent[-1][0] == "destroyed"


@pytest.mark.parametrize("bucket_bytes", [50_000, 1_000])
def test_cuda_ipc_sends_all_weights_in_buckets(
    monkeypatch: pytest.MonkeyPatch, server: StandIn, control: TransferRoutes, model: Any, bucket_bytes: int
) -> None:
    from vllm.distributed.weight_transfer import ipc_engine
    from vllm.distributed.weight_transfer.packed_tensor import packed_ipc_producer

    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid="GPU-7"))
    collected: list[int] = []
    monkeypatch.setattr(torch.cuda, "ipc_collect", lambda: collected.append(len(server.updates)))
    sent: dict[str, torch.Tensor] = {}
    assert {"names", "shapes", "dtype_names", "tensor_sizes", "ipc_handle"} <= {
        *inspect.signature(inspect.signature(packed_ipc_producer).return_annotation.__args__[0]).parameters
    }

    def chunks(iterator: Any, gpu_uuid: str, post_iter_func: Any, buffer_size_bytes: int) -> Iterator[Any]:
        assert gpu_uuid == "GPU-7" and buffer_size_bytes == max(bucket_bytes, largest)
        for item in iterator:
            tensor = sent[item[0]] = post_iter_func(item)
            yield SimpleNamespace(
                names=[item[0]],
                shapes=[list(tensor.shape)],
                dtype_names=["bfloat16"],
                tensor_sizes=[tensor.numel() * 2],
                ipc_handle={"GPU-7": ("rebuild", item[0])},
            )

    largest = max(
        2 * tensor.numel() for tensor in model.state_dict().values()
    )  # vLLM refuses a tensor larger than its buffer
    assert 1_000 < largest < 50_000
    replace_checked(monkeypatch, ipc_engine, "packed_ipc_producer", chunks)
    weight_sender = sender(control, "ipc", model, bucket_bytes)
    assert weight_sender.method == "CUDA IPC" and ipc_engine.IPCWeightTransferInitInfo(**server.inits[-1]).packed
    server.calls.clear()
    weight_sender.send(meta_model(model), dict(model.state_dict()), "5")
    assert server.calls == ["/start_weight_update", *["/update_weights"] * len(sent), "/finish_weight_update"]
    assert server.label == "5" and {*sent} == sent_names(model)
    for update in server.updates:
        # Handles are pickled for HTTP; the installed version's own class reads them back.
        info = ipc_engine.IPCWeightTransferUpdateInfo(**update)
        assert info.ipc_handles == {"GPU-7": ("rebuild", info.names[0])}
    assert collected[:2] == [1, 2], "the server reads each bucket before the next one is written"


def test_a_broken_group_is_a_lost_engine(
    monkeypatch: pytest.MonkeyPatch, server: StandIn, control: TransferRoutes, model: Any
) -> None:
    from vllm.distributed.weight_transfer import nccl_engine

    def broken(**keywords: Any) -> None:
        raise RuntimeError("NCCL error: unhandled system error")

    replace_checked(monkeypatch, nccl_engine, "open_trainer_endpoint", lambda init_info: SimpleNamespace())
    replace_checked(monkeypatch, nccl_engine, "packed_nccl_broadcast_producer", broken)
    weight_sender = sender(control, "nccl", model)
    with pytest.raises(EngineLostError, match=r"weights by NCCL .*: RuntimeError: NCCL error"):
        weight_sender.send(meta_model(model), dict(model.state_dict()), "4")
    assert server.label == "default"


def test_the_installed_version_has_the_routes_for_sleep_and_wake() -> None:
    """Their parameters must be the ones that the connector sends: level and mode."""
    from vllm.entrypoints.serve.dev.sleep import api_router

    routes = {route.path: route for route in api_router.router.routes}
    assert "POST" in routes["/sleep"].methods and "POST" in routes["/wake_up"].methods
    assert {"level", "mode"} <= {*inspect.signature(api_router.sleep).parameters}
