"""Export of the policy as a folder that `from_pretrained` loads, with its tokenizer and a card of its training."""

from __future__ import annotations

from pathlib import Path

from lightning_scalerl.model.chat import Rendering, told_of
from lightning_scalerl.model.save import save_model
from lightning_scalerl.session.parts import Parts


def export(module: Parts, directory: str | Path, dtype: str) -> Path:
    """Write the module's policy; all ranks call it, and rank 0 writes. Arguments as of `ScaleRL.save_pretrained`."""
    trained_from = module.arguments.get("model")
    card = {"recipe": module.recipe.name, "optimizer steps": module.completed_steps, "trained from": trained_from}
    choices = {axis: type(choice).__name__ for axis, choice in module.choices.items()}
    card["choices"] = ", ".join(f"{axis}: {name}" for axis, name in choices.items())
    rendering = Rendering(module.tokenizer, module.recipe.chat)
    card |= told_of(rendering)

    def write() -> str:
        return str(save_model(module.trained.whole_model(), rendering.to_save(), directory, dtype, card))

    module.ranks.share(write)
    return Path(directory)
