"""Tests that every recipe, variant and experiment of conf/ composes and trains ten steps at `scale=tiny`."""

from __future__ import annotations

import json
import math
import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import hydra
import pytest
from hydra import initialize_config_dir
from omegaconf import OmegaConf

from lightning_scalerl.checks import ConfigurationError
from lightning_scalerl.choices import AXES, NEUTRAL
from lightning_scalerl.composition import build_recipe, compose
from lightning_scalerl.member.identify import plan_members
from lightning_scalerl.member.run import run_member
from lightning_scalerl.recipe import ContextSettings
from sweeps.run.journal import read_journal
from sweeps.run.spec import learning_config
from tests.examples import every
from tests.paths import ROOT
from tests.variants import recipe_text

STEPS = 10


def names(group: str) -> list[str]:
    return sorted(path.stem for path in (ROOT / "conf" / group).glob("*.yaml"))


# Experiments on a user's model.
ON_USERS_MODEL = [
    name
    for name in names("experiment")
    if re.search(r"override /model: path|kl\.reference=", (ROOT / f"conf/experiment/{name}.yaml").read_text())
]
# Those planned below with stand-ins for the user's data. The other three have tests of their own: real_model reads
# reasoning-gym (tests/test_real_model.py), downstream has several data formats, and distil_or_rl needs a teacher
# (tests/test_distil.py).
WITH_STAND_IN_DATA = [name for name in ON_USERS_MODEL if name not in ("real_model", "downstream", "distil_or_rl")]
SELF_CONTAINED = [name for name in names("experiment") if name not in ON_USERS_MODEL]
# scale=tiny is for the arithmetic task. An experiment with another task needs its own small values.
SIZES = {
    "agent": [
        *("task.train=80", "task.heldout=8", "batch.prompts=8", "batch.completions=8"),
        *("evaluation.every_n_steps=5", "evaluation.samples=1", "evaluation.prompts=4"),
    ]
}


def members(experiment: str) -> list[list[str]]:
    """Return the override lists of an experiment's grid, as Hydra's sweeper would make them."""
    from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
    from hydra.core.override_parser.overrides_parser import OverridesParser

    with initialize_config_dir(str(ROOT / "conf"), version_base=None):
        composed = hydra.compose("train", [f"experiment={experiment}"], return_hydra_config=True)
    sweeper = composed.hydra.sweeper
    grid: list[list[str]] = []
    for row in sweeper.get("rows") or [[]]:
        swept = [*row, *(f"{key}={value}" for key, value in (sweeper.params or {}).items())]
        grid += BasicSweeper.split_arguments(OverridesParser.create().parse_overrides(swept), None)[0]
    return [[f"experiment={experiment}", *point] for point in grid]


def small(experiment: str) -> list[str]:
    """Return overrides that make an experiment small."""
    return SIZES.get(experiment, ["scale=tiny"])


def train(overrides: list[str], tmp_path: Path, moves: bool = True, size: Sequence[str] = ("scale=tiny",)) -> None:
    """Train ten steps like `scalerl train`. All metrics must be finite and, if `moves`, one gradient not 0."""
    run_overrides = [*overrides, *size, f"budget.steps={STEPS}", f"output_dir={tmp_path}"]
    (spec,) = plan_members([run_overrides])
    run_dir = tmp_path / "runs" / spec.run
    spec.write(run_dir)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run_member(run_dir)
    view = read_journal(run_dir)
    assert view.status == "finished"
    records = view.of_kind("train")
    assert [record.step for record in records] == list(range(1, STEPS + 1))
    assert all(math.isfinite(value) for record in records for value in record.metrics.values())
    assert not moves or any(record.metrics["train/gradient_norm"] > 0 for record in records), [
        r.metrics["train/reward"] for r in records
    ]


