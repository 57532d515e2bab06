"""Transfer of weights to a vLLM server, in the policy's dtype, one bucket at a time.

The server's `--weight-transfer-config` selects the backend. `scalerl` is ours and works on any machine: through a file
if both sides see the same folder, else over HTTP. `ipc` and `nccl` are vLLM's own, between GPUs.
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
from lightning_scalerl.generator.fleet.weights import SHARED_MEMORY, TYPE_NAMES, safetensors_header
from lightning_scalerl.generator.vllm.engine import checkpoint_format
from lightning_scalerl.generator.vllm.http import Connection, EngineLostError, RefusedError
from lightning_scalerl.generator.vllm.plugin import BACKEND
from sweeps.port import free_port

# Transfer methods of a server with our backend.
TRANSFERS = ("auto", "file", "http")


class TransferRoutes:
    """Client for a server's weight-transfer routes, with the interface that vLLM's trainer engines call.

    That interface is vLLM's `VLLMWeightSyncClient`. vLLM's trainer engines pass no label at the end of an update;
    `label` is then attached to the weights.
    """

    def __init__(self, connection: Connection, timeout_s: float) -> None:
        self._connection, self.timeout_s = connection, timeout_s
        self.label: str | None = None

    def _post(self, path: str, body: Any = None) -> None:
        self._connection.call("POST", path, body, timeout_s=self.timeout_s)

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Prepare the workers for a transfer method."""
        self._post("/init_weight_transfer_engine", {"init_info": init_info})

    def start_weight_update(self) -> None:
        """Begin an update of the weights."""
        self._post("/start_weight_update")

    def update_weights(self, update_info: Any) -> None:
        """Send a part of the weights and return when the workers have loaded it."""
        self._post("/update_weights", {"update_info": _as_json(update_info)})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """End an update and label its weights."""
        self._post("/finish_weight_update", {"weight_version": weight_version or self.label})

    def abort_update(self) -> None:
        """Abort an update that another client left open, if any, because the server would refuse a new one."""
        with suppress(RefusedError):
            self._post("/update_weights", {"update_info": {}})

    def world_size(self) -> int:
        """Return the number of the server's workers."""
        return int(self._connection.call("GET", "/get_world_size", timeout_s=self.timeout_s)["world_size"])


def _as_json(update_info: Any) -> Any:
    """Return a trainer engine's update info in JSON-compatible form; only CUDA IPC handles need a translation."""
    if isinstance(update_info, dict) and update_info.get("ipc_handles") is not None:
        from vllm.distributed.weight_transfer.clients import _json_safe_update_info

        return _json_safe_update_info(update_info)
    return update_info


