"""Tests of the connector to vLLM's server, against a stand-in: its requests, their order, and how it treats failures.

`test_vllm_http.py` tests it against the real server.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.accelerators import cuda

from lightning_scalerl.axes.precision import Precision
from lightning_scalerl.checks import ConfigurationError
from lightning_scalerl.generator.base import FinishedRollout, GroupRequest
from lightning_scalerl.generator.vllm import http as vllm_http
from lightning_scalerl.generator.vllm import stream as vllm_stream
from lightning_scalerl.generator.vllm.announced import Announcement
from lightning_scalerl.generator.vllm.client import VLLMServerGenerator
from lightning_scalerl.generator.vllm.engine import keep_cublas_workspaces
from lightning_scalerl.generator.vllm.http import EngineLostError
from lightning_scalerl.generator.vllm.plugin import IDLE
from lightning_scalerl.generator.vllm.stream import Tokens
from lightning_scalerl.model.load import load_model
from sweeps.port import free_port
from tests.generator.sampling import with_sampling
from tests.generator.stand_in import TOKEN, StandIn
from tests.paths import ROOT
from tests.place import PATIENCE_S

PROMPT = (5, 9, 20)


def test_lightning_keeps_the_workspaces_of_an_engines_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA graphs of an engine in the same process point into cuBLAS workspaces, which Lightning's teardown frees."""
    freed: list[str] = []
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: freed.append("workspaces"), raising=False)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: freed.append("cache"))
    monkeypatch.setitem(vars(cuda), "_clear_cuda_memory", vars(cuda)["_clear_cuda_memory"])
    accelerator: Any = cuda.CUDAAccelerator()
    accelerator.teardown()
    assert freed == ["workspaces", "cache"]
    keep_cublas_workspaces()
    accelerator.teardown()
    assert freed == ["workspaces", "cache", "cache"]


@pytest.fixture
def server() -> Iterator[StandIn]:
    stand_in = StandIn()
    yield stand_in
    stand_in.close()


@pytest.fixture(scope="module")
def model(tiny_model_path: str) -> Any:
    return load_model(tiny_model_path)


@pytest.fixture
def connect(server: StandIn, model: Any) -> Iterator[Any]:
    """Return a function that makes connectors; close them all after the test."""
    generators: list[VLLMServerGenerator] = []

    def connect_(**settings: Any) -> VLLMServerGenerator:
        values = {"slots": 4, "max_prompt_tokens": 16, "max_new_tokens": 6, "stop_tokens": [1], **settings}
        values = {"address": server.address, "token": TOKEN, "silence_s": 1.5, "away_s": 0.5, **values}
        precision = values.pop("precision", Precision("fp32"))
        generators.append(VLLMServerGenerator(model, precision, **with_sampling(**values)))
        return generators[-1]

    yield connect_
    for generator in generators:
        generator.close()


def drained(generator: VLLMServerGenerator, limit_s: float = 20.0) -> list[FinishedRollout]:
    collected: list[FinishedRollout] = []
    until = time.monotonic() + limit_s
    while generator.in_flight and time.monotonic() < until:
        collected += generator.step().finished
    assert not generator.in_flight
    return sorted(collected, key=lambda item: (item.key, item.index))


def step_until(generator: VLLMServerGenerator, tokens: int) -> None:
    """Step until `tokens` tokens have arrived."""
    until = time.monotonic() + 10
    while generator.sampled_in_flight < tokens:
        generator.step()
        assert time.monotonic() < until


# --- at the start ---------------------------------------------------------------------------------------------


def with_config(**parts: dict[str, Any]) -> Any:
    def change(server: StandIn) -> None:
        for name, values in parts.items():
            server.config[name] = {**server.config[name], **values}

    return change


def with_attributes(**attributes: Any) -> Any:
    def change(server: StandIn) -> None:
        for name, value in attributes.items():
            setattr(server, name, value)

    return change


