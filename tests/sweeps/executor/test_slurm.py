"""Tests of a study on a SLURM cluster, with a fake cluster in virtual time (`fake_cluster`).

Jobs, nodes, the scheduler and the controller fail in all ways. Each member must still finish exactly once, or be given
up for its true reason. No journal record may be lost or duplicated, and no accepted job submitted twice. Observers must
get the correct events in order.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import repeat
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sweeps.errors import UserError
from sweeps.executor.failure import BLAMES_NODE, KINDS, NO_RETRIES
from sweeps.executor.failure import retries as retry_policy
from sweeps.executor.node.attempts import attempts
from sweeps.executor.slurm.ending import FollowedJob, JobEndings
from sweeps.executor.slurm.executor import ClusterExecutor
from sweeps.executor.slurm.handover import pickle_of
from sweeps.executor.slurm.settings import JobSettings
from sweeps.launch.ledger import Ledger, MemberState
from sweeps.launch.node_blacklist import EXCLUDED_S, MAX_EXCUSED
from sweeps.launch.status import overview
from sweeps.run.files import dump_line, parse_line
from sweeps.run.journal import JOURNAL_FILE
from sweeps.run.lease import Lease, LeaseLostError
from sweeps.run.spec import RunSpec
from sweeps.run.writer import DUPLICATE_WAIT_S
from tests.examples import every, examples
from tests.sweeps.executor.fake_cluster import (
    FILLS_THE_DISK,
    FILLS_THE_DISK_SILENTLY,
    FINDS_NO_HUB,
    FINISHES,
    FINISHES_TOO_EARLY,
    GIVES_UP,
    HANGS,
    HAS_A_SURVIVING_PROCESS,
    IS_A_DUPLICATE,
    IS_CANCELLED,
    IS_FORGOTTEN,
    IS_FORGOTTEN_AND_FINISHES,
    IS_HELD,
    IS_KILLED,
    IS_KILLED_FOR_MEMORY,
    IS_STOPPED,
    KIND,
    LACKS_ITS_PICKLE,
    LOSES_ITS_FILES,
    LOSES_ITS_GPU,
    NEVER_BEGINS,
    NODE_FAILS,
    NODE_FAILS_AND_BACK,
    NODES,
    NOT_REQUEUED,
    PREEMPTED,
    PREEMPTED_AND_BACK,
    RAISES,
    RAISES_OUT_OF_MEMORY,
    REQUEUES,
    RUNS_OUT_OF_MEMORY,
    TIMES_OUT,
    WAITS_FOR_A_RANK,
    EndlessError,
    FakeCluster,
    Fate,
    Job,
    Killed,
    Place,
    RecordingObserver,
    VirtualTime,
    light,
    member,
)


@pytest.fixture(autouse=True)
def _light(monkeypatch: pytest.MonkeyPatch) -> None:
    light(monkeypatch)


def place(
    directory: Path,
    fates: Mapping[int, Sequence[Fate]] | None = None,
    members: int = 1,
    job_settings: Mapping[str, object] | None = None,
    retries: Mapping[str, int | None] | None = None,
    virtual_ledger: bool = False,
    **cluster: object,
) -> Place:
    """Make a study; `fates` are by index of the member, `virtual_ledger`: whether the ledger uses the virtual clock."""
    specs = [member(seed) for seed in range(members)]
    by_run = {specs[number].run: fates_of_run for number, fates_of_run in (fates or {}).items()}
    fake = FakeCluster(VirtualTime(), by_run, **cluster)  # type: ignore[arg-type]
    return Place(
        directory, fake, specs, JobSettings.of(dict(job_settings or {})), retries or retry_policy(), virtual_ledger
    )


def state(states: Mapping[str, MemberState], spec: RunSpec) -> tuple[str, str | None]:
    return states[spec.run].state, states[spec.run].kind


# --- a study without faults ----------------------------------------------------------------------------------


def test_members_become_one_array_and_are_done_once(tmp_path: Path) -> None:
    here, observer = place(tmp_path, members=5), RecordingObserver()
    states = here.run([observer])
    assert here.cluster.sizes() == [5]
    assert [job.id for job in here.cluster.jobs] == ["1_0", "1_1", "1_2", "1_3", "1_4"]
    for spec in here.specs:
        assert state(states, spec) == ("finished", None)
        here.finished_once(spec.run)
        assert observer.events[spec.run] == ["queued", "started", "finished"]
        assert here.cluster.started[spec.run] == 1
    assert (observer.opened, observer.closed) == (1, [(0, 0)])
    assert observer.ticks[-1] == (0, 0, 5, 0)


def test_a_single_member_is_a_job_without_an_index(tmp_path: Path) -> None:
    here = place(tmp_path)
    here.run()
    assert [job.id for job in here.cluster.jobs] == ["1"]
    assert "--array" not in here.cluster.scripts[0]
    here.finished_once(here.specs[0].run)


def test_finished_members_are_not_submitted_again(tmp_path: Path) -> None:
    here = place(tmp_path, members=3)
    here.run()
    observer = RecordingObserver()
    assert {each.state for each in here.run([observer]).values()} == {"finished"}
    assert here.cluster.sizes() == [3]
    assert all(observer.events[spec.run] == ["finished"] for spec in here.specs)
    for spec in here.specs:
        here.finished_once(spec.run)


def test_a_failed_member_is_retried_only_if_again_is_set(tmp_path: Path) -> None:
    here = place(tmp_path, {0: [RAISES]}, members=2)
    assert state(here.run(), here.specs[0]) == ("failed", "error")
    assert state(here.run(again=False), here.specs[0]) == ("failed", "error")
    assert here.cluster.sizes() == [2]
    assert state(here.run(), here.specs[0]) == ("finished", None)
    assert here.cluster.sizes() == [2, 1]


def test_the_queue_is_queried_at_most_once_per_poll_interval(tmp_path: Path) -> None:
    here = place(tmp_path, {0: [REQUEUES] * 10}, members=2, job_settings={"poll_s": 30})
    begin = here.time.now
    here.run()
    assert here.cluster.looks <= (here.time.now - begin) / 30 + 2


# --- how a job ends, and what the study makes of it ----------------------------------------------------------


@pytest.mark.parametrize("fate", [fate for fate, kind in KIND.items() if kind is not None], ids=lambda fate: fate.state)
def test_every_end_is_classified(tmp_path: Path, fate: Fate) -> None:
    here, observer = place(tmp_path, {0: [fate]}, members=2, retries=NO_RETRIES), RecordingObserver()
    states = here.run([observer])
    spec, other = here.specs
    end_state = "stopped" if fate is IS_STOPPED else "failed"
    assert state(states, spec) == (end_state, KIND[fate])
    reason = states[spec.run].reason
    assert reason
    if fate.recorded is not None and fate.recorded[2] is not None:
        assert fate.recorded[2] in reason
    assert observer.events[spec.run][-1] == ("cancelled" if KIND[fate] == "cancelled" else end_state)
    assert here.count(spec.run, end_state) == 1
    assert observer.closed == [(int(end_state == "failed"), 0)]
    here.finished_once(other.run)
    assert here.cluster.sizes() == [2]


@pytest.mark.parametrize("remembers_s", every(5, [300.0, 3.0]))
@pytest.mark.parametrize("lag_s", [0.0, 40.0])
@pytest.mark.parametrize("fate", [fate for fate, kind in KIND.items() if kind is not None], ids=lambda fate: fate.state)
def test_the_kind_does_not_depend_on_when_accounting_answers(
    tmp_path: Path, fate: Fate, remembers_s: float, lag_s: float
) -> None:
    here = place(tmp_path, {0: [fate]}, retries=NO_RETRIES, remembers_s=remembers_s, accounting_lag_s=lag_s)
    # The job's own record or SLURM's accounting: either is enough to classify the end.
    assert state(here.run(), here.specs[0]) == ("stopped" if fate is IS_STOPPED else "failed", KIND[fate])


@pytest.mark.parametrize(
    "fate",
    [REQUEUES, PREEMPTED_AND_BACK, NODE_FAILS_AND_BACK, HAS_A_SURVIVING_PROCESS],
    ids=["asked", "preempted", "node", "copies"],
)
@pytest.mark.parametrize("times", [1, 3])
def test_a_requeued_job_is_waited_for(tmp_path: Path, fate: Fate, times: int) -> None:
    here, observer = place(tmp_path, {0: [fate] * times}, members=2), RecordingObserver()
    here.run([observer])
    spec = here.specs[0]
    here.finished_once(spec.run)
    assert here.count(spec.run, "retried") == 0
    assert here.cluster.sizes() == [2]
    assert here.cluster.started[spec.run] == times + 1
    assert set(observer.events[spec.run]) == {"queued", "started", "finished"}


def test_a_process_that_outlives_its_job_writes_nothing_twice(tmp_path: Path) -> None:
    here = place(tmp_path, {0: [HAS_A_SURVIVING_PROCESS, FINISHES]})
    here.run()
    spec = here.specs[0]
    here.finished_once(spec.run)
    assert [(each.job, each.restart) for each in attempts(here.run_dir(spec.run))] == [("1", 0), ("1", 1)]


def test_a_lost_job_that_finishes_later_counts_once(tmp_path: Path) -> None:
    here = place(tmp_path, {0: [IS_FORGOTTEN_AND_FINISHES]})
    here.run()
    spec = here.specs[0]
    here.finished_once(spec.run)
    assert here.count(spec.run, "retried") == 1
    assert here.events(spec.run)[3]["kind"] == "lost"


def test_a_missing_job_counts_as_lost_only_after_lost_after_s(tmp_path: Path) -> None:
    here = place(tmp_path, {0: [IS_FORGOTTEN]}, job_settings={"lost_after_s": 900})
    here.run()
    spec = here.specs[0]
    here.finished_once(spec.run)
    assert here.cluster.submit_times[1] - here.cluster.submit_times[0] >= 900
    assert [event["kind"] for event in here.events(spec.run) if event["event"] == "retried"] == ["lost"]


@pytest.mark.parametrize("fate", [RAISES, FILLS_THE_DISK, NOT_REQUEUED, RAISES_OUT_OF_MEMORY, GIVES_UP])
def test_without_accounting_the_jobs_own_record_counts(tmp_path: Path, fate: Fate) -> None:
    here = place(tmp_path, {0: [fate]}, retries=NO_RETRIES, accounting=False, remembers_s=1)
    begin = here.time.now
    assert state(here.run(), here.specs[0]) == ("failed", KIND[fate])
    assert here.time.now - begin < 120, "the kind is known long before the job would count as lost"


def test_while_the_scheduler_is_silent_no_job_counts_as_lost(tmp_path: Path) -> None:
    here, observer = place(tmp_path, {0: [REQUEUES]}, members=3), RecordingObserver()
    begin = here.time.now
    here.cluster.silent = lambda now: begin + 20 <= now < begin + 3_000
    here.run([observer])
    for spec in here.specs:
        here.finished_once(spec.run)
        assert here.count(spec.run, "retried") == 0
    assert here.cluster.sizes() == [3]


def test_silent_time_does_not_count_towards_lost_after_s(tmp_path: Path) -> None:
    """The time limit for a job that is not in the queue yet starts again after the scheduler was silent."""
    here = place(tmp_path, job_settings={"lost_after_s": 120})
    begin = here.time.now
    here.cluster.faults.append("shown_late")
    here.cluster.late_s = 200
    here.cluster.silent = lambda now: begin + 1 < now < begin + 150
    here.run()
    here.finished_once(here.specs[0].run)
    assert here.cluster.sizes() == [1]


def test_a_job_that_the_queue_shows_late_is_waited_for(tmp_path: Path) -> None:
    here = place(tmp_path, members=2, job_settings={"lost_after_s": 120})
    here.cluster.faults.append("shown_late")
    here.cluster.late_s = 110
    here.run(detach=True)
    assert here.time.now > 1_100, "the detached controller left before the jobs were in the queue"
    here.run()
    assert here.cluster.sizes() == [2]
    for spec in here.specs:
        here.finished_once(spec.run)


# --- attempts by kind ----------------------------------------------------------------------------------------

POLICY = retry_policy()
FATE_OF = {
    "error": RAISES,
    "out_of_memory": RUNS_OUT_OF_MEMORY,
    "disk_full": FILLS_THE_DISK,
    "preempted": PREEMPTED,
    "time_limit": TIMES_OUT,
    "gave_up": GIVES_UP,
    "node": NODE_FAILS,
    "killed": IS_KILLED,
    "hang": HANGS,
    "duplicate": IS_A_DUPLICATE,
    "gpu": LOSES_ITS_GPU,
    "storage": LOSES_ITS_FILES,
    "collective": WAITS_FOR_A_RANK,
    "network": FINDS_NO_HUB,
    "launch": NEVER_BEGINS,
    "half_submitted": LACKS_ITS_PICKLE,
    "lost": IS_FORGOTTEN,
    "cancelled": IS_CANCELLED,
    "stopped": IS_STOPPED,
    "outgrown": FINISHES_TOO_EARLY,
}


def test_every_kind_of_failure_has_a_fate_in_these_tests() -> None:
    assert FATE_OF.keys() == KINDS.keys()


@pytest.mark.slow
def test_a_duplicate_is_retried_with_growing_delays_and_never_given_up(tmp_path: Path) -> None:
    """The other copy of the run continues. Each retry costs an allocation, so the delays between retries grow."""
    here = place(tmp_path, {0: [IS_A_DUPLICATE] * 7})
    (spec,) = here.specs
    assert state(here.run(), spec) == ("finished", None)
    jobs = here.cluster.jobs_of(spec.run)
    begins = [job.options.get("begin") for job in jobs]
    assert begins == [None, *(f"now+{minutes}minutes" for minutes in (10, 20, 40, 80, 160, 240, 240))]
    assert not any(job.options.get("exclude") for job in jobs), "a duplicate is not blamed on its node"


@pytest.mark.parametrize("damage", ["a line", "another run"])
def test_an_unreadable_journal_is_an_error_and_not_a_raised_budget(
    tmp_path: Path, damage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = place(tmp_path)
    (spec,) = here.specs
    path = tmp_path / "runs" / spec.run / JOURNAL_FILE
    judge = JobEndings.outcome

    def spoil_and_judge(endings: JobEndings, each: FollowedJob, nodes: int) -> object:
        lines = path.read_bytes().splitlines(keepends=True)
        if damage == "a line":  # damage line 4 and cut off the last one
            path.write_bytes(b"".join([*lines[:3], b"<<<\n", *lines[4:-1]]))
        else:
            header = {**(parse_line(lines[0]) or {}), "run": "somebody"}
            path.write_bytes(b"".join([dump_line(header, checksum=True), *lines[1:]]))
        return judge(endings, each, nodes)

    monkeypatch.setattr(JobEndings, "outcome", spoil_and_judge)
    states = here.run()
    assert state(states, spec) == ("failed", "error")
    reason = states[spec.run].reason
    assert reason is not None and str(path) in reason
    assert ("line 4" if damage == "a line" else "another run, somebody") in reason
    (view,) = overview(tmp_path)
    assert (view.state, view.reason) == ("failed", reason)


@pytest.mark.parametrize("kind", [kind for kind, limit in POLICY.items() if limit is not None])
def test_a_member_fails_after_the_allowed_retries_of_its_kind(tmp_path: Path, kind: str) -> None:
    limit = POLICY[kind]
    assert limit is not None
    here, observer = place(tmp_path, {0: [FATE_OF[kind]] * (limit + 1)}), RecordingObserver()
    states = here.run([observer])
    spec = here.specs[0]
    assert state(states, spec) == ("stopped" if kind == "stopped" else "failed", kind)
    assert states[spec.run].attempts == limit + 1 == len(here.cluster.jobs_of(spec.run))
    assert [event["kind"] for event in here.events(spec.run) if event["event"] == "retried"] == [kind] * limit
    assert observer.events[spec.run].count("retried") == limit


@pytest.mark.parametrize("accounting", [{"accounting": False}, {"accounting_lag_s": 60.0}, {}])
def test_a_full_disk_is_recognized_by_the_exit_code_before_accounting(
    tmp_path: Path, accounting: dict[str, object]
) -> None:
    here = place(tmp_path, {0: [FILLS_THE_DISK_SILENTLY]}, **accounting)
    assert state(here.run(), here.specs[0]) == ("failed", "disk_full")


@pytest.mark.parametrize(
    "kind", every(14, every(7, [kind for kind, limit in POLICY.items() if limit != 0], pytest.mark.full))
)
def test_a_member_may_finish_at_its_last_retry(tmp_path: Path, kind: str) -> None:
    times = POLICY[kind] or 12
    here = place(tmp_path, {0: [FATE_OF[kind]] * times})
    here.run()
    here.finished_once(here.specs[0].run)
    assert here.count(here.specs[0].run, "retried") == times
    assert len(here.cluster.jobs) == times + 1


def test_retries_are_counted_per_kind(tmp_path: Path) -> None:
    fates = [NODE_FAILS, RUNS_OUT_OF_MEMORY, IS_KILLED, NODE_FAILS, NEVER_BEGINS, IS_KILLED, IS_FORGOTTEN, TIMES_OUT]
    here = place(tmp_path, {0: fates, 1: [*fates, RUNS_OUT_OF_MEMORY]}, members=2)
    states = here.run()
    here.finished_once(here.specs[0].run)
    assert state(states, here.specs[1]) == ("failed", "out_of_memory")


def test_a_new_launch_resets_the_retries(tmp_path: Path) -> None:
    here = place(tmp_path, {0: [NEVER_BEGINS] * 3})
    assert state(here.run(), here.specs[0]) == ("failed", "launch")
    here.run()
    assert here.count(here.specs[0].run, "finished") == 1
    assert len(here.cluster.jobs) == 4


def memory_option(script: str) -> str | None:
    match = re.search(r"(?m)^#SBATCH --mem=(\S+)$", script)
    return match[1] if match else None


def exclude_option(script: str) -> str | None:
    match = re.search(r"(?m)^#SBATCH --exclude=(\S+)$", script)
    return match[1].strip("'") if match else None


@pytest.mark.parametrize("fate", [RUNS_OUT_OF_MEMORY, RAISES_OUT_OF_MEMORY, IS_KILLED_FOR_MEMORY])
def test_a_retry_after_out_of_memory_asks_for_half_as_much_memory_again(tmp_path: Path, fate: Fate) -> None:
    policy = retry_policy({"out_of_memory": 3})
    here = place(tmp_path, {0: [fate] * 3}, job_settings={"mem_gb": 8}, retries=policy)
    here.run()
    here.finished_once(here.specs[0].run)
    assert [memory_option(script) for script in here.cluster.scripts] == ["8GB", "12GB", "18GB", "27GB"]


def with_layout(spec: RunSpec, devices: int, nodes: int = 1) -> RunSpec:
    return replace(spec, config={**spec.config, "strategy": {"name": "fsdp2", "nodes": nodes, "devices": devices}})


def ranks(script: str) -> list[str]:
    """Return the numbers of nodes, of tasks per node and of GPUs per node that a job asks for."""
    return re.findall(r"(?m)^#SBATCH --(?:nodes|ntasks-per-node|gpus-per-node)=(\S+)$", script)


@pytest.mark.parametrize(("gpus", "expected_gpus"), [(1, "4"), ("a100:2", "a100:4"), (6, "6"), (None, None)])
def test_each_member_has_the_ranks_that_its_strategy_asks_for(
    tmp_path: Path, gpus: int | str | None, expected_gpus: str | None
) -> None:
    """Members that need the same resources share an array; a retry asks for the same resources again."""
    job_settings = {} if gpus is None else {"gpus_per_node": gpus}
    here = place(tmp_path, {2: [NODE_FAILS]}, members=4, job_settings=job_settings)
    here.specs[1:3] = [with_layout(spec, 4, nodes=2) for spec in here.specs[1:3]]
    here.run()
    for spec in here.specs:
        here.finished_once(spec.run)
    large = sorted(["2", "4", *([expected_gpus] if expected_gpus else [])])
    assert [sorted(ranks(script)) == large for script in here.cluster.scripts] == [False, True, False, True]
    assert here.cluster.sizes() == [1, 2, 1, 1]


def test_unset_memory_does_not_grow(tmp_path: Path) -> None:
    here = place(tmp_path, {0: [RUNS_OUT_OF_MEMORY]})
    here.run()
    assert [memory_option(script) for script in here.cluster.scripts] == [None, None]


@pytest.mark.parametrize("fate", [NODE_FAILS, IS_KILLED, IS_HELD], ids=["node", "killed", "held"])
def test_a_retry_excludes_the_failed_nodes_and_the_users_own(tmp_path: Path, fate: Fate) -> None:
    here = place(tmp_path, {0: [fate, fate]}, job_settings={"exclude": "n7"})
    here.run()
    here.finished_once(here.specs[0].run)
    used = [each.node for each in attempts(here.run_dir(here.specs[0].run))]
    assert len(set(used)) == 3
    assert [exclude_option(script) for script in here.cluster.scripts] == [
        "n7",
        f"n7,{used[0]}",
        f"n7,{used[0]},{used[1]}",
    ]


def test_a_job_held_after_a_failed_launch_is_cancelled_and_retried(tmp_path: Path) -> None:
    here = place(tmp_path, {0: [IS_HELD]})
    here.run()
    spec = here.specs[0]
    here.finished_once(spec.run)
    assert here.cluster.cancelled == [here.cluster.jobs[0].id]
    (retried,) = [event for event in here.events(spec.run) if event["event"] == "retried"]
    assert retried["kind"] == "node" and "launch failed requeued held" in retried["reason"]


def test_a_node_on_which_a_launch_failed_is_excluded(tmp_path: Path) -> None:
    here = place(tmp_path, {0: [NEVER_BEGINS]})
    here.run()
    here.finished_once(here.specs[0].run)
    failed_on = here.events(here.specs[0].run)[3]["node"]
    assert [exclude_option(script) for script in here.cluster.scripts] == [None, failed_on]


@pytest.mark.parametrize("fate", [TIMES_OUT, PREEMPTED, NOT_REQUEUED, RUNS_OUT_OF_MEMORY, IS_FORGOTTEN])
def test_failures_without_a_guilty_node_exclude_no_node(tmp_path: Path, fate: Fate) -> None:
    here = place(tmp_path, {0: [fate]})
    here.run()
    assert [exclude_option(script) for script in here.cluster.scripts] == [None, None]


def test_members_with_different_resources_are_submitted_separately(tmp_path: Path) -> None:
    fates = {0: [RUNS_OUT_OF_MEMORY], 1: [TIMES_OUT], 2: [NODE_FAILS], 3: [RUNS_OUT_OF_MEMORY]}
    here = place(tmp_path, fates, members=4, job_settings={"mem_gb": 4})
    here.run()
    for spec in here.specs:
        here.finished_once(spec.run)
    node = next(entry["node"] for entry in here.events(here.specs[2].run) if "node" in entry)
    needs = {job.run: (memory_option(script), exclude_option(script)) for job, script in last_scripts(here)}
    assert [needs[spec.run] for spec in here.specs] == [("6GB", None), ("4GB", None), ("4GB", node), ("6GB", None)]


def last_scripts(here: Place) -> list[tuple[Job, str]]:
    """Return each job with its batch script, in the order of submission."""
    names = {re.findall(r"(?m)^#SBATCH --job-name=(.*)$", script)[0]: script for script in here.cluster.scripts}
    return [(job, names[job.name]) for job in here.cluster.jobs]


@pytest.mark.parametrize(
    "first_fate", [REQUEUES, PREEMPTED_AND_BACK, NODE_FAILS_AND_BACK], ids=["asked", "preempted", "node"]
)
def test_a_requeued_job_that_never_begins_is_a_launch_failure(tmp_path: Path, first_fate: Fate) -> None:
    here = place(tmp_path, {0: [first_fate, NEVER_BEGINS]}, retries=NO_RETRIES)
    assert state(here.run(), here.specs[0]) == ("failed", "launch")


# --- limits of the cluster -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given_size", "limit", "sizes"),
    [(None, 1001, [7]), (3, 1001, [3, 3, 1]), (None, 4, [4, 3]), (3, 2, [2, 2, 2, 1]), (1, 1001, [1] * 7)],
)
def test_arrays_respect_the_size_limits_and_are_submitted_at_once(
    tmp_path: Path, given_size: int | None, limit: int, sizes: list[int]
) -> None:
    here = place(tmp_path, members=7, job_settings={"array_size": given_size}, array_limit=limit)
    here.run()
    assert here.cluster.sizes() == sizes
    assert len(set(here.cluster.submit_times)) == 1, "all arrays are submitted before the first one ends"
    for spec in here.specs:
        here.finished_once(spec.run)


def test_an_array_rejected_as_too_large_is_halved_until_accepted(tmp_path: Path) -> None:
    here = place(tmp_path, members=8, array_limit=1001, true_array_limit=3)
    here.run()
    assert here.cluster.sizes() == [2, 2, 2, 2]
    assert len(here.cluster.submit_times) == 6
    for spec in here.specs:
        here.finished_once(spec.run)
        assert here.cluster.started[spec.run] == 1


def test_a_job_limit_is_met_with_few_refused_submissions(tmp_path: Path) -> None:
    here = place(tmp_path, members=6, submit_limit=2)
    begin = here.time.now
    here.run()
    for spec in here.specs:
        here.finished_once(spec.run)
        assert here.cluster.started[spec.run] == 1
    refused = len(here.cluster.submit_times) - len(here.cluster.sizes())
    minutes = (here.time.now - begin) / 60
    assert refused <= 4 + 4 * minutes
    pauses = [b - a for a, b in zip(here.cluster.submit_times, here.cluster.submit_times[1:], strict=False)]
    assert all(pause == 0 or pause >= 4.9 for pause in pauses)


def test_the_pauses_between_refusals_grow_to_minutes(tmp_path: Path) -> None:
    here = place(tmp_path)
    here.cluster.faults.extend(["limit"] * 12)
    here.run()
    pauses = [b - a for a, b in zip(here.cluster.submit_times, here.cluster.submit_times[1:], strict=False)]
    assert len(pauses) == 12
    assert pauses[:4] == pytest.approx([5, 10, 20, 40], abs=11)
    assert pauses[-1] == pytest.approx(300, abs=11)
    here.finished_once(here.specs[0].run)


def test_a_permanent_refusal_is_a_user_error_and_the_next_launch_submits(tmp_path: Path) -> None:
    here = place(tmp_path, members=2)
    here.cluster.faults.append("refused")
    with pytest.raises(UserError, match="partition"):
        here.run()
    here.run()
    for spec in here.specs:
        here.finished_once(spec.run)
        assert here.cluster.started[spec.run] == 1


def test_running_jobs_survive_a_permanent_refusal(tmp_path: Path) -> None:
    here, observer = place(tmp_path, members=4, job_settings={"array_size": 2}), RecordingObserver()
    here.cluster.faults.extend([None, "refused"])
    with pytest.raises(UserError, match="partition"):
        here.run([observer])
    here.run()
    for spec in here.specs:
        here.finished_once(spec.run)
        assert here.cluster.started[spec.run] == 1


# --- submissions without an answer ---------------------------------------------------------------------------


@pytest.mark.parametrize("members", [1, 3])
def test_a_submission_whose_answer_was_lost_is_found_in_the_queue(tmp_path: Path, members: int) -> None:
    here = place(tmp_path, members=members)
    here.cluster.faults.append("reply_lost")
    here.run()
    assert here.cluster.sizes() == [members]
    assert here.cluster.cancelled == []
    for spec in here.specs:
        here.finished_once(spec.run)
        assert here.cluster.started[spec.run] == 1


@pytest.mark.parametrize("members", [1, 3])
def test_a_submission_that_never_arrived_is_made_again(tmp_path: Path, members: int) -> None:
    here = place(tmp_path, members=members)
    here.cluster.faults.extend(["no_answer", "no_answer"])
    here.run()
    assert here.cluster.sizes() == [members]
    for spec in here.specs:
        here.finished_once(spec.run)


def test_a_submission_accepted_after_it_was_given_up_is_cancelled(tmp_path: Path) -> None:
    here = place(tmp_path, {0: [REQUEUES] * 4}, members=2, wait_s=60)
    here.cluster.faults.append("late")
    here.cluster.late_s = 40
    here.run()
    assert here.cluster.sizes() == [2, 2]
    assert set(here.cluster.cancelled) == {"1"}
    for spec in here.specs:
        here.finished_once(spec.run)
        assert here.cluster.started[spec.run] == 1 + 4 * (spec == here.specs[0])


# --- jobs of other users -------------------------------------------------------------------------------------


def test_a_reused_job_id_is_not_taken_for_ours(tmp_path: Path) -> None:
    here = place(tmp_path, {0: [IS_FORGOTTEN]})

    def foreign_once_forgotten() -> None:
        if any(job.forgotten for job in here.cluster.jobs) and len(here.cluster.jobs) == 1:
            here.cluster.foreign(1, state="RUNNING")

    here.time.then.append(foreign_once_forgotten)
    here.run()
    spec = here.specs[0]
    here.finished_once(spec.run)
    assert [event["kind"] for event in here.events(spec.run) if event["event"] == "retried"] == ["lost"]


def test_a_job_id_reused_between_controllers_is_not_adopted(tmp_path: Path) -> None:
    here = place(tmp_path, {0: [IS_FORGOTTEN]}, members=2)
    here.run(detach=True)
    here.time.sleep(100)
    here.cluster.foreign(1, state="COMPLETED")
    here.run()
    for spec in here.specs:
        here.finished_once(spec.run)
    assert here.count(here.specs[0].run, "retried") == 1
    assert here.count(here.specs[1].run, "retried") == 0


def test_accounting_of_a_reused_job_id_is_ignored(tmp_path: Path) -> None:
    here = place(tmp_path, {0: [IS_FORGOTTEN]})
    here.run(detach=True)
    here.time.sleep(100)
    here.cluster.foreign(1, state="OUT_OF_MEMORY")
    here.run()
    spec = here.specs[0]
    here.finished_once(spec.run)
    assert [event["kind"] for event in here.events(spec.run) if event["event"] == "retried"] == ["lost"]


def test_a_retried_member_is_reported_as_queued_again(tmp_path: Path) -> None:
    """This holds even if no poll saw it run."""
    short = replace(NEVER_BEGINS, lasts_s=1.0)
    here, observer = place(tmp_path, {0: [short]}, job_settings={"poll_s": 60}), RecordingObserver()
    here.run([observer])
    assert observer.events[here.specs[0].run][:3] == ["queued", "retried", "queued"]


def test_jobs_of_other_studies_are_left_alone(tmp_path: Path) -> None:
    here = place(tmp_path, members=2)
    other = here.cluster.foreign(999)
    here.cluster.faults.append("late")
    here.run()
    assert other.state == "RUNNING"
    assert "999" not in here.cluster.cancelled


# --- detached launches, and later controllers ----------------------------------------------------------------


def test_a_detached_launch_leaves_after_submitting_and_a_later_one_collects(tmp_path: Path) -> None:
    here, observer = (
        place(tmp_path, {1: [RAISES], 2: [NODE_FAILS]}, members=4, job_settings={"array_size": 3}),
        RecordingObserver(),
    )
    begin = here.time.now
    states = here.run([observer], detach=True)
    assert here.time.now - begin < 60
    assert {each.state for each in states.values()} == {"started"}
    assert here.cluster.sizes() == [3, 1]
    assert observer.closed == [(0, 4)]
    here.time.sleep(5_000)
    states, observer = here.run([observer := RecordingObserver()], again=False), observer
    assert state(states, here.specs[1]) == ("failed", "error")
    for spec in (here.specs[0], here.specs[2], here.specs[3]):
        here.finished_once(spec.run)
    assert here.count(here.specs[2].run, "retried") == 1
    assert here.cluster.sizes() == [3, 1, 1]


def test_repeated_detached_launches_complete_a_study(tmp_path: Path) -> None:
    here = place(tmp_path, {0: [NODE_FAILS, TIMES_OUT], 1: [REQUEUES]}, members=3)
    for _ in range(40):
        states = here.run(detach=True, again=False)
        if {each.state for each in states.values()} == {"finished"}:
            break
        here.time.sleep(120)
    for spec in here.specs:
        here.finished_once(spec.run)
    assert here.cluster.sizes() == [3, 1, 1]


def test_a_detached_launch_leaves_members_that_exceed_the_job_limit(tmp_path: Path) -> None:
    here, observer = place(tmp_path, members=4, job_settings={"array_size": 2}, submit_limit=2), RecordingObserver()
    here.run([observer], detach=True)
    assert here.cluster.sizes() == [2]
    assert observer.closed == [(0, 4)]
    here.time.sleep(1_000)
    here.run(again=False)
    for spec in here.specs:
        here.finished_once(spec.run)
        assert here.cluster.started[spec.run] == 1


def test_a_detached_launch_submits_all_although_its_arrays_were_too_large(tmp_path: Path) -> None:
    here = place(tmp_path, members=8, array_limit=1001, true_array_limit=2)
    here.run(detach=True)
    assert here.cluster.sizes() == [2, 2, 2, 2]


def test_a_controller_without_the_lease_submits_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = place(tmp_path, members=2)

    def lost(lease: Lease) -> None:
        raise LeaseLostError("taken over")

    monkeypatch.setattr(Lease, "check", lost)
    with pytest.raises(LeaseLostError):
        here.run()
    assert here.cluster.jobs == []


# --- a controller that is killed -----------------------------------------------------------------------------

WRITES = 40


def one_kill(where: str, number: int) -> Iterator[tuple[str, int] | None]:
    yield (where, number)


@pytest.mark.parametrize("gap_s", every(6, [0.0, 30.0, 150.0]))
@pytest.mark.parametrize("members", [1, 3])
def test_a_controller_killed_at_any_ledger_write_causes_no_second_submission(
    tmp_path: Path, members: int, gap_s: float
) -> None:
    killed = 0
    for where in ("before", "after"):
        for number in range(1, WRITES):
            here = place(tmp_path / f"{where}{number}", {0: [REQUEUES]}, members=members)
            here.until_done(one_kill(where, number), gap_s)
            for spec in here.specs:
                here.finished_once(spec.run)
                assert here.cluster.started[spec.run] == 1 + (spec == here.specs[0]), (where, number)
            assert here.cluster.sizes() == [members], (where, number)
            writes = len({(entry["event"], entry["time"]) for entry in Ledger(here.directory).entries()})
            if number > writes + members:
                break
            killed += 1
    assert killed >= 2 * (members + 3)


@pytest.mark.parametrize("members", every(8, [1, 3]))
@pytest.mark.parametrize(("where", "number"), [("after", 1), ("after", 2), ("before", 2), ("before", 3), ("after", 3)])
@pytest.mark.parametrize("gap_s", [0.0, 45.0])
def test_a_study_finishes_although_every_controller_is_killed(
    tmp_path: Path, members: int, where: str, number: int, gap_s: float
) -> None:
    fates = {0: [NODE_FAILS, TIMES_OUT], members - 1: [IS_KILLED]}
    here = place(tmp_path, fates, members=members)
    here.until_done(repeat((where, number), 60), gap_s)
    for spec in here.specs:
        here.finished_once(spec.run)
        jobs = 1 + here.count(spec.run, "retried")
        assert len(here.cluster.jobs_of(spec.run)) == jobs == here.cluster.started[spec.run]


@pytest.mark.parametrize("members", [1, 3])
@pytest.mark.parametrize("fault", ["killed_before", "killed_after"])
@pytest.mark.parametrize("gap_s", [0.0, 30.0, 200.0])
def test_a_controller_killed_during_sbatch_causes_no_second_submission(
    tmp_path: Path, members: int, fault: str, gap_s: float
) -> None:
    here = place(tmp_path, members=members)
    here.cluster.faults.append(fault)
    here.until_done(iter(()), gap_s)
    assert here.cluster.sizes() == [members]
    for spec in here.specs:
        here.finished_once(spec.run)
        assert here.cluster.started[spec.run] == 1


@pytest.mark.parametrize("fault", ["killed_before", "killed_after"])
def test_a_controller_killed_while_submitting_the_second_of_three_arrays(tmp_path: Path, fault: str) -> None:
    here = place(tmp_path, members=6, job_settings={"array_size": 2})
    here.cluster.faults.extend([None, fault])
    here.until_done(iter(()))
    assert sorted(here.cluster.sizes()) == [2, 2, 2]
    for spec in here.specs:
        here.finished_once(spec.run)
        assert here.cluster.started[spec.run] == 1


@pytest.mark.parametrize("members", [1, 3])
@pytest.mark.parametrize("gap_s", [0.0, 4.0])
def test_the_next_controller_completes_a_half_made_submission(tmp_path: Path, members: int, gap_s: float) -> None:
    """The first controller is killed after sbatch accepted the jobs and before submitit named their pickles."""
    here = place(tmp_path, members=members)
    here.cluster.faults.append("killed_between")
    with pytest.raises(Killed):
        here.run()
    jobs = {job.id for job in here.cluster.jobs}
    (folder,) = (tmp_path / "jobs").iterdir()
    assert len(jobs) == members and not any((folder / pickle_of(job)).exists() for job in jobs)
    here.until_done(iter(()), gap_s)
    assert here.cluster.sizes() == [members]
    for spec in here.specs:
        here.finished_once(spec.run)
        assert here.cluster.started[spec.run] == 1


@pytest.mark.parametrize("members", [1, 3])
@pytest.mark.parametrize("accounting", [True, False])
def test_jobs_without_pickles_are_retried_at_no_cost_to_the_member(
    tmp_path: Path, members: int, accounting: bool
) -> None:
    """The next controller comes too late: submitit in the jobs waits one minute for the pickle, then fails."""
    none = dict.fromkeys(POLICY, 0) | {"half_submitted": POLICY["half_submitted"]}
    here = place(tmp_path, members=members, retries=none, accounting=accounting)
    for _ in range(7):
        here.cluster.faults.append("killed_between")
        with pytest.raises(Killed):
            here.run()
        here.time.sleep(200.0)
    here.run()
    for spec in here.specs:
        here.finished_once(spec.run)
        kinds = [entry["kind"] for entry in here.events(spec.run) if entry["event"] == "retried"]
        assert kinds == ["half_submitted"] * 7
        assert here.cluster.started[spec.run] == 8 and here.cluster.begun[spec.run] == 1
        assert failed_nodes(here, spec.run) == [], "not blamed on a node"


def test_a_missing_pickle_of_an_earlier_versions_job_is_a_launch_failure(tmp_path: Path) -> None:
    """Versions that did not use submitit wrote `submit.sh` into a submission's folder; that file marks such a job."""
    here = place(tmp_path, {0: [LACKS_ITS_PICKLE]})
    here.run(detach=True)
    (folder,) = (tmp_path / "jobs").iterdir()
    (folder / "submit.sh").touch()
    here.run()
    assert [e["kind"] for e in here.events(here.specs[0].run) if e["event"] == "retried"] == ["launch"]


