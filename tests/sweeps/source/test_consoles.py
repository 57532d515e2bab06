"""Tests of console logs of transformers, TRL, Unsloth and ms-swift, and of directories of logs and TRL states."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sweeps.errors import UserError
from sweeps.source import load
from sweeps.source.foreign_runs import expand_source, read_runs
from sweeps.source.raw import read_logs

BAR = "{desc}{percent:3d}%|{blocks:<10}| {step}/{total} [00:0{second}<01:00,  1.25s/it]"


def bar(step: int, total: int, desc: str = "") -> str:
    blocks = "█" * (10 * step // total)
    return BAR.format(desc=desc, percent=100 * step // total, blocks=blocks, step=step, total=total, second=step % 10)


def trl(steps: int = 20, every: int = 5, text: bool = False) -> str:
    """Return a console of TRL: a progress bar redrawn after each row, and a second bar for each evaluation."""
    console_text = (
        "Unsloth 2026.1: Fast Qwen2 patching. {'max_seq_length': 2048, 'load_in_4bit': True, 'step': 'off'}\n"
    )
    console_text += (
        "\r" + bar(2, 2, "Loading checkpoint shards: ") + "\nMap: 100%|██████████| 7473/7473 [00:01<00:00, 5 ex/s]\n"
    )
    console_text += "\r" + bar(0, steps)
    for step in range(1, steps + 1):
        console_text += "\r" + bar(step, steps) + "\r" + " " * 60 + "\r"
        row = {"loss": 0.0, "num_tokens": 1000.0 * step, "completions/mean_length": 200.5, "rewards/exact/mean": 0.5}
        row |= {"reward": step / 40, "frac_reward_zero_std": 0.0, "epoch": round(step / 7, 2)}
        printed_row = {key: f"{value:.4g}" for key, value in row.items()} if text else row
        console_text += str(printed_row).replace(
            "'loss': 0.0", "'loss': nan, 'kl': np.float64(0.0012), 'entropy': tensor(0.5)"
        )
        console_text += "\n\n" + bar(step, steps)
        if step % every == 0:
            console_text += "".join("\r" + bar(batch, 8) for batch in range(9)) + "\r"
            evaluation_row = {
                "eval_loss": 0.1,
                "eval_runtime": 2.5,
                "eval_num_tokens": 1000.0 * step,
                "eval_reward": step / 50,
            }
            console_text += f"{evaluation_row}\n"
    return console_text + "{'train_runtime': 1234.5, 'train_samples_per_second': 0.8, 'train_loss': 0.001}\n"


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


@pytest.mark.parametrize("text", [False, True], ids=["numbers", "texts"])
def test_a_console_of_trl_and_unsloth(tmp_path: Path, text: bool) -> None:
    study = load([write(tmp_path / "grpo.log", trl(text=text))])
    (curve,) = study.curves
    assert (curve.recipe, curve.axis, curve.metric) == ("grpo", "num_tokens", "eval_reward")
    assert curve.compute.tolist() == [5000, 10000, 15000, 20000]
    assert curve.reward.tolist() == pytest.approx([0.1, 0.2, 0.3, 0.4])
    assert "step <- the progress bar, " in study.mapping[0] and "24 rows: 4 points" in study.mapping[0]
    (training,) = load([tmp_path / "grpo.log"], metric="reward", x="step").curves
    assert training.compute.tolist() == list(range(1, 21))
    assert training.reward.tolist() == pytest.approx([step / 40 for step in range(1, 21)])


def test_a_console_of_ms_swift_has_steps_in_its_rows(tmp_path: Path) -> None:
    rows = [
        {"loss": "0.01", "grad_norm": "0.5", "completions/mean_length": "9", "reward": f"{s / 400}",
         "rewards/MathORM/mean": "0.3", "epoch": "0.1", "global_step/max_steps": f"{s}/400", "percentage": f"{s / 4}%",
         "elapsed_time": "3m 27s", "train_speed(iter/s)": "0.04"}
        for s in range(5, 101, 5)
    ]  # fmt: skip
    console_text = "".join(
        f"Train: {bar(s // 5, 80)}[INFO:swift] {row}\n" for s, row in zip(range(5, 101, 5), rows, strict=True)
    )
    study = load([write(tmp_path / "swift.txt", console_text)])
    assert study.curves[0].compute.tolist() == list(range(5, 101, 5)) and "step <- in the rows" in study.mapping[0]


def test_rows_of_ms_swift_are_read_from_jsonl_and_text(tmp_path: Path) -> None:
    """ms-swift's `logging.jsonl`, and rows that were pasted into one line."""
    rows = [
        {"loss": 0.0, "reward": s / 9, "rewards/a/mean": 0.0, "global_step/max_steps": f"{s}/99"} for s in range(1, 41)
    ]
    files = {"logging.jsonl": "".join(json.dumps(row) + "\n" for row in rows), "a.txt": "x " + " ".join(map(str, rows))}
    for name, text in files.items():
        assert load([write(tmp_path / name, text)]).curves[0].compute.tolist() == list(range(1, 41))


