"""Stand-in for vLLM's HTTP server, in a thread: it samples the tokens 2, 3, 4, ... and fails as tests configure it."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from aiohttp import web
from safetensors.torch import load, load_file

from lightning_scalerl.generator.vllm.stream import ROUTE

TOKEN = "secret"


class StandIn:
    """Fake server. Tests set its attributes: `delay_s` per token, `failures` per route, and how it answers requests."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.bodies: list[dict[str, Any]] = []
        self.tensors: dict[str, Any] = {}
        self.inits: list[dict[str, Any]] = []
        self.updates: list[dict[str, Any]] = []
        self.version = "0.32.0"
        self.dev_mode = self.scale_out = self.sees_files = True
        self.config: dict[str, Any] = {
            "model_config": {
                "dtype": "torch.float32",
                "max_model_len": 4096,
                "logprobs_mode": "processed_logprobs",
                "generation_config": "vllm",
                "override_generation_config": {},
                "hf_overrides": {},
                "enable_sleep_mode": True,
            },
            "cache_config": {"enable_prefix_caching": True},
            "scheduler_config": {"max_num_seqs": 64},
            "parallel_config": {"data_parallel_size": 1},
            "weight_transfer_config": {"backend": "scalerl"},
        }
        self.details = True
        self.delay_s = 0.0
        # Failures per route before it works: a status, "garbage", or "hang". A "hang" at the end of a list is repeated.
        self.failures: dict[str, list[Any]] = {}
        self.spans: list[str] | None = None  # version labels to return instead of the current ones
        # Changes a part of an answer, or returns bytes to send instead of it.
        self.lie: Callable[[dict[str, Any]], Any] | None = None
        self.manner = ""  # "twice", "too many", "breaks", "ends early", "no labels", "other tokens"
        self.paused = asyncio.Event()
        self.label = "default"
        self.open: Counter[str] = Counter()
        self.sampled = 0
        self._aborted: set[str] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._runner: web.AppRunner | None = None
        self._port = 0
        self.up()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def up(self) -> None:
        asyncio.run_coroutine_threadsafe(self._up(), self._loop).result(10)

    def down(self) -> None:
        asyncio.run_coroutine_threadsafe(self._down(), self._loop).result(10)

    def close(self) -> None:
        self.down()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    async def _up(self) -> None:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._answer)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1, access_log=None)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self._port)
        await site.start()
        assert site._server is not None
        self._port = site._server.sockets[0].getsockname()[1]  # type: ignore[attr-defined]

    async def _down(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        if request.path != "/health" and request.headers.get("Authorization") != f"Bearer {TOKEN}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        if request.path not in ("/health", ROUTE):
            self.calls.append(request.path_qs)
        planned = self.failures.get(request.path) or []
        if planned:
            failure = planned.pop(0) if len(planned) > 1 or planned[0] != "hang" else planned[0]
            if failure == "hang":
                await asyncio.sleep(3600)
            if failure == "garbage":
                return web.Response(text="data: <html>\n\n" if request.path == ROUTE else "<html>")
            if isinstance(failure, str) and failure != "ok":
                return web.Response(text=failure, status=500)
            if failure != "ok":
                return web.json_response({"error": {"message": "not now"}}, status=failure)
        return await self._route(request)

    async def _route(self, request: web.Request) -> web.StreamResponse:
        path = request.path
        if path == "/version":
            return web.json_response({"version": self.version})
        if path == ROUTE:
            return await self._generate(request)
        if path != "/health" and not self.dev_mode:
            raise web.HTTPNotFound
        body = await request.json() if request.can_read_body else {}
        if path == "/server_info":
            return web.json_response({"vllm_config": self.config})
        if path == "/pause":
            self.paused.set()
        elif path == "/resume":
            assert self.paused.is_set(), "resumed twice"
            self.paused.clear()
        elif path == "/inference/v1/abort_requests":
            self._aborted |= {name.removeprefix("generate-tokens-") for name in body["request_ids"]}
        elif path == "/init_weight_transfer_engine":
            return self._init(body["init_info"])
        elif path == "/update_weights":
            return await self._update(body["update_info"])
        elif path == "/finish_weight_update":
            self.label = body["weight_version"]
        elif path == "/get_world_size":
            return web.json_response({"world_size": 2})
        return web.json_response({})

    def _init(self, info: dict[str, Any]) -> web.Response:
        self.inits.append(info)
        if "path" in info and not (self.sees_files and Path(info["path"]).read_text() == info["content"]):
            return web.json_response({"error": {"message": "no such file"}}, status=500)
        return web.json_response({})

    async def _update(self, info: dict[str, Any]) -> web.Response:
        self.updates.append(info)
        if info.get("path"):
            self.tensors |= load_file(info["path"])
        elif info.get("url"):
            self.tensors |= await asyncio.to_thread(self._fetched, info["url"], self.inits[-1]["key"])
        elif not info.get("names"):
            return web.json_response({"error": {"message": "given up"}}, status=500)
        return web.json_response({})

    def _fetched(self, url: str, key: str) -> Any:
        from urllib.request import Request, urlopen

        with urlopen(Request(url, headers={"Authorization": f"Bearer {key}"}), timeout=10) as answer:
            return load(answer.read())

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        if not self.scale_out:
            return web.json_response({"error": {"message": "disabled"}}, status=403)
        body = await request.json()
        self.bodies.append(body)
        name, wanted = body["request_id"], body["sampling_params"]
        if "prompt_logprobs" in wanted:
            entries = [None, *({str(token): {"logprob": -2.0}} for token in body["token_ids"][1:])]
            return web.json_response({"prompt_logprobs": entries})
        details = {"cached_tokens": 1} if self.details else None
        usage = {"prompt_tokens": len(body["token_ids"]), "prompt_tokens_details": details}
        labels: list[str] = []
        if not body.get("stream"):
            choice = self._choice([2], "length", [self.label])
            return web.json_response({"choices": [choice], "usage": usage})
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        self.open[name] += 1
        try:
            while len(labels) < wanted["max_tokens"] and name not in self._aborted:
                while self.paused.is_set() and name not in self._aborted:
                    await asyncio.sleep(0.005)
                await asyncio.sleep(self.delay_s)
                if name in self._aborted:
                    break
                labels.append(self.label)
                self.sampled += 1
                last = len(labels) == wanted["max_tokens"]
                token = 1 + len(labels)
                await self._part(answer, [self._choice([token], "length" if last else None, labels)])
                if self.manner == "ends early" and len(labels) == 2:
                    return answer
                if self.manner == "breaks" and len(labels) == 2:
                    request.transport.close()  # type: ignore[union-attr]
                    return answer
            if self.manner == "too many":
                await self._part(answer, [self._choice([1 + len(labels)], "length", labels)])
            if name in self._aborted:
                await self._part(answer, [self._choice([], "abort", labels)])
            await self._part(answer, [], usage)
            await answer.write(b"data: [DONE]\n\n")
            if self.manner == "twice":
                await self._part(answer, [self._choice([7], "length", labels)], usage)
                await answer.write(b"data: [DONE]\n\n")
        finally:
            self.open[name] -= 1
        return answer

    async def _part(self, answer: web.StreamResponse, choices: list[Any], usage: Any = None) -> None:
        part: Any = {"choices": choices, "usage": usage}
        part = part if self.lie is None else self.lie(part)
        text = part if isinstance(part, bytes) else json.dumps(part).encode()
        await answer.write(b"data: " + text + b"\n\n")

    def _choice(self, tokens: list[int], reason: str | None, labels: list[str]) -> dict[str, Any]:
        if self.spans is not None and len(labels) > 1:
            labels = self.spans
        spans = [{"version": label, "start": at, "end": at + 1} for at, label in enumerate(labels)]
        named = [token + (self.manner == "other tokens") for token in tokens]
        return {
            "index": 0,
            "token_ids": tokens,
            "finish_reason": reason,
            "logprobs": {"content": [{"token_id": token, "logprob": -1.0 - token / 10} for token in named]},
            "weight_versions": spans if reason and self.manner != "no labels" else None,
        }
