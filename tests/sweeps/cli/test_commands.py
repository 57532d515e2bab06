"""Tests of the console script: its output, and its exit codes 0, 1 and 2."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
import pytest

from sweeps.api import READING
from sweeps.cli import main as cli
from sweeps.cli import showing_commands
from sweeps.cli.curves import source_arguments
from sweeps.fit.family import FAMILIES
from sweeps.fit.names import FAMILY_NAMES
from sweeps.run.rollouts import write_groups
from tests.examples import every
from tests.paths import ROOT

EXAMPLE = ROOT / "examples" / "curves.csv"


def scalerl(*arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "sweeps.cli.main", *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_fit_prints_json() -> None:
    done = scalerl("fit", EXAMPLE, "--json")
    assert done.returncode == 0 and done.stderr == ""
    fits = {entry["recipe"]: entry for entry in json.loads(done.stdout)}
    assert len(fits) == 4
    entry = fits["scalerl"]
    for key in ("verdict", "A", "A_total", "B", "C_mid", "R0", "family", "rmse", "r2", "n", "seeds", "window",
                "extrapolation_error", "warnings"):  # fmt: skip
        assert key in entry
    assert entry["verdict"] == "identifiable" and entry["seeds"] == 2 and entry["R0"]["source"] == "first"
    assert entry["A"]["low"] < 0.61 < entry["A_total"]["high"]
    assert fits["scalerl+aggregation=token"]["verdict"] == "pre_inflection"
    assert fits["scalerl+aggregation=token"]["A"]["high"] is None


def test_the_example_equals_the_output_of_its_script() -> None:
    made = subprocess.run(
        [sys.executable, "examples/make_curves.py"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert made.stdout == EXAMPLE.read_text()


def test_no_torch_is_imported() -> None:
    code = "import sys, sweeps.cli.main, sweeps.report.write; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def run(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, str, str]:
    """Call the console script's entry point in this process, which is faster than starting one."""
    try:
        code = cli.main([str(argument) for argument in arguments])
    except SystemExit as stop:
        code = int(stop.code or 0)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("fti", "'fti' is no command; did you mean fit? scalerl --help"),
        ("trian", "'trian' is no command; did you mean train? scalerl --help"),
        ("wibble", "'wibble' is no command; scalerl --help"),
    ],
)
def test_an_unknown_command_suggests_a_similar_one(word: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, word, EXAMPLE)
    assert (code, out) == (2, "") and said in err


def test_fit_names_compute_and_reward_unless_they_have_the_default_names(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "fit", EXAMPLE)
    assert re.search(r"\n95% intervals, within these runs; the scale of the walks is pooled over \d+ recipes\n", out)
    _, out, _ = run(capsys, "fit", ROOT / "examples" / "study")
    assert "\ncompute: virtual device hours; reward: eval/heldout/pass_rate; 95% intervals" in out


def test_fit_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "fit", EXAMPLE, "--r0", "0.3", "--min-compute", "1000")
    assert code == 0
    assert "identifiable" in out and "scalerl+normalization=prompt" in out and "open]" in out


def test_rank_prints_outcome_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "rank", EXAMPLE, "--budget", "16000")
    assert code == 0 and "R at 1.6e+04" in out and "delta A" in out
    code, out, _ = run(capsys, "rank", EXAMPLE, "--json", "--margin", "0.05")
    ranking = json.loads(out)
    assert code == 0
    assert {"baseline", "margin", "undecided", "ranking"} <= set(ranking)
    assert ranking["baseline"] == "scalerl" and ranking["margin"] == 0.05
    assert set(ranking["ranking"][0]) >= {
        "recipe", "rank", "p_best", "tied_with_best", "A", "B_at_shared_A", "R_at_budget", "verdict", "reason"
    }  # fmt: skip
    assert ranking["ranking"][-1]["rank"] is None


