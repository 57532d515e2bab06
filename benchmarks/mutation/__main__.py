"""Mutation testing: do the tests fail when the source is wrong? Mutants of twelve groups of modules.

The list `mutants.jsonl` has 144 one-line changes, twelve per group of modules (`groups.py`), drawn once with a fixed
seed. A run applies them one by one to a copy of a tree and runs the group's test files, slow tests only if the mutant
survives the others. Two runs, on the same source with the tests of two dates, show whether the later tests miss
mutants that the earlier ones killed. Some mutants do not change behaviour (equivalent mutants), so they always survive.

    python -m benchmarks.mutation list                             # draws a new list: only for a good reason
    python -m benchmarks.mutation run --tree CLEAN_CLONE --out benchmarks/mutation/after.jsonl
    python -m benchmarks.mutation compare benchmarks/mutation/before.jsonl benchmarks/mutation/after.jsonl

A run continues where it was stopped: mutants that have a result are skipped, unless `--again ID ...` names them; the
last result counts. Before a group's first mutant, its tests must pass on the unchanged tree. `before.jsonl` is from
commit e5d9cfd, whose source the list was drawn from. `after.jsonl` has the results of the tests of a515a2a on the
hundred mutants that were killed before. 24 mutants whose lines or files no longer exist were moved to other lines. All
of them are killed, and have results only in `after.jsonl` (`cpu` is null where the mutant was applied by hand and tried
with a few tests).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from importlib.util import cache_from_source
from pathlib import Path
from typing import Any

from benchmarks.mutation.groups import GROUPS
from benchmarks.mutation.mutants import Mutant, sample

HERE = Path(__file__).parent
LIST = HERE / "mutants.jsonl"
SEED, EACH = 29, 12
KILLED = ("killed", "timeout")
FAST_S, SLOW_S = 1800.0, 300.0  # limits for the tests on the unchanged tree
ELSEWHERE = "not vllm and not browser and not peers and not environments and not slurm"
LIGHT = (
    "pytest", "hypothesis", "xdist", "numpy", "scipy.optimize", "scipy.stats", "scipy.signal", "yaml", "omegaconf",
    "hydra",
)  # fmt: skip
HEAVY = (
    *LIGHT, "torch", "tokenizers", "transformers", "transformers.models.llama.modeling_llama",
    "transformers.models.auto.modeling_auto", "pandas", "pyarrow", "sympy",
)  # fmt: skip
LIGHTNING = (*HEAVY, "lightning.pytorch", "torchmetrics")


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read the records of a file with one JSON object per line."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def mutants() -> list[Mutant]:
    """Return the mutants of the list."""
    return [Mutant(**line) for line in read_lines(LIST)]


class Server:
    """A process that runs `server.py` in a tree."""

    def __init__(self, tree: Path, place: Path, packages: Sequence[str]) -> None:
        environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
        self.place, self.log = place, place / "last.log"
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "server.py"), *packages],
            cwd=tree, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def run(
        self, tests: Sequence[str], speed: str, timeout: float, cpu: float, keep_bytecode: bool = False
    ) -> dict[str, Any]:
        """Run the slow or the other tests of some files; `server.py` describes the answer."""
        assert self.process.stdin is not None and self.process.stdout is not None
        with tempfile.TemporaryDirectory(dir=self.place, ignore_cleanup_errors=True) as temporary:
            Path(temporary).chmod(0o755)
            request = {
                "tests": tests, "markers": f"{speed} and {ELSEWHERE}", "timeout": timeout, "cpu": int(cpu),
                "keep_bytecode": keep_bytecode,
                "temporary": f"{temporary}/pytest", "log": str(self.log),
            }  # fmt: skip
            print(json.dumps(request), file=self.process.stdin, flush=True)
            answer: dict[str, Any] = json.loads(self.process.stdout.readline())
        return answer


@contextmanager
def mutated(tree: Path, mutant: Mutant, source: str) -> Iterator[None]:
    """Change one line of the tree while inside, and remove the file's bytecode before and after."""
    path = tree / mutant.file
    original = path.read_text()
    compiled = Path(cache_from_source(str(path)))
    try:
        path.write_text(source)
        compiled.unlink(missing_ok=True)
        yield
    finally:
        path.write_text(original)
        compiled.unlink(missing_ok=True)


