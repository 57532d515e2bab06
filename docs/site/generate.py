"""Writes the pages that come from code: commands, configuration keys, recipes and variants, the Python interface.

Each function returns Markdown; `pages` has them all by their place on the site. Nothing of them is kept in the
repository, so nothing of them can be older than the code.
"""

from __future__ import annotations

import argparse
import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from docs.site.source import CONF, HOME_OF, Choice, Key, choices, find, groups, loaded, read
from sweeps.cli.main import make_parser

# Groups that are rows over the others: they have a page of their own.
ROWS = ("recipe", "variant", "scale", "experiment")
# A folder of examples for other trainers, which are copied and not chosen.
OTHERS = "command"
# Titles of the pages of the Python interface, and the modules or rooms whose public names each has.
API_PAGES = {
    "run": ("A run", ("module", "recipe", "optim", "data", "stream", "update", "measure", "member", "translate")),
    "callbacks": ("Callbacks", ("callbacks",)),
    "choices": ("Choices and errors", ("axes.choice", "choices", "checks")),
    "tasks": ("Tasks, prompts and grading", ("task", "rollouts", "verify")),
    "models": ("Models, generators, environments", ("model", "generator", "environment")),
}


def pages() -> dict[str, str]:
    """Return every generated page by its path on the site."""
    parsers = commands()
    return {
        "commands/index.md": _commands_index(parsers),
        **{f"commands/{name}.md": _command(name, parser) for name, parser in parsers.items()},
        "configuration/index.md": _configuration_index(),
        "configuration/run.md": _run_keys(),
        f"configuration/{OTHERS}.md": _keys_of_commands(),
        **{f"configuration/{group.replace('/', '_')}.md": _group(group) for group in setting_groups()},
        **{f"recipes/{group}.md": _rows(group) for group in ROWS},
        **_api(),
    }


def commands() -> dict[str, argparse.ArgumentParser]:
    """Return the parser of every command, in the order in which `scalerl --help` lists them."""
    return dict(_subparsers().choices)


def _subparsers() -> argparse._SubParsersAction[argparse.ArgumentParser]:
    actions = make_parser()._actions
    return next(action for action in actions if isinstance(action, argparse._SubParsersAction))


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    return "\n".join([*lines, *(f"| {' | '.join(_cell(cell) for cell in row)} |" for row in rows)])


def _cell(text: str) -> str:
    """Return a text on one line; a bar ends a cell, but not within code."""
    parts = re.split(r"(`[^`]*`)", " ".join(text.split()))
    return "".join(part if part.startswith("`") else part.replace("|", "\\|") for part in parts)


def _code(text: str) -> str:
    """Return a text as code within a table; "" is unchanged."""
    return f"`{text}`" if text else ""


def _plain(text: str) -> str:
    """Return a text of a docstring or a help with what Markdown would take for markup escaped, outside of code."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(part if part.startswith("`") else _escaped(part) for part in parts)


def _escaped(text: str) -> str:
    return re.sub(r"([\\*_\[\]])", r"\\\1", text.replace("&", "&amp;").replace("<", "&lt;"))


# --- commands ------------------------------------------------------------------------------------------------------


def _commands_index(parsers: dict[str, argparse.ArgumentParser]) -> str:
    rows = [(f"[`scalerl {name}`]({name}.md)", _plain(_summary(parser))) for name, parser in parsers.items()]
    return (
        "# Commands\n\nEvery command of `scalerl`, as `scalerl COMMAND --help` describes it. Exit codes: 0 done (a "
        "refusal to name an asymptote is an answer), 1 a failure, told in one line, 2 wrong usage.\n\n"
        + _table(("command", "what it does"), rows)
        + "\n"
    )


def _summary(parser: argparse.ArgumentParser) -> str:
    return (parser.description or "").splitlines()[0]


def _command(name: str, parser: argparse.ArgumentParser) -> str:
    usage = " ".join(parser.format_usage().split()).removeprefix("usage: ")
    usage = textwrap.fill(usage, 90, subsequent_indent=" " * 8, break_on_hyphens=False)
    parts = [f"# scalerl {name}", *_paragraphs(parser.description or "")]
    parts.append(f'```text title="usage"\n{usage}\n```')
    if name == "train":
        parts.append(
            "Every key and choice: [configuration](../configuration/index.md), [recipes](../recipes/recipe.md)."
        )
        parts.append(f"```text\n{_train_help()}\n```")
    for group in parser._action_groups:
        rows = [row for action in group._group_actions if (row := _argument(parser, action)) is not None]
        if rows:
            parts += [f"## {(group.title or '').capitalize()}", _table(("argument", "default", "what it is"), rows)]
    parts += _paragraphs(_example(parser.epilog or ""))
    return "\n\n".join(parts) + "\n"


def _train_help() -> str:
    """Return Hydra's help of `scalerl train` up to its list of groups, which has pages of its own here."""
    template: str = loaded(CONF / "train.yaml")["hydra"]["help"]["template"]
    return template.partition("configuration groups and their choices")[0].strip()


