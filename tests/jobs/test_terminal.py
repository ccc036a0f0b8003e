"""The live display on a real (pseudo) terminal: what Ctrl-C does there, and how the terminal is left."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

_PROGRAM = """
import fcntl, os, sys, termios, time
from rich.console import Console
from gpuherd.jobs.monitor.display import display
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
if "background" in sys.argv:
    if os.fork():
        os.wait()
        sys.exit()
    os.setpgid(0, 0)
try:
    with display(Console(force_terminal=True)):
        print("ready", flush=True)
        time.sleep(0.3 if "background" in sys.argv else 30)
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


@contextmanager
def on_terminal(*words: str) -> Iterator[tuple[int, subprocess.Popen[bytes]]]:
    """The program with a terminal of its own as its controlling one; yields our end of it."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", _PROGRAM, *words], stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
    )
    try:
        yield ours, process
    finally:
        process.kill()
        process.wait()
        os.close(ours)
        os.close(theirs)


def echoes_control_keys(terminal: int) -> bool:
    return bool(termios.tcgetattr(terminal)[3] & termios.ECHOCTL)


def read_until(terminal: int, word: bytes, within_s: float = 60.0) -> bytes:
    said = b""
    deadline = time.monotonic() + within_s
    while word not in said:
        assert select.select([terminal], [], [], max(0.0, deadline - time.monotonic()))[0], said
        said += os.read(terminal, 4096)
    return said


def test_ctrl_c_leaves_no_mark_in_the_picture_and_the_terminal_as_it_was() -> None:
    with on_terminal() as (terminal, process):
        assert echoes_control_keys(terminal)
        read_until(terminal, b"ready")
        assert not echoes_control_keys(terminal)
        os.write(terminal, b"\x03")
        assert b"^C" not in read_until(terminal, b"interrupted")
        assert process.wait(timeout=60) == 0
        assert echoes_control_keys(terminal)


def test_in_the_background_the_terminal_is_left_alone() -> None:
    """A process in the background that changed it would be stopped by the kernel, and the run with it."""
    with on_terminal("background") as (terminal, process):
        read_until(terminal, b"ready")
        assert echoes_control_keys(terminal)
        assert process.wait(timeout=60) == 0


@pytest.mark.parametrize("force", [True, False])
def test_a_reader_that_goes_away_does_not_end_the_run(force: bool) -> None:
    """``gpuherd esd ... | head -1``"""
    program = f"""
import sys, time
from rich.console import Console
from gpuherd.jobs.records import Event, EventKind
from gpuherd.jobs.monitor.display import display
with display(Console(force_terminal={force})) as shown:
    for i in range(200):
        shown.event(Event(kind=EventKind.NOTICE, at=0.0, text=f"line {{i}} " + 1000 * "x"))
print("went on to the end", file=sys.stderr)
"""
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.read(10)
    process.stdout.close()
    assert process.stderr.read().decode() == "went on to the end\n"
    assert process.wait(timeout=60) == 0
    process.stderr.close()


def test_a_terminal_that_is_closed_does_not_end_the_run() -> None:
    """Somebody closes the window: each write fails from then on (EIO). Once is enough to stop drawing."""
    program = """
import logging, signal, sys, time
from rich.console import Console
from gpuherd.jobs.records import RunSnapshot
from gpuherd.jobs.monitor.display import display
from gpuherd.jobs.records import Counts
signal.signal(signal.SIGHUP, signal.SIG_IGN)
logging.basicConfig(level=logging.INFO, filename=sys.argv[1])
with display(Console(force_terminal=True)) as shown:
    print("drawing", file=sys.__stderr__, flush=True)
    sys.stdin.readline()
    for done in range(20):
        shown.snapshot(RunSnapshot(Counts(done=done), (), None, None))
print("went on to the end", file=sys.__stderr__)
"""
    ours, theirs = pty.openpty()
    with tempfile.NamedTemporaryFile() as log:
        process = subprocess.Popen(
            [sys.executable, "-c", program, log.name], stdin=subprocess.PIPE, stdout=theirs, stderr=subprocess.PIPE
        )
        os.close(theirs)
        assert process.stdin is not None and process.stderr is not None
        assert process.stderr.readline() == b"drawing\n"
        os.close(ours)
        _, said = process.communicate(b"\n", timeout=30)
        assert b"went on to the end" in said
        assert process.returncode in (0, 120), "120: Python itself could not flush its output"
        assert Path(log.name).read_text().count("the run goes on") <= 2
