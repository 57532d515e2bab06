"""Tests that a plan and its errors equal the result of composing every member completely by Hydra."""

from __future__ import annotations

import json
import math
import re
from dataclasses import asdict, fields
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from lightning_scalerl import composition
from lightning_scalerl.checks import ConfigurationError
from lightning_scalerl.choices import AXES
from lightning_scalerl.composition import Composer, compose, names_in
from lightning_scalerl.member.identify import plan_members
from sweeps.errors import UserError
from sweeps.executor.slurm.settings import JobSettings
from sweeps.run.spec import Texts
from sweeps.search.settings import RaceSettings, SearchSettings
from tests.examples import every, examples

# A base model that is made quickly, for tests in which only the configuration matters.
QUICK = ["model.batches=1", "model.width=32", "model.layers=1"]

GROUPS = [
    f"{group}={name}"
    for group in (*AXES, "variant", "recipe", "scale", "experiment", "task")
    for name in names_in(group)
]
NUMBERS = st.one_of(
    st.integers(-3, 5000), st.floats(1e-8, 1e8).map(lambda x: float(f"{x:.4g}")), st.sampled_from(["1e-4", "inf"])
)
# Independent keys. `READ` has keys that other keys are computed from, and keys that only some choices have.
KEYS = [
    "seed",
    "budget.steps",
    "optimizer.lr",
    "optimizer.weight_decay",
    "batch.prompts",
    "mlflow.uri",
    "race.looks",
]
READ = ["study", "output_dir", "thinking.end", "thinking.interrupt_from", "context.max_new_tokens", "loss.clip_high"]
ODD = [
    "optimizer={lr: 0.5}",
    "optimizer={lr: ${seed}}",
    "study=run${seed}",
    "study=\\${seed}",
    "output_dir=${study}/${budget.steps}",
    "task.train=[1,2,3,4]",
    "task.train.0=7",
    "task=jsonl",
    "task.heldout={a: b}",
    "label=null",
    "label=[a]",
    "label=5",
    "study='a b'",
    "seed=???",
    "seed=null",
    "seed=true",
    "scale=null",
    "+extra=1",
    "++seed=4",
    "+seed=4",
    "~schedule",
    "~label",
    "~seed",
    "model@other=path",
    "loss@here=dapo",
    "hydra.job.name=x",
    # Mistakes.
    "nonsense=1",
    "optimizer.nonsense=1",
    "optimizer.lr.deeper=1",
    "loss=foo",
    "loss=5",
    "seed=1,2",
    "seed",
    "=3",
    "seed=[",
    "study=${nothing}",
    "study=${study}",
]
VALUES = st.builds("{}={}".format, st.sampled_from(KEYS + READ), NUMBERS)
NAMES = st.builds("{}={}".format, st.sampled_from(["study", "output_dir", "mlflow.uri", "thinking.end"]), st.just("x"))
OVERRIDES = st.lists(st.one_of(st.sampled_from(GROUPS), VALUES, VALUES, NAMES, st.sampled_from(ODD)), max_size=6)
# Shared by all examples, so that state left behind by one example would be noticed in the next.
SHARED = Composer()


def outcome(resolve: Any, overrides: list[str]) -> Any:
    """Return the resolved values, or the error. Values are returned as text, because types and order count."""
    try:
        return repr(resolve(overrides))
    except Exception as error:
        return type(error), str(error)


def compose_completely(overrides: list[str]) -> Any:
    """Return the plain values that Hydra composes from all overrides."""
    config = compose(overrides)
    if missing := sorted(OmegaConf.missing_keys(config)):
        raise ConfigurationError(f"{missing[0]}: needs a value; give {missing[0]}=...")
    return OmegaConf.to_container(config, resolve=True)


@cache
def hydra_outcome(overrides: tuple[str, ...]) -> Any:
    return outcome(compose_completely, list(overrides))


@pytest.mark.full
@settings(max_examples=examples(40), suppress_health_check=list(HealthCheck))
@example(["optimizer.lr=2", "optimizer={lr: 0.5}"])
@example(["optimizer={lr: 0.5}", "optimizer.lr=2"])
@example(["optimizer={lr: ${seed}}", "seed=9"])
@example(["output_dir=${study}/${budget.steps}", "budget.steps=5", "study=s"])
@example(["study=s", "seed=3", "seed=4"])
@example(["task=jsonl", "task.heldout={a: b}"])
@example(["thinking.end=x", "thinking.interrupt_from=3", "variant=length_control_penalty", "seed=1"])
@example(["loss=dapo", "loss.clip_high=0.3"])
@example(["loss=cispo", "loss.clip_high=0.3"])
@given(OVERRIDES)
def test_a_configuration_equals_the_one_composed_by_hydra(overrides: list[str]) -> None:
    assert outcome(SHARED.resolved, overrides) == hydra_outcome(tuple(overrides))


