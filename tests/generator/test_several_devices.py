"""Tests of engines with several devices: they use vLLM's server, and each engine gets its own devices."""

from __future__ import annotations

import json
import os
import sys
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from lightning_scalerl import Live
from lightning_scalerl.axes.precision import Precision
from lightning_scalerl.checks import CannotGoOnError, ConfigurationError
from lightning_scalerl.generator.fleet import transport
from lightning_scalerl.generator.fleet.addresses import Address, addresses_of, blueprint_for, visible_devices
from lightning_scalerl.generator.fleet.fleet import Fleet
from lightning_scalerl.generator.fleet.server import Blueprint
from lightning_scalerl.generator.torch.generator import TorchGenerator
from lightning_scalerl.generator.vllm import serve as vllm_serve
from lightning_scalerl.generator.vllm import served as vllm_served
from lightning_scalerl.generator.vllm.generator import VLLMGenerator
from lightning_scalerl.generator.vllm.http import EngineLostError
from lightning_scalerl.generator.vllm.served import VLLMAnnouncedGenerator, VLLMServedGenerator
from lightning_scalerl.model.load import load_model
from lightning_scalerl.task.arithmetic_base import new_model
from sweeps.run import slurm_job
from tests.generator.sampling import with_sampling
from tests.generator.stand_in import TOKEN, StandIn
from tests.generator.test_vllm_server import drained

ARGUMENTS = with_sampling(max_prompt_tokens=16, max_new_tokens=6, stop_tokens=[1])


@pytest.fixture(scope="module")
def model(tiny_model_path: str) -> Any:
    return load_model(tiny_model_path)


@pytest.mark.parametrize(
    ("devices", "partners", "engines", "expected"),
    [
        (["1", "2", "3"], 1, 2, ["1", "2", "3"]),
        (["1", "2", "3", "4"], 2, 2, ["1,2", "3,4"]),
        (["1,2", "3,4"], 2, 2, ["1,2", "3,4"]),
        (["0,1", "2, 3"], 4, 1, ["0,1,2,3"]),
        ([], 2, 1, []),  # on a CPU
        (["1", "2", "3"], 2, 0, ["1", "2", "3"]),  # no engine runs on this machine
        (["1", "2", "3"], 2, 1, "1 engines of 2 devices need 2, and there are 3 "),
        (["1", "2", "3", "4"], 2, 3, r"3 engines of 2 devices need 6, and there are 4 \(1, 2, 3, 4\)"),
    ],
)
def test_devices_are_divided_between_engines_or_refused(
    devices: list[str], partners: int, engines: int, expected: list[str] | str
) -> None:
    if isinstance(expected, str):
        with pytest.raises(ConfigurationError, match=f"^driver.tensor_parallel: {expected}"):
            visible_devices(devices, partners, engines)
    else:
        assert visible_devices(devices, partners, engines) == expected


