"""Compute losses, advantages and weights of a few small rollouts with TRL and verl; write peer_arrays.json.

test_peers.py compares our own values with this file. The script runs in an environment that has the peers and not
this package, because verl needs an older transformers than the vLLM backend. Python 3.11 and a CPU build of torch are
enough. Install torch first, so that nothing replaces it. All versions are within what both peers declare. verl is
installed without its dependencies, because its losses need few of them. The commands:

    python3.11 -m venv /tmp/peers
    /tmp/peers/bin/pip install torch==2.13.0
    /tmp/peers/bin/pip install -r tests/parity/peers.txt
    /tmp/peers/bin/pip install --no-deps verl==0.9.1
    /tmp/peers/bin/python tests/parity/make_peer_arrays.py

Both peers compute in float64 here. Repositories: huggingface/trl, verl-project/verl; each entry names the released
version and the function. Neither can average over prompts, so TRL runs once for each prompt and the results are
averaged. TRL computes everything itself from rewards to loss. verl's actor and critic losses come from its workers
(`ppo_loss`, `value_loss`) with the batch's counts, or from a single function if the entry names one.
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
from tensordict import TensorDict
from torch import Tensor
from trl import GRPOTrainer
from trl.experimental.gmpo import GMPOTrainer
from verl.trainer.ppo.core_algos import (
    compute_gae_advantage_return,
    get_adv_estimator_fn,
    get_policy_loss_fn,
    kl_penalty,
)
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask
from verl.utils import tensordict_utils
from verl.workers.config import ActorConfig, CriticConfig, PolicyLossConfig
from verl.workers.utils import losses as verl_losses

SEED = 1
# Multiples of powers of two: each reward minus its group's mean is exact in float32. The second group is constant but
# not zero, which changes a standard deviation of rewards, but not one of advantages.
REWARDS = [[1.0, 0.0, 0.25, 0.5], [0.75, 0.75, 0.75, 0.75], [0.0, 0.0, 1.0, 0.0]]
LENGTHS = [[7, 3, 5, 1], [2, 1, 4, 3], [5, 2, 7, 6]]
# Rollouts that reached the completion limit, one per group.
TRUNCATED = (1, 6, 10)
# More than the longest completion, so that a divisor of the padded width gives another result.
MAX_TOKENS = 9

TRL_LOSS = "trl.trainer.grpo_trainer.GRPOTrainer._compute_loss"
TRL_GMPO = "trl.experimental.gmpo.GMPOTrainer._compute_loss"
TRL_ADVANTAGE = "trl.trainer.grpo_trainer.GRPOTrainer._generate_and_score_completions"
VERL = "verl.trainer.ppo.core_algos"
VERL_LOSSES = "verl.workers.utils.losses"
VERL_WEIGHTS = "verl.trainer.ppo.rollout_corr_helper.compute_rollout_correction_and_rejection_mask"
CENTRED = "reward minus group mean"


@dataclass
class Rollouts:
    """All rollouts of all prompts, in order: lists (R) of (T) without padding; rewards (P) of (G), truncated (R).

    `proximal_logprobs` are the trainer's before the update. `values` are the critic's before it, `new_values` in it.
    """

    rewards: list[list[float]]
    generator_logprobs: list[list[float]]
    trainer_logprobs: list[list[float]]
    forced: list[list[int]]
    truncated: list[int]
    proximal_logprobs: list[list[float]]
    reference_logprobs: list[list[float]]
    entropies: list[list[float]]
    values: list[list[float]]
    new_values: list[list[float]]

    def plain(self) -> dict[str, Any]:
        """Return the content to store."""
        return {"seed": SEED, **vars(self)}

    def table(self, name: str) -> Tensor:
        """Return one of the ragged lists as (R, T) float64, padded at the right."""
        rows = [torch.tensor(row, dtype=torch.float64) for row in getattr(self, name)]
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)

    def mask(self, with_forced: bool) -> Tensor:
        """Return (R, T): 1 for sampled tokens; forced tokens count as sampled unless `with_forced`."""
        rows = [torch.tensor([int(not (with_forced and flag)) for flag in row]) for row in self.forced]
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)

    def advantages(self) -> Tensor:
        """Return rewards minus the group's mean, (R,)."""
        centred = [reward - sum(group) / len(group) for group in self.rewards for reward in group]
        return torch.tensor(centred, dtype=torch.float64)

    def token_rewards(self, mask: Tensor) -> Tensor:
        """Return (R, T): each rollout's reward at its last token inside the mask."""
        table = torch.zeros(mask.shape, dtype=torch.float64)
        for row, reward in enumerate(reward for group in self.rewards for reward in group):
            places = mask[row].nonzero()
            if len(places):
                table[row, places[-1]] = reward
        return table

    def ragged(self, table: Tensor) -> list[list[float]]:
        """Return a table (R, T) in its stored form: without padding, with rounded numbers."""
        rows = zip(table.tolist(), self.forced, strict=True)
        return [[digits(number) for number in row[: len(forced)]] for row, forced in rows]

    def rows(self, prompts: list[int]) -> list[int]:
        """Return the indices of these prompts' rollouts."""
        size = len(self.rewards[0])
        return [row for prompt in prompts for row in range(prompt * size, (prompt + 1) * size)]


