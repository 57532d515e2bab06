"""Measure the size of an installation and the cost of imports, and write docs/measured/install_size.md.

Sizes are sums over the files of a distribution's packages in this environment, each package counted once. There is one
more line per extra, with the extra included. Each import is timed in a new process.

    python -m benchmarks.install_size
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement

from benchmarks.marks import between

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "measured" / "install_size.md"
# Extras of lightning-scalerl that add a feature.
EXTRAS = ("interactive", "datasets", "tensorboard", "wandb", "lora")
LARGEST = 10
# Packages whose import takes time or memory.
HEAVY = (
    *("torch", "lightning", "transformers", "mlflow", "optuna", "submitit", "pyarrow", "pandas", "scipy", "matplotlib"),
    *("vl_convert", "datasets", "math_verify", "sympy", "aiohttp"),
)
_IMPORT = """
import importlib, sys, time
begin = time.process_time()
importlib.import_module(sys.argv[1])
seconds = time.process_time() - begin
heavy = [name for name in sys.argv[2:] if name in sys.modules]
print(f"{seconds:.1f}|{len(sys.modules)}|{', '.join(heavy) or '-'}")
"""


def needed(requirements: Iterable[str]) -> dict[str, Distribution]:
    """Return every installed package that these requirements need, by normalised name."""
    installed: dict[str, Distribution] = {}
    waiting, seen = [Requirement(each) for each in requirements], set()
    while waiting:
        requirement = waiting.pop()
        name = re.sub(r"[-_.]+", "-", requirement.name).lower()
        if (key := (name, frozenset(requirement.extras))) in seen:
            continue
        seen.add(key)
        try:
            installed[name] = distribution(requirement.name)
        except PackageNotFoundError:  # for another platform or Python version
            continue
        for each in map(Requirement, installed[name].requires or ()):
            marker = each.marker
            if marker is None or any(marker.evaluate({"extra": extra}) for extra in ("", *requirement.extras)):
                waiting.append(each)
    return installed


def megabytes(package: Distribution) -> float:
    """Return the size of a package's files in MB."""
    files = [Path(str(package.locate_file(file))) for file in package.files or ()]
    return sum(file.stat().st_size for file in files if file.is_file()) / 1e6


def distributions() -> dict[str, list[str]]:
    """Return the requirements of both distributions, and of lightning-scalerl with each extra."""
    ours, curves = (tomllib.loads((ROOT / name).read_text()) for name in ("pyproject.toml", "sweeps/pyproject.toml"))
    light = curves["project"]["dependencies"]
    # A wheel depends on scalerl-curves, so its dependencies count too.
    full = [*ours["tool"]["hatch"]["metadata"]["hooks"]["custom"]["dependencies"], *light]
    extras = ours["project"]["optional-dependencies"]
    return {
        "scalerl-curves": light,
        "lightning-scalerl": full,
        **{f"lightning-scalerl[{extra}]": [*full, *extras[extra]] for extra in EXTRAS},
    }


def sizes(requirements: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the table of distributions with their packages and sizes, and the list of the largest packages."""
    packages_by_distribution = {name: needed(each) for name, each in requirements.items()}
    size = {name: megabytes(package) for each in packages_by_distribution.values() for name, package in each.items()}
    lines = [
        "| distribution | requirements | packages with dependencies | MB | MB without torch |",
        "|---|---|---|---|---|",
    ]
    for name, packages in packages_by_distribution.items():
        requirement_count = len({Requirement(each).name for each in requirements[name]})
        total = sum(size[each] for each in packages)
        without_torch = total - (size["torch"] if "torch" in packages else 0)
        lines.append(f"| `{name}` | {requirement_count} | {len(packages)} | {total:.0f} | {without_torch:.0f} |")
    largest = sorted(packages_by_distribution["lightning-scalerl"], key=lambda name: -size[name])[:LARGEST]
    named = ", ".join(f"{name} {size[name]:.0f}" for name in largest)
    return [*lines, "", f"The largest packages of `lightning-scalerl`, in MB: {named}."]


def imports() -> list[str]:
    """Return the table of import costs."""
    lines = ["| import | CPU seconds | modules | large packages that it imports |", "|---|---|---|---|"]
    for module in ("sweeps", "sweeps.cli.main", "sweeps.api", "lightning_scalerl", "lightning_scalerl.module"):
        command = [sys.executable, "-c", _IMPORT, module, *HEAVY]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        lines.append(f"| `{module}` | {' | '.join(done.stdout.strip().split('|'))} |")
    return lines


def main() -> None:
    """Write the page."""
    PAGE.write_text(between(PAGE.read_text(), "sizes", [*sizes(distributions()), "", *imports()]))


if __name__ == "__main__":
    main()
