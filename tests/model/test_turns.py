"""Chat templates over several turns: which ones can be used, and the text between two turns of the model."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lightning_scalerl.checks import ConfigurationError
from lightning_scalerl.environment.calls import convention_of
from lightning_scalerl.environment.pool import EnvironmentPool
from lightning_scalerl.environment.settings import EnvironmentSettings
from lightning_scalerl.model.chat import Chat, Rendering
from lightning_scalerl.model.turns import Turns
from lightning_scalerl.rollouts.prompt import Prompt
from lightning_scalerl.stream.conversations import Dialogue
from tests.environment.environments_for_tests import Calculator, Obedient
from tests.environment.test_calls import TOOLS
from tests.families import FAMILIES, QWEN2, QWEN3, tokenizer_of

CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
BEGIN = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
STRIPS = CHATML.replace("m.content", "m.content.split('</think>')[-1]") + BEGIN


def rendering(template: str | None = None) -> Rendering:
    tokenizer = tokenizer_of(QWEN3)
    if template is not None:
        tokenizer.chat_template = template
    stop = [tokenizer.convert_tokens_to_ids("<|im_end|>")]
    return Rendering(tokenizer, Chat(), stop)


REFUSED = {("DeepSeek-V3", "user"), ("DeepSeek-V3", "tool"), ("Mistral", "tool"), ("Mixtral", "tool")}


@pytest.mark.parametrize("role", ["user", "tool"])
@pytest.mark.parametrize("family", FAMILIES)
def test_which_families_templates_can_be_used(family: str, role: str) -> None:
    chat_rendering = Rendering(tokenizer_of(FAMILIES[family].style), Chat())
    if (family, role) in REFUSED:
        with pytest.raises(ConfigurationError, match=r"^chat\.template: the template of the model (rewrites|does not)"):
            Turns(chat_rendering, role=role)
    else:
        (text,) = Turns(chat_rendering, role=role).following([["A", "B"]])
        assert "A" in text and "B" in text


def test_following_text_and_tokens() -> None:
    chat_rendering = rendering(CHATML + BEGIN)
    turns = Turns(chat_rendering, role="tool")
    text = "<|im_end|>\n<|im_start|>tool\n7<|im_end|>\n<|im_start|>assistant\n"
    assert turns.following([["7"], ["7"]]) == [text, text]
    end = chat_rendering.tokenizer.convert_tokens_to_ids("<|im_end|>")
    closed, open_ = turns.following_tokens([["7"], ["7"]], [[5, end], [5]])
    assert open_ == [end, *closed] and chat_rendering.tokenizer.decode(open_, skip_special_tokens=False) == text


def test_a_template_may_name_the_tool_of_an_answer() -> None:
    """Hermes' own template does so and refuses answers without a name."""
    named = "{% if m.role == 'tool' %}{{ m.name if m.name is defined else raise_exception('no name') }}: {% endif %}"
    chat_rendering = rendering("{{ tools }}" + CHATML.replace("{{ m.content }}", named + "{{ m.content }}") + BEGIN)
    turns = Turns(chat_rendering, TOOLS, role="tool")
    first = TOOLS[0]["function"]["name"]
    assert f"tool\n{first}: 7" in turns.following([["7"]])[0]
    (text,) = turns.following([["7", "8"]], [["divide", ""]])
    assert "tool\ndivide: 7" in text and f"tool\n{first}: 8" in text, (
        "the answer to a malformed call gets the first tool's name"
    )


def test_sampled_and_following_tokens_make_the_whole_conversation() -> None:
    """Sampled and following tokens, joined, equal the tokens that the template gives for the whole conversation."""
    chat_rendering = rendering()
    conversation = [{"role": "user", "content": "How many?"}]
    tokens = chat_rendering.tokenizer(chat_rendering.conversation(conversation), add_special_tokens=False)["input_ids"]
    turns = Turns(chat_rendering)
    for answer, reply in [("Seven, I think.", "No."), ("Eight!", "Yes.")]:
        sampled = chat_rendering.tokenizer(f"{answer}<|im_end|>", add_special_tokens=False)["input_ids"]
        (following,) = turns.following_tokens([[reply]], [sampled])
        tokens = [*tokens, *sampled, *following]
        conversation += [{"role": "assistant", "content": answer}, {"role": "user", "content": reply}]
        rendered = chat_rendering.conversation(conversation)
        assert tokens == chat_rendering.tokenizer(rendered, add_special_tokens=False)["input_ids"]


def test_without_a_template_texts_follow_each_other() -> None:
    assert Turns(Rendering(tokenizer_of(FAMILIES["GPT2"].style), Chat())).following([["7\n"]]) == ["7\n"]


def test_a_template_that_strips_earlier_thinking_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "strips.jinja"
    path.write_text(STRIPS)
    with pytest.raises(ConfigurationError) as refused:
        Turns(Rendering(tokenizer_of(QWEN3), Chat(template=str(path))))
    line = str(refused.value)
    assert f"the template of {path} rewrites earlier turns: once turn 1 is answered" in line
    assert "where the rollout has '<think>" in line and "keeps the thinking up to </think>" in line
    assert len(line.splitlines()) == 1