@pytest.mark.parametrize(
    ("change", "settings", "message"),
    [
        (
            with_attributes(version="0.34.1"),
            {},
            r"runs vllm 0.34.1, and 0.32 up to below 0.34 .* install vllm>=0.32,<0.34 there",
        ),
        (with_attributes(dev_mode=False), {}, "404.*VLLM_SERVER_DEV_MODE=1"),
        (with_attributes(), {"token": "other"}, "401.*give this run the server's token"),
        (with_attributes(scale_out=False), {}, "403.*--enable-scale-out"),
        (with_attributes(details=False), {}, "--enable-prompt-tokens-details"),
        (with_attributes(manner="no labels"), {}, "labels a token of weights 0 with"),
        (with_attributes(config={}), {}, "is it a server of vllm?"),
        (with_config(model_config={"logprobs_mode": "raw_logprobs"}), {}, "--logprobs-mode processed_logprobs"),
        (with_config(model_config={"generation_config": "auto"}), {}, "--generation-config vllm"),
        (
            with_config(model_config={"override_generation_config": {"top_k": 3}}),
            {},
            "without --override-generation-config",
        ),
        (with_config(model_config={"max_model_len": 22}), {}, "--max-model-len 23"),
        (with_config(model_config={"dtype": "torch.bfloat16"}), {}, "computes in bfloat16.*--dtype float32"),
        (with_config(model_config={"dtype": "torch.bfloat16"}), {"precision": Precision("bf16")}, "head_dtype"),
        (with_config(parallel_config={"data_parallel_size": 2}), {}, "a server for each"),
        (with_config(cache_config={"enable_prefix_caching": False}), {}, "--enable-prefix-caching"),
        (with_config(weight_transfer_config={"backend": None}), {}, "takes weights by no way"),
        (with_config(weight_transfer_config={"backend": "nccl"}), {}, "needs the trainer's weights on a GPU"),
    ],
)
def test_an_unsuitable_server_is_refused_with_the_remedy(
    server: StandIn, connect: Any, change: Any, settings: Any, message: str
) -> None:
    change(server)
    with pytest.raises(ConfigurationError, match=message) as caught:
        connect(**settings)
    assert "\n" not in str(caught.value)
    assert not any(body.get("stream") for body in server.bodies), "no rollout was requested"


def test_an_absent_server_is_awaited(server: StandIn, connect: Any) -> None:
    server.down()
    began = time.monotonic()
    with pytest.raises(EngineLostError, match=r"no server for 0.5 s: start one there"):
        connect()
    assert time.monotonic() - began > 0.4
    server.up()
    server.failures["/health"] = [503, 503, "ok"]
    connect(away_s=10.0)
    assert not server.failures["/health"]


# --- requests ---------------------------------------------------------------------------------------------------


def test_requests_for_a_group(server: StandIn, connect: Any) -> None:
    generator = connect(temperature=0.7)
    generator.submit(GroupRequest(7, PROMPT, 2, (3, 4)))
    collected = drained(generator)
    assert [item.rollout.tokens for item in collected] == [[2, 3, 4, 5, 6, 7]] * 2
    assert collected[0].rollout.generator_logprobs == pytest.approx([-1.2, -1.3, -1.4, -1.5, -1.6, -1.7])
    assert collected[0].rollout.finish_reason == "length" and not any(collected[0].rollout.forced)
    first, second = (body for body in server.bodies if body.get("stream"))
    assert "group7-rollout0-version0" in first["request_id"] and "group7-rollout1-version0" in second["request_id"]
    assert first["token_ids"] == [*PROMPT] and first["return_weight_versions"] is True
    expected = first["sampling_params"]
    assert expected["logprobs"] == 0 and expected["temperature"] == 0.7 and expected["max_tokens"] == 6
    assert expected["stop_token_ids"] == [1] and expected["ignore_eos"] and not expected["detokenize"]
    assert expected["seed"] != second["sampling_params"]["seed"]
    assert not generator.can_score and generator.free_slots == 4


def test_publishing_pauses_once_and_resumes_once(server: StandIn, connect: Any, model: Any) -> None:
    generator = connect(bucket_mib=0.01)
    server.calls.clear()
    generator.publish(dict(model.state_dict()), 3)
    updates = generator._sender.buckets
    assert updates > 2
    assert server.calls == [
        "/pause?mode=keep&clear_cache=false",
        "/start_weight_update",
        *["/update_weights"] * updates,
        "/finish_weight_update",
        "/resume",
    ]
    assert server.label == "3" and generator.version == 3
    generator.publish(dict(model.state_dict()), 4, recompute_kv=True)
    assert "/pause?mode=keep&clear_cache=true" in server.calls


def test_tokens_during_a_publish_have_the_servers_version_labels(server: StandIn, connect: Any, model: Any) -> None:
    server.delay_s = 0.03
    generator = connect()
    generator.submit(GroupRequest(0, PROMPT, 4, (1,)))
    step_until(generator, 8)
    generator.publish(dict(model.state_dict()), 2)
    server.spans = ["0", "0", "0", "0", "2", "2"]
    collected = drained(generator)
    assert [item.rollout.weight_versions for item in collected] == [[0, 0, 0, 0, 2, 2]] * 4, (
        "the server's labels count, not the time of arrival"
    )
    for item in collected:
        versions = item.rollout.weight_versions
        assert len(versions) == 6 and versions == sorted(versions) and set(versions) == {0, 2}
        assert item.rollout.tokens == [2, 3, 4, 5, 6, 7], "the rollout continued"
    assert len([body for body in server.bodies if body.get("stream")]) == 4


