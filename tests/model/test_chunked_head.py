"""A head computed in chunks: values and gradients of the whole head, with one chunk of logits alive at a time."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_scalerl.measure.memory import LiveBytes
from lightning_scalerl.model.chunked_head import Scaling, chunked_scores
from lightning_scalerl.model.head import head_logits, scaling_of

TOKENS, VOCABULARY, WIDTH = 23, 37, 16


def whole_scores(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    model: Any,
    temperature: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    logprobs = (head_logits(model, hidden, weight, bias, dtype) / temperature).log_softmax(-1)
    return logprobs.gather(-1, targets.unsqueeze(-1)).squeeze(-1), -(logprobs.exp() * logprobs).sum(-1)


@pytest.mark.parametrize("entropy_gradient", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize(
    "config", [{}, {"logit_scale": 0.5}, {"logits_scaling": 4.0}, {"final_logit_softcapping": 2.0, "logit_scale": 3.0}]
)
def test_chunks_give_values_and_gradients_of_the_whole_head(
    config: dict[str, float], temperature: float, with_bias: bool, entropy_gradient: bool
) -> None:
    model: Any = SimpleNamespace(config=SimpleNamespace(**config))
    rng = torch.Generator().manual_seed(0)
    inputs = [torch.randn(TOKENS, WIDTH, generator=rng), 0.25 * torch.randn(VOCABULARY, WIDTH, generator=rng)]
    inputs += [torch.randn(VOCABULARY, generator=rng)] if with_bias else []
    targets = torch.randint(VOCABULARY, (TOKENS,), generator=rng)
    token_weights = torch.randn(2, TOKENS, generator=rng)
    results = []
    for chunk in (None, 5, 1, 100):
        hidden, weight, *optional_bias = (tensor.clone().requires_grad_() for tensor in inputs)
        bias = optional_bias[0] if optional_bias else None
        if chunk is None:
            logprobs, entropies = whole_scores(hidden, weight, bias, targets, model, temperature, torch.float32)
        else:
            scaling = scaling_of(model, temperature)
            logprobs, entropies = chunked_scores(
                hidden, weight, bias, targets, scaling, torch.float32, chunk, entropy_gradient
            )
            assert entropies.requires_grad == entropy_gradient
        loss = token_weights[0] @ logprobs + (token_weights[1] @ entropies if entropy_gradient else 0)
        loss.backward()  # type: ignore[no-untyped-call]
        results.append([logprobs, entropies, hidden.grad, weight.grad, *([bias.grad] if bias is not None else [])])
    for chunked in results[1:]:
        for expected, value in zip(results[0], chunked, strict=True):
            assert (value - expected).abs().max() <= 2e-6 * expected.abs().max()


def test_a_frozen_head_and_products_in_bf16() -> None:
    rng = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, WIDTH, generator=rng).bfloat16().requires_grad_()
    weight, targets = torch.randn(VOCABULARY, WIDTH, generator=rng), torch.arange(TOKENS)
    logprobs, _ = chunked_scores(hidden, weight, None, targets, Scaling(), torch.bfloat16, 4, False)
    logprobs.sum().backward()  # type: ignore[no-untyped-call]
    assert weight.grad is None and hidden.grad is not None and hidden.grad.dtype == torch.bfloat16
    reference = hidden.detach().requires_grad_()
    model: Any = SimpleNamespace(config=SimpleNamespace())
    expected, _ = whole_scores(reference, weight, None, targets, model, 1.0, torch.bfloat16)
    expected.sum().backward()  # type: ignore[no-untyped-call]
    assert reference.grad is not None
    torch.testing.assert_close(logprobs, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(hidden.grad, reference.grad, rtol=2e-2, atol=2e-2)


def test_one_chunk_of_logits_is_alive() -> None:
    """The peak is at most 1.2 times inputs, weights, gradients and one chunk. `benchmarks/` has a realistic size."""
    tokens, vocabulary, width, chunk = 1024, 19_000, 128, 128
    with FakeTensorMode():
        hidden = torch.zeros(tokens, width, requires_grad=True)
        weight = torch.zeros(vocabulary, width, requires_grad=True)
        live = LiveBytes()
        with live:
            live.watch(hidden)
            live.watch(weight)
            logprobs, _ = chunked_scores(
                hidden, weight, None, torch.zeros(tokens, dtype=torch.int64), Scaling(), torch.float32, chunk, False
            )
            logprobs.sum().backward()  # type: ignore[no-untyped-call]
    needed = 4 * (2 * tokens * width + 2 * vocabulary * width + chunk * vocabulary)
    assert needed <= live.peak <= 1.2 * needed
