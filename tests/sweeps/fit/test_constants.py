"""Truths about numbers set by hand: those that decide stand in one module, with what they were set on, and are few."""

from __future__ import annotations

import ast

from sweeps.fit import constants
from tests.paths import ROOT

FIT = ROOT / "sweeps" / "fit"
# A new one is a reason to look for one that can go.
MOST = 60
# How finely something is computed, what a user may choose, and what is printed; and the paper's own procedure.
COMPUTED = {
    "compare.py": {"ORIGINS", "_LEAST_HELD_OUT"},
    "family.py": {"B_RANGE", "C_MID_BELOW", "C_MID_ABOVE"},
    "checks.py": {"R0_STEP"},
    "draws.py": {"_NODES", "_SMOOTHED"},
    "grid.py": {"DROPPED", "_UNLIKELY", "_WORTH", "_SHRINKS", "_INSIDE"},
    "history.py": {"GROWTH", "RECENT", "REACH"},
    "kinds.py": {"SIGMOID", "KINDS"},
    "law.py": {
        "TAIL", "_FINE", "_ROUNDS", "_FINER", "_CELLS", "_FIXED", "_DEVIANCE", "_TRIALS", "_EDGE",
        "_LEVELS",
    },
    "least_squares.py": {
        "_COARSE", "_STEEP", "_STEEP_SPAN", "_STEEP_BEYOND", "_RESTARTS", "_MINIMA", "_HOPELESS", "_ITERATIONS",
        "_REACH", "_BESIDE", "_ROUGH", "_SAME", "_NEIGHBOURS", "_NOTHING",
    },
    "mixture.py": {
        "_MOST_JUMPS", "_ELSEWHERE", "_SEARCHED", "_JUMP_ROUNDS", "_ROUNDS", "_FINE", "_ROUGH",
        "_BEHIND", "NONE", "DRIFT", "JUMP",
    },
    "forecast.py": {"DRAWS", "_MOST", "_LEAST"},
    "points.py": {"MOST_POINTS", "_OF_A_RUN", "_ROBUST_ROUNDS"},
    "predict.py": {"FAR", "_BEYOND", "_LOOKS"},
    "published.py": {"A_GRID", "C_MID_GRID", "MIN_COMPUTE", "_MIN_COMPUTES"},
    "sensitivity.py": {"_CUTS", "_ENDS"},
    "schedule.py": {"_LAST"},
    "verdict.py": {"_SMOOTH"},
    "wander.py": {"_MANY"},
}  # fmt: skip


def assignments(name: str) -> list[ast.Assign | ast.AnnAssign]:
    tree = ast.parse((FIT / name).read_text())
    return [node for node in tree.body if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None]


def numbers(node: ast.AST) -> int:
    return sum(
        isinstance(each, ast.Constant) and isinstance(each.value, int | float) and not isinstance(each.value, bool)
        for each in ast.walk(node)
    )


def names(node: ast.Assign | ast.AnnAssign) -> set[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return {each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name)}


def test_the_numbers_that_decide_are_counted_and_explained() -> None:
    found = assignments("constants.py")
    assert sum(numbers(node.value) for node in found if node.value is not None) <= MOST
    lines = (FIT / "constants.py").read_text().splitlines()
    for node in found:
        before = lines[node.lineno - 2]
        neighbour = any(node.lineno == other.lineno + 1 and other is not node for other in found)
        own = before.startswith("#") and not before.startswith("# ---")
        assert own or neighbour or before == "}", f"no comment above {', '.join(names(node))}"


def test_no_other_module_has_one() -> None:
    for path in sorted(FIT.glob("*.py")):
        if path.name == "constants.py":
            continue
        held = {
            name
            for node in assignments(path.name)
            if node.value is not None and numbers(node.value)
            for name in names(node)
        }
        assert held <= COMPUTED.get(path.name, set()), (
            f"{path.name}: {held}: a number that decides goes into constants.py"
        )


def test_all_of_them_are_used() -> None:
    sources = "\n".join(path.read_text() for path in FIT.glob("*.py") if path.name != "constants.py")
    found = assignments("constants.py")
    mine = {name for node in found for name in names(node)}
    # Or of use to others of them.
    shared = {each.id for node in found if node.value for each in ast.walk(node.value) if isinstance(each, ast.Name)}
    assert mine and all(name in sources or name in shared for name in mine)
    assert all(hasattr(constants, name) for name in mine)
