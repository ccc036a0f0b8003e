"""A page of answers that is open in a real browser."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from gpuherd.qa.report.page import make_page
from gpuherd.qa.report.reading import ReportedRun

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
IN_A_BROWSER = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")]


_pages: dict[int, tuple[ReportedRun, bytes]] = {}


def _page_of(run: ReportedRun) -> bytes:
    """A run that many tests open is packed once; what is kept of it keeps its id its own."""
    if id(run) not in _pages:
        _pages[id(run)] = run, make_page(run).html
    return _pages[id(run)][1]


class Opened:
    """A page in the browser, with all that it complained of and asked for."""

    def __init__(
        self,
        browser: Browser,
        shown: ReportedRun | Path,
        folder: Path | None = None,
        width: int = 1280,
        scheme: str = "light",
    ):
        self.path = shown if isinstance(shown, Path) else (folder or Path()) / "page.html"
        if isinstance(shown, ReportedRun):
            self.path.write_bytes(_page_of(shown))
        context = browser.new_context(
            viewport={"width": width, "height": 900},
            color_scheme=scheme,  # type: ignore[arg-type]
            offline=True,
        )
        self.page: Page = context.new_page()
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(self.path.as_uri())
        self.page.wait_for_selector("body[data-ready]")

    def go(self, where: str) -> None:
        """Shows a view."""
        self.page.evaluate("where => { location.hash = where; }", f"#/{where}")
        self.page.wait_for_function("where => document.body.dataset.shown === where", arg=f"#/{where}")

    def lines(self) -> list[int]:
        """The numbers of the questions in the list, from its first line in view."""
        texts = self.page.locator(".line .asks").all_inner_texts()
        places = [int(each.get_attribute("data-place") or 0) for each in self.page.locator(".line").all()]
        numbers = [int(text.split(":")[0].split()[1]) for text in texts]
        return [number for _, number in sorted(zip(places, numbers, strict=True))]

    def settled(self) -> None:
        """Waits until what was typed has taken effect, and what follows is drawn."""
        self.page.wait_for_timeout(250)

    def fine(self) -> bool:
        """No error, and nothing was asked for but the page itself."""
        assert self.complaints == []
        assert [url for url in self.requests if not url.startswith((self.path.as_uri(), "data:"))] == []
        return True
