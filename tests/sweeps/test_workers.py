"""What the processes that run the study's tests have imported."""

from __future__ import annotations

import pytest

from tests.conftest import TORCH_IMPORTED


def test_no_module_of_these_tests_imports_torch(pytestconfig: pytest.Config) -> None:
    """It costs each worker five seconds, and every fork of theirs more. A test that needs it imports it itself."""
    assert not pytestconfig.stash[TORCH_IMPORTED]
