"""Tests of verdicts: right programs pass, wrong ones fail, and a program passes by its answers only."""

# ruff: noqa: E501 (programs are easier to compare with one or two lines each)
from __future__ import annotations

import os
import secrets
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from lightning_scalerl.checks import ConfigurationError
from lightning_scalerl.sandbox import Limits, SandboxError, judge, launch, run_program
from lightning_scalerl.sandbox.judge import same_output
from lightning_scalerl.sandbox.walls import Protections, Walls
from tests.examples import every
from tests.sandbox.places import Place

TESTS = "assert f(2) == {marker!r}\nassert f(3) == {marker!r} + '3'\n"
RIGHT = "def f(x):\n    return {marker!r} + ('3' if x == 3 else '')\n"

# Programs that do not know the answer. True: the program passes if it runs in one process with the tests.
FAKES: dict[str, tuple[str, bool]] = {
    "exits": ("import sys\nsys.exit(0)", True),
    "exits at once": ("import os\nos._exit(0)", True),
    "exits when called": ("import sys\ndef f(x):\n    sys.exit(0)", True),
    "exits at once when called": ("import os\ndef f(x):\n    os._exit(0)", True),
    "raises exit in a generator": ("def f(x):\n    yield 1\n    raise SystemExit(0)", False),
    "ends by a signal": ("import os\ndef f(x):\n    os.kill(os.getpid(), 9)", False),
    "is equal to all": (
        "class Liar:\n    def __eq__(self, other):\n        return True\n    def __ne__(self, other):\n        return False\n"
        "def f(x):\n    return Liar()", True,
    ),
    "is a text that is equal to all": (
        "class Liar(str):\n    def __eq__(self, other):\n        return True\n    __hash__ = None\ndef f(x):\n    return Liar('a')", True,
    ),
    "claims to be a text": (
        "class Liar:\n    __class__ = str\n    def __eq__(self, other):\n        return True\ndef f(x):\n    return Liar()", True,
    ),
    "has a liar for a class": (
        "class M(type):\n    def __eq__(self, other):\n        return True\n    __hash__ = None\nclass f(metaclass=M):\n    def __new__(cls, x):\n"
        "        return cls", True,
    ),
    "raises what asserts raise": ("def f(x):\n    raise AssertionError()", False),
    "patches built-ins": (
        "import builtins\nclass Quiet(BaseException):\n    pass\nbuiltins.AssertionError = Quiet\nbuiltins.str = lambda *a: None\n"
        "builtins.compile = lambda *a, **k: (lambda: 0).__code__\nbuiltins.exec = lambda *a: None\nbuiltins.isinstance = lambda *a: True\n"
        "builtins.len = lambda x: 0\ndef f(x):\n    return 'wrong'", False,
    ),
    "defines check": ("def f(x):\n    return 'wrong'\ndef check(candidate):\n    return True\ndef test():\n    return True", False),
    "prints": (
        "import sys\nfor word in ('ready', 'passed', 'ok', '0' * 64, 'True'):\n    print(word, flush=True)\n    print(word, file=sys.stderr)\n"
        "def f(x):\n    print('passed')\n    return 'passed'", False,
    ),
    "writes to every descriptor": (
        "import os\ndef f(x):\n    for fd in range(256):\n        for word in (b'ready\\n', b'passed', b'0' * 64, b'\\x00' * 8, b'\\xff' * 8):\n"
        "            if fd in (0, 1, 2) or x:\n                try:\n                    os.set_blocking(fd, False)\n                    os.write(fd, word)\n"
        "                except OSError:\n                    pass\n    os._exit(0)", False,
    ),
    "closes every descriptor": ("import os\ndef f(x):\n    os.closerange(0, 256)\n    return 'wrong'", False),
    "answers with true": (
        "import os, struct\n"
        "def f(x):\n    true = b'l\\x03\\x00\\x00\\x00' + b's\\x04\\x00\\x00\\x00gave' + b'b\\x01\\x00\\x00\\x00T' + b'N'\n"
        "    for fd in range(3, 64):\n        for _ in range(5):\n            try:\n                os.set_blocking(fd, False)\n"
        "                os.write(fd, struct.pack('<I', len(true)) + true)\n            except OSError:\n                pass\n    return True", False,
    ),
    "patches what serves it": (
        "import sys, gc, types\nfor frame in (sys._getframe(1), sys._getframe(2), sys._getframe(3)):\n    for name in list(frame.f_globals):\n"
        "        if name in ('encode', '_answer', '_outcome'):\n            frame.f_globals[name] = lambda *a: b'l\\x03\\x00\\x00\\x00' + b's\\x04\\x00\\x00\\x00gave' + b'b\\x01\\x00\\x00\\x00T' + b'N'\n"
        "def f(x):\n    return True", False,
    ),
    "looks into frames": (
        "import sys\ndef f(x):\n    frame = sys._getframe()\n    while frame:\n        for held in (frame.f_locals, frame.f_globals):\n"
        "            for value in list(held.values()):\n                if 'MARK' in repr(value) and 'looks' not in repr(value):\n"
        "                    return found(repr(value), x)\n        frame = frame.f_back\n    return 'nothing'\n"
        "def found(text, x):\n    import re\n    return re.search('MARK[0-9a-f]+', text)[0] + ('3' if x == 3 else '')", False,
    ),
    "looks into all objects": (
        "import gc, re, sys\nPATTERN = 'MA' + 'RK[0-9a-f]+'\ndef f(x):\n    frame, codes = sys._getframe(), []\n    while frame:\n"
        "        codes += frame.f_code.co_consts\n        frame = frame.f_back\n    for text in [*codes, *(r for t in gc.get_objects() for r in gc.get_referents(t))]:\n"
        "        if type(text) is str and re.search(PATTERN, text):\n            return re.search(PATTERN, text)[0] + ('3' if x == 3 else '')\n    return 'nothing'", True,
    ),
    "looks into its memory and its start": (
        "import os, re, sys, ctypes\ndef f(x):\n    for path in ('/proc/self/mem', '/proc/self/cmdline', '/proc/self/environ', '/proc/1/environ', '/proc/1/cmdline'):\n"
        "        try:\n            m = re.search(b'MA' + b'RK[0-9a-f]+', open(path, 'rb').read(1 << 20))\n        except OSError:\n            continue\n"
        "        if m:\n            return m[0].decode()\n    return 'nothing'", False,
    ),
    "overwrites what it finds": (
        "import os\nfor top in ('.', '..', '/tmp', '/var/tmp', '/dev/shm'):\n    for folder, _, files in os.walk(top):\n        for name in files:\n"
        "            try:\n                open(os.path.join(folder, name), 'w').write('assert True')\n            except OSError:\n                pass\n"
        "def f(x):\n    return 'wrong'", False,
    ),
    "shadows the library": (
        "for name in ('ast', 'struct', 'os', 'unittest', 'sitecustomize'):\n    open(name + '.py', 'w').write('raise SystemExit(0)')\ndef f(x):\n    return 'wrong'", False,
    ),
    "sends back what it is sent": ("def f(*x):\n    return x[0]", False),
    "sends too much": ("def f(x):\n    return 'a' * (1 << 26)", False),
    "sends something too deep": ("def f(x):\n    y = []\n    for _ in range(100000):\n        y = [y]\n    return y", False),
    "does not define it": ("g = 5", False),
    "does not parse": ("def f(x:", False),
    "has a null byte": ("def f(x):\n    return '\0'", False),
    "is empty": ("", False),
}  # fmt: skip


