"""The trained policy as rank 0 uses it between passes: to score rollouts, to publish weights, to try others."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_scalerl.axes.precision import Precision
from lightning_scalerl.distributed.ranks import Ranks
from lightning_scalerl.distributed.sharded import gathered, is_sharded, part_like, whole_tensor
from lightning_scalerl.model.adapter import has_adapter, merge, plain_copy
from lightning_scalerl.model.files import is_blank
from lightning_scalerl.model.head import eval_mode
from lightning_scalerl.model.policy import Policy
from lightning_scalerl.rollout import TrainBatch

# Noise on weights as a share of their own size; at least `LEAST_SIZE`, so that zero weights (a bias, half of an
# adapter) move as well. With this much, a layer's effect on a log-probability changes by more than any rounding.
MOVE, LEAST_SIZE = 0.3, 0.05


class TrainedPolicy:
    """Access to the policy's log-probabilities and weights for rank 0, which alone judges and publishes them.

    Where each rank has the whole model, rank 0 helps itself. A sharded one computes on all ranks together: what rank 0
    calls here, within the work that it does for all (`Ranks.share`), the others do as well, by `answer`.

    Args:
        policy: `Policy`, which is called with a batch and keeps its language model in `model`.
        ranks: returns the ranks of the run as they are now.
        load: loads the language model whole, where the policy's weights are in their folder still.
    """

    def __init__(self, policy: Policy, ranks: Callable[[], Ranks], load: Callable[[], nn.Module] | None = None) -> None:
        self.policy = policy
        self._ranks = ranks
        self._load = load
        self._before: dict[str, Tensor] = {}

    def answer(self, request: Sequence[Any]) -> None:
        """Do what rank 0 has asked for, together with it: the name of a method here, and its arguments."""
        name, *arguments = request
        getattr(self, f"_{name}")(*arguments)

    def _together(self, name: str, *arguments: Any) -> Any:
        ranks = self._ranks()
        if ranks.sharded:
            ranks.ask((name, *arguments))
        return getattr(self, f"_{name}")(*arguments)

    def logprobs(self, batch: TrainBatch, precision: Precision | None = None) -> Tensor:
        """Return log-probabilities (R, T) of a batch without gradient and dropout, in the policy's types or others."""
        types = None if precision is None else precision.parameters()
        found: Tensor = self._together("score", replace(batch, groups=[]), types)
        return found

    def weights(self) -> dict[str, Tensor]:
        """Return the model's weights by name, an adapter merged in; of a sharded one whole copies on the host."""
        found: dict[str, Tensor] = self._together("gather")
        return found

    def weight(self, name: str) -> Tensor:
        """Return a weight of the model by its name, without its adapter; of a sharded one a whole copy on the host."""
        found: Tensor = self._together("gather_one", name)
        return found

    def adapter_weights(self) -> dict[str, Tensor]:
        """Return the trained weights of an adapted model by name; of a sharded one whole copies on the host."""
        found: dict[str, Tensor] = self._together("gather_adapter")
        return found

    def whole_model(self, device: torch.device | str = "cpu") -> nn.Module:
        """Return the language model whole, without adapter; on rank 0.

        It is the policy's own, unless that has an adapter, or is or will be sharded: then a copy on the device.
        """
        model: nn.Module = self.policy.model
        if is_blank(model):
            assert self._load is not None
            model = self._load()
        elif has_adapter(model):
            model = plain_copy(model, self.weights())
        elif is_sharded(self.policy):
            weights, sharded = self.weights(), model
            model = type(sharded)(sharded.config)
            model.load_state_dict(weights)
            model.generation_config = sharded.generation_config
        elif self._ranks().sharded:
            model = copy.deepcopy(model)
        else:
            return model
        return model.to(device)

    @contextmanager
    def moved(self, names: Sequence[str]) -> Iterator[None]:
        """Add noise to these weights, each tensor by `MOVE` of its own size, and restore them bit for bit."""
        try:
            self._together("move", list(names))
            yield
        finally:
            self._together("restore")

    @torch.no_grad()
    def _score(self, batch: TrainBatch, types: dict[str, Any] | None) -> Tensor:
        precision = None if types is None else Precision(**types)
        device = next(self.policy.parameters()).device
        with eval_mode(self.policy):
            logprobs: Tensor = self.policy(batch.to(device), precision)[0]
        return logprobs

    def _gather(self) -> dict[str, Any]:
        ranks, state = self._ranks(), dict(self.policy.model.state_dict())
        whole = gathered(state, ranks.leads) if ranks.sharded else state
        return merge(whole, self.policy.model) if has_adapter(self.policy.model) else whole

    @torch.no_grad()
    def _gather_one(self, name: str) -> Tensor | None:
        return gathered({name: self.policy.model.state_dict()[name]}, self._ranks().leads).get(name)

    def _gather_adapter(self) -> dict[str, Any]:
        ranks, model = self._ranks(), self.policy.model
        trained = {name for name, each in model.named_parameters(remove_duplicate=False) if each.requires_grad}
        state = {name: value for name, value in model.state_dict().items() if name in trained}
        return gathered(state, ranks.leads) if ranks.sharded else state

    @torch.no_grad()
    def _move(self, names: Sequence[str]) -> None:
        parameters = dict(self.policy.model.named_parameters())
        noise: torch.Generator | None = None
        for name in names:
            parameter = parameters[name]
            noise = noise or torch.Generator(parameter.device).manual_seed(0)
            self._before[name] = _own(parameter).to("cpu", copy=True)
            size = whole_tensor(parameter.square().mean()).sqrt().clamp(min=LEAST_SIZE)
            drawn = torch.randn(parameter.shape, generator=noise, device=parameter.device).to(parameter.dtype)
            parameter.add_(part_like(drawn, parameter), alpha=MOVE * float(size))

    @torch.no_grad()
    def _restore(self) -> None:
        parameters = dict(self.policy.model.named_parameters())
        for name, values in self._before.items():
            _own(parameters[name]).copy_(values)
        self._before = {}


def _own(parameter: Tensor) -> Tensor:
    """Return the part of a weight that this rank keeps: all of it unless it is sharded."""
    detached = parameter.detach()
    return detached.to_local() if isinstance(detached, DTensor) else detached
