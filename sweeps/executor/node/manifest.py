"""Manifest of a submission: what a job needs to know about the members that are submitted together.

It is written to `<study>/jobs/<submission>/` before the jobs are submitted:

    submission.json   members in the order of their jobs, the entry function, limits, the code's commit
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
# Seconds within which a new file should become visible on another node of a network file system.
_VISIBLE_S = 60.0


def make_folder(study: Path, submission: str) -> Path:
    """Make the folder of a submission, with mode 0700, because the owner's jobs run its scripts."""
    folder = study.resolve() / JOBS_DIR / submission
    folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.mkdir(mode=0o700)
    return folder


def write_manifest(
    folder: Path, members: Sequence[Launch], entry: str, limits: Mapping[str, Any], settings: Mapping[str, Any]
) -> None:
    """Write the files that the jobs of a submission need.

    Args:
        folder: folder of the submission; its last part is the submission's name.
        members: members in the order of their jobs.
        entry: `module:function` that runs one member, given the member's folder.
        limits: `timeout_min`, a job's time limit; `signal_delay_s`, how many seconds before the limit it is warned;
            `max_num_timeout`, how often a member may reach the limit (None: any number of times); `gpus`, whether a job
            must fail if it sees no GPU.
        settings: all settings of the jobs, only for people who read the file.
    """
    manifest = {
        "submission": folder.name,
        "entry": entry,
        "members": [member.run for member in members],
        **limits,
        "settings": redact_config(settings),
        "command": [redact_override(argument) for argument in sys.argv],
        "code": record_code(folder),
    }
    write_atomically(folder / MANIFEST_FILE, json.dumps(manifest, indent=1), mode=0o600)


def record_code(folder: Path) -> dict[str, Any]:
    """Return the code's commit, and write uncommitted changes, redacted, to `code.diff`."""
    here = checkout()
    if here is None:
        return {"commit": None}
    diff = redact(here.diff)
    if diff:
        write_atomically(folder / DIFF_FILE, diff, mode=0o600)
    return {"commit": here.commit, "changed": bool(diff)}


def wait_for_manifest(folder: Path) -> dict[str, Any]:
    """Wait for the manifest of a submission to become visible on a node, and read it.

    Raises:
        FileNotFoundError: the manifest has not become visible within a minute.
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
