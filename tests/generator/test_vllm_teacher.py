"""Tests of a teacher behind an address, against a stand-in for vLLM's server: failures, and a whole run."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_scalerl.axes.precision import Precision
from lightning_scalerl.checks import ConfigurationError
from lightning_scalerl.generator.vllm.http import EngineLostError
from lightning_scalerl.generator.vllm.teacher import VLLMTeacher
from lightning_scalerl.model.load import load_model
from lightning_scalerl.model.policy import Policy
from lightning_scalerl.rollouts.rollout import TrainBatch
from lightning_scalerl.stream.credit import assemble
from lightning_scalerl.task.arithmetic_base import new_model, tokenizer
from sweeps.port import free_port
from sweeps.run.journal import read_journal
from tests.helpers import fit, make_group, row

KEY = "secret-key"


@dataclass
class Served:
    """Returns a model's log-probabilities. `failures` are returned first: a status, "hang", "drop" or a body."""

    model: Any
    failures: list[Any] = field(default_factory=list)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    keys: set[str] = field(default_factory=set)
    longest: int = 64
    address: str = ""
    over: threading.Event = field(default_factory=threading.Event)

    def answer(self, path: str, body: dict[str, Any]) -> Any:
        if path == "/v1/models":
            return {"data": [{"id": "teacher", "max_model_len": self.longest}]}
        self.bodies.append(body)
        with torch.no_grad():
            logprobs = self.model(input_ids=torch.tensor([body["prompt"]])).logits[0].log_softmax(-1)
        logprobs_by_token = [
            {str(token): {"logprob": float(logprobs[place, token])}} for place, token in enumerate(body["prompt"][1:])
        ]
        return {"choices": [{"index": 0, "text": "x", "prompt_logprobs": [None, *logprobs_by_token]}]}


@pytest.fixture(scope="module")
def teacher_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("teachers") / "teacher"
    new_model(width=64, layers=2, seed=5).save_pretrained(path)
    tokenizer().save_pretrained(path)
    return str(path)


@pytest.fixture
def served(teacher_path: str) -> Iterator[Served]:
    torch.set_num_threads(1)
    served_ = Served(load_model(teacher_path).eval())

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *arguments: Any) -> None: ...

        def do_GET(self) -> None:
            self.do_POST()

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or b"{}")
            served_.keys.add(self.headers.get("Authorization", ""))
            failure = served_.failures.pop(0) if served_.failures and self.path != "/v1/models" else None
            if failure == "hang":
                served_.over.wait(30)
            if failure in ("hang", "drop"):
                return self.close()
            status = failure if isinstance(failure, int) else 200
            reply: Any = {"error": {"message": f"because of {KEY}"}} if status != 200 else failure
            content = json.dumps(served_.answer(self.path, body) if reply is None else reply).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def close(self) -> None:
            self.close_connection = True

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    served_.address = f"http://127.0.0.1:{server.server_address[1]}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield served_
    served_.over.set()
    server.shutdown()
    server.server_close()


@pytest.fixture
def teacher(served: Served) -> Iterator[VLLMTeacher]:
    opened = VLLMTeacher(served.address, 60, 3.0, KEY)
    served.bodies.clear()
    yield opened
    opened.close()


def batch_of(groups: int = 3) -> TrainBatch:
    sampled_groups = [make_group([1.0, 0.0, 1.0], number, prompt_length=2 + number) for number in range(groups)]
    return assemble(sampled_groups, row(), max_new_tokens=8)


def local_logprobs(path: str, batch: TrainBatch) -> Tensor:
    with torch.no_grad():
        logprobs: Tensor = Policy(load_model(path), Precision("fp32"))(batch)[0]
    return logprobs


def test_logprobs_are_those_of_the_model(teacher: VLLMTeacher, served: Served, teacher_path: str) -> None:
    batch = batch_of(15)
    scored = teacher.score(batch)
    assert (
        torch.allclose(scored, local_logprobs(teacher_path, batch), atol=1e-5) and scored.shape == batch.loss_mask.shape
    )
    assert len(served.bodies) == 45 and served.keys == {f"Bearer {KEY}"}
    assert {(entry["max_tokens"], entry["prompt_logprobs"], entry["model"]) for entry in served.bodies} == {
        (1, 0, "teacher")
    }
    assert teacher.score(batch.select(torch.arange(0))).numel() == 0


