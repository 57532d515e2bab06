"""Environments written for TRL run unchanged and have the tools that TRL finds in them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_scalerl.environment.pool import EnvironmentPool
from lightning_scalerl.environment.protocol import Call, History, Observation, Turn
from tests.environment.environments_for_tests import Calculator, SelfSampled

HERE = Path(__file__).parent


def test_an_environment_that_draws_its_own_task() -> None:
    """TRL's form has no seed. The worker seeds `random`, so that a group shares one task and a replay repeats it."""
    pool = EnvironmentPool(SelfSampled, most=1, timeout_s=20.0)
    number = pool.open({}, seed=1)
    start = pool.wait(number)
    assert isinstance(start, Observation)
    target = int(start.texts[0].removeprefix("Count to ").removesuffix("."))
    first = Turn("", (Call("count", {"steps": target - 1}),))
    pool.act(number, first)
    answer = pool.wait(number)
    assert answer == Observation((str(target - 1),))
    pool.close(number)

    number = pool.open({}, 1, History(start, ((first, Observation((str(target - 1),))),)))
    assert pool.wait(number) == answer
    pool.act(number, Turn("", (Call("count", {"steps": 1}),)))
    assert pool.wait(number) == Observation((str(target),))
    pool.act(number, Turn("Done."))
    assert pool.wait(number) == Observation(reward=1.0, terminated=True)
    pool.close(number)
    tasks = set()
    for seed in range(5):
        number = pool.open({}, seed)
        tasks.add(str(pool.wait(number)))
        pool.close(number)
    assert len(tasks) > 1
    pool.shutdown()


@pytest.mark.full
@pytest.mark.peers
def test_tools_are_those_that_trl_finds(tmp_path: Path) -> None:
    from tests.families import QWEN2, tokenizer_of

    python = os.environ.get("PEERS_PYTHON", sys.executable)
    find = "import importlib.util as u; print(u.find_spec('trl').submodule_search_locations[0])"
    trl_location = subprocess.run([python, "-c", find], capture_output=True, text=True, check=False)
    if trl_location.returncode:
        reason = f"{python} has no trl; tests/parity/make_peer_arrays.py says how to make one, PEERS_PYTHON names it"
        (pytest.fail if os.environ.get("CI_ALL") == "1" else pytest.skip)(reason)
    tokenizer_of(QWEN2).save_pretrained(tmp_path / "tokenizer")
    template = Path(trl_location.stdout.strip()) / "chat_templates" / "qwen2_5.jinja"
    command = [python, HERE / "trl_tools.py", tmp_path / "tokenizer", template, tmp_path / "found.json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    trl_tools = json.loads((tmp_path / "found.json").read_text())
    declared = EnvironmentPool({"sums": Calculator, "count": SelfSampled}, most=1, timeout_s=20.0).declare()
    our_tools = {
        name: {"tools": list(declaration.tools), "owns_reward": declaration.owns_reward}
        for name, declaration in declared.items()
    }
    assert our_tools == trl_tools
