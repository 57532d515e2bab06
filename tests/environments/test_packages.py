"""Conversations with environments of real packages, through the adapters in examples/environments.

The packages are in their own virtual environment, because their pins conflict with vLLM's. Its Python, given by
ENVIRONMENTS_PYTHON, runs the conversations (converse.py):

    python3.11 -m venv /tmp/environments
    /tmp/environments/bin/pip install -r tests/environments/packages.txt
"""

from __future__ import annotations

import os
import pickle
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from lightning_scalerl.environment.pool import EnvironmentPool
from lightning_scalerl.environment.protocol import Call, Declared, Failure, History, Observation, Turn
from sweeps.port import free_port
from tests.environments.converse import Answer, Conversation, Request
from tests.place import PATIENCE_S

pytestmark = [pytest.mark.slow, pytest.mark.environments]

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PACKAGES = ("verifiers", "openenv", "textarena")


@pytest.fixture(scope="module")
def python() -> str:
    """The interpreter that has the packages."""
    python = os.environ.get("ENVIRONMENTS_PYTHON", sys.executable)
    probe = f"import importlib.util as u; raise SystemExit(not all(map(u.find_spec, {PACKAGES})))"
    if subprocess.run([python, "-c", probe], check=False).returncode:
        reason = f"{python} has not all of {', '.join(PACKAGES)}; ENVIRONMENTS_PYTHON names an interpreter that has"
        (pytest.fail if os.environ.get("CI_ALL") == "1" else pytest.skip)(reason)
    return python


