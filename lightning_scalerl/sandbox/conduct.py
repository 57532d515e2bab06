"""Runs a data set's tests: each test function, test class and doctest that they define is run once.

Runs inside the judge's sandbox (standard library only, and pytest if the tests import it). Tests that cannot be run
were refused when the row was read (`survey.py`).
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from itertools import product
from types import CoroutineType, FunctionType, SimpleNamespace
from typing import Any

# Names added to the tests' module. They start with one underscore because classes mangle names with two.
_ENTERED, _REACHED, _FAILED = "_scalerl_entered", "_scalerl_reached", "_scalerl_failed"
_CATCHES_ASSERTS = ("AssertionError", "Exception", "BaseException")


class FailedError(Exception):
    """Raised when the program has failed; the message is the reason."""


class _ProgressMarker(ast.NodeTransformer):
    """Adds calls to the tests' source that record entered test functions, reached asserts and failed asserts.

    Attributes:
        asserts: whether the tests have an assert that can fail.
        functions: name and line of each test function, by the key that is recorded when the function is entered.
    """

    def __init__(self, tree: ast.Module) -> None:
        self._catches = _catches_asserts(tree)
        self.asserts, self.functions = False, dict[str, tuple[str, int]]()

    def visit_Assert(self, node: ast.Assert) -> list[ast.stmt]:
        # `assert False` does not count as a check, because a correct program never reaches it.
        self.asserts |= not isinstance(node.test, ast.Constant)
        if not self._catches:
            # Record the failure by a call in the assert's message, which is evaluated only when the assert fails. The
            # exception alone may be lost in a thread, in `suppress` or in `gather`.
            pair = ast.Tuple(
                [_recording_call(_FAILED, str(node.lineno), node).value, node.msg or ast.Constant("")], ast.Load()
            )
            node.msg = ast.Subscript(pair, ast.Constant(1), ast.Load())
            for part in ast.walk(node.msg):
                if not hasattr(part, "lineno"):
                    ast.copy_location(part, node)
        return [_recording_call(_REACHED, "", node), node]

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        return self._function(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.AST:
        return self._function(node)

    def _function(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> ast.AST:
        self.generic_visit(node)
        if node.name.startswith("test") or node.name == "check":
            key = f"{node.name}:{node.lineno}"
            self.functions[key] = node.name, node.lineno
            index = 1 if ast.get_docstring(node, clean=False) is not None else 0
            node.body.insert(index, _recording_call(_ENTERED, key, node.body[0]))
        return node


def _catches_asserts(tree: ast.Module) -> bool:
    """Return whether the tests catch failed asserts themselves, for instance to count them."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ExceptHandler):
            exceptions = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
            if any(exception is None or getattr(exception, "id", "") in _CATCHES_ASSERTS for exception in exceptions):
                return True
        if isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) != "suppress":
            arguments = [*node.args, *(k.value for k in node.keywords)]
            if any(getattr(value, "id", "") in _CATCHES_ASSERTS for value in arguments):
                return True
    return False


def _recording_call(name: str, argument: str, position: ast.stmt) -> ast.Expr:
    call = ast.Expr(ast.Call(ast.Name(name, ast.Load()), [ast.Constant(argument)], []))
    for node in ast.walk(call):
        ast.copy_location(node, position)
    return call


