"""A progress bar with an ETA for work in this process, shown only when it takes long enough to ask for one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

T = TypeVar("T")

SHOW_AFTER_S = 2.0


def track(console: Console, items: Sequence[T], title: str, clock: Callable[[], float] = time.monotonic) -> Iterator[T]:
    """Passes ``items`` on; when they take longer than two seconds, with a bar and an ETA on ``console``."""
    started = clock()
    bar: Progress | None = None
    try:
        for done, item in enumerate(items):
            if bar is None and clock() - started > SHOW_AFTER_S:
                columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
                bar = Progress(*columns, console=console, transient=True)
                bar.add_task(title, total=len(items))
                bar.start()
            if bar is not None:
                bar.update(bar.task_ids[0], completed=done)
            yield item
    finally:
        if bar is not None:
            bar.stop()


@contextmanager
def of_bytes(
    console: Console, total: int, title: str, clock: Callable[[], float] = time.monotonic
) -> Iterator[Callable[[int], None]]:
    """A function to call, from any thread, with how many more bytes are done.

    Past two seconds ``console`` shows a bar with an ETA; where it is no terminal, one line that names the work.
    """
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    bar = Progress(TextColumn("{task.description}"), *columns, console=console, transient=True)
    task = bar.add_task(title, total=total)
    started, shown, lock = clock(), False, threading.Lock()

    def advance(count: int) -> None:
        nonlocal shown
        bar.update(task, advance=count)
        with lock:
            if shown or clock() - started <= SHOW_AFTER_S:
                return
            shown = True
        if console.is_terminal:
            bar.start()
        else:
            console.print(f"{title} ({total / 1e9:.1f} GB)", markup=False, highlight=False)

    try:
        yield advance
    finally:
        if bar.live.is_started:
            bar.stop()