# Pairs on diagonals run in CI, so that each recipe and each scale occurs. `make test-full` runs all pairs.
PAIRS = [
    pytest.param(
        recipe, scale, marks=() if (i - j) % max(len(names("recipe")), len(names("scale"))) == 0 else pytest.mark.full
    )
    for i, recipe in enumerate(names("recipe"))
    for j, scale in enumerate(names("scale"))
]


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "scale"), PAIRS)
def test_every_recipe_composes_with_every_scale(recipe: str, scale: str) -> None:
    built = build_recipe(compose([f"recipe={recipe}", f"scale={scale}"]), recipe)
    built.check(built.choices)
    assert {axis for axis, _ in built.choices.items()} == set(AXES)


@pytest.mark.parametrize("recipe", names("recipe"))
def test_recipes_explain_lines_with_neutral_choices(recipe: str) -> None:
    """A recipe also names every axis without a neutral choice. A line that names a neutral choice has a comment why."""
    lines = re.findall(r"^  - override /(\w+): (\w+)(.*)$", recipe_text(recipe), re.MULTILINE)
    named = {axis: file for axis, file, _ in lines}
    assert {axis for axis in AXES if NEUTRAL[axis] is None} <= named.keys()
    assert all(remark.startswith(" # ") for axis, file, remark in lines if NEUTRAL.get(axis) == file)
    assert all((ROOT / "conf" / axis / f"{file}.yaml").is_file() for axis, file in named.items())


def test_scalerl_resolves_to_its_golden_file() -> None:
    """Choices and numbers equal the golden file. Axes and settings added later have their neutral value."""
    config: Any = OmegaConf.to_container(compose(["recipe=scalerl", "scale=paper"]), resolve=True)
    frozen = (ROOT / "tests" / "golden" / "scalerl.yaml").read_text()
    parts = list(OmegaConf.create(frozen))
    for added_later in set(AXES).difference(parts):
        assert config[added_later] == OmegaConf.load(ROOT / "conf" / added_later / f"{NEUTRAL[added_later]}.yaml")
    # Settings added later have the value that changes nothing.
    for added_later, neutral in ContextSettings.added.items():
        if added_later not in OmegaConf.create(frozen).context:
            assert config["context"].pop(added_later) == neutral
    assert OmegaConf.to_yaml({key: config[key] for key in config if key in parts}) == frozen


