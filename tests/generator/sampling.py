"""Sampling settings of generators, given by name in tests."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from lightning_scalerl.generator.base import SamplingSettings

SAMPLING_FIELDS = {field.name for field in fields(SamplingSettings)}


def with_sampling(**values: Any) -> dict[str, Any]:
    """Return arguments of a generator: sampling settings in one record, the others unchanged."""
    sampling = SamplingSettings(**{name: value for name, value in values.items() if name in SAMPLING_FIELDS})
    return {"sampling": sampling, **{name: value for name, value in values.items() if name not in SAMPLING_FIELDS}}
