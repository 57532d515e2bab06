"""Command line of `scalerl train`, or `python -m lightning_scalerl.train`: one run, or a study with `--multirun`.

On SIGUSR2 or SIGTERM a single run saves a checkpoint at the next clean point (docs/guide/training.md) and exits with
code 85. The same command continues it. slurm/single_run.sbatch requeues its job on that code. Ctrl-C does the same with
code 130; a second Ctrl-C ends the run at once, without saving.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from lightning_scalerl.checks import ONE_TRAINER, CannotGoOnError, ConfigurationError
from lightning_scalerl.compat.hydra import flags
from lightning_scalerl.composition import check_choices, conf_dir, explain, explain_other, help_text
from lightning_scalerl.member.command import plan_commands, run_command, shared_groups, study_file, with_study_name
from sweeps.errors import UserError, describe_os_error, errors_naming
from sweeps.run.interruption import RunInterruptedError, interruption
from sweeps.run.journal import read_journal
from sweeps.run.lease import LeaseLostError
from sweeps.run.progress import changes_since, check_journal_owner, final_reason, is_done
from sweeps.run.provenance import changes_line
from sweeps.run.spec import RunSpec, run_of_curve
from sweeps.run.user_config_dirs import user_folders
from sweeps.terminal import open_streams

EXIT_INTERRUPTED = 85
EXIT_CTRL_C = 130
# Values of `cluster` that a single run accepts, because it runs in this process.
LOCAL_CLUSTERS = ("cluster=local", "cluster=debug")
# Options with which the command only prints something.
PRINTING_OPTIONS = {"--help", "-h", "--hydra-help", "--cfg", "-c", "--info", "-i"}


def main() -> None:
    """Run the command line. A user's mistake is reported in one line with exit code 1, without a traceback."""
    open_streams()
    # `--detach` is our option, not Hydra's: a short form of the launcher's setting.
    words = ["hydra.launcher.detach=true" if word == "--detach" else word for word in sys.argv[1:]]
    sys.argv[1:] = _options_first(words)
    # Without this, Hydra prints its own traceback and exits instead of raising.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    _single_runs.clear()
    try:
        folders, overrides = _folders_and_overrides()
        if (file := study_file(_config_name(), folders)) is not None:
            _run_commands(file)
            return
        check_choices(overrides, folders)
        if _config_name() is None and {"--help", "-h"} & set(sys.argv[1:]):
            print(help_text(folders))
            return
        # Check for several trainers before composition, which would complain about a key that the other trainer does
        # not have.
        if any(word.lstrip("+").startswith("trainer=") and "," in word for word in overrides):
            raise ConfigurationError(ONE_TRAINER)
        _check_printed_config()
        _hydra_main()
        with interruption.on_signals([signal.SIGUSR2, signal.SIGTERM] if _single_runs else []):
            for overrides, folders in _single_runs:
                _train(overrides, folders)
    except KeyboardInterrupt:
        if _single_runs:  # a study has printed its own line
            print("scalerl train: interrupted; the same command continues the run", file=sys.stderr)
        sys.exit(EXIT_CTRL_C)
    except RunInterruptedError as stop:
        print(f"scalerl train: saved ({stop}); the same command continues the run", file=sys.stderr)
        sys.exit(EXIT_CTRL_C if interruption.reason == signal.SIGINT.name else EXIT_INTERRUPTED)
    except LeaseLostError as error:
        sys.exit(_complain(str(error)))
    except (ConfigurationError, UserError, CannotGoOnError) as error:
        sys.exit(_complain(str(error)))
    except (HydraException, OmegaConfBaseException) as error:
        folders, overrides = _folders_and_overrides()
        other_trainer = study_file(_config_name(), folders) is not None
        sys.exit(_complain(explain_other(error) if other_trainer else explain(error, folders, overrides)))
    except OSError as error:
        if isinstance(error, BrokenPipeError) and PRINTING_OPTIONS & {word.partition("=")[0] for word in sys.argv[1:]}:
            # The reader (`head`, a pager) has closed the pipe. /dev/null keeps Python from failing to flush at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return
        # A missing file is an error of the code that opens it (a task, a verifier): keep the traceback.
        if (message := describe_os_error(error, missing=False)) is None:
            raise
        sys.exit(_complain(message))


def _check_printed_config() -> None:
    """Check the options that make Hydra print (--cfg, --info). With --cfg, also make the checks of a run."""
    options = {word.partition("=")[0] for word in sys.argv[1:]}
    if (printing := options & {"--cfg", "-c", "--info", "-i"}) and options & {"--multirun", "-m"}:
        raise ConfigurationError(f"{min(printing)}: prints the configuration of one run; leave out --multirun")
    if printing & {"--cfg", "-c"}:
        from lightning_scalerl.member.identify import check_printed_config

        folders, overrides = _folders_and_overrides()
        check_printed_config(overrides, folders)


def _options_first(words: Sequence[str]) -> list[str]:
    """Return a command line's words, options first, because Hydra needs all overrides together."""
    options: list[str] = []
    overrides: list[str] = []
    actions = {name: action for action in flags() for name in action.option_strings}
    remaining = list(words)
    while remaining:
        word = remaining.pop(0)
        if not word.startswith("-"):
            overrides.append(word)
            continue
        options.append(word)
        if (action := actions.get(word)) is None or not remaining:
            continue
        if action.nargs is None or (action.nargs == "?" and remaining[0] in (action.choices or ())):
            options.append(remaining.pop(0))
        elif action.nargs == "?":  # write the default, or the option would take the first override as its value
            options[-1] = f"{action.option_strings[0]}={action.const}"
    return [*options, *overrides]


