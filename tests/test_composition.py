"""Tests of conf/: every file composes and builds, and a variant changes exactly one choice of its recipe."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from lightning_scalerl import RolloutDataModule, train
from lightning_scalerl.checks import ConfigurationError, check_arguments
from lightning_scalerl.choices import AXES, NEUTRAL
from lightning_scalerl.composition import FROM_TRL, build_recipe, compose, conf_dir, load_recipe, plain_variants
from lightning_scalerl.member.identify import plan_members
from sweeps.decide.resolution import NULL_RECIPE
from sweeps.run.spec import learning_config
from tests.examples import every
from tests.sweeps.command.toy import planned, write_study
from tests.variants import VARIANTS, recipe_text, variant_text

CONF = conf_dir()
ROOT = CONF.parent
CHANGING = [variant for variant in VARIANTS if variant != "none"]
# Variants of optimizer settings, not of an axis. At some scales such a variant changes nothing.
OPTIMIZER = [variant for variant in CHANGING if variant.startswith(("clip_", "optimizer_")) or variant == "lr_0"]
# Experiments that sweep variants of the default recipe. The others are tested in tests/test_recipes.py.
VARIANT_EXPERIMENTS = [
    path.stem
    for path in sorted((CONF / "experiment").glob("*.yaml"))
    if "recipe:" not in (text := path.read_text()) and ("variant:" in text or "- leave_one_out" in text)
]
# A tiny base model, for tests that only look at the configuration.
QUICK = ["model.batches=1", "model.width=32", "model.layers=1"]


@pytest.fixture(autouse=True)
def model_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCALERL_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


def chosen_files(recipe: str) -> dict[str, str | None]:
    """Return the file that a recipe chooses on each axis."""
    return {**NEUTRAL, **dict(re.findall(r"^  - override /(\w+): (\w+)", recipe_text(recipe), re.MULTILINE))}


def is_own_choice(recipe: str, variant: str) -> bool:
    """Whether the recipe already makes the variant's choice: it names the same file, and the variant sets no value."""
    ((axis, name),) = re.findall(r"^  - override /(\w+): (\w+)", variant_text(variant), re.MULTILINE) or [("", "")]
    return chosen_files(recipe).get(axis) == name and f"label: {axis}={name}\n" in variant_text(variant)


@cache
def resolved(recipe: str) -> dict[str, Any]:
    """Return a recipe's resolved configuration in plain values."""
    return dict(OmegaConf.to_container(compose([f"recipe={recipe}"]), resolve=True))  # type: ignore[arg-type]


@cache
def meanings(recipe: str) -> dict[str, dict[str, Any]]:
    """Return the semantics of a recipe's choices by axis."""
    choices = load_recipe(recipe).choices
    return {axis: choices.on(axis).semantics() for axis in AXES}


# Each variant is tested on the first two of these recipes that do not already make its choice. PPO is for variants that
# both other recipes make.
PAIRS = [
    pytest.param(recipe, variant, marks=pytest.mark.full if again else ())
    for variant in CHANGING
    if variant not in OPTIMIZER
    for again, recipe in enumerate(
        [name for name in ("scalerl", "scalerl_core", "ppo") if not is_own_choice(name, variant)][:2]
    )
]


@pytest.mark.parametrize(("recipe", "variant"), every(12, every(6, PAIRS, pytest.mark.full)))
def test_a_variant_changes_one_choice_and_its_label_names_it(recipe: str, variant: str) -> None:
    config = compose([f"recipe={recipe}", f"variant={variant}"])
    changed = OmegaConf.to_container(config, resolve=True)
    assert isinstance(changed, dict)
    one, two = learning_config(resolved(recipe)), learning_config(changed)  # type: ignore[arg-type]
    different = [key for key in one if one[key] != two[key]]
    axis, choice = config.label.split("=")
    assert different == [axis]
    assert variant == f"{axis}_{choice}"
    assert build_recipe(config, recipe).choices.on(axis).semantics() != meanings(recipe)[axis]