def test_an_unrecorded_retry_is_recorded_by_the_next_controller(tmp_path: Path) -> None:
    for number in range(1, 12):
        for where in ("before", "after"):
            here = place(tmp_path / f"{where}{number}", {0: [NODE_FAILS, IS_KILLED]}, job_settings={"mem_gb": 2})
            here.until_done(one_kill(where, number), 40.0)
            spec = here.specs[0]
            here.finished_once(spec.run)
            assert [e["kind"] for e in here.events(spec.run) if e["event"] == "retried"] == ["node", "killed"]
            assert len(here.cluster.jobs_of(spec.run)) == 3


def test_an_unrecorded_failure_is_recorded_by_the_next_controller(tmp_path: Path) -> None:
    for number in range(1, 6):
        for where in ("before", "after"):
            here = place(tmp_path / f"{where}{number}", {0: [RAISES]})
            states = here.until_done(one_kill(where, number), 40.0)
            assert state(states, here.specs[0]) == ("failed", "error")
            assert here.count(here.specs[0].run, "failed") == 1
            assert len(here.cluster.jobs) == 1


@pytest.mark.parametrize("fate", [RAISES, TIMES_OUT, REQUEUES])
@pytest.mark.parametrize("members", [1, 2])
def test_a_job_that_ended_before_its_id_was_recorded_is_not_repeated(tmp_path: Path, fate: Fate, members: int) -> None:
    """A controller is killed after sbatch accepted the job, before the ledger has its id.

    The next one starts when the queue no longer shows how the job ended.
    """
    here = place(tmp_path, {number: [fate] for number in range(members)}, members=members, remembers_s=60)
    here.cluster.faults.append("killed_after")
    here.until_done(iter(()), gap_s=1_000)
    for spec in here.specs:
        assert here.cluster.started[spec.run] == 1 + (KIND[fate] == "time_limit") + (fate is REQUEUES)
        if KIND[fate] is not None:
            assert [e["kind"] for e in here.events(spec.run) if e["event"] in ("retried", "failed")] == [KIND[fate]]


