"""vLLM's own HTTP server, on this machine: what it samples is what the trainer computes, at every publish.

One server for most tests (starting one takes half a minute), of a model with a head that is tied to the embeddings:
vLLM on a CPU has to pack it again at every reload.
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
from lightning_scalerl.generator.vllm.weights import Control
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
    """The package's entry point, also where it was installed before it had one."""
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


def served(model: Any, **given: Any) -> Server:
    return serve(model, FP32, slots=16, capacity=500, cache_gib=0.25, token=TOKEN, start_s=START_S, **given)


@pytest.fixture(scope="module")
def server(plugin: None) -> Iterator[Server]:
    running = served(new_model(FAMILY))
    yield running
    running.close()


def connected(server: Server, model: Any, **given: Any) -> VLLMServerGenerator:
    values = {"slots": 8, "max_prompt_tokens": 160, "max_new_tokens": 16, "stop_tokens": [STOP], **given}
    return VLLMServerGenerator(model, FP32, address=server.address, token=TOKEN, away_s=5.0, **with_sampling(**values))


@pytest.fixture
def generator(server: Server) -> Iterator[VLLMServerGenerator]:
    made = connected(server, new_model(FAMILY), phrase=[6, 7])
    yield made
    made.close()


@pytest.mark.parametrize("transfer", ["file", "http"])
def test_log_probabilities_are_the_trainers_at_every_publish(server: Server, transfer: str) -> None:
    old, new = new_model(FAMILY, 1), new_model(FAMILY, 2)
    generator = connected(server, old, transfer=transfer, bucket_mib=0.1)
    digests, checksums = [], []
    try:
        for number, (ours, other) in enumerate([(old, new), (new, old), (old, new)]):
            generator.publish(dict(ours.state_dict()), number)
            digests.append(generator._sender.digest)
            checksums.append(generator._call("POST", "/weight_checker", {"action": "checksum"})["checksums"])
            generator.submit(GroupRequest(number, LONG, 6, (0, number)))
            generator.submit(GroupRequest(10 + number, SHORT, 3, (1, number)))
            found = drained(generator)
            assert len(found) == 9 and {v for each in found for v in each.rollout.weight_versions} == {number}
            assert max(gap(ours, LONG, found[:6]), gap(ours, SHORT, found[6:])) < 1e-4
            assert gap(other, LONG, found[:6]) > 1e-2
            tokens = found[0].rollout.tokens
            assert float((generator.score(LONG, tokens) - trainers(ours, LONG, tokens)).abs().max()) < 1e-4
        assert generator._sender.buckets > 1
        for taken in (digests, checksums):
            assert taken[0] == taken[2] != taken[1]
    finally:
        generator.close()


def test_a_teacher_gives_the_log_probabilities_of_the_local_model(server: Server) -> None:
    """Through the OpenAI-compatible route, of the weights that it serves."""
    served, other = new_model(FAMILY, 1), new_model(FAMILY, 2)
    generator = connected(server, served)
    generator.close()  # its weights stay
    groups = [make_group([0.0] * 4, number, prompt_length=5 + number, seed=3) for number in range(10)]
    batch = assemble(groups, row(), max_new_tokens=8)
    teacher = VLLMTeacher(server.address, 100, 60.0, TOKEN)
    try:
        found = teacher.score(batch)
    finally:
        teacher.close()
    with torch.no_grad():
        ours, others = (Policy(model, FP32)(batch)[0] for model in (served, other))
    assert float((found - ours).abs().max()) < 1e-4 and float((found - others).abs().max()) > 1e-2


def test_the_same_seeds_give_the_same_tokens_as_in_this_process(generator: VLLMServerGenerator) -> None:
    """vLLM promises it of requests with seeds where nothing rounds otherwise: in FP32, at this size, it does not."""
    inside = generator_of(new_model(FAMILY), phrase=[6, 7])
    try:
        for each in (inside, generator):
            each.submit(GroupRequest(0, LONG, 6, (3, 1)))
            each.submit(GroupRequest(1, SHORT, 4, (3, 2), (4,) * 4))
            each.submit(GroupRequest(2, LONG, 3, (3, 3), waits=True, turn_tokens=4))
        ours, theirs = answered(inside), answered(generator)
    finally:
        inside.close()
    assert [each.rollout.tokens for each in ours] == [each.rollout.tokens for each in theirs]
    assert [each.rollout.sources for each in ours] == [each.rollout.sources for each in theirs]
    assert {source for each in theirs for source in each.rollout.sources} == {0, 1, 2}
    for one, other in zip(ours, theirs, strict=True):
        assert one.rollout.generator_logprobs == pytest.approx(other.rollout.generator_logprobs, abs=1e-5)


@pytest.mark.parametrize("updated", [False, True])
def test_the_trainer_agrees_over_three_turns(server: Server, updated: bool) -> None:
    """Also if other weights are published after the first turn."""
    old = new_model(FAMILY, 1)
    generator = connected(server, old)
    try:
        check_three_turns(generator, old, new_model(FAMILY, 2), updated)
    finally:
        generator.close()


