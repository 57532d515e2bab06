"""Tests of compute measured from other trainers' logs: units, sums, counters that restart, FLOPs by model size."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sweeps.command.compute import Compute, compute_of, parameters_of
from sweeps.command.follow import Counter, MetricsError
from sweeps.command.growing import Column
from sweeps.errors import UserError

DEFAULTS: dict[str, Any] = {
    "unit": "tokens", "column": "tokens", "per_step": False, "restarts": False, "devices": 1, "parameters": None,
    "model": None,
}  # fmt: skip
# From the config.json of Qwen3-0.6B, and of a mixture of experts similar to Qwen3-30B-A3B.
DENSE = {
    "hidden_size": 1024, "num_hidden_layers": 28, "intermediate_size": 3072, "num_attention_heads": 16,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "hidden_act": "silu",
}  # fmt: skip
EXPERTS = {
    "hidden_size": 2048, "num_hidden_layers": 48, "intermediate_size": 6144, "num_attention_heads": 32,
    "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936, "num_experts_per_tok": 8,
    "moe_intermediate_size": 768, "hidden_act": "silu",
}  # fmt: skip


def counted_at(
    compute: Compute, steps: list[int], column: Column, begin: tuple[float, float], where: str
) -> list[float]:
    """Return compute at `steps`, from the rows of a column since `begin`: the step and compute at the start."""
    counter = Counter(compute, begin, where)
    counter.add(column)
    return counter.at(steps)


def test_a_sum_over_steps_continues_from_its_last_value() -> None:
    compute = compute_of({**DEFAULTS, "per_step": True}, Path())
    assert counted_at(compute, [11, 12, 13], [(11, 5.0), (12, 6.0), (13, 7.0)], (10, 100.0), "x") == [105, 111, 118]


def test_compute_between_two_logged_steps_is_interpolated() -> None:
    compute = compute_of(DEFAULTS, Path())
    assert counted_at(compute, [0, 5, 10, 15], [(10, 100.0), (20, 300.0)], (0, 0.0), "x") == [0, 50, 100, 200]


def test_a_counter_that_restarts_is_added_up_or_refused() -> None:
    column = [(11.0, 10.0), (12.0, 20.0)]
    assert counted_at(compute_of({**DEFAULTS, "restarts": True}, Path()), [12], column, (10, 100.0), "x") == [120]
    with pytest.raises(
        MetricsError, match=r"^command.compute.column: tokens in x went back at step 11: .*restarts=true"
    ):
        counted_at(compute_of(DEFAULTS, Path()), [12], column, (10, 100.0), "x")


def test_device_hours_add_up_all_devices() -> None:
    compute = compute_of({**DEFAULTS, "unit": "device_hours", "column": "seconds", "devices": 8}, Path())
    assert counted_at(compute, [1], [(1, 900.0)], (0, 0.0), "x") == pytest.approx([2.0])
    assert compute.text == "device hours: seconds, seconds, x 8 devices"


@pytest.mark.parametrize(("config", "billions"), [(DENSE, 0.596), (EXPERTS, 3.03)])
def test_parameters_are_the_active_ones_per_token(tmp_path: Path, config: dict[str, Any], billions: float) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert parameters_of(tmp_path) == pytest.approx(billions * 1e9, rel=0.02)
    compute = compute_of({**DEFAULTS, "unit": "flops", "model": str(tmp_path)}, Path())
    assert counted_at(compute, [1], [(1, 10.0)], (0, 0.0), "x") == pytest.approx([6 * 10 * parameters_of(tmp_path)])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"unit": "gpu_days"},
            r"^command.compute.unit: 'gpu_days' is unknown; valid: steps, tokens, device_hours, flops",
        ),
        ({"column": None}, r"^command.compute.column: None; name the column of the tokens"),
        ({"unit": "flops"}, r"^command.compute.parameters: FLOPs are 6 x parameters x tokens; give"),
        (
            {"unit": "flops", "model": "nowhere"},
            r"^command.compute.model: nowhere: no hidden_size, .* give their number",
        ),
    ],
)
def test_wrong_settings_of_compute_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        compute_of({**DEFAULTS, **changes}, Path())