@pytest.mark.parametrize("failure", [503, 429, "drop"])
def test_temporary_failures_are_retried(failure: Any, teacher: VLLMTeacher, served: Served, teacher_path: str) -> None:
    served.failures = [failure] * 3
    batch = batch_of()
    assert torch.allclose(teacher.score(batch), local_logprobs(teacher_path, batch), atol=1e-5)
    assert not served.failures


@pytest.mark.parametrize(
    ("failure", "match"),
    [
        ("hang", r"/v1/completions has not answered for .* s; given up after kl\.timeout_s=0\.5"),
        (400, r"/v1/completions answers 400: because of"),
        (
            {"choices": [{"text": "x"}]},
            r"gives no log-probabilities of given tokens \(KeyError.*is it a server of vllm",
        ),
        ({"choices": [{"prompt_logprobs": [None]}]}, r"gives no log-probabilities of given tokens \(ValueError"),
        ({"choices": [{"prompt_logprobs": [{"3": {"logprob": float("nan")}}] * 99}]}, "gives no log-probabilities"),
        ([], r"gives no log-probabilities of given tokens \(TypeError"),
    ],
    ids=["late", "refused", "none", "too few", "not a number", "another form"],
)
def test_a_server_that_fails_ends_the_run_with_one_line(
    failure: Any, match: str, served: Served, teacher_path: str
) -> None:
    teacher = VLLMTeacher(served.address, 60, 0.5, KEY)
    served.failures = [failure] * 99
    began = time.monotonic()
    with pytest.raises(EngineLostError, match=match) as error:
        teacher.score(batch_of())
    teacher.close()
    text = str(error.value)
    assert text.startswith(f"kl.reference: {served.address}") and "\n" not in text and KEY not in text
    assert time.monotonic() - began < 3


def test_an_absent_server_is_an_error() -> None:
    address = f"http://127.0.0.1:{free_port('127.0.0.1')}"
    with pytest.raises(
        EngineLostError, match=rf"kl\.reference: {address}/v1/models cannot be reached .*timeout_s=0\.3"
    ):
        VLLMTeacher(address, 60, 0.3)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"longest": 60}, r"holds 60 tokens of a sequence; start it with --max-model-len 61"),
        ({"failures": [401]}, r"answers 401: .*; give its key in VLLM_API_KEY"),
        ({"failures": [404]}, r"answers 404: .*; is it a server of vllm\?"),
    ],
)
def test_an_unsuitable_server_is_refused(change: dict[str, Any], match: str, served: Served) -> None:
    for name, value in change.items():
        setattr(served, name, value)
    with pytest.raises(ConfigurationError, match=match) as error:
        VLLMTeacher(served.address, 60, 3.0, KEY)
    assert "\n" not in str(error.value)


def test_a_local_and_a_served_teacher_give_the_same_run(
    served: Served, tiny_model_path: str, teacher_path: str, tmp_path: Path
) -> None:
    """Metrics are equal except for rounding. The server's devices count in device hours."""
    alone = ("kl=distil", "reward=none", "filter=none", "loss=reinforce")
    here = fit(tiny_model_path, tmp_path / "here", 3, overrides=[*alone, f"kl.reference={teacher_path}"])
    by_address = (f"kl.reference={served.address}", f"kl.served={teacher_path}", "kl.served_devices=3")
    there = fit(tiny_model_path, tmp_path / "there", 3, overrides=[*alone, *by_address])
    one, two = (
        [entry.metrics for entry in read_journal(tmp_path / place).of_kind("train")] for place in ("here", "there")
    )
    for name in ("train/kl", "compute/flops_train", "compute/virtual_device_hours"):
        assert [entry[name] for entry in two] == pytest.approx([entry[name] for entry in one], rel=1e-4)
    assert len(served.bodies) == 3 * 12 + 1
    assert (here.meter.devices, there.meter.devices) == (1, 4)
    assert there.models.reference is None, "the connection was closed after the run"
    with pytest.raises(ConfigurationError, match=r"temperature 1, and context\.temperature is 0\.7"):
        fit(tiny_model_path, None, 1, overrides=[*alone, *by_address, "context.temperature=0.7"])
