"""Tests of different configurations with one label: each has its own curve, and its label shows the difference."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sweeps.cli import main as cli
from sweeps.errors import UserError
from sweeps.run.health import mechanism_counters
from sweeps.run.journal import SEMANTICS_FILE, Journal
from sweeps.run.spec import RunSpec, make_spec
from sweeps.source import load


def run(
    root: Path,
    lr: float,
    seed: int = 0,
    recipe: str = "scalerl",
    scale: float = 0.5,
    steps: int = 6,
    frozen: bool = True,
    **science: Any,
) -> RunSpec:
    """Write a run with one evaluation per step and, if `frozen`, its specification."""
    config = {"optimizer": {"lr": lr}, **science, "seed": seed, "budget": {"steps": steps}}
    spec = make_spec(config, config, recipe, "scalerl")
    run_dir = root / "runs" / f"{spec.run}-{steps}"
    if frozen:
        spec.write(run_dir)
    journal = Journal(run_dir, clock=lambda: 0.0)
    journal.header(**spec.header(), device="cpu")
    for step in range(steps):
        journal.record("train", step, {"mechanism/loss": lr})
        reward = scale * step / (step + 2)
        metrics = {"eval/heldout/pass_rate": reward, "compute/virtual_device_hours": float(step)}
        journal.record("eval", step, metrics)
    journal.end(steps, "finished")
    journal.close()
    return spec


def curves(*roots: Path, **options: Any) -> dict[str, int]:
    """Load sources and return the number of points by label."""
    return {curve.recipe: len(curve.reward) for curve in load([str(root) for root in roots], **options).curves}


def test_a_key_that_another_run_lacks_is_not_in_the_label(tmp_path: Path) -> None:
    run(tmp_path, 0.001)
    run(tmp_path, 0.003, branch={"run": None})
    assert list(curves(tmp_path)) == ["scalerl (optimizer.lr=0.001)", "scalerl (optimizer.lr=0.003)"]


def test_two_configurations_with_one_label_are_two_curves(tmp_path: Path) -> None:
    for lr in (0.001, 0.003):
        for seed in (0, 1):
            run(tmp_path, lr, seed)
    study = load([str(tmp_path)])
    assert [curve.recipe for curve in study.curves] == ["scalerl (optimizer.lr=0.001)", "scalerl (optimizer.lr=0.003)"]
    for curve in study.curves:
        assert set(curve.seed.tolist()) == {"0", "1"} and len(curve.reward) == 12
    (note,) = study.warnings
    assert note == (
        "2 different configurations share the label 'scalerl'; each has a separate curve: "
        "scalerl (optimizer.lr=0.001), scalerl (optimizer.lr=0.003)"
    )
    counters = mechanism_counters(study.runs)
    assert counters["scalerl (optimizer.lr=0.003)"] == {"loss": 0.003}, "counters must have the new labels"


def test_runs_that_differ_in_seed_or_budget_only_are_one_curve(tmp_path: Path) -> None:
    run(tmp_path, 0.001)
    run(tmp_path, 0.001, steps=9)
    run(tmp_path, 0.001, seed=1)
    study = load([str(tmp_path)])
    assert [curve.recipe for curve in study.curves] == ["scalerl"] and study.warnings == []


def test_variants_have_the_baseline_with_their_values(tmp_path: Path) -> None:
    for lr in (0.001, 0.003):
        run(tmp_path, lr, loss="cispo")
        run(tmp_path, lr, recipe="scalerl+loss=dapo", loss="dapo")
    run(tmp_path, 0.003, recipe="scalerl+loss=gspo", loss="gspo")
    run(tmp_path, 0.01, recipe="scalerl+loss=ppo", loss="ppo")
    assert {curve.recipe: curve.baseline for curve in load([str(tmp_path)]).curves} == {
        "scalerl (optimizer.lr=0.001)": "scalerl (optimizer.lr=0.001)",
        "scalerl (optimizer.lr=0.003)": "scalerl (optimizer.lr=0.003)",
        "scalerl+loss=dapo (optimizer.lr=0.001)": "scalerl (optimizer.lr=0.001)",
        "scalerl+loss=dapo (optimizer.lr=0.003)": "scalerl (optimizer.lr=0.003)",
        "scalerl+loss=gspo": "scalerl (optimizer.lr=0.003)",
        "scalerl+loss=ppo": "scalerl",  # its learning rate is that of neither baseline
    }


def test_a_variant_with_an_extra_key_has_the_baseline_with_its_values(tmp_path: Path) -> None:
    run(tmp_path, 0.001, loss="cispo")
    run(tmp_path, 0.003, loss="cispo", branch={"run": None})
    run(tmp_path, 0.001, recipe="scalerl+loss=dapo", loss="dapo", branch={"run": None})
    assert {curve.recipe: curve.baseline for curve in load([str(tmp_path)]).curves} == {
        "scalerl (optimizer.lr=0.001)": "scalerl (optimizer.lr=0.001)",
        "scalerl (optimizer.lr=0.003)": "scalerl (optimizer.lr=0.003)",
        "scalerl+loss=dapo": "scalerl (optimizer.lr=0.001)",
    }


def test_labels_that_differ_by_a_factor_need_no_addition(tmp_path: Path) -> None:
    """Two studies of one recipe with different sizes."""
    for width in (32, 64):
        run(tmp_path / str(width), 0.001, model={"width": width})
    from yaml import safe_dump

    for spec in tmp_path.rglob("spec.json"):
        (spec.parent / "config.yaml").write_text(safe_dump(json.loads(spec.read_text())["config"]))
    assert set(curves(tmp_path, factors=["model.width"])) == {"scalerl model.width=32", "scalerl model.width=64"}
    run(tmp_path / "32", 0.003, model={"width": 32})
    for spec in tmp_path.rglob("spec.json"):
        (spec.parent / "config.yaml").write_text(safe_dump(json.loads(spec.read_text())["config"]))
    assert set(curves(tmp_path, factors=["model.width"])) == {
        "scalerl (optimizer.lr=0.001) model.width=32",
        "scalerl (optimizer.lr=0.003) model.width=32",
        "scalerl model.width=64",
    }
    run(tmp_path / "32", 0.003, recipe="scalerl+loss=dapo", loss="dapo", model={"width": 32})
    for spec in tmp_path.rglob("spec.json"):
        (spec.parent / "config.yaml").write_text(safe_dump(json.loads(spec.read_text())["config"]))
    baselines = {curve.recipe: curve.baseline for curve in load([str(tmp_path)], factors=["model.width"]).curves}
    assert baselines["scalerl+loss=dapo model.width=32"] == "scalerl (optimizer.lr=0.003) model.width=32"
    assert baselines["scalerl model.width=64"] == "scalerl model.width=64"


def test_an_unknown_or_long_difference_is_replaced_by_the_curves_id(tmp_path: Path) -> None:
    ids = [run(tmp_path / "a", lr, frozen=frozen).curve[:6] for lr, frozen in ((0.001, False), (0.003, True))]
    assert set(curves(tmp_path / "a")) == {f"scalerl (curve {curve_id})" for curve_id in ids}
    ids = [run(tmp_path / "b", 0.1, text=text * 200).curve[:6] for text in "xy"]
    assert set(curves(tmp_path / "b")) == {f"scalerl (curve {curve_id})" for curve_id in ids}
    # A label shows at most three keys. Here a, b and c are equal in two of the configurations.
    values = [(1, 1, 1, 1), (2, 2, 2, 2), (2, 2, 2, 3)]
    ids = [run(tmp_path / "c", 0.1, **dict(zip("abcd", setting, strict=True))).curve[:6] for setting in values]
    assert set(curves(tmp_path / "c")) == {f"scalerl (curve {curve_id})" for curve_id in ids}


def test_shared_keys_are_preferred_over_keys_that_one_run_lacks(tmp_path: Path) -> None:
    """A later version may have settings that an earlier one did not have."""
    for number in range(6):  # the order of reading depends on the runs' ids, so try several
        run(tmp_path / str(number), 0.001, number=number, alpha={"a": 1}, zeta=1)
        run(tmp_path / str(number), 0.001, number=number, alpha={"a": 1, "b": 2, "c": 3}, zeta=2)
        assert all("(zeta=" in label for label in curves(tmp_path / str(number)))


@pytest.mark.parametrize("unknown", [{"curve": "local"}, {}])
def test_runs_without_a_curve_id_stay_together(tmp_path: Path, unknown: dict[str, str]) -> None:
    for name in ("one", "two"):
        journal = Journal(tmp_path / name, clock=lambda: 0.0)
        journal.header(run=name, recipe="mine", seed=0, **unknown)
        journal.record("eval", 0, {"eval/heldout/pass_rate": 0.1, "compute/virtual_device_hours": 0.0})
        journal.record("eval", 1, {"eval/heldout/pass_rate": 0.2, "compute/virtual_device_hours": 1.0})
        journal.close()
    assert curves(tmp_path) == {"mine": 4}
    run(tmp_path, 0.001, recipe="mine")
    study = load([str(tmp_path)])
    assert [curve.recipe for curve in study.curves] == ["mine"]
    assert any("fitted together" in note for note in study.curves[0].warnings)


def script(run_dir: Path, seed: int = 0, **semantics: Any) -> None:
    """Write a run of a user's script: no curve id in the header, but a file with its resolved settings."""
    journal = Journal(run_dir, clock=lambda: 0.0)
    journal.header(run="local", curve="local", recipe="scalerl", seed=seed)
    for step in range(3):
        journal.record(
            "eval", step, {"eval/heldout/pass_rate": 0.1 * step, "compute/virtual_device_hours": float(step)}
        )
    journal.close()
    (run_dir / SEMANTICS_FILE).write_text(json.dumps({**semantics, "seed": seed, "commit": f"commit of {seed}"}))


