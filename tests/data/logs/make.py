"""Write the small logs in this folder, in the format of each framework, from planted curves. Nothing is downloaded.

    python tests/data/logs/make.py

Metric names follow TRL, verl, prime-rl and open-instruct. The layout follows W&B's exports
(docs/reference/sources.md).
"""

from __future__ import annotations

import csv
import json
import random
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
TOKENS = 250_000  # per training step


def rate(tokens: float, top: float = 0.62, start: float = 0.20, middle: float = 4e6, slope: float = 1.6) -> float:
    """The planted curve: the sigmoid of the fits, from `start` to `top`."""
    return start if tokens <= 0 else start + (top - start) / (1 + (middle / tokens) ** slope)


def trl(noise: random.Random) -> None:
    """One row every 5 training steps, an evaluation on two sets every 10, and a summary at the end."""
    history: list[dict[str, Any]] = []
    for step in range(0, 101, 5):
        tokens = float(TOKENS * step)
        if step:
            reward = rate(tokens) + noise.gauss(0, 0.02)
            row = {"loss": 0.01, "grad_norm": 0.2, "learning_rate": 1e-6, "num_tokens": tokens}
            row |= {"completions/mean_length": 610.5, "rewards/accuracy_reward/mean": reward, "reward": reward}
            row |= {"reward_std": 0.31, "frac_reward_zero_std": 0.2, "kl": 0.0, "epoch": step / 100, "step": step}
            history.append(row)
        if step % 10 == 0:
            for name, top in (("math", 0.62), ("code", 0.45)):
                reward = rate(tokens, top) + noise.gauss(0, 0.004)
                row = {f"eval_{name}_loss": 0.0, f"eval_{name}_runtime": 31.2, "eval_num_tokens": tokens}
                row |= {"eval_rewards/accuracy_reward/mean": reward, "eval_reward": reward}
                history.append({**row, "eval_reward_std": 0.3, "epoch": step / 100, "step": step})
    history.append({"epoch": 1.0, "step": 100, "total_flos": 0.0, "train_loss": 0.01, "train_runtime": 6400.0})
    state = {"best_metric": None, "epoch": 1.0, "eval_steps": 10, "global_step": 100, "log_history": history}
    folder = HERE / "trl_grpo"
    folder.mkdir(exist_ok=True)
    (folder / "trainer_state.json").write_text(json.dumps({**state, "max_steps": 100, "save_steps": 50}, indent=1))


def verl_rows(noise: random.Random, steps: int = 80) -> list[tuple[int, dict[str, float]]]:
    """Return one row per step, with a validation before training and every 5 steps."""
    rows: list[tuple[int, dict[str, float]]] = []
    for step in range(steps + 1):
        tokens = TOKENS * step
        row: dict[str, float] = {}
        if step:
            score = rate(tokens) + noise.gauss(0, 0.02)
            row |= {"global_seqlen/mean": TOKENS / 8, "actor/pg_loss": 0.01, "training/global_step": float(step)}
            row |= {"critic/score/mean": score, "critic/rewards/mean": score, "response_length/mean": 288.698}
            row |= {"perf/total_num_tokens": float(TOKENS), "perf/time_per_step": 96.5, "timing_s/step": 96.5}
        if step % 5 == 0:
            value = rate(tokens) + noise.gauss(0, 0.004)
            row |= {"val-aux/openai/gsm8k/reward/mean@1": value, "val-core/openai/gsm8k/acc/mean@1": value}
        rows.append((step, row))
    return rows


