"""Requests to a judge: an HTTP endpoint of OpenAI's chat form, with retries, a time limit and a cache on disk."""

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

# Statuses after which the same request may succeed: a timeout of the server, too many requests, a server that fails.
_AGAIN = frozenset({408, 409, 425, 429, *range(500, 600)})
# Seconds of the first pause; each further one is twice as long, up to the longest. Shortened at random by up to a half,
# so that many workers do not retry at the same moment.
_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 20.0
_MOST_BYTES = 4 * 2**20
_HERE = ("localhost", "127.0.0.1", "::1")  # never behind a proxy
_SHOWN = 200  # characters of an error's body


@dataclass(frozen=True)
class Answer:
    """Answer of a judge, with its cost.

    Attributes:
        text: content of its message.
        seconds: time of its requests, failed attempts included.
        prompt_tokens, completion_tokens: as the endpoint reports them; 0 if it does not.
        complete: whether the judge stopped by itself, and not at its limit of tokens.
    """

    text: str
    seconds: float
    prompt_tokens: int = 0
    completion_tokens: int = 0
    complete: bool = True


class JudgeError(RuntimeError):
    """A judge gave no verdict: an error of the infrastructure, never a reward of 0.

    Attributes:
        charges: costs of the attempts, which are due without a verdict too.
    """

    def __init__(self, message: str, charges: tuple[Charge, ...] = ()) -> None:
        super().__init__(message)
        self.charges = charges

    @classmethod
    def of(cls, error: Exception, charges: tuple[Charge, ...]) -> JudgeError:
        """Return the error of another reward, notes included, with the charges of the judges in the same sum."""
        judged = cls(error_line(error), charges)
        for note in getattr(error, "__notes__", ()):
            judged.add_note(note)
        return judged


# (index of the request, its result) -> the result to use.
Kept = Callable[[int, Answer | JudgeError], Answer | JudgeError]


def _unchanged(number: int, result: Answer | JudgeError) -> Answer | JudgeError:
    return result