def test_runs_of_scripts_with_different_settings_give_a_warning(tmp_path: Path) -> None:
    for seed, clip in enumerate((0.2, 0.5)):
        loss = {"choice": "DAPO", "clip_high": clip}
        script(tmp_path / str(seed), seed, choices={"loss": loss}, batch={"prompts": 2 + seed}, model="mine")
    (curve,) = load([str(tmp_path)]).curves
    assert curve.warnings == (
        "runs of scalerl differ in loss.clip_high: 0.2, 0.5; batch.prompts: 2, 3; they are fitted together as seeds of "
        "one recipe; give each recipe its own label, RunLog(run_dir, {'recipe': NAME})",
    )


def test_runs_of_scripts_that_differ_only_in_seed_are_seeds(tmp_path: Path) -> None:
    for seed in (0, 1):
        script(tmp_path / str(seed), seed, choices={"loss": {"choice": "DAPO"}})
    (tmp_path / "old").mkdir()
    script(tmp_path / "old", 2)  # a run of an earlier version, which stored no settings
    (tmp_path / "old" / SEMANTICS_FILE).unlink()
    (curve,) = load([str(tmp_path)]).curves
    assert not curve.warnings and set(curve.seed.tolist()) == {"0", "1", "2"}


def test_rank_prints_the_warning_and_the_new_labels(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for seed in (0, 1):
        run(tmp_path, 0.001, seed, scale=0.4)
        run(tmp_path, 0.003, seed, scale=0.8)
    assert cli.main(["rank", str(tmp_path)]) == 0
    shown = capsys.readouterr()
    assert "2 different configurations share the label 'scalerl'" in shown.err
    assert "scalerl (optimizer.lr=0.001)" in shown.out and "scalerl (optimizer.lr=0.003)" in shown.out
    with pytest.raises(UserError, match="no such recipe; there are scalerl \\(optimizer"):
        from sweeps.decide.rank import rank
        from sweeps.fit.fit import fit_curves

        rank(fit_curves(load([str(tmp_path)]).curves), baseline="scalerl")
