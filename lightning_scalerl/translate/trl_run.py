"""Training of one run by TRL's `GRPOTrainer` in TRL's interpreter. Arguments: SPECIFICATION FOLDER.

The interpreter has torch, transformers, datasets and trl, but not this package, so this file imports nothing of it. The
specification (`trl_member.specification`) has the fields of `GRPOConfig`, the prompts with their answers, and the FLOPs
per token. The run writes `evaluations.jsonl` into the folder. Each line is an evaluation: step, reward (the pass rate
on held-out prompts), its standard error, and compute.

Compute is FLOPs counted by this project's rules, so that a step of a recipe costs the same in both trainers. A prompt
is prefilled once per group. Padding and evaluations do not count, nor does the pass in which TRL computes the
log-probabilities of samples, which our generator records while sampling.

A killed run resumes from its last checkpoint when it is started again. Steps after that checkpoint are then logged a
second time, after the old lines. SIGTERM, or a file named STOP in the folder, ends the run after the current step with
a checkpoint and exit code 3.
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


def compute_file(checkpoint: Path, passes: int) -> Path:
    """Return the path of a checkpoint's file with the compute so far.

    The file's name contains the number of ScaleRL's steps: TRL's steps divided by the passes over a batch.
    """
    return checkpoint / f"scalerl-{int(checkpoint.name.rpartition('-')[2]) // passes}.json"


def forward_flops(model: Mapping[str, float], prompt: int, completion: int) -> float:
    """Return the FLOPs of the trainer's forward pass over one rollout, as in `FlopModel.forward`."""
    length = prompt + completion
    tokens, context = length - 1, (length - 1) * length // 2
    return model["body"] * tokens + model["head"] * completion + model["context"] * context


