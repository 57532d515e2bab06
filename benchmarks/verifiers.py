"""Are the answers of real data sets graded right, and how fast? GSM8K and MATH as verl prepares them, 21,292 rows.

Every gold answer, written as a solution in two ways, must score 1, and with its answer changed 0, in the very pool
that grades a run's completions. Then: how long it takes to load GSM8K, put its prompts through a chat template and
measure them, the first time and from the cache.

The rows are looked for in the folder that SCALERL_DATA names, else in `../shared/data`: gsm8k/train.parquet and
test.parquet, math/train.parquet and test.parquet. Prints Markdown.

    python benchmarks/verifiers.py
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_scalerl.model.chat import Chat, Rendering
from lightning_scalerl.prompt import Prompt
from lightning_scalerl.task.dataset import DatasetTask
from lightning_scalerl.task.formats import Problem, verl
from lightning_scalerl.task.rows import RowSource
from lightning_scalerl.verify.grade import Outcome, Sample
from lightning_scalerl.verify.answers import stated
from lightning_scalerl.verify.mathematics import changed
from lightning_scalerl.verify.pool import VerifierPool
from lightning_scalerl.verify.registry import reward_sum

ROOT = Path(__file__).resolve().parent.parent
FILES = ("gsm8k/train", "gsm8k/test", "math/train", "math/test")
# To the letter a verifier need not think; set otherwise it must.
SET_OTHERWISE = "\\displaystyle "
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message.role }}|>\n{{ message.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
WAYS = ("as it is", "set otherwise", "changed")


@dataclass(frozen=True)
class Case:
    """A completion, and what it must score."""

    file: str
    row: int
    way: str
    sample: Sample
    reward: float


def solution(problem: Problem, way: str) -> str:
    """A row's answer written as a solution; the data's own where it has one."""
    gold = str(problem.answer)
    if way == "changed":
        return f"So the answer is $\\boxed{{{changed(gold)}}}$."
    if way == "set otherwise":
        return f"So the answer is $\\boxed{{{SET_OTHERWISE}{gold}}}$."
    return problem.right or f"So the answer is $\\boxed{{{gold}}}$."


def cases(folder: Path, file: str, rows: int | None) -> Iterator[Case]:
    """Of a file, each row in all ways."""
    for number, row in enumerate(RowSource("rows", str(folder / f"{file}.parquet"), rows=rows).read()):
        problem = verl(row)
        if problem.answer == "":
            continue  # the task leaves such rows out, and says so
        prompt = Prompt(f"{file}/{number}", problem.text, problem.answer)
        for way in WAYS:
            text = solution(problem, way)
            yield Case(file, number, way, Sample(prompt, text, text), float(way != "changed"))


def graded(pool: VerifierPool, those: Sequence[Case]) -> tuple[list[Outcome], float]:
    """Outcomes in order, and seconds."""
    began = time.perf_counter()
    tickets = [pool.submit(case.sample) for case in those]
    return [pool.wait(ticket) for ticket in tickets], time.perf_counter() - began


def reason(case: Case, outcome: Outcome) -> str:
    """Why a completion has not scored what it must, as far as a program can tell."""
    if outcome.kind != "score":
        return outcome.why
    if "math_too_costly" in outcome.parts:
        return "takes more than its processor time"
    from lightning_scalerl.verify.mathematics import _read

    gold, said = (_read(text)[:1] for text in (str(case.sample.prompt.answer), stated(case.sample.answer).text))
    if gold == said:
        return f"math-verify reads a part only, and of both the same: {gold}"
    return f"math-verify reads {gold} and {said}"


def cell(text: str, limit: int = 90) -> str:
    """For a table's row."""
    short = " ".join(text.split())
    return (short if len(short) <= limit else short[: limit - 1] + "…").replace("|", "\\|")


def grading(folder: Path, workers: int, rows: int | None) -> tuple[list[str], bool]:
    """Lines on what was graded, and whether all of it was graded right."""
    lines = ["| file | rows | written | scores as it must | of them | completions/s |", "|---|---|---|---|---|---|"]
    failed: list[tuple[Case, Outcome]] = []
    pool = VerifierPool(reward_sum("rewards", "math"), workers, timeout_s=10.0, retries=1, memory_gib=4.0)
    slowest, spent, count, without = 0.0, 0.0, 0, 0
    try:
        graded(pool, list(cases(folder, FILES[0], 1)))  # the workers start
        for file in FILES:
            every = list(cases(folder, file, rows))
            without += 1 + every[-1].row - len(every) // len(WAYS)
            for way in WAYS:
                those = [case for case in every if case.way == way]
                outcomes, seconds = graded(pool, those)
                bad = [
                    (case, outcome)
                    for case, outcome in zip(those, outcomes, strict=True)
                    if (outcome.kind, outcome.reward) != ("score", case.reward)
                ]
                failed += bad
                right = len(those) - len(bad)
                slowest = max(slowest, *(outcome.seconds for outcome in outcomes))
                spent, count = spent + seconds, count + len(those)
                lines.append(
                    f"| {file} | {len(those)} | {way} | {right} ({100 * right / len(those):.2f}%) | "
                    f"{int(those[0].reward)} | {len(those) / seconds:.0f} |"
                )
    finally:
        pool.close()
    lines += [
        "",
        f"{count} completions in {spent:.0f} s with {workers} workers: {count / spent:.0f} a second; the slowest took "
        f"{slowest:.2f} s. Left out, as tasks do: {without} rows without an answer. {len(failed)} completions do not "
        "score what they must:",
        "",
        "| row | written | gold | answer | outcome | why |",
        "|---|---|---|---|---|---|",
    ]
    for case, outcome in failed:
        said = stated(case.sample.answer)[0] or ""
        got = f"{outcome.reward:g}" if outcome.kind == "score" else outcome.kind
        lines.append(
            f"| {case.file} {case.row} | {case.way} | {cell(str(case.sample.prompt.answer))} | {cell(said)} | {got} | "
            f"{cell(reason(case, outcome), 160)} |"
        )
    return lines, not failed


