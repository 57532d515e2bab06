"""Tests of members that are commands: journal, resume, stop, and every way to end unfinished."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from sweeps.command.metrics import Source, SourceMetrics
from sweeps.command.runner import CommandFailedError, CommandKilledError, run_member
from sweeps.errors import UserError
from sweeps.run.activity import HUNG_CODE
from sweeps.run.interruption import RunInterruptedError, ask_to_stop, clear_stop_request, interruption
from sweeps.run.progress import is_done
from tests.paths import ROOT
from tests.sweeps.command.toy import (
    SCRIPT,
    commands_of,
    lines,
    planned,
    steps_of,
    view,
    wait_until,
    write_study,
    written,
)
from tests.sweeps.test_process import gone

# First lines of the scripts below: `given` holds the options of the command line.
HEAD = "import json, os, sys, time\ngiven = dict(word[2:].split('=', 1) for word in sys.argv[1:])\n"
WAITING = "python -S train.py --steps={steps} --seed={seed} --out={run_dir} --loss={loss} --wait=17"


@pytest.fixture(autouse=True)
def clear_interruption() -> None:
    interruption.clear()


def log_of(steps: str, row: str, after: str = "") -> str:
    """Return a script that logs a row at each step. `steps` and `row` are Python expressions."""
    return f"{HEAD}for step in {steps}:\n    print(json.dumps({row}), flush=True)\n{after}"


def started(run_dir: Path) -> subprocess.Popen[bytes]:
    """Start a member in a new process."""
    code = f"from pathlib import Path; from sweeps.command.runner import run_member; run_member(Path({str(run_dir)!r}))"
    with (run_dir / "log.txt").open("ab") as log:
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        return subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=log, stderr=log)


def failure(run_dir: Path, kind: type[UserError] = CommandFailedError) -> str:
    """Run a member that fails. Returns the reason, after checking that it is one line and in the journal."""
    with pytest.raises(kind) as caught:
        run_member(run_dir)
    reason = str(caught.value)
    assert "\n" not in reason
    assert (view(run_dir).status, view(run_dir).reason) == ("failed", reason)
    return reason


# --- done ---------------------------------------------------------------------------------------------------------


def test_steps_are_recorded_with_compute_and_evaluations_with_reward(tmp_path: Path) -> None:
    spec, run_dir = written(write_study(tmp_path, metrics={"reward": {"math": "eval_reward"}, "keep": ["tokens"]}))
    run_member(run_dir)
    assert is_done(run_dir, 30, spec.run)
    journal_view = view(run_dir)
    assert journal_view.header["axis"] == "compute/tokens" and journal_view.header["reward_is"] == {
        "math": "eval_reward"
    }
    assert steps_of(run_dir) == list(range(1, 31)) and steps_of(run_dir, "eval") == [5, 10, 15, 20, 25, 30]
    assert all(record.metrics["compute/tokens"] == 100 * record.step for record in journal_view.records)
    assert journal_view.of_kind("train")[0].metrics["train/tokens"] == 100
    assert journal_view.of_kind("eval")[-1].metrics["eval/math/pass_rate"] == pytest.approx(0.5 * 30 / 40)
    assert json.loads((run_dir / "semantics.json").read_text())["compute"]["is"] == "tokens: tokens"
    lines_before = lines(run_dir)
    run_member(run_dir)  # the second run has nothing to do
    assert lines(run_dir) == lines_before


SOURCES = {
    "out.jsonl": "print(json.dumps(row), file=handle)",
    "out.csv": "print('step,tokens,eval_reward' if step == 1 else '', file=handle) if step == 1 else None\n"
    "    print(f\"{step},{row['tokens']},{row.get('eval_reward', '')}\", file=handle)",
}


@pytest.mark.parametrize("name", SOURCES)
def test_a_metrics_file_is_followed(tmp_path: Path, name: str) -> None:
    script = (
        f"{HEAD}handle = open(os.path.join(given['out'], '{name}'), 'a', buffering=1)\n"
        "for step in range(1, 31):\n    row = {'step': step, 'tokens': 100 * step}\n"
        f"    if step % 5 == 0: row['eval_reward'] = step / 100\n    {SOURCES[name]}\n"
    )
    metrics = {"source": f"{{run_dir}}/{name}", "reward": "eval_reward"}
    _, run_dir = written(write_study(tmp_path, script, metrics=metrics))
    run_member(run_dir)
    assert steps_of(run_dir) == list(range(1, 31)) and steps_of(run_dir, "eval") == [5, 10, 15, 20, 25, 30]


def test_the_newest_trainer_state_is_followed(tmp_path: Path) -> None:
    script = (
        f"{HEAD}history = []\nfor step in range(1, 31):\n"
        "    history.append({'step': step, 'num_tokens': 100 * step})\n"
        "    if step % 10: continue\n    history.append({'step': step, 'eval_reward': step / 100, 'eval_runtime': 1})\n"
        "    folder = os.path.join(given['out'], f'checkpoint-{step}')\n    os.makedirs(folder)\n"
        "    json.dump({'log_history': history}, open(os.path.join(folder, 'trainer_state.json'), 'w'))\n"
    )
    metrics = {"source": "{run_dir}/checkpoint-*/trainer_state.json", "reward": "eval_reward"}
    _, run_dir = written(write_study(tmp_path, script, metrics=metrics, compute={"column": "num_tokens"} | TOKENS))
    run_member(run_dir)
    assert steps_of(run_dir) == list(range(1, 31)) and steps_of(run_dir, "eval") == [10, 20, 30]


TOKENS = {"unit": "tokens"}


def test_steps_counted_from_zero_end_one_below_the_budget(tmp_path: Path) -> None:
    row = "{'step': step, 'tokens': step, 'eval_reward': 0.5}"
    spec, run_dir = written(write_study(tmp_path, log_of("range(30)", row), done={"within": 1}))
    run_member(run_dir)
    assert is_done(run_dir, 30, spec.run) and steps_of(run_dir, "eval") == list(range(30))


def test_device_hours_are_the_commands_running_time(tmp_path: Path) -> None:
    _, run_dir = written(write_study(tmp_path, compute={"unit": "device_hours", "devices": 3600}))
    run_member(run_dir)
    spent = [record.metrics["compute/device_hours"] for record in view(run_dir).of_kind("train")]
    assert spent == sorted(spent) and 0 < spent[-1] < 60  # with 3600 devices, device hours equal seconds


def test_files_are_written_and_the_environment_is_set(tmp_path: Path) -> None:
    (tmp_path / "base.json").write_text('{"loss": "{loss}", "seed": {seed}}')
    row = "{'step': step, 'tokens': json.load(open(given['config']))['seed'], 'eval_reward': float(os.environ['BEST'])}"
    line = "python -S train.py --config={run_dir}/conf/c.json --steps={steps}"
    file = write_study(
        tmp_path, log_of("range(1, 31)", row), line=line, files={"conf/c.json": "base.json"}, env={"BEST": 0.25}
    )
    _, run_dir = written(file, "seed=7")
    run_member(run_dir)
    assert {r.metrics["compute/tokens"] for r in view(run_dir).records} == {7.0}
    assert view(run_dir).of_kind("eval")[0].metrics["eval/heldout/pass_rate"] == 0.25


# --- interrupted --------------------------------------------------------------------------------------------------


def test_a_killed_member_resumes_and_has_every_step_once(tmp_path: Path) -> None:
    spec, run_dir = written(write_study(tmp_path, line=WAITING))
    member = started(run_dir)
    wait_until(lambda: lines(run_dir) > 10)
    member.kill()
    member.wait()
    wait_until(lambda: not commands_of(run_dir))
    (run_dir / "go").touch()
    run_member(run_dir)
    assert is_done(run_dir, 30, spec.run) and steps_of(run_dir) == list(range(1, 31))
    assert steps_of(run_dir, "eval") == [5, 10, 15, 20, 25, 30] and not view(run_dir).holes
    raw = (run_dir / "metrics.jsonl").read_text()
    # It resumed from the checkpoint of step 10, so later records of the first attempt are void.
    assert raw.count('"kind":"resume"') == 1 and '"step":10,"code"' in raw
    assert [r.metrics["compute/tokens"] for r in view(run_dir).of_kind("train")] == [100.0 * n for n in range(1, 31)]


def test_a_stopped_command_resumes_with_the_resume_option_and_checkpoint(tmp_path: Path) -> None:
    resume = {"add": "--from={checkpoint}", "checkpoints": "{run_dir}/state-*.json"}
    _, run_dir = written(write_study(tmp_path, line=WAITING, resume=resume))
    stopper = threading.Thread(target=lambda: (wait_until(lambda: lines(run_dir) > 10), ask_to_stop(run_dir, "enough")))
    stopper.start()
    with pytest.raises(RunInterruptedError, match=r"^enough at step 17; the command ended with killed by SIGTERM$"):
        run_member(run_dir)
    stopper.join()
    assert view(run_dir).status == "running" and view(run_dir).checkpoint_step == 10
    clear_stop_request(run_dir)
    interruption.clear()
    (run_dir / "go").touch()
    run_member(run_dir)
    attempt = json.loads((run_dir / "command.json").read_text())
    assert attempt["attempts"] == 2 and attempt["words"][-1] == f"--from={run_dir}/state-10.json"
    assert steps_of(run_dir) == list(range(1, 31))


# Ends a member as a cluster's job does, and prints how. The variable names the signal of the cluster's warning.
JOB = """
import signal
from pathlib import Path
from sweeps.command.runner import run_member
from sweeps.run.interruption import RunInterruptedError, interruption
with interruption.on_signals([signal.SIGUSR2, signal.SIGTERM]):
    try:
        run_member(Path({run_dir!r}))
    except RunInterruptedError as error:
        print("interrupted:", error, flush=True)
