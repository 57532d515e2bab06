"""HTTP connection to a vLLM server, with its own thread, a timeout on every call, and one-line errors."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

from aiohttp import ClientError, ClientResponse, ClientSession, ClientTimeout, TCPConnector

from lightning_scalerl.checks import CannotGoOnError, error_line
from sweeps.redact import MASK, redact
from sweeps.run.files import parse_json
from sweeps.terminal import one_line

T = TypeVar("T")

# Timeout for opening a connection, in seconds.
CONNECT_S = 10.0
# Largest answer to a call, and largest text of an error, in bytes. Scoring a prompt of 100,000 tokens takes some 10 MB.
MAX_ANSWER_BYTES = 2**26
MAX_ERROR_BYTES = 2**16


class EngineLostError(CannotGoOnError):
    """Raised when a server cannot be reached or gives an unusable answer. A new connection may succeed."""


class RefusedError(EngineLostError):
    """Raised when a server answers a call with an error; `status` is the HTTP status."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


def excerpt(value: Any, limit: int = 200) -> str:
    """Return the first `limit` characters of a server's message; for a value that is not text, its type."""
    text = " ".join(value.split()) if isinstance(value, str) else ""
    if isinstance(value, dict) and isinstance(value.get("message"), str):
        return excerpt(value["message"], limit)
    return text[:limit] if isinstance(value, str) else f"a {type(value).__name__}"


class Connection:
    """Connection for calls to one server from any thread. All calls run in one thread that this object owns.

    Args:
        address: the server's address, such as `http://node7:8000`.
        token: sent with every call; empty for a server that requires none.
        setting: configuration key that names the server, for messages.
    """

    def __init__(self, address: str, token: str = "", setting: str = "generator") -> None:
        self.address = address.rstrip("/")
        self._setting = setting
        self._token = token
        # No compression: a small compressed answer could expand to any size.
        self._headers = {"Accept-Encoding": "identity", **({"Authorization": f"Bearer {token}"} if token else {})}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True, name="vllm-http")
        self._thread.start()
        self._session: ClientSession = self.run(self._open_session(), CONNECT_S)

    async def _open_session(self) -> ClientSession:
        # Do not limit the number of connections: each rollout in flight has one. Do not reuse them either: a server
        # closes a connection after some idle seconds, and a call that is sent at that moment is lost.
        return ClientSession(
            self.address,
            headers=self._headers,
            connector=TCPConnector(limit=0, force_close=True),
            timeout=ClientTimeout(total=None, sock_connect=CONNECT_S),
            # A line can be long: vLLM merges into one part all tokens that it sampled while the client was not reading.
            read_bufsize=2**23,
            auto_decompress=False,
        )

    def safe_line(self, text: str) -> str:
        """Return a message, which may quote the server, as one printable line without secrets such as the token."""
        text = text.replace(self._token, MASK) if self._token else text
        return " ".join(one_line(redact(text)).split())

    def run(self, work: Coroutine[Any, Any, T], timeout_s: float) -> T:
        """Run a coroutine in the connection's thread and return its result.

        Raises:
            EngineLostError: the coroutine takes longer than `timeout_s` seconds.
        """
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(timeout_s)
        except TimeoutError as error:
            future.cancel()
            raise EngineLostError(f"{self._setting}: {self.address} has not answered for {timeout_s:g} s") from error

    def start(self, work: Coroutine[Any, Any, None]) -> Future[None]:
        """Start a coroutine in the connection's thread, without waiting for it."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def call(
        self, method: str, path: str, body: Any = None, *, timeout_s: float, query: dict[str, str] | None = None
    ) -> Any:
        """Make one call and return the server's answer, parsed from JSON; None if it is empty.

        Raises:
            EngineLostError: the server is unreachable, silent, or gives an invalid answer.
            RefusedError: the server answers with an error.
        """
        # The inner timeout ends the call itself; the outer one covers a hanging thread.
        return self.run(self.ask(method, path, body, timeout_s=timeout_s, query=query), timeout_s + 5)

    async def ask(
        self, method: str, path: str, body: Any = None, *, timeout_s: float, query: dict[str, str] | None = None
    ) -> Any:
        """Make one call like `call`, from a coroutine that runs in the connection's thread."""
        limit = ClientTimeout(total=timeout_s, sock_connect=min(CONNECT_S, timeout_s))
        try:
            async with self._session.request(method, path, json=body, params=query, timeout=limit) as answer:
                if answer.status >= 400:
                    raise await self._refused_error(path, answer)
                text = await self._read(path, answer, MAX_ANSWER_BYTES)
                return parse_json(text) if text.strip() else None
        except TimeoutError as error:
            raise self._lost_error(path, f"has not answered for {timeout_s:g} s") from error
        except (ClientError, OSError) as error:
            raise self._lost_error(path, f"cannot be reached ({error_line(error)})") from error
        except ValueError as error:
            raise self._lost_error(path, f"answers what is no JSON ({error_line(error)})") from error

    async def _read(self, path: str, answer: ClientResponse, max_bytes: int) -> bytes:
        """Return the whole content of an answer; raise `EngineLostError` above `max_bytes` bytes."""
        content = bytearray()
        async for chunk in answer.content.iter_any():
            content += chunk
            if len(content) > max_bytes:
                raise self._lost_error(path, f"answers more than {max_bytes} bytes")
        return bytes(content)

    def _lost_error(self, path: str, reason: str) -> EngineLostError:
        return EngineLostError(self.safe_line(f"{self._setting}: {self.address}{path} {reason}"))

    async def stream(self, path: str, body: Any, max_bytes: int = MAX_ANSWER_BYTES) -> AsyncIterator[Any]:
        """Make one call and yield the parts of its answer (server-sent events), until the server's end marker.

        Raises:
            EngineLostError: the connection ends early, or the data cannot be parsed or exceed `max_bytes`.
        """
        ended = False
        received_bytes = 0
        try:
            async with self._session.post(path, json=body) as answer:
                if answer.status >= 400:
                    raise await self._refused_error(path, answer)
                async for line in answer.content:
                    received_bytes += len(line)
                    if received_bytes > max_bytes:
                        raise self._lost_error(path, f"answers more than {max_bytes} bytes")
                    if not line.startswith(b"data:"):
                        continue
                    data = line[5:].strip()
                    if data == b"[DONE]":
                        ended = True
                        break
                    part = parse_json(data)
                    if isinstance(part, dict) and "error" in part:
                        raise self._lost_error(path, f"ends with {excerpt(part['error'])}")
                    yield part
        except (ClientError, OSError) as error:  # TimeoutError is an OSError
            raise self._lost_error(path, f"broke off ({error_line(error)})") from error
        except ValueError as error:
            raise self._lost_error(path, f"answers what is no JSON ({error_line(error)})") from error
        if not ended:
            raise self._lost_error(path, "broke off in the middle of an answer")

    async def _refused_error(self, path: str, answer: ClientResponse) -> EngineLostError:
        text = (await self._read(path, answer, MAX_ERROR_BYTES)).decode(errors="replace")
        message: Any = text
        with suppress(ValueError, TypeError, KeyError):
            message = parse_json(text)["error"]["message"]
        safe_line = self.safe_line(
            f"{self._setting}: {self.address}{path} answers {answer.status}: {excerpt(message, 300)}"
        )
        return RefusedError(safe_line, answer.status)

    def close(self) -> None:
        """Cancel all coroutines and close the connections."""
        if not self._loop.is_running():
            return
        with suppress(EngineLostError):
            self.run(self._close_session(), CONNECT_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CONNECT_S)

    async def _close_session(self) -> None:
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._session.close()
