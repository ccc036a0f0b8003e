"""A page that is open in a real browser: one window for the tests of a module, which each open their page in it.

A test takes a second or two of a core. The ways through each page are in ``make test``; what is odd in a run, or the
same at a further width, is slow.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Page

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
IN_A_BROWSER = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")


class Window:
    """A window of Chromium without a network, and all that its page complained of and asked for.

    A page that opens where another was needs no new process, nor the charts' library compiled once more: a third of
    the time that a new window takes.
    """

    def __init__(self, page: Page):
        self.page = page
        self.complaints: list[str] = []
        self.requests: list[str] = []
        page.on("console", lambda message: self.complaints.append(message.text))
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("request", lambda request: self.requests.append(request.url))


def one_window(*, offline: bool = True) -> Iterator[Window]:
    """A window that is there until the generator goes on; ``offline``: without a network, the loopback too."""
    sync_api = pytest.importorskip("playwright.sync_api")
    with sync_api.sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield Window(found.new_context(offline=offline).new_page())
        found.close()


class Opened:
    """A page that has taken the place of the one before in the window."""

    def __init__(self, browser: Window, path: Path, width: int = 1280, scheme: str = "light"):
        self.page, self.path = browser.page, path
        self.complaints, self.requests = browser.complaints, browser.requests
        self.complaints.clear()
        self.requests.clear()
        self.page.mouse.move(0, 0)
        self.page.set_viewport_size({"width": width, "height": 900})
        self.page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
        self.page.goto(path.as_uri())
        self.page.wait_for_selector("body[data-ready]")

    def go(self, where: str) -> None:
        """Shows a view."""
        self.page.evaluate("where => { location.hash = where; }", f"#/{where}")
        self.page.wait_for_function("where => document.body.dataset.shown === where", arg=f"#/{where}")

    def fine(self) -> bool:
        """No error, and nothing was asked for but the page itself."""
        assert self.complaints == []
        assert self.requests[:1] == [self.path.as_uri()]
        assert [url for url in self.requests if not url.startswith((self.path.as_uri(), "data:"))] == []
        return True
