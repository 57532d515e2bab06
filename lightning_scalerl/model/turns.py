"""Checks whether a chat template can be used over several turns, and renders the text between two turns of the model.

A rollout of several turns is never tokenised again: its sampled tokens stay as they are, and the tokens that the
template writes after a turn are appended. The result is the same as if the template had rendered the whole
conversation, but only if the template leaves earlier turns unchanged. Templates that remove earlier thinking change
them (Qwen3, DeepSeek-R1; prime-rl#1334, trl#6361).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lightning_scalerl.checks import ConfigurationError
from lightning_scalerl.model.bounded import BoundedError, BoundedWorker
from lightning_scalerl.model.chat import Rendering

Message = Mapping[str, Any]

# Messages of the example conversation. No message is part of another, so that a search for one finds only this one.
_QUESTION, _THOUGHT, _ANSWERS = "How many?", "Let me see.", ("First one.", "Second one.", "Third one.")
_REPLIES = (("Alpha.",), ("Beta.", "Gamma."), ("Delta.",))
# Number of characters of a rendering that an error message quotes.
_SHOWN = 60


class Turns:
    """Renders the texts between turns with the chat template of a `Rendering`.

    Args:
        rendering: tokenizer and chat settings.
        tools: schemas of tools for the template.
        role: role of the messages between two turns of the model, "tool" or "user".
        example: text that the model's example turns contain, such as a tool call.

    Raises:
        ConfigurationError: the template refuses such a conversation or rewrites earlier turns.
    """

    def __init__(
        self, rendering: Rendering, tools: Sequence[Mapping[str, Any]] = (), role: str = "user", example: str = ""
    ) -> None:
        self._rendering, self._tools, self._role = rendering, tools, role
        self._worker = BoundedWorker[Sequence[Message]](lambda messages: rendering.conversation(messages, tools))
        self._answer = ""
        if rendering.template is None:
            return
        try:
            self._try_template(rendering.template, example)
        except BaseException:
            self.close()
            raise

    def _try_template(self, template: str, example: str) -> None:
        """Check the template on an example conversation, whose first model turn `following` uses again."""
        rendering, tools = self._rendering, self._tools
        opening = rendering.marker.replace("</", "<", 1)
        # If the template has no `<think>`, assume that its model does not think: a thought would be ordinary text.
        thinks = rendering.marker in template and rendering.chat.thinking is not False
        first_prompt = self._render([[_user(_QUESTION)]], "the first turn")[0]
        hidden_tools = [name for tool in tools if (name := tool["function"]["name"]) not in first_prompt]
        if hidden_tools:
            raise ConfigurationError(
                f"chat.template: the template of {rendering.owner} does not show the tool {hidden_tools[0]!r} to the "
                "model; give chat.template a file that renders tools, or describe them in the prompt (convention plain)"
            )
        thought = ""
        if thinks:
            opened = first_prompt.rstrip().endswith(opening)
            thought = f"{'' if opened else opening + chr(10)}{_THOUGHT}\n{rendering.marker}\n\n"
        self._answer = f"{thought}{_ANSWERS[0]}{example}"
        self._check([f"{thought}{answer}{example}" for answer in _ANSWERS], first_prompt)

    def following(self, replies: Sequence[Sequence[str]], names: Sequence[Sequence[str]] = ()) -> list[str]:
        """Return, for each conversation, the text between the model's turn and the beginning of its next turn.

        The text begins with the end of the turn, such as `<|im_end|>`, if the template writes one.

        Args:
            replies: for each conversation, the texts of the messages that answer the model's turn.
            names: for each conversation, the names of the tools that gave these answers; some templates (Hermes) need
                them. Without names, the first tool's name is used.

        Raises:
            ConfigurationError: the template refuses a message.
        """
        if self._rendering.template is None:
            return ["".join(texts) for texts in replies]
        start = [_user(_QUESTION), _assistant(self._answer)]
        tool_names = names or [()] * len(replies)
        answers = [self._messages(*answer) for answer in zip(replies, tool_names, strict=True)]
        conversations = [[_user(_QUESTION)], *([*start, *messages] for messages in answers)]
        question_text, *renderings = self._render(conversations, "an answer to the model's turn")
        return [text[len(question_text) + len(self._answer) :] for text in renderings]

    def following_tokens(
        self, replies: Sequence[Sequence[str]], sampled: Sequence[Sequence[int]], names: Sequence[Sequence[str]] = ()
    ) -> list[list[int]]:
        """Return the tokens to append to the model's turns.

        Args:
            replies, names: see `following`.
            sampled: the tokens of each conversation's latest turn. If a turn ended with a stop token, the stop token
                that the template writes is left out.
        """
        tokens: list[list[int]] = []
        for text, turn in zip(self.following(replies, names), sampled, strict=True):
            ids: list[int] = self._rendering.tokenizer(text, add_special_tokens=False)["input_ids"] if text else []
            stop = self._rendering.stop_tokens
            tokens.append(ids[1:] if turn and ids and turn[-1] in stop and ids[0] in stop else ids)
        return tokens

    def close(self) -> None:
        """End the process in which the template runs."""
        self._worker.close()

    def _check(self, answers: Sequence[str], first_prompt: str) -> None:
        """Check on an example that the rendering up to a turn is the beginning of that up to the next turn."""
        messages = [_user(_QUESTION)]
        conversations = []
        for answer, texts in zip(answers, _REPLIES, strict=True):
            messages = [*messages, _assistant(answer), *self._messages(texts)]
            conversations.append(messages)
        following = self.following(_REPLIES)
        rendered = first_prompt
        for number, next_rendered in enumerate(self._render(conversations, "several turns"), 1):
            sampled = rendered + answers[number - 1]
            if not next_rendered.startswith(sampled):
                self._refuse(sampled, next_rendered, f"rewrites earlier turns: once turn {number} is answered")
            if next_rendered[len(sampled) :] != following[number - 1]:
                self._refuse(
                    sampled + following[number - 1], next_rendered, f"does not write the same after turn {number}"
                )
            rendered = next_rendered
        if any(
            text not in next_rendered
            for texts, next_rendered in zip(_REPLIES, following, strict=True)
            for text in texts
        ):
            raise ConfigurationError(
                f"chat.template: the template of {self._rendering.owner} leaves out messages of {self._role!r}; give "
                "chat.template a file that writes them, or use an environment whose answers are messages of the user"
            )

    def _refuse(self, expected: str, actual: str, problem: str) -> None:
        position = next((at for at, (a, b) in enumerate(zip(expected, actual, strict=False)) if a != b), len(actual))
        expected_excerpt = expected[position : position + _SHOWN]
        marker = self._rendering.marker
        thinking = f" and keeps the thinking up to {marker}" if marker in expected[position:] else ""
        raise ConfigurationError(
            f"chat.template: the template of {self._rendering.owner} {problem}, it has "
            f"{actual[position:][:_SHOWN]!r} where the rollout has {expected_excerpt!r} (character {position + 1}); "
            f"give chat.template a file that leaves earlier turns as they were{thinking}"
        )

    def _messages(self, texts: Sequence[str], names: Sequence[str] = ()) -> list[Message]:
        """Return the messages that answer a turn: one per text from tools, or a single message of the user."""
        if self._role == "user":
            return [_user("\n".join(texts))]
        first = self._tools[0]["function"]["name"] if self._tools else "tool"
        all_names = [*names, *(first for _ in texts)]
        return [
            {"role": self._role, "name": name or first, "content": text}
            for name, text in zip(all_names, texts, strict=False)
        ]

    def _render(self, conversations: Sequence[Sequence[Message]], description: str) -> list[str]:
        """Run the template, which is untrusted, in a process with limits."""
        try:
            return self._worker(conversations)
        except BoundedError as error:
            reason = " ".join(str(error).split())[:200]
            remedy = "an environment whose answers are messages of the user" if self._role != "user" else "one turn"
            raise ConfigurationError(
                f"chat.template: the template of {self._rendering.owner} does not take {description} with messages of "
                f"{self._role!r} ({reason}); give chat.template a file that does, or use {remedy}"
            ) from error


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}
