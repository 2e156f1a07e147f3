"""A browser without a window, where there is one."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest

ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-dev-shm-usage",
    "--no-first-run",
]


@pytest.fixture(scope="package")
def browser() -> Iterator[Any]:
    """Chromium, driven by playwright; the test skips where either is missing."""
    playwright = pytest.importorskip("playwright.sync_api")
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        pytest.skip("needs chromium (apt-get install chromium)")
    with playwright.sync_playwright() as driver:
        running = driver.chromium.launch(executable_path=chromium, args=ARGUMENTS)
        yield running
        running.close()
