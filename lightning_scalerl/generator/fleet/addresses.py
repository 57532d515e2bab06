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
    - `srun`: a server that the run starts as a step of its SLURM job on node `host`. `devices` are its numbers among
      the GPUs that the step sees; empty for all of them.
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
    seen = set()
    for text in engines:
        if text == "local":
            continue
        address = _parsed(text)
        if address in seen:
            raise ConfigurationError(f"driver.engines: {text} is there twice")
        seen.add(address)


def addresses_of(engines: Sequence[str], generators: int, partners: int = 1) -> list[Address]:
    """Return the addresses of a run's engines: the listed ones, or `generators` children on this node.

    Args:
        engines: the entries of `driver.engines`; "srun" expands to as many engines per free node as its GPUs allow.
        generators: number of child processes if `engines` is empty.
        partners: number of devices per engine.

    Raises:
        ConfigurationError: an address cannot be parsed, or srun is used outside a SLURM job with spare nodes.
    """
    check_engines(engines)
    found: list[Address] = []
    for text in engines or ["local"] * generators:
        address = _parsed(text)
        found += _steps(partners) if address.kind == "srun" else [address]
    return found


def shares(devices: Sequence[str], partners: int, engines: int) -> list[str]:
    """Return CUDA_VISIBLE_DEVICES for each engine on this node, with `partners` devices each.

    Engines of one device keep `devices` unchanged and may share them; engines of several devices share none.

    Args:
        devices: devices for the engines; an entry is one number or several separated by commas. Empty without GPUs.
        partners: number of devices per engine.
        engines: number of engines on this node.

    Raises:
        ConfigurationError: the devices are too few, or not a multiple of `partners`.
    """
    if partners == 1 or not devices or not engines:
        return list(devices)
    numbers = [number.strip() for each in devices for number in each.split(",")]
    if len(numbers) % partners or len(numbers) < engines * partners:
        raise ConfigurationError(
            f"driver.tensor_parallel: {engines} engines of {partners} devices need {engines * partners}, and there are "
            f"{len(numbers)} ({', '.join(numbers)}); choose another number of either, or name others in driver.devices"
        )
    return [",".join(numbers[start : start + partners]) for start in range(0, len(numbers), partners)]


def _steps(partners: int) -> list[Address]:
    if not slurm_job.inside():
        raise ConfigurationError("driver.engines: srun is for a job of SLURM, and this process is in none")
    trained_on = slurm_job.nodes_of_step()
    others = [node for node in slurm_job.nodes_of_job() if node not in trained_on]
    if not others:
        raise ConfigurationError(
            "driver.engines: srun starts engines on each node of the job without a trainer, and there is none beside "
            f"{', '.join(trained_on)}; ask for more nodes, and start the trainer with srun --nodes"
        )
    gpus = slurm_job.gpus_of_node()
    if gpus % partners:
        raise ConfigurationError(
            f"driver.tensor_parallel: {gpus} GPUs of a node do not make engines of {partners}; ask for another number"
        )
    if gpus <= 1:
        return [Address("srun", node) for node in others]
    numbers = [range(first, first + partners) for first in range(0, gpus, partners)]
    return [Address("srun", node, devices=",".join(map(str, each))) for node in others for each in numbers]


def _parsed(text: str) -> Address:
    if text == "local":
        return Address("local")
    if text == "srun":
        return Address("srun")
    if text.startswith("file:"):
        return Address("file", path=_path(text))
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
    rest = parts.path.strip("/") or parts.query or parts.fragment or parts.username
    if parts.scheme != "http" or not host or not port or rest:
        raise ConfigurationError(f"driver.engines: {text!r} cannot be read; valid: {VALID}")
    return Address("http", host, port)


def _path(text: str) -> str:
    rest = text.removeprefix("file:")
    path = "/" + rest.lstrip("/") if rest.startswith("///") else rest  # file:/PATH or file:///PATH
    if not path.startswith("/") or path.startswith("//") or path.endswith("/"):
        raise ConfigurationError(
            f"driver.engines: {text!r} is not the whole path of a file (such as file:/shared/engines/0) in which a "
            "server announces itself (python -m lightning_scalerl.generator.vllm.serve --announce PATH)"
        )
    return os.path.normpath(path)


def blueprint_for(address: Address, blueprint: Blueprint, partners: int, start_s: float) -> Blueprint:
    """Return an engine's blueprint: the run's for a local engine of one device, else that of a vLLM client.

    Args:
        address: the engine's address. A local engine of several devices starts a vLLM server.
        blueprint: the run's blueprint.
        partners: number of devices per engine.
        start_s: seconds that an engine may take to start.

    Raises:
        ConfigurationError: the run's generator is not vLLM, or its model cannot be divided among the devices.
    """
    if address.kind == "local" and partners == 1:
        return blueprint
    factory = blueprint.factory
    settings = getattr(factory, "keywords", {})
    if getattr(getattr(factory, "func", factory), "__name__", "") != "VLLMGenerator":
        if address.kind == "local":
            raise ConfigurationError(f"driver.tensor_parallel: {partners} devices per engine need generator=vllm")
        raise ConfigurationError(f"driver.engines: {address} is a server of vLLM; use it with generator=vllm")
    # The limit is slightly below the fleet's, so that the child can report what it was waiting for.
    patience_s = 0.9 * start_s
    if address.kind == "http":
        connector = importlib.import_module(HTTP_ENGINE).VLLMServerGenerator
        more = {"address": str(address), "token": os.environ.get(TOKEN) or None, "away_s": patience_s}
        return replace(blueprint, factory=partial(connector, **more, **settings))
    served = importlib.import_module(SERVED_ENGINE)
    if address.kind == "file":
        more = {"path": address.path, "start_s": patience_s}
        return replace(blueprint, factory=partial(served.VLLMAnnouncedGenerator, **more, **settings))
    shape: Any = blueprint  # a blueprint has `config`, as a model does
    heads = int(text_config(shape).num_attention_heads)
    if heads % partners:
        raise ConfigurationError(
            f"driver.tensor_parallel: {heads} attention heads cannot be divided between {partners} devices"
        )
    more = {"tensor_parallel": partners, "node": address.host, "gpus": address.devices, "start_s": patience_s}
    return replace(blueprint, factory=partial(served.VLLMServedGenerator, **more, **settings))
