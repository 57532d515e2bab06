"""Several processes ("ranks") that train one run together: what they share, sum and gather.

Rank 0 leads: it alone has the rollout stream, the generator, the evaluation, the counters and the journal. The
others only train. Every optimizer step,

    rank 0 makes the batch -> share -> each rank trains on its own `rows` -> `sum_gradients` -> clip -> step
                                                                          -> `gather_parts` -> rank 0 records

The batch's denominators are global, so the gradients of the rows add up to the gradient of the batch; nothing is
averaged. With one rank everything here hands through what it is given.

Two process groups: sums of tensors go through the strategy's (NCCL on GPUs, with its usual time limit, so that a
rank that is stuck is noticed); whatever may wait for rank 0's generation or evaluation goes through one on the
hosts (gloo), which waits a day and notices at once when a process is gone.
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
from lightning_scalerl.distributed.meeting import all_gather, encode, receive, send
from lightning_scalerl.distributed.sharded import ShardedStrategy, check_divides
from lightning_scalerl.rollout import BEFORE_UPDATE, Part, PassSize, TrainBatch, whole
from sweeps.run.interruption import interruption

T = TypeVar("T")

# Timeout of ranks that wait for rank 0 to generate, evaluate or save.
PATIENCE = timedelta(hours=24)
# First entry of what rank 0 sends to ranks that wait for its work: the result, or a request before it.
_RESULT, _REQUEST = "result", "request"
# Gradients are summed in buffers of about this many numbers (128 MB in FP32).
BUFFER = 2**25


class LeaderFailedError(RuntimeError):
    """Raised on the other ranks when rank 0 fails; it names the error, which rank 0 raises itself and records."""

    leave_journal = True


@dataclass(frozen=True)
class Ranks:
    """This process among those that train the run; by default the only one.

    `number` counts from 0 and `count` is how many there are. `hosts` is the process group that waits for rank 0,
    None with one rank; `strategy` is the trainer's, if there are several. `answer` is what the other ranks do with a
    request of rank 0, see `ask`.
    """

    number: int = 0
    count: int = 1
    hosts: Any = None
    strategy: DDPStrategy | ShardedStrategy | None = None
    answer: Callable[[Any], None] | None = None

    @classmethod
    def of(cls, trainer: Trainer, answer: Callable[[Any], None] | None = None) -> Ranks:
        """Build the ranks of a trainer whose strategy is set up. All ranks must call it: it makes a process group.

        Args:
            trainer: whose ranks these are.
            answer: what another rank does with a request that rank 0 sends by `ask`.
        """
        strategy = trainer.strategy if isinstance(trainer.strategy, DDPStrategy | ShardedStrategy) else None
        hosts = dist.new_group(backend="gloo", timeout=PATIENCE) if trainer.world_size > 1 else None
        return cls(trainer.global_rank, trainer.world_size, hosts, strategy, answer)

    @property
    def leads(self) -> bool:
        """Return True on rank 0, the one with the rollout stream and the journal."""
        return self.number == 0

    @property
    def sharded(self) -> bool:
        """Return whether no rank has the whole model: whatever passes through it passes on all ranks together."""
        return isinstance(self.strategy, ShardedStrategy)

    @property
    def writes_shards(self) -> bool:
        """Return whether each rank writes its own part of a checkpoint."""
        return isinstance(self.strategy, ShardedStrategy) and self.strategy.writes_shards

    @property
    def partners(self) -> int:
        """Return how many ranks split each layer between them: they have the same rows, and compute the same."""
        return self.strategy.tensor_parallel if isinstance(self.strategy, ShardedStrategy) else 1

    @property
    def place(self) -> int:
        """Return this rank's number among those that rows are dealt to; its partners have the same one."""
        return self.number // self.partners

    @property
    def _group(self) -> Any:
        """Process group of ranks with different rows, one of each set of partners; None for all ranks."""
        if isinstance(self.strategy, ShardedStrategy) and self.partners > 1:
            return self.strategy.device_mesh["data_parallel"].get_group()
        return None

    # --- on the hosts ------------------------------------------------------------------------------------

    def share(self, work: Callable[[], T], lean: Callable[[T], T] = lambda result: result) -> T:
        """Do the work on rank 0 and return its result on every rank, or fail on every rank.

        Meanwhile the other ranks answer what rank 0 asks of them (`ask`).

        Args:
            work: called on rank 0 only; its result is plain data, see `meeting`.
            lean: reduces the result to what the other ranks need.

        Raises:
            LeaderFailedError: on the other ranks, if the work raised on rank 0.
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
            # Within the `try`: a result that is no plain data has to fail on the waiting ranks as well.
            encoded = encode((_RESULT, None, lean(result)))
        except Exception as error:
            with suppress(RuntimeError):  # ranks that are gone need no news
                send(encode((_RESULT, f"{type(error).__name__}: {error}", None)), self.hosts)
            raise
        send(encoded, self.hosts)
        return result

    def on_leader(self, work: Callable[[], T]) -> T | None:
        """Do the work on rank 0 and return its result there, None elsewhere; fail on every rank as `share` does."""

        def lean(result: T | None) -> None:
            """Leave the result where it is: it need not be plain data."""

        return self.share(work, lean)

    def ask(self, request: Any) -> None:
        """Have the other ranks do something together with rank 0, in the middle of its work in `share`.

        Args:
            request: plain data, see `meeting`; each of them hands it to its `answer`.
        """
        if self.count > 1:
            send(encode((_REQUEST, request)), self.hosts)

    def share_batch(self, work: Callable[[], TrainBatch | str | None]) -> TrainBatch | str | None:
        """Make a batch on rank 0 and return it on every rank; the other ranks get it without its groups.

        None, or a text on why there is no batch, is returned everywhere as it is.
        """
        return self.share(work, lambda batch: replace(batch, groups=[]) if isinstance(batch, TrainBatch) else batch)

    def gather(self, value: T) -> list[T]:
        """Return every rank's value, by rank, on every rank."""
        if self.count == 1:
            return [value]
        return all_gather(value, self.hosts, self.count)

    def agree(self, reason: str | None) -> str | None:
        """Return the first reason that any rank has, the same on all ranks; None if none has one."""
        return next((given for given in self.gather(reason) if given is not None), None)

    def check_alike(self, what: str, value: Any) -> None:
        """Check that all ranks have the same value.

        Raises:
            RuntimeError: they differ; on every rank.
        """
        values = self.gather(value)
        if any(other != value for other in values):
            raise RuntimeError(f"{what}: differs between ranks, {values}; they must read the same files")

    def restore_sigterm(self, handler: Any) -> None:
        """Restore the SIGTERM handler from before Lightning's, if there was one or there are several ranks.

        Lightning's handler ends the run as failed, even one that has just saved its last step. And it starts a
        broadcast wherever the signal finds its rank; ranks at different places would take it for a part of their sums,
        and train on with the result.
        """
        if (
            (self.count > 1 or callable(handler))
            and handler is not None
            and threading.current_thread() is threading.main_thread()
        ):
            # SIGTERM's default action would kill the ranks of a script: treat it as a request to stop instead.
            asked = handler if callable(handler) else lambda *_: interruption.request("SIGTERM")
            signal.signal(signal.SIGTERM, asked)

    # --- on the devices ----------------------------------------------------------------------------------

    def rows(self, batch: TrainBatch, size: PassSize | None = None) -> TrainBatch:
        """Return this rank's rows of the batch, possibly none; long and short ones are dealt out evenly.

        Where passes are cut by tokens ranks get as many tokens, not rows: the longest row that is left goes to the rank
        with the fewest. Tensor-parallel partners get the same ones.
        """
        if self.count == 1:
            return batch
        # Stable, since each rank sorts for itself and all must deal out the same.
        order = torch.argsort(batch.lengths, descending=True, stable=True)
        places = self.count // self.partners
        if size is None or size.tokens is None:
            return batch.select(order[self.place :: places])
        fewest = [(0, place) for place in range(places)]  # tokens so far, a heap
        own: list[int] = []
        for row, length in zip(order.tolist(), batch.lengths[order].tolist(), strict=True):
            tokens, place = fewest[0]
            heapq.heapreplace(fewest, (tokens + length, place))
            if place == self.place:
                own.append(row)
        return batch.select(order.new_tensor(own))

    def passes(self, rows: TrainBatch, size: PassSize) -> Iterator[tuple[Tensor, TrainBatch]]:
        """Yield micro-batches of this rank's rows, with the numbers of their rows; if sharded, as many on every rank.

        Layers are gathered in lockstep: a rank that has fewer rows than others goes through the model with blank ones,
        whose number of rows is none (`TrainBatch.blank`).
        """
        cuts = list(rows.cut(size))
        most = -self._least(-len(cuts))
        for number in range(most):
            if number < len(cuts):
                yield cuts[number], rows.select(cuts[number])
            else:
                yield rows.row.new_zeros(0), rows.blank()

    def all_would(self, choice: bool) -> bool:
        """Return whether the ranks of a sharded model all have chosen so; that of this rank alone where it is whole."""
        return bool(self._least(choice))

    def _least(self, value: int) -> int:
        """Return the smallest of the ranks' numbers if they share a sharded model, else this rank's."""
        if not self.sharded:
            return value
        assert isinstance(self.strategy, ShardedStrategy)
        least = torch.tensor(int(value), device=self.strategy.root_device)
        dist.all_reduce(least, dist.ReduceOp.MIN)
        return int(least)

    def unsynchronized(self) -> AbstractContextManager[None]:
        """Suppress DDP's averaging in backward passes inside: ranks differ in how many micro-batches they have."""
        return self.strategy.block_backward_sync() if isinstance(self.strategy, DDPStrategy) else nullcontext()

    @torch.no_grad()
    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Replace each gradient by its sum over the ranks, bit for bit the same on all of them.

        A parameter without a gradient counts as zeros where another rank has one, and stays without where none has.
        """
        if self.count == 1 or self.sharded:  # FSDP2 has summed them in the backward passes
            return
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        # A rank without rows has no gradients and yet must sum the same buffers: which there are is agreed on first.
        given = torch.tensor([parameter.grad is not None for parameter in trained], dtype=torch.int32)
        given = given.to(trained[0].device)
        dist.all_reduce(given, dist.ReduceOp.MAX)
        gradients = []
        for parameter, somewhere in zip(trained, given.tolist(), strict=True):
            if somewhere and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            if parameter.grad is not None:
                gradients.append(parameter.grad)
        for buffered in _buffers(gradients):
            flat = torch.cat([gradient.reshape(-1) for gradient in buffered])
            dist.all_reduce(flat)
            for gradient, summed in zip(buffered, torch.split(flat, [g.numel() for g in buffered]), strict=True):
                gradient.copy_(summed.view_as(gradient))

    def sum(self, value: Tensor) -> Tensor:
        """Return the sum over ranks, each row counted once, on every rank; `value` itself is overwritten."""
        if self.count > 1:
            dist.all_reduce(value, group=self._group)
        return value

    def gather_rows(self, batch: TrainBatch, rows: TrainBatch) -> TrainBatch:
        """Return the whole batch with the results that each rank computed for its rows before the update."""
        if self.count == 1:
            return rows
        names = [name for name in BEFORE_UPDATE if getattr(rows, name) is not None]
        if batch.rollouts == 0 or not names:
            return replace(batch, **{name: getattr(rows, name) for name in names})
        order = torch.argsort(batch.row)
        # Where each of this rank's rows stands in the batch: `row` is unique, and searchsorted wants it sorted.
        place = order[torch.searchsorted(batch.row[order], rows.row)]
        tables = torch.zeros(len(names), *batch.generator_logprobs.shape, device=batch.tokens.device)
        for table, name in zip(tables, names, strict=True):
            values = getattr(rows, name)
            table[place, : values.shape[1]] = values
        # Each row is one rank's (or its partners') and zero on the others: the sum is a gather, and exact.
        found: dict[str, Any] = dict(zip(names, self.sum(tables), strict=True))
        return replace(batch, **found)

    def gather_parts(self, batch: TrainBatch, parts: Sequence[Part]) -> Sequence[Part]:
        """Return the log-probabilities and entropies of all ranks' rows, as one part of the whole batch."""
        if self.count == 1:
            return parts
        if batch.rollouts == 0:
            return []
        # Each row is one rank's and zero on the others: the sum is exact.
        logprobs, entropies = self.sum(torch.stack(whole(batch, parts)))
        return [(batch, logprobs, entropies)]


