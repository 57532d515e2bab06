"""Places in which the sandbox is tested: a kind of walls and a user."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from lightning_scalerl.checks import ConfigurationError
from lightning_scalerl.sandbox import JudgeResult, ProgramResult, SandboxError
from lightning_scalerl.sandbox.walls import Protections, Walls
from tests.paths import ROOT
from tests.sandbox import worker

# A user without rights. Each xdist worker uses its own, because the kernel counts threads per user of the machine.
NOBODY = 65534 - int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
RAISED = {"ConfigurationError": ConfigurationError, "SandboxError": SandboxError}


def missing(why: str) -> None:
    """Skip the test, or fail where CI_ALL demands that everything runs."""
    (pytest.fail if os.environ.get("CI_ALL") == "1" else pytest.skip)(why)


class Place:
    """The sandbox in one mode, in this process or in a worker process."""

    def __init__(self, mode: str, process: subprocess.Popen[str] | None = None) -> None:
        self.mode, self._process = mode, process
        self.pid = os.getpid()
        if process is not None:
            assert process.stdout is not None
            self.pid = int(process.stdout.readline())
        self.uid = os.geteuid() if process is None else NOBODY

    def _ask(self, what: str, limits: dict[str, Any], **asked: Any) -> Any:
        request = {"what": what, "mode": self.mode, "limits": limits, "asked": asked}
        if self._process is None:
            return worker.perform(**request)
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        if "raised" in answer:
            kind, message = answer["raised"]
            raise RAISED[kind](message)
        reply = answer["gave"]
        if what == "protections":
            return Protections(Walls(**reply["walls"]), tuple(map(tuple, reply["obstacles"])))  # type: ignore[arg-type]
        return (JudgeResult if what in ("judge", "stdio") else ProgramResult)(**reply)

    def judge(
        self,
        program: str,
        tests: str,
        entry_point: str | None = "f",
        prelude: str = "",
        names: Sequence[str] = (),
        **limits: Any,
    ) -> JudgeResult:
        asked = {"program": program, "tests": tests, "entry_point": entry_point, "prelude": prelude, "names": names}
        result: JudgeResult = self._ask("judge", limits, **asked)
        return result

    def stdio(self, program: str, cases: list[tuple[str, str]], total_s: float = 60.0, **limits: Any) -> JudgeResult:
        result: JudgeResult = self._ask("stdio", limits, program=program, cases=cases, total_s=total_s)
        return result

    def run(self, source: str, stdin: str = "", **limits: Any) -> ProgramResult:
        result: ProgramResult = self._ask("run", limits, source=source, stdin=stdin)
        return result

    def behind(self, walls: Walls, source: str, **limits: Any) -> ProgramResult:
        """Run a program with the given walls only."""
        result: ProgramResult = self._ask("behind", limits, source=source, walls=dataclasses.asdict(walls))
        return result

    def bare(self, source: str, **limits: Any) -> ProgramResult:
        """Run a program without walls, to show that an attempt would succeed."""
        return self.behind(Walls(), source, **limits)

    @property
    def protections(self) -> Protections:
        tested: Protections = self._ask("protections", {})
        return tested


def interpreter_for_all() -> str | None:
    """Return a Python that an ordinary user can start: this one may be in root's private folder."""
    for candidate in (sys.executable, shutil.which("python3", path="/usr/local/bin:/usr/bin:/bin")):
        if candidate is not None:
            check = [candidate, "-c", "import sys, os; os.stat(sys.executable); sys.exit(sys.version_info < (3, 11))"]
            try:
                done = subprocess.run(check, user=NOBODY, group=NOBODY, extra_groups=[], cwd="/", capture_output=True)
            except OSError:
                continue
            if done.returncode == 0:
                return candidate
    return None


@contextmanager
def ordinary(mode: str) -> Iterator[Place]:
    """Yield a place in which the sandbox runs as a user without rights."""
    if os.geteuid() != 0:
        yield Place(mode)
        return
    python = interpreter_for_all()
    if python is None:
        missing("no Python 3.11 that an ordinary user can start")
    # SANDBOX_SECRET below must not be visible in the sandbox.
    environment = {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1", "PATH": os.environ["PATH"]}
    with subprocess.Popen(
        [str(python), "-m", "tests.sandbox.worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        user=NOBODY,
        group=NOBODY,
        extra_groups=[],
        cwd="/",
        env=environment | {"SANDBOX_SECRET": "not for programs"},
    ) as process:
        yield Place(mode, process)
        assert process.poll() is None, "the worker died"
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(20) == 0
