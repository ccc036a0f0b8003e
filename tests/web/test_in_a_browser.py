"""The machine page in a real browser: events, keyboard, phone, dark, and hostile names."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest
from tests import browsing
from tests.ledger.uses import use
from tests.patience import wait_until
from tests.web.serving import Serving, serving
from tests.web.visiting import Visit

from gpuherd.gpus.leases import LeaseFolder, LeaseNote
from gpuherd.ledger import Recorder
from gpuherd.standin.machine import SimulatedMachine

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = browsing.IN_A_BROWSER
HOSTILE = "<img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def window() -> Iterator[browsing.Window]:
    yield from browsing.one_window(offline=False)


@pytest.fixture
def machine(standin: Callable[..., SimulatedMachine]) -> SimulatedMachine:
    """Four GPUs: free, held for a job, busy and lost; and a month of use."""
    made = standin("4x40GB")
    made.set_name(0, HOSTILE)
    made.occupy(2, 30_000, pid=os.getpid())
    made.set_utilisation(2, 87)
    made.lose(3)
    recorder = Recorder()
    recorder.end(
        use(f"u{day}", since=time.time() - day * 86_400, held_s=3600.0 * (day % 7 + 1), uid=os.geteuid())
        for day in range(1, 25)
    )
    recorder.close()
    return made


@pytest.fixture
def server(machine: SimulatedMachine) -> Iterator[Serving]:
    note = LeaseNote(job="train llama-8b")
    with LeaseFolder.default().acquire(machine.uuids[1], note) or pytest.fail("free"), serving() as made:
        yield made


def test_the_page_follows_the_machine_and_keeps_the_focus(
    window: browsing.Window, machine: SimulatedMachine, server: Serving
) -> None:
    visit = Visit(window, server)
    page = visit.page
    assert page.url == server.base
    assert page.locator(".gpu").count() == 4
    assert page.locator("#gpu-0 .gpu-name").inner_text() == HOSTILE
    page.wait_for_selector("svg.days rect")
    summary = page.locator("details.how summary")
    summary.focus()
    page.keyboard.press("Enter")
    page.locator("svg.days").evaluate("node => { node.dataset.same = 'yes'; }")
    machine.occupy(0, 20_000)
    page.wait_for_selector("#gpu-0.busy", timeout=20_000)
    assert page.evaluate("document.activeElement.tagName") == "SUMMARY"
    assert page.locator("details.how").get_attribute("open") is not None
    assert page.locator("svg.days").get_attribute("data-same") == "yes"
    assert visit.accessible()
    assert visit.fine()


def test_on_a_phone_in_the_dark(window: browsing.Window, server: Serving) -> None:
    visit = Visit(window, server, width=360, scheme="dark")
    visit.page.wait_for_selector("svg.days rect")
    assert visit.fits()
    boxes = [visit.page.locator(f"#gpu-{number}").bounding_box() for number in range(4)]
    assert len({box["x"] for box in boxes if box is not None}) == 1  # one column
    assert visit.accessible()
    assert visit.fine()


def test_the_login_and_a_problem(window: browsing.Window, server: Serving) -> None:
    window.page.context.clear_cookies()
    visit = Visit(window, server, live=False)
    visit.page.get_by_role("button", name="Log out").click()
    visit.page.wait_for_selector("#secret")
    assert visit.accessible()
    visit.page.locator("#secret").fill(server.token)
    visit.page.keyboard.press("Enter")
    visit.connected()
    visit.go("/nothing")
    assert "no such page" in visit.page.locator("main").inner_text()
    assert visit.accessible()


@pytest.mark.slow
@pytest.mark.parametrize("width", [320, 600, 900, 1920])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_at_any_width(window: browsing.Window, server: Serving, width: int, scheme: str) -> None:
    visit = Visit(window, server, width=width, scheme=scheme)
    visit.page.wait_for_selector("svg.days rect")
    assert visit.fits()
    assert visit.accessible()
    assert visit.fine()


def followers(*pages: Page) -> list[Page]:
    """Those that have an event stream all the time."""
    return [page for page in pages if page.locator("body").get_attribute("data-connected") == "follows"]


@pytest.mark.slow
def test_ten_tabs_in_sight_share_the_connections_that_a_browser_has(window: browsing.Window, server: Serving) -> None:
    visit = Visit(window, server)
    context = visit.page.context
    others = [context.new_page() for _ in range(9)]
    try:
        for page in others:
            page.goto(server.base)
            page.wait_for_selector("body[data-connected]", state="attached")
        assert len(followers(visit.page, *others)) == 4
        gone = followers(*others)[0]
        gone.close()  # one of those that look in takes its place
        others.remove(gone)
        wait_until(lambda: len(followers(visit.page, *others)) == 4, within_s=60.0, every_s=0.5)
        assert visit.page.evaluate("fetch('/').then(answer => answer.status)") == 200
    finally:
        for page in others:
            page.close()


@pytest.mark.slow
def test_a_server_that_is_gone_is_told(window: browsing.Window, machine: SimulatedMachine) -> None:
    with serving() as server:
        visit = Visit(window, server)
    visit.page.wait_for_function("document.getElementById('connection').textContent.includes('lost')", timeout=20_000)
    assert visit.page.locator("#gpu-2").count() == 1
