"""Tests of error signatures: each leads to its kind, in an exception, in a chain of exceptions, and in a log."""

from __future__ import annotations

import errno
import os
import urllib.error

import pytest

from sweeps.executor.error_signatures import PEER_FAILURES, SIGNATURES, classify_log
from sweeps.executor.failure import BLAMES_NODE, KINDS, kind_of, retries

TEXTS = [(kind, text) for kind, signs in SIGNATURES.items() for text in signs.texts]
TYPES = [(kind, name) for kind, signs in SIGNATURES.items() for name in signs.types]
ERRNOS = [(kind, number) for kind, signs in SIGNATURES.items() for number in signs.errnos]


def exception_class(name: str, *bases: type[BaseException]) -> type[BaseException]:
    """Return an exception class with this name, as a library may define it."""
    return type(name, bases or (Exception,), {})


def test_each_kind_of_the_table_is_a_kind_of_failure() -> None:
    assert SIGNATURES.keys() <= KINDS.keys()
    assert SIGNATURES.keys() >= {"gpu", "storage", "collective", "network"}
    for kind in ("gpu", "storage", "collective", "network"):
        assert retries()[kind], "such a failure may not occur on another node or at a later time, so it is retried"
    assert {"gpu", "storage", "collective"} <= BLAMES_NODE
    assert "network" not in BLAMES_NODE
    assert SIGNATURES.keys() >= PEER_FAILURES


def test_each_text_has_a_source() -> None:
    for kind, signs in SIGNATURES.items():
        for text, source in signs.texts.items():
            assert source and "://" not in source, (kind, text)


def caused_by(error: BaseException) -> BaseException:
    outer = ValueError("while training")
    outer.__cause__ = error
    return outer


def test_a_text_is_recognized_inside_a_longer_message() -> None:
    for kind, text in TEXTS:
        signs = SIGNATURES[kind]
        raised = RuntimeError if issubclass(RuntimeError, signs.of) else signs.of
        for message in (text, text.upper(), f"Triggered internally: {text}!\nat some.cpp:12"):
            assert kind_of(raised(message)) == kind, message
            assert kind_of(caused_by(raised(message))) == kind, message


def test_a_text_is_recognized_in_a_log_if_the_table_allows_it() -> None:
    for kind, text in TEXTS:
        log = f"step 3\n[rank0]: {text} (and more)\n  frame #0: c10::Error\n"
        expected = (kind, f"[rank0]: {text} (and more)") if SIGNATURES[kind].in_logs else None
        assert classify_log(log) == expected, text


def test_a_type_is_recognized_by_its_name_and_so_are_its_subclasses() -> None:
    for kind, name in TYPES:
        library = exception_class(name, OSError) if kind != "out_of_memory" else exception_class(name, RuntimeError)
        assert kind_of(library("no more is said")) == kind, name
        assert kind_of(exception_class("Special", library)("no more is said")) == kind, name


def test_errno_values_are_recognized() -> None:
    for kind, number in ERRNOS:
        assert kind_of(OSError(number, os.strerror(number), "/shared/runs/checkpoint")) == kind, errno.errorcode[number]


HUB = "https://hub.example/some/model/resolve/main/config.json"


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        # CUDA errors, as torch raises them
        (
            RuntimeError(
                "CUDA error: uncorrectable ECC error encountered\nCUDA kernel errors might be asynchronously reported "
                "at some other API call, so the stacktrace below might be incorrect."
            ),
            "gpu",
        ),
        (exception_class("AcceleratorError", RuntimeError)("CUDA error: unspecified launch failure"), "gpu"),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), "error"),
        (RuntimeError("CUDA error: device-side assert triggered"), "error"),
        (RuntimeError("CUDA error: invalid device ordinal"), "error"),
        (RuntimeError("CUDA error: out of memory"), "out_of_memory"),
        (
            exception_class("OutOfMemoryError", RuntimeError)("CUDA out of memory. Tried to allocate 2 GiB"),
            "out_of_memory",
        ),
        (AssertionError("Torch not compiled with CUDA enabled"), "error"),
        (
            RuntimeError(
                "The NVIDIA driver on your system is too old (found version 11040). Please update your GPU driver"
            ),
            "gpu",
        ),
        (
            RuntimeError(
                "Unexpected error from cudaGetDeviceCount(). Did you run some cuda functions before calling "
                "NumCudaDevices() that might have already set an error? Error 802: system not yet initialized"
            ),
            "gpu",
        ),
        # NCCL and gloo
        (
            exception_class("DistBackendError", RuntimeError)(
                "NCCL error in: ProcessGroupNCCL.cpp:275, unhandled cuda error, NCCL version 2.20.5\n"
                "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure 999 'unknown error'"
            ),
            "gpu",
        ),
        (
            exception_class("DistBackendError", RuntimeError)(
                "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure 2 'out of memory'"
            ),
            "out_of_memory",
        ),
        (
            exception_class("DistBackendError", RuntimeError)(
                "ncclUnhandledCudaError: Cuda failure 700 'an illegal memory access was encountered'"
            ),
            "error",
        ),
        (
            exception_class("DistBackendError", RuntimeError)(
                "[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=5, OpType=ALLREDUCE, "
                "NumelIn=1, Timeout(ms)=600000) ran for 600013 milliseconds before timing out."
            ),
            "collective",
        ),
        (
            RuntimeError(
                "[gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1800000ms for recv operation to complete"
            ),
            "collective",
        ),
        (RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:3456"), "killed"),
        (ValueError("connection reset by peer, says the user's own program"), "error"),
        # files
        (OSError(errno.ESTALE, "Stale file handle", "/shared/outputs"), "storage"),
        (OSError(errno.EIO, "Input/output error"), "storage"),
        (TimeoutError(errno.ETIMEDOUT, "Connection timed out", "/shared/outputs"), "storage"),
        (RuntimeError("basic_ios::clear: iostream error: Stale file handle"), "storage"),
        (OSError(errno.ENOENT, "No such file or directory"), "error"),
        (OSError(errno.EACCES, "Permission denied"), "error"),
        (FileNotFoundError("there is no such task"), "error"),
        # pipes to our own processes
        (BrokenPipeError(errno.EPIPE, "Broken pipe"), "error"),
        (EOFError(), "error"),
        # the network
        (ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused"), "network"),
        (ConnectionError("Couldn't reach 'some/data' on the Hub (ReadTimeout)"), "network"),
        (urllib.error.HTTPError(HUB, 503, "Service Unavailable", None, None), "network"),  # type: ignore[arg-type]
        (urllib.error.HTTPError(HUB, 404, "Not Found", None, None), "error"),  # type: ignore[arg-type]
        (TimeoutError("a generation took more than 30 s"), "error"),
        (TimeoutError(errno.ETIMEDOUT, "Connection timed out"), "network"),  # without a file name: from a socket
        (OSError(errno.EHOSTDOWN, "Host is down"), "network"),
        (
            OSError(
                "We couldn't connect to 'https://hub.example' to load the files, and couldn't find them in the "
                "cached files.\nCheck your internet connection or see how to run the library in offline mode at ..."
            ),
            "network",
        ),
        (OSError("some/model is not a local folder and is not a valid model identifier listed on ..."), "error"),
    ],
    ids=lambda value: f"{type(value).__name__}: {value}"[:60] if isinstance(value, BaseException) else value,
)
def test_messages_of_real_libraries_are_recognized(error: BaseException, kind: str) -> None:
    assert kind_of(error) == kind


