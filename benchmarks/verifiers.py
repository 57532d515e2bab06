"""Are answers of real data sets graded correctly, and how fast? GSM8K and MATH as prepared by verl, 21,292 rows.

Every gold answer is written as a solution in ways with the same meaning, which must score 1, and changed in ways with
another meaning, which must score 0. A way is used for the rows to which it applies. Grading uses the pool that also
grades a run's completions. Then the script measures how long it takes to load GSM8K, apply a chat template to its
prompts and compute their lengths, for the first time and from the cache.

The rows are read from the folder in SCALERL_DATA, or else from `../shared/data`: gsm8k/train.parquet and test.parquet,
math/train.parquet and test.parquet. Prints Markdown.

    python benchmarks/verifiers.py
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_scalerl.model.chat import Chat, Rendering
from lightning_scalerl.rollouts.grade import Outcome, Sample
from lightning_scalerl.rollouts.prompt import Prompt
from lightning_scalerl.task.dataset import DatasetTask
from lightning_scalerl.task.formats import Problem, verl
from lightning_scalerl.task.rows import RowSource
from lightning_scalerl.verify.answers import extract_answer
from lightning_scalerl.verify.mathematics import change_first_digit
from lightning_scalerl.verify.pool import VerifierPool
from lightning_scalerl.verify.registry import reward_sum

ROOT = Path(__file__).resolve().parent.parent
FILES = ("gsm8k/train", "gsm8k/test", "math/train", "math/test")
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message.role }}|>\n{{ message.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
_INTEGER = re.compile(r"-?\d+")
_UNIT = re.compile(r"\\(?:text|mbox)\{\s*([a-z]{3,})\s*\}\s*$")
_POWER = re.compile(r"(\\(?:text|mbox)\{[^{}]*\}\s*\^\s*\{?)([23])(\}?)$")
_UNICODE = {
    "\\pi": "π",
    "\\infty": "∞",
    "\\le ": "≤ ",
    "\\cup": "∪",
    "\\pm": "±",
    "\\times": "×",
    "^2": "²",
    "^\\circ": "°",
}


def boxed(answer: str) -> str:
    """Return a solution that ends with an answer."""
    return f"So the answer is $\\boxed{{{answer}}}$."


def in_unicode(answer: str) -> str | None:
    """Replace commands by Unicode characters, if a letter or digit does not follow; None if nothing changes."""
    rewritten = answer
    for command, character in _UNICODE.items():
        rewritten = re.sub(re.escape(command) + r"(?![A-Za-z0-9])", character, rewritten)
    rewritten = re.sub(r"\\sqrt\{(\w+)\}", r"√(\1)", rewritten).replace("-", "−")
    return None if rewritten == answer or "text" in answer else boxed(rewritten)


def thousands(answer: str) -> str | None:
    """Separate digits in groups of three, as MATH does."""
    if not re.fullmatch(r"\d{4,}", answer):
        return None
    return boxed(f"{int(answer):,}".replace(",", ",\\! "))


def other_unit(answer: str) -> str | None:
    """Replace the last word of an answer by a word with another meaning."""
    unit_match = _UNIT.search(answer)
    return boxed(f"{answer[: unit_match.start(1)]}furlongs{answer[unit_match.end(1) :]}") if unit_match else None


def other_power(answer: str) -> str | None:
    """Swap square and cubic units."""
    power_match = _POWER.search(answer)
    return (
        boxed(f"{answer[: power_match.start(2)]}{5 - int(power_match[2])}{answer[power_match.end(2) :]}")
        if power_match
        else None
    )


def other_sign(answer: str) -> str | None:
    """Change the sign of a number."""
    if not _INTEGER.fullmatch(answer) or int(answer) == 0:
        return None
    return boxed(answer[1:] if answer.startswith("-") else f"-{answer}")


def other_bracket(answer: str) -> str | None:
    """Swap a closed and an open end of an interval."""
    if (
        not re.fullmatch(r"[(\[][^(){}\[\]]*,[^(){}\[\]]*[)\]]", answer)
        or "infty" in answer
        or answer[0] + answer[-1] == "()"
    ):
        return None
    return boxed(answer[:-1] + (")" if answer[-1] == "]" else "]"))


def other_word(answer: str) -> str | None:
    """Replace an answer that is a word by another word."""
    return boxed("\\text{furlongs}") if re.fullmatch(r"\\text\{[A-Za-z]{3,}\}", answer) else None


# By name: the function that rewrites a gold answer (None if the way does not apply), and the expected reward.
WAYS: dict[str, tuple[Callable[[str], str | None], float]] = {
    "as it is": (boxed, 1.0),
    "`\\displaystyle`": (lambda answer: boxed(f"\\displaystyle {answer}"), 1.0),
    "`\\boldsymbol`": (lambda answer: boxed(f"\\boldsymbol{{{answer}}}"), 1.0),
    "`\\textcolor`": (lambda answer: boxed(f"\\textcolor{{blue}}{{{answer}}}"), 1.0),
    "`\\(...\\)` in the box": (lambda answer: boxed(f"\\({answer}\\)"), 1.0),
    "`<answer>`": (lambda answer: f"<answer>{answer}</answer>", 1.0),
    "the answer is": (lambda answer: f"Therefore, the answer is ${answer}$.", 1.0),
    "`####`": (lambda answer: f"#### ${answer}$", 1.0),
    "Unicode characters": (in_unicode, 1.0),
    "thousands separated": (thousands, 1.0),
    "a unit after a number": (
        lambda answer: boxed(f"{answer} \\text{{ cm}}") if _INTEGER.fullmatch(answer) else None,
        1.0,
    ),
    "first digit changed": (lambda answer: boxed(change_first_digit(answer)), 0.0),
    "another sign": (other_sign, 0.0),
    "another unit or word after": (other_unit, 0.0),
    "another power of the unit": (other_power, 0.0),
    "another bracket": (other_bracket, 0.0),
    "another word": (other_word, 0.0),
}
SHOWN = 30


@dataclass(frozen=True)
class Case:
    """A completion and its expected reward."""

    file: str
    row: int
    way: str
    sample: Sample
    reward: float


def solution(problem: Problem, way: str) -> str | None:
    """Return a row's answer written as a solution. For "as it is" the data's own solution is used if there is one."""
    written = WAYS[way][0](str(problem.answer))
    return problem.right or written if way == "as it is" else written


def cases(folder: Path, file: str, rows: int | None) -> Iterator[Case]:
    """Yield each row of a file in all ways."""
    for number, row in enumerate(RowSource("rows", str(folder / f"{file}.parquet"), rows=rows).read()):
        problem = verl(row)
        if problem.answer == "":
            continue  # the task also leaves out such rows, with a note
        prompt = Prompt(f"{file}/{number}", problem.text, problem.answer)
        for way in WAYS:
            if text := solution(problem, way):
                yield Case(file, number, way, Sample(prompt, text, text), WAYS[way][1])


def graded(pool: VerifierPool, completions: Sequence[Case]) -> tuple[list[Outcome], float]:
    """Grade completions; return the outcomes in order, and the seconds."""
    started_at = time.perf_counter()
    tickets = [pool.submit(case.sample) for case in completions]
    return [pool.wait(ticket) for ticket in tickets], time.perf_counter() - started_at


def reason(case: Case, outcome: Outcome) -> str:
    """Describe why a completion did not get the expected score, as far as known."""
    if outcome.kind != "score":
        return outcome.why
    if "math_too_costly" in outcome.parts:
        return "takes more than its processor time"
    from lightning_scalerl.verify.mathematics import _normalise

    gold, read_answer = (
        _normalise(text) for text in (str(case.sample.prompt.answer), extract_answer(case.sample.answer).text)
    )
    readings = [[str(found[0]) for _, found in each.readings] for each in (gold, read_answer)]
    return f"read as {readings[0]} {' '.join(gold.parts.words)} and {readings[1]} {' '.join(read_answer.parts.words)}"


def cell(text: str, limit: int = 90) -> str:
    """Shorten and escape text for a cell of a table."""
    short = " ".join(text.split())
    return (short if len(short) <= limit else short[: limit - 1] + "…").replace("|", "\\|")


def grading(folder: Path, workers: int, rows: int | None) -> tuple[list[str], bool]:
    """Grade everything; return the lines of the page, and whether all grades were correct."""
    lines = [
        "| answer written | must score | " + " | ".join(FILES) + " | completions/s |",
        f"|---|---|{'---|' * len(FILES)}---|",
    ]
    cells: dict[str, list[str]] = {way: [] for way in WAYS}
    rates: dict[str, list[float]] = {way: [0.0, 0.0] for way in WAYS}
    failed: list[tuple[Case, Outcome]] = []
    pool = VerifierPool(reward_sum("rewards", "math"), workers, timeout_s=10.0, retries=1, memory_gib=4.0)
    slowest, spent, count, blank_rows = 0.0, 0.0, 0, 0
    try:
        graded(pool, list(cases(folder, FILES[0], 1)))  # starts the workers
        for file in FILES:
            all_cases = list(cases(folder, file, rows))
            blank_rows += 1 + all_cases[-1].row - sum(case.way == "as it is" for case in all_cases)
            for way in WAYS:
                selected = [case for case in all_cases if case.way == way]
                outcomes, seconds = graded(pool, selected)
                bad = [
                    (case, outcome)
                    for case, outcome in zip(selected, outcomes, strict=True)
                    if (outcome.kind, outcome.reward) != ("score", case.reward)
                ]
                failed += bad
                right = len(selected) - len(bad)
                slowest = max([slowest, *(outcome.seconds for outcome in outcomes)])
                spent, count = spent + seconds, count + len(selected)
                cells[way].append(f"{right} of {len(selected)}" if selected else "-")
                rates[way][0] += len(selected)
                rates[way][1] += seconds
    finally:
        pool.close()
    for way, (_, reward) in WAYS.items():
        speed = f"{rates[way][0] / rates[way][1]:.0f}" if rates[way][0] else "-"
        lines.append(f"| {way} | {reward:g} | {' | '.join(cells[way])} | {speed} |")
    lines += [
        "",
        f"In all, {count} completions were graded in {spent:.0f} s with {workers} worker{'s' * (workers != 1)}, "
        f"{count / spent:.0f} per second. The slowest took {slowest:.2f} s. Rows without an answer are left out, as in "
        f"training; here there are {blank_rows}. {len(failed)} completions do not get the right score"
        + (f"; the first {SHOWN}:" if len(failed) > SHOWN else ":"),
        "",
        "| row | answer written | gold | answer | score | why |",
        "|---|---|---|---|---|---|",
    ]
    for case, outcome in failed[:SHOWN]:
        graded_text = extract_answer(case.sample.answer).text
        score = f"{outcome.reward:g}" if outcome.kind == "score" else outcome.kind
        lines.append(
            f"| {case.file} {case.row} | {case.way} | {cell(str(case.sample.prompt.answer))} | {cell(graded_text)} | "
            f"{score} | {cell(reason(case, outcome), 160)} |"
        )
    return lines, not failed


def tokenizer_of(texts: Sequence[str], size: int) -> Any:
    """Train a byte-level BPE on these texts, with a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = ["<|begin|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(texts, trainer)
    fast_tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<|begin|>", eos_token="<|end|>")
    fast_tokenizer.chat_template = TEMPLATE
    return fast_tokenizer


def prompts(folder: Path, size: int) -> list[str]:
    """Measure the processing of GSM8K's prompts; return the lines of the page."""
    started_at = time.perf_counter()
    task = DatasetTask(
        "verl",
        train=str(folder / "gsm8k/train.parquet"),
        heldout={"test": str(folder / "gsm8k/test.parquet")},
        rewards="math",
    )
    loaded = time.perf_counter() - started_at
    sets = {"train": task.train_prompts(), **task.eval_sets()}
    tokenizer = tokenizer_of([prompt.text for prompt in task.train_prompts()], size)
    seconds, lengths = [], []
    with tempfile.TemporaryDirectory() as cache:
        os.environ["SCALERL_CACHE"] = cache
        for _ in range(2):
            # A new rendering, as in another process: in-memory caches must not count.
            rendering = Rendering(tokenizer, Chat(), [tokenizer.eos_token_id])
            started_at = time.perf_counter()
            tokens = rendering.encode_all(sets)
            lengths = [len(ids) for those in tokens.values() for ids in those]
            seconds.append(time.perf_counter() - started_at)
        cache_bytes = sum(file.stat().st_size for file in Path(cache).rglob("*.npz"))
    count = len(lengths)
    return [
        f"How long does it take to prepare the {count} prompts of GSM8K? The tokenizer is a byte-level BPE of "
        f"{len(tokenizer)} tokens with a chat template. The prompts have {sum(lengths)} tokens, {min(lengths)} to "
        f"{max(lengths)} each.",
        "",
        *(f"- {note}" for note in task.notes()),
        "",
        "| task | seconds |",
        "|---|---|",
        f"| read both files, check for duplicates and leaks | {loaded:.2f} |",
        f"| apply the chat template, tokenize and measure lengths, the first time | {seconds[0]:.2f} |",
        f"| read the same from the cache ({cache_bytes / 2**20:.1f} MiB) | {seconds[1]:.2f} |",
    ]


def main() -> int:
    """Measure, grade and print the page."""
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
    lines, all_correct = grading(folder, options.workers, options.rows)
    command = " ".join(["python benchmarks/verifiers.py", *sys.argv[1:]])
    print(
        "\n".join(
            [
                "# Verifiers on real answers",
                "",
                "How often does this project's mathematics verifier grade an answer wrongly, and how fast is it? It is "
                "tested on the right answers (*gold answers*) of GSM8K and MATH.",
                "",
                f"Written by `{command}` on {os.cpu_count()} cores, Python {platform.python_version()}.",
                "",
                "## Gold answers, and changed ones",
                "",
                "Each gold answer is graded in three ways: as it is (in GSM8K with its own reasoning, in MATH in a "
                "`\\boxed`), in other notations with the same meaning, and changed so that its meaning differs. The "
                "column *must score* has the right score: 1, or 0 if the meaning is changed. The columns of the data "
                "sets count the answers that get the right score, among the rows to which the notation or change can "
                "be applied.",
                "",
                *lines,
                "",
                "## Prompts",
                "",
                *measured,
            ]
        )
    )
    return 0 if all_correct else 2


if __name__ == "__main__":
    sys.exit(main())
