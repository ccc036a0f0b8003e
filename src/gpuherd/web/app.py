"""The application: the pages, what they share, and the way in.

``create_app`` finds each module of ``pages`` that defines ``PAGE``. In front of everything stands
``access.AccessControl``; what it lets through is logged in, and has the form's token where it changes something.
"""

from __future__ import annotations

import asyncio
import importlib
import pkgutil
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route

from gpuherd.errors import GpuherdError, clean
from gpuherd.web import pages as page_modules
from gpuherd.web.access import SESSION_S, AccessControl, Rules, Step, Verdict, local_path, logs_in, new_cookie
from gpuherd.web.hosts import Hosts
from gpuherd.web.live import Feeds, ReadTimeout, Streams
from gpuherd.web.page import Page, Services, assets, form, render

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Scope

_FOREVER = "private, max-age=31536000, immutable"


@cache
def all_pages() -> tuple[Page, ...]:
    """The pages of all modules in ``pages``, in the order of the navigation."""
    modules = [
        importlib.import_module(f"{page_modules.__name__}.{found.name}")
        for found in pkgutil.iter_modules(page_modules.__path__)
    ]
    found = [module.PAGE for module in modules if hasattr(module, "PAGE")]
    return tuple(sorted(found, key=lambda page: page.order))


def create_app(
    rules: Rules,
    *,
    user: str,
    machine: str,
    runs: tuple[Path, ...] = (),
    hosts: Hosts | None = None,
    secure: bool = False,
) -> Starlette:
    """The application for one user.

    Args:
        rules: who may ask.
        user: the name of the user as whom it runs.
        machine: the name of the machine, for titles.
        runs: run folders that its pages show next to the user's own queues.
        hosts: other machines that are shown next to this one.
        secure: it is reached by TLS, so that browsers must not send its cookie over anything else.
    """
    found = all_pages()

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        services = app.state.services = Services(Feeds(), Streams(), found, user, machine, runs, hosts or Hosts())
        warming = asyncio.gather(
            *(page.warm_up(services) for page in found if page.warm_up is not None), return_exceptions=True
        )
        yield
        warming.cancel()
        services.hosts.close()
        services.streams.end()
        services.feeds.close()

    way_in = _WayIn(rules, secure)
    return Starlette(
        routes=[
            Route("/assets/{name}", _asset),
            Route("/login", way_in.form, methods=["GET"]),
            Route("/login", way_in.log_in, methods=["POST"]),
            Route("/logout", way_in.log_out, methods=["POST"]),
            *(route for page in found for route in page.routes),
        ],
        middleware=[Middleware(AccessControl, rules=rules, refused=way_in.refused)],
        exception_handlers={
            HTTPException: _http_problem,
            GpuherdError: _known_problem,
        },
        lifespan=lifespan,
    )


class _WayIn:
    """Links with tokens, the form for a token or password, and refusals."""

    def __init__(self, rules: Rules, secure: bool) -> None:
        self._rules = rules
        self._secure = secure

    def refused(self, scope: Scope, verdict: Verdict) -> ASGIApp:
        """The response to a request that no page gets."""
        request = Request({**scope, "state": {"session": None}})
        if verdict.step is Step.ENTER:
            return self._entered(request, verdict.onward)
        if verdict.step is Step.LOG_IN and not _wants_page(request):
            return PlainTextResponse("not logged in; open the page again\n", verdict.status)
        if verdict.step is Step.LOG_IN:
            return self._form(request, verdict.onward, status=verdict.status)
        return _problem(request, verdict.status, verdict.reason)

    async def form(self, request: Request) -> Response:
        """The form where one logs in."""
        return self._form(request, request.query_params.get("onward", "/"))

    async def log_in(self, request: Request) -> Response:
        """A form that was sent."""
        onward = local_path(form(request).get("onward", "/"))
        if logs_in(self._rules, form(request).get("secret", "").strip()):
            return self._entered(request, onward)
        return self._form(request, onward, status=403, mistake=f"that is not the {self._secret_name}")

    async def log_out(self, request: Request) -> Response:
        """Forgets the browser's cookie."""
        response = self._form(request, "/")
        response.delete_cookie(self._rules.cookie, path="/", httponly=True, samesite="strict")
        return response

    @property
    def _secret_name(self) -> str:
        return "token" if self._rules.password is None else "password"

    def _form(self, request: Request, onward: str, *, status: int = 200, mistake: str = "") -> Response:
        request.state.session = None
        context = {"onward": local_path(onward), "mistake": mistake, "secret_name": self._secret_name}
        return render(request, "login.html", title="Log in", status=status, **context)

    def _entered(self, request: Request, onward: str) -> Response:
        """On to the page, with a cookie. Where another site's link led here, a browser would leave the cookie out of a
        redirect; so a page of ours leads on."""
        response: Response
        if request.headers.get("sec-fetch-site", "none") in ("none", "same-origin"):
            response = RedirectResponse(onward, 303)
        else:
            response = render(request, "entered.html", title="Logged in", onward=onward)
        over_tls = self._secure or request.headers.get("x-forwarded-proto") == "https"
        response.set_cookie(
            self._rules.cookie,
            new_cookie(self._rules, time.time()),
            max_age=SESSION_S,
            path="/",
            httponly=True,
            samesite="strict",
            secure=over_tls,
        )
        return response


async def _asset(request: Request) -> Response:
    found = assets().get(request.path_params["name"])
    if found is None:
        raise HTTPException(404)
    return Response(found.content, media_type=found.media_type, headers={"cache-control": _FOREVER})


def _wants_page(request: Request) -> bool:
    """Whether a person sees the response: not a script, a picture or an event stream."""
    return "text/html" in request.headers.get("accept", "text/html") and "hx-request" not in request.headers


async def _http_problem(request: Request, problem: Exception) -> Response:
    status = problem.status_code if isinstance(problem, HTTPException) else 500
    words = {404: "there is no such page", 405: "this address does not take such a request"}
    detail = problem.detail if isinstance(problem, HTTPException) else ""
    return _problem(request, status, words.get(status, detail))


async def _known_problem(request: Request, problem: Exception) -> Response:
    return _problem(request, 503 if isinstance(problem, ReadTimeout) else 500, str(problem))


def _problem(request: Request, status: int, reason: str) -> Response:
    if not _wants_page(request):
        return PlainTextResponse(clean(reason) + "\n", status)
    return render(request, "problem.html", title="That did not work", status=status, reason=reason)