@pytest.mark.slow
def test_plan_proposes_runs_without_a_target_or_budget(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, out, _ = run(capsys, "plan", EXAMPLE)
    _, out_with_target, _ = run(capsys, "plan", EXAMPLE, "--target", "0.6")
    assert code == 0 and out.startswith("not settled: scalerl is the best choice so far")
    assert "what to run next (gain" in out and out_with_target.endswith(out), (
        "the proposed runs do not depend on the target"
    )
    code, out, _ = run(capsys, "plan", EXAMPLE, "--json")
    plan = json.loads(out)
    assert code == 0 and "target" not in plan and "budget" not in plan and plan["next"][0]["action"] == "extend"
    assert [row["compute"] for row in plan["recipes"]] == [None] * 4
    code, _, err = run(capsys, "plan", ROOT / "examples" / "sizes.csv", "--size", "size")
    assert code == 1 and "--size: which size is best depends" in err


@pytest.mark.full
def test_report_writes_its_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "report", EXAMPLE, "-o", tmp_path / "sub" / "report.html")
    assert code == 0
    assert (tmp_path / "sub" / "report.html").stat().st_size > 10000
    assert (tmp_path / "sub" / "ranking.csv").read_text().startswith("recipe,")
    assert str(tmp_path / "sub" / "report_curves.png") in out


@pytest.mark.parametrize("place", ["/proc/nowhere/report.html", "is_a_folder", "a_file/report.html", "n" * 300])
def test_nothing_is_fitted_if_the_report_cannot_be_written(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "is_a_folder").mkdir()
    (tmp_path / "a_file").touch()
    monkeypatch.setattr(showing_commands, "read_and_fit", None)
    code, out, err = run(capsys, "report", EXAMPLE, "-o", place)
    assert code == 1 and out == "" and "cannot be written" in err and err.count("\n") == 1


def test_a_refused_source_leaves_no_folder_for_its_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, _ = run(capsys, "report", tmp_path / "nowhere.csv", "-o", tmp_path / "sub" / "deep" / "report.html")
    assert code == 1 and not (tmp_path / "sub").exists()


@pytest.mark.parametrize("option", ["--size", "--rollouts", "--difficulty", "--group"])
def test_a_missing_column_is_refused_with_the_option_that_named_it(
    capsys: pytest.CaptureFixture[str], option: str
) -> None:
    code, _, err = run(capsys, "plan", EXAMPLE, option, "nope", "--budget", "1e4")
    assert code == 1 and err.endswith(
        f"no column nope; found recipe, baseline, seed, compute, reward; name it with {option}\n"
    )


@pytest.mark.parametrize("option", ["--size", "--rollouts", "--difficulty", "--group"])
def test_a_missing_label_of_a_run_is_refused_with_the_option_that_named_it(
    capsys: pytest.CaptureFixture[str], option: str
) -> None:
    code, _, err = run(capsys, "plan", ROOT / "tests/data/logs/verl_dapo.jsonl", option, "nope", "--budget", "1e4")
    assert code == 1 and err.endswith(f"; choose with {option}\n")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["fit", "nowhere.csv"], "no such file"),
        (["fit", EXAMPLE, "--x", "gpu_hours"], "no column gpu_hours; found recipe, baseline, seed, compute, reward"),
        (["fit", EXAMPLE, "--min-compute", "5", "--max-compute", "4"], "is not below"),
        (["fit", EXAMPLE, "--r0", "0.3", "--min-compute", "1e9"], "no points in the window"),
        (["fit", EXAMPLE, "--r0", "3"], "--r0 3"),
        (["plan", EXAMPLE, "--bounds", "-1", "0.5"], "--bounds -1 0.5: recipe 'scalerl' has reward 0."),
        (["rank", EXAMPLE, "--budget", "0"], "--budget"),
        (["fit", "a\nb"], "no such file"),
    ],
)
def test_failures_exit_1_with_one_line(
    capsys: pytest.CaptureFixture[str], arguments: list[str | Path], words: str
) -> None:
    code, out, err = run(capsys, *arguments)
    assert code == 1 and out == ""
    assert words in err and err.startswith("scalerl: ") and err.count("\n") == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ["nonsense"],
        ["completion", "powershell"],
        ["fit"],
        ["fit", "x.csv", "--r0", "maybe"],
        ["fit", "x.csv", "--r0", "nan"],
        ["fit", "x.csv", "--max-compute", "-1"],
        ["fit", "x.csv", "--bounds", "1"],
        ["rank", "x.csv", "--margin", "x"],
        ["publish", "x"],
        ["rollouts", "x", "--limit", "-1"],
        ["rollouts", "x", "--step", "-1"],
        ["rollouts", "x", "--step=-3:-1"],
        ["export", "x", "y", "--step", "-1"],
        ["compare", "x.csv", "--bounds", "0", "3", "--bugdet", "5"],
        ["completion", "bash", "more"],
    ],
)
def test_wrong_usage_exits_2(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    code, _, err = run(capsys, *arguments)
    assert code == 2 and "usage" in err


# Commands that need a trained model.
OF_MODELS = ("export", "rollouts", "rescore", "noise")
COMMANDS = (
    *("train", "fit", "rank", "plan", "compare", "decide", "effects", "race", "report", "watch", "publish", "init"),
    *("adopt", "memory", "translate", "status", "collect", "clean", *OF_MODELS, "completion"),
)


def test_every_command_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "--help")
    assert [line.split()[0] for line in out.splitlines() if re.match(r"    [a-z]+( |$)", line)] == list(COMMANDS)


