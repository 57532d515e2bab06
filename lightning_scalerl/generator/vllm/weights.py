"""Weights on their way to a server of vLLM: in the policy's type, one bucket at a time.

Which way they take is the server's to say (`--weight-transfer-config`): `scalerl` is ours, for any machine, by a file
where both sides see one folder and over HTTP elsewhere; `ipc` and `nccl` are vLLM's own, between GPUs.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import tempfile
import threading
import zlib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import groupby
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
from torch import Tensor, nn

from lightning_scalerl.checks import ConfigurationError
from lightning_scalerl.generator.fleet.weights import SHARED_MEMORY, TYPE_NAMES, start_of_file
from lightning_scalerl.generator.vllm.engine import checkpoint_format
from lightning_scalerl.generator.vllm.http import Connection, EngineLostError, RefusedError
from lightning_scalerl.generator.vllm.plugin import BACKEND

# Ways that a server with our engine takes.
TRANSFERS = ("auto", "file", "http")


class Control:
    """The weight-transfer routes of a server, as vLLM's trainer engines call them (`VLLMWeightSyncClient`).

    `label` is given to the weights when an update is finished; vLLM's own engines finish without one.
    """

    def __init__(self, connection: Connection, timeout_s: float) -> None:
        self._connection, self._timeout_s = connection, timeout_s
        self.label: str | None = None

    def _post(self, path: str, body: Any = None) -> None:
        self._connection.call("POST", path, body, timeout_s=self._timeout_s)

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Prepare the workers for a way of transfer."""
        self._post("/init_weight_transfer_engine", {"init_info": init_info})

    def start_weight_update(self) -> None:
        """Begin an update of the weights."""
        self._post("/start_weight_update")

    def update_weights(self, update_info: Any) -> None:
        """Hand over a part of the weights; returns when the workers have loaded it."""
        self._post("/update_weights", {"update_info": _as_json(update_info)})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """End an update and label its weights."""
        self._post("/finish_weight_update", {"weight_version": weight_version or self.label})

    def give_up(self) -> None:
        """End an update that somebody else has left open, if there is one: the server refuses to begin another."""
        with suppress(RefusedError):
            self._post("/update_weights", {"update_info": {}})

    def world_size(self) -> int:
        """Return the number of the server's workers."""
        return int(self._connection.call("GET", "/get_world_size", timeout_s=self._timeout_s)["world_size"])


def _as_json(update_info: Any) -> Any:
    """Return what a trainer engine hands over as JSON carries it; only handles of CUDA's IPC need a translation."""
    if isinstance(update_info, dict) and update_info.get("ipc_handles") is not None:
        from vllm.distributed.weight_transfer.clients import _json_safe_update_info

        return _json_safe_update_info(update_info)
    return update_info


