"""Do the tests notice when a program is wrong? Mutants of twelve modules, each killed by a test or not.

A list (`mutants.jsonl`) has 144 changes of one line each, twelve a group of modules (`groups.py`), drawn once with a
fixed seed. A run applies them one by one to a copy of a tree and asks the group's test files; first those that are
not slow, and the slow ones only where a mutant survives. Two runs, on the same source with the tests of two days, say
whether the later tests have lost what the earlier ones saw. Some mutants change nothing that anybody could see
(equivalent ones): they survive for good.

    python -m benchmarks.mutation list                             # makes the list anew: only with a reason
    python -m benchmarks.mutation run --tree CLEAN_CLONE --out benchmarks/mutation/after.jsonl
    python -m benchmarks.mutation compare benchmarks/mutation/before.jsonl benchmarks/mutation/after.jsonl

A run goes on where it was stopped: what its file holds is not done again (`--again ID ...` does; the last result
counts). Before a group's first mutant its tests must pass on the tree as it is. `before.jsonl` is of e5d9cfd, whose
source the list was made from; `after.jsonl` asks the tests of a515a2a about the hundred mutants that were killed. 24
mutants whose lines or files have left since then are aimed at other lines; all are killed, and have results in
`after.jsonl` alone (`cpu` null: the mutant was applied by hand, and asked of a few tests).
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
FAST_S, SLOW_S = 1800.0, 300.0  # at most, on the tree as it is
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
    """The records of a file, one JSON object a line."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def mutants() -> list[Mutant]:
    """The list."""
    return [Mutant(**line) for line in read_lines(LIST)]


class Server:
    """`server.py` in a tree."""

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
        """Run the slow tests of some files, or the others; see `server.py` for the answer."""
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
    """The tree with one line changed, and no bytecode of what was there before or is there meanwhile."""
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
    """Asks one group's tests about mutants, in a copy of a tree."""

    def __init__(self, server: Server, tree: Path, name: str) -> None:
        self.server, self.tree, self.name, self.tests = server, tree, name, GROUPS[name].tests
        self.sound = self._as_it_is("not slow", FAST_S)
        self.slow: dict[str, Any] | None = None
        if self.sound["code"] != 0:
            sys.exit(f"{name}: its tests do not pass on the tree as it is:\n{server.log.read_text()[-3000:]}")

    def _as_it_is(self, speed: str, timeout: float) -> dict[str, Any]:
        answer = self.server.run(self.tests, speed, timeout, 10 * timeout, keep_bytecode=True)
        print(f"{self.name}, {speed}, unchanged: {answer}", flush=True)
        return answer

    def ask(self, mutant: Mutant) -> dict[str, Any]:
        """Whether a test kills it, and which; slow ones only where no other does, and if they are not too slow."""
        path = self.tree / mutant.file
        source = mutant.applied(path.read_text()) if path.exists() else None
        result: dict[str, Any] = {"id": mutant.id, "result": "does not apply", "by": None, "seconds": 0.0, "cpu": 0.0}
        if source is None:
            return result
        self._under(mutant, source, "not slow", self.sound, result)
        if result["result"] == "survived":
            self.slow = self.slow or self._as_it_is("slow", SLOW_S)
            if self.slow["code"] == 0:
                self._under(mutant, source, "slow", self.slow, result)
        return result

    def _under(self, mutant: Mutant, source: str, speed: str, sound: Mapping[str, Any], result: dict[str, Any]) -> None:
        with mutated(self.tree, mutant, source):
            answer = self.server.run(self.tests, speed, max(120.0, 8 * sound["seconds"]), 20 + 4 * sound["cpu"])
        result["seconds"] = round(result["seconds"] + answer["seconds"], 2)
        result["cpu"] = round(result["cpu"] + answer["cpu"], 2)
        result["result"] = {None: "timeout", 0: "survived"}.get(answer["code"], "killed")
        result["by"] = answer["failed"] or (f"exit code {answer['code']}" if result["result"] == "killed" else None)


def run(tree: Path, out: Path, only: Sequence[str], again: Sequence[str]) -> None:
    """Judge the mutants of the list that have no result yet, and append theirs."""
    wanted = [m for m in mutants() if not only or m.group in only or m.id in only]
    done = {line["id"] for line in read_lines(out)}
    left = [m for m in wanted if m.id not in done or m.id in again]
    names = list(dict.fromkeys(m.group for m in left))
    for name in names:
        if missing := [test for test in GROUPS[name].tests if not (tree / test).exists()]:
            sys.exit(f"groups.py: {name}: {', '.join(missing)}: no such file below {tree}")
    with tempfile.TemporaryDirectory(prefix="mutation-", ignore_cleanup_errors=True) as place:
        Path(place).chmod(0o755)  # an ordinary user's tests import from it
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
            for mutant in (m for m in left if m.group == name):
                result = judge.ask(mutant)
                with out.open("a") as handle:
                    handle.write(json.dumps(result) + "\n")
                print(f"  {mutant.id} {result['result']} {result['by'] or ''} {result['seconds']:.0f} s", flush=True)


def compare(before: Path, after: Path) -> int:
    """Print totals and what was lost; 1 if anything was."""
    first, then = ({line["id"]: line["result"] for line in read_lines(path)} for path in (before, after))
    rows: dict[str, Counter[str]] = {}
    lost = []
    for mutant in mutants():
        was, now = (results.get(mutant.id, "not run") for results in (first, then))
        rows.setdefault(mutant.group, Counter()).update(mutants=1, before=was in KILLED, after=now in KILLED)
        if was in KILLED and now not in KILLED:
            place = f"{mutant.file}:{mutant.line} ({mutant.function})"
            change = f"  - {mutant.before.strip()}\n  + {mutant.after.strip()}"
            lost.append(f"{mutant.id}: {was} before, {now} after: {place}\n{change}")
    print(f"{'group':12} {'mutants':>8} {'killed before':>14} {'killed after':>13}")
    for name, row in {**rows, "all": sum(rows.values(), Counter())}.items():
        print(f"{name:12} {row['mutants']:8} {row['before']:14} {row['after']:13}")
    print("\n".join(lost) or "nothing that was killed before is not killed after")
    return int(bool(lost))


def main() -> int:
    """The three commands."""
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
    given = parser.parse_args()
    if given.command == "compare":
        return compare(given.before, given.after)
    if given.command == "run":
        run(given.tree.resolve(), given.out.resolve(), given.only, given.again)
        return 0
    made = [m for name, group in GROUPS.items() for m in sample(given.tree, name, group.modules, EACH, SEED)]
    LIST.write_text("".join(json.dumps(asdict(m), ensure_ascii=False) + "\n" for m in made))
    return 0


if __name__ == "__main__":
    sys.exit(main())