# Choices and numbers of each recipe according to its source, with the scale that belongs to it.
SCALERL = {
    "resampling": "no_positive",
    "curriculum": "none",
    "allocation": "fixed",
    "async_mode": "pipeline",
    "length_control": "interruption",
    "truncated": "mask",
    "filter": "zero_variance",
    "advantage": "group",
    "normalization": "batch",
    "precision": "bf16",
    "correction": "behaviour",
    "critic": "none",
    "loss": "cispo",
    "kl": "none",
    "entropy": "none",
    "aggregation": "prompt",
    "epochs": "default",
    "reward": "plus_minus_one",
}
RESOLVED: dict[str, tuple[str, dict[str, str], dict[str, Any]]] = {
    "scalerl": (
        "paper",
        SCALERL,
        {
            "reward.correct": 1.0,
            "reward.incorrect": -1.0,
            "loss.max_ratio": 5.0,
            "async_mode.k": 8,
            "async_mode.kv_on_update": "stale",
            "batch.prompts": 48,
            "batch.completions": 16,
            "optimizer.lr": 5e-7,
            "optimizer.eps": 1e-15,
            "optimizer.weight_decay": 0.01,
            "schedule.warmup_steps": 100,
            "context.max_prompt_tokens": 2048,
            "context.max_new_tokens": 14336,
            "length_control.low": 10_000,
            "length_control.high": 12_000,
            "evaluation.every_n_steps": 100,
            "evaluation.samples": 16,
        },
    ),
    "scalerl_core": (
        "paper",
        {
            **SCALERL,
            "resampling": "uniform",
            "async_mode": "ppo_off_policy",
            "length_control": "none",
            "truncated": "keep",
            "precision": "fp32",
        },
        {"reward.incorrect": -1.0},
    ),
    # In proportion to 10,000 to 12,000 of 12,288 tokens. max_new_tokens leaves room for the phrase and the solution.
    "scalerl_32k": (
        "scalerl_32k",
        SCALERL,
        {
            "length_control.low": round(10_000 * 32_768 / 12_288),
            "length_control.high": round(12_000 * 32_768 / 12_288),
            "context.max_new_tokens": 34_816,
            "evaluation.every_n_steps": 100,
            "evaluation.samples": 16,
        },
    ),
    "magistral": (
        "dapo_qwen",
        {**SCALERL, "resampling": "uniform", "precision": "bf16_head", "loss": "dapo"},
        {"loss.clip_high": 0.26, "batch.prompts": 80, "evaluation.every_n_steps": 100, "evaluation.samples": 16},
    ),
    "dr_grpo": (
        "paper",
        {
            **SCALERL,
            "resampling": "uniform",
            "async_mode": "ppo_off_policy",
            "length_control": "none",
            "truncated": "keep",
            "filter": "none",
            "normalization": "none",
            "precision": "bf16_head",
            "loss": "ppo",
            "aggregation": "constant",
            "reward": "zero_one",
        },
        {"async_mode.k": 8, "loss.clip": 0.2},
    ),
    "dapo": (
        "dapo",
        {
            **SCALERL,
            "resampling": "uniform",
            "async_mode": "ppo_off_policy",
            "length_control": "penalty",
            "truncated": "keep",
            "filter": "dynamic_sampling",
            "normalization": "prompt",
            "precision": "bf16_head",
            "loss": "dapo",
        },
        {
            "async_mode.k": 16,
            "loss.clip_low": 0.2,
            "loss.clip_high": 0.28,
            "length_control.limit": 20_480,
            "length_control.buffer": 4_096,
            "length_control.only_correct": False,
            "batch.prompts": 32,
            "batch.completions": 16,
            "optimizer.lr": 1e-6,
            "schedule.warmup_steps": 320,
            "context.max_new_tokens": 20_480,
        },
    ),
}


@pytest.mark.parametrize("recipe", every(3, RESOLVED))
def test_a_recipe_resolves_to_what_its_source_says(recipe: str) -> None:
    scale, chosen, values = RESOLVED[recipe]
    config = compose([f"recipe={recipe}", f"scale={scale}"])
    build_recipe(config, recipe)
    for group, name in chosen.items():
        with initialize_config_dir(str(ROOT / "conf"), version_base=None):
            file = hydra.compose(f"{group}/{name}")[group]
        assert config[group]._target_ == file._target_, group
        assert set(config[group]) == set(file), group
        if group in ("normalization", "precision"):
            assert config[group] == file, group
    assert {key: OmegaConf.select(config, key) for key in values} == pytest.approx(values)


@pytest.mark.slow
def test_scales_of_the_paper_evaluate_as_the_paper_does() -> None:
    """arXiv 2510.13786, A.3: every 100 steps, 16 completions per prompt. All scales of the paper's runs do so."""
    for scale in ("paper", "8b", "dapo_qwen", "scalerl_32k"):
        config = compose([f"scale={scale}"])
        assert (config.evaluation.every_n_steps, config.evaluation.samples) == (100, 16), scale


@pytest.mark.slow
@pytest.mark.parametrize("experiment", every(6, SELF_CONTAINED, pytest.mark.full))
def test_members_of_an_experiment_differ(experiment: str) -> None:
    specs = plan_members([[*overrides, *small(experiment)] for overrides in members(experiment)])
    assert len({spec.run for spec in specs}) == len(specs) > 1
    assert len({spec.recipe for spec in specs if spec.seed == 0}) * len({s.seed for s in specs}) == len(specs)