def pairs(model: nn.Module, weights: Mapping[str, Tensor], dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Yield names and tensors in checkpoint format, floating ones to be sent as `dtype`.

    Layer by layer: experts lie in one tensor in memory and in many in a checkpoint, and are taken apart when their
    layer's turn has come.
    """

    def layer_of(name: str) -> str:
        parts = name.split(".")
        number = next((place for place, part in enumerate(parts) if part.isdigit()), None)
        return "" if number is None else ".".join(parts[: number + 1])

    for _, names in groupby(weights, layer_of):
        yield from checkpoint_format(model, {name: weights[name] for name in names})


class Bucket:
    """One buffer for all buckets: weights of one type, as a file of safetensors holds them.

    Args:
        size: bytes of a bucket; a tensor that is larger has one to itself.
        dtype: type in which floating tensors are sent.
    """

    def __init__(self, size: int, dtype: torch.dtype) -> None:
        self._size, self._dtype = size, dtype
        self._buffer = torch.empty(0, dtype=torch.uint8)

    @property
    def allocated(self) -> int:
        """Bytes of host memory that the buffer takes."""
        return self._buffer.numel()

    def filled(self, tensors: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[bytes, memoryview]]:
        """Yield buckets as header and content; each is overwritten by the next."""
        entries: dict[str, Any] = {}
        end, kind = 0, None
        for name, tensor in tensors:
            dtype = self._dtype if tensor.is_floating_point() else tensor.dtype
            length = tensor.numel() * dtype.itemsize
            if entries and (end + length > self._size or dtype != kind):
                yield self._bucket(entries, end)
                entries, end = {}, 0
            self._reserve(length)
            self._buffer[end : end + length].view(dtype).view(tensor.shape).copy_(tensor)
            entries[name] = {
                "dtype": TYPE_NAMES[dtype],
                "shape": list(tensor.shape),
                "data_offsets": [end, end + length],
            }
            end, kind = end + length, dtype
        if entries:
            yield self._bucket(entries, end)

    def _reserve(self, length: int) -> None:
        # Grown before anything lies in it, or for one that a bucket of the usual size does not hold.
        if self.allocated < max(self._size, length):
            self._buffer = torch.empty(max(self._size, length), dtype=torch.uint8)

    def _bucket(self, entries: dict[str, Any], end: int) -> tuple[bytes, memoryview]:
        return start_of_file(entries), memoryview(self._buffer[:end].numpy())  # type: ignore[arg-type]


class _Shelf:
    """Address at which workers fetch the bucket of the moment; those who have the key."""

    def __init__(self, host: str, timeout_s: float) -> None:
        self.key = secrets.token_hex(16)
        self.content: tuple[bytes, memoryview] = (b"", memoryview(b""))
        self.sent = 0
        shelf = self

        class Handler(BaseHTTPRequestHandler):
            timeout = timeout_s

            def do_GET(self) -> None:
                if not hmac.compare_digest(self.headers.get("Authorization", ""), f"Bearer {shelf.key}"):
                    self.send_error(401)
                    return
                header, content = shelf.content
                self.send_response(200)
                self.send_header("Content-Length", str(len(header) + len(content)))
                self.end_headers()
                self.wfile.write(header)
                self.wfile.write(content)
                shelf.sent += len(header) + len(content)

            def log_message(self, *args: Any) -> None:
                """Say nothing: progress bars stay whole."""

        self._server = ThreadingHTTPServer((host, 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{self._server.server_address[1]}/bucket"
        threading.Thread(target=self._server.serve_forever, daemon=True, name="vllm-weights").start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def own_address(address: str) -> str:
    """Return the address of this machine towards a server: what the server's workers can reach."""
    parts = urlsplit(address)
    family, _, _, _, target = socket.getaddrinfo(parts.hostname, parts.port or 80, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)  # sends nothing: asks the routes
        return str(probe.getsockname()[0])


class BucketSender:
    """Sends weights to workers that have our engine, by a file or over HTTP, whichever their trial shows to work.

    Attributes:
        way: how the weights go, in words.
        bytes_sent: content of all buckets of the last update, once whatever the number of workers.
        buckets: number of them.
        digest: checksum of the last update's content, which changes when a weight has changed.
        wire_bytes: bytes that went over HTTP since the start, to all workers.

    Args:
        control: routes of the server.
        address: its address.
        transfer: one of `TRANSFERS`.
        folder: a folder that workers may see under the same path; None for this machine's shared memory.
        bucket_bytes: bytes of a bucket.
        dtype: type in which floating tensors are sent.
        timeout_s: longest wait for the bytes of a bucket.

    Raises:
        ConfigurationError: no way reaches the workers.
    """

    def __init__(
        self,
        control: Control,
        address: str,
        *,
        transfer: str,
        folder: Path | None,
        bucket_bytes: int,
        dtype: torch.dtype,
        timeout_s: float,
    ) -> None:
        self._control, self._bucket = control, Bucket(bucket_bytes, dtype)
        self._dtype, self.bytes_sent, self.buckets, self.digest, self.way = dtype, 0, 0, "", ""
        place = folder or (SHARED_MEMORY if SHARED_MEMORY.is_dir() else None)
        # Removed at the end of the process too, which a failure ends without `close`.
        self._owned = tempfile.TemporaryDirectory(prefix="scalerl-weights-", dir=place, ignore_cleanup_errors=True)
        self._folder = Path(self._owned.name)
        self._shelf: _Shelf | None = None
        try:
            refused = self._tried_file() if transfer != "http" else "not tried"
            if refused and transfer != "file":
                refused = (
                    f"a file: {refused}; HTTP: {because}" if (because := self._tried_http(address, timeout_s)) else ""
                )
            if refused:
                raise ConfigurationError(
                    f"generator: no weights reach the workers of {address} ({refused}); name a folder that both sides "
                    "see (generator.folder), or let its node reach this one"
                )
        except BaseException:
            self.close()
            raise

    def _tried_file(self) -> str:
        """Return why the workers do not see our folder, or nothing if they do."""
        trial, content = self._folder / "trial", secrets.token_hex(16)
        trial.write_text(content)
        try:
            self._control.init_weight_transfer_engine({"path": str(trial), "content": content})
        except RefusedError as error:
            return str(error)
        finally:
            trial.unlink()
        self.way = f"files in {self._folder.parent}"
        return ""

    def _tried_http(self, address: str, timeout_s: float) -> str:
        """Return why the workers do not reach this machine, or nothing if they do."""
        host, content = own_address(address), secrets.token_hex(16)
        self._shelf = _Shelf(host, timeout_s)
        self._shelf.content = (content.encode(), memoryview(b""))
        info = {"url": self._shelf.url, "key": self._shelf.key, "content": content, "timeout_s": timeout_s}
        try:
            self._control.init_weight_transfer_engine(info)
        except RefusedError as error:
            return str(error)
        self.way = f"HTTP from {host}"
        return ""

    @property
    def allocated(self) -> int:
        """Bytes of host memory that are taken for sending."""
        return self._bucket.allocated

    @property
    def wire_bytes(self) -> int:
        """Bytes that went over HTTP since the start, to all workers together."""
        return 0 if self._shelf is None else self._shelf.sent

    def send(self, model: nn.Module, weights: Mapping[str, Tensor], label: str) -> None:
        """Replace the server's weights and label them, in one update."""
        self._control.start_weight_update()
        self.bytes_sent, self.buckets, checksum = 0, 0, 0
        for header, content in self._bucket.filled(pairs(model, weights, self._dtype)):
            checksum = zlib.crc32(content, zlib.crc32(header, checksum))
            if self._shelf is not None:
                self._shelf.content = (header, content)
                self._control.update_weights({"url": f"{self._shelf.url}/{self.buckets}"})
            else:
                self._by_file(header, content)
            self.bytes_sent += len(content)
            self.buckets += 1
        self._control.finish_weight_update(label)
        self.digest = f"{checksum:08x}"

    def _by_file(self, header: bytes, content: memoryview) -> None:
        path = self._folder / f"bucket-{self.buckets}.safetensors"
        with path.open("wb") as file:
            file.write(header)
            file.write(content)
        try:
            self._control.update_weights({"path": str(path)})
        finally:
            path.unlink()

    def close(self) -> None:
        """Remove the folder and the address."""
        self._owned.cleanup()
        if self._shelf is not None:
            self._shelf.close()


class EngineSender:
    """Sends weights by vLLM's own engine for trainers: CUDA IPC on one GPU, NCCL between GPUs.

    Attributes:
        way: how the weights go, in words.
        bytes_sent: bytes of the last update.
        digest: empty, for the weights do not pass through the host.

    Args:
        control: routes of the server.
        backend: "ipc" or "nccl", as the server was started.
        address: the server's.
        model: a model of the same class, which knows how weights are named in a checkpoint.
        dtype: type in which floating tensors are sent.
        device: the GPU that they are sent from.
        bucket_bytes: bytes of a bucket, raised to those of the largest tensor.
    """

    digest = ""
    wire_bytes = 0

    def __init__(
        self,
        control: Control,
        backend: str,
        address: str,
        *,
        model: nn.Module,
        dtype: torch.dtype,
        device: torch.device,
        bucket_bytes: int,
    ) -> None:
        from vllm.distributed.weight_transfer import WeightTransferTrainerFactory
        from vllm.distributed.weight_transfer.base import ParamMeta, TrainerInitInfo, WeightSource

        outer = self

        class Source(WeightSource):  # type: ignore[misc]
            """The weights of the moment, in the order of `checkpoint_format`, made ready when their turn comes."""

            def metadata(self) -> list[ParamMeta]:
                return [ParamMeta(name, outer._type(tensor), tuple(tensor.shape)) for name, tensor in outer._pairs()]

            def __iter__(self) -> Iterator[tuple[str, Tensor]]:
                for name, tensor in outer._pairs():
                    yield name, tensor.to(device, outer._type(tensor))

        self._control, self._model, self._dtype = control, model, dtype
        self._weights: Mapping[str, Tensor] = {}
        self.bytes_sent = 0
        self.allocated = 0
        # vLLM's buffer on a GPU does not grow: it must hold the largest tensor, which is the embeddings' as a rule.
        bucket_bytes = max(bucket_bytes, max(each.numel() for each in model.parameters()) * dtype.itemsize)
        init_info: TrainerInitInfo
        if backend == "ipc":
            from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo

            init_info = IPCTrainerInitInfo(rank=0, packed=True, packed_buffer_size_bytes=bucket_bytes)
            self.way = "CUDA IPC"
        else:
            from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

            host = own_address(address)
            with socket.create_server((host, 0)) as free:
                port = free.getsockname()[1]
            init_info = NCCLTrainerInitInfo(
                master_address=host,
                master_port=port,
                world_size=1 + control.world_size(),
                rank=0,
                packed=True,
                packed_buffer_size_bytes=bucket_bytes,
            )
            self.way = f"NCCL from {host}:{port}"
        self._engine = WeightTransferTrainerFactory.trainer_init(init_info, client=control, source=Source())

    def _type(self, tensor: Tensor) -> torch.dtype:
        return self._dtype if tensor.is_floating_point() else tensor.dtype

    def _pairs(self) -> Iterator[tuple[str, Tensor]]:
        return pairs(self._model, self._weights, self._dtype)

    def send(self, model: nn.Module, weights: Mapping[str, Tensor], label: str) -> None:
        """Replace the server's weights and label them, in one update."""
        self._weights, self._control.label = weights, label
        self.bytes_sent = sum(tensor.numel() * self._type(tensor).itemsize for _, tensor in self._pairs())
        try:
            self._engine.send_weights()
        except EngineLostError:
            raise
        except Exception as error:
            raise EngineLostError(f"generator: weights by {self.way}: {type(error).__name__}: {error}") from error
        finally:
            self._weights = {}

    def close(self) -> None:
        """Leave the group of processes that weights go through."""
        self._engine.shutdown()


def new_sender(
    control: Control,
    backend: str | None,
    address: str,
    *,
    model: nn.Module,
    dtype: torch.dtype,
    device: torch.device,
    transfer: str,
    folder: Path | None,
    bucket_bytes: int,
    timeout_s: float,
) -> BucketSender | EngineSender:
    """Return the sender for the way that a server was started with.

    Raises:
        ConfigurationError: the server takes no weights, or by a way that this package or this machine does not have.
    """
    control.give_up()
    if backend == BACKEND:
        return BucketSender(
            control,
            address,
            transfer=transfer,
            folder=folder,
            bucket_bytes=bucket_bytes,
            dtype=dtype,
            timeout_s=timeout_s,
        )
    if backend in ("ipc", "nccl"):
        if device.type != "cuda":
            raise ConfigurationError(
                f"generator: {address} takes weights by {backend}, which needs the trainer's weights on a GPU, and "
                f'they are on {device.type}; start it with --weight-transfer-config \'{{"backend": "{BACKEND}"}}\''
            )
        return EngineSender(
            control, backend, address, model=model, dtype=dtype, device=device, bucket_bytes=bucket_bytes
        )
    raise ConfigurationError(
        f"generator: {address} takes weights by {backend or 'no way'}; start it with "
        f'--weight-transfer-config \'{{"backend": "{BACKEND}"}}\', ipc (one GPU) or nccl (several)'
    )
