"""Division of a run between several processes ("ranks"), which share batches, sum gradients and gather results.

Rank 0 leads. It alone has the rollout stream, the generator, the evaluation, the counters and the journal. The other
ranks only train. In every optimizer step,

    rank 0 assembles the batch -> `share` -> each rank trains on its `rows` -> `sum_gradients` -> clip -> step
                                                                            -> `gather_parts` -> rank 0 records

The denominators of a batch are global, so the ranks' gradients add up to the gradient of the batch, and nothing is
averaged. With a single rank, all functions here return their input.

There are two process groups. Sums of tensors use the strategy's group (NCCL on GPUs), whose usual timeout detects stuck
ranks. Operations that may wait for rank 0's generation or evaluation use a gloo group on the hosts. It has a timeout of
a day, and detects immediately when a process has died.
"""

from __future__ import annotations

import heapq
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from torch import Tensor, nn

from lightning_scalerl.checks import ConfigurationError
from lightning_scalerl.compat import lightning as compat
from lightning_scalerl.distributed.meeting import all_gather, encode, receive, send
from lightning_scalerl.distributed.sharded import ShardedStrategy, check_divides
from lightning_scalerl.rollouts.rollout import BEFORE_UPDATE, Part, PassSize, TrainBatch, whole
from sweeps.run.interruption import interruption

T = TypeVar("T")

# Timeout of ranks that wait for rank 0 to generate, evaluate or save.
WAIT_TIMEOUT = timedelta(hours=24)
# First element of a message from rank 0 to the waiting ranks: "request" during rank 0's work, "result" at its end.
_RESULT, _REQUEST = "result", "request"
# Gradients are summed in buffers of about this many numbers (128 MB in FP32).
BUFFER = 2**25


class LeaderFailedError(RuntimeError):
    """Raised on the other ranks when rank 0 fails; it names the error, which rank 0 raises and records."""

    leave_journal = True  # only rank 0 writes to the journal


