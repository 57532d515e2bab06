"""Test that the commands in sweeps/SKILL.md work, and that it lists every exit code, state and verdict."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lightning_scalerl.train import EXIT_CTRL_C, EXIT_INTERRUPTED
from sweeps.decide import keep_discard, pairwise
from sweeps.fit import verdict
from sweeps.launch.status import STATES
from sweeps.run.journal import find_runs
from tests import light
from tests.paths import ROOT
from tests.place import PATIENCE_S, deterministic, lines

PAGE = ROOT / "sweeps" / "SKILL.md"
# A short form of the demo: two of its recipes, 12 steps, members that do not train, no MLflow.
SHORT = [
    'hydra.sweeper.rows=[[],["kl=fixed","kl.coefficient=0.2"]]',
    "++task.verifier=tests.place:odd_digits",
    "batch.prompts=2",
    "batch.completions=4",
    "budget.steps=12",
    "checkpoint.every_n_steps=3",
    "evaluation.every_n_steps=3",
    "mlflow.uri=null",
    "launch.max_parallel=2",
]
COMPARISON_OUTCOMES = (pairwise.HIGHER, pairwise.LOWER, pairwise.SAME, pairwise.UNDECIDED)


def blocks(heading: str) -> list[str]:
    """Return the bash blocks below a heading of the page."""
    (section,) = re.findall(rf"^## {heading}$(.*?)(?=^## |\Z)", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    return re.findall(r"^```bash\n(.*?)^```", section, re.MULTILINE | re.DOTALL)


class Assistant:
    """Follow the page in a new folder. Each block runs in a new shell, as coding assistants run it."""

    def __init__(self, folder: Path, more: list[str]) -> None:
        self.folder = folder
        programs = folder / "bin"
        programs.mkdir()
        # The `scalerl` on this PATH adds the overrides of SHORT to `train`, so the page's commands run unchanged.
        short = " ".join(f"'{word}'" for word in more)
        command = f'exec {sys.executable} -m sweeps.cli.main "$@"'
        self._program("scalerl", f'[ "$1" = train ] && set -- "$@" {short}\n{command}')
        self._program("python3", f'exec {sys.executable} "$@"')
        self._program("sleep", f"exec {sys.executable} -c 'import time; time.sleep(0.1)'")
        self.environment = {
            **os.environ,
            "PATH": f"{programs}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "SCALERL_CACHE": str(folder / "cache"),
            "OMP_NUM_THREADS": "1",
        }

    def _program(self, name: str, text: str) -> None:
        path = self.folder / "bin" / name
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)

    def follow(self, heading: str, **environment: str) -> str:
        """Run the blocks below a heading and return their standard output."""
        output = ""
        for block in blocks(heading):
            with (self.folder / "stderr.txt").open("w+") as errors:
                done = subprocess.run(
                    ["bash", "-euo", "pipefail", "-c", block], cwd=self.folder, env=self.environment | environment,
                    stdout=subprocess.PIPE, stderr=errors, text=True, timeout=PATIENCE_S, start_new_session=True,
                )  # fmt: skip
            assert done.returncode == 0, f"{block}\n{(self.folder / 'stderr.txt').read_text()}"
            output += done.stdout
        return output

    def read(self, name: str) -> Any:
        return json.loads((self.folder / name).read_text())


@pytest.fixture
def shortened(tmp_path: Path) -> Iterator[Assistant]:
    assistant = Assistant(tmp_path, [*SHORT, *light.overrides("local")])
    yield assistant
    if alive(assistant):  # if the test failed before it killed the study
        os.killpg(os.getpgid(pid(assistant)), signal.SIGKILL)


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "nothing happened for too long"
        time.sleep(0.02)


@pytest.mark.full
def test_its_commands_launch_continue_and_read_a_study(shortened: Assistant) -> None:
    study, gate = shortened.folder / "outputs" / "mine", shortened.folder / "gate"
    shortened.follow("Launch", VERIFIER_GATE=str(gate))
    # Kill the study when both running members wait at the gate of the verifier.
    wait_for(lambda: not alive(shortened) or (len(runs := find_runs(study)) == 2 and lines(*runs) == 2 * 4))
    assert alive(shortened), (shortened.folder / "mine.log").read_text()
    os.killpg(os.getpgid(pid(shortened)), signal.SIGKILL)
    gate.touch()
    assert shortened.follow("Wait").strip() != "{'finished': 4}"

    shortened.follow("Continue a killed study")
    assert shortened.follow("Wait").strip() == "{'finished': 4}", (shortened.folder / "mine.log").read_text()
    assert {len(journal) for journal in deterministic(study).values()} == {12 + 5}

    result = shortened.follow("Read the result")
    ranking = shortened.read("rank.json")
    assert result.startswith(f"{'no winner' if ranking['undecided'] else 'decided'}: {ranking['sentence']}\n")
    assert {comparison["told"] for comparison in shortened.read("compare.json")["comparisons"]} <= set(
        COMPARISON_OUTCOMES
    )
    # Light members do not record their overrides, so these commands are only compared with plan.json.
    proposed = shortened.follow("If it is undecided").splitlines()
    assert proposed and proposed == [str(step["command"]) for step in shortened.read("plan.json")["next"]]


def pid(assistant: Assistant) -> int:
    return int((assistant.folder / "mine.pid").read_text())


def alive(assistant: Assistant) -> bool:
    state = Path(f"/proc/{pid(assistant)}/stat")
    return state.exists() and state.read_text().rpartition(")")[2].split()[0] != "Z"


def test_its_command_for_users_loops_decides(tmp_path: Path) -> None:
    assistant = Assistant(tmp_path, [])
    (tmp_path / "results.tsv").write_bytes((ROOT / "examples" / "results.tsv").read_bytes())
    assert assistant.follow("Keep or discard, in a loop of your own").startswith("keep | keep b2c3d4e: better than")


def test_it_lists_every_exit_code_state_and_verdict() -> None:
    text = PAGE.read_text()
    codes = re.findall(r"^\| (\d+) \|", text, re.MULTILINE)
    assert list(map(int, codes)) == [0, 1, 2, EXIT_INTERRUPTED, EXIT_CTRL_C]
    words = set(re.findall(r"`([^`\n]+)`", text))
    fitted = set(re.findall(r"`(\w+)`", verdict.__doc__ or ""))
    assert len(fitted) == 9
    verdicts = {keep_discard.KEEP, keep_discard.DISCARD, keep_discard.UNDECIDED}
    assert {*STATES, *fitted, *COMPARISON_OUTCOMES, *verdicts} <= words
