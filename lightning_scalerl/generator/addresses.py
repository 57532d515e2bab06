"""Addresses of engines: what `driver.engines` may name, checked before anything is started."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Literal
from urllib.parse import urlsplit

from lightning_scalerl.checks import ConfigurationError
from lightning_scalerl.generator.wire import TOKEN, token_here
from sweeps.run import slurm_job

if TYPE_CHECKING:
    from lightning_scalerl.generator.server import Blueprint

VALID = "local, srun, tcp://HOST:PORT, http://HOST:PORT"
HTTP_ENGINE = "lightning_scalerl.generator.vllm_server"


@dataclass(frozen=True)
class Address:
    """Address of an engine, and who has started it there.

    `local` is a child on this node; `tcp` an engine of ours that somebody has started; `http` a server of vLLM's own,
    asked by a child on this node; `srun` a step of this job on the node `host`.
    """

    kind: Literal["local", "tcp", "http", "srun"]
    host: str = ""
    port: int = 0

    @property
    def given(self) -> bool:
        """Return whether somebody else has started the engine, and this run cannot start it again."""
        return self.kind == "tcp"

    def __str__(self) -> str:
        return f"{self.kind}://{self.host}:{self.port}" if self.port else f"{self.kind} {self.host}".strip()


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


def addresses_of(engines: Sequence[str], generators: int) -> list[Address]:
    """Return the places of a run's engines: those that are named, or `generators` children on this node.

    Raises:
        ConfigurationError: one cannot be read, or cannot be reached by what this process knows.
    """
    check_engines(engines)
    found: list[Address] = []
    for text in engines or ["local"] * generators:
        address = _parsed(text)
        if address.kind == "tcp" and not token_here():
            raise ConfigurationError(f"driver.engines: {text} needs the engine's token in {TOKEN}")
        found += _steps() if address.kind == "srun" else [address]
    return found


def _steps() -> list[Address]:
    if not slurm_job.inside():
        raise ConfigurationError("driver.engines: srun is for a job of SLURM, and this process is in none")
    trained_on = slurm_job.nodes_of_step()
    others = [Address("srun", node) for node in slurm_job.nodes_of_job() if node not in trained_on]
    if not others:
        raise ConfigurationError(
            "driver.engines: srun starts an engine on each node of the job without a trainer, and there is none beside "
            f"{', '.join(trained_on)}; ask for more nodes, and start the trainer with srun --nodes"
        )
    return others


def _parsed(text: str) -> Address:
    if text == "local":
        return Address("local")
    if text == "srun":
        return Address("srun")
    try:
        parts = urlsplit(text)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ConfigurationError(f"driver.engines: {text!r} cannot be read ({error}); valid: {VALID}") from error
    rest = parts.path.strip("/") or parts.query or parts.fragment or parts.username
    if parts.scheme not in ("tcp", "http") or not host or not port or rest:
        raise ConfigurationError(f"driver.engines: {text!r} cannot be read; valid: {VALID}")
    return Address("tcp" if parts.scheme == "tcp" else "http", host, port)


def blueprint_for(address: Address, blueprint: Blueprint) -> Blueprint:
    """Return the blueprint of an engine at an address: that of all, but for a server of vLLM's own.

    Raises:
        ConfigurationError: the run samples with another generator than vLLM, or no such server can be asked.
    """
    if address.kind != "http":
        return blueprint
    factory = blueprint.factory
    name = getattr(getattr(factory, "func", factory), "__name__", "")
    if name != "VLLMGenerator":
        raise ConfigurationError(f"driver.engines: {address} is a server of vLLM; use it with generator=vllm")
    connector = importlib.import_module(HTTP_ENGINE).VLLMServerGenerator
    settings = getattr(factory, "keywords", {})
    token = token_here().decode() or None
    return replace(blueprint, factory=partial(connector, address=str(address), token=token, **settings))