def test_json_rows_within_other_text_are_read(tmp_path: Path) -> None:
    console_text = "config: " + json.dumps({"model": {"name": "a", "sizes": [{"a": {"b": 1}}] * 50}, "lr": 1e-6}) + "\n"
    console_text += "".join(
        f'2026-01-0{s} 10:00 | INFO {{"step": {s}, "reward": 0.{s}, "loss": NaN, "more": {{"a": "}}"}}}} | done\n'
        for s in range(1, 9)
    )
    (curve,) = load([write(tmp_path / "run.out", console_text)]).curves
    assert curve.compute.tolist() == list(range(1, 9)) and curve.reward.tolist() == [s / 10 for s in range(1, 9)]


def test_rows_separated_from_their_progress_bars_are_numbered(tmp_path: Path) -> None:
    """Standard output into a file is buffered in blocks, while bars on standard error are written at once."""
    bars = "".join("\r" + bar(step, 20) for step in range(21))
    rows = "".join(f"{{'loss': 0.1, 'rewards/a/mean': 0.5, 'reward': {step / 40}}}\n" for step in range(1, 21))
    for console_text, why in (
        (bars + "\n" + rows, "they were buffered"),
        (rows, "neither the rows nor a progress bar has a step"),
    ):
        study = load([write(tmp_path / "a.log", console_text)])
        assert study.curves[0].compute.tolist() == list(range(1, 21)) and why in study.mapping[0]


def test_tables_and_json_lines_are_not_taken_for_a_console(tmp_path: Path) -> None:
    rows = "".join(f'{{"compute": {c}, "reward": 0.{c}, "step": {c}}}\n' for c in range(1, 9))
    for path in (
        write(tmp_path / "a.log", rows),
        write(tmp_path / "b.csv", "compute,reward,x\n1,0.1,\"{'loss': 1}\"\n"),
    ):
        assert "table" in load([path]).mapping[0]
    (log,) = read_logs(write(tmp_path / "c.log", "begun\n" + trl()))
    assert log.series("reward").steps.tolist() == list(range(1, 21))


def states(folder: Path, *steps: int, last: int | None = None) -> None:
    for step in steps:
        rows = [
            {"step": s, "reward": s / 500, "num_tokens": 10.0 * s, "rewards/a/mean": 0.1}
            for s in range(10, step + 1, 10)
        ]
        content = {"log_history": rows, "global_step": step, "max_steps": 400}
        place = folder if step == last else folder / f"checkpoint-{step}"
        write(place / "trainer_state.json", json.dumps(content))


@pytest.mark.parametrize("inner", ["", "a", "a/checkpoint-400"])
def test_a_directory_of_trl_gives_the_last_state_of_each_run(tmp_path: Path, inner: str) -> None:
    states(tmp_path / "out" / "a", 90, 100, 400)
    states(tmp_path / "out" / "b", 50, 60, last=60)
    states(tmp_path / "out" / "c", 50, 70, last=50)  # the run continued after its final state was saved
    curves = {curve.recipe: len(curve.compute) for curve in load([tmp_path / "out" / inner]).curves}
    assert curves == ({"a": 40} if inner else {"a": 40, "b": 6, "c": 7})
    if not inner:
        assert len(expand_source(str(tmp_path / "out"))) == 3 and len(read_runs([str(tmp_path / "out")], {})[0]) == 3


def test_consoles_without_a_reward_are_left_out_of_a_directory(tmp_path: Path) -> None:
    line = "(TaskRunner pid=1) step:{0} - critic/score/mean:0.{0} - perf/total_num_tokens:10\n"
    for name in ("one.log", "deep/two.out"):
        write(tmp_path / name, "".join(line.format(step) for step in range(1, 9)))
    write(tmp_path / "three.txt", trl())
    write(tmp_path / "bad.log", "step:1 - actor/pg_loss:0.1\n")
    write(tmp_path / "notes.txt", "step: nothing here {'a': 1}\n")
    with pytest.raises(UserError, match="differ in their compute axis"):
        load([tmp_path])
    (tmp_path / "three.txt").unlink()
    study = load([tmp_path])
    assert [curve.recipe for curve in study.curves] == ["one", "two"]
    assert len(study.warnings) == 1 and study.warnings[0].startswith("left out: ") and "bad.log" in study.warnings[0]
    (tmp_path / "one.log").unlink()
    (tmp_path / "deep" / "two.out").unlink()
    with pytest.raises(UserError, match=r"bad\.log: none of verl's names"):
        load([tmp_path])
    (tmp_path / "bad.log").unlink()
    with pytest.raises(UserError, match=r"no run in this directory .*trainer_state\.json, no console log \*\.log"):
        load([tmp_path])
