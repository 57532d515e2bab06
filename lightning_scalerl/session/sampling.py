"""Sampling of completions and their grading: prompts as the model reads them, a generator, verifiers.

In come a stage's settled choices, task and policy (`Inputs`); out go prompts that fit the context, and engines that the
data path of a fit is built from, or that an evaluation borrows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from lightning_scalerl.checks import ConfigurationError
from lightning_scalerl.choices import Choices
from lightning_scalerl.distributed.start import devices_beside
from lightning_scalerl.generator.base import EndOfThinking, Generator, SamplingSettings
from lightning_scalerl.generator.fleet.fleet import Fleet
from lightning_scalerl.model.chat import Rendering, StopTexts
from lightning_scalerl.recipe import Recipe
from lightning_scalerl.stream.drivers import Driver, Live
from lightning_scalerl.stream.prompts import PromptSet, fitting
from lightning_scalerl.task.base import Task, passes
from lightning_scalerl.update.trained import TrainedPolicy
from lightning_scalerl.verify.verification import Verifiers, check_verifiers

TRAINING = "training"


@dataclass(frozen=True)
class Inputs:
    """Settled choices and parts of a stage, from which prompts, generator and verifiers follow.

    `rows` is how many tokens the model has an embedding for, `ranks` how many ranks train on this node; `held_out` at
    most how many prompts of each held-out set are evaluated, None for all.
    """

    recipe: Recipe
    choices: Choices
    task: Task
    seed: int
    tokenizer: Any
    stop_tokens: list[int]
    rows: int
    trained: TrainedPolicy
    device: torch.device
    ranks: int
    held_out: int | None

    def encode(self, text: str) -> list[int]:
        """Tokenize a text without adding special tokens."""
        tokens: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return tokens


class Sampling:
    """Prompts of a stage, rendered, tokenised and measured; and who samples and grades completions of them.

    All prompts are measured before any compute: one that is too long would else end the run when it is drawn, and every
    resume of it.

    Args:
        inputs: of the stage.
        training: whether the prompts that are trained on are needed, or the held-out ones alone.

    Raises:
        ConfigurationError: prompts that do not fit into the context, or that cannot be rendered.
    """

    def __init__(self, inputs: Inputs, *, training: bool) -> None:
        self.inputs = inputs
        # In a fit there is one engine, with one copy of weights and cache; it is set once it is built.
        self.driver: Driver | None = None
        sets = {TRAINING: inputs.task.train_prompts()} if training else {}
        sets |= {f"held-out ({name})": some[: inputs.held_out] for name, some in inputs.task.eval_sets().items()}
        context, control = inputs.recipe.context, inputs.choices.length_control.end_of_thinking
        self.rendering = Rendering(inputs.tokenizer, inputs.recipe.chat, inputs.stop_tokens, control)
        tokens = self.rendering.encode_all(sets)
        _check_rows(inputs, tokens)
        self.sets = fitting(sets, tokens, context.max_prompt_tokens, context.too_long)

    @property
    def eval_sets(self) -> dict[str, PromptSet]:
        """Held-out prompts that are evaluated, by the name of their set."""
        return {name: self.sets[f"held-out ({name})"] for name in self.inputs.task.eval_sets()}

    @contextmanager
    def generating(self) -> Iterator[Generator]:
        """Lend the fit's generator with nothing in flight, or a new one where there is no fit."""
        if self.driver is not None:
            with self.driver.quiet(), self.driver.generator.aside():
                yield self.driver.generator
            return
        generator = new_generator(self.inputs)
        try:
            yield generator
        finally:
            generator.close()

    @contextmanager
    def verifying(self) -> Iterator[Verifiers]:
        """Lend the fit's verifiers, or new ones where there is no fit."""
        if self.driver is not None:
            yield self.driver.verifiers
            return
        verifiers, _ = new_verifiers(self.inputs)
        try:
            yield verifiers
        finally:
            verifiers.close()


def _check_rows(inputs: Inputs, tokens: Mapping[str, Sequence[Sequence[int]]]) -> None:
    """Check that the model has a row for every token that it will read.

    A tokenizer may have others: Gemma 3 without vision has no row for the token of an image.

    Raises:
        ConfigurationError: prompts, the phrase that ends thinking or the end of a completion need a row it lacks.
    """
    ours: dict[str, Iterable[int]] = {
        f"{name} prompts": (token for prompt in some for token in prompt) for name, some in tokens.items()
    }
    ours["length_control.phrase"] = inputs.encode(inputs.choices.length_control.phrase)
    ours["the tokenizer's eos_token"] = [inputs.tokenizer.eos_token_id]
    for where, read in ours.items():
        missing = sorted({token for token in read if token >= inputs.rows})
        if not missing:
            continue
        shown = ", ".join(f"{token} ({inputs.tokenizer.convert_ids_to_tokens(token)})" for token in missing[:8])
        raise ConfigurationError(
            f"model: it has {inputs.rows} rows of embeddings, numbered from 0, and {where} need"
            f"{'s' * where.startswith('the')} tokens without one: {shown}{', ...' if len(missing) > 8 else ''}; give "
            f"it its own tokenizer, or save it after model.resize_token_embeddings({max(missing) + 1}) or more"
        )


def new_verifiers(inputs: Inputs) -> tuple[Verifiers, str]:
    """Start the verifiers that grade completions and try them on known answers; return a line on the trial too."""
    verifiers = inputs.recipe.verify.verifiers(inputs.task.grader(), inputs.task.trusted)
    try:
        tried = check_verifiers(verifiers, inputs.task.known(), partial(passes, inputs.task))
    except BaseException:
        verifiers.close()
        raise
    return verifiers, tried


def new_generator(inputs: Inputs) -> Generator:
    """Build a generator with a copy of the current weights: in this process, or in those that the driver asks for."""
    factory, driver = inputs.recipe.generator, inputs.recipe.driver
    model, arguments = inputs.trained.whole_model(inputs.device), generator_arguments(inputs)
    if not isinstance(driver, Live):
        return factory(model=model, **arguments)
    return Fleet(
        factory,
        model,
        arguments,
        generators=driver.generators,
        silence_s=driver.silence_s,
        start_s=driver.start_s,
        devices=driver.devices or devices_beside(inputs.ranks),
        engines=driver.engines,
        bucket_mib=driver.bucket_mib,
        tensor_parallel=driver.tensor_parallel,
    )


def generator_arguments(inputs: Inputs) -> dict[str, Any]:
    """Return the arguments of a generator besides the model.

    Raises:
        ConfigurationError: the phrase that ends thinking does not fit into a completion.
    """
    control, context = inputs.choices.length_control, inputs.recipe.context
    phrase = inputs.encode(control.phrase) if control.phrase else []
    problem = control.check_limit(context.max_new_tokens, len(phrase))
    if problem:
        raise ConfigurationError(problem)
    stop = tuple(inputs.recipe.chat.stop)
    sampling = SamplingSettings(
        max_prompt_tokens=context.max_prompt_tokens,
        max_new_tokens=context.max_new_tokens,
        stop_tokens=inputs.stop_tokens,
        temperature=context.temperature,
        phrase=phrase,
        thinking_ended=EndOfThinking(inputs.tokenizer, control.end_of_thinking),
        stop_text=StopTexts(inputs.tokenizer, stop) if stop else None,
    )
    return {"precision": inputs.choices.precision, "sampling": sampling}
