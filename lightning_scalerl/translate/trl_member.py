"""Training of a run by TRL: write the specification for TRL's interpreter, or refuse a run that TRL cannot express.

    python -m lightning_scalerl.translate.trl_member --python PYTHON --folder FOLDER OVERRIDE...

trains one run in FOLDER with PYTHON, an interpreter that has TRL, or resumes the run that is already there.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning_scalerl.axes.length_control import Penalty
from lightning_scalerl.checks import ConfigurationError
from lightning_scalerl.composition import build
from lightning_scalerl.measure.flops import FlopModel
from lightning_scalerl.model.load import load_model
from lightning_scalerl.task.arithmetic import ArithmeticTask
from lightning_scalerl.translate.record import Run, Translation
from lightning_scalerl.translate.to_trl import to_trl

RUNNER = Path(__file__).with_name("trl_run.py")
# Settings of TRL's own evaluation, which `trl_run.py` replaces.
_EVALUATION = ("eval_strategy", "eval_steps", "eval_on_start", "num_generations_eval", "per_device_eval_batch_size")


def translate_for_trl(run: Run) -> tuple[Translation, ArithmeticTask]:
    """Translate a run for TRL; return the translation and the task.

    Raises:
        ConfigurationError: TRL cannot express a choice or setting (the error names it), or the task is not supported.
    """
    if run.processes > 1:
        raise ConfigurationError(
            f"trainer=trl: strategy.devices: {run.config.strategy.devices}; TRL trains a member in one process, so "
            "leave strategy.devices out"
        )
    translation, task = to_trl(run), build(run.config, "task")
    if translation.missing:
        missing = "; ".join(f"{entry.key}={entry.value} ({entry.why})" for entry in translation.missing)
        raise ConfigurationError(f"trainer=trl: what TRL {translation.version} cannot express: {missing}")
    if not isinstance(task, ArithmeticTask):
        raise ConfigurationError(f"trainer=trl: task {type(task).__name__} is not handed over; task=arithmetic is")
    return translation, task


def specification(run: Run) -> dict[str, Any]:
    """Return the specification that `trl_run.py` reads, as plain values.

    Raises:
        ConfigurationError: see `translate_for_trl`.
    """
    (translation, task), recipe = translate_for_trl(run), run.recipe
    evaluation = recipe.evaluation
    (heldout,) = task.eval_sets().values()
    control = run.choices.length_control
    model = str(build(run.config, "model"))
    flops = FlopModel.of(load_model(model))
    return {
        "config": {name: value for name, value in translation.settings.items() if name not in _EVALUATION},
        "model": model,
        "seed": run.seed,
        "threads": int(run.config.launch.threads),
        "train": [{"prompt": prompt.text, "answer": prompt.answer} for prompt in task.train_prompts()],
        "heldout": [{"prompt": prompt.text, "answer": prompt.answer} for prompt in heldout][
            : evaluation.get("prompts")
        ],
        "reward": {"correct": recipe.reward.correct, "incorrect": recipe.reward.incorrect},
        "penalty": {"limit": control.limit, "buffer": control.buffer} if isinstance(control, Penalty) else None,
        "evaluation": {
            "every": int(evaluation["every_n_steps"]),
            "samples": int(evaluation["samples"]),
            "seed": int(evaluation["seed"]),
        },
        "save_every": int(run.config.checkpoint.every_n_steps) * run.choices.epochs.count,
        "flops": {"body": flops.body_per_token, "head": flops.head, "context": flops.per_context},
        "forwards": run.choices.passes.policy_forwards + run.choices.passes.reference_forwards,
        "versions": {"trl": translation.version},
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the specification into the folder, and replace this process by TRL's interpreter."""
    parser = argparse.ArgumentParser(description="Train one run of this project with TRL's GRPOTrainer.")
    parser.add_argument("--python", required=True, help="Python interpreter with TRL installed")
    parser.add_argument(
        "--folder", required=True, type=Path, help="folder of the run, for evaluations.jsonl and checkpoints"
    )
    parser.add_argument(
        "--config-dir", action="append", default=[], help="folder of your own configuration files, in addition to conf/"
    )
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args(arguments)
    try:
        content = specification(Run.of(options.overrides, options.config_dir))
    except ConfigurationError as error:
        print(f"scalerl: {error}", file=sys.stderr)
        return 1
    options.folder.mkdir(parents=True, exist_ok=True)
    file = options.folder / "specification.json"
    file.write_text(json.dumps(content, indent=1))
    command = [options.python, str(RUNNER), str(file), str(options.folder)]
    try:
        # Replace the process, so that signals to it reach the trainer.
        os.execv(options.python, command)
    except OSError as error:
        print(f"scalerl: {options.python}: {error.strerror}; name an interpreter that has trl", file=sys.stderr)
        return 1


if __name__ == "__main__":
    raise SystemExit(main())
