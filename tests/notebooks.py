"""Notebooks of examples/, run cell by cell in one process: `python -m tests.notebooks` writes their outputs anew."""

from __future__ import annotations

import ast
import contextlib
import io
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib

from tests.paths import ROOT

NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))


def run(path: Path) -> dict[str, Any]:
    """Run all code cells of a notebook in its folder; return it with the outputs that its cells now have.

    What a cell's last line is worth is kept as a notebook shows it: its HTML, or else its text.
    """
    notebook: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    matplotlib.use("Agg")
    names: dict[str, Any] = {}
    with _in(path.parent):
        for number, cell in enumerate(each for each in notebook["cells"] if each["cell_type"] == "code"):
            cell["outputs"] = _outputs("".join(cell["source"]), names, f"{path.name}, cell {number}")
    return notebook


def _outputs(source: str, names: dict[str, Any], where: str) -> list[dict[str, Any]]:
    tree, printed, value = ast.parse(source, where), io.StringIO(), None
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, where, "exec"), names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), where, "eval"), names)
    outputs: list[dict[str, Any]] = []
    if printed.getvalue():
        lines = printed.getvalue().splitlines(keepends=True)
        outputs.append({"output_type": "stream", "name": "stdout", "text": lines})
    if value is not None and not hasattr(value, "get_xlabel"):  # a figure is drawn, not kept
        data: dict[str, Any] = {"text/plain": repr(value)[:500].splitlines(keepends=True)}
        if hasattr(value, "_repr_html_"):
            data["text/html"] = value._repr_html_().splitlines(keepends=True)
            data["text/plain"] = [f"<{type(value).__name__}>"]
        outputs.append({"output_type": "execute_result", "execution_count": None, "metadata": {}, "data": data})
    return outputs


@contextlib.contextmanager
def _in(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def write(path: Path, notebook: dict[str, Any]) -> None:
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    for each in NOTEBOOKS:
        write(each, run(each))
