"""AdamW of torchao, whose moments are 8-bit numbers with one scale per block of 256 values."""

from __future__ import annotations

from typing import Any

import torch

from lightning_scalerl.compat.imports import show_torchao

show_torchao()
from torchao.optim import AdamW8bit as TorchAOAdamW8bit  # noqa: E402
from torchao.optim.subclass_8bit import OptimState8bit  # noqa: E402


class EagerAdamW8bit(TorchAOAdamW8bit):  # type: ignore[misc]  # torchao has no types
    """torchao's AdamW8bit without torch.compile, with plain learning rates, and with plain tensors in its state dict.

    The reasons for these three differences, in the same order:

    - A compiled step would need a compiler where the run is, and its rounding would depend on that compiler.
    - Schedules, callbacks and checkpoints expect plain rates, and torchao's step expects tensors.
    - A checkpoint of plain tensors can be read where torchao is not installed.

    Source: arXiv 2110.02861 (block-wise dynamic quantization); torchao 0.18, `optim/adam.py`.
    """

    def __init__(self, parameters: Any, **settings: Any) -> None:
        groups = list(parameters)
        # torchao turns the learning rates into FP32 tensors, so restore the plain rates below. Parameters without
        # groups form one group, with the optimizer's rate.
        rates = [group.get("lr", settings["lr"]) for group in groups if isinstance(group, dict)] or [settings["lr"]]
        super().__init__(groups, **settings)
        for group, rate in zip(self.param_groups, rates, strict=True):
            group["lr"] = rate

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Make one step; parameters without a gradient keep weights and moments."""
        rates = [group["lr"] for group in self.param_groups]
        for group, rate in zip(self.param_groups, rates, strict=True):
            group["lr"] = torch.tensor(rate)
        try:
            with torch.compiler.set_stance("force_eager"):
                return super().step(closure)
        finally:
            for group, rate in zip(self.param_groups, rates, strict=True):
                group["lr"] = rate

    def state_dict(self) -> dict[str, Any]:
        """Return torch's state dict, with two plain tensors, `NAME.codes` and `NAME.scale`, for each 8-bit tensor."""
        state_dict_of_torch: dict[str, Any] = super().state_dict()
        plain: dict[int, dict[str, Any]] = {}
        for number, state in state_dict_of_torch["state"].items():
            plain[number] = {}
            for name, value in state.items():
                if isinstance(value, OptimState8bit):
                    plain[number] |= {f"{name}.codes": value.codes, f"{name}.scale": value.scale}
                else:
                    plain[number][name] = value
        return {**state_dict_of_torch, "state": plain}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state from `state_dict`."""
        states: dict[int, dict[str, Any]] = {}
        for number, plain in state_dict["state"].items():
            states[number] = {name: value for name, value in plain.items() if "." not in name}
            for name in ("exp_avg", "exp_avg_sq"):
                if (codes := plain.get(f"{name}.codes")) is not None:
                    scale, signed = plain[f"{name}.scale"], name == "exp_avg"
                    block = codes.numel() // scale.numel()
                    state = OptimState8bit.zeros(codes.shape, signed, block, codes.device, torch.float32)
                    state.codes.copy_(codes)
                    state.scale.copy_(scale)
                    states[number][name] = state
        super().load_state_dict({**state_dict, "state": states})