@pytest.mark.parametrize("name", every(4, FAKES))
def test_programs_that_do_not_know_the_answer_fail(place: Place, name: str) -> None:
    program, fools_others = FAKES[name]
    marker = f"MARK{secrets.token_hex(8)}"
    tests = TESTS.format(marker=marker)
    result = place.judge(program, tests)
    assert not result.passed, result
    assert marker not in result.reason
    # Make sure that this program would pass if it shared a process with the tests.
    if fools_others and place.mode == "landlock":
        together = place.bare(program + "\n" + tests)
        assert together.status == "ok", together


def test_the_tests_of_the_fakes_pass_a_right_program(place: Place) -> None:
    for _ in range(3):
        marker = f"MARK{secrets.token_hex(8)}"
        assert place.judge(RIGHT.format(marker=marker), TESTS.format(marker=marker)).passed


def test_a_program_that_tampers_passes_only_by_right_answers(any_place: Place) -> None:
    program = "import builtins\nbuiltins.AssertionError = builtins.exec = builtins.compile = None\ndef f(x):\n    return x + 1"
    check_passes(any_place, program, "assert f(1) == 2")
    check_fails(any_place, program, "assert f(1) == 3")


def test_endless_programs_time_out(place: Place) -> None:
    for program in ("def f(x):\n    while True: pass", "import time\ndef f(x):\n    time.sleep(99)"):
        began = time.monotonic()
        result = place.judge(program, "assert f(1) == 1", wall_s=0.3)
        assert (result.passed, result.reason) == (False, "timeout")
        assert time.monotonic() - began < 5


