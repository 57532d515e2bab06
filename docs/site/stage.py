"""Collects the pages of the site in build/docs: the written ones with rewritten links, and the generated ones.

A link to a page leads to the page's place on the site, and reads as the page's title where it names a file. A
link to another file of the repository becomes the file's name, because the site does not assume an address of the
repository.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from docs.site.generate import pages as generated_pages
from docs.site.source import ROOT, loaded

DOCS = ROOT / "docs"
CONFIG = ROOT / "mkdocs.yml"
ASSETS = ("style.css", "worker.js")
# The theme would fetch this for its search; worker.js replaces it.
FETCHED = "https://unpkg.com/iframe-worker/shim"
# Pages outside of docs/, and the index of docs/, which is two pages on the site.
ELSEWHERE = {
    "README.md": "index.md",
    "docs/README.md": "pages.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "slurm/README.md": "slurm.md",
    "slurm/lab/README.md": "slurm_lab.md",
}
GLOSSARY = "glossary.md"
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")


def written_pages() -> dict[Path, str]:
    """Return every written page with its place on the site."""
    found = {ROOT / page: place for page, place in ELSEWHERE.items() if (ROOT / page).is_file()}
    for page in sorted(DOCS.rglob("*.md")):
        found.setdefault(page, page.relative_to(DOCS).as_posix())
    return found


def stage(target: Path) -> Path:
    """Write all pages and the completed configuration to an emptied `target`; return the configuration's path."""
    shutil.rmtree(target, ignore_errors=True)
    pages = target / "pages"
    pages.mkdir(parents=True)
    for file in sorted(DOCS.rglob("*")):
        if file.is_file() and file.suffix in (".png", ".svg", ".csv"):
            place = pages / file.relative_to(DOCS)
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, place)
    for asset in ASSETS:
        shutil.copy(Path(__file__).with_name(asset), pages / asset)
    texts = {**site_pages(), **generated_pages()}
    for name, text in texts.items():
        place = pages / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)
    config = target / "mkdocs.yml"
    config.write_text(yaml.safe_dump(completed(loaded(CONFIG), sorted(texts)), sort_keys=False))
    return config


def finish(site: Path) -> None:
    """Make built pages load the search helper from the site itself."""
    for page in site.rglob("*.html"):
        page.write_text(page.read_text().replace(FETCHED, _relative("worker.js", page.relative_to(site).as_posix())))


def site_pages() -> dict[str, str]:
    """Return the text of every written page by its place, with rewritten links."""
    places = written_pages()
    texts = {}
    for page, place in places.items():
        text = page.read_text()
        if place == "pages.md":
            text, _, glossary = text.partition("\n## Glossary\n")
            glossary = re.sub(r"^###", "##", glossary, flags=re.MULTILINE)
            texts[GLOSSARY] = turned(f"# Glossary\n{glossary}", page, GLOSSARY, places)
        texts[place] = turned(text, page, place, places)
    return texts


def turned(text: str, page: Path, place: str, places: dict[Path, str]) -> str:
    """Return a page's text with relative links rewritten for the site; code blocks are unchanged."""
    parts = re.split(r"(^```.*?^```)", text, flags=re.DOTALL | re.MULTILINE)
    return "".join(
        part if part.startswith("```") else LINK.sub(lambda link: _turned(link, page, place, places), part)
        for part in parts
    )


def _turned(link: re.Match[str], page: Path, place: str, places: dict[Path, str]) -> str:
    image, text, url = link.groups()
    text = LINK.sub(lambda inner: _turned(inner, page, place, places), text)
    if re.match(r"[a-z]+:", url):
        return f"{image}[{text}]({url})"
    path, _, fragment = url.partition("#")
    # Not resolved: docs/SKILL.md is a symbolic link to a file of the package.
    file = Path(os.path.normpath(page.parent / path)) if path else page
    if file == DOCS / "README.md" and (not path or fragment == "glossary"):
        return f"[{text}]({_relative(GLOSSARY, place)})"
    anchor = f"#{fragment}" if fragment else ""
    if not path:
        return f"[{text}]({anchor})"
    if (there := places.get(file)) is not None:
        text = _title(file) if re.fullmatch(r"[\w/.-]+\.md", text.strip("`")) else text
        return f"{image}[{text}]({_relative(there, place)}{anchor})"
    if file.suffix in (".png", ".svg", ".csv") and file.is_relative_to(DOCS):
        return f"{image}[{text}]({_relative(file.relative_to(DOCS).as_posix(), place)})"
    name = file.relative_to(ROOT).as_posix()
    plain = text.strip("`")
    return text if plain in (name, file.name) or name.endswith(plain) else f"{text} (`{name}`)"


def _title(page: Path) -> str:
    """Return the first heading of a page, without links."""
    found = re.search(r"^# (.+)$", page.read_text(), flags=re.MULTILINE)
    return LINK.sub(r"\2", found[1]) if found else page.name


def _relative(there: str, here: str) -> str:
    return os.path.relpath(there, Path(here).parent).replace(os.sep, "/")


def completed(config: dict[str, Any], names: list[str]) -> dict[str, Any]:
    """Return the configuration with `folder/*` of its navigation replaced by the folder's other pages."""
    listed = set(navigated(config["nav"]))
    config["nav"] = _completed(config["nav"], names, listed)
    config |= {"docs_dir": "pages", "site_dir": "site"}
    for plugin in config["plugins"]:
        if isinstance(plugin, dict) and "mkdocstrings" in plugin:
            plugin["mkdocstrings"]["handlers"]["python"]["paths"] = [str(ROOT)]
    return config


def navigated(nav: Any) -> Iterator[str]:
    """Yield every page that a navigation names."""
    if isinstance(nav, str):
        yield nav
    else:
        for each in nav.values() if isinstance(nav, dict) else nav:
            yield from navigated(each)


def _completed(nav: Any, names: list[str], listed: set[str]) -> Any:
    if isinstance(nav, dict):
        return {title: _completed(each, names, listed) for title, each in nav.items()}
    if isinstance(nav, str):
        return nav
    made: list[Any] = []
    for each in nav:
        if isinstance(each, str) and each.endswith("*"):
            made += [name for name in names if name.startswith(each[:-1]) and name not in listed]
        else:
            made.append(_completed(each, names, listed))
    return made
