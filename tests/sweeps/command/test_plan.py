"""Tests of planning commands: identities, labels, and mistakes that are refused before anything is started."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_scalerl.checks import ConfigurationError
from lightning_scalerl.member.command import command_conf_dir, plan_commands, study_file
from sweeps.command.plan import resolved
from sweeps.command.settings import newest
from tests.paths import ROOT
from tests.sweeps.command.toy import SCRIPT, planned, write_study

LINE = "python -S train.py --steps={steps} --seed={seed} --out={run_dir} --loss={loss}"


def test_seed_budget_and_folder_are_not_part_of_a_recipe(tmp_path: Path) -> None:
    file = write_study(tmp_path)
    one, other_seed, longer, dapo = planned(file, "seed=1", "seed=2", "seed=1 budget.steps=99", "seed=1 loss=dapo")
    assert one.curve == other_seed.curve == longer.curve != dapo.curve
    assert one.run == longer.run != other_seed.run
    assert planned(file, "seed=1 output_dir=/elsewhere launch.max_parallel=7")[0].run == one.run
    words = resolved(dapo, tmp_path / "out").words
    assert words == ("python", "-S", "train.py", "--steps=30", "--seed=1", f"--out={tmp_path}/out", "--loss=dapo")


def test_labels_list_the_values_that_differ_from_the_file(tmp_path: Path) -> None:
    file = write_study(tmp_path, values={"loss": "grpo", "optim": {"lr": 1e-6}}, line=f"{LINE} {{optim.lr}}")
    unchanged, dapo, both = planned(file, "loss=grpo", "loss=dapo", "optim.lr=0.1 loss=dapo")
    assert [spec.recipe for spec in (unchanged, dapo, both)] == ["toy", "loss=dapo", "loss=dapo+optim.lr=0.1"]
    assert (unchanged.baseline, dict(both.departures)) == ("toy", {"loss": "dapo", "optim.lr": "0.1"})
    content = yaml.safe_load(file.read_text())
    file.write_text(yaml.safe_dump({**content, "label": "{loss} at {optim.lr}"}))
    assert [spec.recipe for spec in planned(file, "", "loss=dapo")] == ["grpo at 1e-06", "dapo at 1e-06"]


def test_an_interpolated_value_is_not_part_of_the_label(tmp_path: Path) -> None:
    values = {"loss": "grpo", "name": "${loss}-${seed}"}
    unchanged, dapo = planned(write_study(tmp_path, values=values, line=f"{LINE} {{name}}"), "loss=grpo", "loss=dapo")
    assert (
        unchanged.recipe == "toy"
        and dapo.recipe.startswith("loss=dapo")
        and resolved(dapo, tmp_path).words[-1] == "dapo-0"
    )


def test_a_value_without_a_default_is_in_every_label(tmp_path: Path) -> None:
    file = write_study(tmp_path, values={"loss": "???"})
    assert [spec.recipe for spec in planned(file, "loss=grpo", "loss=dapo")] == ["loss=grpo", "loss=dapo"]
    with pytest.raises(ConfigurationError, match=r"^loss: needs a value; give loss=\.\.\., or a value in "):
        planned(file)


def test_the_content_of_script_and_template_is_part_of_the_recipe(tmp_path: Path) -> None:
    (tmp_path / "base.toml").write_text('loss = "{loss}"\nseed = {seed}\n')
    line = "python -S train.py --config={run_dir}/c.toml --steps={steps}"
    file = write_study(tmp_path, files={"c.toml": "base.toml"}, line=line)
    first = planned(file)[0]
    assert first.config["command"]["named"].keys() == {"train.py"}
    (tmp_path / "base.toml").write_text('loss = "{loss}"\nseed = {seed}\nlr = 1\n')
    second = planned(file)[0]
    (tmp_path / "train.py").write_text(SCRIPT + "\n# another\n")
    assert len({first.curve, second.curve, planned(file)[0].curve}) == 3
    # The first plan keeps the template's content of that time.
    assert resolved(first, tmp_path).files == {"c.toml": 'loss = "grpo"\nseed = 0\n'}


def test_a_learning_rate_is_a_number_in_a_yaml_template(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("learning_rate: {lr}\n")
    line = "python -S train.py --config={run_dir}/c.yaml --lr={lr} --steps={steps} --seed={seed}"
    spec = planned(write_study(tmp_path, values={"lr": 1e-5}, files={"c.yaml": "base.yaml"}, line=line))[0]
    command = resolved(spec, tmp_path)
    assert yaml.safe_load(command.files["c.yaml"]) == {"learning_rate": 1e-5}
    assert "--lr=1e-05" in command.words


@pytest.mark.parametrize(
    ("value", "word"),
    [("nan", "NaN"), ("inf", "Infinity"), ("1_000", "1000"), ("0.10", "0.1"), ("'inf'", "inf"), ("'1_000'", "1_000")],
)
def test_values_are_inserted_as_in_json_and_quoted_ones_as_they_are(tmp_path: Path, value: str, word: str) -> None:
    """Other words would change the identities of existing members."""
    line = "python train.py {v} {seed} {steps}"
    (spec,) = planned(write_study(tmp_path, values={"v": "???"}, line=line), f"v={value}")
    assert resolved(spec, tmp_path).words == ("python", "train.py", word, "0", "30")


def test_users_values_may_have_the_names_of_our_groups(tmp_path: Path) -> None:
    values = {"loss": "grpo", "model": "tiny", "variant": 8}
    file = write_study(tmp_path, values=values, line=f"{LINE} {{model}} {{variant}}")
    assert planned(file, "model=large variant=16")[0].recipe == "model=large+variant=16"


@pytest.mark.parametrize(
    ("settings", "overrides", "message"),
    [
        ({"line": LINE + " {lr}"}, "", r"^command.line: \{lr\} has no value; give the key lr one in your file"),
        (
            {"line": LINE.replace("--loss={loss}", "")},
            "",
            r"^loss: grpo is used nowhere; write \{loss\} where it belongs",
        ),
        ({"line": LINE.replace("{seed}", "1")}, "", r"^seed: 0 is used nowhere; write \{seed\}"),
        ({"line": ""}, "", r"^command.line: is empty; give the command that trains"),
        ({"line": "python 'train.py"}, "", r"^command.line: \"python 'train.py\" must be a command line"),
        ({"files": {"c.toml": "no.toml"}}, "", r"^command.files.c.toml: .*/no.toml: cannot be read"),
        ({"folder": "nowhere"}, "", r"^command.folder: .*/nowhere: no such folder"),
        ({"identity": ["no.py"]}, "", r"^command.identity: .*/no.py: no such file"),
        ({"stop": {"signal": "TERM"}}, "", r"^command.stop.signal: 'TERM' is no signal; give SIGTERM"),
        ({"stop": {"within_s": 0}}, "", r"^command.stop.within_s: 0 must be a number of seconds above 0"),
        ({"compute": {"parameters": 0}}, "", r"^command.compute.parameters: 0 must be a number above 0"),
        ({"compute": {"devices": -1}}, "", r"^command.compute.devices: -1 must be a number above 0"),
        ({"compute": {"per_step": "yes"}}, "", r"^command.compute.per_step: 'yes' must be true or false"),
        ({"done": {"within": -1}}, "", r"^command.done.within: -1 must be a whole number of steps"),
        ({"metrics": {"reward": 3}}, "", r"^command.metrics.reward: 3 must be the name of a column"),
        (
            {"metrics": {"reward": "r", "rewrd": "r"}},
            "",
            r"^command.metrics.rewrd: no such setting; valid: keep, reward",
        ),
        ({}, "command.retries=3", r"command\.retries.*give command\.retries a value in your file, or take it away"),
        ({}, "cluster=mars", r"cluster"),
        ({}, "seed=x", r"^seed: 'x' must be a whole number"),
        ({}, "budget.steps=0", r"^budget.steps: 0 must be a whole number of steps"),
        ({"env": {"TOKEN": "hf_abcdefghijklmnopqrstuvwxyz0123456789"}}, "", r"holds what looks like a secret"),
    ],
)
def test_mistakes_are_one_line_before_anything_runs(
    tmp_path: Path, settings: dict[str, Any], overrides: str, message: str
) -> None:
    file = write_study(tmp_path, **settings)
    with pytest.raises(ConfigurationError, match=message) as caught:
        planned(file, overrides)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "text"), [("c.toml", "lr = {loss}"), ("c.json", '{"a": "{loss}",}'), ("c.yaml", "a: [{loss}")]
)
def test_a_template_that_gives_an_invalid_file_is_refused(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / "template").write_text(text)
    file = write_study(tmp_path, files={name: "template"})
    with pytest.raises(ConfigurationError, match=rf"^command.files.{name}: with its values filled in it is not "):
        planned(file)


def test_two_members_with_one_log_are_refused_by_name(tmp_path: Path) -> None:
    file = write_study(tmp_path, metrics={"reward": "r", "source": "out/{loss}.jsonl"})
    with pytest.raises(ConfigurationError, match=r"out/grpo.jsonl: toy seed 1 and toy seed 2 would both write it; put"):
        planned(file, "seed=1", "seed=2")
    assert len(planned(file, "loss=grpo", "loss=dapo")) == 2


@pytest.mark.parametrize(
    ("setting", "settings"),
    [
        ("metrics.source", {"metrics": {"source": "{loss}/../out.jsonl", "reward": "r"}}),
        ("resume.checkpoints", {"resume": {"checkpoints": "state-*.json"}}),
        ("stop.file", {"stop": {"file": "STOP"}}),
    ],
)
def test_two_members_may_not_share_log_checkpoint_or_stop_file(
    tmp_path: Path, setting: str, settings: dict[str, Any]
) -> None:
    """Each would resume from the other's checkpoint or stop with it. The log's path is spelled in different ways."""
    file = write_study(tmp_path, **settings)
    for loss in ("grpo", "dapo"):
        (tmp_path / loss).mkdir()
    with pytest.raises(
        ConfigurationError, match=rf"^command.{setting}: .*: toy seed 0 and loss=dapo seed 0 would both"
    ):
        planned(file, "loss=grpo", "loss=dapo")


@pytest.mark.parametrize(
    ("script", "value", "safe"),
    [
        ("train {loss} | tee log", "grpo", True),
        ("train {loss} | tee log", "'a;touch pwned'", False),
        ("train {loss}", "'two words'", False),
        ("train '{loss}'", "'two words; $HOME'", True),
        ("train '{loss}'", '"it\'s"', False),
        ('train "{loss}"', "'two words; *'", True),
        ('train "{loss}"', "'$(date)'", False),
    ],
)
def test_values_are_safe_in_shell_commands(tmp_path: Path, script: str, value: str, safe: bool) -> None:
    line = ["bash", "-c", f"{script} --seed {{seed}} {{steps}}"]
    file = write_study(tmp_path, line=line)
    lists = [[f"loss={value}"]]
    if safe:
        assert plan_commands(lists, [str(file)])
        return
    with pytest.raises(ConfigurationError, match=r"^command.line: loss: .* stands in words of a shell, .* as an argum"):
        plan_commands(lists, [str(file)])
    as_argument = write_study(tmp_path, line=["bash", "-c", 'train "$1"', "bash", "{loss}", "{seed}", "{steps}"])
    (spec,) = plan_commands(lists, [str(as_argument)])
    assert resolved(spec, tmp_path).words[4] in ("a;touch pwned", "two words", "it's", "$(date)")


def test_a_folders_name_may_contain_glob_characters(tmp_path: Path) -> None:
    folder = tmp_path / "study[1] *"
    file = write_study(
        folder,
        metrics={"source": "{run_dir}/checkpoint-*/state.json", "reward": "r"},
        resume={"checkpoints": "{run_dir}/state-*.json"},
    )
    (spec,) = planned(file)
    command = resolved(spec, run_dir := folder / "outputs/runs" / spec.run)
    (run_dir / "checkpoint-10").mkdir(parents=True)
    for name in ("checkpoint-10/state.json", "state-5.json", "state-10.json"):
        (run_dir / name).touch()
    assert command.newest_checkpoint() == str(run_dir / "state-10.json")
    assert newest(command.source) == str(run_dir / "checkpoint-10/state.json")


def test_one_study_has_one_axis_of_compute(tmp_path: Path) -> None:
    file = write_study(tmp_path)
    with pytest.raises(ConfigurationError, match=r"^command.compute: members measure compute in 2 ways \(.*one axis$"):
        planned(file, "seed=1", "seed=2 command.compute.unit=steps")


def test_a_study_keeps_its_measure_of_compute(tmp_path: Path) -> None:
    file = write_study(tmp_path)
    journal = tmp_path / "outputs/runs/one/metrics.jsonl"
    journal.parent.mkdir(parents=True)
    journal.write_text('{"kind": "run", "compute_is": "tokens: tokens"}\n')
    assert planned(file, "seed=2")
    with pytest.raises(
        ConfigurationError, match=r"and runs in .*/outputs measure tokens: tokens; one study has one axis"
    ):
        planned(file, "seed=2 command.compute.unit=steps")


def test_a_file_with_a_command_needs_the_member_default(tmp_path: Path) -> None:
    file = write_study(tmp_path)
    assert study_file("toy", [tmp_path]) == file and study_file("train", []) is None and study_file("no", []) is None
    content = yaml.safe_load(file.read_text())
    file.write_text(yaml.safe_dump({key: value for key, value in content.items() if key != "defaults"}))
    with pytest.raises(ConfigurationError, match=r"toy.yaml: has a command and no member; begin it with defaults:"):
        study_file("toy", [tmp_path])


EXAMPLES = sorted(path.stem for path in command_conf_dir().glob("*.yaml"))


def test_each_trainer_has_an_example() -> None:
    assert EXAMPLES == ["open_instruct", "prime_rl", "skyrl", "trl", "verl"]


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_compose_and_fill_in_every_placeholder(name: str) -> None:
    file = command_conf_dir() / f"{name}.yaml"
    (spec, other) = plan_commands([[f"study={name}", f"seed={seed}"] for seed in (1, 2)], [str(file)])
    assert spec.curve == other.curve and spec.recipe == name
    command = resolved(spec, Path("/study/runs/one"))
    text = " ".join([*command.words, *command.files.values(), *command.env.values()])
    assert "{" not in text.replace("{checkpoint}", "") and "/study/runs/one" in text
    if not command.remote:
        assert command.source.startswith("/study/runs/one/")
    assert file.read_text().startswith("# ") and f"--config-name {name} --multirun" in file.read_text()


def test_our_own_runs_compose_after_a_study_of_commands(tmp_path: Path) -> None:
    """Planning changes Hydra's config store, which is global in a process. It must restore the store completely."""
    file = write_study(tmp_path)
    program = f"""
from pathlib import Path
from lightning_scalerl.composition import compose
from lightning_scalerl.member.command import plan_commands
plan_commands([["seed=1"]], [{str(file)!r}])
print(compose(["variant=loss_dapo"])["label"], compose(["variant=normalization_prompt"])["label"])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.stdout.split() == ["loss=dapo", "normalization=prompt"], done.stderr


def test_our_files_in_a_members_folder_are_not_overwritten(tmp_path: Path) -> None:
    """A template for `config.yaml` would silently replace the run's configuration."""
    (tmp_path / "template.yaml").write_text("loss: {loss}\n")
    for name in ("config.yaml", "spec.json", "./metrics.jsonl", "../config.yaml", "/tmp/config.yaml"):
        with pytest.raises(ConfigurationError, match=r"command\.files\..*another"):
            planned(write_study(tmp_path, files={name: "template.yaml"}))
    assert planned(write_study(tmp_path, files={"conf/config.yaml": "template.yaml"}))
    with pytest.raises(ConfigurationError, match=r"metrics\.jsonl is the member's journal"):
        planned(write_study(tmp_path, metrics={"reward": "r", "source": "{run_dir}/metrics.jsonl"}))
