"""Tests that identities of runs do not change between versions: rows of identities.json never change.

A row is a command with the meaning that it had when the row was added. If a recipe or scale was corrected later, the
test adds overrides with the old values, so that the old identity can still be obtained. `COMMAND @2` is a row that was
added after the corrections of form 2.

python -m tests.member.test_identity     adds new CASES to the table, and never changes existing rows
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
# Recipes in conf/ when the table was begun; later ones are added by hand.
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

# By form: old values of recipes and scales that were corrected in it.
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


def overrides_of(case: str) -> list[str]:
    """Return the overrides of a row: its command, and the old values of later corrections."""
    command, _, form = case.partition(" @")
    words = command.split()
    corrected_names = words if any(word.startswith("recipe=") for word in words) else [*words, "recipe=scalerl"]
    corrections = [old_values for number, old_values in CORRECTED.items() if number > int(form or 1)]
    return [
        *words,
        *(override for old_values in corrections for name in corrected_names for override in old_values.get(name, ())),
    ]


TWO_REWARDS = (
    "task=dataset task.train=train.jsonl task.heldout={a:heldout.jsonl} task.leaks=keep task.rewards=[exact_match,math]"
)
# Cases of variants that need more than a recipe to differ from it.
CASE_OF = {
    "clip_none": "variant=clip_none @2",
    "clip_0.3": "scale=8b scaled_for=null variant=clip_0.3 @2",
    "clip_1.0": "variant=clip_1.0 @2",
    "curriculum_staged_rewards": f"{TWO_REWARDS} variant=curriculum_staged_rewards @2",
}


def _case(variant: str) -> str:
    """Return the case of a variant, with the first recipe whose own choice differs from the variant's."""
    if variant in CASE_OF:
        return CASE_OF[variant]
    text = variant_text(variant)
    lines = [line for line in text.splitlines() if line.startswith("  - override /")]
    values = any(line.startswith("  ") and line not in lines for line in text.splitlines())
    for recipe in ("scalerl", "scalerl_core", "ppo"):
        recipe_text = (CONF / "recipe" / f"{recipe}.yaml").read_text()
        recipe_text += "".join(
            f"  - override /{axis}: {file}\n" for axis, file in NEUTRAL.items() if f"/{axis}:" not in recipe_text
        )
        if values or not lines or not re.search(rf"^{re.escape(lines[0])}( #.*)?$", recipe_text, re.MULTILINE):
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


