import re

PATTERN = re.compile(r"^<think>\n(?!.*<think>)(.*?)\n</think>.*$", re.DOTALL)


def think_format_reward(completions, **kwargs):
    """1.0 if the reasoning is between <think> and </think>, else 0.0."""
    texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    return [1.0 if PATTERN.match(text) else 0.0 for text in texts]


def no_kwargs(prompts, completions, answer):
    # This function uses only `answer` of the data set's columns.
    return [float(a in c and p.endswith("?")) for p, c, a in zip(prompts, completions, answer, strict=True)]
