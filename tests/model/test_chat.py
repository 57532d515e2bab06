"""Prompts in the form that models expect, and the part of a completion that is graded."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from lightning_scalerl.checks import ConfigurationError
from lightning_scalerl.model import bounded as bounded_module
from lightning_scalerl.model import chat as chat_module
from lightning_scalerl.model.chat import Chat, Rendering, StopTexts
from lightning_scalerl.rollouts.prompt import Prompt
from lightning_scalerl.rollouts.rollout import Rollout
from lightning_scalerl.stream.prompts import fitting
from tests.examples import examples
from tests.sweeps.command.toy import wait_until
from tests.sweeps.test_process import gone, number

SPECIAL = ["<s>", "</s>", "<|user|>", "<|assistant|>", "<think>", "</think>"]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ '<|' + m.role + '|>' + m.content + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>"
    "{% if enable_thinking is not defined or enable_thinking %}<think>{% endif %}{% endif %}"
)
PLAIN_TEMPLATE = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}[assistant]"
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}x"


def tokenizer(template: str | None = None, adds: str = "", special_thinking: bool = True) -> Any:
    """A tokenizer of bytes. `adds` is the template of special tokens that it puts around plain text."""
    pieces = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    vocabulary = {token: number for number, token in enumerate(pieces)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special_tokens = SPECIAL if special_thinking else SPECIAL[:4]
    backend.add_special_tokens(special_tokens)
    if not special_thinking:
        backend.add_tokens(SPECIAL[4:])
    if adds:
        ids = [(token, vocabulary[token]) for token in ("<s>", "</s>", "<|user|>")]
        backend.post_processor = processors.TemplateProcessing(single=adds, special_tokens=ids)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    wrapped.chat_template = template
    return wrapped


def decode(rendering: Rendering, ids: list[int]) -> str:
    text: str = rendering.tokenizer.decode(ids, skip_special_tokens=False)
    return text


def ask(text: str, *messages: dict[str, str]) -> Prompt:
    return Prompt("p", text, "4", messages=messages)


def finished(tokens: list[int]) -> Rollout:
    count = len(tokens)
    return Rollout(tokens, [0.0] * count, [0] * count, [False] * count, "stop")


def test_a_template_is_used_if_there_is_one_and_adds_bos_once() -> None:
    rendering = Rendering(tokenizer(TEMPLATE, adds="<s> $A"), Chat())
    assert decode(rendering, rendering.encode(ask("2+2?"))) == "<s><|user|>2+2?</s><|assistant|><think>"
    assert "chat template" in rendering.description


def test_plain_text_gets_the_tokenizers_prefix_but_no_suffix() -> None:
    for adds, prefix in (("", ""), ("<s> $A", "<s>"), ("<s> $A </s>", "<s>")):
        rendering = Rendering(tokenizer(adds=adds), Chat())
        assert decode(rendering, rendering.encode(ask("2+2?"))) == f"{prefix}2+2?"
    without_template = Rendering(tokenizer(TEMPLATE, adds="<s> $A"), Chat(template="none"))
    assert decode(without_template, without_template.encode(ask("2+2?"))) == "<s>2+2?"
    # A text that ends in the end token itself keeps it.
    with_end = Rendering(tokenizer(adds="<s> $A"), Chat())
    assert decode(with_end, with_end.encode(ask("over</s>"))) == "<s>over</s>"


def test_bos_is_not_doubled_if_a_text_begins_with_it() -> None:
    for adds in ("", "<s> $A", "<s> $A </s>"):
        plain = Rendering(tokenizer(adds=adds), Chat())
        for text in ("<s>2+2?", "<s>", "<s>over</s>", "<s>a<s>b"):
            assert decode(plain, plain.encode(ask(text))) == text, adds
        prefix = "<s>" * adds.startswith("<s>")
        assert decode(plain, plain.encode(ask("over</s>"))) == f"{prefix}over</s>"
        assert decode(plain, plain.encode(ask("a<s>"))) == f"{prefix}a<s>"
    # GLM's tokenizer puts two tokens before a text.
    two_token_prefix = Rendering(tokenizer(adds="<s> <|user|> $A"), Chat())
    for text in ("hi", "<s><|user|>hi"):
        assert decode(two_token_prefix, two_token_prefix.encode(ask(text))) == "<s><|user|>hi"
    bare_template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
    rendered = Rendering(tokenizer(bare_template, adds="<s> $A"), Chat())
    assert decode(rendered, rendered.encode(ask("<s>2+2?"))) == "<s>2+2?"


def test_a_lone_surrogate_is_refused_by_prompt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as in a prompt of `Trainer.predict` or of a task of the user's; data rows are checked when they are read."""
    monkeypatch.setenv("SCALERL_CACHE", str(tmp_path))
    with pytest.raises(ConfigurationError, match=r"^task: prompt '.*': 'a.*' has a lone surrogate"):
        Rendering(tokenizer(), Chat()).encode_all({"training": [ask("b"), ask("a \ud800")]})