@pytest.mark.slow
@pytest.mark.parametrize("experiment", WITH_STAND_IN_DATA)
def test_experiments_on_real_models_can_be_planned(experiment: str, tmp_path: Path) -> None:
    """The number of devices depends on the model, and batch settings are the same in all. No hub is accessed."""
    (tmp_path / "rows.jsonl").write_text('{"question": "1+1?", "answer": "so #### 2"}\n')
    (tmp_path / "held.jsonl").write_text('{"question": "2+2?", "answer": "so #### 4"}\n')
    data = [f"task.train={tmp_path}/rows.jsonl", f"task.heldout={{test: {tmp_path}/held.jsonl}}"]
    specs = plan_members([[*overrides, *data] for overrides in members(experiment)])
    assert len({spec.run for spec in specs}) == len(specs) == 12
    layouts = {spec.config["model"]["path"]: spec.layout for spec in specs}
    assert layouts["Qwen/Qwen3-0.6B"] == (1, 1)
    assert len(layouts) == 1 or layouts["Qwen/Qwen3-8B"] == (1, 8)
    assert len({json.dumps(learning_config(spec.config)["batch"]) for spec in specs}) == 1


@pytest.mark.slow
def test_evaluation_sets_can_have_other_formats_than_the_task(tmp_path: Path) -> None:
    """experiment=downstream: each set has its own format, settings and rows, and is part of the run's identity."""
    rows = {
        "polaris": [{"problem": f"{n}+1?", "answer": str(n + 1), "difficulty": "3/8"} for n in range(300)],
        "aime": [{"problem": "1+1?", "answer": "2"}],
        "gsm8k": [{"question": "1+1?", "answer": "so #### 2"}],
        "humaneval": [{"prompt": "#1+1\n", "test": "def check(f):\n    assert f() == 2\n", "entry_point": "f",
                       "canonical_solution": "def f():\n    return 2\n"}],
    }  # fmt: skip
    files = {name: tmp_path / f"{name}.jsonl" for name in rows}
    for name, file in files.items():
        file.write_text("\n".join(map(json.dumps, rows[name])))
    data = [f"task.train={files['polaris']}"]
    for name, of in (("aime24", "aime"), ("gsm8k", "gsm8k"), ("humaneval", "humaneval")):
        data.append(f"evaluation.sets.{name}.task.heldout={{test: {files[of]}}}")
    specs = plan_members([[*overrides, *data] for overrides in members("downstream")])
    assert len({spec.run for spec in specs}) == len(specs) == 4 and len({spec.curve for spec in specs}) == 2
    sets = specs[0].config["evaluation"]["sets"]
    assert [sets[name]["samples"] for name in ("aime24", "gsm8k", "humaneval")] == [32, 1, 8]
    moved = tmp_path / "moved.jsonl"
    files["aime"].rename(moved)
    data[1] = f"evaluation.sets.aime24.task.heldout={{test: {moved}}}"
    assert plan_members([[*members("downstream")[0], *data]])[0].run == specs[0].run, "data are identified by content"
    assert plan_members([[*members("downstream")[0], *data, "evaluation.sets.aime24.samples=8"]])[0].run != specs[0].run


@pytest.mark.parametrize(
    "recipe",
    every(99, every(3, sorted(names("recipe"), key=lambda name: (name != "scalerl", name)), pytest.mark.full)),
)
def test_every_recipe_trains(recipe: str, tmp_path: Path) -> None:
    train([f"recipe={recipe}"], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("experiment", every(100, SELF_CONTAINED, pytest.mark.full))
def test_every_experiment_trains(experiment: str, tmp_path: Path) -> None:
    """Its first and its last member."""
    first, *_, last = members(experiment)
    # A model this small never solves the prompts of its pools, so it has no gradient.
    moves = experiment != "data_reuse"
    train(first, tmp_path, moves, small(experiment))
    # Without its tool, the agent solves nothing either.
    train(last, tmp_path, moves and experiment != "agent", small(experiment))


SMALL = ["model.width=32", "model.layers=1", "model.batches=2", "batch.prompts=2", "batch.completions=4"]


def two_rewards(folder: Path) -> list[str]:
    """Return overrides of a task with two rewards: even length (decides a pass), and short length at half weight."""
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(1, 6) for b in range(1, 6)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "held.jsonl").write_text('{"prompt": "6+1=", "answer": "7"}\n{"prompt": "1+6=", "answer": "7"}\n')
    functions = {"even": "float(len(completion) % 2 == 0)", "short": "1 / (1 + len(completion))"}
    texts = [f"def {name}(completion, answer):\n    return {value}\n" for name, value in functions.items()]
    (folder / "lengths.py").write_text("\n".join(texts))
    rewards = f"['{folder}/lengths.py:even',{{use:'{folder}/lengths.py:short',weight:0.5}}]"
    files = [f"task.train={folder}/rows.jsonl", f"task.heldout={{a:{folder}/held.jsonl}}"]
    return ["task=dataset", *files, f"task.rewards={rewards}", "verify.workers=0", *SMALL]


