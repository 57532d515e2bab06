"""Sampling and grading of completions: prompts as the model reads them, a generator, verifiers.

The input is a `Stage`. The results are prompts that fit the context, and a generator and verifiers, for the data path
of a fit or for an evaluation.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from lightning_scalerl.checks import ConfigurationError
from lightning_scalerl.choices import Choices
from lightning_scalerl.distributed.start import free_devices
from lightning_scalerl.environment.pool import EnvironmentPool
from lightning_scalerl.generator.base import EndOfThinking, Generator, SamplingSettings
from lightning_scalerl.generator.fleet.fleet import Fleet
from lightning_scalerl.model.chat import Rendering, StopTexts
from lightning_scalerl.recipe import Recipe
from lightning_scalerl.rollouts.grade import Sample, check_services
from lightning_scalerl.rollouts.prompt import Prompt
from lightning_scalerl.rollouts.rollout import Rollout
from lightning_scalerl.session.models import Models
from lightning_scalerl.stream.conversations import Conversations, Dialogue, Limits
from lightning_scalerl.stream.drivers import Driver, Live
from lightning_scalerl.stream.prompts import PromptSet, fitting
from lightning_scalerl.task.base import Task, passes
from lightning_scalerl.verify.settled import SettledFirst
from lightning_scalerl.verify.verification import Verifiers, check_verifiers

TRAINING = "training"


@dataclass(frozen=True)
class Stage:
    """Inputs of a fit, validation or prediction, once its choices are resolved and its models are placed.

    `local_ranks` is the number of ranks that train on this node. `held_out` is the maximum number of prompts evaluated
    per held-out set, None for all.
    """

    recipe: Recipe
    choices: Choices
    models: Models
    task: Task
    seed: int
    local_ranks: int
    held_out: int | None


class Sampling:
    """Prompts of a stage, rendered and tokenized, with access to a generator and verifiers for them.

    The length of every prompt is checked here. Otherwise a prompt that is too long would end the run when it is drawn,
    and again at every resume.

    Args:
        stage: choices and models of the stage.
        training: whether training prompts are needed too, or only held-out ones.

    Raises:
        ConfigurationError: prompts do not fit into the context, or cannot be rendered.
    """

    def __init__(self, stage: Stage, *, training: bool) -> None:
        self.stage = stage
        # The fit's driver, set once it is built. Evaluations use its generator, because no other one has current
        # weights.
        self.driver: Driver | None = None
        sets = {TRAINING: stage.task.train_prompts()} if training else {}
        sets |= {f"held-out ({name})": prompts[: stage.held_out] for name, prompts in stage.task.eval_sets().items()}
        context, models = stage.recipe.context, stage.models
        end_of_thinking = stage.choices.length_control.end_of_thinking
        self.rendering = Rendering(models.tokenizer, stage.recipe.chat, models.stop_tokens, end_of_thinking)
        settings = stage.recipe.environment
        self._pool: EnvironmentPool | None = None  # used by evaluations
        self.dialogue: Dialogue | None = None
        try:
            if settings.acts:
                self._pool = settings.pool()
                self.dialogue = Dialogue(settings, self.rendering, self._pool, sets)
                sets = self.dialogue.prompts
            tokens = self.rendering.encode_all(sets)
            _check_rows(stage, tokens)
            self.sets = fitting(sets, tokens, context.max_prompt_tokens, context.too_long)
        except BaseException:
            self.close()
            raise

    @property
    def eval_sets(self) -> dict[str, PromptSet]:
        """Held-out prompts for evaluation, by name of the set."""
        return {name: self.sets[f"held-out ({name})"] for name in self.stage.task.eval_sets()}

    @property
    def notes(self) -> list[str]:
        """Lines for the user on the prompts of a fit: their lengths, and the first prompt as the model reads it."""
        prompts = self.sets[TRAINING].prompts
        shown = self.rendering.text(prompts[0])
        return [
            *(prompt_set.describe(name) for name, prompt_set in self.sets.items()),
            f"prompts: {self.rendering.description}; the first prompt as the model reads it:",
            *(f"  | {line}" for line in (shown if len(shown) < 2000 else f"{shown[:2000]} ...").splitlines()),
            *self.rendering.notes(prompts),
            *self.stage.task.notes(),
        ]

    @contextmanager
    def lend_generator(self) -> Iterator[Generator]:
        """Lend a generator: in a fit the driver's, with its running rollouts paused; otherwise a new one."""
        if self.driver is not None:
            with self.driver.quiet(), self.driver.generator.aside():
                yield self.driver.generator
            return
        generator = self.new_generator()
        try:
            yield generator
        finally:
            generator.close()

    @contextmanager
    def lend_verifiers(self) -> Iterator[Verifiers]:
        """Lend verifiers: in a fit the driver's, otherwise new ones."""
        if self.driver is not None:
            yield self.driver.verifiers
            return
        verifiers, _ = self.new_verifiers()
        try:
            yield verifiers
        finally:
            verifiers.close()

    def new_verifiers(self) -> tuple[Verifiers, str]:
        """Start verifiers and test them on known answers. Return them, and a text for the user about the test.

        If an environment gives the rewards, nothing is tested and the text is empty.
        """
        task = self.stage.task
        grader = task.grader()
        if self.dialogue is not None and self.dialogue.settings.gives_reward:
            # The environment gives the rewards, so the task's grader is never called. Do not test it, and declare it
            # trusted, because a trusted grader gets no processes.
            return SettledFirst(self.stage.recipe.verify.verifiers(grader, trusted=True)), ""
        services = check_services(grader)
        verifiers = self.stage.recipe.verify.verifiers(grader, task.trusted)
        if self.dialogue is not None:
            verifiers = SettledFirst(verifiers)
        try:
            trial_line = check_verifiers(verifiers, task.known(), partial(passes, task))
        except BaseException:
            verifiers.close()
            raise
        return verifiers, "\n".join([*services, trial_line])

    def sample(self, prompt: Prompt, rollout: Rollout, step: int) -> Sample:
        """Return a completion as a `Sample`, the argument of a grader."""
        renderer = self.rendering if self.dialogue is None else self.dialogue
        return renderer.sample(prompt, rollout, step)

    def conversations(self, prompts: Sequence[Prompt]) -> Conversations | None:
        """Return the conversations of an evaluation; None without environments.

        A group's key (`GroupRequest.key`) must be the index of its prompt in `prompts`.
        """
        if self.dialogue is None or self._pool is None:
            return None
        return Conversations(self.dialogue, self._pool, self.limits, prompts.__getitem__)

    @property
    def limits(self) -> Limits:
        """Limits of a conversation with an environment."""
        context = self.stage.recipe.context
        return Limits(context.max_turns, context.max_turn_tokens)

    def close(self) -> None:
        """End the environment processes of evaluations, and the processes in which chat templates run."""
        if self._pool is not None:
            self._pool.shutdown()
        if self.dialogue is not None:
            self.dialogue.close()

    def new_generator(self) -> Generator:
        """Build a generator with a copy of the current weights, in this process or in the driver's engine processes.

        Raises:
            ConfigurationError: the phrase that ends thinking does not fit into a completion.
        """
        stage = self.stage
        factory, driver = stage.recipe.generator, stage.recipe.driver
        model = stage.models.trained.whole_model(stage.models.device)
        arguments = {"precision": stage.choices.precision, "sampling": self.settings()}
        if not isinstance(driver, Live):
            return factory(model=model, **arguments)
        return Fleet(
            factory,
            model,
            arguments,
            generators=driver.generators,
            silence_s=driver.silence_s,
            start_s=driver.start_s,
            devices=driver.devices or free_devices(stage.local_ranks),
            engines=driver.engines,
            bucket_mib=driver.bucket_mib,
            tensor_parallel=driver.tensor_parallel,
        )

    def settings(self) -> SamplingSettings:
        """Return the settings that a generator samples with.

        Raises:
            ConfigurationError: the phrase that ends thinking does not fit into a completion.
        """
        stage, tokenizer = self.stage, self.stage.models.tokenizer
        length_control, context = stage.choices.length_control, stage.recipe.context
        phrase = stage.models.encode(length_control.phrase) if length_control.phrase else []
        problem = length_control.check_limit(context.max_new_tokens, len(phrase))
        if problem:
            raise ConfigurationError(problem)
        stop = tuple(stage.recipe.chat.stop)
        if quoted := [text for text in stop if text in length_control.phrase]:
            raise ConfigurationError(
                f"chat.stop: {quoted[0]!r} is part of length_control.phrase, so graders would see a completion only "
                "up to there; choose another phrase or stop text"
            )
        return SamplingSettings(
            max_prompt_tokens=context.max_prompt_tokens,
            max_new_tokens=context.max_new_tokens,
            stop_tokens=stage.models.stop_tokens,
            temperature=context.temperature,
            phrase=phrase,
            thinking_ended=EndOfThinking(tokenizer, length_control.end_of_thinking),
            stop_text=StopTexts(tokenizer, stop) if stop else None,
        )


