"""Every test of what the sandbox contains runs behind both kinds of walls, as root and as an ordinary user."""

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

# Each kind of walls and each user once; crossed the other way by test-full.
PLACES = [
    pytest.param(("bubblewrap", "root"), marks=pytest.mark.full, id="bubblewrap-root"),
    pytest.param(("bubblewrap", "ordinary"), id="bubblewrap-ordinary"),
    pytest.param(("landlock", "root"), id="landlock-root"),
    pytest.param(("landlock", "ordinary"), marks=pytest.mark.full, id="landlock-ordinary"),
]


@contextmanager
def stand(mode: str, user: str) -> Iterator[Place]:
    if user == "root":
        if os.geteuid() != 0:
            missing("the tests do not run as root")
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("SANDBOX_SECRET", "not for programs")
            yield checked(Place(mode))
    else:
        with ordinary(mode) as place:
            yield checked(place)


def checked(place: Place) -> Place:
    try:
        assert place.protections.walls.isolated
    except ConfigurationError as error:
        # Asked in another way: a fault of ours that makes the trial run fail is no reason to skip.
        assert not machine_has(place), error
        missing(f"this machine has no {place.mode}: {error}")
    return place


def machine_has(place: Place) -> bool:
    if place.mode == "landlock":
        return landlock_abi() > 0 and seccomp_obstacle() is None
    command = ["bwrap", "--unshare-all", "--ro-bind", "/", "/", "--dev", "/dev", "true"]
    who = {"user": NOBODY, "group": NOBODY, "extra_groups": []} if place.uid != os.geteuid() else {}
    try:
        return subprocess.run(command, cwd="/", capture_output=True, **who).returncode == 0  # type: ignore[call-overload]
    except OSError:
        return False


@pytest.fixture(scope="session", params=PLACES)
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    with stand(*request.param) as found:
        yield found


@pytest.fixture(scope="session")
def any_place() -> Iterator[Place]:
    """For what does not depend on the walls."""
    with stand("landlock", "root" if os.geteuid() == 0 else "ordinary") as found:
        yield found


@pytest.fixture
def outside(place: Place) -> Iterator[Path]:
    """A folder that the sandbox's user could use, were it not for the walls."""
    with TemporaryDirectory(prefix="outside-") as folder:
        path = Path(folder)
        path.chmod(0o777)
        secret = path / "secret"
        secret.write_text("a secret")
        secret.chmod(0o666)
        if place.uid == NOBODY and os.geteuid() == 0:
            for made in (path, secret):
                os.chown(made, NOBODY, NOBODY)
        yield path