@pytest.mark.slow
def test_a_clip_variant_changes_only_clip_norm() -> None:
    """A variant with the value that the scale already has changes nothing, and is refused."""
    paper = ["scale=paper", *QUICK, "scaled_for=null"]
    plain, none, low = plan_members([[*paper], [*paper, "variant=clip_none"], [*paper, "variant=clip_0.3"]])
    (toy,) = plan_members([[*QUICK, "variant=clip_1.0"]])
    assert [spec.recipe for spec in (none, low, toy)] == [
        f"scalerl+optimizer.clip_norm={clip}" for clip in ("none", "0.3", "1.0")
    ]
    for spec, value in ((none, None), (low, 0.3), (toy, 1.0)):
        assert spec.departures == {"optimizer": f"clip_norm={'none' if value is None else value}"}
        one, two = learning_config(spec.reference), learning_config(spec.config)
        assert [key for key in one if one[key] != two[key]] == ["optimizer"]
        assert {**one["optimizer"], "clip_norm": value} == two["optimizer"]
    assert len({spec.curve for spec in (plain, none, low, toy)}) == 4
    for scale, variant in (("paper", "1.0"), ("arithmetic", "0.3")):
        with pytest.raises(ConfigurationError, match=rf"variant: optimizer\.clip_norm={variant} changes nothing"):
            plan_members([[f"scale={scale}", *QUICK, "scaled_for=null", f"variant=clip_{variant}"]])


def test_the_null_recipe_differs_only_in_its_learning_rate() -> None:
    """The recipe with learning rate 0 is labelled as the null recipe (see sweeps/decide/resolution.py)."""
    (null,) = plan_members([[*QUICK, "variant=lr_0"]])
    assert null.recipe == f"scalerl+{NULL_RECIPE}" and null.departures == {"optimizer": "null"}
    one, two = learning_config(null.reference), learning_config(null.config)
    assert [key for key in one if one[key] != two[key]] == ["optimizer"]
    assert {**one["optimizer"], "lr": 0.0} == two["optimizer"]


@pytest.mark.slow
@pytest.mark.parametrize("experiment", every(3, VARIANT_EXPERIMENTS, pytest.mark.full))
def test_every_experiment_of_variants_can_be_planned(experiment: str) -> None:
    experiment_config = OmegaConf.load(CONF / "experiment" / f"{experiment}.yaml")
    inherited = [name for name in experiment_config.get("defaults", []) if name != "_self_"]  # type: ignore[union-attr]
    files = [*(OmegaConf.load(CONF / "experiment" / f"{name}.yaml") for name in inherited), experiment_config]
    variants = OmegaConf.merge(*files).hydra.sweeper.params.variant.split(",")  # type: ignore[union-attr]
    assert set(variants) <= set(VARIANTS)
    specs = plan_members(
        [[f"experiment={experiment}", f"variant={v}", f"seed={s}", *QUICK] for v in variants for s in (0, 1)]
    )
    assert len({spec.run for spec in specs}) == 2 * len(variants)
    assert len({spec.curve for spec in specs}) == len({spec.recipe for spec in specs}) == len(variants)
    assert all(not spec.departures for spec in specs if spec.recipe == spec.baseline)
    assert all(len(spec.departures) == 1 for spec in specs if spec.recipe != spec.baseline)
    assert {spec.config["output_dir"] for spec in specs} == {f"outputs/{experiment}"}


def test_labels_and_identity() -> None:
    same, budget, seed, changed, by_hand = plan_members(
        [
            [*QUICK],
            [*QUICK, "budget.steps=7", "study=other"],
            [*QUICK, "seed=5"],
            [*QUICK, "variant=loss_dapo"],
            [*QUICK, "loss=dapo"],
        ]
    )
    assert same.run == budget.run and budget.steps == 7
    assert same.curve == seed.curve and same.run != seed.run
    assert changed.recipe == by_hand.recipe == "scalerl+loss=dapo"
    assert changed.run == by_hand.run


