"""Axis `kl`: the KL divergence of the policy from a frozen reference model (the initial model or a teacher).

With the initial model, the KL is a penalty that keeps the policy close to it. With a teacher (`reference`) it is
on-policy distillation: reverse KL on the student's own rollouts (arXiv 2306.13649; Thinking Machines 2025).

How a token's KL is estimated determines the gradient (arXiv 2506.09477). For the sampled token let d = log pi - log
ref, with pi the policy:

    k1     d                 As a term of the loss, its own gradient is 0 on average. Therefore -d becomes an advantage
                             in the run's surrogate and correction (score function).
    k2     d^2 / 2           The gradient is d times that of log pi, which is unbiased for the reverse KL.
    k3     exp(-d) + d - 1   The gradient is (1 - ref / pi) times that of log pi, which is unbiased for the forward KL.
    full   sum over the vocabulary of pi (log pi - log ref)   The reverse KL itself, with its exact gradient.

k1, k2 and k3 assume that the policy itself sampled the tokens. Only k1 corrects for tokens from older weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_scalerl.axes.choice import MAX_LOG_RATIO, DesignChoice
from lightning_scalerl.checks import ADDRESSES, ConfigurationError, not_negative, positive, whole_number

WHERE = ("loss", "reward")
# Estimates of a token's KL from the reference, each with its gradient as a term of the loss.
GRADIENT_BY_ESTIMATE = {
    "k1": "log pi - log reference as a negative advantage, in the run's loss and correction (score function)",
    "k2": "(log pi - log reference) times that of log pi: the reverse KL's at the policy's own samples",
    "k3": "(1 - reference / pi) times that of log pi: the forward KL's at the policy's own samples",
    "full": "the reverse KL's over the whole vocabulary, token by token, exact",
}


def log_ratio(trainer_logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """Return log pi - log reference of each token, within +-`MAX_LOG_RATIO`. Shapes: all (R, T)."""
    return (trainer_logprobs - reference_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def k2(trainer_logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """Return the k2 estimate d^2 / 2 of each token, with d = trainer - reference log-probability.

    Its gradient is unbiased for KL(policy, reference); its value is biased. Shapes: all (R, T); unreduced, with
    gradient. Source: Schulman 2020 (k2); arXiv 2506.09477.
    """
    return log_ratio(trainer_logprobs, reference_logprobs).square() / 2


def k3(trainer_logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """Return the k3 estimate exp(d) - d - 1 of each token, with d = reference - trainer log-probability.

    It is never negative, and unbiased for KL(policy, reference). Shapes: all (R, T); unreduced, with gradient.
    Source: Schulman 2020 (k3); arXiv 2402.03300, eq. 4.
    """
    gap = (reference_logprobs - trainer_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    # For a small gap d the result is about d^2 / 2. Early in training d is tiny, and the rounding error of exp(d) - 1
    # would exceed the result.
    return torch.expm1(gap) - gap


# Estimates that need only log-probabilities of the sampled tokens, not of the whole vocabulary.
SAMPLED_ESTIMATES = {"k1": log_ratio, "k2": k2, "k3": k3}


class KL(DesignChoice):
    """An optional penalty per token: the KL divergence of the policy from a frozen reference model.

    Attributes:
        where: "loss" for a term of the loss, "reward" for a deduction from the token's reward, "" for no KL.
        estimate: "k1", "k2", "k3" or "full" (`GRADIENT_BY_ESTIMATE`).
        reference: path, hub id or address of a teacher; None for the initial model.
        served, served_devices, timeout_s: model, devices and time limit of the server behind an address.
        relative_size: FLOPs per token of the reference in units of the policy's; set once the reference is known.
        models: parameters that name a model. A run's identity has digests of the model's files, not its path.
    """

    axis: ClassVar[str] = "kl"
    neutral: ClassVar[Mapping[str, Any] | None] = {"choice": "NoKL"}
    models: ClassVar[tuple[str, ...]] = ()
    where: str = ""
    estimate: str = "k3"
    reference: str | None = None
    served: str | None = None
    served_devices: int = 1
    timeout_s: float = 120.0
    aggregation: str | None = None
    relative_size: float = 1.0

    @property
    def is_served(self) -> bool:
        """True if the reference is a teacher that a server runs."""
        return self.reference is not None and self.reference.startswith(ADDRESSES)

    @property
    def devices(self) -> int:
        """Number of devices of a served teacher, for device hours; 0 if the reference is in this process."""
        return self.served_devices if self.is_served else 0

    @property
    def reads_vocabulary(self) -> bool:
        """True if the KL needs the reference's probabilities of all tokens, not only of sampled ones."""
        return bool(self.where) and self.estimate == "full"

    def coefficients(self, pass_rates: Tensor) -> Tensor:
        """Return the coefficient of each rollout (R,) from the mean pass rate of its prompt so far (R,)."""
        return torch.zeros_like(pass_rates)


class NoKL(KL):
    """No reference model and no penalty (ScaleRL)."""


