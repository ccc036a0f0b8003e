"""Notices as a command and a web server really get them."""

from __future__ import annotations

import http.server
import json
import logging
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.patience import wait_until

from gpuherd.errors import ExitCode, UsageError
from gpuherd.jobs import Job, Queue, RunDirectory, run_jobs
from gpuherd.jobs.control.client import poke
from gpuherd.jobs.monitor.notify import (
    BUNDLE_S,
    Channels,
    NotDelivered,
    Notice,
    Notifier,
    PendingFailures,
    Webhook,
    run_command,
)
from gpuherd.jobs.options import DispatchOptions
from gpuherd.jobs.records import Event, EventKind, Outcome

NOTICE = Notice(kind="failed", text="gpuherd: 1 job of run has failed: x", run="run", host="here", at=0.0)
DATA = NOTICE.to_json()
ENDED = Outcome(done=3, failed=1, waiting=0, cancelled=0)


def failed(text: str) -> Event:
    return Event(kind=EventKind.FAILED, at=0.0, text=text)


@pytest.fixture
def told(tmp_path: Path) -> Path:
    return tmp_path / "told"


@pytest.fixture
def channels(told: Path, tmp_path: Path) -> Channels:
    """A command that writes down what it gets: its words, the text, its input."""
    script = tmp_path / "notify me"
    script.write_text(f'#!/bin/sh\nprintf "%s|%s|%s\\n" "$1" "$GPUHERD_NOTICE" "$(cat)" >>"{told}"\n')
    script.chmod(0o755)
    return Channels.of(f"'{script}' 'two words; $HOME'", None)


def notices(told: Path) -> list[tuple[str, str, dict[str, Any]]]:
    lines = told.read_text().splitlines() if told.exists() else []
    parts = [line.split("|", 2) for line in lines]
    return [(word, text, json.loads(notice)) for word, text, notice in parts]


def test_the_first_failure_at_once_the_rest_with_the_end(channels: Channels, told: Path) -> None:
    notifier = Notifier(channels, "results")
    notifier.event(Event(kind=EventKind.STARTED, at=0.0, text="a: started"))
    notifier.event(failed("a: failed (crash): it broke"))
    wait_until(lambda: bool(notices(told)))
    for name in "bcd":
        notifier.event(failed(f"{name}: failed"))
    notifier.close(ENDED)
    first, last = notices(told)
    assert first[:2] == ("two words; $HOME", "gpuherd: 1 job of results has failed: a: failed (crash): it broke")
    assert (first[2]["kind"], first[2]["failures"]) == ("failed", ["a: failed (crash): it broke"])
    assert last[1] == "gpuherd: results has ended: 3 of 4 done, 1 failed, 0 running, 0 waiting"
    assert last[2]["kind"] == "finished"
    assert last[2]["failures"] == ["b: failed", "c: failed", "d: failed"]
    assert last[2]["counts"] == {"done": 3, "failed": 1, "waiting": 0, "cancelled": 0}
    assert last[2].keys() == {"kind", "text", "run", "host", "time", "failures", "more_failures", "counts"}


def test_a_run_that_was_stopped_or_broke_off(channels: Channels, told: Path) -> None:
    Notifier(channels, "r").close(Outcome(1, 0, 2, 0, stopped_by=ExitCode.INTERRUPTED))
    Notifier(channels, "r").close(None)
    stopped, broken = (text for _, text, _ in notices(told))
    assert stopped == "gpuherd: r was stopped: 1 of 3 done, 0 running, 2 waiting"
    assert "broke off with an error" in broken


@given(st.lists(st.one_of(st.just("tick"), st.text(min_size=1)), max_size=60), st.floats(0, 100))
def test_bundles_lose_nothing_and_go_once_a_minute(happens: list[str], step: float) -> None:
    bundle, now, sent = PendingFailures(), 0.0, []
    number = 0
    for word in happens:
        now += step
        if word != "tick":
            bundle = bundle.plus(word)
            number += 1
        due = bundle.due_at()
        if due is not None and due <= now:
            assert bundle.text("run").startswith("gpuherd: ")
            sent.append((now, len(bundle.failures) + bundle.more))
            bundle = bundle.sent(now)
    assert sum(count for _, count in sent) + len(bundle.failures) + bundle.more == number
    assert len(bundle.failures) <= 20
    assert all(later - earlier >= BUNDLE_S for (earlier, _), (later, _) in pairwise(sent))


