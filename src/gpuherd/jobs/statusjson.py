"""A run's status as JSON; the schema is in docs/control.md.

Most jobs of a long run have ended and will not change, and all that JSON has of them is in their rows: SQLite makes
their text itself, twenty times as fast as by way of ``JobStatus``. What it makes is equal to what ``_job`` makes, but
that it writes times with 15 digits.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import asdict, fields
from itertools import islice
from typing import Any

from gpuherd.jobs.job import ENDED
from gpuherd.jobs.reader import QueueReader
from gpuherd.jobs.rundir import RunDirectory
from gpuherd.jobs.runstatus import SHOWN_FIRST, AttemptStatus, DispatcherStatus, JobStatus, Page, RunStatus
from gpuherd.jobs.status import looking, opened

_TOGETHER = 500
_JOB_FIELDS = tuple(field.name for field in fields(JobStatus))
_ATTEMPT_FIELDS = tuple(field.name for field in fields(AttemptStatus))
_encode = json.JSONEncoder(separators=(",", ":")).encode

# The JSON of a job that has ended: the same as ``jobstatus`` and ``_job`` make.
_TEXT_OF_ENDED = """
json_object('id', id, 'name', name, 'title', coalesce(nullif(json_extract(spec, '$.title'), ''), name),
    'state', state, 'paused', json(CASE held WHEN 0 THEN 'false' ELSE 'true' END), 'reason', reason, 'gpus', gpus,
    'memory_mb', memory_mb, 'learned', NULL, 'priority', priority, 'tries', tries, 'attempts', attempts,
    'ready_at', NULL, 'command', json_extract(spec, '$.argv'), 'attempt', (
        SELECT json_object('id', a.id, 'number', number, 'state', a.state, 'gpus', json(labels),
            'gpu_uuids', json(a.gpus), 'pid', CASE engine WHEN 'local' THEN pid END, 'log', log,
            'started_at', started_at, 'ended_at', ended_at,
            'run_s', CASE WHEN engine = 'local' OR node IS NOT NULL OR a.state = 'done'
                THEN max(0.0, ended_mono - started_mono) END,
            'wait_s', wait_s, 'exit_code', exit_code, 'signal', signal, 'failure_class', class, 'peak_mb', peak_mb,
            'paused', json('[]'), 'paused_s', paused_s, 'progress', NULL, 'eta_s', NULL,
            'handed', CASE WHEN engine <> 'local' THEN
                json_object('engine', engine, 'batch', batch, 'index', place, 'handle', handle, 'node', node) END)
        FROM attempts a WHERE job = jobs.id ORDER BY a.id DESC LIMIT 1))
"""


def json_text(run: RunDirectory, page: Page, *, lines: bool = True) -> Iterator[str]:
    """The status with all jobs of a page without ``offset`` and ``each``, as pieces of one JSON text.

    Nothing is yielded before all is read, so that a slow reader of the text does not hold the queue's snapshot; what is
    read is kept compressed meanwhile.

    Args:
        lines: a line for each job and each other key, for people to read too; else all in one line.

    Raises UsageError without a queue, and QueueUnreadable.
    """
    with opened(run) as reader, looking(run, reader, page) as look:
        head = as_json(look.status)
        by_sqlite = _can_make_text(reader)
        texts = (
            text
            for state in SHOWN_FIRST
            for text in (
                map(_ascii, look.columns(state, _TEXT_OF_ENDED))
                if by_sqlite and state in ENDED
                else (_encode(_job(job)) for job in look.jobs((state,)))
            )
        )
        kept = [zlib.compress(piece.encode("ascii"), 1) for piece in _pieces(texts, ",\n    " if lines else ",")]
    whole = json.dumps(head, indent=2 if lines else None)
    begun, _, _ = whole.rpartition("[]")
    yield begun + ("[\n    " if lines and kept else "[")
    for piece in kept:
        yield zlib.decompress(piece).decode("ascii")
    yield "\n  ]\n}" if lines and kept else "]\n}" if lines else "]}"


def as_json(status: RunStatus) -> dict[str, Any]:
    """The status as plain data, the jobs last."""
    return {
        "folder": str(status.folder),
        "time": status.at,
        "counts": {
            **asdict(status.counts),
            "total": status.counts.total,
            "paused": status.paused,
            "in_line": 0 if status.in_engine is None else status.in_engine.in_line,
        },
        "in_engine": None if status.in_engine is None else asdict(status.in_engine),
        "eta_s": None if status.eta_s is None else round(status.eta_s, 1),
        "left_out": dict(status.left_out),
        "dispatcher": None if status.dispatcher is None else _dispatcher(status.dispatcher),
        "matching": status.matching,
        "jobs": [_job(job) for job in status.jobs],
    }


def _dispatcher(dispatcher: DispatcherStatus) -> dict[str, Any]:
    told = dispatcher.standing
    return {
        "pid": dispatcher.pid,
        "since": dispatcher.since,
        "mode": None if told is None else told.mode,
        "closed": None if told is None else told.closed,
        "away": None if told is None else told.away,
        "settings": None if told is None else dict(told.settings),
        "gpus": None if told is None else [asdict(gpu) for gpu in told.gpus],
    }


def _job(job: JobStatus) -> dict[str, Any]:
    told = {name: getattr(job, name) for name in _JOB_FIELDS}
    attempt = job.attempt
    if attempt is not None:
        told["attempt"] = {name: getattr(attempt, name) for name in _ATTEMPT_FIELDS}
        told["attempt"]["progress"] = None if attempt.progress is None else asdict(attempt.progress)
        told["attempt"]["handed"] = None if attempt.handed is None else asdict(attempt.handed)
    return told


def _can_make_text(reader: QueueReader) -> bool:
    """Whether SQLite was built with JSON, and the file has all columns: one of an older gpuherd lacks some."""
    return reader.has("attempts", "engine") and reader.can("SELECT json_object('a', json('[]'))")


def _ascii(text: str) -> str:
    return text if text.isascii() else _encode(json.loads(text))


def _pieces(texts: Iterable[str], between: str) -> Iterator[str]:
    """The texts with ``between`` between them, many to a piece."""
    rest, lead = iter(texts), ""
    while together := list(islice(rest, _TOGETHER)):
        yield lead + between.join(together)
        lead = between
