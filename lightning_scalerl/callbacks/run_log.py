"""Write a run's journal: a header that identifies the run, then every record, flushed at once."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_scalerl.callbacks.base import Recorder, filter_lightning_tips
from lightning_scalerl.callbacks.evaluate import evaluation_of
from lightning_scalerl.callbacks.run import Run, run_of
from lightning_scalerl.checks import ConfigurationError
from lightning_scalerl.measure.compute_meter import WASTED, total_cost
from lightning_scalerl.measure.heartbeat import MeterHeartbeat, heartbeat_cost
from sweeps.run.interruption import RunInterruptedError
from sweeps.run.journal import JOURNAL_FILE, Journal, JournalView, read_journal
from sweeps.run.passes import Passes, write_passes
from sweeps.run.provenance import changes_line, code_changes, code_facts, package_digest

log = logging.getLogger(__name__)

# Computed at import: a member may be forked from this process much later, when files on the disk have changed.
_IMPORTED = package_digest()
# Exceptions that end a run without a failure: a request to stop, Ctrl-C, and Lightning's for SIGTERM.
_INTERRUPTIONS = (RunInterruptedError, KeyboardInterrupt, SIGTERMException)


@dataclass(frozen=True)
class PassedOver:
    """A checkpoint that could not be used, and the reason."""

    checkpoint: str
    why: str


class RunLog(Recorder):
    """Writes the files of a run's directory, on rank 0.

    - `metrics.jsonl`: the journal, with all records;
    - `semantics.json`: the run's choices, with all defaults filled in;
    - `passes.jsonl`: which held-out prompts passed in each evaluation;
    - `compute.json`: the compute so far, rewritten regularly until the run is finished (heartbeat).

    If the run fails, an `end` record with the reason is written. None is written if it is interrupted (by a request to
    stop, Ctrl-C or SIGTERM), because it will continue; nor if the exception's attribute `leave_journal` is True,
    because the journal then belongs to another process.

    Args:
        run_dir: the run's directory; created if missing.
        identity: fields of the header (run, curve, recipe, seed, ...); optional in scripts.
        guard: called before every write. It raises if another process has taken over the run.
        announce: whether to print what the run's choices mean when it starts.
        passed_over: checkpoints from which this process could not resume (reported by `newest_checkpoint`).
        code: the user's folders and files whose Python code counts as the run's code, in addition to ours.
        strict_code: whether to refuse to continue a run with changed code; if False, a warning is printed.
    """

    def __init__(
        self,
        run_dir: str | Path,
        identity: Mapping[str, Any] | None = None,
        guard: Callable[[], None] | None = None,
        announce: bool = False,
        passed_over: Sequence[PassedOver] = (),
        code: Sequence[str | Path] = (),
        strict_code: bool = False,
    ) -> None:
        filter_lightning_tips()
        self.run_dir = Path(run_dir)
        self.identity = dict(identity or {})
        self._guard = guard or (lambda: None)
        self._journal: Journal | None = None
        self._heartbeat: MeterHeartbeat | None = None
        self._last_step = 0
        self._is_trial = False
        self._announce = announce
        self._passed_over = tuple(passed_over)
        self._code = tuple(code)
        self._strict_code = strict_code

    @property
    def journal(self) -> Journal:
        """Journal, open for writing. Every access calls the guard."""
        self._guard()
        if self._journal is None:
            self._journal = Journal(self.run_dir)
        return self._journal

    def on_fit_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Write the header of a new run. For a resumed run, record the checkpoint and the compute that was lost."""
        run = run_of(pl_module)
        self._is_trial = bool(trainer.fast_dev_run)  # type: ignore[attr-defined]
        if self._is_trial:
            return  # a trial must not leave files, because the real run would find them
        # Check that all ranks resume at the same step, before anything is written that depends on it.
        run.ranks.check_alike("checkpoint: completed steps", run.completed_steps)
        # A checkpoint of step 0 was saved during the first generation or evaluation. A run that resumes from it keeps
        # the records of step 0.
        resumes = run.completed_steps > 0 or trainer.ckpt_path is not None
        run.ranks.share(lambda: self._begin(run, resumes))

    def _begin(self, run: Run, resumes: bool) -> None:
        """Check the earlier journal, if any, and write the files of a run that starts or resumes."""
        from lightning_scalerl.measure.semantics import describe_choices, header_fields, write_semantics

        self._last_step = run.completed_steps
        header = header_fields(run, self.identity)
        earlier = self._earlier()
        # -1, because a fresh start repeats the initial evaluation: one that was recorded at step 0 is not valid.
        last_valid_step = self._last_step if resumes else -1
        facts = code_facts(self._code, _IMPORTED)
        if earlier is not None:
            self._check_same_run(earlier, header, resumes)
            self._check_same_code(earlier, facts, last_valid_step)
        self._guard()
        write_semantics(self.run_dir, run)
        if self._announce:
            lines = [*describe_choices(run.recipe, run.choices), *run.began]
            print("\n".join(f"  {line}" for line in lines), flush=True)
        recorded = [] if earlier is None else earlier.records
        last_recorded = max((record.step for record in recorded if record.step <= self._last_step), default=0)
        if last_recorded < self._last_step:
            first = last_recorded + 1
            missing = f"step {first}" if first == self._last_step else f"steps {first} to {self._last_step}"
            print(
                f"warning: {self.run_dir / JOURNAL_FILE} lacks {missing}, because the checkpoint is newer; for a "
                "complete curve, continue from the checkpoint that newest_checkpoint finds, or start again",
                file=sys.stderr,
                flush=True,
            )
        if earlier is None:
            self.journal.header(**{**header, "code": facts})
        else:
            run.meter.count_lost_work(self._largest_cost(earlier))
        passed_over, self._passed_over = self._passed_over, ()  # recorded once, not in later fits too
        mended = None if earlier is None else earlier.mended
        resume_notes: dict[str, Any] = {"passed_over": [asdict(each) for each in passed_over]} if passed_over else {}
        if mended:
            resume_notes["mended"] = {key: mended.get(key) for key in ("line", "kept", "step")}
        if earlier is not None or self._last_step or resume_notes:
            self.journal.resume(last_valid_step, code=facts, **resume_notes)
        # Started now, so that the compute of a run that is killed before its first record is known.
        self._heartbeat = MeterHeartbeat(self.run_dir, run.meter, self._guard)

    def _largest_cost(self, earlier: JournalView) -> dict[str, float]:
        """Return the largest known cost of the run so far, from records that are dropped and the last heartbeat."""
        discarded = [record.metrics for record in earlier.records if record.step > self._last_step]
        discarded.append((earlier.mended or {}).get("metrics", {}))
        costs = [*map(total_cost, discarded), heartbeat_cost(self.run_dir)]
        return {name: max(cost.get(name, 0.0) for cost in costs) for name in WASTED}

    def on_record(self, kind: str, step: int, metrics: Mapping[str, float]) -> None:
        """Write one record to the journal."""
        if self._is_trial:
            return
        self._last_step = step
        self.journal.record(kind, step, metrics)

    def on_validation_end(self, trainer: Trainer, pl_module: Any) -> None:
        """Write which held-out prompts passed, besides the evaluation's record."""
        evaluation = evaluation_of(trainer)
        if trainer.state.fn == "fit" and evaluation is not None and not self._is_trial:
            run = run_of(pl_module)
            run.ranks.share(lambda: self._write_passes(run.completed_steps, evaluation.passes))

    def _write_passes(self, step: int, sets: Mapping[str, Passes]) -> None:
        self._guard()
        write_passes(self.run_dir, step, sets)

    def checkpointed(self, step: int) -> None:
        """Record that a durable checkpoint covers all records up to `step`."""
        self.journal.checkpoint(step)

    def on_fit_end(self, trainer: Trainer, pl_module: Any) -> None:
        """Record the run as finished if it has made all steps, or if a callback has stopped it.

        Not in `on_train_end`, because Lightning skips that hook if a run resumes with no steps left.
        """
        run = run_of(pl_module)
        done = run.completed_steps >= trainer.max_steps
        if self._journal is not None and (done or trainer.should_stop):
            stopped = run.exhausted or "stopped before max_steps by a callback of the Trainer"
            reason = None if done else stopped
            self.journal.end(self._last_step, "finished", reason, final=not done and run.exhausted is not None)
        self._close(finished=done or trainer.should_stop)

    def on_exception(self, trainer: Trainer, pl_module: Any, exception: BaseException) -> None:
        """Record why the run failed. Never raise, because that would hide the error."""
        if self._journal is None:
            return
        keep_open = isinstance(exception, _INTERRUPTIONS) or getattr(exception, "leave_journal", False)
        try:
            if not keep_open:
                reason = f"{type(exception).__name__}: {exception}".splitlines()[0]
                self.journal.end(self._last_step, "failed", reason)
            self._close()
        except Exception as secondary_error:
            log.warning("%s: the journal does not record how the run ended (%s)", self.run_dir, secondary_error)
            self._journal = None

    def _earlier(self) -> JournalView | None:
        """Return the journal of an earlier process, or None. Opening `journal` cuts off an incomplete last line."""
        return read_journal(self.run_dir) if self.journal.path.stat().st_size else None

    def _check_same_run(self, earlier: JournalView, header: Mapping[str, Any], resumes: bool) -> None:
        """Raise ConfigurationError if the journal is another run's, or if a finished run would start again."""
        for field in ("run", "recipe", "seed"):
            if earlier.header.get(field) != header[field]:
                self._close()
                raise ConfigurationError(
                    f"run_dir: {self.run_dir} holds a run with {field} {earlier.header.get(field)!r}, this one has "
                    f"{header[field]!r}; choose another directory"
                )
        if earlier.status == "finished" and not resumes:
            self._close()
            raise ConfigurationError(
                f"run_dir: {self.run_dir} holds a finished run; choose another directory, or continue it from its "
                "checkpoint with fit(ckpt_path=...)"
            )

    def _check_same_code(self, earlier: JournalView, facts: Mapping[str, Any], step: int) -> None:
        """Warn, or raise with `strict_code`, if the run resumes with changed code, which its records do not show."""
        changes = code_changes(earlier.code_before(step), facts)
        if not changes:
            return
        if self._strict_code:
            self._close()
            raise ConfigurationError(
                f"launch.strict_code: the code is not the one that this run was made with until step {step} "
                f"({changes_line(changes)}); go back to that code, or go on with launch.strict_code=false"
            )
        print(
            f"warning: from step {step} the run continues with changed code: {changes_line(changes)}",
            file=sys.stderr,
            flush=True,
        )

    def _close(self, finished: bool = False) -> None:
        heartbeat, self._heartbeat = self._heartbeat, None
        if heartbeat is not None:
            heartbeat.stop(finished)
        if self._journal is not None:
            self._journal.close()
            self._journal = None
