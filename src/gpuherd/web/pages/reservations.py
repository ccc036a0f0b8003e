"""Reservations: a week as a calendar, a form to reserve GPUs, and buttons to cancel one's own."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from datetime import date, datetime, timedelta
from functools import lru_cache, partial

import anyio
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from gpuherd.errors import GpuherdError
from gpuherd.gpus.reservation_files import LONGEST_NAME
from gpuherd.jobs.gpu.booking import CannotReserve, cancel
from gpuherd.web.calendar_view import (
    HOURS,
    FieldProblem,
    MachineReservations,
    Reservations,
    first_day,
    own_week,
    request_of,
)
from gpuherd.web.live import EventStream, Feed, Fragment, Look, changes
from gpuherd.web.page import Page, form, render, render_fragment, services

EVERY_S = 3.0
_KEY = "reservations"
# Reservations that are made or cancelled at a time.
_ACTIONS = 4


def _machine(request: Request) -> MachineReservations:
    """That of this server, made when it is first asked for."""
    state = request.app.state
    if not hasattr(state, "reservations"):
        state.reservations = MachineReservations()
    made: MachineReservations = state.reservations
    return made


@lru_cache(maxsize=1)
def _limiter() -> anyio.CapacityLimiter:
    return anyio.CapacityLimiter(_ACTIONS)


def feed_of(request: Request) -> Feed[Reservations]:
    """The look at the reservations that all requests share."""
    return services(request).feeds.of((_KEY,), _machine(request).read, EVERY_S)


async def show(request: Request) -> Response:
    """The page."""
    return await _page(request, _first(request.query_params.get("from", "")))


async def events(request: Request) -> ASGIApp:
    """What changes in the week."""
    first = _first(request.query_params.get("from", ""))
    return EventStream(services(request).streams, changes(feed_of(request), partial(_fragments, first)))


async def reserve(request: Request) -> Response:
    """Makes the reservation of the form; one that can't be made is explained there."""
    fields = form(request)
    first = _first(fields.get("shown", ""))
    try:
        wanted = request_of(fields, time.time())
        made = await anyio.to_thread.run_sync(_machine(request).reserve, wanted, limiter=_limiter())
    except FieldProblem as problem:
        return await _page(request, first, fields, {problem.field: str(problem)}, 422)
    except CannotReserve as problem:
        return await _page(request, first, fields, {"gpus": str(problem)}, 409)
    except GpuherdError as problem:
        return await _page(request, first, fields, {"form": str(problem)}, 409)
    services(request).feeds.expire(_KEY)
    begin = date.fromtimestamp(made.reservation.since)
    shown = first if first <= begin < first + timedelta(days=7) else begin
    return RedirectResponse(f"/reservations?from={shown}&made={made.reservation.id}", 303)


async def give_back(request: Request) -> Response:
    """Cancels a reservation of the user's."""
    first, wanted = _first(form(request).get("shown", "")), form(request).get("id", "")[:100]
    try:
        await anyio.to_thread.run_sync(cancel, wanted, limiter=_limiter())
    except GpuherdError as problem:
        return await _page(request, first, {}, {"list": str(problem)}, 409)
    services(request).feeds.expire(_KEY)
    return RedirectResponse(f"/reservations?from={first}&cancelled=1", 303)


async def _page(
    request: Request,
    first: date,
    fields: Mapping[str, str] | None = None,
    problems: Mapping[str, str] | None = None,
    status: int = 200,
) -> Response:
    """The page; ``fields`` and ``problems`` of a form that was refused, by the names of fields."""
    made = request.query_params.get("made")
    look = await feed_of(request).latest()
    if made is not None and all(each.reservation.id != made for each in look.value.standings):
        # That was read while it was made.
        services(request).feeds.expire(_KEY)
        look = await feed_of(request).latest()
    found, now = look.value, time.time()
    parts = {part.id: part.html for part in _fragments(first, look)}
    week = own_week(found, first, now)
    return render(
        request,
        "reservations.html",
        title="Reservations",
        live=f"/reservations/events?from={first}",
        status=status,
        found=found,
        week=week,
        parts=parts,
        fields={**_usual(now), **(fields or {})},
        problems=problems or {},
        made=next((entry for entry in week.entries if entry.id == made and entry.is_own), None),
        cancelled="cancelled" in request.query_params,
        longest_name=LONGEST_NAME,
        zone=datetime.fromtimestamp(now).astimezone().tzname(),
    )


def _fragments(first: date, look: Look[Reservations]) -> Sequence[Fragment]:
    week = own_week(look.value, first, time.time())
    context = {"week": week, "late": look.late, "hours": range(HOURS)}
    return [Fragment(name, render_fragment(f"reservations_{name}.html", **context)) for name in ("calendar", "entries")]


def _first(word: str) -> date:
    """The first day that was asked for. Raises HTTPException for what is none."""
    try:
        return first_day(word, time.time())
    except ValueError as problem:
        raise HTTPException(400, str(problem)) from None


def _usual(now: float) -> dict[str, str]:
    """What the form has before anything was written: two hours from the next full hour on."""
    hour = datetime.fromtimestamp(now).replace(minute=0, second=0, microsecond=0)
    spans = {"from": hour + timedelta(hours=1), "until": hour + timedelta(hours=3)}
    return {"gpus": "1", "name": "", **{name: f"{at:%Y-%m-%dT%H:%M}" for name, at in spans.items()}}


PAGE = Page(
    "/reservations",
    "Reservations",
    50,
    (
        Route("/reservations", show, methods=["GET"]),
        Route("/reservations", reserve, methods=["POST"]),
        Route("/reservations/events", events),
        Route("/reservations/cancel", give_back, methods=["POST"]),
    ),
)