def converse(python: str, folder: Path, request: Request) -> tuple[dict[str, Declared], list[list[Answer]]]:
    """Run the conversations in a process of the other Python."""
    request_file, answer_file = folder / "request.pkl", folder / "answer.pkl"
    request_file.write_bytes(pickle.dumps(request))
    done = subprocess.run(
        [python, HERE / "converse.py", request_file, answer_file],
        env=variables(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answer: tuple[dict[str, Declared], list[list[Answer]]] = pickle.loads(answer_file.read_bytes())
    return answer


def variables() -> dict[str, str]:
    path = os.pathsep.join(map(str, (ROOT, ROOT / "examples" / "environments", HERE)))
    return {**os.environ, "PYTHONPATH": path}


def turns(*texts: str) -> tuple[Turn, ...]:
    return tuple(map(Turn, texts))


def assert_failed(answer: Answer, kind: str, why: str) -> None:
    assert isinstance(answer, Failure) and answer.kind == kind and why in answer.why, answer


def test_a_game_of_textarena(python: str, tmp_path: Path) -> None:
    moves = turns("I begin with [10].", "[3]", "Perhaps [7]?", "[30]", "[5]", "never sent")
    conversations = [
        Conversation(moves, seed=1),
        Conversation(moves, seed=1),
        Conversation(turns("[1]", "no number", "still none"), seed=2),
        Conversation(moves[2:], seed=1, replays=(0, 2)),
        Conversation(seed=2, replays=(0, 2)),
        Conversation(turns("[down]"), seed=1, environment="lake"),
    ]
    lake = ("textarena_game:TextArenaGame", {"game": "FrozenLake-v0"})
    request = Request({"": ("textarena_game:TextArenaGame", {}), "lake": lake}, conversations)
    declared, (game, same, lost, continued, other, ice) = converse(python, tmp_path, request)
    assert (declared[""].form, declared[""].replayable, declared[""].tools) == ("text", True, ())

    start, won = game[0], game[-1]
    assert isinstance(start, Observation) and start.reward is None
    assert "guess the number between 1 and 20 within 10 turns" in start.texts[0]
    # An observation has only new messages: neither the rules nor the model's own turn.
    assert game[1:4] == [Observation((f"The target number is {hint}.",)) for hint in ("lower", "higher", "lower")]
    assert isinstance(game[4], Observation) and "outside the range" in game[4].texts[0]
    assert len(game) == 6 and isinstance(won, Observation) and won.terminated and won.reward == 1.0
    assert won.info == {"reason": "Congratulations! You guessed the correct number.", "moves": 4.0}
    assert same == game and continued == game[2:]
    assert_failed(other[0], "replay", "differs")
    # Two invalid moves end the game. Its reward is the distance of the last guess: 1 of 19.
    end = lost[-1]
    assert isinstance(end, Observation) and end.terminated and end.reward == 1 - 1 / 19
    assert str(end.info["reason"]).startswith("Invalid Move")
    assert isinstance(ice[1], Observation) and ice[1].texts[0].count("|  P  |") == 1 and not ice[1].terminated


@contextmanager
def served(python: str, folder: Path, sessions: int) -> Iterator[str]:
    """Run the server of guess_server.py and yield its address."""
    port = free_port()
    log = folder / "server.log"
    with log.open("wb") as output:
        command = [python, HERE / "guess_server.py", str(port), str(sessions)]
        server = subprocess.Popen(command, env=variables(), stdout=output, stderr=output)
    try:
        deadline = time.monotonic() + PATIENCE_S
        while True:
            assert server.poll() is None and time.monotonic() < deadline, log.read_text()
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1.0).close()
                break
            except OSError:
                time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.kill()
        server.wait()


def guess(*numbers: int) -> tuple[Turn, ...]:
    return tuple(Turn("", (Call("guess", {"number": number}),)) for number in numbers)


def test_a_server_of_openenv(python: str, tmp_path: Path) -> None:
    texts = turns("10", "ten", "15", "18", "19", "20", "never sent")
    calls = (*guess(10, 15, 18, 19, 20, 20), Turn("It is 20."))
    row = {"prompt": "Find it.", "seed": 5, "largest": 20, "a column that the server does not know": None}
    conversations = [
        Conversation(texts, seed=5),
        Conversation(texts, seed=5),
        Conversation(texts, seed=6),
        Conversation(texts[3:], seed=5, replays=(0, 3)),
        Conversation(calls, row=row, environment="tools"),
        Conversation(calls[2:], row=row, environment="tools", replays=(4, 2)),
        Conversation(calls, seed=7, environment="tools"),  # without a column `seed`, the conversation's seed is used
        Conversation(calls, seed=7, environment="tools"),
        Conversation(guess(10, 0, 15), row=row, environment="tools"),  # 0: the server crashes
        Conversation(texts),
    ]
    with served(python, tmp_path, sessions=1) as url:
        environments = {
            "": ("openenv_server:OpenEnvText", {"url": url, "field": "number"}),
            "tools": ("guess_client:GuessTools", {"url": url}),
        }
        declared, answers = converse(python, tmp_path, Request(environments, conversations))
    game, same, other, continued, tools, replayed, seeded, again, crashed, away = answers

    assert declared[""].form == "text" and declared[""].replayable and declared[""].owns_reward
    start, higher = Observation(("Guess a number from 1 to 20.",)), Observation(("Higher.",), reward=-0.125)
    assert game[:2] == [start, higher] and game[3:6] == [higher] * 3
    refused = game[2]
    assert isinstance(refused, Observation) and refused.reward is None and refused.info == {"refused": 1.0}
    assert refused.texts[0].startswith("Server error: Invalid message")
    assert game[6:] == [Observation(("Found.",), reward=1.0, terminated=True)]
    assert same == game and len(other) == 6 and continued == game[3:]

    assert declared["tools"].form == "tools" and declared["tools"].owns_reward
    (tool,) = declared["tools"].tools
    assert tool["function"]["name"] == "guess" and tool["function"]["parameters"]["required"] == ["number"]
    assert tools[:6] == [start, *[Observation(("Higher.",))] * 4, Observation(("Found.",))]
    # A tool that raises gives an error text, as in TRL. The reward is the sum over all turns.
    assert tools[6] == Observation(("error: ValueError: the episode is over",), raised=1)
    assert tools[7:] == [Observation(reward=1.0 - 4 * 0.125, terminated=True)]
    assert replayed == tools[2:] and seeded == again
    # Failures of the server give no reward and no message to the model.
    assert len(crashed) == 3
    assert_failed(crashed[-1], "died", url)
    assert_failed(away[0], "raised", "ConnectionError")


def test_a_taskset_of_verifiers(python: str, tmp_path: Path) -> None:
    script = turns("10", "15", "5", "8", "never sent")
    conversations = [
        Conversation(script, seed=3),
        Conversation(script, seed=13),  # there are ten tasks, so this is the task of seed 3
        Conversation(turns("1", "2", "3", "4", "5", "6"), seed=3),
        Conversation(script[:1], seed=3),  # closed after one turn
        Conversation(script[2:], seed=3, replays=(0, 2)),
        Conversation(seed=0, replays=(0, 2)),
        Conversation(turns("1", "two"), seed=3),
        Conversation(seed=3, replays=(0, 2), environment="once"),
    ]
    guess = {"taskset": "guess_taskset", "settings": {"largest": 20}}
    adapter = "verifiers_taskset:VerifiersTaskset"
    request = Request({"": (adapter, guess), "once": (adapter, {**guess, "replayable": False})}, conversations)
    declared, answers = converse(python, tmp_path, request)
    game, same, limited, _, continued, other, failed, once = answers

    assert declared[""].form == "text" and declared[""].replayable and declared[""].tools == ()
    start = Observation(("Answer with a number only.\n\nGuess a number from 1 to 20.",))
    lower, higher = Observation(("Lower.",)), Observation(("Higher.",))
    info = {"guesses": 4.0, "stop": "user_closed"}
    assert game == [start, lower, lower, higher, Observation(("",), reward=1.0, terminated=True, info=info)]
    assert same == game and continued == game[2:]
    # The taskset's own limit of five turns: verifiers scores the turns so far.
    info = {"guesses": 5.0, "stop": "max_turns"}
    assert limited == [start, *[higher] * 4, Observation(("",), reward=0.0, truncated=True, info=info)]
    # An error of the taskset is not a reward of 0.
    assert_failed(failed[-1], "raised", "invalid literal for int()")
    assert_failed(other[0], "replay", "differs")
    assert_failed(once[0], "replay", "cannot be replayed")


def test_a_taskset_by_another_python(python: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The trainer's Python does not have the package. It runs the conversation through another Python."""
    for folder in (HERE, ROOT / "examples" / "environments"):
        monkeypatch.syspath_prepend(folder)
    from other_python import OtherPython

    (tmp_path / "guess.py").write_text(
        f"import sys\nsys.path += {[str(HERE), str(ROOT / 'examples' / 'environments')]}\n"
        "from verifiers_taskset import VerifiersTaskset\n\n\n"
        "class Guess(VerifiersTaskset):\n    taskset = 'guess_taskset'\n"
    )

    class Guess(OtherPython):
        pass

    Guess.python, Guess.environment = python, f"{tmp_path / 'guess.py'}:Guess"
    pool = EnvironmentPool(Guess, most=1, timeout_s=240.0)
    number = pool.open({}, seed=3)
    start = Observation(("Answer with a number only.\n\nGuess a number from 1 to 100.",))
    assert pool.wait(number) == start
    pool.act(number, Turn("50"))
    assert pool.wait(number) == Observation(("Lower.",))
    history = History(start, ((Turn("50"), Observation(("Lower.",))),))
    pool.close(number)
    number = pool.open({}, 3, history)
    assert pool.wait(number) == history.exchanges[0][1]
    pool.act(number, Turn("a number"))
    assert_failed(pool.wait(number), "raised", "invalid literal for int()")
    pool.shutdown()
