"""Engine addresses in `driver.engines`, checked before anything is started."""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

from lightning_scalerl.checks import ConfigurationError
from lightning_scalerl.generator.vllm.plugin import TOKEN
from lightning_scalerl.model.head import text_config
from sweeps.run import slurm_job

if TYPE_CHECKING:
    from lightning_scalerl.generator.fleet.server import Blueprint

VALID = "local, http://HOST:PORT, file:/PATH, srun"
HTTP_ENGINE = "lightning_scalerl.generator.vllm.client"
SERVED_ENGINE = "lightning_scalerl.generator.vllm.served"


@dataclass(frozen=True)
class Address:
    """Address of an engine.

    `local` is a child process on this node. The other kinds are vLLM servers, each with a client process on this node:

    - `http`: a running server at `host` and `port`.
    - `file`: a server that announces its address in the file `path`.
    - `srun`: a server that the run starts as a step of its SLURM job on node `host`. `devices` are the numbers of the
      server's GPUs among those that the step sees; empty for all of them.
    """

    kind: Literal["local", "http", "srun", "file"]
    host: str = ""
    port: int = 0
    devices: str = ""
    path: str = ""

    def __str__(self) -> str:
        if self.path:
            return f"file:{self.path}"
        if self.port:
            return f"{self.kind}://{self.host}:{self.port}"
        return f"{self.kind} {self.host}{self.devices and f' GPU {self.devices}'}".strip()


def check_engines(engines: Sequence[str]) -> None:
    """Check the syntax of engine addresses, without contacting any engine.

    Raises:
        ConfigurationError: an address cannot be parsed, or occurs twice.
    """
    addresses = set()
    for text in engines:
        if text == "local":
            continue
        address = _parse(text)
        if address in addresses:
            raise ConfigurationError(f"driver.engines: {text} is there twice")
        addresses.add(address)


def addresses_of(engines: Sequence[str], generators: int, devices_per_engine: int = 1) -> list[Address]:
    """Return the addresses of a run's engines: the listed ones, or `generators` children on this node.

    Args:
        engines: the entries of `driver.engines`; "srun" expands to as many engines per free node as its GPUs allow.
        generators: number of child processes if `engines` is empty.
        devices_per_engine: number of devices per engine.

    Raises:
        ConfigurationError: an address cannot be parsed, or srun is used outside a SLURM job with spare nodes.
    """
    check_engines(engines)
    addresses: list[Address] = []
    for text in engines or ["local"] * generators:
        address = _parse(text)
        addresses += _srun_addresses(devices_per_engine) if address.kind == "srun" else [address]
    return addresses


def visible_devices(devices: Sequence[str], devices_per_engine: int, engines: int) -> list[str]:
    """Return CUDA_VISIBLE_DEVICES for each engine on this node, with `devices_per_engine` devices each.

    Engines with one device each may share devices, so `devices` is returned unchanged. Engines with several devices
    share none.

    Args:
        devices: devices for the engines; an entry is one number or several separated by commas. Empty without GPUs.
        devices_per_engine: number of devices per engine.
        engines: number of engines on this node.

    Raises:
        ConfigurationError: the devices are too few, or not a multiple of `devices_per_engine`.
    """
    if devices_per_engine == 1 or not devices or not engines:
        return list(devices)
    numbers = [number.strip() for entry in devices for number in entry.split(",")]
    needed = engines * devices_per_engine
    if len(numbers) % devices_per_engine or len(numbers) < needed:
        raise ConfigurationError(
            f"driver.tensor_parallel: {engines} engines of {devices_per_engine} devices need {needed}, and there are "
            f"{len(numbers)} ({', '.join(numbers)}); choose another number of either, or name others in driver.devices"
        )
    return [
        ",".join(numbers[start : start + devices_per_engine]) for start in range(0, len(numbers), devices_per_engine)
    ]


