"""Tests of the tests that a data set defines: all of them run, or the row is refused before anything runs."""

# ruff: noqa: E501 (tests are easier to compare with a line each)
from __future__ import annotations

import pytest

from lightning_scalerl.checks import ConfigurationError
from lightning_scalerl.sandbox import unjudgeable
from tests.examples import every
from tests.sandbox.places import Place

A = "assert f(1) == 2"
CASE = "import unittest\nclass T(unittest.TestCase):\n    def test_a(self): self.assertEqual(f(1), 2)\n"

# Each passes `x + 1` and fails `0`. Those with `f(0)` at module level would pass anything if their test did not run.
RUN = {
    "coroutine": f"f(0)\nasync def test_a():\n    {A}",
    "a coroutine as check": "async def check(candidate):\n    assert candidate(1) == 2",
    "main guard": f"def test_a():\n    {A}\nif __name__ == '__main__':\n    test_a()",
    "main guard that exits": f"import sys\ndef main():\n    {A}\n    return 0\nif '__main__' == __name__:\n    sys.exit(main())",
    "pytest class": "f(0)\nclass Base:\n    def setup_method(self): self.x = 1\n    def test_a(self): assert f(self.x) == 2\nclass TestF(Base): pass",
    "parametrised": "import pytest\nf(0)\nclass TestF:\n    @pytest.mark.parametrize('y', [2])\n    @pytest.mark.parametrize(['x'], [pytest.param(1)])\n    def test_a(self, x, y): assert f(x) == y",
    "under if": f"f(0)\nif True:\n    def test_a(): {A}",
    "under try": f"f(0)\ntry:\n    import nothing\nexcept ImportError:\n    def test_a(): {A}",
    "in a function": f"def suite():\n    def test_a(): {A}\n    test_a()\nsuite()",
    "lambda": "check = lambda candidate: candidate(1) == 2",
    "a lambda that raises": "f(0)\ntest_a = lambda: f(1) == 2 or 1 / 0",
    "returned": "def test_a():\n    return f(1) == 2",
    "unittest.main": CASE + "if __name__ == '__main__':\n    unittest.main()",
    "suite, result dropped": CASE.replace("test_a", "looks") + "f(0)\nunittest.TextTestRunner().run(unittest.TestSuite([T('looks')]))",
    "a case in a function": "import unittest\nf(0)\ndef make():\n    class T(unittest.TestCase):\n        def test_a(self): self.assertEqual(f(1), 2)\nmake()",
    "doctest": "f(0)\ndef g():\n    '''\n    >>> f(1)\n    2\n    '''",
    "mentioned, not called": f"def test_a(): {A}\nnames = [test_a.__name__]\nf(0)",
    "in a thread": f"import threading\ndef go(): {A}\nt = threading.Thread(target=go); t.start(); t.join()",
    "suppressed": f"import contextlib\nwith contextlib.suppress(AssertionError):\n    {A}",
    "lent by the library": "assert f(1) == Decimal(2)",
    "an attribute of the tests' own module": "assert f(1) == 2 and __file__",
}  # fmt: skip


@pytest.mark.parametrize("name", every(4, RUN))
def test_all_tests_that_are_defined_run(any_place: Place, name: str) -> None:
    if name == "parametrised" and any_place.run("import pytest").status != "ok":
        pytest.skip("this user's Python has no pytest")
    assert any_place.judge("def f(x):\n    return x + 1", RUN[name]).passed
    lies = "def Decimal(x):\n    return 0\n"
    assert not any_place.judge(lies + "def f(x):\n    return 0", RUN[name]).passed


