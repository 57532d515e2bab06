"""Tests of the documentation site: its pages are complete and correct, and it builds without broken links.

Pages on commands, keys, recipes and public names are generated from code; the tests check that nothing is missing.
Hand-written pages (metrics, messages, commands in code blocks) are checked against the code. Only tests of the build
need the extra `docs` (mark `docs`, run by .ci/run).
"""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from fnmatch import fnmatchcase
from functools import cache
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from urllib.parse import unquote

import pytest
import yaml

import lightning_scalerl
import sweeps
from docs.site.generate import OTHERS, ROWS, commands, pages, setting_groups
from docs.site.stage import CONFIG, completed, finish, navigated, site_pages, stage
from lightning_scalerl.callbacks.trainer import LOGGED
from lightning_scalerl.composition import plain_variants
from lightning_scalerl.member.identify import check_printed_config
from sweeps.cli.main import make_parser
from tests.examples import every
from tests.paths import ROOT
from tests.sweeps.cli.test_commands import COMMANDS

CONF = ROOT / "conf"
METRICS = ROOT / "docs" / "reference" / "metrics.md"
MESSAGES = ROOT / "docs" / "guide" / "troubleshooting.md"
METRIC = re.compile(
    r"(train|eval|eval_cost|compute|time|verify|mechanism|virtual|live|alarm|reward|environment|fit|rank)/[^\s]"
)


@cache
def generated() -> dict[str, str]:
    return pages()


@cache
def site() -> dict[str, str]:
    return {**site_pages(), **generated()}


def leaves(value: object, name: str) -> Iterator[str]:
    """Yield the dotted names of a configuration's values; an empty mapping is a value."""
    if isinstance(value, dict) and value and name not in ("", "hydra"):
        for key, each in value.items():
            yield from leaves(each, f"{name}.{key}")
    else:
        yield name


def keys_of(file: Path) -> set[str]:
    text = file.read_text()
    package = "" if "# @package _global_" in text or file == CONF / "train.yaml" else ".".join(
        file.parent.relative_to(CONF).parts
    )  # fmt: skip
    raw = yaml.safe_load(text) or {}
    raw.pop("defaults", None)
    prefix = f"{package}." if package else ""
    key_names = {name for key, value in raw.items() for name in leaves(value, f"{prefix}{key}")}
    return {name for name in key_names if not re.search(r"(^|\.)_\w+_$", name)}  # keys such as _target_ are Hydra's


# --- generated pages are complete ----------------------------------------------------------------------------------


def test_every_command_has_a_page_with_each_of_its_options() -> None:
    assert list(commands()) == list(COMMANDS)
    for name, parser in commands().items():
        page = site()[f"commands/{name}.md"]
        assert f"[`scalerl {name}`]({name}.md)" in site()["commands/index.md"]
        rows = re.findall(r"^\| `([^`]+)` \|", page, flags=re.MULTILINE)
        for action in parser._actions:
            if action.help != "==SUPPRESS==" and "--help" not in action.option_strings:
                shown = action.option_strings or [str(action.metavar or next(iter(action.choices or [action.dest])))]
                asked = [rf"(?<![\w-]){re.escape(flag)}(?![\w-])" for flag in shown]
                assert any(all(re.search(flag, row) for flag in asked) for row in rows), f"scalerl {name}: {shown}"


def test_every_key_of_the_configuration_is_on_a_page() -> None:
    page_of_group = {group: f"configuration/{group.replace('/', '_')}.md" for group in [*setting_groups(), OTHERS]}
    page_of_group[""] = "configuration/run.md"
    for file in sorted(CONF.rglob("*.yaml")):
        group = "" if file.parent == CONF else file.parent.relative_to(CONF).as_posix()
        if group in ROWS or file.stem == "sums_of_two_digits":  # a base that experiments include
            continue
        if group == OTHERS:  # examples to copy, shown in full: each has its own keys, and those of the base
            assert file.read_text().strip() in site()[f"configuration/{OTHERS}.md"]
            continue
        shared = file == CONF / "data_set_rows.yaml"  # included by files of task/
        page = site()[page_of_group["task" if shared else group.removesuffix("/base")]]
        keys = {f"task.{key}" if shared else key for key in keys_of(file)}
        # Hydra's own settings are not keys of a run; settings of our launchers and sweepers are.
        missing = {
            key for key in keys if f"`{key}`" not in page and not re.match(r"hydra\.(?!launcher|sweeper)|hydra$", key)
        }
        assert not missing, f"{file.relative_to(ROOT)}: {sorted(missing)} not on {page_of_group[group]}"


