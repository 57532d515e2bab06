"""task=arithmetic: addition of two numbers, worked out digit by digit; learnable on one CPU core.

A prompt is right-aligned, `  12+  34=`. A completion has three parts:

- thinking: four characters for each position, from the last to the first: the two digits there, then their sum with the
  carry, written with two digits;
- `#` and the answer: the digits of the result in reverse order, with the final carry;
- `.`, which ends the sequence.

For 12 + 34 that is `2406` `1304` `#` `640` `.`. A completion is correct if thinking and answer are both right to the
character. Difficulty is the number of digits, and length grows with it: 8 to 23 tokens for 1 to 4 digits.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

from lightning_scalerl.checks import ConfigurationError, shown, whole_number
from lightning_scalerl.rollouts.prompt import Prompt
from lightning_scalerl.task.base import PoolTask

ALPHABET = "0123456789+=#. "
STOP = "."
MAX_DIGITS = 4


def problem(first: int, second: int) -> str:
    """Return the prompt's text, padded to a fixed width."""
    return f"{first:>{MAX_DIGITS}}+{second:>{MAX_DIGITS}}="


def solution(first: int, second: int, digits: int) -> str:
    """Return the only correct completion, including the full stop at its end."""
    thinking, answer, carry = [], [], 0
    for position in range(digits):
        a, b = first // 10**position % 10, second // 10**position % 10
        total = a + b + carry
        thinking.append(f"{a}{b}{total:02d}")
        answer.append(str(total % 10))
        carry = total // 10
    return "".join(thinking) + "#" + "".join(answer) + str(carry) + STOP


def draw_number(digits: int, rng: random.Random) -> int:
    """Draw a number with exactly `digits` digits (0 counts as one digit)."""
    return rng.randrange(10 ** (digits - 1) if digits > 1 else 0, 10**digits)


class ArithmeticTask(PoolTask):
    """Finite pool of additions of mixed difficulty, and a held-out set.

    Args:
        train: numbers of training prompts with 1 digit, 2 digits, and so on; None for a task that is only evaluated.
        heldout: numbers of held-out prompts with 1 digit, 2 digits, and so on. No held-out prompt is in the pool.
        seed: seed of the pool. It is independent of a run's seed, so that all runs share their prompts.
    """

    trusted = True  # its verifier only compares two texts

    def __init__(self, train: Sequence[int] | None, heldout: Sequence[int], seed: int) -> None:
        num_train, num_heldout = [] if train is None else _counts("train", train), _counts("heldout", heldout)
        rng = random.Random(f"arithmetic {seed}")
        pool: list[Prompt] = []
        heldout_prompts: list[Prompt] = []
        for place, counts in enumerate(zip_longest(num_train, num_heldout, fillvalue=0)):
            prompts = self._distinct(place + 1, sum(counts), rng)
            heldout_prompts += prompts[: counts[1]]
            pool += prompts[counts[1] :]
        self._train, self._heldout = pool, {"heldout": heldout_prompts}

    @staticmethod
    def _distinct(digits: int, count: int, rng: random.Random) -> list[Prompt]:
        # Numbers with this many digits: 10, or 9 * 10**(digits - 1). A problem is a pair of numbers.
        possible = (10**digits - (10 ** (digits - 1) if digits > 1 else 0)) ** 2
        if count > possible:
            raise ConfigurationError(f"task: {count} problems of {digits} digits wanted, only {possible} exist")
        pairs: dict[tuple[int, int], None] = {}
        while len(pairs) < count:
            pairs[draw_number(digits, rng), draw_number(digits, rng)] = None
        return [
            Prompt(
                prompt_id=f"{first}+{second}/{digits}",
                text=problem(first, second),
                answer=solution(first, second, digits).removesuffix(STOP),
                difficulty=f"{digits}_digits",
                solution=solution(first, second, digits).removesuffix(STOP),
            )
            for first, second in pairs
        ]

    def reward(self, prompt: Prompt, completion: str) -> float:
        """Return 1 if the worked digits and the answer are right, else 0."""
        return float(completion == prompt.answer)

    def stated(self, completion: str) -> str:
        """Return the whole completion: worked digits are part of the answer."""
        return completion


def _counts(field: str, counts: Any) -> Sequence[int]:
    """Return numbers of prompts by number of digits.

    Raises:
        ConfigurationError: a number is not a whole number, there are too many or too few, or none is above 0.
    """
    if not isinstance(counts, list | tuple) or not 0 < len(counts) <= MAX_DIGITS or not any(counts):
        raise ConfigurationError(f"task.{field}: {shown(counts)} must give 1 to {MAX_DIGITS} counts, not all 0")
    return [whole_number(f"task.{field}", count, least=0) for count in counts]
