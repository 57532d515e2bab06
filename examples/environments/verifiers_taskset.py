"""Tasksets of verifiers as environments.

    pip install verifiers==0.4.0

Name the taskset in a subclass, and give the subclass to the pool of environments:

    class Guess(VerifiersTaskset):
        taskset = "guess_taskset"
        settings = {"largest": 20}

The taskset runs in an environment server of verifiers, one for each process of the pool. The first conversation of a
process starts it, which takes some seconds. verifiers asks a model over HTTP for each turn. Here an endpoint on
127.0.0.1 takes its requests: a request is an observation, and the next turn of our model is its answer. verifiers
scores the conversation, and its reward comes with the last turn.

The seed selects the task. Set `replayable = False` if the taskset may answer the same turns differently.

Limits: environments with one role, texts only, and no tools. A system prompt and a prompt become one text.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count, islice
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import httpx
import verifiers.v1 as vf
from verifiers.v1.configs.agent import agent_config_fields
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.serve import EnvClient, env_config_data, serve_env
from verifiers.v1.utils.loaders import env_config_type, load_taskset, resolve_env_config

# verifiers imports the harness by the name of this file.
__all__ = ["OneRequestPerTurn"]

Messages = Sequence[Mapping[str, Any]]


class VerifiersTaskset:
    """Text form of a taskset.

    Attributes:
        taskset: name of its module, as for `vf-eval`.
        settings: further settings of the taskset.
        most_tasks: number of tasks that are used; a taskset may be infinite.
    """

    taskset = ""
    settings: Mapping[str, Any] = {}
    most_tasks = 1000

    def __init__(self) -> None:
        self._conversation: _Conversation | None = None

    def reset(self, seed: int) -> str:
        """Start an episode of the task that the seed selects, and return its prompt."""
        server = _server(self.taskset, json.dumps(self.settings, sort_keys=True), self.most_tasks)
        self._conversation = server.start(server.tasks[seed % len(server.tasks)])
        asked = self._conversation.next()
        if isinstance(asked, vf.WireEpisode):
            raise RuntimeError(f"the episode has ended before the first turn: {_errors(asked)}")
        return _text(asked)

    def step(self, text: str) -> tuple[str, float | None, bool, bool, dict[str, Any]]:
        """Answer the request for a turn."""
        assert self._conversation is not None
        self._conversation.texts.put(text)
        asked = self._conversation.next()
        if not isinstance(asked, vf.WireEpisode):
            last = max(place for place, message in enumerate(asked) if message["role"] == "assistant")
            return _text(asked[last + 1 :]), None, False, False, {}
        if not asked.ok:
            raise RuntimeError(_errors(asked))
        (trace,) = asked.traces
        info = {**trace.metrics, "stop": trace.stop_condition or ""}
        return "", trace.reward, not trace.is_truncated, trace.is_truncated, info

    def __del__(self) -> None:
        if self._conversation is not None:
            self._conversation.end()


class OneRequestPerTurn(vf.Harness[vf.HarnessConfig]):
    """Harness that asks the model once per turn. It runs in the environment server and starts no program."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
    ) -> vf.ProgramResult:
        """Send the conversation to the endpoint, where verifiers records it."""
        system, prompt = self.resolve_prompt(data)
        messages = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += [message_to_wire(message) for message in prompt or ()]
        async with httpx.AsyncClient(timeout=None, trust_env=False) as client:
            answer = await client.post(
                f"{endpoint}/chat/completions",
                json={"model": ctx.model, "messages": messages},
                headers={"Authorization": f"Bearer {secret}"},
            )
        return vf.ProgramResult(int(answer.is_error), "", answer.text if answer.is_error else "")


class _Conversation:
    """Requests of verifiers in one episode, and the model's answers."""

    def __init__(self) -> None:
        self.asked: SimpleQueue[Messages | Future[vf.WireEpisode]] = SimpleQueue()
        self.texts: SimpleQueue[str | None] = SimpleQueue()
        self.episode: Future[vf.WireEpisode] | None = None

    def next(self) -> Messages | vf.WireEpisode:
        """Wait for the next request, or for the end of the episode."""
        asked = self.asked.get()
        return asked.result() if isinstance(asked, Future) else asked

    def end(self) -> None:
        """Cancel the rest of the episode."""
        self.texts.put(None)
        if self.episode is not None:
            self.episode.cancel()


