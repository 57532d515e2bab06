"""Settings of generators, given by name in tests."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from lightning_scalerl.generator.base import SamplingSettings

OF_SAMPLING = {field.name for field in fields(SamplingSettings)}


def with_sampling(**values: Any) -> dict[str, Any]:
    """Return arguments of a generator: those of sampling in their record, the others as they are."""
    sampling = SamplingSettings(**{name: value for name, value in values.items() if name in OF_SAMPLING})
    return {"sampling": sampling, **{name: value for name, value in values.items() if name not in OF_SAMPLING}}
