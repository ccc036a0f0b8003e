"""The machine: its GPUs now, who uses and holds them, who waits; and how much was used in the last 30 days.

The days are read from the ledger once in some minutes, and fetched by the page when it is open already: they may take
a second, and no page waits for them to show what is free.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from markupsafe import Markup
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from gpuherd.web.bars import bars_of
from gpuherd.web.live import EventStream, Feed, Fragment, Look, changes
from gpuherd.web.machine_data import DayUse, GpuState, MachineReader, MachineView, read_days
from gpuherd.web.page import Page, Services, render, render_fragment, services

EVERY_S = 2.0
DAYS, DAYS_EVERY_S = 30, 300.0


@cache
def _reader() -> MachineReader:
    return MachineReader()


def feed_of(request: Request) -> Feed[MachineView]:
    """The look at the machine that all requests share."""
    return _feed(services(request))


def _feed(known: Services) -> Feed[MachineView]:
    return known.feeds.of("machine", lambda: _reader().read(), EVERY_S)


async def show(request: Request) -> Response:
    """The page as it is now."""
    feed = feed_of(request)
    parts = {part.id: Markup(part.html) for part in feed.rendered(await feed.latest(), fragments)}  # noqa: S704
    return render(request, "machine.html", title="Machine", live="/machine/events", parts=parts, days=DAYS)


async def events(request: Request) -> ASGIApp:
    """What changes on it."""
    return EventStream(services(request).streams, changes(feed_of(request), fragments))


def fragments(look: Look[MachineView]) -> Sequence[Fragment]:
    """The parts of the page that change."""
    context = {"view": look.value, "now": look.at, "late": look.late, "states": GpuState}
    return [
        Fragment(name, render_fragment(f"machine_{name}.html", **context)) for name in ("summary", "gpus", "waiting")
    ]


async def history(request: Request) -> Response:
    """The last days: a part of the page, or a page of its own where there are no scripts."""
    feed: Feed[tuple[DayUse, ...]] = services(request).feeds.of("days", lambda: read_days(DAYS), DAYS_EVERY_S)
    bars = bars_of((await feed.latest()).value)
    if "hx-request" in request.headers:
        return HTMLResponse(render_fragment("machine_days.html", bars=bars, days=DAYS))
    return render(request, "machine_history.html", title=f"The last {DAYS} days", bars=bars, days=DAYS)


PAGE = Page(
    "/",
    "Machine",
    0,
    (Route("/", show), Route("/machine/events", events), Route("/machine/history", history)),
    warm_up=lambda known: _feed(known).latest(),
)