def _paragraphs(text: str) -> list[str]:
    return [paragraph if paragraph.startswith("#") or paragraph.startswith("```") else _plain(paragraph)
            for paragraph in text.split("\n\n") if paragraph.strip()]  # fmt: skip


def _example(epilog: str) -> str:
    found = re.search(r"example: (scalerl .+)", epilog)
    if found is None:
        return epilog
    command, _, remark = found[1].partition("   (")
    told = f"\n\n{remark.rstrip(')').strip()[:1].upper()}{remark.rstrip(')').strip()[1:]}." if remark else ""
    rest = epilog.replace(found[0], "").strip()
    return f"## Example\n\n```\n{command}\n```{told}" + (f"\n\n{rest}" if rest else "")


def _argument(parser: argparse.ArgumentParser, action: argparse.Action) -> tuple[str, str, str] | None:
    """Return flags, default and help of an argument; None for --help and hidden arguments."""
    if action.help == argparse.SUPPRESS or isinstance(action, argparse._HelpAction):
        return None
    formatter = parser._get_formatter()
    shown = formatter._format_action_invocation(action)
    default = "" if action.default in (None, False, argparse.SUPPRESS, []) or action.required else str(action.default)
    if default and not action.option_strings:
        default = ""
    text = formatter._expand_help(action) if action.help else ""
    chosen = f" ({', '.join(map(str, action.choices))})" if action.choices and not action.metavar else ""
    return _code(shown), _code(default), _plain(text + ("" if chosen.strip(" ()") in shown.strip("{}") else chosen))


# --- configuration -------------------------------------------------------------------------------------------------


def setting_groups() -> list[str]:
    """Return the groups whose files set keys of their own: all but groups of rows and files to be copied."""
    return [group for group in groups() if group not in (*ROWS, OTHERS)]


def _configuration_index() -> str:
    rows = []
    for group in setting_groups():
        names = ", ".join(_code(choice.name) for choice in choices(group))
        rows.append((f"[`{group}`]({group.replace('/', '_')}.md)", names))
    return (
        "# Configuration keys\n\nA run is composed of one file from each group; `loss=dapo` picks a file, "
        "`loss.clip_high=0.28` sets one of its keys. What every run and study has besides: [run and study](run.md). "
        f"A study on another trainer has [keys of its own]({OTHERS}.md). "
        "Rows over the groups have pages of their own: [recipes](../recipes/recipe.md), "
        "[variants](../recipes/variant.md), [scales](../recipes/scale.md), [experiments](../recipes/experiment.md).\n\n"
        "`scalerl train --cfg job` prints the whole configuration of a run and trains nothing.\n\n"
        + _table(("group", "choices"), rows)
        + "\n"
    )


def _run_keys() -> str:
    keys = [key for key in read(CONF / "train.yaml").keys if not key.name.startswith("hydra.")]
    return (
        "# Run and study\n\nKeys that every run has, of whatever choices. But for `seed` none of them is part of a "
        "run's identity.\n\n" + _key_table(keys, {}) + "\n"
    )


def _keys_of_commands() -> str:
    base = read(CONF / OTHERS / "base" / f"{OTHERS}.yaml")
    keys = [key for key in base.keys if not key.name.startswith("hydra.")]
    parts = [
        "# A study on another trainer",
        "Keys of a file whose members are commands, of whatever trainer: [the guide](../guide/any_trainer.md). All "
        "other keys of such a file are values of its own, which `{KEY}` stands for.",
        _key_table(keys, {}),
        "Examples follow, each to be copied and set.",
    ]
    for path in sorted((CONF / OTHERS).glob("*.yaml")):
        files = [path, *sorted(path.parent.glob(f"{path.stem}.*ml"))]
        parts.append(f"## {path.stem}")
        parts += [
            f'```{file.suffix[1:]} title="{file.name}"\n{file.read_text().strip()}\n```'
            for file in dict.fromkeys(files)
        ]
    return "\n\n".join(parts) + "\n"


def _group(group: str) -> str:
    parts = [f"# {group}"]
    flag = group.removeprefix("hydra/")
    parts.append(f"Choices of the group `{group}`: `{group}=NAME` takes another file of `conf/{group}/`.")
    for base in sorted({choice.base for choice in choices(group)} - {""}):
        shared = read(CONF / f"{base}.yaml")
        keys = [replace(key, name=f"{group}.{key.name}") for key in shared.keys if not plumbing(key)]
        names = ", ".join(_code(choice.name) for choice in choices(group) if choice.base == base)
        parts += [f"## Shared by {names}", _plain(shared.about), _key_table(keys, _arguments(shared))]
    for choice in choices(group):
        parts.append(f"## {flag}={choice.name}")
        documented = find(choice.target) if choice.target else None
        if choice.about:
            parts.append(_plain(choice.about))
        if choice.sibling:
            parts.append(f"As `{flag}={choice.sibling}` but for what follows.")
        elif documented is not None:
            made = f"Made into `{choice.target}`. " if choice.target else ""
            parts.append(made + _plain(documented.summary))
            if documented.sources:
                parts.append("Source: " + "; ".join(map(_plain, documented.sources)) + ".")
        if choice.overrides:
            parts.append(_overrides_table(choice))
        keys = [key for key in choice.keys if not plumbing(key)]
        if keys:
            parts.append(_key_table(keys, _arguments(choice)))
    return "\n\n".join(parts) + "\n"


