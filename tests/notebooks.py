"""Run the notebooks of examples/ in this process. `python -m tests.notebooks` updates the outputs stored in them."""

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
    """Run all code cells of a notebook in its folder; return the notebook with the new outputs.

    The value of a cell's last line is stored as a notebook shows it: as HTML if it has any, otherwise as text.
    """
    notebook: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    matplotlib.use("Agg")
    names: dict[str, Any] = {}
    with _in(path.parent):
        for number, cell in enumerate(entry for entry in notebook["cells"] if entry["cell_type"] == "code"):
            cell["outputs"] = _outputs("".join(cell["source"]), names, f"{path.name}, cell {number}")
    return notebook


def _outputs(source: str, names: dict[str, Any], cell_name: str) -> list[dict[str, Any]]:
    tree, printed, value = ast.parse(source, cell_name), io.StringIO(), None
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, cell_name, "exec"), names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), cell_name, "eval"), names)
    outputs: list[dict[str, Any]] = []
    if printed.getvalue():
        lines = printed.getvalue().splitlines(keepends=True)
        outputs.append({"output_type": "stream", "name": "stdout", "text": lines})
    if value is not None and not hasattr(value, "get_xlabel"):  # the axes of a figure: drawn, not stored
        data: dict[str, Any] = {"text/plain": repr(value)[:500].splitlines(keepends=True)}
        if hasattr(value, "_repr_html_"):
            data["text/html"] = value._repr_html_().splitlines(keepends=True)
            data["text/plain"] = [f"<{type(value).__name__}>"]
        outputs.append({"output_type": "execute_result", "execution_count": None, "metadata": {}, "data": data})
    return outputs


@contextlib.contextmanager
def _in(folder: Path) -> Iterator[None]:
    previous_folder = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(previous_folder)


def write(path: Path, notebook: dict[str, Any]) -> None:
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    for notebook_path in NOTEBOOKS:
        write(notebook_path, run(notebook_path))
