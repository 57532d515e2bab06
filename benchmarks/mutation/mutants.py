"""Mutants of Python source: small changes of one line each, which should make a test fail."""

from __future__ import annotations

import ast
import random
import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

SWAPS = {
    "<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "is": "is not", "is not": "is", "in": "not in",
    "not in": "in", "+": "-", "-": "+", "*": "/", "/": "*", "//": "*", "%": "*", "**": "*", "&": "|", "|": "&",
    "and": "or", "or": "and",
}  # fmt: skip
CALLS = {"min": "max", "max": "min", "minimum": "maximum", "maximum": "minimum", "any": "all", "all": "any"}
CALLS |= {"floor": "ceil", "ceil": "floor", "argmin": "argmax", "argmax": "argmin"}
KEYWORDS = {"min": "max", "max": "min"}  # of clamp
OPERATOR = re.compile(r"<=|>=|==|!=|\bis\s+not\b|\bnot\s+in\b|\bis\b|\bin\b|//|\*\*|\band\b|\bor\b|[<>+\-*/%&|]")
CRUDE = "returns None"
SILENT = {"print", "warn", "warning", "info", "debug", "note", "isinstance", "issubclass", "TypeVar"}


@dataclass(frozen=True)
class Mutant:
    """One changed line.

    Args:
        id: group and number.
        group: name in `groups.GROUPS`.
        file: path relative to the root of the tree.
        line: line number when the list was made, for information.
        occurrence: index among the file's lines with the same text, from 0. It finds the line even if lines moved.
        function: the function that contains the line.
        kind: kind of change.
        before: the original line.
        after: the changed line.
    """

    id: str
    group: str
    file: str
    line: int
    occurrence: int
    function: str
    kind: str
    before: str
    after: str

    def applied(self, source: str) -> str | None:
        """Return the source with the change, or None if it does not contain the line."""
        lines = source.split("\n")
        places = [at for at, line in enumerate(lines) if line == self.before]
        if len(places) <= self.occurrence:
            return None
        lines[places[self.occurrence]] = self.after
        return "\n".join(lines)


