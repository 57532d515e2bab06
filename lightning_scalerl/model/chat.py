"""Rendering of prompts for a model, and of completions for a verifier.

A conversation is rendered with the model's chat template. A plain text gets the prefix that its tokenizer adds (BOS).
The answer of a completion is the text after the marker that ends its thinking.
"""

from __future__ import annotations

import copy
import hashlib
import json
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, ClassVar
from zipfile import BadZipFile

import numpy as np

from lightning_scalerl.cache import cache_dir
from lightning_scalerl.checks import ConfigurationError, lone_surrogate
from lightning_scalerl.model.bounded import BoundedError, bounded
from lightning_scalerl.rollouts.grade import Sample
from lightning_scalerl.rollouts.prompt import Prompt
from lightning_scalerl.rollouts.rollout import Rollout

END_OF_THINKING = "</think>"
# The default date of Llama's templates. With today's date, prompts would change every day.
DATE = datetime(2024, 7, 26)
# Largest number of special tokens to list at the start; a model may have hundreds of reserved ones.
MAX_LISTED_TOKENS = 24
# Version of the tokenisation rules; cached tokens of other versions are not read.
RULES_VERSION = 2
# Tokenisation that takes longer than this is cached on disk.
CACHE_AFTER_S = 0.5


@dataclass(frozen=True)
class Chat:
    """Settings for rendering prompts and for finding the answer in a completion.

    Args:
        template: "auto" for the model's own chat template if it has one, "none" for prompts as plain text, or a file
            with a Jinja template.
        system: system prompt for every conversation without one.
        thinking: value of the template's `enable_thinking`; None for the template's default.
        stop: texts that end a completion, in addition to the model's end-of-sequence tokens.
        end_of_thinking: text that ends the thinking; None for the text of axis `length_control`, or else `</think>`.
    """

    neutral: ClassVar[Mapping[str, Any] | None] = {
        "choice": "Chat", "template": "auto", "system": None, "thinking": None, "stop": [], "end_of_thinking": None,
    }  # fmt: skip

    template: str = "auto"
    system: str | None = None
    thinking: bool | None = None
    stop: Sequence[str] = field(default_factory=list)
    end_of_thinking: str | None = None

    def __post_init__(self) -> None:
        stop = self.stop
        if isinstance(stop, str) or not all(isinstance(text, str) and text for text in stop):
            raise ConfigurationError(f"chat.stop: {stop!r} must be a list of texts, such as ['\\nUser:']")
        if self.template not in ("auto", "none") and not Path(self.template).expanduser().is_file():
            raise ConfigurationError(f"chat.template: {self.template!r} is neither auto nor none nor a file")
        if self.end_of_thinking == "":
            raise ConfigurationError("chat.end_of_thinking: an empty text ends nothing; leave it out for </think>")

    @staticmethod
    def content(parameters: Mapping[str, Any]) -> dict[str, Any]:
        """Return the digest of a template file for the run's identity; empty without a file."""
        path = Path(str(parameters.get("template", "auto"))).expanduser()
        if str(path) in ("auto", "none") or not path.is_file():
            return {}
        return {"template": hashlib.sha256(path.read_bytes()).hexdigest()}


