"""Classify failures by errnos, names of exceptions, and messages of libraries and drivers.

Texts are parts of messages, compared without regard to case. Each has its source: a public thread, a manual, or the
program that prints it. Exceptions are matched by the names of their types, so that no library must be imported.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Signatures:
    """Patterns that identify one kind of failure.

    Attributes:
        texts: parts of messages, with their sources.
        types: names of exception types. If several types in an exception's class hierarchy are listed, the most derived
            one decides.
        errnos: error numbers of an OSError.
        of: exceptions of this type are searched for `texts`.
        in_logs: whether to search `texts` also in the log of a process that ended without an exception.
    """

    texts: Mapping[str, str] = field(default_factory=dict)
    types: tuple[str, ...] = ()
    errnos: tuple[int, ...] = ()
    of: type[BaseException] = BaseException
    in_logs: bool = False


# The first kind that matches counts. So out of memory comes before the NCCL error that it causes, and a failed GPU
# before the collective timeout that it causes on other ranks.
SIGNATURES: Mapping[str, Signatures] = {
    # Errors of the program or its configuration that look like a failure of hardware or network.
    "error": Signatures(
        texts={
            "an illegal memory access was encountered": "pytorch#21819",
            "device-side assert triggered": "pytorch#75534",
            "Torch not compiled with CUDA enabled": "torch/cuda/__init__.py",
            "outgoing traffic has been disabled": "huggingface_hub/file_download.py (HF_HUB_OFFLINE)",
            "out of shared memory": "pytorch#5040 (a Bus error of a worker)",
        },
        types=(
            # The Hugging Face hub has answered: what was requested is missing, forbidden or invalid.
            *("RepositoryNotFoundError", "GatedRepoError", "DisabledRepoError", "RevisionNotFoundError"),
            *("EntryNotFoundError", "RemoteEntryNotFoundError", "BadRequestError", "HFValidationError"),
            "OfflineModeIsEnabled",
        ),
    ),
    "disk_full": Signatures(
        # torch writes files through its own streams. Their errors have no errno, only its text.
        texts={"No space left on device": "strerror(ENOSPC)", "Disk quota exceeded": "strerror(EDQUOT)"},
        errnos=(errno.ENOSPC, errno.EDQUOT),
    ),
    "out_of_memory": Signatures(
        texts={"out of memory": "torch.cuda.OutOfMemoryError", "not enough memory": "torch's DefaultCPUAllocator"},
        types=("MemoryError", "OutOfMemoryError"),
        of=RuntimeError,
    ),
    "gpu": Signatures(
        texts={
            "uncorrectable ECC error encountered": "vllm#5222, accelerate#1192",
            "CUDA_ERROR_ECC_UNCORRECTABLE": "nagadit/DeepFaceLab_Linux#89",
            "uncorrectable double bit error (DBE)": "NVIDIA's Xid 48, in the kernel's log",
            "GPU has fallen off the bus": "NVIDIA's Xid 79; pop-os/pop#3363",
            "GPU is lost": "JosephKJ/OWOD#81, AlexeyAB/darknet#86",
            "Unable to determine the device handle for GPU": "NVIDIA/open-gpu-kernel-modules#387",
            "Timeout waiting for RPC from GSP": "NVIDIA's Xid 119, in the kernel's log",
            "Invalid access of peer GPU memory over nvlink or a hardware error": "ultralytics#24536",
            # CUDA's manual suspects the program first. But the kernels here are torch's; their errors show the texts
            # under "error", and public reports of this error end with a replaced card: pytorch#74235,
            # opendatalab/MinerU#426. If it was the program after all, the retry on another node fails too.
            "unspecified launch failure": "pytorch#74235",
            "CUDA unknown error": "pytorch#49327",
            "CUDA error: unknown error": "pytorch#170045 (Cuda failure 999)",
            "CUDA-capable devices are busy or unavailable": "detectron2#2580",
            "CUDA-capable device(s) is/are busy or unavailable": "llama.cpp#11841",
            "no CUDA-capable device is detected": "AlexeyAB/darknet#86",
            "No CUDA GPUs are available": "torch/lib/libtorch_cuda",
            "Found no NVIDIA driver on your system": "torch/lib/libc10_cuda",
            "The NVIDIA driver on your system is too old": "pytorch#4546",
            "CUDA driver version is insufficient for CUDA runtime version": "CUDA's manual, Error 35",
            "CUDA driver initialization failed": "torch/lib/libc10_cuda",
            "forward compatibility was attempted on non supported HW": "pytorch#40671",
            "system not yet initialized": "pytorch#35710 (Error 802, the fabric manager)",
            "unsupported display driver / cuda driver combination": "CUDA's manual, Error 803",
            "Driver/library version mismatch": "pytorch#45109, mozilla/translations#1167",
            "couldn't communicate with the NVIDIA driver": "nvidia-smi",
            "ncclUnhandledCudaError": "NVIDIA/nccl#1410, pytorch#130113",
            "no ROCm-capable device is detected": "ROCm/hip#3805",
            "No HIP GPUs are available": "torch/lib/libtorch_hip",
        },
        types=("NoGpuError",),
        in_logs=True,
    ),
    "storage": Signatures(
        texts={
            "Stale file handle": "strerror(ESTALE); transformers#9732, LlamaFactory#3243",
            "Stale NFS file handle": "strerror(ESTALE) of older systems; sjl/peat#2",
            "Input/output error": "strerror(EIO)",
            "Remote I/O error": "strerror(EREMOTEIO)",
            "Transport endpoint is not connected": "strerror(ENOTCONN): a FUSE file system whose server is gone",
            "Cannot send after transport endpoint shutdown": "strerror(ESHUTDOWN): Lustre; whamcloud/iml#230",
            # srun prints this when a task has mapped a file that its node can no longer read.
            ": Bus error": "srun; pytorch#26009",
        },
        errnos=(
            *(errno.ESTALE, errno.EIO, errno.EREMOTEIO, errno.ENOTCONN, errno.ESHUTDOWN),
            *(errno.ETIMEDOUT, errno.EHOSTDOWN),  # only for an error with a file name; see `classify_exception`
        ),
        in_logs=True,
    ),
    # A rank waited too long for another.
    "collective": Signatures(
        texts={
            "Watchdog caught collective operation timeout": "pytorch#118369, sglang#1693",
            "ProcessGroupNCCL's watchdog got stuck": "torch's ProcessGroupNCCL.cpp",
            "ms for recv operation to complete": "pytorch/gloo#511",
            "ms for send operation to complete": "detectron2#5121 (gloo)",
            "The client socket has timed out after": "lllyasviel/ControlNet#382 (torch's TCPStore)",
            "The client socket has failed to connect to any network address": "torch's TCPStore",
            "wait timeout after": "pytorch#131808 (torch's TCPStore)",
        },
        of=RuntimeError,
        in_logs=True,
    ),
    # Another rank of the job is gone. Its own error, if it left one, explains why.
    "killed": Signatures(
        texts={
            "connection closed by peer": "gloo",
            "connection reset by peer": "gloo",
            "closed by remote peer": "gloo",
            "connection was likely closed": "gloo",
            "broken pipe": "gloo",
            "ncclRemoteError": "NVIDIA/nccl, ncclResult_t",
            "ncclSystemError": "NVIDIA/nccl#975, pytorch#149984",
            "communicator was aborted": "torch's NCCLUtils",
            "remote process exited": "NVIDIA/nccl, ncclResult_t",
        },
        types=("LeaseLostError", "CommandKilledError"),
        of=RuntimeError,
    ),
    # The scheduler lost contact with a job and started a second copy.
    "duplicate": Signatures(types=("DuplicateRunError",)),
    "network": Signatures(
        texts={
            "Temporary failure in name resolution": "gai_strerror(EAI_AGAIN)",
            "Name or service not known": "gai_strerror(EAI_NONAME)",
            "Failed to establish a new connection": "HumanGaussian#4 (urllib3)",
            "Max retries exceeded with url": "HumanGaussian#4 (urllib3)",
            "Network is unreachable": "strerror(ENETUNREACH); HumanGaussian#4",
            "Read timed out": "huggingface_hub#1718 (requests)",
            "An error happened while trying to locate the file": "huggingface_hub#985, docling#1308",
            "We couldn't connect to 'http": "transformers/utils/hub.py; state-spaces/mamba#539",
            "Server disconnected without sending a response": "httpx",
            "429 Client Error": "requests, huggingface_hub",
            "'429 Too Many Requests'": "httpx",
            "HTTP Error 429": "urllib",
            "500 Server Error": "requests",
            "502 Server Error": "requests",
            "503 Server Error": "requests",
            "504 Server Error": "huggingface_hub#1516, transformers#23228",
            "Server error '50": "httpx",
            "HTTP Error 50": "urllib",
        },
        types=(
            *("ConnectTimeout", "ReadTimeout", "WriteTimeout", "PoolTimeout", "TimeoutException"),
            *("ConnectError", "ReadError", "WriteError", "RemoteProtocolError", "ChunkedEncodingError"),
            *("ConnectTimeoutError", "ReadTimeoutError", "NewConnectionError", "NameResolutionError"),
            *("MaxRetryError", "LocalEntryNotFoundError", "gaierror", "ConnectionError"),
        ),
        errnos=(errno.ECONNREFUSED, errno.ECONNRESET, errno.ECONNABORTED, errno.ENETUNREACH, errno.EHOSTUNREACH),
    ),
}

# Kinds of failure that are caused by the end of another rank, whose own error takes precedence.
PEER_FAILURES = frozenset({"killed", "collective"})

_KIND_OF_TYPE = {name: kind for kind, signs in SIGNATURES.items() for name in signs.types}
_KIND_OF_ERRNO = {number: kind for kind, signs in SIGNATURES.items() for number in signs.errnos}
_LOWER_TEXTS = {kind: tuple(text.lower() for text in signs.texts) for kind, signs in SIGNATURES.items()}


def classify_exception(error: BaseException) -> str | None:
    """Return the kind of failure of one exception, not of its causes; None if no pattern matches."""
    text = str(error).lower()
    if any(words in text for words in _LOWER_TEXTS["error"]):
        return "error"
    # Names of exceptions of HTTP libraries are more specific than the errno.
    kind = next((_KIND_OF_TYPE[name] for name in _names(type(error)) if name in _KIND_OF_TYPE), None)
    if isinstance(error, OSError) and kind in (None, "network"):
        of_a_socket = error.errno in (errno.ETIMEDOUT, errno.EHOSTDOWN) and error.filename is None
        kind = "network" if of_a_socket else _KIND_OF_ERRNO.get(error.errno or 0, kind)
    if kind is not None:
        return kind
    for kind, signs in SIGNATURES.items():
        if isinstance(error, signs.of) and any(words in text for words in _LOWER_TEXTS[kind]):
            return kind
    return None


def _names(of: type[BaseException]) -> Iterator[str]:
    """Return the names of a type and its bases, except the base ConnectionError, whose subclasses have an errno."""
    return (cls.__name__ for cls in of.__mro__ if cls is of or cls is not ConnectionError)


def classify_log(log: str) -> tuple[str, str] | None:
    """Return the kind of failure that a log shows, and the first line that shows it; None if no pattern matches."""
    low = log.lower()
    # These messages show an error of the program, although it looks like a failure of a GPU or the network.
    if any(words in low for words in _LOWER_TEXTS["error"]):
        return None
    for kind, signs in SIGNATURES.items():
        if signs.in_logs and any(words in low for words in _LOWER_TEXTS[kind]):
            return kind, next(_lines_with(log, _LOWER_TEXTS[kind]), "")
    return None


def _lines_with(log: str, texts: tuple[str, ...]) -> Iterator[str]:
    return (line.strip()[:300] for line in log.splitlines() if any(words in line.lower() for words in texts))