def _arguments(choice: Choice) -> dict[str, str]:
    documented = find(choice.target) if choice.target else None
    return documented.arguments if documented else {}


def plumbing(key: Key) -> bool:
    """Return whether a key is an instruction to Hydra (how to make an object), not a setting."""
    return re.search(r"(^|\.)_\w+_$", key.name) is not None


def _key_table(keys: Iterable[Key], arguments: dict[str, str]) -> str:
    rows = [
        (_code(key.name), _code(key.value), _plain(key.comment or arguments.get(key.name.split(".")[-1], "")))
        for key in keys
    ]
    return _table(("key", "default", "what it is"), rows)


def _overrides_table(choice: Choice) -> str:
    rows = [(_code(f"{group}={name}"), _plain(comment)) for group, name, comment in choice.overrides]
    return _table(("choice", "source or reason"), rows)


# --- recipes, variants, scales, experiments ------------------------------------------------------------------------

ABOUT = {
    "recipe": "A recipe is a choice for every axis; axes that it does not name are neutral. `recipe=NAME`",
    "variant": "A variant changes one choice of a recipe. `variant=NAME`; in a grid `variant=none,loss_dapo`",
    "scale": "A scale is what goes with a model's size: learning rate, batch, lengths. `scale=NAME`",
    "experiment": "An experiment is a grid that is ready to run. `--multirun experiment=NAME`",
}


def _rows(group: str) -> str:
    """Return the page of a group whose files are rows over others, each with its source."""
    parts = [f"# {group.capitalize()}s", ABOUT[group] + "."]
    if group == "variant":
        rows = [(_code(choice.name), _changes(choice), _variant_source(choice)) for choice in choices(group)]
        return "\n\n".join([*parts, _table(("variant", "what it sets", "source, or what it is"), rows)]) + "\n"
    for choice in choices(group):
        parts.append(f"## {choice.name}")
        if choice.about:
            parts.append(_plain(choice.about))
        if choice.sibling:
            parts.append(f"As `{group}={choice.sibling}` but for what follows.")
        if choice.overrides:
            parts.append(_overrides_table(choice))
        if choice.keys:
            parts.append(_key_table(choice.keys, {}))
    return "\n\n".join(parts) + "\n"


def _changes(choice: Choice) -> str:
    made = [f"{group}={name}" for group, name, _ in choice.overrides]
    made += [f"{key.name}={key.value}" for key in choice.keys if key.name != "label"]
    return ", ".join(map(_code, made)) or "nothing: the recipe as it is"


def _variant_source(choice: Choice) -> str:
    """Return the comment of the variant's file, or else the sources of its choice."""
    said = [choice.about, *(comment for _, _, comment in choice.overrides), *(key.comment for key in choice.keys)]
    if text := "; ".join(each for each in said if each):
        return _plain(text)
    sources = [source for group, name, _ in choice.overrides for source in _choice_sources(group, name)]
    return "; ".join(map(_plain, dict.fromkeys(sources)))


def _choice_sources(group: str, name: str) -> Iterator[str]:
    taken = read(CONF / group / f"{name}.yaml")
    documented = find(taken.target) if taken.target else None
    if documented is not None and documented.sources:
        yield from documented.sources
    elif taken.about:
        yield taken.about
    elif documented is not None:
        yield documented.summary


# --- Python --------------------------------------------------------------------------------------------------------


def _api() -> dict[str, str]:
    """Return the pages of the public names: mkdocstrings fills in signatures and docstrings."""
    pages = {}
    for page, (title, rooms) in API_PAGES.items():
        names = {name: home for name, home in HOME_OF.items() if {home, home.split(".")[0]} & set(rooms)}
        pages[f"api/{page}.md"] = _api_page(title, names)
    axes = sorted({home.split(".")[1] for home in HOME_OF.values() if home.startswith("axes.")} - {"choice"})
    for axis in axes:
        names = {name: home for name, home in HOME_OF.items() if home.split(".")[:2] == ["axes", axis]}
        pages[f"api/axis_{axis}.md"] = _api_page(f"Axis {axis}", names)
    return pages


def _api_page(title: str, names: dict[str, str]) -> str:
    parts = [f"# {title}", "`from lightning_scalerl import NAME`: each is imported when it is first used."]
    parts += [f"::: lightning_scalerl.{home}.{name}" for name, home in names.items()]
    return "\n\n".join(parts) + "\n"
