"""Connection of a run's ranks into a process group, and exchange of plain data between them.

By default, torch's store listens on all addresses of a node regardless of MASTER_ADDR, and torch unpickles objects from
other ranks. Here, rank 0 listens only where the ranks need it: at 127.0.0.1 if all are on one node, else at the first
node's address. Only plain data is sent, and the receiver accepts nothing else.
"""

from __future__ import annotations

import atexit
import io
import ipaddress
import os
import socket
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.fabric.utilities.distributed import _destroy_dist_connection
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torch.distributed.constants import default_pg_timeout

from lightning_scalerl.compat import lightning as compat
from lightning_scalerl.distributed.sharded import ShardedStrategy
from lightning_scalerl.rollouts.rollout import Denominators, TrainBatch
from sweeps.run import slurm_job

LOOPBACK = "127.0.0.1"
_PLAIN_TYPES = (bool, int, float, str, Tensor)
_BATCH_TYPES = (TrainBatch, Denominators)


class NotPlainError(RuntimeError):
    """Raised for data between ranks other than numbers, strings, tensors, batches and containers of these."""


# --- rendezvous ----------------------------------------------------------------------------------------------


def meet(trainer: Trainer) -> None:
    """Create the process group of a trainer's ranks as Lightning would, but listen only at the address that they need.

    All ranks call it before Lightning sets up its strategy, which then uses this group. For a single rank, an existing
    group, or a launcher with its own store (torchrun), it does nothing.

    Raises:
        DistNetworkError: rank 0 cannot listen on the address.
    """
    strategy = trainer.strategy
    if trainer.world_size == 1 or dist.is_initialized() or not isinstance(strategy, DDPStrategy | ShardedStrategy):
        return
    environment = strategy.cluster_environment
    if not isinstance(environment, LightningEnvironment | SLURMEnvironment) or strategy.accelerator is None:
        return
    # Use an address that the user has set: ranks on one node may be in different network namespaces, for instance.
    on_one_node = trainer.num_nodes == 1 and os.environ.get("MASTER_ADDR", LOOPBACK) in (LOOPBACK, "localhost")
    address = LOOPBACK if on_one_node else environment.main_address
    if on_one_node:
        _use_loopback()
    # Without a socket (the name resolves to no address of this machine), torch listens on all addresses.
    listening = _listening_socket(address, environment.main_port) if trainer.global_rank == 0 else None
    store = dist.TCPStore(  # type: ignore[attr-defined]
        address,
        environment.main_port,
        trainer.world_size,
        trainer.global_rank == 0,
        timeout=compat.timeout(strategy) or default_pg_timeout,
        master_listen_fd=None if listening is None else listening.detach(),
    )
    backend = compat.backend(strategy)
    device = strategy.root_device
    strategy.accelerator.setup_device(device)  # NCCL would use the current device otherwise
    dist.init_process_group(
        backend,
        store=dist.PrefixStore(slurm_job.step_name(), store),  # type: ignore[attr-defined]
        rank=trainer.global_rank,
        world_size=trainer.world_size,
        timeout=compat.timeout(strategy),
        device_id=None if device.type == "cpu" else device,
    )
    if backend == "nccl":
        atexit.register(_destroy_dist_connection)  # as Lightning does: NCCL warns about a group that is not destroyed


def _use_loopback() -> None:
    """Make gloo and NCCL use the loopback interface, unless the user has chosen another."""
    names = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        if names:
            os.environ.setdefault(variable, names[0])


def _listening_socket(address: str, port: int) -> socket.socket | None:
    """Open a socket that listens on one address; None if the name resolves to no address that other nodes can reach."""
    addresses = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)
    for family, socket_type, protocol, _, socket_address in addresses:
        # Debian resolves its own host name to 127.0.1.1, which other nodes cannot reach.
        if address != LOOPBACK and ipaddress.ip_address(str(socket_address[0]).partition("%")[0]).is_loopback:
            continue
        listener = socket.socket(family, socket_type, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(socket_address)
            listener.listen(1024)
        except OSError as error:
            listener.close()
            if address == LOOPBACK:
                raise dist.DistNetworkError(f"the ranks cannot meet at {address}:{port}: {error}") from error
            continue
        return listener
    return None


# --- exchange of plain data ----------------------------------------------------------------------------------


def encode(value: Any) -> Tensor:
    """Encode plain data as bytes, shape (N,) uint8.

    Raises:
        NotPlainError: the data contains an object of another class, which the receiver could only unpickle.
    """
    buffer = io.BytesIO()
    torch.save(_plain(value), buffer)
    return torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)


def decode(encoded: Tensor) -> Any:
    """Decode bytes from `encode`; tensors are on the CPU.

    Raises:
        NotPlainError: the bytes are not from `encode`. No code in them is run.
    """
    try:
        with torch.serialization.safe_globals(list(_BATCH_TYPES)):
            return torch.load(io.BytesIO(encoded.numpy().tobytes()), weights_only=True, map_location="cpu")
    except Exception as error:  # hostile bytes may fail anywhere in the unpickler
        raise NotPlainError(f"a rank sent what is no plain data ({type(error).__name__}); refused unread") from error


def _plain(value: Any) -> Any:
    """Return a value as plain types: tensors are detached, NumPy scalars become Python's, mappings become dicts."""
    value_type = type(value)
    if value is None or value_type in _PLAIN_TYPES:
        return value.detach() if isinstance(value, Tensor) else value
    if isinstance(value, np.generic):
        return value.item()
    if value_type in _BATCH_TYPES:
        return value_type(**{name: _plain(field) for name, field in vars(value).items()})
    if value_type in (list, tuple):
        return value_type(map(_plain, value))
    if isinstance(value, Mapping):
        return {_plain(key): _plain(entry) for key, entry in value.items()}
    raise NotPlainError(f"{value_type.__module__}.{value_type.__qualname__}: ranks hand each other plain data only")


def send(encoded: Tensor, group: Any) -> None:
    """Broadcast the result of `encode` from rank 0 to the other ranks of a gloo group."""
    # Send the length first, so that receivers can allocate memory.
    dist.broadcast(torch.tensor([encoded.numel()]), src=0, group=group)
    dist.broadcast(encoded, src=0, group=group)


def receive(group: Any) -> Any:
    """Receive and decode the value that rank 0 broadcasts with `send`.

    Raises:
        NotPlainError: see `decode`.
    """
    length = torch.zeros(1, dtype=torch.int64)
    dist.broadcast(length, src=0, group=group)
    encoded = torch.empty(int(length), dtype=torch.uint8)
    dist.broadcast(encoded, src=0, group=group)
    return decode(encoded)


def all_gather(value: Any, group: Any, count: int) -> list[Any]:
    """Return the values of all ranks of a gloo group, by rank, on every rank.

    Raises:
        NotPlainError: see `encode` and `decode`.
    """
    encoded = encode(value)
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(count)]
    dist.all_gather(lengths, torch.tensor([encoded.numel()]), group=group)
    # all_gather needs the same shape on all ranks: exchange the lengths, then pad everything to the longest.
    longest = max(map(int, lengths))
    padded = torch.zeros(longest, dtype=torch.uint8)
    padded[: encoded.numel()] = encoded
    received = [torch.empty(longest, dtype=torch.uint8) for _ in range(count)]
    dist.all_gather(received, padded, group=group)
    return [decode(encoded[: int(length)]) for encoded, length in zip(received, lengths, strict=True)]
