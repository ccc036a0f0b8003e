"""Runs with results (spectra, answers, post-training), and their reports opened in place."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from gpuherd.web.actions import Outcome
from gpuherd.web.live import EventStream, Feed, Fragment, Look, changes
from gpuherd.web.page import Page, render, render_fragment, services
from gpuherd.web.pages.queues import explained, parts_of, place_of, places_of, said
from gpuherd.web.places import Place, Places
from gpuherd.web.queue_views import Filter, NotThere
from gpuherd.web.reports import HEADERS, Report, ReportFile, ReportMaker

_EVERY_S = 2.0
_RUNS_A_PAGE = 50


@cache
def _maker() -> ReportMaker:
    return ReportMaker()


async def show_runs(request: Request) -> Response:
    """The list of runs with results, the latest first."""
    page = Filter.of(request.query_params).page
    found = [place for place in await run_in_threadpool(places_of(request).all) if place.results is not None]
    shown = found[(page - 1) * _RUNS_A_PAGE : page * _RUNS_A_PAGE]
    reports = await run_in_threadpool(lambda: [_maker().look(place) for place in shown])
    pages = max(1, -(-len(found) // _RUNS_A_PAGE))
    runs = list(zip(shown, reports, strict=True))
    return render(request, "runs.html", title="Runs", runs=runs, number=page, of_pages=pages)


def _feed(request: Request, place: Place) -> Feed[Report]:
    return services(request).feeds.of((place.key, "report"), partial(_look, places_of(request), place.key), _EVERY_S)


def _look(places: Places, key: str) -> Report:
    place = places.find(key)
    if place is None:
        raise NotThere("this run is not there any more")
    return _maker().look(place)


@explained
async def show_run(request: Request) -> Response:
    """A run: its report, or the button that makes it."""
    place = await place_of(request)
    if place.results is None:
        raise NotThere(f"there are no results of gpuherd's in {place.folder}")
    feed = _feed(request, place)
    parts = parts_of(feed, await feed.latest(), partial(_fragments, place))
    live = f"/runs/{place.key}/events"
    return render(request, "run.html", title=place.title, live=live, place=place, parts=parts)


@explained
async def run_events(request: Request) -> ASGIApp:
    """What changes of it: a report that has been made."""
    place = await place_of(request)
    return EventStream(services(request).streams, changes(_feed(request, place), partial(_fragments, place)))


def _fragments(place: Place, look: Look[Report]) -> Sequence[Fragment]:
    context = {"place": place, "report": look.value}
    return [
        Fragment("report-state", render_fragment("run_state.html", **context)),
        Fragment("report", render_fragment("run_report.html", **context)),
    ]


@explained
async def report_file(request: Request) -> Response:
    """The report itself, in a sandbox."""
    place = await place_of(request)
    try:
        file = await run_in_threadpool(ReportFile, place)
    except OSError:
        raise NotThere("there is no report that can be shown in this run folder") from None
    headers = {**HEADERS, "content-length": str(file.state.st_size)}
    return StreamingResponse(file.blocks(), media_type="text/html; charset=utf-8", headers=headers)


@explained
async def make_report(request: Request) -> Response:
    """Begins to make the report."""
    place = await place_of(request)
    if place.results is None:
        raise NotThere(f"there are no results of gpuherd's in {place.folder}")
    begun = _maker().make(place)
    services(request).feeds.expire(place.key)
    if "hx-request" in request.headers:
        return said(Outcome(True, "the report is being made" if begun else "it is being made already"))
    return RedirectResponse(f"/runs/{place.key}", 303)


PAGE = Page(
    "/runs",
    "Runs",
    20,
    (
        Route("/runs", show_runs),
        Route("/runs/{key}", show_run),
        Route("/runs/{key}/events", run_events),
        Route("/runs/{key}/report.html", report_file),
        Route("/runs/{key}/report", make_report, methods=["POST"]),
    ),
)
