"""Tests of logs of other frameworks: the right columns become compute and reward, and skipped rows are counted."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sweeps.cli import main as cli
from sweeps.errors import UserError
from sweeps.fit.fit import fit_curves
from sweeps.source import LoadedStudy, load
from sweeps.source.vocabulary import VOCABULARIES
from tests.examples import examples
from tests.paths import LOGS
from tests.sweeps.source.event_log import TRL_SCALARS, events

TOKENS = 250_000


def write(path: Path, content: str | bytes | object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    if not isinstance(content, str | bytes):
        content = json.dumps(content)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def state(path: Path, rows: list[Any], **more: object) -> Path:
    return write(path, {"log_history": rows, "global_step": 10, **more})


def line(study: LoadedStudy) -> str:
    (mapping_line,) = study.mapping
    assert study.shown == study.mapping and "\n" not in mapping_line
    return mapping_line


def test_log_fixtures_equal_the_output_of_their_script(tmp_path: Path) -> None:
    code = (LOGS / "make.py").read_text()
    copy = write(tmp_path / "make.py", code)
    subprocess.run([sys.executable, copy], check=True)
    for path in LOGS.rglob("*"):
        if path.is_file() and path.suffix != ".pyc":
            assert (tmp_path / path.relative_to(LOGS)).read_bytes() == path.read_bytes(), path.name


# --- TRL ----------------------------------------------------------------------------------------------------


def test_trl_evaluations_on_two_sets_are_not_mixed() -> None:
    path = LOGS / "trl_grpo" / "trainer_state.json"
    with pytest.raises(UserError, match=r"2 rewards could be meant \(eval_math_reward, eval_code_reward\).*--metric"):
        load([path])
    code, math = load([path], metric="all").curves
    assert (code.recipe, math.recipe) == ("trl_grpo set=code", "trl_grpo set=math")
    assert code.factors == {"set": "code"} and math.metric == "eval_math_reward"
    assert math.reward[-1] > code.reward[-1] + 0.1
    assert math.compute.tolist() == [TOKENS * step for step in range(0, 101, 10)]
    study = load([path], metric="eval_code_reward")
    assert "num_tokens (TRL's name)" in line(study) and "43 rows: 11 points, rows without eval_code_reward: 32" in line(
        study
    )
    assert load([path], y="eval_code_reward").curves[0].reward.tolist() == code.reward.tolist()


def test_trl_falls_back_to_training_reward_and_to_steps_and_says_so(tmp_path: Path) -> None:
    rows = [{"step": step, "reward": 0.1 * step, "completions/mean_length": 9.0} for step in range(1, 5)]
    path = state(tmp_path / "run" / "checkpoint-4" / "trainer_state.json", [*rows, {"step": 4, "train_runtime": 1.0}])
    study = load([path])
    (curve,) = study.curves
    assert curve.recipe == "run" and curve.axis == "step" and curve.compute.tolist() == [1, 2, 3, 4]
    assert any("step counts steps, not compute: the compute of a step differs" in note for note in curve.warnings)
    assert any("reward during training, not that of a held-out evaluation" in note for note in curve.warnings)
    assert "5 rows: 4 points, rows without reward: 1" in line(study)
    named = load([path], x="step", metric="completions/mean_length").curves[0]
    assert named.metric == "completions/mean_length"


def test_trl_rows_logged_again_after_a_resume_replace_earlier_ones(tmp_path: Path) -> None:
    rows = [{"step": step, "reward": 0.1 * step, "num_tokens": 100.0 * step} for step in (1, 2, 3, 2, 3, 4)]
    rows[3]["reward"] = 0.25
    path = state(tmp_path / "a" / "trainer_state.json", rows)
    study = load([path])
    assert study.curves[0].reward.tolist() == pytest.approx([0.1, 0.25, 0.3, 0.4])
    assert "values replaced by a later value at the same step: 2" in line(study)
    assert any("replaced by a later value at the same step" in note for note in study.curves[0].warnings)


def test_bad_values_are_counted_and_the_first_is_named(tmp_path: Path) -> None:
    rows: list[Any] = [{"step": s, "eval_reward": 0.1 * s, "eval_num_tokens": 10.0 * s} for s in range(5)]
    rows[2]["eval_reward"] = float("nan")
    rows[3]["eval_reward"] = "oops"
    rows.append("not a row")
    study = load([state(tmp_path / "a" / "trainer_state.json", rows)])
    assert study.curves[0].compute.tolist() == [0, 10, 40]
    assert "values not finite: 2" in line(study) and "rows without a step: 1" in line(study)
    assert any(
        "2 values of eval_reward left out: not finite numbers (first row 3: 'nan')" in w
        for w in study.curves[0].warnings
    )


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "log_history holds no rows"),
        ("text", "log_history holds no rows"),
        ([{"step": 1, "loss": 0.5}], "none of TRL's names of a reward; found loss"),
        ([{"step": 1, "reward": None, "num_tokens": 1}], "no usable value of reward in 1 rows"),
        ([{"reward": 1.0}], "none of TRL's names"),
        ([{"step": 1, "reward": 0.5, "num_tokens": -1.0}], "num_tokens is negative at 1 step, first 1"),
        ([{"step": -1, "reward": 0.5}], "negative steps: 1, first -1"),
    ],
)
def test_unusable_trl_states_are_refused_with_a_reason(tmp_path: Path, rows: Any, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        load([state(tmp_path / "trainer_state.json", rows)])
    assert "trainer_state.json" in str(caught.value) and "\n" not in str(caught.value)


def test_single_constant_and_wide_rewards_get_a_verdict(tmp_path: Path) -> None:
    for name, values in (("one", [0.5]), ("flat", [0.5] * 8), ("wide", [-3.0, 1.0, 4.0, 5.0, 5.5, 5.7])):
        rows = [{"step": s, "reward": v, "num_tokens": 100.0 * s} for s, v in enumerate(values)]
        (fit,) = fit_curves(load([state(tmp_path / name / "trainer_state.json", rows)]).curves)
        assert fit.verdict
        assert any("outside [0, 1]" in note for note in fit.warnings) == (name == "wide")


# --- verl ---------------------------------------------------------------------------------------------------


def test_verl_console_and_file_logger_give_the_same_points(tmp_path: Path) -> None:
    console, lines = load([LOGS / "verl_grpo.log"]), load([LOGS / "verl_dapo.jsonl"])
    for study in (console, lines):
        (curve,) = study.curves
        assert curve.metric == "val-core/openai/gsm8k/acc/mean@1" and curve.axis == "perf/total_num_tokens"
        # verl counts tokens per batch. The axis is their running sum, 0 at the validation before training.
        assert curve.compute.tolist() == [TOKENS * step for step in range(0, 81, 5)]
        assert 0.5 < curve.reward[-1] < 0.7 and curve.reward[0] < 0.25
        assert "verl's name, running sum over the steps" in line(study)
        assert "81 rows: 17 points" in line(study) and "at compute 0: 1" in line(study)
    assert "other lines: 164" in line(console)
    timed = load([LOGS / "verl_grpo.log"], x="timing_s/step", metric="critic/score/mean").curves[0]
    assert timed.compute[:2].tolist() == [96.5, 193.0] and len(timed.compute) == 80


def test_verl_lines_cut_off_repeated_and_missing_are_counted(tmp_path: Path) -> None:
    text = "".join(
        f"step:{step} - critic/score/mean:0.{step} - actor/pg_loss:n/a - perf/total_num_tokens:100.000\r\n"
        for step in (2, 3, 3, 6)
    )
    path = write(tmp_path / "job.out", text.encode() + b"\xe2\x96\nstep:7 - critic/score/mean:0.7 - actor/x:0.1")
    study = load([path])
    (curve,) = study.curves
    assert curve.reward.tolist() == pytest.approx([0.2, 0.3, 0.6, 0.7])
    assert curve.compute.tolist() == [100, 200, 300, 300]
    all_warnings = " ".join(curve.warnings)
    assert (
        "log starts at step 2" in all_warnings
        and "2 steps missing in the log" in all_warnings
        and "1 value of critic" in all_warnings
    )
    assert "fields that are not numbers: 5" in line(study)


def test_verl_data_sources_need_a_choice(tmp_path: Path) -> None:
    text = "step:1 - val-core/gsm8k/acc/mean@4:0.5 - val-core/aime/acc/mean@4:0.1 - val-core/aime/acc/best@4/mean:0.3\n"
    path = write(tmp_path / "x.txt", text)
    with pytest.raises(UserError, match="2 rewards could be meant"):
        load([path])
    assert [curve.factors["set"] for curve in load([path], metric="all").curves] == ["aime", "gsm8k"]


def test_a_torn_last_line_is_left_out_and_any_other_is_refused(tmp_path: Path) -> None:
    text = (LOGS / "verl_dapo.jsonl").read_text()
    assert "an incomplete last line was left out" in line(
        load([write(tmp_path / "a.jsonl", text + '{"step": 81, "da')])
    )
    lines = text.splitlines()
    lines[2] = lines[2][:20]
    with pytest.raises(UserError, match="line 3 is not JSON"):
        load([write(tmp_path / "b.jsonl", "\n".join(lines))])


@pytest.mark.parametrize("name", ["verl_dapo.jsonl", "verl_grpo.log", "open_instruct_history.csv"])
def test_nul_bytes_of_a_crash_are_dropped_and_counted(tmp_path: Path, name: str) -> None:
    """NUL bytes after the last line, before a complete line, and in place of the end of a line."""
    raw = (LOGS / name).read_bytes()
    (whole,) = load([LOGS / name]).curves
    study = load([write(tmp_path / name, raw + b"\0" * 4096)])
    assert study.curves[0].reward.tolist() == whole.reward.tolist() and study.curves[0].axis == whole.axis
    assert study.warnings == [f"{tmp_path / name}: dropped 4096 NUL bytes left by a crash"]
    lines = raw.split(b"\n")
    half = len(lines) // 2
    broken = lines[half][:20] + b"\0" * 512
    for middle, lost in (([b"\0" * 100], 0), ([broken], 1), ([broken + lines[half][-20:]], 1)):
        study = load([write(tmp_path / name, b"\n".join([*lines[:half], *middle, *lines[half:]]))])
        assert study.curves[0].reward.tolist() == whole.reward.tolist()
        assert ("left by a crash, and 1 line cut off there" in study.warnings[0]) == bool(lost)
    if name != "open_instruct_history.csv":  # in a CSV the remainder of a cell may look like a whole cell
        raw = b"\n".join([*lines[:half], broken + lines[half], *lines[half + 1 :]])
        assert load([write(tmp_path / name, raw)]).curves[0].reward.tolist() == whole.reward.tolist()


def test_nul_bytes_after_a_state_and_before_a_log_are_dropped(tmp_path: Path) -> None:
    rows = [{"step": s, "reward": 0.1 * s, "num_tokens": 100.0 * s} for s in range(4)]
    path = state(tmp_path / "a" / "trainer_state.json", rows)
    path.write_bytes(path.read_bytes() + b"\0\0")
    assert len(load([path]).curves[0].reward) == 4
    # If a log is truncated while it is written, it begins with NUL bytes, followed by the rest of a line.
    raw = b"\0" * 9000 + b"core/x:0.5\n" + (LOGS / "verl_grpo.log").read_bytes()
    study = load([write(tmp_path / "job.log", raw)])
    assert len(study.curves[0].reward) == 17 and "dropped 9000 NUL bytes left by a crash" in study.warnings[0]


# --- W&B, prime-rl, open-instruct -----------------------------------------------------------------------------


def test_a_chart_export_has_one_recipe_per_run() -> None:
    study = load([LOGS / "wandb_chart.csv"])
    assert [curve.recipe for curve in study.curves] == ["brisk-sweep-7", "olive-sweep-3"]
    assert [len(curve.reward) for curve in study.curves] == [31, 41]
    assert study.curves[0].axis == "val/num_total_tokens" and "rows without eval/scores: 10" in line(study)
    with pytest.raises(UserError, match="the chart was exported along val/num_total_tokens, without other"):
        load([LOGS / "wandb_chart.csv"], x="other")


def test_a_chart_with_steps_groups_and_averages_is_read(tmp_path: Path) -> None:
    columns = [f"algo: cispo, seed: {seed} - reward{end}" for seed in (1, 2) for end in ("", "__MIN", "__MAX")]
    header = ",".join(f'"{name}"' for name in ["Step", *columns])
    rows = ["1,0.1,0.05,0.15,0.2,0.2,0.2", "2,,,,0.3,0.3,0.3", "3,0.4,0.4,0.4,NaN,NaN,NaN"]
    text = "\n".join([header, *rows])
    study = load([write(tmp_path / "chart.csv", text)], by="algo")
    (curve,) = study.curves
    assert curve.recipe == "cispo" and curve.seed.tolist() == ["1", "1", "2", "2"]
    assert any("Step counts steps, not compute" in note for note in curve.warnings)
    assert "whose points are means (their __MIN and __MAX differ): 1" in line(study)
    assert "values not finite: 1" in line(study)
    with pytest.raises(UserError, match=r"nothing named nope.*found algo, seed"):
        load([tmp_path / "chart.csv"], by="nope")


def test_prime_rl_evaluations_are_joined_with_training_by_step() -> None:
    path = LOGS / "prime_rl_history.json"
    math, code = load([path], metric="all").curves
    assert (math.factors["set"], code.factors["set"]) == ("aime24", "livecodebench")
    assert math.compute.tolist() == [TOKENS * step for step in range(0, 61, 5)]
    (curve,) = load([path], metric="reward/all/mean").curves
    assert len(curve.reward) == 61


def test_a_file_of_prime_rl_is_not_taken_for_our_journal(tmp_path: Path) -> None:
    rows = [{"step": s, "time": 1.0 + s, "progress/total_tokens": 10 * s, "reward/all/mean": 0.1 * s} for s in range(5)]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    write(tmp_path / "study" / "run_a" / "metrics.jsonl", text)
    write(tmp_path / "study" / "run_b" / "metrics.jsonl", text + '{"step": 5, "ti')
    study = load([tmp_path / "study"])
    assert [curve.recipe for curve in study.curves] == ["run_a", "run_b"] and study.runs == []
    assert "prime-rl log" in study.mapping[0] and "an incomplete last line was left out" in study.mapping[1]


def test_open_instruct_prefers_the_held_out_rate() -> None:
    study = load([LOGS / "open_instruct_history.csv"])
    assert study.curves[0].metric == "eval/objective/verifiable_correct_rate"
    assert "80 rows: 20 points" in line(study)
    scores = load([LOGS / "open_instruct_history.csv"], metric="eval/scores").curves[0]
    assert any("outside [0, 1]" in note for note in scores.notes)


@pytest.mark.parametrize("form", ["csv", "json", "jsonl", "parquet"])
def test_a_history_of_several_runs_is_read_in_every_format(tmp_path: Path, form: str) -> None:
    rows = [
        {"_step": s, "run_name": f"r{seed}", "algo": algo, "seed": seed, "size": size, "x": 10.0 * s, "acc": 0.1 * s}
        for seed, algo, size in ((1, "a", "7b"), (2, "a", "7b"), (1, "b", "1b"))
        for s in range(3)
    ]
    rows += [{"_step": 3, "run_name": "r1", "algo": "a", "seed": 1, "size": "7b", "x": 30.0}]
    frame = pandas.DataFrame(rows)
    path = tmp_path / f"h.{form}"
    if form == "csv":
        frame.to_csv(path, index=False)
    elif form == "parquet":
        frame.to_parquet(path)
    else:
        write(path, rows if form == "json" else "".join(json.dumps(row) + "\n" for row in rows))
    a, b = load([path], metric="acc", x="x", by="algo", factors=("size",)).curves
    assert (a.recipe, b.recipe) == ("a size=7b", "b size=1b") and a.factors == {"size": "7b"}
    assert a.seed.tolist() == ["1"] * 3 + ["2"] * 3 and a.compute.tolist() == [0, 10, 20] * 2
    with pytest.raises(UserError, match="no name of a reward"):
        load([path])
    with pytest.raises(UserError, match=r"no metric nope; found _step"):
        load([path], metric="nope")
    with pytest.raises(UserError, match=r"no metric nope.*--x"):
        load([path], metric="acc", x="nope")
    with pytest.raises(UserError, match="no column nope"):
        load([path], metric="acc", by="nope")


def test_a_decreasing_axis_gives_a_warning(tmp_path: Path) -> None:
    rows = [{"_step": s, "acc": 0.1 * s, "tokens": t} for s, t in enumerate((0, 10, 20, 5, 15))]
    (curve,) = load([write(tmp_path / "h.json", rows)], metric="acc", x="tokens").curves
    assert any("tokens falls at 1 step, first at step 3" in note for note in curve.warnings)


def test_compute_between_logged_steps_is_interpolated_and_counted(tmp_path: Path) -> None:
    rows: list[dict[str, float]] = [{"_step": s, "tokens": 10.0 * s} for s in (2, 4, 8)]
    rows += [{"_step": s, "acc": 0.1} for s in (0, 3, 4)]
    study = load([write(tmp_path / "h.json", rows)], metric="acc", x="tokens")
    assert study.curves[0].compute.tolist() == [0, 30, 40]
    assert "at compute 0: 1" in line(study) and "interpolated between logged steps: 1" in line(study)


def test_runs_of_one_recipe_get_different_seeds(tmp_path: Path) -> None:
    rows = [{"step": s, "reward": 0.1 * s, "num_tokens": 100.0 * s} for s in range(3)]
    paths = [state(tmp_path / folder / "grpo" / "trainer_state.json", rows) for folder in "ab"]
    (curve,) = load(paths).curves
    assert sorted(set(curve.seed.tolist())) == ["run 0", "run 1"] and len(curve.reward) == 6


def test_a_run_given_twice_is_not_a_second_seed(tmp_path: Path) -> None:
    rows = [{"step": s, "reward": 0.1 * s, "num_tokens": 100.0 * s} for s in range(4)]
    early = state(tmp_path / "grpo" / "checkpoint-2" / "trainer_state.json", rows[:3])
    late = state(tmp_path / "grpo" / "checkpoint-3" / "trainer_state.json", rows)
    study = load([late, late])
    assert study.curves[0].seed.tolist() == ["run 0"] * 4 and "given twice, read once" in study.warnings[0]
    with pytest.raises(UserError, match=r"the same run as .*checkpoint-2"):
        load([early, late])


# --- TensorBoard ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tensors", [False, True])
def test_event_files_with_scalars_or_tensors_are_read(tmp_path: Path, tensors: bool) -> None:
    path = events(tmp_path / "run", TRL_SCALARS, tensors)
    study = load([path])
    (curve,) = study.curves
    assert curve.axis == "train/num_tokens" and curve.metric == "eval/reward"
    assert curve.compute.tolist() == [0, 500, 1000, 1500, 2000]
    assert curve.reward.tolist() == pytest.approx([0, 0.1, 0.2, 0.3, 0.4], abs=1e-6)
    assert "TensorBoard event files" in line(study)
    timed = load([path], x="wall_time", metric="train/reward").curves[0]
    assert timed.compute.tolist() == list(range(1, 21))


def test_a_directory_of_event_files_is_a_run_and_damage_gives_a_warning(tmp_path: Path) -> None:
    events(tmp_path / "study" / "a", TRL_SCALARS)
    cut = events(tmp_path / "study" / "b" / "logs", TRL_SCALARS)
    cut.write_bytes(cut.read_bytes()[:-20])
    write(tmp_path / "study" / "c" / "events.out.tfevents.1.host", b"junk" * 20)
    study = load([tmp_path / "study"])
    assert [curve.recipe for curve in study.curves] == ["a", "b/logs"]
    assert any("cut off or damaged after" in note for note in study.curves[1].warnings)
    assert any("not an event file" in note for note in study.warnings)
    with pytest.raises(UserError, match="not an event file"):
        load([tmp_path / "study" / "c"])
    events(tmp_path / "other", {"loss": [(1, 0.5)]})
    with pytest.raises(UserError, match="no name of a reward that a reader knows; found loss, wall_time"):
        load([tmp_path / "other"])


def test_seeds_are_read_from_folder_names_of_event_files(tmp_path: Path) -> None:
    for name, shift in (("a/seed_1", 0.0), ("a/seed_2", 0.01), ("b/seed_1", 0.0)):
        rewards = [(step, reward + shift) for step, reward in TRL_SCALARS["eval/reward"]]
        events(tmp_path / "study" / name, {**TRL_SCALARS, "eval/reward": rewards})
    a, b = load([tmp_path / "study"]).curves
    assert (a.recipe, b.recipe) == ("a", "b") and set(a.seed.tolist()) == {"1", "2"}
    (alone,) = load([tmp_path / "study" / "a"]).curves
    assert alone.recipe == "a" and set(alone.seed.tolist()) == {"1", "2"}


def test_without_tensorboard_the_message_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(UserError, match="tensorboard, which is not installed; pip install tensorboard"):
        load([write(tmp_path / "events.out.tfevents.1", b"")])


# --- all frameworks -------------------------------------------------------------------------------------------


def test_no_two_frameworks_claim_the_same_names() -> None:
    for vocabulary in VOCABULARIES:
        for example in ("val-core/a/acc/mean@1", "progress/total_tokens", "val/num_total_tokens", "train/num_tokens"):
            claiming = [v.project for v in VOCABULARIES if v.recognizes([example])]
            assert len(claiming) == 1, (example, claiming, vocabulary.project)


JUNK = st.one_of(
    st.binary(max_size=200),
    st.text(max_size=200).map(str.encode),
    st.recursive(
        st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8)),
        lambda inner: st.one_of(
            st.lists(inner, max_size=4),
            st.dictionaries(
                st.sampled_from(["step", "_step", "reward", "data", "log_history", "x"]), inner, max_size=4
            ),
        ),
        max_leaves=12,
    ).map(lambda value: json.dumps(value).encode()),
)
HEADS = {
    "trainer_state.json": [b"", b'{"log_history": ', b'{"log_history": [{"step": 1, "reward": 0.5}, '],
    "verl.log": [b"", b"step:1 - critic/score/mean:0.5 - ", b"step:1 - critic/score/mean:0.5\nstep:"],
    "verl.jsonl": [b'{"step": 1, "data": {"critic/score/mean": 0.5}}\n', b'{"step": 1, "data": '],
    "chart.csv": [b"Step,a - r,a - r__MIN,a - r__MAX\n1,0.5,0.5,0.5\n", b"Step,a - r,a - r__MIN\n"],
    "history.csv": [b"_step,reward/all/mean,progress/total_tokens\n1,0.5,100\n", b"_step,scores,eval/scores\n"],
    "history.json": [b"", b'[{"_step": 1, "scores": 0.5, "eval/scores": 1}, '],
    "metrics.jsonl": [b"", b'{"step": 1, "reward/all/mean": 0.5}\n'],
    "x.parquet": [b"", b"PAR1"],
    "events.out.tfevents.1": [b""],
}


@settings(max_examples=examples(100))
@given(JUNK, st.sampled_from([b"", b"]}", b"]", b"}", b"\n"]), st.sampled_from([None, "all", "x"]))
def test_junk_gives_every_reader_a_curve_or_one_line(
    tmp_path_factory: pytest.TempPathFactory, junk: bytes, tail: bytes, metric: str | None
) -> None:
    folder = tmp_path_factory.mktemp("junk")
    for name, heads in HEADS.items():
        for head in heads:
            try:
                assert load([write(folder / name, head + junk + tail)], metric=metric).curves
            except UserError as error:
                assert str(error) and "\n" not in str(error)


@pytest.mark.full
def test_a_million_rows_load_in_seconds(tmp_path: Path) -> None:
    count = 1_000_000
    frame = pandas.DataFrame(
        {"recipe": np.where(np.arange(count) % 2, "a", "b"), "seed": np.arange(count) % 3, "compute": np.arange(count)}
    )
    frame["reward"] = np.tanh(frame["compute"] / count)
    frame.to_csv(tmp_path / "many.csv", index=False)
    curves = load([tmp_path / "many.csv"]).curves
    assert [len(curve.reward) for curve in curves] == [count // 2] * 2


def test_the_command_shows_the_mapping_of_logs_but_not_of_tables(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert cli.main(["fit", str(LOGS / "verl_grpo.log"), "--json"]) == 0
    shown = capsys.readouterr()
    assert shown.err.startswith("source: ") and "running sum" in shown.err and json.loads(shown.out)
    table = write(tmp_path / "t.csv", "recipe,size,lr,compute,reward\n" + "a,7b,1,1,0.1\na,7b,1,2,0.2\na,1b,1,3,0.2\n")
    assert cli.main(["fit", str(table), "--json", "--size", "size", "--group", "lr"]) == 0
    shown = capsys.readouterr()
    assert "source:" not in shown.err
    assert [fit["recipe"] for fit in json.loads(shown.out)] == ["a size=1b lr=1", "a size=7b lr=1"]
    assert cli.main(["fit", str(table), "--by", "nope"]) == 1
    assert "no column nope" in capsys.readouterr().err