@dataclass(frozen=True)
class Ranks:
    """Position of this process among the ranks of a run; by default it is the only one.

    Attributes:
        number: rank of this process, from 0.
        count: number of ranks.
        hosts: gloo process group for waiting on rank 0; None with one rank.
        strategy: the trainer's strategy if it is for several ranks, else None.
        answer: called on the other ranks with a request of rank 0, see `ask`.
    """

    number: int = 0
    count: int = 1
    hosts: Any = None
    strategy: DDPStrategy | ShardedStrategy | None = None
    answer: Callable[[Any], None] | None = None

    @classmethod
    def of(cls, trainer: Trainer, answer: Callable[[Any], None] | None = None) -> Ranks:
        """Return the ranks of a trainer whose strategy is set up. All ranks call it, because it makes a process group.

        Args:
            trainer: the trainer.
            answer: called on the other ranks with a request of rank 0, see `ask`.
        """
        strategy = trainer.strategy if isinstance(trainer.strategy, DDPStrategy | ShardedStrategy) else None
        hosts = dist.new_group(backend="gloo", timeout=WAIT_TIMEOUT) if trainer.world_size > 1 else None
        return cls(trainer.global_rank, trainer.world_size, hosts, strategy, answer)

    @property
    def leads(self) -> bool:
        """True on rank 0, which has the rollout stream and the journal."""
        return self.number == 0

    @property
    def sharded(self) -> bool:
        """True if the model is sharded. Every pass through it must then run on all ranks together."""
        return isinstance(self.strategy, ShardedStrategy)

    @property
    def writes_shards(self) -> bool:
        """True if each rank writes its part of a checkpoint."""
        return isinstance(self.strategy, ShardedStrategy) and self.strategy.writes_shards

    @property
    def tensor_parallel_size(self) -> int:
        """Number of tensor-parallel ranks, which split each layer between them and have the same rows."""
        return self.strategy.tensor_parallel if isinstance(self.strategy, ShardedStrategy) else 1

    @property
    def data_parallel_index(self) -> int:
        """Data-parallel index of this rank, which its tensor-parallel partners share."""
        return self.number // self.tensor_parallel_size

    @property
    def _group(self) -> Any:
        """Data-parallel process group, with one rank of each set of partners. None means the group of all ranks."""
        if isinstance(self.strategy, ShardedStrategy) and self.tensor_parallel_size > 1:
            return self.strategy.device_mesh["data_parallel"].get_group()
        return None

    # --- on the hosts (gloo) -----------------------------------------------------------------------------

    def share(self, work: Callable[[], T], reduce: Callable[[T], T] = lambda result: result) -> T:
        """Call `work` on rank 0 and return its result on every rank. An error of `work` is raised on every rank.

        Meanwhile the other ranks handle requests of rank 0 (`ask`).

        Args:
            work: called on rank 0 only; its result must be plain data, see `meeting`.
            reduce: reduces the result to what the other ranks need.

        Raises:
            LeaderFailedError: on the other ranks, if the work raised an error on rank 0.
        """
        if self.count == 1:
            return work()
        if not self.leads:
            while (message := receive(self.hosts))[0] == _REQUEST:
                assert self.answer is not None
                self.answer(message[1])
            failure, received = message[1:]
            if failure is not None:
                raise LeaderFailedError(f"rank 0 failed: {failure}")
            result: T = received
            return result
        try:
            result = work()
            # Encode inside the `try`, because a result that is not plain data must raise on the waiting ranks as well.
            encoded = encode((_RESULT, None, reduce(result)))
        except Exception as error:
            with suppress(RuntimeError):  # the other ranks may have died
                send(encode((_RESULT, f"{type(error).__name__}: {error}", None)), self.hosts)
            raise
        send(encoded, self.hosts)
        return result

    def on_leader(self, work: Callable[[], T]) -> T | None:
        """Call `work` on rank 0; return its result on rank 0, None on other ranks. Errors are raised on every rank."""

        def reduce(result: T | None) -> None:
            """Send nothing: the result need not be plain data."""

        return self.share(work, reduce)

    def ask(self, request: Any) -> None:
        """Send a request to the other ranks, so that they do something together with rank 0 during its work in `share`.

        Args:
            request: plain data, see `meeting`; the other ranks pass it to `answer`.
        """
        if self.count > 1:
            send(encode((_REQUEST, request)), self.hosts)

    def share_batch(self, work: Callable[[], TrainBatch | str | None]) -> TrainBatch | str | None:
        """Assemble a batch on rank 0 by `work`, and return it on every rank. Only rank 0 gets it with its groups.

        If `work` returns None or a string (the reason why there is no batch), every rank returns that.
        """
        return self.share(work, lambda batch: replace(batch, groups=[]) if isinstance(batch, TrainBatch) else batch)

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks, by rank, on every rank."""
        if self.count == 1:
            return [value]
        return all_gather(value, self.hosts, self.count)

    def agree(self, reason: str | None) -> str | None:
        """Return the first reason, to stop for example, that any rank gives, else None; the same on every rank."""
        return next((other for other in self.gather(reason) if other is not None), None)

    def check_alike(self, what: str, value: Any) -> None:
        """Check that all ranks have the same value.

        Raises:
            RuntimeError: values differ; raised on every rank.
        """
        values = self.gather(value)
        if any(other != value for other in values):
            raise RuntimeError(f"{what}: differs between ranks, {values}; they must read the same files")

    def restore_sigterm(self, handler: Any) -> None:
        """Restore the SIGTERM handler from before Lightning's, if that was a function or there are several ranks.

        Lightning's handler marks the run as failed, even if it has just saved its last step. It also broadcasts a
        tensor as soon as the signal arrives. Other ranks may be summing tensors at that moment, would take the
        broadcast tensor for a part of the sum, and would continue training with wrong values.
        """
        if (
            (self.count > 1 or callable(handler))
            and handler is not None
            and threading.current_thread() is threading.main_thread()
        ):
            # The default action would kill the ranks of a script: treat SIGTERM as a request to stop instead.
            new_handler = handler if callable(handler) else lambda *_: interruption.request("SIGTERM")
            signal.signal(signal.SIGTERM, new_handler)

    # --- on the devices ----------------------------------------------------------------------------------

    def rows(self, batch: TrainBatch, size: PassSize | None = None) -> TrainBatch:
        """Return this rank's rows of the batch, possibly none. Long and short rows are distributed evenly.

        If passes are limited by tokens, ranks get equal numbers of tokens instead of rows: the longest remaining row
        goes to the rank with the fewest tokens. Tensor-parallel partners get the same rows.
        """
        if self.count == 1:
            return batch
        # The sort is stable, because every rank sorts by itself and all ranks must get the same order.
        order = torch.argsort(batch.lengths, descending=True, stable=True)
        num_groups = self.count // self.tensor_parallel_size
        if size is None or size.tokens is None:
            return batch.select(order[self.data_parallel_index :: num_groups])
        heap = [(0, index) for index in range(num_groups)]  # (tokens so far, data-parallel index)
        row_numbers: list[int] = []
        for row, length in zip(order.tolist(), batch.lengths[order].tolist(), strict=True):
            tokens, index = heap[0]
            heapq.heapreplace(heap, (tokens + length, index))
            if index == self.data_parallel_index:
                row_numbers.append(row)
        return batch.select(order.new_tensor(row_numbers))

    def passes(self, rows: TrainBatch, size: PassSize) -> Iterator[tuple[Tensor, TrainBatch]]:
        """Yield (row numbers, micro-batch) for this rank's rows.

        With a sharded model, every rank yields the same number of micro-batches, because layers are gathered in
        lockstep. Ranks with fewer rows add blank micro-batches without row numbers (`TrainBatch.blank`).
        """
        cuts = list(rows.cut(size))
        max_passes = -self._minimum(-len(cuts))  # the maximum over ranks, computed as -min(-n)
        for number in range(max_passes):
            if number < len(cuts):
                yield cuts[number], rows.select(cuts[number])
            else:
                yield rows.row.new_zeros(0), rows.blank()

    def true_on_all(self, choice: bool) -> bool:
        """Return whether `choice` is True on all ranks of a sharded model; without sharding, return `choice`."""
        return bool(self._minimum(choice))

    def _minimum(self, value: int) -> int:
        """Return the smallest `value` over the ranks of a sharded model; without sharding, return `value`."""
        if not self.sharded:
            return value
        assert isinstance(self.strategy, ShardedStrategy)
        minimum = torch.tensor(int(value), device=self.strategy.root_device)
        dist.all_reduce(minimum, dist.ReduceOp.MIN)
        return int(minimum)

    def unsynchronized(self) -> AbstractContextManager[None]:
        """Turn off DDP's averaging in backward passes in the `with` block: ranks have different numbers of passes."""
        return self.strategy.block_backward_sync() if isinstance(self.strategy, DDPStrategy) else nullcontext()

    @torch.no_grad()
    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Replace each gradient by its sum over the ranks, which is bit for bit the same on all ranks.

        A missing gradient counts as zeros if another rank has one; if no rank has one, it stays missing.
        """
        if self.count == 1 or self.sharded:  # FSDP2 has already summed the gradients in the backward passes
            return
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        # A rank without rows has no gradients but must sum the same buffers, so first agree on which gradients exist.
        has_gradient = torch.tensor([parameter.grad is not None for parameter in trained], dtype=torch.int32)
        has_gradient = has_gradient.to(trained[0].device)
        dist.all_reduce(has_gradient, dist.ReduceOp.MAX)
        gradients = []
        for parameter, on_any_rank in zip(trained, has_gradient.tolist(), strict=True):
            if on_any_rank and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            if parameter.grad is not None:
                gradients.append(parameter.grad)
        for buffer_gradients in _buffers(gradients):
            flat = torch.cat([gradient.reshape(-1) for gradient in buffer_gradients])
            dist.all_reduce(flat)
            for gradient, summed in zip(
                buffer_gradients, torch.split(flat, [g.numel() for g in buffer_gradients]), strict=True
            ):
                gradient.copy_(summed.view_as(gradient))

    def sum(self, value: Tensor) -> Tensor:
        """Return the sum over data-parallel ranks, so that each row counts once. `value` is overwritten."""
        if self.count > 1:
            dist.all_reduce(value, group=self._group)
        return value

    def gather_rows(self, batch: TrainBatch, rows: TrainBatch) -> TrainBatch:
        """Return the whole batch with the results that all ranks computed before the update (`BEFORE_UPDATE`).

        Args:
            batch: the whole batch.
            rows: this rank's rows, with their results.
        """
        if self.count == 1:
            return rows
        names = [name for name in BEFORE_UPDATE if getattr(rows, name) is not None]
        if batch.rollouts == 0 or not names:
            return replace(batch, **{name: getattr(rows, name) for name in names})
        order = torch.argsort(batch.row)
        # Position of each of this rank's rows in the batch: `row` is unique, and searchsorted needs it sorted.
        positions = order[torch.searchsorted(batch.row[order], rows.row)]
        tables = torch.zeros(len(names), *batch.generator_logprobs.shape, device=batch.tokens.device)
        for table, name in zip(tables, names, strict=True):
            values = getattr(rows, name)
            table[positions, : values.shape[1]] = values
        # Each row is nonzero on one rank (and its partners) only, so the sum gathers the rows exactly.
        results: dict[str, Any] = dict(zip(names, self.sum(tables), strict=True))
        return replace(batch, **results)

    def gather_parts(self, batch: TrainBatch, parts: Sequence[Part]) -> Sequence[Part]:
        """Return log-probabilities and entropies of the rows of all ranks, as one `Part` of the whole batch."""
        if self.count == 1:
            return parts
        if batch.rollouts == 0:
            return []
        # Each row is nonzero on one rank only, so the sum is exact.
        logprobs, entropies = self.sum(torch.stack(whole(batch, parts)))
        return [(batch, logprobs, entropies)]


def _buffers(gradients: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield the gradients in groups of about `BUFFER` elements."""
    group: list[Tensor] = []
    size = 0
    for gradient in gradients:
        group.append(gradient)
        size += gradient.numel()
        if size >= BUFFER:
            yield group
            group, size = [], 0
    if group:
        yield group


