"""Entry point and argument parser of the console script `scalerl`.

Exit codes: 0 for success, even if the data do not decide between recipes; 1 for a failure, with one line on the problem
and the remedy; 2 for wrong usage; 130 after Ctrl-C.

This module imports little. A command's modules are imported when the command runs, so that help, and errors such as a
mistyped option or a missing file, come at once. tests/sweeps/cli/test_quick.py checks the imports.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Callable, Collection, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, cast

from sweeps import __version__
from sweeps.cli.study_commands import ROWS, train_command
from sweeps.decide.margin import MARGIN
from sweeps.decide.rules import Rules
from sweeps.errors import UserError, describe_os_error
from sweeps.fit.names import FAMILY_NAMES, METHOD
from sweeps.terminal import open_streams
from sweeps.threads import multiply_on_one_thread

if TYPE_CHECKING:
    from sweeps.fit.points import R0Mode

# Function that runs a command, and returns its exit code; None means success.
Handler = Callable[[argparse.Namespace], int | None]
# Function that adds a command to the parser, given the command's name, handler, summary and example.
Command = Callable[[str, Handler, str, str], argparse.ArgumentParser]
# Modules of commands that fit and decide, but start no members.
_CALCULATING_MODULES = ("fitting_commands", "deciding_commands", "showing_commands")
EPILOG = (
    "scalerl COMMAND --help prints the options of a command and an example. To complete commands and options with TAB: "
    "scalerl completion bash|zsh|tcsh"
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code for `sys.exit`."""
    open_streams()
    arguments = list(sys.argv[1:] if argv is None else argv)
    # Hydra's own options (--multirun, --cfg) must reach Hydra unchanged, so argparse does not see them. The help of
    # `train` lists the configuration groups, which only Hydra knows.
    if arguments[:1] == ["train"]:
        options = argparse.Namespace(handler=lambda options: train_command(options.overrides), overrides=arguments[1:])
    else:
        parser, names = _make_parser()
        if arguments and not arguments[0].startswith("-") and arguments[0] not in names:
            parser.error(_unknown_command(arguments[0], names))
        options, left = parser.parse_known_args(_join_seed_pattern(arguments) or ["--help"])
        # argparse takes sources from one place in the command line only. Sources after an option are left over, such as
        # RECIPE in `SOURCE --bounds 0 3 RECIPE`.
        if left and (
            not isinstance(getattr(options, "sources", None), list) or any(word.startswith("-") for word in left)
        ):
            parser.error(f"unrecognized arguments: {' '.join(left)}")
        if left:
            options.sources += left
    handler: Handler = options.handler
    try:
        code = handler(options)
        sys.stdout.flush()
        return code or 0
    except _one_line_errors() as error:
        from sweeps.report.plain import one_line

        print(f"scalerl: {one_line(str(error))}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        # The reader (`head`, a pager) closed the pipe. Redirect stdout so that Python does not complain at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if (reason := describe_os_error(error)) is None:
            raise
        print(f"scalerl: {reason}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("scalerl: interrupted", file=sys.stderr)
        return 130  # the exit code of shells after SIGINT


def _join_seed_pattern(arguments: Sequence[str]) -> list[str]:
    """Join `--seed-from` with a pattern such as `-s(\\d+)`, which argparse would take for an option."""
    words: list[str] = []
    for word in arguments:
        if words and words[-1] == "--seed-from" and word.startswith("-") and "(" in word:
            words[-1] += f"={word}"
        else:
            words.append(word)
    return words


def _one_line_errors() -> tuple[type[Exception], ...]:
    """Return the exception types that are reported in one line. It imports modules, so call it only after an error."""
    from sweeps.run.lease import LeaseLostError

    return (UserError, LeaseLostError)


def _unknown_command(word: str, names: Collection[str]) -> str:
    from difflib import get_close_matches

    near = get_close_matches(word, names, n=1)
    meant = f"; did you mean {near[0]}?" if near else ";"
    return f"{word!r} is no command{meant} scalerl --help lists all"


def _lazy_handler(module: str, function: str) -> Handler:
    def handler(options: argparse.Namespace) -> int | None:
        if module in _CALCULATING_MODULES:
            multiply_on_one_thread()
        code: int | None = getattr(import_module(f"sweeps.cli.{module}"), function)(options)
        return code

    return handler


def make_parser() -> argparse.ArgumentParser:
    """Make the argument parser of all commands; `scalerl completion` uses it too."""
    return _make_parser()[0]


def _make_parser() -> tuple[argparse.ArgumentParser, Collection[str]]:
    parser = argparse.ArgumentParser(
        prog="scalerl",
        description="Run RL recipes, fit their reward over compute, and rank them with a stated certainty.",
        epilog=EPILOG,
    )
    parser.add_argument(
        "--version", action="version", version=f"scalerl {__version__}", help="print the version and exit"
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def command(name: str, handler: Handler, summary: str, example: str) -> argparse.ArgumentParser:
        added = commands.add_parser(
            name,
            help=summary,
            description=summary[:1].upper() + summary[1:] + ".",
            epilog=f"example: {example}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        added.set_defaults(handler=handler)
        return added

    # This parser is only for help and completion: `main` passes the words of `train` to Hydra unchanged.
    train = command(
        "train",
        lambda options: train_command(options.overrides),
        "train one run, or a grid with --multirun (takes Hydra's overrides and options)",
        "scalerl train variant=loss_dapo seed=1 --cfg job",
    )
    train.add_argument("overrides", nargs="*", metavar="OVERRIDE", help="as for python -m lightning_scalerl.train")
    _fitting(command)
    _deciding(command)
    _showing(command)
    _studying(command)
    _reading(command)
    completion = command(
        "completion",
        _lazy_handler("completion", "completion_command"),
        "print a shell script that completes commands and options with TAB",
        'scalerl completion bash   (to enable it, put this into ~/.bashrc: eval "$(scalerl completion bash)")',
    )
    completion.add_argument("shell", choices=["bash", "zsh", "tcsh"])
    return parser, tuple(commands.choices)


def _fitting(command: Command) -> None:
    fit = command(
        "fit",
        _lazy_handler("fitting_commands", "fit_command"),
        "fit reward over compute per recipe: A, B and C_mid with intervals, and a verdict",
        "scalerl fit examples/curves.csv --max-compute 8000",
    )
    _add_source(fit)
    fit.add_argument("--json", action="store_true", help="print a JSON list with one object per recipe")
    fit.add_argument(
        "--family",
        choices=[*FAMILY_NAMES, "all"],
        default="sigmoid",
        metavar="F",
        help=f"curve to fit: {', '.join(FAMILY_NAMES)}; all: the sigmoid, and a comparison of all families by "
        "forecasts and AICc",
    )
    fit.add_argument(
        "--method",
        choices=["posterior", METHOD],
        default="posterior",
        help=f"{METHOD}: the published procedure with its grid, compute in GPU-hours (takes seconds per recipe, gives "
        "no "
        "intervals); default: %(default)s",
    )
    fit.add_argument(
        "--sensitivity",
        action="store_true",
        help="also refit without early points, with other rules for R0, robust weights and shorter windows, to see "
        "whether A "
        "changes",
    )


def _deciding(command: Command) -> None:
    ranking = command(
        "rank",
        _lazy_handler("deciding_commands", "rank_command"),
        "rank recipes by asymptote, ties by efficiency; report 'undecided' if the data do not decide",
        "scalerl rank examples/curves.csv --budget 16000",
    )
    _add_source(ranking)
    _add_ranking(ranking)
    ranking.add_argument(
        "--axes",
        nargs="?",
        const="",
        metavar="X,Y",
        help="also rank by several measures of compute (steps, device hours, FLOPs), given as for --x; for runs of a "
        "study the "
        "default is all of them",
    )
    ranking.add_argument(
        "--rate", type=_number, metavar="MONEY", help="price of a device hour; with --axes, also rank by cost"
    )
    ranking.add_argument("--json", action="store_true", help="print a JSON object")

    planning = command(
        "plan",
        _lazy_handler("deciding_commands", "plan_command"),
        "propose the next runs; compute needed for a target, split of a budget, size of a planned study, best model "
        "size",
        "scalerl plan examples/curves.csv --target 0.6",
    )
    _add_source(planning, "*")
    _add_planning(planning)
    planning.set_defaults(refuse=planning.error)
    planning.add_argument("--json", action="store_true", help="print a JSON object")

    compare = command(
        "compare",
        _lazy_handler("deciding_commands", "compare_command"),
        "compare two recipes, or all with one: reward at the same compute, compute to the same reward, asymptote",
        "scalerl compare examples/curves.csv scalerl scalerl+loss=dapo",
    )
    _add_source(compare, more="; one recipe or two may follow the sources")
    compare.add_argument("--budget", type=_number, metavar="C", help="also print the difference at this compute")
    compare.add_argument(
        "--margin",
        type=_number,
        metavar="R",
        help=f"recipes are reported as the same if the whole interval of their difference in reward is within this; "
        f"default: the study's launch.margin, or {MARGIN:g} of the scale",
    )
    compare.add_argument("--json", action="store_true", help="print a JSON object")

    decide = command(
        "decide",
        _lazy_handler("deciding_commands", "decide_command"),
        "keep or discard a change by the final values of a few runs and the noise floor of repeated runs",
        "scalerl decide a1b2c3d b2c3d4e --from examples/results.tsv --lower-is-better",
    )
    decide.add_argument("baseline", metavar="A", help="recipe or commit that is kept so far")
    decide.add_argument("candidate", metavar="B", help="recipe or commit that may replace it")
    decide.add_argument(
        "--from",
        dest="source",
        required=True,
        metavar="FILE",
        help="a table with one row per run (TSV, CSV, JSONL, Parquet, Excel); rows of the same recipe are repeated "
        "runs",
    )
    decide.add_argument("--by", metavar="COL", help="recipe column; default: commit or recipe")
    decide.add_argument("--y", metavar="COL", help="value column; default: value, reward, score or val_bpb")
    decide.add_argument("--status", metavar="COL", help="column with the status of each run; default: status")
    decide.add_argument(
        "--failed", metavar="WORD,WORD", help="statuses that mean a failed run; default: crash, oom and others"
    )
    decide.add_argument("--lower-is-better", action="store_true", help="the value is a loss or an error rate")
    decide.add_argument(
        "--margin", type=_number, metavar="D", help="smallest difference that matters; default: the noise floor"
    )
    decide.add_argument("--json", action="store_true", help="print a JSON object")

    effects = command(
        "effects",
        _lazy_handler("deciding_commands", "effects_command"),
        "estimate the effect of each axis of a grid on asymptote and compute, and propose the cells to run next",
        "scalerl effects examples/grid.csv",
    )
    _add_source(effects)
    effects.add_argument(
        "--interaction",
        action="append",
        default=[],
        type=_two_axes,
        metavar="AXIS:AXIS",
        help="also estimate the interaction of two axes; repeatable",
    )
    effects.add_argument("-o", "--output", metavar="FILE", help="write a forest plot: .svg, .png or .pdf")
    effects.add_argument("--json", action="store_true", help="print a JSON object")

    race = command(
        "race",
        _lazy_handler("deciding_commands", "race_command"),
        "show which recipes a race would have stopped before the budget, look by look; does not stop any run",
        "scalerl race examples/curves.csv --budget 16000",
    )
    _add_source(race)
    race.add_argument(
        "--budget",
        type=_number,
        required=True,
        metavar="C",
        help="compute of one run, at which the best recipe is wanted",
    )
    race.add_argument(
        "--p-ahead",
        type=_number,
        metavar="P",
        help="stop a recipe below this probability of ending ahead of the favourite; default: %(default)g",
    )
    race.add_argument(
        "--looks",
        type=_whole_number,
        metavar="K",
        help="stop only after so many looks in a row below it; default: %(default)s",
    )
    race.add_argument(
        "--first", type=_number, metavar="S", help="fraction of the budget at the first look; default: %(default)g"
    )
    race.add_argument(
        "--growth", type=_number, metavar="G", help="factor of compute from one look to the next; default: %(default)g"
    )
    race.add_argument(
        "--loss",
        type=_number,
        metavar="L",
        help="largest expected loss of all stops together, as a fraction of the reward's scale; default: %(default)g",
    )
    race.set_defaults(p_ahead=Rules.p_ahead, looks=Rules.looks, first=Rules.first, growth=Rules.growth, loss=Rules.loss)
    race.add_argument("--json", action="store_true", help="print a JSON object with all looks")


def _showing(command: Command) -> None:
    report = command(
        "report",
        _lazy_handler("showing_commands", "report_command"),
        "write a self-contained HTML page, and figures and ranking.csv next to it",
        "scalerl report examples/study -o report.html",
    )
    _add_source(report)
    _add_ranking(report)
    report.add_argument("-o", "--output", default="report.html", metavar="FILE", help="default: %(default)s")
    report.add_argument(
        "--beside", metavar="SOURCE", help="another study, to be shown next to this one; it is fitted in the same way"
    )
    report.add_argument("--title", help="title of the page; default: the name of the first source")
    report.add_argument(
        "--history",
        action="store_true",
        help="also show A as fitted at growing compute, and earlier forecasts next to what was observed (about a "
        "second per "
        "recipe)",
    )

    watch = command(
        "watch",
        _lazy_handler("showing_commands", "watch_command"),
        "watch a study live: members, curves, P(best), A over time, and warnings where a run leaves its forecast",
        "scalerl watch examples/curves.csv --once",
    )
    _add_source(watch)
    watch.add_argument(
        "--interval",
        type=_number,
        default=30.0,
        metavar="S",
        help="seconds between two refreshes; default: %(default)g",
    )
    watch.add_argument("--once", action="store_true", help="process what is there and exit")
    watch.add_argument("--json", action="store_true", help="print one JSON object per line")
    watch.add_argument(
        "--out",
        metavar="FILE",
        help="append every snapshot to this file, after reading the ones in it; default: fits.jsonl in a run or sweep "
        "directory, no file for tables and for several sources",
    )

    publish = command(
        "publish",
        _lazy_handler("showing_commands", "publish_command"),
        "write fits, bands and the ranking to MLflow and print the link to the chart",
        "scalerl publish examples/study --mlflow sqlite:///mlflow.db",
    )
    publish.add_argument("sources", nargs="+", metavar="SOURCE", help="a run or sweep directory")
    publish.add_argument("--mlflow", required=True, metavar="URI", help="tracking URI")


def _studying(command: Command) -> None:
    init = command(
        "init",
        _lazy_handler("init_command", "init_command"),
        "make a folder to start from, which runs as it is: task, reward, recipe, study, batch script",
        "scalerl init my_study",
    )
    init.add_argument("folder", metavar="FOLDER", help="a new or empty folder")

    adopt = command(
        "adopt",
        _lazy_handler("study_commands", "adopt_command"),
        "add runs of other tools to a study as members, so that every command on the study includes them",
        "scalerl adopt my_study --from examples/curves.csv --by recipe,seed",
    )
    adopt.add_argument("study", metavar="STUDY", help="a study's folder, or a new one")
    adopt.add_argument(
        "--from",
        dest="sources",
        nargs="+",
        required=True,
        metavar="SOURCE",
        help="as for scalerl fit: wandb:entity/project, mlflow:URI#experiment, W&B folders, tables, logs; or a folder "
        "of logs",
    )
    adopt.add_argument(
        "--by",
        action="append",
        default=[],
        metavar="NAME,NAME=COL",
        help="columns or parameters that distinguish recipes and seeds: loss,seed or loss=config.loss_type; repeatable",
    )
    adopt.add_argument("--metric", metavar="M", help="name of the reward in a log")
    adopt.add_argument("--x", metavar="COL", help="compute column or metric; default: as for scalerl fit")
    adopt.add_argument("--y", metavar="COL", help="reward column of a table")
    adopt.add_argument(
        "--unit",
        choices=["device_hours", "virtual_device_hours", "flops", "tokens", "steps"],
        help="unit of the compute column, if its name does not say",
    )
    adopt.add_argument(
        "--set", metavar="NAME", help="evaluation set that the reward was measured on; default: the study's, or heldout"
    )
    adopt.add_argument(
        "--seed-from",
        metavar="REGEX",
        help="regular expression that finds the seed in names of runs, as for scalerl fit",
    )
    adopt.add_argument(
        "--running", action="store_true", help="also add runs that have not ended, up to their last evaluation"
    )
    adopt.add_argument("--json", action="store_true", help="print a JSON object")

    memory = command(
        "memory",
        _lazy_handler("memory_command", "memory_command"),
        "predict the memory of a run on each device, by part, before any compute is spent",
        "scalerl memory scale=0.6b model.width=256 --devices 8 --gib 80",
    )
    memory.add_argument("overrides", nargs="*", metavar="OVERRIDE", help="as for scalerl train")
    memory.add_argument(
        "--devices",
        type=_whole_number,
        metavar="N",
        help="number of training devices; default: the number in strategy.*, or 1",
    )
    memory.add_argument(
        "--gib", type=_number, metavar="G", help="memory of a device: exit with 1 and a remedy if the run does not fit"
    )
    memory.add_argument("--json", action="store_true", help="print a JSON object, sizes in bytes")
    translate = command(
        "translate",
        _lazy_handler("translate_command", "translate_command"),
        "translate a recipe into another trainer's settings, and list the choices that have no counterpart there",
        "scalerl translate recipe=scalerl_core aggregation=token --to trl",
    )
    translate.add_argument("overrides", nargs="*", metavar="OVERRIDE", help="as for scalerl train")
    translate.add_argument("--to", required=True, metavar="TRAINER", help="trl, verl, prime-rl or skyrl")
    translate.add_argument(
        "--config-dir",
        action="append",
        default=[],
        metavar="DIR",
        help="your own folder of configuration files, as for scalerl train",
    )
    translate.add_argument(
        "-o", "--output", metavar="FILE", help="write the trainer's settings to this file instead of the terminal"
    )
    translate.add_argument("--json", action="store_true", help="print a JSON object: settings, missing, notes, axes")

    status = command(
        "status",
        _lazy_handler("study_commands", "status_command"),
        "show which members run, wait, are finished or failed, and why; changes nothing",
        "scalerl status examples/study",
    )
    status.add_argument("study", metavar="SWEEP", help="the folder that a --multirun wrote to")
    status.add_argument("--all", action="store_true", help=f"show every member; default: the {ROWS} most important")
    status.add_argument("--json", action="store_true", help="print a JSON object")

    collect = command(
        "collect",
        _lazy_handler("study_commands", "collect_command"),
        "update a study on a cluster: classify ended jobs, submit what is left, update MLflow, rank",
        "scalerl collect examples/study",
    )
    collect.add_argument("study", metavar="SWEEP", help="the folder that a --multirun wrote to")
    collect.add_argument("--wait", action="store_true", help="wait until every member is done")
    _add_trust(collect)
    collect.add_argument("--again", action="store_true", help="retry members that failed")

    clean = command(
        "clean",
        _lazy_handler("study_commands", "clean_command"),
        "list files of a study that can be deleted, with their sizes; delete them with --yes",
        "scalerl clean examples/study",
    )
    clean.add_argument("study", metavar="SWEEP", help="the folder that a --multirun wrote to")
    clean.add_argument("--yes", action="store_true", help="delete the files; without it, they are only listed")
    clean.add_argument(
        "--checkpoints",
        action="store_true",
        help="checkpoints of finished members (included by default, like --leftovers)",
    )
    clean.add_argument(
        "--keep",
        type=_whole_number,
        default=0,
        metavar="N",
        help="number of newest checkpoints to keep per member; default: %(default)s",
    )
    clean.add_argument("--leftovers", action="store_true", help="unfinished files of killed processes")
    clean.add_argument("--logs", action="store_true", help="logs of finished members")
    clean.add_argument("--attempts", action="store_true", help="job records of finished members, and ended submissions")
    clean.add_argument(
        "--rollouts", action="store_true", help="stored rollouts of finished members (scalerl rollouts shows them)"
    )

    export = command(
        "export",
        _lazy_handler("study_commands", "export_command"),
        "write the model of a run as a folder that transformers loads, with tokenizer and model card",
        "scalerl export outputs/mine/runs/0f3a9c21d4e7 my_model --dtype bf16",
    )
    export.add_argument("run", metavar="RUN", help="a run's folder: outputs/STUDY/runs/IDENTITY")
    export.add_argument("directory", metavar="DIR", help="a new or empty folder")
    export.add_argument(
        "--dtype", choices=["fp32", "bf16", "fp16"], default="fp32", help="type of the weights; default: %(default)s"
    )
    _add_trust(export)
    export.add_argument("--step", type=_whole_number, metavar="N", help="step of the checkpoint; default: the newest")


def _reading(command: Command) -> None:
    rollouts = command(
        "rollouts",
        _lazy_handler("rollout_commands", "rollouts_command"),
        "show completions that a run has stored: whole groups with rewards, outcomes and weight versions",
        "scalerl rollouts outputs/mine/runs/0f3a9c21d4e7 --only wrong --limit 2",
    )
    rollouts.add_argument("run", metavar="RUN", help="a run's folder: outputs/STUDY/runs/IDENTITY")
    rollouts.add_argument("--step", type=_steps, metavar="N|N:M", help="only this step, or a range of steps")
    rollouts.add_argument("--prompt", metavar="ID", help="only this prompt")
    rollouts.add_argument("--difficulty", metavar="D", help="only prompts of this difficulty")
    rollouts.add_argument("--source", metavar="TASK", help="only this task of a mixture")
    rollouts.add_argument("--outcome", choices=["score", "abstain", "error"], help="only completions with this outcome")
    rollouts.add_argument("--only", choices=["right", "wrong"], help="only completions that were graded like this")
    rollouts.add_argument(
        "--limit", type=_whole_number, default=3, metavar="K", help="print the last K groups; 0: all; default: 3"
    )
    rollouts.add_argument("--full", action="store_true", help="print texts in full")
    rollouts.add_argument("--json", action="store_true", help="print a JSON list with one object per group")

    rescore = command(
        "rescore",
        _lazy_handler("rollout_commands", "rescore_command"),
        "grade the stored rollouts of a run again, with its own verifier or another; generates nothing",
        "scalerl rescore outputs/mine/runs/0f3a9c21d4e7 --reward my_rewards.py:strict",
    )
    rescore.add_argument("run", metavar="RUN", help="a run's folder: outputs/STUDY/runs/IDENTITY")
    rescore.add_argument(
        "--reward", metavar="R", help="math, choice, ... or file.py:function; default: the reward of the run's task"
    )
    _add_trust(rescore)
    rescore.add_argument("--out", metavar="FILE", help="write the groups with their new grades (JSON lines)")
    rescore.add_argument("--json", action="store_true", help="print a JSON list with one object per task")

    noise = command(
        "noise",
        _lazy_handler("rollout_commands", "noise_command"),
        "repeat an evaluation with the same weights, to measure the error of one evaluation",
        "scalerl noise my_model gsm8k scale=0.6b task.train=train.jsonl 'task.heldout={test: test.jsonl}' --repeats 5",
    )
    noise.add_argument("model", metavar="MODEL", help="a run's folder, or a model's folder or hub id")
    noise.add_argument("overrides", nargs="*", metavar="TASK OVERRIDE", help="for a model: the task and its settings")
    _add_trust(noise)
    noise.add_argument(
        "--repeats", type=int, default=5, metavar="N", help="number of evaluations; default: %(default)s"
    )
    noise.add_argument("--json", action="store_true", help="print a JSON list with one object per held-out set")


def _add_trust(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--trust",
        action="store_true",
        help="run all code that the folder names; default: only this project's public names and your own code "
        "(docs/guide/study.md)",
    )


def _steps(text: str) -> tuple[int, int | None]:
    """Parse `N` into (N, N) and `N:M` into (N, M), with M None if it is omitted."""
    first, colon, last = text.partition(":")
    try:
        return _whole_number(first or "0"), (_whole_number(last) if last else None) if colon else _whole_number(first)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no step; give one, as 64, or a range, as 8:64") from error


def _add_source(parser: argparse.ArgumentParser, many: str = "+", more: str = "") -> None:
    """Add the arguments for sources and fits. `many` is `nargs` of the sources, `more` the end of their help."""
    parser.add_argument(
        "sources",
        nargs=many,
        metavar="SOURCE",
        help="a run or sweep directory, mlflow:URI#experiment, wandb:entity/project, a CSV, JSONL or Parquet table, "
        "TensorBoard event files, or a log of TRL, verl, W&B, Trackio or CSVLogger (docs/reference/sources.md)" + more,
    )
    parser.add_argument(
        "--r0",
        type=_r0,
        default="first",
        metavar="X|first|free",
        help="reward before training: a number, the first evaluation (default), or fitted (free)",
    )
    parser.add_argument("--robust", action="store_true", help="give less weight to evaluations far from the curve")
    parser.add_argument("--min-compute", type=_number, metavar="C", help="leave out evaluations below this compute")
    parser.add_argument("--max-compute", type=_number, metavar="C", help="leave out evaluations above this compute")
    parser.add_argument(
        "--metric",
        metavar="M",
        help="the reward: eval/<set>/pass_rate of runs of a study (default: the first set), or a metric of a log; "
        "all: one curve per set",
    )
    parser.add_argument(
        "--x",
        metavar="COL",
        help="compute column (default: compute), or measure of compute in runs and logs; order: the row number; "
        "sum:COL: the "
        "running sum of a log's column",
    )
    parser.add_argument("--y", metavar="COL", help="reward column (default: reward); all: each column is a run")
    parser.add_argument(
        "--bounds",
        nargs=2,
        type=_finite,
        metavar=("LOW", "HIGH"),
        help="lowest and highest possible reward, on the scale of the source; default: the first of 0 1, -1 1 and 0 "
        "100 that "
        "contains all rewards, else no bounds",
    )
    parser.add_argument(
        "--lower-is-better",
        action="store_true",
        help="the reward is a loss or an error rate: it is shown as minus the metric; give --r0 and --target as minus "
        "the metric",
    )
    parser.add_argument("--by", metavar="COL", help="recipe column (default: recipe), or a tag or parameter in MLflow")
    parser.add_argument(
        "--seed-from",
        metavar="REGEX",
        help="regular expression with one group, which finds the seed in names of runs, such as 'ppo-s(\\d+)'",
    )
    parser.add_argument("--size", metavar="COL", help="model size: a column or configuration key; one curve per size")
    parser.add_argument(
        "--group",
        action="append",
        default=[],
        metavar="COL",
        help="make one curve per value of this column, too; repeatable",
    )


def _add_ranking(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--budget", type=_number, metavar="C", help="also print the reward at this compute")
    parser.add_argument(
        "--baseline",
        metavar="RECIPE",
        help="recipe to compare the others with; default: the recipe that the variants change",
    )
    parser.add_argument(
        "--margin",
        type=_number,
        metavar="A",
        help=f"recipes whose A differ by less are tied; default: the study's launch.margin, or {MARGIN:g} of the scale",
    )
    parser.add_argument(
        "--sets",
        metavar="A,B",
        help="also compare the recipes over these evaluation sets together: interquartile mean, bootstrap",
    )


def _add_planning(parser: argparse.ArgumentParser) -> None:
    goal = parser.add_mutually_exclusive_group()
    goal.add_argument("--target", type=_finite, metavar="R", help="reward to reach")
    goal.add_argument(
        "--design",
        nargs="+",
        metavar="OVERRIDE",
        help="overrides of a planned study, as for scalerl train --multirun: prints its members, device hours and the "
        "differences that it can detect",
    )
    goal.add_argument(
        "--budget",
        type=_number,
        metavar="C",
        help="further compute for all recipes together; with --size, --rollouts or --group, compute of one run",
    )
    parser.add_argument(
        "--margin",
        type=_number,
        metavar="A",
        help="a recipe whose A is within this of the best is not a wrong choice; default: the study's launch.margin, "
        f"or {MARGIN:g} of the scale",
    )
    parser.add_argument(
        "--sizes", default="", metavar="LIST", help="further model sizes to predict, with --size: 1e9,14B"
    )
    parser.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        help="with --size: write a figure of the best size over budgets: .svg, .png or .pdf",
    )
    parser.add_argument(
        "--like",
        metavar="SOURCE",
        help="with --design: an earlier study, whose errors and costs are used for the prediction",
    )
    parser.add_argument("--rate", type=_number, metavar="MONEY", help="with --design: price of a device hour")
    parser.add_argument("--rollouts", metavar="COL", help="rollouts per prompt, if they vary: a column or key")
    parser.add_argument(
        "--difficulty", metavar="COL", help="difficulty of the evaluated prompts: a column, with --rollouts"
    )


def _two_axes(text: str) -> tuple[str, str]:
    """Parse `AXIS:AXIS` into two different axis names."""
    one, _, two = text.partition(":")
    if not (one and two) or one == two:
        raise argparse.ArgumentTypeError(f"{text!r} is no pair of axes such as loss:async_mode")
    return one, two


def _whole_number(text: str) -> int:
    """Parse a whole number of 0 or more."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 0 or more")
    return int(text)


def _number(text: str) -> float:
    """Parse a finite number of 0 or more."""
    value = _finite(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of 0 or more")
    return value


def _finite(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number")
    return value


def _r0(text: str) -> R0Mode:
    if text in ("first", "free"):
        return cast("R0Mode", text)
    try:
        return _finite(text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number nor first or free") from error


if __name__ == "__main__":
    sys.exit(main())
