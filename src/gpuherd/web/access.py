"""Who may ask: every request passes ``decide`` before any page sees it.

1. The Host header is one of the server's names: a page of a stranger whose name resolves to this address (DNS
   rebinding) is refused.
2. A request that another site's page makes is refused, other than following a link. Other ports of the host count as
   other sites: other users' servers may be there.
3. The user is known: by the cookie that the link with the token, or the password, was exchanged for; or, on a Unix
   socket alone, by the header of a reverse proxy.
4. A request that changes something is a POST from our own page with the token of its forms.

A cookie is signed with a secret that is made at the start, so that those of earlier servers, and forged ones, mean
nothing. All comparisons of secrets take constant time. Decisions are pure; ``AccessControl`` reads the request.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
import logging
import re
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl, quote, urlsplit

from gpuherd.errors import printable

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

logger = logging.getLogger(__name__)

# Seconds for which a browser stays logged in.
SESSION_S = 7 * 86_400
_COOKIE = "gpuherd"
FORM_FIELD = "form_token"
FORM_HEADER = "x-gpuherd-form"
# Paths that need no login: style, scripts and the form where one logs in.
_OPEN = ("/assets/", "/login")
_MOST_BODY_BYTES = 64 * 1024
_MOST_FIELDS = 200
# How long a client may leave what was sent to it unread.
SEND_S = 20.0
# Logins: one a second, five at once.
_LOGINS_A_SECOND, _LOGINS_AT_ONCE = 1.0, 5.0

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "frame-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
# Sent with each response that doesn't set them itself.
HEADERS: Mapping[bytes, bytes] = {
    b"content-security-policy": POLICY.encode(),
    b"x-content-type-options": b"nosniff",
    b"x-frame-options": b"DENY",
    # Not no-referrer: browsers would then send "Origin: null" with our own forms, too.
    b"referrer-policy": b"same-origin",
    b"cross-origin-opener-policy": b"same-origin",
    b"cross-origin-resource-policy": b"same-origin",
    b"permissions-policy": b"camera=(), geolocation=(), microphone=()",
    b"cache-control": b"no-store",
}


@dataclass(frozen=True, slots=True)
class Rules:
    """Who may ask this server.

    Attributes:
        hosts: names and addresses in lower case that the Host header may have, an IPv6 address in brackets.
        any_address: it may have any address too: one that is no name can't have been resolved to this machine.
        token: of the link; None where a password or a proxy stands in for it.
        password: None for no password.
        user_header: lower-case name of the header by which a proxy names the user; believed on a Unix socket only.
        user: whom that header must name.
        port: distinguishes the cookies of several servers on a host.
    """

    hosts: frozenset[str]
    any_address: bool = False
    token: str | None = None
    password: str | None = field(default=None, repr=False)
    user_header: str | None = None
    user: str = ""
    port: int = 0
    secret: bytes = field(default_factory=lambda: secrets.token_bytes(32), repr=False)

    @property
    def cookie(self) -> str:
        """The name of the cookie."""
        return f"{_COOKIE}-{self.port}"


@dataclass(frozen=True, slots=True)
class Asked:
    """What a request says, as far as it matters for access. ``headers``: in lower case, as often as they were sent."""

    method: str
    path: str
    headers: Sequence[tuple[str, str]]
    query: Mapping[str, str] = field(default_factory=dict)
    form: Mapping[str, str] = field(default_factory=dict)
    over_socket: bool = False

    def all(self, name: str) -> list[str]:
        """The values of this header."""
        return [value for key, value in self.headers if key == name]

    def one(self, name: str) -> str | None:
        """The value of this header; None unless it was sent exactly once."""
        values = self.all(name)
        return values[0] if len(values) == 1 else None


@dataclass(frozen=True, slots=True)
class Session:
    """A user who is logged in; ``form_token`` goes into their forms."""

    form_token: str


class Step(Enum):
    """What comes next for a request."""

    LET_IN = "let in"
    ENTER = "enter"
    LOG_IN = "log in"
    REFUSE = "refuse"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What becomes of a request. ``reason``: of a refusal, a sentence for people; ``onward``: the path to go on to
    after a login."""

    step: Step
    status: int = 200
    reason: str = ""
    session: Session | None = None
    onward: str = "/"


