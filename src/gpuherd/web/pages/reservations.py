"""Reservations: a week as a calendar, a form to reserve GPUs, and buttons to cancel one's own."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from datetime import date, datetime, timedelta
from functools import cache, lru_cache, partial

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
    monday_of,
    own_week,
    request_of,
)
from gpuherd.web.live import EventStream, Feed, Fragment, Look, changes
from gpuherd.web.page import Page, form, render, render_fragment, services

EVERY_S = 3.0
_KEY = "reservations"
# Reservations that are made or cancelled at a time.
_ACTIONS = 4


@cache
def _machine() -> MachineReservations:
    return MachineReservations()


@lru_cache(maxsize=1)
def _limiter() -> anyio.CapacityLimiter:
    return anyio.CapacityLimiter(_ACTIONS)


def feed_of(request: Request) -> Feed[Reservations]:
    """The look at the reservations that all requests share."""
    return services(request).feeds.of((_KEY,), _machine().read, EVERY_S)


async def show(request: Request) -> Response:
    """The page."""
    return await _page(request, _monday(request.query_params.get("week", "")))


async def events(request: Request) -> ASGIApp:
    """What changes in the week."""
    monday = _monday(request.query_params.get("week", ""))
    return EventStream(services(request).streams, changes(feed_of(request), partial(_fragments, monday)))


async def reserve(request: Request) -> Response:
    """Makes the reservation of the form; one that can't be made is explained there."""
    fields = form(request)
    monday = _monday(fields.get("week", ""))
    try:
        wanted = request_of(fields, time.time())
        made = await anyio.to_thread.run_sync(_machine().reserve, wanted, limiter=_limiter())
    except FieldProblem as problem:
        return await _page(request, monday, fields, {problem.field: str(problem)}, 422)
    except CannotReserve as problem:
        return await _page(request, monday, fields, {"gpus": str(problem)}, 409)
    except GpuherdError as problem:
        return await _page(request, monday, fields, {"form": str(problem)}, 409)
    services(request).feeds.expire(_KEY)
    week = monday_of("", made.reservation.since)
    return RedirectResponse(f"/reservations?week={week}&made={made.reservation.id}", 303)


async def give_back(request: Request) -> Response:
    """Cancels a reservation of the user's."""
    monday, wanted = _monday(form(request).get("week", "")), form(request).get("id", "")[:100]
    try:
        await anyio.to_thread.run_sync(cancel, wanted, limiter=_limiter())
    except GpuherdError as problem:
        return await _page(request, monday, {}, {"list": str(problem)}, 409)
    services(request).feeds.expire(_KEY)
    return RedirectResponse(f"/reservations?week={monday}&cancelled=1", 303)


async def _page(
    request: Request,
    monday: date,
    fields: Mapping[str, str] | None = None,
    problems: Mapping[str, str] | None = None,
    status: int = 200,
) -> Response:
    """The page; ``fields`` and ``problems`` of a form that was refused, by the names of fields."""
    look = await feed_of(request).latest()
    found, now = look.value, time.time()
    parts = {part.id: part.html for part in _fragments(monday, look)}
    made = request.query_params.get("made")
    week = own_week(found, monday, now)
    return render(
        request,
        "reservations.html",
        title="Reservations",
        live=f"/reservations/events?week={monday}",
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


def _fragments(monday: date, look: Look[Reservations]) -> Sequence[Fragment]:
    week = own_week(look.value, monday, time.time())
    context = {"week": week, "late": look.late, "hours": range(HOURS)}
    return [Fragment(name, render_fragment(f"reservations_{name}.html", **context)) for name in ("calendar", "entries")]


def _monday(word: str) -> date:
    """The week that was asked for. Raises HTTPException for what is none."""
    try:
        return monday_of(word, time.time())
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
