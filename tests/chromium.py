"""A headless Chromium for tests that look at a page in a browser.

Debian: `apt-get install --no-install-recommends chromium chromium-driver`; selenium is a dev dependency.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--disable-dev-shm-usage", "--window-size=1600,1100",
)  # fmt: skip


def need(present: object, what: str) -> None:
    if not present:
        if os.environ.get("CI_ALL") == "1":
            pytest.fail(f"{what} is missing, and CI_ALL=1 asks for every test")
        pytest.skip(f"{what} is missing")


def need_chromium() -> None:
    """Skip the test if selenium or Chromium is missing. With CI_ALL=1, fail instead."""
    try:
        import selenium
    except ImportError:
        selenium = None
    need(selenium, "selenium")
    need(shutil.which("chromium") and shutil.which("chromedriver"), "chromium or chromedriver")


@contextlib.contextmanager
def chromium(profile: Path, *flags: str, logs: bool = False) -> Iterator[Any]:
    """Start a headless Chromium with an empty profile; `logs` records its console and its network requests."""
    from selenium import webdriver

    binary, driver = shutil.which("chromium"), shutil.which("chromedriver")
    assert binary and driver
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for flag in (*FLAGS, *flags, f"--user-data-dir={profile}"):
        options.add_argument(flag)
    if logs:
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    try:
        yield browser
    finally:
        browser.quit()


def wait_for(condition: Callable[[], Any], seconds: float = 120) -> Any:
    """Poll until the result is true or the time is up. Returns the last result."""
    deadline = time.monotonic() + seconds
    while not (result := condition()) and time.monotonic() < deadline:
        time.sleep(0.5)
    return result