@pytest.mark.parametrize(
    ("template", "role", "tools", "why"),
    [
        # The last answer is rendered differently from earlier ones.
        (
            CHATML.replace("m.content", "m.content if loop.last or m.role != 'assistant' else 'gone'"),
            "user",
            [],
            "rewr",
        ),
        (CHATML.replace("{{ m.role", "{{ loop.index0 }}{{ m.role"), "user", [], "rewrites earlier turns"),
        (CHATML + "{{ messages | length }}", "user", [], "rewrites earlier turns"),
        (CHATML.replace("m in messages %}", "m in messages if m.role != 'tool' %}"), "tool", [], "leaves out messages"),
        (CHATML, "tool", TOOLS, "does not show the tool 'add'"),
        ("{% if messages | length > 2 %}{{ raise_exception('one turn') }}{% endif %}" + CHATML, "user", [], "one turn"),
        (CHATML + "{% for m in messages if m.role == 'user' %}.{% endfor %}", "user", [], "rewrites"),
    ],
)
def test_unusable_templates_are_refused(template: str, role: str, tools: list[Any], why: str) -> None:
    with pytest.raises(ConfigurationError, match=why):
        Turns(rendering(template + BEGIN), tools, role)


def test_a_text_that_depends_on_earlier_turns_is_refused() -> None:
    grows = CHATML.replace("<|im_end|>", "<|im_end|>{{ '!' * loop.index if m.role == 'tool' }}")
    with pytest.raises(ConfigurationError, match="does not write the same after turn 2"):
        Turns(rendering(grows + BEGIN), role="tool")


EXITS = """
import signal
from lightning_scalerl.model.bounded import BoundedWorker
signal.signal(signal.SIGTERM, lambda number, frame: None)  # as `scalerl train` does, which ends at a step's end
worker = BoundedWorker(str)
print(worker([7]))
"""


def test_a_process_exits_although_nobody_has_closed_its_template() -> None:
    """At exit `multiprocessing` sends its children SIGTERM, which they ignore if their parent handles it."""
    result = subprocess.run([sys.executable, "-c", EXITS], capture_output=True, text=True, check=False, timeout=60)
    assert (result.returncode, result.stdout) == (0, "['7']\n"), result.stderr


def test_a_refused_template_leaves_no_process() -> None:
    before = multiprocessing.active_children()
    with pytest.raises(ConfigurationError, match="rewrites earlier turns"):
        Turns(rendering(STRIPS))
    assert set(multiprocessing.active_children()) <= set(before)


def test_a_row_that_is_refused_leaves_no_process_of_a_template() -> None:
    """Two environments are two templates, whose processes start before the rows are read."""
    pool = EnvironmentPool({"a": Obedient, "b": Calculator}, most=1, timeout_s=20.0)
    prompts = [Prompt("0", "How many?", columns={"environment": "zzz"})]
    settings = EnvironmentSettings({"a": Obedient, "b": Calculator}, convention="plain")
    before = multiprocessing.active_children()
    try:
        with pytest.raises(ConfigurationError, match="'zzz'"):
            Dialogue(settings, rendering(CHATML + BEGIN), pool, {"training": prompts})
    finally:
        pool.shutdown()
    assert set(multiprocessing.active_children()) <= set(before)


# --- real templates ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def real() -> Path:
    """The folder of chat templates in TRL (Apache-2.0): copies of the models' templates, and changed ones."""
    python = os.environ.get("PEERS_PYTHON", sys.executable)
    find = "import importlib.util as u; print(u.find_spec('trl').submodule_search_locations[0])"
    location = subprocess.run([python, "-c", find], capture_output=True, text=True, check=False)
    if location.returncode:
        reason = f"{python} has no trl; tests/parity/make_peer_arrays.py says how to make one, PEERS_PYTHON names it"
        (pytest.fail if os.environ.get("CI_ALL") == "1" else pytest.skip)(reason)
    return Path(location.stdout.strip()) / "chat_templates"


@pytest.mark.peers
@pytest.mark.parametrize(
    ("name", "role", "chat", "refused"),
    [
        ("qwen3", "tool", {}, ""),
        ("qwen3", "tool", {"thinking": False}, "rewrites earlier turns"),
        ("qwen3", "user", {}, "rewrites earlier turns.*keeps the thinking"),
        ("qwen3_training", "user", {}, ""),
        ("qwen3_training", "tool", {"thinking": False}, ""),
        ("qwen2_5", "tool", {}, ""),
        ("llama3_1", "tool", {}, ""),
        ("llama3_1", "user", {}, ""),
        ("deepseek_r1_distill", "user", {}, "rewrites earlier turns"),
    ],
)
def test_templates_of_real_models(real: Path, name: str, role: str, chat: dict[str, Any], refused: str) -> None:
    path = real / f"{name}.jinja"
    chat_rendering = Rendering(tokenizer_of(QWEN2), Chat(template=str(path), **chat))
    tools = TOOLS if role == "tool" else []
    if refused:
        with pytest.raises(ConfigurationError, match=refused):
            Turns(chat_rendering, tools, role)
        return
    (text,) = Turns(chat_rendering, tools, role).following([["seven"]])
    assert "seven" in text
    expected = {"llama3_1": "llama"}.get(name, "hermes")
    assert convention_of(path.read_text()) == expected
