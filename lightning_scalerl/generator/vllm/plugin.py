"""Plugin for vLLM's processes (entry point `vllm.general_plugins`): our weight transfer, and an access guard.

Every vLLM process in an environment with this package calls `register`, so this module imports nothing heavy.
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
# Environment variable for the server's token: vLLM's own variable, so that all routes need the same token.
TOKEN = "VLLM_API_KEY"
# Environment variable for the process that started the server, as PID@HOST; unset for a server started by hand. The
# host matters because a server that srun starts on another node inherits the variable but cannot see that process.
PARENT = "SCALERL_SERVER_PARENT"
# Environment variable for the seconds without a request after which a server ends; unset: it keeps running.
IDLE = "SCALERL_SERVER_IDLE_S"


def register() -> None:
    """Register the backend with vLLM. Each vLLM process calls this, some more than once.

    If a program started the server (`PARENT`), the server's processes also end with that program, even after kill -9.
    """
    parent, _, host = os.environ.get(PARENT, "").partition("@")
    if parent and host == socket.gethostname():
        threading.Thread(target=_exit_with_parent, args=(int(parent),), daemon=True).start()
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory

    with suppress(ValueError):  # the backend is already registered
        WeightTransferEngineFactory.register_engine(
            BACKEND, "lightning_scalerl.generator.vllm.worker", "ScaleRLWeightTransferEngine"
        )


def _exit_with_parent(parent: int) -> None:
    while True:
        try:
            os.kill(parent, 0)
        except ProcessLookupError:
            os._exit(1)
        time.sleep(1.0)


class Guard:
    """ASGI middleware that requires the server's token on every route except `/health`, and ends an idle server.

    vLLM's `--api-key` protects only the inference routes. Through the development-mode routes, anyone who reaches the
    port could pause the server, change its weights or call into its workers.
    """

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self._app = app
        self._authorization = f"Bearer {os.environ[TOKEN]}".encode() if os.environ.get(TOKEN) else None
        self._last_request = time.monotonic()
        if os.environ.get(IDLE):
            threading.Thread(target=self._end_idle, args=(float(os.environ[IDLE]),), daemon=True).start()

    def _end_idle(self, seconds: float) -> None:
        """End the server after `seconds` without a request; a connected run requests `/health` every second."""
        while (left_s := self._last_request + seconds - time.monotonic()) > 0:
            time.sleep(left_s)
        os.kill(os.getpid(), signal.SIGTERM)

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Callable[..., Awaitable[None]]) -> None:
        """Pass a request on if it has the token, or if no token is required."""
        self._last_request = time.monotonic()
        guarded = (
            self._authorization is not None and scope["type"] in ("http", "websocket") and scope["path"] != "/health"
        )
        if guarded and not hmac.compare_digest(
            dict(scope["headers"]).get(b"authorization", b""), self._authorization or b""
        ):
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1008})
                return
            body = json.dumps({"error": "Unauthorized"}).encode()
            await send({"type": "http.response.start", "status": 401, "headers": [(b"content-type", b"text/plain")]})
            await send({"type": "http.response.body", "body": body})
            return
        await self._app(scope, receive, send)