def test_a_silent_scheduler_stops_a_controller_with_an_unanswered_submission(tmp_path: Path) -> None:
    here = place(tmp_path, members=2)
    here.cluster.faults.append("killed_after")
    with pytest.raises(Killed):
        here.run()
    here.cluster.silent = lambda now: True
    with pytest.raises(UserError, match="does not answer"):
        here.run()
    here.cluster.silent = lambda now: False
    here.run()
    assert here.cluster.sizes() == [2]
    for spec in here.specs:
        here.finished_once(spec.run)


@pytest.mark.parametrize("where", ["no_answer", "late"])
def test_the_next_controller_cancels_a_submission_that_was_given_up(tmp_path: Path, where: str) -> None:
    here = place(tmp_path, {0: [REQUEUES] * 6}, wait_s=200)
    here.cluster.faults.append(where)
    here.cluster.late_s = 60
    # Ledger writes: planned, submitting, submitting again, started. Kill it after the second submission was accepted.
    with pytest.raises(Killed):
        here.run(killed_at=("after", 4))
    assert len(here.cluster.submit_times) == 2
    here.time.sleep(80)
    here.run()
    here.finished_once(here.specs[0].run)
    assert len({job.id for job in here.cluster.jobs if job.state == "COMPLETED"}) == 1
    first = here.cluster.jobs[0]
    assert where == "no_answer" or first.state == "CANCELLED"


