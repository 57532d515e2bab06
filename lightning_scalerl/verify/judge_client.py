"""HTTP requests to a judge by OpenAI's chat completions API, with retries, a time limit and a cache on disk."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import random
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from lightning_scalerl.checks import error_line
from lightning_scalerl.rollouts.grade import Charge
from sweeps.redact import MASK, redact
from sweeps.run.files import read_json, write_atomically

if TYPE_CHECKING:
    from aiohttp import ClientSession

# HTTP statuses after which a retry may succeed: a timeout of the server, too many requests, a failure of the server.
_RETRIED_STATUSES = frozenset({408, 409, 425, 429, *range(500, 600)})
# First pause before a retry, and longest pause, in seconds; each pause is twice as long as the one before it. Pauses
# are shortened at random by up to a half, so that many workers do not retry at the same moment.
_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 20.0
_MAX_BYTES = 4 * 2**20  # maximum size of a response
_LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")  # never behind a proxy
_EXCERPT_CHARACTERS = 200  # number of characters of a failed response that the error message shows


@dataclass(frozen=True)
class Answer:
    """Answer of a judge, with its cost.

    Attributes:
        text: content of the judge's message.
        seconds: time of the requests, failed attempts included.
        prompt_tokens, completion_tokens: numbers of tokens that the endpoint reports; 0 if it reports none.
        complete: whether the judge stopped by itself, not at its token limit.
    """

    text: str
    seconds: float
    prompt_tokens: int = 0
    completion_tokens: int = 0
    complete: bool = True


class JudgeError(RuntimeError):
    """Raised when a judge gave no verdict: an error of the infrastructure, never a reward of 0.

    Attributes:
        charges: costs of the attempts, which count even without a verdict.
    """

    def __init__(self, message: str, charges: tuple[Charge, ...] = ()) -> None:
        super().__init__(message)
        self.charges = charges

    @classmethod
    def wrap(cls, error: Exception, charges: tuple[Charge, ...]) -> JudgeError:
        """Convert another reward's error, with its notes, to attach the charges of judges in the same weighted sum."""
        judged = cls(error_line(error), charges)
        for note in getattr(error, "__notes__", ()):
            judged.add_note(note)
        return judged


# Function that is called with the index of a request and its result, and returns the result to use.
ResultHook = Callable[[int, Answer | JudgeError], Answer | JudgeError]


def _keep_result(number: int, result: Answer | JudgeError) -> Answer | JudgeError:
    return result


@dataclass(frozen=True)
class Endpoint:
    """Endpoint of OpenAI's chat completions API.

    Args:
        url: the endpoint's address, `http://host:8000`, `https://host/v1` or the whole path.
        key_env: environment variable that holds the API key; empty for none.
        timeout_s: limit in seconds on one answer, all retries and pauses included.
        retries: number of further attempts after a connection error, or after a status such as 429 or 5xx.
        concurrency: maximum number of concurrent requests of each process.
    """

    url: str
    key_env: str
    timeout_s: float
    retries: int
    concurrency: int

    @property
    def address(self) -> str:
        """Complete address of the requests."""
        parts = urlsplit(self.url)
        path = parts.path.rstrip("/")
        if not path.endswith("/chat/completions"):
            path = (path or "/v1") + "/chat/completions"
        return parts._replace(path=path).geturl()

    @property
    def safe_address(self) -> str:
        """Address for error messages, without query and fragment, which may contain secrets."""
        return urlsplit(self.address)._replace(query="", fragment="").geturl()

    def ask(
        self, bodies: Sequence[Mapping[str, Any]], on_result: ResultHook = _keep_result
    ) -> list[Answer | JudgeError]:
        """Send all requests, at most `concurrency` at a time, and return one answer or error per request, in order.

        Args:
            bodies: the requests.
            on_result: called as soon as a request has ended, with its index and result; returns the result to use.
        """
        # Run in a thread of its own, because a notebook's thread already has a running event loop.
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(lambda: asyncio.run(self._ask_all(bodies, on_result))).result()

    async def _ask_all(self, bodies: Sequence[Mapping[str, Any]], on_result: ResultHook) -> list[Answer | JudgeError]:
        from aiohttp import ClientSession, ClientTimeout, TCPConnector

        semaphore = asyncio.Semaphore(self.concurrency)
        # `_ask` enforces the time limit. aiohttp's own limit, which is five minutes by default, is turned off.
        connector, no_limit = TCPConnector(limit=self.concurrency), ClientTimeout(total=None)
        async with ClientSession(connector=connector, timeout=no_limit) as session:

            async def ask_one(number: int) -> Answer | JudgeError:
                async with semaphore:
                    return on_result(number, await self._ask(session, bodies[number]))

            return list(await asyncio.gather(*map(ask_one, range(len(bodies)))))

    async def _ask(self, session: ClientSession, body: Mapping[str, Any]) -> Answer | JudgeError:
        """Send a request until it is answered, fails permanently, or no attempt or time is left."""
        from aiohttp import ClientError

        deadline, request_s, reason, pause_s = time.monotonic() + self.timeout_s, 0.0, "", 0.0
        for attempt in range(self.retries + 1):
            if attempt:
                planned_s = min(_LONGEST_PAUSE_S, _PAUSE_S * 2 ** (attempt - 1)) * random.uniform(0.5, 1.0)
                pause_s = max(planned_s, pause_s)
                if time.monotonic() + pause_s >= deadline:
                    reason += f"; no time is left of timeout_s={self.timeout_s:g}"
                    break
                await asyncio.sleep(pause_s)
            began, retryable, pause_s = time.monotonic(), True, 0.0
            try:
                async with asyncio.timeout(deadline - began):
                    status, headers, content = await self._post(session, body)
                if status == 200:
                    answer = _parse_answer(content)
                    return _with_seconds(answer, request_s + time.monotonic() - began)
                retryable, pause_s = status in _RETRIED_STATUSES, _retry_after(headers)
                reason = f"status {status} {self._safe_excerpt(content)}".rstrip()
            except TimeoutError:
                reason, retryable = f"no answer within timeout_s={self.timeout_s:g}", False
            except (ClientError, OSError, ValueError, LookupError, TypeError) as error:
                reason = self._safe_excerpt(f"{type(error).__name__}: {error}".encode())
            request_s += time.monotonic() - began
            if not retryable:
                break
        return JudgeError(f"judge at {self.safe_address}: {reason}", (Charge("", request_s),) if request_s else ())

    async def _post(self, session: ClientSession, body: Mapping[str, Any]) -> tuple[int, Mapping[str, str], bytes]:
        """Send one request and return the status, the headers and the body."""
        key = os.environ.get(self.key_env, "") if self.key_env else ""
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        parts = urlsplit(self.address)
        host = parts.hostname or ""
        proxy = None if host in _LOCAL_HOSTS or proxy_bypass(host) else getproxies().get(parts.scheme)
        # A redirect would send the key elsewhere.
        post = session.post(self.address, json=body, headers=headers, proxy=proxy, allow_redirects=False)
        async with post as response:
            content = b""
            async for chunk in response.content.iter_any():
                content += chunk
                if len(content) > _MAX_BYTES:
                    raise ValueError(f"an answer of more than {_MAX_BYTES} bytes")
            return response.status, response.headers, content

    def _safe_excerpt(self, content: bytes) -> str:
        """Return the beginning of a message as one line without secrets."""
        text = " ".join(content[: 10 * _EXCERPT_CHARACTERS].decode(errors="replace").split())
        key = os.environ.get(self.key_env, "") if self.key_env else ""
        return redact(text.replace(key, MASK) if key else text)[:_EXCERPT_CHARACTERS]


