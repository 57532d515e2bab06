"""Analyses a data set's tests without running them: whether they can judge programs, and where their names come from.

Standard library only. `survey` parses the source and runs nothing, so unusable rows can be refused when they are read.
A row is unusable if its tests would not run, or if a program could influence the verdict by defining a certain name.
"""

from __future__ import annotations

import ast
import builtins
import symtable
import sys
import warnings
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec

# Modules that provide names which tests use without importing them. They take precedence over the program, because a
# program that defines `isclose` could decide which results are close.
_STANDARD_MODULES = (
    "math", "collections", "itertools", "functools", "typing", "copy", "heapq", "bisect", "string", "re", "fractions",
    "decimal", "datetime",
)  # fmt: skip
_MODULE_ALIASES = {"np": "numpy", "numpy": "numpy"}
# Names that every module has.
_MODULE_NAMES = {"__name__", "__file__", "__doc__", "__builtins__", "__spec__", "__package__", "__loader__"}
# Features of pytest and unittest that keep a test from running or need pytest itself.
_UNSUPPORTED = {
    "skip", "skipif", "skipIf", "skipUnless", "skipTest", "xfail", "importorskip", "usefixtures", "pytestmark",
    "autouse", "load_tests", "FunctionTestCase",
}  # fmt: skip
_SETTINGS = {"pytestmark", "autouse"}
_FRAMEWORKS = {"pytest", "mark", "unittest", "self"}
# Prefixes of methods that a framework calls by name.
_SET_UP = ("setUp", "tearDown", "setup_", "teardown_", "asyncSetUp", "asyncTearDown", "runTest")
_CATCHES_ALL = {"AssertionError", "Exception", "BaseException"}
# Calls in a handler that only report the error.
_PRINTS = {"print", "print_exc", "warn", "info", "warning", "error", "exception", "debug", "write"}

_Function = ast.FunctionDef | ast.AsyncFunctionDef
_Scope = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)


class UnjudgeableError(Exception):
    """Raised for tests that cannot be used to judge programs; the message gives the reason."""


@dataclass(frozen=True)
class Sources:
    """Sources of the names that tests use but do not define.

    Args:
        modules: module of each name that stands for one, such as `np`.
        standard_library: module of each name from the standard library, such as `sqrt`.
        program: names to take from the program, including the first part of the entry point.
    """

    modules: Mapping[str, str] = field(default_factory=dict)
    standard_library: Mapping[str, str] = field(default_factory=dict)
    program: Collection[str] = ()


@lru_cache(maxsize=256)  # the same row is surveyed for each completion of its group
def survey(tests: str, prelude: str, entry_point: str | None, names: tuple[str, ...]) -> Sources:
    """Return the sources of the names that the tests use but do not define.

    Args:
        tests, prelude: source from the data set; the prelude runs first.
        entry_point: name of the function under test; None if it is the only name without a definition.
        names: other names that a correct program defines, such as those in the row's solution.

    Raises:
        UnjudgeableError: a test would not run, could not fail, or uses an unknown name.
    """
    tree, prelude_tree = _parse("tests", tests), _parse("prelude", prelude)
    for part in (prelude_tree, tree):
        _check_imports(part)
        _check_files(part)
    _Coverage(tree, entry_point).check()
    return _sources(tests, prelude, tree, prelude_tree, entry_point, names)


