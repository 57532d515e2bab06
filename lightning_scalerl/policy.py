"""The policy: any causal language model of transformers, its log-probabilities, and its head's precision."""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_scalerl.axes.precision import Precision
from lightning_scalerl.choice import ConfigurationError
from lightning_scalerl.rollout import TrainBatch

# Above this many logits (tokens x vocabulary) the head works in chunks and recomputes them for the backward
# pass: at a real vocabulary the logits are the largest tensor of the step. 2^27 FP32 logits are 0.5 GB.
MAX_LOGITS = 2**27


def model_path(path: str) -> str:
    """The path itself: what `model=path` builds, as other files in `conf/model/` build one that they make.

    Raises:
        ConfigurationError: it looks like a local path and nothing is there.
    """
    local = path.startswith((".", "/", "~")) or path.count("/") > 1
    if local and not (Path(path).expanduser() / "config.json").is_file():
        raise ConfigurationError(f"model.path: {path!r} holds no config.json; give a folder saved by save_pretrained")
    return str(Path(path).expanduser()) if local else path


def load_model(path: str) -> nn.Module:
    """Load a causal language model in FP32.

    Args:
        path: a local directory in the transformers format, or a hub id.

    Raises:
        ConfigurationError: nothing loadable there.
    """
    from transformers import AutoModelForCausalLM

    try:
        model: nn.Module = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    except (OSError, ValueError) as error:
        raise ConfigurationError(_unusable("model", path, error)) from error
    return model


