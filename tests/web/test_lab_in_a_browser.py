"""Usage, reservations and other machines in a real browser: dragging, the form by keyboard, phone, dark, and axe."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests import browsing
from tests.ledger.uses import use
from tests.web.other_machines import BUSY, FREE, fake_ssh, printing
from tests.web.serving import Serving, serving
from tests.web.visiting import Visit

from gpuherd.gpus.reservations import read
from gpuherd.ledger import Recorder
from gpuherd.standin.machine import SimulatedMachine

pytestmark = browsing.IN_A_BROWSER
HOSTILE = "<img src=x onerror=alert(1)>"
PAGES = ("/usage", "/usage?by=project", "/reservations", "/machines")


@pytest.fixture(scope="module")
def window() -> Iterator[browsing.Window]:
    yield from browsing.one_window(offline=False)


@pytest.fixture
def server(
    standin: Callable[..., SimulatedMachine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Serving]:
    """Four GPUs, a month of eight users' use, and three other machines: one answers, one is away, one is slow."""
    standin("4x40GB")
    now, recorder = time.time(), Recorder()
    recorder.end(
        use(
            f"u{number}",
            since=now - (number % 29 + 1) * 86_400,
            held_s=3600.0 * (number % 7 + 1),
            uid=os.geteuid() + number % 8,
            project=HOSTILE,
            computing_s=1800.0,
            energy_j=1e6,
        )
        for number in range(120)
    )
    recorder.close()
    away = "if 'away' in sys.argv: sys.stderr.write('No route to host\\n'); sys.exit(255)\n"
    fake_ssh(tmp_path, monkeypatch, f"{away}if 'slow' in sys.argv: time.sleep(60)\n{printing(FREE, BUSY)}")
    with serving(hosts=("node-2", "away", "slow")) as made:
        yield made


def drag(visit: Visit, first: str, last: str) -> None:
    """Drags with the mouse from one cell of the calendar to another."""
    visit.page.locator(first).scroll_into_view_if_needed()
    boxes = [visit.page.locator(each).bounding_box() for each in (first, last)]
    (x, y), (to_x, to_y) = ((box["x"] + 6, box["y"] + box["height"] / 2) for box in boxes if box is not None)
    visit.page.mouse.move(x, y)
    visit.page.mouse.down()
    visit.page.mouse.move((x + to_x) / 2, (y + to_y) / 2)
    visit.page.mouse.move(to_x, to_y)
    visit.page.mouse.up()


def test_a_span_is_dragged_and_reserved_and_given_back_by_keyboard(window: browsing.Window, server: Serving) -> None:
    visit = Visit(window, server)
    page = visit.page
    visit.go("/reservations")
    visit.connected()
    drag(visit, '.slot[data-slot="33"]', '.slot[data-slot="36"]')  # tomorrow, from nine until one o'clock
    assert page.locator(".slot.chosen").count() == 4
    assert page.evaluate("document.activeElement.id") == "reserve-gpus"
    assert page.locator("#reserve-from").input_value().endswith("T09:00")
    assert page.locator("#reserve-until").input_value().endswith("T13:00")
    page.keyboard.type("3")
    page.locator("#reserve-name").fill(HOSTILE)
    page.keyboard.press("Enter")
    page.get_by_text("Reserved: GPU").wait_for()
    (made,) = read()
    assert (made.gpus, made.name, made.until - made.since) == (3, HOSTILE, 4 * 3600.0)
    assert page.locator('.slot[data-slot="34"]').inner_text() == "1"
    assert visit.accessible()
    # A refusal is read where the field is, and what was written stays.
    page.locator("#reserve-from").fill(time.strftime("%Y-%m-%dT%H:%M", time.localtime(made.since)))
    page.locator("#reserve-until").fill(time.strftime("%Y-%m-%dT%H:%M", time.localtime(made.until)))
    page.locator("#reserve-gpus").fill("2")
    page.get_by_role("button", name="Reserve", exact=True).press("Enter")
    page.wait_for_selector("#gpus-problem")
    assert "not free" in page.locator("#gpus-problem").inner_text()
    assert page.locator("#reserve-gpus").input_value() == "2"
    # The browser tells of the status; nothing else is complained of.
    assert all("409" in complaint for complaint in visit.complaints)
    visit.complaints.clear()
    page.once("dialog", lambda dialog: dialog.accept())
    page.get_by_role("button", name="Cancel").press("Enter")
    page.get_by_text("The reservation is cancelled.").wait_for()
    assert read() == ()
    assert visit.fine()