def decide(rules: Rules, asked: Asked, now: float) -> Verdict:
    """The verdict on a request; ``now`` in wall-clock seconds."""
    if not host_allowed(rules, asked.one("host")):
        return _refuse(421, "this server is not known by the name in the address; start it with --host-name NAME")
    if asked.method not in ("GET", "HEAD", "POST"):
        return _refuse(405, "only GET, HEAD and POST are known here")
    if (strange := _cross_site(asked)) is not None:
        return _refuse(403, strange)
    is_open = asked.path.startswith(_OPEN[0]) or asked.path == _OPEN[1]
    if rules.user_header is not None and asked.over_socket:
        named = asked.one(rules.user_header)
        if named is None or not _same(named, rules.user):
            return _refuse(403, f"the proxy does not name {rules.user}, whose page this is, in {rules.user_header}")
        session: Session | None = Session(_signature(rules, "form", "proxy"))
    else:
        session = session_of(rules, asked, now)
    if rules.token is not None and asked.method in ("GET", "HEAD") and "token" in asked.query:
        if _same(asked.query["token"], rules.token):
            return Verdict(Step.ENTER, onward=_onward(asked))
        if session is None:
            return _refuse(403, "the link is of an earlier gpuherd web, or not complete; use the one it printed last")
    if session is None and not is_open:
        if asked.method == "POST":
            return _refuse(403, "not logged in; open the page again")
        return Verdict(Step.LOG_IN, 403 if asked.all("hx-request") else 401, onward=_onward(asked))
    if asked.method == "POST" and asked.path != "/login":
        given = asked.one(FORM_HEADER) or asked.form.get(FORM_FIELD, "")
        if session is None or not _same(given, session.form_token):
            return _refuse(403, "the form is of an earlier page; open the page again")
    return Verdict(Step.LET_IN, session=session)


def host_allowed(rules: Rules, host: str | None) -> bool:
    """Whether the Host header names this server, with whatever port: a tunnel may have another."""
    parts = re.fullmatch(r"(?:\[([0-9a-f:.]+)\]|([^][\s:/?#@\\]+))(?::\d{1,5})?", (host or "").lower(), re.ASCII)
    if parts is None:
        return False
    name = parts[1] or parts[2].rstrip(".")
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return name in rules.hosts
    return rules.any_address or (f"[{address}]" if address.version == 6 else str(address)) in rules.hosts


def _cross_site(asked: Asked) -> str | None:
    """Why a request is one that another site made, as a sentence; None if it is not."""
    reason = "the request comes from the page of another site"
    site = asked.one("sec-fetch-site")
    if site not in (None, "same-origin", "none"):
        follows_link = asked.one("sec-fetch-mode") == "navigate" and asked.one("sec-fetch-dest") == "document"
        if asked.method == "POST" or not follows_link:
            return reason
    origins = asked.all("origin")
    if origins and (len(origins) > 1 or urlsplit(origins[0]).netloc.lower() != (asked.one("host") or "").lower()):
        return reason
    if asked.method == "POST" and not origins and site != "same-origin":
        return "the request does not say which page it comes from"
    return None


def new_cookie(rules: Rules, now: float) -> str:
    """The value of a cookie for somebody who has logged in."""
    content = f"{int(now + SESSION_S)}.{secrets.token_urlsafe(16)}"
    return f"{content}.{_signature(rules, 'cookie', content)}"


def session_of(rules: Rules, asked: Asked, now: float) -> Session | None:
    """The session that the request's cookie is of; None for none, an expired or a forged one."""
    for line in asked.all("cookie"):
        for part in line.split(";"):
            name, _, value = part.strip().partition("=")
            content, _, signature = value.rpartition(".")
            if name != rules.cookie or not _same(signature, _signature(rules, "cookie", content)):
                continue
            if int(content.partition(".")[0]) > now:
                return Session(_signature(rules, "form", content))
    return None


def logs_in(rules: Rules, given: str) -> bool:
    """Whether this is the password, or the token where there is no password."""
    expected = rules.password if rules.password is not None else rules.token
    return expected is not None and _same(given, expected)


def _signature(rules: Rules, purpose: str, content: str) -> str:
    text = f"{purpose}\0{content}".encode("utf-8", "surrogatepass")
    return hmac.new(rules.secret, text, hashlib.sha256).hexdigest()


def _same(given: str, expected: str) -> bool:
    return hmac.compare_digest(given.encode("utf-8", "surrogatepass"), expected.encode("utf-8", "surrogatepass"))


def _refuse(status: int, reason: str) -> Verdict:
    return Verdict(Step.REFUSE, status, reason)


def _onward(asked: Asked) -> str:
    """The path that was asked for, without the token."""
    rest = "&".join(f"{quote(name)}={quote(value)}" for name, value in asked.query.items() if name != "token")
    return local_path(quote(asked.path) + (f"?{rest}" if rest else ""))


def local_path(path: str) -> str:
    """The path if it leads to a page of this server, else ``/``: ``//evil.example`` is a host to a browser."""
    safe = path.startswith("/") and not path.startswith(("//", "/\\", "/login")) and path.isprintable()
    return path if safe and "\\" not in path else "/"


# ---- in front of the pages -------------------------------------------------------------------------------------------

