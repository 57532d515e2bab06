"""Measure the compute of runs of other trainers: steps, tokens, device hours, or FLOPs from model size and tokens.

A study has one compute axis. Each journal's header has the name of the axis (`axis`) and a description of how compute
was measured (`compute_is`). Journals that differ in one of them are not fitted together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sweeps.curve import DEVICE_HOURS, FLOPS, STEPS, TOKENS
from sweeps.errors import UserError
from sweeps.run.files import read_json

AXIS_OF = {"steps": STEPS, "tokens": TOKENS, "device_hours": DEVICE_HOURS, "flops": FLOPS}
# Value of `command.compute.parameters` which says that the trainer counts FLOPs itself.
COUNTED = "counted"
# FLOPs per parameter and token: 2 forward (a multiplication and an addition), and twice as many backward.
FLOPS_PER_PARAMETER = 6


@dataclass(frozen=True)
class Compute:
    """Measure of a member's compute: by a metric that its trainer logs, by its steps, or by wall-clock time.

    Attributes:
        unit: `steps`, `tokens`, `device_hours` or `flops`.
        column: metric with tokens, FLOPs, or seconds (for device hours); None for steps and wall-clock time.
        per_step: whether the column has the amount of each single step, so that it must be summed.
        restarts: whether the column begins again at 0 in a resumed run.
        factor: compute per unit of the column or of the clock.
        counted: whether the column has FLOPs, as counted by the trainer.
    """

    unit: str
    column: str | None
    per_step: bool
    restarts: bool
    factor: float
    counted: bool = False

    @property
    def axis(self) -> str:
        """Name of the compute axis in the journal."""
        return AXIS_OF[self.unit]

    @property
    def on_clock(self) -> bool:
        """True if compute is the wall-clock time for which the command runs."""
        return self.unit == "device_hours" and self.column is None

    @property
    def text(self) -> str:
        """Description of how compute is measured. Journals whose descriptions differ are not compared."""
        if self.unit == "steps":
            return "steps, which are an order and no compute: recipes may differ in what a step costs"
        counted = f"{'the sum of ' if self.per_step else ''}{self.column}"
        if self.unit == "tokens":
            return f"tokens: {counted}"
        if self.counted:
            return f"FLOPs, as the trainer counts them: {counted}"
        if self.unit == "flops":
            return f"FLOPs: {self.factor:.6g} (6 x parameters) x tokens, {counted}"
        if self.on_clock:
            return f"device hours: the time that the command runs x {self.factor * 3600:g} devices"
        return f"device hours: seconds, {counted}, x {self.factor * 3600:g} devices"


def compute_of(settings: Mapping[str, Any], folder: Path) -> Compute:
    """Read how compute is measured from the settings under `command.compute`.

    Args:
        settings: the settings, complete and with valid types (`sweeps.command.kinds`).
        folder: folder to which relative paths in the settings refer.

    Raises:
        UserError: the unit is unknown, or a setting that it needs is missing.
    """
    unit, column = settings["unit"], settings["column"]
    if unit not in AXIS_OF:
        raise UserError(f"command.compute.unit: {unit!r} is unknown; valid: {', '.join(AXIS_OF)}")
    if unit in ("tokens", "flops") and not column:
        raise UserError(f"command.compute.column: {column!r}; name the column of the tokens, of which {unit} are made")
    if unit == "steps":
        column = None
    factor = 1.0
    if unit == "device_hours":
        factor = settings["devices"] / 3600
    elif unit == "flops" and settings["parameters"] == COUNTED and settings["model"] is None:
        return Compute(unit, str(column), settings["per_step"], settings["restarts"], factor, counted=True)
    elif unit == "flops":
        parameters, model = settings["parameters"], settings["model"]
        if (parameters is None) == (model is None):
            raise UserError(
                "command.compute.parameters: FLOPs are 6 x parameters x tokens; give the number of parameters, or "
                "command.compute.model, a folder with config.json, and one of them only"
            )
        factor = FLOPS_PER_PARAMETER * (float(parameters) if model is None else parameters_of(folder / model))
    return Compute(unit, None if column is None else str(column), settings["per_step"], settings["restarts"], factor)


def parameters_of(path: Path) -> float:
    """Count the parameters of a decoder that are multiplied for every token, including those of the output layer.

    Of a mixture of experts, only the active experts count. Norms, biases and the embedding are left out, because they
    contribute few multiplications or none.

    Args:
        path: a `config.json` of transformers, or the folder that contains it.

    Raises:
        UserError: the file is missing, or lacks a value that is needed.
    """
    file = path / "config.json" if path.is_dir() else path
    config = read_json(file)
    config = config.get("text_config", config) if isinstance(config.get("text_config", {}), dict) else config
    names = ("hidden_size", "num_hidden_layers", "intermediate_size", "num_attention_heads", "vocab_size")
    missing = [name for name in names if not isinstance(config.get(name), int)]
    if missing:
        raise UserError(
            f"command.compute.model: {file}: no {', '.join(missing)} in it, so parameters cannot be counted; give "
            "their number as command.compute.parameters"
        )
    width, layers, inner_width, heads, vocabulary = (int(config[name]) for name in names)
    head_size = int(config.get("head_dim") or width // heads)
    key_value_heads = int(config.get("num_key_value_heads") or heads)
    attention = 2 * width * heads * head_size + 2 * width * key_value_heads * head_size
    active_experts = int(config.get("num_experts_per_tok") or 1)
    if "num_experts_per_tok" in config:
        inner_width = int(config.get("moe_intermediate_size") or inner_width)
    # A gated activation (SiLU and similar) has two projections up and one down.
    projections = 3 if str(config.get("hidden_act", "silu")) in ("silu", "swish", "gelu_pytorch_tanh") else 2
    return float(layers * (attention + active_experts * projections * width * inner_width) + vocabulary * width)