def test_a_rollout_without_tokens_starts_with_the_new_weights(server: StandIn, connect: Any, model: Any) -> None:
    server.delay_s = 0.3
    generator = connect(silence_s=10.0)
    generator.submit(GroupRequest(0, PROMPT, 2, (1,)))
    while len(+server.open) < 2:
        generator.step()
    generator.publish(dict(model.state_dict()), 2)
    server.delay_s = 0.0
    assert {version for item in drained(generator) for version in item.rollout.weight_versions} == {2}
    salts = [body["cache_salt"] for body in server.bodies if body.get("stream")]
    assert len({*salts}) == 2 and salts[-1].endswith("-2"), "each version has its own prefix cache"


def test_after_a_failed_update_the_server_stays_paused(server: StandIn, connect: Any, model: Any) -> None:
    generator = connect()
    server.failures["/update_weights"] = [500]
    server.calls.clear()
    with pytest.raises(EngineLostError, match=r"update_weights answers 500.*stays paused"):
        generator.publish(dict(model.state_dict()), 1)
    assert server.calls[-1] == "/update_weights" and server.paused.is_set()
    assert server.label == "0"
    connect()  # the next connection sends all weights before it resumes the server
    assert not server.paused.is_set() and server.calls.count("/resume") == 1


# --- interruptions, turns and texts --------------------------------------------------------------------------------


def test_the_phrase_is_forced_if_thinking_has_not_ended(server: StandIn, connect: Any) -> None:
    generator = connect(phrase=[30, 31], thinking_ended=lambda tokens: False)
    generator.submit(GroupRequest(0, PROMPT, 1, (1,), interrupt_at=(2,)))
    (item,) = drained(generator)
    assert item.rollout.tokens == [2, 3, 30, 31, 2, 3] and item.rollout.forced == [
        False,
        False,
        True,
        True,
        False,
        False,
    ]
    assert item.rollout.generator_logprobs[2:4] == [0.0, 0.0]
    first, second = (body for body in server.bodies if body.get("stream"))
    assert first["sampling_params"]["max_tokens"] == 2 and second["token_ids"] == [*PROMPT, 2, 3, 30, 31]
    assert first["sampling_params"]["seed"] != second["sampling_params"]["seed"]


class Four:
    window = 1

    def __call__(self, tokens: Any) -> bool:
        return tokens[-1] == 4


def test_a_text_ends_a_completion_with_its_last_token(server: StandIn, connect: Any) -> None:
    server.delay_s = 0.02
    generator = connect(stop_text=Four(), max_new_tokens=500, max_prompt_tokens=3)
    generator.submit(GroupRequest(0, PROMPT, 2, (1,)))
    collected = [item.rollout for item in drained(generator)]
    for rollout in collected:
        assert rollout.tokens == [2, 3, 4] and rollout.finish_reason == "stop"
        assert len(rollout.weight_versions) == len(rollout.generator_logprobs) == 3
    assert not +server.open and server.sampled < 500, "the connector aborted its requests"


def test_computed_tokens_are_counted(server: StandIn, connect: Any) -> None:
    generator = connect()
    generator.submit(GroupRequest(0, PROMPT, 2, (1,)))
    reports = []
    while generator.in_flight:
        reports.append(generator.step())
    prefill, _, decoded, context, prefilled, _ = (
        sum(counts) for counts in zip(*(report.computed for report in reports), strict=True)
    )
    # One token of each prompt was cached; a rollout's first token comes from its prefill.
    assert (prefill, decoded, prefilled) == (2 * 2, 2 * 5, 2)
    assert context == 2 * sum(range(4, 9))


# --- aside, states, sleep -----------------------------------------------------------------------------------------


def test_rollouts_in_flight_are_paused_by_aside(server: StandIn, connect: Any, model: Any) -> None:
    server.delay_s = 0.02
    generator = connect()
    generator.submit(GroupRequest(0, PROMPT, 6, (1,)))
    step_until(generator, 6)
    other = {name: tensor + 1 for name, tensor in model.state_dict().items()}
    with generator.aside():
        assert generator.in_flight == 0
        # The server notices a closed connection only when it next writes to it.
        end = time.monotonic() + PATIENCE_S
        while +server.open and time.monotonic() < end:
            time.sleep(0.01)
        assert not +server.open
        generator.publish(other, 9)
        generator.submit(GroupRequest(0, PROMPT, 1, (2,)))
        (inside,) = drained(generator)
        assert set(inside.rollout.weight_versions) == {9}
    assert generator.version == 0 and server.label == "0"
    assert torch.equal(server.tensors["lm_head.weight"], model.state_dict()["lm_head.weight"])
    collected = drained(generator)
    assert sorted(item.index for item in collected) == list(range(6))
    assert all(len(item.rollout.tokens) == 6 and set(item.rollout.weight_versions) == {0} for item in collected)