class _Server:
    """Environment server of verifiers in a process of its own, and the endpoint that it asks."""

    def __init__(self, taskset: str, settings: Mapping[str, Any], most_tasks: int) -> None:
        roles = list(agent_config_fields(env_config_type(taskset)()))
        if len(roles) != 1:
            raise ValueError(f"taskset {taskset} has the roles {', '.join(roles)}, and one model cannot play them all")
        role = {"harness": {"id": Path(__file__).stem}, "runtime": {"type": "subprocess"}}
        config = resolve_env_config({"taskset": {"id": taskset, **settings}, roles[0]: role})
        self.tasks = [
            task.data.model_dump(mode="json") for task in islice(iter(load_taskset(config.taskset)), most_tasks)
        ]
        self._numbers = count()
        self._conversations: dict[str, _Conversation] = {}
        self._endpoint = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._endpoint.daemon_threads = True
        threading.Thread(target=self._endpoint.serve_forever, daemon=True).start()
        spawn = multiprocessing.get_context("spawn")
        addresses = spawn.Queue()
        # The server ends when this process does, because its end of the pipe is closed then.
        self._alive, theirs = spawn.Pipe()
        spawn.Process(
            target=serve_env,
            kwargs={
                "max_workers": 1,
                "address": "tcp://127.0.0.1:0",
                "address_queue": addresses,
                "death_pipe": theirs,
                "config_data": env_config_data(config),
            },
            daemon=True,
        ).start()
        theirs.close()
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self._client = asyncio.run_coroutine_threadsafe(_connected(addresses.get()), self._loop).result()

    def start(self, task: Mapping[str, Any]) -> _Conversation:
        """Start an episode."""
        number, conversation = str(next(self._numbers)), _Conversation()
        self._conversations[number] = conversation
        address = f"http://127.0.0.1:{self._endpoint.server_address[1]}/{number}/v1"
        # No key is sent: the variable does not exist.
        client = vf.EvalClientConfig(base_url=address, api_key_var="NO_KEY")
        conversation.episode = asyncio.run_coroutine_threadsafe(
            self._client.run(client, "policy", vf.SamplingConfig(), dict(task)), self._loop
        )

        def ended(episode: Future[vf.WireEpisode]) -> None:
            del self._conversations[number]
            conversation.asked.put(episode)

        conversation.episode.add_done_callback(ended)
        return conversation

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        conversations = self._conversations

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                conversation = conversations.get(self.path.split("/")[1])
                text = None
                if conversation is not None:
                    conversation.asked.put(body["messages"])
                    text = conversation.texts.get()
                if text is None:
                    self.send_error(410, "the conversation is over")
                    return
                message = {"role": "assistant", "content": text}
                answer = {
                    "id": "turn",
                    "object": "chat.completion",
                    "created": 0,
                    "model": body["model"],
                    "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
                }
                content = json.dumps(answer).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *arguments: object) -> None:
                """Write no line per request."""

        return Handler


@cache
def _server(taskset: str, settings: str, most_tasks: int) -> _Server:
    """Return the process's server of a taskset: its start takes seconds, and it serves all conversations."""
    return _Server(taskset, json.loads(settings), most_tasks)


async def _connected(address: str) -> EnvClient:
    client = EnvClient(address)
    await client.wait_for_server_startup(interval=0.05)
    return client


def _text(messages: Messages) -> str:
    """Join the texts of messages, which may be lists of parts."""
    texts = []
    for message in messages:
        content = message["content"]
        parts = [content] if isinstance(content, str) else [part.get("text", "") for part in content]
        texts += [part for part in parts if part]
    return "\n\n".join(texts)


def _errors(episode: vf.WireEpisode) -> str:
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    # The same error may be in the episode and in its trace.
    return "; ".join(dict.fromkeys(f"{error.type}: {error.message}" for error in errors)) or "no error"