def pairs(model: nn.Module, weights: Mapping[str, Tensor], dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Yield names and tensors in checkpoint format, layer by layer.

    A layer's experts are one tensor in memory and many in a checkpoint. They are split only when their layer is sent,
    to save memory.
    """

    def layer_of(name: str) -> str:
        parts = name.split(".")
        number = next((index for index, name_part in enumerate(parts) if name_part.isdigit()), None)
        return "" if number is None else ".".join(parts[: number + 1])

    for _, names in groupby(weights, layer_of):
        yield from checkpoint_format(model, {name: weights[name] for name in names})


class Bucket:
    """Buffer that holds one bucket of weights after another, in the layout of a safetensors file.

    Args:
        size: bucket size in bytes; a larger tensor gets a bucket to itself.
        dtype: dtype in which floating-point tensors are sent.
    """

    def __init__(self, size: int, dtype: torch.dtype) -> None:
        self._size, self._dtype = size, dtype
        self._buffer = torch.empty(0, dtype=torch.uint8)

    @property
    def allocated(self) -> int:
        """Size of the buffer in host memory, in bytes."""
        return self._buffer.numel()

    def fill(self, tensors: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[bytes, memoryview]]:
        """Fill the buffer with tensors, and yield each bucket as (header, content). The next bucket overwrites it."""
        entries: dict[str, Any] = {}
        end, bucket_dtype = 0, None
        for name, tensor in tensors:
            dtype = self._dtype if tensor.is_floating_point() else tensor.dtype
            length = tensor.numel() * dtype.itemsize
            if entries and (end + length > self._size or dtype != bucket_dtype):
                yield self._bucket(entries, end)
                entries, end = {}, 0
            self._reserve(length)
            self._buffer[end : end + length].view(dtype).view(tensor.shape).copy_(tensor)
            entries[name] = {
                "dtype": TYPE_NAMES[dtype],
                "shape": list(tensor.shape),
                "data_offsets": [end, end + length],
            }
            end, bucket_dtype = end + length, dtype
        if entries:
            yield self._bucket(entries, end)

    def _reserve(self, length: int) -> None:
        # Allocate at first use, or grow for a tensor that exceeds the usual bucket size.
        if self.allocated < max(self._size, length):
            self._buffer = torch.empty(max(self._size, length), dtype=torch.uint8)

    def _bucket(self, entries: dict[str, Any], end: int) -> tuple[bytes, memoryview]:
        return safetensors_header(entries), memoryview(self._buffer[:end].numpy())  # type: ignore[arg-type]


class _BucketServer:
    """HTTP server from which workers that have the key fetch the current bucket."""

    def __init__(self, host: str, timeout_s: float) -> None:
        self.key = secrets.token_hex(16)
        self.content: tuple[bytes, memoryview] = (b"", memoryview(b""))
        self.sent = 0
        bucket_server = self

        class Handler(BaseHTTPRequestHandler):
            timeout = timeout_s

            def do_GET(self) -> None:
                if not hmac.compare_digest(self.headers.get("Authorization", ""), f"Bearer {bucket_server.key}"):
                    self.send_error(401)
                    return
                header, content = bucket_server.content
                self.send_response(200)
                self.send_header("Content-Length", str(len(header) + len(content)))
                self.end_headers()
                self.wfile.write(header)
                self.wfile.write(content)
                bucket_server.sent += len(header) + len(content)

            def log_message(self, *args: Any) -> None:
                """Log nothing, to keep progress bars intact."""

        self._server = ThreadingHTTPServer((host, 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{self._server.server_address[1]}/bucket"
        threading.Thread(target=self._server.serve_forever, daemon=True, name="vllm-weights").start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def address_towards(address: str) -> str:
    """Return this machine's address on the route to a server, at which the server's workers can reach it."""
    parts = urlsplit(address)
    family, _, _, _, target = socket.getaddrinfo(parts.hostname, parts.port or 80, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)  # sends nothing, only looks up the route
        return str(probe.getsockname()[0])


class BucketSender:
    """Sends weights to workers with our backend, through a file or over HTTP; the constructor tests which works.

    Attributes:
        method: description of the transfer method.
        bytes_sent: size of the last update in bytes, counted once regardless of the number of workers.
        buckets: number of buckets of the last update.
        digest: checksum of the last update's content.
        wire_bytes: bytes sent over HTTP since the start, to all workers together.

    Args:
        control: routes of the server.
        address: address of the server.
        transfer: one of `TRANSFERS`.
        folder: a folder that workers may see under the same path; None for this machine's shared memory.
        bucket_bytes: bucket size in bytes.
        dtype: dtype in which floating-point tensors are sent.

    Raises:
        ConfigurationError: no method reaches the workers.
    """

    def __init__(
        self,
        control: TransferRoutes,
        address: str,
        *,
        transfer: str,
        folder: Path | None,
        bucket_bytes: int,
        dtype: torch.dtype,
    ) -> None:
        self._control, self._bucket = control, Bucket(bucket_bytes, dtype)
        self._dtype, self.bytes_sent, self.buckets, self.digest, self.method = dtype, 0, 0, "", ""
        parent_folder = folder or (SHARED_MEMORY if SHARED_MEMORY.is_dir() else None)
        # `TemporaryDirectory` also cleans up at the end of the process, if a failure ends it without `close`.
        self._temporary_folder = tempfile.TemporaryDirectory(
            prefix="scalerl-weights-", dir=parent_folder, ignore_cleanup_errors=True
        )
        self._folder = Path(self._temporary_folder.name)
        self._http: _BucketServer | None = None
        try:
            file_problem = self._try_file() if transfer != "http" else "not tried"
            if file_problem and transfer != "file":
                http_problem = self._try_http(address)
                file_problem = f"a file: {file_problem}; HTTP: {http_problem}" if http_problem else ""
            if file_problem:
                raise ConfigurationError(
                    f"generator: no weights reach the workers of {address} ({file_problem}); name a folder that both "
                    "sides see (generator.folder), or let its node reach this one"
                )
        except BaseException:
            self.close()
            raise

    def _try_file(self) -> str:
        """Test whether the workers can read from our folder; return the reason why not, or ""."""
        trial_file, content = self._folder / "trial", secrets.token_hex(16)
        trial_file.write_text(content)
        try:
            self._control.init_weight_transfer_engine({"path": str(trial_file), "content": content})
        except RefusedError as error:
            return str(error)
        finally:
            trial_file.unlink()
        self.method = f"files in {self._folder.parent}"
        return ""

    def _try_http(self, address: str) -> str:
        """Start the HTTP server and test whether the workers can reach it; return the reason why not, or ""."""
        host, content, timeout_s = address_towards(address), secrets.token_hex(16), self._control.timeout_s
        self._http = _BucketServer(host, timeout_s)
        self._http.content = (content.encode(), memoryview(b""))
        info = {"url": self._http.url, "key": self._http.key, "content": content, "timeout_s": timeout_s}
        try:
            self._control.init_weight_transfer_engine(info)
        except RefusedError as error:
            return str(error)
        self.method = f"HTTP from {host}"
        return ""

    @property
    def allocated(self) -> int:
        """Host memory used for sending, in bytes."""
        return self._bucket.allocated

    @property
    def wire_bytes(self) -> int:
        """Bytes sent over HTTP since the start, to all workers together."""
        return 0 if self._http is None else self._http.sent

    def send(self, model: nn.Module, weights: Mapping[str, Tensor], label: str) -> None:
        """Replace all of the server's weights in one update, and label them."""
        self._control.start_weight_update()
        self.bytes_sent, self.buckets, checksum = 0, 0, 0
        for header, content in self._bucket.fill(pairs(model, weights, self._dtype)):
            checksum = zlib.crc32(content, zlib.crc32(header, checksum))
            if self._http is not None:
                self._http.content = (header, content)
                self._control.update_weights({"url": f"{self._http.url}/{self.buckets}"})
            else:
                self._send_file(header, content)
            self.bytes_sent += len(content)
            self.buckets += 1
        self._control.finish_weight_update(label)
        self.digest = f"{checksum:08x}"

    def _send_file(self, header: bytes, content: memoryview) -> None:
        path = self._folder / f"bucket-{self.buckets}.safetensors"
        with path.open("wb") as file:
            file.write(header)
            file.write(content)
        try:
            self._control.update_weights({"path": str(path)})
        finally:
            path.unlink()

    def close(self) -> None:
        """Remove the folder and stop the HTTP server."""
        self._temporary_folder.cleanup()
        if self._http is not None:
            self._http.close()


class EngineSender:
    """Sends weights with vLLM's trainer engine: CUDA IPC on one GPU, NCCL between GPUs.

    Attributes:
        method: description of the transfer method.
        bytes_sent: size of the last update in bytes.
        digest: always empty, because the weights do not pass through the host.

    Args:
        control: routes of the server.
        backend: "ipc" or "nccl", as the server was started.
        address: address of the server.
        model: the trainer's model, or a copy without weights (`meta_model`).
        dtype: dtype in which floating-point tensors are sent.
        device: the GPU that the weights are sent from.
        bucket_bytes: bucket size in bytes; raised to the size of the largest tensor.
    """

    digest = ""
    wire_bytes = 0

    def __init__(
        self,
        control: TransferRoutes,
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

        sender = self

        class Source(WeightSource):  # type: ignore[misc]
            """Current weights in the order of `checkpoint_format`, converted one at a time."""

            def metadata(self) -> list[ParamMeta]:
                return [
                    ParamMeta(name, sender._dtype_of(tensor), tuple(tensor.shape)) for name, tensor in sender._pairs()
                ]

            def __iter__(self) -> Iterator[tuple[str, Tensor]]:
                for name, tensor in sender._pairs():
                    yield name, tensor.to(device, sender._dtype_of(tensor))

        self._control, self._model, self._dtype = control, model, dtype
        self._weights: Mapping[str, Tensor] = {}
        self.bytes_sent = 0
        self.allocated = 0
        # vLLM's GPU buffer does not grow, so it must hold the largest tensor, usually the embeddings.
        bucket_bytes = max(bucket_bytes, max(parameter.numel() for parameter in model.parameters()) * dtype.itemsize)
        init_info: TrainerInitInfo
        if backend == "ipc":
            from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo

            init_info = IPCTrainerInitInfo(rank=0, packed=True, packed_buffer_size_bytes=bucket_bytes)
            self.method = "CUDA IPC"
        else:
            from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

            host = address_towards(address)
            port = free_port(host)  # NCCL binds this port
            init_info = NCCLTrainerInitInfo(
                master_address=host,
                master_port=port,
                world_size=1 + control.world_size(),
                rank=0,
                packed=True,
                packed_buffer_size_bytes=bucket_bytes,
            )
            self.method = f"NCCL from {host}:{port}"
        self._engine = WeightTransferTrainerFactory.trainer_init(init_info, client=control, source=Source())

    def _dtype_of(self, tensor: Tensor) -> torch.dtype:
        return self._dtype if tensor.is_floating_point() else tensor.dtype

    def _pairs(self) -> Iterator[tuple[str, Tensor]]:
        return pairs(self._model, self._weights, self._dtype)

    def send(self, model: nn.Module, weights: Mapping[str, Tensor], label: str) -> None:
        """Replace all of the server's weights in one update, and label them."""
        self._weights, self._control.label = weights, label
        self.bytes_sent = sum(tensor.numel() * self._dtype_of(tensor).itemsize for _, tensor in self._pairs())
        try:
            self._engine.send_weights()
        except EngineLostError:
            raise
        except Exception as error:
            raise EngineLostError(f"generator: weights by {self.method}: {type(error).__name__}: {error}") from error
        finally:
            self._weights = {}

    def close(self) -> None:
        """Leave the process group used for the transfer."""
        self._engine.shutdown()


def new_sender(
    control: TransferRoutes,
    backend: str | None,
    address: str,
    *,
    model: nn.Module,
    dtype: torch.dtype,
    device: torch.device,
    transfer: str,
    folder: Path | None,
    bucket_bytes: int,
) -> BucketSender | EngineSender:
    """Return the sender for the transfer backend that a server was started with.

    Raises:
        ConfigurationError: the server has no transfer backend, or one that this package or machine does not support.
    """
    control.abort_update()
    if backend == BACKEND:
        return BucketSender(control, address, transfer=transfer, folder=folder, bucket_bytes=bucket_bytes, dtype=dtype)
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
