"""The table of controls: what people ask of a queue while it is worked off, and what they were answered.

SQL only. A control stands there until somebody has applied it; it is applied and answered in one transaction, so that
a kill at any instant leaves it open or done, never done twice.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Letter:
    """A control that waits to be applied. ``at``: wall-clock second when it was written; ``by``: who wrote it."""

    id: int
    at: float
    kind: str
    by: str
    jobs: tuple[str, ...] = ()
    settings: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Reply:
    """What came of it: whether all of it could be done, a sentence, who did it, and the jobs that it changed."""

    ok: bool
    text: str
    applied_by: str
    changed: tuple[str, ...] = ()


def post(db: sqlite3.Connection, letter: Letter) -> int:
    """Writes a control into the table (its ``id`` is not looked at); returns its number."""
    cursor = db.execute(
        "INSERT INTO controls (at, kind, jobs, settings, by) VALUES (?,?,?,?,?)",
        (letter.at, letter.kind, json.dumps(letter.jobs), json.dumps(dict(letter.settings)), letter.by),
    )
    return int(cursor.lastrowid or 0)


def open_letters(db: sqlite3.Connection) -> tuple[Letter, ...]:
    """What nobody has applied yet, oldest first."""
    rows = db.execute("SELECT * FROM controls WHERE applied_at IS NULL ORDER BY id").fetchall()
    return tuple(_letter(row) for row in rows)


def _letter(row: sqlite3.Row) -> Letter:
    jobs, settings = json.loads(row["jobs"]), json.loads(row["settings"])
    return Letter(row["id"], row["at"], row["kind"], row["by"], tuple(jobs), settings)


def answer(db: sqlite3.Connection, letter: int, reply: Reply, now: float) -> None:
    """Writes down what came of a control: it is applied from now on."""
    db.execute(
        "UPDATE controls SET applied_at = ?, applied_by = ?, ok = ?, answer = ?, changed = ? WHERE id = ?",
        (now, reply.applied_by, reply.ok, reply.text, json.dumps(reply.changed), letter),
    )


def reply_to(db: sqlite3.Connection, letter: int) -> Reply | None:
    """What a control was answered, None while it is open."""
    row = db.execute("SELECT * FROM controls WHERE id = ?", (letter,)).fetchone()
    if row is None or row["applied_at"] is None:
        return None
    return Reply(bool(row["ok"]), row["answer"], row["applied_by"], tuple(json.loads(row["changed"])))
