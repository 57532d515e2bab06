"""What TRL and verl compute on a few small rollouts; writes peer_arrays.json for test_peers.py.

Runs in an environment of its own that holds the peers and not this package: verl wants an older transformers
than the vLLM backend does. Python 3.11 and a CPU build of torch are enough; torch goes first, so that nothing
replaces it. Every version is within what both peers declare, and verl comes without its dependencies because
its losses need few of them. One command each:

    python3.11 -m venv /tmp/peers
    /tmp/peers/bin/pip install torch==2.13.0
    /tmp/peers/bin/pip install -r tests/parity/peers.txt
    /tmp/peers/bin/pip install --no-deps verl==0.9.1
    /tmp/peers/bin/python tests/parity/make_peer_arrays.py

Both peers compute in float64 here. Repositories: huggingface/trl, verl-project/verl; each entry names the
released version and the function. Neither has a prompt average: TRL runs once a prompt and the results are
averaged.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import re
from collections import defaultdict
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from trl import GRPOTrainer
from verl.trainer.ppo.core_algos import get_adv_estimator_fn, get_policy_loss_fn
from verl.workers.config import ActorConfig

SEED = 1
# Dyadic, so that every reward minus its group's mean is exact in float32 too. The second group is constant
# but not zero: a standard deviation of rewards sees its level, one of advantages does not.
REWARDS = [[1.0, 0.0, 0.25, 0.5], [0.75, 0.75, 0.75, 0.75], [0.0, 0.0, 1.0, 0.0]]
LENGTHS = [[7, 3, 5, 1], [2, 1, 4, 3], [5, 2, 7, 6]]

TRL_LOSS = "trl.trainer.grpo_trainer.GRPOTrainer._compute_loss"
TRL_ADVANTAGE = "trl.trainer.grpo_trainer.GRPOTrainer._generate_and_score_completions"
VERL = "verl.trainer.ppo.core_algos"
CENTRED = "reward minus group mean"


@dataclass
class Rollouts:
    """All rollouts of all prompts, in order: lists (R) of (T) without padding; rewards (P) of (G)."""

    rewards: list[list[float]]
    generator_logprobs: list[list[float]]
    trainer_logprobs: list[list[float]]
    forced: list[list[int]]

    def plain(self) -> dict[str, Any]:
        """As stored."""
        return {"seed": SEED, **vars(self)}

    def table(self, name: str) -> Tensor:
        """One of the ragged lists as (R, T) float64, padded at the right."""
        rows = [torch.tensor(row, dtype=torch.float64) for row in getattr(self, name)]
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)

    def mask(self, with_forced: bool) -> Tensor:
        """(R, T): 1 where a token was sampled."""
        rows = [torch.tensor([int(not (with_forced and flag)) for flag in row]) for row in self.forced]
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)

    def advantages(self) -> Tensor:
        """Reward minus group mean, (R,)."""
        centred = [reward - sum(group) / len(group) for group in self.rewards for reward in group]
        return torch.tensor(centred, dtype=torch.float64)

    def rows(self, prompts: list[int]) -> list[int]:
        """Where the rollouts of these prompts are."""
        size = len(self.rewards[0])
        return [row for prompt in prompts for row in range(prompt * size, (prompt + 1) * size)]


def make_rollouts() -> Rollouts:
    """Ratios spread over [0.25, 8], so that a cap at 5 bites as well as a clip at 0.8.

    Those of whole sequences lie in [0.9, 2.7]: a clip to [0.95, 1.1] bites on either side, and not everywhere.
    Each rollout opens with 1.27, which is between the two upper clips in use, 1.26 and 1.28.
    Log-probabilities are multiples of 2**-10: float32 holds them exactly.
    """
    draw = random.Random(SEED)
    lengths = [length for group in LENGTHS for length in group]
    spread = sum(lengths) - len(lengths)
    ratios = [0.25 * 32 ** (index / (spread - 1)) for index in range(spread)]
    draw.shuffle(ratios)
    generator, trainer, forced = [], [], []
    for row, length in enumerate(lengths):
        chosen = [1.27] + [ratios.pop() for _ in range(length - 1)]
        anchors = [round(draw.uniform(-4.5, -2.5) * 1024) / 1024 for _ in chosen]
        generator.append(anchors)
        trainer.append([round((a + math.log(r)) * 1024) / 1024 for a, r in zip(anchors, chosen, strict=True)])
        # In the cases with forced tokens: all of rollout 3, and some within and at the end of others.
        forced.append([int(row == 3 or (row % 4 == 0 and token in (2, 4))) for token in range(length)])
    return Rollouts(REWARDS, generator, trainer, forced)


def trl_trainer(**settings: Any) -> Any:
    """A GRPOTrainer that never saw a model: only what the two methods read.

    One process, no gradient accumulation, one step a generation: TRL's normalizers are then the batch's.
    """
    trainer = GRPOTrainer.__new__(GRPOTrainer)
    model = torch.nn.Module()
    model.is_gradient_checkpointing = False
    accelerator = SimpleNamespace(
        num_processes=1,
        process_index=0,
        device=torch.device("cpu"),
        sync_gradients=True,
        gather=lambda value: value,
        gather_for_metrics=lambda value: value,
        reduce=lambda value, reduction: value,
    )
    args = SimpleNamespace(
        delta=None,
        use_bias_correction_kl=True,
        steps_per_generation=1,
        gradient_accumulation_steps=1,
        gradient_checkpointing_kwargs=None,
        per_device_train_batch_size=1,
    )
    values: dict[str, Any] = {
        "model": model,
        "accelerator": accelerator,
        "args": args,
        "importance_sampling_level": "token",
        "epsilon_low": 0.2,
        "epsilon_high": 0.2,
        "beta": 0.0,
        "current_gradient_accumulation_steps": 1,
        "use_vllm": False,
        "vllm_importance_sampling_correction": False,
        "top_entropy_quantile": 1.0,
        "off_policy_mask_threshold": None,
        "_entropy_bonus_enabled": False,
        "aux_loss_enabled": False,
        "_metrics": {"train": defaultdict(list), "eval": defaultdict(list)},
        # From here on for the advantages only.
        "environment_factories": None,
        "environments": None,
        "tools": None,
        "_tokenizer": SimpleNamespace(pad_token_id=0),
        "eos_token_ids": [1],
        "pad_to_multiple_of": None,
        "mask_truncated_completions": False,
        "num_iterations": 1,
        "num_generations": len(REWARDS[0]),
        "multi_objective_aggregation": "sum_then_normalize",
        "reward_weights": torch.ones(1, dtype=torch.float64),
        "reward_func_names": ["reward"],
        "_logs": {
            "prompt": [],
            "completion": [],
            "rewards": defaultdict(list),
            "advantages": [],
            "extra": defaultdict(list),
        },
        "_pending_extra_logs": {},
        "_pending_metrics": {},
        "log_multimodal": False,
    }
    vars(trainer).update(values | settings)
    return trainer


def trl_advantages(rollouts: Rollouts, scale_rewards: str) -> Tensor:
    """(R,), by TRL's own path from rewards."""
    count = len(rollouts.forced)
    completions = [[2] * len(row) for row in rollouts.forced]
    trainer = trl_trainer(scale_rewards=scale_rewards)
    trainer._generate = lambda prompts: ([[3]] * count, completions, None, [""] * count, None, {}, None, None)
    rewards = torch.tensor(rollouts.rewards, dtype=torch.float64).reshape(-1, 1)
    trainer._calculate_rewards = lambda *_: rewards.clone()
    inputs: list[dict[str, Any]] = [{"prompt": ""} for _ in range(count)]
    advantages: Tensor = trainer._generate_and_score_completions(inputs)["advantages"]
    return advantages


