"""Tests of run specifications: which values identify a run and a curve, and the file format."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sweeps.errors import UserError
from sweeps.run.files import write_atomically
from sweeps.run.spec import (
    OPERATIONAL_KEYS,
    SPEC_FILE,
    RunSpec,
    Texts,
    budget_of,
    changed_keys,
    check_distinct,
    digest,
    learning_config,
    make_spec,
)

CONFIG: dict[str, Any] = {
    "seed": 3,
    "label": None,
    "loss": {"_target_": "lightning_scalerl.loss.CISPO", "max_ratio": 5.0},
    "aggregation": {"_target_": "lightning_scalerl.aggregation.PromptAggregation"},
    "optimizer": {"lr": 4e-4, "betas": [0.9, 0.95]},
    "batch": {"prompts": 16, "completions": 16},
    "evaluation": {"every_n_steps": 8, "prompts": None},
    "model": {"width": 64},
    "task": {"train": [60, 300], "seed": 0},
    "budget": {"steps": 240},
    "checkpoint": {"every_n_steps": 24},
    "study": "local",
    "output_dir": "outputs/local",
    "launch": {"max_parallel": 2, "threads": 1},
    "mlflow": {"uri": None},
}


def spec(config: Mapping[str, Any] = CONFIG, reference: Mapping[str, Any] | None = None, label: str = "r") -> RunSpec:
    return make_spec(config, CONFIG if reference is None else reference, label, "r")


def departed_axes(run_spec: RunSpec) -> tuple[str, ...]:
    return changed_keys(learning_config(run_spec.config), learning_config(run_spec.reference))


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the paths of all leaves of a nested value."""
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    has_children = False
    for key, child in children:
        has_children = True
        yield from leaves(child, (*path, key))
    if not has_children:
        yield path


def changed_config(path: tuple[Any, ...], value: Any = "another") -> dict[str, Any]:
    """Return the configuration with one leaf changed."""
    config = copy.deepcopy(CONFIG)
    node: Any = config
    for key in path[:-1]:
        node = node[key]
    assert node[path[-1]] != value
    node[path[-1]] = value
    return config


SCIENCE = [path for path in leaves(CONFIG) if path[0] not in OPERATIONAL_KEYS]
OPERATION = [path for path in leaves(CONFIG) if path[0] in OPERATIONAL_KEYS - {"seed", "budget"}]


# --- identity ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", SCIENCE, ids=str)
def test_every_scientific_value_changes_run_and_curve(path: tuple[Any, ...]) -> None:
    other = spec(changed_config(path))
    assert other.run != spec().run
    assert other.curve != spec().curve
    assert departed_axes(other) == (path[0],)


@pytest.mark.parametrize("path", OPERATION, ids=str)
def test_operational_values_change_neither_run_nor_curve(path: tuple[Any, ...]) -> None:
    other = spec(changed_config(path))
    assert (other.run, other.curve, departed_axes(other)) == (spec().run, spec().curve, ())


def test_the_budget_changes_neither_run_nor_curve() -> None:
    larger = spec(changed_config(("budget", "steps"), 1000))
    assert (larger.run, larger.curve, departed_axes(larger)) == (spec().run, spec().curve, ())
    assert (spec().steps, larger.steps) == (240, 1000)


def test_the_seed_changes_the_run_and_not_the_curve() -> None:
    other = spec(changed_config(("seed",), 4))
    assert other.run != spec().run
    assert other.curve == spec().curve
    assert departed_axes(other) == ()
    assert (spec().seed, other.seed) == (3, 4)


def test_run_and_curve_have_different_identities() -> None:
    assert spec().run != spec().curve


def test_label_and_reference_change_neither_run_nor_curve() -> None:
    other = make_spec(CONFIG, changed_config(("loss", "max_ratio"), 8.0), "another label", "another baseline")
    assert (other.run, other.curve) == (spec().run, spec().curve)


