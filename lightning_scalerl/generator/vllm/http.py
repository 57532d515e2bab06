"""HTTP connection to a server of vLLM: one thread of its own, a time limit on every call, errors of one line."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

from aiohttp import ClientError, ClientResponse, ClientSession, ClientTimeout, TCPConnector

from lightning_scalerl.checks import CannotGoOnError, said
from sweeps.redact import MASK, redact
from sweeps.run.files import parse_json
from sweeps.terminal import one_line

T = TypeVar("T")

# A connection that is not there by then will not come.
CONNECT_S = 10.0
# Longest answer to a call, and longest text of an error, in bytes. A prompt of 100,000 tokens is scored in some 10 MB.
MOST_BYTES = 2**26
ERROR_BYTES = 2**16


class EngineLostError(CannotGoOnError):
    """Raised when a server cannot be reached, or answers what cannot be used; another connection may succeed."""


class RefusedError(EngineLostError):
    """Raised when a server answers a call with an error; `status` is HTTP's."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


def quoted(value: Any, limit: int = 200) -> str:
    """Return a text of a server as it is, cut to a limit; of anything else its type: it may be nested deep."""
    text = " ".join(value.split()) if isinstance(value, str) else ""
    if isinstance(value, dict) and isinstance(value.get("message"), str):
        return quoted(value["message"], limit)
    return text[:limit] if isinstance(value, str) else f"a {type(value).__name__}"


class Connection:
    """Calls to one server, from any thread; their work is done in a thread that this object owns.

    Args:
        address: the server's, such as `http://node7:8000`.
        token: sent with every call; empty for a server that asks for none.
    """

    def __init__(self, address: str, token: str = "") -> None:
        self.address = address.rstrip("/")
        self._token = token
        # Not compressed: what is small on the way could be of any size here.
        self._headers = {"Accept-Encoding": "identity", **({"Authorization": f"Bearer {token}"} if token else {})}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True, name="vllm-http")
        self._thread.start()
        self._session: ClientSession = self.run(self._opened(), CONNECT_S)

    async def _opened(self) -> ClientSession:
        # No limit of connections: as many as rollouts are in flight, each a stream of its own. And none is used again:
        # a server closes one that has been idle for some seconds, and a call that meets that is lost.
        return ClientSession(
            self.address,
            headers=self._headers,
            connector=TCPConnector(limit=0, force_close=True),
            timeout=ClientTimeout(total=None, sock_connect=CONNECT_S),
            # Longest line: vLLM puts all tokens into one part that were sampled while nobody read.
            read_bufsize=2**23,
            auto_decompress=False,
        )

    def words(self, text: str) -> str:
        """Return a message that may quote the server as one printable line, without the token or other secrets."""
        text = text.replace(self._token, MASK) if self._token else text
        return " ".join(one_line(redact(text)).split())

    def run(self, work: Coroutine[Any, Any, T], timeout_s: float) -> T:
        """Do work in the connection's thread and return its result.

        Raises:
            EngineLostError: it takes longer than its limit.
        """
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(timeout_s)
        except TimeoutError as error:
            future.cancel()
            raise EngineLostError(f"generator: {self.address} has not answered for {timeout_s:g} s") from error

    def start(self, work: Coroutine[Any, Any, None]) -> Future[None]:
        """Begin work in the connection's thread, without waiting for it."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def call(
        self, method: str, path: str, body: Any = None, *, timeout_s: float, query: dict[str, str] | None = None
    ) -> Any:
        """Return a server's answer to one call, parsed if it is JSON.

        Raises:
            EngineLostError: the server is away, silent, or answers nonsense.
            RefusedError: it answers with an error.
        """
        # The limit inside ends the call itself; the one outside is for a thread that hangs.
        return self.run(self.ask(method, path, body, timeout_s=timeout_s, query=query), timeout_s + 5)

    async def ask(
        self, method: str, path: str, body: Any = None, *, timeout_s: float, query: dict[str, str] | None = None
    ) -> Any:
        """Do the work of `call`, for coroutines of the connection's thread."""
        limit = ClientTimeout(total=timeout_s, sock_connect=min(CONNECT_S, timeout_s))
        try:
            async with self._session.request(method, path, json=body, params=query, timeout=limit) as answer:
                if answer.status >= 400:
                    raise await self._refused(path, answer)
                text = await self._read(path, answer, MOST_BYTES)
                return parse_json(text) if text.strip() else None
        except TimeoutError as error:
            raise self._lost(path, f"has not answered for {timeout_s:g} s") from error
        except (ClientError, OSError) as error:
            raise self._lost(path, f"cannot be reached ({said(error)})") from error
        except ValueError as error:
            raise self._lost(path, f"answers what is no JSON ({said(error)})") from error

    async def _read(self, path: str, answer: ClientResponse, most: int) -> bytes:
        """Return the whole of an answer, of `most` bytes at most."""
        found = bytearray()
        async for chunk in answer.content.iter_any():
            found += chunk
            if len(found) > most:
                raise self._lost(path, f"answers more than {most} bytes")
        return bytes(found)

    def _lost(self, path: str, why: str) -> EngineLostError:
        return EngineLostError(self.words(f"generator: {self.address}{path} {why}"))

    async def stream(self, path: str, body: Any, most_bytes: int = MOST_BYTES) -> AsyncIterator[Any]:
        """Yield the parts of an answer as they come (server-sent events), to the end that the server declares.

        Raises:
            EngineLostError: the connection ends before, or what comes cannot be read, or is more than `most_bytes`.
        """
        ended = False
        read = 0
        try:
            async with self._session.post(path, json=body) as answer:
                if answer.status >= 400:
                    raise await self._refused(path, answer)
                async for line in answer.content:
                    read += len(line)
                    if read > most_bytes:
                        raise self._lost(path, f"answers more than {most_bytes} bytes")
                    if not line.startswith(b"data:"):
                        continue
                    data = line[5:].strip()
                    if data == b"[DONE]":
                        ended = True
                        break
                    part = parse_json(data)
                    if isinstance(part, dict) and "error" in part:
                        raise self._lost(path, f"ends with {quoted(part['error'])}")
                    yield part
        except (ClientError, OSError) as error:  # TimeoutError is an OSError
            raise self._lost(path, f"broke off ({said(error)})") from error
        except ValueError as error:
            raise self._lost(path, f"answers what is no JSON ({said(error)})") from error
        if not ended:
            raise self._lost(path, "broke off in the middle of an answer")

    async def _refused(self, path: str, answer: ClientResponse) -> EngineLostError:
        """Return the error that an answer stands for, in the server's words where it has a few."""
        text = (await self._read(path, answer, ERROR_BYTES)).decode(errors="replace")
        message: Any = text
        with suppress(ValueError, TypeError, KeyError):
            message = parse_json(text)["error"]["message"]
        words = self.words(f"generator: {self.address}{path} answers {answer.status}: {quoted(message, 300)}")
        return RefusedError(words, answer.status)

    def close(self) -> None:
        """End all work and close the connections."""
        if not self._loop.is_running():
            return
        with suppress(EngineLostError):
            self.run(self._closed(), CONNECT_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CONNECT_S)

    async def _closed(self) -> None:
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await self._session.close()
