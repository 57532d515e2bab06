"""Tests of vLLM's own HTTP server on this machine: its log-probabilities equal the trainer's after every publish.

Most tests share one server, because starting one takes half a minute. Its model has a head tied to the embeddings,
which vLLM on a CPU must pack again at every reload.
"""

from __future__ import annotations

import os
import shlex
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
import torch

from lightning_scalerl.axes.precision import Precision
from lightning_scalerl.checks import ConfigurationError
from lightning_scalerl.generator.base import FinishedRollout, GroupRequest
from lightning_scalerl.generator.fleet.fleet import Fleet
from lightning_scalerl.generator.vllm.client import VLLMServerGenerator
from lightning_scalerl.generator.vllm.generator import VLLMGenerator
from lightning_scalerl.generator.vllm.http import EngineLostError
from lightning_scalerl.generator.vllm.serve import Server, main, prepare, serve
from lightning_scalerl.generator.vllm.teacher import VLLMTeacher
from lightning_scalerl.generator.vllm.weights import TransferRoutes
from lightning_scalerl.model.policy import Policy
from lightning_scalerl.stream.credit import assemble
from tests.generator.sampling import with_sampling
from tests.generator.test_vllm import (
    FP32,
    LONG,
    SHORT,
    STOP,
    check_three_turns,
    drained,
    gap,
    generator_of,
    new_model,
    trainers,
)
from tests.helpers import make_group, row

pytestmark = pytest.mark.vllm

FAMILY = "Qwen2, tied"
TOKEN = "secret"
START_S = 300.0


@pytest.fixture(scope="module")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Register our vLLM plugin, also if the installed package has no entry point for it yet."""
    place = tmp_path_factory.mktemp("plugin")
    folder = place / "scalerl_plugin_of_tests-0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: scalerl-plugin-of-tests\nVersion: 0\n")
    (folder / "entry_points.txt").write_text(
        "[vllm.general_plugins]\nlightning_scalerl_of_tests = lightning_scalerl.generator.vllm.plugin:register\n"
    )
    sys.path.insert(0, str(place))
    yield
    sys.path.remove(str(place))


def start_server(model: Any, **options: Any) -> Server:
    return serve(model, FP32, slots=16, capacity=500, cache_gib=0.25, token=TOKEN, start_s=START_S, **options)


@pytest.fixture(scope="module")
def server(plugin: None) -> Iterator[Server]:
    running = start_server(new_model(FAMILY))
    yield running
    running.close()


def connect(server: Server, model: Any, **options: Any) -> VLLMServerGenerator:
    values = {"slots": 8, "max_prompt_tokens": 160, "max_new_tokens": 16, "stop_tokens": [STOP], **options}
    return VLLMServerGenerator(model, FP32, address=server.address, token=TOKEN, away_s=5.0, **with_sampling(**values))


@pytest.fixture
def generator(server: Server) -> Iterator[VLLMServerGenerator]:
    opened = connect(server, new_model(FAMILY), phrase=[6, 7])
    yield opened
    opened.close()


@pytest.mark.parametrize("transfer", ["file", "http"])
def test_log_probabilities_are_the_trainers_at_every_publish(server: Server, transfer: str) -> None:
    old, new = new_model(FAMILY, 1), new_model(FAMILY, 2)
    generator = connect(server, old, transfer=transfer, bucket_mib=0.1)
    digests, checksums = [], []
    try:
        for number, (ours, other) in enumerate([(old, new), (new, old), (old, new)]):
            generator.publish(dict(ours.state_dict()), number)
            digests.append(generator._sender.digest)
            checksums.append(generator._call("POST", "/weight_checker", {"action": "checksum"})["checksums"])
            generator.submit(GroupRequest(number, LONG, 6, (0, number)))
            generator.submit(GroupRequest(10 + number, SHORT, 3, (1, number)))
            collected = drained(generator)
            assert len(collected) == 9 and {v for entry in collected for v in entry.rollout.weight_versions} == {number}
            assert max(gap(ours, LONG, collected[:6]), gap(ours, SHORT, collected[6:])) < 1e-4
            assert gap(other, LONG, collected[:6]) > 1e-2
            tokens = collected[0].rollout.tokens
            assert float((generator.score(LONG, tokens) - trainers(ours, LONG, tokens)).abs().max()) < 1e-4
        assert generator._sender.buckets > 1
        for history in (digests, checksums):
            assert history[0] == history[2] != history[1]
    finally:
        generator.close()


def test_a_teacher_gives_the_logprobs_of_the_local_model(server: Server) -> None:
    """The teacher's log-probabilities come from the OpenAI-compatible route, for the weights that it serves."""
    taught, other = new_model(FAMILY, 1), new_model(FAMILY, 2)
    generator = connect(server, taught)
    generator.close()  # the server keeps its weights
    groups = [make_group([0.0] * 4, number, prompt_length=5 + number, seed=3) for number in range(10)]
    batch = assemble(groups, row(), max_new_tokens=8)
    teacher = VLLMTeacher(server.address, 100, 60.0, TOKEN)
    try:
        collected = teacher.score(batch)
    finally:
        teacher.close()
    with torch.no_grad():
        ours, others = (Policy(model, FP32)(batch)[0] for model in (taught, other))
    assert float((collected - ours).abs().max()) < 1e-4 and float((collected - others).abs().max()) > 1e-2


