"""Plugin of vLLM's processes, by the entry point `vllm.general_plugins`: our way of getting weights, and a guard.

Light, for every process of vLLM in an environment with this package calls `register`: nothing heavy is imported.
"""

from __future__ import annotations

import hmac
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

# Name of the weight-transfer backend, as `--weight-transfer-config` names it.
BACKEND = "scalerl"
# Environment variable that holds the server's token: vLLM's own, so that its routes and ours ask for the same.
TOKEN = "VLLM_API_KEY"
# Environment variable that holds who has started the server, if a program has: process id @ host. A server that is
# started on another node (by srun, with this environment) does not see that program's processes.
PARENT = "SCALERL_SERVER_PARENT"
# Environment variable with the seconds after which a server that nobody asks anything ends; none: it stays.
IDLE = "SCALERL_SERVER_IDLE_S"


def register() -> None:
    """Make the backend known to vLLM; called in each of its processes, some of them more than once.

    In those of a server that a program has started, also see to it that they end with that program, kill -9 included.
    """
    parent, _, host = os.environ.get(PARENT, "").partition("@")
    if parent and host == socket.gethostname():
        threading.Thread(target=_end_with, args=(int(parent),), daemon=True).start()
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory

    with suppress(ValueError):  # it is known already
        WeightTransferEngineFactory.register_engine(
            BACKEND, "lightning_scalerl.generator.vllm.worker", "ScaleRLWeightTransferEngine"
        )


def _end_with(parent: int) -> None:
    """End this process when the one that asked for the server is gone."""
    while True:
        try:
            os.kill(parent, 0)
        except ProcessLookupError:
            os._exit(1)
        time.sleep(1.0)


class Guard:
    """ASGI middleware that asks for the server's token on every route but `/health`, and ends an idle server.

    vLLM's `--api-key` covers its inference routes only: whoever reaches the port could pause the server, change its
    weights or call into its workers by the routes of its development mode.
    """

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self._app = app
        self._wanted = f"Bearer {os.environ[TOKEN]}".encode() if os.environ.get(TOKEN) else None
        self._asked = time.monotonic()
        if os.environ.get(IDLE):
            threading.Thread(target=self._end_idle, args=(float(os.environ[IDLE]),), daemon=True).start()

    def _end_idle(self, seconds: float) -> None:
        """End the server when nothing was asked for so long; a connected run asks for `/health` each second."""
        while (left := self._asked + seconds - time.monotonic()) > 0:
            time.sleep(left)
        os.kill(os.getpid(), signal.SIGTERM)

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Callable[..., Awaitable[None]]) -> None:
        """Pass a request on if it has the token, or if no token is asked for."""
        self._asked = time.monotonic()
        guarded = self._wanted is not None and scope["type"] in ("http", "websocket") and scope["path"] != "/health"
        if guarded and not hmac.compare_digest(dict(scope["headers"]).get(b"authorization", b""), self._wanted or b""):
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1008})
                return
            body = json.dumps({"error": "Unauthorized"}).encode()
            await send({"type": "http.response.start", "status": 401, "headers": [(b"content-type", b"text/plain")]})
            await send({"type": "http.response.body", "body": body})
            return
        await self._app(scope, receive, send)
