"""Tests of a member whose engines are vLLM servers, on other nodes of its job or in a separate job."""

from __future__ import annotations

import re
import stat
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from lightning_scalerl.generator.vllm.announced import Announcement
from sweeps.launch.status import overview
from tests.place import STEPS, Place
from tests.slurm.cluster import PATIENCE_S, Lab, eventually
from tests.slurm.test_templates import ONE, FromTemplate, preempt, submit

pytestmark = [pytest.mark.slurm, pytest.mark.slow]

# vLLM on a CPU needs attention heads of at least 32 dimensions, and half a minute of one core to start.
VLLM = ("generator=vllm", "generator.cache_gib=0.125", "precision=fp32")
LIVE = ("driver=live", *VLLM, "driver.silence_s=60", "driver.start_s=400")


@pytest.fixture
def sweep(studies: Place, ready_lab: Lab) -> FromTemplate:
    """Return a study of one member, whose trainer uses one node and whose engines use the others."""
    live = (*LIVE, "driver.engines=[srun]")
    return FromTemplate(studies, ready_lab, (*ONE, *live), name="study of engines", template="engines")


def assert_both_sides_work(sweep: FromTemplate, engines: int) -> None:
    """Wait until the status shows the trainer and all engines with their measurements, each on another node."""

    def are_up() -> bool:
        (member,) = overview(sweep.directory)
        return [side.state for side in member.sides] == ["running", *["up"] * engines] and all(
            side.idle is not None and side.tokens_s for side in member.sides
        )

    eventually(are_up, "both sides are up and have worked")
    (member,) = overview(sweep.directory)
    assert len({side.where.split()[-1] for side in member.sides if side.where}) == 1 + engines


def test_a_trainer_uses_an_engine_on_another_node(sweep: FromTemplate) -> None:
    """The run starts a vLLM server on the other node and ends it. Every step is recorded once."""
    sweep.name += " of one"
    with sweep.launched("hydra.launcher.gpus_per_node=1", "hydra.launcher.nodes=2", verifier_s=0.2) as process:
        sweep.reaches(2)
        assert_both_sides_work(sweep, 1)
        assert process.wait(timeout=PATIENCE_S) == 0, sweep.said()
    assert sweep.finished()
    trained = sweep.journal().of_kind("train")
    assert [record.step for record in trained] == list(range(1, STEPS + 1))
    assert max(record.metrics["train/staleness_max"] for record in trained) <= 2
    eventually(lambda: not sweep.lab.jobs(), "no step outlives its job", 60)


@pytest.mark.full
@pytest.mark.parametrize("times", [1, 3])
def test_a_trainer_with_two_engines_survives_preemptions_and_kills(sweep: FromTemplate, times: int) -> None:
    """Trainer and engines are preempted and killed `times` times. Every step counts once, with bounded staleness."""
    sweep.name += f" {times}"
    steps = STEPS // 2 * (1 + times)
    sweep.overrides = (*sweep.overrides, f"budget.steps={steps}", f"hydra.launcher.retries.killed={times}")
    with sweep.launched("hydra.launcher.gpus_per_node=1", verifier_s=0.2) as process:
        sweep.reaches(3)
        steps_on_nodes = sweep.lab.sh("squeue", "-h", "-s", "-o", "%N %j")
        assert {"n1", "n2", "n3", "n4"} >= set(re.findall(r"n\d", steps_on_nodes)) and len(
            set(re.findall(r"n\d", steps_on_nodes))
        ) == 3
        assert_both_sides_work(sweep, 2)
        for number in range(times):
            started = len(sweep.attempts())
            sweep.reaches(6 * number + 3)
            preempt(sweep.lab)
            eventually(lambda: len(sweep.attempts()) == started + 1, "another start")  # noqa: B023
            sweep.reaches(6 * number + 6)
            sweep.kill_member()
            eventually(lambda: len(sweep.attempts()) == started + 2, "another start")  # noqa: B023
        assert process.wait(timeout=PATIENCE_S) == 0, sweep.said()
    assert sweep.finished()
    trained = sweep.journal().of_kind("train")
    assert [record.step for record in trained] == list(range(1, steps + 1))
    assert max(record.metrics["train/staleness_max"] for record in trained) <= 2
    assert all(trained[-1].metrics[f"live/engine{number}_tokens_s"] > 0 for number in (0, 1))
    assert trained[-1].metrics["compute/device_hours"] > 0
    attempts = sweep.attempts()
    assert len(attempts) == 2 * times + 1 and attempts[-1].outcome == "finished"
    assert {(each.outcome, each.kind) for each in attempts[:-1:2]} == {("interrupted", "preempted")}
    # After a preemption the same job is requeued; after a kill a new job is submitted.
    assert len({each.job for each in attempts}) == times + 1
    assert all(one.job == two.job for one, two in zip(attempts[::2], attempts[1::2], strict=False))
    eventually(lambda: not sweep.lab.jobs(), "no step outlives its job", 60)