def test_a_state_holds_partial_rollouts(server: StandIn, connect: Any, model: Any, tmp_path: Any) -> None:
    server.delay_s = 0.02
    generator = connect()
    generator.submit(GroupRequest(0, PROMPT, 5, (1,)))
    step_until(generator, 6)
    torch.save(generator.state_dict(), tmp_path / "state.pt")
    generator.close()
    before = [len(item.rollout.tokens) for item in generator._unfinished()]
    other = connect()
    other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    server.bodies.clear()
    collected = drained(other)
    assert sorted(item.index for item in collected) == list(range(5)) and max(before) > 0
    assert max(len(body["token_ids"]) for body in server.bodies) > len(PROMPT), (
        "rollouts continue after their saved tokens"
    )


def test_weights_changed_in_place_are_detected(connect: Any, model: Any) -> None:
    generator = connect()
    own_weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    generator.publish(own_weights, 1)
    next(iter(own_weights.values())).add_(1.0)
    with pytest.raises(RuntimeError, match="changed in place"):
        generator.state_dict()
    generator.publish(own_weights, 2)


def test_a_sleeping_server_samples_nothing(server: StandIn, connect: Any) -> None:
    server.delay_s = 0.02
    generator = connect()
    generator.submit(GroupRequest(0, PROMPT, 2, (1,)))
    step_until(generator, 2)
    generator.sleep()
    assert server.calls[-1] == "/sleep?level=1&mode=abort" and not +server.open
    requests = len(server.bodies)
    for _ in range(3):
        generator.step()
        time.sleep(0.1)
    assert len(server.bodies) == requests
    generator.wake()
    assert server.calls[-1] == "/wake_up" and len(drained(generator)) == 2
    server.config["model_config"]["enable_sleep_mode"] = False
    with pytest.raises(ConfigurationError, match="--enable-sleep-mode"):
        connect().sleep()


# --- failures -----------------------------------------------------------------------------------------------------


def failing(**failures: list[Any]) -> Any:
    def change(server: StandIn) -> None:
        server.failures["/inference/v1/generate"] = failures["generate"]

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (failing(generate=[503]), "answers 503: not now"),
        (failing(generate=["garbage"]), "no JSON"),
        (with_attributes(manner="breaks"), "broke off"),
        (with_attributes(manner="ends early"), "broke off in the middle of an answer"),
        (with_attributes(manner="too many"), "more tokens than asked for"),
        (with_attributes(manner="no labels"), "names the weights of 0 of"),
        (with_attributes(manner="other tokens"), "log-probabilities of other tokens"),
    ],
)
def test_an_unusable_answer_is_a_lost_engine(server: StandIn, connect: Any, change: Any, message: str) -> None:
    generator = connect()
    change(server)
    generator.submit(GroupRequest(0, PROMPT, 1, (1,)))
    with pytest.raises(EngineLostError, match=message) as caught:
        drained(generator)
    assert "\n" not in str(caught.value)


Part = dict[str, Any]


def choice(**fields: Any) -> Any:
    """Lie that sets fields of every choice."""
    return lambda part: {**part, "choices": [{**item, **fields} for item in part["choices"]]}


def entry(**fields: Any) -> Any:
    """Lie that sets fields of every token's entry."""

    def lie(part: Part) -> Part:
        return {
            **part,
            "choices": [
                {**item, "logprobs": {"content": [{**one, **fields} for one in item["logprobs"]["content"]]}}
                for item in part["choices"]
            ],
        }

    return lie


def token(value: Any) -> Any:
    """Lie that replaces every token id, in the choice and in its entries."""

    def lie(part: Part) -> Part:
        part = {
            **part,
            "choices": [{**item, "token_ids": [value] * len(item["token_ids"])} for item in part["choices"]],
        }
        return entry(token_id=value)(part)  # type: ignore[no-any-return]

    return lie


def at_the_end(**fields: Any) -> Any:
    """Lie that sets fields of the choice that ends the completion."""

    def lie(part: Part) -> Part:
        return {**part, "choices": [{**e, **fields} if e["finish_reason"] else e for e in part["choices"]]}

    return lie


def span(start: Any = 0, end: Any = 6, version: Any = "0", *more: Part) -> Any:
    return at_the_end(weight_versions=[{"version": version, "start": start, "end": end}, *more])


def usage(**fields: Any) -> Any:
    return lambda part: {**part, "usage": part["usage"] and {**part["usage"], **fields}}


