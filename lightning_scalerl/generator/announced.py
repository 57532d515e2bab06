"""Announcements of engines: where one listens, in the line that it prints and in a file for runs that attach to it.

A run reads the line of a step of its own job in that step's log. `--announce PATH` writes it into a file on a file
system that both sides see, with a token that is made for it, and `driver.engines=[file:PATH]` reads it at each attempt
to connect: an engine whose job was requeued elsewhere is found again.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from lightning_scalerl.checks import ConfigurationError
from lightning_scalerl.generator.wire import TOKEN, RefusedError
from sweeps.run.files import write_atomically

_LINE = re.compile(r"engine: listening on (\S+):(\d+) ")
_TOKEN = re.compile(r"^token (\S+)$", re.MULTILINE)
# Longest announcement, in characters.
LONGEST = 4096


def line_of(host: str, port: int, device: str) -> str:
    """Return the line in which an engine says where it listens."""
    return f"engine: listening on {host}:{port} (device {device})"


def listens_at(text: str) -> tuple[str, int] | None:
    """Return host and port of such a line somewhere in a text, None if there is none."""
    found = _LINE.search(text)
    return None if found is None else (found[1], int(found[2]))


@dataclass(frozen=True)
class Announcement:
    """File in which an engine says where it listens, and with which token. Only its user can read it.

    Attributes:
        path: of the file, whose folder is there.
    """

    path: Path

    def write(self, line: str, token: str) -> None:
        """Replace the file in one step.

        Raises:
            ConfigurationError: it cannot be written, or others could read it on this file system.
        """
        try:
            write_atomically(self.path, self._text(line, token), mode=0o600)
            mode = self.path.stat().st_mode & 0o777
        except OSError as error:
            raise ConfigurationError(f"engine: --announce {self.path}: cannot be written ({error})") from error
        if mode & 0o077:
            self.path.unlink(missing_ok=True)
            raise ConfigurationError(
                f"engine: --announce {self.path}: others could read it (this file system makes it mode {mode:04o}); "
                f"name one elsewhere, or set {TOKEN} on both sides and use tcp:// addresses"
            )

    def remove(self, line: str, token: str) -> None:
        """Remove the file, unless another engine has replaced it meanwhile."""
        try:
            if self.path.read_text() == self._text(line, token):
                self.path.unlink()
        except OSError:  # it is gone already
            pass

    def read(self) -> tuple[str, int, bytes]:
        """Return host, port and token of the engine that has announced itself last.

        Raises:
            OSError: none has done so yet.
            RefusedError: the file is no announcement, or somebody else could have written it.
        """
        try:
            with self.path.open(errors="replace") as file:
                facts, text = os.fstat(file.fileno()), file.read(LONGEST)
        except FileNotFoundError as error:
            raise OSError("no engine has announced itself there") from error
        except IsADirectoryError as error:
            raise RefusedError("it is a folder; name the file of each engine") from error
        except PermissionError as error:
            raise RefusedError("it cannot be read here; engine and run must belong to the same user") from error
        # Who writes it chooses whom we talk to, and an engine that knows the token can run code here.
        if facts.st_uid != os.geteuid() or facts.st_mode & 0o077:
            raise RefusedError(
                f"it must belong to this user alone (it belongs to user {facts.st_uid}, and has mode "
                f"{facts.st_mode & 0o777:04o})"
            )
        place, token = listens_at(text), _TOKEN.search(text)
        if place is None or token is None:
            raise RefusedError("it is no announcement of an engine (--announce)")
        return *place, token[1].encode()

    @staticmethod
    def _text(line: str, token: str) -> str:
        return f"{line}\ntoken {token}\n"