# OF_MODELS is left out: the examples contain no trained model. tests/member trains one.
@pytest.mark.slow
@pytest.mark.parametrize("command", every(12, [each for each in COMMANDS if each not in OF_MODELS], pytest.mark.full))
def test_help_has_an_example_that_works(tmp_path: Path, command: str) -> None:
    """The example in the help text runs unchanged in a folder that contains only the repository's examples."""
    help_output = scalerl(command, "--help")
    assert help_output.returncode == 0
    example = re.search(r"example: scalerl (.+?)(?:   \(|$)", help_output.stdout, re.MULTILINE)
    assert example is not None and example[1].split()[0] == command
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    done = subprocess.run(
        [sys.executable, "-m", "sweeps.cli.main", *example[1].split()],
        cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) > 1
    assert "Traceback" not in done.stderr


def test_without_arguments_the_help_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys) == run(capsys, "--help")
    code, out, err = run(capsys)
    assert code == 0 and err == "" and "commands:" in out and "scalerl completion" in out


def test_version_is_printed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "__version__", "1.2.3")
    assert run(capsys, "--version") == (0, "scalerl 1.2.3\n", "")


def test_family_names_on_the_command_line_match_the_fit() -> None:
    assert list(FAMILIES) == list(FAMILY_NAMES)


@pytest.mark.full
def test_help_of_train_lists_groups_and_choices(tmp_path: Path) -> None:
    (tmp_path / "loss").mkdir()
    (tmp_path / "loss" / "mine.yaml").write_text("_target_: mine.Loss\n")
    groups = {path.name for path in (ROOT / "conf").iterdir() if path.is_dir()} - {"hydra"}
    assert groups
    for option in ("--help", "-h"):
        done = scalerl("train", option, "--config-dir", tmp_path)
        assert done.returncode == 0 and done.stderr == ""
        listed = dict(re.findall(r"^(\w+): (.+)$", done.stdout, re.MULTILINE))
        assert groups <= set(listed)
        losses = {path.stem for path in (ROOT / "conf" / "loss").glob("*.yaml")}
        assert listed["loss"].split(", ") == sorted(losses | {"mine"})
        assert "--cfg job" in done.stdout and "--multirun" in done.stdout and "--config-dir" in done.stdout


@pytest.mark.parametrize("shell", ["bash", "zsh", "tcsh"])
def test_completion_knows_commands_and_options(capsys: pytest.CaptureFixture[str], shell: str) -> None:
    code, out, err = run(capsys, "completion", shell)
    assert code == 0 and err == ""
    assert all(command in out for command in COMMANDS) and "max-compute" in out


