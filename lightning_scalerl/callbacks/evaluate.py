"""Evaluation: fixed held-out prompts, n samples each, the exact current weights, a seed of its own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer

from lightning_scalerl.checks import whole_number
from lightning_scalerl.generator.base import Generator, GroupRequest
from lightning_scalerl.rollout import Prompt
from lightning_scalerl.stream.events import Event
from lightning_scalerl.stream.random_streams import EVALUATION_STREAM
from lightning_scalerl.task.base import score


class Evaluate(Callback):
    """Pass rate on held-out prompts before the first step, every n steps, and after the last.

    Records `eval/<set>/pass_rate` with its standard error within prompts (the set being fixed), and pass rates
    by difficulty. It is metered apart, on no compute axis, and every recipe sees the same random numbers.

    Args:
        every_n_steps: optimizer steps between evaluations.
        samples: completions a prompt.
        seed: of the evaluation's sampling, apart from the run's.
        prompts: at most this many prompts of each set, the first ones; None for all.
    """

    def __init__(self, every_n_steps: int = 10, samples: int = 4, seed: int = 0, prompts: int | None = None) -> None:
        self.every_n_steps = whole_number("evaluation.every_n_steps", every_n_steps)
        self.samples = whole_number("evaluation.samples", samples)
        self.seed = seed
        self.prompts = prompts
        self._generator: Generator | None = None
        self._last_step = -1

    @property
    def state_key(self) -> str:
        """Of its checkpoint state."""
        return "evaluate"

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        """The starting point: R0 as an observation."""
        if pl_module.completed_steps == 0:
            self._evaluate(trainer, pl_module)

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """If it is time."""
        step = pl_module.completed_steps
        if step % self.every_n_steps == 0 or step == trainer.max_steps:
            self._evaluate(trainer, pl_module)

    def state_dict(self) -> dict[str, Any]:
        """The last step evaluated."""
        return {"last_step": self._last_step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from there."""
        self._last_step = state_dict["last_step"]

    def _evaluate(self, trainer: Trainer, module: Any) -> None:
        step = module.completed_steps
        if step != self._last_step:
            module.ranks.share(lambda: self._measure(module, step))
            self._last_step = step

    def _measure(self, module: Any, step: int) -> None:
        """On rank 0; the others wait."""
        with module.meter.phase("evaluate"):
            # A generator of its own: rollouts in flight are not disturbed, and the weights are exactly these.
            if self._generator is None:
                self._generator = module.new_generator()
            self._generator.publish(dict(module.policy.model.state_dict()), step)
            metrics: dict[str, float] = {}
            for number, (name, prompts) in enumerate(module.task.eval_sets().items()):
                metrics |= self._pass_rates(name, number, prompts[: self.prompts], module, step)
        module.record("eval", {**metrics, **module.meter.evaluation_metrics()})

    def _pass_rates(
        self, name: str, number: int, prompts: Sequence[Prompt], module: Any, step: int
    ) -> dict[str, float]:
        generator = self._generator
        assert generator is not None
        for place, prompt in enumerate(prompts):
            key = (self.seed, EVALUATION_STREAM, number, place, step)
            generator.submit(GroupRequest(place, tuple(module.encode(prompt.text)), self.samples, key))
        passes = torch.zeros(len(prompts), dtype=torch.float64)
        while generator.in_flight:
            report = generator.step()
            module.meter.on_event(Event("decode", 0.0, report))
            for finished in report.finished:
                prompt = prompts[finished.key]
                reward = score(module.task, prompt, module.decode(finished.rollout.tokens))
                passes[finished.key] += module.task.is_correct(reward)
        rates = passes / self.samples
        metrics = {
            f"eval/{name}/pass_rate": float(rates.mean()),
            f"eval/{name}/pass_rate_se": standard_error(rates, self.samples),
        }
        for difficulty in sorted({prompt.difficulty for prompt in prompts} - {""}):
            chosen = [place for place, prompt in enumerate(prompts) if prompt.difficulty == difficulty]
            metrics[f"eval/{name}/pass_rate_{difficulty}"] = float(rates[chosen].mean())
        return metrics


def standard_error(rates: torch.Tensor, samples: int) -> float:
    """Standard error of the mean of per-prompt pass rates (N,), the prompts being fixed.

    Only sampling varies: sum of p (1 - p) / samples over prompts, unbiased for few samples. Never zero: with all
    rates at 0 or 1 it is that of one more pass or failure (add-one smoothing over the whole set).
    """
    count = rates.numel()
    spread = (rates * (1 - rates)).sum() / max(1, samples - 1)
    total = count * samples
    mean = (float(rates.sum()) * samples + 1) / (total + 2)
    floor = mean * (1 - mean) / total if not spread > 0 else 0.0
    return math.sqrt(max(float(spread) / count**2, floor))
