"""Announcement file of a vLLM server, with its address and token.

`serve --announce PATH` writes the file on a file system that server and run share, and `driver.engines=[file:PATH]`
reads it at each attempt to connect. A server whose job was requeued on another node is thus found again.
"""

from __future__ import annotations

import os
import re
import time
from dataclasses import dataclass
from pathlib import Path
from urllib.error import URLError
from urllib.request import ProxyHandler, Request, build_opener

from lightning_scalerl.checks import CannotGoOnError, ConfigurationError, error_line
from sweeps.run.files import write_atomically

_LINE = re.compile(r"^engine: (http://\S+:\d+)$", re.MULTILINE)
_TOKEN = re.compile(r"^token (\S+)$", re.MULTILINE)
# Maximum length of an announcement, in characters.
MAX_CHARACTERS = 4096
# Interval at which the file is read again, and timeout for a server's answer, in seconds.
REREAD_S, ANSWER_S = 1.0, 5.0


def address_line(address: str) -> str:
    """Return the log line in which a server reports its address."""
    return f"engine: {address}"


def address_in(text: str) -> str | None:
    """Return the address from the first line in the format of `address_line`, or None without such a line."""
    match = _LINE.search(text)
    return None if match is None else match[1]


@dataclass(frozen=True)
class Announcement:
    """File with the address and token of a server. Only its owner can read it.

    Attributes:
        path: path of the file; its folder must exist.
    """

    path: Path

    def write(self, address: str, token: str) -> None:
        """Write the file, atomically replacing an existing one.

        Raises:
            ConfigurationError: the file cannot be written, or other users could read it on this file system.
        """
        try:
            write_atomically(self.path, self._text(address, token), mode=0o600)
            mode = self.path.stat().st_mode & 0o777
        except OSError as error:
            raise ConfigurationError(f"--announce {self.path}: cannot be written ({error})") from error
        if mode & 0o077:
            self.path.unlink(missing_ok=True)
            raise ConfigurationError(
                f"--announce {self.path}: others could read it (this file system makes it mode {mode:04o}); name a "
                "file elsewhere, or start the server with a --port and name it as http://HOST:PORT"
            )

    def remove(self, address: str, token: str) -> None:
        """Remove the file, unless another server has replaced it meanwhile."""
        try:
            if self.path.read_text() == self._text(address, token):
                self.path.unlink()
        except OSError:  # already removed
            pass

    def read(self) -> tuple[str, str]:
        """Return address and token of the last announced server.

        Raises:
            FileNotFoundError: no server has announced itself yet.
            ConfigurationError: the file is not an announcement, or another user could have written it.
        """
        name = f"driver.engines: file:{self.path}"
        try:
            with self.path.open(errors="replace") as file:
                status, text = os.fstat(file.fileno()), file.read(MAX_CHARACTERS)
        except IsADirectoryError as error:
            raise ConfigurationError(f"{name} is a folder; name the file of each engine") from error
        except PermissionError as error:
            raise ConfigurationError(
                f"{name} cannot be read here; engine and run must belong to the same user"
            ) from error
        # A security check: the announced server receives our weights, and we train on its answers.
        if status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise ConfigurationError(
                f"{name} must belong to this user alone (it belongs to user {status.st_uid}, and has mode "
                f"{status.st_mode & 0o777:04o})"
            )
        address, token = address_in(text), _TOKEN.search(text)
        if address is None or token is None:
            raise ConfigurationError(f"{name} is not an announcement of a server (--announce)")
        return address, token[1]

    def find(self, limit_s: float) -> tuple[str, str]:
        """Wait until the announced server answers, and return its address and token.

        The file is read again before each attempt.

        Raises:
            CannotGoOnError: no server has answered within `limit_s` seconds.
            ConfigurationError: as for `read`.
        """
        deadline = time.monotonic() + limit_s
        while True:
            try:
                address, token = self.read()
                # Send the token: another server may have taken the port of a server that has ended.
                request = Request(f"{address}/version", headers={"Authorization": f"Bearer {token}"})
                with build_opener(ProxyHandler({})).open(request, timeout=ANSWER_S):
                    return address, token
            except FileNotFoundError:
                reason = (
                    "no server has announced itself there; look at the log of the job that starts it, "
                    "scalerl-engines-JOB.log for slurm/engines.sbatch"
                )
            except (URLError, OSError) as error:
                reason = f"{address} does not answer ({error_line(error)})"
            if time.monotonic() > deadline:
                raise CannotGoOnError(
                    f"driver.engines: file:{self.path} leads to no server for {limit_s:g} s: {reason}"
                )
            time.sleep(REREAD_S)

    @staticmethod
    def _text(address: str, token: str) -> str:
        return f"{address_line(address)}\ntoken {token}\n"