def test_all_calls_share_one_time_limit(any_place: Place) -> None:
    program = "import time\ndef f(x):\n    time.sleep(0.1)\n    return x"
    assert any_place.judge(program, "for i in range(3):\n    assert f(i) == i", wall_s=8).passed
    assert any_place.judge(program, "for i in range(10):\n    assert f(i) == i", wall_s=0.5).reason == "timeout"


@pytest.mark.slow
def test_programs_that_use_too_many_resources_fail(place: Place) -> None:
    for body in (
        "    held = []\n    while True:\n        held.append(bytearray(1 << 24))",
        "    import os\n    while True:\n        os.write(1, b'x' * 65536)",
        "    x = ()\n    for _ in range(1 << 21):\n        x = (x,)\n    return hash(x)",
    ):
        began = time.monotonic()
        assert not place.judge("def f(x):\n" + body, "assert f(1) == 1", wall_s=1, memory_mib=256).passed
        assert time.monotonic() - began < 8


def test_a_program_cannot_fill_the_disk(place: Place) -> None:
    program = "def f(x):\n    n = 0\n    while True:\n        n += 1\n        open(str(n), 'wb').write(bytes(1 << 20))"
    assert place.judge(program, "f(1)", file_mib=4).reason == "disk_limit"


# The remaining tests are about tests and calls, which do not depend on the walls.


def check_passes(
    place: Place, program: str, tests: str, entry_point: str | None = "f", prelude: str = "", names: Sequence[str] = ()
) -> None:
    result = place.judge(program, tests, entry_point, prelude, names)
    assert result.passed, result


def check_fails(
    place: Place,
    program: str,
    tests: str,
    entry_point: str | None = "f",
    prelude: str = "",
    why: str = "",
    names: Sequence[str] = (),
) -> None:
    result = place.judge(program, tests, entry_point, prelude, names)
    assert not result.passed and why in result.reason, result


def test_tests_in_the_form_of_human_eval(any_place: Place) -> None:
    prelude = (
        "from typing import List\n\ndef encode(s: str):\n    return s[::-1]\n\ndef decode(s: str):\n    '''inverse'''\n"
    )
    tests = (
        "METADATA = {'author': 'x'}\n\ndef check(candidate):\n    import math\n    for word in ('abc', 'xyz'):\n"
        "        assert candidate(encode(word)) == word\n"
    )
    check_passes(any_place, "def decode(s):\n    return s[::-1]", tests, "decode", prelude)
    check_fails(any_place, "def decode(s):\n    return s", tests, "decode", prelude, "AssertionError in line 6")
    # A helper that the tests call is the data set's, even if the program defines one of that name.
    check_fails(any_place, "def encode(s):\n    return s\ndef decode(s):\n    return s", tests, "decode", prelude)


