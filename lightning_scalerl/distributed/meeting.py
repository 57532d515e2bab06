"""Rendezvous of a run's ranks and the data they exchange there: nothing received can run code.

torch's store listens on all of a node's addresses, whatever MASTER_ADDR says, and its ways to send objects unpickle
whatever arrives. So rank 0 opens the store where the ranks are: at 127.0.0.1 if they are all on one node, else at the
first node's address. And what is sent is plain data, read as such.
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

from lightning_scalerl.distributed.sharded import ShardedStrategy
from lightning_scalerl.rollout import Denominators, TrainBatch
from sweeps.run import slurm_job

HERE = "127.0.0.1"
_PLAIN = (bool, int, float, str, Tensor)
_OWN = (TrainBatch, Denominators)


class NotPlainError(RuntimeError):
    """Raised for data between ranks that is more than numbers, texts, tensors and batches of them."""


# --- the place -----------------------------------------------------------------------------------------------


def meet(trainer: Trainer) -> None:
    """Make the process group of a trainer's ranks, as Lightning would, at an address that only they need to reach.

    All ranks call it before Lightning sets its strategy up, which then finds the group made. Left to others: one rank,
    a group that is there already, and launchers that bring a store of their own (torchrun).

    Raises:
        DistNetworkError: rank 0 cannot listen there.
    """
    strategy = trainer.strategy
    if trainer.world_size == 1 or dist.is_initialized() or not isinstance(strategy, DDPStrategy | ShardedStrategy):
        return
    environment = strategy.cluster_environment
    if not isinstance(environment, LightningEnvironment | SLURMEnvironment) or strategy.accelerator is None:
        return
    # A user who has named another address has a reason: ranks with network name spaces of their own, for instance.
    on_one_node = trainer.num_nodes == 1 and os.environ.get("MASTER_ADDR", HERE) in (HERE, "localhost")
    address = HERE if on_one_node else environment.main_address
    if on_one_node:
        _stay_here()
    # None: the name is no address of this machine; torch then listens on all addresses, as by default.
    listening = _listening(address, environment.main_port) if trainer.global_rank == 0 else None
    store = dist.TCPStore(  # type: ignore[attr-defined]
        address,
        environment.main_port,
        trainer.world_size,
        trainer.global_rank == 0,
        timeout=strategy._timeout or default_pg_timeout,
        master_listen_fd=None if listening is None else listening.detach(),
    )
    backend = strategy._get_process_group_backend()
    device = strategy.root_device
    strategy.accelerator.setup_device(device)  # before NCCL takes whatever is current
    dist.init_process_group(
        backend,
        store=dist.PrefixStore(slurm_job.step_name(), store),  # type: ignore[attr-defined]
        rank=trainer.global_rank,
        world_size=trainer.world_size,
        timeout=strategy._timeout,
        device_id=None if device.type == "cpu" else device,
    )
    if backend == "nccl":
        atexit.register(_destroy_dist_connection)  # as Lightning does: NCCL complains of a group that nobody ends


def _stay_here() -> None:
    """Have gloo and NCCL connect ranks over the loopback interface, unless the user has named another."""
    names = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        if names:
            os.environ.setdefault(variable, names[0])


def _listening(address: str, port: int) -> socket.socket | None:
    """Open a socket that listens at one address; None if the name has no address here that other nodes can reach."""
    found = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)
    for family, kind, protocol, _, place in found:
        # Debian's own name for itself is 127.0.1.1, where no other node comes.
        if address != HERE and ipaddress.ip_address(str(place[0]).partition("%")[0]).is_loopback:
            continue
        opened = socket.socket(family, kind, protocol)
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            opened.bind(place)
            opened.listen(1024)
        except OSError as error:
            opened.close()
            if address == HERE:
                raise dist.DistNetworkError(f"the ranks cannot meet at {address}:{port}: {error}") from error
            continue
        return opened
    return None


# --- what is exchanged there ---------------------------------------------------------------------------------


def encode(value: Any) -> Tensor:
    """Encode plain data as bytes, shape (N,) uint8.

    Raises:
        NotPlainError: there is an object in it whose class the other ranks would have to trust.
    """
    written = io.BytesIO()
    torch.save(_plain(value), written)
    return torch.frombuffer(bytearray(written.getvalue()), dtype=torch.uint8)


def decode(sent: Tensor) -> Any:
    """Decode the bytes that `encode` made; tensors arrive on the CPU.

    Raises:
        NotPlainError: nothing that `encode` makes; nothing of it was run.
    """
    try:
        with torch.serialization.safe_globals(list(_OWN)):
            return torch.load(io.BytesIO(sent.numpy().tobytes()), weights_only=True, map_location="cpu")
    except Exception as error:  # hostile bytes may fail anywhere in the unpickler
        raise NotPlainError(f"a rank sent what is no plain data ({type(error).__name__}); refused unread") from error


def _plain(value: Any) -> Any:
    """Return a value made of plain types alone: tensors detached, numpy's numbers as Python's, mappings as dicts."""
    kind = type(value)
    if value is None or kind in _PLAIN:
        return value.detach() if isinstance(value, Tensor) else value
    if isinstance(value, np.generic):
        return value.item()
    if kind in _OWN:
        return kind(**{name: _plain(each) for name, each in vars(value).items()})
    if kind in (list, tuple):
        return kind(map(_plain, value))
    if isinstance(value, Mapping):
        return {_plain(key): _plain(each) for key, each in value.items()}
    raise NotPlainError(f"{kind.__module__}.{kind.__qualname__}: ranks hand each other plain data only")


def send(encoded: Tensor, group: Any) -> None:
    """Broadcast what `encode` made from rank 0 to all others of a group on the hosts."""
    # The length first: a receiver has to make room before it receives.
    dist.broadcast(torch.tensor([encoded.numel()]), src=0, group=group)
    dist.broadcast(encoded, src=0, group=group)


def receive(group: Any) -> Any:
    """Receive the value that rank 0 broadcasts with `send`.

    Raises:
        NotPlainError: see `decode`.
    """
    length = torch.zeros(1, dtype=torch.int64)
    dist.broadcast(length, src=0, group=group)
    sent = torch.empty(int(length), dtype=torch.uint8)
    dist.broadcast(sent, src=0, group=group)
    return decode(sent)


def all_gather(value: Any, group: Any, count: int) -> list[Any]:
    """Return every rank's value, by rank, on every rank of a group on the hosts.

    Raises:
        NotPlainError: see `encode` and `decode`.
    """
    sent = encode(value)
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(count)]
    dist.all_gather(lengths, torch.tensor([sent.numel()]), group=group)
    # all_gather wants one shape from all: lengths first, then everything padded to the longest.
    longest = max(map(int, lengths))
    padded = torch.zeros(longest, dtype=torch.uint8)
    padded[: sent.numel()] = sent
    received = [torch.empty(longest, dtype=torch.uint8) for _ in range(count)]
    dist.all_gather(received, padded, group=group)
    return [decode(each[: int(length)]) for each, length in zip(received, lengths, strict=True)]