class TestRun:
    """Run of the tests in their module.

    Args:
        tree: the parsed tests; calls that record progress are added to it.
        names: dictionary of the module, with names from the prelude and the program.
        candidate: the entry point, or None.
        source: source of the tests.
    """

    def __init__(self, tree: ast.Module, names: dict[str, Any], candidate: Any, source: str) -> None:
        self._tree, self._names, self._candidate = tree, names, candidate
        self._has_doctests = ">>>" in source
        self._entered: set[str] = set()
        self._assert_reached = False
        self._failures: list[str] = []
        if "unittest" in source:
            self._prepare_unittest()
        if "pytest" in source:
            self._prepare_pytest()

    def run_all(self) -> None:
        """Run all tests.

        Raises:
            FailedError: a test failed without an exception, a test function was never run, or no assert was reached.
            BaseException: any exception that a test raises.
        """
        doctests = list(self._docstrings()) if self._has_doctests else []
        marker = _ProgressMarker(self._tree)
        ended_at = max((node.lineno for node in self._tree.body), default=0)
        tree = marker.visit(self._tree)
        names_before = set(self._names)
        self._names |= {_ENTERED: self._entered.add, _REACHED: self._note_assert, _FAILED: self._note_failure}
        try:
            exec(compile(tree, "tests.py", "exec", dont_inherit=True), self._names)
        except SystemExit as error:
            # Accept an exit with success, but only in the last statement: an earlier one would skip tests.
            if error.code not in (None, 0) or self._line(error) < ended_at:
                raise
        defined = {name: value for name, value in self._names.items() if name not in names_before}
        self._run_check(defined, marker)
        self._run_functions(defined, marker)
        self._run_classes(defined, marker)
        self._run_unittest_cases()
        self._run_doctests(doctests)
        if self._failures:
            raise FailedError(self._failures[0])
        for key, (name, line) in marker.functions.items():
            if key not in self._entered:
                raise FailedError(f"{name} in line {line} of the tests was never run")
        if marker.asserts and not self._assert_reached:
            raise FailedError("no assert of the tests was reached")

    def _note_assert(self, _: str) -> None:
        self._assert_reached = True

    def _note_failure(self, line: str) -> None:
        self._failures.append(f"the assert in line {line} of the tests failed, and its error was caught")

    def _line(self, error: BaseException) -> int:
        """Return the line of the top-level statement that raised the error."""
        trace = error.__traceback__
        while trace is not None:
            if trace.tb_frame.f_code.co_filename == "tests.py":
                line = trace.tb_lineno
                return next((n.lineno for n in self._tree.body if n.lineno <= line <= (n.end_lineno or 0)), line)
            trace = trace.tb_next
        return 0

    def _was_run(self, function: Any, marker: _ProgressMarker) -> bool:
        """Return whether the tests have called this function themselves."""
        while hasattr(function, "__wrapped__"):  # like `inspect.unwrap`, whose import takes 10 ms
            function = function.__wrapped__
        code = getattr(function, "__code__", None)
        keys = [k for k, (name, _) in marker.functions.items() if code is not None and name == code.co_name]
        # The code object starts at its first decorator's line, but the key has the line of `def`: compare all lines.
        same_line = [k for k in keys if code is not None and marker.functions[k][1] in {n[2] for n in code.co_lines()}]
        return any(key in self._entered for key in same_line or keys)

    def _run_check(self, defined: Mapping[str, Any], marker: _ProgressMarker) -> None:
        check = defined.get("check")
        if self._candidate is not None and callable(check) and not self._was_run(check, marker):
            _check_result("check", check(self._candidate))

    def _run_functions(self, defined: Mapping[str, Any], marker: _ProgressMarker) -> None:
        for name, value in defined.items():
            # Run only functions that the tests define, not imported ones.
            of_tests = isinstance(value, FunctionType) and value.__module__ == "__main__"
            if name.startswith("test") and of_tests and not self._was_run(value, marker):
                _run_with_all_parameters(name, value, [])

    def _run_classes(self, defined: Mapping[str, Any], marker: _ProgressMarker) -> None:
        for name, value in defined.items():
            if name.startswith("Test") and isinstance(value, type) and value.__module__ == "__main__":
                self._run_class(value, marker)

    def _run_class(self, owner: type, marker: _ProgressMarker) -> None:
        unittest = sys.modules.get("unittest")
        if "__init__" in {n for c in owner.__mro__[:-1] for n in vars(c)} or (
            unittest and issubclass(owner, unittest.TestCase)
        ):
            return
        tests = [n for n in dir(owner) if n.startswith("test") and callable(getattr(owner, n))]
        _call_if_defined(owner, "setup_class")
        for name in tests:
            instance = owner()
            test = getattr(instance, name)
            _call_if_defined(instance, "setup_method", test)
            _run_with_all_parameters(name, test, getattr(owner, "pytestmark", []))
            _call_if_defined(instance, "teardown_method", test)
        _call_if_defined(owner, "teardown_class")
        for name, inner in list(vars(owner).items()):
            if name.startswith("Test") and isinstance(inner, type):
                self._run_class(inner, marker)

    def _prepare_unittest(self) -> None:
        """Record unittest's failures here too, because tests may ignore its results, and disable `unittest.main`."""
        import unittest

        failures = self._failures

        def recording(method: Callable[..., None]) -> Callable[..., None]:
            def note(result: Any, test: Any, *details: Any) -> None:
                if details[-1:] != (None,):  # unittest also reports subtests that succeed
                    failures.append(f"a unittest case failed: {test}")
                method(result, test, *details)

            return note

        for name in ("addFailure", "addError", "addUnexpectedSuccess", "addSubTest"):
            setattr(unittest.TestResult, name, recording(getattr(unittest.TestResult, name)))
        unittest.main = lambda *_, **__: SimpleNamespace(result=unittest.TestResult())  # type: ignore[assignment]

    def _prepare_pytest(self) -> None:
        """Disable `pytest.main`, because this class itself runs the tests that pytest would collect."""
        try:
            pytest: Any = import_module("pytest")
        except ImportError:
            return  # pytest is not installed: the tests only mention it
        pytest.main = lambda *_, **__: 0

    def _run_unittest_cases(self) -> None:
        # If the tests did not import unittest, they have no cases.
        unittest = sys.modules.get("unittest")
        if unittest is None:
            return
        result = unittest.TestResult()
        pending = [unittest.TestCase]
        while pending:
            case = pending.pop(0)
            pending += case.__subclasses__()
            if case.__module__ == "__main__":
                unittest.defaultTestLoader.loadTestsFromTestCase(case).run(result)

    def _docstrings(self) -> Iterator[str]:
        for node in ast.walk(self._tree):
            if isinstance(node, ast.Module | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                text = ast.get_docstring(node)
                if text and ">>>" in text:
                    yield text

    def _run_doctests(self, docstrings: list[str]) -> None:
        extra = self._names.get("__test__")
        docstrings += [text for text in extra.values() if isinstance(text, str)] if isinstance(extra, dict) else []
        if not docstrings:
            return
        import doctest

        runner = doctest.DocTestRunner(verbose=False)
        for text in docstrings:
            examples = doctest.DocTestParser().get_doctest(text, self._names, "doctest", "tests.py", 0)
            if runner.run(examples, out=lambda _: None).failed:
                raise FailedError("a doctest failed")
            self._assert_reached = True


def _call_if_defined(owner: Any, name: str, *arguments: Any) -> None:
    method = getattr(owner, name, None)
    if method is not None:
        argument_count = method.__code__.co_argcount - (1 if hasattr(method, "__self__") else 0)
        _check_result(name, method(*arguments[:argument_count]))


def _run_with_all_parameters(name: str, test: Callable[..., Any], marks: Any) -> None:
    """Call a test once for each combination of parameters from `pytest.mark.parametrize`, or once without any."""
    all_marks = [*marks, *getattr(test, "pytestmark", [])]
    axes = [_cases(*mark.args, **mark.kwargs) for mark in all_marks if mark.name == "parametrize"]
    for chosen in product(*axes):
        _check_result(name, test(**{key: value for case in chosen for key, value in case.items()}))


def _cases(argnames: Any, argvalues: Any, **_: Any) -> list[dict[str, Any]]:
    """Return the parameters of each case of one `pytest.mark.parametrize`, by name."""
    names = [n.strip() for n in argnames.split(",") if n.strip()] if isinstance(argnames, str) else list(argnames)
    cases = []
    for value in argvalues:
        # A case is a `pytest.param(...)` with values, a sequence (for several names), or a single value (for one name).
        values = value.values if type(value).__name__ == "ParameterSet" else value if len(names) > 1 else (value,)
        cases.append(dict(zip(names, values, strict=True)))
    return cases


def _check_result(name: str, result: Any) -> None:
    """Check a test's return value: run it if it is a coroutine, and raise `FailedError` if it is False."""
    if isinstance(result, CoroutineType):
        import asyncio

        result = asyncio.run(result)
    if type(result).__name__ in ("bool", "bool_") and not result:
        raise FailedError(f"{name} returned false")
