"""A place where real studies run: a small task whose rewards vary, a tiny model, and the commands.

Journals are compared as read, bit for bit, without the wall clock.
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

# From where this module has its name, here and in the processes that look up the verifier.
IMPORT_ROOT = Path(__file__).parents[__name__.count(".")]


STEPS = 12


PATIENCE_S = 600.0


Deterministic = list[tuple[str, int, dict[str, float]]]


# A run behind a gate comes so far: into its third step.
BEFORE_THE_GATE = 24

# By process: one that was forked from a test begins anew.
_calls: Counter[int] = Counter()


def odd_digits(completion: str, answer: str) -> float:
    """The task's verifier: random text already varies in it.

    `VERIFIER_S` gives the tests time to aim. Where no time is long enough on a busy machine and all shorter ones are
    too long, `VERIFIER_GATE` names a file without which the run does not go on.
    """
    _calls[os.getpid()] += 1
    time.sleep(float(os.environ.get("VERIFIER_S", "0")))
    if gate := os.environ.get("VERIFIER_GATE"):
        while _calls[os.getpid()] > BEFORE_THE_GATE and not Path(gate).exists():
            time.sleep(0.02)
    return sum(character in "13579" for character in completion) / 6


@dataclass
class Place:
    """A directory with the task's files and the model's cache, where commands are run.

    Args:
        root: the directory; several places may share it, for the files are always the same.
        light: whether members of its studies train or only do as if (`tests.light`).
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
        """Arguments of Python that launch a study."""
        own = light.overrides(cluster) if self.light else []
        return ["-m", "lightning_scalerl.train", "--multirun", *self.overrides(output, *more), *own]

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
        """`python ARGUMENTS...`, in a process group of its own; none of it outlives us."""
        with self._said.open("ab") as said:
            process = Forked(
                [sys.executable, *arguments],
                cwd=self.root,
                env=self.environment(verifier_s),
                stdout=said,
                stderr=said,
                start_new_session=True,
            )
        try:
            yield process
        finally:
            kill_group(process)

    @property
    def _said(self) -> Path:
        # Of this worker: another one may be at work in the same place.
        return self.root / f"said.{os.getpid()}.txt"

    def said(self) -> str:
        return self._said.read_text(errors="replace")


def kill_group(process: Forked) -> None:
    """Controller, members and their parent, all at once."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def wait_until(true: Callable[[], bool], process: Forked, patience_s: float = PATIENCE_S) -> bool:
    """Whether it became true before the process ended."""
    deadline = time.monotonic() + patience_s
    while not true():
        if process.poll() is not None:
            return true()
        assert time.monotonic() < deadline, "nothing happened for too long"
        time.sleep(0.002)
    return True


def lines(*run_dirs: Path) -> int:
    """Of journal, written so far."""
    files = [run_dir / JOURNAL_FILE for run_dir in run_dirs]
    return sum(path.read_bytes().count(b"\n") for path in files if path.exists())


def kinds(run_dir: Path) -> Counter[str]:
    """Records by kind, superseded ones too."""
    return Counter(json.loads(line)["kind"] for line in (run_dir / JOURNAL_FILE).read_bytes().splitlines())


def views(output: Path) -> dict[str, JournalView]:
    return {run_dir.name: read_journal(run_dir) for run_dir in find_runs(output)}


def deterministic(output: Path) -> dict[str, Deterministic]:
    return {run: view.deterministic() for run, view in views(output).items()}


def made_once(folder: Path, make: Callable[[], None]) -> None:
    """Whichever worker comes first makes it; the others wait, and find it made."""
    with FileLock(folder.with_name(f"{folder.name}.lock")):
        made = folder.with_name(f"{folder.name}.made")
        if not made.exists():
            make()
            made.touch()