def trl_loss(rollouts: Rollouts, rows: list[int], mask: Tensor, advantages: Tensor, **settings: Any) -> Any:
    """Loss and d loss / d trainer_logprobs (all R, T) of these rows in one call.

    `mask` reaches TRL as its tool mask: that is how TRL keeps tokens out of the loss that were not sampled.
    """
    logprobs = rollouts.table("trainer_logprobs").requires_grad_(True)
    present = rollouts.mask(with_forced=False)[rows]
    trainer = trl_trainer(**settings)
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (
        logprobs[rows],
        torch.zeros(len(rows), logprobs.shape[1], dtype=torch.float64),
        None,
    )
    ones = torch.ones(len(rows), 1, dtype=torch.long)
    inputs = {
        "prompt_ids": ones,
        "prompt_mask": ones,
        "completion_ids": present,
        "completion_mask": present,
        "tool_mask": mask[rows],
        "advantages": advantages[rows],
        "old_per_token_logps": rollouts.table("generator_logprobs")[rows],
        "num_items_in_batch": mask[rows].sum(),
    }
    loss = trainer._compute_loss(None, inputs)
    return loss.detach(), torch.autograd.grad(loss, logprobs)[0]


def verl_loss(rollouts: Rollouts, mask: Tensor, name: str, loss_agg_mode: str, **settings: float) -> Any:
    """Loss and d loss / d trainer_logprobs (R, T)."""
    logprobs = rollouts.table("trainer_logprobs").requires_grad_(True)
    config = ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, **settings)
    loss, _ = get_policy_loss_fn(name)(
        old_log_prob=rollouts.table("generator_logprobs"),
        log_prob=logprobs,
        advantages=rollouts.advantages().unsqueeze(1).expand_as(logprobs),
        response_mask=mask.double(),
        loss_agg_mode=loss_agg_mode,
        config=config,
    )
    return loss.detach(), torch.autograd.grad(loss, logprobs)[0]


