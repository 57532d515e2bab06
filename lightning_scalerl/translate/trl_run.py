"""One run of TRL's `GRPOTrainer` on a task of ours, under TRL's own interpreter: SPECIFICATION FOLDER.

Started as a file by an interpreter that holds torch, transformers, datasets and trl, and not this package: it imports
nothing of ours. The specification (`trl_member.specification`) has the fields of `GRPOConfig`, the prompts with their
answers, and what a token costs. In the folder it leaves `evaluations.jsonl`, a line an evaluation: step, reward (the
pass rate on the held-out prompts), its standard error, and compute. Compute is FLOPs by this project's formulas and
counting, so that a step of a recipe costs the same in both trainers: a prompt is prefilled once a group; padding,
evaluations, and the pass by which TRL asks its trainer what our generator has recorded, are not counted.

Killed and started again it goes on from its last checkpoint; steps beyond that get other lines behind theirs. SIGTERM,
or a file named STOP in the folder, ends it with a checkpoint after the step at hand, by exit code 3.
"""

from __future__ import annotations

import json
import math
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

STOPPED = 3


def counted(checkpoint: Path, passes: int) -> Path:
    """Return the file in a checkpoint with the compute so far; its name has the steps that are ours: TRL's / passes."""
    return checkpoint / f"scalerl-{int(checkpoint.name.rpartition('-')[2]) // passes}.json"


def forward_flops(model: Mapping[str, float], prompt: int, completion: int) -> float:
    """Return FLOPs of the trainer's forward pass over one rollout, as `FlopModel.forward` counts it."""
    length = prompt + completion
    tokens, context = length - 1, (length - 1) * length // 2
    return model["body"] * tokens + model["head"] * completion + model["context"] * context