REFUSED = {
    f"def test_a(x): {A}\nf(0)": "takes x",
    f"f(0)\nclass TestF:\n    def test_a(self, x): {A}": "takes x",
    f"f(0)\ndef verify(): {A}": "verify in line 2 is never called",
    f"f(0)\ndef suite():\n    def test_a(): {A}\n    return test_a\nsuite()": "test_a in line 3 is never called",
    f"async def main():\n    {A}\nf(0)": "main in line 1 is never called",
    "f(0)\nverify = lambda: f(1) == 2 or 1 / 0": "a lambda in line 2 is never called",
    "f(0)\nchecks = (1 / (f(x) == 2) for x in [1])": "a generator in line 2 is never called",
    f"f(0)\ndef test_a():\n    yield 1\n    {A}": "is a generator",
    f"import pytest\n@pytest.mark.skip\ndef test_a(): {A}": "skip is not supported",
    CASE.replace("    def", "    @unittest.skipIf(1, '')\n    def"): "skipIf is not supported",
    "f(1) == 2": "compares and does nothing",
    "assert (f(1) == 2, 'no')": "asserts a tuple",
    f"try:\n    {A}\nexcept Exception:\n    print('no')": "line 2 cannot fail",
    f"def test_a(): {A}\ntry:\n    test_a()\nexcept AssertionError:\n    pass": "line 3 cannot fail",
    f"import no_such_module\n{A}": "no_such_module, which is not installed",
    "assert f(1) == int(open('cases.txt').read())": "reads cases.txt",
    "assert f(1) ==": "SyntaxError",
    "assert f(TreeNode(1)).val == 2": "TreeNode",
    "assert allclose(f(1), 2)": "allclose",
    "for x, y in CASES: assert f(x) == y": "CASES",
    "def g():\n    y = 1\n    return y\nassert f(g()) == y": "use y",
}


def test_tests_that_cannot_be_judged_are_refused_before_they_run(any_place: Place) -> None:
    for tests, why in REFUSED.items():
        assert why in (unjudgeable(tests, entry_point="f") or ""), tests
    with pytest.raises(ConfigurationError, match="tests: the tests use allclose"):
        any_place.judge("def allclose(a, b):\n    return True\ndef f(x):\n    return 0", "assert allclose(f(1), 2)")


def test_common_tests_are_not_refused() -> None:
    for tests in (
        *RUN.values(),
        "try:\n    f('a')\n    assert False\nexcept TypeError:\n    pass",
        "failed = 0\ntry:\n    assert f(1) == 2\nexcept AssertionError:\n    failed += 1\nassert failed == 0",
        "def same(a, b): assert a == b\nsame(f(1), 2)",
        "import numpy as np\ndef check(candidate):\n    assert np.isclose(candidate(1), 2)",
        "assert math.isclose(f(1), 2) and Counter([f(1)])",
        "from math import *\nassert isclose(f(1), 2)",
        "assert [f(x) for x in (1,)] == [2]",
    ):
        assert unjudgeable(tests, entry_point="f") is None, tests


def test_only_names_that_the_solution_defines_come_from_the_program(any_place: Place) -> None:
    tests = "assert f(1) == 2 and g(1) == 1"
    program = "def g(x):\n    return x\ndef f(x):\n    return g(x) + 1"
    assert any_place.judge(program, tests, names=["g"]).passed
    assert "use g" in (unjudgeable(tests, entry_point="f") or "")
    assert "which of f, g" in (unjudgeable(tests, entry_point=None) or "")
    assert unjudgeable("assert f(1) == 2", entry_point=None) is None
    assert unjudgeable("assert gcd(4, 6) == 2", entry_point=None) is None


def test_an_exception_that_the_tests_would_hide_fails_the_program(any_place: Place) -> None:
    tests = "class C:\n    @property\n    def v(self): return f(1)\nassert getattr(C(), 'v', 2) == 2"
    assert not any_place.judge("def f(x):\n    raise AttributeError", tests).passed
    loop = "for v in iter(lambda: f(1), 0): assert v == 2"
    assert any_place.judge("def f(x):\n    return 0", loop).reason == "no assert of the tests was reached"


def test_coroutines_of_the_program_can_be_awaited(any_place: Place) -> None:
    tests = "import asyncio\nassert asyncio.run(f(1)) == 2"
    assert any_place.judge("async def f(x):\n    return x + 1", tests).passed
    assert not any_place.judge("async def f(x):\n    return x", tests).passed