class _ActiveKL(KL):
    """Base class of the choices that use the KL, as a term of the loss or as a deduction from token rewards."""

    added: ClassVar[Mapping[str, Any]] = {"reference": None, "estimate": "k3", "served": None, "served_devices": 1}
    models: ClassVar[tuple[str, ...]] = ("reference", "served")
    operational_parameters: ClassVar[tuple[str, ...]] = ("timeout_s",)

    def __init__(
        self,
        where: str,
        aggregation: str | None,
        reference: str | None,
        estimate: str,
        served: str | None,
        served_devices: int,
        timeout_s: float,
    ) -> None:
        for field, value, valid in (("where", where, WHERE), ("estimate", estimate, GRADIENT_BY_ESTIMATE)):
            if value not in valid:
                raise ConfigurationError(f"kl.{field}: {value!r} is unknown; valid: {', '.join(valid)}")
        if reference is not None and (not isinstance(reference, str) or not reference):
            raise ConfigurationError(
                f"kl.reference: {reference!r} names no model; give a folder, a hub id, http://HOST:PORT of a vLLM "
                "server, or null for the model that training began with"
            )
        self.where = where
        self.aggregation = aggregation
        self.reference = reference
        self.estimate = estimate
        self.served = served
        self.served_devices = whole_number("kl.served_devices", served_devices, 0)
        self.timeout_s = positive("kl.timeout_s", timeout_s)
        if self.is_served and served is None:
            raise ConfigurationError(
                f"kl.served: needed with kl.reference={reference}; give the folder or hub id of the model that is "
                "served there, for its tokenizer, its size and this run's identity (its weights are not read)"
            )
        if served is not None and not self.is_served:
            raise ConfigurationError(
                f"kl.served: {served!r}, and kl.reference is no address; give the model as kl.reference, or an "
                "address http://HOST:PORT there"
            )
        if self.is_served and estimate == "full":
            raise ConfigurationError(
                f"kl.estimate: full needs probabilities of the whole vocabulary, and {reference} gives those of given "
                "tokens; choose kl.estimate=k1, or give the model's folder as kl.reference"
            )

    def conflict(self, others: Mapping[str, DesignChoice]) -> str | None:
        """Return a one-line error if the KL is deducted from rewards but advantages are per rollout."""
        if self.where == "reward" and not getattr(others["advantage"], "after_forward", False):
            return (
                "kl.where: 'reward' needs advantages per token (advantage=gae): credit within a group is given before "
                "any log-probability is known; use kl.where=loss"
            )
        return None

    def semantics(self) -> dict[str, Any]:
        """Return the parameters, the gradient of the estimate, and which model the reference is."""
        reference = self.reference or "the model that training began with"
        gradient = (
            GRADIENT_BY_ESTIMATE[self.estimate]
            if self.where == "loss"
            else "none: it is deducted from the token's reward"
        )
        return {**super().semantics(), "gradient": gradient, "reference": f"{reference}, frozen"}


class FixedKL(_ActiveKL):
    """KL penalty or distillation with the same coefficient for every token.

    Args:
        coefficient: beta. As a penalty 0.05 to 0.1 for small models, 0.01 to 0.05 for large ones; 1 to distil.
        where: "loss" for a term of the loss, "reward" for a deduction from each token's reward.
        aggregation: name of the term's aggregation (with "loss"); None for the one of axis `aggregation`.
        reference: a teacher: a folder, a hub id, or `http://HOST:PORT` of a vLLM server; None for the initial model.
        estimate: "k1", "k2", "k3" or "full"; their gradients are in the docstring of this module.
        served: folder or hub id of the model that the server runs; its weights are not read here.
        served_devices: devices of that server, which count in the run's device hours.
        timeout_s: time limit of one request to the server in seconds, including retries.
    """

    def __init__(
        self,
        coefficient: float = 0.05,
        where: str = "loss",
        aggregation: str | None = None,
        reference: str | None = None,
        estimate: str = "k3",
        served: str | None = None,
        served_devices: int = 1,
        timeout_s: float = 120.0,
    ) -> None:
        super().__init__(where, aggregation, reference, estimate, served, served_devices, timeout_s)
        self.coefficient = not_negative("kl.coefficient", coefficient)

    def coefficients(self, pass_rates: Tensor) -> Tensor:
        """Return the same coefficient for every rollout, (R,)."""
        return torch.full_like(pass_rates, self.coefficient)


class KLByDifficulty(_ActiveKL):
    """KL penalty that is larger on easy prompts than on hard ones: linear in the prompt's pass rate so far.

    Args:
        easy: coefficient at a pass rate of 1.
        hard: coefficient at a pass rate of 0.
        where, aggregation, reference, estimate, served, served_devices, timeout_s: as `FixedKL`.
    """

    def __init__(
        self,
        easy: float = 0.1,
        hard: float = 0.01,
        where: str = "loss",
        aggregation: str | None = None,
        reference: str | None = None,
        estimate: str = "k3",
        served: str | None = None,
        served_devices: int = 1,
        timeout_s: float = 120.0,
    ) -> None:
        super().__init__(where, aggregation, reference, estimate, served, served_devices, timeout_s)
        self.easy = not_negative("kl.easy", easy)
        self.hard = not_negative("kl.hard", hard)

    def coefficients(self, pass_rates: Tensor) -> Tensor:
        """Return coefficients (R,) between `hard` and `easy`, linear in the pass rate."""
        return self.hard + (self.easy - self.hard) * pass_rates
