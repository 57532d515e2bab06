"""Members that need no torch: for tests of all that happens around training, not of training itself.

Importing Lightning costs seconds of CPU in every process, and a test of the controller, the ledger or the scheduler
starts many. Both the planner and what runs a member are keys of the launcher; `overrides` sets them. A light member
does to its run's directory what a real one does: one writer, a journal line by line, checkpoints that it goes on from,
a request to stop honoured after the step. Its numbers depend on all of its state, so that two runs agree bit for bit
only if nothing was lost, doubled or restored wrongly.
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
from sweeps.run.progress import check_own, is_done
from sweeps.run.repair import find_break, mend
from sweeps.run.spec import RunSpec, make_spec
from sweeps.run.writer import sole_writer

KEEP = 2


def overrides(cluster: str) -> list[str]:
    """What makes a study on this machine (`local`) or on a cluster a light one."""
    preload = ["hydra.launcher.preload=[tests.light]"] if cluster == "local" else []
    return ["hydra.launcher.planner=tests.light:plan", "hydra.launcher.entry=tests.light:run", *preload]


# --- the planner ---------------------------------------------------------------------------------------------


def plan(override_lists: Sequence[Sequence[str]], folders: Sequence[str] = ()) -> list[RunSpec]:
    """Identify members, labelled as the real planner does; nothing is checked or made for them."""
    everywhere = set.intersection(*map(set, override_lists))

    @cache
    def resolved(words: tuple[str, ...]) -> dict[str, Any]:
        return dict(OmegaConf.to_container(compose(words), resolve=True))  # type: ignore[arg-type]

    specs = []
    for given in override_lists:
        config = resolved(tuple(given))
        reference = resolved(tuple(word for word in given if not word.startswith("variant=")))
        variant = config["label"]
        axis, _, choice = (variant or "").partition("=")
        settings = [word for word in given if word not in everywhere and not word.startswith(("variant=", "seed="))]
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
    """A verifier raised. The real one comes with torch."""


@dataclass
class State:
    """All that a member knows, and so all that its checkpoint must hold."""

    step: int = 0
    weight: float = 0.0
    flops: float = 0.0
    wasted_flops: float = 0.0
    completions: int = 0


def run(run_dir: Path) -> None:
    """Run the member frozen in `run_dir` to the end of its budget, from its newest checkpoint that can be read."""
    spec = RunSpec.read(run_dir)
    with sole_writer(run_dir, spec) as lease:
        assert lease is not None
        check_own(run_dir, spec.run)
        if is_done(run_dir, spec.steps, spec.run):
            print(f"{spec.title}: done already")
            return
        if (broken := find_break(run_dir)) is not None:
            for path in (run_dir / "checkpoints").glob("*.ckpt"):
                if int(path.stem.removeprefix("step-")) > broken.step:
                    path.rename(path.with_suffix(".void"))
            print(f"{broken.why}; kept as {mend(broken).name}")
        _Member(run_dir, spec, lease).run()


class _Member:
    """One process's work on a run."""

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
        """To the end, or to the border at which it was asked to stop."""
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
        every, evaluated = config["checkpoint"]["every_n_steps"], config["evaluation"]["every_n_steps"]
        if state.step == 0:
            self._evaluate()
        self._stop_if_asked()
        while state.step < self._spec.steps:
            self._step()
            last = state.step >= self._spec.steps
            if last or state.step % evaluated == 0:
                self._evaluate()
            if last or interruption.requested or state.step % every == 0:
                self._save()
            if not last:
                self._stop_if_asked()

    def _begin(self) -> None:
        """Header, or the note that the run goes on and what the interruption threw away."""
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
        # Of the title: no two members of a study learn the same, and each learns the same in whatever folder, which its
        # identity knows. Of the weight, so that nothing may be forgotten.
        pull = random.Random(f"{self._spec.title} {state.step} {state.weight!r} {rewards}").random()
        state.step += 1
        state.weight += 0.1 * pull * (1 - state.weight)
        state.flops += 1e6 * (1 + pull)
        metrics = {"train/gradient_norm": pull, "train/loss": -sum(rewards) * pull, "train/weight": state.weight}
        self._journal.record("train", state.step, {**metrics, **self._compute()})

    def _evaluate(self) -> None:
        # What was sampled for an evaluation is no part of the run's state.
        before = self._state.completions
        rewards = [self._score() for _ in range(6)]
        self._state.completions = before
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
        """The axes; a light member's hours are its FLOPs by another name."""
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
                continue  # half of one
            if saved.pop("whole", False):
                return State(**saved)
        return State()
