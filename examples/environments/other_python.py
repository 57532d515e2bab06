"""Environments in text form in another Python: their packages conflict with the trainer's.

verifiers needs openai below 3, for example, and vLLM needs openai 3. Install the packages in a virtual
environment. The trainer loads a subclass, which names that interpreter and the class of the environment:

    class Guess(OtherPython):
        python = "/envs/verifiers/bin/python"
        environment = "my_taskset.py:Guess"

The other interpreter needs neither this project nor torch. Prints of the environment go to standard error.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any


class OtherPython:
    """Text form of an environment that runs in a process of another Python, one for each process of the pool.

    Attributes:
        python: interpreter.
        environment: FILE.py:CLASS. A relative path is relative to the file of the subclass.
    """

    python = sys.executable
    environment = ""

    def reset(self, seed: int) -> str:
        """Make an instance there, and reset it."""
        file, _, name = self.environment.rpartition(":")
        folder = Path(getattr(sys.modules.get(type(self).__module__), "__file__", None) or ".").parent
        self._process = _process(self.python, str(folder / file), name)
        text: str = _call(self._process, "reset", seed)
        return text

    def step(self, text: str) -> tuple[str, float | None, bool, bool, dict[str, Any]]:
        """Pass a turn on."""
        answer, reward, terminated, truncated, info = _call(self._process, "step", text)
        return answer, reward, terminated, truncated, info


@cache
def _process(python: str, file: str, name: str) -> subprocess.Popen[str]:
    """Start the other Python. It ends with this process, which closes the pipe, or is killed with its group."""
    return subprocess.Popen([python, __file__, file, name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _call(process: subprocess.Popen[str], method: str, argument: Any) -> Any:
    """Call a method there and return its result.

    Raises:
        RuntimeError: it has raised an exception, or the process has ended.
    """
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(json.dumps([method, argument]) + "\n")
    process.stdin.flush()
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"the other Python has ended with exit code {process.wait()}")
    answer = json.loads(line)
    if "error" in answer:
        raise RuntimeError(answer["error"])
    return answer["value"]


def _serve(file: str, name: str) -> None:
    """Answer requests until the other end of the pipe is closed."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # prints would be read as answers
    sys.path.insert(0, str(Path(file).parent))
    made = getattr(import_module(Path(file).stem), name)
    instance: Any = None
    for line in sys.stdin:
        method, argument = json.loads(line)
        try:
            if method == "reset":
                random.seed(argument)
                instance = made()
                value = instance.reset(seed=argument)
            else:
                value = instance.step(argument)
            answer = json.dumps({"value": value}, default=float)
        except Exception as error:
            answer = json.dumps({"error": f"{type(error).__name__}: {error}"})
        answers.write(answer + "\n")
        answers.flush()


if __name__ == "__main__":
    _serve(sys.argv[1], sys.argv[2])