def load_tokenizer(path: str) -> Any:
    """Load the tokenizer that belongs to the model at `path`.

    Raises:
        ConfigurationError: nothing loadable there, or it has no end-of-sequence token.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise ConfigurationError(_unusable("tokenizer", path, error)) from error
    if tokenizer.eos_token_id is None:
        raise ConfigurationError(f"model.path: the tokenizer of {path} has no eos_token; completions could never end")
    return tokenizer


def _unusable(what: str, path: str, error: Exception) -> str:
    first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    place = "a folder without a" if Path(path).is_dir() else "neither a folder nor a reachable hub id of a"
    return f"model.path: {path!r} is {place} loadable {what} ({first})"


class Policy(nn.Module):
    """A causal language model that returns log-probabilities of given tokens.

    Args:
        model: from `AutoModelForCausalLM`; its weights stay FP32.
        precision: policy type (autocast) and head type.
        temperature: mirrored from sampling, or the importance ratio would not start at 1.
    """

    def __init__(self, model: nn.Module, precision: Precision, temperature: float = 1.0) -> None:
        super().__init__()
        self.model = model
        self.precision = precision
        self.temperature = temperature

    def autocast(self, precision: Precision) -> AbstractContextManager[Any]:
        """The policy type's autocast on this policy's device; nothing for FP32."""
        device = next(self.model.parameters()).device.type
        return torch.autocast(device, dtype=torch.bfloat16, enabled=precision.policy_dtype != torch.float32)

    def forward(self, batch: TrainBatch, precision: Precision | None = None) -> tuple[Tensor, Tensor]:
        """Log-probabilities of the completion's tokens, with gradient, and the entropies, without.

        Shapes: (R, T) each, zero beyond a completion's end. No attention mask is needed: sequences are
        left-aligned and padding stands behind everything it could disturb.

        Args:
            batch: sequences.
            precision: instead of the policy's own (to compare two).
        """
        precision = precision or self.precision
        rollouts, width = batch.generator_logprobs.shape
        with self.autocast(precision):
            hidden = backbone(self.model)(input_ids=batch.tokens[:, :-1], use_cache=False).last_hidden_state
        column = torch.arange(width, device=hidden.device)
        real = column < (batch.lengths - batch.completion_start).unsqueeze(1)
        row = torch.arange(rollouts, device=hidden.device).unsqueeze(1).expand(-1, width)[real]
        position = (batch.completion_start.unsqueeze(1) - 1 + column)[real]
        targets = batch.tokens[row, position + 1]
        logprobs, entropies = self._score(hidden[row, position], targets, precision)
        shape = batch.generator_logprobs
        return (
            torch.zeros_like(shape).masked_scatter(real, logprobs),
            torch.zeros_like(shape).masked_scatter(real, entropies),
        )

    def _score(self, hidden: Tensor, targets: Tensor, precision: Precision) -> tuple[Tensor, Tensor]:
        head = output_head(self.model)
        dtype = precision.head_dtype(precision.fp32_head_trainer)

        def score(states: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
            logits = head_logits(self.model, states, head.weight, head.bias, dtype) / self.temperature
            logprobs = F.log_softmax(logits, dim=-1)
            entropies = -(logprobs.detach().exp() * logprobs.detach()).sum(-1)
            return logprobs.gather(-1, wanted.unsqueeze(-1)).squeeze(-1), entropies

        chunk = max(1, MAX_LOGITS // head.weight.shape[0])
        if hidden.shape[0] <= chunk:
            return score(hidden, targets)
        parts = [
            checkpoint(score, hidden[i : i + chunk], targets[i : i + chunk], use_reentrant=False)
            for i in range(0, hidden.shape[0], chunk)
        ]
        return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])


class GeneratorPolicy:
    """The generator's copy of the policy: weights in the policy's type, the head's in the head's.

    An FP32 head keeps the master weights' bits: a head cast to BF16 and back would not be one. With tied
    embeddings the head gets a copy of its own, refreshed on every `load`.
    """

    def __init__(self, model: nn.Module, precision: Precision) -> None:
        self.dtype = precision.policy_dtype
        self.head_dtype = precision.head_dtype(precision.fp32_head_generator)
        self.model = copy.deepcopy(model).to(self.dtype).eval().requires_grad_(False)
        self._separate_head = self.head_dtype != self.dtype
        self._head_weight: Tensor | None = None
        self._head_bias: Tensor | None = None
        self.load(dict(model.state_dict()))

    @torch.no_grad()
    def load(self, weights: dict[str, Tensor]) -> None:
        """Take over new weights (a state dict of the trainer's model, any type)."""
        own = self.model.state_dict()
        for name, tensor in weights.items():
            own[name].copy_(tensor)
        if self._separate_head:
            head = output_head(self.model)
            name = next(key for key, value in own.items() if value.data_ptr() == head.weight.data_ptr())
            self._head_weight = weights[name].detach().to(self.head_dtype, copy=True)
            self._head_bias = None if head.bias is None else head.bias.to(self.head_dtype)

    def weights(self) -> dict[str, Any]:
        """The copy itself, for a checkpoint taken while rollouts are in flight."""
        return {
            "model": {name: tensor.clone() for name, tensor in self.model.state_dict().items()},
            "head_weight": self._head_weight,
            "head_bias": self._head_bias,
        }

    def load_weights(self, state: dict[str, Any]) -> None:
        """Put back what `weights` gave."""
        self.model.load_state_dict(state["model"])
        # A checkpoint is read to the CPU.
        device = next(self.model.parameters()).device
        self._head_weight, self._head_bias = (
            None if state[name] is None else state[name].to(device) for name in ("head_weight", "head_bias")
        )

    @torch.no_grad()
    def hidden(self, **inputs: Any) -> Tensor:
        """Last hidden states (rows, query length, width)."""
        states: Tensor = backbone(self.model)(**inputs).last_hidden_state
        return states

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """FP32 logits (rows, vocabulary), computed in the head's type."""
        head = output_head(self.model)
        weight = head.weight if self._head_weight is None else self._head_weight
        bias = head.bias if self._head_weight is None else self._head_bias
        return head_logits(self.model, hidden, weight, bias, self.head_dtype)


def backbone(model: nn.Module) -> nn.Module:
    """The model without its head."""
    base: nn.Module = model.base_model  # type: ignore[assignment]
    return base


def output_head(model: nn.Module) -> nn.Linear:
    """The language-model head.

    Raises:
        ConfigurationError: the model has none.
    """
    head = model.get_output_embeddings()  # type: ignore[operator]
    if not isinstance(head, nn.Linear):
        raise ConfigurationError(f"model: {type(model).__name__} has no linear language-model head")
    return head


def head_logits(model: nn.Module, hidden: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Logits in FP32 from hidden states, multiplied in `dtype`, with the scaling some architectures add."""
    with torch.autocast(hidden.device.type, enabled=False):
        logits = F.linear(hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)).float()
    config: Any = model.config
    if getattr(config, "logit_scale", None):  # Cohere
        logits = logits * config.logit_scale
    if getattr(config, "logits_scaling", None):  # Granite
        logits = logits / config.logits_scaling
    if getattr(config, "final_logit_softcapping", None):  # Gemma
        cap = config.final_logit_softcapping
        logits = torch.tanh(logits / cap) * cap
    return logits


@torch.no_grad()
def check_head(model: nn.Module) -> None:
    """Compare our head with the model's own on one short input.

    Raises:
        ConfigurationError: the architecture treats its logits in a way we do not know; training on would
            optimise another distribution than the one the model defines.
    """
    head = output_head(model)
    tokens = torch.arange(4, device=head.weight.device).unsqueeze(0)
    expected = model(input_ids=tokens, use_cache=False).logits.float()
    hidden = backbone(model)(input_ids=tokens, use_cache=False).last_hidden_state
    ours = head_logits(model, hidden, head.weight, head.bias, head.weight.dtype)
    if not torch.allclose(ours, expected, atol=1e-3, rtol=1e-3):
        raise ConfigurationError(
            f"model: {type(model).__name__} post-processes its logits in an unknown way "
            f"(largest difference {(ours - expected).abs().max():.3g}); it is not supported"
        )