"""
# Starts of scripts: the command keeps the name of the signal that asks it to stop, or ignores that signal.
KEEPING = """import os, signal, sys
def keep(number, frame):
    with open(sys.argv[3].partition("=")[2] + "/asked", "a") as file:
        file.write(signal.Signals(number).name)
    os._exit(0)
signal.signal(signal.SIGINT, keep)
"""
IGNORING = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"


@pytest.mark.parametrize(
    ("start", "stop", "warning", "expected"),
    [
        ("", {}, "SIGUSR2", "the command ended with killed by SIGTERM"),
        (KEEPING, {"signal": "SIGINT"}, "SIGUSR2", "the command ended with exit code 0"),
        ("", {"signal": "SIGUSR2"}, "SIGUSR2", "the command ended with killed by SIGUSR2"),
        (
            IGNORING,
            {"within_s": 0.05},
            "SIGUSR2",
            "the command ended with killed by SIGKILL (not within 0.05 s, so it and its child processes were killed)",
        ),
        ("", {"signal": "SIGINT"}, "SIGTERM", "the command ended with killed by SIGTERM"),
    ],
)
def test_a_clusters_warning_to_every_process_asks_the_command_to_stop(
    tmp_path: Path, start: str, stop: dict[str, object], warning: str, expected: str
) -> None:
    """SLURM sends its warning to all processes of a step, also to those that no handler protects."""
    _, run_dir = written(write_study(tmp_path, start + SCRIPT, line=WAITING, stop=stop))
    with (run_dir / "log.txt").open("ab") as log:
        job = subprocess.Popen(
            [sys.executable, "-c", JOB.format(run_dir=str(run_dir))],
            env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=log, stderr=log,
        )  # fmt: skip
    wait_until(lambda: lines(run_dir) > 10)
    (command,) = commands_of(run_dir)
    guard = int(Path(f"/proc/{command}/stat").read_text().rpartition(")")[2].split()[1])
    for process in (command, guard, job.pid):
        os.kill(process, signal.Signals[warning])
    assert job.wait(60) == 0, (run_dir / "log.txt").read_text()
    assert f"interrupted: {warning} at step 17; {expected}\n" in (run_dir / "log.txt").read_text()
    assert view(run_dir).status == "running", "the run can be continued"
    if start == KEEPING:
        assert (run_dir / "asked").read_text() == "SIGINT"


def test_a_command_that_ignores_the_stop_file_is_killed(tmp_path: Path) -> None:
    stop = {"signal": None, "file": "{run_dir}/please_stop", "within_s": 0.05}
    _, run_dir = written(write_study(tmp_path, line=WAITING, stop=stop))
    ask_to_stop(run_dir, "enough")
    with pytest.raises(RunInterruptedError, match=r"\(not within 0.05 s, so it and its child processes were killed\)$"):
        run_member(run_dir)
    assert (run_dir / "please_stop").exists()


def test_a_command_that_cannot_resume_starts_anew(tmp_path: Path) -> None:
    script = log_of("range(1, 31)", "{'step': step, 'tokens': step, 'eval_reward': 0.5}")
    broken = script.replace(
        "    print", "    if step == 20 and not os.path.exists(given['out'] + '/go'): sys.exit(7)\n    print"
    )
    _, run_dir = written(write_study(tmp_path, broken, resume={"anew": True}))
    assert "ended with exit code 7 at step 19 of 30" in failure(run_dir)
    (run_dir / "go").touch()
    run_member(run_dir)
    assert (
        steps_of(run_dir) == list(range(1, 31)) and '"kind":"resume","time"' in (run_dir / "metrics.jsonl").read_text()
    )


# --- not done -----------------------------------------------------------------------------------------------------


def test_a_resume_that_restarts_at_step_1_is_refused(tmp_path: Path) -> None:
    script = log_of("range(1, 31)", "{'step': step, 'tokens': step, 'eval_reward': 0.5}")
    broken = script.replace(
        "    print", "    if step == 20 and not os.path.exists(given['out'] + '/go'): sys.exit(7)\n    print"
    )
    _, run_dir = written(write_study(tmp_path, broken))
    failure(run_dir)
    (run_dir / "go").touch()
    reason = failure(run_dir)
    assert reason.startswith(
        "command.resume: the command began again at step 1, but the journal has steps up to 19: it"
    )
    assert steps_of(run_dir) == list(range(1, 20))


def test_a_missing_program_is_reported_as_command_line(tmp_path: Path) -> None:
    _, run_dir = written(write_study(tmp_path, line="./no-such-program {loss} {seed} {steps}"))
    with pytest.raises(UserError, match=r"^command.line: './no-such-program' cannot be started in .*No such file"):
        run_member(run_dir)


ROW = "{'step': step, 'tokens': step, 'eval_reward': 0.5}"
ENDS = {
    "no_metrics": (
        HEAD,
        r"^command.metrics.source: the command ended with exit code 0, but standard output holds no m",
    ),
    "elsewhere": (
        f"{HEAD}if os.fork(): sys.exit(0)\nos.setsid()\ntime.sleep(600)\n",
        r"^command.metrics.source: the command ended with exit code 0 \(1 process was left behind and ended; the "
        "command must stay in the foreground",
    ),
    "too_early": (log_of("range(1, 21)", ROW), r"^budget.steps: the command ended with exit code 0 at step 20 of 30;"),
    "exit_code": (
        log_of("range(1, 21)", ROW, "raise ValueError('no such loss')"),
        r"^command.line: python ended with exit code 1 at step 20 of 30: ValueError: no such loss; its output is in",
    ),
    "no_reward": (
        log_of("range(1, 31)", "{'step': step, 'tokens': step, 'reward': 0}"),
        r"^command.metrics.reward: no column eval_reward in standard output; found step, tokens, reward; name one",
    ),
    "no_compute": (
        log_of("range(1, 31)", "{'step': step, 'eval_reward': 0}"),
        r"^command.compute.column: no column tokens in standard output; found step, eval_reward; name one",
    ),
    "no_step": (
        log_of("range(1, 31)", "{'it': step, 'eval_reward': 0}"),
        r"^command.metrics.source: standard output: no column of steps; found it",
    ),
    "reward_ends": (
        log_of("range(1, 31)", "{'step': step, 'tokens': 1} | ({'eval_reward': 0} if step % 2 and step < 12 else {})"),
        r"^command.metrics.reward: eval_reward was last logged at step 11 of 30, but every 2 steps before "
        "that; find out why",
    ),
    "reward_logged_once": (
        log_of("range(1, 31)", "{'step': step, 'tokens': 1, 'eval_reward': 0.5 if step == 1 else None}"),
        r"^command.metrics.reward: eval_reward was logged only once, at step 1 of 30; "
        "find out why the command no longer logs it; found step, tokens, eval_reward;",
    ),
    "compute_ends": (
        log_of("range(1, 31)", "{'step': step, 'tokens': step if step < 9 else None, 'eval_reward': 0.5}"),
        r"^command.compute.column: tokens was last logged at step 8 of 30, but every 1 steps before that; find out",
    ),
    "compute_is_text": (
        log_of("range(1, 31)", "{'step': step, 'tokens': 'many', 'eval_reward': 0.5}"),
        r"^command.compute.column: tokens in standard output has no finite number up to step 30; found step, tokens, ",
    ),
    **{
        f"reward_is_{value}": (
            log_of("range(1, 31)", f"{{'step': step, 'tokens': step, 'eval_reward': {value}}}"),
            r"^command.metrics.reward: eval_reward in standard output has no finite number up to step 30; found step, "
            "tokens, eval_reward; name a column with numbers",
        )
        for value in ("None", "True", "'high'", "[0.5]", "float('inf')")
    },
    "tokens_fall": (
        log_of("range(1, 31)", "{'step': step, 'tokens': 100 - step, 'eval_reward': 0}"),
        r"^command.compute.column: tokens in standard output went back at step 2: it counts one attempt only",
    ),
}


@pytest.mark.parametrize("name", ENDS)
def test_an_unfinished_command_is_explained_in_one_line(
    tmp_path: Path, name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    script, message = ENDS[name]
    _, run_dir = written(write_study(tmp_path, script))
    log = os.open(run_dir / "log.txt", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    saved_stderr = os.dup(2)
    os.dup2(log, 2)  # in a member's process stderr is log.txt
    try:
        reason = failure(run_dir)
    finally:
        os.dup2(saved_stderr, 2)
        os.close(saved_stderr)
        os.close(log)
    assert re.search(message, reason), reason


def test_a_vanished_column_fails_the_member_while_the_command_runs(tmp_path: Path) -> None:
    script = (
        f"{HEAD}path = os.path.join(given['out'], 'out.csv')\n"
        "open(path, 'w').write('step,tokens,eval_reward\\n' + ''.join(f'{n},{n},0.5\\n' for n in range(1, 9)))\n"
        "while not os.path.exists(given['out'] + '/go'): time.sleep(0.005)\n"
        "open(path + '.new', 'w').write('step,tokens\\n' + ''.join(f'{n},{n}\\n' for n in range(1, 12)))\n"
        "os.rename(path + '.new', path)\ntime.sleep(600)\n"
    )
    _, run_dir = written(
        write_study(tmp_path, script, metrics={"source": "{run_dir}/out.csv", "reward": "eval_reward"})
    )
    releaser = threading.Thread(target=lambda: (wait_until(lambda: lines(run_dir) > 10), (run_dir / "go").touch()))
    releaser.start()
    reason = failure(run_dir)
    releaser.join()
    assert reason.startswith(
        f"command.metrics.reward: eval_reward was in {run_dir}/out.csv up to step 7 and is no longer there;"
    )
    assert steps_of(run_dir, "eval") == list(range(1, 8))


def test_a_hung_command_ends_the_member_and_its_child_processes(tmp_path: Path) -> None:
    file = write_study(tmp_path, log_of("range(1, 9)", ROW, "print(os.getpid(), flush=True)\ntime.sleep(600)"))
    _, run_dir = written(file, "launch.hang_min_s=12 launch.hang_factor=1.5")
    member = started(run_dir)
    assert member.wait(60) == HUNG_CODE
    assert "no sign of life for" in (log := (run_dir / "log.txt").read_text()) and "standard output: step 7" in log
    process = int((run_dir / "stdout.txt").read_text().splitlines()[-1])
    wait_until(lambda: gone(process))


def test_a_killed_command_raises_its_own_error(tmp_path: Path) -> None:
    script = log_of("range(1, 9)", ROW, "os.kill(os.getpid(), 9)")
    _, run_dir = written(write_study(tmp_path, script))
    assert "ended with killed by SIGKILL at step 8 of 30" in failure(run_dir, CommandKilledError)


def test_another_runs_metrics_are_refused(tmp_path: Path) -> None:
    file = write_study(tmp_path, metrics={"source": "mine.jsonl", "reward": "eval_reward"})
    (tmp_path / "mine.jsonl").write_text('{"step": 1, "tokens": 1, "eval_reward": 0.5}\n')
    _, run_dir = written(file)
    with pytest.raises(
        UserError, match=r"mine.jsonl holds 1 rows already, and this run has not begun: .*put \{run_dir\}"
    ):
        run_member(run_dir)


def test_another_runs_checkpoint_is_refused(tmp_path: Path) -> None:
    _, run_dir = written(write_study(tmp_path, resume={"checkpoints": "state-*.json"}))
    (tmp_path / "state-20.json").touch()
    with pytest.raises(
        UserError, match=r"^command.resume.checkpoints: .*/state-20.json is there already, and this run has not begun: "
    ):
        run_member(run_dir)


def test_a_resume_with_another_measure_of_compute_is_refused(tmp_path: Path) -> None:
    script = log_of("range(1, 21)", ROW)
    _, run_dir = written(write_study(tmp_path, script))
    failure(run_dir)
    (spec,) = planned(write_study(tmp_path, script, compute={"unit": "steps"}), f"output_dir={tmp_path}/elsewhere")
    assert spec.run == run_dir.name
    spec.write(run_dir)
    with pytest.raises(
        UserError, match=r"^command.compute: steps, .* was begun with tokens: tokens; go back to that, or"
    ):
        run_member(run_dir)


@pytest.mark.parametrize("strict", [False, True])
def test_a_changed_script_is_warned_of_or_refused(
    tmp_path: Path, strict: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    _, run_dir = written(write_study(tmp_path), f"launch.strict_code={strict}")
    (tmp_path / "train.py").write_text(SCRIPT + "\n# changed\n")
    if strict:
        with pytest.raises(UserError, match=r"^launch.strict_code: train.py has changed since the study was launched"):
            run_member(run_dir)
        return
    run_member(run_dir)
    assert "warning: train.py has changed since the study was launched" in capsys.readouterr().out


def test_a_journal_with_a_broken_line_is_repaired_from_the_metrics(tmp_path: Path) -> None:
    spec, run_dir = written(write_study(tmp_path, line=WAITING))
    member = started(run_dir)
    wait_until(lambda: lines(run_dir) > 18)
    member.kill()
    member.wait()
    wait_until(lambda: not commands_of(run_dir))
    path = run_dir / "metrics.jsonl"
    whole = path.read_bytes().split(b"\n")
    path.write_bytes(b"\n".join([*whole[:8], b"damaged", *whole[9:]]))
    (run_dir / "go").touch()
    run_member(run_dir)
    assert is_done(run_dir, 30, spec.run) and steps_of(run_dir) == list(range(1, 31))


def test_one_slow_poll_does_not_delay_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first poll that finds rows is slow, because it imports their reader.

    The next poll must not wait ten times as long, or a race would not see the member.
    """
    script = (
        f"{HEAD}def log(steps):\n    for step in steps:\n"
        "        print(json.dumps({'step': step, 'tokens': step, 'eval_reward': 0.5}), flush=True)\n"
        "def wait(name):\n    while not os.path.exists(os.path.join(given['out'], name)):\n        time.sleep(0.01)\n"
        "log(range(1, 4))\nwait('looked')\nlog(range(4, 20))\nwait('go')\nlog(range(20, 31))\n"
    )
    _, run_dir = written(write_study(tmp_path, script))
    read, slow_poll_ends = Source.read, []

    def slow_once(self: Source) -> SourceMetrics:
        source_metrics = read(self)
        if source_metrics.rows and not slow_poll_ends:
            time.sleep(1.0)
            slow_poll_ends.append(time.monotonic())
            (run_dir / "looked").touch()
        return source_metrics

    delays_s: list[float] = []

    def watch() -> None:
        wait_until(lambda: len(slow_poll_ends) > 0 and lines(run_dir) > 18)
        delays_s.append(time.monotonic() - slow_poll_ends[0])
        (run_dir / "go").touch()

    monkeypatch.setattr(Source, "read", slow_once)
    watcher = threading.Thread(target=watch)
    watcher.start()
    run_member(run_dir)
    watcher.join()
    assert delays_s[0] < 6.0, "the next poll waited too long; ten times the slow poll is 10 s"