@dataclass(frozen=True)
class Endpoint:
    """Endpoint of OpenAI's chat form.

    Args:
        url: its address, `http://host:8000`, `https://host/v1` or the whole path.
        key_env: environment variable that holds the key; empty for none.
        timeout_s: limit in seconds on one answer, all retries and pauses included.
        retries: number of further attempts after a connection error, 429 or 5xx.
        concurrency: number of requests at the same time, per process.
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
    def shown(self) -> str:
        """Address as errors show it, without query and fragment."""
        return urlsplit(self.address)._replace(query="", fragment="").geturl()

    def ask(self, bodies: Sequence[Mapping[str, Any]], kept: Kept = _unchanged) -> list[Answer | JudgeError]:
        """Send all requests, at most `concurrency` at a time, and return one answer or error per request, in order.

        Args:
            bodies: the requests.
            kept: called as soon as a request has ended, with its index and result; returns the result to use.
        """
        # Run in a thread of its own, because a notebook's thread already has a running event loop.
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(lambda: asyncio.run(self._ask_all(bodies, kept))).result()

    async def _ask_all(self, bodies: Sequence[Mapping[str, Any]], kept: Kept) -> list[Answer | JudgeError]:
        from aiohttp import ClientSession, ClientTimeout, TCPConnector

        places = asyncio.Semaphore(self.concurrency)
        # `_ask` limits the whole time; aiohttp's own limit of five minutes would be a second one.
        connector, no_limit = TCPConnector(limit=self.concurrency), ClientTimeout(total=None)
        async with ClientSession(connector=connector, timeout=no_limit) as session:

            async def one(number: int) -> Answer | JudgeError:
                async with places:
                    return kept(number, await self._ask(session, bodies[number]))

            return list(await asyncio.gather(*map(one, range(len(bodies)))))

    async def _ask(self, session: ClientSession, body: Mapping[str, Any]) -> Answer | JudgeError:
        """Send a request until it is answered, fails permanently, or has no attempt or time left."""
        from aiohttp import ClientError

        deadline, spent_s, why, pause_s = time.monotonic() + self.timeout_s, 0.0, "", 0.0
        for attempt in range(self.retries + 1):
            if attempt:
                planned_s = min(_LONGEST_PAUSE_S, _PAUSE_S * 2 ** (attempt - 1)) * random.uniform(0.5, 1.0)
                pause_s = max(planned_s, pause_s)
                if time.monotonic() + pause_s >= deadline:
                    why += f"; no time is left of timeout_s={self.timeout_s:g}"
                    break
                await asyncio.sleep(pause_s)
            began, again, pause_s = time.monotonic(), True, 0.0
            try:
                async with asyncio.timeout(deadline - began):
                    status, headers, raw = await self._post(session, body)
                if status == 200:
                    answer = _answer(raw)
                    return _with_seconds(answer, spent_s + time.monotonic() - began)
                again, pause_s = status in _AGAIN, _retry_after(headers)
                why = f"status {status} {self._clean(raw)}".rstrip()
            except TimeoutError:
                why, again = f"no answer within timeout_s={self.timeout_s:g}", False
            except (ClientError, OSError, ValueError, LookupError, TypeError) as error:
                why = self._clean(f"{type(error).__name__}: {error}".encode())
            spent_s += time.monotonic() - began
            if not again:
                break
        return JudgeError(f"judge at {self.shown}: {why}", (Charge("", spent_s),) if spent_s else ())

    async def _post(self, session: ClientSession, body: Mapping[str, Any]) -> tuple[int, Mapping[str, str], bytes]:
        """Send one request and return the status, the headers and the body."""
        key = os.environ.get(self.key_env, "") if self.key_env else ""
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        parts = urlsplit(self.address)
        host = parts.hostname or ""
        proxy = None if host in _HERE or proxy_bypass(host) else getproxies().get(parts.scheme)
        # A redirect would send the key elsewhere.
        post = session.post(self.address, json=body, headers=headers, proxy=proxy, allow_redirects=False)
        async with post as response:
            raw = b""
            async for chunk in response.content.iter_any():
                raw += chunk
                if len(raw) > _MOST_BYTES:
                    raise ValueError(f"an answer of more than {_MOST_BYTES} bytes")
            return response.status, response.headers, raw

    def _clean(self, raw: bytes) -> str:
        """Return the beginning of a message as one line without secrets."""
        text = " ".join(raw[: 10 * _SHOWN].decode(errors="replace").split())
        key = os.environ.get(self.key_env, "") if self.key_env else ""
        return redact(text.replace(key, MASK) if key else text)[:_SHOWN]


def _answer(raw: bytes) -> Answer:
    """Read the body of an answer.

    Raises:
        ValueError, LookupError, TypeError: it is not of OpenAI's chat form.
    """
    try:
        reply = json.loads(raw)
        choice = reply["choices"][0]
        text = choice["message"].get("content")
        usage = reply.get("usage") or {}
        sent, received = (int(usage.get(name) or 0) for name in ("prompt_tokens", "completion_tokens"))
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        excerpt = " ".join(raw.decode(errors="replace").split())[:80]
        raise ValueError(f"an answer that is not of OpenAI's chat form ({excerpt!r})") from error
    return Answer(
        text if isinstance(text, str) else "", 0.0, sent, received, complete=choice.get("finish_reason") != "length"
    )


def _with_seconds(answer: Answer, seconds: float) -> Answer:
    return Answer(answer.text, seconds, answer.prompt_tokens, answer.completion_tokens, answer.complete)


def _retry_after(headers: Mapping[str, str]) -> float:
    """Return the seconds that the endpoint asks to wait, 0 if it does not or names a date."""
    with suppress(ValueError):
        return max(0.0, float(headers.get("Retry-After", "0")))
    return 0.0


@dataclass(frozen=True)
class AnswerCache:
    """Answers on disk, one file per question, named by its hash. Several processes may share a folder.

    A file is complete or absent, also after kill -9. The first answer to a question stays, so that all processes count
    the same cost for it. Nothing is ever removed: a question takes one file of less than about 4 KiB.
    """

    folder: Path

    def get(self, key: str) -> Answer | None:
        """Return the answer to a question; None if there is none, or its file is unreadable."""
        with suppress(TypeError):
            answer = Answer(**read_json(self._path(key)))
            return answer if isinstance(answer.text, str) else None
        return None

    def put(self, key: str, answer: Answer, replace: bool = False) -> Answer:
        """Store an answer, and return the one that is stored: another process may have been first.

        Args:
            key: hash of the question.
            answer: the answer.
            replace: whether to replace an earlier answer.
        """
        path = self._path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}.new")
        write_atomically(new, json.dumps(asdict(answer)))
        try:
            if not replace:
                # A link, unlike a rename, fails if the file exists. Without links the last answer stays.
                with suppress(PermissionError, NotImplementedError):
                    path.hardlink_to(new)
                    return answer
            new.replace(path)
        except FileExistsError:
            return self.get(key) or self.put(key, answer, replace=True)
        finally:
            new.unlink(missing_ok=True)
        return answer

    def check(self) -> None:
        """Check that the folder can be written.

        Raises:
            OSError: it cannot.
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
