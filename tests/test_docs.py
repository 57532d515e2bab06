"""Links between pages lead to files and headings that exist, and every page can be reached from the index."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.paths import ROOT

DOCS = ROOT / "docs"
INDEX = DOCS / "README.md"
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted(DOCS.rglob("*.md")),
    *sorted((ROOT / "slurm").rglob("*.md")),
]
CODE = ("benchmarks", "conf", "examples", "hydra_plugins", "lightning_scalerl", "slurm", "sweeps", "tests", ".ci")
# A program of the reader's own, which the page has shown before.
OF_THE_READER = {"main.py"}
SUFFIXES = {".py", ".yaml", ".yml", ".sh", ".sbatch", ""}


def prose(page: Path) -> str:
    """Return a page without its blocks of code, in which a # begins a comment and brackets are no links."""
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def links(page: Path) -> Iterator[tuple[str, str]]:
    """Yield target and fragment of each relative link of a page; the target is empty within the page."""
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if not re.match(r"[a-z]+:", link):
            target, _, fragment = link.partition("#")
            yield target, fragment


def there(page: Path, target: str) -> Path:
    """Return the file of a link; a symbolic link (docs/SKILL.md) is a page of its own."""
    return Path(os.path.normpath(page.parent / target))


def anchors(page: Path) -> set[str]:
    """Return the fragments that GitHub gives the headings of a page."""
    found: list[str] = []
    for heading in re.findall(r"^#+ +(.+?) *$", prose(page), flags=re.MULTILINE):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        slug = re.sub(r"[^\w\- ]", "", text).replace(" ", "-")
        found.append(f"{slug}-{again}" if (again := found.count(slug)) else slug)
    return set(found)


def named_in_code() -> Iterator[tuple[Path, str]]:
    """Yield each file of code with each path below docs/ that it names, in one word or part by part."""
    files = [file for folder in CODE for file in (ROOT / folder).rglob("*") if file.suffix in SUFFIXES]
    for file in [ROOT / "Makefile", *files]:
        if not file.is_file() or "__pycache__" in file.parts:
            continue
        text = file.read_text(errors="ignore")
        for path in re.findall(r"(?<![\w./-])docs/[\w./-]*\w", text):
            yield file, path
        for parts in re.findall(r'"docs"((?: / "[\w.-]+")+)', text):
            yield file, "/".join(["docs", *re.findall(r'"([\w.-]+)"', parts)])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_and_headings(page: Path) -> None:
    for target, fragment in links(page):
        file = there(page, target) if target else page
        assert file.exists(), f"{page.name} links to {target}, which does not exist"
        if fragment and file.suffix == ".md":
            assert fragment in anchors(file), f"{page.name} links to {target}#{fragment}, and no heading is called so"


def test_every_page_is_reachable_from_the_index() -> None:
    reached, waiting = {INDEX}, [INDEX]
    while waiting:
        page = waiting.pop()
        for target, _ in links(page):
            file = there(page, target)
            if target and file.suffix == ".md" and file.is_relative_to(DOCS) and file.exists() and file not in reached:
                reached.add(file)
                waiting.append(file)
    assert sorted(set(DOCS.rglob("*.md")) - reached) == []


def test_the_index_lists_every_page() -> None:
    listed = {there(INDEX, target) for target, _ in links(INDEX) if target}
    assert sorted(set(DOCS.rglob("*.md")) - listed - {INDEX}) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_tables_begin_with_a_header_and_have_as_many_cells_in_each_row(page: Path) -> None:
    """A blank line within a table ends it: the rows that follow would be shown as they are written."""
    before, cells = "", 0
    lines = prose(page).splitlines()
    for line, after in zip(lines, [*lines[1:], ""], strict=True):
        row = len(re.findall(r"(?<!\\)\|", re.sub(r"`[^`]*`", "", line)))
        if line.startswith("|") and not before.startswith("|"):
            assert re.fullmatch(r"\|(\s*:?-+:?\s*\|)+", after), f"{page.name}: a row without a header: {line}"
            cells = row
        assert not line.startswith("|") or row == cells, f"{page.name}: other cells than its header has: {line}"
        before = line


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_stand_in_fences_and_name_programs_that_exist(page: Path) -> None:
    """Only fenced blocks have a button to copy them, and are checked; programs that a page names are looked up."""
    text = page.read_text()
    assert not re.findall(r"^ {4}(?:\$ )?(?:python3?|scalerl|make|sbatch|srun|pip) .*", prose(page), flags=re.MULTILINE)
    for module, file in re.findall(r"(?<![\w/])python3? (?:-m ([\w.]+)|([\w/]+\.py)\b)", text):
        if file:
            places = [ROOT, *(ROOT / "examples").glob("*/"), page.parent]
            assert file in OF_THE_READER or any((place / file).is_file() for place in places), f"{page.name}: {file}"
        elif module.split(".")[0] in (*CODE, "docs"):
            place = ROOT.joinpath(*module.split("."))
            assert place.is_dir() or place.with_suffix(".py").is_file(), f"{page.name}: {module}"


def test_code_names_pages_that_exist() -> None:
    missing = {f"{file.relative_to(ROOT)}: {path}" for file, path in named_in_code() if not (ROOT / path).exists()}
    assert sorted(missing) == []
