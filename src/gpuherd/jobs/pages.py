"""Which jobs of a queue stand on a page, and in which order: read from the indexes, however long the queue is."""

from __future__ import annotations

import itertools
import sqlite3
from collections.abc import Iterator

from gpuherd.jobs.job import JobState
from gpuherd.jobs.reader import QueueReader
from gpuherd.jobs.records import Counts
from gpuherd.jobs.runstatus import SHOWN_FIRST, Page

# Those that can't run yet come last.
_LAST = "blocked > 0 OR held, "


def rows_of(
    reader: QueueReader, page: Page, submission: int, counts: Counts, longest_first: bool, columns: str = "*"
) -> tuple[Iterator[sqlite3.Row], int]:
    """The rows of the page, to be read one after the other within one snapshot, and how many rows match in all. Of a
    long queue no more is read than the page holds, unless the page is a search.

    ``columns``: what to read of each row, but of those that wait.
    """
    searches = bool(page.text or page.names)
    parts: list[Iterator[sqlite3.Row]] = []
    matching, skip, room = 0, page.offset, page.limit
    for state in SHOWN_FIRST:
        if page.states and state not in page.states:
            continue
        where, values = _where(page, submission, state)
        here = _count(reader, where, values) if searches else int(getattr(counts, state.value))
        matching += here
        # What runs is never many: as much as there are GPUs.
        most = min(room, here if page.each is None or state is JobState.RUNNING else page.each)
        if most > 0 and skip < here:
            if state is JobState.WAITING and not searches:
                parts.append(_waiting(reader, submission, longest_first, most, skip))
            else:
                # Sorted are the numbers alone, from an index, and not the rows.
                order = _order(reader, state, longest_first)
                chosen = f"SELECT id FROM jobs WHERE {where} ORDER BY {order} LIMIT ? OFFSET ?"  # noqa: S608
                query = f"SELECT {columns} FROM jobs WHERE id IN ({chosen}) ORDER BY {order}"  # noqa: S608
                parts.append(reader.each(query, (*values, most, skip)))
            room -= min(most, here - skip)
        skip = max(0, skip - here)
    return itertools.chain.from_iterable(parts), matching


def places(page: Page) -> Iterator[int | None]:
    """For each waiting job of the page how many go before it; None where others than the page's may do."""
    if page.text or page.names or (page.offset and set(page.states) != {JobState.WAITING}):
        return itertools.repeat(None)
    return itertools.count(page.offset)


def _count(reader: QueueReader, where: str, values: tuple[object, ...]) -> int:
    found = reader.one(f"SELECT count(*) FROM jobs WHERE {where}", values)  # noqa: S608 - our own words
    return 0 if found is None else int(found[0])


def _waiting(reader: QueueReader, submission: int, longest_first: bool, most: int, skip: int) -> Iterator[sqlite3.Row]:
    """Waiting jobs in the order of ``_order``: those that could run from the indexes that the dispatcher goes by, which
    hold those with GPUs and those without apart."""
    order, where = _order(reader, JobState.WAITING, longest_first), "submission = ? AND state = 'waiting'"
    values: tuple[object, ...] = (submission,)
    could_run = "blocked = 0 AND held = 0"
    if reader.has("jobs", "held") and reader.has("jobs", "round"):
        by_index = order.removeprefix(_LAST)
        of_each = " UNION ALL ".join(
            f"SELECT * FROM (SELECT * FROM jobs WHERE {where} AND {could_run} AND (gpus > 0) = {on_gpus}"  # noqa: S608
            f" ORDER BY {by_index} LIMIT ?)"
            for on_gpus in (1, 0)
        )
        one = (*values, skip + most)
        for row in reader.each(f"{of_each} ORDER BY {by_index} LIMIT ? OFFSET ?", (*one, *one, most, skip)):
            most -= 1
            yield row
        if not most:
            return
        skip = max(0, skip - _count(reader, f"{where} AND {could_run}", values))
        where += f" AND NOT ({could_run})"
    query = f"SELECT * FROM jobs WHERE {where} ORDER BY {order} LIMIT ? OFFSET ?"  # noqa: S608 - our own words
    yield from reader.each(query, (*values, most, skip))


def _order(reader: QueueReader, state: JobState, longest_first: bool) -> str:
    """The waiting in the order in which they will run, those that can't run yet last; of the ended the latest first."""
    if state is JobState.RUNNING:
        return "id"
    if state is not JobState.WAITING:
        return "id DESC"
    if reader.has("jobs", "held") and reader.has("jobs", "round"):
        longest = "rank DESC, " if longest_first and reader.has("jobs", "rank") else ""
        return f"{_LAST}round, priority DESC, {longest}id"
    return "blocked > 0, priority DESC, id"


def _where(page: Page, submission: int, state: JobState) -> tuple[str, tuple[object, ...]]:
    where, values = "submission = ? AND state = ?", [submission, state.value]
    if page.text:
        where += " AND instr(lower(name), lower(?)) > 0"
        values.append(page.text)
    if page.names:
        where += f" AND name IN ({','.join('?' * len(page.names))})"
        values += page.names
    return where, tuple(values)
