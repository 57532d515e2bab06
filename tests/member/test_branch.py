"""Tests of branches: an unchanged branch repeats its parent bit for bit, and invalid branches are refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_scalerl.checks import ConfigurationError
from lightning_scalerl.member.branch import Branch, checkpoint_at, copy_checkpoint
from lightning_scalerl.member.identify import plan_members
from lightning_scalerl.member.run import run_member
from lightning_scalerl.member.trl import plan_trl
from sweeps.errors import UserError
from sweeps.run.journal import JOURNAL_FILE, read_journal
from sweeps.run.passes import PASSES_FILE
from sweeps.run.progress import is_done
from sweeps.run.spec import RunSpec
from tests.place import STEPS, Place
from tests.variants import VARIANTS

HALF = STEPS // 2
# Label of the parent, whose settings `tests.place` gives.
LABEL = "scalerl+async_mode.k=2"
# These checkpoints of the parent exist only because of keep_steps.
KEPT = (4, HALF, 9)


@dataclass
class Family:
    """A finished parent run, and helpers to branch from it."""

    place: Place
    parent: Path

    def branch(self, *overrides: str, step: int = HALF, run: object = None, output: str = "late") -> RunSpec:
        """Plan a branch and freeze it in its folder."""
        words = [f"branch.run={run or self.parent}", f"branch.step={step}", f"output_dir={self.place.root}/{output}"]
        (spec,) = plan_members([[*words, *overrides]])
        spec.write(self.folder(spec))
        return spec

    def folder(self, spec: RunSpec) -> Path:
        return Path(spec.config["output_dir"]) / "runs" / spec.run

    def run(self, spec: RunSpec) -> Path:
        run_member(self.folder(spec))
        assert is_done(self.folder(spec), spec.steps, spec.run)
        return self.folder(spec)


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Any:
    place = Place(tmp_path_factory.mktemp("branches"))
    with pytest.MonkeyPatch.context() as patch:
        for name, value in place.environment().items():
            patch.setenv(name, value)
        overrides = [*place.overrides("base", "seed=3"), f"checkpoint.keep_steps=[{','.join(map(str, KEPT))}]"]
        (spec,) = plan_members([overrides])
        folder = Path(spec.config["output_dir"]) / "runs" / spec.run
        spec.write(folder)
        run_member(folder)
        yield Family(place, folder)


def deterministic(folder: Path) -> list[tuple[str, int, dict[str, float]]]:
    """Return the deterministic records without `mechanism/` counters.

    A branch counts departures from its parent, and not from the recipe, so these counters differ.
    """
    return [
        (kind, step, {name: value for name, value in metrics.items() if not name.startswith("mechanism/")})
        for kind, step, metrics in read_journal(folder).deterministic()
    ]


def rows(folder: Path, after: int, last: int = STEPS) -> list[tuple[str, int, dict[str, float]]]:
    return [row for row in deterministic(folder) if after < row[1] <= last]


def test_an_unchanged_branch_repeats_the_parents_curve(family: Family) -> None:
    spec = family.branch()
    assert spec.recipe == f"{LABEL}@{HALF}" and spec.seed == 3 and spec.steps == STEPS and not spec.departures
    folder = family.run(spec)
    assert deterministic(folder) == deterministic(family.parent)
    header = read_journal(folder).header
    assert header["branch"] == {
        "run": family.parent.name,
        "step": HALF,
        "optimizer": "kept",
        "ancestors": {family.parent.name: HALF},
    }
    shared = [json.loads(line) for line in (family.parent / PASSES_FILE).read_text().splitlines()]
    assert [json.loads(line) for line in (folder / PASSES_FILE).read_text().splitlines()] == shared


def test_a_changed_choice_differs_from_the_parent_only_after_the_branch(family: Family) -> None:
    folder = family.run(family.branch("loss=reinforce", "budget.steps=8", output="parted"))
    spec = RunSpec.read(folder)
    assert (spec.recipe, spec.baseline) == (f"{LABEL}@{HALF}+loss=reinforce", f"{LABEL}@{HALF}")
    assert dict(spec.departures) == {"loss": "reinforce"}
    records, parent_records = deterministic(folder), deterministic(family.parent)
    shared = [row for row in parent_records if row[1] <= HALF]
    assert records[: len(shared)] == shared
    assert rows(folder, HALF) != rows(family.parent, HALF, 8)
    first = next(record for record in read_journal(folder).records if record.step == HALF + 1)
    parent_last = next(r for r in read_journal(family.parent).records if r.step == HALF and r.kind == "train")
    assert first.metrics["compute/flops"] > parent_last.metrics["compute/flops"] > 0


@pytest.mark.full
def test_a_branch_may_change_optimizer_settings_and_keep_or_reset_its_state(family: Family) -> None:
    optimizer_states = {}
    for name, change in {
        "kept": (),
        "fresh": ("branch.optimizer=fresh",),
        "rate": ("optimizer.lr=0",),
        "decay": ("optimizer.weight_decay=0.7",),
        "muon": ("optimizer=muon", "branch.optimizer=fresh"),
    }.items():
        folder = family.run(family.branch(*change, "budget.steps=8", output=name))
        saved = torch.load(checkpoint_at(folder, 8), weights_only=True)
        optimizer_states[name] = saved["optimizer_states"][0]
        if name == "rate":
            assert not any(
                r.metrics["train/learning_rate"] for r in read_journal(folder).records[-2:] if r.kind == "train"
            )
    assert "momentum_buffer" in optimizer_states.pop("muon")["state"][0]
    steps = {name: float(state["state"][0]["step"]) for name, state in optimizer_states.items()}
    assert steps == {"kept": 8, "fresh": 2, "rate": 8, "decay": 8}
    decay = {name: state["param_groups"][0]["weight_decay"] for name, state in optimizer_states.items()}
    assert decay["decay"] == 0.7 != decay["kept"]


@pytest.mark.full
def test_a_branch_can_be_branched(family: Family) -> None:
    spec = family.branch("loss=reinforce", f"checkpoint.keep_steps=[{KEPT[-1]}]")
    first = family.run(spec)
    second = family.branch(step=KEPT[-1], run=first, output="later")
    assert second.recipe == f"{LABEL}@{HALF}+loss=reinforce@{KEPT[-1]}"
    folder = family.run(second)
    assert deterministic(folder) == deterministic(first)
    ancestors = read_journal(folder).header["branch"]["ancestors"]
    assert ancestors == {first.name: KEPT[-1], family.parent.name: HALF}
    third = family.branch("loss=dapo", step=KEPT[-1], run=first, output="later")
    assert third.recipe == f"{second.recipe}+loss=dapo" and dict(third.departures) == {"loss": "dapo"}
    assert third.config["loss"]["_target_"].endswith("DAPO")
    with pytest.raises(ConfigurationError, match=f"branch.step: {HALF}, and the parent .* is itself a branch"):
        family.branch(step=HALF, run=first)


@pytest.mark.slow
def test_a_stopped_branch_continues_without_its_parent(family: Family, tmp_path: Path) -> None:
    """The parent's folder may be deleted once the branch has begun, even before the branch's first checkpoint."""
    copy = tmp_path / "parent"
    shutil.copytree(family.parent, copy / "runs" / family.parent.name)
    run = copy / "runs" / family.parent.name
    spec = family.branch("kl=light", run=run, output="orphan")
    folder = family.folder(spec)

    class StopError(Exception):
        pass

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lightning_scalerl.member.run._fit", lambda *arguments: (_ for _ in ()).throw(StopError))
        with pytest.raises(StopError):
            run_member(folder)
    assert deterministic(folder) == [row for row in deterministic(family.parent) if row[1] <= HALF]
    shutil.rmtree(copy)
    family.run(spec)
    assert deterministic(folder) == deterministic(family.run(family.branch("kl=light", output="kept")))


@pytest.mark.slow
@pytest.mark.parametrize("killed_in", ["copy_checkpoint", "_copy_passes", "Journal.checkpoint"])
def test_a_branch_killed_while_it_starts_begins_again(family: Family, killed_in: str, tmp_path: Path) -> None:
    spec = family.branch("budget.steps=7", output=tmp_path.name)

    class Killed(BaseException):
        pass

    def kill(*arguments: Any, **options: Any) -> None:
        raise Killed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(f"lightning_scalerl.member.branch.{killed_in}", kill)
        with pytest.raises(Killed):
            run_member(family.folder(spec))
    assert not (family.folder(spec) / JOURNAL_FILE).exists()
    trained = [row for row in deterministic(family.run(spec)) if row[0] == "train"]
    assert trained == [row for row in rows(family.parent, 0, 7) if row[0] == "train"]


def test_the_parent_may_be_given_as_folder_study_or_identity(family: Family) -> None:
    by_folder = family.branch()
    assert family.branch(run=family.parent.name).run == by_folder.run
    assert family.branch(run=family.place.root / "base").run == by_folder.run
    words = [f"branch={{run: {family.parent.name}, step: {HALF}}}", f"output_dir={family.place.root}/late"]
    (spec,) = plan_members([words])
    assert spec.run == by_folder.run
    assert family.branch("seed=3").run == by_folder.run
    assert family.branch("branch.optimizer=kept").run == by_folder.run
    fresh = family.branch("branch.optimizer=fresh")
    assert fresh.recipe == f"{LABEL}@{HALF}+branch.optimizer=fresh"
    assert fresh.run != family.branch(step=9).run


def test_a_member_of_another_trainer_cannot_branch(family: Family) -> None:
    with pytest.raises(ConfigurationError, match="branch: starts from a checkpoint of ours, which TRL cannot read"):
        plan_trl([["trainer=trl", f"branch.run={family.parent}", f"branch.step={HALF}"]])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["branch.step=5"], "has no checkpoint of step 5, it has 3, 4, 6, 9, 12; .*checkpoint.keep_steps=\\[5\\]"),
        (["seed=4"], "seed: 4, and the parent .* has 3"),
        (["loss=dapo", "kl=light"], "branch: kl, loss differ from the parent"),
        (["batch.prompts=4"], "branch: batch cannot change at a branch"),
        (["async_mode=on_policy"], "branch: async_mode cannot change"),
        (["budget.steps=6"], "budget.steps: 6 must be above branch.step=6"),
        (["optimizer=muon"], "the optimizer changes from AdamW to Muon.*give branch.optimizer=fresh"),
        (["branch.run=nowhere"], "branch.run: 'nowhere' is no run here"),
        (["branch.run=null"], "branch.run: needs a value"),
        (["branch.optimizer=new"], "branch.optimizer: 'new' is unknown; valid: kept, fresh"),
        (["+branch.at=3"], "branch.at: unknown"),
        (["branch.step=half"], "branch.step: 'half' must be a whole number"),
    ],
)
def test_invalid_branches_are_refused(family: Family, overrides: Sequence[str], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        family.branch(*overrides)


def _without_checkpoint(parent: Path) -> None:
    checkpoint_at(parent, HALF).unlink()


def _without_records(parent: Path) -> None:
    lines = (parent / JOURNAL_FILE).read_text().splitlines(keepends=True)
    other_lines = [line for line in lines if json.loads(line).get("step") != 2]
    (parent / JOURNAL_FILE).write_text("".join(other_lines))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (shutil.rmtree, "the parent's checkpoint .* is not there"),
        (_without_checkpoint, "the parent's checkpoint .* is not there"),
        (_without_records, "lacks step 2 of 6"),
    ],
)
def test_a_missing_or_damaged_parent_is_refused_in_one_line(
    family: Family, tmp_path: Path, damage: Callable[[Path], Any], message: str
) -> None:
    parent = tmp_path / "runs" / family.parent.name
    shutil.copytree(family.parent, parent)
    spec = family.branch(run=parent, output=f"gone{damage.__name__}")
    damage(parent)
    with pytest.raises(UserError, match=message):
        run_member(family.folder(spec))


def test_a_sharded_checkpoint_is_linked_file_by_file(tmp_path: Path) -> None:
    source = checkpoint_at(tmp_path / "parent", 4)
    (source / "part").mkdir(parents=True)
    (source / "part" / "weights").write_text("w")
    branch = Branch(run="p", step=4, folder=str(tmp_path / "parent"))
    copy = copy_checkpoint(tmp_path / "own", branch)
    assert copy == checkpoint_at(tmp_path / "own", 4) and (copy / "part" / "weights").samefile(
        source / "part" / "weights"
    )
    shutil.rmtree(source)
    assert (copy_checkpoint(tmp_path / "own", branch) / "part" / "weights").read_text() == "w"


@pytest.mark.full
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_can_branch_or_is_refused_before_it_starts(family: Family, variant: str) -> None:
    try:
        spec = family.branch(f"variant={variant}", "budget.steps=8", output="variants")
    except ConfigurationError:
        return
    try:
        family.run(spec)
    except ConfigurationError as error:  # the task lacks what the variant needs
        assert read_journal(family.folder(spec)).records[-1].step == HALF, error