@pytest.mark.slow
def test_staged_rewards_act_until_the_last_stage_and_need_several_rewards(tmp_path: Path) -> None:
    """Stages begin after 0, 0.3 and 0.6 of the ten steps. They change the rewards, but not the pass rate."""
    journals = {}
    for variant in ("curriculum_staged_rewards", "none"):
        place = tmp_path / variant
        place.mkdir()
        staged_overrides = [*two_rewards(place), "recipe=scalerl_core", "async_mode=on_policy", "optimizer.lr=0"]
        train([*staged_overrides, f"variant={variant}"], place, size=["scale=arithmetic"])
        (run_dir,) = (place / "runs").iterdir()
        journals[variant] = read_journal(run_dir)
    staged, plain = (journals[name].of_kind("train") for name in ("curriculum_staged_rewards", "none"))
    shares = [record.metrics["train/rewards_staged"] for record in staged]
    assert any(shares[:6]) and not any(shares[6:])
    assert staged[-1].metrics["mechanism/curriculum"] == sum(map(bool, shares)) / STEPS
    assert "train/rewards_staged" not in plain[0].metrics
    # With learning rate 0 both runs sample the same rollouts, so rewards differ only by the weight of the first reward.
    for ours, theirs in zip(staged, plain, strict=True):
        factor = 0.0 if ours.step <= 3 else 0.5 if ours.step <= 6 else 1.0
        right = theirs.metrics["reward/even"]
        assert ours.metrics["train/pass_rate"] == theirs.metrics["train/pass_rate"] == right
        assert ours.metrics["train/reward"] == pytest.approx(theirs.metrics["train/reward"] - 2 * (1 - factor) * right)
    with pytest.raises(ConfigurationError, match=r"curriculum: StagedRewards .* this task has one; give task\.rewards"):
        plan_members([["variant=curriculum_staged_rewards", *SMALL]])


@pytest.mark.slow
@pytest.mark.parametrize("variant", every(20, sorted(set(names("variant")) - {"none"}), pytest.mark.full))
def test_every_variant_trains(variant: str, tmp_path: Path) -> None:
    """The variant is tried on the first recipe that it changes."""
    special = {
        "clip_none": [],
        "clip_0.3": [],
        "clip_1.0": two_rewards(tmp_path),
        "curriculum_staged_rewards": two_rewards(tmp_path),
    }
    if variant in special:  # it needs a scale with another clip norm, or a task with several rewards
        scale = "arithmetic" if special[variant] else "tiny"
        train([*special[variant], f"variant={variant}"], tmp_path, size=[f"scale={scale}"])
        return
    changed = compose([f"variant={variant}"])
    axis = str(changed.label).partition("=")[0]
    recipes = ("scalerl", "baseline", "ppo", "dr_grpo") if not variant.endswith("_value") else ("ppo",)
    recipe = next(name for name in recipes if compose([f"recipe={name}"])[axis] != changed[axis])
    train([f"recipe={recipe}", f"variant={variant}"], tmp_path)