def _folders_and_overrides() -> tuple[list[str], list[str]]:
    """Return the user's configuration folders and overrides from the command line, without Hydra."""
    words = sys.argv[1:]
    folders = [words[i + 1] for i, word in enumerate(words[:-1]) if word in ("--config-dir", "-cd")]
    folders += [word.partition("=")[2] for word in words if word.startswith("--config-dir=")]
    overrides = [word for word in words if "=" in word and not word.startswith(("-", "hydra."))]
    return [str(Path(folder).resolve()) for folder in folders if Path(folder).is_dir()], overrides


def _config_name() -> str | None:
    words = sys.argv[1:]
    names = [words[i + 1] for i, word in enumerate(words[:-1]) if word in ("--config-name", "-cn")]
    names += [word.partition("=")[2] for word in words if word.startswith("--config-name=")]
    return names[-1] if names else None


def _run_commands(file: Path) -> None:
    """Run a study, or a single member, of another trainer's command."""
    sys.argv[1:] = with_study_name(sys.argv[1:], file)
    # The file's folder becomes Hydra's main folder, so that no other file of the same name is found first.
    try:
        with shared_groups():
            hydra.main(version_base="1.3", config_path=str(file.parent), config_name=file.stem)(_record_single_run)()
    except ValueError as error:  # raised by Hydra if a group is set to a number
        if "Config group override" not in str(error):
            raise
        raise ConfigurationError(f"{error}; give cluster= and hydra/...= the name of a file") from error
    with interruption.on_signals([signal.SIGUSR2, signal.SIGTERM] if _single_runs else []):
        for overrides, folders in _single_runs:
            (spec,) = plan_commands([overrides], [*folders, str(file)])
            _run_alone(spec, run_command)


def _complain(message: str) -> int:
    print(f"scalerl train: {' '.join(message.split())}", file=sys.stderr)
    return 1


# Hydra reads the command line and answers --help and --cfg. The training happens after Hydra has returned, so that
# Hydra's error reports do not replace this module's.
_single_runs: list[tuple[list[str], list[str]]] = []


@hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name="train")  # type: ignore[untyped-decorator]
def _hydra_main(config: DictConfig) -> None:
    _record_single_run(config)


def _record_single_run(config: DictConfig) -> None:
    """Record a single run's overrides and folders for `main`, which trains after Hydra has returned."""
    hydra_config = HydraConfig.get()
    _single_runs.append((list(hydra_config.overrides.task), user_folders(hydra_config)))


def _train(overrides: list[str], folders: list[str]) -> None:
    """Train a single run in this process, with TRL if the overrides say `trainer=trl`."""
    # A slow import, made only after the configuration has been composed without errors.
    from lightning_scalerl.member.identify import plan_members

    cluster_words = [word for word in overrides if word.startswith("cluster=") and word not in LOCAL_CLUSTERS]
    cluster_words += [word for word in sys.argv[1:] if word == "hydra/launcher=submitit_slurm"]
    if cluster_words:
        raise UserError(f"{cluster_words[0]}: a single run runs in this process; add --multirun to submit it")
    if "trainer=trl" in (entry.lstrip("+") for entry in overrides):
        from lightning_scalerl.member.trl import plan_trl

        (spec,) = plan_trl([overrides], folders)
        _run_alone(spec, run_command)
        return
    (spec,) = plan_members([overrides], folders)
    _run_alone(spec, _run_with_our_trainer)


def _run_with_our_trainer(run_dir: Path, progress: bool) -> None:
    # This imports torch, which is slow and not needed for a run that is already done.
    from lightning_scalerl.member.run import run_member

    run_member(run_dir, progress)


def _run_alone(spec: RunSpec, run_member: Callable[[Path, bool], None]) -> None:
    """Run a member in this process by `run_member`; if it is already done, only print how it could continue."""
    runs_dir = Path(spec.config["output_dir"]) / "runs"
    if (other := run_of_curve(runs_dir, spec.curve)) is not None:
        spec = spec.labelled_like(RunSpec.read(other))
    run_dir = runs_dir / spec.run
    check_journal_owner(run_dir, spec.run)
    if is_done(run_dir, spec.steps, spec.run):
        further = final_reason(run_dir) or "a larger budget.steps continues it"
        print(f"{spec.title}: done already, {run_dir}; {further}")
        if changes := changes_since(read_journal(run_dir), spec.folders, spec.config):
            print(
                f"warning: {spec.title} was trained with other code: {changes_line(changes)}; its results are those of "
                "the earlier code; study=NAME trains it with this code",
                file=sys.stderr,
            )
        return
    with errors_naming("output_dir"):
        spec.write(run_dir)
    for line in spec.cautions:
        print(line, file=sys.stderr)
    print(f"{spec.title}: {run_dir}")
    # If Ctrl-C is ignored already, as under nohup, it stays ignored.
    ctrl_c = [signal.SIGINT] if signal.getsignal(signal.SIGINT) is signal.default_int_handler else []
    try:
        with interruption.on_signals(ctrl_c):
            run_member(run_dir, True)
    except SystemExit as error:  # Lightning's Trainer exits with code 1 on KeyboardInterrupt
        if isinstance(error.__context__, KeyboardInterrupt):
            raise error.__context__ from None
        raise


if __name__ == "__main__":
    main()