@pytest.mark.full
def test_a_node_of_two_gpus_has_two_engines(sweep: FromTemplate) -> None:
    """Each engine is a separate SLURM step, with one of the job's GPUs on that node."""
    sweep.name += " of two"
    with sweep.launched("hydra.launcher.gpus_per_node=2", "hydra.launcher.nodes=2", verifier_s=0.2) as process:
        sweep.reaches(2)
        places: list[str | None] = []

        def have_places() -> bool:
            (member,) = overview(sweep.directory)
            places[:] = [side.where for side in member.sides]
            return len(places) == 3 and all(places)

        eventually(have_places, "both sides are told", 120)
        trainer, *engines = [str(place) for place in places]
        (node,) = {where.split()[1] for where in engines}
        assert engines == [f"srun {node} GPU {number}" for number in (0, 1)] and node != trainer
        assert process.wait(timeout=PATIENCE_S) == 0, sweep.said()
    assert sweep.finished()
    last = sweep.journal().of_kind("train")[-1]
    assert all(last.metrics[f"live/engine{number}_tokens_s"] > 0 for number in (0, 1))


# --- engines in a separate job ---------------------------------------------------------------------------------


def addresses_of(files: list[Path]) -> list[str]:
    """Return the addresses that servers announce now; servers without an announcement are left out."""
    addresses = []
    for path in files:
        with suppress(OSError):
            addresses.append(Announcement(path).read()[0])
    return addresses


def nodes_of(addresses: list[str]) -> set[str | None]:
    return {urlsplit(address).hostname for address in addresses}


def model_of(place: Place) -> str:
    """Return the folder of the studies' model, which the servers load for its shape."""
    code = "from lightning_scalerl import arithmetic_base_model as made; print(made(width=32, layers=1, batches=2))"
    done = subprocess.run(
        [sys.executable, "-c", code], env=place.environment(), capture_output=True, text=True, check=True
    )
    return done.stdout.split()[-1]


@pytest.mark.full
@pytest.mark.parametrize("times", [1, 3])
def test_engines_in_a_separate_job_survive_preemptions(studies: Place, ready_lab: Lab, times: int) -> None:
    """The engines' job is preempted and restarts on another node, then the trainer's job is. Every step counts once."""
    folder = studies.root / f"engines-{times}"
    files = [folder / "0", folder / "1"]
    steps = STEPS * (1 + times)  # enough that no preemption comes when the run is over
    engines_override = f"driver.engines=[{','.join(f'file:{path}' for path in files)}]"
    live = (*LIVE, engines_override, f"budget.steps={steps}")
    sweep = FromTemplate(studies, ready_lab, (*ONE, *live), name=f"study of a job of engines {times}")
    # Both GPUs of a node, so that the trainer is on another node. Two vLLM servers take 3.1 GB.
    options = ("--signal=B:USR2@60", "--gpus-per-node=2", "--mem=6G")
    serving = (model_of(studies), "--max-tokens", "64", "--policy", "fp32", "--slots", "72", "--cache-gib", "0.125")
    engines = submit(ready_lab, studies, 0.0, str(folder), *serving, options=options, script="engines.sbatch")

    def node(job: str) -> str:
        return ready_lab.sh("squeue", "-h", "-j", job, "-o", "%N")

    with sweep.launched(verifier_s=0.2) as process:
        sweep.reaches(3)
        assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}
        places = [f"file:{path}" for path in files]
        eventually(lambda: [side.where for side in overview(sweep.directory)[0].sides[1:]] == places, "status has them")
        for number in range(times):
            known, place = addresses_of(files), node(engines)
            assert place != sweep.attempts()[-1].node and nodes_of(known) == {place}
            preempt(ready_lab, ("-w", place), 30)
            eventually(lambda: len(set(addresses_of(files)) - set(known)) == 2, "engines at another place")  # noqa: B023
            assert nodes_of(addresses_of(files)) == {node(engines)} != {place}
            sweep.reaches(max(sweep.step() + 1, 6 * number + 5))
            preempt(ready_lab, ("-w", sweep.attempts()[-1].node))
            eventually(lambda: len(sweep.attempts()) == number + 2, "another start")  # noqa: B023
            sweep.reaches(6 * number + 8)
        assert process.wait(timeout=PATIENCE_S) == 0, sweep.said()
    assert sweep.finished() and sweep.steps_written() == list(range(1, steps + 1)), "no step is repeated"
    trained = sweep.journal().of_kind("train")
    assert max(record.metrics["train/staleness_max"] for record in trained) <= 2
    assert all(trained[-1].metrics[f"live/engine{number}_tokens_s"] > 0 for number in (0, 1))
    assert trained[-1].metrics["compute/device_hours"] > 0
    assert [each.kind for each in sweep.attempts()[:-1]] == ["preempted"] * times
    assert len({each.job for each in sweep.attempts()}) == 1
    assert f"Restarts={times} " in ready_lab.sh("scontrol", "show", "job", engines)
    ready_lab.sh("scancel", engines)
    eventually(lambda: not ready_lab.jobs(), "no engine outlives its job", 60)
    assert list(folder.iterdir()) == [], "a clean end leaves no announcement"
