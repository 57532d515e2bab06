"""Access of rank 0 to the trained policy between passes: to score rollouts, publish weights, and perturb weights."""

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
from lightning_scalerl.distributed.sharded import gather_state, is_sharded, shard_like, whole_tensor
from lightning_scalerl.model.adapter import has_adapter, merge, merged_copy
from lightning_scalerl.model.files import has_no_data
from lightning_scalerl.model.head import eval_mode
from lightning_scalerl.model.policy import Policy
from lightning_scalerl.rollouts.rollout import TrainBatch

# `perturbed` adds noise to weights to test whether a generator follows them. The noise's standard deviation is
# `RELATIVE_NOISE` times the weights' root mean square (RMS), so that noise on one layer changes log-probabilities by
# more than rounding does. An RMS below `MIN_RMS` counts as `MIN_RMS`, so that zero weights (such as biases) change too.
RELATIVE_NOISE, MIN_RMS = 0.3, 0.05


class TrainedPolicy:
    """Gives rank 0 the policy's log-probabilities and weights; other ranks do not use them.

    If each rank has the whole model, rank 0 works alone. A sharded model needs all ranks: while rank 0 calls methods of
    this class during `Ranks.share`, the other ranks make the same calls in `answer`.

    Args:
        policy: the `Policy`, whose language model is in `policy.model`.
        ranks: returns the current ranks of the run.
        load: loads the whole language model. Used as long as the policy's weights have not been read from their folder.
    """

    def __init__(self, policy: Policy, ranks: Callable[[], Ranks], load: Callable[[], nn.Module] | None = None) -> None:
        self.policy = policy
        self._ranks = ranks
        self._load = load
        self._saved_parts: dict[str, Tensor] = {}

    def answer(self, request: Sequence[Any]) -> None:
        """Make the call that rank 0 makes. `request` is a private method's name, without `_`, and its arguments."""
        name, *arguments = request
        getattr(self, f"_{name}")(*arguments)

    def _on_all_ranks(self, name: str, *arguments: Any) -> Any:
        """Call a private method on this rank and, with a sharded model, on all other ranks as well."""
        ranks = self._ranks()
        if ranks.sharded:
            ranks.ask((name, *arguments))
        return getattr(self, f"_{name}")(*arguments)

    def logprobs(self, batch: TrainBatch, precision: Precision | None = None) -> Tensor:
        """Return log-probabilities (R, T) of a batch without gradient or dropout, in `precision` or the policy's."""
        types = None if precision is None else precision.parameters()
        # The groups are not needed for scoring, and would be sent to the other ranks.
        logprobs: Tensor = self._on_all_ranks("score", replace(batch, groups=[]), types)
        return logprobs

    def weights(self) -> dict[str, Tensor]:
        """Return the model's weights by name, with an adapter merged; whole copies on the host if it is sharded."""
        weights: dict[str, Tensor] = self._on_all_ranks("gather")
        return weights

    def weight(self, name: str) -> Tensor:
        """Return one weight by name, without merging an adapter; a whole copy on the host if the model is sharded."""
        weight: Tensor = self._on_all_ranks("gather_one", name)
        return weight

    def adapter_weights(self) -> dict[str, Tensor]:
        """Return the trained weights of an adapted model by name; whole copies on the host if it is sharded."""
        weights: dict[str, Tensor] = self._on_all_ranks("gather_adapter")
        return weights

    def whole_model(self, device: torch.device | str = "cpu") -> nn.Module:
        """Return the whole language model without adapter, on rank 0.

        This is the policy's own model, or a copy on `device` if that model has an adapter or is (or will be) sharded.
        """
        model: nn.Module = self.policy.model
        if has_no_data(model):  # its weights have not been read yet
            assert self._load is not None
            model = self._load()
        elif has_adapter(model):
            model = merged_copy(model, self.weights())
        elif is_sharded(self.policy):
            weights, sharded = self.weights(), model
            model = type(sharded)(sharded.config)
            model.load_state_dict(weights)
            model.generation_config = sharded.generation_config
        elif self._ranks().sharded:  # the policy's own model is about to be sharded
            model = copy.deepcopy(model)
        else:
            return model
        return model.to(device)

    @contextmanager
    def perturbed(self, names: Sequence[str]) -> Iterator[None]:
        """Add noise to these weights for the `with` block, then restore them bit for bit."""
        try:
            self._on_all_ranks("perturb", list(names))
            yield
        finally:
            self._on_all_ranks("restore")

    @torch.no_grad()
    def _score(self, batch: TrainBatch, types: dict[str, Any] | None) -> Tensor:
        precision = None if types is None else Precision(**types)
        device = next(self.policy.parameters()).device
        with eval_mode(self.policy):
            logprobs: Tensor = self.policy(batch.to(device), precision)[0]
        return logprobs

    def _gather(self) -> dict[str, Any]:
        ranks, state = self._ranks(), dict(self.policy.model.state_dict())
        whole = gather_state(state, ranks.leads) if ranks.sharded else state
        return merge(whole, self.policy.model) if has_adapter(self.policy.model) else whole

    @torch.no_grad()
    def _gather_one(self, name: str) -> Tensor | None:
        return gather_state({name: self.policy.model.state_dict()[name]}, self._ranks().leads).get(name)

    def _gather_adapter(self) -> dict[str, Any]:
        ranks, model = self._ranks(), self.policy.model
        parameters = model.named_parameters(remove_duplicate=False)
        trained = {name for name, parameter in parameters if parameter.requires_grad}
        state = {name: value for name, value in model.state_dict().items() if name in trained}
        return gather_state(state, ranks.leads) if ranks.sharded else state

    @torch.no_grad()
    def _perturb(self, names: Sequence[str]) -> None:
        parameters = dict(self.policy.model.named_parameters())
        noise: torch.Generator | None = None
        for name in names:
            parameter = parameters[name]
            noise = noise or torch.Generator(parameter.device).manual_seed(0)
            # Each rank saves only its own part, on the host.
            self._saved_parts[name] = _local_part(parameter).to("cpu", copy=True)
            rms = whole_tensor(parameter.square().mean()).sqrt().clamp(min=MIN_RMS)
            # Every rank draws noise for the whole tensor with one seed, so that the ranks' parts fit together.
            noise_values = torch.randn(parameter.shape, generator=noise, device=parameter.device).to(parameter.dtype)
            parameter.add_(shard_like(noise_values, parameter), alpha=RELATIVE_NOISE * float(rms))

    @torch.no_grad()
    def _restore(self) -> None:
        parameters = dict(self.policy.model.named_parameters())
        for name, values in self._saved_parts.items():
            _local_part(parameters[name]).copy_(values)
        self._saved_parts = {}


def _local_part(parameter: Tensor) -> Tensor:
    """Return this rank's part of a weight, which is all of it unless the weight is sharded."""
    detached = parameter.detach()
    return detached.to_local() if isinstance(detached, DTensor) else detached
