"""Evaluation on fixed held-out prompts: n samples of each, with the current weights and a seed of its own."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any, ClassVar, Literal, cast

import torch
from lightning.pytorch import Callback, Trainer

from lightning_scalerl.callbacks.base import filter_lightning_tips
from lightning_scalerl.callbacks.evaluation_set import EvaluationSet, evaluation_set
from lightning_scalerl.callbacks.run import Run, run_of
from lightning_scalerl.checks import ConfigurationError, whole_number
from lightning_scalerl.compat import lightning as compat
from lightning_scalerl.generator.base import Generator, GroupRequest, StepReport, TurnGenerator
from lightning_scalerl.measure.probe import Scorer, can_score, generator_scores
from lightning_scalerl.rollouts.grade import Sample, needs_group
from lightning_scalerl.rollouts.prompt import Prompt
from lightning_scalerl.rollouts.rollout import Rollout
from lightning_scalerl.stream.events import Event
from lightning_scalerl.stream.prompts import PromptSet
from lightning_scalerl.stream.random_streams import EVALUATION_STREAM
from lightning_scalerl.task.base import Task, passes
from lightning_scalerl.task.beside import TaskWithEvaluationSets
from lightning_scalerl.verify.verification import ErrorWatch, RewardError, Verifiers, submit_bundle
from sweeps.run.passes import Passes, digest

# Largest number of tokens, with padding, in one forward pass over known solutions.
_MAX_SCORED_TOKENS = 8192
# Values that are used if neither the caller nor the recipe sets them.
_DEFAULTS: Mapping[str, Any] = {"every_n_steps": 10, "samples": 4, "seed": 0, "prompts": None}
# Default of `prompts`: use the recipe's value. None would mean all prompts. It is a string so that LightningCLI can
# save it.
_FROM_RECIPE: Literal["recipe"] = "recipe"


class Evaluate(Callback):
    """Callback that measures the pass rate on held-out prompts: before step 1, every n steps, and after the last.

    Each evaluation is a Lightning validation, after which EarlyStopping and ModelCheckpoint act. It records
    `eval/<set>/pass_rate` with its standard error for this fixed set of prompts, pass rates by difficulty, and pass@k
    and maj@k for k = 2, 4, 8, ... up to `samples` (`sweeps.run.pass_at_k`). The compute of evaluations is measured
    separately, and is part of no compute axis.

    Arguments that are not given come from the recipe (its configuration group `evaluation`, which a scale may set), as
    in `scalerl train`. Otherwise the defaults are 10 steps, 4 samples, seed 0 and all prompts.

    Args:
        every_n_steps: optimizer steps between evaluations.
        samples: completions per prompt.
        seed: seed of the evaluation's sampling, combined with the run's seed. Runs in which both are equal use the same
            random numbers.
        prompts: number of prompts of each set to evaluate, from the first on; None for all.
        sets: further held-out sets, of any task, by name: an `EvaluationSet`, a mapping of its arguments, or a task.
            They do not change what a run trains on.
        gold_logprob: whether to record the log-probability of known solutions too, where rows have one. It costs a
            forward pass per prompt, about a fifth of an evaluation with 4 samples.
    """

    # Parameters with these values are left out of identities, so that runs from before a parameter existed keep theirs.
    added: ClassVar[Mapping[str, Any]] = {"sets": {}, "gold_logprob": False}

    def __init__(
        self,
        every_n_steps: int | None = None,
        samples: int | None = None,
        seed: int | None = None,
        prompts: int | Literal["recipe"] | None = _FROM_RECIPE,
        sets: Mapping[str, Any] | None = None,
        gold_logprob: bool = False,
    ) -> None:
        filter_lightning_tips()
        self.gold_logprob = gold_logprob
        self.sets = {name: evaluation_set(name, entry) for name, entry in (sets or {}).items()}
        explicit = {"every_n_steps": every_n_steps, "samples": samples, "seed": seed}
        self._explicit: dict[str, Any] = {name: value for name, value in explicit.items() if value is not None}
        if prompts != _FROM_RECIPE:
            self._explicit["prompts"] = prompts
        self._last_values: dict[str, Any] = {}
        self.follow({})
        self.passes: dict[str, Passes] = {}  # results of the last evaluation, by set
        self.is_last = False  # whether the next evaluation is the run's last, which covers all sets
        self._last_step = -1
        self._evaluated: set[str] = set()  # entries of `sets` evaluated at `_last_step`; "": the task's own sets

    def follow(self, settings: Mapping[str, Any]) -> None:
        """Take the arguments that the caller has left out from a recipe (`Recipe.evaluation`).

        Raises:
            ConfigurationError: a value is invalid.
        """
        # An attribute that a script has changed since the last call counts as given by the caller.
        self._explicit |= {
            name: getattr(self, name) for name, was in self._last_values.items() if getattr(self, name) != was
        }
        values = {**_DEFAULTS, **{name: settings[name] for name in _DEFAULTS if name in settings}, **self._explicit}
        self.every_n_steps = whole_number("evaluation.every_n_steps", values["every_n_steps"])
        self.samples = whole_number("evaluation.samples", values["samples"])
        self.seed: int = values["seed"]
        limit = values["prompts"]
        self.prompts = None if limit is None else whole_number("evaluation.prompts", limit)
        self._last_values = {name: getattr(self, name) for name in _DEFAULTS}

    @property
    def tasks(self) -> dict[str, Task]:
        """Tasks of `sets`, by name of the entry."""
        return {name: one.task for name, one in self.sets.items()}

    def check_context(self, max_new_tokens: int) -> None:
        """Check that no set has a completion limit above the generator's, `max_new_tokens`.

        Raises:
            ConfigurationError: the limit of a set is larger.
        """
        for name, one in self.sets.items():
            if (one.max_new_tokens or 0) > max_new_tokens:
                raise ConfigurationError(
                    f"evaluation.sets.{name}.max_new_tokens: {one.max_new_tokens} is above context.max_new_tokens="
                    f"{max_new_tokens}, for which the generator has room; raise that one"
                )

    @property
    def state_key(self) -> str:
        """Key of this callback's state in a checkpoint."""
        return "evaluate"

    def owes(self, step: int, max_steps: int, last: bool = False) -> bool:
        """Return whether an evaluation of the weights of `step` is due and not made yet. `last`: no step follows."""
        due = self._due(step, last or step >= max_steps)
        return bool(due - self._evaluated if step == self._last_step else due)

    def settings(self, task: Task) -> dict[str, EvaluationSet]:
        """Return the settings of each held-out set of a task. Only temperature and token limit may be None."""
        by_set = dict.fromkeys(task.eval_sets(), EvaluationSet(task))
        if isinstance(task, TaskWithEvaluationSets):
            by_set |= {name: self.sets[entry] for entry, names in task.names.items() for name in names}
        return {
            name: replace(
                one, samples=one.samples or self.samples, every_n_steps=one.every_n_steps or self.every_n_steps
            )
            for name, one in by_set.items()
        }

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Evaluate the initial weights (R0), or repeat an evaluation that a stop has interrupted."""
        self._evaluate(trainer, run_of(pl_module))

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Evaluate after this step if an evaluation is due."""
        self._evaluate(trainer, run_of(pl_module))

    def state_dict(self) -> dict[str, Any]:
        """Return the last evaluated step, so that a resumed run does not repeat it."""
        return {"last_step": self._last_step, "evaluated": sorted(self._evaluated)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the last evaluated step from a checkpoint."""
        self._last_step = state_dict["last_step"]
        # Checkpoints of versions without `sets` lack `evaluated`.
        self._evaluated = set(state_dict.get("evaluated", [""]))

    def _evaluate(self, trainer: Trainer, run: Run) -> None:
        if self.owes(run.completed_steps, trainer.max_steps):
            validate_now(trainer, last=run.completed_steps >= trainer.max_steps)

    def measure(self, run: Run, in_fit: bool = True) -> dict[str, float]:
        """Evaluate the current weights. Return the pass rates of every held-out set, and the cost. All ranks must call
        it.

        Outside of a fit, the step does not count as evaluated, so that a later fit makes its own initial evaluation.

        Raises:
            EvaluationStoppedError: a stop was requested. Nothing is recorded, and the evaluation is still due.
        """
        metrics = run.ranks.share(lambda: self._measure(run, in_fit))
        if metrics is None:
            raise EvaluationStoppedError(f"step {run.completed_steps}: asked to stop in the middle of an evaluation")
        if in_fit:
            self._last_step = run.completed_steps
            self._evaluated = self._due(run.completed_steps, self.is_last)
        return metrics

    def _due(self, step: int, last: bool) -> set[str]:
        """Return the entries of `sets` to evaluate at `step`; "" stands for the task's own sets."""
        intervals = {name: one.every_n_steps or self.every_n_steps for name, one in self.sets.items()}
        return {
            name for name, interval in {"": self.every_n_steps, **intervals}.items() if last or step % interval == 0
        }

    def _measure(self, run: Run, in_fit: bool) -> dict[str, float] | None:
        """Evaluate on rank 0, while the other ranks wait. Return None if a stop is requested meanwhile."""
        # `generating` puts aside the rollouts that training has in flight.
        with run.meter.phase("evaluate"), run.generating() as generator, run.verifying() as verifiers:
            generator.publish(run.trained.weights(), run.completed_steps)
            metrics = {"eval/weight_version": float(run.completed_steps)}
            cost_before = run.meter.evaluation_cost()
            step, settings, self.passes = run.completed_steps, self.settings(run.task), {}
            for number, (name, prompts) in enumerate(run.eval_sets.items()):
                interval = settings[name].every_n_steps or self.every_n_steps
                # A later record of a step replaces an earlier one, so the last evaluation must cover every set.
                if in_fit and not self.is_last and step % interval:
                    continue
                rates = self._pass_rates(name, number, prompts, settings[name], run, generator, verifiers)
                if rates is None:
                    run.meter.discard_evaluation(cost_before)
                    return None
                metrics |= rates | self._gold_logprob(name, prompts, run, generator)
        return {**metrics, **run.meter.evaluation_metrics()}

    def _pass_rates(
        self,
        name: str,
        number: int,
        sets: PromptSet,
        settings: EvaluationSet,
        run: Run,
        generator: Generator,
        verifiers: Verifiers,
    ) -> dict[str, float] | None:
        """Return the metrics of one held-out set; None if a stop is requested.

        Raises:
            RewardError: no completion has a score.
        """
        prompts = sets.prompts[: self.prompts]
        # The random key includes the run's seed. If the noise were the same in all seeds, their curves would have the
        # same bumps, and a fit would take these for the curve's shape. Recipes with the same seed do share the noise,
        # so that their differences are paired. A set of another task is keyed by its name, so that adding a set does
        # not change the random numbers of other sets.
        set_key = number if settings.task is run.task else int.from_bytes(sha256(name.encode()).digest()[:8])
        samples = settings.samples or self.samples
        requests = [
            GroupRequest(
                prompt_index,
                tuple(tokens),
                samples,
                (self.seed, EVALUATION_STREAM, set_key, prompt_index, run.completed_steps, run.seed),
                max_new_tokens=settings.max_new_tokens or 0,
                temperature=settings.temperature,
            )
            for prompt_index, tokens in enumerate(sets.tokens[: self.prompts])
        ]
        tickets = sample_and_submit(run, prompts, requests, generator, verifiers, f"evaluation of {name}")
        if tickets is None:
            return None
        passed = torch.zeros(len(prompts), dtype=torch.float64)
        scored = torch.zeros(len(prompts), dtype=torch.float64)
        wrong_answers: list[Counter[str | None]] = [Counter() for _ in prompts]
        watch = ErrorWatch(run.recipe.verify)
        for submitted in tickets:
            assert submitted.ticket is not None
            prompt_index, outcome = submitted.prompt_index, verifiers.wait(submitted.ticket)
            run.meter.judged(outcome.charges, evaluation=True)
            watch.observe(prompts[prompt_index], outcome)
            if outcome.kind == "score":
                scored[prompt_index] += 1
                is_pass = passes(run.task, outcome)
                passed[prompt_index] += is_pass
                if not is_pass:
                    wrong_answers[prompt_index][outcome.answer] += 1
        if not scored.any():
            why = "; ".join(watch.last_errors) or "its verifier abstains"
            raise RewardError(f"reward: no completion of held-out set {name!r} has a score ({why})")
        metrics = self._rates(name, samples, prompts, passed, scored, wrong_answers)
        # Greedy decoding always gives the same completion, so a binomial error would claim noise that cannot occur.
        return {key: value for key, value in metrics.items() if settings.temperature != 0 or not key.endswith("_se")}

    def _gold_logprob(self, name: str, sets: PromptSet, run: Run, generator: Generator) -> dict[str, float]:
        """Return the mean log-probability (nats) of a token of the known solutions, from forward passes over them.

        Unlike pass rates, it has no sampling noise. It is the mean over prompts of the mean over a solution's tokens.
        Empty if no prompt has a solution that fits into the context, or if the generator cannot compute
        log-probabilities of given tokens.
        """
        if not self.gold_logprob or not can_score(generator):
            return {}
        context, requests = run.recipe.context, []
        max_tokens = context.max_prompt_tokens + context.max_new_tokens
        for prompt, tokens in zip(sets.prompts[: self.prompts], sets.tokens[: self.prompts], strict=True):
            solution = run.encode(prompt.solution) if prompt.solution else []
            if solution and len(tokens) + len(solution) <= max_tokens:
                requests.append((tuple(tokens), tuple(solution)))
        total = 0.0
        longest = max((len(prompt) + len(tokens) for prompt, tokens in requests), default=1)
        batch_size = max(1, _MAX_SCORED_TOKENS // longest)
        for first in range(0, len(requests), batch_size):
            batch = requests[first : first + batch_size]
            scores = generator_scores(cast(Scorer, generator), batch)
            if scores is None:
                return {}
            total += sum(float(logprobs.double().mean()) for logprobs in scores)
            run.meter.on_event(Event("decode", 0.0, _scoring_work(batch)))
        return {f"eval/{name}/gold_logprob": total / len(requests)} if requests else {}

    def _rates(
        self,
        name: str,
        samples: int,
        prompts: Sequence[Prompt],
        passed: torch.Tensor,
        scored: torch.Tensor,
        wrong_answers: Sequence[Counter[str | None]],
    ) -> dict[str, float]:
        """Return pass rates over prompts with a graded completion. Ungraded completions are ignored."""
        graded = torch.nonzero(scored).flatten().tolist()
        rates = passed[graded] / scored[graded]
        prompts_digest = digest((prompt.text, prompt.answer) for prompt in prompts)
        passed_counts, scored_counts = (tuple(map(int, count.tolist())) for count in (passed, scored))
        families = tuple(prompt.family for prompt in prompts)
        self.passes[name] = Passes(
            prompts_digest,
            passed_counts,
            scored_counts,
            _wrong_answers(wrong_answers),
            families if any(families) else None,
        )
        metrics = {
            f"eval/{name}/pass_rate": float(rates.mean()),
            f"eval/{name}/pass_rate_se": standard_error(rates, samples, scored[graded]),
        }
        metrics |= {
            f"eval/{name}/prompts_at_0": float((rates == 0).double().mean()),
            f"eval/{name}/prompts_at_1": float((rates == 1).double().mean()),
        }
        for statistic, (mean, error) in self.passes[name].at_k(samples).items():
            kind, _, k = statistic.partition("@")
            metrics |= {f"eval/{name}/{kind}@{k}": mean, f"eval/{name}/{kind}@{k}_se": error}
        if (missing := len(prompts) * samples - int(scored.sum())) > 0:
            metrics[f"eval/{name}/ungraded"] = missing / (len(prompts) * samples)
        for label in sorted({label for prompt in prompts for label in _labels(prompt)}):
            matching = [number for number, prompt_index in enumerate(graded) if label in _labels(prompts[prompt_index])]
            if matching:
                metrics[f"eval/{name}/pass_rate_{label}"] = float(rates[matching].mean())
        return metrics


def _labels(prompt: Prompt) -> set[str]:
    """Return the labels that split pass rates: a prompt's difficulty, and its environment if there are several."""
    environment = "" if prompt.opening is None else str(prompt.opening[0].get("environment", ""))
    return {prompt.difficulty, environment} - {""}


def _scoring_work(scored: Sequence[tuple[Sequence[int], Sequence[int]]]) -> StepReport:
    """Return a report of the work of scoring pairs of prompt and completion, as if completions were sampled."""
    pairs = [(len(prompt), len(tokens)) for prompt, tokens in scored]
    return StepReport(
        finished=(),
        prefill_tokens=sum(prompt for prompt, _ in pairs),
        prefill_context=sum(prompt * (prompt + 1) // 2 for prompt, _ in pairs),
        decoded_tokens=sum(tokens - 1 for _, tokens in pairs),
        decoded_context=sum((tokens - 1) * (2 * prompt + tokens) // 2 for prompt, tokens in pairs),
        prefilled=len(pairs),
    )


def _wrong_answers(wrong_answers: Sequence[Counter[str | None]]) -> tuple[tuple[int, ...], ...] | None:
    """Return for each prompt how often each wrong answer occurred, the most frequent first.

    Completions without an answer are left out. None if the grader returns no answers, or if no answer was wrong.
    """
    if any(None in answers for answers in wrong_answers) or not any(wrong_answers):
        return None
    return tuple(tuple(count for answer, count in answers.most_common() if answer) for answers in wrong_answers)


@dataclass(frozen=True)
class Submitted:
    """A sampled completion, the index of its prompt, and the ticket for its outcome (None if it is not graded)."""

    prompt_index: int
    sample: Sample
    ticket: int | None


def sample_and_submit(
    run: Run,
    prompts: Sequence[Prompt],
    requests: Sequence[GroupRequest],
    generator: Generator,
    verifiers: Verifiers,
    purpose: str,
    ungraded: Collection[int] = (),
) -> list[Submitted] | None:
    """Sample completions of prompts. Submit each for grading while others are still being sampled.

    Args:
        run: the run. Its generator must have the current weights.
        prompts: the prompts. The key of a request is an index into them.
        requests: for each prompt, a request for a group of completions.
        generator, verifiers: the run's generator and verifiers.
        purpose: what the completions are for, for error messages.
        ungraded: indices of prompts that the task cannot grade.

    Returns:
        The completions in the order of submission; None if a stop was requested meanwhile.

    Raises:
        OtherWeightsError: the generator used weights other than the run's.
    """
    grader, sizes = run.task.grader(), {request.key: request.completions for request in requests}
    conversations = run.conversations(prompts)
    for request in requests:
        generator.submit(request if conversations is None else conversations.request(request))
    submitted: list[Submitted] = []
    # Finished samples by prompt and by index in the group.
    finished_of: dict[int, dict[int, Sample]] = {}
    while generator.in_flight:
        if run.stop_reason is not None:
            verifiers.forget(entry.ticket for entry in submitted if entry.ticket is not None)
            if conversations is not None:
                conversations.clear()
            return None
        report = generator.step()
        run.meter.on_event(Event("decode", 0.0, report))
        if conversations is not None:
            conversations.answer(cast(TurnGenerator, generator), report.waiting)
        for finished in report.finished:
            if conversations is not None:
                conversations.store_record(finished)
            _check_version(purpose, finished.rollout, run.completed_steps)
            prompt_index, sample = finished.key, run.sample(prompts[finished.key], finished.rollout)
            group = finished_of.setdefault(prompt_index, {})
            group[finished.index] = sample
            if prompt_index in ungraded:
                submitted.append(Submitted(prompt_index, sample, None))
                continue
            # Some graders compare the completions of a prompt with each other, and need the whole group.
            if not needs_group(grader, prompts[prompt_index]):
                bundle = [sample]
            elif len(group) == sizes[prompt_index]:
                bundle = [group[index] for index in sorted(group)]
            else:
                continue
            tickets = submit_bundle(verifiers, bundle)
            submitted += [
                Submitted(prompt_index, member, ticket) for member, ticket in zip(bundle, tickets, strict=True)
            ]
    return submitted


class OtherWeightsError(RuntimeError):
    """Raised if an evaluation of one step used the weights of another: it must not become a point of a curve."""


def _check_version(purpose: str, rollout: Rollout, version: int) -> None:
    """Raise OtherWeightsError unless the current weights sampled every token of a rollout."""
    other_versions = sorted(set(rollout.weight_versions) - {version})
    if other_versions:
        raise OtherWeightsError(
            f"{purpose}: it is of step {version}, and the generator sampled with weights of step "
            f"{other_versions[0]}; nothing is recorded"
        )


def evaluation_of(trainer: Trainer) -> Evaluate | None:
    """Return the Trainer's evaluation callback, or None."""
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    return next((callback for callback in callbacks if isinstance(callback, Evaluate)), None)


def evaluation_due(trainer: Trainer, step: int, last: bool = False) -> bool:
    """Return whether an evaluation of the weights of `step` is due and not made yet; see `Evaluate.owes`."""
    evaluation = evaluation_of(trainer)
    return evaluation is not None and evaluation.owes(step, trainer.max_steps, last)


class EvaluationStoppedError(Exception):
    """Raised to end an evaluation because a stop of the run is requested."""


def validate_now(trainer: Trainer, last: bool) -> bool:
    """Run Lightning's validation loop with all its hooks, inside `fit`. Return False if it was stopped early.

    Args:
        trainer: the Trainer.
        last: whether no step follows, so that all sets are evaluated.
    """
    evaluation = evaluation_of(trainer)
    assert evaluation is not None
    evaluation.is_last = last
    loop = trainer.fit_loop.epoch_loop.val_loop
    loop.restarting = False
    trainer.validating = True
    try:
        with compat.keep_first_iteration(trainer):
            loop.run()
    except EvaluationStoppedError:
        compat.restore_modes(loop, trainer.lightning_module)
        return False
    finally:
        trainer.training = True
    return True


def standard_error(rates: torch.Tensor, samples: int, scored: torch.Tensor | None = None) -> float:
    """Return the standard error of the mean over prompts of pass rates (N,), for this fixed set of prompts.

    It measures only the noise of sampling. Its square is the sum over prompts of unbiased estimates of p (1 - p) /
    samples, divided by N^2. It is never zero: if all rates are 0 or 1, one pass and one failure are added to the whole
    set.

    Args:
        rates: pass rates (N,).
        samples: completions per prompt.
        scored: number of graded completions of each prompt (N,); None if it is always `samples`.
    """
    count = rates.numel()
    # Bessel's correction: division by samples - 1 makes the estimate of each p (1 - p) unbiased.
    if scored is None or bool((scored == samples).all()):
        variance_sum = (rates * (1 - rates)).sum() / max(1, samples - 1)
    else:
        variance_sum = (rates * (1 - rates) / (scored - 1).clamp(min=1)).sum()
    total = count * samples
    mean = (float(rates.sum()) * samples + 1) / (total + 2)
    smallest_variance = mean * (1 - mean) / total if not variance_sum > 0 else 0.0
    return math.sqrt(max(float(variance_sum) / count**2, smallest_variance))