def test_tests_in_the_form_of_mbpp(any_place: Place) -> None:
    tests = "assert f(3) == 6\nassert math.isclose(f(1.5), 3.0)\nassert Counter(g('aab')) == Counter('aab')"
    check_passes(any_place, "def f(x):\n    return 2 * x\ndef g(s):\n    return s", tests, None, names=("f", "g"))
    lying = "class math:\n    isclose = lambda *a: True\nclass Counter:\n    __eq__ = lambda *a: True\n    __init__ = lambda *a: None\n"
    check_fails(
        any_place,
        lying + "def f(x):\n    return 6\ndef g(s):\n    return s",
        tests,
        None,
        why="line 2",
        names=("f", "g"),
    )
    check_fails(
        any_place,
        lying + "def f(x):\n    return 2 * x\ndef g(s):\n    return 'b'",
        tests,
        None,
        why="line 3",
        names=("f", "g"),
    )
    # A function under test may have the name of a library function.
    check_passes(any_place, "def gcd(a, b):\n    return gcd(b, a % b) if b else a", "assert gcd(12, 18) == 6", None)
    check_fails(any_place, "def gcd(a, b):\n    return 1", "assert gcd(12, 18) == 6", None)


def test_tests_in_the_form_of_leet_code(any_place: Place) -> None:
    program = (
        "class Solution:\n    def __init__(self):\n        self.calls = 0\n"
        "    def twice(self, x):\n        self.calls += 1\n        return 2 * x * self.calls\n"
    )
    for entry_point in ("Solution.twice", "Solution().twice"):
        check_passes(
            any_place,
            program,
            "def check(candidate):\n    assert candidate(2) == 4\n    assert candidate(2) == 4",
            entry_point,
        )
        check_fails(any_place, program, "assert candidate(2) == 5", entry_point)
    check_passes(
        any_place, program, "s = Solution()\nassert s.twice(2) == 4\nassert s.twice(2) == 8\nassert s.calls == 2", None
    )


def test_arguments_changed_in_place(any_place: Place) -> None:
    program = "def f(a, more=None, *rest):\n    a.sort()\n    if more:\n        more['k'] = a[0]\n        more['l'][0].append(5)\n        del more['gone']\n"
    check_passes(any_place, program, "x = y = [3, 1, 2]\nassert f(x) is None\nassert y == [1, 2, 3] and x is y")
    check_passes(
        any_place,
        program,
        "d = {'gone': 0, 'l': [[]]}\ninner = d['l'][0]\nf([2, 1], more=d)\nassert d == {'l': [[5]], 'k': 1} and inner == [5]",
    )
    check_passes(
        any_place,
        "def f(s, b):\n    s.add(3)\n    b[:] = b'xy'",
        "s, b = {1}, bytearray(b'q')\nf(s, b)\nassert s == {1, 3} and b == b'xy'",
    )
    check_passes(any_place, "def f(m):\n    m[0][1] = 9", "row = [1, 2]\nf([row])\nassert row == [1, 9]")
    check_passes(
        any_place,
        "def f(m):\n    m.append(1)\n    raise ValueError('x')",
        "m = []\ntry:\n    f(m)\nexcept ValueError:\n    pass\nassert m == [1]",
    )
    check_fails(any_place, "def f(a):\n    return sorted(a)", "x = [3, 1]\nf(x)\nassert x == [1, 3]")


def test_exceptions(any_place: Place) -> None:
    program = "class Own(Exception):\n    pass\ndef f(x):\n    if x == 5:\n        raise Own('own')\n    if x == 6:\n        raise SystemExit(0)\n    raise ValueError('bad', x)"
    tests = "try:\n    f({0})\n    assert False\nexcept {1} as error:\n    assert {2}"
    check_passes(any_place, program, tests.format(1, "ValueError", "error.args == ('bad', 1)"))
    check_fails(any_place, program, tests.format(1, "KeyError", "True"), why="ValueError")
    check_fails(any_place, program, tests.format(5, "ValueError", "True"), why="Own")
    check_passes(any_place, program, tests.format(5, "Exception", "'Own' in str(error)"))
    check_fails(any_place, program, tests.format(6, "SystemExit", "True"), why="SystemExit")
    # StopIteration in a loop of the tests would end the loop, and with it the tests.
    stops = "def f(x):\n    raise StopIteration"
    check_fails(any_place, stops, "for given in map(f, [1, 2]):\n    assert given == 2", why="StopIteration")
    check_fails(any_place, stops, "for given in iter(lambda: f(1), 0):\n    assert given == 2", why="StopIteration")