def test_the_same_seeds_give_the_same_tokens_as_in_this_process(generator: VLLMServerGenerator) -> None:
    """vLLM promises this for requests with seeds if no rounding differs, as here with FP32 and a small model."""
    inside = generator_of(new_model(FAMILY), phrase=[6, 7])
    try:
        for entry in (inside, generator):
            entry.submit(GroupRequest(0, LONG, 6, (3, 1)))
            entry.submit(GroupRequest(1, SHORT, 4, (3, 2), (4,) * 4))
            entry.submit(GroupRequest(2, LONG, 3, (3, 3), waits=True, turn_tokens=4))
        ours, theirs = answer_all(inside), answer_all(generator)
    finally:
        inside.close()
    assert [entry.rollout.tokens for entry in ours] == [entry.rollout.tokens for entry in theirs]
    assert [entry.rollout.sources for entry in ours] == [entry.rollout.sources for entry in theirs]
    assert {source for entry in theirs for source in entry.rollout.sources} == {0, 1, 2}
    for one, other in zip(ours, theirs, strict=True):
        assert one.rollout.generator_logprobs == pytest.approx(other.rollout.generator_logprobs, abs=1e-5)


@pytest.mark.parametrize("updated", [False, True])
def test_the_trainer_agrees_over_three_turns(server: Server, updated: bool) -> None:
    """The trainer's log-probabilities match, also if new weights are published after the first turn."""
    old = new_model(FAMILY, 1)
    generator = connect(server, old)
    try:
        check_three_turns(generator, old, new_model(FAMILY, 2), updated)
    finally:
        generator.close()


def answer_all(generator: Any) -> list[FinishedRollout]:
    """Step until all rollouts have ended; each rollout that waits gets one answer."""
    collected: list[FinishedRollout] = []
    while generator.in_flight:
        for entry in generator.waiting:
            if any(entry.rollout.inserted):
                generator.end(entry.key, entry.index)
            else:
                generator.insert(entry.key, entry.index, [9, 12])
        collected += generator.step().finished
    return sorted(collected, key=lambda entry: (entry.key, entry.index))


def signal_engine(server: Server, number: signal.Signals) -> None:
    """Send a signal to the server's worker processes, which compute, but not to the process that answers requests."""
    assert server.process is not None
    collected = []
    for place in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            name, _, stat_fields = place.read_text().partition("(")[2].rpartition(")")
            if "Worker" in name and int(stat_fields.split()[2]) == server.process.pid:  # the server's process group
                collected.append(int(place.parent.name))
    assert collected
    for pid in collected:
        os.kill(pid, number)


@contextmanager
def running(server: Server) -> Iterator[None]:
    """Let the server's workers run in the `with` block; stop them after it."""
    signal_engine(server, signal.SIGCONT)
    try:
        yield
    finally:
        signal_engine(server, signal.SIGSTOP)


def in_the_middle(server: Server, generator: VLLMServerGenerator, tokens: int) -> list[FinishedRollout]:
    """Stop the engine in the middle of some rollouts; return rollouts that have ended already.

    The workers run in short slices and are stopped while this process reads. Otherwise all rollouts would end before
    the first tokens are read.
    """
    collected: list[FinishedRollout] = []
    while generator.sampled_in_flight < tokens and not collected:
        with running(server):
            time.sleep(0.02)
        read_until = time.monotonic() + 0.5  # time for the sampled tokens to arrive
        while time.monotonic() < read_until:
            collected += generator.step().finished
    return collected