class Rendering:
    """Renders prompts as texts and tokens, and completions as samples to grade, by a tokenizer and chat settings.

    Args:
        tokenizer: the model's tokenizer.
        chat: the chat settings.
        stop_tokens: token ids that end a completion.
        end_of_thinking: end-of-thinking marker of axis `length_control`; empty if that axis has none.

    Raises:
        ConfigurationError: the model's template does not support a setting.
    """

    def __init__(self, tokenizer: Any, chat: Chat, stop_tokens: Sequence[int] = (), end_of_thinking: str = "") -> None:
        self.tokenizer = tokenizer
        self.chat = chat
        self.stop_tokens = frozenset(stop_tokens)
        self.marker = chat.end_of_thinking or end_of_thinking or END_OF_THINKING
        marker_id = tokenizer.convert_tokens_to_ids(self.marker)
        # The id is needed if the marker is a special token, because decoding then drops it from the text.
        self._marker_id = marker_id if isinstance(marker_id, int) and marker_id != tokenizer.unk_token_id else None
        self._template = self._choose_template()
        # Maps a prompt's digest to whether the rendered prompt ends by opening the thinking (`<think>`). If it does, a
        # completion without the marker has no answer yet.
        self._opening: dict[bytes, bool] = {}
        # Maps a prompt to the schemas of the tools that its template shows.
        self.tools_of: Callable[[Prompt], Sequence[Mapping[str, Any]]] = _no_tools

    def _choose_template(self) -> str | None:
        chat = self.chat
        template: str | None = None
        if chat.template == "auto":
            # Some tokenizers have several named templates.
            templates = getattr(self.tokenizer, "chat_template", None)
            template = templates.get("default") if isinstance(templates, Mapping) else templates
        elif chat.template != "none":
            template = Path(chat.template).expanduser().read_text(encoding="utf-8-sig")
        if chat.system is not None and template is None:
            raise ConfigurationError("chat.system: there is no chat template to put it into; give chat.template a file")
        if chat.thinking is not None and (template is None or "enable_thinking" not in template):
            raise ConfigurationError(
                f"chat.thinking: {chat.thinking!r} would do nothing, for the model's chat template knows no "
                "enable_thinking; leave it out"
            )
        return template

    def tokenizer_to_save(self) -> Any:
        """Return the tokenizer to save with the model, with the chat template that training used."""
        if self._template is None or self.chat.template == "auto":
            return self.tokenizer
        tokenizer = copy.copy(self.tokenizer)
        tokenizer.chat_template = self._template
        return tokenizer

    @property
    def template(self) -> str | None:
        """Jinja template for prompts; None for plain text."""
        return self._template

    @property
    def owner(self) -> str:
        """File or model that the template comes from."""
        return self.chat.template if self.chat.template != "auto" else self.tokenizer.name_or_path or "the model"

    @property
    def description(self) -> str:
        """Description of how prompts are rendered, in one line."""
        if self._template is None:
            return "plain text, no chat template"
        template_name = (
            "the model's chat template" if self.chat.template == "auto" else f"the template of {self.chat.template}"
        )
        thinking = "" if self.chat.thinking is None else f", enable_thinking={self.chat.thinking}"
        return f"{template_name}{', with a system prompt' if self.chat.system else ''}{thinking}"

    def text(self, prompt: Prompt) -> str:
        """Return the text that the model reads, including the template's special tokens; see `texts`."""
        return self.texts([prompt])[0]

    def texts(self, prompts: Sequence[Prompt]) -> list[str]:
        """Return the texts that the model reads. The template is untrusted, so it runs in a process with limits.

        Raises:
            ConfigurationError: the template refuses a conversation or exceeds a limit, or there is a conversation and
                no template.
        """
        if self._template is None:
            return [self._plain_text(prompt) for prompt in prompts]
        try:
            return list(bounded(self._render, prompts))
        except BoundedError as error:
            reason = " ".join(str(error).split())[:200]
            prompt = prompts[error.number]
            if error.limit:
                raise ConfigurationError(
                    f"chat.template: the template of {self.owner} cannot be used, for {reason} on prompt "
                    f"{prompt.prompt_id!r}; give chat.template a file of yours, or chat.template=none"
                ) from error
            raise ConfigurationError(
                f"chat.template: it does not take the conversation of prompt {prompt.prompt_id!r} ({reason}); mend the "
                "prompt, leave out chat.system if it knows none, or give chat.template a file of yours"
            ) from error

    def _render(self, prompt: Prompt) -> str:
        messages = list(prompt.messages) or [{"role": "user", "content": prompt.text}]
        return self.conversation(messages, self.tools_of(prompt))

    def conversation(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> str:
        """Render a conversation that the model continues. Call this by `bounded`, because templates are untrusted.

        Args:
            messages: the conversation.
            tools: schemas of tools for the template's `tools`; empty for none.
        """
        if self.chat.system is not None and messages[0].get("role") != "system":
            messages = [{"role": "system", "content": self.chat.system}, *messages]
        switch: dict[str, Any] = {} if self.chat.thinking is None else {"enable_thinking": self.chat.thinking}
        if tools:
            switch["tools"] = list(tools)
        rendered: str = self.tokenizer.apply_chat_template(
            list(messages),
            chat_template=self._template,
            tokenize=False,
            add_generation_prompt=True,
            date_string=DATE.strftime("%d %b %Y"),
            strftime_now=DATE.strftime,
            **switch,
        )
        return rendered

    def _plain_text(self, prompt: Prompt) -> str:
        """Return a prompt as plain text; a conversation must be a single message of the user."""
        if not prompt.messages:
            return prompt.text
        (message, *others) = prompt.messages
        if others or message.get("role") != "user" or not isinstance(message.get("content"), str):
            raise ConfigurationError(
                f"chat.template: prompt {prompt.prompt_id!r} is a conversation of {len(prompt.messages)} messages, and "
                "the model has no chat template (or chat.template=none); give chat.template a file"
            )
        return str(message["content"])

    def encode(self, prompt: Prompt) -> list[int]:
        """Return the tokens of one prompt."""
        return self._tokens([self.text(prompt)])[0]

    def encode_all(self, sets: Mapping[str, Sequence[Prompt]]) -> dict[str, list[list[int]]]:
        """Return the tokens of all prompts of several sets, from the disk cache or computed in one batch.

        One batch is many times faster than a call per prompt.
        """
        prompts = [prompt for pool in sets.values() for prompt in pool]
        digests = [_digest(prompt) for prompt in prompts]
        path = cache_dir() / "prompts" / f"{self._key(prompts)}.npz"
        tokens, opening = _read_cache(path)
        if not len(tokens) == len(opening) == len(prompts):
            began = time.perf_counter()
            texts = self.texts(prompts)
            # Tasks check only the rows of their files, but these texts may also come from a user's task or from
            # `predict`.
            for prompt, text in zip(prompts, texts, strict=True):
                if (reason := lone_surrogate(text)) is not None:
                    raise ConfigurationError(f"task: prompt {prompt.prompt_id!r}: {reason}")
            tokens, opening = self._tokens(texts), [self._opens_thinking(text) for text in texts]
            if time.perf_counter() - began > CACHE_AFTER_S:
                _write_cache(path, tokens, opening)
        self._opening |= zip(digests, opening, strict=True)
        tokens_of, start = {}, 0
        for name, pool in sets.items():
            tokens_of[name] = tokens[start : start + len(pool)]
            start += len(pool)
        return tokens_of

    def _opens_thinking(self, text: str) -> bool:
        """Return whether a prompt's text ends by opening the thinking (`<think>`)."""
        opening = self.marker.replace("</", "<", 1)
        return opening != self.marker and text.rstrip().endswith(opening)

    def _key(self, prompts: Sequence[Prompt]) -> str:
        """Return a digest of everything that determines the tokens, as the key of the disk cache."""
        digest = hashlib.sha256()
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        tokenizer_text = backend.to_str() if backend is not None else repr(sorted(self.tokenizer.get_vocab().items()))
        special = {str(name): str(value) for name, value in self.tokenizer.special_tokens_map.items()}
        settings = {**asdict(self.chat), "template": self._template, "marker": self.marker, "rules": RULES_VERSION}
        tools = [list(self.tools_of(prompt)) for prompt in prompts] if self.tools_of is not _no_tools else []
        settings |= {"tools": tools} if any(tools) else {}
        for part in (type(self.tokenizer).__name__, tokenizer_text, json.dumps([special, settings], default=str)):
            digest.update(part.encode() + b"\0")  # a separator, so that different parts cannot join to the same bytes
        for prompt in prompts:
            digest.update(_digest(prompt))
        return digest.hexdigest()[:24]

    def _tokens(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of each text, with a single BOS at the start if the model uses one.

        A template writes all special tokens itself. To a plain text the tokenizer adds its prefix, unless the text
        already starts with it. An EOS that the tokenizer appends is removed: the model would take the text as ended.
        """
        if not texts:
            return []
        bare: list[list[int]] = self.tokenizer(list(texts), add_special_tokens=False)["input_ids"]
        bos, end = self.tokenizer.bos_token_id, self.tokenizer.eos_token_id
        if self._template is not None:
            # Drop a second BOS, which comes from a message that had already been rendered.
            return [ids[1:] if bos is not None and ids[:2] == [bos, bos] else ids for ids in bare]
        # A tokenizer that adds nothing to "a" adds nothing to any text.
        if self.tokenizer("a")["input_ids"] == self.tokenizer("a", add_special_tokens=False)["input_ids"]:
            return bare
        encoded: list[list[int]] = self.tokenizer(list(texts))["input_ids"]
        for ids, bare_ids in zip(encoded, bare, strict=True):
            if ids[-len(bare_ids) - 1 :] == [*bare_ids, end]:
                ids.pop()
            added = len(ids) - len(bare_ids)
            if bare_ids[:added] == ids[:added]:
                del ids[:added]
        return encoded

    def notes(self, prompts: Sequence[Prompt]) -> list[str]:
        """Return notes for the user: special tokens that rewards do not see, and prompts that open the thinking.

        Call `encode_all` on `prompts` first.
        """
        lines = []
        if dropped := self._dropped_tokens():
            remainder = f" and {len(dropped) - MAX_LISTED_TOKENS} more" if len(dropped) > MAX_LISTED_TOKENS else ""
            lines.append(
                "special tokens that decoding removes before rewards see a completion: "
                f"{', '.join(dropped[:MAX_LISTED_TOKENS])}{remainder}; a reward can find them only in "
                "completion_ids"
            )
        if opened := sum(self._opening[_digest(prompt)] for prompt in prompts):
            reason = "" if self._template is None else ", because the chat template opens the thinking"
            lines.append(
                f"prompts that end in {self.marker.replace('</', '<', 1)}: {opened} of {len(prompts)}{reason}; "
                f"their completions begin inside the thinking, and contain at most {self.marker}"
            )
        return lines

    def _dropped_tokens(self) -> list[str]:
        """Return the special tokens that `decode` drops, except stop tokens; reserved ones come last."""
        added = getattr(self.tokenizer, "added_tokens_decoder", {})
        ids = {*self.tokenizer.all_special_ids, *(number for number, token in added.items() if token.special)}
        special = [
            number
            for number in sorted(ids - self.stop_tokens)
            if not self.tokenizer.decode([number], skip_special_tokens=True)
        ]
        tokens: list[str] = self.tokenizer.convert_ids_to_tokens(special)
        return sorted(tokens, key=lambda token: "reserved" in token or "unused" in token)

    # --- completions -------------------------------------------------------------------------------------

    def sample(self, prompt: Prompt, rollout: Rollout, step: int) -> Sample:
        """Decode a rollout and return it as a sample for graders."""
        tokens = rollout.tokens
        completion = self.decode(tokens)
        answer = self._answer(prompt, tokens, completion)
        return Sample(prompt, completion, answer, tuple(tokens), rollout.truncated, step)

    def answer(self, prompt: Prompt, tokens: Sequence[int]) -> str:
        """Return the text of these tokens after the end of thinking; empty if thinking has started and not ended."""
        return self._answer(prompt, tokens, self.decode(tokens))

    def read(self, tokens: Sequence[int]) -> str:
        """Decode tokens that the model did not sample, without special tokens. A stop text in them has no effect."""
        text: str = self.tokenizer.decode(list(tokens), skip_special_tokens=True)
        return text

    def decode(self, tokens: Sequence[int]) -> str:
        """Decode completion tokens, without special tokens and without the stop text or stop token."""
        if tokens and tokens[-1] in self.stop_tokens:
            tokens = tokens[:-1]
        text = self.read(tokens)
        ends = [position for position in map(text.find, self.chat.stop) if position >= 0]
        return text[: min(ends)] if ends else text

    def _answer(self, prompt: Prompt, tokens: Sequence[int], completion: str) -> str:
        if self.marker in completion:
            return completion.rpartition(self.marker)[2]
        if self._marker_id is not None and self._marker_id in tokens:
            # A special token is not in the text: take everything after its last occurrence among the ids.
            return self.decode(tokens[len(tokens) - list(tokens)[::-1].index(self._marker_id) :])
        opening = self.marker.replace("</", "<", 1)
        if opening == self.marker:
            return completion
        if opening in completion:
            return ""
        key = _digest(prompt)
        if key not in self._opening:
            self._opening[key] = self._opens_thinking(self.text(prompt))
        return "" if self._opening[key] else completion


def _no_tools(prompt: Prompt) -> Sequence[Mapping[str, Any]]:
    return ()


@dataclass(frozen=True)
class StopTexts:
    """Test for stop texts in a completion. It runs after every token and therefore decodes only the last few tokens."""

    tokenizer: Any
    texts: tuple[str, ...]

    @property
    def window(self) -> int:
        """Number of trailing tokens to decode: one per character of a stop text, plus a margin."""
        return max(map(len, self.texts)) + 8

    def __call__(self, tokens: Sequence[int]) -> bool:
        """Return whether the last of these tokens contain a stop text."""
        tail: str = self.tokenizer.decode(list(tokens[-self.window :]), skip_special_tokens=True)
        return any(text in tail for text in self.texts)


def _digest(prompt: Prompt) -> bytes:
    """Return a digest of the parts of a prompt that are rendered: its text and messages."""
    content = json.dumps([prompt.text, [dict(message) for message in prompt.messages]])
    return hashlib.blake2b(content.encode(), digest_size=16).digest()


def _read_cache(path: Path) -> tuple[list[list[int]], list[bool]]:
    """Read from the cache each prompt's tokens, and for each prompt whether its rendering opens the thinking.

    Both lists are empty if the file cannot be read.
    """
    try:
        with np.load(path) as cached:
            tokens = [part.tolist() for part in np.split(cached["tokens"], np.cumsum(cached["lengths"])[:-1])]
            return tokens, cached["opening"].tolist()
    except (OSError, ValueError, KeyError, EOFError, BadZipFile):
        return [], []


def _write_cache(path: Path, tokens: Sequence[Sequence[int]], opening: Sequence[bool]) -> None:
    """Write tokens to the cache, ignoring disk errors."""
    # Write to a temporary name and rename, because several runs share the cache. `savez` appends .npz to a name without
    # it.
    unfinished = path.with_name(f"{path.stem}.{uuid.uuid4().hex}.part.npz")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        flat = np.fromiter((token for ids in tokens for token in ids), np.int32)
        lengths = np.array([len(ids) for ids in tokens], np.int64)
        np.savez(unfinished, tokens=flat, lengths=lengths, opening=np.array(opening, np.bool_))
        unfinished.replace(path)
    except OSError:
        unfinished.unlink(missing_ok=True)


def model_card_facts(rendering: Rendering) -> dict[str, str]:
    """Return the lines of a model card on prompts and stop texts."""
    stop = rendering.chat.stop
    return {"prompts": rendering.description, **({"completions end at": ", ".join(map(repr, stop))} if stop else {})}