# --- random faults in random order ---------------------------------------------------------------------------

HARMLESS = [REQUEUES, PREEMPTED_AND_BACK, NODE_FAILS_AND_BACK]
ENDS = [fate for fate, kind in KIND.items() if kind is not None]


def expected(fates: Sequence[Fate], policy: Mapping[str, int | None]) -> tuple[str, int, int]:
    """Return the expected end of a member (`finished` or kind of failure), number of starts and number of jobs."""
    spent: dict[str, int] = {}
    jobs = 1
    for number, fate in enumerate([*fates, FINISHES], start=1):
        kind = KIND[fate]
        if fate is FINISHES:
            return "finished", number, jobs
        if kind is None:
            continue
        limit = policy[kind]
        if limit is not None and spent.get(kind, 0) >= limit:
            return kind, number, jobs
        spent[kind] = spent.get(kind, 0) + 1
        jobs += 1
    raise AssertionError


def bad_nodes(here: Place) -> set[str]:
    """Return the nodes on which at least two members failed."""
    runs: dict[str, set[str]] = {}
    for spec in here.specs:
        for entry in here.events(spec.run):
            if "node" in entry and entry["event"] != "finished":
                runs.setdefault(entry["node"], set()).add(spec.run)
    return {node for node, who in runs.items() if len(who) > 1}


