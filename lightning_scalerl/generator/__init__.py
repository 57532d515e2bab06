"""Generators: prompts and weights in, rollouts out; in the trainer's process, or in engines anywhere.

    trainer --- Fleet --- Ledger (who has which rollout; no I/O)
                  |-------- WeightStore (published versions, a file each)
                  `-------- Engines --- Transport ... wire ... server --- Generator

The trainer waits for engines in two places only: when it publishes, until each has confirmed, and when it asks one to
score. An engine waits for nobody: it samples while it has rollouts.
"""

from lightning_scalerl.generator.base import FinishedRollout, Generator, GroupRequest, StepReport

__all__ = ["FinishedRollout", "Generator", "GroupRequest", "StepReport"]
