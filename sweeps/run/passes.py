"""Results of each held-out prompt at each evaluation of a run, in `passes.jsonl`: one line per evaluation and set.

The journal in the same folder has only means over prompts. With results by prompt, two runs that were evaluated on the
same prompts can be compared prompt by prompt. Evaluations that a resume made void stay in this file. An evaluation is
valid if the journal has its step, and this file has no later line for that step.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sweeps.run.files import append_lines, parse_lines
from sweeps.run.pass_at_k import Votes, all_at_k

PASSES_FILE = "passes.jsonl"


@dataclass(frozen=True)
class Passes:
    """Results by prompt of one evaluation on one held-out set.

    Attributes:
        prompts: digest of the set's n prompts, in order. Two runs with the same digest can be compared prompt by
            prompt.
        passed: number of completions that passed, by prompt, (n,).
        scored: number of completions that could be graded, by prompt, (n,).
        wrong: by prompt, how often each different wrong answer was given; None if the verifier does not distinguish
            answers, or if an earlier version wrote the run.
        families: name of each prompt's family, (n,), "" for a prompt without one; None if no prompt has a family.
    """

    prompts: str
    passed: tuple[int, ...]
    scored: tuple[int, ...]
    wrong: tuple[tuple[int, ...], ...] | None = None
    families: tuple[str, ...] | None = None

    @property
    def votes(self) -> list[Votes]:
        """Answers of the completions, by prompt. If `wrong` is None, all wrong completions count as `silent`."""
        wrong = self.wrong or ((),) * len(self.passed)
        return [
            Votes(passed, answers, scored - passed - sum(answers))
            for passed, scored, answers in zip(self.passed, self.scored, wrong, strict=True)
        ]

    def at_k(self, samples: int) -> dict[str, tuple[float, float]]:
        """Return pass@k and, if wrong answers are known, maj@k, for k = 2, 4, ... up to `samples`; see `all_at_k`."""
        return all_at_k(samples, self.votes, self.wrong is not None)


def digest(prompts: Iterable[tuple[str, object]]) -> str:
    """Return a digest of prompts and their answers, in order, as 16 hexadecimal digits."""
    sha = hashlib.sha256()
    for text, answer in prompts:
        sha.update(repr((text, answer)).encode())
    return sha.hexdigest()[:16]


def write_passes(run_dir: Path, step: int, sets: Mapping[str, Passes]) -> None:
    """Append the evaluation at `step`, one line per held-out set. `sets` has the results by name of the set."""
    entries = [
        {
            "step": step,
            "set": name,
            "prompts": passes.prompts,
            "passed": passes.passed,
            "scored": passes.scored,
            **({} if passes.wrong is None else {"wrong": passes.wrong}),
            **({} if passes.families is None else {"families": passes.families}),
        }
        for name, passes in sets.items()
    ]
    append_lines(run_dir / PASSES_FILE, entries, checksum=True)


def read_passes(run_dir: Path, name: str, steps: Sequence[int]) -> dict[int, Passes]:
    """Read the evaluations of one held-out set, by step; empty if there are none, as in runs of earlier versions.

    Args:
        run_dir: the run's folder.
        name: name of the held-out set.
        steps: steps at which the journal has an evaluation; others are ignored.
    """
    try:
        raw = (run_dir / PASSES_FILE).read_bytes()
    except OSError:
        return {}
    wanted, by_step = set(steps), {}
    for entry in parse_lines(raw):
        if entry.get("set") != name or entry.get("step") not in wanted:
            continue
        passed, scored = entry.get("passed"), entry.get("scored")
        if isinstance(passed, list) and isinstance(scored, list) and len(passed) == len(scored):
            wrong = entry.get("wrong")
            answers = tuple(tuple(counts) for counts in wrong) if isinstance(wrong, list) else None
            names = entry.get("families")
            families = tuple(map(str, names)) if isinstance(names, list) and len(names) == len(passed) else None
            by_step[entry["step"]] = Passes(str(entry.get("prompts")), tuple(passed), tuple(scored), answers, families)
    return by_step
