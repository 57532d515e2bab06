"""Measure seconds per batch of a hand-written training loop: arguments FOLDER PROMPT_TOKENS BATCHES.

The loop uses transformers' `generate` with its log-probabilities, the reward, advantages by group and batch, CISPO's
loss, and AdamW.
"""

from __future__ import annotations

import sys
import time

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.speed.setting import ANSWER_TOKENS, COMPLETIONS, PROMPTS, reward, words


def main() -> None:
    """Train, and print the seconds per batch."""
    folder, prompt_tokens, batches = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), eps=1e-15, weight_decay=0.01)
    pool = torch.tensor(tokenizer(words(0, prompt_tokens))["input_ids"])
    ends = []
    for batch in range(batches + 1):
        prompts = pool[(torch.arange(PROMPTS) + batch * PROMPTS) % len(pool)].repeat_interleave(COMPLETIONS, 0)
        model.eval()
        with torch.no_grad():
            sampled = model.generate(
                prompts,
                attention_mask=torch.ones_like(prompts),
                do_sample=True,
                top_k=0,
                max_new_tokens=ANSWER_TOKENS,
                return_dict_in_generate=True,
                output_logits=True,
            )
        sequences = sampled.sequences
        answers = sequences[:, prompt_tokens:]
        sampled_logprobs = (
            torch.log_softmax(torch.stack(sampled.logits, 1), -1).gather(2, answers.unsqueeze(2)).squeeze(2)
        )
        ended = (answers == tokenizer.eos_token_id).cumsum(1)
        mask = ((ended == 0) | ((ended == 1) & (answers == tokenizer.eos_token_id))).float()
        texts = tokenizer.batch_decode(answers, skip_special_tokens=True)
        rewards = torch.tensor([reward(text) for text in texts]).view(PROMPTS, COMPLETIONS)
        advantages = (rewards - rewards.mean(1, keepdim=True)).flatten()
        advantages = advantages / (advantages.std() + 1e-6)
        for half in torch.arange(len(sequences)).chunk(2):
            logits = model(sequences[half], use_cache=False).logits[:, prompt_tokens - 1 : -1]
            logprobs = torch.log_softmax(logits, -1).gather(2, answers[half].unsqueeze(2)).squeeze(2)
            weight = torch.exp(logprobs.detach() - sampled_logprobs[half]).clamp(max=5.0)
            token_losses = -(weight * advantages[half].unsqueeze(1) * logprobs * mask[half])
            loss = token_losses.sum() / mask[half].sum()
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        ends.append(time.perf_counter())
    print((ends[-1] - ends[0]) / batches)


if __name__ == "__main__":
    main()