def make_rollouts() -> Rollouts:
    """Make rollouts whose ratios cover [0.25, 8], so that both a cap at 5 and a clip at 0.8 have an effect.

    Ratios of whole sequences cover [0.9, 2.7], so that a clip to [0.95, 1.1] has an effect on both sides, but not
    always. The first ratio of each rollout is 1.27, between the two upper clips in use, 1.26 and 1.28.
    Log-probabilities are multiples of 2**-10, which float32 holds exactly.
    """
    draw = random.Random(SEED)
    lengths = [length for group in LENGTHS for length in group]
    spread = sum(lengths) - len(lengths)
    ratios = [0.25 * 32 ** (index / (spread - 1)) for index in range(spread)]
    draw.shuffle(ratios)
    generator, trainer, forced = [], [], []
    for row, length in enumerate(lengths):
        chosen = [1.27] + [ratios.pop() for _ in range(length - 1)]
        anchors = [exact(draw.uniform(-4.5, -2.5)) for _ in chosen]
        generator.append(anchors)
        trainer.append([exact(a + math.log(r)) for a, r in zip(anchors, chosen, strict=True)])
        # Forced tokens, for the cases that use them: all of rollout 3, and some inside and at the end of others.
        forced.append([int(row == 3 or (row % 4 == 0 and token in (2, 4))) for token in range(length)])
    truncated = [int(row in TRUNCATED) for row in range(len(lengths))]
    return Rollouts(REWARDS, generator, trainer, forced, truncated, **make_before_update(trainer))


def make_before_update(trainer: list[list[float]]) -> dict[str, list[list[float]]]:
    """Make the models' outputs before the update, and values and entropies in it.

    Ratios to the proximal anchor cover [0.3, 6.6]. The first of each rollout is 1.23, where a clip at 0.2 has an effect
    and one at 0.26 has none. The reference is between anchor and trainer, where k3 is below 10. Values move by up to
    0.5, so that a clip at 0.2 has an effect.

    The seed was searched for. With and without forced tokens, rollouts with an advantage have weights below 0.5,
    above 3 and in between. Each kind is a large enough part of the loss to show a bound. Ratios of whole
    sequences are on both sides of all GSPO clips, and between them.
    """
    draw = random.Random(30845)
    spread = sum(map(len, trainer)) - len(trainer)
    ratios = [0.3 * 22 ** (index / (spread - 1)) for index in range(spread)]
    draw.shuffle(ratios)
    tables: dict[str, list[list[float]]] = {}

    def add(name: str, row: list[float]) -> None:
        tables.setdefault(name, []).append([exact(value) for value in row])

    for row in trainer:
        chosen = [1.23] + [ratios.pop() for _ in row[1:]]
        gaps = [math.log(ratio) for ratio in chosen]
        values = [exact(draw.uniform(-0.5, 1.0)) for _ in row]
        add("proximal_logprobs", [t - gap for t, gap in zip(row, gaps, strict=True)])
        add("reference_logprobs", [t - gap / 2 + draw.uniform(-0.7, 0.7) for t, gap in zip(row, gaps, strict=True)])
        add("entropies", [draw.uniform(0.1, 3.0) for _ in row])
        add("values", values)
        add("new_values", [value + draw.uniform(-0.5, 0.5) for value in values])
    return tables


def exact(value: float) -> float:
    """Round to a multiple of 2**-10, which float32 holds exactly."""
    return round(value * 1024) / 1024


