"""A headless Chromium for tests of pages; they are skipped where there is none."""

import os
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

sync_api = pytest.importorskip("playwright.sync_api")
BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), ""
)
needs_browser = pytest.mark.skipif(not BROWSER, reason="no Chromium on the PATH")


def launched() -> Iterator[Any]:
    """A browser, closed when the iterator goes on."""
    arguments = ["--no-sandbox"] if os.getuid() == 0 else []
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=arguments)
        yield browser
        browser.close()
