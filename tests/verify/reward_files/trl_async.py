import asyncio

LIMIT = 8


async def _judge(text, reference):
    await asyncio.sleep(0)
    return sum(word in text for word in reference.split()) / len(reference.split())


async def judged_reward(
    prompts, completions, completion_ids, reference, trainer_state, log_extra, log_metric, **kwargs
):
    """Share of the reference's words in the completion; long ones are punished after the first ten steps."""
    texts = [completion[0]["content"] for completion in completions]
    scores = await asyncio.gather(*(_judge(text, ref) for text, ref in zip(texts, reference, strict=True)))
    lengths = [len(ids) for ids in completion_ids]
    if trainer_state.global_step > 10:
        scores = [score - 0.5 * (length > LIMIT) for score, length in zip(scores, lengths, strict=True)]
    log_extra("reference", reference)
    log_extra("asked", [prompt[-1]["content"] for prompt in prompts])
    log_metric("mean_length", sum(lengths) / len(lengths))
    log_metric("columns", float(len(kwargs)))
    return scores
