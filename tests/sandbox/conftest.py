"""Fixtures that run the sandbox's tests with both kinds of walls, as root and as an ordinary user."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from lightning_scalerl.checks import ConfigurationError
from lightning_scalerl.sandbox.jail import landlock_abi, seccomp_obstacle
from tests.sandbox.places import NOBODY, Place, missing, ordinary

# By default each kind of walls and each user is tested once; test-full adds the other two combinations.
PLACES = [
    pytest.param(("bubblewrap", "root"), marks=pytest.mark.full, id="bubblewrap-root"),
    pytest.param(("bubblewrap", "ordinary"), id="bubblewrap-ordinary"),
    pytest.param(("landlock", "root"), id="landlock-root"),
    pytest.param(("landlock", "ordinary"), marks=pytest.mark.full, id="landlock-ordinary"),
]


@contextmanager
def open_place(mode: str, user: str) -> Iterator[Place]:
    if user == "root":
        if os.geteuid() != 0:
            missing("the tests do not run as root")
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("SANDBOX_SECRET", "not for programs")
            yield require_walls(Place(mode))
    else:
        with ordinary(mode) as place:
            yield require_walls(place)


def require_walls(place: Place) -> Place:
    try:
        assert place.protections.walls.isolated
    except ConfigurationError as error:
        # Check the machine in another way, so that a bug in our trial run does not skip tests.
        assert not machine_has(place), error
        missing(f"this machine has no {place.mode}: {error}")
    return place


def machine_has(place: Place) -> bool:
    if place.mode == "landlock":
        return landlock_abi() > 0 and seccomp_obstacle() is None
    command = ["bwrap", "--unshare-all", "--ro-bind", "/", "/", "--dev", "/dev", "true"]
    identity = {"user": NOBODY, "group": NOBODY, "extra_groups": []} if place.uid != os.geteuid() else {}
    try:
        return subprocess.run(command, cwd="/", capture_output=True, **identity).returncode == 0  # type: ignore[call-overload]
    except OSError:
        return False


@pytest.fixture(scope="session", params=PLACES)
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    with open_place(*request.param) as entered:
        yield entered


@pytest.fixture(scope="session")
def any_place() -> Iterator[Place]:
    """One place, for tests that do not depend on the walls."""
    with open_place("landlock", "root" if os.geteuid() == 0 else "ordinary") as entered:
        yield entered


@pytest.fixture
def outside(place: Place) -> Iterator[Path]:
    """A folder outside the sandbox that its user could read and write without the walls."""
    with TemporaryDirectory(prefix="outside-") as folder:
        path = Path(folder)
        path.chmod(0o777)
        secret = path / "secret"
        secret.write_text("a secret")
        secret.chmod(0o666)
        if place.uid == NOBODY and os.geteuid() == 0:
            for path_ in (path, secret):
                os.chown(path_, NOBODY, NOBODY)
        yield path
