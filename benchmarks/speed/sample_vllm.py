"""Run vLLM's engine in a separate process: argument FOLDER, then one line per measurement on standard input.

A line is `PROMPTS ROLLOUTS PROMPT_TOKENS NEW_TOKENS`. The answer is the seconds until all rollouts are finished, with
log-probabilities, which RL needs. vLLM's prefix cache stays on, but no prompt is repeated.
"""

from __future__ import annotations

import os
import random
import sys
import time

from benchmarks.speed.setting import VOCABULARY

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}


def main() -> None:
    """Answer measurements until standard input ends."""
    from vllm import LLM, SamplingParams

    engine = LLM(
        model=sys.argv[1],
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=512,
        max_num_seqs=256,
        kv_cache_memory_bytes=2**30,
        enforce_eager=True,
    )
    source = random.Random(0)
    print("ready", flush=True)
    for line in sys.stdin:
        number, rollouts, prompt_tokens, new_tokens = map(int, line.split())
        prompts = [[source.randrange(1, VOCABULARY - 1) for _ in range(prompt_tokens)] for _ in range(number)]
        sampling = SamplingParams(n=rollouts, max_tokens=new_tokens, ignore_eos=True, logprobs=0, detokenize=False)
        started_at = time.perf_counter()
        engine.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
        print(time.perf_counter() - started_at, flush=True)


if __name__ == "__main__":
    main()
