"""Everything before the training step: prompts become groups of rollouts, and groups become a TrainBatch.

`prompts` draws prompts. `rollout_stream` is the ledger: it decides which group may start and which batch is due. A
driver decides when things happen: `virtual_driver` on a simulated clock (`cost_model`, `events`), `live_driver` in real
time. `credit` turns the groups of a step into a TrainBatch.
"""