def test_a_program_that_dies_fails_even_if_the_tests_catch_everything(any_place: Place) -> None:
    tests = "for i in range(3):\n    try:\n        f(i)\n    except BaseException:\n        pass\n"
    check_passes(any_place, "def f(x):\n    raise ValueError", tests)
    check_fails(any_place, "import os\ndef f(x):\n    os._exit(0)", tests, why="ended")


def test_values_of_all_kinds(any_place: Place) -> None:
    tests = (
        "from collections import Counter\nfor v in (None, True, 0, -1, 1 << 80, 1.5, 2j, 'é', b'b', [1, [2]], (1,), {1: {2}}, frozenset([1]), range(3), list(range(100))):\n"
        "    assert f(v) == v and type(f(v)) is type(v), v\n"
        "assert type(f(True)) is bool and str(f(-0.0)) == '-0.0' and f(float('nan')) != f(float('nan'))\n"
    )
    check_passes(any_place, "def f(x):\n    return x", tests)
    check_passes(
        any_place,
        "def f(x):\n    return (i * i for i in range(x))",
        "assert list(f(3)) == [0, 1, 4] and sum(f(3)) == 5",
    )
    check_passes(
        any_place,
        "import collections\ndef f(x):\n    return collections.Counter(x)",
        "assert f('aab') == {'a': 2, 'b': 1}",
    )
    check_passes(
        any_place,
        "def f(*a, k=1, **more):\n    return [a, k, more]",
        "assert f(1, 2, k=3, z=4) == [(1, 2), 3, {'z': 4}]",
    )
    check_fails(any_place, "def f(x):\n    return [1]", "assert f(0) == (1,)")
    check_fails(any_place, "def f(x):\n    return '1'", "assert f(0) == 1")


def test_numpy_may_be_used(any_place: Place) -> None:
    pytest.importorskip("numpy")
    if any_place.run("import numpy").status != "ok":
        pytest.skip("this user's Python has no NumPy")
    check_passes(
        any_place,
        "import numpy as np\ndef f(x):\n    return np.sum(x)",
        "assert f([1, 2]) == 3\nassert np.isclose(f([0.5]), 0.5)",
    )


def test_objects_of_the_program(any_place: Place) -> None:
    program = (
        "LIMIT = 7\nclass Stack:\n    def __init__(self, *items):\n        self.items = list(items)\n    def push(self, x):\n        self.items.append(x)\n"
        "        return self\n    def top(self):\n        return self.items[-1]\n    def same(self, other):\n        return other is self\n    def __eq__(self, other):\n        return True\n"
    )
    check_passes(
        any_place,
        program,
        "s = Stack(1)\nassert s.push(2).push(3).top() == 3\nassert s.items == [1, 2, 3]\nassert s.same(s) and LIMIT == 7",
        None,
        names=("Stack", "LIMIT"),
    )
    check_fails(any_place, program, "assert Stack(1) == 1", None)
    check_fails(any_place, program, "assert Stack(1).top == 1", None)


def test_test_functions_and_test_cases_run(any_place: Place) -> None:
    functions = "def test_one():\n    assert f(1) == 2\ndef helper(x):\n    return x"
    check_passes(any_place, "def f(x):\n    return x + 1", functions)
    check_fails(any_place, "def f(x):\n    return x", functions)
    cases = "import unittest\nclass TestIt(unittest.TestCase):\n    def test_one(self):\n        self.assertEqual(f(1), 2)\n        with self.assertRaises(TypeError):\n            f('a')\n"
    check_passes(any_place, "def f(x):\n    return x + 1", cases)
    check_fails(any_place, "def f(x):\n    return 2", cases)


def test_tests_without_a_check_fail_every_program(any_place: Place) -> None:
    for tests in (
        "",
        "x = 5",
        "def check(candidate):\n    pass",
        "assert True\nimport sys\nsys.exit(0)",
        "import os\nos._exit(0)",
    ):
        check_fails(any_place, "def f(x):\n    return x", tests)


