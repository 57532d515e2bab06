"""Export of the policy as a folder that `from_pretrained` loads, with tokenizer and model card."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from lightning_scalerl.axes.precision import Precision
from lightning_scalerl.checks import ConfigurationError
from lightning_scalerl.choices import Choices
from lightning_scalerl.distributed.sharded import is_sharded
from lightning_scalerl.model.adapter import modules_saved
from lightning_scalerl.model.chat import Chat, Rendering, model_card_facts
from lightning_scalerl.model.head import eval_mode, output_head
from lightning_scalerl.model.load import blank_copy
from lightning_scalerl.model.policy import Policy
from lightning_scalerl.model.save import save_adapter, save_in_parts, save_model
from lightning_scalerl.recipe import Recipe
from lightning_scalerl.rollouts.prompt import Prompt
from lightning_scalerl.rollouts.rollout import Group, Rollout, Source
from lightning_scalerl.session.models import Models
from lightning_scalerl.stream.credit import to_tensors
from lightning_scalerl.update.trained import TrainedPolicy

# Largest allowed log-probability difference between the trained policy and the model with a merged adapter, in FP32.
MERGED_BOUND = 1e-4
NUM_ROWS, NUM_TOKENS = 4, 8


def export(models: Models, card: dict[str, Any], chat: Chat, directory: str | Path, dtype: str, adapter: bool) -> Path:
    """Export the policy to a folder. All ranks call this function, and rank 0 writes.

    Args:
        models: models of the run.
        card: entries of the model card, see `model_card_entries`.
        chat: how the recipe renders prompts, which the model card states.
        directory, dtype, adapter: as in `ScaleRL.save_pretrained`.
    """
    policy, trained = models.policy, models.trained
    if adapter and policy.adapter is None:
        raise ConfigurationError("adapter: this model has none; leave adapter=True out to save the model itself")
    rendering = Rendering(models.tokenizer, chat)
    card = {**card, **model_card_facts(rendering)}

    def write() -> str:
        if adapter:
            (config,) = dict(getattr(policy.model, "peft_config")).values()  # noqa: B009  # getattr, as nn.Module does not declare the field
            saved = modules_saved(policy.model)
            dtype_name = str(policy.precision.policy_dtype).removeprefix("torch.")
            if dtype_name != "float32":
                card["frozen linear layers"] = f"rounded to {dtype_name} in training; round those of the base model too"
            return str(save_adapter(config, trained.adapter_weights(), directory, dtype, card, saved))
        tokenizer = rendering.tokenizer_to_save()
        if is_sharded(policy) and policy.adapter is None:
            return str(save_in_parts(blank_copy(policy.model), trained.weight, tokenizer, directory, dtype, card))
        model = trained.whole_model()
        if policy.adapter is not None:
            check_merged(trained, model)
        return str(save_model(model, tokenizer, directory, dtype, card))

    models.ranks.share(write)
    return Path(directory)


def model_card_entries(recipe: Recipe, choices: Choices, steps: int, trained_from: str | None) -> dict[str, Any]:
    """Return the entries of a model card that say how the policy was trained."""
    choice_names = {axis: type(choice).__name__ for axis, choice in choices.items()}
    return {
        "recipe": recipe.name,
        "optimizer steps": steps,
        "trained from": trained_from,
        "choices": ", ".join(f"{axis}: {name}" for axis, name in choice_names.items()),
    }


def check_merged(trained: TrainedPolicy, model: nn.Module) -> None:
    """Check on a few random tokens that a model with merged weights agrees with the trained policy, in FP32.

    Raises:
        RuntimeError: their log-probabilities differ by more than `MERGED_BOUND`.
    """
    vocabulary = output_head(model).weight.shape[0]
    token_rows = torch.randint(
        vocabulary, (NUM_ROWS, 2 * NUM_TOKENS), generator=torch.Generator().manual_seed(0)
    ).tolist()
    rollouts = [
        Rollout(
            tokens=row[NUM_TOKENS:],
            generator_logprobs=[0.0] * NUM_TOKENS,
            weight_versions=[0] * NUM_TOKENS,
            sources=[Source.SAMPLED] * NUM_TOKENS,
            finish_reason="length",
        )
        for row in token_rows
    ]
    groups = [
        Group(number, Prompt("export", "", ""), row[:NUM_TOKENS], [rollout])
        for number, (row, rollout) in enumerate(zip(token_rows, rollouts, strict=True))
    ]
    batch = to_tensors([(group, group.rollouts[0], [0.0], 0, number) for number, group in enumerate(groups)])
    fp32 = Precision("fp32")
    plain = Policy(model, fp32, trained.policy.temperature)
    with torch.no_grad(), eval_mode(plain):
        gap = float((plain(batch)[0] - trained.logprobs(batch, fp32).cpu()).abs().max())
    if not gap <= MERGED_BOUND:
        raise RuntimeError(
            f"export: the model with its adapter merged in differs from the trained policy by {gap:.3g} in "
            f"log-probability, more than {MERGED_BOUND:g}; nothing is written"
        )