@pytest.mark.slow
def test_what_is_reserved_elsewhere_comes_by_itself_on_a_phone(window: browsing.Window, server: Serving) -> None:
    from gpuherd.gpus.reservation_files import ReservationFolder

    visit = Visit(window, server, width=360, scheme="dark")
    visit.go("/reservations")
    visit.connected()
    assert not visit.page.locator("table.calendar").is_visible()
    begin = time.time() // 3600 * 3600 + 30 * 3600
    ReservationFolder.made().add([_uuid(server)], begin, begin + 7200, "elsewhere")
    visit.page.locator("#entries").get_by_text("elsewhere").wait_for()
    assert "GPU 0 ·" in visit.page.locator("#entries").inner_text()
    assert visit.page.locator(".free-list").get_by_text("3").count() >= 1
    for path in ("/reservations", "/usage"):
        visit.go(path)
        assert visit.fits()
        assert visit.accessible()
    assert visit.fine()


def _uuid(_server: Serving) -> str:
    from gpuherd.gpus.query import GpuReader

    return GpuReader().snapshot().gpus[0].uuid


@pytest.mark.slow
@pytest.mark.parametrize("width", [320, 700, 1280, 1920])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_at_any_width(window: browsing.Window, server: Serving, width: int, scheme: str) -> None:
    visit = Visit(window, server, width=width, scheme=scheme)
    for path in PAGES:
        visit.go(path)
        assert visit.fits(), path
        assert visit.accessible()
    visit.page.get_by_text("No route to host").wait_for()
    visit.page.get_by_text("1 of 2 free").wait_for()
    assert visit.accessible()
    assert visit.fine()


@pytest.mark.slow
def test_dragging_upwards_over_days_and_escape_and_the_last_hour(window: browsing.Window, server: Serving) -> None:
    visit = Visit(window, server)
    page = visit.page
    visit.go("/reservations")
    drag(visit, '.slot[data-slot="61"]', '.slot[data-slot="33"]')
    assert page.locator(".slot.chosen").count() == 29
    assert page.locator("#reserve-from").input_value().endswith("T09:00")
    assert page.locator("#reserve-until").input_value().endswith("T14:00")
    page.keyboard.press("Escape")
    assert page.locator(".slot.chosen").count() == 0
    drag(visit, '.slot[data-slot="167"]', '.slot[data-slot="167"]')
    assert page.locator("#reserve-from").input_value().endswith("T23:00")
    assert page.locator("#reserve-until").input_value().endswith("T00:00")
    assert page.locator("#reserve-until").input_value() > page.locator("#reserve-from").input_value()
    visit.go("/reservations?from=" + time.strftime("%Y-%m-%d", time.localtime(time.time() - 7 * 86_400)))
    before = page.locator("#reserve-from").input_value()
    drag(visit, '.slot[data-slot="33"]', '.slot[data-slot="36"]')  # past
    assert page.locator(".slot.chosen").count() == 0
    assert page.locator("#reserve-from").input_value() == before
    assert visit.fine()


@pytest.mark.slow
def test_usage_is_chosen_by_month_and_key_and_downloaded(window: browsing.Window, server: Serving) -> None:
    visit = Visit(window, server)
    page = visit.page
    visit.go("/usage")
    page.wait_for_selector("svg.days rect")
    assert page.locator("tr.own").count() == 1
    page.get_by_role("link", name="by project").click()
    assert page.locator("th.name").first.inner_text().startswith(HOSTILE)
    with page.expect_download() as download:
        page.get_by_role("link", name="Download as CSV").click()
    assert download.value.suggested_filename.endswith("-by-project.csv")
    page.locator("#month").select_option(index=1)
    page.get_by_role("button", name="Show").click()
    assert page.locator("#month").input_value() == time.strftime("%Y-%m")
    assert page.locator(".tabs a[aria-current]").inner_text() == "by project"
    assert visit.fine()