class Judge:
    """Run one group's tests on mutants, in a copy of a tree."""

    def __init__(self, server: Server, tree: Path, name: str) -> None:
        self.server, self.tree, self.name, self.tests = server, tree, name, GROUPS[name].tests
        self.unchanged_result = self._unchanged("not slow", FAST_S)
        self.slow: dict[str, Any] | None = None
        if self.unchanged_result["code"] != 0:
            sys.exit(f"{name}: its tests do not pass on the tree as it is:\n{server.log.read_text()[-3000:]}")

    def _unchanged(self, speed: str, timeout: float) -> dict[str, Any]:
        answer = self.server.run(self.tests, speed, timeout, 10 * timeout, keep_bytecode=True)
        print(f"{self.name}, {speed}, unchanged: {answer}", flush=True)
        return answer

    def ask(self, mutant: Mutant) -> dict[str, Any]:
        """Return the result for a mutant and the test that killed it. Slow tests run only if no other test kills it."""
        path = self.tree / mutant.file
        source = mutant.applied(path.read_text()) if path.exists() else None
        result: dict[str, Any] = {"id": mutant.id, "result": "does not apply", "by": None, "seconds": 0.0, "cpu": 0.0}
        if source is None:
            return result
        self._run_mutated(mutant, source, "not slow", self.unchanged_result, result)
        if result["result"] == "survived":
            self.slow = self.slow or self._unchanged("slow", SLOW_S)
            if self.slow["code"] == 0:
                self._run_mutated(mutant, source, "slow", self.slow, result)
        return result

    def _run_mutated(
        self, mutant: Mutant, source: str, speed: str, unchanged_result: Mapping[str, Any], result: dict[str, Any]
    ) -> None:
        with mutated(self.tree, mutant, source):
            answer = self.server.run(
                self.tests, speed, max(120.0, 8 * unchanged_result["seconds"]), 20 + 4 * unchanged_result["cpu"]
            )
        result["seconds"] = round(result["seconds"] + answer["seconds"], 2)
        result["cpu"] = round(result["cpu"] + answer["cpu"], 2)
        result["result"] = {None: "timeout", 0: "survived"}.get(answer["code"], "killed")
        result["by"] = answer["failed"] or (f"exit code {answer['code']}" if result["result"] == "killed" else None)


def run(tree: Path, out: Path, only: Sequence[str], again: Sequence[str]) -> None:
    """Test the mutants of the list that have no result yet, and append their results."""
    selected = [m for m in mutants() if not only or m.group in only or m.id in only]
    done = {line["id"] for line in read_lines(out)}
    remaining = [m for m in selected if m.id not in done or m.id in again]
    names = list(dict.fromkeys(m.group for m in remaining))
    for name in names:
        if missing := [test for test in GROUPS[name].tests if not (tree / test).exists()]:
            sys.exit(f"groups.py: {name}: {', '.join(missing)}: no such file below {tree}")
    with tempfile.TemporaryDirectory(prefix="mutation-", ignore_cleanup_errors=True) as place:
        Path(place).chmod(0o755)  # tests that run as another user import from it
        copy = Path(place) / "tree"
        ignored = shutil.ignore_patterns(".git", ".venv", "__pycache__", ".hypothesis")
        shutil.copytree(tree, copy, symlinks=True, ignore=ignored)
        shared = copy / "tests/conftest.py"
        torch = shared.exists() and "\nimport torch" in shared.read_text()
        servers: dict[tuple[str, ...], Server] = {}
        for name in names:
            packages = LIGHTNING if GROUPS[name].torch else HEAVY if torch else LIGHT
            if packages not in servers:
                servers[packages] = Server(copy, Path(place), packages)
            judge = Judge(servers[packages], copy, name)
            for mutant in (m for m in remaining if m.group == name):
                result = judge.ask(mutant)
                with out.open("a") as handle:
                    handle.write(json.dumps(result) + "\n")
                print(f"  {mutant.id} {result['result']} {result['by'] or ''} {result['seconds']:.0f} s", flush=True)


def compare(before: Path, after: Path) -> int:
    """Print totals and the mutants that only the earlier tests killed; return 1 if there are any."""
    results_before, results_after = (
        {line["id"]: line["result"] for line in read_lines(path)} for path in (before, after)
    )
    rows: dict[str, Counter[str]] = {}
    no_longer_killed = []
    for mutant in mutants():
        result_before, result_after = (results.get(mutant.id, "not run") for results in (results_before, results_after))
        rows.setdefault(mutant.group, Counter()).update(
            mutants=1, before=result_before in KILLED, after=result_after in KILLED
        )
        if result_before in KILLED and result_after not in KILLED:
            location = f"{mutant.file}:{mutant.line} ({mutant.function})"
            change = f"  - {mutant.before.strip()}\n  + {mutant.after.strip()}"
            no_longer_killed.append(f"{mutant.id}: {result_before} before, {result_after} after: {location}\n{change}")
    print(f"{'group':12} {'mutants':>8} {'killed before':>14} {'killed after':>13}")
    for name, row in {**rows, "all": sum(rows.values(), Counter())}.items():
        print(f"{name:12} {row['mutants']:8} {row['before']:14} {row['after']:13}")
    print("\n".join(no_longer_killed) or "nothing that was killed before is not killed after")
    return int(bool(no_longer_killed))


def main() -> int:
    """Run one of the three commands."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    listing = commands.add_parser("list")
    listing.add_argument("--tree", type=Path, default=HERE.parents[1], help="the source that mutants are made of")
    running = commands.add_parser("run")
    running.add_argument("--tree", type=Path, required=True, help="a clean clone; it is copied, not changed")
    running.add_argument("--out", type=Path, required=True, help="results, a line a mutant")
    running.add_argument("--only", nargs="+", default=[], help="groups or ids")
    running.add_argument(
        "--again", nargs="+", default=[], help="ids to judge though they have a result; the last counts"
    )
    comparing = commands.add_parser("compare")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    options = parser.parse_args()
    if options.command == "compare":
        return compare(options.before, options.after)
    if options.command == "run":
        run(options.tree.resolve(), options.out.resolve(), options.only, options.again)
        return 0
    drawn = [m for name, group in GROUPS.items() for m in sample(options.tree, name, group.modules, EACH, SEED)]
    LIST.write_text("".join(json.dumps(asdict(m), ensure_ascii=False) + "\n" for m in drawn))
    return 0


if __name__ == "__main__":
    sys.exit(main())