Refuse = Callable[["Scope", Verdict], "ASGIApp"]


class AccessControl:
    """ASGI middleware. Pages behind it find ``session`` (None on open pages) and ``form`` (of a POST) in the request's
    state. ``refused`` makes the response to a request that is not let through."""

    def __init__(self, app: ASGIApp, rules: Rules, refused: Refuse) -> None:
        self._app = app
        self._rules = rules
        self._refused = refused
        self._logins_left, self._counted_at = _LOGINS_AT_ONCE, time.monotonic()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return
        response = _Response(send)
        try:
            await self._answer(scope, receive, response.send)
        except ClientTooSlow:
            return  # the server closes the connection, since the response has not ended
        except Exception as problem:
            logger.exception("the page %s failed", printable(scope["path"]))
            if response.begun:
                return
            reason = f"unexpected error: {type(problem).__name__}; its traceback is where gpuherd web runs"
            await self._refused(scope, _refuse(500, reason))(scope, receive, response.send)

    async def _answer(self, scope: Scope, receive: Receive, guarded: Send) -> None:
        asked, body = asked_in(scope), b""
        if asked.method == "POST":
            read = await _read_form(asked, receive)
            if isinstance(read, Verdict):
                await self._refused(scope, read)(scope, receive, guarded)
                return
            body = read
            asked = asked_in(scope, _pairs(body.decode("utf-8", "replace")))
            if asked.path == "/login" and not self._may_log_in():
                verdict = _refuse(429, "too many logins; try again in some seconds")
                await self._refused(scope, verdict)(scope, receive, guarded)
                return
        verdict = decide(self._rules, asked, time.time())
        if verdict.step is not Step.LET_IN:
            await self._refused(scope, verdict)(scope, receive, guarded)
            return
        scope.setdefault("state", {}).update(session=verdict.session, form=asked.form)
        await self._app(scope, _again(body, receive) if asked.method == "POST" else receive, guarded)

    def _may_log_in(self) -> bool:
        now = time.monotonic()
        gained = (now - self._counted_at) * _LOGINS_A_SECOND
        self._logins_left, self._counted_at = min(_LOGINS_AT_ONCE, self._logins_left + gained), now
        if self._logins_left < 1.0:
            return False
        self._logins_left -= 1.0
        return True


def asked_in(scope: Scope, form: Mapping[str, str] | None = None) -> Asked:
    """The request as ``decide`` takes it."""
    headers = [(name.decode("latin-1").lower(), value.decode("latin-1")) for name, value in scope["headers"]]
    query = _pairs(scope["query_string"].decode("latin-1"))
    # uvicorn knows no client's address on a Unix socket, whose server is its path and None for a port.
    server = scope.get("server")
    over_socket = server is not None and server[1] is None
    return Asked(scope["method"], scope["path"], headers, query, form or {}, over_socket)


def _pairs(text: str) -> dict[str, str]:
    try:
        return dict(parse_qsl(text, keep_blank_values=True, max_num_fields=_MOST_FIELDS))
    except ValueError:  # too many
        return {}


async def _read_form(asked: Asked, receive: Receive) -> bytes | Verdict:
    """The body of a POST, or why it is refused."""
    kind = (asked.one("content-type") or "").partition(";")[0].strip().lower()
    if kind not in ("application/x-www-form-urlencoded", ""):
        return _refuse(415, "only plain forms are taken")
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return _refuse(400, "the request is not complete")
        body += message.get("body", b"")
        if len(body) > _MOST_BODY_BYTES:
            return _refuse(413, f"a form has at most {_MOST_BODY_BYTES // 1024} KB")
        if not message.get("more_body", False):
            return bytes(body)


def _again(body: bytes, receive: Receive) -> Receive:
    """Gives out the body that was read already, then what else comes."""
    left = [body]

    async def give() -> Message:
        if left:
            return {"type": "http.request", "body": left.pop(), "more_body": False}
        return await receive()

    return give


class ClientTooSlow(Exception):
    """A client has not read what was sent to it for SEND_S seconds."""


class _Response:
    """What is sent of one response: with the headers that all have, and a limit of time."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.begun = False
        self._given_up = False

    async def send(self, message: Message) -> None:
        """Raises ClientTooSlow."""
        if self._given_up:
            raise ClientTooSlow
        if message["type"] == "http.response.start":
            self.begun = True
            headers = list(message.get("headers", ()))
            there = {name.lower() for name, _ in headers}
            headers += [(name, value) for name, value in HEADERS.items() if name not in there]
            message = {**message, "headers": headers}
        try:
            async with asyncio.timeout(SEND_S):
                await self._send(message)
        except TimeoutError:
            self._given_up = True
            raise ClientTooSlow from None
