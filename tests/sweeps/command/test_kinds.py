"""Test that any value in a study's file is accepted or refused in one line, without a Python traceback."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from lightning_scalerl.checks import ConfigurationError
from lightning_scalerl.member.command import command_conf_dir, plan_commands, study_file
from sweeps.cli.launchers import DebugStudyLauncher
from sweeps.command.kinds import _KINDS
from sweeps.command.plan import ComposedMember, make_specs
from sweeps.errors import UserError
from sweeps.run.spec import RunSpec
from sweeps.search.settings import Axis
from tests.examples import every
from tests.sweeps.command.toy import planned, write_study

VALUES: tuple[Any, ...] = (
    None, True, 0, 3, -1, 1.5, float("inf"), float("nan"), 10**400, "", "{", "x", "???", "a\nb", "\0", "\ud800",
    b"\xff", [], [1], ["x"], [None], [{}], {}, {"a": 1}, {1: 2}, {"a": {"b": [1]}}, object(),
)  # fmt: skip
PARTS = 4  # no common factor with len(VALUES), so each part has every key and every value


def keys(config: Mapping[str, Any], above: str = "") -> Iterator[str]:
    for key, value in config.items():
        if key == "hydra":
            continue
        yield above + key
        if isinstance(value, Mapping):
            yield from keys(value, f"{above}{key}.")


BASE = OmegaConf.to_container(OmegaConf.load(command_conf_dir() / "base" / "command.yaml"))
assert isinstance(BASE, dict)
KEYS = [key for key in keys(BASE) if key not in ("defaults", "race") and not key.startswith("defaults.")]


def test_every_setting_of_the_base_has_a_type() -> None:
    checked_elsewhere = re.compile(
        r"seed|race\..*|launch\.(hang_factor|hang_min_s|max_device_hours|rate|margin|design)"
    )
    assert {key for key in KEYS if not checked_elsewhere.fullmatch(key)} == set(_KINDS)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    (spec,) = planned(write_study(tmp_path_factory.mktemp("toy")))
    composed = copy.deepcopy(dict(spec.config))
    composed["command"] = {k: v for k, v in composed["command"].items() if k not in ("texts", "named")}
    return composed


class Launcher(DebugStudyLauncher):
    """A launcher that plans a study and stops before it runs members."""

    config: Mapping[str, Any]
    folder: Path

    def plan_members(self, override_lists: Sequence[Sequence[str]]) -> list[RunSpec]:
        return make_specs([ComposedMember(self.config, {}, ())], "toy", self.folder, ())

    def _run(self, study: Any, plan: Any, search: Any = None) -> dict[str, Any]:
        plan.text()
        return {}


@pytest.mark.parametrize("part", every(PARTS, range(PARTS), pytest.mark.full))
def test_any_value_at_any_key_is_accepted_or_refused_by_name(config: dict[str, Any], part: int) -> None:
    launcher = Launcher("a:b", "a:b")
    launcher.folder = Path(config["command"]["folder"])
    for key, value in [(key, value) for key in [*KEYS, "loss"] for value in VALUES][part::PARTS]:
        changed = copy.deepcopy(config)
        inner = changed
        *groups, name = key.split(".")
        for group in groups:
            inner = inner[group]
        inner[name] = value
        launcher.config = changed
        try:
            launcher.launch([[]], 0)
        except UserError as error:
            assert str(error).startswith((name, key, "'", "command.", "loss: ")), (key, value, error)
        except Exception as error:
            raise AssertionError(f"{key}: {value!r}") from error


@pytest.mark.parametrize("key", ["command.metrics.step", "command.resume", "budget.steps", "launch.max_parallel"])
def test_a_removed_setting_is_refused_by_name(config: dict[str, Any], key: str) -> None:
    changed = copy.deepcopy(config)
    *groups, name = key.split(".")
    inner = changed
    for group in groups:
        inner = inner[group]
    del inner[name]
    with pytest.raises(UserError, match=f"^{re.escape(key)}: was taken away; give "):
        make_specs([ComposedMember(changed, {}, ())], "toy", Path(config["command"]["folder"]), ())


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (b"x: [1\n", r"line \d+, column \d+: not YAML"),
        (b"x:\n\t- y\n", r"line \d+, column 1: not YAML \(found character"),
        (b"x: *nope\n", "not YAML .*undefined alias"),
        (b"loss: again\n", "duplicate key loss"),
        (b"x: !tag y\n", "could not determine a constructor"),
        (b"x: \xff\n", r"byte \d+ is not UTF-8; save the file as UTF-8"),
        (b"x: \0\n", "special characters are not allowed"),
        (b"---\nx: 1\n", "found another document"),
        (b"x: " + b"9" * 5000 + b"\n", "not YAML .*4300 digits"),
        (b"x: " + b"[" * 1000 + b"\n", "nested too deep"),
        (b"x: ${\n", "not YAML"),
        (b"hydra: {launcher: 3}\n", "hydra.launcher: 3 must be a group"),
    ],
)
def test_invalid_yaml_is_refused_with_file_and_line(tmp_path: Path, more: bytes, said: str) -> None:
    path = write_study(tmp_path)
    path.write_bytes(path.read_bytes() + more)
    with pytest.raises(ConfigurationError, match=f"^{re.escape(str(path))}: .*{said}") as caught:
        study_file("toy", [tmp_path])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "defaults", ["", "3", "member", "[{member: command}, 3]", "[{member: 3}]", "[{member: nope}]", "[{member: }, x]",
                 "[{member: command, x: y}]", "[{member: command}, null]"],
)  # fmt: skip
def test_defaults_without_a_command_say_how_to_begin(tmp_path: Path, defaults: str) -> None:
    path = write_study(tmp_path)
    _, _, below = path.read_text().partition("- _self_\n")
    path.write_text(f"defaults: {defaults}\n{below}")
    with pytest.raises(ConfigurationError, match=r"begin it with defaults: \[{member: command}, _self_\]$"):
        study_file("toy", [tmp_path])


@pytest.mark.parametrize("defaults", ["", "3", "train", "{train: x}", "[train, 3]", "[train, null]", "[{loss: 3}]"])
def test_defaults_of_a_file_without_a_command_are_checked_too(tmp_path: Path, defaults: str) -> None:
    """With an empty `defaults:` Hydra raises a ValueError, which would end in a traceback."""
    (tmp_path / "mine.yaml").write_text(f"defaults: {defaults}\nbudget: {{steps: 2}}\n")
    with pytest.raises(ConfigurationError, match=rf"^{re.escape(str(tmp_path))}.*: defaults: .*begin .*defaults: \["):
        study_file("mine", [tmp_path])


@pytest.mark.parametrize("value", ["${nope}", "${nope:1}", "${oc.env:NOPE_NOPE}", "${loss}"])
def test_an_unresolved_reference_is_refused_with_its_file(tmp_path: Path, value: str) -> None:
    path = write_study(tmp_path, values={"loss": value})
    with pytest.raises(ConfigurationError, match=f"; correct it in {re.escape(str(path))}$") as caught:
        plan_commands([[]], [str(path)])
    assert "\n" not in str(caught.value)


def test_a_search_may_vary_a_value_without_a_default() -> None:
    received: list[Sequence[str]] = []

    class Recording(DebugStudyLauncher):
        def plan_members(self, override_lists: Sequence[Sequence[str]]) -> list[RunSpec]:
            received.extend(override_lists)
            raise UserError("enough")

    launcher = Recording("a:b", "a:b")
    launcher._config = DictConfig({"loss": "???", "optim": {"lr": "???"}, "clip": 0.2})
    space = [Axis("loss", ("dapo", "gspo")), Axis("optim.lr", (), 1e-6, 1e-4, True), Axis("clip", (), 0.1, 0.3)]
    with pytest.raises(UserError, match="enough"):
        launcher.search(["seed=1"], space, {}, lambda seed: None)
    assert received == [["seed=1", "loss=dapo", "optim.lr=1e-06"]]
