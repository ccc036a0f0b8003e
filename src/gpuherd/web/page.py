"""What the modules of ``pages`` use: a page's place in the navigation, the server's services, and templates.

In templates all text is escaped, and characters that steer a terminal or the direction of writing are left out
(``errors.harmless``), whoever wrote it. ``|lines`` keeps line breaks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape
from starlette.responses import HTMLResponse

from gpuherd import report
from gpuherd.errors import harmless
from gpuherd.units import duration
from gpuherd.web.hosts import Hosts

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.routing import BaseRoute

    from gpuherd.web.access import Session
    from gpuherd.web.live import Feeds, Streams

_HERE = Path(__file__).parent
# The look is that of the reports' pages.
_SHARED_STYLE = Path(str(report.__file__)).parent / "assets" / "page.css"


@dataclass(frozen=True, slots=True)
class Page:
    """A page of the navigation.

    Attributes:
        path: its address, ``/jobs``.
        title: its word in the navigation.
        order: its place there; the lowest comes first.
        routes: of this page and of what belongs to it (events, forms).
        is_shown: whether it has a place in the navigation of this server.
        warm_up: called when the server starts, so that the first reader need not wait for a driver to start.
    """

    path: str
    title: str
    order: int
    routes: Sequence[BaseRoute]
    is_shown: Callable[[Services], bool] = lambda _: True
    warm_up: Callable[[Services], Awaitable[object]] | None = None


@dataclass(frozen=True, slots=True)
class Services:
    """What the server offers its pages.

    Attributes:
        feeds: looks that all requests share.
        streams: open event streams.
        pages: all pages, in order.
        user: the user as whom the server runs.
        machine: the name of the machine.
        runs: the run folders named on the command line.
        hosts: other machines, asked over ssh.
    """

    feeds: Feeds
    streams: Streams
    pages: tuple[Page, ...]
    user: str
    machine: str
    runs: tuple[Path, ...] = ()
    hosts: Hosts = field(default_factory=Hosts)


def services(request: Request) -> Services:
    """The services of the server that got this request."""
    found: Services = request.app.state.services
    return found


def form(request: Request) -> Mapping[str, str]:
    """The fields of a POST; the last of several of one name."""
    fields: Mapping[str, str] = request.state.form
    return fields


def render(
    request: Request, template: str, *, title: str, live: str | None = None, status: int = 200, **context: Any
) -> HTMLResponse:
    """A whole page: the template's, which extends ``base.html``.

    Args:
        live: the address of its event stream (``live.EventStream``), whose fragments are put into the page; None for a
            page that stays as it is.
        context: further names for the template.
    """
    session: Session | None = getattr(request.state, "session", None)
    known = services(request)
    html = (
        _environment()
        .get_template(template)
        .render(
            title=title,
            live=live,
            path=request.url.path,
            pages=[page for page in known.pages if page.is_shown(known)],
            user=known.user,
            machine=known.machine,
            form_token="" if session is None else session.form_token,
            logged_in=session is not None,
            **context,
        )
    )
    return HTMLResponse(html.encode("utf-8", "replace"), status)


def render_fragment(template: str, **context: Any) -> Markup:
    """A part of a page, for event streams and for pages that include it."""
    return Markup(_environment().get_template(template).render(**context))  # noqa: S704 - Jinja has escaped it


@dataclass(frozen=True, slots=True)
class Asset:
    """A file of style or script: served from memory, so that no path leads anywhere else. ``version``: digits that
    change with the content."""

    content: bytes
    media_type: str
    version: str


@cache
def assets() -> Mapping[str, Asset]:
    """The files of ``assets/`` by name, and the style of the reports."""
    types = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml", ".LICENSE": "text/plain"}
    files = [_SHARED_STYLE, *sorted((_HERE / "assets").iterdir())]
    found = {path: path.read_bytes() for path in files if path.suffix in types}
    return {
        path.name: Asset(content, types[path.suffix], hashlib.sha256(content).hexdigest()[:12])
        for path, content in found.items()
    }


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(_HERE / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_plain,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
    )
    environment.filters["lines"] = _lines
    environment.filters["duration"] = duration
    environment.globals["asset"] = lambda name: f"/assets/{name}?v={assets()[name].version}"
    return environment


def _plain(value: Any) -> Any:
    """What is put into a page in place of a value: text without control and direction characters."""
    return value if isinstance(value, Markup) or not isinstance(value, str) else harmless(value)


def _lines(text: str) -> Markup:
    """The text, escaped and harmless, with its line breaks."""
    return Markup("\n").join(escape(harmless(line)) for line in text.split("\n"))