def test_every_key_of_the_configuration_has_a_description() -> None:
    for place, page in generated().items():
        if place.startswith("configuration/") and place != "configuration/index.md":
            rows = re.findall(r"^\| `([^`]+)` \| .*? \|(.*)\|$", page, flags=re.MULTILINE)
            described = {key for key, text in rows if text.strip()}
            assert {key for key, _ in rows} - described == set(), (
                f"{place}: describe the key by a comment in the file or in Args"
            )


def test_every_choice_recipe_and_variant_is_on_a_page() -> None:
    for folder in [path for path in CONF.iterdir() if path.is_dir() and path.name != "hydra"]:
        for file in folder.glob("*.yaml"):
            if folder.name == "variant":
                assert f"| `{file.stem}` |" in site()["recipes/variant.md"]
            elif folder.name in (*ROWS, OTHERS):
                page_name = f"configuration/{OTHERS}.md" if folder.name == OTHERS else f"recipes/{folder.name}.md"
                assert f"\n## {file.stem}\n" in site()[page_name]
            else:
                assert f"\n## {folder.name}={file.stem}\n" in site()[f"configuration/{folder.name}.md"]


def test_variants_have_a_description_and_recipes_a_source() -> None:
    rows = re.findall(r"^\| (`.+?`) \| (.+?) \|(.*)\|$", site()["recipes/variant.md"], flags=re.MULTILINE)
    assert len(rows) == len({path.stem for path in (CONF / "variant").glob("*.yaml")} | plain_variants().keys())
    unsaid = {name for name, _, description in rows if not description.strip()}
    # Allowed without a description: they set one number of the optimizer, or nothing.
    assert unsaid <= {"`clip_0.3`", "`clip_1.0`", "`lr_0`", "`none`"}
    parts = re.split(r"^## ", site()["recipes/recipe.md"], flags=re.MULTILINE)[1:]
    unsourced = {part.split()[0] for part in parts if not re.search(r"arXiv|\d{4}\.\d{5}|section|https?:", part)}
    # Allowed without a source: the PPO recipes are our own, with our assumptions in each row, and scalerl_core is a
    # subset of scalerl.
    assert unsourced <= {"ppo", "ppo_large", "scalerl_core"}


def test_every_public_name_has_its_docstring_on_a_page_of_the_python_interface() -> None:
    named = re.findall(r"^::: lightning_scalerl\.([\w.]+)$", "\n".join(generated().values()), flags=re.MULTILINE)
    assert sorted(named) == sorted(f"{home}.{name}" for name, home in lightning_scalerl._HOME_OF.items())


# --- hand-written pages are correct --------------------------------------------------------------------------------


