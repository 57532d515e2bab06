"""Code provenance of a run: facts by which a resume with other code is noticed and reported.

A journal's header and each of its `resume` records store them under "code":

    {"commit": "1f0c...", "diff": "9ac1..." | null, "files": "77ab...",
     "folders": {"/shared/mine": "01de..."}, "versions": {"python": "3.11.2", "torch": "2.13.0", ...}}

`files` decides whether the code is the same. It is a digest of all Python files of our packages on disk, whether or not
git tracks them. In a git checkout, `commit` and `diff` identify the code; `diff` is a digest of the uncommitted changes
in our packages (null without changes). `folders` has digests of the Python files in the user's folders that a
configuration names. The configuration itself is in the run's specification.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
OUR_PACKAGES = ("lightning_scalerl", "sweeps", "hydra_plugins")
# Third-party packages that affect results.
LIBRARIES = ("torch", "lightning", "transformers", "numpy", "vllm")
ABSENT = "not installed"
# Largest number of Python files read in a user's folder. One with more, such as a home directory, is probably a
# mistake.
MAX_FILES = 2000
TOO_MANY = f"more than {MAX_FILES} Python files: not looked at"
_SKIPPED_FOLDERS = ("__pycache__", "node_modules", "site-packages")
# Names of a study's outputs (`launch.ledger`, `executor.node.manifest`). These folders contain no code and are skipped.
_STUDY_FILE, _STUDY_FOLDERS = "ledger.jsonl", ("runs", "jobs")
_NAMED_FILE = re.compile(r"(.+\.py)(?::[\w.]+)?")


def package_digest(root: Path | None = None) -> str:
    """Return the digest of our packages' Python files on disk."""
    root = root or ROOT
    return _digest(root, [root / package for package in OUR_PACKAGES])


def code_facts(
    named: Iterable[str | Path] = (), imported: str | None = None, root: Path | None = None
) -> dict[str, Any]:
    """Return the current code provenance; takes tens of milliseconds.

    Args:
        named: the user's own folders, and Python files of the user that the configuration names.
        imported: `package_digest` at the time when this process imported our packages; None if the files have not
            changed since. If they have, the process still runs the imported code, so no commit is recorded.
        root: folder that contains our packages; None for that of the running code.
    """
    root = root or ROOT
    files = package_digest(root)
    here = checkout(root, OUR_PACKAGES) if imported in (None, files) else None
    return {
        "commit": None if here is None else here.commit,
        "diff": None if here is None or not here.diff else _short(here.diff.encode()),
        "files": imported or files,
        "folders": {str(path): _digest(Path(path), [Path(path)]) for path in named},
        "versions": versions(LIBRARIES),
    }


def code_changes(before: Mapping[str, Any] | None, after: Mapping[str, Any] | None) -> tuple[str, ...]:
    """Describe how two provenance records differ, one string per change; empty if one of them is None.

    A different commit with the same files is not a change.
    """
    if not isinstance(before, Mapping) or not isinstance(after, Mapping):
        return ()
    changes = []
    if before.get("files") != after.get("files"):
        for key, name in (("commit", "commit"), ("diff", "uncommitted changes")):
            old_value, new_value = before.get(key), after.get(key)
            if old_value != new_value:
                changes.append(f"{name} {_brief(old_value)} -> {_brief(new_value)}")
        if not changes:
            changes.append(f"files of the package {_brief(before.get('files'))} -> {_brief(after.get('files'))}")
    old, new = _mapping(before.get("folders")), _mapping(after.get("folders"))
    # Compare contents, not paths: on another node the same folder may have another path.
    for path in sorted(path for path in new if new[path] not in old.values()):
        changes.append(f"{path} {_brief(old.get(path))} -> {_brief(new[path])}")
    for path in sorted(path for path in old if path not in new and old[path] not in new.values()):
        changes.append(f"{path} {_brief(old[path])} -> none")
    old, new = _mapping(before.get("versions")), _mapping(after.get("versions"))
    changes += [f"{name} {old[name]} -> {new[name]}" for name in old if name in new and old[name] != new[name]]
    return tuple(changes)


def changes_line(changes: Sequence[str]) -> str:
    """Join changes into one line. Only the first six are listed."""
    shown = [str(change) for change in changes[:6]]
    return ", ".join([*shown, *([f"and {len(changes) - 6} more"] if len(changes) > 6 else [])])


def versions(packages: Iterable[str]) -> dict[str, str]:
    """Return the versions of Python and of packages by name, without importing them."""
    return {"python": platform.python_version(), **{package: _version(package) for package in packages}}