def test_a_removed_key_at_its_neutral_value_in_recorded_overrides_is_ignored() -> None:
    (recorded,) = plan_members([["scale=tiny", "race.freed=nothing", "output_dir=x"]])
    (now,) = plan_members([["scale=tiny", "output_dir=x"]])
    assert (recorded.run, recorded.recipe) == (now.run, now.recipe)
    with pytest.raises(ConfigurationError, match=r"race.freed: the key was removed; .* `scalerl plan`"):
        plan_members([["scale=tiny", "race.freed=plan"]])


def test_swept_settings_are_part_of_the_label() -> None:
    one, two = plan_members([[*QUICK, "optimizer.lr=1e-4"], [*QUICK, "optimizer.lr=2e-4"]])
    assert (one.recipe, two.recipe) == ("scalerl+optimizer.lr=1e-4", "scalerl+optimizer.lr=2e-4")


def test_a_variant_that_changes_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="variant: loss=dapo changes nothing"):
        plan_members([[*QUICK, "recipe=mine", "variant=loss_dapo"]], [with_recipe(tmp_path, "mine", loss="dapo")])


def with_recipe(folder: Path, name: str, **choices: str) -> Path:
    """Write a recipe that overrides choices of ScaleRL into a user's folder."""
    (folder / "recipe").mkdir()
    lines = [
        "# @package _global_",
        "defaults:",
        "  - scalerl",
        *(f"  - override /{a}: {c}" for a, c in choices.items()),
    ]
    (folder / "recipe" / f"{name}.yaml").write_text("\n".join(lines))
    return folder


def user_recipe(folder: Path, **choices: str) -> Path:
    """Write a recipe `mine` that is not based on another one into a user's folder."""
    (folder / "recipe").mkdir()
    lines = [f"  - override /{axis}: {file}" for axis, file in choices.items()]
    (folder / "recipe" / "mine.yaml").write_text("\n".join(["# @package _global_", "defaults:", *lines]))
    return folder


NEEDED = {"advantage": "group", "precision": "bf16", "loss": "ppo", "aggregation": "token"}


def test_an_axis_that_a_recipe_does_not_name_has_its_neutral_choice(tmp_path: Path) -> None:
    choices = load_recipe("mine", folders=[user_recipe(tmp_path, **NEEDED)]).choices
    assert {axis for axis, choice in choices.items() if not choice.same_as(choice.neutral_choice() or choice)} == set()
    assert [axis for axis, choice in choices.items() if choice.neutral_choice() is None] == list(NEEDED)


def test_a_recipe_that_names_every_axis_resolves_to_those_choices(tmp_path: Path) -> None:
    """A recipe that names every axis does not depend on neutral choices. Old recipes were written this way."""
    whole = {axis: file for axis, file in chosen_files("scalerl_32k").items() if file is not None}
    folder = user_recipe(tmp_path, **whole)
    assert [*whole] == [*AXES, "reward"]
    assert OmegaConf.to_container(compose(["recipe=mine"], [folder]), resolve=True) == resolved("scalerl_32k")


def test_values_of_a_recipes_own_choice_do_not_reach_another_choice(tmp_path: Path) -> None:
    """Otherwise a study of losses on this recipe would run one loss with another loss's clip bounds."""
    for override in ("loss=gspo", "variant=loss_gspo"):
        assert dict(compose(["recipe=dapo", override]).loss) == dict(compose(["loss=gspo"]).loss)
    assert compose(["recipe=dapo", "async_mode=on_policy"]).async_mode.keys() == {"_target_"}
    folder = user_recipe(tmp_path, **{**NEEDED, "loss": "dapo"})
    with (folder / "recipe" / "mine.yaml").open("a") as file:
        file.write("\nloss:\n  clip_high: 0.5\n")
    assert compose(["recipe=mine", "loss=dapo"], [folder]).loss.clip_high == 0.5
    for override in ("loss=gspo", "variant=loss_gspo"):
        with pytest.raises(
            ConfigurationError, match=r"recipe=mine: its file sets loss.clip_high for loss=dapo, and loss=gspo"
        ):
            compose(["recipe=mine", override], [folder])