def test_a_new_scientific_key_makes_a_new_curve() -> None:
    other = spec({**CONFIG, "critic": {"weight": 1.0}})
    assert other.curve != spec().curve
    assert departed_axes(other) == ("critic",)


def test_identity_is_the_same_in_every_process_and_version() -> None:
    # Never change these values: all existing runs would get other identities.
    assert (spec().run, spec().curve) == ("bb8d8af7618a", "9ff41ffa2b89")


def test_nan_has_no_identity() -> None:
    with pytest.raises(UserError, match=r"^optimizer\.lr: nan must be a finite number$"):
        spec(changed_config(("optimizer", "lr"), float("nan")))


values = st.recursive(
    st.one_of(st.none(), st.integers(-9, 9), st.text(max_size=3), st.sampled_from([0.5, 1e-5])),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=2), inner, max_size=3)),
    max_leaves=6,
)
sciences = st.dictionaries(st.sampled_from(["loss", "filter", "batch", "model", "task"]), values, max_size=5)


def shuffle_keys(value: Any, draw: st.DataObject) -> Any:
    """Return the same value with the keys of every mapping in another order."""
    if isinstance(value, dict):
        return {key: shuffle_keys(value[key], draw) for key in draw.draw(st.permutations(list(value)))}
    return [shuffle_keys(item, draw) for item in value] if isinstance(value, list) else value


def complete_config(science_part: dict[str, Any], seed: int = 0, steps: int = 10) -> dict[str, Any]:
    return {**science_part, "seed": seed, "budget": {"steps": steps}}


@given(sciences, st.data())
def test_the_order_of_keys_does_not_matter(science_part: dict[str, Any], data: st.DataObject) -> None:
    one, two = complete_config(science_part), shuffle_keys(complete_config(science_part), data)
    assert spec(one).run == spec(two).run
    assert spec(one).curve == spec(two).curve
    assert departed_axes(spec(one, reference=two)) == ()


@given(sciences, sciences, st.integers(0, 2), st.integers(0, 2))
def test_runs_are_equal_exactly_if_science_and_seed_are_equal(
    one: dict[str, Any], two: dict[str, Any], seed: int, other_seed: int
) -> None:
    first, second = spec(complete_config(one, seed)), spec(complete_config(two, other_seed, steps=20))
    assert (first.curve == second.curve) == (one == two)
    assert (first.run == second.run) == (one == two and seed == other_seed)


@given(sciences, sciences)
def test_axes_are_exactly_the_keys_that_differ(one: dict[str, Any], two: dict[str, Any]) -> None:
    axes = departed_axes(spec(complete_config(one, seed=1), reference=complete_config(two, seed=2, steps=3)))
    everything = one.keys() | two.keys()
    missing = object()
    assert axes == tuple(sorted(k for k in everything if one.get(k, missing) != two.get(k, missing)))


def test_only_the_top_level_key_separates_science_from_operation() -> None:
    assert learning_config(CONFIG).keys() == CONFIG.keys() - OPERATIONAL_KEYS
    # The seeds of the task and of the evaluation are scientific.
    assert spec(changed_config(("task", "seed"), 1)).curve != spec().curve


# --- on disk -------------------------------------------------------------------------------------------------


def test_a_written_spec_is_read_back(tmp_path: Path) -> None:
    written = spec(changed_config(("loss", "max_ratio"), 8.0), label="r+loss.max_ratio=8.0")
    written.write(tmp_path / "runs" / written.run)
    assert RunSpec.read(tmp_path / "runs" / written.run) == written
    assert departed_axes(written) == ("loss",)


