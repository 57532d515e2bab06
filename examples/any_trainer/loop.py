"""A plain PyTorch loop that does not use lightning-scalerl: policy gradients on sums of two digits, modulo 10.

It prints one JSON object per line, saves its state, and resumes from it. `study.yaml` in this folder runs it as a
study.
"""

import argparse
import json
from pathlib import Path

import torch
from torch.nn.functional import one_hot

parser = argparse.ArgumentParser()
parser.add_argument("--loss", choices=["reinforce", "ppo"], default="reinforce")
parser.add_argument("--lr", type=float, default=3e-3)
parser.add_argument("--samples", type=int, default=8)
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--out", type=Path, default=Path())
options = parser.parse_args()

torch.set_num_threads(1)
torch.manual_seed(options.seed)
policy = torch.nn.Sequential(torch.nn.Linear(20, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
optimizer = torch.optim.Adam(policy.parameters(), lr=options.lr)
pairs = torch.cartesian_prod(torch.arange(10), torch.arange(10))
prompts, answers = one_hot(pairs, 10).flatten(1).float(), pairs.sum(1) % 10
step, tokens, state = 0, 0, options.out / "state.pt"
if state.exists():
    saved = torch.load(state)
    policy.load_state_dict(saved["policy"])
    optimizer.load_state_dict(saved["optimizer"])
    step, tokens = saved["step"], saved["tokens"]
    torch.set_rng_state(saved["random"])

while step < options.steps:
    chosen = torch.randint(100, (32,))
    with torch.no_grad():
        sampled = torch.distributions.Categorical(logits=policy(prompts[chosen])).sample((options.samples,))
        old = policy(prompts[chosen]).log_softmax(-1).expand(options.samples, -1, -1).gather(-1, sampled[..., None])
    reward = (sampled == answers[chosen]).float()
    advantage = (reward - reward.mean(0))[..., None]
    for _ in range(1 if options.loss == "reinforce" else 2):
        now = policy(prompts[chosen]).log_softmax(-1).expand(options.samples, -1, -1).gather(-1, sampled[..., None])
        ratio = (now - old).exp()
        clipped = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        optimizer.zero_grad()
        (-(now * advantage if options.loss == "reinforce" else clipped).mean()).backward()
        optimizer.step()
    step, tokens = step + 1, tokens + sampled.numel()
    row = {"step": step, "tokens": tokens, "reward": reward.mean().item()}
    if step % 10 == 0:
        with torch.no_grad():
            probability = policy(prompts).softmax(-1).gather(1, answers[:, None]).mean().item()
        row["eval_reward"] = probability  # the expected reward, over all prompts
        saved = {"policy": policy.state_dict(), "optimizer": optimizer.state_dict(), "step": step, "tokens": tokens}
        torch.save(saved | {"random": torch.get_rng_state()}, state)
    print(json.dumps(row), flush=True)