fates_of_a_run = st.lists(st.sampled_from([*HARMLESS, *ENDS]), max_size=4)
kill_points = st.lists(
    st.one_of(st.none(), st.tuples(st.sampled_from(["before", "after"]), st.integers(1, 9))), max_size=5
)


@pytest.mark.slow
@settings(max_examples=examples(120), derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    fates=st.lists(fates_of_a_run, min_size=1, max_size=6),
    kills=kill_points,
    gap_s=st.sampled_from([0.0, 7.0, 55.0, 250.0]),
    array_size=st.sampled_from([None, 1, 2, 4]),
    poll_s=st.sampled_from([5, 10, 60]),
    accounting_lag_s=st.sampled_from([0.0, 20.0]),
    silence=st.lists(st.tuples(st.integers(0, 900), st.integers(1, 400)), max_size=3),
    limit=st.sampled_from([None, 2, 5]),
    limit_faults=st.lists(st.sampled_from([None, None, None, "limit"]), max_size=4),
)
def test_under_random_faults_each_member_finishes_once_or_fails_for_its_true_reason(
    tmp_path_factory: pytest.TempPathFactory,
    fates: list[list[Fate]],
    kills: list[tuple[str, int] | None],
    gap_s: float,
    array_size: int | None,
    poll_s: int,
    accounting_lag_s: float,
    silence: list[tuple[int, int]],
    limit: int | None,
    limit_faults: list[str | None],
) -> None:
    here = place(
        tmp_path_factory.mktemp("study"),
        dict(enumerate(fates)),
        members=len(fates),
        job_settings={"array_size": array_size, "poll_s": poll_s, "mem_gb": 2},
        accounting_lag_s=accounting_lag_s,
        submit_limit=limit,
        remembers_s=600.0,
    )
    begin = here.time.now
    here.cluster.faults.extend(limit_faults)
    here.cluster.silent = lambda now: any(begin + at <= now < begin + at + length for at, length in silence)
    controllers = iter([*kills, *repeat(None, 40)])
    while True:
        try:
            states = here.until_done(controllers, gap_s)
            break
        except UserError:
            here.time.sleep(100)  # a controller stops if it needs an answer and the scheduler is silent
    assert here.time.now - begin < 60_000
    for spec, fates_of_member in zip(here.specs, fates, strict=True):
        excused = [entry for entry in here.events(spec.run) if "node" in entry and entry["node"] in bad_nodes(here)]
        if excused:
            continue  # failures on bad nodes do not count; the tests of bad nodes below check those attempts
        kind, starts, jobs = expected(fates_of_member, here.retries)
        assert here.cluster.started[spec.run] == starts
        assert len(here.cluster.jobs_of(spec.run)) == jobs
        if kind == "finished":
            here.finished_once(spec.run)
        else:
            ended = "stopped" if kind == "stopped" else "failed"
            assert state(states, spec) == (ended, kind)
            assert here.count(spec.run, ended) == 1
            assert here.count(spec.run, "finished") == 0
    assert here.cluster.living() == []
    if limit is None:
        assert len(here.cluster.submit_times) <= 8 * len(fates) + len(limit_faults) + 5


