"""Generator that samples with a vLLM engine in this process, which steps only on request.

A step samples one token for every rollout that has a slot, as with any other generator. Weights change between two
steps. Rollouts that were paused, saved or interrupted continue as new requests after their existing tokens, which keep
the log-probabilities and versions they were sampled with.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from itertools import count
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lightning_scalerl.axes.precision import Precision
from lightning_scalerl.checks import ConfigurationError, whole_number
from lightning_scalerl.generator.base import SamplingSettings, StepReport, set_aside
from lightning_scalerl.generator.vllm.engine import default_cache_gib, load_weights, meta_model, new_engine
from lightning_scalerl.generator.vllm.rollouts import ActiveRollout, Computed, StepEnds, VLLMBookkeeping, report
from lightning_scalerl.model.head import text_config
from lightning_scalerl.model.windows import attention_windows

# Number of scoring requests that may run in addition to the slots; they only return log-probabilities.
SCORING = 8


class VLLMGenerator(VLLMBookkeeping):
    """Generator that samples rollouts with a vLLM engine in this process.

    Args:
        model: the trainer's model; the engine is built for it and gets its weights.
        precision: dtypes of the engine's weights and of its head.
        sampling: sampling settings.
        slots: number of rollouts that decode together.
        cache_gib: memory for keys and values, in GiB; None for twice the need of all slots at full length, at most 4.

    Raises:
        ConfigurationError: vLLM is unusable, cannot run the model, or has too little memory (`engine`).
    """

    # Settings that do not change results and so are not part of a run's identity.
    operational_parameters: ClassVar[tuple[str, ...]] = ("cache_gib",)

    def __init__(
        self,
        model: nn.Module,
        precision: Precision,
        sampling: SamplingSettings,
        *,
        slots: int,
        cache_gib: float | None = None,
    ) -> None:
        whole_number("generator.slots", slots)
        if cache_gib is not None and not cache_gib > 0:
            raise ConfigurationError(f"generator.cache_gib: {cache_gib!r} must be above 0, or null")
        capacity = sampling.capacity + 1  # scoring samples one token after the sequence
        if cache_gib is None:
            cache_gib = default_cache_gib(model, precision.policy_dtype, slots, capacity)
        self._model = meta_model(model)
        self._dtype = precision.policy_dtype
        self._engine = new_engine(model, precision, slots=slots + SCORING, capacity=capacity, cache_gib=cache_gib)
        super().__init__(sampling, slots, int(text_config(model).vocab_size))
        self._names = (f"r{number}" for number in count())
        self._running: dict[str, ActiveRollout] = {}
        self._scored: dict[str, Any] = {}
        self._windows = attention_windows(text_config(model))
        self.publish(dict(model.state_dict()), 0)

    # --- the protocol of a generator ---------------------------------------------------------------------

    def step(self) -> StepReport:
        """Sample one token for every rollout that has a slot, and return the rollouts that ended."""
        return self._report_queue.popleft() if self._report_queue else self._advance()

    def publish(self, weights: dict[str, Tensor], version: int, recompute_kv: bool = False) -> None:
        """Use new weights from the next token on.

        Rollouts in flight keep their stale keys and values, unless `recompute_kv` recomputes them.
        """
        load_weights(self._engine, self._model, weights)
        # Keep a copy for checkpoints, evaluations and restarts: the engine's copy is packed for its kernels.
        self._weights = {
            name: tensor.detach().to("cpu", self._dtype if tensor.is_floating_point() else tensor.dtype, copy=True)
            for name, tensor in weights.items()
        }
        self._version = version
        self._engine.set_weight_version(str(version))
        # Restart rollouts without a token, so that the new weights also compute the keys and values of their prompts.
        self._restart([name for name, active in self._running.items() if not active.computed])
        if recompute_kv:
            # Loading weights does not clear the caches, so drop the keys and values of older weights here.
            self._engine.reset_prefix_cache(reset_running_requests=True)
            for active in self._running.values():
                if active.computed:
                    self._unreported.add(0, len(active.sequence), self._windows)
        elif not self._running:
            self._engine.reset_prefix_cache()

    def score(self, prompt_tokens: Sequence[int], tokens: Sequence[int]) -> Tensor:
        """Return log-probabilities (T,) of a completion under the weights in use, by one forward pass."""
        from vllm import SamplingParams

        name = next(self._names)
        parameters = SamplingParams(max_tokens=1, prompt_logprobs=0, temperature=1.0, detokenize=False)
        self._scored[name] = None
        self._engine.add_request(name, {"prompt_token_ids": [*prompt_tokens, *tokens]}, parameters)
        while self._scored[name] is None:
            self._report_queue.append(self._advance())
        entries = self._scored.pop(name)[len(prompt_tokens) :]
        logprobs = [entry[token].logprob for entry, token in zip(entries, tokens, strict=True)]
        return torch.tensor(logprobs, dtype=torch.float32)

    def aside(self) -> AbstractContextManager[None]:
        """Pause the rollouts in flight while the context is open, then resume them with the earlier weights."""
        return self._keep_reports(set_aside(self, self.clear))

    def close(self) -> None:
        """Release the engine's memory; everything in flight is kept for `state_dict`."""
        if self._closed is None:
            self._closed = self.state_dict()
            self.clear()
            self._engine.engine_core.shutdown()
            del self._engine

    # --- steps -------------------------------------------------------------------------------------------

    def _advance(self) -> StepReport:
        """Start rollouts that have a slot, take one step of the engine, and report its results."""
        while self._waiting and len(self._running) < self._slots:
            self._start(self._waiting.popleft())
        ended = StepEnds()
        prefill, self._unreported = self._unreported, Computed()
        decoded = Computed()
        prefilled = 0
        for output in self._engine.step():
            if output.request_id in self._scored:
                if output.finished:
                    self._scored[output.request_id] = output.prompt_logprobs
                continue
            if output.request_id not in self._running:  # a stop text ended the request in the previous step
                continue
            active = self._running[output.request_id]
            (completion,) = output.outputs
            length = len(active.sequence)
            # The first token of a request comes from its prefill.
            if completion.token_ids and not active.computed:
                prefill.add(min(output.num_cached_tokens or 0, length), length, self._windows)
                prefilled += 1
            elif completion.token_ids:
                decoded.add(length - 1, length, self._windows)
            active.computed = length
            tokens = list(completion.token_ids)
            logprobs = (entry[token].logprob for entry, token in zip(completion.logprobs or (), tokens, strict=True))
            active.append(tokens, logprobs, self._version)
            reason = completion.finish_reason
            if tokens and self._has_stop_text(active):
                if reason is None:
                    self._engine.abort_request([output.request_id])
                reason = "stop"
            if reason is not None:
                del self._running[output.request_id]
                if not self._turn_ends(active, reason, ended):
                    self._start(active)
        return report(ended, prefill, decoded, prefilled)

    def _start(self, active: ActiveRollout) -> None:
        """Request a rollout's next tokens, up to its interruption point or the limit of its turn."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        parameters = SamplingParams(**self._sampling_parameters(active), output_kind=RequestOutputKind.DELTA)
        name = next(self._names)
        active.computed = 0
        self._running[name] = active
        # The salt keeps vLLM's prefix cache from sharing keys and values between versions of the weights.
        prompt = {"prompt_token_ids": active.sequence, "cache_salt": str(self._version)}
        self._engine.add_request(name, prompt, parameters)

    def _running_rollouts(self) -> list[ActiveRollout]:
        return list(self._running.values())

    def _restart(self, names: Sequence[str]) -> None:
        """Replace running requests by new ones for the same rollouts."""
        if names:
            self._engine.abort_request(list(names))
        for active in [self._running.pop(name) for name in names]:
            self._start(active)

    # --- state -------------------------------------------------------------------------------------------

    def clear(self) -> None:
        """Drop everything in flight."""
        self._engine.abort_request([*self._running, *self._scored])
        self._running.clear()
        self._waiting.clear()
        self._between_turns.clear()
        self._scored.clear()
        self._report_queue.clear()
        self._unreported = Computed()

    def state_dict(self) -> dict[str, Any]:
        """Return everything in flight, with the weights; keys and values are recomputed on resuming."""
        if self._closed is not None:
            return self._closed
        return self._state()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume the rollouts with the tokens they had."""
        self.clear()
        self.publish(state["weights"], state["version"])
        self._restore(state)