@cache  # parsing a package's metadata takes milliseconds, and every run records its packages three times
def _version(package: str) -> str:
    from importlib.metadata import PackageNotFoundError, version  # slow to import

    try:
        return version(package)
    except PackageNotFoundError:
        return ABSENT


def files_named(config: Any) -> list[str]:
    """Return the Python files that exist among a configuration's values, such as `folder/rewards.py[:function]`."""
    if isinstance(config, Mapping):
        return sorted({name for value in config.values() for name in files_named(value)})
    if isinstance(config, list | tuple):
        return sorted({name for value in config for name in files_named(value)})
    match = _NAMED_FILE.fullmatch(config) if isinstance(config, str) and len(config) < 4096 else None
    return [match[1]] if match and Path(match[1]).is_file() else []


# --- git --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Checkout:
    """Commit of a git checkout, and the diff of its working tree from that commit."""

    commit: str
    diff: str


def checkout(root: Path | None = None, only: Sequence[str] = ()) -> Checkout | None:
    """Return the git checkout of our code; None if git fails or does not track our code (installed by pip).

    Args:
        root: folder that contains our packages; None for the folder of the running code.
        only: folders in `root` whose changes count; empty for all of them.
    """
    root = root or ROOT
    # The environment in which we are installed may be inside another repository, so check that git tracks our code.
    if git(root, "ls-files", "--error-unmatch", "--", "sweeps") is None:
        return None
    commit = git(root, "rev-parse", "HEAD")
    existing = [package for package in only if (root / package).exists()]
    diff = _diff(root, *(["--", *existing] if existing else []))
    return None if commit is None or diff is None else Checkout(commit.strip(), diff)


def _diff(root: Path, *arguments: str) -> str | None:
    """Return the diff of the working tree from its commit; None if git fails.

    `git diff` locks and rewrites the index, but hundreds of jobs may run it at once, and the user may be about to
    commit. So it gets a copy of the index. The copy has the same modification time, so that git compares the content of
    files that were changed in the same second, and not only size and time.
    """
    index_path = git(root, "rev-parse", "--git-path", "index")
    if index_path is None:
        return None
    try:
        with TemporaryDirectory() as scratch:
            index_copy = Path(scratch) / "index"
            shutil.copy2(root / index_path.strip(), index_copy)
            return git(root, "diff", "HEAD", "--no-color", "--no-ext-diff", *arguments, index=index_copy)
    except OSError:
        return None


def git(root: Path, *arguments: str, index: Path | None = None) -> str | None:
    """Run git and return its stdout; None if it fails or is not installed. `index` replaces the checkout's index."""
    try:
        process = subprocess.run(
            ["git", "-C", str(root), *arguments],
            env=None if index is None else {**os.environ, "GIT_INDEX_FILE": str(index)},
            capture_output=True,
            text=True,
            errors="replace",
            timeout=60,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return process.stdout if process.returncode == 0 else None


# --- files ------------------------------------------------------------------------------------------------------


def _digest(root: Path, folders: Iterable[Path]) -> str:
    """Return a digest of the Python files in folders: of their names relative to `root`, and of their contents."""
    sha = hashlib.sha256()
    count = 0
    for folder in folders:
        for path in _python_files(folder):
            count += 1
            if count > MAX_FILES:
                return TOO_MANY
            try:
                content = hashlib.sha256(path.read_bytes()).hexdigest()
            except OSError:
                content = "unreadable"
            sha.update(f"{path.relative_to(root)} {content}\n".encode(errors="surrogateescape"))
    return sha.hexdigest()[:12]


def _python_files(path: Path) -> Iterator[Path]:
    """Yield the Python files below a folder, in order; or `path` itself if it is a file.

    Hidden folders, environments, and the outputs of a study, which may be thousands of folders, are skipped.
    """
    if path.is_file():
        yield path
        return
    for parent, inner, names in os.walk(path):
        if _STUDY_FILE in names:
            inner[:] = set(inner).difference(_STUDY_FOLDERS)
        inner[:] = sorted(
            name
            for name in inner
            if not name.startswith(".")
            and name not in _SKIPPED_FOLDERS
            and not (Path(parent) / name / "pyvenv.cfg").exists()
        )
        yield from (Path(parent) / name for name in sorted(names) if name.endswith(".py"))


def _short(raw: bytes) -> str:
    return hashlib.sha256(raw).hexdigest()[:12]


def _brief(value: Any) -> str:
    """Shorten a commit or digest to 12 characters; "none" if it is None."""
    return "none" if value is None else str(value)[:12] if value != TOO_MANY else "not looked at"


def _mapping(value: Any) -> dict[str, Any]:
    return {str(key): item for key, item in value.items()} if isinstance(value, Mapping) else {}
