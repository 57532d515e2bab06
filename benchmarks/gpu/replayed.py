"""Rollouts of given lengths without sampling, for measurements of training only."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from lightning_scalerl import Prompt, Task
from lightning_scalerl.generator.base import FinishedRollout, GroupRequest, StepReport
from lightning_scalerl.rollouts.rollout import Rollout
from tests.scripted import ScriptedGenerator

VOCABULARY = 151_936
# The published configuration of Qwen3-0.6B.
QWEN3_0_6B = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": VOCABULARY,
    "tie_word_embeddings": True,
    "max_position_embeddings": 40_960,
}


def new_model(device: str, **changed: Any) -> Qwen3ForCausalLM:
    """Make a Qwen3 with random weights. Its last norm is zero, so that all tokens have the same probability."""
    torch.manual_seed(0)
    with torch.device(device):
        model = Qwen3ForCausalLM(Qwen3Config(**{**QWEN3_0_6B, **changed}))
    torch.nn.init.zeros_(model.model.norm.weight)
    return model


def words() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one word for each of the first thousand ids of the vocabulary."""
    by_word = Tokenizer(models.WordLevel({f"w{number}": number for number in range(1000)}, unk_token="w0"))
    by_word.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=by_word, pad_token="w0", eos_token="w999")


class Words(Task):
    """A task with prompts of one length. Completions that begin with an even word, half of each group, are correct."""

    trusted = True

    def __init__(self, prompt_tokens: int) -> None:
        source = random.Random(0)
        self._texts = [" ".join(f"w{source.randrange(1, 999)}" for _ in range(prompt_tokens)) for _ in range(64)]

    def train_prompts(self) -> Sequence[Prompt]:
        """Return the pool."""
        return [Prompt(f"train-{number}", text) for number, text in enumerate(self._texts)]

    def eval_sets(self) -> Mapping[str, Sequence[Prompt]]:
        """Return a set that is never evaluated. A task needs one."""
        return {"heldout": [Prompt("heldout-0", "w1 w2 w3")]}

    def reward(self, prompt: Prompt, completion: str) -> float:
        """Return 1 for a completion that begins with an even word."""
        return float(int(completion.split()[0][1:]) % 2 == 0)


class Replayed(ScriptedGenerator):
    """A generator whose rollouts are finished at once. The run's n-th rollout has `lengths(n)` tokens."""

    def __init__(self, lengths: Callable[[int], int], slots: int) -> None:
        self._seen = 0

        def script(request: GroupRequest, index: int) -> list[int]:
            length = lengths(self._seen)
            self._seen += 1
            return [index + 1] + [1 + (index + place) % 998 for place in range(1, length)]

        super().__init__(script, slots)

    def step(self) -> StepReport:
        """Return all submitted rollouts. Log-probabilities are uniform over the vocabulary, like the model's."""
        finished = []
        for request, index in self._waiting:
            tokens = list(self._script(request, index))
            logprobs, versions = [-math.log(VOCABULARY)] * len(tokens), [self.version] * len(tokens)
            rollout = Rollout(tokens, logprobs, versions, [False] * len(tokens), "stop")
            finished.append(FinishedRollout(request.key, index, rollout))
        self.clear()
        decoded = sum(len(each.rollout.tokens) for each in finished)
        return StepReport(finished, 0, 0, decoded, decoded)
