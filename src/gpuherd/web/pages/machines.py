"""Several machines side by side: this one, and those of ``--host``."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from gpuherd.errors import GpuherdError
from gpuherd.web.hosts import GpuLine, HostLook
from gpuherd.web.live import EventStream, Fragment, Look
from gpuherd.web.machine_data import GpuState, GpuView, MachineView
from gpuherd.web.page import Page, render, render_fragment, services
from gpuherd.web.pages import machine

EVERY_S = 2.0


def own_look(look: Look[MachineView], name: str) -> HostLook:
    """This machine, as the others are shown."""
    view = look.value
    gpus = tuple(_own_line(each) for each in view.gpus if each.state is not GpuState.SPLIT)
    return HostLook(name, gpus, look.at, view.problem, answers=not look.late, tried=True)


def _own_line(view: GpuView) -> GpuLine:
    gpu, holder = view.gpu, view.holder
    users = [process.user for process in gpu.processes]
    if holder is not None:
        users.insert(0, holder.user)
    return GpuLine(
        label=gpu.label,
        name=gpu.name,
        used_mb=gpu.used_mb,
        total_mb=gpu.total_mb,
        utilisation=gpu.utilisation_percent,
        free=view.state is GpuState.FREE,
        reason="" if view.state is GpuState.FREE else view.reason or "taken by gpuherd",
        users=tuple(dict.fromkeys(user for user in users if user)),
        idle_s=None if view.idle is None else int(view.idle.idle_s),
    )


async def show(request: Request) -> Response:
    """The machines as they are known now; no other machine is waited for."""
    parts = await _fragments(request)
    names = [services(request).machine, *services(request).hosts.names]
    return render(
        request,
        "machines.html",
        title="Machines",
        live="/machines/events",
        shown=list(zip(names, parts, strict=True)),
        alone=len(names) == 1,
    )


async def events(request: Request) -> ASGIApp:
    """What changes on them."""
    return EventStream(services(request).streams, _changes(request))


async def _changes(request: Request) -> AsyncIterator[Sequence[Fragment]]:
    shown: dict[str, str] = {}
    while True:
        changed = [part for part in await _fragments(request) if shown.get(part.id) != part.html]
        if changed:
            shown.update((part.id, part.html) for part in changed)
            yield changed
        await asyncio.sleep(EVERY_S)


async def _fragments(request: Request) -> list[Fragment]:
    """A part for each machine, this one first."""
    known = services(request)
    others = known.hosts.looks()
    try:
        own = own_look(await machine.feed_of(request).latest(), known.machine)
    except (GpuherdError, OSError) as problem:
        own = HostLook(known.machine, problem=str(problem), tried=True)
    return [
        Fragment(
            f"host-{number}", render_fragment("machines_host.html", look=look, age_s=_age_s(look), is_own=not number)
        )
        for number, look in enumerate((own, *others))
    ]


def _age_s(look: HostLook) -> float | None:
    """How old what is shown is, where that matters: the machine does not answer now."""
    return None if look.at is None or look.answers else max(0.0, time.time() - look.at)


PAGE = Page(
    "/machines",
    "Machines",
    60,
    (Route("/machines", show), Route("/machines/events", events)),
    is_shown=lambda known: bool(known.hosts.names),
)
