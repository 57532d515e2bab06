"""Truths about identity: what makes two runs one, what makes two recipes two."""

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
    make_spec,
    science,
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


def departs_on(found: RunSpec) -> tuple[str, ...]:
    return changed_keys(science(found.config), science(found.reference))


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of all values that hold no others."""
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    found = False
    for key, child in children:
        found = True
        yield from leaves(child, (*path, key))
    if not found:
        yield path


def changed(path: tuple[Any, ...], value: Any = "another") -> dict[str, Any]:
    """The configuration with one leaf set to another value."""
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
def test_every_scientific_value_is_part_of_run_and_curve(path: tuple[Any, ...]) -> None:
    other = spec(changed(path))
    assert other.run != spec().run
    assert other.curve != spec().curve
    assert departs_on(other) == (path[0],)


@pytest.mark.parametrize("path", OPERATION, ids=str)
def test_how_and_where_a_run_is_made_is_in_neither(path: tuple[Any, ...]) -> None:
    other = spec(changed(path))
    assert (other.run, other.curve, departs_on(other)) == (spec().run, spec().curve, ())


def test_the_budget_is_in_neither() -> None:
    larger = spec(changed(("budget", "steps"), 1000))
    assert (larger.run, larger.curve, departs_on(larger)) == (spec().run, spec().curve, ())
    assert (spec().steps, larger.steps) == (240, 1000)


def test_the_seed_is_in_the_run_and_not_in_the_curve() -> None:
    other = spec(changed(("seed",), 4))
    assert other.run != spec().run
    assert other.curve == spec().curve
    assert departs_on(other) == ()
    assert (spec().seed, other.seed) == (3, 4)


def test_a_run_is_never_mistaken_for_a_curve() -> None:
    assert spec().run != spec().curve


def test_label_and_reference_are_in_neither() -> None:
    other = make_spec(CONFIG, changed(("loss", "max_ratio"), 8.0), "another label", "another baseline")
    assert (other.run, other.curve) == (spec().run, spec().curve)


def test_a_scientific_key_that_is_new_makes_a_new_curve() -> None:
    other = spec({**CONFIG, "critic": {"weight": 1.0}})
    assert other.curve != spec().curve
    assert departs_on(other) == ("critic",)


def test_identity_is_the_same_in_every_process_and_version() -> None:
    # Frozen: a change here orphans every run on every disk.
    assert (spec().run, spec().curve) == ("bb8d8af7618a", "9ff41ffa2b89")


def test_what_is_not_a_number_has_no_identity() -> None:
    with pytest.raises(ValueError):
        spec(changed(("optimizer", "lr"), float("nan")))


values = st.recursive(
    st.one_of(st.none(), st.integers(-9, 9), st.text(max_size=3), st.sampled_from([0.5, 1e-5])),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=2), inner, max_size=3)),
    max_leaves=6,
)
sciences = st.dictionaries(st.sampled_from(["loss", "filter", "batch", "model", "task"]), values, max_size=5)


def shuffled(value: Any, draw: st.DataObject) -> Any:
    """The same values, every mapping in another order of keys."""
    if isinstance(value, dict):
        return {key: shuffled(value[key], draw) for key in draw.draw(st.permutations(list(value)))}
    return [shuffled(item, draw) for item in value] if isinstance(value, list) else value


def complete(what: dict[str, Any], seed: int = 0, steps: int = 10) -> dict[str, Any]:
    return {**what, "seed": seed, "budget": {"steps": steps}}


@given(sciences, st.data())
def test_the_order_of_keys_means_nothing(what: dict[str, Any], data: st.DataObject) -> None:
    one, two = complete(what), shuffled(complete(what), data)
    assert spec(one).run == spec(two).run
    assert spec(one).curve == spec(two).curve
    assert departs_on(spec(one, reference=two)) == ()


@given(sciences, sciences, st.integers(0, 2), st.integers(0, 2))
def test_two_runs_are_one_exactly_if_science_and_seed_agree(
    one: dict[str, Any], two: dict[str, Any], seed: int, other_seed: int
) -> None:
    first, second = spec(complete(one, seed)), spec(complete(two, other_seed, steps=20))
    assert (first.curve == second.curve) == (one == two)
    assert (first.run == second.run) == (one == two and seed == other_seed)


@given(sciences, sciences)
def test_axes_are_exactly_the_keys_that_differ(one: dict[str, Any], two: dict[str, Any]) -> None:
    axes = departs_on(spec(complete(one, seed=1), reference=complete(two, seed=2, steps=3)))
    everything = one.keys() | two.keys()
    missing = object()
    assert axes == tuple(sorted(k for k in everything if one.get(k, missing) != two.get(k, missing)))


def test_science_and_operation_are_told_apart_by_the_top_level_key_alone() -> None:
    assert science(CONFIG).keys() == CONFIG.keys() - OPERATIONAL_KEYS
    # The task's and the evaluation's own seeds are science.
    assert spec(changed(("task", "seed"), 1)).curve != spec().curve


# --- on disk -------------------------------------------------------------------------------------------------


def test_a_spec_comes_back_from_its_directory(tmp_path: Path) -> None:
    written = spec(changed(("loss", "max_ratio"), 8.0), label="r+loss.max_ratio=8.0")
    written.write(tmp_path / "runs" / written.run)
    assert RunSpec.read(tmp_path / "runs" / written.run) == written
    assert departs_on(written) == ("loss",)


def test_a_checksum_is_of_all_but_the_budget_and_what_is_operational(tmp_path: Path) -> None:
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


def test_a_spec_that_was_read_has_its_old_identity(tmp_path: Path) -> None:
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
def test_what_is_written_out_once_reads_as_what_is_written_whole(
    one: dict[str, Any], two: dict[str, Any], other: Any
) -> None:
    written = Texts()
    for config in (one, two, {**one, "seed": 1}, one | two):
        given = {"form": 2, "config": config, "settings": two, "reference": one, "other": other, "steps": 7}
        assert written.of(given, ("config", "reference")) == json.dumps(given, indent=1)


def test_specs_that_are_read_together_keep_what_they_share_once(tmp_path: Path) -> None:
    for seed in range(3):
        spec({**CONFIG, "seed": seed}).write(tmp_path / str(seed))
    known: dict[str, Any] = {}
    found = [RunSpec.read(tmp_path / str(seed), known) for seed in range(3)]
    assert found == [RunSpec.read(tmp_path / str(seed)) for seed in range(3)]
    assert len({id(each.config["loss"]) for each in found} | {id(each.reference["loss"]) for each in found}) == 1
    assert [each.config["seed"] for each in found] == [0, 1, 2]
    # 1 and 1.0 and True are equal and not the same.
    for number, value in enumerate((1, 1.0, True)):
        spec({**CONFIG, "loss": {"x": value}}).write(tmp_path / str(number))
        assert repr(RunSpec.read(tmp_path / str(number), known).config["loss"]) == repr({"x": value})


def test_what_is_there_already_is_not_written_again(tmp_path: Path) -> None:
    spec().write(tmp_path)
    before = (tmp_path / SPEC_FILE).stat()
    spec().write(tmp_path)
    assert (tmp_path / SPEC_FILE).stat().st_ino == before.st_ino
    spec(changed(("budget", "steps"), 1000)).write(tmp_path)
    assert (tmp_path / SPEC_FILE).stat().st_ino != before.st_ino


def test_the_budget_is_the_specs_own_and_not_one_inside(tmp_path: Path) -> None:
    inside = {**CONFIG, "loss": {"steps": 5}, "note": '\n "steps": 6,\n'}
    for written in (spec(), spec(inside, reference={**CONFIG, "budget": {"steps": 9}})):
        written.write(tmp_path)
        assert budget_of(tmp_path) == 240
        (tmp_path / SPEC_FILE).write_text(json.dumps(json.loads((tmp_path / SPEC_FILE).read_text())))
        assert budget_of(tmp_path) == 240


def test_writing_again_replaces_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    spec().write(tmp_path)
    spec(changed(("budget", "steps"), 1000)).write(tmp_path)
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


def test_a_spec_of_another_form_is_refused_by_what_to_do(tmp_path: Path) -> None:
    """The first form had no number, and identities with module paths in them."""
    spec().write(tmp_path)
    written = json.loads((tmp_path / SPEC_FILE).read_text())
    del written["form"]
    (tmp_path / SPEC_FILE).write_text(json.dumps(written))
    with pytest.raises(UserError, match=r"another version.*folder of its own \(study=NAME\)"):
        RunSpec.read(tmp_path)
    assert budget_of(tmp_path) == 240


def test_an_identity_that_is_given_is_what_counts(tmp_path: Path) -> None:
    lasting = {"loss": {"choice": "CISPO"}}
    one = make_spec(CONFIG, CONFIG, "r", "r", identity=lasting)
    two = make_spec(changed(("loss", "_target_")), CONFIG, "r", "r", identity=lasting)
    assert (one.run, one.curve) == (two.run, two.curve) != (spec().run, spec().curve)


def test_the_header_says_who_the_run_is() -> None:
    found = spec(changed(("loss", "max_ratio"), 8.0), label="r+loss.max_ratio=8.0")
    assert found.header() == {
        "run": found.run,
        "curve": found.curve,
        "recipe": "r+loss.max_ratio=8.0",
        "baseline": "r",
        "seed": 3,
        "departures": {},
        "settings": {},
    }
    told = replace(found, departures={"loss": "max_ratio=8.0"}, settings={"optimizer.lr": "1e-3"}).header()
    assert (told["departures"], told["settings"]) == ({"loss": "max_ratio=8.0"}, {"optimizer.lr": "1e-3"})
    assert found.title == "r+loss.max_ratio=8.0 seed 3"


# --- labels --------------------------------------------------------------------------------------------------


def test_one_label_for_two_curves_is_refused() -> None:
    one, two = spec(label="scalerl"), spec(changed(("loss", "max_ratio"), 8.0), label="scalerl")
    with pytest.raises(UserError, match="'scalerl'"):
        check_distinct([one, two])
    assert check_distinct([one, replace(two, recipe="scalerl+loss.max_ratio=8.0")]) == [
        one,
        replace(two, recipe="scalerl+loss.max_ratio=8.0"),
    ]


def test_one_label_for_two_seeds_is_one_curve() -> None:
    specs = [spec(changed(("seed",), seed)) for seed in (5, 4, 6)]
    assert check_distinct(specs) == specs


def test_repetitions_count_once() -> None:
    one, two = spec(), spec(changed(("seed",), 4))
    assert check_distinct([one, two, one, two, two]) == [one, two]


def test_five_and_five_point_zero_are_one_number() -> None:
    assert digest({"a": [5, {"b": 1.0}]}) == digest({"a": (5.0, {"b": 1})})
    assert digest({"a": 5}) != digest({"a": 5.5})
    assert digest({"a": True}) != digest({"a": "True"})