def test_bash_completes(tmp_path: Path) -> None:
    """Call the completion function as bash does when TAB is pressed after `scalerl fit --max`."""
    script = tmp_path / "completion.bash"
    script.write_text(scalerl("completion", "bash").stdout)
    bash_code = (
        f"source {script}; COMP_WORDS=(scalerl fit --max); COMP_CWORD=2; _shtab_scalerl; "
        'printf "%s\\n" "${COMPREPLY[@]}"'
    )
    done = subprocess.run(["bash", "-c", bash_code], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["--max-compute"], done.stderr


def test_an_undecided_ranking_exits_0(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "few.csv"
    path.write_text("recipe,seed,compute,reward\na,0,0,0.1\na,0,1,0.2\n")
    code, out, _ = run(capsys, "rank", path)
    assert code == 0 and "undecided" in out and "too_few_points" in out


@pytest.mark.parametrize("missing", ["lightning_scalerl", "hydra", "torch", "lightning"])
def test_train_names_the_missing_package(
    missing: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    monkeypatch.setattr(os, "execv", lambda *_: pytest.fail("train was started although a package is missing"))
    code, _, err = run(capsys, "train", "seed=1")
    expected = (
        f"scalerl: scalerl train: needs the package {missing}, which is not installed; pip install lightning-scalerl"
    )
    assert code == 1 and err == f"{expected} (in a checkout: pip install -e .)\n"


@pytest.mark.parametrize(
    ("name", "raw", "words"),
    [
        ("run-1.wandb", b":W&B\x01\x02\x00abc", "no metric in 1 log of W&B; give another source"),
        ("study.xlsx", b"PK\x03\x04\x14\x00", "a spreadsheet, which is not read; save its sheet as CSV"),
        ("step-00000004.ckpt", b"PK\x03\x04\x14\x00", "a checkpoint, which holds no curve; give the run's folder"),
    ],
)
def test_an_unsupported_source_names_an_alternative(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, raw: bytes, words: str
) -> None:
    (tmp_path / name).write_bytes(raw)
    code, _, err = run(capsys, "fit", tmp_path / name)
    assert code == 1 and words in err and err.count("\n") == 1, err


def test_train_replaces_its_process_with_training(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[list[str]] = []

    def execv(_path: str, arguments: list[str]) -> None:
        called.append(arguments)
        raise SystemExit(3)

    monkeypatch.setattr(os, "execv", execv)
    with pytest.raises(SystemExit) as stop:
        cli.main(["train", "--multirun", "seed=1,2", "--cfg", "job", "hydra.sweep.dir=x"])
    assert stop.value.code == 3
    assert called == [
        [
            sys.executable,
            "-m",
            "lightning_scalerl.train",
            "--multirun",
            "seed=1,2",
            "--cfg",
            "job",
            "hydra.sweep.dir=x",
        ]
    ]


@pytest.mark.slow
def test_a_closed_pipe_is_not_an_error() -> None:
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {sys.executable} -m sweeps.cli.main fit {EXAMPLE} --json | head -n 1"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stderr == "" and done.stdout == "[\n"


@pytest.mark.slow
def test_help_into_a_closed_pipe_is_not_an_error() -> None:
    command = f"set -o pipefail; {sys.executable} -m sweeps.cli.main train --help | true"
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


STORED_ROLLOUT = {
    "completion": "2", "outcome": "score", "correct": True, "reward": 1.0, "parts": {}, "extra": {},
    "versions": [[0, 1]], "tokens": 1, "forced": 0, "finish_reason": "stop",
}  # fmt: skip
STORED_PROMPT = {"prompt_id": "a", "prompt": "1+1=", "answer": "2", "difficulty": "", "source": "train"}


@pytest.mark.parametrize(
    ("filters", "title"),
    [
        ((), "step 1, prompt a (train), 1 of 2 right"),
        (("--only", "right"), "step 1, prompt a (train), 1 of 2 right; 1 of 3 shown"),
        (("--only", "wrong"), "step 1, prompt a (train), 1 of 2 right; 1 of 3 shown"),
        (("--outcome", "abstain"), "step 1, prompt a (train), 1 of 2 right; 1 of 3 shown"),
        (("--outcome", "score"), "step 1, prompt a (train), 1 of 2 right; 2 of 3 shown"),
    ],
)
def test_a_filter_keeps_the_result_of_the_whole_group(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], filters: Sequence[str], title: str
) -> None:
    wrong = {**STORED_ROLLOUT, "completion": "3", "correct": False, "reward": 0.0}
    abstention = {**STORED_ROLLOUT, "outcome": "abstain", "correct": False, "reward": None}
    write_groups(
        tmp_path, [{"step": 1, "admission": 1, **STORED_PROMPT, "rollouts": [STORED_ROLLOUT, wrong, abstention]}]
    )
    code, out, err = run(capsys, "rollouts", tmp_path, *filters)
    assert code == 0 and out.splitlines()[0] == title, (out, err)


def test_the_count_of_rollout_groups_is_singular_for_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The last line of `scalerl rollouts` is "1 group", not "1 groups"."""
    write_groups(
        tmp_path,
        [{"step": step, "admission": step, **STORED_PROMPT, "rollouts": [STORED_ROLLOUT]} for step in (1, 2)],
    )
    for step_option, summary in (((), "2 groups"), (("--step", "2"), "1 group")):
        code, out, err = run(capsys, "rollouts", tmp_path, *step_option)
        assert code == 0 and out.endswith(f"\n{summary}\n"), (out, err)


def test_with_lower_is_better_the_smallest_loss_wins(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--lower-is-better is applied when the file is read, so every command sees the negated loss."""
    lines = ["recipe,compute,loss"]
    for recipe, final_loss in (("bad", 0.6), ("good", 0.2)):
        lines += [f"{recipe},{c},{1 - (1 - final_loss) * c / (c + 3) + 0.003 * (c % 3):.4f}" for c in range(16)]
    path = tmp_path / "losses.csv"
    path.write_text("\n".join(lines) + "\n")
    code, out, err = run(capsys, "rank", path, "--y", "loss", "--lower-is-better", "--bounds", "0", "2", "--json")
    assert code == 0 and "shown as minus the metric (-loss)" in err
    ranking = json.loads(out)
    assert ranking["leader"] == "good" and ranking["margin"] == pytest.approx(0.02 * 2)
    for command, message in (
        (("fit", "--method", "scalerl-a5"), "leave out it or --lower-is-better"),
        (("plan", "--target", "0.3"), "--target 0.3: rewards are minus the metric; give -0.3"),
        (("plan", "--size", "recipe", "--budget", "9"), "--size: laws across sizes are of pass rates; give 1 - error"),
    ):
        name, *more = command
        code, _, err = run(capsys, name, path, "--y", "loss", "--lower-is-better", *more)
        assert code == 1 and message in err


@pytest.fixture
def steps(tmp_path: Path) -> Path:
    """Write a table of three recipes, one seed each, rewards by step. `base` has two rewards at step 100."""
    lines = ["recipe,step,reward", "base,100,0.9"]
    for recipe, ceiling in (("base", 0.6), ("base+loss=x", 0.7), ("base+lr=y", 0.65)):
        lines += [f"{recipe},{c}00,{0.2 + (ceiling - 0.2) / (1 + (9 / c) ** 2):.4f}" for c in range(1, 9)]
    path = tmp_path / "steps.csv"
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.mark.parametrize(
    "command",
    [
        "fit --json",
        "rank",
        "rank --json",
        "plan",
        "plan --json",
        "compare --json",
        "effects",
        pytest.param("report", marks=pytest.mark.slow),
    ],
)
def test_every_command_that_decides_prints_the_warnings_of_fit(
    command: str, steps: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def warning_lines(err: str) -> list[str]:
        return [line for line in err.splitlines() if line.startswith("warning: ")]

    code, _, err = run(capsys, "fit", steps)
    warnings = warning_lines(err)
    assert code == 0 and warnings[0] == (
        "warning: one seed per recipe: the spread between seeds is assumed (0.015), not measured; add seeds"
    )
    for recipe in ("base", "base+loss=x", "base+lr=y"):
        assert (
            f"warning: {recipe}: step counts steps, not compute: the compute of a step differs between recipes"
            in warnings
        )
    assert any("do two runs share one name?" in line for line in warnings)
    name, *words = command.split()
    output: list[str | Path] = ["-o", steps.with_name("report.html")] if name == "report" else []
    code, out, err = run(capsys, name, steps, *words, *output)
    assert code == 0 and warning_lines(err)[: len(warnings)] == warnings
    assert all(err.count(f"{line}\n") == 1 for line in warnings)
    if words:
        json.loads(out)


def test_a_race_prints_the_warnings_of_its_curves(steps: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "race", steps, "--budget", "1000", "--json")
    assert code == 0 and json.loads(out)
    assert err.count(": step counts steps, not compute") == 3 and "do two runs share one name?" in err


def test_an_undecided_ranking_ends_with_the_plan_command_of_the_same_options(
    steps: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        "--x=step", "--y=reward", "--by=recipe", "--bounds", "-1", "1", "--r0", "0.2", "--max-compute", "1e3",
        "--robust", "--margin", "0.05", r"--seed-from=-s(\d+)", "--size", "recipe", "--group", "step",
    ]  # fmt: skip
    rank_options = cli.make_parser().parse_args(["rank", str(steps), *words])
    plan_options = vars(cli.make_parser().parse_args(["plan", *source_arguments(rank_options)]))
    assert plan_options["group"] == ["recipe", "step"] and plan_options["size"] is None
    for name in ("sources", "margin", *READING, "r0", "robust", "min_compute", "max_compute"):
        assert name in ("size", "group") or plan_options[name] == getattr(rank_options, name), name
    code, out, _ = run(capsys, "rank", steps, *words[:8])
    assert code == 0 and out.startswith("undecided: ")
    last = out.splitlines()[-1]
    assert last == f"next: scalerl plan {steps} --x=step --y=reward --by=recipe --r0=0.2 --bounds -1 1"
    code, out, _ = run(capsys, *last.removeprefix("next: scalerl ").split())
    assert code == 0 and out.startswith("not settled: ")


def test_compare_leaves_out_a_recipe_without_a_forecast(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A recipe with too few points is skipped with a warning. If the user names it, compare exits with 1."""
    table = pd.read_csv(EXAMPLE)
    short_run = pd.DataFrame({"recipe": "young", "seed": 0, "compute": [0.0, 300.0], "reward": [0.3, 0.31]})
    path = tmp_path / "mixed.csv"
    pd.concat([short_run, table]).to_csv(path, index=False)
    for words, against in (([], "scalerl"), (["scalerl+loss=dapo"], "scalerl+loss=dapo")):
        assert cli.main(["compare", str(path), *words, "--json"]) == 0
        printed = capsys.readouterr()
        rows = json.loads(printed.out)["comparisons"]
        assert len(rows) == 3 and {row["other"] for row in rows} == {against}
        assert "warning: young: nothing can be read off it" in printed.err and "; left out\n" in printed.err
    assert cli.main(["compare", str(path), "young"]) == 1
    assert "young: nothing can be read off it" in capsys.readouterr().err


def test_recipes_and_sources_may_follow_options(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["compare", "a.csv", "--lower-is-better", "--bounds", "0", "3", "base", "--budget", "9", "other"]
    seen: list[object] = []
    monkeypatch.setattr("sweeps.cli.deciding_commands.compare_command", lambda options: seen.append(options.sources))
    assert cli.main(words) == 0 and seen == [["a.csv", "base", "other"]]


def test_ctrl_c_exits_with_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("sweeps.cli.fitting_commands.fit_command", interrupted)
    assert cli.main(["fit", str(EXAMPLE)]) == 130 and capsys.readouterr().err == "scalerl: interrupted\n"