def test_the_checksum_covers_all_but_the_budget_and_operational_values(tmp_path: Path) -> None:
    first = spec({**CONFIG, "odd": {1: (2, 0.1), "ü": None}})
    first.write(tmp_path)
    read = RunSpec.read(tmp_path)
    assert read.checksum() == first.checksum()
    longer = replace(read, steps=9, overrides=("budget.steps=9",), config={**read.config, "budget": {"steps": 9}})
    assert longer.checksum() == first.checksum()
    changes = [
        {"config": {**read.config, "loss": {}}},
        {"reference": {**read.reference, "loss": {}}},
        *({name: "another"} for name in ("run", "curve", "recipe", "baseline", "seed", "folders", "departures")),
    ]
    assert len({replace(read, **change).checksum() for change in (*changes, {})}) == len(changes) + 1
    read.check_checksum(tmp_path, None)
    with pytest.raises(UserError, match=f"{tmp_path / SPEC_FILE}: changed since .* and 0123 in the ledger; restore"):
        read.check_checksum(tmp_path, "0123")


def test_a_spec_that_was_read_keeps_its_identity(tmp_path: Path) -> None:
    spec().write(tmp_path)
    read = RunSpec.read(tmp_path)
    again = make_spec(read.config, read.reference, read.recipe, read.baseline)
    assert (again.run, again.curve) == (read.run, read.curve) == (spec().run, spec().curve)


texts = st.text(st.sampled_from('ab \n"\\é{}:,'), max_size=5)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=12,
)


@pytest.mark.slow
@given(st.dictionaries(texts, values, max_size=4), st.dictionaries(texts, values, max_size=4), values)
@settings(suppress_health_check=[HealthCheck.too_slow])
def test_cached_texts_give_the_same_json(one: dict[str, Any], two: dict[str, Any], other: Any) -> None:
    texts_cache = Texts()
    for config in (one, two, {**one, "seed": 1}, one | two):
        content = {"form": 2, "config": config, "settings": two, "reference": one, "other": other, "steps": 7}
        assert texts_cache.of(content, ("config", "reference")) == json.dumps(content, indent=1)


def test_specs_read_together_share_equal_parts(tmp_path: Path) -> None:
    for seed in range(3):
        spec({**CONFIG, "seed": seed}).write(tmp_path / str(seed))
    shared: dict[str, Any] = {}
    specs = [RunSpec.read(tmp_path / str(seed), shared) for seed in range(3)]
    assert specs == [RunSpec.read(tmp_path / str(seed)) for seed in range(3)]
    assert len({id(one.config["loss"]) for one in specs} | {id(one.reference["loss"]) for one in specs}) == 1
    assert [one.config["seed"] for one in specs] == [0, 1, 2]
    # 1, 1.0 and True are equal in Python, but must not be shared.
    for number, value in enumerate((1, 1.0, True)):
        spec({**CONFIG, "loss": {"x": value}}).write(tmp_path / str(number))
        assert repr(RunSpec.read(tmp_path / str(number), shared).config["loss"]) == repr({"x": value})


def test_an_unchanged_spec_is_not_written_again(tmp_path: Path) -> None:
    spec().write(tmp_path)
    before = (tmp_path / SPEC_FILE).stat()
    spec().write(tmp_path)
    assert (tmp_path / SPEC_FILE).stat().st_ino == before.st_ino
    spec(changed_config(("budget", "steps"), 1000)).write(tmp_path)
    assert (tmp_path / SPEC_FILE).stat().st_ino != before.st_ino


def test_the_budget_is_read_from_the_top_level_only(tmp_path: Path) -> None:
    inside = {**CONFIG, "loss": {"steps": 5}, "note": '\n "steps": 6,\n'}
    for written in (spec(), spec(inside, reference={**CONFIG, "budget": {"steps": 9}})):
        written.write(tmp_path)
        assert budget_of(tmp_path) == 240
        (tmp_path / SPEC_FILE).write_text(json.dumps(json.loads((tmp_path / SPEC_FILE).read_text())))
        assert budget_of(tmp_path) == 240


