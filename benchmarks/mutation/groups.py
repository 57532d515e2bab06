"""Groups of modules to mutate, with the test files that should kill their mutants. Adapt them when test files move."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Group:
    """Modules that are mutated together.

    Args:
        modules: files, relative to the root of the tree.
        tests: the test files that a maintainer would choose for them, the cheapest first.
        torch: the tests import torch even if `tests/conftest.py` does not.
    """

    modules: tuple[str, ...]
    tests: tuple[str, ...]
    torch: bool = False


def _each(folder: str, *names: str) -> tuple[str, ...]:
    return tuple(f"{folder}/{name}.py" for name in names)


GROUPS = {
    "losses": Group(
        _each("lightning_scalerl/axes/loss", "base", "cispo", "dapo", "gspo", "ppo", "reinforce"),
        ("tests/measure/test_semantics.py", "tests/axes/test_contract.py", "tests/parity/test_peers.py"),
        torch=True,
    ),
    "aggregation": Group(
        ("lightning_scalerl/axes/aggregation.py",),
        _each("tests/axes", "test_truncated", "test_contract", "test_terms"),
        torch=True,
    ),
    "stream": Group(
        ("lightning_scalerl/stream/rollout_stream.py",),
        _each("tests/stream", "test_outcomes", "test_refill", "test_rollout_stream"),
        torch=True,
    ),
    "credit": Group(
        ("lightning_scalerl/stream/credit.py", *_each("lightning_scalerl/axes", "advantage", "normalization")),
        (
            *_each("tests/axes", "test_truncated", "test_token_credit"),
            "tests/stream/test_outcomes.py",
            "tests/measure/test_step_metrics.py",
            "tests/parity/test_peers.py",
        ),
        torch=True,
    ),
    "journal": Group(
        ("sweeps/run/journal.py",),
        _each("tests/sweeps/run", "test_journal", "test_provenance", "test_tail", "test_repair"),
    ),
    "ledger": Group(
        ("sweeps/launch/ledger.py",),
        _each(
            "tests/sweeps/launch",
            "test_ledger",
            "test_node_blacklist",
            "test_accepted",
            "test_status",
            "test_study",
            "test_clean",
        ),
    ),
    "lease": Group(
        ("sweeps/run/lease.py",),
        _each("tests/sweeps/run", "test_writer", "test_lease", "test_lease_contention"),
    ),
    "fit": Group(
        _each("sweeps/fit", "posterior", "pooling", "verdict"),
        _each("tests/sweeps/fit", "test_posterior", "test_fit", "test_forecast"),
    ),
    "rank": Group(
        _each("sweeps/decide", "rank", "standing"),
        _each("tests/sweeps/decide", "test_standing", "test_rank"),
    ),
    "race": Group(
        _each("sweeps/decide", "race", "rules"),
        ("tests/sweeps/decide/test_race.py",),
    ),
    "sandbox": Group(
        _each("lightning_scalerl/sandbox", "judge", "examine", "jail"),
        _each("tests/sandbox", "test_jail", "test_protections", "test_judge", "test_escapes"),
        torch=True,
    ),
    "readers": Group(
        _each("sweeps/source", "cells", "table", "log", "wide"),
        ("tests/sweeps/test_curve.py", "tests/sweeps/source/test_logs.py"),
    ),
}
