"""Checks, before a run uses a vLLM server, that the server answers and samples as the run needs."""

from __future__ import annotations

import logging
import time
from typing import Any

from lightning_scalerl.axes.precision import Precision
from lightning_scalerl.checks import ConfigurationError
from lightning_scalerl.generator.vllm.engine import VERSIONS, known_version
from lightning_scalerl.generator.vllm.http import Connection, EngineLostError, RefusedError
from lightning_scalerl.generator.vllm.stream import ROUTE

_log = logging.getLogger(__name__)

# Interval between attempts to reach a server that is still starting, in seconds.
RETRY_S = 0.5
# Timeout of a call that neither transfers weights nor waits for a token, in seconds.
CALL_S = 30.0
# Timeout for a server's first token, in seconds. The server may compile first; 30 s were too short on a busy CPU.
FIRST_TOKEN_S = 120.0


def wait_for_server(connection: Connection, away_s: float) -> None:
    """Wait until the server answers, because it may still be starting, or the network may be down briefly.

    Raises:
        EngineLostError: the server has not answered within `away_s` seconds.
    """
    deadline = time.monotonic() + away_s
    while True:
        try:
            connection.call("GET", "/health", timeout_s=min(CALL_S, max(1.0, away_s)))
            return
        except EngineLostError as error:
            if time.monotonic() > deadline:
                raise EngineLostError(
                    f"{error}; no server for {away_s:g} s: start one there (python -m "
                    "lightning_scalerl.generator.vllm.serve), or correct the address"
                ) from error
        time.sleep(RETRY_S)


def check_server(connection: Connection, precision: Precision, slots: int, capacity: int) -> dict[str, Any]:
    """Check that the server samples as the run needs, and return its configuration.

    Args:
        connection: connection to the server.
        precision: dtypes of weights and head that the run needs.
        slots: number of rollouts that the run keeps in flight.
        capacity: tokens of the run's longest sequence.

    Raises:
        ConfigurationError: the server was started with other settings; the message says how to start it.
    """
    address = connection.address
    try:
        version = str(connection.call("GET", "/version", timeout_s=CALL_S)["version"])
        if not known_version(version):
            low, below = (".".join(map(str, numbers)) for numbers in VERSIONS)
            raise ConfigurationError(
                f"generator: {address} runs vllm {connection.safe_line(version[:40])}, and {low} up to below {below} "
                f"is known to work; install vllm>={low},<{below} there"
            )
        answer = connection.call("GET", "/server_info", query={"config_format": "json"}, timeout_s=CALL_S)
        info: dict[str, Any] = answer["vllm_config"]
        differences = _differences(info, precision, capacity)
        server_slots = info["scheduler_config"]["max_num_seqs"]
    except RefusedError as error:
        remedy = {
            401: "give this run the server's token (VLLM_API_KEY)",
            404: "start it with VLLM_SERVER_DEV_MODE=1 in its environment: weights go by routes of that mode",
        }.get(error.status)
        if remedy is None:
            raise
        raise ConfigurationError(f"{error}; {remedy}") from error
    except (KeyError, TypeError, AttributeError) as error:
        raise ConfigurationError(f"generator: {address} answers without {error}: is it a server of vllm?") from error
    if differences:
        raise ConfigurationError(connection.safe_line(f"generator: {address} {differences[0]}"))
    if server_slots < slots:
        _log.warning(
            "generator: %s decodes at most %d rollouts at a time; the others of generator.slots=%d wait",
            address,
            server_slots,
            slots,
        )
    return info


def _differences(info: dict[str, Any], precision: Precision, capacity: int) -> list[str]:
    """Return messages for all differences between a server's configuration and the run's needs, with remedies."""
    model = info["model_config"]
    server_dtype, run_dtype = (str(dtype).removeprefix("torch.") for dtype in (model["dtype"], precision.policy_dtype))
    needs_fp32_head = precision.fp32_head_generator and run_dtype != "float32"
    facts = {
        f"gives {model['logprobs_mode']}; start it with --logprobs-mode processed_logprobs": (
            model["logprobs_mode"] != "processed_logprobs"
        ),
        f"samples by defaults of {model['generation_config']!r}; start it with --generation-config vllm": (
            model["generation_config"] != "vllm"
        ),
        "samples by defaults of its own; start it without --override-generation-config": (
            bool(model["override_generation_config"])
        ),
        f"holds {model['max_model_len']} tokens of a sequence; start it with --max-model-len {capacity}": (
            model["max_model_len"] < capacity
        ),
        f"computes in {server_dtype}, precision.policy in {run_dtype}; start it with --dtype {run_dtype}": server_dtype
        != run_dtype,
        'has no head in FP32; start it with --hf-overrides \'{"head_dtype": "float32"}\'': (
            needs_fp32_head and (model["hf_overrides"] or {}).get("head_dtype") != "float32"
        ),
        "has several engines behind one address; start a server for each": (
            info["parallel_config"]["data_parallel_size"] != 1
        ),
        "computes a prompt again for each rollout; start it with --enable-prefix-caching": (
            not info["cache_config"]["enable_prefix_caching"]
        ),
    }
    return [message for message, applies in facts.items() if applies]


def check_answer(connection: Connection, body: dict[str, Any], version: int) -> None:
    """Sample one token and check that the answer has all fields that a rollout needs.

    Args:
        connection: connection to the server.
        body: body of the request.
        version: version of the published weights.

    Raises:
        ConfigurationError: a field is missing; the message says how to start the server.
    """
    address = connection.address
    try:
        answer = connection.call("POST", ROUTE, body, timeout_s=FIRST_TOKEN_S)
        (choice,) = answer["choices"]
        details = answer["usage"]["prompt_tokens_details"]
        (entry,) = choice["logprobs"]["content"]
        labels = [span["version"] for span in choice["weight_versions"] or ()]
        same_token = [entry["token_id"]] == choice["token_ids"]
    except RefusedError as error:
        if error.status not in (403, 404):
            raise
        raise ConfigurationError(f"{error}; start it with --enable-scale-out") from error
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigurationError(f"generator: {address} answers a request without {error}") from error
    if details is None:
        raise ConfigurationError(
            f"generator: {address} does not report what its cache has saved; start it with "
            "--enable-prompt-tokens-details"
        )
    if labels != [str(version)] or not same_token:
        raise ConfigurationError(
            f"generator: {address} labels a token of weights {version} with {str(labels)[:60]}; is it another run's "
            "too?"
        )