@settings(max_examples=examples(60), derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    fates=st.lists(
        st.lists(
            st.sampled_from([*HARMLESS, HAS_A_SURVIVING_PROCESS, IS_FORGOTTEN_AND_FINISHES, PREEMPTED, TIMES_OUT]),
            max_size=3,
        ),
        min_size=1,
        max_size=4,
    ),
    faults=st.lists(
        st.sampled_from(
            [None, "limit", "no_answer", "reply_lost", "late", "killed_before", "killed_between", "killed_after"]
        ),
        max_size=8,
    ),
    kills=kill_points,
    gap_s=st.sampled_from([0.0, 20.0, 150.0]),
    late_s=st.sampled_from([3.0, 30.0, 200.0]),
    silence=st.lists(st.tuples(st.integers(0, 300), st.integers(1, 200)), max_size=2),
)
def test_under_random_submission_faults_nothing_is_lost_or_duplicated(
    tmp_path_factory: pytest.TempPathFactory,
    fates: list[list[Fate]],
    faults: list[str | None],
    kills: list[tuple[str, int] | None],
    gap_s: float,
    late_s: float,
    silence: list[tuple[int, int]],
) -> None:
    policy = retry_policy({"cancelled": 5, "lost": 20})
    here = place(
        tmp_path_factory.mktemp("study"),
        dict(enumerate(fates)),
        members=len(fates),
        job_settings={"array_size": 2},
        retries=policy,
        remembers_s=600.0,
    )
    begin = here.time.now
    here.cluster.faults.extend(faults)
    here.cluster.late_s = late_s
    here.cluster.silent = lambda now: any(begin + at <= now < begin + at + length for at, length in silence)
    controllers = iter([*kills, *repeat(None, 60)])
    while True:
        try:
            states = here.until_done(controllers, gap_s)
            break
        except UserError:
            here.time.sleep(50)
    assert here.time.now - begin < 60_000
    for spec in here.specs:
        assert state(states, spec) == ("finished", None)
        here.finished_once(spec.run)


