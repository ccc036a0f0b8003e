"""A page of answers that is open in a real browser."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.browsing import Opened, Window
from tests.patience import wait_until

from gpuherd.qa.report.page import make_page
from gpuherd.qa.report.reading import ReportedRun

_pages: dict[int, tuple[ReportedRun, bytes]] = {}


def _page_of(run: ReportedRun) -> bytes:
    """A run that many tests open is packed once; what is kept of it keeps its id its own."""
    if id(run) not in _pages:
        _pages[id(run)] = run, make_page(run).html
    return _pages[id(run)][1]


class OpenedRun(Opened):
    """The page of a run, written into a folder, with its list of answers."""

    def __init__(self, browser: Window, run: ReportedRun, folder: Path, width: int = 1280, scheme: str = "light"):
        path = folder / "page.html"
        path.write_bytes(_page_of(run))
        super().__init__(browser, path, width, scheme)

    def lines(self) -> list[int]:
        """The numbers of the questions in the list, from its first line in view."""
        found: list[tuple[int, str]] = self.page.locator(".line").evaluate_all(
            "all => all.map(each => [Number(each.dataset.place), each.querySelector('.asks').innerText])"
        )
        return [int(text.split(":")[0].split()[1]) for _, text in sorted(found)]

    def begins_with(self, numbers: list[int]) -> bool:
        """Whether the lines in view are the first of ``numbers``, in their order."""
        shown = self.lines()
        return len(shown) > 0 and shown == numbers[: len(shown)]

    def soon(self, condition: Callable[[], bool]) -> bool:
        """Waits until what was typed has taken effect, and what follows is drawn: when ``condition`` holds."""
        wait_until(condition, every_s=0.03, told=lambda: f"with the lines {self.lines()}")
        return True