def gone(pid: Path) -> bool:
    """Whether the process with the number in this file is no more, or a zombie that nobody has fetched yet."""
    try:
        return Path(f"/proc/{pid.read_text().strip()}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_a_command_that_hangs_is_killed_with_its_children(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    began = tmp_path / "began"
    script = f"sleep 100 & echo $! >{pid}; mv {pid} {began}; wait"
    with pytest.raises(NotDelivered, match="took more than 2 s"):
        run_command(["sh", "-c", script], DATA, NOTICE.text, limit_s=2.0)
    wait_until(lambda: gone(began))


def test_a_command_that_ends_is_not_waited_for_by_the_pipes_of_its_children(tmp_path: Path) -> None:
    """Its child has left the session, so that nothing kills it, and holds standard error open."""
    pid = tmp_path / "pid"
    script = f"setsid sh -c 'echo $$ >{pid}.new; mv {pid}.new {pid}; exec sleep 300' & while ! [ -e {pid} ]; do :; done"
    run_command(["sh", "-c", script], DATA, NOTICE.text, limit_s=60.0)
    assert not gone(pid)
    os.kill(int(pid.read_text()), signal.SIGKILL)


def test_a_command_that_says_much_fills_no_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(NotDelivered, match="ended with 3") as raised:
        run_command(["sh", "-c", "yes | head -c 50000000 >&2; exit 3"], DATA, NOTICE.text)
    assert len(str(raised.value)) < 10_000
    assert not list(tmp_path.iterdir())


def test_a_command_that_never_reads_a_long_notice_is_not_waited_for() -> None:
    run_command(["sh", "-c", "exec <&-"], b"y" * 10_000_000, "x")
    run_command(["true"], b"y" * 10_000_000, "x")


def test_a_failure_to_send_is_logged_once_as_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    # Not the root's level: a test before this one may have set that of our own loggers.
    caplog.set_level(logging.INFO, logger="gpuherd")
    channels = Channels.of("sh -c 'echo no such chat >&2; exit 3'", None)
    notifier = Notifier(channels, "r")
    notifier.event(failed("x"))
    wait_until(lambda: "could not be sent" in caplog.text)
    notifier.close(ENDED)
    levels = [record.levelname for record in caplog.records if "could not be sent" in record.message]
    assert levels == ["WARNING", "INFO"]
    assert "sh ended with 3: no such chat" in caplog.text


@pytest.mark.parametrize(
    "command, webhook, part",
    [
        ("no-such-program-here now", None, "no such program"),
        ("echo 'open", None, "a quote that is not closed"),
        ("   ", None, "no such program"),
        (None, "ftp://host/x", "no http or https"),
        (None, "file:///etc/passwd", "no http or https"),
        (None, "https://", "no http or https"),
        (None, "https://host:port/", "no http or https"),
        (None, "http://host/\nHost: other", "no http or https"),
        (None, "http://host/a b", "no http or https"),
        (None, "http://host/\u00fc", "no http or https"),
        (None, "http://me:secret@host/", "name or password"),
    ],
)
def test_what_could_never_work_is_refused(command: str | None, webhook: str | None, part: str) -> None:
    with pytest.raises(UsageError, match=part) as raised:
        Channels.of(command, webhook)
    assert "secret" not in str(raised.value)


class Hook(http.server.BaseHTTPRequestHandler):
    got: list[tuple[str, dict[str, str], bytes]]
    answer = 200

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        type(self).got.append((self.path, dict(self.headers), body))
        self.send_response(type(self).answer)
        self.send_header("Location", "/elsewhere")
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        pass


@pytest.fixture
def hook(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    Hook.got, Hook.answer = [], 200
    with http.server.HTTPServer(("127.0.0.1", 0), Hook) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/chat?token=1"
        server.shutdown()
        thread.join()


def test_a_webhook_gets_json(hook: str) -> None:
    channels = Channels.of(None, hook)
    Notifier(channels, "results").close(ENDED)
    ((path, headers, body),) = Hook.got
    assert (path, headers["Content-Type"]) == ("/chat?token=1", "application/json")
    assert json.loads(body)["text"].startswith("gpuherd: results has ended: 3 of 4 done")


def test_a_webhook_that_refuses_is_an_error(hook: str) -> None:
    Hook.answer = 500
    with pytest.raises(NotDelivered, match="500"):
        Webhook(hook).post(DATA)


@pytest.mark.parametrize("code", [301, 302, 303, 307, 308])
def test_a_webhook_that_points_elsewhere_has_not_got_the_notice(hook: str, code: int) -> None:
    """Else the body would be dropped on the way, and the notice with it."""
    Hook.answer = code
    with pytest.raises(NotDelivered, match="elsewhere"):
        Webhook(hook).post(DATA)
    assert len(Hook.got) == 1


def test_a_webhook_that_answers_byte_by_byte_has_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    over = threading.Event()

    def dribble(server: socket.socket) -> None:
        connection, _ = server.accept()
        with connection, suppress(OSError):
            connection.sendall(b"HTTP/1.1 200 OK\r\nX: ")
            while not over.wait(0.05):
                connection.sendall(b"x")

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=dribble, args=(server,))
        thread.start()
        webhook = Webhook(f"http://127.0.0.1:{server.getsockname()[1]}/", limit_s=0.5)
        with pytest.raises(NotDelivered, match="no answer within"):
            webhook.post(DATA)
        with pytest.raises(NotDelivered, match="the last notice"):
            webhook.post(DATA)
        over.set()
        thread.join()


def test_a_huge_answer_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    sent = []

    def flood(server: socket.socket) -> None:
        connection, _ = server.accept()
        with connection, suppress(OSError):
            connection.recv(65_536)
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100000000000\r\n\r\n")
            for _ in range(1000):
                connection.sendall(b"x" * 1_000_000)
                sent.append(1)

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=flood, args=(server,))
        thread.start()
        Webhook(f"http://127.0.0.1:{server.getsockname()[1]}/").post(DATA)
        thread.join()
    assert len(sent) < 100


