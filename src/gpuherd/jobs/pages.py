"""Which jobs of a queue stand on a page, and in which order: read from the indexes, however long the queue is."""

from __future__ import annotations

import itertools
import sqlite3
from collections.abc import Iterator, Sequence

from gpuherd.jobs.job import JobState
from gpuherd.jobs.reader import QueueReader
from gpuherd.jobs.records import Counts
from gpuherd.jobs.runstatus import SHOWN_FIRST, Page

# Those that can't run yet come last.
_LAST = "blocked > 0 OR held, "


def rows_of(
    reader: QueueReader, page: Page, submission: int, counts: Counts, longest_first: bool
) -> tuple[list[sqlite3.Row], int]:
    """The rows of the page, and how many there are in all. Of a long queue no more is read than the page holds, unless
    the page is a search."""
    searches = bool(page.text or page.names)
    rows: list[sqlite3.Row] = []
    matching, skip = 0, page.offset
    for state in SHOWN_FIRST:
        if page.states and state not in page.states:
            continue
        where, values = _where(page, submission, state)
        here = _count(reader, where, values) if searches else int(getattr(counts, state.value))
        matching += here
        # What runs is never many: as much as there are GPUs.
        most = min(page.limit - len(rows), here if page.each is None or state is JobState.RUNNING else page.each)
        if most > 0 and skip < here and state is JobState.WAITING and not searches:
            rows += _waiting(reader, submission, longest_first, most, skip)
        elif most > 0 and skip < here:
            query = f"SELECT * FROM jobs WHERE {where} ORDER BY {_order(reader, state, longest_first)} LIMIT ? OFFSET ?"  # noqa: S608
            rows += reader.rows(query, (*values, most, skip))
        skip = max(0, skip - here)
    return rows, matching


def places(page: Page) -> Iterator[int | None]:
    """For each waiting job of the page how many go before it; None where others than the page's may do."""
    if page.text or page.names or (page.offset and set(page.states) != {JobState.WAITING}):
        return itertools.repeat(None)
    return itertools.count(page.offset)


def _count(reader: QueueReader, where: str, values: tuple[object, ...]) -> int:
    found = reader.one(f"SELECT count(*) FROM jobs WHERE {where}", values)  # noqa: S608 - our own words
    return 0 if found is None else int(found[0])


def _waiting(reader: QueueReader, submission: int, longest_first: bool, most: int, skip: int) -> Sequence[sqlite3.Row]:
    """Waiting jobs in the order of ``_order``: those that could run from the indexes that the dispatcher goes by, which
    hold those with GPUs and those without apart."""
    order, where = _order(reader, JobState.WAITING, longest_first), "submission = ? AND state = 'waiting'"
    values: tuple[object, ...] = (submission,)
    could_run = "blocked = 0 AND held = 0"
    rows: list[sqlite3.Row] = []
    if reader.has("jobs", "held") and reader.has("jobs", "round"):
        by_index = order.removeprefix(_LAST)
        of_each = " UNION ALL ".join(
            f"SELECT * FROM (SELECT * FROM jobs WHERE {where} AND {could_run} AND (gpus > 0) = {on_gpus}"  # noqa: S608
            f" ORDER BY {by_index} LIMIT ?)"
            for on_gpus in (1, 0)
        )
        one = (*values, skip + most)
        rows += reader.rows(f"{of_each} ORDER BY {by_index} LIMIT ? OFFSET ?", (*one, *one, most, skip))
        if len(rows) == most:
            return rows
        skip = max(0, skip - _count(reader, f"{where} AND {could_run}", values))
        most -= len(rows)
        where += f" AND NOT ({could_run})"
    query = f"SELECT * FROM jobs WHERE {where} ORDER BY {order} LIMIT ? OFFSET ?"  # noqa: S608 - our own words
    return [*rows, *reader.rows(query, (*values, most, skip))]


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