def answered(generator: Any) -> list[FinishedRollout]:
    """Let everything in flight end; rollouts that wait get one answer."""
    found: list[FinishedRollout] = []
    while generator.in_flight:
        for each in generator.waiting:
            if any(each.rollout.inserted):
                generator.end(each.key, each.index)
            else:
                generator.insert(each.key, each.index, [9, 12])
        found += generator.step().finished
    return sorted(found, key=lambda each: (each.key, each.index))


def signal_engine(server: Server, number: signal.Signals) -> None:
    """Send a signal to the server's workers, which compute; not to the process that answers."""
    assert server.process is not None
    found = []
    for place in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            name, _, rest = place.read_text().partition("(")[2].rpartition(")")
            if "Worker" in name and int(rest.split()[2]) == server.process.pid:  # its group
                found.append(int(place.parent.name))
    assert found
    for pid in found:
        os.kill(pid, number)


@contextmanager
def running(server: Server) -> Iterator[None]:
    """Let the server's workers run in the `with` block, and stand still behind it."""
    signal_engine(server, signal.SIGCONT)
    try:
        yield
    finally:
        signal_engine(server, signal.SIGSTOP)


def in_the_middle(server: Server, generator: VLLMServerGenerator, tokens: int) -> list[FinishedRollout]:
    """Have rollouts begin, and the engine stand still in the middle of them; return those that have ended already.

    It runs in slices, and stands still while this process reads: else it would have sampled the whole before the
    beginnings are seen.
    """
    found: list[FinishedRollout] = []
    while generator.sampled_in_flight < tokens and not found:
        with running(server):
            time.sleep(0.02)
        read_until = time.monotonic() + 0.5  # for what was sampled to arrive
        while time.monotonic() < read_until:
            found += generator.step().finished
    return found


@pytest.mark.parametrize("recompute", [False, True])
def test_weights_change_within_rollouts_that_go_on(server: Server, recompute: bool) -> None:
    old, new = new_model(FAMILY), new_model(FAMILY, 5)
    generator = connected(server, old, max_prompt_tokens=12, max_new_tokens=480, stop_tokens=[])
    assert server.process is not None
    # Whoever reads goes first, on a busy machine too.
    os.setpriority(os.PRIO_PGRP, server.process.pid, 19)
    try:
        for attempt in range(5):  # whoever gets no turn for half a second finds it done
            generator.publish(dict(old.state_dict()), 0)
            generator.submit(GroupRequest(attempt, SHORT, 12, (3, attempt)))
            found = in_the_middle(server, generator, 60)
            # The engine runs again once the request to pause waits for it.
            goes_on = threading.Timer(1.0, lambda: signal_engine(server, signal.SIGCONT))
            goes_on.start()
            generator.publish(dict(new.state_dict()), 7, recompute)
            goes_on.join()
            found += drained(generator)
            assert sorted(each.index for each in found) == list(range(12))
            if sum(0 < each.rollout.weight_versions.count(0) < 460 for each in found) > 1:
                break
        else:
            pytest.fail("no publish came into the middle of two rollouts")
        for rollout in (each.rollout for each in found):
            before = rollout.weight_versions.count(0)
            assert rollout.weight_versions == [0] * before + [7] * (480 - before)
            recorded = torch.tensor(rollout.generator_logprobs)
            # To the token: those that the server says the old weights have sampled have their log-probabilities.
            if before:
                assert float((trainers(old, SHORT, rollout.tokens) - recorded).abs()[:before].max()) < 1e-4
            if before < 460:
                beyond = float((trainers(new, SHORT, rollout.tokens) - recorded).abs()[before:].max())
                # Keys and values of the old weights, under the new ones: neither policy's, as long as it went on.
                assert beyond < 1e-4 if recompute or not before else beyond > 1e-2
    finally:
        signal_engine(server, signal.SIGCONT)
        os.setpriority(os.PRIO_PGRP, server.process.pid, 0)
        generator.close()


