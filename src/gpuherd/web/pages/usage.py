"""Who used what: the last 30 days or a month, by user, project, GPU or command, with a chart by day."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gpuherd.ledger.figures import csv_of
from gpuherd.ledger.usage import Total, Usage
from gpuherd.web.bars import bars_of
from gpuherd.web.live import Feed
from gpuherd.web.page import Page, render, services
from gpuherd.web.usage_view import BY, DAYS, Span, UsageView, file_name, months, read_usage, span_of

EVERY_S = 60.0
# So long the page waits for the figures.
PAINT_S = 0.15


async def show(request: Request) -> Response:
    """The page. Of a large ledger it is there before the figures are, and fetches them when it is open."""
    feed, by, month = _asked(request)
    view = None
    with suppress(TimeoutError):  # the reading goes on
        async with asyncio.timeout(None if "hx-request" in request.headers else PAINT_S):
            view = (await feed.latest()).value
    return render(
        request,
        "usage.html",
        title="Usage",
        view=view,
        by=by,
        month=month,
        kinds=BY,
        months=months(time.time()),
        recent_days=DAYS,
        bars=bars_of(view.days if view is not None else ()),
        days=len(view.days) if view is not None else 0,
    )


async def download(request: Request) -> Response:
    """The table as a file."""
    feed, by, _ = _asked(request)
    view = (await feed.latest()).value
    disposition = f'attachment; filename="{file_name(view.span, by)}"'
    return Response(
        csv_of(view.sums.get(by, Usage((), Total())), by),
        media_type="text/csv",
        headers={"content-disposition": disposition},
    )


def _asked(request: Request) -> tuple[Feed[UsageView], str, str]:
    """The figures that the address asks for, the table and the month. Raises HTTPException for what there is not."""
    by, month = request.query_params.get("by", "user"), request.query_params.get("month", "")
    if by not in BY:
        raise HTTPException(400, f"usage is shown by {', '.join(BY)}")
    try:
        span_of(month, time.time())
    except ValueError as problem:
        raise HTTPException(400, str(problem)) from None
    return services(request).feeds.of(("usage", month), lambda: _read(month), EVERY_S), by, month


def _read(month: str) -> UsageView:
    now = time.time()
    try:
        span = span_of(month, now)
    except ValueError:  # the month has become too old while its page was open
        span = Span(month, now, now)
    return read_usage(span)


PAGE = Page("/usage", "Usage", 40, (Route("/usage", show), Route("/usage.csv", download)))