def _buffers(gradients: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield the gradients in groups of about `BUFFER` numbers."""
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
    """Stand-in for the rollout stream on ranks that only train: it counts the completed steps."""

    completed_steps: int = 0

    def step_completed(self) -> None:
        """Count one more completed optimizer step."""
        self.completed_steps += 1


def check_strategy(strategy: Any) -> None:
    """Refuse strategies other than a single device, plain data parallelism and FSDP2.

    Raises:
        ConfigurationError: another strategy, or one that does not go with the number of devices.
    """
    if isinstance(strategy, ShardedStrategy):
        check_divides(strategy.tensor_parallel, strategy.num_nodes * strategy.num_processes)
    if isinstance(strategy, SingleDeviceStrategy | ShardedStrategy):
        return
    remedy = 'use strategy="ddp" or, sharded, "fsdp2" in a script (or under torchrun or srun), or devices=1'
    if type(strategy) is not DDPStrategy:
        raise ConfigurationError(f"strategy: {type(strategy).__name__} is not supported; {remedy}")
    if strategy._start_method != "popen":
        raise ConfigurationError(
            f"strategy: DDP with start_method={strategy._start_method!r} is not supported; {remedy}"
        )
    if strategy._ddp_kwargs.get("static_graph"):
        raise ConfigurationError(f"strategy: DDP with static_graph=True cannot sum uneven micro-batches; {remedy}")