def verl_advantages(rollouts: Rollouts, estimator: str, **settings: Any) -> Tensor:
    """(R,). Completions of one token: where verl weighs by tokens, every rollout then weighs the same."""
    rewards = torch.tensor(rollouts.rewards, dtype=torch.float64).reshape(-1, 1)
    index: Any = np.repeat(np.arange(len(rollouts.rewards)), len(rollouts.rewards[0]))
    advantages, _ = get_adv_estimator_fn(estimator)(
        token_level_rewards=rewards.clone(), response_mask=torch.ones_like(rewards), index=index, **settings
    )
    return advantages.squeeze(1)


def digits(value: float) -> float:
    """Twelve significant digits: the same text on every machine."""
    return float(f"{value:.12g}") + 0.0  # no negative zero


def loss_entry(rollouts: Rollouts, name: str, result: Any, origin: dict[str, Any]) -> dict[str, Any]:
    """A stored case; the gradient is ragged as the completions are."""
    value, gradient = result
    lengths = [len(row) for row in rollouts.forced]
    padding = torch.arange(gradient.shape[1]) >= torch.tensor(lengths).unsqueeze(1)
    if gradient[padding].any():
        raise RuntimeError(f"{name}: the peer has a gradient on padding")
    return {
        "name": name,
        **origin,
        "value": digits(value.item()),
        "gradient": [
            [digits(number) for number in row[:length].tolist()] for row, length in zip(gradient, lengths, strict=True)
        ],
    }


