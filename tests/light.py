"""Light members: members that do not train and need no torch, for tests of everything around training.

Importing Lightning takes seconds of CPU per process, and a test of the controller, the ledger or the scheduler starts
many processes. The planner and the function that runs a member are settings of the launcher; `overrides` sets them. A
light member treats its run directory as a real one does: it is the only writer, appends to a journal, resumes from
checkpoints, and honours a request to stop at the end of the step. Its numbers depend on its whole state, so two runs
agree bit for bit only if nothing was lost, repeated or restored wrongly.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from lightning_scalerl.composition import compose
from sweeps.executor.base import load_entry
from sweeps.run.files import write_atomically
from sweeps.run.interruption import RunInterruptedError, interruption
from sweeps.run.journal import Journal, covered_step, read_journal
from sweeps.run.lease import Lease
from sweeps.run.progress import check_journal_owner, is_done
from sweeps.run.repair import cut_broken_journal, find_break
from sweeps.run.spec import RunSpec, make_spec
from sweeps.run.writer import hold_run_lease

KEEP = 2


def overrides(cluster: str) -> list[str]:
    """Overrides that make the members of a study light, on this machine (`local`) or on a cluster."""
    preload = ["hydra.launcher.preload=[tests.light]"] if cluster == "local" else []
    return ["hydra.launcher.planner=tests.light:plan", "hydra.launcher.entry=tests.light:run", *preload]


# --- the planner ---------------------------------------------------------------------------------------------


def plan(override_lists: Sequence[Sequence[str]], folders: Sequence[str] = ()) -> list[RunSpec]:
    """Plan members with the labels of the real planner, but without its checks and without building anything."""
    common_overrides = set.intersection(*map(set, override_lists))

    @cache
    def resolved(words: tuple[str, ...]) -> dict[str, Any]:
        return dict(OmegaConf.to_container(compose(words), resolve=True))  # type: ignore[arg-type]

    specs = []
    for override_list in override_lists:
        config = resolved(tuple(override_list))
        reference = resolved(tuple(word for word in override_list if not word.startswith("variant=")))
        variant = config["label"]
        axis, _, choice = (variant or "").partition("=")
        settings = [
            word
            for word in override_list
            if word not in common_overrides and not word.startswith(("variant=", "seed="))
        ]
        specs.append(
            make_spec(
                config,
                reference,
                label="+".join(["scalerl", *([variant] if variant else []), *settings]),
                baseline="scalerl",
                departures={axis: choice} if variant else {},
                settings=dict(word.split("=", 1) for word in settings),
            )
        )
    return specs


# --- a member ------------------------------------------------------------------------------------------------


class RewardError(RuntimeError):
    """A verifier raised. Replaces the real RewardError, whose module imports torch."""


@dataclass
class State:
    """The whole state of a member, and so the content of its checkpoint."""

    step: int = 0
    weight: float = 0.0
    flops: float = 0.0
    wasted_flops: float = 0.0
    completions: int = 0


def run(run_dir: Path) -> None:
    """Run the member whose spec is in `run_dir` to the end of its budget, from its newest readable checkpoint."""
    spec = RunSpec.read(run_dir)
    with hold_run_lease(run_dir, spec) as lease:
        assert lease is not None
        check_journal_owner(run_dir, spec.run)
        if is_done(run_dir, spec.steps, spec.run):
            print(f"{spec.title}: done already")
            return
        if (broken := find_break(run_dir)) is not None:
            for path in (run_dir / "checkpoints").glob("*.ckpt"):
                if int(path.stem.removeprefix("step-")) > broken.step:
                    path.rename(path.with_suffix(".void"))
            print(f"{broken.why}; kept as {cut_broken_journal(broken).name}")
        _Member(run_dir, spec, lease).run()


class _Member:
    """A member in one process."""

    def __init__(self, run_dir: Path, spec: RunSpec, lease: Lease) -> None:
        self._run_dir = run_dir
        self._spec = spec
        self._lease = lease
        self._checkpoints = run_dir / "checkpoints"
        self._checkpoints.mkdir(exist_ok=True)
        self._verifier: Callable[[str, str], float] = load_entry(str(spec.config["task"]["verifier"]))
        self._state = self._restored()
        self._open = Journal(run_dir)

    @property
    def _journal(self) -> Journal:
        self._lease.check()
        return self._open

    def run(self) -> None:
        """Run to the end of the budget, or stop after the step in which a stop is requested."""
        try:
            self._begin()
            self._train()
        except BaseException as error:
            if not isinstance(error, RunInterruptedError) and not getattr(error, "leave_journal", False):
                self._journal.end(self._state.step, "failed", f"{type(error).__name__}: {error}")
            raise
        self._journal.end(self._state.step, "finished")

    def _train(self) -> None:
        config, state = self._spec.config, self._state
        checkpoint_interval, evaluation_interval = (
            config["checkpoint"]["every_n_steps"],
            config["evaluation"]["every_n_steps"],
        )
        if state.step == 0:
            self._evaluate()
        self._stop_if_asked()
        while state.step < self._spec.steps:
            self._step()
            last = state.step >= self._spec.steps
            if last or state.step % evaluation_interval == 0:
                self._evaluate()
            if last or interruption.requested or state.step % checkpoint_interval == 0:
                self._save()
            if not last:
                self._stop_if_asked()

    def _begin(self) -> None:
        """Write the journal's header. When resuming, write a resume record and count the FLOPs that were lost."""
        if not self._open.path.stat().st_size:
            self._journal.header(**self._spec.header(), parameters=1)
            return
        lost = [record for record in read_journal(self._run_dir).records if record.step > self._state.step]
        if lost:
            self._state.wasted_flops += max(record.metrics["compute/flops"] for record in lost) - self._state.flops
        self._journal.resume(self._state.step or -1)

    def _stop_if_asked(self) -> None:
        if interruption.requested:
            raise RunInterruptedError(f"step {self._state.step}: {interruption.reason}")

    def _step(self) -> None:
        state, batch = self._state, self._spec.config["batch"]
        rewards = [self._score() for _ in range(batch["prompts"] * batch["completions"])]
        # Seeded by the title, which differs between members and, unlike the run's identity, does not depend on the
        # folder. The weight is in the seed so that a wrongly restored state changes all later numbers.
        pull = random.Random(f"{self._spec.title} {state.step} {state.weight!r} {rewards}").random()
        state.step += 1
        state.weight += 0.1 * pull * (1 - state.weight)
        state.flops += 1e6 * (1 + pull)
        metrics = {"train/gradient_norm": pull, "train/loss": -sum(rewards) * pull, "train/weight": state.weight}
        self._journal.record("train", state.step, {**metrics, **self._compute()})

    def _evaluate(self) -> None:
        # Samples of an evaluation are not part of the run's state.
        completions_before = self._state.completions
        rewards = [self._score() for _ in range(6)]
        self._state.completions = completions_before
        rate = 0.1 + 0.8 * self._state.weight + 0.001 * sum(rewards)
        metrics = {"eval/heldout/pass_rate": rate, "eval/heldout/pass_rate_se": 0.01, **self._compute()}
        self._journal.record("eval", self._state.step, metrics)

    def _score(self) -> float:
        state = self._state
        state.completions += 1
        source = random.Random(f"{self._spec.title} {state.completions} {state.weight!r}")
        try:
            return self._verifier("".join(source.choices("0123456789+=", k=6)), "")
        except Exception as error:
            raise RewardError(f"the verifier raised {type(error).__name__}: {error}") from error

    def _compute(self) -> dict[str, float]:
        """The compute axes. A light member's hours are its FLOPs divided by 1e6."""
        flops = self._state.flops
        hours = {"compute/device_hours": flops / 1e6, "compute/virtual_device_hours": flops / 1e6}
        return {"compute/flops": flops, **hours, "compute/wasted_flops": self._state.wasted_flops}

    def _save(self) -> None:
        self._lease.check()
        path = self._checkpoints / f"step-{self._state.step:08d}.ckpt"
        write_atomically(path, json.dumps({**asdict(self._state), "whole": True}))
        self._journal.checkpoint(self._state.step)
        for old in sorted(self._checkpoints.glob("*.ckpt"), reverse=True)[KEEP:]:
            old.unlink()

    def _restored(self) -> State:
        covered = covered_step(self._run_dir)
        for path in sorted(self._checkpoints.glob("*.ckpt"), reverse=True):
            if covered is None or int(path.stem.removeprefix("step-")) > covered:
                print(f"checkpoint {path.name} is skipped, not recorded in the journal")
                continue
            try:
                saved = json.loads(path.read_text())
            except ValueError:
                continue  # truncated
            if saved.pop("whole", False):
                return State(**saved)
        return State()