def write_files(folder: Path) -> None:
    """Write the files that some cases name."""
    for name in ("train", "heldout"):
        (folder / f"{name}.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    row = {"data_source": "ours", "prompt": [{"role": "user", "content": "1+1?"}], "ability": "math"}
    row |= {"reward_model": {"style": "rule", "ground_truth": "2"}, "extra_info": {"split": "train"}}
    (folder / "rows.jsonl").write_text(json.dumps(row))
    (folder / "rewards.py").write_text("def score(data_source, solution_str, ground_truth):\n    return 1.0\n")
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text("{}")


def identities(cases: list[str]) -> dict[str, list[str]]:
    """Return the identities of run and curve of each case."""
    # Rows with a model of the user keep the small default scale with which the table was begun.
    lists = [[*overrides_of(case), *(("scaled_for=null",) if "model=path" in case else QUICK)] for case in cases]
    specs = plan_members(lists)
    for spec in specs:
        check_identity(spec, Path())  # the composed specification agrees with its identity
    return {case: [spec.run, spec.curve] for case, spec in zip(cases, specs, strict=True)}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_files(tmp_path)
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


def test_a_changed_specification_is_refused(place: Path) -> None:
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


def test_different_curves_have_different_identities() -> None:
    """Two rows have the same run exactly if no scientific value differs."""
    frozen = json.loads(TABLE.read_text())
    same = {"variant=none", "cluster=slurm", "budget.steps=9 study=elsewhere", "health=stop"}
    assert len({tuple(frozen[case]) for case in same}) == 1
    assert frozen["seed=7"][1] == frozen["variant=none"][1] and frozen["seed=7"][0] != frozen["variant=none"][0]
    # `scalerl_32k` has the recipe of ScaleRL and differs only in its scale.
    assert frozen["recipe=scalerl @2"] == frozen["recipe=scalerl_32k"]
    others = [frozen[case][1] for case in frozen if case not in same | {"seed=7", "recipe=scalerl_32k"}]
    assert len(set(others)) == len(others) and frozen["variant=none"][1] not in others


def test_machine_settings_change_no_identity(place: Path) -> None:
    needs = [
        "generator.cache_gib=3",
        "driver=live driver.silence_s=9 driver.start_s=9 driver.probe_every=2 driver.tensor_parallel=2",
    ]
    plain, cache, live_plain, live = identities(["seed=0", needs[0], "driver=live", needs[1]]).values()
    assert plain == cache and live_plain == live != plain


def test_data_is_identified_by_content_and_not_by_path(place: Path) -> None:
    (place / "copy").mkdir()
    for name in ("train.jsonl", "heldout.jsonl"):
        (place / "copy" / name).write_bytes((place / name).read_bytes())
    cases = ["task=jsonl task.train=train.jsonl task.heldout={a:heldout.jsonl}"]
    moved = [case.replace("=train", "=copy/train").replace(":heldout", ":copy/heldout") for case in cases]
    (first,) = identities(cases).values()
    assert list(identities(moved).values()) == [first]
    (place / "train.jsonl").write_text('{"prompt": "1+1=", "answer": "3"}\n')
    assert list(identities(cases).values()) != [first]


def test_a_model_is_identified_by_content_and_large_files_by_samples(place: Path) -> None:
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
    """A class whose parameters changed after its identities were frozen.

    neutral: parameters at that time; added: later ones; operational_parameters: those that are never in an identity.
    """

    neutral: ClassVar[Mapping[str, Any]] = {"choice": "Plain", "width": 1}
    added: ClassVar[Mapping[str, Any]] = {"depth": 0}
    operational_parameters: ClassVar[tuple[str, ...]] = ("why",)


def form(**parameters: Any) -> dict[str, Any]:
    return identity_of({"thing": {"_target_": f"{__name__}.Plain", **parameters}})


class DAPO:
    """A user's class with the name of one of our classes."""


def test_ambiguous_or_missing_classes_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"bears the name of lightning_scalerl\.DAPO.*rename it"):
        identity_of({"loss": {"_target_": f"{__name__}.DAPO"}})
    with pytest.raises(ConfigurationError, match=r"task: .*nowhere"):
        identity_of({"task": {"_target_": "nowhere.Task"}})
    one, other = (identity_of({"thing": {"_target_": "decimal.Decimal", "_args_": [n]}}) for n in (1, 2))
    assert one != other


def test_neutral_values_and_operational_parameters_are_left_out() -> None:
    assert form(width=2) == {"thing": {"choice": "Plain", "width": 2}}
    assert form(width=2, depth=0, why="because") == form(width=2)
    assert form(width=2, depth=1) == {"thing": {"choice": "Plain", "width": 2, "depth": 1}}
    assert form(width=1) == form(width=1, depth=0) == {}
    assert identity_of({"seed": 1, "study": "x", "nested": {"a": [{"b": 1}]}}) == {"nested": {"a": [{"b": 1}]}}


def test_every_case_is_in_the_table() -> None:
    """This is also asserted where identities are compared, but that test is slow."""
    assert set(CASES) <= set(json.loads(TABLE.read_text())), "new cases: python -m tests.member.test_identity"


def test_names_in_frozen_files_stay_importable() -> None:
    """Frozen specifications, launches and jobs contain these public names, so the names must stay importable."""
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
        write_files(Path(folder))
        cases = [case for case in CASES if case not in frozen]
        new = identities(cases) if cases else {}
    TABLE.write_text(json.dumps({**frozen, **new}, indent=1) + "\n")


if __name__ == "__main__":
    main()
