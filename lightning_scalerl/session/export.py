"""Export of the policy as a folder that `from_pretrained` loads, with tokenizer and model card."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from lightning_scalerl.axes.precision import Precision
from lightning_scalerl.checks import ConfigurationError
from lightning_scalerl.distributed.sharded import is_sharded
from lightning_scalerl.model.adapter import modules_saved
from lightning_scalerl.model.chat import Rendering, told_of
from lightning_scalerl.model.head import eval_mode, output_head
from lightning_scalerl.model.load import blank_copy
from lightning_scalerl.model.policy import Policy
from lightning_scalerl.model.save import save_adapter, save_in_parts, save_model
from lightning_scalerl.rollouts.prompt import Prompt
from lightning_scalerl.rollouts.rollout import Group, Rollout
from lightning_scalerl.session.parts import Parts
from lightning_scalerl.stream.credit import lay_out
from lightning_scalerl.update.trained import TrainedPolicy

# Largest allowed log-probability difference between the trained policy and the saved plain model, both in FP32.
MERGED_BOUND = 1e-4
ROWS, TOKENS = 4, 8


def export(module: Parts, directory: str | Path, dtype: str, adapter: bool) -> Path:
    """Write the module's policy. All ranks call it, and rank 0 writes. Arguments as in `ScaleRL.save_pretrained`."""
    if adapter and module.policy.adapter is None:
        raise ConfigurationError("adapter: this model has none; leave adapter=True out to save the model itself")
    trained_from = module.arguments.get("model")
    card = {"recipe": module.recipe.name, "optimizer steps": module.completed_steps, "trained from": trained_from}
    choices = {axis: type(choice).__name__ for axis, choice in module.choices.items()}
    card["choices"] = ", ".join(f"{axis}: {name}" for axis, name in choices.items())
    rendering = Rendering(module.tokenizer, module.recipe.chat)
    card |= told_of(rendering)

    def write() -> str:
        if adapter:
            (config,) = dict(getattr(module.policy.model, "peft_config")).values()  # noqa: B009  # getattr, as nn.Module does not declare the field
            saved = modules_saved(module.policy.model)
            return str(save_adapter(config, module.trained.adapter_weights(), directory, dtype, card, saved))
        tokenizer = rendering.to_save()
        if is_sharded(module.policy) and module.policy.adapter is None:
            return str(
                save_in_parts(blank_copy(module.policy.model), module.trained.weight, tokenizer, directory, dtype, card)
            )
        model = module.trained.whole_model()
        if module.policy.adapter is not None:
            check_merged(module.trained, model)
        return str(save_model(model, tokenizer, directory, dtype, card))

    module.ranks.share(write)
    return Path(directory)


def check_merged(trained: TrainedPolicy, model: nn.Module) -> None:
    """Check on a few tokens that a plain model with merged weights computes the same as the trained policy, in FP32.

    Raises:
        RuntimeError: their log-probabilities differ by more than `MERGED_BOUND`.
    """
    vocabulary = output_head(model).weight.shape[0]
    drawn = torch.randint(vocabulary, (ROWS, 2 * TOKENS), generator=torch.Generator().manual_seed(0)).tolist()
    rollouts = [
        Rollout(
            tokens=row[TOKENS:],
            generator_logprobs=[0.0] * TOKENS,
            weight_versions=[0] * TOKENS,
            forced=[False] * TOKENS,
            finish_reason="length",
        )
        for row in drawn
    ]
    groups = [
        Group(number, Prompt("export", "", ""), row[:TOKENS], [rollout])
        for number, (row, rollout) in enumerate(zip(drawn, rollouts, strict=True))
    ]
    batch = lay_out([(group, group.rollouts[0], 0.0, 0, number) for number, group in enumerate(groups)])
    single = Precision("fp32")
    plain = Policy(model, single, trained.policy.temperature)
    with torch.no_grad(), eval_mode(plain):
        gap = float((plain(batch)[0] - trained.logprobs(batch, single).cpu()).abs().max())
    if not gap <= MERGED_BOUND:
        raise RuntimeError(
            f"export: the model with its adapter merged in differs from the trained policy by {gap:.3g} in "
            f"log-probability, more than {MERGED_BOUND:g}; nothing is written"
        )
