"""Shows a run while it goes on: live lines on a terminal, plain lines elsewhere.

A snapshot comes in, text goes out: the functions that make the text are pure. What a job reports of itself is cleaned
of control characters and never read as markup.
"""

from __future__ import annotations

import logging
import os
import termios
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from rich.console import Console, Group
from rich.text import Text

from gpuherd.errors import clean, escape_unencodable
from gpuherd.jobs import clock
from gpuherd.jobs.monitor.format import bar, counted, place, stage, time_left
from gpuherd.jobs.records import Event, EventKind, JobStatus, RunSnapshot
from gpuherd.jobs.reporter import Display

if TYPE_CHECKING:
    from rich.live import Live

logger = logging.getLogger(__name__)

_LOCAL_FLAGS = 3  # the place of the flags in tcgetattr's list
# Lines below those of the running jobs: the counts, what is next, and the cursor's own.
_BELOW = 3
_STYLES = {
    EventKind.FAILED: "red",
    EventKind.RETRY: "yellow",
    EventKind.CANCELLED: "yellow",
    EventKind.IDLE: "yellow",
    EventKind.NOTICE: "cyan",
}


@contextmanager
def display(console: Console, *, plain_every_s: float = 15.0) -> Iterator[Display]:
    """A display on this console while the context lasts: live on a terminal, else lines, with a count now and then."""
    screen = _Screen()
    escape_unencodable(console.file)
    if not console.is_terminal:
        yield LineDisplay(console, plain_every_s, screen)
        return
    # Only on a terminal: a dispatcher that writes to a file for days should be small.
    from rich.live import Live

    live = Live(console=console, auto_refresh=False, transient=True)
    with quiet_control_keys():
        screen.show(live.start)
        try:
            yield LiveDisplay(live, screen)
        finally:
            # Also on a dead terminal: this restores standard output and error, which Live had redirected.
            _Screen().show(live.stop)


class _Screen:
    """All output goes through here. When its reader is gone (``gpuherd esd … | head -1``, a closed terminal), the run
    goes on and nothing is written any more.

    On a closed pipe rich raises SystemExit and writes nothing from then on.
    """

    def __init__(self) -> None:
        self._gone = False

    def show(self, draw: Callable[[], object]) -> None:
        if self._gone:
            return
        try:
            draw()
        except (OSError, SystemExit) as problem:
            self._gone = True
            logger.info("can't write to the terminal or pipe any more (%r); the run goes on without a display", problem)


class LineDisplay:
    """One line for each event, and a line of counts every so many seconds."""

    def __init__(self, console: Console, every_s: float, screen: _Screen | None = None):
        self._console = console
        self._screen = screen or _Screen()
        self.every_s = every_s
        self._next = clock.mono() + every_s

    def event(self, event: Event) -> None:
        """Prints the event."""
        self._print(event.text)

    def snapshot(self, snapshot: RunSnapshot) -> None:
        """Prints the counts, but not in the first moments of a run, when the events suffice."""
        if clock.mono() >= self._next:
            self._print(summary(snapshot))

    def _print(self, text: str) -> None:
        self._screen.show(lambda: self._console.print(Text(clean(text)), soft_wrap=True))


class LiveDisplay:
    """A line for each running job, the counts, and what is next, kept up to date; failures scroll above it."""

    every_s = 0.25

    def __init__(self, live: Live, screen: _Screen):
        self._live = live
        self._screen = screen

    def event(self, event: Event) -> None:
        """Prints failures, retries and notices, which people may want to read later."""
        style = _STYLES.get(event.kind)
        if style is not None:
            line = Text(clean(event.text), style=style)
            self._screen.show(lambda: self._live.console.print(line, soft_wrap=True))

    def snapshot(self, snapshot: RunSnapshot) -> None:
        """Draws the run anew."""
        height = self._live.console.size.height
        self._screen.show(lambda: self._live.update(render(snapshot, height), refresh=True))


def render(snapshot: RunSnapshot, height: int = 10_000) -> Group:
    """The live display in at most ``height`` lines: a line for each running job, as far as there is room, then the
    counts, then why the next job waits.
    """
    from rich.table import Table

    room = max(1, height - _BELOW)
    shown = snapshot.running if len(snapshot.running) <= room else snapshot.running[: room - 1]
    table = Table.grid(padding=(0, 2), expand=True)
    for ratio in (None, 1, None, None):
        # Only the title gives way where the terminal is narrow.
        table.add_column(no_wrap=True, overflow="ellipsis", ratio=ratio)
    for job in shown:
        table.add_row(*(Text(cell) for cell in cells(job)))
    lines = []
    if len(shown) < len(snapshot.running):
        lines.append(Text(f"and {len(snapshot.running) - len(shown)} more", style="dim"))
    lines.append(Text(counts(snapshot), style="bold", no_wrap=True, overflow="ellipsis"))
    if snapshot.waiting_for:
        lines.append(Text(clean(snapshot.waiting_for), style="dim", no_wrap=True, overflow="ellipsis"))
    return Group(table, *lines)


def cells(job: JobStatus) -> tuple[str, str, str, str]:
    """A running job's GPU, title, progress, and stage with time, as plain text."""
    attempt = job.attempt
    if attempt is None:
        return "", clean(job.title), "", ""
    time = "paused" if job.paused else ", ".join(part for part in (stage(attempt), time_left(attempt)) if part)
    return place(attempt), clean(job.title), bar(attempt.progress), time


def counts(snapshot: RunSnapshot) -> str:
    """The counts in one line: ``3 of 20 done, 1 failed, 4 running, 12 waiting, 1 paused, about 5 min left``."""
    return counted(snapshot.counts, paused=snapshot.paused, in_line=snapshot.in_line, eta_s=snapshot.eta_s)


def summary(snapshot: RunSnapshot) -> str:
    """The snapshot in one line: the counts, and why the next job waits."""
    return "; ".join([counts(snapshot), *([clean(snapshot.waiting_for)] if snapshot.waiting_for else [])])


@contextmanager
def quiet_control_keys() -> Iterator[None]:
    """Switches the echo of control keys off on the controlling terminal, if there is one, while the context lasts.

    Ctrl-C works as ever; but the ``^C`` that the terminal echoes moves the cursor, so that old lines of a live display
    would stay in the scrollback. Only this one flag (ECHOCTL) is changed, and restored at the end.
    """
    was_on = _set_echo(False)
    try:
        yield
    finally:
        if was_on:
            _set_echo(True)


def _set_echo(wanted: bool) -> bool:
    """Sets the flag and returns its former value; False as well where it can't be set."""
    with suppress(OSError, termios.error):
        descriptor = os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)
        try:
            # A background process must not touch the terminal: the kernel would stop it.
            if os.tcgetpgrp(descriptor) != os.getpgrp():
                return False
            settings = termios.tcgetattr(descriptor)
            was = bool(settings[_LOCAL_FLAGS] & termios.ECHOCTL)
            flags = settings[_LOCAL_FLAGS] & ~termios.ECHOCTL
            settings[_LOCAL_FLAGS] = flags | termios.ECHOCTL if wanted else flags
            termios.tcsetattr(descriptor, termios.TCSANOW, settings)
            return was
        finally:
            os.close(descriptor)
    return False
