"""Compute of other trainers' runs: steps, tokens, device hours, or FLOPs from the model's size and its tokens.

A study has one axis. The journal's header has its name (`axis`) and how it was measured (`compute_is`). Journals that
differ in either are not fitted together.
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
# Given instead of the number of parameters: the trainer counts FLOPs itself.
COUNTED = "counted"
# Forward: a multiplication and an addition per parameter and token. Backward: twice that.
FLOPS_A_TOKEN = 6


@dataclass(frozen=True)
class Compute:
    """Measure of a member's compute: a metric that its trainer logs, or wall-clock time.

    Attributes:
        unit: `steps`, `tokens`, `device_hours` or `flops`.
        column: metric with tokens, FLOPs, or seconds (for device hours). None: the step itself, or wall-clock time.
        per_step: True if the column has the amount of each step, to be summed.
        restarts: True if the column starts again from 0 in a resumed run.
        factor: compute per unit of the column or the clock.
        counted: True if the column holds FLOPs as the trainer counts them.
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
        """Return True if compute is the time for which the command runs."""
        return self.unit == "device_hours" and self.column is None

    @property
    def text(self) -> str:
        """Describe in words how compute is measured. It is printed; journals that differ in it are not compared."""
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


def compute_of(given: Mapping[str, Any], folder: Path) -> Compute:
    """Make the measure from the settings under `command.compute`.

    Args:
        given: the settings, with all keys, of their types (`sweeps.command.kinds`).
        folder: base of relative paths in them.

    Raises:
        UserError: an unknown unit, or a missing setting that the unit needs.
    """
    unit, column = given["unit"], given["column"]
    if unit not in AXIS_OF:
        raise UserError(f"command.compute.unit: {unit!r} is unknown; valid: {', '.join(AXIS_OF)}")
    if unit in ("tokens", "flops") and not column:
        raise UserError(f"command.compute.column: {column!r}; name the column of the tokens, of which {unit} are made")
    if unit == "steps":
        column = None
    factor = 1.0
    if unit == "device_hours":
        factor = given["devices"] / 3600
    elif unit == "flops" and given["parameters"] == COUNTED and given["model"] is None:
        return Compute(unit, str(column), given["per_step"], given["restarts"], factor, counted=True)
    elif unit == "flops":
        parameters, model = given["parameters"], given["model"]
        if (parameters is None) == (model is None):
            raise UserError(
                "command.compute.parameters: FLOPs are 6 x parameters x tokens; give the number of parameters, or "
                "command.compute.model, a folder with config.json, and one of them only"
            )
        factor = FLOPS_A_TOKEN * (float(parameters) if model is None else parameters_of(folder / model))
    return Compute(unit, None if column is None else str(column), given["per_step"], given["restarts"], factor)


def parameters_of(path: Path) -> float:
    """Count the parameters of a decoder from its configuration: those that multiply a token, output layer included.

    In a mixture of experts only the active experts count. Norms, biases and the embedding lookup are left out: they
    multiply little or nothing.

    Args:
        path: a `config.json` as transformers writes it, or the folder that contains one.

    Raises:
        UserError: the file is missing, or lacks a value that the count needs.
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
    width, layers, inner, heads, words = (int(config[name]) for name in names)
    head = int(config.get("head_dim") or width // heads)
    shared = int(config.get("num_key_value_heads") or heads)
    attention = 2 * width * heads * head + 2 * width * shared * head
    active = int(config.get("num_experts_per_tok") or 1)
    if "num_experts_per_tok" in config:
        inner = int(config.get("moe_intermediate_size") or inner)
    # Gated activations (SiLU and similar) have two projections up and one down.
    gated = 3 if str(config.get("hidden_act", "silu")) in ("silu", "swish", "gelu_pytorch_tanh") else 2
    return float(layers * (attention + active * gated * width * inner) + words * width)
