"""Addresses of engines: what `driver.engines` may name, checked before anything is started."""

from __future__ import annotations

import importlib
import os.path
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

from lightning_scalerl.checks import ConfigurationError
from lightning_scalerl.generator.wire import TOKEN, token_here
from lightning_scalerl.model.head import text_config
from sweeps.run import slurm_job

if TYPE_CHECKING:
    from lightning_scalerl.generator.server import Blueprint

VALID = "local, srun, tcp://HOST:PORT, http://HOST:PORT, file:/PATH"
HTTP_ENGINE = "lightning_scalerl.generator.vllm_server"
SERVED_ENGINE = "lightning_scalerl.generator.vllm_served"


@dataclass(frozen=True)
class Address:
    """Address of an engine, and who has started it there.

    `local` is a child on this node; `tcp` an engine of ours that somebody has started, and `file` one that has
    announced in the file `path` where it listens; `http` a server of vLLM's own, asked by a child on this node; `srun`
    a step of this job on the node `host`, with these numbers among the GPUs that it sees there (empty for all of them).
    """

    kind: Literal["local", "tcp", "http", "srun", "file"]
    host: str = ""
    port: int = 0
    devices: str = ""
    path: str = ""

    @property
    def given(self) -> bool:
        """Return whether somebody else has started the engine, and this run cannot start it again."""
        return self.kind in ("tcp", "file")

    def __str__(self) -> str:
        if self.path:
            return f"file:{self.path}"
        if self.port:
            return f"{self.kind}://{self.host}:{self.port}"
        return f"{self.kind} {self.host}{self.devices and f' GPU {self.devices}'}".strip()


def check_engines(engines: Sequence[str]) -> None:
    """Check how the engines are written, without looking for any.

    Raises:
        ConfigurationError: one cannot be read, or two are the same.
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
    """Return the places of a run's engines: those that are named, or `generators` children on this node.

    Args:
        engines: as `driver.engines` names them; "srun" stands for as many on each node as its GPUs make.
        generators: number of children where none is named.
        partners: devices of an engine.

    Raises:
        ConfigurationError: one cannot be read, or cannot be reached by what this process knows.
    """
    check_engines(engines)
    found: list[Address] = []
    for text in engines or ["local"] * generators:
        address = _parsed(text)
        if address.kind == "tcp" and not token_here():
            raise ConfigurationError(f"driver.engines: {text} needs the engine's token in {TOKEN}")
        found += _steps(partners) if address.kind == "srun" else [address]
    return found


def shares(devices: Sequence[str], partners: int, engines: int) -> list[str]:
    """Return CUDA_VISIBLE_DEVICES of the engines on this node, `partners` devices each; of single ones those given.

    Args:
        devices: there for engines, each one number or several with commas between them; empty where there are no GPUs.
        partners: devices of an engine.
        engines: number of engines on this node; those of several devices do not share them.

    Raises:
        ConfigurationError: the devices cannot be divided so, or are too few.
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
    try:
        parts = urlsplit(text)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ConfigurationError(f"driver.engines: {text!r} cannot be read ({error}); valid: {VALID}") from error
    rest = parts.path.strip("/") or parts.query or parts.fragment or parts.username
    if parts.scheme not in ("tcp", "http") or not host or not port or rest:
        raise ConfigurationError(f"driver.engines: {text!r} cannot be read; valid: {VALID}")
    return Address("tcp" if parts.scheme == "tcp" else "http", host, port)


def _path(text: str) -> str:
    rest = text.removeprefix("file:")
    path = "/" + rest.lstrip("/") if rest.startswith("///") else rest  # file:/PATH or file:///PATH
    if not path.startswith("/") or path.startswith("//") or path.endswith("/"):
        raise ConfigurationError(
            f"driver.engines: {text!r} names no file by its whole path (as file:/shared/engines/0 does) in which an "
            "engine announces itself (python -m lightning_scalerl.generator.server --announce PATH)"
        )
    return os.path.normpath(path)


def blueprint_for(address: Address, blueprint: Blueprint, partners: int = 1) -> Blueprint:
    """Return the blueprint of an engine at an address: that of all, but for servers of vLLM's own.

    One is at an `http` address, or the engine starts it where it is, for several devices.

    Raises:
        ConfigurationError: the run samples with another generator than vLLM, or its model cannot be divided so.
    """
    if address.kind != "http" and partners == 1:
        return blueprint
    factory = blueprint.factory
    name = getattr(getattr(factory, "func", factory), "__name__", "")
    settings = getattr(factory, "keywords", {})
    if address.kind != "http":
        if name != "VLLMGenerator":
            raise ConfigurationError(f"driver.tensor_parallel: {partners} devices an engine are for generator=vllm")
        shape: Any = blueprint  # it has a configuration, as its model will
        heads = int(text_config(shape).num_attention_heads)
        if heads % partners:
            raise ConfigurationError(
                f"driver.tensor_parallel: {heads} attention heads cannot be divided between {partners} devices"
            )
        served = importlib.import_module(SERVED_ENGINE).VLLMServedGenerator
        return replace(blueprint, factory=partial(served, tensor_parallel=partners, **settings))
    if name != "VLLMGenerator":
        raise ConfigurationError(f"driver.engines: {address} is a server of vLLM; use it with generator=vllm")
    connector = importlib.import_module(HTTP_ENGINE).VLLMServerGenerator
    token = token_here().decode() or None
    return replace(blueprint, factory=partial(connector, address=str(address), token=token, **settings))