def trl_cases(rollouts: Rollouts) -> list[dict[str, Any]]:
    """Losses under TRL, which has no filter: where ours drops the constant group, TRL is not shown it."""
    everything = list(range(len(REWARDS)))
    varied = [prompt for prompt in everything if len(set(REWARDS[prompt])) > 1]
    entries = []

    def add(
        name: str,
        settings: dict[str, Any],
        prompts: list[int],
        average: str = "batch",
        forced: bool = False,
        scale_rewards: str | None = None,
    ) -> None:
        mask = rollouts.mask(forced)
        credit = trl_advantages(rollouts, scale_rewards) if scale_rewards else rollouts.advantages()
        calls = [[prompt] for prompt in prompts] if average == "prompt" else [prompts]
        results = [trl_loss(rollouts, rollouts.rows(call), mask, credit, **settings) for call in calls]
        result = [sum(part) / len(calls) for part in zip(*results, strict=True)]
        origin = {
            "peer": "trl",
            "version": version("trl"),
            "function": TRL_LOSS,
            "settings": settings,
            "calls": "one a prompt, averaged over prompts" if average == "prompt" else "one",
            "advantages": f"TRL's, scale_rewards={scale_rewards}" if scale_rewards else CENTRED,
            "prompts": prompts,
            "forced": forced,
        }
        entries.append(loss_entry(rollouts, name, result, origin))

    def clip(loss_type: str, high: float) -> dict[str, Any]:
        return {"loss_type": loss_type, "epsilon_low": 0.2, "epsilon_high": high}

    def sequence(loss_type: str, low: float, high: float) -> dict[str, Any]:
        ratio = {"importance_sampling_level": "sequence"}
        return {"loss_type": loss_type, "epsilon_low": low, "epsilon_high": high, **ratio}

    # `epsilon_high` of TRL's cispo is the absolute cap on the ratio.
    cap = {"loss_type": "cispo", "epsilon_high": 5.0}
    for high in (0.26, 0.28):
        add(f"trl dapo {high} token", clip("dapo", high), everything)
        add(f"trl dapo {high} sample", clip("grpo", high), everything)
        add(f"trl dapo {high} prompt", clip("dapo", high), everything, "prompt")
    add("trl cispo token", cap, everything)
    add("trl cispo prompt", cap, everything, "prompt")
    add("trl dapo 0.26 token filtered", clip("dapo", 0.26), varied)
    add("trl dapo 0.26 sample filtered", clip("grpo", 0.26), varied)
    add("trl cispo prompt filtered", cap, varied, "prompt")
    add("trl dapo 0.26 token forced", clip("dapo", 0.26), everything, forced=True)
    add("trl dapo 0.26 sample forced", clip("grpo", 0.26), everything, forced=True)
    add("trl cispo prompt forced", cap, everything, "prompt", forced=True)
    # GSPO is loss type grpo; under dapo TRL warns that sequences weigh by length.
    add("trl gspo 0.005 sample", sequence("grpo", 3e-3, 5e-3), everything)
    add("trl gspo 0.1 sample", sequence("grpo", 0.05, 0.1), everything)
    add("trl gspo 0.1 token", sequence("dapo", 0.05, 0.1), everything)
    add("trl gspo 0.1 prompt", sequence("dapo", 0.05, 0.1), everything, "prompt")
    add("trl gspo 0.1 sample forced", sequence("grpo", 0.05, 0.1), everything, forced=True)
    add("trl grpo from rewards", clip("grpo", 0.2), everything, scale_rewards="group")
    return entries