def test_errors_of_huggingface_hub_are_recognized() -> None:
    """Names and base classes are those of the installed version of huggingface_hub."""
    httpx = pytest.importorskip("httpx")
    errors = pytest.importorskip("huggingface_hub.errors")
    try:
        import httpx2 as client
    except ImportError:
        client = httpx

    def answer(cls: type[BaseException], code: int) -> BaseException:
        request = client.Request("GET", HUB)
        try:
            client.Response(code, request=request).raise_for_status()
        except client.HTTPStatusError as error:
            result = cls(str(error), response=error.response)  # type: ignore[call-arg]
            result.__cause__ = error
            return result
        raise AssertionError

    missed = errors.LocalEntryNotFoundError(
        "An error happened while trying to locate the file on the Hub and we cannot find the requested files in the "
        "local cache. Please check your connection and try again or make sure your Internet connection is on."
    )
    assert kind_of(missed) == "network"
    assert kind_of(answer(errors.HfHubHTTPError, 503)) == "network"
    assert kind_of(answer(errors.HfHubHTTPError, 429)) == "network"
    assert kind_of(answer(errors.HfHubHTTPError, 401)) == "error"
    assert kind_of(answer(errors.RepositoryNotFoundError, 404)) == "error"
    assert kind_of(answer(errors.GatedRepoError, 403)) == "error"
    assert kind_of(answer(errors.RemoteEntryNotFoundError, 404)) == "error"
    assert kind_of(client.ConnectTimeout("timed out")) == "network"
    assert kind_of(client.ReadTimeout("The read operation timed out")) == "network"
    assert kind_of(client.ConnectError("[Errno -3] Temporary failure in name resolution")) == "network"
    offline = errors.LocalEntryNotFoundError(
        "Cannot find the requested files in the disk cache and outgoing traffic has been disabled. To enable hf.co "
        "look-ups and downloads online, set 'local_files_only' to False."
    )
    assert kind_of(offline) == "error"
    wrapped = OSError("We couldn't connect to 'https://hub.example' to load the files")
    wrapped.__cause__ = offline
    assert kind_of(wrapped) == "error", "offline mode is set by the user, so a retry does not help"


def test_a_missing_file_on_the_hub_does_not_hide_a_network_failure() -> None:
    lost = exception_class("ConnectTimeout")("timed out")
    lost.__context__ = exception_class("EntryNotFoundError")("no adapter_config.json")
    assert kind_of(lost) == "network"
    lost.__cause__ = lost.__context__
    assert kind_of(lost) == "error"


def test_in_a_log_a_symptom_does_not_hide_its_cause() -> None:
    log = (
        "[E ProcessGroupNCCL.cpp:616] [Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=8)\n"
        "terminate called after throwing an instance of 'c10::Error'\n"
        "  what():  CUDA error: uncorrectable ECC error encountered\n"
    )
    assert classify_log(log) == ("gpu", "what():  CUDA error: uncorrectable ECC error encountered")
    assert (
        classify_log("Watchdog caught collective operation timeout\nan illegal memory access was encountered") is None
    )
    assert classify_log("all is well\nConnection reset by peer; trying again") is None