@pytest.mark.parametrize("recompute", [False, True])
def test_weights_change_within_continued_rollouts(server: Server, recompute: bool) -> None:
    old, new = new_model(FAMILY), new_model(FAMILY, 5)
    generator = connect(server, old, max_prompt_tokens=12, max_new_tokens=480, stop_tokens=[])
    assert server.process is not None
    # On a busy machine too, this reader must run before the server.
    os.setpriority(os.PRIO_PGRP, server.process.pid, 19)
    try:
        for attempt in range(5):  # a reader that is delayed for half a second finds all rollouts finished
            generator.publish(dict(old.state_dict()), 0)
            generator.submit(GroupRequest(attempt, SHORT, 12, (3, attempt)))
            collected = in_the_middle(server, generator, 60)
            # Continue the engine once the pause request waits for it.
            resume = threading.Timer(1.0, lambda: signal_engine(server, signal.SIGCONT))
            resume.start()
            generator.publish(dict(new.state_dict()), 7, recompute)
            resume.join()
            collected += drained(generator)
            assert sorted(entry.index for entry in collected) == list(range(12))
            if sum(0 < entry.rollout.weight_versions.count(0) < 460 for entry in collected) > 1:
                break
        else:
            pytest.fail("no publish happened during two rollouts")
        for rollout in (entry.rollout for entry in collected):
            before = rollout.weight_versions.count(0)
            assert rollout.weight_versions == [0] * before + [7] * (480 - before)
            recorded = torch.tensor(rollout.generator_logprobs)
            # Tokens that the server labels with the old version must have the old weights' log-probabilities.
            if before:
                assert float((trainers(old, SHORT, rollout.tokens) - recorded).abs()[:before].max()) < 1e-4
            if before < 460:
                beyond = float((trainers(new, SHORT, rollout.tokens) - recorded).abs()[before:].max())
                # A cache of the old weights under new weights matches neither policy.
                assert beyond < 1e-4 if recompute or not before else beyond > 1e-2
    finally:
        signal_engine(server, signal.SIGCONT)
        os.setpriority(os.PRIO_PGRP, server.process.pid, 0)
        generator.close()


