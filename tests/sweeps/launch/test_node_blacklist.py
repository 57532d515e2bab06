"""Tests of the nodes that a study excludes, from entries of a ledger."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sweeps.executor.slurm.executor import SlurmCluster
from sweeps.launch.node_blacklist import EXCLUDED_S, MAX_EXCUSED, MIN_NODES, WINDOW_S, NodeBlacklist
from sweeps.launch.settings import LAUNCH_FILE, LaunchSettings

ECC = "RuntimeError: CUDA error: uncorrectable ECC error encountered"


def add_failure(
    nodes: NodeBlacklist, node: str | None, run: str, time: float, reason: str = ECC, event: str = "retried"
) -> None:
    nodes.add_entry({"time": time, "run": run, "event": event, "kind": "gpu", "reason": reason, "node": node})


def test_a_node_is_excluded_after_two_members_until_an_hour_after_the_last() -> None:
    nodes = NodeBlacklist()
    add_failure(nodes, "n1", "a", 0.0)
    add_failure(nodes, "n1", "a", 10.0)
    assert nodes.excluded_nodes(20.0) == ()
    add_failure(nodes, "n1", "b", 600.0)
    assert nodes.excluded_nodes(600.0) == nodes.excluded_nodes(600.0 + EXCLUDED_S - 1) == ("n1",)
    assert nodes.excluded_nodes(600.0 + EXCLUDED_S) == ()
    add_failure(nodes, "n1", "c", 601.0 + EXCLUDED_S)
    assert nodes.excluded_nodes(602.0 + EXCLUDED_S) == (), "one failure since the node returned is not enough"
    add_failure(nodes, "n1", "d", 603.0 + EXCLUDED_S)
    assert nodes.excluded_nodes(604.0 + EXCLUDED_S) == ("n1",)


def test_failures_more_than_an_hour_apart_do_not_count_together() -> None:
    nodes = NodeBlacklist()
    add_failure(nodes, "n1", "a", 0.0)
    add_failure(nodes, "n1", "b", WINDOW_S + 1)
    assert nodes.excluded_nodes(WINDOW_S + 2) == ()
    assert nodes.count_excused("b", WINDOW_S + 2) == {}


def test_failures_of_different_kinds_count_and_entries_without_a_node_do_not() -> None:
    nodes = NodeBlacklist()
    add_failure(nodes, "n1", "a", 0.0)
    add_failure(nodes, None, "b", 1.0)
    assert nodes.excluded_nodes(2.0) == ()
    add_failure(nodes, "n1", "b", 3.0, "OSError: [Errno 5] Input/output error", event="failed")
    assert nodes.excluded_nodes(4.0) == ("n1",)


def test_one_failure_per_bad_node_is_excused_also_an_earlier_one() -> None:
    nodes = NodeBlacklist()
    add_failure(nodes, "n1", "a", 0.0)
    assert nodes.count_excused("a", 1.0) == {}
    add_failure(nodes, "n1", "b", 2.0)
    add_failure(nodes, "n1", "a", 3.0)
    assert nodes.count_excused("a", 4.0) == nodes.count_excused("b", 4.0) == {"gpu": 1}
    nodes.reset_failures("a")
    assert nodes.count_excused("a", 5.0) == {}, "a new launch of a failed member starts its count at zero"


def test_at_most_max_excused_failures_are_excused() -> None:
    nodes = NodeBlacklist(lambda: ["a good one"])
    for number in range(3 * MAX_EXCUSED):
        add_failure(nodes, f"n{number}", "a", float(number))
        add_failure(nodes, f"n{number}", "b", float(number))
    assert nodes.count_excused("a", 100.0) == {"gpu": MAX_EXCUSED}


REASONS = [
    ECC,
    "the member never began (SLURM says FAILED, exit code {number}:0): srun: error: {node}: task 0: Exited",
    "OSError: [Errno 116] Stale file handle: '/shared/outputs/runs/{run}/checkpoints/step-{number}.ckpt'",
    "bash: /scratch/{run}/venv: Stale file handle (on {node})",
    "rank {number}: lost 0x7f{number}a8bb1980 of 3f2a9c{number}d41b",
]


def fail_on_nodes(nodes: NodeBlacklist, reason: str, count: int) -> None:
    for number in range(count):
        for run in ("af3290", "b71c05"):
            node = f"gpu-{number}"
            add_failure(nodes, node, run, float(number), reason.format(number=number, run=run, node=node))


@pytest.mark.parametrize("reason", REASONS)
def test_a_failure_with_the_same_cause_on_every_node_excludes_none(reason: str) -> None:
    nodes = NodeBlacklist()
    fail_on_nodes(nodes, reason, MIN_NODES - 1)
    assert len(nodes.excluded_nodes(50.0)) == MIN_NODES - 1, "so few nodes may all be bad by chance"
    fail_on_nodes(nodes, reason, MIN_NODES)
    assert nodes.excluded_nodes(50.0) == () and nodes.count_excused("af3290", 50.0) == {}


@pytest.mark.parametrize("how", ["at work", "finished", "another reason"])
def test_one_node_without_the_failure_is_enough_to_blame_the_others(how: str) -> None:
    nodes = NodeBlacklist(lambda: ["n-good"] if how == "at work" else [])
    if how == "finished":
        nodes.add_entry({"time": 1.0, "run": "c", "event": "finished", "node": "n-good"})
    elif how == "another reason":
        add_failure(nodes, "n-good", "c", 1.0, "killed from outside")
    fail_on_nodes(nodes, ECC, MIN_NODES + 2)
    assert len(nodes.excluded_nodes(50.0)) == MIN_NODES + 2
    assert nodes.count_excused("af3290", 50.0) == {"gpu": MIN_NODES + 2}


def test_a_member_that_finished_more_than_an_hour_ago_does_not_count() -> None:
    nodes = NodeBlacklist()
    nodes.add_entry({"time": 0.0, "run": "c", "event": "finished", "node": "n-good"})
    for number in range(MIN_NODES):
        for run in "ab":
            add_failure(nodes, f"n{number}", run, WINDOW_S + 10.0)
    assert nodes.excluded_nodes(WINDOW_S + 20.0) == ()


def test_an_excluded_node_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    nodes = NodeBlacklist()
    add_failure(nodes, "n1", "a", 0.0)
    add_failure(nodes, "n1", "b", 1.0)
    for _ in range(3):
        nodes.excluded_nodes(2.0)
    (record,) = caplog.records
    assert record.getMessage().startswith("n1 is excluded for an hour") and "ECC" in record.getMessage()


def test_settings_of_an_earlier_version_get_the_default_retries_of_new_kinds(tmp_path: Path) -> None:
    old = json.loads(LaunchSettings("slurm", "a:b", (), 1, 1, None, "x", SlurmCluster({"timeout_min": 60})).text())
    old["retries"] = {"killed": 7, "error": 0}
    del old["settings"]["require_gpu"]
    (tmp_path / LAUNCH_FILE).write_text(json.dumps(old))
    settings = LaunchSettings.read(tmp_path)
    assert (settings.retries["killed"], settings.retries["gpu"], settings.retries["storage"]) == (7, 3, 5)
    assert settings.cluster.require_gpu
    (tmp_path / LAUNCH_FILE).write_text(json.dumps({**old, "kind": "local"}))
    assert "gpu" not in LaunchSettings.read(tmp_path).retries, "local launches do not retry"
