"""Tests of the pages: links lead to existing files and headings, and every page can be reached from the index."""

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
# Programs that the page asks the reader to write.
READERS_PROGRAMS = {"main.py"}
SUFFIXES = {".py", ".yaml", ".yml", ".sh", ".sbatch", ""}


def prose(page: Path) -> str:
    """Return a page without its code blocks, where # starts a comment and brackets are not links."""
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def links(page: Path) -> Iterator[tuple[str, str]]:
    """Yield target and fragment of each relative link of a page; the target is empty within the page."""
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if not re.match(r"[a-z]+:", link):
            target, _, fragment = link.partition("#")
            yield target, fragment


def target_file(page: Path, target: str) -> Path:
    """Return the file of a link, without resolving symbolic links: docs/SKILL.md counts as a page."""
    return Path(os.path.normpath(page.parent / target))


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub gives to the headings of a page."""
    slugs: list[str] = []
    for heading in re.findall(r"^#+ +(.+?) *$", prose(page), flags=re.MULTILINE):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        slug = re.sub(r"[^\w\- ]", "", text).replace(" ", "-")
        slugs.append(f"{slug}-{again}" if (again := slugs.count(slug)) else slug)
    return set(slugs)


def docs_paths_in_code() -> Iterator[tuple[Path, str]]:
    """Yield (code file, path under docs/ that it names), for paths written as one string or joined with `/`."""
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
        file = target_file(page, target) if target else page
        assert file.exists(), f"{page.name} links to {target}, which does not exist"
        if fragment and file.suffix == ".md":
            assert fragment in anchors(file), f"{page.name} links to {target}#{fragment}, which has no such heading"


def test_every_page_is_reachable_from_the_index() -> None:
    reached, waiting = {INDEX}, [INDEX]
    while waiting:
        page = waiting.pop()
        for target, _ in links(page):
            file = target_file(page, target)
            if target and file.suffix == ".md" and file.is_relative_to(DOCS) and file.exists() and file not in reached:
                reached.add(file)
                waiting.append(file)
    assert sorted(set(DOCS.rglob("*.md")) - reached) == []


def test_the_index_lists_every_page() -> None:
    listed = {target_file(INDEX, target) for target, _ in links(INDEX) if target}
    assert sorted(set(DOCS.rglob("*.md")) - listed - {INDEX}) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_tables_have_a_header_and_equally_many_cells_per_row(page: Path) -> None:
    """A blank line ends a table, so the rows after it would be shown as plain text."""
    previous, cells = "", 0
    lines = prose(page).splitlines()
    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        row = len(re.findall(r"(?<!\\)\|", re.sub(r"`[^`]*`", "", line)))
        if line.startswith("|") and not previous.startswith("|"):
            assert re.fullmatch(r"\|(\s*:?-+:?\s*\|)+", following), f"{page.name}: a row without a header: {line}"
            cells = row
        assert not line.startswith("|") or row == cells, f"{page.name}: not as many cells as the header: {line}"
        previous = line


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_are_in_fences_and_name_programs_that_exist(page: Path) -> None:
    """Only fenced blocks have a copy button and are checked by tests. Programs that a page names must exist."""
    text = page.read_text()
    assert not re.findall(r"^ {4}(?:\$ )?(?:python3?|scalerl|make|sbatch|srun|pip) .*", prose(page), flags=re.MULTILINE)
    for module, file in re.findall(r"(?<![\w/])python3? (?:-m ([\w.]+)|([\w/]+\.py)\b)", text):
        if file:
            places = [ROOT, *(ROOT / "examples").glob("*/"), page.parent]
            assert file in READERS_PROGRAMS or any((place / file).is_file() for place in places), f"{page.name}: {file}"
        elif module.split(".")[0] in (*CODE, "docs"):
            place = ROOT.joinpath(*module.split("."))
            assert place.is_dir() or place.with_suffix(".py").is_file(), f"{page.name}: {module}"


def test_code_names_pages_that_exist() -> None:
    missing = {f"{file.relative_to(ROOT)}: {path}" for file, path in docs_paths_in_code() if not (ROOT / path).exists()}
    assert sorted(missing) == []