# --- bad nodes ----------------------------------------------------------------------------------------------

SECONDS = 2.0
# A node that fails its jobs within seconds is free again at once, and gets the next job.
BLACK_HOLES = [replace(fate, lasts_s=SECONDS) for fate in (NEVER_BEGINS, LOSES_ITS_GPU, LOSES_ITS_FILES, IS_KILLED)]


def failed_nodes(here: Place, run: str) -> list[str]:
    """Return the nodes on which a run failed."""
    return [entry["node"] for entry in here.events(run) if "node" in entry and entry["event"] != "finished"]


@pytest.mark.parametrize("fate", BLACK_HOLES, ids=lambda fate: KIND[replace(fate, lasts_s=60.0)])
def test_failures_on_two_bad_nodes_do_not_count_against_the_members(tmp_path: Path, fate: Fate) -> None:
    here = place(tmp_path, members=6, job_settings={"exclude": "n4,n5,n6,n7"})
    here.cluster.bad = dict.fromkeys(("n1", "n2"), fate)
    states = here.run()
    for spec in here.specs:
        assert state(states, spec) == ("finished", None)
        here.finished_once(spec.run)
        assert len(failed_nodes(here, spec.run)) == len(set(failed_nodes(here, spec.run))), (
            "a node failed a member twice"
        )


def on_two_nodes(tmp_path: Path, members: int) -> Place:
    """Run members on n1, which is bad, and n2: members with odd numbers start on n1, the others on n2."""
    elsewhere = ",".join(node for node in NODES if node not in ("n1", "n2"))
    here = place(tmp_path, members=members, job_settings={"exclude": elsewhere}, virtual_ledger=True)
    here.cluster.bad = {"n1": LOSES_ITS_GPU}
    here.run()
    assert [len(failed_nodes(here, spec.run)) for spec in here.specs] == [number % 2 for number in range(members)]
    return here


def n1_is_excluded_for_a_new_member(here: Place) -> bool:
    """Run a new member, which has not failed yet, and return whether n1 was excluded for it."""
    here.specs = [*here.specs, member(len(here.specs))]
    here.run()
    return "n1" in (exclude_option(here.cluster.scripts[-1 - here.count(here.specs[-1].run, "retried")]) or "").split(
        ","
    )


def test_a_node_that_failed_two_members_is_excluded_for_all(tmp_path: Path) -> None:
    here = on_two_nodes(tmp_path, members=4)
    assert n1_is_excluded_for_a_new_member(here), "a new controller reads the bad node from the ledger"


def test_a_node_that_failed_one_member_is_not_excluded_for_others(tmp_path: Path) -> None:
    here = on_two_nodes(tmp_path, members=2)
    assert not n1_is_excluded_for_a_new_member(here)


def test_an_excluded_node_returns_after_an_hour_and_needs_two_new_failures(tmp_path: Path) -> None:
    here = on_two_nodes(tmp_path, members=4)
    here.time.sleep(EXCLUDED_S - 600)
    assert n1_is_excluded_for_a_new_member(here)
    here.time.sleep(600)
    assert not n1_is_excluded_for_a_new_member(here)
    while not failed_nodes(here, here.specs[-1].run):
        assert not n1_is_excluded_for_a_new_member(here)
    assert not n1_is_excluded_for_a_new_member(here), "only one member failed there since"


def test_queued_members_avoid_nodes_excluded_since_they_were_planned(tmp_path: Path) -> None:
    """Each submission excludes the nodes that are bad at that time, not those that were bad when it was planned."""
    elsewhere = ",".join(node for node in NODES if node not in ("n1", "n2"))
    here = place(tmp_path, members=6, job_settings={"exclude": elsewhere, "array_size": 4}, submit_limit=4)
    here.cluster.bad = {"n1": replace(LOSES_ITS_GPU, lasts_s=SECONDS)}
    here.run()
    late = [text for job, text in last_scripts(here) if job.run in (here.specs[4].run, here.specs[5].run)]
    assert late and all("n1" in (exclude_option(text) or "").split(",") for text in late)
    assert not any(failed_nodes(here, spec.run) for spec in here.specs[4:])


def test_a_launch_that_fails_on_every_node_is_not_blamed_on_the_nodes(tmp_path: Path) -> None:
    broken = replace(NEVER_BEGINS, lasts_s=SECONDS, log_text="slurm_script: line 9: module: command not found")
    here = place(tmp_path, members=12)
    here.cluster.bad = dict.fromkeys(NODES, broken)
    states = here.run()
    for spec in here.specs:
        assert state(states, spec) == ("failed", "launch")
        assert "module: command not found" in str(states[spec.run].reason)
        assert len(here.cluster.jobs_of(spec.run)) == 1 + (POLICY["launch"] or 0)
    last = exclude_option(here.cluster.scripts[-1])
    assert last is None or len(last.split(",")) <= 2, "the whole cluster is not excluded"


