"""Where the sandbox is tested: behind which walls, and as which user."""

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

# A user without rights; each worker has one of its own, since the kernel counts the threads of a user on the machine.
NOBODY = 65534 - int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
RAISED = {"ConfigurationError": ConfigurationError, "SandboxError": SandboxError}


def missing(why: str) -> None:
    """Skip; but where everything must run, that is a failure."""
    (pytest.fail if os.environ.get("CI_ALL") == "1" else pytest.skip)(why)


class Place:
    """The sandbox in one mode, in this process or in a worker's."""

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
            kind, said = answer["raised"]
            raise RAISED[kind](said)
        given = answer["gave"]
        if what == "protections":
            return Protections(Walls(**given["walls"]), tuple(map(tuple, given["obstacles"])))  # type: ignore[arg-type]
        return (JudgeResult if what in ("judge", "stdio") else ProgramResult)(**given)

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
        """With some walls only."""
        result: ProgramResult = self._ask("behind", limits, source=source, walls=dataclasses.asdict(walls))
        return result

    def bare(self, source: str, **limits: Any) -> ProgramResult:
        """Without any walls: what an escape does where nothing is in its way."""
        return self.behind(Walls(), source, **limits)

    @property
    def protections(self) -> Protections:
        found: Protections = self._ask("protections", {})
        return found


def interpreter_for_all() -> str | None:
    """A Python that an ordinary user can start: this one may lie in root's own folder."""
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
    """The sandbox as a user without any rights."""
    if os.geteuid() != 0:
        yield Place(mode)
        return
    python = interpreter_for_all()
    if python is None:
        missing("no Python 3.11 that an ordinary user can start")
    # A variable that must not be seen inside.
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