def test_faults_of_the_data_set_are_reported(any_place: Place) -> None:
    with pytest.raises(ConfigurationError, match="tests: the tests cannot be compiled: SyntaxError"):
        any_place.judge("def f(x):\n    return x", "assert f(1) ==")
    check_fails(
        any_place, "def f(x):\n    return x", "f(1)", prelude="1 / 0", why="the data set's own code: ZeroDivisionError"
    )
    check_fails(any_place, "def f(x):\n    return x", "f(object())", why="plain")


def test_names_defined_by_the_tests_override_the_programs(any_place: Place) -> None:
    lying = "def helper(x):\n    return 5\ndef e(x):\n    return 5\n"
    for definition in (
        "def helper(x):\n    return x", "from operator import pos as helper", "helper = lambda e: e", "class helper(int):\n    pass",
    ):  # fmt: skip
        check_passes(any_place, lying + "def f(x):\n    return x", f"{definition}\nassert f(3) == helper(3)")
        check_fails(any_place, lying + "def f(x):\n    return 5", f"{definition}\nassert f(3) == helper(3)")


def test_a_built_in_name_under_test(any_place: Place) -> None:
    check_passes(any_place, "def sorted(x):\n    return 'mine'", "assert sorted([1]) == 'mine'", "sorted")
    check_fails(any_place, "x = 1", "assert sorted([2, 1]) == [1, 2]", "sorted", why="does not define")


def test_standard_input_and_output(any_place: Place) -> None:
    program = "n = int(input())\nprint(sum(map(int, input().split())))\nprint(n / 3)"
    cases = [("3\n1 2 3\n", "6\n1.0\n"), ("1\n1\n", " 1 \n0.3333333")]
    assert any_place.stdio(program, cases).passed
    assert any_place.stdio(program, [*cases, ("1\n1\n", "2\n0.3333333")]).reason == "case 3: wrong output"
    assert "EOFError" in any_place.stdio(program, [("3\n", "6")]).reason
    assert any_place.stdio("print(6)\nprint(1.0)\nraise SystemExit(3)", cases[:1]).reason == "case 1: nonzero"
    assert not any_place.stdio(program, []).passed


def test_each_case_has_its_own_clock_and_all_of_them_one_together(any_place: Place) -> None:
    sleeps = "import time\ntime.sleep(float(input()))\nprint(1)"
    assert any_place.stdio(sleeps, [("0.4", "1")] * 4, wall_s=1.0).passed
    assert any_place.stdio(sleeps, [("0", "1"), ("30", "1")], wall_s=1.0).reason == "case 2: timeout"
    together = any_place.stdio(sleeps, [("0.6", "1")] * 9, wall_s=5.0, total_s=1.5)
    assert not together.passed and "timeout" in together.reason and together.seconds < 5


def test_the_output_limit_grows_with_the_expected_output(any_place: Place) -> None:
    long = "12345678 " * 4000
    assert any_place.stdio("print('12345678\\n' * 4000)", [("", long)], output_kib=8).passed
    assert any_place.stdio("print('12345678\\n' * 40000)", [("", long)], output_kib=8).reason == "case 1: output_limit"


@pytest.mark.parametrize(
    ("printed", "expected", "same"),
    [
        ("1 2\n3", "1\n2 3\n", True),
        ("1.0000001", "1", True),
        ("1.00001", "1", False),
        ("1e0", "1", True),
        ("1000000007", "1000000008", False),
        ("10000000000000000001", "10000000000000000002", False),
        ("10000000000000000001", "10000000000000000002.0", False),
        ("1234567.89", "1234567.8912", True),
        ("-1.23456789012e+20", "-1.234567890123e+20", True),
        ("1.5e20", "1.5e21", False),
        ("1000001.5", "1000000.5", False),
        ("1234567891.0", "1234567890.0", False),
        ("1234567891", "1234567890.5", False),
        ("0.501", "0.5", False),
        ("nan", "1.0", False),
        ("inf", "1e400", False),
        ("Infinity.", "inf", False),
        ("1", "1 1", False),
        ("", "1", False),
        ("yes", "YES", False),
        ("1e999999999999999999999", "1.0", False),
        ("+.5", "0.5", True),
        ("1_0.0", "10.0", False),
        ("\u0661\u0660.0", "10.0", False),
        ("\uff11.0", "1.0", False),
    ],
)
def test_same_output(printed: str, expected: str, same: bool) -> None:
    assert same_output(printed, expected) is same


