"""A server of the page in a thread of the test, and plain requests to it."""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import Any

from gpuherd.web.serve import ServeOptions, WebServer


@dataclass(frozen=True)
class Serving:
    """A server that runs. ``port``: 0 on a socket."""

    server: WebServer
    port: int

    @property
    def url(self) -> str:
        """The link with the token."""
        assert self.server.listening.url is not None
        return self.server.listening.url

    @property
    def base(self) -> str:
        """The address of its first page."""
        return self.url.partition("?")[0]

    @property
    def token(self) -> str:
        return self.url.partition("?token=")[2]


@contextmanager
def serving(**options: Any) -> Iterator[Serving]:
    """A server with these options (``ServeOptions``) on a free port, until the block ends."""
    server = WebServer(ServeOptions(**({"port": 0} if "socket" not in options else {}) | options))
    ready = threading.Event()
    thread = threading.Thread(target=server.run, args=(lambda _: ready.set(),), daemon=True)
    thread.start()
    try:
        assert ready.wait(30)
        yield Serving(server, int(server.listening.place.rpartition(":")[2]) if "socket" not in options else 0)
    finally:
        server.stop()
        thread.join(20)
        assert not thread.is_alive()


@dataclass(frozen=True)
class Answer:
    """A response, read to its end."""

    status: int
    headers: Mapping[str, str]
    text: str

    @property
    def cookie(self) -> str:
        """The cookie that it sets, as the browser sends it back."""
        return self.headers.get("set-cookie", "").partition(";")[0]

    @property
    def form_token(self) -> str:
        """The token in the page's forms."""
        found = re.search(r'name="form_token" value="(\w+)"', self.text)
        assert found is not None
        return found[1]


class _SocketConnection(HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=30)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(30)
        self.sock.connect(str(self._path))


def ask(at: int | Path, path: str = "/", *, method: str = "GET", body: str | None = None, **headers: str) -> Answer:
    """One request to a port of 127.0.0.1, or to a socket. ``headers``: with _ in place of -."""
    connection = HTTPConnection("127.0.0.1", at, timeout=30) if isinstance(at, int) else _SocketConnection(at)
    named = {"Accept": "text/html", **{name.replace("_", "-"): value for name, value in headers.items()}}
    if body is not None:
        named.setdefault("Content-Type", "application/x-www-form-urlencoded")
    try:
        connection.request(method, path, body, named)
        found: HTTPResponse = connection.getresponse()
        content = found.read().decode("utf-8", "replace")
        return Answer(found.status, {name.lower(): value for name, value in found.getheaders()}, content)
    finally:
        connection.close()
