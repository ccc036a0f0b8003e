"""Listens: on the loopback with a token in the link, on a Unix socket for a reverse proxy, or on a public address with
TLS and a password.

``check`` refuses what would let strangers in. Connections are bounded in number, and one that does not send a whole
request in time is closed, so that no client holds up the others.
"""

from __future__ import annotations

import asyncio
import grp
import ipaddress
import logging
import os
import secrets
import socket
import ssl
import stat
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from gpuherd.errors import CannotWrite, UsageError
from gpuherd.gpus.lease_files import user_name
from gpuherd.web.access import Rules
from gpuherd.web.app import create_app
from gpuherd.web.hosts import Hosts
from gpuherd.web.machine_data import machine_name
from gpuherd.web.peers import user_at

if TYPE_CHECKING:
    from starlette.applications import Starlette

PORT = 8642
LOOPBACK = "127.0.0.1"
_LOOPBACK_NAMES = ("127.0.0.1", "[::1]", "localhost")
_MOST_CONNECTIONS = 256
# Seconds in which a client has to send a whole request.
REQUEST_S = 10.0
_KEEP_ALIVE_S = 15
_OF_ANOTHER_USER = (
    b"HTTP/1.1 403 Forbidden\r\ncontent-type: text/plain\r\ncontent-length: 68\r\nconnection: close\r\n\r\n"
    b"this page belongs to another user; start your own with: gpuherd web\n"
)
_SHORTEST_PASSWORD = 12
_MOST_PASSWORD_BYTES = 4096


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """Where to listen, and who may ask. None is what was not given.

    Attributes:
        port: 0 for any that is free; None for the usual one, or any if that is taken.
        bind: an IP address of this machine.
        host_names: further names by which browsers reach the server: that of a proxy, or of the machine.
        socket: path of a Unix socket to listen on in place of a port; ``socket_group``: who may use it besides us.
        user_header: the header by which a proxy names the user; ``user_name``: what it must say, by default our login.
        tls_cert, tls_key: PEM files.
        password_file: its first line is the password.
        runs: run folders to show.
        hosts: names of other machines to show, asked over ssh.
    """

    port: int | None = None
    bind: str = LOOPBACK
    host_names: tuple[str, ...] = ()
    socket: Path | None = None
    socket_group: str | None = None
    user_header: str | None = None
    user_name: str | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    password_file: Path | None = None
    runs: tuple[Path, ...] = ()
    hosts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Listening:
    """The server listens now. ``url``: the link to open, None on a socket without a token; ``place``: the socket's path
    or address and port."""

    url: str | None
    place: str


def check(options: ServeOptions) -> None:
    """Raises UsageError for options that contradict each other, or that would let strangers in."""
    if (options.tls_cert is None) != (options.tls_key is None):
        raise UsageError("--tls-cert and --tls-key belong together; give both")
    if options.socket is not None:
        if options.port is not None or options.bind != LOOPBACK or options.tls_cert is not None:
            raise UsageError("--socket stands in for --port, --bind and --tls-cert; leave them out")
    elif options.user_header is not None:
        raise UsageError("--user-header needs --socket: on a port anybody could send that header")
    elif options.socket_group is not None:
        raise UsageError("--socket-group needs --socket")
    if options.user_name is not None and options.user_header is None:
        raise UsageError("--user-name needs --user-header, the header that must have this value")
    if options.user_header is not None and options.password_file is not None:
        raise UsageError("with --user-header the proxy says who asks; leave --password-file out")
    try:
        address = ipaddress.ip_address(options.bind)
    except ValueError:
        raise UsageError(f"--bind {options.bind!r} is no IP address, like 127.0.0.1 or 0.0.0.0") from None
    if not address.is_loopback and (options.tls_cert is None or options.password_file is None):
        raise UsageError(
            f"--bind {options.bind} can be reached from other machines: what the page shows and the login would cross"
            " the network in the open. Give --tls-cert, --tls-key and --password-file, or leave it on 127.0.0.1 and"
            " use: ssh -L 8642:127.0.0.1:8642 MACHINE"
        )