@pytest.mark.parametrize(
    ("gpus_per_node", "partners", "on_a_node"),
    [
        ("", 1, [""]),
        ("1", 1, [""]),
        ("a100:4", 1, ["0", "1", "2", "3"]),
        ("4", 2, ["0,1", "2,3"]),
        ("4", 4, ["0,1,2,3"]),
        ("4", 3, None),
        ("1", 2, None),
    ],
)
def test_srun_starts_as_many_engines_per_node_as_its_gpus_allow(
    gpus_per_node: str, partners: int, on_a_node: list[str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slurm_job, "inside", lambda: True)
    monkeypatch.setattr(slurm_job, "nodes_of_job", lambda: ["n1", "n2", "n3"])
    monkeypatch.setattr(slurm_job, "nodes_of_step", lambda: ["n1"])
    monkeypatch.delenv("SLURM_GPUS_ON_NODE", raising=False)
    monkeypatch.setenv("SLURM_GPUS_PER_NODE", gpus_per_node)
    driver = Live(engines=["srun"], tensor_parallel=partners)
    if on_a_node is None:
        with pytest.raises(
            ConfigurationError, match=rf"{gpus_per_node} GPUs of a node do not make engines of {partners}"
        ):
            _ = driver.engine_devices
        return
    addresses = addresses_of(["srun"], 1, partners)
    assert [(engine.host, engine.devices) for engine in addresses] == [(n, d) for n in ("n2", "n3") for d in on_a_node]
    assert len({str(engine) for engine in addresses}) == len(addresses), "every engine has a unique name"
    assert driver.engine_devices == len(addresses) * partners


def test_all_devices_of_engines_are_counted() -> None:
    assert Live(generators=2, tensor_parallel=4).engine_devices == 8
    assert Live(engines=["local", "http://here:1"], tensor_parallel=2).engine_devices == 4
    with pytest.raises(ConfigurationError, match=r"driver\.tensor_parallel: 0 must be a whole number"):
        Live(tensor_parallel=0)


@pytest.mark.parametrize(
    ("visible", "numbers", "selected"),
    [
        ("", "2,3", "2,3"),
        ("4,5,6,7", "2,3", "6,7"),
        ("GPU-a,GPU-b", "1", "GPU-b"),
        ("4,5", "1,2", None),
        ("", "x", None),
    ],
)
def test_gpus_are_selected_among_the_visible_ones(
    visible: str, numbers: str, selected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--gpus` counts visible devices: SLURM sets the variable itself, and counts from 0 in each container."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    if selected is None:
        with pytest.raises(ConfigurationError, match=f"^--gpus {numbers}: this process sees "):
            vllm_serve.restrict_gpus(numbers)
    else:
        vllm_serve.restrict_gpus(numbers)
        assert os.environ["CUDA_VISIBLE_DEVICES"] == selected


@pytest.mark.parametrize("gpus", ["", "2,3"])
def test_an_srun_step_gets_the_model_shape_and_its_gpus(
    gpus: str, model: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The fake srun records its arguments and the shape, and prints the address of its server."""
    srun = tmp_path / "srun"
    srun.write_text(
        f"#!{sys.executable}\n"
        "import json, sys\n"
        "shape = json.loads(sys.stdin.readline())\n"
        f"open({str(tmp_path / 'said')!r}, 'w').write(json.dumps([sys.argv[1:], shape]))\n"
        f"print('engine: ' + open({str(tmp_path / 'address')!r}).read(), flush=True)\n"
        "sys.stdin.read()\n"
    )
    srun.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with closing(StandIn()) as stand_in:
        (tmp_path / "address").write_text(stand_in.address)
        step = vllm_serve.serve_on(
            *("n2", model, Precision("fp32", fp32_head_generator=False)),
            **{"slots": 4, "capacity": 23, "cache_gib": 0.5, "token": TOKEN, "gpus": gpus},
        )
        assert step.address == stand_in.address and step.process is not None
        assert step.process.poll() is None, "closing its input would end the step"
        step.close()
        assert step.process.poll() is not None
    command, shape = json.loads((tmp_path / "said").read_text())
    assert "--nodelist=n2" in command and ("--gpus" in command) == bool(gpus)
    assert not gpus or command[command.index("--gpus") + 1] == gpus
    assert command[command.index("--max-tokens") + 1] == "22" and "--bf16-head" in command
    assert shape["architectures"] == [type(model).__name__] and shape["hidden_size"] == model.config.hidden_size


def test_an_srun_step_that_ends_at_once_is_an_error_with_the_reason(
    model: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Also if the step ends while its shape is still being written to its input."""
    srun = tmp_path / "srun"
    srun.write_text("#!/bin/sh\necho srun: error: no such node >&2\nexit 1\n")
    srun.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(vllm_serve, "shape_of", lambda model: "x" * 2**20)  # more than a pipe holds
    with pytest.raises(CannotGoOnError, match=r"vLLM's server ended with status 1 \(srun: error: no such node\)"):
        vllm_serve.serve_on("n2", model, Precision("fp32"), slots=4, capacity=23, cache_gib=0.5, token=TOKEN)


# --- generators of engines ------------------------------------------------------------------------------------


def blueprint(model: Any, factory: Any) -> Blueprint:
    return Blueprint(factory, {"precision": Precision("fp32"), **ARGUMENTS}, type(model), model.config, "cuda")


def test_several_devices_need_vllm_and_other_generators_are_refused() -> None:
    model = new_model(64, 1, seed=0)
    model.config.num_attention_heads = 4
    with_vllm = blueprint(model, partial(VLLMGenerator, slots=4))
    for address in (Address("local"), Address("srun", "n2", devices="0,1")):
        addresses = blueprint_for(address, with_vllm, 2, 100.0).factory
        assert addresses.func is VLLMServedGenerator
        extra = {"node": address.host, "gpus": address.devices}
        assert addresses.keywords == {"tensor_parallel": 2, "slots": 4, "start_s": 90.0, **extra}
    assert blueprint_for(Address("local"), blueprint(model, TorchGenerator), 1, 100.0).factory is TorchGenerator
    addresses = blueprint_for(Address("file", path="/shared/0"), with_vllm, 1, 100.0).factory
    assert (addresses.func, addresses.keywords["path"]) == (VLLMAnnouncedGenerator, "/shared/0")
    with pytest.raises(ConfigurationError, match=r"^driver.tensor_parallel: 2 devices per engine .* generator=vllm"):
        blueprint_for(Address("local"), blueprint(model, partial(TorchGenerator, slots=4)), 2, 100.0)
    with pytest.raises(ConfigurationError, match=r"attention heads cannot be divided between 3 devices"):
        blueprint_for(Address("local"), with_vllm, 3, 100.0)


def test_invalid_devices_are_refused_before_anything_starts(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def started(*args: Any) -> None:
        raise AssertionError("started")

    monkeypatch.setattr(transport.subprocess, "Popen", started)
    arguments = {"precision": Precision("fp32"), **ARGUMENTS}
    limits: dict[str, Any] = {"generators": 2, "silence_s": 1.0, "start_s": 1.0, "tensor_parallel": 2}
    with pytest.raises(ConfigurationError, match="2 engines of 2 devices need 4, and there are 3"):
        Fleet(partial(VLLMGenerator, slots=4), model, arguments, devices=["1", "2", "3"], **limits)
    with pytest.raises(ConfigurationError, match="need generator=vllm"):
        Fleet(partial(TorchGenerator, slots=4), model, arguments, **limits)


class Served:
    """Replaces `serve`: returns a running stand-in and records its settings."""

    def __init__(self, stand_in: StandIn) -> None:
        self.stand_in, self.address = stand_in, stand_in.address
        self.requested: list[tuple[Any, dict[str, Any]]] = []
        self.closed = 0

    def __call__(self, model: Any, precision: Precision, **settings: Any) -> Served:
        self.requested.append((next(model.parameters()).device.type, settings))
        return self

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Any:
    with closing(StandIn()) as stand_in:
        replacement = Served(stand_in)
        monkeypatch.setattr(vllm_served, "serve", replacement)
        monkeypatch.setattr(vllm_served.secrets, "token_hex", lambda size: TOKEN)
        yield replacement


def test_the_generator_uses_the_server_that_it_started_and_ends_it(served: Served, model: Any) -> None:
    from lightning_scalerl.generator.base import GroupRequest

    factory = partial(VLLMServedGenerator, tensor_parallel=2, slots=4)
    generator = blueprint(model, factory).build()
    ((device, server_settings),) = served.requested
    assert device == "cpu", "the GPUs belong to the server"
    assert (
        server_settings["tensor_parallel"] == 2
        and server_settings["token"] == TOKEN
        and server_settings["capacity"] == 23
    )
    assert server_settings["slots"] >= 4 and server_settings["cache_gib"] > 0
    generator.submit(GroupRequest(0, (5, 9, 20), 2, (0,)))
    assert [finished.rollout.tokens[:2] for finished in drained(generator)] == [[2, 3], [2, 3]]  # type: ignore[arg-type]
    assert all(tensor.device.type == "cpu" for tensor in served.stand_in.tensors.values())
    generator.close()
    assert served.closed == 1


def test_an_unsuitable_or_absent_server_is_closed(served: Served, model: Any) -> None:
    served.stand_in.config["model_config"]["logprobs_mode"] = "raw_logprobs"
    with pytest.raises(ConfigurationError, match="--logprobs-mode"):
        VLLMServedGenerator(model, Precision("fp32"), tensor_parallel=2, slots=4, **ARGUMENTS)
    assert served.closed == 1
    served.stand_in.down()
    with pytest.raises(EngineLostError, match="no server"):
        VLLMServedGenerator(model, Precision("fp32"), tensor_parallel=2, slots=4, away_s=0.1, **ARGUMENTS)
    assert served.closed == 2


def test_a_model_on_the_host_is_never_put_on_a_gpu(model: Any) -> None:
    placed: list[str] = []

    class OnHost:
        on_host = True

        def __init__(self, model: Any, **kwargs: Any) -> None:
            placed.append(next(model.parameters()).device.type)

    blueprint(model, OnHost).build()  # without a GPU, moving the model to one would fail
    assert placed == ["cpu"]