def verl_cases(rollouts: Rollouts) -> list[dict[str, Any]]:
    """Losses under verl."""
    entries = []

    def add(name: str, loss: str, mode: str, settings: dict[str, float], forced: bool = False) -> None:
        origin = {
            "peer": "verl",
            "version": version("verl"),
            "function": f"{VERL}.get_policy_loss_fn({loss!r})",
            "settings": {"loss_agg_mode": mode, **settings},
            "calls": "one",
            "advantages": CENTRED,
            "prompts": list(range(len(REWARDS))),
            "forced": forced,
        }
        result = verl_loss(rollouts, rollouts.mask(forced), loss, mode, **settings)
        entries.append(loss_entry(rollouts, name, result, origin))

    # verl bounds the loss of a negative advantage at ratio c, "dual clip". We do not: c is put out of reach,
    # and one case keeps verl's default, 3, to show that it is another surrogate.
    clip = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "clip_ratio_c": 1e6}
    # verl clips the weight of cispo to [1 - low, 1 + high]: low 1 means no lower bound, high 4 a cap at 5.
    cap = {"clip_ratio_low": 1.0, "clip_ratio_high": 4.0}
    add("verl dapo 0.28 token", "vanilla", "token-mean", clip)
    add("verl dapo 0.28 sample", "vanilla", "seq-mean-token-mean", clip)
    add("verl cispo token", "cispo", "token-mean", cap)
    add("verl cispo sample", "cispo", "seq-mean-token-mean", cap)
    add("verl cispo token forced", "cispo", "token-mean", cap, forced=True)
    add("verl cispo sample forced", "cispo", "seq-mean-token-mean", cap, forced=True)
    scalerl = {"clip_ratio_low": 3e-3, "clip_ratio_high": 5e-3}
    wider = {"clip_ratio_low": 0.05, "clip_ratio_high": 0.1}
    add("verl gspo 0.005 sample", "gspo", "seq-mean-token-mean", scalerl)
    add("verl gspo 0.1 sample", "gspo", "seq-mean-token-mean", wider)
    add("verl gspo 0.1 token", "gspo", "token-mean", wider)
    add("verl gspo 0.1 token forced", "gspo", "token-mean", wider, forced=True)
    add("verl dual clip token", "vanilla", "token-mean", clip | {"clip_ratio_c": 3.0})
    return entries


def advantage_cases(rollouts: Rollouts) -> list[dict[str, Any]]:
    """Advantages (P) of (G)."""
    entries = []

    def add(peer: str, name: str, function: str, settings: dict[str, Any], values: Tensor) -> None:
        table = values.reshape(len(REWARDS), -1).tolist()
        entries.append(
            {
                "name": name,
                "peer": peer,
                "version": version(peer),
                "function": function,
                "settings": settings,
                "advantages": [[digits(value) for value in row] for row in table],
            }
        )

    for scale in ("group", "batch", "none"):
        add("trl", f"trl {scale}", TRL_ADVANTAGE, {"scale_rewards": scale}, trl_advantages(rollouts, scale))
    for scaled in (True, False):
        settings = {"norm_adv_by_std_in_grpo": scaled}
        values = verl_advantages(rollouts, "grpo", **settings)
        function = f"{VERL}.compute_grpo_outcome_advantage"
        add("verl", f"verl grpo {'scaled' if scaled else 'unscaled'}", function, settings, values)
    # Group mean out, then whitened over the batch: the peers' only standard deviation of *advantages*.
    whiten = "reinforce_plus_plus_baseline"
    function = f"{VERL}.compute_reinforce_plus_plus_baseline_outcome_advantage"
    add("verl", "verl whitened", function, {}, verl_advantages(rollouts, whiten))
    return entries


def write(path: Path, content: dict[str, Any]) -> None:
    """JSON with every innermost list on one line, so that a difference names its rollout."""

    def joined(found: re.Match[str]) -> str:
        return "[" + " ".join(found[1].split()) + "]"

    path.write_text(re.sub(r"\[\s+([^\[\]{}]*?)\s+\]", joined, json.dumps(content, indent=1)) + "\n")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--output", type=Path, default=Path(__file__).with_name("peer_arrays.json"))
    output = parser.parse_args().output
    rollouts = make_rollouts()
    packages = ("torch", "trl", "accelerate", "transformers", "verl", "tensordict")
    write(
        output,
        {
            "made_by": "tests/parity/make_peer_arrays.py",
            "environment": {package: version(package) for package in packages},
            "inputs": rollouts.plain(),
            "losses": trl_cases(rollouts) + verl_cases(rollouts),
            "advantages": advantage_cases(rollouts),
        },
    )


if __name__ == "__main__":
    main()
