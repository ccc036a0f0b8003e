"""A progress bar with an ETA for work in this process, shown only when it takes long enough to ask for one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

T = TypeVar("T")

SHOW_AFTER_S = 2.0


def track(
    console: Console, items: Sequence[T], title: str, clock: Callable[[], float] = time.monotonic
) -> Iterator[T]:
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