def sampling_flops(model: Mapping[str, float], prompt: int, completions: Sequence[int]) -> float:
    """Return FLOPs of sampling one group: its prompt once, then every token but the last of each completion."""
    flops = model["body"] * prompt + model["head"] + model["context"] * (prompt * (prompt + 1) // 2)
    for completion in completions:
        fed = completion - 1
        context = sum(range(prompt + 1, prompt + fed + 1))
        flops += (model["body"] + model["head"]) * fed + model["context"] * context
    return flops


def standard_error(passed: Sequence[int], samples: int) -> float:
    """Return the standard error of a pass rate, the prompts being fixed, as `Evaluate` gives it."""
    rates = [count / samples for count in passed]
    spread = sum(rate * (1 - rate) for rate in rates) / max(1, samples - 1)
    mean = (sum(passed) + 1) / (len(rates) * samples + 2)
    floor = mean * (1 - mean) / (len(rates) * samples) if not spread > 0 else 0.0
    return math.sqrt(max(spread / len(rates) ** 2, floor))


class Journal:
    """Writer of `evaluations.jsonl`, a line an evaluation, and the compute that it stands at."""

    def __init__(self, folder: Path, passes: int) -> None:
        self._file = folder / "evaluations.jsonl"
        self._passes = passes  # steps of TRL's in one of ours
        self.flops = 0.0

    def go_on_from(self, checkpoint: Path | None) -> None:
        """Take up the compute of a checkpoint, and cut off a line that was torn by a kill.

        Lines beyond the checkpoint stay: their steps are logged again behind them, by which whoever follows the file
        sees where the run goes on. A file that became shorter would look like one that was begun again.
        """
        if checkpoint is not None:
            self.flops = json.loads(counted(checkpoint, self._passes).read_text())["flops"]
        if self._file.exists():
            whole = self._file.read_bytes().rpartition(b"\n")
            os.truncate(self._file, len(whole[0]) + len(whole[1]))

    def add(self, **values: float) -> None:
        """Append a line with these values, durably."""
        with self._file.open("a") as file:
            file.write(json.dumps(values) + "\n")
            file.flush()
            os.fsync(file.fileno())


def make_reward(specification: Mapping[str, Any], tally: Callable[[list[int], list[int]], None]) -> Callable[..., Any]:
    """Return TRL's reward function: our task's verifier on our scale, and a penalty of length if there is one."""
    right, wrong = specification["reward"]["correct"], specification["reward"]["incorrect"]
    penalty = specification.get("penalty")

    def reward(completions: list[str], answer: list[str], prompt_tokens: list[int], **others: Any) -> list[float]:
        lengths = [len(ids) for ids in others["completion_ids"]]
        tally(prompt_tokens, lengths)
        found = [right if text == wanted else wrong for text, wanted in zip(completions, answer, strict=True)]
        if penalty:
            limit, buffer = penalty["limit"], penalty["buffer"]
            found = [
                value + min(0.0, max(-1.0, (limit - length) / buffer - 1.0))
                for value, length in zip(found, lengths, strict=True)
            ]
        return found

    return reward


def main() -> int:
    """Train, or go on; return the exit code."""
    specification, folder = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    folder.mkdir(parents=True, exist_ok=True)
    import torch
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(specification["threads"])
    config = specification["config"]
    epochs = config["num_iterations"]
    journal = Journal(folder, epochs)
    saved = sorted(folder.glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]))
    last = next((path for path in reversed(saved) if counted(path, epochs).is_file()), None)
    journal.go_on_from(last)
    asked: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: asked.append(number))
    tokenizer = AutoTokenizer.from_pretrained(specification["model"], padding_side="left")
    size, model_flops = config["num_generations"], specification["flops"]
    # Training is charged when it is done: a generation batch is trained on in so many steps.
    updates = config["steps_per_generation"] // config["gradient_accumulation_steps"] * epochs
    owed: list[float] = []

    def tally(prompts: list[int], lengths: list[int]) -> None:
        for first in range(0, len(prompts), size):
            journal.flops += sampling_flops(model_flops, prompts[first], lengths[first : first + size])
        forward = sum(forward_flops(model_flops, *each) for each in zip(prompts, lengths, strict=True))
        pending = 3 * forward * epochs + specification["forwards"] * forward
        owed[:] = [pending / updates] * updates

    class Follow(TrainerCallback):  # type: ignore[misc]
        """Evaluate where it is due, count what a step costs, and end the run if that is asked for."""

        def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            """Evaluate the starting point of a new run."""
            if state.global_step == 0:
                evaluate(trainer.model, 0)

        def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> Any:
            """Charge the step, evaluate if it is due, and look whether somebody wants it to end."""
            if owed:
                journal.flops += owed.pop()
            step, left = divmod(state.global_step, epochs)
            if not left and (step % specification["evaluation"]["every"] == 0 or state.global_step == args.max_steps):
                evaluate(trainer.model, step)
            if asked or (folder / "STOP").exists():
                control.should_save = control.should_training_stop = True
            return control

        def on_save(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            """Keep the compute beside a checkpoint; one without it is unfinished."""
            file = counted(folder / f"checkpoint-{state.global_step}", epochs)
            part = file.with_name(f".{file.name}")  # a kill leaves it whole or not there
            part.write_text(json.dumps({"flops": journal.flops}))
            part.replace(file)

    @torch.no_grad()
    def evaluate(model: Any, step: int) -> None:
        """Add the pass rate on the held-out prompts, drawn from random numbers of their own."""
        asks, samples = specification["heldout"], specification["evaluation"]["samples"]
        passed, training = [0] * len(asks), model.training
        model.eval()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(hash((specification["seed"], step, specification["evaluation"]["seed"])) % 2**63)
            batch = tokenizer([each["prompt"] for each in asks], return_tensors="pt", padding=True)
            batch = {name: batch[name].repeat_interleave(samples, 0) for name in ("input_ids", "attention_mask")}
            drawn = model.generate(**batch, generation_config=trainer.generation_config)
        texts = tokenizer.batch_decode(drawn[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
        for place, text in enumerate(texts):
            passed[place // samples] += text == asks[place // samples]["answer"]
        model.train(training)
        rate = sum(passed) / (len(asks) * samples)
        journal.add(step=step, reward=rate, reward_se=standard_error(passed, samples), compute=journal.flops)

    trainer = GRPOTrainer(
        specification["model"],
        reward_funcs=make_reward(specification, tally),
        args=GRPOConfig(
            output_dir=str(folder),
            use_cpu=not torch.cuda.is_available(),
            gradient_checkpointing=False,
            report_to="none",
            save_strategy="steps",
            save_steps=specification["save_every"],
            save_total_limit=2,
            logging_strategy="no",
            disable_tqdm=True,
            **config,
        ),
        train_dataset=Dataset.from_list(
            [{**each, "prompt_tokens": len(tokenizer(each["prompt"])["input_ids"])} for each in specification["train"]]
        ),
        processing_class=tokenizer,
        callbacks=[Follow()],
    )
    trainer.train(resume_from_checkpoint=str(last) if last else None)
    return 0 if trainer.state.global_step >= config["max_steps"] else STOPPED


if __name__ == "__main__":
    raise SystemExit(main())