def _srun_addresses(devices_per_engine: int) -> list[Address]:
    """Return one address for each engine that the free nodes of this SLURM job can run.

    Raises:
        ConfigurationError: this is not a SLURM job, no node is free, or a node's GPUs do not divide into engines.
    """
    if not slurm_job.inside():
        raise ConfigurationError("driver.engines: srun is for a job of SLURM, and this process is in none")
    trained_on = slurm_job.nodes_of_step()
    free_nodes = [node for node in slurm_job.nodes_of_job() if node not in trained_on]
    if not free_nodes:
        raise ConfigurationError(
            "driver.engines: srun starts engines on each node of the job without a trainer, and there is none beside "
            f"{', '.join(trained_on)}; ask for more nodes, and start the trainer with srun --nodes"
        )
    gpus = slurm_job.gpus_of_node()
    if gpus % devices_per_engine:
        raise ConfigurationError(
            f"driver.tensor_parallel: {gpus} GPUs of a node do not make engines of {devices_per_engine}; "
            "ask for another number"
        )
    if gpus <= 1:
        return [Address("srun", node) for node in free_nodes]
    numbers = [range(first, first + devices_per_engine) for first in range(0, gpus, devices_per_engine)]
    return [Address("srun", node, devices=",".join(map(str, group))) for node in free_nodes for group in numbers]


def _parse(text: str) -> Address:
    if text == "local":
        return Address("local")
    if text == "srun":
        return Address("srun")
    if text.startswith("file:"):
        return Address("file", path=_parse_path(text))
    if text.startswith("tcp:"):
        raise ConfigurationError(
            f"driver.engines: {text} is not supported any more; start vLLM's server there (python -m "
            "lightning_scalerl.generator.vllm.serve) and name it as http://HOST:PORT, with generator=vllm"
        )
    try:
        parts = urlsplit(text)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ConfigurationError(f"driver.engines: {text!r} cannot be read ({error}); valid: {VALID}") from error
    surplus = parts.path.strip("/") or parts.query or parts.fragment or parts.username
    if parts.scheme != "http" or not host or not port or surplus:
        raise ConfigurationError(f"driver.engines: {text!r} cannot be read; valid: {VALID}")
    return Address("http", host, port)


def _parse_path(text: str) -> str:
    location = text.removeprefix("file:")
    path = "/" + location.lstrip("/") if location.startswith("///") else location  # file:/PATH or file:///PATH
    if not path.startswith("/") or path.startswith("//") or path.endswith("/"):
        raise ConfigurationError(
            f"driver.engines: {text!r} is not the whole path of a file (such as file:/shared/engines/0) in which a "
            "server announces itself (python -m lightning_scalerl.generator.vllm.serve --announce PATH)"
        )
    return os.path.normpath(path)


def blueprint_for(address: Address, blueprint: Blueprint, devices_per_engine: int, start_s: float) -> Blueprint:
    """Return an engine's `Blueprint`: the run's for a local engine of one device, else that of a vLLM client.

    Args:
        address: the engine's address. A local engine of several devices starts a vLLM server.
        blueprint: the run's blueprint.
        devices_per_engine: number of devices per engine.
        start_s: seconds that an engine may take to start.

    Raises:
        ConfigurationError: the run's generator is not vLLM, or its model cannot be divided among the devices.
    """
    if address.kind == "local" and devices_per_engine == 1:
        return blueprint
    factory = blueprint.factory
    settings = getattr(factory, "keywords", {})
    if getattr(getattr(factory, "func", factory), "__name__", "") != "VLLMGenerator":
        if address.kind == "local":
            raise ConfigurationError(
                f"driver.tensor_parallel: {devices_per_engine} devices per engine need generator=vllm"
            )
        raise ConfigurationError(f"driver.engines: {address} is a server of vLLM; use it with generator=vllm")
    # Slightly below the fleet's timeout, so that the child can report what it was waiting for.
    timeout_s = 0.9 * start_s
    if address.kind == "http":
        connector = importlib.import_module(HTTP_ENGINE).VLLMServerGenerator
        settings_of_kind = {"address": str(address), "token": os.environ.get(TOKEN) or None, "away_s": timeout_s}
        return replace(blueprint, factory=partial(connector, **settings_of_kind, **settings))
    served = importlib.import_module(SERVED_ENGINE)
    if address.kind == "file":
        settings_of_kind = {"path": address.path, "start_s": timeout_s}
        return replace(blueprint, factory=partial(served.VLLMAnnouncedGenerator, **settings_of_kind, **settings))
    shape: Any = blueprint  # a blueprint has `config`, as a model does
    heads = int(text_config(shape).num_attention_heads)
    if heads % devices_per_engine:
        raise ConfigurationError(
            f"driver.tensor_parallel: {heads} attention heads cannot be divided between {devices_per_engine} devices"
        )
    settings_of_kind = {
        "tensor_parallel": devices_per_engine,
        "node": address.host,
        "gpus": address.devices,
        "start_s": timeout_s,
    }
    return replace(blueprint, factory=partial(served.VLLMServedGenerator, **settings_of_kind, **settings))