def test_a_templates_byte_order_mark_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "chat.jinja"
    path.write_text("{{ messages[0].content }}", encoding="utf-8-sig")
    assert Rendering(tokenizer(), Chat(template=str(path))).template == "{{ messages[0].content }}"


def test_notes_state_what_rewards_do_not_see(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCALERL_CACHE", str(tmp_path))

    def notes_of(rendering: Rendering, *texts: str) -> list[str]:
        prompts = [ask(text) for text in texts]
        rendering.encode_all({"training": prompts})
        return rendering.notes(prompts)

    dropped, opened = notes_of(Rendering(tokenizer(TEMPLATE), Chat(), stop_tokens=[1]), "2+2?", "3+3?")
    assert dropped.startswith(
        "special tokens that decoding removes before rewards see a completion: "
        "<s>, <|user|>, <|assistant|>, <think>, </think>; a reward can find them only in"
    )
    assert (
        "prompts that end in <think>: 2 of 2, because the chat template opens the thinking; their completions" in opened
    )
    (dropped,) = notes_of(Rendering(tokenizer(TEMPLATE, special_thinking=False), Chat(thinking=False), [1]), "2+2?")
    assert "think" not in dropped
    plain = Rendering(tokenizer(special_thinking=False), Chat(), stop_tokens=[0, 1, 2, 3])
    (opened,) = notes_of(plain, "2+2?", "2+2? <think>\n")
    assert opened.startswith("prompts that end in <think>: 1 of 2; their completions begin inside the thinking")
    many_special = tokenizer()
    many_special.add_special_tokens(
        {"additional_special_tokens": [f"<|reserved_{number}|>" for number in range(300)] + ["<x>"]}
    )
    (dropped,) = notes_of(Rendering(many_special, Chat()), "2+2?")
    assert "</think>, <x>, <|reserved_0|>" in dropped and "and 283 more;" in dropped


def test_system_prompt_thinking_switch_and_a_users_template(tmp_path: Path) -> None:
    rendering = Rendering(tokenizer(TEMPLATE), Chat(system="Be brief.", thinking=False))
    text = decode(rendering, rendering.encode(ask("2+2?")))
    assert text == "<s><|system|>Be brief.</s><|user|>2+2?</s><|assistant|>"
    conversation = ask("hi", {"role": "system", "content": "Mine."}, {"role": "user", "content": "hi"})
    assert "Be brief" not in rendering.text(conversation) and "Mine." in rendering.text(conversation)
    path = tmp_path / "mine.jinja"
    path.write_text(PLAIN_TEMPLATE)
    mine = Rendering(tokenizer(TEMPLATE), Chat(template=str(path)))
    assert mine.text(ask("2+2?")) == "[user] 2+2?\n[assistant]"


@pytest.mark.parametrize(
    ("made", "chat", "said"),
    [
        (None, Chat(system="x"), r"chat\.system: there is no chat template"),
        (PLAIN_TEMPLATE, Chat(thinking=True), r"chat\.thinking: True would do nothing"),
        (None, Chat(thinking=False), r"chat\.thinking: False would do nothing"),
    ],
)
def test_settings_that_would_do_nothing_are_refused(made: str | None, chat: Chat, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        Rendering(tokenizer(made), chat)


def test_a_conversation_that_the_template_refuses_gives_a_one_line_error() -> None:
    rendering = Rendering(tokenizer(NO_SYSTEM), Chat(system="x"))
    with pytest.raises(ConfigurationError, match=r"prompt 'p' \(System role not supported\); .*chat\.system") as caught:
        rendering.text(ask("2+2?"))
    assert "\n" not in str(caught.value)


def test_a_conversation_without_a_template_is_its_only_question_or_refused() -> None:
    rendering = Rendering(tokenizer(), Chat())
    assert rendering.text(ask("2+2?", {"role": "user", "content": "2+2?"})) == "2+2?"
    two = ask("b", {"role": "user", "content": "a"}, {"role": "assistant", "content": "x"})
    with pytest.raises(ConfigurationError, match="conversation of 2 messages, and the model has no chat template"):
        rendering.text(two)


@pytest.mark.parametrize(
    "bad", [{"template": "/no/such/file"}, {"stop": "word"}, {"stop": [""]}, {"stop": [3]}, {"end_of_thinking": ""}]
)
def test_bad_settings_name_their_field(bad: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=rf"chat\.{next(iter(bad))}: "):
        Chat(**bad)


@pytest.mark.parametrize("special", [True, False])
def test_the_answer_is_what_follows_the_thinking(special: bool) -> None:
    """The end-of-thinking marker may be a special token, which decoding drops, or an ordinary one."""
    text_tokenizer = tokenizer(TEMPLATE, special_thinking=special)
    rendering = Rendering(text_tokenizer, Chat(), stop_tokens=[1])

    def answer(text: str) -> str:
        return rendering.sample(ask("2+2?"), finished(text_tokenizer.encode(text, add_special_tokens=False)), 0).answer

    assert answer("two and two</think>4</s>") == "4"
    assert answer("a</think>b</think>c") == "c"
    # The template opens the thinking, so a completion that never ends it has no answer.
    assert answer("two and two make 4") == ""
    silent = Rendering(text_tokenizer, Chat(thinking=False))
    tokens = text_tokenizer.encode("4", add_special_tokens=False)
    assert silent.sample(ask("2+2?"), finished(tokens), 0).answer == "4"


def test_without_thinking_the_whole_text_is_the_answer_and_the_marker_can_be_set() -> None:
    text_tokenizer = tokenizer()
    tokens = text_tokenizer.encode("a#b", add_special_tokens=False)
    assert Rendering(text_tokenizer, Chat()).sample(ask("?"), finished(tokens), 3).answer == "a#b"
    assert Rendering(text_tokenizer, Chat(end_of_thinking="#")).sample(ask("?"), finished(tokens), 3).answer == "b"
    forced = Rendering(text_tokenizer, Chat(), end_of_thinking="#").sample(ask("?"), finished(tokens), 3)
    assert (forced.answer, forced.completion, forced.step, forced.tokens) == ("b", "a#b", 3, tuple(tokens))


def test_a_completion_does_not_include_the_text_that_ended_it() -> None:
    text_tokenizer = tokenizer()
    rendering = Rendering(text_tokenizer, Chat(stop=["\nUser:", "STOP"]), stop_tokens=[1])
    for text, expected in (
        ("4</s>", "4"),
        ("4\nUser: more", "4"),
        ("4STOP", "4"),
        ("4", "4"),
        ("a STOP \nUser:", "a "),
    ):
        assert rendering.decode(text_tokenizer.encode(text, add_special_tokens=False)) == expected


@settings(max_examples=examples(60))
@given(st.text(max_size=30), st.sampled_from(["STOP", "é", "\n\n", "日本"]), st.text(max_size=10))
def test_a_stop_text_is_detected_with_its_last_token_and_not_before(before: str, stop: str, after: str) -> None:
    text_tokenizer = tokenizer()
    holds = StopTexts(text_tokenizer, (stop,))
    before = before.replace(stop, "").replace(stop[0], "").replace(stop[-1], "")
    tokens = text_tokenizer.encode(before + stop + after, add_special_tokens=False)
    first = next(number for number in range(len(tokens) + 1) if holds(tokens[:number]))
    assert stop in text_tokenizer.decode(tokens[:first]) and stop not in text_tokenizer.decode(tokens[: first - 1])
    assert holds(tokens[:first][-holds.window :])


def test_prompts_encoded_together_have_the_same_tokens_and_are_cached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SCALERL_CACHE", str(tmp_path))
    monkeypatch.setattr(chat_module, "CACHE_AFTER_S", 0.0)
    rendering = Rendering(tokenizer(TEMPLATE), Chat())
    sets = {name: [ask(f"{name} {number}?") for number in range(5)] for name in ("one", "two")}
    once = rendering.encode_all(sets)
    assert once == {
        name: [rendering.encode(prompt) for prompt in prompts_of_set] for name, prompts_of_set in sets.items()
    }
    (cache_file,) = (tmp_path / "prompts").iterdir()
    monkeypatch.setattr(Rendering, "_tokens", lambda self, texts: pytest.fail("the cache is not used"))
    assert rendering.encode_all(sets) == once
    monkeypatch.undo()
    monkeypatch.setenv("SCALERL_CACHE", str(tmp_path))
    monkeypatch.setattr(chat_module, "CACHE_AFTER_S", 0.0)
    cache_file.write_bytes(b"torn")
    assert rendering.encode_all(sets) == once
    # Everything that determines the tokens is part of the key.
    others = [
        Rendering(tokenizer(TEMPLATE), Chat(thinking=False)),
        Rendering(tokenizer(TEMPLATE.replace("<|assistant|>", "<|user|>")), Chat()),
        Rendering(tokenizer(TEMPLATE, special_thinking=False), Chat()),
    ]
    prompts = [prompt for prompts_of_set in sets.values() for prompt in prompts_of_set]
    assert len({candidate._key(prompts) for candidate in [rendering, *others]}) == 4
    assert rendering._key(prompts) != rendering._key(prompts[:-1])


@pytest.mark.slow
def test_ten_thousand_prompts_take_seconds() -> None:
    """A guard against slow rendering of one prompt at a time. The limit is far above the time on any machine."""
    rendering = Rendering(tokenizer(TEMPLATE), Chat())
    start_s = time.monotonic()
    rendering._tokens(rendering.texts([ask(f"What is {number} and {number}? " * 5) for number in range(10_000)]))
    assert time.monotonic() - start_s < 60


# --- lengths -----------------------------------------------------------------------------------------------------


def lengths(*counts: int) -> tuple[list[Prompt], list[list[int]]]:
    return [Prompt(f"p{number}", "x") for number in range(len(counts))], [[7] * count for count in counts]


def test_prompts_beyond_their_budget_are_refused_or_dropped_and_counted() -> None:
    training, heldout = lengths(3, 9, 4, 12), lengths(2, 5)
    sets, tokens = {"training": training[0], "held-out": heldout[0]}, {"training": training[1], "held-out": heldout[1]}
    with pytest.raises(
        ConfigurationError, match=r"2 of 4 training prompts have more than 5 .*longest 12; .*too_long=drop"
    ):
        fitting(sets, tokens, 5)
    kept = fitting(sets, tokens, 5, "drop")
    assert [prompt.prompt_id for prompt in kept["training"].prompts] == ["p0", "p2"]
    assert (kept["training"].dropped, kept["held-out"].dropped) == (2, 0)
    assert "2 too long, left out" in kept["training"].describe("training")
    with pytest.raises(ConfigurationError, match="2 of 2 held-out prompts"):
        fitting({"held-out": heldout[0]}, {"held-out": heldout[1]}, 1, "drop")
    with pytest.raises(ConfigurationError, match=r"'p0' .* has no tokens"):
        fitting({"training": [Prompt("p0", "")]}, {"training": [[]]}, 5, "drop")


HOSTILE = {
    "an endless text": ("{{ 'a' * 10**10 }}", "MiB"),
    "a wide format": ("{{ '%2000000000d' % 1 }}", "MiB"),
    "a wide filter": ("{{ 'a' | center(3000000000) }}", "MiB"),
    "a text that doubles": (
        "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
        "MiB",
    ),
    "a long text": ("{{ 'a' * 20000000 }}", "writes 20000000 characters"),
    "a large power": ("{{ 9 ** (9 ** 9) }}", "has not ended after 0.4 s"),
    "nested loops": (
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "has not ended after 0.4 s",
    ),
}


def test_a_template_runs_under_limits_of_time_memory_and_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """A template is another person's program. Exceeding a limit gives one line that names its origin and the remedy."""
    monkeypatch.setattr(bounded_module, "LIMIT_S", 0.4)
    for name, (template, expected) in HOSTILE.items():
        hostile = tokenizer(template)
        hostile.name_or_path = "/models/theirs"
        with pytest.raises(ConfigurationError) as caught:
            Rendering(hostile, Chat()).text(ask("2+2?"))
        message = str(caught.value)
        assert "of /models/theirs cannot be used" in message and "give chat.template a file of yours" in message, name
        assert expected in message or "has not ended" in message, (name, message)
        assert message.isprintable()
    macro = tokenizer("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}")
    with pytest.raises(ConfigurationError, match="recursion"):
        Rendering(macro, Chat()).text(ask("2+2?"))
    assert Rendering(tokenizer(TEMPLATE), Chat()).text(ask("2+2?")).startswith("<s><|user|>2+2?")


def test_work_under_limits_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    """kill -9 leaves the process no time to clean up."""

    def work(item: int) -> str:
        (tmp_path / "new").write_text(str(os.getpid()))
        (tmp_path / "new").rename(tmp_path / "number")
        time.sleep(60)
        return ""

    if (parent := os.fork()) == 0:
        try:
            list(bounded_module.bounded(work, [0]))
        finally:
            os._exit(1)
    worker = number(tmp_path)
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    wait_until(lambda: gone(worker))
