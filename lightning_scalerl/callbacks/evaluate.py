"""Evaluation on fixed held-out prompts: n samples each, the exact current weights, a seed of its own."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from lightning.pytorch import Callback, Trainer

from lightning_scalerl.callbacks.base import without_tips
from lightning_scalerl.checks import whole_number
from lightning_scalerl.generator.base import Generator, GroupRequest
from lightning_scalerl.prompt import Prompt
from lightning_scalerl.rollout import Rollout
from lightning_scalerl.run import Run, run_of
from lightning_scalerl.stream.events import Event
from lightning_scalerl.stream.prompts import PromptSet
from lightning_scalerl.stream.random_streams import EVALUATION_STREAM
from lightning_scalerl.task.base import passes
from lightning_scalerl.verify.grade import Sample, needs_group
from lightning_scalerl.verify.verification import ErrorWatch, RewardError, Verifiers, submit_bundle
from sweeps.run.passes import Passes, digest

# Used where neither a script nor a recipe sets a value.
_DEFAULTS: Mapping[str, Any] = {"every_n_steps": 10, "samples": 4, "seed": 0, "prompts": None}
# Stands for "not given": None already means all prompts. A text, which LightningCLI can write down.
_RECIPES: Literal["recipe"] = "recipe"


class Evaluate(Callback):
    """Pass rate on held-out prompts before the first step, every n steps, and after the last.

    Each evaluation is a validation of Lightning's, so that EarlyStopping and ModelCheckpoint act after it.
    Records `eval/<set>/pass_rate` with its standard error within prompts (the set being fixed), and pass rates
    by difficulty. It is metered apart, on no compute axis, and every recipe sees the same random numbers.

    What is not given is the recipe's (the group `evaluation` of its configuration, which a scale may set), as it is for
    `scalerl train`; without a recipe's it is every 10 steps, 4 samples, seed 0 and all prompts.

    Args:
        every_n_steps: optimizer steps between evaluations.
        samples: completions a prompt.
        seed: of the evaluation's sampling, beside the run's: runs of one seed share these random numbers.
        prompts: at most this many prompts of each set, the first ones; None for all.
    """

    def __init__(
        self,
        every_n_steps: int | None = None,
        samples: int | None = None,
        seed: int | None = None,
        prompts: int | Literal["recipe"] | None = _RECIPES,
    ) -> None:
        without_tips()
        given = {"every_n_steps": every_n_steps, "samples": samples, "seed": seed}
        self._given: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        if prompts != _RECIPES:
            self._given["prompts"] = prompts
        self._taken: dict[str, Any] = {}
        self.follow({})
        self.passes: dict[str, Passes] = {}  # of the last evaluation, by set
        self._last_step = -1

    def follow(self, settings: Mapping[str, Any]) -> None:
        """Take what was not given from a recipe's settings (`Recipe.evaluation`).

        Raises:
            ConfigurationError: a value that cannot be.
        """
        # An attribute that was assigned since the last call counts as given.
        self._given |= {name: getattr(self, name) for name, was in self._taken.items() if getattr(self, name) != was}
        values = {**_DEFAULTS, **{name: settings[name] for name in _DEFAULTS if name in settings}, **self._given}
        self.every_n_steps = whole_number("evaluation.every_n_steps", values["every_n_steps"])
        self.samples = whole_number("evaluation.samples", values["samples"])
        self.seed: int = values["seed"]
        limit = values["prompts"]
        self.prompts = None if limit is None else whole_number("evaluation.prompts", limit)
        self._taken = {name: getattr(self, name) for name in _DEFAULTS}

    @property
    def state_key(self) -> str:
        """Key of the callback's state in a checkpoint."""
        return "evaluate"

    def owes(self, step: int, max_steps: int, last: bool = False) -> bool:
        """Return whether the weights of `step` are to be evaluated and have not been; `last`: no step follows."""
        due = last or step == 0 or step % self.every_n_steps == 0 or step == max_steps
        return due and step != self._last_step

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Evaluate the starting point (R0), or repeat an evaluation that a stop interrupted."""
        self._evaluate(trainer, run_of(pl_module))

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Evaluate after this step if one is due."""
        self._evaluate(trainer, run_of(pl_module))

    def state_dict(self) -> dict[str, Any]:
        """Return the last step evaluated, so that a resumed run does not repeat it."""
        return {"last_step": self._last_step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the last step evaluated from a checkpoint."""
        self._last_step = state_dict["last_step"]

    def _evaluate(self, trainer: Trainer, run: Run) -> None:
        if self.owes(run.completed_steps, trainer.max_steps):
            validate_now(trainer)

    def measure(self, run: Run, in_fit: bool = True) -> dict[str, float]:
        """Evaluate the current weights: pass rates of every held-out set, and their cost. All ranks call it.

        Outside of a fit nothing is remembered of it: a fit that follows makes its own starting evaluation.

        Raises:
            EvaluationStoppedError: the run was asked to stop; nothing is recorded, and the evaluation is still owed.
        """
        metrics = run.ranks.share(lambda: self._measure(run))
        if metrics is None:
            raise EvaluationStoppedError(f"step {run.completed_steps}: asked to stop in the middle of an evaluation")
        if in_fit:
            self._last_step = run.completed_steps
        return metrics

    def _measure(self, run: Run) -> dict[str, float] | None:
        """Evaluate on rank 0 while the others wait. Return None if the run is asked to stop meanwhile."""
        # Training's rollouts in flight are set aside, and the current weights are published first.
        with run.meter.phase("evaluate"), run.generating() as generator, run.verifying() as verifiers:
            generator.publish(run.trained.weights(), run.completed_steps)
            metrics = {"eval/weight_version": float(run.completed_steps)}
            before = run.meter.evaluation_flops
            for number, (name, prompts) in enumerate(run.eval_sets.items()):
                rates = self._pass_rates(name, number, prompts, run, generator, verifiers)
                if rates is None:
                    run.meter.evaluation_thrown_away(before)
                    return None
                metrics |= rates
        return {**metrics, **run.meter.evaluation_metrics()}

    def _pass_rates(
        self, name: str, number: int, sets: PromptSet, run: Run, generator: Generator, verifiers: Verifiers
    ) -> dict[str, float] | None:
        prompts = sets.prompts[: self.prompts]
        # The run's seed too: seeds that shared this noise would bend alike, and a fit takes that for the curve's own
        # shape. Recipes still share it, seed by seed, so that their differences are paired.
        requests = [
            GroupRequest(
                place,
                tuple(tokens),
                self.samples,
                (self.seed, EVALUATION_STREAM, number, place, run.completed_steps, run.seed),
            )
            for place, tokens in enumerate(sets.tokens[: self.prompts])
        ]
        tickets = sampled(run, prompts, requests, generator, verifiers, f"evaluation of {name}")
        if tickets is None:
            return None
        passed = torch.zeros(len(prompts), dtype=torch.float64)
        scored = torch.zeros(len(prompts), dtype=torch.float64)
        watch = ErrorWatch(run.recipe.verify)
        for each in tickets:
            assert each.ticket is not None
            place, outcome = each.place, verifiers.wait(each.ticket)
            watch.observe(prompts[place], outcome)
            if outcome.kind == "score":
                scored[place] += 1
                passed[place] += passes(run.task, outcome)
        if not scored.any():
            why = "; ".join(watch.last_errors) or "its verifier abstains"
            raise RewardError(f"reward: no completion of held-out set {name!r} has a score ({why})")
        return self._rates(name, prompts, passed, scored)

    def _rates(
        self, name: str, prompts: Sequence[Prompt], passed: torch.Tensor, scored: torch.Tensor
    ) -> dict[str, float]:
        """Return pass rates over prompts with a score; an ungraded completion counts as not sampled."""
        left = torch.nonzero(scored).flatten().tolist()
        rates = passed[left] / scored[left]
        asked = digest((prompt.text, prompt.answer) for prompt in prompts)
        counts = (tuple(map(int, each.tolist())) for each in (passed, scored))
        self.passes[name] = Passes(asked, *counts)
        metrics = {
            f"eval/{name}/pass_rate": float(rates.mean()),
            f"eval/{name}/pass_rate_se": standard_error(rates, self.samples, scored[left]),
        }
        if (missing := len(prompts) * self.samples - int(scored.sum())) > 0:
            metrics[f"eval/{name}/ungraded"] = missing / (len(prompts) * self.samples)
        for difficulty in sorted({prompt.difficulty for prompt in prompts} - {""}):
            chosen = [number for number, place in enumerate(left) if prompts[place].difficulty == difficulty]
            if chosen:
                metrics[f"eval/{name}/pass_rate_{difficulty}"] = float(rates[chosen].mean())
        return metrics


@dataclass(frozen=True)
class Submitted:
    """Completion that was sampled: the place of its prompt, and the ticket of its outcome; None if it has none."""

    place: int
    sample: Sample
    ticket: int | None


def sampled(
    run: Run,
    prompts: Sequence[Prompt],
    requests: Sequence[GroupRequest],
    generator: Generator,
    verifiers: Verifiers,
    purpose: str,
    ungraded: Collection[int] = (),
) -> list[Submitted] | None:
    """Sample completions of prompts, and have them graded while others are still sampled.

    Args:
        run: whose generator has its current weights.
        prompts: those that `requests` count by their place.
        requests: a group of completions for each.
        generator, verifiers: of the run.
        purpose: what they are sampled for, for errors.
        ungraded: places of prompts that the task cannot grade.

    Returns:
        What was sampled, in the order in which it is graded; None if the run was asked to stop meanwhile.

    Raises:
        OtherWeightsError: the generator has sampled with other weights than the run's.
    """
    grader, sizes = run.task.grader(), {request.key: request.completions for request in requests}
    for request in requests:
        generator.submit(request)
    submitted: list[Submitted] = []
    ended: dict[int, dict[int, Sample]] = {}
    while generator.in_flight:
        if run.stop_reason is not None:
            verifiers.forget(each.ticket for each in submitted if each.ticket is not None)
            return None
        report = generator.step()
        run.meter.on_event(Event("decode", 0.0, report))
        for finished in report.finished:
            _check_version(purpose, finished.rollout, run.completed_steps)
            place, sample = finished.key, run.sample(prompts[finished.key], finished.rollout)
            group = ended.setdefault(place, {})
            group[finished.index] = sample
            if place in ungraded:
                submitted.append(Submitted(place, sample, None))
                continue
            if not needs_group(grader, prompts[place]):
                bundle = [sample]
            elif len(group) == sizes[place]:
                bundle = [group[index] for index in sorted(group)]
            else:
                continue
            tickets = submit_bundle(verifiers, bundle)
            submitted += [Submitted(place, each, ticket) for each, ticket in zip(bundle, tickets, strict=True)]
    return submitted


class OtherWeightsError(RuntimeError):
    """Point measured on other weights than those of its step: it belongs to no curve."""


def _check_version(purpose: str, rollout: Rollout, version: int) -> None:
    """Check that every token of an evaluation was sampled by the weights under evaluation.

    Raises:
        OtherWeightsError: one is not.
    """
    others = sorted(set(rollout.weight_versions) - {version})
    if others:
        raise OtherWeightsError(
            f"{purpose}: it is of step {version}, and the generator sampled with weights of step "
            f"{others[0]}; nothing is recorded"
        )


def evaluation_of(trainer: Trainer) -> Evaluate | None:
    """Return the run's evaluation callback, or None."""
    return next((each for each in trainer.callbacks if isinstance(each, Evaluate)), None)  # type: ignore[attr-defined]


def owed(trainer: Trainer, step: int, last: bool = False) -> bool:
    """Return whether the weights of `step` are to be evaluated in this run and have not been; see `Evaluate.owes`."""
    evaluation = evaluation_of(trainer)
    return evaluation is not None and evaluation.owes(step, trainer.max_steps, last)


class EvaluationStoppedError(Exception):
    """Raised when an evaluation is broken off because the run is asked to stop."""


def validate_now(trainer: Trainer) -> bool:
    """Run Lightning's validation loop, with all its hooks, inside of `fit`; False if it was broken off."""
    loop = trainer.fit_loop.epoch_loop.val_loop
    connector = trainer._logger_connector
    inside = connector._first_loop_iter
    loop.restarting = False
    trainer.validating = True
    try:
        loop.run()
    except EvaluationStoppedError:
        loop._module_mode.restore(trainer.lightning_module)
        return False
    finally:
        trainer.training = True
        connector._first_loop_iter = inside
    return True


def standard_error(rates: torch.Tensor, samples: int, scored: torch.Tensor | None = None) -> float:
    """Standard error of the mean of per-prompt pass rates (N,), the prompts being fixed.

    Only sampling varies: sum of p (1 - p) / samples over prompts, unbiased for few samples. Never zero: with all
    rates at 0 or 1 it is that of one more pass or failure (add-one smoothing over the whole set).
    """
    count = rates.numel()
    if scored is None or bool((scored == samples).all()):
        spread = (rates * (1 - rates)).sum() / max(1, samples - 1)
    else:
        spread = (rates * (1 - rates) / (scored - 1).clamp(min=1)).sum()
    total = count * samples
    mean = (float(rates.sum()) * samples + 1) / (total + 2)
    floor = mean * (1 - mean) / total if not spread > 0 else 0.0
    return math.sqrt(max(float(spread) / count**2, floor))