@pytest.mark.slow
@pytest.mark.parametrize("entry", every(24, ODD, pytest.mark.full))
def test_unusual_overrides_give_the_result_of_hydra(entry: str) -> None:
    for overrides in ([entry], ["seed=2", entry, "optimizer.lr=0.5"]):
        assert outcome(SHARED.resolved, overrides) == hydra_outcome(tuple(overrides))


def specs_or_error(lists: list[list[str]]) -> Any:
    try:
        return json.dumps([asdict(spec) for spec in plan_members(lists)])
    except Exception as error:
        return type(error), str(error)


GRIDS = {
    "variants and seeds": [[f"variant={v}", f"seed={s}"] for v in ("none", "loss_dapo", "filter_none") for s in (0, 1)],
    "values": [[f"optimizer.lr={lr}", f"loss.clip_high={c}", "seed=1"] for lr in ("1e-4", 2) for c in (3, 4.5)],
    "axes by hand": [[f"loss={loss}", "study=x", "budget.steps=9"] for loss in ("cispo", "dapo", "gspo")],
    "a value that others read": [[f"context.max_new_tokens={n}", "variant=length_control_penalty"] for n in (24, 30)],
    "a variant too many": [["seed=1"], ["variant=loss_dapo", "loss=cispo"]],
    "a bad value": [["seed=1"], ["seed=2", "budget.steps=0", "optimizer.lr=1"]],
    "a refused value": [["seed=1"], ["seed=2", "optimizer.lr=-1"]],
    "a choice that needs another": [["async_mode.k=0", "seed=1"], ["seed=2"]],
    "an unknown key": [["seed=1"], ["optimizer.nonsense=1"]],
    "a file that is not there": [["task=jsonl", "task.train=/nothing", "task.heldout={a: /nothing}"]],
    "text that reads like an interpolation": [["study=\\${seed}", "thinking.phrase=\\${nothing}"]],
    "a group gone": [["~evaluation"]],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", every(12, GRIDS, pytest.mark.full))
def test_a_plan_equals_the_one_composed_by_hydra(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    monkeypatch.setenv("SCALERL_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
    lists = [[*entries, *QUICK] for entries in GRIDS[name]]
    quick = specs_or_error(lists)
    monkeypatch.setattr(Composer, "config", lambda self, overrides: compose(overrides, self.folders))
    assert specs_or_error(lists) == quick


def test_a_grid_composes_each_combination_of_choices_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    monkeypatch.setenv("SCALERL_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
    calls: list[tuple[str, ...]] = []

    def counted(overrides: Any, folders: Any = ()) -> Any:
        calls.append(tuple(overrides))
        return compose(overrides)

    composition._composer_of_ours.cache_clear()  # forget what earlier tests composed
    monkeypatch.setattr(composition, "compose", counted)
    specs = plan_members(
        [
            [f"variant={variant}", f"optimizer.lr={lr}", f"seed={seed}", *QUICK]
            for variant in ("none", "loss_dapo")
            for lr in ("1e-4", "2e-4", "3e-4")
            for seed in range(5)
        ]
    )
    assert sorted(calls) == [(), ("variant=loss_dapo",), ("variant=none",)]
    assert len({spec.run for spec in specs}) == 30 and len({spec.curve for spec in specs}) == 6
    assert all(spec.config["seed"] == spec.seed for spec in specs)
    # Equal parts are shared objects, so that a thousand members cost little more than one.
    assert len({id(spec.config["task"]) for spec in specs}) == 1


def test_an_unknown_key_is_refused_with_the_valid_keys() -> None:
    with pytest.raises(ConfigurationError, match=r"optimizer\.nonsense.*valid here: _target_, lr"):
        plan_members([["seed=1", *QUICK], ["seed=2", "optimizer.nonsense=1", *QUICK]])


def test_a_pool_that_may_be_exhausted_causes_a_warning() -> None:
    small = [*QUICK, "scale=tiny", "task.train=[6]"]
    (spec,) = plan_members([[*small, "budget.steps=4"]])
    (line,) = spec.cautions
    assert line.startswith("warning: the pool may be exhausted: 4 steps of 3 prompts draw each of 6 prompts 2 times")
    assert "its group of 4 " in line and line.endswith("resampling=uniform")
    assert "cautions" not in json.loads(Texts().of(spec._fields(), ()))
    others = plan_members([[*small, "budget.steps=3"], [*small, "budget.steps=99", "resampling=uniform"]])
    assert [other.cautions for other in others] == [(), ()]


def test_a_length_penalty_inactive_in_the_first_stage_causes_a_warning() -> None:
    staged = [*QUICK, "scale=tiny", "curriculum=staged_length", "budget.steps=1"]
    lists = [
        [*staged, "length_control=penalty"],
        [*staged, "length_control=penalty", "thinking.penalty_buffer=12"],
        staged,
    ]
    idle, active, other = plan_members(lists)
    (line,) = idle.cautions
    assert line.startswith(
        "warning: curriculum: completions of the first stage have at most 10 tokens, and length_control"
    )
    assert "acts from 16 tokens on" in line and active.cautions == other.cautions == ()


def test_rewards_that_an_environment_replaces_cause_a_warning_or_an_error(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n{"prompt": "1+2=", "answer": "3"}\n' * 9)
    rewards = "task.rewards=[{use: exact_match}, {use: math, weight: 0.2}]"
    task = [
        "task=dataset",
        f"task.train={tmp_path}/rows.jsonl",
        "task.heldout=0.5",
        rewards,
        "resampling=uniform",
        *QUICK,
    ]
    game = "environment.factory=tests.environment.games:Adding"
    verified = "environment.reward=task"
    replaced, used, plain = plan_members([[*task, game], [*task, game, verified], task])
    (line,) = replaced.cautions
    assert line.startswith(
        "warning: environment.reward: environment, so none of the task's rewards (exact_match, math)"
    )
    assert line.endswith("set environment.reward=task") and used.cautions == plain.cautions == ()
    staged = [*task, game, "curriculum=staged_rewards"]
    with pytest.raises(ConfigurationError, match=r"^curriculum: StagedRewards .* set environment\.reward=task, or"):
        plan_members([staged])
    assert len(plan_members([[*staged, verified]])) == 1


@pytest.mark.parametrize(("limit", "warned"), [(50, True), (24, True), (23, False)])
def test_a_length_penalty_beyond_the_longest_completion_causes_a_warning(limit: int, warned: bool) -> None:
    penalty = ["length_control=penalty", f"length_control.limit={limit}", "length_control.buffer=4"]
    (spec,) = plan_members([[*QUICK, "scale=tiny", "context.max_new_tokens=20", "budget.steps=1", *penalty]])
    assert spec.cautions == (
        (
            "warning: length_control: completions have at most 20 tokens, and length_control=penalty acts from "
            f"{limit - 4} tokens on: nothing is penalised. A larger length_control.buffer, or a smaller "
            "length_control.limit",
        )
        if warned
        else ()
    )


def test_infinity_is_composed_unchanged() -> None:
    assert math.isinf(Composer().resolved(["optimizer.clip_norm=inf"])["optimizer"]["clip_norm"])


NUMBERS_OF_A_STUDY = (
    *("seed=?", "budget.steps=?", "checkpoint.every_n_steps=?", "checkpoint.keep_steps=[?]", "rollouts.groups=?"),
    *("rollouts.every_n_steps=?", "launch.max_parallel=?", "launch.threads=?", "launch.hang_factor=?"),
    *("launch.hang_min_s=?", "strategy.nodes=?", "strategy.devices=?", "strategy.tensor_parallel=?"),
    *("thinking.penalty_buffer=?", "loss=clip_cov loss.high=?", "generator.cache_gib=?", "race.budget=?"),
)


@pytest.mark.parametrize("override", NUMBERS_OF_A_STUDY)
def test_a_number_of_a_study_is_finite(override: str) -> None:
    field = re.findall(r"[a-z_.]+(?==\[?\?)", override)[0]
    more = ["strategy=fsdp2"] if "tensor" in override else []
    for value in ("nan", "inf"):
        with pytest.raises((UserError, ConfigurationError), match=f"^{re.escape(field)}: ") as error:
            plan_members([[*more, *override.replace("?", value).split()]])
        assert "\n" not in str(error.value)


RESOURCES = ("timeout_min", "mem_gb", "cpus_per_task", "cpus_per_gpu", "nodes", "array_parallelism", "signal_delay_s")


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *((kind, each.name) for kind in (RaceSettings, SearchSettings) for each in fields(kind)),
        *((JobSettings, name) for name in (*RESOURCES, "max_num_timeout", "array_size", "poll_s", "lost_after_s")),
    ],
)
def test_a_number_of_a_launch_is_finite(kind: Any, name: str) -> None:
    for value in (math.nan, math.inf, -math.inf):
        with pytest.raises(UserError, match=name.replace("_", "[_-]")):
            kind.of({name: value})