def twice(part: Part) -> Part:
    """Lie that sends each entry twice, so that there are more entries than tokens."""
    return {**part, "choices": [{**e, "logprobs": {"content": e["logprobs"]["content"] * 2}} for e in part["choices"]]}


LIES = {
    "token beyond the vocabulary": (token(10**6), "1000000 is no id of the model's"),
    "negative token": (token(-1), "-1 is no id"),
    "null token": (token(None), "None is no id"),
    "token true": (token(True), "True is no id"),
    "token 2.0": (token(2.0), "2.0 is no id"),
    "token as text": (token("2"), "'2' is no id"),
    "tokens as text": (choice(token_ids="23"), "'23' is no list"),
    "log-probability NaN": (entry(logprob=float("nan")), "nan is no log-probability"),
    "log-probability above 0": (entry(logprob=0.5), "0.5 is no log-probability"),
    "log-probability infinite": (entry(logprob=float("-inf")), "-inf is no log-probability"),
    "log-probability beyond FP32": (entry(logprob=-1e300), r"-1e\+300 is no log-probability"),
    "log-probability null": (entry(logprob=None), "None is no log-probability"),
    "log-probability false": (entry(logprob=False), "False is no log-probability"),
    "log-probability as text": (entry(logprob="-1.0"), "'-1.0' is no log-probability"),
    "no log-probabilities": (choice(logprobs=None), "other tokens than it samples"),
    "more log-probabilities than tokens": (twice, "other tokens than it samples"),
    "entries of other tokens": (entry(token_id=9), "other tokens than it samples"),
    "unknown version": (span(version="7"), "'7' labels no weights"),
    "version of nobody": (span(version="default"), "'default' labels no weights"),
    "version null": (span(version=None), "None labels no weights"),
    "version as number": (span(version=0), "0 labels no weights"),
    "span of 10^9": (span(end=10**9), "a span from 0 to 1000000000, behind 0 of 6 tokens"),
    "span outside of the completion": (span(end=7), "a span from 0 to 7"),
    "spans that overlap": (span(0, 6, "0", {"version": "0", "start": 3, "end": 6}), "from 3 to 6, behind 6 of 6"),
    "spans with a gap": (span(0, 2, "0", {"version": "0", "start": 4, "end": 6}), "from 4 to 6, behind 2 of 6"),
    "span backwards": (span(0, -6), "from 0 to -6"),
    "span of floats": (span(0.0, 6.0), "from 0.0 to 6.0"),
    "span null": (at_the_end(weight_versions=[None]), "None is no object"),
    "too short a span": (span(end=5), "names the weights of 5 of 6"),
    "more tokens than log-probabilities": (choice(token_ids=[2] * 7), "other tokens"),
    "unknown reason": (at_the_end(finish_reason="tired"), "'tired' is unknown"),
    "reason as number": (at_the_end(finish_reason=1), "1 is unknown"),
    "stop without a token that stops": (at_the_end(finish_reason="stop"), "the last token, 7, ends no completion"),
    "length before it": (choice(finish_reason="length"), "length, after 1 of 6"),
    "abort that nobody asked for": (at_the_end(finish_reason="abort"), "ended a request with 'abort'"),
    "no end": (at_the_end(finish_reason=None), "ended a request with ''"),
    "goes on behind its end": (token(1), "goes on behind a token that ends"),
    "answer to another request": (lambda part: {**part, "request_id": "another"}, "'another' is another request"),
    "another prompt": (usage(prompt_tokens=4), "a prompt of 4 tokens, and this one has 3"),
    "other numbers of tokens": (usage(completion_tokens=5), "5 tokens sampled, and 6 have come"),
    "cached tokens of nothing": (usage(prompt_tokens_details={"cached_tokens": 10**9}), "1000000000 cached"),
    "negative cache": (usage(prompt_tokens_details={"cached_tokens": -3}), "-3 cached"),
    "second completion": (choice(index=1), "index: 1"),
    "two completions": (lambda part: {**part, "choices": part["choices"] * 2}, "2 of them"),
    "choices by name": (lambda part: {**part, "choices": {"0": None}}, "a dict is no list"),
    "list": (lambda part: [part], "a list is no object"),
    "number": (lambda part: 3, "3 is no object"),
    "nested deep": (lambda part: b"[" * 10**5 + b"]" * 10**5, "nested too deep"),
    "number of 10^5 digits": (lambda part: b"9" * 10**5, "no JSON"),
    "endless": (lambda part: b'{"choices": []}\n\ndata: ' * 99 + b"{}", "parts for at most 6 tokens"),
    "gigabytes": (lambda part: {**part, "more": "x" * 3000}, "answers more than 4096 bytes"),
    "error": (lambda part: {"error": {"message": f"\x1b[2J {TOKEN}\r\n\x07!"}}, r"ends with \[2J \*\*\* !$"),
    "error nested deep": (lambda part: b'{"error": ' + b"[" * 500 + b"]" * 500 + b"}", "ends with a list$"),
}


