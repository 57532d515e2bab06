"""Tasks: prompts with a verifier.

`base` has the class `Task`. `arithmetic` is the demo's task and `arithmetic_base` its model. `dataset` reads rows
(`rows`, `formats`) of data sets and removes duplicates (`overlap`), `jsonl` reads plain prompt files, `reasoning_gym`
uses the generators of that package, and `mixture` joins several tasks.
"""

from lightning_scalerl.task.base import Task

__all__ = ["Task"]
