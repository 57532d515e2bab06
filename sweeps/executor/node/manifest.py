"""Manifest of a submission, members that are submitted together under a name that is used once.

Everything that a job needs is written to `<study>/jobs/<submission>/` before it is submitted:

    submission.json   members in the order of their jobs, the entry, limits, the code's commit
    code.diff         uncommitted changes of the working tree
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sweeps.executor.base import Launch
from sweeps.redact import redact, redact_config, redact_override
from sweeps.run.files import parse_json, write_atomically
from sweeps.run.provenance import checkout

JOBS_DIR = "jobs"
MANIFEST_FILE = "submission.json"
DIFF_FILE = "code.diff"
# Timeout for a file written before submission to become visible through a network file system.
_VISIBLE_S = 60.0


def make_folder(study: Path, submission: str) -> Path:
    """Make the folder of a submission, with mode 0700 because its scripts run as the owner."""
    folder = study.resolve() / JOBS_DIR / submission
    folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.mkdir(mode=0o700)
    return folder


def write_manifest(
    folder: Path, members: Sequence[Launch], entry: str, limits: Mapping[str, Any], settings: Mapping[str, Any]
) -> None:
    """Write the files that the jobs of a submission need.

    Args:
        folder: folder of the submission, with its name.
        members: members in the order of their jobs.
        entry: `module:function`, called with a member's directory.
        limits: `timeout_min`, a job's time limit; `signal_delay_s`, the seconds before it at which the job is warned;
            `max_num_timeout`, the number of times that it may be reached, or None; `gpus`, whether a job that sees no
            GPU must fail.
        settings: all settings of the jobs, for readers.
    """
    manifest = {
        "submission": folder.name,
        "entry": entry,
        "members": [member.run for member in members],
        **limits,
        "settings": redact_config(settings),
        "command": [redact_override(argument) for argument in sys.argv],
        "code": freeze_code(folder),
    }
    write_atomically(folder / MANIFEST_FILE, json.dumps(manifest, indent=1), mode=0o600)


def freeze_code(folder: Path) -> dict[str, Any]:
    """Return the code's commit, and write uncommitted changes to `code.diff`, redacted."""
    here = checkout()
    if here is None:
        return {"commit": None}
    diff = redact(here.diff)
    if diff:
        write_atomically(folder / DIFF_FILE, diff, mode=0o600)
    return {"commit": here.commit, "changed": bool(diff)}


def wait_for_manifest(folder: Path) -> dict[str, Any]:
    """Read the manifest of a submission on a node.

    Raises:
        FileNotFoundError: it has not become visible within a minute.
    """
    path = folder / MANIFEST_FILE
    deadline = time.monotonic() + _VISIBLE_S
    while not path.exists():
        if time.monotonic() > deadline:
            raise FileNotFoundError(
                f"{path} is not there; the study's output_dir must be on a file system that every node sees"
            )
        time.sleep(1)
    manifest: dict[str, Any] = parse_json(path.read_text(encoding="utf-8"))
    return manifest