def trl_trainer(**settings: Any) -> Any:
    """Make a GRPOTrainer without a model, with the attributes that the two methods read.

    `settings` are attributes of the trainer or of its arguments. With one process, no gradient accumulation and one
    step per generation, TRL normalizes by the whole batch. The loss type "gmpo" selects TRL's GMPOTrainer, because TRL
    has no such loss type.
    """
    kind = GMPOTrainer if settings.get("loss_type") == "gmpo" else GRPOTrainer
    trainer = kind.__new__(kind)
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
        sapo_temperature_pos=1.0,
        sapo_temperature_neg=1.05,
        steps_per_generation=1,
        gradient_accumulation_steps=1,
        gradient_checkpointing_kwargs=None,
        per_device_train_batch_size=1,
    )
    values: dict[str, Any] = {
        "model": model,
        "ref_model": torch.nn.Module(),
        "accelerator": accelerator,
        "args": args,
        "importance_sampling_level": "token",
        "epsilon_low": 0.2,
        "epsilon_high": 0.2,
        "beta": 0.0,
        "max_completion_length": MAX_TOKENS,
        "current_gradient_accumulation_steps": 1,
        "use_vllm": False,
        "vllm_importance_sampling_correction": False,
        "top_entropy_quantile": 1.0,
        "off_policy_mask_threshold": None,
        "_entropy_bonus_enabled": False,
        "aux_loss_enabled": False,
        "_metrics": {"train": defaultdict(list), "eval": defaultdict(list)},
        "use_adaptive_entropy": False,
        # The following attributes are read before the loss.
        "environment_factories": None,
        "environments": None,
        "tools": None,
        "_tokenizer": SimpleNamespace(pad_token_id=0),
        "eos_token_ids": [1],
        "pad_to_multiple_of": None,
        "mask_truncated_completions": False,
        # With one iteration, TRL would not compute the log-probabilities before the update.
        "num_iterations": 2,
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
    vars(trainer).update(values)
    for name, value in settings.items():
        vars(args if hasattr(args, name) else trainer)[name] = value
    return trainer


@dataclass
class Leaves:
    """Inputs (R, T) by which gradients are taken."""

    gradient: Tensor
    entropy_gradient: Tensor
    value_gradient: Tensor

    @classmethod
    def of(cls, rollouts: Rollouts) -> Leaves:
        """Return the trainer's log-probabilities, entropies and values in the update, named as in the file."""
        names = ("trainer_logprobs", "entropies", "new_values")
        return cls(*(rollouts.table(name).requires_grad_(True) for name in names))

    def result(self, loss: Tensor) -> dict[str, Tensor]:
        """Return the loss and its gradients."""
        named = vars(self)
        gradients = torch.autograd.grad(loss, tuple(named.values()), materialize_grads=True)
        return {"value": loss.detach(), **dict(zip(named, gradients, strict=True))}


def trl_scored(rollouts: Rollouts, rows: list[int], mask: Tensor, trainer: Any) -> dict[str, Any]:
    """Return TRL's results before the loss for the rollouts in these rows: advantages, masks, weights.

    `mask` is passed as TRL's tool mask, which keeps tokens that were not sampled out of the loss.
    """
    lengths = [len(rollouts.forced[row]) for row in rows]
    # Token 1 is the end of sequence, which truncated completions lack.
    completions = [
        [2] * (length - 1) + [2 if rollouts.truncated[row] else 1] for row, length in zip(rows, lengths, strict=True)
    ]
    tools = [mask[row, :length].tolist() for row, length in zip(rows, lengths, strict=True)]
    sampling = [rollouts.generator_logprobs[row] for row in rows]
    prompts, texts = [[3]] * len(rows), [""] * len(rows)
    trainer._generate = lambda _: (prompts, completions, tools, texts, sampling, {}, None, None)
    rewards = torch.tensor(rollouts.rewards, dtype=torch.float64).reshape(-1, 1)[rows]
    trainer._calculate_rewards = lambda *_: rewards.clone()
    scored: dict[str, Any] = trainer._generate_and_score_completions([{"prompt": ""} for _ in rows])
    return scored


def trl_step(rollouts: Rollouts, rows: list[int], mask: Tensor, anchor: str, **settings: Any) -> Any:
    """Return loss and gradients (all R, T) of these rows in one call, and TRL's results before the loss.

    `anchor` names the trainer's log-probabilities before the update. TRL's weights are their ratio to the generator's.
    """
    leaves = Leaves.of(rollouts)
    trainer = trl_trainer(**settings)
    width = max(len(rollouts.forced[row]) for row in rows)
    logprobs_by_model = {
        None: leaves.gradient,
        trainer.model: rollouts.table(anchor),
        trainer.ref_model: rollouts.table("reference_logprobs"),
    }
    trainer._get_per_token_logps_and_entropies = lambda model, *_, **__: (
        logprobs_by_model[model][rows, :width],
        leaves.entropy_gradient[rows, :width],
        None,
    )
    scored = trl_scored(rollouts, rows, mask, trainer)
    return leaves.result(trainer._compute_loss(None, scored)), scored


def trl_advantages(rollouts: Rollouts, **settings: Any) -> Tensor:
    """Return advantages (R,), computed by TRL from rewards."""
    everything = rollouts.rows(list(range(len(REWARDS))))
    _, scored = trl_step(rollouts, everything, rollouts.mask(False), "generator_logprobs", loss_type="grpo", **settings)
    advantages: Tensor = scored["advantages"]
    return advantages


def verl_loss(rollouts: Rollouts, mask: Tensor, name: str, loss_agg_mode: str, **settings: float) -> Any:
    """Return loss and gradients (R, T) of verl's single function, which counts only the tokens that it gets."""
    leaves = Leaves.of(rollouts)
    policy_settings = {key: value for key, value in settings.items() if key in vars(PolicyLossConfig())}
    others = {key: value for key, value in settings.items() if key not in policy_settings}
    common = {"strategy": "fsdp", "rollout_n": 1, "ppo_micro_batch_size_per_gpu": 1}
    config = ActorConfig(**common, policy_loss=PolicyLossConfig(loss_mode=name, **policy_settings), **others)
    loss, _ = get_policy_loss_fn(name)(
        old_log_prob=rollouts.table("generator_logprobs"),
        log_prob=leaves.gradient,
        advantages=rollouts.advantages().unsqueeze(1).expand_as(mask),
        response_mask=mask.double(),
        loss_agg_mode=loss_agg_mode,
        config=config,
    )
    return leaves.result(loss)


def verl_weights(rollouts: Rollouts, mask: Tensor, **settings: Any) -> Tensor:
    """Return weights (R, T): the ratio of the trainer before the update to the generator; 0 outside the mask."""
    weights, _, _ = compute_rollout_correction_and_rejection_mask(
        rollouts.table("proximal_logprobs"), rollouts.table("generator_logprobs"), mask, **settings
    )
    sampled_weights: Tensor = weights.batch["rollout_is_weights"]
    return sampled_weights


def verl_gae(rollouts: Rollouts, mask: Tensor, beta: float, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Return whitened advantages and returns, (R, T).

    Rewards are at last tokens. `beta` times k3 is subtracted from them, as `apply_kl_penalty` does in
    verl.trainer.ppo.ray_trainer, which cannot be imported alone.
    """
    distance = kl_penalty(rollouts.table("proximal_logprobs"), rollouts.table("reference_logprobs"), "low_var_kl")
    rewards = rollouts.token_rewards(mask) - beta * distance * mask
    estimates: tuple[Tensor, Tensor] = compute_gae_advantage_return(rewards, rollouts.table("values"), mask, gamma, lam)
    return estimates


def verl_step(
    rollouts: Rollouts,
    mask: Tensor,
    settings: dict[str, Any],
    anchor: str,
    weights: dict[str, Any] | None,
    gae: dict[str, float] | None,
    critic: dict[str, Any],
) -> Any:
    """Return loss and gradients (R, T) of verl's workers; with `gae`, the critic's loss is added to the actor's.

    Log-probabilities are tables already, so verl's conversion into tables is replaced by the identity.
    """
    leaves = Leaves.of(rollouts)
    verl_losses.no_padding_2_padding = lambda values, _: values
    common = {"strategy": "fsdp", "rollout_n": 1, "ppo_micro_batch_size_per_gpu": 1}
    policy_loss = PolicyLossConfig(loss_mode=settings["loss_mode"])
    chosen = {name: value for name, value in settings.items() if name != "loss_mode"}
    tables = {
        "response_mask": mask,
        "old_log_probs": rollouts.table(anchor),
        "ref_log_prob": rollouts.table("reference_logprobs"),
        "values": rollouts.table("values"),
        "advantages": rollouts.advantages().unsqueeze(1).expand_as(mask),
    }
    if gae is not None:
        tables["advantages"], tables["returns"] = verl_gae(rollouts, mask, **gae)
    if weights is not None:
        tables["rollout_is_weights"] = verl_weights(rollouts, mask, **weights)
    data = TensorDict(tables, batch_size=[len(mask)])
    counts = {"dp_size": 1, "batch_num_tokens": int(mask.sum()), "global_batch_size": len(mask)}
    tensordict_utils.assign_non_tensor(data, **counts)
    outputs = {"log_probs": leaves.gradient, "entropy": leaves.entropy_gradient, "values": leaves.value_gradient}
    loss, _ = verl_losses.ppo_loss(ActorConfig(**common, policy_loss=policy_loss, **chosen), outputs, data)
    if gae is not None:
        loss = loss + verl_losses.value_loss(CriticConfig(**common, **critic), outputs, data)[0]
    return leaves.result(loss)


def verl_advantages(rollouts: Rollouts, estimator: str, **settings: Any) -> Tensor:
    """Return advantages (R,) for completions of one token, because then verl's weights by tokens are equal."""
    rewards = torch.tensor(rollouts.rewards, dtype=torch.float64).reshape(-1, 1)
    index: Any = np.repeat(np.arange(len(rollouts.rewards)), len(rollouts.rewards[0]))
    advantages, _ = get_adv_estimator_fn(estimator)(
        token_level_rewards=rewards.clone(), response_mask=torch.ones_like(rewards), index=index, **settings
    )
    return advantages.squeeze(1)


def digits(value: float) -> float:
    """Round to twelve significant digits, so that the text is the same on every machine."""
    return float(f"{value:.12g}") + 0.0  # no negative zero


def loss_entry(rollouts: Rollouts, name: str, result: dict[str, Tensor], origin: dict[str, Any]) -> dict[str, Any]:
    """Return a stored case. Gradients are ragged like the completions; gradients that are 0 everywhere are left out."""
    lengths = [len(row) for row in rollouts.forced]
    gradients = {key: value for key, value in result.items() if key != "value"}
    for gradient in gradients.values():
        padding = torch.arange(gradient.shape[1]) >= torch.tensor(lengths).unsqueeze(1)
        if gradient[padding].any():
            raise RuntimeError(f"{name}: the peer has a gradient on padding")
    return {
        "name": name,
        **origin,
        "value": digits(result["value"].item()),
        **{key: rollouts.ragged(gradient) for key, gradient in gradients.items() if gradient.any()},
    }


def trl_weighted(mode: str, low: float | None = None) -> dict[str, Any]:
    """Return TRL's settings for weights of the trainer before the update over the generator, within [low, 3]."""
    return {
        "use_vllm": True,
        "vllm_importance_sampling_correction": True,
        "vllm_importance_sampling_mode": mode,
        "vllm_importance_sampling_clip_min": low,
        "vllm_importance_sampling_clip_max": 3.0,
    }


TRL_MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")


TRL_PLAIN = {"loss_type": "grpo", "scale_rewards": "none"}


def trl_cases(rollouts: Rollouts) -> list[dict[str, Any]]:
    """Return losses of TRL, which has no filter: the constant group is left out where our filter drops it."""
    everything = list(range(len(REWARDS)))
    varied = [prompt for prompt in everything if len(set(REWARDS[prompt])) > 1]
    entries = []

    def add(
        name: str,
        settings: dict[str, Any],
        prompts: list[int] = everything,
        average: str = "batch",
        forced: bool = False,
        scale_rewards: str | None = None,
        anchor: str = "generator_logprobs",
    ) -> None:
        mask = rollouts.mask(forced)
        calls = [[prompt] for prompt in prompts] if average == "prompt" else [prompts]
        given = {"scale_rewards": scale_rewards or "none", **settings}
        results = [trl_step(rollouts, rollouts.rows(call), mask, anchor, **given)[0] for call in calls]
        result = {key: sum(result_[key] for result_ in results) / len(calls) for key in results[0]}
        origin = {
            "peer": "trl",
            "version": version("trl"),
            "function": TRL_GMPO if settings["loss_type"] == "gmpo" else TRL_LOSS,
            "settings": settings,
            "calls": "one a prompt, averaged over prompts" if average == "prompt" else "one",
            "advantages": f"TRL's, scale_rewards={scale_rewards}" if scale_rewards else CENTRED,
            "prompts": prompts,
            "forced": forced,
        }
        if anchor != "generator_logprobs":
            origin["anchor"] = anchor
        entries.append(loss_entry(rollouts, name, result, origin))

    def clip(loss_type: str, high: float) -> dict[str, Any]:
        return {"loss_type": loss_type, "epsilon_low": 0.2, "epsilon_high": high}

    def sequence(loss_type: str, low: float, high: float) -> dict[str, Any]:
        ratio = {"importance_sampling_level": "sequence"}
        return {"loss_type": loss_type, "epsilon_low": low, "epsilon_high": high, **ratio}

    # TRL's `epsilon_high` is an absolute cap on the ratio in the loss type cispo.
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
    # GSPO is loss type grpo. With dapo, TRL warns that sequences are weighted by their length.
    add("trl gspo 0.005 sample", sequence("grpo", 3e-3, 5e-3), everything)
    add("trl gspo 0.1 sample", sequence("grpo", 0.05, 0.1), everything)
    add("trl gspo 0.1 token", sequence("dapo", 0.05, 0.1), everything)
    add("trl gspo 0.1 prompt", sequence("dapo", 0.05, 0.1), everything, "prompt")
    add("trl gspo 0.1 sample forced", sequence("grpo", 0.05, 0.1), everything, forced=True)
    add("trl grpo from rewards", clip("grpo", 0.2), everything, scale_rewards="group")

    # TRL's loss type determines the aggregation: token for dapo and cispo, sample for grpo, constant for dr_grpo.
    # TRL has no sum over the batch.
    token, sample, constant = clip("dapo", 0.2), clip("grpo", 0.2), clip("dr_grpo", 0.2)
    add("trl ppo token", token)
    add("trl ppo sample", sample)
    add("trl ppo prompt", token, average="prompt")
    add("trl ppo constant", constant)
    add("trl dapo 0.28 constant", clip("dr_grpo", 0.28))
    add("trl gspo 0.1 constant", sequence("dr_grpo", 0.05, 0.1))
    add("trl ppo prompt forced", token, average="prompt", forced=True)
    add("trl ppo constant forced", constant, forced=True)
    add("trl ppo token batch rewards", token, scale_rewards="batch")

    masked = {"mask_truncated_completions": True}
    add("trl ppo token truncated", token | masked)
    add("trl ppo sample truncated", sample | masked)
    add("trl ppo prompt truncated", token | masked, average="prompt")
    add("trl ppo constant truncated", constant | masked)
    add("trl cispo token truncated", cap | masked)
    add("trl ppo token truncated forced", token | masked, forced=True)
    add("trl ppo token truncated from rewards", token | masked, scale_rewards="group")

    distance = {"beta": 0.2, "use_bias_correction_kl": False}
    add("trl ppo token kl", token | distance)
    add("trl ppo sample kl", sample | distance)
    add("trl ppo prompt kl", token | distance, average="prompt")
    add("trl ppo constant kl", constant | distance)
    add("trl cispo token kl forced", cap | distance, forced=True)
    add("trl ppo token kl truncated", token | distance | masked)
    add("trl ppo token kl biased", token | distance | {"use_bias_correction_kl": True})

    # The entropy bonus has one coefficient, and is a mean over tokens for every loss type.
    bonus = {"_entropy_bonus_enabled": True, "entropy_coef": 0.01}
    add("trl ppo token entropy", token | bonus)
    add("trl ppo sample entropy", sample | bonus)
    add("trl cispo token entropy forced", cap | bonus, forced=True)

    proximal = "proximal_logprobs"
    add("trl ppo token proximal", token, anchor=proximal)
    for mode in TRL_MODES:
        named = mode.replace("_", " ")
        add(f"trl ppo token weights {named}", token | trl_weighted(mode), anchor=proximal)
        add(f"trl cispo token weights {named}", cap | trl_weighted(mode), anchor=proximal)
        add(f"trl ppo token weights {named} forced", token | trl_weighted(mode), anchor=proximal, forced=True)
        add(f"trl ppo token kl weights {named}", token | distance | trl_weighted(mode), anchor=proximal)
    add("trl ppo token kl proximal", token | distance, anchor=proximal)
    add("trl ppo sample weights sequence mask", sample | trl_weighted("sequence_mask"), anchor=proximal)
    add("trl ppo constant weights token truncate", constant | trl_weighted("token_truncate"), anchor=proximal)
    above = {mode: trl_weighted(mode, 0.5) for mode in TRL_MODES}
    add("trl ppo prompt weights token truncate 0.5", token | above["token_truncate"], average="prompt", anchor=proximal)
    add("trl ppo sample weights sequence mask 0.5", sample | above["sequence_mask"], anchor=proximal)
    gspo = sequence("grpo", 0.05, 0.1) | trl_weighted("sequence_truncate")
    add("trl gspo 0.1 sample weights sequence truncate", gspo, anchor=proximal)

    gate = {"loss_type": "sapo", "sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05}
    hotter = gate | {"sapo_temperature_pos": 2.0, "sapo_temperature_neg": 3.0}
    geometric = {"loss_type": "gmpo", "epsilon_low": 0.4, "epsilon_high": 0.4}
    add("trl sapo sample", gate)
    add("trl sapo sample forced", gate, forced=True)
    add("trl sapo 2 sample proximal", hotter, anchor=proximal)
    add("trl gmpo sample", geometric)
    add("trl gmpo 0.2 sample forced", geometric | {"epsilon_low": 0.2, "epsilon_high": 0.3}, forced=True)
    add("trl gmpo sample proximal", geometric, anchor=proximal)
    return entries


def verl_cases(rollouts: Rollouts) -> list[dict[str, Any]]:
    """Return losses of verl."""
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

    def add_step(
        name: str,
        settings: dict[str, Any],
        forced: bool = False,
        weights: dict[str, Any] | None = None,
        gae: dict[str, float] | None = None,
        critic: dict[str, Any] | None = None,
        anchor: str | None = None,
    ) -> None:
        named = anchor or ("generator_logprobs" if weights is None else "proximal_logprobs")
        given: dict[str, Any] = {"anchor": named, "weights": weights, "gae": gae, "critic": critic or {}}
        origin = {
            "peer": "verl",
            "version": version("verl"),
            "function": f"{VERL_LOSSES}.ppo_loss" + (" + value_loss" if gae else ""),
            "settings": {**settings, **{key: value for key, value in given.items() if value}},
            "calls": "one",
            "advantages": "verl's, gae" if gae else CENTRED,
            "prompts": list(range(len(REWARDS))),
            "forced": forced,
        }
        result = verl_step(rollouts, rollouts.mask(forced), settings, **given)
        entries.append(loss_entry(rollouts, name, result, origin))

    # verl bounds the loss of a negative advantage at the ratio c ("dual clip"), and we do not. A huge c turns this off.
    # One case keeps verl's default, 3, to show the difference.
    clip = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "clip_ratio_c": 1e6}
    # verl clips the weight of cispo to [1 - low, 1 + high]: low 1 means no lower bound, and high 4 a cap at 5.
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
    add("verl sapo sample", "sapo", "seq-mean-token-mean", {"tau_pos": 1.0, "tau_neg": 1.05})
    geometric = {"clip_ratio_low": 0.4, "clip_ratio_high": 0.4}
    add("verl gmpo sample", "geo_mean", "seq-mean-token-mean", geometric)
    add("verl gmpo sample forced", "geo_mean", "seq-mean-token-mean", geometric, forced=True)
    # verl's `clip_ratio_c` is the cap on the ratio in these losses.
    for divergence, low, high in (("tv", 0.02, 0.05), ("kl", 0.01, 0.02)):
        region = {"clip_ratio_low": low, "clip_ratio_high": high, "clip_ratio_c": 3.0}
        add(f"verl dppo {divergence} token", f"dppo_{divergence}", "token-mean", region)
        add(f"verl dppo {divergence} sample", f"dppo_{divergence}", "seq-mean-token-mean", region)
        add(f"verl dppo {divergence} token forced", f"dppo_{divergence}", "token-mean", region, forced=True)
    # verl draws tokens at random. With a share of 1 it takes all tokens in the interval. The ratio is not clipped.
    drawn = {"clip_cov_ratio": 1.0, "clip_cov_lb": 0.1, "clip_cov_ub": 0.5}
    opened = {"clip_ratio_low": 1.0, "clip_ratio_high": 1e6}
    ranked = {"kl_cov_ratio": 0.2, "ppo_kl_coef": 0.5}
    for tail, forced in (("", False), (" forced", True)):
        add(f"verl clip_cov token{tail}", "clip_cov", "token-mean", drawn | opened, forced=forced)
        add(f"verl kl_cov token{tail}", "kl_cov", "token-mean", ranked, forced=forced)
    add("verl dual clip token", "vanilla", "token-mean", clip | {"clip_ratio_c": 3.0})

    token: dict[str, Any] = {"loss_agg_mode": "token-mean"}
    sample: dict[str, Any] = {"loss_agg_mode": "seq-mean-token-mean"}
    summed: dict[str, Any] = {"loss_agg_mode": "token-sum"}
    width: dict[str, Any] = {"loss_agg_mode": "seq-mean-token-sum-norm"}
    constant = width | {"loss_scale_factor": MAX_TOKENS}
    aggregations = {"token": token, "sample": sample, "sum": summed, "constant": constant}

    symmetric = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "clip_ratio_c": 1e6}
    ppo = {"loss_mode": "vanilla", **symmetric}
    dapo, cispo, gspo = {"loss_mode": "vanilla", **clip}, {"loss_mode": "cispo", **cap}, {"loss_mode": "gspo", **wider}
    reinforce = {"loss_mode": "gpg"}
    for named, aggregation in aggregations.items():
        add_step(f"verl ppo {named}", ppo | aggregation)
        add_step(f"verl ppo {named} forced", ppo | aggregation, forced=True)
        add_step(f"verl reinforce {named}", reinforce | aggregation)
    for named in ("sum", "constant"):
        add_step(f"verl dapo 0.28 {named}", dapo | aggregations[named])
        add_step(f"verl cispo {named}", cispo | aggregations[named])
        add_step(f"verl cispo {named} forced", cispo | aggregations[named], forced=True)
    add_step("verl gspo 0.1 sum", gspo | summed)
    add_step("verl ppo constant width", ppo | width)
    add("verl ppo constant forced bare", "vanilla", "seq-mean-token-sum-norm", symmetric, forced=True)

    distance = {"use_kl_loss": True, "kl_loss_coef": 0.2, "kl_loss_type": "low_var_kl"}
    bonus = {"entropy_coeff": 0.01}
    for named, aggregation in aggregations.items():
        add_step(f"verl ppo {named} kl", ppo | aggregation | distance)
        add_step(f"verl ppo {named} entropy", ppo | aggregation | bonus)
    add_step("verl ppo token kl entropy forced", ppo | token | distance | bonus, forced=True)

    bounded: dict[str, dict[str, Any]] = {
        "token truncate": {"rollout_is": "token", "rollout_is_threshold": 3.0},
        "token mask 0.5": {"rollout_is": "token", "rollout_is_threshold": "0.5_3.0"},
        "sequence truncate": {"rollout_is": "sequence", "rollout_is_threshold": 3.0},
        "sequence mask 0.5": {"rollout_is": "sequence", "rollout_is_threshold": "0.5_3.0"},
    }
    for named, weights in bounded.items():
        add_step(f"verl ppo token weights {named}", ppo | token, weights=weights)
        add_step(f"verl ppo token kl weights {named}", ppo | token | distance, weights=weights)
        add_step(f"verl reinforce token weights {named}", reinforce | token, weights=weights)
    add_step("verl ppo token kl proximal", ppo | token | distance, anchor="proximal_logprobs")
    add_step("verl ppo token proximal", ppo | token, anchor="proximal_logprobs")
    add_step("verl cispo sample weights token truncate", cispo | sample, weights=bounded["token truncate"])

    gae = {"beta": 0.0, "gamma": 1.0, "lam": 0.95}
    decayed = {"beta": 0.0, "gamma": 0.9, "lam": 0.5}
    value = {"cliprange_value": 0.2}
    for named in ("token", "sample", "sum"):
        critic_settings = value | aggregations[named]
        add_step(f"verl ppo gae {named}", ppo | aggregations[named], gae=gae, critic=critic_settings)
    add_step("verl ppo gae token forced", ppo | token, gae=gae, critic=value | token, forced=True)
    add_step("verl ppo gae sample, critic token", ppo | sample, gae=decayed, critic=value | token)
    charged = gae | {"beta": 0.2}
    proximal = "proximal_logprobs"
    add_step("verl ppo gae token kl reward", ppo | token, gae=charged, critic=value | token, anchor=proximal)
    return entries


def advantage_cases(rollouts: Rollouts) -> list[dict[str, Any]]:
    """Return advantages, (P) of (G)."""
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
        settings: dict[str, Any] = {"scale_rewards": scale}
        add("trl", f"trl {scale}", TRL_ADVANTAGE, settings, trl_advantages(rollouts, **settings))
    for scaled in (True, False):
        settings = {"norm_adv_by_std_in_grpo": scaled}
        values = verl_advantages(rollouts, "grpo", **settings)
        function = f"{VERL}.compute_grpo_outcome_advantage"
        add("verl", f"verl grpo {'scaled' if scaled else 'unscaled'}", function, settings, values)
    # The peers' only standard deviation of advantages: subtract the group's mean, then whiten over the batch.
    whiten = "reinforce_plus_plus_baseline"
    function = f"{VERL}.compute_reinforce_plus_plus_baseline_outcome_advantage"
    add("verl", "verl whitened", function, {}, verl_advantages(rollouts, whiten))
    for scale in ("group", "batch"):
        settings = {"scale_rewards": scale, "mask_truncated_completions": True}
        add("trl", f"trl {scale} truncated", TRL_ADVANTAGE, settings, trl_advantages(rollouts, **settings))
    return entries


def token_cases(rollouts: Rollouts) -> dict[str, list[dict[str, Any]]]:
    """Return results per token, (R) of (T), by kind: token advantages, weights, distances."""
    by_kind: dict[str, list[dict[str, Any]]] = {"token_advantages": [], "weights": [], "distances": []}

    def add(kind: str, name: str, function: str, settings: dict[str, Any], forced: bool, **tables: Tensor) -> None:
        peer = name.split()[0]
        origin = {"name": name, "peer": peer, "version": version(peer), "function": function, "settings": settings}
        ragged = {key: rollouts.ragged(table) for key, table in tables.items()}
        by_kind[kind].append({**origin, "forced": forced, **ragged})

    for forced in (False, True):
        mask, suffix = rollouts.mask(forced), " forced" if forced else ""
        for beta, gamma, lam in ((0.0, 1.0, 0.95), (0.0, 0.9, 0.5), (0.2, 1.0, 1.0)):
            settings: dict[str, Any] = {"beta": beta, "gamma": gamma, "lam": lam}
            advantages, returns = verl_gae(rollouts, mask, **settings)
            tables = {"advantages": advantages * mask, "returns": returns * mask}
            function = f"{VERL}.compute_gae_advantage_return"
            add("token_advantages", f"verl gae {gamma} {lam} kl {beta}{suffix}", function, settings, forced, **tables)
        for mode, low in [(mode, low) for low in (None, 0.5) for mode in TRL_MODES]:
            settings = trl_weighted(mode, low)
            everything = list(range(len(mask)))
            _, scored = trl_step(rollouts, everything, mask, "proximal_logprobs", **settings, **TRL_PLAIN)
            weights = scored["importance_sampling_ratio"].expand_as(mask) * mask
            name = f"trl {mode.replace('_', ' ')}{f' {low}' if low else ''}{suffix}"
            add("weights", name, TRL_ADVANTAGE, settings, forced, weights=weights)
        for level in ("token", "sequence"):
            for named, bounds in (("truncate", 3.0), ("mask 0.5", "0.5_3.0")):
                settings = {"rollout_is": level, "rollout_is_threshold": bounds}
                weights = verl_weights(rollouts, mask, **settings)
                add("weights", f"verl {level} {named}{suffix}", VERL_WEIGHTS, settings, forced, weights=weights)

    # The second reference is so far away that verl's bound of 10 is reached.
    for name, shift in (("verl k3", 0.0), ("verl k3 far", 2.0)):
        leaf = rollouts.table("trainer_logprobs").requires_grad_(True)
        present = rollouts.mask(with_forced=False)
        distance = kl_penalty(leaf, rollouts.table("reference_logprobs") + shift * present, "low_var_kl")
        (gradient,) = torch.autograd.grad(distance.sum(), leaf)
        settings = {"kl_penalty": "low_var_kl", "shift": shift}
        add("distances", name, f"{VERL}.kl_penalty", settings, False, distance=distance.detach(), gradient=gradient)
    return by_kind


def write(path: Path, content: dict[str, Any]) -> None:
    """Write JSON with every innermost list on one line, so that a diff shows the rollout."""

    def joined(match: re.Match[str]) -> str:
        return "[" + " ".join(match[1].split()) + "]"

    path.write_text(re.sub(r"\[\s+([^\[\]{}]*?)\s+\]", joined, json.dumps(content, indent=1)) + "\n")


def main() -> None:
    """Write the arrays to the file given on the command line."""
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
            **token_cases(rollouts),
        },
    )


if __name__ == "__main__":
    main()