def test_a_run_names_a_server_by_its_address(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """With `driver.engines=[http://...]` and `generator=vllm`, a child process of the run connects to the server."""
    assert server.address is not None
    monkeypatch.setenv("VLLM_API_KEY", TOKEN)
    model, other = new_model(FAMILY, 1), new_model(FAMILY, 2)
    settings = with_sampling(max_prompt_tokens=160, max_new_tokens=16, stop_tokens=[STOP], precision=FP32)
    factory = partial(VLLMGenerator, slots=8)
    limits: dict[str, Any] = {"generators": 1, "silence_s": 20, "start_s": START_S}
    fleet = Fleet(factory, model, settings, engines=[server.address], **limits)
    try:
        for number, (ours, theirs) in enumerate([(model, other), (other, model)]):
            fleet.publish(dict(ours.state_dict()), number)
            fleet.submit(GroupRequest(number, LONG, 6, (0, number)))
            collected = drained(fleet)
            assert gap(ours, LONG, collected) < 1e-4 and gap(theirs, LONG, collected) > 1e-2
    finally:
        fleet.close()


def test_an_interrupted_update_does_not_affect_the_next_connection(server: Server) -> None:
    """Neither an update that the server refused nor one whose sender ended halfway."""
    ours, other = new_model(FAMILY, 1), new_model(FAMILY, 2)
    generator = connect(server, other)
    wrong = {name: tensor[:, :3] if tensor.ndim == 2 else tensor for name, tensor in ours.state_dict().items()}
    with pytest.raises(EngineLostError, match=r"update_weights answers 500.*stays paused"):
        generator.publish(wrong, 1)
    assert generator._call("GET", "/is_paused") == {"is_paused": True}
    generator.close()

    half = connect(server, other, bucket_mib=0.02)
    control = TransferRoutes(half._connection, 30.0)
    finish, control.finish_weight_update = control.finish_weight_update, lambda *_: None  # type: ignore[method-assign]
    assert finish
    half._sender._control = control
    state = dict(other.state_dict())
    half._sender.send(half._model, dict(list(state.items())[:5]), "9")
    half._connection.close()

    last = connect(server, ours)
    try:
        last.submit(GroupRequest(0, LONG, 4, (1,)))
        collected = drained(last)
        assert gap(ours, LONG, collected) < 1e-4 and gap(other, LONG, collected) > 1e-2
    finally:
        last.close()


def test_requests_without_the_token_are_refused(server: Server, generator: VLLMServerGenerator) -> None:
    for path in ("/pause", "/collective_rpc", "/update_weights", "/inference/v1/generate"):
        with pytest.raises(HTTPError, match="401"):
            urlopen(Request(f"{server.address}{path}", data=b"{}"), timeout=10)
    with urlopen(f"{server.address}/health", timeout=10) as answer:
        assert answer.status == 200
    with pytest.raises(ConfigurationError, match="without a token takes weights from everybody"):
        prepare(new_model(FAMILY), FP32, slots=1, capacity=177, cache_gib=0.25, host="0.0.0.0")
    assert TOKEN not in server.line


@pytest.mark.parametrize("policy", ["fp32", "bf16"])
def test_a_gpu_server_gets_the_given_cache_size_and_the_policys_precision(plugin: None, policy: str) -> None:
    options = {"slots": 1, "capacity": 177, "cache_gib": 0.25, "on_cpu": False, "backend": "ipc"}
    server = prepare(new_model(FAMILY), Precision(policy), **options)
    server.close()
    words = dict(pairwise(server.command))
    assert words["--kv-cache-memory-bytes"] == str(2**28)
    # vLLM must not demand a larger free share of the GPU, because a trainer may use the rest.
    assert words["--gpu-memory-utilization"] == "0.01"
    assert server.environment.get("TRITON_F32_DEFAULT") == ("ieee" if policy == "fp32" else None)


def test_a_killed_server_is_lost_and_a_new_one_gets_weights_before_prompts(server: Server) -> None:
    """This test must be the last one that uses the shared server."""
    ours = new_model(FAMILY, 3)
    generator = connect(server, ours, max_prompt_tokens=12, max_new_tokens=480, stop_tokens=[])
    generator.submit(GroupRequest(0, SHORT, 32, (7,)))
    while not generator.sampled_in_flight:
        generator.step()
    assert server.process is not None
    os.killpg(server.process.pid, signal.SIGKILL)
    server.process.wait()
    with pytest.raises(EngineLostError, match="broke off") as caught:
        drained(generator)
    assert "\n" not in str(caught.value)
    generator.close()
    server.start()
    server.wait(START_S)
    reconnected = connect(server, ours)
    try:
        reconnected.submit(GroupRequest(0, LONG, 6, (7,)))
        collected = drained(reconnected)
        assert len(collected) == 6 and gap(ours, LONG, collected) < 1e-4
    finally:
        reconnected.close()


@pytest.mark.full
@pytest.mark.parametrize("family", ["Qwen3Moe", "Gemma2"])
def test_logprobs_of_a_family_agree_before_and_after_an_update(plugin: None, family: str) -> None:
    old, new = new_model(family, 1), new_model(family, 2)
    running = start_server(old)
    try:
        generator = connect(running, old, bucket_mib=0.05)
        for number, (ours, other) in enumerate([(old, new), (new, old), (old, new)]):
            generator.publish(dict(ours.state_dict()), number)
            generator.submit(GroupRequest(number, LONG, 4, (0, number)))
            collected = drained(generator)
            assert gap(ours, LONG, collected) < 1e-4 and gap(other, LONG, collected) > 1e-2
        generator.close()
    finally:
        running.close()


def test_the_process_group_is_gone_after_close(plugin: None, tmp_path: Path) -> None:
    server = prepare(new_model(FAMILY), FP32, slots=1, capacity=177, cache_gib=0.25)
    server.command = [sys.executable, "-c", "import subprocess; subprocess.Popen(['sleep', '77']).wait()"]
    server.start()
    assert server.process is not None
    time.sleep(0.5)
    server.close()
    group, until = str(server.process.pid), time.monotonic() + 60

    def alive() -> list[str]:
        collected = []
        for place in Path("/proc").glob("[0-9]*/stat"):
            with suppress(OSError):
                state, _, process_group, *_ = place.read_text().rpartition(")")[2].split()
                collected += [state] if process_group == group and state != "Z" else []
        return collected

    while alive():  # a killed process ends only when the kernel schedules it
        assert time.monotonic() < until, alive()
        time.sleep(0.05)
    assert not server.folder.exists()


@pytest.mark.full
def test_vllm_accepts_the_printed_command(tiny_model_path: str, capsys: pytest.CaptureFixture[str]) -> None:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    arguments = [
        "--max-tokens",
        "25",
        "--policy",
        "bf16",
        "--print",
        "--backend",
        "ipc",
        "--sleep",
        "--tensor-parallel",
        "2",
    ]
    assert main([tiny_model_path, *arguments]) == 0
    words = shlex.split(capsys.readouterr().out)
    assert words[:2] == ["VLLM_SERVER_DEV_MODE=1", "VLLM_ALLOW_INSECURE_SERIALIZATION=1"] and words[3] == "-m"
    options = make_arg_parser(FlexibleArgumentParser()).parse_args(words[5:])
    assert (options.dtype, options.hf_overrides) == ("bfloat16", {"head_dtype": "float32"})
    assert (options.max_model_len, options.tensor_parallel_size, options.port) == (26, 2, 8000)
    assert options.enable_sleep_mode and options.enable_scale_out and options.enable_prompt_tokens_details
    assert options.weight_transfer_config.backend == "ipc" and options.logprobs_mode == "processed_logprobs"
    assert options.middleware == ["lightning_scalerl.generator.vllm.plugin.Guard"]
    assert main([tiny_model_path, "--max-tokens", "25", "--host", "0.0.0.0"]) == 1
    assert "without a token" in capsys.readouterr().err
