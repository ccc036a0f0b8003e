"""The full-screen view, driven by keys and read as text, against a dispatcher at work in a process of its own."""

from __future__ import annotations

import asyncio
import fcntl
import html
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

import pytest
from textual.pilot import Pilot
from textual.widgets import DataTable

from gpuherd.jobs import JobState, RunDirectory
from gpuherd.standin.machine import SimulatedMachine
from gpuherd.top.app import TopApp

Standin = Callable[..., SimulatedMachine]
NewJob = Callable[..., dict[str, Any]]
Play = Callable[[Pilot[None]], Coroutine[Any, Any, None]]

# Only lines of the screen are clipped, not the picture's title.
_COLUMN = 12.2
_PART = re.compile(r'<text[^>]*x="([\d.]+)" y="([\d.]+)"[^>]*clip-path[^>]*>([^<]*)</text>')


def play(app: TopApp, scene: Play, size: tuple[int, int] = (80, 24)) -> None:
    """Runs the view on a screen of this size while the scene lasts."""

    async def whole() -> None:
        async with app.run_test(size=size, notifications=True) as pilot:
            await until(pilot, lambda: app.seen is not None)
            await scene(pilot)

    asyncio.run(whole())


async def until(pilot: Pilot[None], condition: Callable[[], bool], within_s: float = 60.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "it never came true:\n" + "\n".join(lines(pilot.app))
        await pilot.pause(0.02)


def lines(app: Any) -> list[str]:
    """What is on the screen, line by line."""
    drawn: dict[float, str] = defaultdict(str)
    for x, y, part in sorted(_PART.findall(app.export_screenshot()), key=lambda found: float(found[0])):
        column = round(float(x) / _COLUMN)
        drawn[float(y)] = drawn[float(y)].ljust(column) + html.unescape(part).replace("\xa0", " ")
    return [drawn[y].rstrip() for y in sorted(drawn)]


def text(pilot: Pilot[None]) -> str:
    return "\n".join(lines(pilot.app))


def row(pilot: Pilot[None], name: str) -> str:
    """The line of the table that tells of this job, "" when there is none."""
    return next((line for line in lines(pilot.app) if re.match(rf"\W*\w+ +{re.escape(name)}\b", line)), "")


@pytest.mark.parametrize("size", [(80, 24), (120, 40), (60, 15)])
def test_gpus_jobs_and_the_log_are_on_one_screen(
    bench: Any, job: NewJob, standin: Standin, size: tuple[int, int]
) -> None:
    machine = standin("4x40GB")
    machine.occupy(3, 30_000)
    bench.start(
        job("first", "echo hello from first; sleep 300", gpus=1),
        job("second", "echo bad luck; exit 65", gpus=1),
        job("third", "true", needs=["second"]),
    )
    bench.wait_for("second", JobState.FAILED)
    pid = str(bench.process.pid)
    bench.wait_for("first", JobState.RUNNING)
    (where,) = bench.job("first").attempt.gpus

    async def scene(pilot: Pilot[None]) -> None:
        await until(pilot, lambda: "hello from first" in text(pilot) and "failed" in row(pilot, "second"))
        await until(pilot, lambda: "c Cancel" in text(pilot) and "  free" in text(pilot))
        shown = lines(pilot.app)
        assert "0 of 3 done, 1 failed, 1 cancelled, 1 running" in shown[0]
        assert f"gpuherd (pid {pid}) works on it" in shown[1]
        gpus = {line.split()[0]: line for line in shown if re.match(r" [0-3]    ", line)}
        assert "first" in gpus[where]
        free = next(gpu for label, gpu in gpus.items() if label not in (where, "3"))
        assert "free" in free and "0.0/40.0 GB" in free
        if size[1] > 15:
            assert "29.3/40.0 GB" in gpus["3"] and "30000 MB used" in gpus["3"]
            assert "bad input" in row(pilot, "second")
        assert row(pilot, "first").split()[:3] == ["running", "first", where]
        assert any(line.startswith(f" Log of first · attempt 1 · GPU {where}") for line in shown)
        assert "c Cancel" in shown[-1]
        assert max(map(len, shown)) <= size[0]

    play(TopApp(bench.run, every_s=0.1), scene, size)


def test_neither_gpus_nor_jobs(tmp_path: Any) -> None:
    async def scene(pilot: Pilot[None]) -> None:
        assert "there is no queue in" in text(pilot)
        assert "No GPUs: " in text(pilot)
        assert "The queue is empty" in text(pilot)
        for key in ("c", "r", "p", "j", "k", "l", "l", "enter"):
            await pilot.press(key)
        assert pilot.app.is_running

    play(TopApp(RunDirectory(tmp_path / "none")), scene)


def test_hostile_names_and_logs_are_text(bench: Any, job: NewJob) -> None:
    bench.start(job("[bold]x[/]\x1b[2J", "printf '[red]\\033[2Jlog[/red]\\n'; sleep 300"))

    async def scene(pilot: Pilot[None]) -> None:
        await until(pilot, lambda: "[red]log[/red]" in text(pilot))
        assert "[bold]x[/]" in text(pilot)

    play(TopApp(bench.run, every_s=0.1), scene)


def test_choosing_a_job_shows_its_log_and_enter_makes_it_large(bench: Any, job: NewJob) -> None:
    bench.start(job("one", "seq 1 30; sleep 300"), job("two", "echo I am two; sleep 60"))
    bench.wait_for("two", JobState.RUNNING)

    async def scene(pilot: Pilot[None]) -> None:
        await until(pilot, lambda: " 30" in [line[:3] for line in lines(pilot.app)])
        await pilot.press("j")
        await until(pilot, lambda: "I am two" in text(pilot))
        await pilot.press("k", "enter")
        await until(pilot, lambda: {" 15", " 30"} <= {line[:3] for line in lines(pilot.app)})
        assert not row(pilot, "one")
        await pilot.press("escape")
        await until(pilot, lambda: bool(row(pilot, "one")))

    play(TopApp(bench.run, every_s=0.1), scene)


def test_the_filter(bench: Any, job: NewJob) -> None:
    bench.start(*(job(f"{kind}-{i}", "sleep 300") for kind in ("apple", "pear") for i in range(3)))

    async def scene(pilot: Pilot[None]) -> None:
        await until(pilot, lambda: bool(row(pilot, "apple-0")))
        await pilot.press("slash", *"pear")
        await until(pilot, lambda: bool(row(pilot, "pear-2")) and not row(pilot, "apple-0"))
        await pilot.press("enter")
        assert pilot.app.query_one("#jobs", DataTable).has_focus
        assert "Only jobs named … pear" in " ".join(text(pilot).split()), "it is to be seen that not all are shown"
        await pilot.press("slash", "backspace", *"lies nowhere")
        await until(pilot, lambda: "No job matches" in text(pilot))
        await pilot.press("escape")
        await until(pilot, lambda: bool(row(pilot, "apple-0")))

    play(TopApp(bench.run, every_s=0.1), scene)


def test_help_and_quit(bench: Any, job: NewJob) -> None:
    bench.start(job("one", "sleep 300"))

    async def scene(pilot: Pilot[None]) -> None:
        await pilot.press("question_mark")
        await until(pilot, lambda: "cancel the job: it ends for good" in text(pilot))
        await pilot.press("d")  # any key closes it, and does nothing else
        await until(pilot, lambda: "it ends for good" not in text(pilot))
        assert "Drain?" not in text(pilot)
        await pilot.press("q")

    app = TopApp(bench.run, every_s=0.1)
    play(app, scene)
    assert app.return_code == 0
    assert bench.job("one").state is JobState.RUNNING


def test_cancel_asks_first(bench: Any, job: NewJob) -> None:
    bench.start(job("one", "sleep 300"), job("two", "sleep 60", needs=["one"]))
    bench.wait_for("one", JobState.RUNNING)

    async def scene(pilot: Pilot[None]) -> None:
        await until(pilot, lambda: bool(row(pilot, "one")))
        await pilot.press("c")
        await until(pilot, lambda: "Cancel one?" in text(pilot))
        await pilot.press("n")
        await until(pilot, lambda: "Cancel one?" not in text(pilot))
        assert bench.job("one").state is JobState.RUNNING
        await pilot.press("c", "y")
        await until(pilot, lambda: "cancelled" in row(pilot, "one"))
        await pilot.press("c")
        await until(pilot, lambda: "is cancelled" in text(pilot))

    play(TopApp(bench.run, every_s=0.1), scene)
    assert bench.job("two").state is JobState.CANCELLED
    assert bench.ends() == 1


def test_pause_and_go_on(bench: Any, job: NewJob) -> None:
    bench.start(job("one", "sleep 0.2; sleep 300"))
    bench.wait_for("one", JobState.RUNNING)

    async def scene(pilot: Pilot[None]) -> None:
        await until(pilot, lambda: "running" in row(pilot, "one"))
        await pilot.press("p")
        await until(pilot, lambda: "paused" in row(pilot, "one"))
        await pilot.press("p")
        await until(pilot, lambda: "running" in row(pilot, "one"))

    play(TopApp(bench.run, every_s=0.1), scene)


def test_retry(bench: Any, job: NewJob, tmp_path: Any) -> None:
    bench.start(job("bad", f"[ -e {tmp_path}/mended ]"), job("long", "sleep 300"))
    bench.wait_for("bad", JobState.FAILED)
    (tmp_path / "mended").touch()

    async def scene(pilot: Pilot[None]) -> None:
        await until(pilot, lambda: "failed" in row(pilot, "bad"))
        await pilot.press("slash", *"bad", "enter", "r")
        await until(pilot, lambda: "done" in row(pilot, "bad"))

    play(TopApp(bench.run, every_s=0.1), scene)


def test_drain_asks_first(bench: Any, job: NewJob, tmp_path: Any) -> None:
    bench.options["cpu_jobs"] = 1
    bench.start(job("one", f"until [ -e {tmp_path}/go ]; do sleep 0.05; done"), job("two", "true"))
    bench.wait_for("one", JobState.RUNNING)

    async def scene(pilot: Pilot[None]) -> None:
        await until(pilot, lambda: bool(row(pilot, "one")))
        await pilot.press("d")
        await until(pilot, lambda: "Drain?" in text(pilot))
        await pilot.press("y")
        await until(pilot, lambda: "it is draining" in text(pilot))
        (tmp_path / "go").touch()
        await until(pilot, lambda: "no gpuherd works on it now" in text(pilot))

    play(TopApp(bench.run, every_s=0.1), scene)
    assert bench.job("two").state is JobState.WAITING


def test_a_wish_that_can_not_be_is_answered(bench: Any, job: NewJob) -> None:
    bench.start(job("one", "sleep 300"))

    async def scene(pilot: Pilot[None]) -> None:
        await until(pilot, lambda: "running" in row(pilot, "one"))
        await pilot.press("r")
        await until(pilot, lambda: "one is running;" in text(pilot))

    play(TopApp(bench.run, every_s=0.1), scene)


def test_the_command_on_a_terminal(bench: Any, job: NewJob) -> None:
    """The real program on a real terminal: it fills it, and gives it back."""
    bench.start(job("one", "echo hello from one; sleep 300"))
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    words = [sys.executable, "-m", "gpuherd", "top", str(bench.root)]
    environment = {**os.environ, "TERM": "xterm-256color"}
    process = subprocess.Popen(words, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    seen = b""
    deadline = time.monotonic() + 60
    while b"hello from one" not in seen and time.monotonic() < deadline:
        if select.select([ours], [], [], 0.1)[0]:
            seen += os.read(ours, 65536)
    os.write(ours, b"q")
    with suppress(OSError):  # EIO: nobody has the other end any more
        while time.monotonic() < deadline:
            seen += os.read(ours, 65536)
    os.close(ours)
    assert process.wait(timeout=60) == 0
    assert b"hello from one" in seen
    assert b"\x1b[?1049l" in seen, "the terminal's own screen is back"


def test_without_a_terminal_it_says_what_to_do(gpuherd: Callable[..., Any]) -> None:
    said = gpuherd("top")
    assert (said.code, said.err) == (2, "gpuherd: top needs a terminal; for a pipe or a file use: gpuherd status\n")


def test_without_textual_it_says_what_to_install(tmp_path: Any) -> None:
    program = "import sys; sys.modules['textual'] = None\n"
    program += f"from gpuherd import jobs, top; top.show(jobs.RunDirectory({str(tmp_path)!r}))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert "MissingExtra: gpuherd top needs textual; install it with: pip install 'gpuherd[top]'" in done.stderr