def test_a_command_knows_nothing_of_an_attempt(told: Path) -> None:
    run_command(["sh", "-c", f"env >{told}"], DATA, NOTICE.text)
    variables = dict(line.split("=", 1) for line in told.read_text().splitlines() if "=" in line)
    assert variables["GPUHERD_NOTICE"] == NOTICE.text
    assert variables["PATH"] == os.environ["PATH"]


def test_a_run_with_notices_and_metrics(channels: Channels, told: Path, tmp_path: Path) -> None:
    """What ``--notify-command`` and ``--prometheus`` do, from the outside."""
    metrics = tmp_path / "metrics"
    fetch = (
        f"import sys, urllib.request as u; print(u.urlopen('http://127.0.0.1:{free_port()}/metrics').read().decode())"
    )
    port = int(re.findall(r":(\d+)/metrics", fetch)[0])
    jobs = [
        Job(name="bad", argv=("sh", "-c", "exit 65"), gpus=0),
        Job(name="look", argv=("sh", "-c", f'{sys.executable} -c "{fetch}" >{metrics}'), gpus=0, env={"no_proxy": "*"}),
    ]
    assert channels.argv is not None
    options = DispatchOptions(notify_command=shlex.join(channels.argv), prometheus=port, cpu_jobs=1)
    events: list[Event] = []
    run_jobs(jobs, options, RunDirectory(tmp_path / "run"), on_event=events.append)
    kinds = [notice["kind"] for _, _, notice in notices(told)]
    assert kinds in (["failed", "finished"], ["finished"])
    assert any("bad: failed (bad input)" in line for _, _, notice in notices(told) for line in notice["failures"])
    assert notices(told)[-1][2]["counts"]["failed"] == 1
    assert 'gpuherd_jobs{state="running"} 1' in metrics.read_text()
    assert "gpuherd_dispatcher_up 1" in metrics.read_text()
    assert EventKind.FAILED in {event.kind for event in events}, "the caller's own listener hears it too"
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", port), timeout=1)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_a_wrong_call_is_refused_before_anything_runs(channels: Channels, told: Path, tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    jobs = [Job(name="a", argv=("touch", str(ran)), gpus=0)]
    with pytest.raises(UsageError, match="no such program"):
        run_jobs(jobs, DispatchOptions(notify_command="no-such-program-here"), RunDirectory(tmp_path / "run"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        options = DispatchOptions(prometheus=taken.getsockname()[1])
        with pytest.raises(UsageError, match="choose another"):
            run_jobs(jobs, options, RunDirectory(tmp_path / "run"))
    assert not ran.exists()
    assert not told.exists()


def test_a_run_that_stays_tells_each_time_that_all_is_done(channels: Channels, told: Path, tmp_path: Path) -> None:
    """``gpuherd up``: its queue is worked off, more comes, and that is worked off too."""
    run = RunDirectory(tmp_path / "run")
    run.create()
    program = (
        "import sys; from gpuherd.jobs import RunDirectory; from gpuherd.jobs.options import DispatchOptions\n"
        "from gpuherd.jobs.run import work_off\n"
        "work_off(RunDirectory(sys.argv[1]), DispatchOptions(notify_command=sys.argv[2]), serve=True)"
    )
    assert channels.argv is not None
    process = subprocess.Popen([sys.executable, "-c", program, str(run.root), shlex.join(channels.argv)])
    try:
        for number in (1, 2):
            with Queue(run.queue) as queue:
                queue.add([Job(name=f"job-{number}", argv=("true",), gpus=0)])
            wait_until(lambda number=number: poke(run) and len(notices(told)) >= number)  # type: ignore[misc]
    finally:
        process.terminate()
        process.wait(timeout=30)
    texts = [text for _, text, _ in notices(told)]
    assert texts[0].endswith("is worked off: 1 of 1 done, 0 running, 0 waiting")
    assert texts[1].endswith("is worked off: 2 of 2 done, 0 running, 0 waiting")