def test_a_recipe_names_the_axes_that_have_no_neutral_choice(tmp_path: Path) -> None:
    folder = user_recipe(tmp_path, **{axis: file for axis, file in NEEDED.items() if axis != "loss"})
    with pytest.raises(ConfigurationError, match=r"^axes: nothing chosen for loss; .* \(override /loss: NAME"):
        load_recipe("mine", folders=[folder])
    assert type(load_recipe("mine", ["loss=cispo"], [folder]).choices.loss).__name__ == "CISPO"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("seed=3", r"seed=3: not a part of the recipe.*RolloutDataModule\(task, seed=\.\.\.\)"),
        ("budget.steps=9", r"budget.steps=9: not a part.*Trainer\(max_steps=\.\.\.\)"),
        ("recipe=dapo", "recipe=dapo: not a part"),
        ("+trainer.devices=2", r"\+trainer.devices=2: not a part.*: leave it out"),
        ("~kl", "~kl: an axis cannot be taken away"),
        ("+decay.factor=0.5", "decay: neither a setting nor an axis"),
    ],
)
def test_a_script_refuses_overrides_that_are_no_part_of_a_recipe(override: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        load_recipe("scalerl", [override])


def test_choices_that_overrides_leave_alone_are_shared_with_the_recipe_of_the_file() -> None:
    recipe = load_recipe("scalerl", ["loss=gspo", "optimizer.lr=0.5"])
    assert recipe.named is not None
    assert (type(recipe.choices.loss).__name__, type(recipe.named.loss).__name__) == ("GSPO", "CISPO")
    assert recipe.named.filter is recipe.choices.filter
    assert [axis for axis, choice in recipe.named.items() if choice is not recipe.choices.on(axis)] == ["loss"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    every(
        6,
        every(
            3,
            [
                (["variant=async_mode_pipeline_4", "async_mode.k=0"], "async_mode.k: 0 must be a whole number"),
                (["variant=async_mode_pipeline_4", "async_mode.k=2"], "async_mode: changed twice, by the variant"),
                (["loss=dapo", "variant=loss_dapo"], "loss: changed twice, by the variant loss=dapo and by loss=dapo"),
                (["variant=loss_dapo", "label='loss=gspo'"], "label='loss=gspo': a run is named after what it changes"),
                (["optimiser.lr=1"], "did you mean optimizer\\?; valid here: .*optimizer"),
                (["optimizer.lrr=1"], "did you mean optimizer.lr\\?; valid here: _target_, lr"),
                (["~filter"], "~filter: an axis cannot be taken away"),
                (
                    ["+decay.factor=0.5"],
                    "decay: neither a setting nor an axis; an axis of your own is a mapping with _target_",
                ),
                (
                    ["loss=dapo", "loss.clip_hgh=0.3"],
                    r"did you mean loss.clip_high\?; valid here: _target_, clip_low, clip_high",
                ),
                (["optimizer.lr=abc"], "optimizer.lr: 'abc' must be a number"),
                (["optimizer.lr=null"], "optimizer.lr: null must be a number"),
                (["optimizer.dropout=1"], "optimizer.dropout: 1 must be true or false"),
                (["task.train=[true]"], "task\\.train: true must be a whole number"),
                (["batch.rollouts=true"], "batch.rollouts: true must be a whole number, or null"),
                (["variant=loss_dapo", "loss.clip_high=true"], "loss.clip_high: true must be a number"),
                (["rollouts.groups=true"], "rollouts.groups: True must be a whole number, 0 or more"),
                (["launch.threads=true"], "launch.threads: True must be a whole number"),
                (["strategy.name=fsdp1"], "strategy.name: 'fsdp1' is unknown; valid: ddp, fsdp2"),
                (["strategy.nodes=2"], "strategy.nodes: 2, and strategy.devices does not say how many ranks each has"),
                (["mlflow.uri=1e999"], "mlflow.uri: inf must be an address"),
                (["+optimizer.clip=1"], "optimizer.clip: no such setting; did you mean optimizer.clip_norm\\?"),
                (["seed=-1"], "seed: -1 must be a whole number, 0 or more"),
                (["budget=3"], "budget: 3 must be a group of settings; give budget.steps=..."),
                (["recipy=scalerl"], "did you mean recipe\\?"),
                (["+trainer.accelerator=gpu"], "trainer.accelerator=gpu: needs trainer=trl; .*strategy.devices=2"),
                (["optimizer.lr.deeper=1"], "optimizer.lr is a value, not a group"),
                (
                    ["scale=tiny", "task.heldout={test: x}"],
                    "task.heldout=.*; a chosen file, such as that of scale=, has a list",
                ),
            ],
            pytest.mark.full,
        ),
    ),
)
def test_error_messages_name_the_wrong_setting(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        plan_members([[*QUICK, *overrides]])


def test_a_scale_for_another_model_is_refused_as_such() -> None:
    """The message names the model. A message about a setting of the other task would suggest no remedy."""
    with pytest.raises(ConfigurationError, match=r"scale: .* were made for arithmetic_base_model"):
        plan_members([["experiment=agent", "scale=tiny"]])


def test_cfg_refuses_what_a_run_would_refuse(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Hydra handles --cfg itself: without our check it would show DAPO under the label GSPO, which no run can have."""
    monkeypatch.setattr(sys, "argv", ["scalerl", "--cfg", "job", "variant=loss_gspo", "loss=dapo"])
    monkeypatch.setattr(train, "_hydra_main", lambda: print("label: loss=gspo"))
    with pytest.raises(SystemExit) as stop:
        train.main()
    assert stop.value.code == 1
    shown = capsys.readouterr()
    assert not shown.out and "loss: changed twice, by the variant loss=gspo and by loss=dapo; keep one" in shown.err
    monkeypatch.setattr(sys, "argv", ["scalerl", "--cfg", "job", "variant=loss_gspo", "optimizer.lr=1e-3"])
    train.main()
    assert capsys.readouterr().out == "label: loss=gspo\n"
    monkeypatch.setattr(sys, "argv", ["scalerl", "--multirun", "loss=gspo,dapo", "--cfg=job"])
    with pytest.raises(SystemExit) as stop:
        train.main()
    assert stop.value.code == 1
    message = "--cfg: prints the configuration of one run; leave out --multirun"
    assert capsys.readouterr().err.strip().endswith(message)


def test_a_task_without_its_files_says_what_to_give() -> None:
    with pytest.raises(ConfigurationError, match=r"task\.heldout: needs a value; give task\.heldout="):
        RolloutDataModule("jsonl")


def error_of_train(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], folder_of_run: Path
) -> str:
    """Return the one-line error of `scalerl train`. Checks that it exits with 1 and leaves no run in the folder."""
    monkeypatch.chdir(folder_of_run)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")  # `main` sets it too; monkeypatch restores it
    monkeypatch.setattr(sys, "argv", ["scalerl train", *words])
    with pytest.raises(SystemExit) as exit:
        train.main()
    stderr = capsys.readouterr().err
    assert exit.value.code == 1 and len(stderr.strip().splitlines()) == 1, stderr
    assert not list(folder_of_run.glob("outputs/**/runs"))
    return stderr


MULTIRUN = ["--multirun", "cluster=debug", "seed=0,1"]
DEVICE = "accelerator: no setting of a run; a run trains on the GPU that its process sees"


@pytest.mark.parametrize(
    ("arguments", "message"),
    every(
        5,
        every(
            5,
            [
                (["loss=foo"], "loss=foo: no such choice; valid: cispo, clip_cov, dapo"),
                (["nonsense=1"], "valid here: "),
                (["async_mode.k=0"], "async_mode.k: 0 must be"),
                (["task=jsonl"], "task.heldout: needs a value"),
                (
                    ["task=jsonl", "task.train=/nothing", "task.heldout={a:/nothing}"],
                    "task.train: cannot read '/nothing'",
                ),
                ([*MULTIRUN, "variant=none,loss_foo"], "loss_dapo"),
                (["budget.steps=0"], "budget.steps: 0"),
                # Hydra itself would print a traceback for these.
                (["task=true"], "task=true: no such choice; valid: aime"),
                (["scale=8"], "scale=8: no such choice; did you mean scale=8b?"),
                (["~loss=1"], "loss=1: no such choice; valid: cispo"),
                (["loss=null"], "loss=null: no such choice; valid: cispo"),
                (["model=[]"], "model=[]: no such choice; valid: arithmetic_base, calculator_base, path"),
                (["model=[1]"], "model=[1]: no such choice"),
                (["=3"], "=3: no key before the ="),
                # Misspelt names.
                (["recipe=scalrl"], "recipe=scalrl: no such choice; did you mean recipe=scalerl?"),
                (["variant=loss_dapoo"], "did you mean variant=loss_dapo?"),
                ([*MULTIRUN, "variant=none,loss_dapoo"], "did you mean variant=loss_dapo?"),
                (["accelerator=gpu"], DEVICE),
                (["race.freed=plan"], "race.freed: the key was removed; leave it out, and ask `scalerl plan`"),
                (["command=trl"], "command: another trainer's command is a file of yours"),
                (["command.line=x"], "give --config-dir FOLDER --config-name NAME"),
                # A boolean is not accepted as a number, nor infinity as text.
                (["optimizer.lr=true"], "optimizer.lr: true must be a number"),
                ([*MULTIRUN, "mlflow.uri=1e999"], "mlflow.uri: inf must be an address"),
            ],
            pytest.mark.full,
        ),
    ),
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_one_line_and_exit_code_1(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    error_line = error_of_train([*arguments, *QUICK], monkeypatch, capsys, tmp_path)
    assert error_line.startswith("scalerl train: ") and message in error_line


@pytest.mark.slow
def test_options_and_overrides_can_be_mixed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Hydra's parser accepts overrides in one place only, and rejects those after an option as unrecognized."""
    last_error_line = error_of_train(
        ["seed=0,1", "--multirun", "cluster=debug", *QUICK, "budget.steps=0"], monkeypatch, capsys, tmp_path
    )
    assert "budget.steps: 0" in last_error_line
    monkeypatch.setattr(sys, "argv", ["scalerl train", "seed=7", "--cfg", "job", "study=mine", "--resolve"])
    train.main()
    shown = capsys.readouterr().out
    assert "seed: 7\n" in shown and "output_dir: outputs/mine\n" in shown


def test_settings_are_compared_with_annotations() -> None:
    class Own:
        def __init__(self, share: float | None, weights: Mapping[str, float], steps: int = 1, free: Any = 0) -> None:
            pass

    good = {"_target_": "x.Own", "share": None, "weights": {"a": 1, "b": 0.5}, "steps": 2, "free": True}
    check_arguments("own", Own, good)
    for bad, expected in (
        ({"share": False}, "own.share: false must be a number, or null"),
        ({"weights": {"a": 1, "b": True}}, "own.weights.b: true must be a number"),
        ({"steps": "2"}, "own.steps: '2' must be a whole number"),
        ({"steps": math.inf}, "own.steps: inf must be a whole number"),
        ({"weights": {"a": 1, "b": math.nan}}, "own.weights.b: nan must be a number"),
        ({"stepps": 2}, "own.stepps: no such setting; did you mean own.steps?; valid: share, weights, steps, free"),
    ):
        with pytest.raises(ConfigurationError) as error:
            check_arguments("own", Own, {**good, **bad})
        assert str(error.value) == expected


def test_variant_files_exist_only_where_the_name_is_not_enough() -> None:
    """A variant that only selects an axis's file needs no file. If it had one, that file would take precedence."""
    file_names = {path.stem for path in (CONF / "variant").glob("*.yaml")}
    assert not file_names & plain_variants().keys()
    assert {"loss_dapo", "adapter_lora"} <= plain_variants().keys() and "async_mode_pipeline_4" in file_names


def test_leave_one_out_has_the_members_of_the_paper() -> None:
    """arXiv 2510.13786, section 5.1: eight members, each with one choice of ScaleRL reverted."""
    params = OmegaConf.load(CONF / "experiment" / "leave_one_out.yaml").hydra.sweeper.params
    assert set(params.variant.split(",")) == {
        "none",
        "loss_dapo",
        "precision_bf16_head",
        "length_control_penalty",
        "normalization_prompt",
        "resampling_uniform",
        "filter_none",
        "async_mode_ppo_off_policy",
        "aggregation_sample",
    }
    config = compose(["recipe=scalerl", "scale=paper", "variant=async_mode_ppo_off_policy"])
    assert config.async_mode.k == 8
    config = compose(["recipe=scalerl", "scale=paper", "variant=length_control_penalty"])
    assert (config.length_control.limit, config.length_control.buffer) == (14336, 2048)


def test_error_messages_suggest_choices_with_the_setting_and_user_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"kl\.coefficient: the chosen kl has no such setting; .*fixed"):
        compose(["kl.coefficient=0.1"])
    with pytest.raises(ConfigurationError, match=r"beta: TRL's name; here kl=fixed kl\.coefficient="):
        compose(["beta=0.04"])
    with pytest.raises(ConfigurationError, match=r"loss=mine: no such choice; .*of your own needs --config-dir FOLDER"):
        compose(["loss=mine"])
    (tmp_path / "loss").mkdir()
    (tmp_path / "loss" / "mine.yaml").write_text("_target_: lightning_scalerl.axes.loss.DAPO\n")
    with pytest.raises(ConfigurationError, match=r"no such choice; use loss=mine, or write variant/loss_mine\.yaml"):
        compose(["variant=loss_mine"], [str(tmp_path)])


def test_our_key_for_each_field_of_trl_exists() -> None:
    chosen = ["kl=fixed", "loss=dapo", "async_mode=ppo_off_policy", "task=dataset", "task.train=x", "task.heldout=y"]
    config = compose(chosen)
    for field, here in FROM_TRL.items():
        for group, _, key in (option.rpartition(".") for option in re.findall(r"([\w.]+)=", here)):
            assert key in (OmegaConf.select(config, group) if group else config), field


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("loss=a,ünï", "loss=a,ünï: a value with the character 'ü' needs quotes: \"loss='...'\""),
        ("optimizer.lr=1^5", "optimizer.lr=1^5: a value with the character '^' needs quotes: \"optimizer.lr='...'\""),
        ("lüss=ü", "lüss=ü: a key cannot have the character 'ü'; correct it"),
        ("loss='grpo", "loss='grpo: the quote ' is not closed; close it"),
        (
            "loss=a=b",
            "loss=a=b: mismatched input '=' expecting <EOF>; put a value with special characters into quotes: ",
        ),
    ],
)
def test_an_override_that_hydra_cannot_parse_is_named(override: str, message: str, tmp_path: Path) -> None:
    """Also for another trainer's command, where a value may be any text."""
    for plan in (lambda: compose([override]), lambda: planned(write_study(tmp_path), override)):
        with pytest.raises(ConfigurationError) as caught:
            plan()
        assert str(caught.value).startswith(message)