def _parse_answer(content: bytes) -> Answer:
    """Parse the body of an answer; its `seconds` are 0.

    Raises:
        ValueError: the body is not an answer of OpenAI's chat completions API.
    """
    try:
        reply = json.loads(content)
        choice = reply["choices"][0]
        text = choice["message"].get("content")
        usage = reply.get("usage") or {}
        sent, received = (int(usage.get(name) or 0) for name in ("prompt_tokens", "completion_tokens"))
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        excerpt = " ".join(content.decode(errors="replace").split())[:80]
        raise ValueError(f"an answer that is not of OpenAI's chat form ({excerpt!r})") from error
    return Answer(
        text if isinstance(text, str) else "", 0.0, sent, received, complete=choice.get("finish_reason") != "length"
    )


def _with_seconds(answer: Answer, seconds: float) -> Answer:
    return Answer(answer.text, seconds, answer.prompt_tokens, answer.completion_tokens, answer.complete)


def _retry_after(headers: Mapping[str, str]) -> float:
    """Return the seconds that the endpoint asks to wait (header Retry-After); 0 if it states no number of seconds."""
    with suppress(ValueError):
        return max(0.0, float(headers.get("Retry-After", "0")))
    return 0.0


@dataclass(frozen=True)
class AnswerCache:
    """Answers on disk, in one file per question, named by the question's hash. Several processes may share a folder.

    A file is complete or absent, even after kill -9. The first answer to a question is kept, so that all processes
    count
    the same cost for it. Answers are never removed; a file takes less than about 4 KiB.
    """

    folder: Path

    def get(self, key: str) -> Answer | None:
        """Return the answer to a question; None if there is none, or its file is unreadable."""
        with suppress(TypeError):
            answer = Answer(**read_json(self._path(key)))
            return answer if isinstance(answer.text, str) else None
        return None

    def put(self, key: str, answer: Answer, replace: bool = False) -> Answer:
        """Store an answer. Return the answer that is stored afterwards, which may be an earlier one of another process.

        Args:
            key: hash of the question.
            answer: the answer.
            replace: whether to replace an answer that is already stored.
        """
        path = self._path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        new_file = path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}.new")
        write_atomically(new_file, json.dumps(asdict(answer)))
        try:
            if not replace:
                # A link, unlike a rename, fails if the file exists. Where links are not supported, the last answer
                # replaces earlier ones.
                with suppress(PermissionError, NotImplementedError):
                    path.hardlink_to(new_file)
                    return answer
            new_file.replace(path)
        except FileExistsError:
            return self.get(key) or self.put(key, answer, replace=True)
        finally:
            new_file.unlink(missing_ok=True)
        return answer

    def check_writable(self) -> None:
        """Check that the folder can be written.

        Raises:
            OSError: it cannot be written.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        trial = self.folder / f".{uuid.uuid4().hex[:12]}.new"
        trial.touch()
        trial.unlink()

    def _path(self, key: str) -> Path:
        return self.folder / key[:2] / f"{key}.json"


def question_key(body: Mapping[str, Any]) -> str:
    """Return the hash of a request: the judge's model, its prompt with the completion, and the sampling settings."""
    return hashlib.sha256(json.dumps(body, sort_keys=True, ensure_ascii=False).encode()).hexdigest()
