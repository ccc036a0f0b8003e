"""Shows a run while it goes on: live lines on a terminal, plain lines elsewhere."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console, Group
from rich.text import Text

from gpuherd.jobs import clock
from gpuherd.jobs.attempts.failures import clean
from gpuherd.jobs.monitor.format import bar, counted, place, stage_and_time
from gpuherd.jobs.monitor.terminal import escape_what_encoding_lacks, quiet_control_keys
from gpuherd.jobs.records import Event, EventKind, RunningLine, RunSnapshot
from gpuherd.jobs.reporter import Display

if TYPE_CHECKING:
    from rich.live import Live


# Shows a run to people: live lines on a terminal, plain lines elsewhere.
#
# A snapshot comes in, text goes out: the functions that make the text are pure. What a job says of itself is a
# stranger's text: it is cleaned of control characters and never read as markup.

logger = logging.getLogger(__name__)

# Lines below those of the running jobs: the counts, what is next, and the cursor's own.
_BELOW = 3
_STYLES = {EventKind.FAILED: "red", EventKind.RETRY: "yellow", EventKind.CANCELLED: "yellow", EventKind.NOTICE: "cyan"}


@contextmanager
def display(console: Console, *, plain_every_s: float = 15.0) -> Iterator[Display]:
    """A display on this console while the context lasts: live on a terminal, else lines, with a count now and then."""
    screen = _Screen()
    escape_what_encoding_lacks(console.file)
    if not console.is_terminal:
        yield PlainDisplay(console, plain_every_s, screen)
        return
    # Only on a terminal: a dispatcher that waits for days into a file should be small.
    from rich.live import Live

    live = Live(console=console, auto_refresh=False, transient=True)
    with quiet_control_keys():
        screen.show(live.start)
        try:
            yield LiveDisplay(live, screen)
        finally:
            # Also on a dead terminal: it gives standard output and error back, which it had redirected.
            _Screen().show(live.stop)


class _Screen:
    """What is shown goes through here, and the run goes on when nobody reads any more (``gpuherd esd … | head -1``, a
    terminal that is gone). From then on nothing is shown, so that a dead terminal costs nothing.

    rich answers a closed pipe by falling silent for good and raising SystemExit.
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
            logger.info("nobody reads what is shown any more (%r); the run goes on", problem)


class PlainDisplay:
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
        """Prints the counts, but for the first moments of a run, when the events say it all."""
        if clock.mono() >= self._next:
            self._print(summary(snapshot))

    def _print(self, text: str) -> None:
        self._screen.show(lambda: self._console.print(Text(clean(text)), soft_wrap=True))


class LiveDisplay:
    """A line for each running job, the counts, and what is next, kept up to date; what went wrong scrolls above it."""

    every_s = 0.25

    def __init__(self, live: Live, screen: _Screen):
        self._live = live
        self._screen = screen

    def event(self, event: Event) -> None:
        """Prints what should be read later too: failures, retries and notices."""
        style = _STYLES.get(event.kind)
        if style is not None:
            line = Text(clean(event.text), style=style)
            self._screen.show(lambda: self._live.console.print(line, soft_wrap=True))

    def snapshot(self, snapshot: RunSnapshot) -> None:
        """Draws the run anew."""
        height = self._live.console.size.height
        self._screen.show(lambda: self._live.update(render(snapshot, height), refresh=True))


def render(snapshot: RunSnapshot, height: int = 10_000) -> Group:
    """The live picture in at most ``height`` lines: a line for each running job, as far as there is room, then the
    counts, then why the next job waits.
    """
    from rich.table import Table

    room = max(1, height - _BELOW)
    shown = snapshot.running if len(snapshot.running) <= room else snapshot.running[: room - 1]
    table = Table.grid(padding=(0, 2), expand=True)
    for ratio in (None, 1, None, None):
        # Only the title gives way where the terminal is narrow.
        table.add_column(no_wrap=True, overflow="ellipsis", ratio=ratio)
    for line in shown:
        table.add_row(*(Text(cell) for cell in cells(line)))
    lines = []
    if len(shown) < len(snapshot.running):
        lines.append(Text(f"and {len(snapshot.running) - len(shown)} more", style="dim"))
    lines.append(Text(counts(snapshot), style="bold", no_wrap=True, overflow="ellipsis"))
    if snapshot.waiting_for:
        lines.append(Text(clean(snapshot.waiting_for), style="dim", no_wrap=True, overflow="ellipsis"))
    return Group(table, *lines)


def cells(line: RunningLine) -> tuple[str, str, str, str]:
    """A running job's GPU, title, progress and stage with time, as plain text."""
    told = line.progress
    time = "paused" if line.paused else stage_and_time(told, line.elapsed_s, line.eta_s)
    where = f"CPU of {clean(line.node)}" if line.node and not line.gpus else place(line.gpus)
    return where, clean(line.title), bar(told), time


def counts(snapshot: RunSnapshot) -> str:
    """The counts in one line: ``3 of 20 done, 1 failed, 4 running, 12 waiting, 1 paused, about 5 min left``."""
    return counted(snapshot.counts, paused=snapshot.paused, in_line=snapshot.in_line, eta_s=snapshot.eta_s)


def summary(snapshot: RunSnapshot) -> str:
    """All of it in one line: the counts, and why the next job waits."""
    return "; ".join([counts(snapshot), *([clean(snapshot.waiting_for)] if snapshot.waiting_for else [])])
