"""Where prompts come from: a finite pool, reshuffled for every epoch, resumable."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from lightning_scalerl.choice import ConfigurationError
from lightning_scalerl.rollout import Prompt


class PromptSource:
    """Endless prompts: epoch after epoch over the pool, each in an order of its own.

    Args:
        pool: the prompts; ids are unique.
        random_key: seeds the orders.

    Raises:
        ConfigurationError: an empty pool or a prompt id that occurs twice.
    """

    def __init__(self, pool: Sequence[Prompt], random_key: tuple[int, ...]) -> None:
        if not pool:
            raise ConfigurationError("task: its pool of training prompts is empty")
        self._pool = list(pool)
        self._by_id = {prompt.prompt_id: prompt for prompt in self._pool}
        if len(self._by_id) < len(self._pool):
            double, _ = Counter(prompt.prompt_id for prompt in self._pool).most_common(1)[0]
            raise ConfigurationError(f"task: prompt id {double!r} occurs twice in the pool")
        self._key = random_key
        self._epoch = 0
        self._position = 0
        self._order = self._shuffled(0)

    @property
    def epoch(self) -> float:
        """Passes over the pool so far."""
        return self._epoch + self._position / len(self._pool)

    def _shuffled(self, epoch: int) -> list[int]:
        source = np.random.Generator(np.random.Philox(np.random.SeedSequence((*self._key, epoch))))
        return [int(place) for place in source.permutation(len(self._pool))]

    def next(self) -> Prompt:
        """The next prompt."""
        if self._position == len(self._order):
            self._epoch += 1
            self._position = 0
            self._order = self._shuffled(self._epoch)
        prompt = self._pool[self._order[self._position]]
        self._position += 1
        return prompt

    def by_id(self, prompt_id: str) -> Prompt:
        """A prompt of the pool.

        Raises:
            KeyError: not in the pool.
        """
        return self._by_id[prompt_id]

    def state_dict(self) -> dict[str, Any]:
        """Epoch and place in it; the order follows from the seed."""
        return {"epoch": self._epoch, "position": self._position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue there."""
        self._epoch, self._position = state["epoch"], state["position"]
        self._order = self._shuffled(self._epoch)
