"""The machine: its GPUs now, who uses and holds them, who waits."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from markupsafe import Markup
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from gpuherd.web.live import EventStream, Feed, Fragment, Look, changes
from gpuherd.web.machine_data import GpuState, MachineReader, MachineView
from gpuherd.web.page import Page, render, render_fragment, services

EVERY_S = 2.0


@cache
def _reader() -> MachineReader:
    return MachineReader()


def feed_of(request: Request) -> Feed[MachineView]:
    """The look at the machine that all requests share."""
    return services(request).feeds.of("machine", _reader().read, EVERY_S)


async def show(request: Request) -> Response:
    """The page as it is now."""
    feed = feed_of(request)
    parts = {part.id: Markup(part.html) for part in feed.rendered(await feed.latest(), fragments)}  # noqa: S704
    return render(request, "machine.html", title="Machine", live="/machine/events", parts=parts)


async def events(request: Request) -> ASGIApp:
    """What changes on it."""
    return EventStream(services(request).streams, changes(feed_of(request), fragments))


def fragments(look: Look[MachineView]) -> Sequence[Fragment]:
    """The parts of the page that change."""
    context = {"view": look.value, "now": look.at, "late": look.late, "states": GpuState}
    return [
        Fragment(name, render_fragment(f"machine_{name}.html", **context)) for name in ("summary", "gpus", "waiting")
    ]


PAGE = Page("/", "Machine", 0, (Route("/", show), Route("/machine/events", events)))
