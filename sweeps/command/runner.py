"""Run a member that is another trainer's command: start it, write metrics and end to a journal, stop it on request."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from sweeps.command.follow import Follower, MetricsError
from sweeps.command.growing import Ending, HalfLineEnd
from sweeps.command.metrics import Source
from sweeps.command.plan import named_files, resolved
from sweeps.command.settings import STDOUT, STDOUT_FILE, command_of
from sweeps.errors import UserError
from sweeps.process import Ended, Tree, locked
from sweeps.run.activity import activity
from sweeps.run.files import read_end, read_json, write_atomically, write_json
from sweeps.run.interruption import RunInterruptedError, interruption
from sweeps.run.job import current
from sweeps.run.journal import CONFIG_FILE, LOG_FILE, SEMANTICS_FILE, Journal, JournalView
from sweeps.run.lease import Lease
from sweeps.run.progress import check_journal_owner, is_done, journal_or_none
from sweeps.run.provenance import changes_line, code_changes, code_facts, versions
from sweeps.run.repair import cut_broken_journal, find_break
from sweeps.run.spec import RunSpec
from sweeps.run.writer import hold_run_lease
from sweeps.terminal import counted

LOCK_FILE = ".command.lock"
ATTEMPT_FILE = "command.json"  # command line of the newest attempt, and number of attempts
# Shortest time in seconds between two polls of metrics, in files and at an address. The pause after a poll is also at
# least `_POLL_FACTOR` times as long as the poll took.
_POLL_S, _REMOTE_POLL_S, _POLL_FACTOR = 0.5, 30.0, 10.0
# Seconds between two checks for a request to stop.
_STOP_CHECK_S = 0.5
_TAIL_BYTES = 8192
_NUMBER = re.compile(r"\d+")


class CommandFailedError(UserError, RuntimeError):
    """Error: a command ended before its run was complete. The message has the cause and the last line of output."""

    is_explained = True  # the log, which ends with the command's own last lines, gets only the message, no traceback


class CommandKilledError(CommandFailedError):
    """Error: a signal that this process did not send has killed a command."""


def run_member(run_dir: Path, progress: bool = False) -> None:
    """Run the command of the member in `run_dir`, and record its metrics in the member's journal.

    Args:
        run_dir: the member's folder, with its specification.
        progress: whether to print each new step.

    Raises:
        RunInterruptedError: the run was asked to stop, and its command has ended.
        CommandFailedError: the command failed, or ended before its budget.
        UserError: another process is running the member, its journal belongs to another run, or its metrics cannot be
            used.
    """
    spec = RunSpec.read(run_dir)
    with hold_run_lease(run_dir, spec, current().rank()) as lease:
        if lease is None:
            raise UserError(
                "hydra.launcher.tasks_per_node: a member that is a command is one task, and starts its ranks itself; "
                "give tasks_per_node=1"
            )
        check_journal_owner(run_dir, spec.run)
        if is_done(run_dir, spec.steps, spec.run):
            print(f"{spec.title}: done already")
            return
        _write_config(run_dir, spec.config)
        if (broken := find_break(run_dir)) is not None:
            lease.check()
            copy = cut_broken_journal(broken)
            print(
                f"{broken.why}; kept as {copy.name}; lost records are read again from the command's metrics if they "
                "are still there",
                flush=True,
            )
        _Member(run_dir, spec, lease, progress).run()


class _Member:
    """One attempt at a member's command."""

    def __init__(self, run_dir: Path, spec: RunSpec, lease: Lease, progress: bool) -> None:
        self._run_dir, self._spec, self._lease, self._progress = run_dir, spec, lease, progress
        self._command = resolved(spec, run_dir)
        self._attempts = 0  # number of attempts before this one
        self._cuts: list[HalfLineEnd] = []
        self._source = Source(self._command, run_dir, self._cuts)
        self._stop_reason: str | None = None  # why the command was asked to stop
        self._log_start = 0  # size of the log when the command was started
        self._resumed_from: str | None = None  # path of the checkpoint from which the command was resumed
        # Path and modification time of the newest checkpoint in the journal, and the last step that it covers.
        self._checkpoint: tuple[str, int] | None = None
        self._covered = -1
        self._journal: Journal  # open while the command runs
        self._follower: Follower

    def run(self) -> None:
        """Start the command, follow it to its end, and record the end in the journal."""
        # If the member was just killed, its earlier command may still be ending: wait until it can no longer write.
        lock = locked(self._run_dir / LOCK_FILE)
        try:
            self._run(lock)
        finally:
            if lock is not None:
                os.close(lock)

    def _run(self, lock: int | None) -> None:
        earlier = self._begin()
        self._checkpoint = self._command.checkpoint_stamp()
        checkpoint = self._command.newest_checkpoint()
        self._journal = Journal(self._run_dir)
        try:
            facts = self._code_provenance(earlier)
            if earlier is None:
                self._journal.header(**self._header(), code=facts)
            self._follower = follower = Follower(
                self._journal, earlier, self._command, self._source, resume={"code": facts}
            )
            follower.catch_up()
            has_steps = follower.last_step >= 0
            if checkpoint is not None and not self._command.anew and not has_steps:
                self._check_checkpoint(earlier, checkpoint)
            resumes = not self._command.anew and (
                checkpoint is not None or (has_steps and self._command.checkpoints is None)
            )
            follower.began_anew, follower.started_before = not resumes, bool(self._attempts)
            if (cut := self._source.mark_half_line()) is not None:
                self._cuts.append(cut)
            self._start_and_follow(resumes, checkpoint, lock)
        finally:
            self._journal.close()

    # --- before it starts ----------------------------------------------------------------------------------------

    def _begin(self) -> JournalView | None:
        """Check that existing files belong to this run, and return its journal; None if there is no journal."""
        earlier = journal_or_none(self._run_dir)
        if earlier is not None and earlier.header.get("compute_is") != self._command.compute.text:
            raise UserError(
                f"command.compute: {self._command.compute.text}, and {earlier.path} was begun with "
                f"{earlier.header.get('compute_is')}; go back to that, or launch into a folder of its own (study=NAME)"
            )
        self._read_attempts(earlier)
        # Standard output is in the member's own folder, so no other run can have written it.
        may_be_foreign = self._command.source != STDOUT and not self._attempts
        if may_be_foreign and (found := self._source.read()).rows:
            raise UserError(
                f"command.metrics.source: {self._source.title} holds {found.rows} rows already, and this run has not "
                "begun: another run writes there; put {run_dir} into its path, or move the file away"
            )
        if not self._attempts and (path := self._command.newest_checkpoint()) is not None and not self._command.anew:
            raise UserError(
                f"command.resume.checkpoints: {path} is there already, and this run has not begun: it would go on from "
                "another run's; put {run_dir} into its path, or move the checkpoint away"
            )
        return earlier

    def _read_attempts(self, earlier: JournalView | None) -> None:
        """Count the earlier attempts, and read where they left half a line in the metrics.

        The journal has both. Earlier versions wrote them only to command.json, the file of the newest attempt.
        That file also shows that there was an attempt if the journal is lost.
        """
        newest = read_json(self._run_dir / ATTEMPT_FILE)
        noted = [] if earlier is None else earlier.attempts
        number = newest.get("attempts")
        self._attempts = max(len(noted), int(earlier is not None), number if isinstance(number, int) else bool(newest))
        for entry in (newest, *noted):
            cuts = entry.get("cuts")
            for entry_cut in cuts if isinstance(cuts, list) else ():
                match entry_cut:
                    case [int(at), str(digest)] if (cut := HalfLineEnd(at, digest)) not in self._cuts:
                        self._cuts.append(cut)

    def _check_checkpoint(self, earlier: JournalView | None, checkpoint: str) -> None:
        """Check that the journal names this checkpoint. Called if the journal has no step before the checkpoint.

        Raises:
            UserError: the journal does not name the checkpoint, so the metrics of the steps before it are lost.
        """
        if earlier is None or earlier.checkpoint_name != Path(checkpoint).name:
            raise UserError(
                f"command.resume.checkpoints: {checkpoint}: no step before it is in the journal or in "
                f"{self._source.title}, so what was logged by then is lost; move the checkpoint away to begin anew"
            )

    def _header(self) -> dict[str, Any]:
        compute = self._command.compute
        return {
            **self._spec.header(),
            "member": "command",
            "axis": compute.axis,
            "compute_is": compute.text,
            "reward_is": dict(self._command.rewards),
        }

    def _code_provenance(self, earlier: JournalView | None) -> dict[str, Any]:
        """Return the code provenance, including files that the command names. Warn of changes since the launch.

        Raises:
            UserError: something has changed, and `launch.strict_code` is true.
        """
        symbols = command_of(self._spec.config, "", only_symbols=True)
        named = named_files(symbols, self._spec.config)
        facts = {**code_facts(), "folders": {f"{self._command.folder}/{name}": text for name, text in named.items()}}
        frozen = self._spec.config["command"].get("named") or {}
        changed = sorted(name for name in {*named, *frozen} if named.get(name) != frozen.get(name))
        notes = [f"{name} has changed since the study was launched" for name in changed]
        if earlier is not None:
            before = [known for _, known in earlier.code][-1:]
            notes += [] if changed or not before else list(code_changes(before[0], facts))
        if notes and self._spec.config["launch"].get("strict_code"):
            raise UserError(
                f"launch.strict_code: {changes_line(notes)}; go back to that, launch what you want under its own "
                "identity, or go on with launch.strict_code=false"
            )
        if notes:
            print(f"warning: {changes_line(notes)}", flush=True)
        return facts

    # --- while it runs -------------------------------------------------------------------------------------------

    def _start_and_follow(self, resumes: bool, checkpoint: str | None, lock: int | None) -> None:
        command, run_dir = self._command, self._run_dir
        words = [*command.words]
        if resumes:
            self._resumed_from = checkpoint
            words += [word.replace("{checkpoint}", checkpoint or "") for word in command.add]
        for name, text in command.files.items():
            (run_dir / name).parent.mkdir(parents=True, exist_ok=True)
            write_atomically(run_dir / name, text)
        if command.stop_file is not None:
            command.stop_file.unlink(missing_ok=True)
        self._attempts += 1
        self._lease.check()
        # Recorded before the start: after a power failure, the next attempt must know where this one began.
        cuts = {"cuts": [[cut.at, cut.before] for cut in self._cuts]} if self._cuts else {}
        self._journal.attempt(self._follower.last_step, **cuts)
        attempt = {"attempts": self._attempts, "words": words, "folder": str(command.folder), "goes_on": resumes}
        write_json(run_dir / ATTEMPT_FILE, attempt)
        self._write_semantics(words)
        print(f"  {' '.join(words)}\n  compute is {command.compute.text}", flush=True)
        with suppress(OSError):
            self._log_start = (run_dir / LOG_FILE).stat().st_size
        own = {"SCALERL_RUN_DIR": str(run_dir.resolve()), "SCALERL_RUN": self._spec.run}
        out = run_dir / STDOUT_FILE if command.source == STDOUT else None
        activity.note("the command was started")
        try:
            with Tree(words, {**own, **command.env}, command.folder, out, lock, command.stop_signal) as tree:
                ended = self._follow(tree)
            self._poll(Ending.TORN if ended.code else Ending.WHOLE)
        except ChildProcessError as error:
            raise UserError(f"command.line: {error}") from None
        except MetricsError as error:
            self._fail(str(error))
        self._record_end(ended)

    def _follow(self, tree: Tree) -> Ended:
        wait_s, last_duration = _POLL_S, 0.0
        last_poll = time.monotonic()
        while (ended := tree.wait(min(wait_s, _STOP_CHECK_S))) is None:
            if self._stop_reason is None and (reason := interruption.reason) is not None:
                self._stop_reason = reason
                self._ask_to_stop(tree, reason)
            if time.monotonic() - last_poll < wait_s:
                continue
            self._lease.check()
            began = time.monotonic()
            if self._poll() and self._progress:
                print(f"  step {self._follower.last_step} of {self._spec.steps}", flush=True)
            last_poll = time.monotonic()
            min_s = _REMOTE_POLL_S if self._command.remote else _POLL_S
            # Go by the shorter of the last two polls: the first one of a file also imports its reader, which takes
            # seconds on a busy machine, and a race would then get no metrics for ten times as long.
            last_duration, duration = last_poll - began, min(last_duration, last_poll - began)
            wait_s = max(min_s, _POLL_FACTOR * duration)
        # A cluster that preempts by SIGTERM sends it to the command as well, which may end before the check above.
        self._stop_reason = self._stop_reason or interruption.reason
        return ended

    def _ask_to_stop(self, tree: Tree, reason: str) -> None:
        command = self._command
        print(f"asked to stop ({reason}); the command has {command.stop_within_s:g} s to end", flush=True)
        if command.stop_file is not None:
            command.stop_file.parent.mkdir(parents=True, exist_ok=True)
            command.stop_file.touch()
        tree.stop(command.stop_signal, command.stop_within_s)

    def _poll(self, ending: Ending = Ending.OPEN) -> bool:
        """Record the steps that are complete now, and a checkpoint that is new; return whether there were any steps.

        After a power failure a run can continue from a checkpoint only if the metrics of the steps before it are on the
        disk. So metrics are synced before a new checkpoint is recorded.
        """
        follower = self._follower
        stamp, last_step = self._command.checkpoint_stamp(), follower.last_step
        changed = stamp is not None and stamp != self._checkpoint
        if changed:
            self._source.sync()
        recorded = follower.update(ending)
        if stamp is not None:
            name = Path(stamp[0]).name
            numbers = _NUMBER.findall(name)
            step = int(numbers[-1]) if numbers else -1
            # A checkpoint without a step in its name, or with a step that is not complete, covers the steps that were
            # recorded before this poll.
            covered = step if 0 <= step <= follower.last_step else min(last_step, follower.last_step)
            if changed or self._covered < covered == step:
                self._journal.checkpoint(covered, name=name)
                self._checkpoint, self._covered = stamp, covered
        return recorded

    # --- after its end -------------------------------------------------------------------------------------------

    def _record_end(self, ended: Ended) -> None:
        """Record how the run has ended.

        Raises:
            RunInterruptedError: the run was stopped on request.
            CommandFailedError: the run has not reached its budget.
        """
        follower, journal = self._follower, self._journal
        steps, last = self._spec.steps, follower.last_step
        behind = (
            f" ({_left_behind(ended.survivors)} and ended; the command must stay in the foreground)"
            if ended.survivors
            else ""
        )
        if ended.killed_survivors:
            print(f"the command ended; {_left_behind(ended.killed_survivors)} and killed", flush=True)
        if self._source.left_out:
            damaged = counted(self._source.left_out, "damaged line")
            print(f"warning: {self._source.title}: {damaged} skipped", flush=True)
        if ended.code == 0 and last >= steps - self._command.within and last >= 0:
            if (problem := follower.overdue()) is not None:
                self._fail(problem)
            self._lease.check()
            if last < steps:  # the command does not log its last steps (`command.done.within`)
                follower.fill_to(steps)
            journal.checkpoint(steps)
            journal.end(steps if last < steps else last, "finished")
            return
        if self._stop_reason is not None:
            killed = f" (not within {self._command.stop_within_s:g} s, so it and its child processes were killed)"
            raise RunInterruptedError(
                f"{self._stop_reason} at step {last}; the command ended with "
                f"{ended.how}{killed if ended.killed else ''}"
            )
        if ended.code != 0:
            error_line = self._last_error_line()
            self._fail(
                f"command.line: {self._command.words[0]} ended with {ended.how} at step {last} of {steps}"
                f"{f': {error_line}' if error_line else ''}; its output is in {LOG_FILE}",
                CommandKilledError if ended.code < 0 else CommandFailedError,
            )
        if last < 0:
            self._fail(
                f"command.metrics.source: the command ended with exit code 0{behind}, but {self._source.title} holds "
                "no metrics; give the place where it writes them",
            )
        if self._resumed_from is not None and not follower.has_logged:
            self._fail(
                f"command.resume.checkpoints: {self._resumed_from}: the command continued from it and logged nothing; "
                f"the journal ends at step {last} of {steps}, so the metrics in between are lost; move that checkpoint "
                "away to continue from the one before it",
            )
        self._fail(
            f"budget.steps: the command ended with exit code 0 at step {last} of {steps}{behind}; pass it {{steps}}, "
            "lower budget.steps, or set command.done.within if it does not log its last steps",
        )

    def _fail(self, reason: str, kind: type[CommandFailedError] = CommandFailedError) -> None:
        self._lease.check()
        self._journal.end(max(self._follower.last_step, 0), "failed", reason)
        raise kind(reason)

    def _last_error_line(self) -> str:
        """Return the last line that was written to the log since the command started, at most 300 characters."""
        text = read_end(self._run_dir / LOG_FILE, _TAIL_BYTES, self._log_start)
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        return lines[-1][:300] if lines else ""

    def _write_semantics(self, words: list[str]) -> None:
        compute = self._command.compute
        content = {
            "member": "command",
            "command": words,
            "folder": str(self._command.folder),
            "reward": dict(self._command.rewards),
            "compute": {"axis": compute.axis, "is": compute.text},
            "metrics": self._command.source,
            "named": dict(self._spec.config["command"].get("named") or {}),
            "optimizer": dict(self._spec.config["command"].get("optimizer") or {}),
            "seed": self._spec.seed,
            "versions": versions(()),
        }
        write_json(self._run_dir / SEMANTICS_FILE, content)


def _left_behind(count: int) -> str:
    return f"{count} {'process was' if count == 1 else 'processes were'} left behind"


def _write_config(run_dir: Path, config: Mapping[str, Any]) -> None:
    import yaml

    write_atomically(run_dir / CONFIG_FILE, yaml.safe_dump(dict(config), sort_keys=False))
