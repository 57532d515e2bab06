"""Stand-in for a judge's endpoint on this machine: tests choose its answers, and it counts its requests."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from lightning_scalerl.rollouts.grade import Sample
from lightning_scalerl.rollouts.prompt import Prompt
from lightning_scalerl.verify.judge import Judge

# Status, headers and body of an answer; None to close the connection without one.
Reply = tuple[int, Mapping[str, str], bytes] | None


def chat(text: str | None, finish: str = "stop", usage: Mapping[str, int] | None = None) -> Reply:
    """Return an answer in OpenAI's chat format."""
    body: dict[str, Any] = {"choices": [{"message": {"content": text}, "finish_reason": finish}]}
    if usage is None:
        usage = {"prompt_tokens": 10, "completion_tokens": 3}
    return 200, {}, json.dumps({**body, "usage": usage}).encode()


def refused(status: int, text: str = "no", **headers: str) -> Reply:
    return status, headers, text.encode()


@dataclass
class StandIn:
    """The requests received so far with their headers and paths, and the largest number of concurrent requests."""

    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    most: int = 0
    _now: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def messages(self) -> list[str]:
        return [body["messages"][-1]["content"] for body in self.bodies]

    def begin(self, body: dict[str, Any], headers: dict[str, str], path: str) -> int:
        with self._lock:
            self.bodies.append(body)
            self.headers.append(headers)
            self.paths.append(path)
            self._now += 1
            self.most = max(self.most, self._now)
            return len(self.bodies)

    def end(self) -> None:
        with self._lock:
            self._now -= 1


@contextmanager
def stand_in(reply: Callable[[str, int], Reply], wait_s: float = 0.0) -> Iterator[StandIn]:
    """Serve on a free port of this machine.

    Args:
        reply: (message, number of the request, from 1) -> the answer.
        wait_s: seconds before each answer.
    """
    service = StandIn()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            number = service.begin(body, dict(self.headers), self.path)
            try:
                time.sleep(wait_s)
                answer = reply(body["messages"][-1]["content"], number)
            finally:
                service.end()
            if answer is None:
                self.close_connection = True
                return
            status, headers, raw = answer
            self.send_response(status)
            for name, value in {"Content-Length": str(len(raw)), **headers}.items():
                self.send_header(name.replace("_", "-"), value)
            self.end_headers()
            self.wfile.write(raw)

        def log_message(self, format: str, *arguments: Any) -> None:
            """Log nothing."""

    class Quiet(ThreadingHTTPServer):
        request_queue_size = 64

        def handle_error(self, request: Any, client_address: Any) -> None:
            """Ignore clients that have left before the answer."""

    server = Quiet(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    service.url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    try:
        yield service
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


PROMPT = "Q: {question} A: {answer} C: {completion}"
JUDGE: dict[str, Any] = {"use": "judge", "url": "http://localhost:1", "model": "m", "prompt": PROMPT}


def judge_at(url: str, **more: Any) -> Judge:
    return Judge(**{"url": url, "model": "m", "prompt": PROMPT, "retries": 0, "timeout_s": 5.0, **more})


def sample(completion: str, question: str = "1+1", answer: str = "2") -> Sample:
    return Sample(Prompt("p", question, answer), completion, completion)


def by_content(message: str, number: int) -> Reply:
    """Answer yes to completions that contain a 2."""
    return chat("Verdict: yes" if "2" in message.rpartition("C: ")[2] else "Verdict: no")