def read_password(path: Path) -> str:
    """The first line of the file. Raises UsageError if others could read it, or if it is short enough to be guessed."""
    try:
        # O_NONBLOCK: opening a FIFO must not wait for a writer.
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            state = os.fstat(file.fileno())
            if not stat.S_ISREG(state.st_mode):
                raise UsageError(f"--password-file {path} is no plain file")
            if state.st_uid != os.geteuid() or state.st_mode & 0o077:
                raise UsageError(f"--password-file {path} could be read or written by others; own it, and chmod 600 it")
            line = file.read(_MOST_PASSWORD_BYTES).split(b"\n", 1)[0].decode("utf-8", "replace").strip()
    except OSError as problem:
        raise UsageError(f"--password-file {path} can't be read: {problem.strerror}") from None
    if len(line) < _SHORTEST_PASSWORD:
        raise UsageError(f"--password-file {path}: a password has at least {_SHORTEST_PASSWORD} characters")
    return line


class WebServer:
    """Listens from its creation on, and serves while ``run`` runs.

    Raises:
        UsageError: the options are wrong, or the port or socket is taken.
        CannotWrite: the socket can't be made.
    """

    def __init__(self, options: ServeOptions) -> None:
        check(options)
        hosts = Hosts(options.hosts)
        password = None if options.password_file is None else read_password(options.password_file)
        context = None if options.tls_cert is None else _tls(options.tls_cert, options.tls_key)
        if options.socket is not None:
            self._listener = _unix_listener(options.socket, options.socket_group)
        else:
            self._listener = _listener(options)
        port = 0 if options.socket is not None else int(self._listener.getsockname()[1])
        user = user_name(os.geteuid())
        rules = Rules(
            hosts=_hosts(options),
            any_address=ipaddress.ip_address(options.bind).is_unspecified,
            token=secrets.token_urlsafe(32) if password is None and options.user_header is None else None,
            password=password,
            user_header=None if options.user_header is None else options.user_header.lower(),
            user=options.user_name or user,
            port=port,
        )
        self.listening = _listening(options, rules, port)
        app = create_app(
            rules,
            user=user,
            machine=machine_name(),
            runs=options.runs,
            hosts=hosts,
            secure=context is not None,
        )
        config = uvicorn.Config(
            app,
            http=_Protocol,
            ws="none",
            loop="asyncio",
            lifespan="on",
            log_config=None,
            log_level=logging.ERROR,
            access_log=False,
            proxy_headers=False,  # nothing that a client says of itself is believed
            server_header=False,
            limit_concurrency=_MOST_CONNECTIONS,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=2,
            ssl_context_factory=None if context is None else lambda *_: context,
        )
        self._server = _Server(config, app, options.socket)

    def run(self, on_ready: Callable[[Listening], None]) -> None:
        """Serves until a signal or ``stop`` ends it; ``on_ready`` is called once pages can be opened."""
        logger = logging.getLogger("uvicorn.error")
        logger.addFilter(_is_worth_telling)
        self._server.on_ready = lambda: on_ready(self.listening)
        try:
            self._server.run(sockets=[self._listener])
        finally:
            logger.removeFilter(_is_worth_telling)

    def stop(self) -> None:
        """Ends ``run`` in another thread, soon."""
        self._server.should_exit = True


def _tls(cert: Path, key: Path | None) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        # A key with a passphrase would ask for it on the terminal.
        context.load_cert_chain(cert, key, password=lambda: "")
    except OSError as problem:  # ssl.SSLError too
        raise UsageError(f"the certificate {cert} and its key {key} can't be used: {problem}") from None
    return context


def _listening(options: ServeOptions, rules: Rules, port: int) -> Listening:
    token = "" if rules.token is None else f"?token={quote(rules.token)}"
    if options.socket is not None:
        name = options.host_names[0] if options.host_names else None
        return Listening(f"https://{name}/{token}" if name is not None else None, str(options.socket))
    address = ipaddress.ip_address(options.bind)
    shown = f"[{address}]" if address.version == 6 else str(address)
    name = next(iter(options.host_names), socket.gethostname() if address.is_unspecified else shown)
    scheme = "http" if options.tls_cert is None else "https"
    return Listening(f"{scheme}://{name}:{port}/{token}", f"{shown}:{port}")


