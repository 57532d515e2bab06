"""Environments in their own processes: a failure affects neither the trainer nor other conversations."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import pytest

from lightning_scalerl.checks import ConfigurationError
from lightning_scalerl.environment.pool import EnvironmentPool
from lightning_scalerl.environment.protocol import Call, Failure, History, Observation, Turn
from sweeps.process import kill_group
from tests.environment.environments_for_tests import Calculator, Formless, Obedient, Once, Undocumented, broken
from tests.examples import every


def make(factory: Any = Obedient, **settings: Any) -> EnvironmentPool:
    return EnvironmentPool(factory, **{"most": 2, "timeout_s": 5.0, "memory_gib": 2.0} | settings)


@pytest.fixture(scope="module")
def shared() -> Iterator[EnvironmentPool]:
    pool = make(timeout_s=1.0, most_characters=100)
    yield pool
    pool.shutdown()


@pytest.fixture
def pool(shared: EnvironmentPool) -> Iterator[EnvironmentPool]:
    """Two processes shared by all tests. Conversations that a failed test left open are closed."""
    yield shared
    for number in list(shared._open):
        shared.close(number)


def begin(pool: EnvironmentPool, seed: int = 1, row: dict[str, Any] | None = None) -> int:
    number = pool.open(row or {}, seed)
    assert isinstance(pool.wait(number), Observation)
    return number


def answer(pool: EnvironmentPool, number: int, text: str, *calls: Call) -> Observation | Failure:
    pool.act(number, Turn(text, calls))
    return pool.wait(number)


def observe(pool: EnvironmentPool, number: int, text: str, *calls: Call) -> Observation:
    observation = answer(pool, number, text, *calls)
    assert isinstance(observation, Observation), observation
    return observation


def test_conversations_are_independent(pool: EnvironmentPool) -> None:
    first, second = begin(pool, 1), begin(pool, 2)
    assert observe(pool, first, "a").texts == ("1.1: a",)
    assert observe(pool, second, "b").texts == ("2.1: b",)
    last = observe(pool, first, "end")
    assert last == Observation(("1.2: end",), reward=0.5, terminated=True, info={"turns": 2.0})
    pool.close(first)


@pytest.mark.parametrize(
    ("text", "kind", "why"),
    every(
        4,
        [
            ("spin", "timeout", "timed out after 1 s"),
            ("die", "died", "its process died (killed by SIGKILL); its last output: the last thing it said"),
            ("late 1.5", "timeout", "timed out"),
            ("deaf", "timeout", "timed out"),
            ("exit 0", "died", "its process died (exit code 0)"),
            ("raise not today", "raised", "ValueError: not today"),
            ("memory", "raised", "MemoryError"),
            ("shout", "timeout", "timed out"),
            ("reward nan", "answer", "returned the reward nan"),
            ("shape", "answer", "step returned 'only a text'; it must be (text, reward"),
        ],
    ),
)
def test_a_failure_ends_one_conversation_and_has_no_reward(
    pool: EnvironmentPool, text: str, kind: str, why: str
) -> None:
    good, bad = begin(pool, 1), begin(pool, 2)
    count_before = pool.counts[f"failed_{kind}"]
    failure = answer(pool, bad, text)
    assert isinstance(failure, Failure) and failure.kind == kind and why in failure.why and "\n" not in failure.why
    assert not hasattr(failure, "reward") and pool.counts[f"failed_{kind}"] == count_before + 1
    with pytest.raises(KeyError):
        pool.act(bad, Turn("more"))
    assert observe(pool, good, "a").texts == ("1.1: a",)
    next_conversation = begin(pool, 3)  # the pool still has two processes: with one less, this would wait
    assert observe(pool, next_conversation, "b").texts == ("3.1: b",)


def test_a_late_answer_is_dropped() -> None:
    """The next conversation gets the only process and its own answer."""
    pool = make(most=1, timeout_s=0.5)
    late = begin(pool, 1)
    pool.act(late, Turn("late 0.52"))
    failure = pool.wait(late)
    assert isinstance(failure, Failure) and failure.kind == "timeout"
    following = begin(pool, 2)
    time.sleep(0.1)
    assert observe(pool, following, "a").texts == ("2.1: a",) and not pool.done()
    pool.shutdown()


def test_floods_are_cut_and_prints_do_not_block(pool: EnvironmentPool) -> None:
    number = begin(pool)
    observation = observe(pool, number, "flood 1000000")
    assert observation.texts == ("y" * 100 + " [999900 characters cut]",) and observation.cut == 999900
    assert observe(pool, number, "print 300").texts == ("1.2: print 300",)  # 300 KiB: more than a pipe holds
    assert observe(pool, number, "surrogate").texts == ("?",)
    pool.close(number)


def test_a_reset_that_raises_is_a_failure(pool: EnvironmentPool) -> None:
    assert pool.wait(pool.open({}, 13)) == Failure("raised", "RuntimeError: no such level")


def test_a_process_is_reused_by_the_next_conversation_and_killed_with_its_children() -> None:
    pool = make(most=1, timeout_s=0.5)
    first = begin(pool)
    process = observe(pool, first, "pid").texts
    waiting = pool.open({}, 2)
    dropped = pool.open({}, 13)
    assert not pool.done()  # the first conversation has the only process
    pool.close(dropped)
    with pytest.raises(KeyError, match="is not open"):
        pool.wait(dropped)
    pool.close(first)
    assert pool.wait(waiting) == Observation(("level 2",))
    assert observe(pool, waiting, "pid").texts == process
    duration = f"97.{os.getpid()}"
    assert isinstance(answer(pool, waiting, f"child {duration}"), Failure)
    listed = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert f"sleep {duration}" not in listed
    assert observe(pool, begin(pool), "pid").texts != process
    assert pool.counts["failed_raised"] == 0  # seed 13 raises: the dropped conversation never began
    pool.shutdown()


def test_a_process_that_dies_between_two_turns_is_a_failure(pool: EnvironmentPool) -> None:
    number = begin(pool)
    kill_group(int(observe(pool, number, "pid").texts[0]))
    failure = answer(pool, number, "a")
    assert isinstance(failure, Failure) and failure.kind == "died"


def test_shutdown_ends_a_call() -> None:
    pool = make(timeout_s=1000.0)
    number = begin(pool)
    pool.act(number, Turn("spin"))
    time.sleep(0.3)  # let the call begin
    started = time.monotonic()
    pool.shutdown()
    assert time.monotonic() - started < 20 and not pool.counts["failed_died"]
    with pytest.raises(RuntimeError, match="closed"):
        pool.wait(number)


# --- TRL's form ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tools() -> Iterator[EnvironmentPool]:
    pool = make({"sums": Calculator, "levels": Obedient})
    yield pool
    pool.shutdown()


def test_tools_and_reward(tools: EnvironmentPool) -> None:
    number = tools.open({"environment": "sums", "answer": 7, "prompt": "3 + 4?", "hint": "Use add."}, seed=0)
    assert tools.wait(number) == Observation(("Use add.",))
    calls = [Call("add", {"a": 3, "b": 4}), Call("later", {"text": "so"}), Call("", error="error: this is no call")]
    observation = observe(tools, number, "", *calls, Call("divide", {"a": 1}))
    assert observation.texts == ("7", "so", "error: this is no call", "error: ZeroDivisionError: division by zero")
    assert (observation.malformed, observation.raised, observation.reward, observation.terminated) == (
        1,
        1,
        None,
        False,
    )
    assert observe(tools, number, "It is 7.") == Observation(reward=1.0, terminated=True)
    tools.close(number)
    assert tools.counts["malformed"] == 1 and tools.counts["raised"] == 1


def test_finishing_a_conversation_at_a_limit_asks_for_the_reward(tools: EnvironmentPool) -> None:
    number = begin(tools, row={"environment": "sums", "answer": 7})
    tools.finish(number)
    assert tools.wait(number) == Observation(reward=0.0, terminated=True)
    tools.close(number)


def test_a_row_names_its_environment(tools: EnvironmentPool) -> None:
    number = begin(tools, row={"environment": "levels"})
    tools.close(number)
    with pytest.raises(ConfigurationError, match="column environment is 'chess'; known are levels, sums"):
        tools.open({"environment": "chess"}, 0)
    with pytest.raises(ConfigurationError, match=r"no column environment, .* give each row one of levels, sums"):
        tools.open({}, 0)


def test_what_an_environment_declares() -> None:
    declared = make({"sums": Calculator, "once": Once}).declare()
    sums, once = declared["sums"], declared["once"]
    assert (once.form, once.replayable, once.seconds, once.tools) == ("text", False, 2.5, ())
    assert (sums.form, sums.replayable, sums.owns_reward) == ("tools", True, True)
    functions = {tool["function"]["name"]: tool["function"] for tool in sums.tools}
    assert sorted(functions) == ["add", "divide", "later"]
    assert functions["add"]["description"] == "Adds two numbers."
    assert functions["add"]["parameters"] == {
        "type": "object",
        "properties": {
            "a": {"type": "integer", "description": "The first number."},
            "b": {"type": "integer", "description": "The second number."},
        },
        "required": ["a", "b"],
    }


@pytest.mark.parametrize(
    ("factory", "why"),
    every(
        3,
        [
            (Formless, "Formless has neither TRL's form"),
            (broken, "it cannot be made .OSError: the service is away"),
            (Undocumented, "tool 'add' has no schema.*give each argument a type hint"),
        ],
    ),
)
def test_an_environment_that_cannot_be_used_is_refused_at_the_start(factory: Any, why: str) -> None:
    with pytest.raises(ConfigurationError, match=f"^environment: {why}"):
        make(factory).declare()


# --- replay --------------------------------------------------------------------------------------------------------


def record(pool: EnvironmentPool, *texts: str) -> History:
    number = pool.open({}, 5)
    start = pool.wait(number)
    assert isinstance(start, Observation)
    exchanges = tuple((Turn(text), observe(pool, number, text)) for text in texts)
    pool.close(number)
    return History(start, exchanges)


def test_a_replayed_conversation_continues_where_it_was(pool: EnvironmentPool) -> None:
    history = record(pool, "a", "draw")
    number = pool.open({}, 5, history)
    assert pool.wait(number) == history.exchanges[-1][1]
    assert observe(pool, number, "b").texts == ("5.3: b",)
    pool.close(number)


def test_the_timeout_of_a_replay_covers_all_its_turns(pool: EnvironmentPool) -> None:
    history = record(pool, "late 0.6", "late 0.6")
    assert pool.wait(pool.open({}, 5, history)) == history.exchanges[-1][1]


def test_a_replay_that_differs_is_a_failure(pool: EnvironmentPool) -> None:
    failure = pool.wait(pool.open({}, 5, record(pool, "a", "clock")))
    assert isinstance(failure, Failure) and failure.kind == "replay" and "its answer to turn 2 differs" in failure.why


def test_an_environment_may_declare_that_it_cannot_be_replayed() -> None:
    pool = make(Once)
    start = Observation(("level 5",))
    # A conversation without turns is not replayed.
    assert pool.wait(pool.open({}, 5, History(start))) == start
    failure = pool.wait(pool.open({}, 5, History(start, ((Turn("a"), Observation(("5.1: a",), 0.5)),))))
    assert failure == Failure("replay", "Once cannot be replayed (replayable = False)")
    pool.shutdown()