@pytest.mark.slow
@settings(max_examples=examples(60), derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    bad=st.dictionaries(st.sampled_from(NODES), st.sampled_from(BLACK_HOLES), max_size=len(NODES) - 1),
    members=st.integers(len(NODES), 14),
    first=st.integers(0, 7),
    kills=kill_points,
    poll_s=st.sampled_from([1, 10, 60]),
)
@pytest.mark.full
def test_with_one_good_node_every_member_finishes(
    tmp_path_factory: pytest.TempPathFactory,
    bad: dict[str, Fate],
    members: int,
    first: int,
    kills: list[tuple[str, int] | None],
    poll_s: int,
) -> None:
    here = place(tmp_path_factory.mktemp("study"), members=members, job_settings={"poll_s": poll_s})
    here.cluster.bad = bad
    here.cluster.first_id(first + 1)
    here.until_done(iter(kills))
    for spec in here.specs:
        here.finished_once(spec.run)
        # Every accepted job either finished the member or was followed by a retry.
        assert len(here.cluster.jobs_of(spec.run)) == 1 + here.count(spec.run, "retried")
        assert len(failed_nodes(here, spec.run)) <= MAX_EXCUSED + 2
    assert here.cluster.living() == []


@pytest.mark.full
@settings(max_examples=examples(40), derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    fates=st.lists(st.sampled_from(BLACK_HOLES), min_size=len(NODES), max_size=len(NODES)),
    members=st.integers(1, 14),
    array_size=st.sampled_from([None, 1, 3]),
)
def test_with_only_bad_nodes_every_member_ends_after_bounded_attempts(
    tmp_path_factory: pytest.TempPathFactory, fates: list[Fate], members: int, array_size: int | None
) -> None:
    here = place(tmp_path_factory.mktemp("study"), members=members, job_settings={"array_size": array_size})
    here.cluster.bad = dict(zip(NODES, fates, strict=True))
    states = here.run()
    most = MAX_EXCUSED + 1 + sum(POLICY[kind] or 0 for kind in ("launch", "gpu", "storage", "killed"))
    for spec in here.specs:
        last_state, kind = state(states, spec)
        assert last_state == "failed" and kind in BLAMES_NODE
        jobs = len(here.cluster.jobs_of(spec.run))
        assert jobs == 1 + here.count(spec.run, "retried") <= most


# --- two copies of a run, wrong clocks, exported variables ----------------------------------------------------


@pytest.mark.full
@settings(max_examples=examples(60), derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    lingers_s=st.lists(st.lists(st.floats(1.0, 20_000.0, allow_nan=False), max_size=3), min_size=1, max_size=4),
    forgotten=st.booleans(),
    kills=kill_points,
)
def test_a_lingering_copy_is_neither_joined_nor_waited_for_too_long(
    tmp_path_factory: pytest.TempPathFactory,
    lingers_s: list[list[float]],
    forgotten: bool,
    kills: list[tuple[str, int] | None],
) -> None:
    fate = IS_FORGOTTEN_AND_FINISHES if forgotten else HAS_A_SURVIVING_PROCESS
    fates = {
        number: [replace(fate, lingers_s=seconds) for seconds in lingers_of_run]
        for number, lingers_of_run in enumerate(lingers_s)
    }
    here = place(tmp_path_factory.mktemp("study"), fates, members=len(fates), retries=retry_policy({"lost": None}))
    here.until_done(iter(kills))
    for spec in here.specs:
        here.finished_once(spec.run)
    assert here.cluster.longest_wait_s <= DUPLICATE_WAIT_S + 60, "a copy that only waits must give its allocation back"


clocks = st.dictionaries(st.sampled_from(NODES), st.floats(-1e6, 1e6, allow_nan=False), min_size=1)


@pytest.mark.slow
@settings(max_examples=examples(60), derandomize=True, suppress_health_check=list(HealthCheck))
@given(fates=st.lists(fates_of_a_run, min_size=1, max_size=4), ahead_s=clocks, kills=kill_points)
def test_node_clocks_do_not_change_the_ledger(
    tmp_path_factory: pytest.TempPathFactory,
    fates: list[list[Fate]],
    ahead_s: dict[str, float],
    kills: list[tuple[str, int] | None],
) -> None:
    assert run_and_read_ledger(tmp_path_factory, fates, kills, ahead_s=ahead_s) == run_and_read_ledger(
        tmp_path_factory, fates, kills
    )


def run_and_read_ledger(
    tmp_path_factory: pytest.TempPathFactory,
    fates: Sequence[Sequence[Fate]],
    kills: Sequence[tuple[str, int] | None],
    ahead_s: Mapping[str, float] | None = None,
    exported: Mapping[str, str] | None = None,
) -> list[list[dict[str, object]]]:
    """Run a study and return the ledger entries of each member, without times and submission names."""
    here = place(tmp_path_factory.mktemp("study"), dict(enumerate(fates)), members=len(fates))
    here.cluster.ahead_s = ahead_s or {}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (exported or {}).items():
            patch.setenv(name, value)
        here.until_done(iter(kills))
    names = ("time", "submission")
    return [
        [{key: value for key, value in entry.items() if key not in names} for entry in here.events(spec.run)]
        for spec in here.specs
    ]


exported = st.fixed_dictionaries(
    {},
    optional={
        "SBATCH_JOB_NAME": st.sampled_from(["mine", "scalerl", "study-0"]),
        "SBATCH_ARRAY_INX": st.sampled_from(["0-9%1", "7"]),
        "SBATCH_EXCLUDE": st.sampled_from([",".join(NODES), NODES[0]]),
        "SLURM_ARRAY_TASK_ID": st.integers(0, 9).map(str),
    },
)


@settings(max_examples=examples(40), derandomize=True, suppress_health_check=list(HealthCheck))
@given(fates=st.lists(fates_of_a_run, min_size=1, max_size=4), exported=exported, kills=kill_points)
def test_exported_slurm_variables_do_not_change_the_ledger(
    tmp_path_factory: pytest.TempPathFactory,
    fates: list[list[Fate]],
    exported: dict[str, str],
    kills: list[tuple[str, int] | None],
) -> None:
    assert run_and_read_ledger(tmp_path_factory, fates, kills, exported=exported) == run_and_read_ledger(
        tmp_path_factory, fates, kills
    )


# --- ledger and polling --------------------------------------------------------------------------------------


def test_the_ledger_records_every_event_of_a_member(tmp_path: Path) -> None:
    here = place(tmp_path, {0: [NODE_FAILS]})
    here.run()
    entries = here.events(here.specs[0].run)
    assert [entry["event"] for entry in entries] == [
        "planned",
        "submitting",
        "started",
        "retried",
        "submitting",
        "started",
        "finished",
    ]
    assert entries[1]["submission"] == entries[2]["submission"] != entries[4]["submission"]
    assert [entries[2]["job"], entries[5]["job"]] == ["1", "2"]
    assert entries[3]["node"] in [attempt.node for attempt in attempts(here.run_dir(here.specs[0].run))]
    manifest = here.directory / "jobs" / entries[1]["submission"] / "submission.json"
    assert json.loads(manifest.read_text())["members"] == [here.specs[0].run]


def test_virtual_time_is_bounded(tmp_path: Path) -> None:
    here = place(tmp_path, wait_s=1e9)
    here.time.limit_s = 5_000
    with pytest.raises(EndlessError):
        here.run()


def test_a_poll_before_the_interval_is_over_only_sleeps(tmp_path: Path) -> None:
    here = place(tmp_path)
    executor: ClusterExecutor = here.executor()
    assert executor.poll(1.0) == []
    looks, before = here.cluster.looks, here.time.now
    for _ in range(9):
        assert executor.poll(1.0) == []
    assert here.cluster.looks == looks
    assert here.time.now == pytest.approx(before + 9)
