"""Test that workers which run only tests/sweeps do not import torch."""

from __future__ import annotations

import pytest

from tests.conftest import TORCH_IMPORTED


def test_collecting_these_tests_does_not_import_torch(pytestconfig: pytest.Config) -> None:
    """Torch costs each worker five seconds, and more in every fork. A test that needs it imports it in the function."""
    assert not pytestconfig.stash[TORCH_IMPORTED]