def test_writing_again_replaces_the_file_and_leaves_no_other(tmp_path: Path) -> None:
    spec().write(tmp_path)
    spec(changed_config(("budget", "steps"), 1000)).write(tmp_path)
    assert RunSpec.read(tmp_path).steps == 1000
    assert [path.name for path in tmp_path.iterdir()] == [SPEC_FILE]


def test_a_failed_write_leaves_the_old_text(tmp_path: Path) -> None:
    write_atomically(tmp_path / "file", "old")
    with pytest.raises(UnicodeEncodeError):
        write_atomically(tmp_path / "file", "new \ud800")
    assert (tmp_path / "file").read_text() == "old"


@pytest.mark.parametrize("text", [None, "", "{", "[]", "{}", '{"form": 2}', '{"form": 2, "folders": 5}', "\0\0"])
def test_a_directory_without_a_readable_spec_is_a_user_error(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / SPEC_FILE).write_text(text)
    with pytest.raises(UserError, match=SPEC_FILE):
        RunSpec.read(tmp_path)


def test_a_spec_of_another_form_is_refused_with_a_remedy(tmp_path: Path) -> None:
    """The first file format had no number, and its identities contained module paths."""
    spec().write(tmp_path)
    written = json.loads((tmp_path / SPEC_FILE).read_text())
    del written["form"]
    (tmp_path / SPEC_FILE).write_text(json.dumps(written))
    with pytest.raises(UserError, match=r"another version.*folder of its own \(study=NAME\)"):
        RunSpec.read(tmp_path)
    assert budget_of(tmp_path) == 240


def test_a_given_identity_replaces_the_configuration(tmp_path: Path) -> None:
    identity_values = {"loss": {"choice": "CISPO"}}
    one = make_spec(CONFIG, CONFIG, "r", "r", identity=identity_values)
    two = make_spec(changed_config(("loss", "_target_")), CONFIG, "r", "r", identity=identity_values)
    assert (one.run, one.curve) == (two.run, two.curve) != (spec().run, spec().curve)


def test_the_header_identifies_the_run() -> None:
    run_spec = spec(changed_config(("loss", "max_ratio"), 8.0), label="r+loss.max_ratio=8.0")
    assert run_spec.header() == {
        "run": run_spec.run,
        "curve": run_spec.curve,
        "recipe": "r+loss.max_ratio=8.0",
        "baseline": "r",
        "seed": 3,
        "departures": {},
        "settings": {},
    }
    header = replace(run_spec, departures={"loss": "max_ratio=8.0"}, settings={"optimizer.lr": "1e-3"}).header()
    assert (header["departures"], header["settings"]) == ({"loss": "max_ratio=8.0"}, {"optimizer.lr": "1e-3"})
    assert run_spec.title == "r+loss.max_ratio=8.0 seed 3"


# --- labels --------------------------------------------------------------------------------------------------


def test_one_label_for_two_curves_is_refused() -> None:
    one, two = spec(label="scalerl"), spec(changed_config(("loss", "max_ratio"), 8.0), label="scalerl")
    with pytest.raises(UserError, match="'scalerl'"):
        check_distinct([one, two])
    assert check_distinct([one, replace(two, recipe="scalerl+loss.max_ratio=8.0")]) == [
        one,
        replace(two, recipe="scalerl+loss.max_ratio=8.0"),
    ]


def test_one_label_for_two_seeds_is_one_curve() -> None:
    specs = [spec(changed_config(("seed",), seed)) for seed in (5, 4, 6)]
    assert check_distinct(specs) == specs


def test_duplicates_count_once() -> None:
    one, two = spec(), spec(changed_config(("seed",), 4))
    assert check_distinct([one, two, one, two, two]) == [one, two]


def test_5_and_5_0_have_the_same_digest() -> None:
    assert digest({"a": [5, {"b": 1.0}]}) == digest({"a": (5.0, {"b": 1})})
    assert digest({"a": 5}) != digest({"a": 5.5})
    assert digest({"a": True}) != digest({"a": "True"})