def _hosts(options: ServeOptions) -> frozenset[str]:
    address = ipaddress.ip_address(options.bind)
    names = [*_LOOPBACK_NAMES, *(name.rstrip(".").lower() for name in options.host_names)]
    names.append(f"[{address}]" if address.version == 6 else str(address))
    if not address.is_loopback:
        names.append(socket.gethostname().lower())
    return frozenset(names)


def _listener(options: ServeOptions) -> socket.socket:
    family = socket.AF_INET6 if ":" in options.bind else socket.AF_INET
    wanted = [PORT, 0] if options.port is None else [options.port]
    for port in wanted:
        made = socket.socket(family, socket.SOCK_STREAM)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            made.bind((options.bind, port))
            made.listen(128)
            return made
        except (OSError, OverflowError) as problem:
            made.close()
            reason = problem.strerror if isinstance(problem, OSError) else "no such port"
            if port == wanted[-1]:
                raise UsageError(f"can't listen on port {port} of {options.bind}: {reason}; try --port 0") from None
    raise AssertionError("there is always a last port")


def _unix_listener(path: Path, group: str | None) -> socket.socket:
    """A socket that only we may use, or this group too: made so, before anybody could connect."""
    _remove_stale(path)
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o177)
    try:
        made.bind(str(path))
        if group is not None:
            os.chown(path, -1, grp.getgrnam(group).gr_gid, follow_symlinks=False)
            path.chmod(0o660)
        made.listen(128)
    except KeyError:
        made.close()
        raise UsageError(f"--socket-group {group}: there is no such group") from None
    except OSError as problem:
        made.close()
        raise CannotWrite(f"can't make the socket {path}: {problem.strerror or problem}") from None
    finally:
        os.umask(before)
    return made


def _remove_stale(path: Path) -> None:
    """Removes a socket of ours that no process listens on any more. Raises UsageError for anything else there."""
    try:
        state = path.lstat()
    except OSError:
        return
    if not stat.S_ISSOCK(state.st_mode) or state.st_uid != os.geteuid():
        raise UsageError(f"--socket {path} is there and no socket of yours; name another path")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe, suppress(ConnectionRefusedError):
        probe.connect(str(path))
        raise UsageError(f"another gpuherd web listens on {path}")
    path.unlink(missing_ok=True)


def _is_worth_telling(record: logging.LogRecord) -> bool:
    """Whether a record of uvicorn is no mere consequence of a client that went away or was too slow."""
    return "without completing response" not in record.getMessage() and "graceful shutdown" not in record.getMessage()


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback


class _Protocol(H11Protocol):
    """Closes connections of other users of this machine, those that are too many, and those that don't send a whole
    request in time."""

    _waiting: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > 2 * _MOST_CONNECTIONS:
            transport.abort()
        elif self._is_of_another_user():
            transport.write(_OF_ANOTHER_USER)
            transport.close()
        else:
            self._wait()

    def _is_of_another_user(self) -> bool:
        """Whether a user of this machine other than ours and root has connected. Unknown users need the token alone."""
        if self.server is None or self.client is None or self.server[1] is None or not _is_loopback(self.server[0]):
            return False
        uid = user_at(self.client, (self.server[0], self.server[1]))
        return uid is not None and uid not in (0, os.geteuid())

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        super().data_received(data)
        if self.cycle is not None and not self.cycle.more_body and not self.cycle.response_complete:
            self._stop_waiting()  # the request is there
        else:
            self._wait()

    def on_response_complete(self) -> None:
        self._stop_waiting()
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def _wait(self) -> None:
        # Not begun anew by each byte that comes.
        if self._waiting is None:
            self._waiting = self.loop.call_later(REQUEST_S, self.transport.abort)

    def _stop_waiting(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None


class _Server(uvicorn.Server):
    """Says when it listens, and ends event streams and removes its socket when it ends."""

    def __init__(self, config: uvicorn.Config, app: Starlette, path: Path | None) -> None:
        super().__init__(config)
        self.on_ready: Callable[[], None] = lambda: None
        self._app = app
        self._path = path

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._path is not None:
            self._path.unlink(missing_ok=True)
        self._app.state.services.streams.end()
        await super().shutdown(sockets)
