"""Who used what: the last 30 days or a month, by user, project, GPU or command, with a chart by day."""

from __future__ import annotations

import time

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gpuherd.ledger.figures import csv_of
from gpuherd.ledger.usage import Total, Usage
from gpuherd.web.bars import bars_of
from gpuherd.web.page import Page, render, services
from gpuherd.web.usage_view import BY, DAYS, Span, UsageView, file_name, months, read_usage, span_of

EVERY_S = 60.0


async def show(request: Request) -> Response:
    """The page."""
    view, by = await _asked(request)
    return render(
        request,
        "usage.html",
        title="Usage",
        view=view,
        by=by,
        kinds=BY,
        months=months(time.time()),
        recent_days=DAYS,
        bars=bars_of(view.days),
        days=len(view.days),
    )


async def download(request: Request) -> Response:
    """The table as a file."""
    view, by = await _asked(request)
    disposition = f'attachment; filename="{file_name(view.span, by)}"'
    return Response(
        csv_of(view.sums.get(by, Usage((), Total())), by),
        media_type="text/csv",
        headers={"content-disposition": disposition},
    )


async def _asked(request: Request) -> tuple[UsageView, str]:
    """The view that the address asks for, and its table. Raises HTTPException for one that there is not."""
    by, month = request.query_params.get("by", "user"), request.query_params.get("month", "")
    if by not in BY:
        raise HTTPException(400, f"usage is shown by {', '.join(BY)}")
    try:
        span_of(month, time.time())
    except ValueError as problem:
        raise HTTPException(400, str(problem)) from None
    feed = services(request).feeds.of(("usage", month), lambda: _read(month), EVERY_S)
    return (await feed.latest()).value, by


def _read(month: str) -> UsageView:
    now = time.time()
    try:
        span = span_of(month, now)
    except ValueError:  # the month has become too old while its page was open
        span = Span(month, now, now)
    return read_usage(span)


PAGE = Page("/usage", "Usage", 40, (Route("/usage", show), Route("/usage.csv", download)))