def sampling_flops(model: Mapping[str, float], prompt: int, completions: Sequence[int]) -> float:
    """Return the FLOPs of sampling one group: its prompt once, and every token of each completion but the last."""
    flops = model["body"] * prompt + model["head"] + model["context"] * (prompt * (prompt + 1) // 2)
    for completion in completions:
        inputs = completion - 1  # the last token is not an input of the model
        context = sum(range(prompt + 1, prompt + inputs + 1))
        flops += (model["body"] + model["head"]) * inputs + model["context"] * context
    return flops


def standard_error(passed: Sequence[int], samples: int) -> float:
    """Return the standard error of a pass rate on fixed prompts, as in `Evaluate`.

    Args:
        passed: number of passes per prompt.
        samples: samples per prompt.
    """
    rates = [count / samples for count in passed]
    variance_sum = sum(rate * (1 - rate) for rate in rates) / max(1, samples - 1)
    # If every prompt passes always or never, the variance comes out as 0: use a smoothed mean (Laplace) instead.
    mean = (sum(passed) + 1) / (len(rates) * samples + 2)
    smallest_variance = mean * (1 - mean) / (len(rates) * samples) if not variance_sum > 0 else 0.0
    return math.sqrt(max(variance_sum / len(rates) ** 2, smallest_variance))


class Journal:
    """Writer of one line per evaluation to `evaluations.jsonl`, which also tracks the compute used so far."""

    def __init__(self, folder: Path, passes: int) -> None:
        self._file = folder / "evaluations.jsonl"
        self._passes = passes  # number of TRL's steps per step of this project
        self.flops = 0.0

    def resume(self, checkpoint: Path | None) -> None:
        """Continue with the compute of a checkpoint, and remove an incomplete last line.

        Lines of steps after the checkpoint are not removed, and these steps are logged a second time. The repeated
        steps show a reader of the growing file where the run resumed. If the file became shorter, the reader would take
        it for the file of a new run.
        """
        if checkpoint is not None:
            self.flops = json.loads(compute_file(checkpoint, self._passes).read_text())["flops"]
        if self._file.exists():
            lines, newline, _ = self._file.read_bytes().rpartition(b"\n")
            os.truncate(self._file, len(lines) + len(newline))

    def add(self, **values: float) -> None:
        """Append a line with these values, and sync it to disk."""
        with self._file.open("a") as file:
            file.write(json.dumps(values) + "\n")
            file.flush()
            os.fsync(file.fileno())


def make_reward(
    specification: Mapping[str, Any], count_batch: Callable[[list[int], list[int]], None]
) -> Callable[..., Any]:
    """Return a reward function for TRL: our task's verifier and reward scale, with the length penalty if there is one.

    Args:
        specification: content of the specification file.
        count_batch: called with the prompt lengths and completion lengths of each batch, in tokens.
    """
    correct_reward, incorrect_reward = specification["reward"]["correct"], specification["reward"]["incorrect"]
    penalty = specification.get("penalty")

    def reward(completions: list[str], answer: list[str], prompt_tokens: list[int], **others: Any) -> list[float]:
        lengths = [len(ids) for ids in others["completion_ids"]]
        count_batch(prompt_tokens, lengths)
        rewards = [
            correct_reward if text == gold else incorrect_reward for text, gold in zip(completions, answer, strict=True)
        ]
        if penalty:
            limit, buffer = penalty["limit"], penalty["buffer"]
            rewards = [
                value + min(0.0, max(-1.0, (limit - length) / buffer - 1.0))
                for value, length in zip(rewards, lengths, strict=True)
            ]
        return rewards

    return reward


def main() -> int:
    """Train, from the last checkpoint if there is one; returns the exit code."""
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
    checkpoints = sorted(folder.glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]))
    last_checkpoint = next((path for path in reversed(checkpoints) if compute_file(path, epochs).is_file()), None)
    journal.resume(last_checkpoint)
    stop_signals: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: stop_signals.append(number))
    tokenizer = AutoTokenizer.from_pretrained(specification["model"], padding_side="left")
    group_size, model_flops = config["num_generations"], specification["flops"]
    # The FLOPs of training on a generation batch are known when it is sampled, and are added step by step.
    updates = config["steps_per_generation"] // config["gradient_accumulation_steps"] * epochs
    pending_steps: list[float] = []

    def count_batch(prompts: list[int], lengths: list[int]) -> None:
        for first in range(0, len(prompts), group_size):
            journal.flops += sampling_flops(model_flops, prompts[first], lengths[first : first + group_size])
        forward = sum(forward_flops(model_flops, *rollout) for rollout in zip(prompts, lengths, strict=True))
        training = 3 * forward * epochs + specification["forwards"] * forward
        pending_steps[:] = [training / updates] * updates

    class Follow(TrainerCallback):  # type: ignore[misc]
        """Callback that evaluates when due, counts the compute of each step, and stops the run on request."""

        def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            if state.global_step == 0:
                evaluate(trainer.model, 0)

        def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> Any:
            if pending_steps:
                journal.flops += pending_steps.pop()
            step, remainder = divmod(state.global_step, epochs)
            is_due = step % specification["evaluation"]["every"] == 0 or state.global_step == args.max_steps
            if not remainder and is_due:
                evaluate(trainer.model, step)
            if stop_signals or (folder / "STOP").exists():
                control.should_save = control.should_training_stop = True
            return control

        def on_save(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            """Store the compute in the checkpoint. A checkpoint without this file is incomplete."""
            file = compute_file(folder / f"checkpoint-{state.global_step}", epochs)
            partial_file = file.with_name(f".{file.name}")  # renamed below, so that a kill never leaves a partial file
            partial_file.write_text(json.dumps({"flops": journal.flops}))
            partial_file.replace(file)

    @torch.no_grad()
    def evaluate(model: Any, step: int) -> None:
        """Log the pass rate on the held-out prompts, sampled with separate random numbers."""
        prompts, samples = specification["heldout"], specification["evaluation"]["samples"]
        passed, training = [0] * len(prompts), model.training
        model.eval()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(hash((specification["seed"], step, specification["evaluation"]["seed"])) % 2**63)
            batch = tokenizer([entry["prompt"] for entry in prompts], return_tensors="pt", padding=True)
            batch = {name: batch[name].repeat_interleave(samples, 0) for name in ("input_ids", "attention_mask")}
            completions = model.generate(**batch, generation_config=trainer.generation_config)
        texts = tokenizer.batch_decode(completions[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
        for index, text in enumerate(texts):
            passed[index // samples] += text == prompts[index // samples]["answer"]
        model.train(training)
        rate = sum(passed) / (len(prompts) * samples)
        journal.add(step=step, reward=rate, reward_se=standard_error(passed, samples), compute=journal.flops)

    trainer = GRPOTrainer(
        specification["model"],
        reward_funcs=make_reward(specification, count_batch),
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
            [
                {**entry, "prompt_tokens": len(tokenizer(entry["prompt"])["input_ids"])}
                for entry in specification["train"]
            ]
        ),
        processing_class=tokenizer,
        callbacks=[Follow()],
    )
    trainer.train(resume_from_checkpoint=str(last_checkpoint) if last_checkpoint else None)
    return 0 if trainer.state.global_step >= config["max_steps"] else STOPPED


if __name__ == "__main__":
    raise SystemExit(main())