def test_a_run_names_a_server_by_its_address(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """`driver.engines=[http://...]` with `generator=vllm`: a child of the run asks the server."""
    assert server.address is not None
    monkeypatch.setenv("VLLM_API_KEY", TOKEN)
    model, other = new_model(FAMILY, 1), new_model(FAMILY, 2)
    settings = with_sampling(max_prompt_tokens=160, max_new_tokens=16, stop_tokens=[STOP], precision=FP32)
    sampled = partial(VLLMGenerator, slots=8)
    limits: dict[str, Any] = {"generators": 1, "silence_s": 20, "start_s": START_S}
    fleet = Fleet(sampled, model, settings, engines=[server.address], **limits)
    try:
        for number, (ours, theirs) in enumerate([(model, other), (other, model)]):
            fleet.publish(dict(ours.state_dict()), number)
            fleet.submit(GroupRequest(number, LONG, 6, (0, number)))
            found = drained(fleet)
            assert gap(ours, LONG, found) < 1e-4 and gap(theirs, LONG, found) > 1e-2
    finally:
        fleet.close()


def test_an_update_that_broke_off_leaves_nothing_behind(server: Server) -> None:
    """Neither one that was refused nor one whose sender has died in the middle."""
    ours, other = new_model(FAMILY, 1), new_model(FAMILY, 2)
    generator = connected(server, other)
    wrong = {name: tensor[:, :3] if tensor.ndim == 2 else tensor for name, tensor in ours.state_dict().items()}
    with pytest.raises(EngineLostError, match=r"update_weights answers 500.*stays paused"):
        generator.publish(wrong, 1)
    assert generator._call("GET", "/is_paused") == {"is_paused": True}
    generator.close()

    half = connected(server, other, bucket_mib=0.02)
    control = Control(half._connection, 30.0)
    finish, control.finish_weight_update = control.finish_weight_update, lambda *_: None  # type: ignore[method-assign]
    assert finish
    half._sender._control = control
    state = dict(other.state_dict())
    half._sender.send(half._model, dict(list(state.items())[:5]), "9")
    half._connection.close()

    last = connected(server, ours)
    try:
        last.submit(GroupRequest(0, LONG, 4, (1,)))
        found = drained(last)
        assert gap(ours, LONG, found) < 1e-4 and gap(other, LONG, found) > 1e-2
    finally:
        last.close()


def test_nobody_without_the_token_gets_in(server: Server, generator: VLLMServerGenerator) -> None:
    for path in ("/pause", "/collective_rpc", "/update_weights", "/inference/v1/generate"):
        with pytest.raises(HTTPError, match="401"):
            urlopen(Request(f"{server.address}{path}", data=b"{}"), timeout=10)
    with urlopen(f"{server.address}/health", timeout=10) as answer:
        assert answer.status == 200
    with pytest.raises(ConfigurationError, match="without a token takes weights from everybody"):
        prepare(new_model(FAMILY), FP32, slots=1, capacity=177, cache_gib=0.25, host="0.0.0.0")
    assert TOKEN not in server.line


@pytest.mark.parametrize("policy", ["fp32", "bf16"])
def test_a_server_on_a_gpu_takes_what_is_said_and_computes_in_the_policys_type(plugin: None, policy: str) -> None:
    given = {"slots": 1, "capacity": 177, "cache_gib": 0.25, "on_cpu": False, "backend": "ipc"}
    server = prepare(new_model(FAMILY), Precision(policy), **given)
    server.close()
    words = dict(pairwise(server.command))
    assert words["--kv-cache-memory-bytes"] == str(2**28)
    # Of the whole GPU no more need be free: a trainer may hold the rest.
    assert words["--gpu-memory-utilization"] == "0.01"
    assert server.environment.get("TRITON_F32_DEFAULT") == ("ieee" if policy == "fp32" else None)


def test_a_server_that_is_killed_is_lost_and_another_gets_weights_before_prompts(server: Server) -> None:
    """The last test of this server."""
    ours = new_model(FAMILY, 3)
    generator = connected(server, ours, max_prompt_tokens=12, max_new_tokens=480, stop_tokens=[])
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
    again = connected(server, ours)
    try:
        again.submit(GroupRequest(0, LONG, 6, (7,)))
        found = drained(again)
        assert len(found) == 6 and gap(ours, LONG, found) < 1e-4
    finally:
        again.close()


@pytest.mark.full
@pytest.mark.parametrize("family", ["Qwen3Moe", "Gemma2"])
def test_a_family_agrees_before_and_after_an_update(plugin: None, family: str) -> None:
    old, new = new_model(family, 1), new_model(family, 2)
    running = served(old)
    try:
        generator = connected(running, old, bucket_mib=0.05)
        for number, (ours, other) in enumerate([(old, new), (new, old), (old, new)]):
            generator.publish(dict(ours.state_dict()), number)
            generator.submit(GroupRequest(number, LONG, 4, (0, number)))
            found = drained(generator)
            assert gap(ours, LONG, found) < 1e-4 and gap(other, LONG, found) > 1e-2
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
        found = []
        for place in Path("/proc").glob("[0-9]*/stat"):
            with suppress(OSError):
                state, _, grouped, *_ = place.read_text().rpartition(")")[2].split()
                found += [state] if grouped == group and state != "Z" else []
        return found

    while alive():  # the kernel ends a killed process when it has a turn
        assert time.monotonic() < until, alive()
        time.sleep(0.05)
    assert not server.folder.exists()


def test_the_printed_command_is_one_that_vllm_takes(tiny_model_path: str, capsys: pytest.CaptureFixture[str]) -> None:
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
    given = make_arg_parser(FlexibleArgumentParser()).parse_args(words[5:])
    assert (given.dtype, given.hf_overrides) == ("bfloat16", {"head_dtype": "float32"})
    assert (given.max_model_len, given.tensor_parallel_size, given.port) == (26, 2, 8000)
    assert given.enable_sleep_mode and given.enable_scale_out and given.enable_prompt_tokens_details
    assert given.weight_transfer_config.backend == "ipc" and given.logprobs_mode == "processed_logprobs"
    assert given.middleware == ["lightning_scalerl.generator.vllm.plugin.Guard"]
    assert main([tiny_model_path, "--max-tokens", "25", "--host", "0.0.0.0"]) == 1
    assert "without a token" in capsys.readouterr().err