@dataclass
class Follower:
    """Replacement for the rollout stream on ranks that only train: counts the completed steps."""

    completed_steps: int = 0

    def step_completed(self) -> None:
        """Count one more completed optimizer step."""
        self.completed_steps += 1


def check_strategy(strategy: Any) -> None:
    """Check that a strategy is supported: a single device, plain data parallelism or FSDP2.

    Raises:
        ConfigurationError: the strategy is not supported, or its settings do not fit the number of devices.
    """
    if isinstance(strategy, ShardedStrategy):
        check_divides(strategy.tensor_parallel, strategy.num_nodes * strategy.num_processes)
    if isinstance(strategy, SingleDeviceStrategy | ShardedStrategy):
        return
    remedy = 'use strategy="ddp" or, sharded, "fsdp2" in a script (or under torchrun or srun), or devices=1'
    if type(strategy) is not DDPStrategy:
        raise ConfigurationError(f"strategy: {type(strategy).__name__} is not supported; {remedy}")
    if compat.start_method(strategy) != "popen":
        raise ConfigurationError(
            f"strategy: DDP with start_method={compat.start_method(strategy)!r} is not supported; {remedy}"
        )
    if compat.ddp_arguments(strategy).get("static_graph"):
        raise ConfigurationError(f"strategy: DDP with static_graph=True cannot sum uneven micro-batches; {remedy}")
