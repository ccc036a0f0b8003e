"""Shows a run to people: live lines on a terminal, plain lines elsewhere.

A snapshot comes in, text goes out: the functions that make the text are pure. What a job says of itself is a stranger's
text: it is cleaned of control characters and never read as markup.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from gpuherd.jobs import clock
from gpuherd.jobs.events import Event, EventKind, RunningLine, RunSnapshot
from gpuherd.jobs.failures import clean
from gpuherd.jobs.reporter import Display
from gpuherd.jobs.terminal import quiet_control_keys

logger = logging.getLogger(__name__)

_STYLES = {EventKind.FAILED: "red", EventKind.RETRY: "yellow", EventKind.CANCELLED: "yellow", EventKind.NOTICE: "cyan"}
_BAR = 20


@contextmanager
def display(console: Console, *, plain_every_s: float = 15.0) -> Iterator[Display]:
    """A display on this console while the context lasts: live on a terminal, else lines, with a count now and then."""
    if not console.is_terminal:
        yield PlainDisplay(console, plain_every_s)
        return
    live = Live(console=console, auto_refresh=False, transient=True)
    with quiet_control_keys():
        with _although_unread():
            live.start()
        try:
            yield LiveDisplay(live)
        finally:
            with _although_unread():
                live.stop()


class PlainDisplay:
    """One line for each event, and a line of counts every so many seconds."""

    def __init__(self, console: Console, every_s: float):
        self._console = console
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
        with _although_unread():
            self._console.print(Text(clean(text)), soft_wrap=True)


class LiveDisplay:
    """One line for each running job and one of counts, kept up to date; what went wrong scrolls above them."""

    every_s = 0.25

    def __init__(self, live: Live):
        self._live = live

    def event(self, event: Event) -> None:
        """Prints what should be read later too: failures, retries and notices."""
        if event.kind in _STYLES:
            with _although_unread():
                self._live.console.print(Text(clean(event.text), style=_STYLES[event.kind]), soft_wrap=True)

    def snapshot(self, snapshot: RunSnapshot) -> None:
        """Draws the run anew."""
        with _although_unread():
            self._live.update(render(snapshot), refresh=True)


@contextmanager
def _although_unread() -> Iterator[None]:
    """Goes on when nobody reads any more (``gpuherd esd … | head -1``, a terminal that is gone).

    The display is for people; the run must not depend on them. rich answers a closed pipe by falling silent for good
    and raising SystemExit.
    """
    try:
        yield
    except (OSError, SystemExit) as problem:
        logger.info("nobody reads what is shown any more (%r); the run goes on", problem)


def render(snapshot: RunSnapshot) -> Group:
    """The live picture: a line for each running job, then the counts."""
    table = Table.grid(padding=(0, 2), expand=True)
    for ratio in (None, 1, None, None):
        # Only the title gives way where the terminal is narrow.
        table.add_column(no_wrap=True, overflow="ellipsis", ratio=ratio)
    for line in snapshot.running:
        table.add_row(*(Text(cell) for cell in cells(line)))
    return Group(table, Text(summary(snapshot), style="bold", no_wrap=True, overflow="ellipsis"))


def cells(line: RunningLine) -> tuple[str, str, str, str]:
    """A running job's GPU, title, progress and stage with time, as plain text."""
    where = f"GPU {','.join(line.gpus)}" if line.gpus else "CPU"
    told = line.progress
    done = ""
    if told is not None and told.total:
        share = min(1.0, told.done / told.total)
        filled = round(share * _BAR)
        done = f"{'━' * filled}{'╌' * (_BAR - filled)} {told.done}/{told.total}"
    elif told is not None:
        done = f"{told.done} done"
    time = f"{duration(line.eta_s)} left" if line.eta_s is not None else f"for {duration(line.elapsed_s)}"
    stage = "" if told is None or not told.stage else clean(told.stage) + ", "
    return where, clean(line.title), done, stage + time


def summary(snapshot: RunSnapshot) -> str:
    """The counts in one line: ``3 of 20 done, 1 failed, 4 running, 12 waiting, about 5 min left (next: …)``."""
    counts = snapshot.counts
    parts = [f"{counts.done} of {counts.total} done"]
    for number, word in ((counts.failed, "failed"), (counts.cancelled, "cancelled")):
        if number:
            parts.append(f"{number} {word}")
    parts += [f"{counts.running} running", f"{counts.waiting} waiting"]
    if snapshot.eta_s is not None and counts.running + counts.waiting:
        parts.append(f"about {duration(snapshot.eta_s)} left")
    text = ", ".join(parts)
    return f"{text}; the next waits: {clean(snapshot.waiting_for)}" if snapshot.waiting_for else text


def duration(seconds: float) -> str:
    """A length of time for people.

    >>> duration(4.4), duration(75), duration(5400)
    ('4 s', '1 min 15 s', '1 h 30 min')
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