def _parse(name: str, source: str) -> ast.Module:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the user cannot fix the data set's source
            tree = ast.parse(source, f"{name}.py")
            compile(tree, f"{name}.py", "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise UnjudgeableError(f"the {name} cannot be compiled: {type(error).__name__}: {error}") from None
    return tree


def _check_imports(tree: ast.Module) -> None:
    """Refuse imports of modules that are not installed, unless they are inside a `try`."""
    guarded = {id(n) for t in ast.walk(tree) if isinstance(t, ast.Try) for n in ast.walk(t)}
    for node in ast.walk(tree):
        if id(node) in guarded or not isinstance(node, ast.Import | ast.ImportFrom):
            continue
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        else:
            modules = ["." * node.level + (node.module or "")]
        for name in modules:
            root = name.partition(".")[0]
            if not root or (root not in sys.builtin_module_names and find_spec(root) is None):
                raise UnjudgeableError(f"line {node.lineno} imports {name}, which is not installed")


def _check_files(tree: ast.Module) -> None:
    """Refuse tests that read a file without writing it, because the sandbox starts with an empty folder."""
    opened: dict[str, tuple[str, int]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "open":
            arguments = [*node.args, *(k.value for k in node.keywords if k.arg == "mode")]
            texts = [a.value for a in arguments[:2] if isinstance(a, ast.Constant) and isinstance(a.value, str)]
            if texts and texts[0] != "/dev/null":
                mode = texts[1] if len(texts) > 1 else "r"
                opened[texts[0]] = (opened.get(texts[0], ("", 0))[0] + mode, node.lineno)
    for path, (modes, line) in opened.items():
        if not set(modes) & set("wax"):
            raise UnjudgeableError(f"line {line} reads {path}, which is not there")


def defined_names(source: str) -> list[str]:
    """Return the functions, classes and variables that a module defines at top level; empty if it does not parse."""
    try:
        table = symtable.symtable(source, "solution.py", "exec")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    return [s.get_name() for s in table.get_symbols() if s.is_assigned() and not s.is_imported()]


def used_names(source: str) -> set[str]:
    """Return the names that a module uses but does not define; empty if the module does not parse."""
    try:
        return _undefined_names(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return set()


def _scopes(table: symtable.SymbolTable) -> Iterator[symtable.SymbolTable]:
    yield table
    for child in table.get_children():
        yield from _scopes(child)


def _undefined_names(source: str) -> set[str]:
    """Return the global names that a module uses but does not define."""
    top = symtable.symtable(source, "tests.py", "exec")
    names_read: set[str] = set()
    defined = {s.get_name() for s in top.get_symbols() if s.is_assigned() or s.is_imported()}
    for scope in _scopes(top):
        for symbol in scope.get_symbols():
            if scope is top or symbol.is_global():
                names_read |= {symbol.get_name()} if symbol.is_referenced() else set()
                defined |= {symbol.get_name()} if symbol.is_assigned() or symbol.is_imported() else set()
    return names_read - defined - _MODULE_NAMES


def _starred(*trees: ast.Module) -> tuple[set[str], bool]:
    """Return the names from `from module import *`, and whether any such module's names are unknown.

    Only modules in `_STANDARD_MODULES` may be imported here; others are untrusted and only imported in the sandbox.
    """
    starred: set[str] = set()
    any_unknown = False
    for node in (n for tree in trees for n in ast.walk(tree)):
        if isinstance(node, ast.ImportFrom) and node.names[0].name == "*":
            if node.module in _STANDARD_MODULES:
                module = import_module(node.module)
                starred |= set(getattr(module, "__all__", None) or (n for n in vars(module) if n[0] != "_"))
            else:
                any_unknown = True
    return starred, any_unknown


def _sources(
    tests: str,
    prelude: str,
    tree: ast.Module,
    prelude_tree: ast.Module,
    entry_point: str | None,
    names: tuple[str, ...],
) -> Sources:
    """Decide the source of each name that the tests use but do not define; see `survey`."""
    root = entry_point.partition(".")[0].removesuffix("()") if entry_point else None
    # The names under which `examine._bind_names` gives the tests the entry point.
    bound = {root, entry_point.rpartition(".")[2].removesuffix("()"), "candidate"} if root and entry_point else set()
    starred, any_unknown = _starred(tree, prelude_tree)
    from_prelude = _defined_at_top(prelude) | starred
    free = {n for n in _undefined_names(tests) if n not in from_prelude and not hasattr(builtins, n)} - bound
    from_program = free & set(names)
    free -= from_program
    # A name refers to a module only if it is always dotted, as in `string.digits`; `string` alone may be the program's.
    dotted = _only_dotted(tree)
    modules = {
        n: _MODULE_ALIASES.get(n, n) for n in free & dotted if n in sys.stdlib_module_names or n in _MODULE_ALIASES
    }
    standard_library = {n: module for n in free - set(modules) if (module := _standard_module(n)) is not None}
    missing = free - set(modules) - set(standard_library)
    program = from_program | ({root} if root else set())
    if not program and not any_unknown:
        # One of the names must be the function under test. A name of the standard library, such as `gcd`, is taken for
        # it only if there is no other candidate.
        if not missing and len(standard_library) == 1:
            missing, standard_library = set(standard_library), {}
        if len(missing) == 1:
            program, missing = missing, set()
        elif missing:
            raise UnjudgeableError(
                f"nothing says which of {_join_names(missing)} is the function under test and what the others are; "
                "give the row an entry point or a solution"
            )
    if missing and not any_unknown:
        raise UnjudgeableError(
            f"the tests use {_join_names(missing)}, which neither they nor the row's solution define, so that a "
            "program could say what is right"
        )
    return Sources(modules, standard_library, sorted(program))


def _defined_at_top(source: str) -> set[str]:
    table = symtable.symtable(source, "prelude.py", "exec")
    return {s.get_name() for s in table.get_symbols() if s.is_assigned() or s.is_imported()}


def _standard_module(name: str) -> str | None:
    return next((m for m in _STANDARD_MODULES if not name.startswith("_") and hasattr(import_module(m), name)), None)


def _only_dotted(tree: ast.Module) -> set[str]:
    """Return the names that are only used as `name.attribute`."""
    dotted = [n.value.id for n in ast.walk(tree) if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name)]
    names = [n.id for n in ast.walk(tree) if isinstance(n, ast.Name)]
    return {name for name in dotted if names.count(name) == dotted.count(name)}


def _join_names(names: Collection[str]) -> str:
    return ", ".join(sorted(names)[:5])


def _nodes_that_run(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes that run when `node` runs: all nodes inside it, except the bodies of functions."""
    pending = list(ast.iter_child_nodes(node))
    while pending:
        child = pending.pop()
        yield child
        if isinstance(child, _Function):
            pending += [*child.decorator_list, *child.args.defaults, *(d for d in child.args.kw_defaults if d)]
        elif isinstance(child, ast.Lambda):
            pending += [*child.args.defaults, *(d for d in child.args.kw_defaults if d)]
        else:
            pending += ast.iter_child_nodes(child)


class _Coverage:
    """Check of the tests' source: every part of it that could reject a program must be run.

    Code is run if it is one of these: statements at the top level, including those under a main guard; `check`, if
    there is an entry point; functions and methods whose names begin with `test`; unittest cases; and all functions that
    any of these refer to by name.
    """

    def __init__(self, tree: ast.Module, entry_point: str | None) -> None:
        self._tree, self._entry_point = tree, entry_point
        self._tested_name = entry_point.rpartition(".")[2].removesuffix("()") if entry_point else None
        self._classes = {n.name: n for n in ast.walk(tree) if isinstance(n, ast.ClassDef)}
        self._parent = {id(child): node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
        self._bodies = [n for n in ast.walk(tree) if isinstance(n, _Function | ast.Lambda | ast.GeneratorExp)]
        self._mentioned: set[str] = set()
        self._run: set[int] = set()

    def check(self) -> None:
        """Refuse tests that would not run or could not fail.

        Raises:
            UnjudgeableError: there is such a test; the error names the line.
        """
        self._refuse_what_cannot_run()
        self._find_running()
        for body in self._bodies:
            if id(body) not in self._run and self._can_fail(body):
                raise UnjudgeableError(f"{_label(body)} in line {body.lineno} is never called")
        self._refuse_what_cannot_fail()

    def _refuse_what_cannot_run(self) -> None:
        for node in ast.walk(self._tree):
            name = str(getattr(node, "name", ""))  # the name of a definition or an import
            if isinstance(node, ast.Attribute) and _last_name(node.value) in _FRAMEWORKS:
                name = node.attr
            setting = _last_name(node) if isinstance(node, ast.Name) else getattr(node, "arg", "")
            if name in _UNSUPPORTED or setting in _SETTINGS:
                raise UnjudgeableError(f"line {getattr(node, 'lineno', '?')}: {name or setting} is not supported here")
            test = isinstance(node, _Function) and _is_test(node.name)
            if test and any(isinstance(n, ast.Yield | ast.YieldFrom) for n in _nodes_that_run(node)):
                line = getattr(node, "lineno", "?")
                raise UnjudgeableError(f"{name} in line {line} is a generator, whose asserts do not run")

    def _find_running(self) -> None:
        """Find the functions that run, starting from the top level, until no more are found."""
        self._record_names(self._tree)
        while newly_run := [b for b in self._bodies if id(b) not in self._run and self._runs(b)]:
            for body in newly_run:
                self._run.add(id(body))
                self._record_names(body)

    def _record_names(self, body: ast.AST) -> None:
        """Record the names that a body refers to.

        A name does not count if only an attribute such as `__name__` is read from it, if it is a statement by itself,
        or if the body only returns it and it is the name of a test.
        """
        parts = ast.walk(body) if isinstance(body, ast.GeneratorExp) else _nodes_that_run(body)
        for node in parts:
            parent = self._parent.get(id(node))
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
                metadata = isinstance(parent, ast.Attribute) and parent.attr.startswith("__")
                unused = isinstance(parent, ast.Expr) or (isinstance(parent, ast.Return) and _is_test(node.id))
                self._mentioned |= set() if metadata or unused else {node.id}
            elif isinstance(node, ast.Attribute):
                self._mentioned.add(node.attr)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                self._mentioned.add(node.value)

    def _runs(self, body: ast.AST) -> bool:
        """Return whether a function runs, given the names that were mentioned so far."""
        parent = self._parent[id(body)]
        if not isinstance(body, _Function):
            # An anonymous function counts as run where it is written, unless it is only assigned to a name.
            if isinstance(parent, ast.Assign | ast.AnnAssign | ast.NamedExpr):
                targets = parent.targets if isinstance(parent, ast.Assign) else [parent.target]
                assigned_names = {t.id for t in targets if isinstance(t, ast.Name)}
                roots = {n for n in assigned_names if isinstance(body, ast.Lambda) and self._is_run_by_name(n, body)}
                return bool(assigned_names & self._mentioned or roots) if assigned_names else True
            return not isinstance(parent, ast.Expr)
        if isinstance(parent, ast.ClassDef):
            return self._method_runs(parent, body)
        return body.name in self._mentioned or (self._at_top(body) and self._is_run_by_name(body.name, body))

    def _is_run_by_name(self, name: str, body: _Function | ast.Lambda) -> bool:
        """Return whether `conduct.py` runs a top-level function with this name."""
        if name == "check":
            return self._entry_point is not None and len(_required(body)) == 1
        if not name.startswith("test"):
            return False
        missing = _required(body) - _parametrised(body)
        if missing:
            if name not in self._mentioned:
                raise UnjudgeableError(
                    f"{name} in line {body.lineno} takes {_join_names(missing)}, which nothing gives it"
                )
            return False
        return True

    def _at_top(self, node: ast.AST) -> bool:
        while (node := self._parent[id(node)]) is not self._tree:
            if isinstance(node, _Scope):
                return False
        return True

    def _method_runs(self, owner: ast.ClassDef, body: _Function) -> bool:
        if body.name in self._mentioned:
            return True
        family = [c for c in self._classes.values() if c is owner or owner in self._bases(c)]
        if body.name.startswith("__"):
            return any(c.name in self._mentioned for c in family)
        cases = any(self._is_unittest_class(c) for c in family)
        suites = [c for c in family if self._is_pytest_class(c)]
        if body.name.startswith(_SET_UP):
            return cases or bool(suites)
        if not body.name.startswith("test") or not (cases or suites):
            return False
        missing = _required(body, method=True) - _parametrised(body) - _parametrised(owner)
        if missing:
            raise UnjudgeableError(
                f"{body.name} in line {body.lineno} takes {_join_names(missing)}, which nothing gives it"
            )
        return True

    def _bases(self, owner: ast.ClassDef) -> list[ast.ClassDef]:
        """Return the base classes of a class, as far as the tests define them."""
        bases: list[ast.ClassDef] = []
        pending = [owner]
        while pending:
            for base in pending.pop().bases:
                definition = self._classes.get(base.id) if isinstance(base, ast.Name) else None
                if definition is not None and definition not in bases:
                    bases.append(definition)
                    pending.append(definition)
        return bases

    def _is_unittest_class(self, owner: ast.ClassDef) -> bool:
        bases = [b for c in (owner, *self._bases(owner)) for b in c.bases]
        return any(_last_name(base).endswith("TestCase") for base in bases)

    def _is_pytest_class(self, owner: ast.ClassDef) -> bool:
        """Return whether pytest would collect a class: at the top level, or inside another such class."""
        if not owner.name.startswith("Test") or any(getattr(n, "name", "") == "__init__" for n in owner.body):
            return False
        parent = self._parent[id(owner)]
        return self._is_pytest_class(parent) if isinstance(parent, ast.ClassDef) else self._at_top(owner)

    def _can_fail(self, body: ast.AST) -> bool:
        """Return whether this function can fail a program: it asserts, or calls an assertion or the tested function."""
        if _is_test(getattr(body, "name", "")):
            return True
        parts = ast.walk(body) if isinstance(body, ast.GeneratorExp) else _nodes_that_run(body)
        for node in parts:
            if isinstance(node, ast.Assert):
                return True
            if isinstance(node, ast.Call):
                name = _last_name(node.func)
                if name.startswith("assert") or name in ("fail", "raises", self._tested_name, "candidate"):
                    return True
        return False

    def _refuse_what_cannot_fail(self) -> None:
        deciding = {b.name for b in self._bodies if isinstance(b, _Function) and self._can_fail(b)}
        for node in ast.walk(self._tree):
            if isinstance(node, ast.Assert) and isinstance(node.test, ast.Tuple) and node.test.elts:
                raise UnjudgeableError(f"line {node.lineno} asserts a tuple, which is always true")
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Compare):
                raise UnjudgeableError(f"line {node.lineno} compares and does nothing with the result")
            if isinstance(node, ast.Try) and any(map(_swallows, node.handlers)):
                for part in (p for statement in node.body for p in (statement, *_nodes_that_run(statement))):
                    calls_deciding = (
                        isinstance(part, ast.Call) and isinstance(part.func, ast.Name) and part.func.id in deciding
                    )
                    if isinstance(part, ast.Assert) or calls_deciding:
                        line = getattr(part, "lineno", node.lineno)
                        raise UnjudgeableError(f"line {line} cannot fail: what it raises is caught and forgotten")


def _is_test(name: str) -> bool:
    return name.startswith("test") or name == "check"


def _label(body: ast.AST) -> str:
    return str(getattr(body, "name", "a lambda" if isinstance(body, ast.Lambda) else "a generator"))


def _last_name(node: ast.AST) -> str:
    """Return `c` for `c` and for `a.b.c`; an empty string for any other expression."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _required(body: _Function | ast.Lambda, method: bool = False) -> set[str]:
    """Return the parameters without a default; for a method, without `self`."""
    parameters = body.args
    positional = [a.arg for a in (*parameters.posonlyargs, *parameters.args)]
    required = positional[: len(positional) - len(parameters.defaults)]
    static = any(isinstance(d, ast.Name) and d.id == "staticmethod" for d in getattr(body, "decorator_list", ()))
    keyword_only = [
        a.arg for a, default in zip(parameters.kwonlyargs, parameters.kw_defaults, strict=True) if default is None
    ]
    return {*(required[1:] if method and not static else required), *keyword_only}


def _parametrised(body: ast.AST) -> set[str]:
    parameters: set[str] = set()
    for mark in getattr(body, "decorator_list", ()):
        if isinstance(mark, ast.Call) and isinstance(mark.func, ast.Attribute) and mark.func.attr == "parametrize":
            first = mark.args[0] if mark.args else next((k.value for k in mark.keywords if k.arg == "argnames"), None)
            if any(k.arg == "indirect" for k in mark.keywords) or first is None:
                continue
            try:
                names = ast.literal_eval(first)
            except ValueError:
                continue
            parameters |= {n.strip() for n in (names.split(",") if isinstance(names, str) else names)}
    return parameters


def _swallows(handler: ast.ExceptHandler) -> bool:
    """Return whether a handler catches failed asserts and does nothing but print."""
    exceptions = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    if not any(
        exception is None or (isinstance(exception, ast.Name) and exception.id in _CATCHES_ALL)
        for exception in exceptions
    ):
        return False
    silent = (ast.Pass, ast.Continue)
    return all(
        isinstance(n, silent)
        or (isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant))
        or (isinstance(n, ast.Expr) and isinstance(n.value, ast.Call) and _last_name(n.value.func) in _PRINTS)
        for n in handler.body
    )