def test_invalid_answers_are_lost_engines_and_never_rollouts(
    server: StandIn, connect: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each lie of the stand-in must become a one-line EngineLostError."""
    generator = connect(silence_s=20.0)
    monkeypatch.setattr(vllm_stream, "ROOM_BYTES", 2**12)
    for name, (lie, message) in LIES.items():
        server.lie = lie
        monkeypatch.setattr(vllm_stream, "TOKEN_BYTES", 0 if name == "gigabytes" else 2**20)
        generator.submit(GroupRequest(0, PROMPT, 1, (1,)))
        with pytest.raises(EngineLostError) as caught:
            drained(generator)
        assert re.search(message, str(caught.value)), (name, str(caught.value))
        assert str(caught.value).isprintable() and TOKEN not in str(caught.value)
        generator._running.clear()
    server.lie = None
    generator.submit(GroupRequest(0, PROMPT, 1, (1,)))
    assert len(drained(generator)) == 1, "a correct answer is still accepted"


def test_errors_quote_answers_in_one_short_line(server: StandIn, connect: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = connect()
    monkeypatch.setattr(vllm_http, "MAX_ANSWER_BYTES", 1000)
    monkeypatch.setattr(vllm_http, "MAX_ERROR_BYTES", 2000)
    for text, message in (
        (f"\x1b]0;{TOKEN}\x07 \u202e{TOKEN}", r"/pause answers 500: \]0;\*\*\* \*\*\*$"),
        ("x" * 2001, "answers more than 2000 bytes"),
        ("[" * 1900, r"answers 500: \[{300}$"),
    ):
        server.failures["/pause"] = [text]
        with pytest.raises(EngineLostError, match=message) as caught:
            generator._call("POST", "/pause")
        assert str(caught.value).isprintable() and TOKEN not in str(caught.value)
    server.config["more"] = "x" * 1000
    with pytest.raises(EngineLostError, match="server_info answers more than 1000 bytes"):
        generator._call("GET", "/server_info")


def test_an_answer_that_arrives_twice_is_one_rollout(server: StandIn, connect: Any) -> None:
    generator = connect()
    server.manner = "twice"
    generator.submit(GroupRequest(0, PROMPT, 3, (1,)))
    collected = drained(generator)
    generator.submit(GroupRequest(1, PROMPT, 3, (1,)))
    generator._streams.events.put(Tokens("a request that was given up", [9], [-1.0]))
    collected += drained(generator)
    assert [(item.key, item.index) for item in collected] == [(key, index) for key in (0, 1) for index in range(3)]
    assert all(len(item.rollout.tokens) == 6 for item in collected)


def test_a_slow_server_is_not_lost(server: StandIn, connect: Any) -> None:
    server.delay_s = 0.5
    generator = connect(max_new_tokens=4)
    generator.submit(GroupRequest(0, PROMPT, 2, (1,)))
    assert len(drained(generator)) == 2  # 2 s in total, with a limit of 1.5 s between two signs of life


def test_a_server_that_hangs_is_lost(server: StandIn, connect: Any) -> None:
    generator = connect(silence_s=1.0)
    server.failures = {"/inference/v1/generate": ["hang"], "/health": ["hang"]}
    began = time.monotonic()
    generator.submit(GroupRequest(0, PROMPT, 1, (1,)))
    with pytest.raises(EngineLostError, match="was silent for"):
        drained(generator)
    assert 0.9 < time.monotonic() - began < 5
    server.failures = {"/pause": ["hang"]}
    with pytest.raises(EngineLostError, match="/pause has not answered for 1 s"):
        generator.publish({}, 5)
    server.failures = {}


def test_a_server_that_goes_away_is_lost(server: StandIn, connect: Any) -> None:
    server.delay_s = 0.05
    generator = connect()
    generator.submit(GroupRequest(0, PROMPT, 4, (1,)))
    step_until(generator, 4)
    server.down()
    with pytest.raises(EngineLostError, match="broke off"):
        drained(generator)
    server.up()
    server.tensors.clear()
    server.bodies.clear()
    reconnected = connect()
    assert server.tensors and not any(body.get("stream") for body in server.bodies), "weights are sent before prompts"
    reconnected.submit(GroupRequest(0, PROMPT, 4, (1,)))
    assert len(drained(reconnected)) == 4


# --- weights ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sees_files", [True, False], ids=["file", "HTTP"])
def test_weights_are_sent_in_the_policys_dtype_in_buckets(
    server: StandIn, connect: Any, model: Any, sees_files: bool
) -> None:
    server.sees_files = sees_files
    server.config["model_config"] |= {"dtype": "torch.bfloat16", "hf_overrides": {"head_dtype": "float32"}}
    generator = connect(precision=Precision("bf16"), bucket_mib=0.01)
    sender = generator._sender
    assert sender.method.startswith("files in" if sees_files else "HTTP from 127.0.0.1")
    weights = dict(model.state_dict())
    expected = {name: tensor.bfloat16() for name, tensor in weights.items()}
    assert {name: tensor.dtype for name, tensor in server.tensors.items()} == dict.fromkeys(expected, torch.bfloat16)
    assert all(torch.equal(server.tensors[name], tensor) for name, tensor in expected.items())
    weights_bytes = sum(tensor.numel() * 2 for tensor in weights.values())
    assert sender.bytes_sent == weights_bytes and sender.buckets >= weights_bytes // 10486
    largest = max(tensor.numel() * 2 for tensor in weights.values())
    assert sender.allocated == max(int(0.01 * 2**20), largest) < weights_bytes, "no more than one bucket is allocated"
    if not sees_files:
        # Headers are small, and nothing is sent as FP32.
        assert weights_bytes < sender.wire_bytes < 1.3 * weights_bytes
    before = sender.digest
    generator.publish(weights, 1)
    assert sender.digest == before
    weights["lm_head.weight"] = weights["lm_head.weight"] + 0.01
    generator.publish(weights, 2)
    assert sender.digest != before


def test_weights_over_http_need_the_key(server: StandIn, connect: Any) -> None:
    from urllib.error import HTTPError
    from urllib.request import urlopen

    server.sees_files = False
    connect()
    with pytest.raises(HTTPError, match="401"):
        urlopen(server.inits[-1]["url"], timeout=5)


@pytest.mark.slow
def test_a_server_without_requests_ends() -> None:
    """The guard's idle timeout, in a process that stands for the server; requests postpone it."""
    code = (
        "import asyncio, time; from lightning_scalerl.generator.vllm.plugin import Guard\n"
        "async def app(*given): pass\n"
        "guard = Guard(app)\n"
        "for _ in range(8):\n"
        "    time.sleep(0.2)\n"
        "    asyncio.run(guard({'type': 'http', 'path': '/health'}, None, None))\n"
        "print('asked', flush=True)\n"
        "time.sleep(60)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, IDLE: "1.0"}, capture_output=True, timeout=50
    )
    assert done.stdout == b"asked\n" and done.returncode == -signal.SIGTERM


@pytest.mark.slow
def test_a_server_ends_with_the_program_that_started_it() -> None:
    """The plugin watches the parent process; here in a process that stands for one of the server's."""
    from lightning_scalerl.generator.vllm.plugin import PARENT

    code = (
        "import sys, types, time; known = types.ModuleType('vllm.distributed.weight_transfer');"
        "known.WeightTransferEngineFactory = types.SimpleNamespace(register_engine=lambda *given: None);"
        "sys.modules |= {'vllm': known, 'vllm.distributed': known, 'vllm.distributed.weight_transfer': known};"
        "from lightning_scalerl.generator.vllm.plugin import register; register(); time.sleep(60)"
    )
    with subprocess.Popen(["sleep", "0.2"]) as parent:
        here, elsewhere = (
            subprocess.Popen([sys.executable, "-c", code], env={**os.environ, PARENT: f"{parent.pid}@{host}"})
            for host in (socket.gethostname(), "another-node")
        )
    try:
        assert here.wait(30) == 1
        assert elsewhere.poll() is None, "a process on another node cannot see the parent"
    finally:
        elsewhere.kill()
        elsewhere.wait()


# Stands for vLLM's server: it starts a worker that ignores SIGTERM, answers requests, and takes 0.3 s to end.
_SERVER = """
import os, signal, subprocess, sys, threading, time
from http.server import BaseHTTPRequestHandler, HTTPServer
class Answers(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
def end(number, frame):
    time.sleep(0.3)
    open("ended", "w").close()
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
worker = subprocess.Popen(["sh", "-c", "trap '' TERM; echo there; sleep 77 & wait"], stdout=subprocess.PIPE)
worker.stdout.readline()
with open("unfinished", "w") as file:
    print(os.getpid(), worker.pid, os.environ["SCALERL_SERVER_PARENT"], file=file)
os.rename("unfinished", "started")
threading.Thread(target=HTTPServer(("127.0.0.1", int(sys.argv[1])), Answers).serve_forever, daemon=True).start()
time.sleep(77)
"""
_COMMAND = """
import sys
from pathlib import Path
from types import SimpleNamespace
from lightning_scalerl.generator.vllm import serve as vllm_serve
anything = SimpleNamespace(from_pretrained=lambda name: None, from_config=lambda config: None)
sys.modules["transformers"] = SimpleNamespace(AutoConfig=anything, AutoModelForCausalLM=anything)
code, port, *options = sys.argv[1:]
given = vllm_serve.Server([sys.executable, "-c", code, port], {}, f"http://127.0.0.1:{port}", Path("shape"))
def prepared(model, *arguments, token, **settings):
    given.token = token
    return given
vllm_serve.prepare = prepared
given.folder.mkdir()
sys.exit(vllm_serve.main([*options, "--max-tokens", "25"]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "ending", ["SIGTERM", *(pytest.param(ending, marks=pytest.mark.full) for ending in ("its input", "SIGINT"))]
)
def test_a_server_started_by_hand_ends_with_its_command(ending: str, tmp_path: Path) -> None:
    """The command ends the server and its processes and waits for them; until then, the server is announced."""
    port = free_port()
    announcement = Announcement(tmp_path / "announced")
    options = ["-" if ending == "its input" else "model", "--announce", str(announcement.path)]
    command = subprocess.Popen(
        [sys.executable, "-c", _COMMAND, _SERVER, str(port), *options],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        # As in a terminal, even if the tests run in the background with Ctrl-C ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert command.stdin is not None
    try:
        command.stdin.write(b"{}\n")
        command.stdin.flush()
        until = time.monotonic() + 60
        while not announcement.path.exists():
            assert command.poll() is None and time.monotonic() < until
            time.sleep(0.02)
        server, worker, parent = (tmp_path / "started").read_text().split()
        # A killed command cannot tell the server, so the server's processes watch for its end.
        assert parent == f"{command.pid}@{socket.gethostname()}"
        address, token = announcement.read()
        assert address == f"http://127.0.0.1:{port}" and len(token) == 64
        if ending == "its input":  # as in an srun step whose run has ended
            command.stdin.close()
        else:
            command.send_signal(signal.Signals[ending])
        assert command.wait(30) == (0 if ending == "SIGINT" else 143)
        assert (tmp_path / "ended").exists(), "the server had time to end"
        assert not announcement.path.exists()
        assert not (tmp_path / "shape").exists()
        while alive := [pid for pid in (server, worker) if runs(pid)]:
            assert time.monotonic() < until + 30, alive
            time.sleep(0.02)
    finally:
        command.kill()
        command.wait()


def runs(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_each_waiting_rollout_is_reported_once(server: StandIn, connect: Any) -> None:
    """Also if the wait begins during a publish and is followed by `aside`. A loaded state reports nothing again."""
    generator = connect()
    generator.submit(GroupRequest(0, PROMPT, 2, (1,), waits=True, turn_tokens=2))
    while len(generator.waiting) < 2:
        generator._report_queue.append(generator._advance(0.02))  # as publishing does
    with generator.aside():
        assert generator.idle and not generator.in_flight
    reported = []
    while not generator.idle:
        reported += generator.step().waiting
    assert sorted(item.index for item in reported) == [0, 1] and len(generator.waiting) == 2
    generator.load_state_dict(generator.state_dict())
    assert len(generator.waiting) == 2 and generator.idle


def test_a_rollout_continues_after_an_answer(server: StandIn, connect: Any) -> None:
    generator = connect()
    generator.submit(GroupRequest(0, PROMPT, 2, (1,), waits=True, turn_tokens=2))
    while len(generator.waiting) < 2:
        generator.step()
    assert [item.rollout.tokens for item in generator.waiting] == [[2, 3]] * 2 and generator.free_slots == 4
    generator.insert(0, 1, [12, 13])
    generator.end(0, 0)
    report = generator.step()
    assert not any(report.computed)
    (first,) = (item.rollout for item in report.finished)
    while not generator.waiting:
        generator.step()
    generator.end(0, 1)
    (second,) = (item.rollout for item in drained(generator))
    assert first.tokens == [2, 3] and first.finish_reason == "length"
    assert second.tokens == [2, 3, 12, 13, 2, 3] and second.sources == [0, 0, 2, 2, 0, 0]
    requests = [body for body in server.bodies if body.get("stream")]
    assert requests[-1]["token_ids"] == [*PROMPT, 2, 3, 12, 13] and requests[-1]["sampling_params"]["max_tokens"] == 2
    with pytest.raises(ValueError, match="token 99999 is not in the vocabulary"):
        generator.insert(0, 1, [99999])
