"""A folder where studies run in tests: a small task whose rewards vary, a tiny model, and the commands to launch them.

Journals are compared bit for bit, without wall-clock times.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock

from sweeps.run.journal import JOURNAL_FILE, JournalView, find_runs, read_journal
from tests import light
from tests.forked import Forked

# The folder to import this module from. Child processes need it on PYTHONPATH to look up the verifier.
IMPORT_ROOT = Path(__file__).parents[__name__.count(".")]


STEPS = 12


PATIENCE_S = 600.0


Deterministic = list[tuple[str, int, dict[str, float]]]


# Verifier calls before a run waits for VERIFIER_GATE: it stops in its third step.
BEFORE_THE_GATE = 24

# Verifier calls by process id: a forked process starts at 0.
_calls: Counter[int] = Counter()


def odd_digits(completion: str, answer: str) -> float:
    """The task's verifier. Its rewards vary even with random text.

    `VERIFIER_S` slows each call down, so that a test can interrupt the run at a chosen moment. Where no fixed delay
    works on a busy machine, `VERIFIER_GATE` names a file for which the run waits.
    """
    _calls[os.getpid()] += 1
    time.sleep(float(os.environ.get("VERIFIER_S", "0")))
    if gate := os.environ.get("VERIFIER_GATE"):
        while _calls[os.getpid()] > BEFORE_THE_GATE and not Path(gate).exists():
            time.sleep(0.02)
    return sum(character in "13579" for character in completion) / 6


@dataclass
class Place:
    """A folder with the task's files and the model cache, in which commands run.

    Args:
        root: the folder. Several places may share it, because their files are the same.
        light: whether members of its studies are light (`tests.light`): they do not train.
    """

    root: Path
    light: bool = False

    def __post_init__(self) -> None:
        for name, count, first in (("train", 12, 10), ("heldout", 6, 50)):
            prompts = [{"prompt": f"{first + i:>4}+{7 * i:>4}=", "answer": ""} for i in range(count)]
            path = self.root / f"{name}.jsonl"
            if not path.exists():  # a run may be reading it
                path.write_text("\n".join(map(json.dumps, prompts)))

    def study(self, output: str, *more: str, cluster: str = "local") -> list[str]:
        """Return the arguments of Python that launch a study."""
        light_overrides = light.overrides(cluster) if self.light else []
        return ["-m", "lightning_scalerl.train", "--multirun", *self.overrides(output, *more), *light_overrides]

    def overrides(self, output: str, *more: str) -> list[str]:
        return [
            "model.batches=2",
            "model.width=32",
            "model.layers=1",
            "task=jsonl",
            f"task.train={self.root}/train.jsonl",
            f"task.heldout={{heldout:{self.root}/heldout.jsonl}}",
            f"task.verifier={__name__}:odd_digits",
            "verify.workers=0",
            "batch.prompts=2",
            "batch.completions=4",
            "async_mode.k=2",
            f"budget.steps={STEPS}",
            "checkpoint.every_n_steps=3",
            "evaluation.every_n_steps=3",
            "evaluation.samples=1",
            f"output_dir={self.root}/{output}",
            *more,
        ]

    def environment(self, verifier_s: float = 0.0) -> dict[str, str]:
        return {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "SCALERL_CACHE": str(self.root / "cache"),
            "PYTHONPATH": str(IMPORT_ROOT),
            "VERIFIER_S": str(verifier_s),
        }

    @contextmanager
    def command(self, arguments: Sequence[str], verifier_s: float = 0.0) -> Iterator[Forked]:
        """Run `python ARGUMENTS...` in its own process group, which is killed on exit."""
        with self._log.open("ab") as log:
            process = Forked(
                [sys.executable, *arguments],
                cwd=self.root,
                env=self.environment(verifier_s),
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        try:
            yield process
        finally:
            kill_group(process)

    @property
    def _log(self) -> Path:
        # One log per worker: another worker may run commands in the same place.
        return self.root / f"said.{os.getpid()}.txt"

    def said(self) -> str:
        return self._log.read_text(errors="replace")


def kill_group(process: Forked) -> None:
    """Kill the controller, the members and their parent process at once."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def wait_until(true: Callable[[], bool], process: Forked, patience_s: float = PATIENCE_S) -> bool:
    """Wait until `true()` holds or the process ends. Returns whether it holds."""
    deadline = time.monotonic() + patience_s
    while not true():
        if process.poll() is not None:
            return true()
        assert time.monotonic() < deadline, "nothing happened for too long"
        time.sleep(0.002)
    return True


def lines(*run_dirs: Path) -> int:
    """Return the number of journal lines written so far."""
    files = [run_dir / JOURNAL_FILE for run_dir in run_dirs]
    return sum(path.read_bytes().count(b"\n") for path in files if path.exists())


def kinds(run_dir: Path) -> Counter[str]:
    """Count journal records by kind, including superseded ones."""
    return Counter(json.loads(line)["kind"] for line in (run_dir / JOURNAL_FILE).read_bytes().splitlines())


def views(output: Path) -> dict[str, JournalView]:
    return {run_dir.name: read_journal(run_dir) for run_dir in find_runs(output)}


def deterministic(output: Path) -> dict[str, Deterministic]:
    return {run: view.deterministic() for run, view in views(output).items()}


def made_once(folder: Path, make: Callable[[], None]) -> None:
    """Call `make` in the first worker that gets here; the other workers wait until it is done."""
    with FileLock(folder.with_name(f"{folder.name}.lock")):
        marker = folder.with_name(f"{folder.name}.made")
        if not marker.exists():
            make()
            marker.touch()
