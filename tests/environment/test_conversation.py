"""A whole conversation with a tool: sampled tokens are kept, calls are parsed and made, answers are appended."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_scalerl.checks import ConfigurationError
from lightning_scalerl.environment.calls import CONVENTIONS, convention_of
from lightning_scalerl.environment.pool import EnvironmentPool
from lightning_scalerl.environment.protocol import Observation, Turn
from lightning_scalerl.environment.settings import EnvironmentSettings
from lightning_scalerl.model.chat import Chat, Rendering
from lightning_scalerl.model.turns import Turns
from lightning_scalerl.stream.conversations import Dialogue
from lightning_scalerl.task.dataset import DatasetTask
from tests.environment.environments_for_tests import Calculator, Rows, Seeded
from tests.families import FAMILIES, QWEN2, tokenizer_of

# A short form of Qwen2.5's template.
TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    'Write <tool_call>{"name": ..., "arguments": ...}</tool_call><|im_end|>\n{% endif %}'
    "{% for m in messages %}{% if m.role == 'tool' %}<|im_start|>user\n<tool_response>{{ m.content }}</tool_response>"
    "<|im_end|>\n{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# A malformed call, a valid call whose JSON no renderer would write like this, and an answer.
SAMPLED = (
    '<tool_call>{"name": "add", "arguments": {"a": 3}}</tool_call>',
    'Again. <tool_call>{"arguments":{"b":4,   "a":3},"name":"add"}</tool_call>',
    "It is 7.",
)


def test_a_conversation_with_a_tool(tmp_path: Path) -> None:
    template = tmp_path / "chat.jinja"
    template.write_text(TEMPLATE)
    tokenizer = tokenizer_of(QWEN2)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    rendering = Rendering(tokenizer, Chat(template=str(template)), [end])
    convention = CONVENTIONS[convention_of(rendering.template)]
    assert convention.name == "hermes"

    pool = EnvironmentPool(Calculator, most=1, timeout_s=20.0)
    (declared,) = pool.declare().values()
    turns = Turns(rendering, declared.tools, convention.role, example=' <tool_call>{"name": "add"}</tool_call>')
    number = pool.open({"answer": 7}, seed=0)
    assert pool.wait(number) == Observation()
    messages = [{"role": "user", "content": "3 + 4?"}]
    tokens: list[int] = tokenizer(rendering.conversation(messages, declared.tools), add_special_tokens=False).input_ids
    mask = [False] * len(tokens)
    for text in SAMPLED:
        # Character by character: a model may sample tokens that no tokenizer would produce for the text.
        sampled = [*(token for sign in text for token in tokenizer(sign, add_special_tokens=False).input_ids), end]
        messages.append({"role": "assistant", "content": text})
        tokens, mask = [*tokens, *sampled], [*mask, *(True for _ in sampled)]
        pool.act(number, Turn(text, convention.parse(rendering.decode(sampled), declared.tools)))
        answer = pool.wait(number)
        assert isinstance(answer, Observation)
        if answer.terminated:
            break
        messages += [{"role": "tool", "content": reply} for reply in answer.texts]
        (following,) = turns.following_tokens([answer.texts], [sampled])
        tokens, mask = [*tokens, *following], [*mask, *(False for _ in following)]
    pool.shutdown()

    assert answer.reward == 1.0 and pool.counts["malformed"] == 1
    assert messages[2]["content"].startswith("error: this call cannot be read, add needs the argument b")
    assert messages[4]["content"] == "7"
    whole: str = rendering.conversation(messages, declared.tools).removesuffix("\n<|im_start|>assistant\n")
    assert tokenizer.decode(tokens) == whole
    assert len(tokens) > len(tokenizer(whole, add_special_tokens=False).input_ids), (
        "sampled tokens are not replaced by the tokenizer's"
    )
    model_tokens = [token for token, is_sampled in zip(tokens, mask, strict=True) if is_sampled]
    assert tokenizer.decode(model_tokens) == "".join(f"{text}<|im_end|>" for text in SAMPLED)


def texts(factory: Any, *rows: dict[str, Any]) -> list[str]:
    """Return the first observations of these rows, read as a data set without `keep_columns`."""
    named = [{"prompt": "How?", "answer": "So.", **row} for row in rows]
    prompts = DatasetTask(train=named, rewards="exact_match", duplicates="keep").train_prompts()
    settings = EnvironmentSettings(factory, convention="plain", describe_tools=False, reward="task", processes=1)
    pool = settings.pool()
    try:
        dialogue = Dialogue(
            settings, Rendering(tokenizer_of(FAMILIES["GPT2"].style), Chat()), pool, {"training": prompts}
        )
        dialogue.close()
    finally:
        pool.shutdown()
    return [prompt.text.removeprefix("How?\n\n") for prompt in dialogue.prompts["training"]]


def test_reset_gets_the_rows_seed_in_any_form_of_a_whole_number() -> None:
    seeds = (1003, "1003", " 1003 ", 1003.0, "1003.0", np.int64(1003), np.float32(1003), -7, 2**70)
    assert texts(Seeded, *({"seed": seed} for seed in seeds)) == [*["seed 1003"] * 7, "seed -7", f"seed {2**70}"]
    missing = texts(Seeded, *({"seed": seed} for seed in (None, math.nan, "")), {})
    assert len(set(missing)) == 4 and "seed 1003" not in missing, "made from the prompt's id"


@pytest.mark.parametrize("seed", ["abc", 1003.5, "1003.5", math.inf, True, [1]])
def test_another_seed_is_refused_by_name(seed: Any) -> None:
    message = f"environment: prompt '1' has {re.escape(repr(seed))} in its column seed, .* give a whole number"
    with pytest.raises(ConfigurationError, match=message):
        texts(Seeded, {"seed": 1}, {"seed": seed})
    assert texts(Rows, {"seed": seed, "environment": "x"}) == ["row How? So."]


@pytest.mark.full
def test_several_environments_need_no_kept_columns() -> None:
    both = {"a": Seeded, "1": Rows}
    rows = [{"environment": "a", "seed": 5}, {"environment": 1, "seed": "none"}]
    assert texts(both, *rows) == ["seed 5", "row How? So."]
    with pytest.raises(ConfigurationError, match=r"a row has no column environment.* one of 1, a"):
        texts(both, {})
