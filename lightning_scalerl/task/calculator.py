"""task=calculator: sums that the model cannot do in its head, and an environment with a calculator.

A prompt is `4812+39075`, rendered as `4812+39075=`. A completion without the tool is `43887.`, in which about half of
the base model's digits are wrong. With environment=calculator a conversation is, in the tokens of the model:

    4812+39075= <call>calculate(4812+39075)</call>. ?43887= 43887.

The model should learn to call the tool, to copy the numbers, and to repeat the tool's answer.
"""

from __future__ import annotations

import random
import re

from lightning_scalerl.checks import ConfigurationError, whole_number
from lightning_scalerl.rollouts.prompt import Prompt
from lightning_scalerl.task.base import PoolTask

MAX_DIGITS = 5
_SUM = re.compile(r"\d{1,18}(\+\d{1,18})*")


class Calculator:
    """Environment with one tool, in TRL's form."""

    def reset(self, **row: object) -> None:
        """Begin an episode. The row is ignored, because the task's own verifier grades the answer."""

    def calculate(self, expression: str) -> str:
        """
        Adds numbers.

        Args:
            expression: The numbers, such as 12+34.

        Returns:
            Their sum.
        """
        if _SUM.fullmatch(expression) is None:
            raise ValueError("no sum")
        return str(sum(map(int, expression.split("+"))))


class CalculatorTask(PoolTask):
    """Finite pool of sums of two numbers, and a held-out set.

    Args:
        train: number of training prompts; None for a task that is only evaluated.
        heldout: number of held-out prompts. No held-out prompt is in the pool.
        digits: smallest and largest number of digits of a number.
        seed: seed of the pool. It is independent of a run's seed, so that all runs share their prompts.
    """

    trusted = True  # its verifier only compares two texts

    def __init__(
        self, train: int | None, heldout: int, digits: tuple[int, int] = (3, MAX_DIGITS), seed: int = 0
    ) -> None:
        num_train = 0 if train is None else whole_number("task.train", train)
        whole_number("task.heldout", heldout)
        min_digits, max_digits = digits
        if not 1 <= min_digits <= max_digits <= MAX_DIGITS:
            raise ConfigurationError(f"task.digits: {list(digits)} must be two numbers in order, of 1 to {MAX_DIGITS}")
        possible = (10**max_digits - (10 ** (min_digits - 1) if min_digits > 1 else 0)) ** 2
        if num_train + heldout > possible // 2:
            raise ConfigurationError(
                f"task: {num_train + heldout} prompts wanted, and only {possible} sums exist; give less"
            )
        source = random.Random(f"calculator {seed}")
        pairs: dict[tuple[int, int], None] = {}
        while len(pairs) < num_train + heldout:
            pairs[draw_number(min_digits, max_digits, source), draw_number(min_digits, max_digits, source)] = None
        prompts = [
            Prompt(prompt_id=f"{first}+{second}", text=f"{first}+{second}", answer=str(first + second))
            for first, second in pairs
        ]
        self._train, self._heldout = prompts[heldout:], {"heldout": prompts[:heldout]}

    def reward(self, prompt: Prompt, completion: str) -> float:
        """Return 1 if the last turn is the sum and nothing else, else 0."""
        return float(completion == prompt.answer)

    def stated(self, completion: str) -> str:
        """Return the whole last turn."""
        return completion


def draw_number(min_digits: int, max_digits: int, source: random.Random) -> int:
    """Draw a number of `min_digits` to `max_digits` digits; each number of digits is equally likely."""
    digits = source.randint(min_digits, max_digits)
    return source.randrange(10 ** (digits - 1) if digits > 1 else 0, 10**digits)
