"""A submission: members frozen together under a name that is used once, and the batch script that runs them.

Everything a job needs lies in `<study>/jobs/<submission>/` before the job is submitted: no job has to wait for its
controller, and one whose controller died the moment after runs all the same.

    submission.json   members in the order of the array's tasks, the entry, limits, the code's commit
    code.diff         what the working tree had beyond that commit
    submit.sh         the batch script
    started-<job>-<restart>   left by the batch script each time it starts
    <job>_<rank>_log.out   what SLURM, the set-up commands and srun had to say; members have logs of their own
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sweeps.errors import UserError
from sweeps.executor.base import Launch
from sweeps.executor.script import batch_script
from sweeps.executor.settings import JobSettings
from sweeps.redact import redact, redact_config, redact_override
from sweeps.run.code import checkout
from sweeps.run.files import write_atomically

JOBS_DIR = "jobs"
MANIFEST_FILE = "submission.json"
SCRIPT_FILE = "submit.sh"
DIFF_FILE = "code.diff"


def new_folder(study: Path, submission: str) -> Path:
    """Make the folder of a submission, mode 0700, for its scripts are run as its owner.

    Raises:
        UserError: the path has a character that SLURM would interpret.
    """
    folder = study.resolve() / JOBS_DIR / submission
    for mark, why in (("%", "SLURM takes for a placeholder"), ("\\", "makes SLURM take placeholders for names")):
        if mark in str(folder):
            raise UserError(f"output_dir: {study} has a {mark} in it, which {why}; choose another name")
    if not str(folder).isprintable():
        raise UserError(
            f"output_dir: {str(study)!r} has a line break or another control character; choose another name"
        )
    (study / JOBS_DIR).mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.mkdir(mode=0o700)
    return folder


def freeze(
    folder: Path,
    submission: str,
    members: Sequence[Launch],
    settings: JobSettings,
    entry: str,
    threads: int,
    title: str,
) -> Path:
    """Write everything that a submission's jobs need and return the path of the batch script.

    Args:
        folder: folder of the submission.
        submission: its name, which is used once.
        members: members in the order of the array's tasks.
        settings: resources and limits.
        entry: `module:function`, called with a member's directory.
        threads: CPU threads of a member's process.
        title: first part of the job's name, for people; see `harmless`.
    """
    manifest = {
        "submission": submission,
        "entry": entry,
        "members": [member.run for member in members],
        "timeout_min": settings.timeout_min,
        "signal_delay_s": settings.signal_delay_s,
        "max_num_timeout": settings.max_num_timeout,
        "gpus": settings.needs_gpu,
        "settings": redact_config(settings.given()),
        "command": [redact_override(argument) for argument in sys.argv],
        "code": freeze_code(folder),
    }
    write_atomically(folder / MANIFEST_FILE, json.dumps(manifest, indent=1), mode=0o600)
    script = folder / SCRIPT_FILE
    # Private before there is anything in it: it holds the user's own commands.
    script.touch(mode=0o600)
    # The name ends with the submission's: by that its jobs are found again in the queue (`executor.slurm`).
    script.write_text(batch_script(folder, settings, len(members), threads, f"{harmless(title)}-{submission}"))
    return script


def freeze_code(folder: Path) -> dict[str, Any]:
    """Record the code's provenance: return its commit, and write uncommitted changes to `code.diff`, redacted."""
    here = checkout()
    if here is None:
        return {"commit": None}
    diff = redact(here.diff)
    if diff:
        write_atomically(folder / DIFF_FILE, diff, mode=0o600)
    return {"commit": here.commit, "changed": bool(diff)}


def harmless(name: str) -> str:
    """Sanitize a job name to letters, digits and `_.+=-`, 1 to 60 characters."""
    return re.sub(r"[^A-Za-z0-9_.+=-]+", "_", name).strip("._-")[:60] or "scalerl"
