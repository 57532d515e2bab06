"""Data classes: prompts (`prompt`), rollouts, groups and batches (`rollout`), samples to grade (`grade`).

Only `rollout` needs torch.
"""
