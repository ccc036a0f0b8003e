"""The server as clients meet it: headers, logins, sockets, TLS, slow and many clients."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import ssl
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
from tests.web.serving import Serving, ask, serving

from gpuherd.errors import CannotWrite, UsageError
from gpuherd.standin.machine import SimulatedMachine
from gpuherd.web import serve
from gpuherd.web.machine_data import MachineReader, MachineView
from gpuherd.web.peers import user_at
from gpuherd.web.serve import ServeOptions, WebServer, check, read_password

PASSWORD = "correct horse battery"
EVERYWHERE = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "same-origin",
    "x-frame-options": "DENY",
    "cross-origin-opener-policy": "same-origin",
}


@pytest.fixture
def page(standin: Callable[..., SimulatedMachine]) -> Iterator[Serving]:
    """A server on a machine of two simulated GPUs."""
    standin("2x40GB")
    with serving() as made:
        yield made


def logged_in(page: Serving) -> str:
    """The cookie that the link is exchanged for."""
    return ask(page.port, f"/?token={page.token}").cookie


def test_the_link_opens_the_page_and_its_token_leaves_the_address(page: Serving) -> None:
    entered = ask(page.port, f"/?token={page.token}")
    assert entered.status == 303
    assert entered.headers["location"] == "/"
    given = entered.headers["set-cookie"].lower()
    assert "httponly" in given
    assert "samesite=strict" in given
    assert page.token not in given
    shown = ask(page.port, Cookie=entered.cookie)
    assert shown.status == 200
    assert "GPU 1" in shown.text
    assert page.token not in shown.text


def test_after_a_link_on_another_site_our_own_page_leads_on(page: Serving) -> None:
    follows = {"Sec_Fetch_Site": "cross-site", "Sec_Fetch_Mode": "navigate", "Sec_Fetch_Dest": "document"}
    entered = ask(page.port, f"/?token={page.token}", **follows)
    assert entered.status == 200
    assert 'content="0; url=/"' in entered.text
    assert entered.cookie


def test_every_response_has_the_headers_of_safety(page: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    read, broken = MachineReader.read, threading.Event()

    def sometimes(self: MachineReader) -> MachineView:
        if broken.is_set():
            raise ZeroDivisionError
        return read(self)

    monkeypatch.setattr(MachineReader, "read", sometimes)
    cookie = logged_in(page)
    answers = {
        200: ask(page.port, Cookie=cookie),
        401: ask(page.port),
        403: ask(page.port, "/?token=forged"),
        404: ask(page.port, "/nothing", Cookie=cookie),
        405: ask(page.port, method="DELETE", Cookie=cookie),
        415: ask(page.port, "/login", method="POST", body="{}", Content_Type="application/json"),
        421: ask(page.port, Host="evil.example"),
    }

    broken.set()
    time.sleep(2.1)  # until the look is read again
    answers[500] = ask(page.port, Cookie=cookie)
    for status, answer in answers.items():
        assert answer.status == status, answer.text
        assert EVERYWHERE.items() <= answer.headers.items()
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "frame-ancestors 'none'" in policy
        assert "unsafe" not in policy
        assert "server" not in answer.headers
    assert "ZeroDivisionError" in answers[500].text


def test_assets_need_no_login_and_lead_nowhere_else(page: Serving) -> None:
    style = ask(page.port, "/assets/web.css")
    assert style.status == 200
    assert style.headers["content-type"].startswith("text/css")
    for path in ("/assets/../access.py", "/assets/%2e%2e/access.py", "/assets/..%2faccess.py", "/assets//etc/passwd"):
        assert ask(page.port, path).status in (401, 404)


def test_forms_are_bounded(page: Serving) -> None:
    assert ask(page.port, "/login", method="POST", body="x" * 70_000, Sec_Fetch_Site="same-origin").status == 413
    many = "&".join(f"a{number}=1" for number in range(5000))
    assert ask(page.port, "/login", method="POST", body=many, Sec_Fetch_Site="same-origin").status == 403


@pytest.mark.slow
def test_a_thousand_requests_read_the_machine_once(page: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[float] = []
    read = MachineReader.read

    def counted(self: MachineReader) -> MachineView:
        reads.append(time.monotonic())
        return read(self)

    monkeypatch.setattr(MachineReader, "read", counted)
    cookie = logged_in(page)

    def ask_often(_: int) -> list[int]:
        connection = HTTPConnection("127.0.0.1", page.port, timeout=60)
        statuses = []
        for _ in range(100):
            connection.request("GET", "/", headers={"Cookie": cookie})
            answer = connection.getresponse()
            answer.read()
            statuses.append(answer.status)
        connection.close()
        return statuses

    began = time.monotonic()
    with ThreadPoolExecutor(10) as clients:
        statuses = [status for found in clients.map(ask_often, range(10)) for status in found]
    assert statuses == [200] * 1000
    assert len(reads) <= 2 + (time.monotonic() - began) / 2


def test_a_client_that_sends_no_whole_request_is_let_go(page: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "REQUEST_S", 0.3)
    with socket.create_connection(("127.0.0.1", page.port), timeout=20) as slow:
        slow.sendall(b"GET / HTTP/1.1\r\nHost: ")
        began = time.monotonic()
        with pytest.raises(OSError):
            for _ in range(200):  # a byte now and then does not buy more time
                slow.sendall(b"a")
                time.sleep(0.05)
        assert time.monotonic() - began < 9
    assert ask(page.port).status == 401


def test_a_client_that_reads_nothing_holds_up_no_other(page: Serving) -> None:
    cookie = logged_in(page)
    opened = [socket.create_connection(("127.0.0.1", page.port)) for _ in range(40)]
    try:
        for each in opened:
            each.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
            request = f"GET /machine/events HTTP/1.1\r\nHost: 127.0.0.1\r\nCookie: {cookie}\r\n\r\n"
            each.sendall(request.encode())
        began = time.monotonic()
        assert ask(page.port, Cookie=cookie).status == 200
        assert time.monotonic() - began < 5
    finally:
        for each in opened:
            each.close()


@pytest.mark.parametrize(
    "noise", [b"\0" * 4096, b"GET " + b"a" * 200_000, b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 40_000]
)
def test_noise_is_refused(page: Serving, noise: bytes) -> None:
    with socket.create_connection(("127.0.0.1", page.port), timeout=20) as client:
        try:
            client.sendall(noise)
            assert client.recv(4096).startswith(b"HTTP/1.1 400")
        except ConnectionError:
            pass  # it was closed before all had been sent
    assert ask(page.port).status == 401


def test_two_of_the_same_kind_of_header_are_refused(page: Serving) -> None:
    with socket.create_connection(("127.0.0.1", page.port), timeout=20) as client:
        client.sendall(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nHost: evil.example\r\n\r\n")
        assert client.recv(4096)[9:12] in (b"400", b"421")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_of_the_machine_gets_nothing_even_with_the_link(page: Serving) -> None:
    cookie = logged_in(page)
    program = (
        "import http.client, sys\n"
        "connection = http.client.HTTPConnection('127.0.0.1', int(sys.argv[1]), timeout=20)\n"
        "connection.request('GET', sys.argv[2], headers={'Cookie': sys.argv[3]})\n"
        "answer = connection.getresponse()\n"
        "print(answer.status, answer.read().decode())"
    )
    for path in (f"/?token={page.token}", "/"):
        words = ["/usr/bin/env", "python3", "-c", program, str(page.port), path, cookie]
        shown = subprocess.run(words, user=65_533, capture_output=True, text=True, timeout=60, cwd="/")
        assert shown.stdout.startswith("403 this page belongs to another user"), shown.stderr
    assert ask(page.port, Cookie=cookie).status == 200


@pytest.mark.parametrize(("family", "address"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")])
def test_the_kernel_names_the_user_at_the_other_end(family: socket.AddressFamily, address: str) -> None:
    with socket.socket(family) as listener:
        try:
            listener.bind((address, 0))
        except OSError:
            pytest.skip(f"there is no {address} here")
        listener.listen()
        with socket.create_connection(listener.getsockname()[:2]) as client:
            assert user_at(client.getsockname()[:2], client.getpeername()[:2]) == os.geteuid()
    assert user_at((address, 1), (address, 2)) is None
    assert user_at(("nonsense", 1), (address, 2)) is None


# ---- other ways to listen --------------------------------------------------------------------------------------------


def password_file(folder: Path, content: str = f"{PASSWORD}\nmore\n", mode: int = 0o600) -> Path:
    path = folder / "password"
    path.write_text(content)
    path.chmod(mode)
    return path


def test_a_password_logs_in_and_guesses_are_slowed(tmp_path: Path, standin: Callable[..., SimulatedMachine]) -> None:
    standin("1x40GB")
    with serving(password_file=password_file(tmp_path)) as page:
        assert "token" not in page.url
        ours = {"Origin": f"http://127.0.0.1:{page.port}"}

        def log_in(secret: str, **headers: str) -> Any:
            return ask(page.port, "/login", method="POST", body=urlencode({"secret": secret}), **headers)

        assert ask(page.port).status == 401
        assert log_in(PASSWORD, Origin="http://evil.example").status == 403
        entered = log_in(PASSWORD, **ours)
        assert entered.status == 303
        shown = ask(page.port, Cookie=entered.cookie)
        assert shown.status == 200
        out = ask(
            page.port,
            "/logout",
            method="POST",
            body=urlencode({"form_token": shown.form_token}),
            Cookie=entered.cookie,
            **ours,
        )
        assert out.status == 200
        assert "max-age=0" in out.headers["set-cookie"].lower()
        statuses = [log_in("guess", **ours).status for _ in range(20)]
        assert set(statuses) == {403, 429}
        assert statuses.count(403) < 12


def test_a_socket_is_ones_own_and_the_proxys_header_is_believed_there(
    tmp_path: Path, standin: Callable[..., SimulatedMachine]
) -> None:
    standin("1x40GB")
    path = tmp_path / "web.sock"
    options = {"socket": path, "host_names": ("lab.example",), "user_header": "X-Remote-User", "user_name": "alice"}
    with serving(**options):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        shown = ask(path, Host="lab.example", X_Remote_User="alice")
        assert shown.status == 200
        assert shown.form_token
        assert ask(path, Host="lab.example", X_Remote_User="bob").status == 403
        assert ask(path, Host="lab.example").status == 403
        assert ask(path, Host="evil.example", X_Remote_User="alice").status == 421
        with pytest.raises(UsageError, match="another gpuherd web"):
            WebServer(ServeOptions(**options))  # type: ignore[arg-type]
    assert not path.exists()


def test_a_header_on_a_port_is_not_believed(page: Serving) -> None:
    for name in ("X_Remote_User", "X_Forwarded_User", "Remote_User"):
        assert ask(page.port, **{name: "root"}).status == 401


def test_a_socket_that_a_killed_server_left_is_replaced_and_nothing_else_is(tmp_path: Path) -> None:
    path = tmp_path / "web.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as left:
        left.bind(str(path))
    with serving(socket=path, host_names=("lab.example",)) as page:
        assert ask(path, f"/?token={page.token}", Host="lab.example").status == 303
    path.write_text("notes")
    with pytest.raises(UsageError, match="no socket of yours"):
        WebServer(ServeOptions(socket=path))
    assert path.read_text() == "notes"
    with pytest.raises(CannotWrite, match="can't make the socket"):
        WebServer(ServeOptions(socket=tmp_path / "nowhere" / "web.sock"))
    with pytest.raises(UsageError, match="no such group"):
        WebServer(ServeOptions(socket=tmp_path / "other.sock", socket_group="no-such-group"))


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl to make a certificate with")
def test_tls_with_a_password(tmp_path: Path, standin: Callable[..., SimulatedMachine]) -> None:
    standin("1x40GB")
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    words = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    words += ["-days", "2", "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run([*words, "-keyout", str(key), "-out", str(cert)], check=True, capture_output=True, timeout=60)
    secret = password_file(tmp_path)
    with serving(bind="0.0.0.0", tls_cert=cert, tls_key=key, password_file=secret) as page:
        assert page.url.startswith("https://")
        context = ssl.create_default_context(cafile=str(cert))
        plain = socket.create_connection(("127.0.0.1", page.port), timeout=20)
        with plain, context.wrap_socket(plain, server_hostname="127.0.0.1") as client:
            body = urlencode({"secret": PASSWORD})
            client.sendall(
                f"POST /login HTTP/1.1\r\nHost: 127.0.0.1:{page.port}\r\nOrigin: https://127.0.0.1:{page.port}\r\n"
                f"Content-Type: application/x-www-form-urlencoded\r\nContent-Length: {len(body)}\r\n"
                f"Connection: close\r\n\r\n{body}".encode()
            )
            answer = b"".join(iter(lambda: client.recv(4096), b"")).decode()
        assert answer.startswith("HTTP/1.1 303")
        assert "; Secure" in answer
    with pytest.raises(UsageError, match="can't be used"):
        WebServer(ServeOptions(port=0, tls_cert=key, tls_key=cert))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"bind": "0.0.0.0"}, "other machines"),
        ({"bind": "192.0.2.1", "tls_cert": Path("c"), "tls_key": Path("k")}, "other machines"),
        ({"bind": "::", "password_file": Path("p")}, "other machines"),
        ({"bind": "lab.example"}, "no IP address"),
        ({"tls_cert": Path("c")}, "belong together"),
        ({"user_header": "X-User"}, "needs --socket"),
        ({"user_name": "alice"}, "needs --user-header"),
        ({"socket_group": "web"}, "needs --socket"),
        ({"socket": Path("s"), "port": 1}, "stands in for"),
        ({"socket": Path("s"), "user_header": "X-User", "password_file": Path("p")}, "leave --password-file out"),
    ],
)
def test_what_would_let_strangers_in_is_refused(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        check(ServeOptions(**options))


def test_password_files_that_others_can_read_or_that_are_no_files_are_refused(tmp_path: Path) -> None:
    assert read_password(password_file(tmp_path)) == PASSWORD
    with pytest.raises(UsageError, match="by others"):
        read_password(password_file(tmp_path, mode=0o640))
    with pytest.raises(UsageError, match="at least 12"):
        read_password(password_file(tmp_path, "short\n"))
    with pytest.raises(UsageError, match="can't be read"):
        read_password(tmp_path / "missing")
    os.mkfifo(tmp_path / "fifo", 0o600)
    with pytest.raises(UsageError, match="no plain file"):
        read_password(tmp_path / "fifo")
    with (tmp_path / "huge").open("wb") as huge:
        huge.truncate(1 << 30)
    (tmp_path / "huge").chmod(0o600)
    assert len(read_password(tmp_path / "huge")) <= 4096


def test_a_port_that_is_taken(page: Serving) -> None:
    with pytest.raises(UsageError, match="try --port 0"):
        WebServer(ServeOptions(port=page.port))


def test_the_command_serves_until_it_is_interrupted_in_60_mb(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "gpuherd", "--simulate", "8x40GB", "web", "--port", "0", "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        text = ""
        while not text.rstrip().endswith("}"):
            text += process.stdout.readline()
        link = json.loads(text)
        port, token = int(link["listens_on"].rpartition(":")[2]), link["url"].partition("?token=")[2]
        cookie = ask(port, f"/?token={token}").cookie
        assert ask(port, Cookie=cookie).text.count("<h2>GPU ") == 8
        times = []
        for _ in range(5):
            began = time.monotonic()
            ask(port, Cookie=cookie)
            times.append(time.monotonic() - began)
        assert min(times) < 0.2
        status = Path(f"/proc/{process.pid}/status").read_text()
        resident_kb = int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmRSS")))
        assert resident_kb < 60 * 1024
    finally:
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)
    assert process.returncode == 0, errors
    assert "Traceback" not in errors
