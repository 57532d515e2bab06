"""Reward `judge`: asks a language model behind an HTTP endpoint for a verdict on each completion."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from lightning_scalerl.cache import cache_dir
from lightning_scalerl.checks import ConfigurationError, error_line, not_negative, positive, whole_number
from lightning_scalerl.rollouts.grade import Charge, Grade, Sample
from lightning_scalerl.rollouts.prompt import Prompt
from lightning_scalerl.verify.judge_client import Answer, AnswerCache, Endpoint, JudgeError, question_key
from sweeps.redact import is_secret_name

log = logging.getLogger(__name__)

FIELD = "task.rewards: judge: "  # before a setting's name in errors

PROMPT = """You grade an answer to a question.

Question:
{question}

Reference answer:
{answer}

Answer to grade:
{completion}

Is the answer to grade right, which means equivalent to the reference answer? Reply with one line,
"Verdict: yes" or "Verdict: no"."""
PATTERN = (
    r"(?i)\b(?:verdict|score)\b\W{0,5}?(yes|no|true|false|correct|incorrect|pass|fail|-?\d+(?:\.\d+)?)(?![\w.]*\w)"
)
# Rewards for verdicts in words.
_REWARD_BY_WORD = {
    "yes": 1.0,
    "true": 1.0,
    "correct": 1.0,
    "pass": 1.0,
    "no": 0.0,
    "false": 0.0,
    "incorrect": 0.0,
    "fail": 0.0,
}
# Fields of a template. All other braces are plain text, because a judge's prompt may show JSON.
_TEMPLATE_FIELDS = re.compile(r"\{(prompt|question|answer|completion)\}")
# Settings that change neither a verdict nor its cost.
OPERATIONAL = frozenset({"url", "key_env", "cache", "timeout_s", "retries", "concurrency"})
# Number of characters at the end of a judge's answer that are searched for a verdict.
_MAX_CHARACTERS = 20_000
# Seconds that a worker may need beyond the limit on an answer, to start a request and to write the cache.
_OVERHEAD_S = 2.0


@dataclass(frozen=True)
class Judge:
    """Rewards a completion by the verdict of a language model, from 0 to 1.

    All completions of a group are sent at the same time. An answer without a verdict, a timeout or a refused
    connection is an error of the infrastructure, never a reward of 0.

    Args:
        url: endpoint of OpenAI's chat completions API: `http://host:8000`, `https://host/v1` or the whole path.
        model: the judge's name at the endpoint.
        prompt: template of the message with {completion} (the text after the thinking), and optionally {question},
            {prompt} (the question with the task's instruction) and {answer} (the row's answer).
        system: system message; empty for none.
        pattern: regular expression with one group; its last match in the judge's answer is the verdict, a number or one
            of yes, no, true, false, correct, incorrect, pass, fail.
        low, high: numeric verdicts that are rewarded with 0 and 1. A verdict between them is rewarded in proportion; a
            verdict outside of them counts as no verdict.
        temperature: sampling temperature of the judge.
        max_tokens: limit on the judge's answer in tokens.
        options: further fields of the request, such as {seed: 0}; null removes a field, such as {max_tokens: null}.
        price_prompt, price_completion: price of a million tokens of requests and of answers, in any unit.
        key_env: environment variable that holds the endpoint's API key.
        timeout_s: limit in seconds on one answer, retries included; `verify.timeout_s` must be a little longer.
        retries: number of further attempts after a connection error, or after a status such as 429 or 5xx.
        concurrency: maximum number of concurrent requests in each of the `verify.workers` processes.
        cache: folder for stored answers; empty for a folder in the user's cache folder, None for no cache.
        label: prefix of the names of recorded values, set by the reward's `name`.

    Raises:
        ConfigurationError: a setting is missing or invalid.
    """

    url: str = ""
    model: str = ""
    prompt: str = PROMPT
    system: str = ""
    pattern: str = PATTERN
    low: float = 0.0
    high: float = 1.0
    temperature: float = 0.0
    max_tokens: int = 512
    options: Mapping[str, Any] = field(default_factory=dict)
    price_prompt: float = 0.0
    price_completion: float = 0.0
    key_env: str = ""
    timeout_s: float = 60.0
    retries: int = 4
    concurrency: int = 32
    cache: str | None = ""
    label: str = "judge"

    def __post_init__(self) -> None:
        _check_url(self.url)
        _check_text("model", self.model, "give the judge's name at the endpoint")
        _check_text("prompt", self.prompt, "give a template with {completion}")
        if "{completion}" not in self.prompt:
            raise _setting_error("prompt", self.prompt[:80], "must contain {completion}, the text to judge")
        try:
            groups = re.compile(self.pattern).groups
        except (re.error, TypeError) as error:
            raise _setting_error("pattern", self.pattern, f"must be a regular expression ({error})") from error
        if groups != 1:
            raise _setting_error("pattern", self.pattern, f"must have one group, the verdict, not {groups}")
        for name in ("price_prompt", "price_completion", "temperature"):
            not_negative(f"{FIELD}{name}", getattr(self, name))
        for name in ("low", "high"):
            if isinstance(value := getattr(self, name), bool) or not isinstance(value, int | float):
                raise _setting_error(name, value, "must be a number")
        if not self.low < self.high:
            raise _setting_error("low", self.low, f"must be below {FIELD}high, {self.high!r}")
        if not isinstance(self.options, Mapping):
            raise _setting_error(
                "options", self.options, "must be a mapping of fields of the request, such as {seed: 0}"
            )
        whole_number(f"{FIELD}max_tokens", self.max_tokens)
        whole_number(f"{FIELD}retries", self.retries, least=0)
        whole_number(f"{FIELD}concurrency", self.concurrency)
        positive(f"{FIELD}timeout_s", self.timeout_s)

    @property
    def longest_s(self) -> float:
        """Maximum wall-clock seconds of one answer, retries included."""
        return self.timeout_s + _OVERHEAD_S

    @property
    def needs_answer(self) -> bool:
        """True if the template contains {answer}. Every row of the data must then have an answer."""
        return "{answer}" in self.prompt

    @property
    def endpoint(self) -> Endpoint:
        """Endpoint with the limits on its requests."""
        return Endpoint(self.url, self.key_env, self.timeout_s, self.retries, self.concurrency)

    @property
    def answers(self) -> AnswerCache | None:
        """Cache of answers, or None if `cache` is None."""
        if self.cache is None:
            return None
        return AnswerCache(Path(self.cache).expanduser() if self.cache else cache_dir() / "judge")

    def ready(self) -> Sequence[str]:
        """Test the endpoint with a short question, which costs a few tokens; return a line about the answer time.

        Raises:
            ConfigurationError: the key's variable is not set, the cache cannot be written, or the endpoint does not
                answer.
        """
        if self.key_env and not os.environ.get(self.key_env):
            raise _setting_error(
                "key_env", self.key_env, "this environment variable is not set; set it to the endpoint's key"
            )
        if self.answers is not None:
            try:
                self.answers.check_writable()
            except OSError as error:
                raise _setting_error(
                    "cache", str(self.answers.folder), f"cannot be written ({error.strerror})"
                ) from error
        (answer,) = self.endpoint.ask([self._body("Reply with the word ready.")])
        if isinstance(answer, JudgeError):
            raise _setting_error(
                "url", self.endpoint.safe_address, f"does not answer ({answer}); start the endpoint or mend the url"
            )
        return [f"judge: {self.model} at {self.endpoint.safe_address} answers in {answer.seconds:.2g} s"]

    def needs_group(self, prompt: Prompt) -> bool:
        """Return True: all completions of a group are sent at the same time."""
        return True

    def grade(self, sample: Sample) -> Grade:
        """Grade one completion.

        Raises:
            JudgeError: the judge gives no verdict.
        """
        (grade,) = self.grade_group([sample])
        if isinstance(grade, Exception):
            raise grade
        return grade

    def grade_group(self, samples: Sequence[Sample]) -> list[Grade | Exception]:
        """Grade all completions of a group: from the cache, or by concurrent requests. Equal requests are sent once."""
        requests = [self._body(self._message(sample)) for sample in samples]
        keys = list(map(question_key, requests))
        bodies = dict(zip(keys, requests, strict=True))
        answers: dict[str, Answer | JudgeError] = {key: answer for key in bodies if (answer := self._cached(key))}
        missing = [key for key in bodies if key not in answers]
        if missing:
            # Each answer is stored when it arrives: if the process dies, the answers so far are not paid for again.
            new_answers = self.endpoint.ask(
                [bodies[key] for key in missing], lambda number, answer: self._store_answer(missing[number], answer)
            )
            answers |= zip(missing, new_answers, strict=True)
        first_use = {key: keys.index(key) for key in missing}  # index of the first completion with each question
        return [self._grade(key, answers[key], first_use.get(key) == number) for number, key in enumerate(keys)]

    def _cached(self, key: str) -> Answer | None:
        """Return the cached answer if it has a verdict under the current pattern."""
        answer = None if self.answers is None else self.answers.get(key)
        return None if answer is None or self._verdict(answer.text) is None else answer

    def _store_answer(self, key: str, answer: Answer | JudgeError) -> Answer | JudgeError:
        """Store a new answer and return the stored answer, or an error if the new answer has no verdict."""
        if isinstance(answer, JudgeError):
            return answer
        if self._verdict(answer.text) is None:
            reason = "no verdict in its answer" if answer.complete else "its answer was cut off at max_tokens"
            excerpt = " ".join(answer.text.split())[-120:]
            return JudgeError(f"judge {self.model}: {reason} ({excerpt!r})", (self._charge("", answer, True),))
        if self.answers is None:
            return answer
        try:
            stored = self.answers.put(key, answer)
            # A stored answer without a verdict under the current pattern is replaced.
            return stored if self._verdict(stored.text) is not None else self.answers.put(key, answer, replace=True)
        except OSError as error:
            log.warning("judge: an answer could not be cached and will be paid for again (%s)", error_line(error))
            return answer

    def _grade(self, key: str, answer: Answer | JudgeError, paid: bool) -> Grade | Exception:
        """Return the grade of one completion, or its error.

        Args:
            key: hash of the question.
            answer: the judge's answer.
            paid: whether the request was made for this completion; equal completions of a group share one request.
        """
        if isinstance(answer, JudgeError):
            return answer if paid else JudgeError(str(answer))
        charge = self._charge("" if self.answers is None and paid else key, answer, paid)
        costs: dict[str, float] = {
            "prompt_tokens": charge.prompt_tokens,
            "completion_tokens": charge.completion_tokens,
        }
        if self.price_prompt or self.price_completion:
            costs["cost"] = charge.cost
        # The seconds are left out, because they differ between two runs with the same seed.
        parts = {f"{self.label}_{name}": float(value) for name, value in costs.items()}
        return Grade(self._verdict(answer.text), parts, extra={self.label: answer.text}, charges=(charge,))

    def _charge(self, key: str, answer: Answer, paid: bool) -> Charge:
        price = self.price_prompt * answer.prompt_tokens + self.price_completion * answer.completion_tokens
        return Charge(key, answer.seconds, answer.prompt_tokens, answer.completion_tokens, price / 1e6, paid)

    def _message(self, sample: Sample) -> str:
        """Fill in the template; braces in a completion are not read as fields."""
        prompt = sample.prompt
        values = {
            "prompt": prompt.text,
            "question": prompt.question or prompt.text,
            "answer": str(prompt.answer),
            "completion": sample.answer,
        }
        return _TEMPLATE_FIELDS.sub(lambda match: values[match[1]], self.prompt)

    def _body(self, message: str) -> dict[str, Any]:
        system = [{"role": "system", "content": self.system}] if self.system else []
        body = {
            "model": self.model,
            "messages": [*system, {"role": "user", "content": message}],
            "temperature": self.temperature,
            "max_tokens": self.max_tokens,
            **self.options,
        }
        return {name: value for name, value in body.items() if value is not None}

    def _verdict(self, text: str) -> float | None:
        """Return the reward that a judge's answer states, or None if it states none."""
        matches = list(re.finditer(self.pattern, text[-_MAX_CHARACTERS:]))
        word = ((matches[-1][1] or "") if matches else "").strip().lower()
        if word in _REWARD_BY_WORD:
            return _REWARD_BY_WORD[word]
        try:
            reward = (float(word) - self.low) / (self.high - self.low)
        except ValueError:
            return None
        return reward if 0 <= reward <= 1 else None


def judge_identity(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that affect a verdict or its cost. The address and the key are not among them."""
    return {name: value for name, value in settings.items() if name not in OPERATIONAL}


def _setting_error(name: str, value: Any, remedy: str) -> ConfigurationError:
    return ConfigurationError(f"{FIELD}{name}: {value!r} {remedy}")


def _check_text(name: str, value: Any, remedy: str) -> None:
    if not isinstance(value, str) or not value.strip():
        raise _setting_error(name, value, f"is no text; {remedy}")


def _check_url(url: Any) -> None:
    """Check an endpoint's address.

    Raises:
        ConfigurationError: it is missing, is not http or https, or contains a secret.
    """
    _check_text("url", url, "give the endpoint, such as http://localhost:8000/v1")
    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # the port is not a number
        raise _setting_error("url", url, "must be an address, such as http://localhost:8000/v1") from None
    # Checked first, because the other messages print the address, and with it the login or key.
    if "@" in parts.netloc or any(is_secret_name(name) for name, _ in parse_qsl(parts.query)):
        raise ConfigurationError(f"{FIELD}url: it contains a secret; put that into a variable, named by key_env")
    if not valid:
        raise _setting_error("url", url, "must begin with http:// or https:// and name a host")
