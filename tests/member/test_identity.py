"""Identities outlive versions: what stands in identities.json stays as it is, and may only grow.

A row stands for a command as it was understood when the row was made. A recipe or scale that has been corrected since
is given what it was, by explicit overrides: so an old identity stays within reach. `COMMAND @2` is a row that was made
after the corrections of the form 2, and so on.

python -m tests.member.test_identity     adds what is new in CASES; what is there it never changes
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

import lightning_scalerl
from lightning_scalerl.checks import ConfigurationError
from lightning_scalerl.choices import NEUTRAL
from lightning_scalerl.member.identify import plan_members
from lightning_scalerl.member.identity import check_identity, identity_of
from sweeps.executor.slurm.job import run_member
from tests.paths import ROOT
from tests.variants import VARIANTS, variant_text

TABLE = Path(__file__).with_name("identities.json")
CONF = ROOT / "conf"
QUICK = ("model.batches=2", "model.width=32", "model.layers=1")
# Which of conf/ were there when the table was begun; later ones are added by hand.
RECIPES = (
    "baseline",
    "dapo_qwen",
    "dr_grpo",
    "grpo_deepseek",
    "magistral",
    "minimax",
    "ppo",
    "ppo_large",
    "scalerl_32k",
)

# Form by form, what a recipe or a scale was before it was corrected.
_EVALUATED = ("evaluation.every_n_steps=10", "evaluation.samples=4")
CORRECTED: dict[int, dict[str, tuple[str, ...]]] = {
    2: {
        "recipe=scalerl": ("reward=zero_one",),
        "recipe=scalerl_core": ("reward=zero_one",),
        "recipe=magistral": ("normalization=prompt",),
        "recipe=dr_grpo": ("async_mode=on_policy",),
        "scale=paper": _EVALUATED,
        "scale=8b": _EVALUATED,
    },
}


def in_its_form(case: str) -> list[str]:
    """The overrides of a row: its command, and what has been corrected since the row was made."""
    command, _, form = case.partition(" @")
    words = command.split()
    named = words if any(word.startswith("recipe=") for word in words) else [*words, "recipe=scalerl"]
    since = [was for number, was in CORRECTED.items() if number > int(form or 1)]
    return [*words, *(override for was in since for what in named for override in was.get(what, ()))]


TWO_REWARDS = (
    "task=dataset task.train=train.jsonl task.heldout={a:heldout.jsonl} task.leaks=keep task.rewards=[exact_match,math]"
)
# Of variants that the recipe alone does not make one.
CASE_OF = {
    "clip_none": "variant=clip_none @2",
    "clip_0.3": "scale=8b scaled_for=null variant=clip_0.3 @2",
    "clip_1.0": "variant=clip_1.0 @2",
    "curriculum_staged_rewards": f"{TWO_REWARDS} variant=curriculum_staged_rewards @2",
}


def _case(variant: str) -> str:
    """On the first recipe whose own choice it is not: that would be no variant of it."""
    if variant in CASE_OF:
        return CASE_OF[variant]
    text = variant_text(variant)
    lines = [line for line in text.splitlines() if line.startswith("  - override /")]
    values = any(line.startswith("  ") and line not in lines for line in text.splitlines())
    for recipe in ("scalerl", "scalerl_core", "ppo"):
        own = (CONF / "recipe" / f"{recipe}.yaml").read_text()
        own += "".join(f"  - override /{axis}: {file}\n" for axis, file in NEUTRAL.items() if f"/{axis}:" not in own)
        if values or not lines or not re.search(rf"^{re.escape(lines[0])}( #.*)?$", own, re.MULTILINE):
            return f"variant={variant}" if recipe == "scalerl" else f"recipe={recipe} variant={variant}"
    raise AssertionError(f"variant {variant} changes none of the recipes")


CASES = [
    *map(_case, VARIANTS),
    "recipe=scalerl_core",
    "recipe=scalerl_core variant=loss_gspo",
    "seed=7",
    "scale=paper",
    "cluster=slurm",
    "budget.steps=9 study=elsewhere",
    "optimizer.lr=1e-3",
    "loss=dapo loss.clip_high=0.3",
    "cost_model.generator_devices=4 generator.slots=512",
    "task=jsonl task.train=train.jsonl task.heldout={a:heldout.jsonl}",
    "task=jsonl task.train=train.jsonl task.heldout={a:heldout.jsonl} task.verifier=math:hypot",
    "model=path model.path=./model",
    "model=path model.path=org/name",
    "generator=vllm",
    "driver=live",
    "driver=live driver.generators=2",
    *(f"recipe={name}" for name in RECIPES),
    "recipe=ppo schedule=cosine",
    "schedule=sqrt_batch",
    "recipe=dr_grpo reward=plus_minus_one",
    "health=stop",
    "batch.rollouts=64 batch.completions=4",
    "chat.system=brief chat.stop=[END]",
    "verify.on_error=zero verify.workers=5",
    "context.too_long=drop",
    "cost_model.grade_s=0.5",
    "cost_model.generator_devices=8 cost_model.tensor_parallel=4",
    "task=dataset task.train=train.jsonl task.heldout={a:heldout.jsonl} task.leaks=keep",
    "task=verl task.train=rows.jsonl task.heldout={a:rows.jsonl} task.rewards=rewards.py:score task.leaks=keep",
    *(f"scale={name} scaled_for=null" for name in ("0.6b", "1.7b", "8b", "trial")),
    *(f"{what}{' scaled_for=null' if what == 'scale=8b' else ''} @2" for what in CORRECTED[2]),
    "recipe=dapo @2",
    "length_control=penalty length_control.only_correct=false @2",
    f"{TWO_REWARDS} curriculum=staged_rewards budget.steps=64 @2",
]


def in_a_place(folder: Path) -> None:
    """Files that some cases name."""
    for name in ("train", "heldout"):
        (folder / f"{name}.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    row = {"data_source": "ours", "prompt": [{"role": "user", "content": "1+1?"}], "ability": "math"}
    row |= {"reward_model": {"style": "rule", "ground_truth": "2"}, "extra_info": {"split": "train"}}
    (folder / "rows.jsonl").write_text(json.dumps(row))
    (folder / "rewards.py").write_text("def score(data_source, solution_str, ground_truth):\n    return 1.0\n")
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text("{}")


def identities(cases: list[str]) -> dict[str, list[str]]:
    """Run and curve of each case."""
    # The toy's scale, on another model: what the table was begun with.
    lists = [[*in_its_form(case), *(("scaled_for=null",) if "model=path" in case else QUICK)] for case in cases]
    specs = plan_members(lists)
    for spec in specs:
        check_identity(spec, Path())  # what was composed is what it says
    return {case: [spec.run, spec.curve] for case, spec in zip(cases, specs, strict=True)}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    in_a_place(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SCALERL_CACHE", str(tmp_path / "cache"))
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("every", [8, pytest.param(1, marks=pytest.mark.full)], ids=["an eighth", "all"])
def test_no_identity_has_changed(place: Path, every: int) -> None:
    frozen = json.loads(TABLE.read_text())
    assert set(CASES) <= set(frozen), "new cases: python -m tests.member.test_identity"
    some = list(frozen)[::every]
    assert identities(some) == {case: frozen[case] for case in some}


def test_a_specification_that_is_not_what_it_names_is_refused(place: Path) -> None:
    task = ["task=jsonl", "task.train=train.jsonl", "task.heldout={a:heldout.jsonl}"]
    (spec,) = plan_members([["variant=loss_dapo", *task, *QUICK]])
    check_identity(spec, place)
    faster = {**spec.config, "optimizer": {**spec.config["optimizer"], "lr": 1.0}}
    other_loss = {**spec.reference, "advantage": {**spec.reference["advantage"], "choice": "another"}}
    for changed in (
        replace(spec, config=faster),
        replace(spec, seed=1),
        replace(spec, run=spec.curve),
        replace(spec, departures={}),
        replace(spec, reference=other_loss),
    ):
        with pytest.raises(ConfigurationError, match=rf"^{place / 'spec.json'}: .*restore what was changed"):
            check_identity(changed, place)
    check_identity(replace(spec, steps=9, config={**spec.config, "budget": {"steps": 9}}), place)
    (place / "train.jsonl").write_text('{"prompt": "1+1=", "answer": "3"}\n')
    with pytest.raises(ConfigurationError, match=r"a file was that it names"):
        check_identity(spec, place)


def test_the_table_tells_curves_apart() -> None:
    """Same run exactly where nothing of science differs."""
    frozen = json.loads(TABLE.read_text())
    same = {"variant=none", "cluster=slurm", "budget.steps=9 study=elsewhere", "health=stop"}
    assert len({tuple(frozen[case]) for case in same}) == 1
    assert frozen["seed=7"][1] == frozen["variant=none"][1] and frozen["seed=7"][0] != frozen["variant=none"][0]
    # The recipe of the run with long thinking is ScaleRL's; what is its own is its scale.
    assert frozen["recipe=scalerl @2"] == frozen["recipe=scalerl_32k"]
    others = [frozen[case][1] for case in frozen if case not in same | {"seed=7", "recipe=scalerl_32k"}]
    assert len(set(others)) == len(others) and frozen["variant=none"][1] not in others


def test_what_a_machine_needs_changes_no_identity(place: Path) -> None:
    needs = [
        "generator.cache_gib=3",
        "driver=live driver.silence_s=9 driver.start_s=9 driver.probe_every=2 driver.tensor_parallel=2",
    ]
    plain, cache, live_plain, live = identities(["seed=0", needs[0], "driver=live", needs[1]]).values()
    assert plain == cache and live_plain == live != plain


def test_data_counts_by_content_wherever_it_lies(place: Path) -> None:
    (place / "copy").mkdir()
    for name in ("train.jsonl", "heldout.jsonl"):
        (place / "copy" / name).write_bytes((place / name).read_bytes())
    given = ["task=jsonl task.train=train.jsonl task.heldout={a:heldout.jsonl}"]
    moved = [case.replace("=train", "=copy/train").replace(":heldout", ":copy/heldout") for case in given]
    (first,) = identities(given).values()
    assert list(identities(moved).values()) == [first]
    (place / "train.jsonl").write_text('{"prompt": "1+1=", "answer": "3"}\n')
    assert list(identities(given).values()) != [first]


def test_a_model_counts_by_content_and_a_large_file_by_samples(place: Path) -> None:
    weights = place / "model" / "model.safetensors"
    weights.write_bytes(bytes(2**25))
    config = {"model": {"_target_": "lightning_scalerl.model_path", "path": "./model"}}
    before = identity_of(config)
    with weights.open("r+b") as handle:
        handle.seek(-1, os.SEEK_END)
        handle.write(b"1")
    assert identity_of(config) != before
    (place / "model").rename(place / "moved")
    moved = {"model": {**config["model"], "path": "./moved"}}
    weights = place / "moved" / "model.safetensors"
    weights.write_bytes(bytes(2**25))
    assert identity_of(moved) == before


class Plain:
    """A class as it was when its identities were frozen, and as it is now."""

    neutral: ClassVar[Mapping[str, Any]] = {"choice": "Plain", "width": 1}
    added: ClassVar[Mapping[str, Any]] = {"depth": 0}
    remarks: ClassVar[tuple[str, ...]] = ("why",)


def form(**parameters: Any) -> dict[str, Any]:
    return identity_of({"thing": {"_target_": f"{__name__}.Plain", **parameters}})


class DAPO:
    """Bears the name of one of ours."""


def test_what_cannot_be_told_apart_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"bears the name of lightning_scalerl\.DAPO.*rename it"):
        identity_of({"loss": {"_target_": f"{__name__}.DAPO"}})
    with pytest.raises(ConfigurationError, match=r"task: .*nowhere"):
        identity_of({"task": {"_target_": "nowhere.Task"}})
    one, other = (identity_of({"thing": {"_target_": "decimal.Decimal", "_args_": [n]}}) for n in (1, 2))
    assert one != other


def test_what_is_left_out() -> None:
    assert form(width=2) == {"thing": {"choice": "Plain", "width": 2}}
    assert form(width=2, depth=0, why="because") == form(width=2)
    assert form(width=2, depth=1) == {"thing": {"choice": "Plain", "width": 2, "depth": 1}}
    assert form(width=1) == form(width=1, depth=0) == {}
    assert identity_of({"seed": 1, "study": "x", "nested": {"a": [{"b": 1}]}}) == {"nested": {"a": [{"b": 1}]}}


def test_every_case_has_its_identity() -> None:
    """Asked here as well as where they are compared: that one is slow."""
    assert set(CASES) <= set(json.loads(TABLE.read_text())), "new cases: python -m tests.member.test_identity"


def test_frozen_files_name_what_never_moves() -> None:
    """Specifications name public classes, launches and jobs public functions: by these names, wherever they stand."""
    targets = set()
    for path in CONF.rglob("*.yaml"):
        if "hydra" not in path.relative_to(CONF).parts:
            targets |= set(re.findall(r"^_target_: (\S+)", path.read_text(), flags=re.MULTILINE))
    assert targets
    for target in targets:
        package, name = target.split(".")
        assert package == "lightning_scalerl" and callable(getattr(lightning_scalerl, name))
    for name in ("scalerl", "scalerl_debug", "scalerl_slurm"):
        launcher = (CONF / "hydra" / "launcher" / f"{name}.yaml").read_text()
        assert "planner: lightning_scalerl:plan_members\nentry: lightning_scalerl:run_member\n" in launcher
    assert (run_member.__module__, run_member.__qualname__) == ("sweeps.executor.slurm.job", "run_member")


def main() -> None:
    """Add new cases to the table."""
    frozen = json.loads(TABLE.read_text()) if TABLE.exists() else {}
    with tempfile.TemporaryDirectory() as folder:
        os.environ["SCALERL_CACHE"] = folder + "/cache"
        os.chdir(folder)
        in_a_place(Path(folder))
        cases = [case for case in CASES if case not in frozen]
        new = identities(cases) if cases else {}
    TABLE.write_text(json.dumps({**frozen, **new}, indent=1) + "\n")


if __name__ == "__main__":
    main()
