"""A page of the server in a real browser, and what its accessibility check finds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.browsing import Window
from tests.web.serving import Serving

if TYPE_CHECKING:
    from playwright.sync_api import Page

# The rules of WCAG's levels A and AA, and what axe's authors recommend.
_SERIOUS = ("serious", "critical")


class Visit:
    """The page, opened by the link with the token. ``live``: wait until its events come."""

    def __init__(
        self, window: Window, server: Serving, *, width: int = 1280, scheme: str = "light", live: bool = True
    ) -> None:
        self.page: Page = window.page
        self.page.goto("about:blank")  # the page before asks a server that has gone
        self.server = server
        self.complaints, self.requests = window.complaints, window.requests
        self.complaints.clear()
        self.requests.clear()
        self.page.set_viewport_size({"width": width, "height": 900})
        self.page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
        self.page.goto(server.url)
        if live:
            self.connected()

    def go(self, path: str) -> None:
        """Opens another page of the server."""
        self.page.goto(self.server.base.rstrip("/") + path)

    def connected(self) -> None:
        """Returns when the page has its event stream."""
        self.page.wait_for_selector("body[data-connected]", state="attached")

    def fine(self) -> bool:
        """No error, no violation of the policy, and nothing was asked of any other server."""
        assert self.complaints == []
        assert [url for url in self.requests if not url.startswith((self.server.base, "data:"))] == []
        return True

    def accessible(self) -> bool:
        """No serious finding of axe."""
        from axe_playwright_python.sync_playwright import Axe

        found: list[dict[str, Any]] = Axe().run(self.page).response["violations"]
        serious = [
            (each["id"], node["html"][:200], node.get("failureSummary", "")[:300])
            for each in found
            if each["impact"] in _SERIOUS
            for node in each["nodes"]
        ]
        assert serious == []
        return True

    def fits(self) -> bool:
        """Nothing has to be scrolled sideways."""
        assert self.page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
        return True