def tokenizer_of(texts: Sequence[str], size: int) -> Any:
    """A byte-level BPE learned from these texts, with a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bare = Tokenizer(models.BPE())
    bare.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bare.decoder = decoders.ByteLevel()
    special = ["<|begin|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    bare.train_from_iterator(texts, trainer)
    made = PreTrainedTokenizerFast(tokenizer_object=bare, bos_token="<|begin|>", eos_token="<|end|>")
    made.chat_template = TEMPLATE
    return made


def prompts(folder: Path, size: int) -> list[str]:
    """Lines on the time that GSM8K's prompts take."""
    began = time.perf_counter()
    task = DatasetTask(
        "verl",
        train=str(folder / "gsm8k/train.parquet"),
        heldout={"test": str(folder / "gsm8k/test.parquet")},
        rewards="math",
    )
    loaded = time.perf_counter() - began
    sets = {"train": task.train_prompts(), **task.eval_sets()}
    tokenizer = tokenizer_of([prompt.text for prompt in task.train_prompts()], size)
    seconds, lengths = [], []
    with tempfile.TemporaryDirectory() as cache:
        os.environ["SCALERL_CACHE"] = cache
        for _ in range(2):
            # As two processes would: what a tokenizer or a rendering remembers must not count.
            rendering = Rendering(tokenizer, Chat(), [tokenizer.eos_token_id])
            began = time.perf_counter()
            tokens = rendering.encode_all(sets)
            lengths = [len(ids) for those in tokens.values() for ids in those]
            seconds.append(time.perf_counter() - began)
        kept = sum(file.stat().st_size for file in Path(cache).rglob("*.npz"))
    count = len(lengths)
    return [
        f"GSM8K, {count} prompts, a byte-level BPE of {len(tokenizer)} tokens with a chat template; "
        f"{sum(lengths)} tokens, {min(lengths)} to {max(lengths)} a prompt.",
        "",
        *(f"- {note}" for note in task.notes()),
        "",
        "| what | seconds |",
        "|---|---|",
        f"| read both files, check for duplicates and leaks | {loaded:.2f} |",
        f"| chat template, tokens and lengths, the first time | {seconds[0]:.2f} |",
        f"| the same from the cache ({kept / 2**20:.1f} MiB) | {seconds[1]:.2f} |",
    ]


def main() -> int:
    """Grade, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rows", type=int, help="of each file at most so many, for a quick look")
    parser.add_argument("--vocabulary", type=int, default=8000, help="tokens of the tokenizer")
    options = parser.parse_args()
    folder = Path(os.environ.get("SCALERL_DATA", ROOT.parent / "shared" / "data"))
    missing = [file for file in FILES if not (folder / f"{file}.parquet").is_file()]
    if missing:
        print(f"verifiers: no {missing[0]}.parquet; name the folder that holds it in SCALERL_DATA", file=sys.stderr)
        return 1
    measured = prompts(folder, options.vocabulary)
    lines, good = grading(folder, options.workers, options.rows)
    print(
        "\n".join(
            [
                "# Verifiers on real answers",
                "",
                "What our verifiers of mathematics get wrong on GSM8K and MATH, and how fast they are.",
                "",
                f"Written by `python benchmarks/verifiers.py` on {os.cpu_count()} cores, Python "
                f"{platform.python_version()}.",
                "",
                "## Gold answers, and others",
                "",
                f"Each gold answer as it is (GSM8K: its own reasoning; MATH: boxed), boxed behind "
                f"`{SET_OTHERWISE.strip()}` so that it is not the gold one to the letter, and changed: its first digit "
                "another one, or another answer altogether.",
                "",
                *lines,
                "",
                "## Prompts",
                "",
                *measured,
            ]
        )
    )
    return 0 if good else 2


if __name__ == "__main__":
    sys.exit(main())