def verl(noise: random.Random) -> None:
    """The console output of a Ray job, and the lines of the file backend."""
    rows = verl_rows(noise)
    ray = "\x1b[36m(TaskRunner pid=4072644)\x1b[0m "
    lines = [f"{ray}Size of train dataloader: 80, Size of val dataloader: 1", f"{ray}Total training steps: 80"]
    for step, row in rows:
        # Newer versions of numpy print the type of values that numpy computed.
        fields = [f"{k}:np.float64({v:.6f})" if k.startswith("val-") else f"{k}:{v:.3f}" for k, v in row.items()]
        lines.append(f"{ray}{' - '.join([f'step:{step}', *fields])}")
        lines.append(f"{ray}\rTraining Progress: {step}/80 [02:40<00:00, 96.50s/it]")
    (HERE / "verl_grpo.log").write_text("\n".join(lines) + "\n")
    text = "".join(json.dumps({"step": step, "data": row}) + "\n" for step, row in verl_rows(noise))
    (HERE / "verl_dapo.jsonl").write_text(text)


def wandb_chart(noise: random.Random) -> None:
    """A chart of two runs over tokens. The second run stopped early."""
    runs = {"olive-sweep-3": (0.62, 40), "brisk-sweep-7": (0.55, 30)}
    metric = "eval/scores"
    header = ["val/num_total_tokens"]
    for run in runs:
        header += [f"{run} - {metric}{end}" for end in ("", "__MIN", "__MAX")]
    with (HERE / "wandb_chart.csv").open("w", newline="") as handle:
        write = csv.writer(handle, quoting=csv.QUOTE_ALL, lineterminator="\n")
        write.writerow(header)
        for step in range(41):
            cells: list[object] = [step * TOKENS]
            for top, last in runs.values():
                value = f"{rate(step * TOKENS, top) + noise.gauss(0, 0.004):.6f}" if step <= last else ""
                cells += [value] * 3
            write.writerow(cells)


def prime_rl(noise: random.Random) -> None:
    """The history of one prime-rl run: evaluations are in separate rows, joined to training by `step`."""
    rows: list[dict[str, Any]] = []

    def log(step: int, metrics: dict[str, Any]) -> None:
        at = {"_step": len(rows), "_runtime": 60.0 * step + 1, "_timestamp": 1.75e9 + 60 * step}
        rows.append({**at, "step": step, **metrics})

    for step in range(61):
        tokens = TOKENS * step
        if step % 5 == 0:
            math = {"eval/aime24/avg@16": rate(tokens, 0.55) + noise.gauss(0, 0.004), "eval/aime24/time": 40.0}
            log(step, {**math, "progress/ckpt_step": step})
            code = rate(tokens, 0.40) + noise.gauss(0, 0.004)
            log(step, {"eval/livecodebench/avg@16": code, "progress/ckpt_step": step})
        reward = rate(tokens) + noise.gauss(0, 0.02)
        progress = {"progress/tokens": TOKENS, "progress/total_tokens": tokens, "progress/total_samples": 512 * step}
        log(step, {**progress, "reward/all/mean": reward, "time/step": 60.0, "val_reward/all/mean": None})
    (HERE / "prime_rl_history.json").write_text(json.dumps(rows, indent=0))


def open_instruct(noise: random.Random) -> None:
    """The history of an open-instruct run as CSV: most cells of an evaluation's columns are empty."""
    header = ["_step", "_runtime", "_timestamp", "episode", "training_step", "val/num_total_tokens", "scores"]
    header += ["objective/verifiable_correct_rate", "eval/scores", "eval/objective/verifiable_correct_rate"]
    with (HERE / "open_instruct_history.csv").open("w", newline="") as handle:
        write = csv.writer(handle, lineterminator="\n")
        write.writerow(header)
        for step in range(1, 81):
            tokens = TOKENS * step
            train = rate(tokens) + noise.gauss(0, 0.02)
            held_out = rate(tokens, 0.58) + noise.gauss(0, 0.004)
            evals = [f"{10 * held_out:.5f}", f"{held_out:.6f}"] if step % 4 == 0 else ["", ""]
            at = [step, 75 * step, 1_750_000_000 + 75 * step, 512 * step, step, tokens]
            write.writerow([*at, f"{10 * train:.5f}", f"{train:.6f}", *evals])


def main() -> None:
    """Write every log, each from its own seed."""
    for seed, make in enumerate((trl, verl, wandb_chart, prime_rl, open_instruct)):
        make(random.Random(seed))


if __name__ == "__main__":
    main()
