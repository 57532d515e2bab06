"""A member whose engines are steps on other nodes of its job: preempted and killed, all of them together."""

from __future__ import annotations

import re

import pytest

from tests.place import STEPS, Place
from tests.slurm.cluster import PATIENCE_S, Lab, eventually
from tests.slurm.test_templates import ONE, FromTemplate, preempt

pytestmark = [pytest.mark.slurm, pytest.mark.slow]

LIVE = ("driver=live", "driver.engines=[srun]", "driver.silence_s=20", "driver.start_s=200")


@pytest.fixture
def sweep(studies: Place, whole: Lab) -> FromTemplate:
    """A study of one member, whose trainer has one of three nodes."""
    return FromTemplate(studies, whole, (*ONE, *LIVE), name="study of engines", template="engines")


@pytest.mark.full
def test_one_trainer_and_two_engines_preempted_and_killed(sweep: FromTemplate) -> None:
    """Every group counts once, whatever ends whom; nothing is older than it may be."""
    with sweep.launched("hydra.launcher.gpus_per_node=1", verifier_s=0.2) as process:
        sweep.reaches(3)
        steps = sweep.lab.sh("squeue", "-h", "-s", "-o", "%N %j")
        assert {"n1", "n2", "n3", "n4"} >= set(re.findall(r"n\d", steps)) and len(set(re.findall(r"n\d", steps))) == 3
        preempt(sweep.lab)
        eventually(lambda: len(sweep.attempts()) == 2, "the second start")
        sweep.reaches(6)
        sweep.kill_member()
        assert process.wait(timeout=PATIENCE_S) == 0, sweep.said()
    assert sweep.finished()
    trained = sweep.journal().of_kind("train")
    assert [record.step for record in trained] == list(range(1, STEPS + 1))
    assert max(record.metrics["train/staleness_max"] for record in trained) <= 2
    assert all(trained[-1].metrics[f"live/engine{number}_tokens_s"] > 0 for number in (0, 1))
    assert trained[-1].metrics["compute/device_hours"] > 0
    first, second, third = sweep.attempts()
    assert (first.outcome, first.kind, third.outcome) == ("interrupted", "preempted", "finished")
    assert second.job == first.job != third.job
    eventually(lambda: not sweep.lab.jobs(), "no step outlives its job", 60)
