"""Generators take prompts and weights and return rollouts, in the trainer's process or in child processes.

`base` defines the protocol of a generator. `torch/` is our own sampler, `vllm/` samples with vLLM, and `fleet/` runs
several generators as engines in child processes:

    trainer --- Fleet --- Ledger (which engine has which rollout; no I/O)
                  |-------- WeightStore (published versions, one file each)
                  `-------- Engines --- Child ... wire ... server --- Generator

The trainer waits for engines in two cases: after publishing weights, until every engine has confirmed them; and when it
asks an engine to score a completion, to pause its rollouts for an evaluation, or to save or restore its state. An
engine never waits while it has rollouts.
"""

from lightning_scalerl.generator.base import FinishedRollout, Generator, GroupRequest, StepReport

__all__ = ["FinishedRollout", "Generator", "GroupRequest", "StepReport"]
