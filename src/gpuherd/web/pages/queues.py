"""Queues, the jobs of a queue, and a job with its live log; buttons for the user's own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlencode

import anyio
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from gpuherd.errors import GpuherdError, UsageError
from gpuherd.jobs.job import JobState
from gpuherd.web.actions import UP, Action, Forbidden, Outcome, carry_out
from gpuherd.web.live import EventStream, Feed, Fragment, Look, Render, changes
from gpuherd.web.log_views import LogPart, read_end, read_on
from gpuherd.web.page import Page, form, render, render_fragment, services
from gpuherd.web.places import Place, Places
from gpuherd.web.queue_views import (
    Filter,
    JobsView,
    JobView,
    NotThere,
    QueueView,
    read_job,
    read_jobs,
    read_queue,
)

T = TypeVar("T")

EVERY_S = 1.5
_LIST_EVERY_S = 5.0
_QUEUES_A_PAGE = 25
_LOG_EVERY_S = 1.0
# Lines that are added to what is shown of a log before its end takes their place: an open page must not grow for ever.
_LINES_ADDED = 4000
# Actions carried out at once; each may take as long as a job needs to end.
_ACTIONS = 4
# SQLite's numbers are of 64 bits, and the browser's of 53.
_HIGHEST = 2**53


@lru_cache(maxsize=4)
def _places(runs: tuple[Path, ...]) -> Places:
    return Places(runs)


def places_of(request: Request) -> Places:
    """The run folders that this server shows."""
    return _places(services(request).runs)


async def place_of(request: Request) -> Place:
    """The run folder that the address names, as it stands now. Raises NotThere."""
    place = await run_in_threadpool(places_of(request).find, request.path_params["key"])
    if place is None:
        raise NotThere("there is no such queue or run here; it may have been moved, or was not named to gpuherd web")
    return place


R = TypeVar("R")


def explained(handler: Callable[[Request], Awaitable[R]]) -> Callable[[Request], Awaitable[R | Response]]:
    """The handler, whose errors become pages with their reason and a fitting status."""

    async def handle(request: Request) -> R | Response:
        try:
            return await handler(request)
        except NotThere as problem:
            return _problem(request, 404, problem)
        except Forbidden as problem:
            return _problem(request, 403, problem)
        except UsageError as problem:
            return _problem(request, 400, problem)

    return handle


def _problem(request: Request, status: int, problem: GpuherdError) -> Response:
    if "hx-request" in request.headers:
        return said(Outcome(False, str(problem)), status)
    return render(request, "problem.html", title="That did not work", status=status, reason=str(problem))


def said(outcome: Outcome, status: int = 200) -> Response:
    """What came of an action, for the line of the page that says so."""
    return HTMLResponse(render_fragment("said.html", outcome=outcome), status)


# --- all queues ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _QueuesView:
    """A page of the queues."""

    queues: tuple[QueueView, ...]
    page: int
    pages: int


def _queues_feed(request: Request) -> Feed[_QueuesView]:
    places, page = places_of(request), Filter.of(request.query_params).page

    def read() -> _QueuesView:
        found = [place for place in places.all() if place.has_queue]
        shown = found[(page - 1) * _QUEUES_A_PAGE : page * _QUEUES_A_PAGE]
        return _QueuesView(tuple(map(read_queue, shown)), page, max(1, -(-len(found) // _QUEUES_A_PAGE)))

    return services(request).feeds.of(("queues", page), read, _LIST_EVERY_S)


async def show_queues(request: Request) -> Response:
    """The list of queues."""
    feed = _queues_feed(request)
    look = await feed.latest()
    live = f"/queues/events?page={look.value.page}"
    return render(request, "queues.html", title="Queues", live=live, parts=parts_of(feed, look, _queues_fragments))


async def queues_events(request: Request) -> ASGIApp:
    """What changes on it."""
    return EventStream(services(request).streams, changes(_queues_feed(request), _queues_fragments))


def _queues_fragments(look: Look[_QueuesView]) -> Sequence[Fragment]:
    return [Fragment("queues", render_fragment("queues_list.html", view=look.value, late=look.late))]


def parts_of(feed: Feed[T], look: Look[T], fragments: Render[T]) -> Mapping[str, str]:
    """The fragments of a look by their id, for the page that begins with them."""
    return {part.id: part.html for part in feed.rendered(look, fragments)}


# --- the jobs of a queue ------------------------------------------------------------------------------------------


def _jobs_feed(request: Request, place: Place, chosen: Filter) -> Feed[JobsView]:
    key = (place.key, "jobs", chosen, place.trusted)
    return services(request).feeds.of(key, partial(read_jobs, place, chosen), EVERY_S)


@explained
async def show_jobs(request: Request) -> Response:
    """A page of the jobs of a queue."""
    place, chosen = await place_of(request), Filter.of(request.query_params)
    feed = _jobs_feed(request, place, chosen)
    look = await feed.latest()
    return render(
        request,
        "jobs.html",
        title=place.title,
        live=f"/queues/{place.key}/events?{_query(chosen)}",
        place=place,
        chosen=chosen,
        parts=parts_of(feed, look, _jobs_fragments),
    )


@explained
async def jobs_events(request: Request) -> ASGIApp:
    """What changes on it."""
    place, chosen = await place_of(request), Filter.of(request.query_params)
    feed = _jobs_feed(request, place, chosen)
    return EventStream(services(request).streams, changes(feed, _jobs_fragments))


def _jobs_fragments(look: Look[JobsView]) -> Sequence[Fragment]:
    context = {"view": look.value, "queue": look.value.queue, "states": tuple(JobState), "late": look.late, "up": UP}
    context |= {"query": lambda **more: _query(look.value.filter, **more)}
    return [Fragment(name, render_fragment(f"jobs_{name}.html", **context)) for name in ("summary", "filter", "list")]


def _query(chosen: Filter, **changed: object) -> str:
    """The filter as the end of an address, with some of it changed.

    >>> _query(Filter(JobState.FAILED, "a&b", 3), page=1)
    'state=failed&q=a%26b&page=1'
    """
    state = "" if chosen.state is None else chosen.state.value
    return urlencode({"state": state, "q": chosen.text, "page": chosen.page, **changed})


# --- a job --------------------------------------------------------------------------------------------------------


def _job_feed(request: Request, place: Place, number: int) -> Feed[JobView]:
    key = (place.key, "job", number, place.trusted)
    return services(request).feeds.of(key, partial(read_job, place, number), EVERY_S)


@explained
async def show_job(request: Request) -> Response:
    """A job, with the end of its log or the part before a byte."""
    place, number, attempt = await place_of(request), _job_number(request), _number(request, "attempt")
    before = _number(request, "before")
    feed = _job_feed(request, place, number)
    look = await feed.latest()
    view = look.value
    chosen = view.attempt(attempt)
    if attempt is not None and chosen is None:
        raise NotThere(f"this job has no attempt {attempt}")
    log = None if chosen is None else await run_in_threadpool(read_end, chosen.log, place.uid, before)
    address = f"/queues/{place.key}/jobs/{number}"
    live = f"{address}/events" + (f"?attempt={attempt}" if attempt is not None else "")
    return render(
        request,
        "job.html",
        title=view.line.title,
        live=live if before is None else None,
        place=place,
        view=view,
        attempt=chosen,
        asked=attempt,
        before=before,
        log=log,
        address=address,
        parts=parts_of(feed, look, _job_fragments),
    )


@explained
async def job_events(request: Request) -> ASGIApp:
    """What changes of it, and what is added to its log."""
    place, number, attempt = await place_of(request), _job_number(request), _number(request, "attempt")
    feed = _job_feed(request, place, number)
    return EventStream(services(request).streams, _job_changes(feed, place, attempt))


def _job_fragments(look: Look[JobView]) -> Sequence[Fragment]:
    view = look.value
    context = {"view": view, "line": view.line, "queue": view.queue, "place": view.queue.place}
    names = ("status", "facts", "attempts")
    return [Fragment(f"job-{name}", render_fragment(f"job_{name}.html", **context)) for name in names]


async def _job_changes(feed: Feed[JobView], place: Place, attempt: int | None) -> AsyncIterator[Sequence[Fragment]]:
    shown: dict[str, str] = {}
    log = LogFollower(place.uid)
    while True:
        parts: list[Fragment] = []
        with suppress(GpuherdError, OSError):
            try:
                look = await feed.latest()
            except NotThere:
                return
            parts = [part for part in feed.rendered(look, _job_fragments) if shown.get(part.id) != part.html]
            shown.update((part.id, part.html) for part in parts)
            chosen = look.value.attempt(attempt)
            if chosen is not None:
                parts += await run_in_threadpool(log.look, chosen.number, chosen.log)
        if parts:
            yield parts
        await asyncio.sleep(_LOG_EVERY_S)


class LogFollower:
    """What an open page has to be sent of a log. For one page; ``owner`` is the user whose file the log must be."""

    def __init__(self, owner: int) -> None:
        self._owner = owner
        self._of: tuple[int, Path] | None = None
        self._part: LogPart | None = None
        self._added = 0

    def look(self, number: int, path: Path) -> list[Fragment]:
        """What has changed of the log of this attempt: first, and of another attempt, all that is shown."""
        if self._of != (number, path):
            self._of, self._part = (number, path), None
        if self._part is None or self._added > _LINES_ADDED:
            part = read_end(path, self._owner)
            whole = True
        else:
            part = read_on(path, self._owner, self._part)
            whole = part is not None and part.is_whole
        if part is None:
            return []
        self._part = part
        self._added = 0 if whole else self._added + len(part.lines)
        html = render_fragment("log_lines.html", log=part)
        found = [Fragment("log-rest", render_fragment("log_rest.html", log=part))]
        if whole:
            found.append(Fragment("log-head", render_fragment("log_head.html", log=part, number=number)))
        if whole or part.lines:
            found.append(Fragment("log-lines", html, "morph" if whole else "append"))
        return found


def _job_number(request: Request) -> int:
    number: int = request.path_params["number"]
    if number > _HIGHEST:
        raise NotThere("there is no job with such a number")
    return number


def _number(request: Request, name: str) -> int | None:
    """A number of the address; None where it has none. Raises NotThere for other words."""
    word = request.query_params.get(name, "")
    if not word:
        return None
    if not (word.isascii() and word.isdigit() and len(word) < 16):
        raise NotThere(f"{name} in the address must be a number")
    return int(word)


# --- actions ------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def _limiter() -> anyio.CapacityLimiter:
    return anyio.CapacityLimiter(_ACTIONS)


@explained
async def act(request: Request) -> Response:
    """Carries out what a button asks for."""
    place, action = await place_of(request), Action.of(form(request))
    try:
        outcome = await anyio.to_thread.run_sync(partial(carry_out, place, action), limiter=_limiter())
    except (Forbidden, UsageError, NotThere):
        raise
    except GpuherdError as problem:
        outcome = Outcome(False, str(problem))
    services(request).feeds.expire(place.key)
    services(request).feeds.expire("queues")
    if "hx-request" in request.headers:
        return said(outcome)
    back = f"/queues/{place.key}" + (f"/jobs/{action.jobs[0]}" if len(action.jobs) == 1 else "")
    return render(request, "outcome.html", title=place.title, outcome=outcome, back=back)


_OF_QUEUE = "/queues/{key}"
PAGE = Page(
    "/queues",
    "Queues",
    10,
    (
        Route("/queues", show_queues),
        Route("/queues/events", queues_events),
        Route(_OF_QUEUE, show_jobs),
        Route(f"{_OF_QUEUE}/events", jobs_events),
        Route(f"{_OF_QUEUE}/do", act, methods=["POST"]),
        Route(f"{_OF_QUEUE}/jobs/{{number:int}}", show_job),
        Route(f"{_OF_QUEUE}/jobs/{{number:int}}/events", job_events),
    ),
)