def strings(folder: str) -> Iterator[str]:
    """Yield every string of the code except docstrings. A value in an f-string becomes `*`."""
    for file in (ROOT / folder).rglob("*.py"):
        tree = ast.parse(file.read_text())
        skipped = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        skipped |= {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
        for node in ast.walk(tree):
            if id(node) in skipped:
                continue
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value
            elif isinstance(node, ast.JoinedStr):
                yield "".join(str(part.value) if isinstance(part, ast.Constant) else "*" for part in node.values)


def metrics_on_the_page() -> set[str]:
    cells = re.findall(r"^\| (`.+?`) \|", METRICS.read_text(), flags=re.MULTILINE)
    return {re.sub(r"<\w+>", "*", name) for cell in cells for name in re.findall(r"`([^`]+)`", cell)}


def test_the_metrics_page_lists_exactly_the_metrics_in_the_code() -> None:
    listed = metrics_on_the_page()
    written = {text for text in strings("lightning_scalerl") if METRIC.match(text) and re.fullmatch(r"[\w/*@]+", text)}
    written |= {text for text in strings("sweeps/tracking") if re.match(r"(fit|rank)/\w", text) and "*" not in text}
    assert {name for name in written if "*" not in name and not name.endswith("_")} <= listed
    patterns = {name for name in written if "*" in name}
    assert {pattern for pattern in patterns if not any(fnmatchcase(name, pattern) for name in listed)} == set()
    stale = {name for name in listed if not any(fnmatchcase(name, pattern) for pattern in written)}
    assert stale == set(), "the page names metrics that no code writes"


def test_the_metrics_that_callbacks_may_monitor_are_those_on_the_page() -> None:
    """Except those of held-out sets, of another trainer's command, and of the forecasts in MLflow."""
    known = {f"{prefix}/{name}" for prefix, names in LOGGED.items() for name in names.split()}
    listed = {name for name in metrics_on_the_page() if name.split("/")[0] in LOGGED}
    listed -= {"compute/tokens", "compute/steps"}
    assert {name for name in known if not any(fnmatchcase(name, pattern) for pattern in listed)} == set()
    known |= {"compute/device_hours_*"}
    assert listed - known == set() and {"fit", "rank", "eval"}.isdisjoint(LOGGED)


def test_every_metric_of_a_short_run_is_on_the_page(tiny_model_path: str) -> None:
    from tests.helpers import undisturbed

    records, _ = undisturbed(tiny_model_path, 2)
    listed = metrics_on_the_page()
    recorded = {name for _, _, metrics in records for name in metrics}
    assert recorded
    assert {name for name in recorded if not any(fnmatchcase(name, pattern) for pattern in listed)} == set()


@pytest.mark.slow
def test_messages_on_the_troubleshooting_page_exist_in_the_code() -> None:
    code_strings = [text for folder in ("lightning_scalerl", "sweeps") for text in strings(folder)]
    quoted = re.findall(r"^\| `(.+?)` \|", MESSAGES.read_text(), flags=re.MULTILINE)
    assert quoted
    hydras = {"Could not override"}
    assert [words for words in quoted if words not in hydras and not any(words in text for text in code_strings)] == []


def blocks() -> Iterator[tuple[str, str, str]]:
    """Yield (page, language, text) of each code block in hand-written pages."""
    for place, text in site_pages().items():
        for language, code in re.findall(r"^```(\w*)[^\n]*\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE):
            if place != "changelog.md":
                yield place, language, code


def commands_shown() -> Iterator[tuple[str, list[str]]]:
    """Yield (page, words) of each `scalerl` command in a code block, without comments and redirections."""
    for place, language, code in blocks():
        if language not in ("", "sh", "bash", "console"):
            continue
        lines = re.sub(r"\\\n\s*", " ", code).splitlines()
        # If some lines begin with a prompt, the others are output, which may start with the recipe name `scalerl`.
        for line in [line for line in lines if line.startswith("$ ")] or lines:
            line = re.sub(r"^(?:python|sbatch \S+) -m lightning_scalerl\.train", "scalerl train", line)
            # A command has one space and a word after `scalerl`. Tables in output start with the recipe `scalerl` too.
            if found := re.match(r"(?:\$ )?(?:[A-Z_]+=\S+ )*scalerl ([a-z]+(?:\s.*)?)$", line):
                yield place, shlex.split(re.split(r"\s#|\s{2,}\(|\s[|>]|\s&&|;", found[1])[0])


def test_python_in_the_pages_compiles() -> None:
    python_blocks = [(place, code) for place, language, code in blocks() if language == "python"]
    assert python_blocks
    for place, code in python_blocks:
        compile(code, place, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


def test_commands_in_the_pages_are_accepted_by_the_parser(capsys: pytest.CaptureFixture[str]) -> None:
    shown_commands = list(commands_shown())
    assert shown_commands
    parser, refused = make_parser(), []
    for place, words in shown_commands:
        if words[0] == "train":
            continue
        try:
            # A single capital letter is a placeholder for a number; "..." means that words may repeat.
            parser.parse_args(["1" if re.fullmatch(r"[A-Z]", word) else word for word in words if word != "..."])
        except SystemExit as stop:
            if stop.code:
                refused.append(f"{place}: scalerl {' '.join(words)}: {capsys.readouterr().err.splitlines()[-1]}")
    assert refused == []


def test_choices_and_keys_of_training_commands_in_the_pages_exist() -> None:
    """Choices are files of conf/ and keys occur in them. Commands with --config-dir may use others and are skipped."""
    keys = {key for file in CONF.rglob("*.yaml") for key in keys_of(file)}
    roots = {key.split(".")[0] for key in keys} | {"hydra"}
    groups = {path.relative_to(CONF).as_posix() for path in CONF.rglob("*") if path.is_dir()}
    wrong = []
    for place, words in commands_shown():
        if words[0] != "train" or "--config-dir" in words:
            continue
        for word in words[1:]:
            name, equals, value = word.partition("=")
            if not equals or word.startswith(("-", "+")):
                continue
            if name in groups:
                chosen = re.findall(r"[\w.]+", value) if re.fullmatch(r"[\w.,]+", value) else []
                plain = plain_variants().keys() if name == "variant" else ()
                files = [each for each in chosen if each not in plain]
                wrong += [f"{place}: {word}" for each in files if not (CONF / name / f"{each}.yaml").is_file()]
            elif name.split(".")[0] not in roots:
                wrong.append(f"{place}: {word}")
    assert wrong == []


def composed_in_the_pages() -> list[object]:
    """Return (configuration folders, overrides) of the first member of each training command in the pages."""
    commands_by_name = {}
    for place, words in commands_shown():
        folders = [argument for word, argument in pairwise(words) if word == "--config-dir"]
        override_words = [word for word in words[1:] if "=" in word and not word.startswith(("-", "hydra.searchpath"))]
        if words[0] != "train" or "--config-name" in words or any("..." in word for word in words):
            continue
        if all(
            (ROOT / folder / "cluster").is_dir() for folder in folders
        ):  # otherwise the folder exists only on the page
            # Keep the first value of a grid. Drop the keys of a search, whose values are drawn at random.
            override_words = [
                re.sub(r"=([\w.]+),.*", r"=\1", word)
                for word in override_words
                if not re.search(r"^trainer\b|\(", word)
            ]
            first = tuple(override_words)
            commands_by_name[f"{place}: {' '.join(first)}"] = (folders, first)
    return [pytest.param(*command, id=name) for name, command in commands_by_name.items()]


@pytest.mark.parametrize(("folders", "overrides"), every(12, composed_in_the_pages(), pytest.mark.full))
def test_training_commands_in_the_pages_compose(folders: list[str], overrides: tuple[str, ...]) -> None:
    """Keys are looked up at every level and values are checked, as in a real run."""
    check_printed_config(overrides, [str(ROOT / folder) for folder in folders])


# --- the site itself -----------------------------------------------------------------------------------------------


def test_links_to_pages_read_as_their_titles() -> None:
    named = {place: re.findall(r"\[`?[\w/]+\.md`?\]\([^)]*\)", text) for place, text in site_pages().items()}
    assert {place: links for place, links in named.items() if links} == {}
    assert "([Sources](../reference/sources.md))" in site_pages()["guide/mlflow.md"]


def test_the_navigation_has_every_page_once() -> None:
    configured = completed(yaml.safe_load(CONFIG.read_text()), sorted(site()))
    listed = list(navigated(configured["nav"]))
    assert sorted(listed) == sorted(site())


class Page(HTMLParser):
    """Links, anchors and fetched resources of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.fetched: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        attribute_values = {name: value or "" for name, value in attributes}
        self.anchors |= {attribute_values[name] for name in ("id", "name") if name in attribute_values}
        if tag == "a" and "href" in attribute_values:
            self.links.append(attribute_values["href"])
        elif tag == "link" and attribute_values.get("rel") not in ("canonical", "prev", "next"):
            self.fetched.append(attribute_values.get("href", ""))
        elif "src" in attribute_values:
            self.fetched.append(attribute_values["src"])


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site. With --strict, Zensical fails on a link or an anchor that does not exist."""
    try:
        import zensical  # noqa: F401
    except ImportError:
        (pytest.fail if os.environ.get("CI_ALL") == "1" else pytest.skip)("the extra docs is not installed")
    target = tmp_path_factory.mktemp("docs")
    config = stage(target)
    done = subprocess.run(
        [sys.executable, "-m", "zensical", "build", "--strict", "--config-file", str(config)],
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, re.sub(r"\x1b\[[\d;]*m", "", done.stdout + done.stderr)[-3000:]
    finish(target / "site")
    return target / "site"


@pytest.mark.docs
def test_the_built_site_has_no_broken_links_and_fetches_nothing(built: Path) -> None:
    parsed = {file: Page(file.read_text()) for file in built.rglob("*.html")}
    assert len(parsed) > len(site())  # 404.html is in addition
    broken, foreign = [], []
    for file, page in parsed.items():
        foreign += [f"{file.name}: {url}" for url in page.fetched if re.match(r"(https?:)?//", url)]
        if file.name == "404.html":
            continue
        for url in [*page.links, *page.fetched]:
            if re.match(r"[a-z]+:", url) or not url:
                continue
            path, _, anchor = unquote(url).partition("#")
            link_target = (file.parent / path.partition("?")[0]).resolve() if path else file
            link_target = link_target / "index.html" if link_target.is_dir() else link_target
            if not link_target.exists() or (
                anchor and link_target in parsed and anchor not in parsed[link_target].anchors | {"__comments"}
            ):
                broken.append(f"{file.relative_to(built)}: {url}")
    assert foreign == [] and broken == []
    for style in built.rglob("*.css"):
        assert not re.search(r"url\([\"']?(https?:)?//", style.read_text()), style


@pytest.mark.docs
def test_search_finds_every_public_name_and_command(built: Path) -> None:
    entries = json.loads((built / "search.json").read_text())["items"]
    text = " ".join(f"{item['title']} {item['text']}" for item in entries)
    missing = [name for name in lightning_scalerl.public_names() if not re.search(rf"\b{name}\b", text)]
    missing += [command for command in COMMANDS if f"scalerl {command}" not in text]
    assert missing == []


# JavaScript that returns [selector, text colour, background colour] for each kind of text; colours are [r, g, b, a].
COLOURS = """
const parse = text => { const n = text.match(/[\\d.]+/g).map(Number); return n.length < 4 ? [...n, 1] : n };
const under = e => { for (; e; e = e.parentElement) {
  const c = parse(getComputedStyle(e).backgroundColor); if (c[3] > 0.99) return c } return [255, 255, 255, 1] };
return ["h1", "h2", "p", ".md-content p a", ".md-content td", ".md-content code", ".md-nav__link"].flatMap(kind => {
  const e = [...document.querySelectorAll(kind)].find(e => e.offsetParent !== null);
  return e ? [[kind, parse(getComputedStyle(e).color), under(e)]] : [] });
"""
# Names of the two colour schemes in the theme.
SCHEMES = {"light": "default", "dark": "slate"}
# JavaScript that returns the visible search field and the text of all shadow roots, in which the theme's search is.
SEARCH = """
const roots = [document, ...[...document.querySelectorAll("*")].filter(e => e.shadowRoot).map(e => e.shadowRoot)];
return [roots.slice(1).flatMap(root => [...root.querySelectorAll("input")]).find(e => e.offsetParent !== null),
        roots.slice(1).map(root => root.textContent).join(" ")];
"""


def contrast(text: list[float], under: list[float]) -> float:
    """Return the WCAG contrast ratio of a possibly transparent colour on an opaque background."""

    def luminance(colour: list[float]) -> float:
        parts = [value / 255 for value in colour]
        return sum(
            weight * (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4)
            for weight, part in zip((0.2126, 0.7152, 0.0722), parts, strict=True)
        )

    blended = [above * text[3] + below * (1 - text[3]) for above, below in zip(text[:3], under[:3], strict=True)]
    lighter, darker = sorted((luminance(blended), luminance(under[:3])), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


@pytest.mark.full
@pytest.mark.docs
@pytest.mark.browser
@pytest.mark.timeout(420)
def test_the_site_opened_as_files_can_be_searched_and_fits_all_screens(built: Path, tmp_path: Path) -> None:
    from selenium.webdriver.common.action_chains import ActionChains

    from tests.chromium import chromium, need

    need(shutil.which("chromium") and shutil.which("chromedriver"), "chromium with its driver")
    with chromium(tmp_path / "profile") as browser:
        for width, scheme in ((1400, "light"), (1400, "dark"), (390, "light"), (390, "dark")):
            size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
            browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
            media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
            browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
            browser.get((built / "index.html").as_uri())
            browser.execute_script("localStorage.clear()")  # it stores the scheme of the first page opened
            for page in ("index.html", "commands/fit.html", "recipes/variant.html", "api/axis_loss.html"):
                browser.get((built / page).as_uri())
                reach, screen = browser.execute_script(
                    "return [document.documentElement.scrollWidth, document.documentElement.clientWidth]"
                )
                assert reach <= screen, f"{page}: {reach} px on a screen of {screen}"
                cut = browser.execute_script(
                    "return [...document.querySelectorAll('pre > code')].filter(code => code.offsetParent"
                    " && code.scrollWidth > code.clientWidth + 1).map(code => code.textContent.slice(0, 60))"
                )
                assert cut == [], (page, screen)
                assert browser.execute_script("return document.body.dataset.mdColorScheme") == SCHEMES[scheme]
                colours = browser.execute_script(COLOURS)
                assert len(colours) >= 3 and {kind: contrast(text, under) for kind, text, under in colours
                                              if contrast(text, under) < 4.5} == {}, (page, scheme)  # fmt: skip
                names = browser.execute_script("return performance.getEntriesByType('resource').map(each => each.name)")
                assert [name for name in names if not name.startswith(("file:", "data:"))] == []
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        browser.get((built / "index.html").as_uri())
        next(
            button for button in browser.find_elements("css selector", "header button") if button.is_displayed()
        ).click()
        deadline = time.monotonic() + 60
        while (field := browser.execute_script(SEARCH)[0]) is None and time.monotonic() < deadline:
            time.sleep(0.2)
        for letter in "staleness":
            ActionChains(browser).send_keys(letter).perform()
            time.sleep(0.1)
        while (
            "train/staleness_mean" not in (shown := browser.execute_script(SEARCH)[1]) and time.monotonic() < deadline
        ):
            time.sleep(0.2)
        assert field.get_property("value") == "staleness" and "Staleness" in shown
        assert [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []


@pytest.mark.docs
@pytest.mark.browser
def test_the_screenshot_shows_a_light_screen_and_a_dark_phone(built: Path, tmp_path: Path) -> None:
    from PIL import Image

    from docs.site.screenshots import take_site
    from tests.chromium import need_chromium

    need_chromium()
    with Image.open(take_site(built, tmp_path / "site.png")) as picture:
        shown = picture.convert("L")
    assert shown.size == (1400 + 10 + 390, 844)
    screen, phone = (sorted(shown.crop(area).getdata()) for area in ((0, 100, 1380, 844), (1410, 100, 1800, 844)))
    assert screen[len(screen) // 2] > 200 and phone[len(phone) // 2] < 60, "median lightness of the pixels"


# --- metadata ------------------------------------------------------------------------------------------------------


def test_the_version_is_the_same_everywhere() -> None:
    """Both distributions read the version from `sweeps`; CITATION.cff contains a copy."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert sweeps.__version__ == lightning_scalerl.__version__ == cited["version"]
    assert project["license"] == cited["license"]
    assert {"cff-version", "message", "title", "authors"} <= set(cited)


def test_issue_templates_ask_for_what_a_report_needs() -> None:
    folder = ROOT / ".github" / "ISSUE_TEMPLATE"
    for name, asked in (("bug", {"command", "version", "journal"}), ("source", {"head", "said", "meant"})):
        form = yaml.safe_load((folder / f"{name}.yml").read_text())
        fields = [field for field in form["body"] if field["type"] != "markdown"]
        assert {"name", "description", "body"} <= set(form) and asked <= {field["id"] for field in fields}
        assert all(field["type"] in ("input", "textarea") and field["attributes"]["label"] for field in fields)


def test_pre_commit_hooks_are_checks_of_ci() -> None:
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    called = {" ".join(word for word in hook["entry"].split() if word[0] != "-") for hook in hooks}
    script = (ROOT / ".ci" / "run").read_text()
    assert called == {".venv/bin/ruff check", ".venv/bin/ruff format", ".venv/bin/mypy"}
    assert all(command in script for command in called)