@dataclass
class _Finder(ast.NodeVisitor):
    """Collects every change of one line as (line from 0, function, kind, changed line)."""

    lines: list[str]
    found: list[tuple[int, str, str, str]] = field(default_factory=list)
    scope: tuple[str, ...] = ()

    def put(self, kind: str, line: int, start: int, end: int, text: str) -> None:
        """Record a change that replaces bytes start to end of a line (counted from 1)."""
        raw = self.lines[line - 1].encode()
        after = (raw[:start] + text.encode() + raw[end:]).decode()
        self.found.append((line - 1, ".".join(self.scope), kind, after))

    def whole(self, kind: str, node: ast.expr | ast.stmt, text: str) -> None:
        """Record a change that replaces a node on one line; {} in `text` is the node's source."""
        if node.lineno == node.end_lineno and node.end_col_offset is not None:
            raw = self.lines[node.lineno - 1].encode()[node.col_offset : node.end_col_offset].decode()
            self.put(kind, node.lineno, node.col_offset, node.end_col_offset, text.replace("{}", raw))

    def between(self, kind: str, left: ast.expr, right: ast.expr) -> None:
        """Record a change that swaps the operator between two operands on one line."""
        if left.end_lineno == right.lineno and left.end_col_offset is not None:
            raw = self.lines[right.lineno - 1].encode()
            gap = raw[left.end_col_offset : right.col_offset].decode()
            if (match := OPERATOR.search(gap)) and (name := " ".join(match[0].split())) in SWAPS:
                at = left.end_col_offset + match.start()
                self.put(kind, right.lineno, at, at + len(match[0]), SWAPS[name])

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        if node.name in ("__repr__", "__str__"):
            return
        self.scope += (node.name,)
        for default in (*node.args.defaults, *node.args.kw_defaults):
            if default is not None:
                self.visit(default)
        for each in node.body:
            self.visit(each)
        self.scope = self.scope[:-1]

    visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.scope += (node.name,)
        for each in node.body:
            self.visit(each)
        self.scope = self.scope[:-1]

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_Raise(self, node: ast.Raise) -> None:
        self.whole("raise removed", node, "pass")

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Skip f-strings: they are messages."""

    def visit_Import(self, node: ast.Import | ast.ImportFrom) -> None:
        """Skip imports."""

    visit_ImportFrom = visit_Import  # noqa: N815

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Call) and _called(node.value) not in SILENT:
            self.whole("call removed", node, "pass")
        if not isinstance(node.value, ast.Constant):
            self.visit(node.value)

    def visit_Return(self, node: ast.Return) -> None:
        if node.value is not None and not (isinstance(node.value, ast.Constant) and node.value.value is None):
            self.whole(CRUDE, node, "return None")
            self.visit(node.value)

    def visit_If(self, node: ast.If | ast.While | ast.IfExp) -> None:
        if isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            return
        if not (isinstance(node.test, ast.UnaryOp) and isinstance(node.test.op, ast.Not)):
            self.whole("condition negated", node.test, "(not ({}))")
        self.generic_visit(node)

    visit_While = visit_IfExp = visit_If  # noqa: N815

    def visit_comprehension(self, node: ast.comprehension) -> None:
        for test in node.ifs:
            self.whole("condition negated", test, "(not ({}))")
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        for left, right in zip((node.left, *node.comparators), node.comparators, strict=False):
            self.between("comparison", left, right)
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        if not any(_text(side) for side in (node.left, node.right)):
            self.between("arithmetic", node.left, node.right)
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        for left, right in zip(node.values, node.values[1:], strict=False):
            self.between("and, or", left, right)
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not | ast.USub) and node.operand.lineno == node.lineno:
            kind = "not removed" if isinstance(node.op, ast.Not) else "sign removed"
            self.put(kind, node.lineno, node.col_offset, node.operand.col_offset, "")
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        if isinstance(node.op, ast.Add | ast.Sub) and not _text(node.value):
            self.between("arithmetic", node.target, node.value)
        self.visit(node.value)

    def visit_Constant(self, node: ast.Constant) -> None:
        value = node.value
        if isinstance(value, bool):
            self.whole("constant", node, str(not value))
        elif isinstance(value, int):
            self.whole("constant", node, "({} + 1)")
        elif isinstance(value, float):
            self.whole("constant", node, "({} * 2)" if value else "1.0")

    def visit_Call(self, node: ast.Call) -> None:
        name, end = _called(node), node.func.end_col_offset
        if name in SILENT:
            return
        if name in CALLS and end is not None and node.func.end_lineno is not None:
            self.put("other function", node.func.end_lineno, end - len(name), end, CALLS[name])
        if name == "sorted" and not any(each.arg == "reverse" for each in node.keywords) and node.end_col_offset:
            self.whole("sorted the other way", node, "list(reversed({}))")
        for keyword in node.keywords:
            if name == "clamp" and keyword.arg in KEYWORDS:
                at = keyword.col_offset
                self.put("other bound", keyword.lineno, at, at + len(keyword.arg), KEYWORDS[keyword.arg])
        self.generic_visit(node)

    def visit_Slice(self, node: ast.Slice) -> None:
        for end in (node.lower, node.upper):
            if end is not None and not isinstance(end, ast.Constant):
                self.whole("slice", end, "{} + 1")
        self.generic_visit(node)

    def visit_Break(self, node: ast.Break) -> None:
        self.whole("loop", node, "continue")

    def visit_Continue(self, node: ast.Continue) -> None:
        self.whole("loop", node, "break")


def _called(node: ast.Call) -> str:
    function = node.func
    return (
        function.id if isinstance(function, ast.Name) else function.attr if isinstance(function, ast.Attribute) else ""
    )


def _text(node: ast.expr) -> bool:
    """Whether a node is text or a type, so that an operator on it is not arithmetic."""
    if isinstance(node, ast.BinOp):
        return _text(node.left) or _text(node.right)
    if isinstance(node, ast.Name):
        return node.id in ("int", "float", "str", "bool", "list", "dict", "bytes", "None")
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str | None))


def changes(source: str) -> list[tuple[int, str, str, str]]:
    """Return every change of one line: (line from 0, function, kind, changed line)."""
    finder = _Finder(source.split("\n"))
    finder.visit(ast.parse(source))
    return finder.found


def differs(source: str, line_index: int, after: str) -> bool:
    """Whether the changed source is valid and its syntax tree differs."""
    lines = source.split("\n")
    try:
        return ast.dump(ast.parse("\n".join((*lines[:line_index], after, *lines[line_index + 1 :])))) != ast.dump(
            ast.parse(source)
        )
    except SyntaxError:
        return False


def sample(tree: Path, group: str, files: tuple[str, ...], count: int, seed: int) -> list[Mutant]:
    """Draw `count` mutants of a group, spread over files, functions and kinds of change. Deterministic per seed."""
    sources = {file: (tree / file).read_text() for file in files}
    candidates = [(file, *change) for file, source in sources.items() for change in changes(source)]
    random.Random(f"{seed} {group}").shuffle(candidates)
    used: Counter[tuple[str, object]] = Counter()
    chosen: list[tuple[str, int, str, str, str]] = []
    while candidates and len(chosen) < count:
        # Prefer changes whose line, file, function and kind have been used least.
        best = min(candidates, key=lambda candidate: [used[part] for part in _parts(candidate)])
        candidates.remove(best)
        if not differs(sources[best[0]], best[1], best[4]):
            continue
        used.update(_parts(best))
        chosen.append(best)
        if best[3] == CRUDE:  # any test notices it, so one per group is enough
            candidates = [candidate for candidate in candidates if candidate[3] != CRUDE]
    chosen.sort(key=lambda candidate: (files.index(candidate[0]), candidate[1]))
    return [
        Mutant(
            f"{group}-{number:02}", group, file, at + 1, lines[:at].count(lines[at]), function, kind, lines[at], after
        )
        for number, (file, at, function, kind, after) in enumerate(chosen, start=1)
        for lines in [sources[file].split("\n")]
    ]


def _parts(one: tuple[str, int, str, str, str]) -> list[tuple[str, object]]:
    file, at, function, kind, _ = one
    return [("line", (file, at)), ("file", file), ("kind", kind), ("function", (file, function))]