def _check_rows(stage: Stage, tokens: Mapping[str, Sequence[Sequence[int]]]) -> None:
    """Check that the model has an embedding row for every token that it will read.

    A tokenizer may have more tokens than the model: Gemma 3 without vision has no row for the image token.
    """
    tokenizer = stage.models.tokenizer
    rows = int(stage.models.policy.model.get_input_embeddings().weight.shape[0])  # type: ignore[operator]
    tokens_by_source: dict[str, Iterable[int]] = {
        f"{name} prompts": (token for prompt in prompts for token in prompt) for name, prompts in tokens.items()
    }
    tokens_by_source["length_control.phrase"] = stage.models.encode(stage.choices.length_control.phrase)
    tokens_by_source["the tokenizer's eos_token"] = [tokenizer.eos_token_id]
    for origin, token_ids in tokens_by_source.items():
        missing = sorted({token for token in token_ids if token >= rows})
        if not missing:
            continue
        shown = ", ".join(f"{token} ({tokenizer.convert_ids_to_tokens(token)})" for token in missing[:8])
        raise ConfigurationError(
            f"model: it has {rows} rows of embeddings, numbered from 0, and {origin} need"
            f"{'s' * origin.startswith('the')} tokens without one: {shown}{', ...' if len(missing) > 8 else ''}; give "
            f"it its own tokenizer, or save it after model.resize_token_embeddings({max(missing) + 1}) or more"
        )