def test_the_entry_point_is_a_name(any_place: Place) -> None:
    with pytest.raises(ConfigurationError, match="entry_point"):
        any_place.judge("f = 1", "f", "f; import os")


BROKEN = {
    "no bubblewrap there": Walls(bubblewrap="/nonexistent/bwrap"),
    "bubblewrap that fails": Walls(bubblewrap="/bin/false"),
    "an interpreter that fails": Walls(),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_sandbox_that_does_not_start_gives_no_verdict(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    protections = Protections(BROKEN[name])
    tmp_path.chmod(0o755)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # other tests use the default folder
    if name.startswith("an interpreter"):
        monkeypatch.setattr(launch, "_python", lambda: "/bin/false")
    with pytest.raises(SandboxError, match="does not start"):
        judge("def f(): pass", "f()", entry_point="f", limits=Limits(), protections=protections)
    with pytest.raises(SandboxError, match="does not start"):
        run_program("print(1)", "", Limits(), protections)
    assert not list(tmp_path.iterdir())


def test_a_program_that_ends_before_it_reports_its_start_gives_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    """The end may be noticed before the start was reported; then it must be checked whether the program had started."""
    monkeypatch.setattr(launch, "_listen", lambda children, *_: [child.wait() for child in children])
    with pytest.raises(SandboxError, match="does not start"):
        run_program("print(1)", "", Limits(), Protections(Walls(bubblewrap="/bin/false")))
    assert run_program("print(1)", "", Limits(), Protections(Walls())).stdout == "1\n"


@pytest.mark.parametrize("number", [signal.SIGUSR2, signal.SIGTERM])
def test_a_clusters_warning_does_not_end_programs(monkeypatch: pytest.MonkeyPatch, number: signal.Signals) -> None:
    """SLURM sends it to every process of a step. A program that it ended would count as wrong."""

    class Warned(subprocess.Popen):  # type: ignore[type-arg]
        def __init__(self, *arguments: object, **more: object) -> None:
            super().__init__(*arguments, **more)  # type: ignore[call-overload]
            os.kill(self.pid, number)

    monkeypatch.setattr(subprocess, "Popen", Warned)
    assert run_program("print(1)", "", Limits(), Protections(Walls())).stdout == "1\n"


def test_a_program_can_end_its_own_child_by_sigterm() -> None:
    source = "import os, time\nchild = os.fork()\nif child == 0: time.sleep(60)\nos.kill(child, 15)\nprint(os.waitpid(child, 0)[1])"
    assert run_program(source, "", Limits(), Protections(Walls())).stdout == "15\n"


def test_programs_are_judged_concurrently(any_place: Place) -> None:
    if any_place.pid != __import__("os").getpid():
        pytest.skip("the worker process answers one request at a time")
    verdicts: list[bool] = []

    def one(number: int) -> None:
        verdicts.append(
            any_place.judge(f"def f(x):\n    return x + {number % 2}", "assert f(1) == 2").passed == (number % 2 == 1)
        )

    threads = [threading.Thread(target=one, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert verdicts == [True] * 8


def test_descriptors_are_closed(any_place: Place) -> None:
    def open_descriptors() -> int:
        return len(list(Path(f"/proc/{any_place.pid}/fd").iterdir()))

    any_place.judge("def f(x):\n    return x", "f(1)")
    before = open_descriptors()
    for program in ("def f(x):\n    return x", "while True: pass", "import os\nos._exit(1)"):
        any_place.judge(program, "f(1)", wall_s=0.3)
        any_place.run(program, wall_s=0.3)
    assert open_descriptors() == before
