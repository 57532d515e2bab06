"""HTTP connection to a server of vLLM: one thread of its own, a time limit on every call, errors of one line."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

from aiohttp import ClientError, ClientSession, ClientTimeout, TCPConnector

from lightning_scalerl.checks import CannotGoOnError, said

T = TypeVar("T")

# A connection that is not there by then will not come.
CONNECT_S = 10.0


class EngineLostError(CannotGoOnError):
    """Raised when a server cannot be reached, or answers what cannot be used; another connection may succeed."""


class RefusedError(EngineLostError):
    """Raised when a server answers a call with an error; `status` is HTTP's."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class Connection:
    """Calls to one server, from any thread; their work is done in a thread that this object owns.

    Args:
        address: the server's, such as `http://node7:8000`.
        token: sent with every call; empty for a server that asks for none.
    """

    def __init__(self, address: str, token: str = "") -> None:
        self.address = address.rstrip("/")
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
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
        )

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
                text = await answer.text()
                if answer.status >= 400:
                    raise self._refused(path, answer.status, text)
                return json.loads(text) if text.strip() else None
        except TimeoutError as error:
            raise EngineLostError(f"generator: {self.address}{path} has not answered for {timeout_s:g} s") from error
        except (ClientError, OSError) as error:
            raise EngineLostError(f"generator: {self.address}{path} cannot be reached ({said(error)})") from error
        except ValueError as error:
            raise EngineLostError(f"generator: {self.address}{path} answers what is no JSON ({said(error)})") from error

    async def stream(self, path: str, body: Any) -> AsyncIterator[dict[str, Any]]:
        """Yield the parts of an answer as they come (server-sent events), to the end that the server declares.

        Raises:
            EngineLostError: the connection ends before, or what comes cannot be read.
        """
        ended = False
        try:
            async with self._session.post(path, json=body) as answer:
                if answer.status >= 400:
                    raise self._refused(path, answer.status, await answer.text())
                async for line in answer.content:
                    if not line.startswith(b"data:"):
                        continue
                    data = line[5:].strip()
                    if data == b"[DONE]":
                        ended = True
                        break
                    part = json.loads(data)
                    if "error" in part:
                        raise EngineLostError(f"generator: {self.address}{path} ends with {str(part['error'])[:200]}")
                    yield part
        except (ClientError, OSError) as error:  # TimeoutError is an OSError
            raise EngineLostError(f"generator: {self.address}{path} broke off ({said(error)})") from error
        except (ValueError, TypeError) as error:
            raise EngineLostError(f"generator: {self.address}{path} answers what is no JSON ({said(error)})") from error
        if not ended:
            raise EngineLostError(f"generator: {self.address}{path} broke off in the middle of an answer")

    def _refused(self, path: str, status: int, text: str) -> RefusedError:
        words = " ".join(text.split())
        with suppress(ValueError, TypeError, KeyError):
            words = str(json.loads(text)["error"]["message"])
        return RefusedError(f"generator: {self.address}{path} answers {status}: {words[:300]}", status)

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
