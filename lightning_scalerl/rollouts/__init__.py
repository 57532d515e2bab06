"""Records of the data path: a prompt (`prompt`), its rollouts, group and batch (`rollout`), what graders see (`grade`).

Only `rollout` needs torch.
"""
