"""A use of a GPU as plain frozen data, and as a line of a file. Pure: no clock, no files.

A line is a JSON object. Whoever may write a file may write anything into it, so ``use_of`` takes nothing on trust but
the form: figures are finite and fit to each other, texts are short and safe to print.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from typing import Any

from gpuherd.errors import clean

# The longest line that is read, in bytes; what ``line_of`` writes is shorter.
LONGEST_LINE = 4096
_LONGEST_ID = 200
_MOST_UID = 2**32 - 2
# Seconds since 1970 of times that are believed: until the year 2200.
_LAST = 7_258_118_400.0
# A use may be held for slightly longer than its times say: they are rounded.
_SLACK_S = 1.0
# Of a GPU: more than any has.
_MOST_MB, _MOST_W = 1e8, 1e5


class Kind(StrEnum):
    """What used the GPU: a job of a queue, ``gpuherd run``, ``gpuherd session``, or a process that no gpuherd
    started."""

    JOB = "job"
    RUN = "run"
    SESSION = "session"
    OTHER = "other"


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """The use of one GPU by one job, command or process, up to now or to its end.

    A GPU that several share at a time counts in parts: the seconds and joules of all of them together are those of the
    GPU. A figure that was never measured is None.

    Attributes:
        id: the same in every record of this use; of two records of one writer the longer one counts.
        uid: whose use it is, by the kernel as the writer saw it.
        gpu, label: UUID and short name (``0``, ``3:1``).
        job: the name that the user has given; None without one.
        project: the user's word for what it belongs to; else the name of the run's folder; None for other processes.
        command: the program's name, without arguments that may hold secrets.
        pid: of the main process.
        since, until: wall-clock seconds since 1970; their difference is by a clock that can't be set.
        held_s: seconds for which the GPU was held.
        computing_s: of these the seconds in which it computed: its utilisation, summed.
        memory_mb_s: memory in use times seconds, in MB (2^20 bytes) seconds, whole also where the GPU is shared.
        peak_mb: the most memory seen, in MB.
        energy_j: joules.
        idle_since: since when memory has been held without computing; None while it computes, or where that is unknown.
    """

    id: str
    uid: int
    gpu: str
    label: str
    kind: Kind
    since: float
    until: float
    job: str | None = None
    project: str | None = None
    command: str | None = None
    pid: int | None = None
    held_s: float = 0.0
    computing_s: float | None = None
    memory_mb_s: float | None = None
    peak_mb: int | None = None
    energy_j: float | None = None
    idle_since: float | None = None

    @property
    def span_s(self) -> float:
        """Seconds from its beginning to now, or to its end."""
        return self.until - self.since

    @property
    def mean_mb(self) -> float | None:
        """Memory in use on average, in MB; None where it was not measured."""
        return None if self.memory_mb_s is None or self.span_s <= 0 else self.memory_mb_s / self.span_s

    def within(self, since: float, until: float) -> Use | None:
        """Its part between two wall-clock seconds, None for none: spread evenly over its time.

        >>> use = Use(id="a", uid=1, gpu="GPU-0", label="0", kind=Kind.JOB, since=0.0, until=100.0, held_s=100.0)
        >>> part = use.within(75.0, 500.0)
        >>> part and (part.since, part.until, part.held_s)
        (75.0, 100.0, 25.0)
        """
        first, last = max(self.since, since), min(self.until, until)
        if last < first or (last == first and self.span_s > 0):
            return None
        if first == self.since and last == self.until:
            return self
        share = (last - first) / self.span_s

        def part(value: float | None) -> float | None:
            return None if value is None else value * share

        return replace(
            self,
            since=first,
            until=last,
            held_s=self.held_s * share,
            computing_s=part(self.computing_s),
            memory_mb_s=part(self.memory_mb_s),
            energy_j=part(self.energy_j),
        )


@dataclass(frozen=True, slots=True)
class Recorded:
    """A use as it stands in the ledger.

    Attributes:
        observer_uid: the owner of the file, by the kernel.
        is_open: it is going on, as far as can be seen: its recorder lives and has not ended it.
    """

    use: Use
    observer_uid: int
    is_open: bool = False

    def is_believed_by(self, reader_uid: int) -> bool:
        """Whether it counts for a reader: written by the user whose use it is, by root, or by the reader."""
        return self.observer_uid in (self.use.uid, 0, reader_uid)

    def outweighs(self, other: Recorded) -> bool:
        """Whether it replaces another record of the same id and writer that was read before it.

        The longer one is the later one, whatever was done to the clock meanwhile; of equals the one of an end counts.
        """
        mine, its = self.use.span_s, other.use.span_s
        return mine > its + 1e-3 or (mine > its - 1e-3 and (not self.is_open or other.is_open))


_FIELDS = tuple((each.name, each.default) for each in fields(Use))
_encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode


def line_of(use: Use) -> bytes:
    """The record as a line, with its end; texts are cut to what ``use_of`` takes."""
    values: dict[str, Any] = {}
    for name, default in _FIELDS:
        value = getattr(use, name)
        if value != default:
            if isinstance(value, float):
                value = round(value, 3)
            values[name] = clean(value) if isinstance(value, str) else value
    return _encode(values).encode("ascii") + b"\n"


def use_of(line: bytes) -> Use | None:
    """The record of a line; None for anything that can't be one. Keys that are not known are passed over."""
    if len(line) > LONGEST_LINE:
        return None
    try:
        values = json.loads(line)
        if not isinstance(values, dict):
            return None
        return _checked(values)
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return None


def _checked(values: dict[str, Any]) -> Use:
    """Raises ValueError, TypeError or KeyError for what can't be."""
    since, until = _number(values["since"], _LAST), _number(values["until"], _LAST)
    if until < since:
        raise ValueError("it ends before it begins")
    span_s = until - since
    held_s = _number(values.get("held_s", 0.0), span_s + _SLACK_S)
    return Use(
        id=_text(values["id"], _LONGEST_ID),
        uid=_whole(values["uid"], _MOST_UID),
        gpu=_text(values["gpu"], _LONGEST_ID),
        label=_text(values["label"], _LONGEST_ID),
        kind=Kind(values["kind"]),
        since=since,
        until=until,
        job=_optional_text(values.get("job")),
        project=_optional_text(values.get("project")),
        command=_optional_text(values.get("command")),
        pid=_optional_whole(values.get("pid"), 2**31),
        held_s=held_s,
        computing_s=_optional(values.get("computing_s"), held_s + _SLACK_S),
        memory_mb_s=_optional(values.get("memory_mb_s"), (span_s + _SLACK_S) * _MOST_MB),
        peak_mb=_optional_whole(values.get("peak_mb"), int(_MOST_MB)),
        energy_j=_optional(values.get("energy_j"), (span_s + _SLACK_S) * _MOST_W),
        idle_since=_optional(values.get("idle_since"), _LAST),
    )


def _number(value: object, most: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= most or math.isnan(value):
        raise ValueError(f"{value!r} is no number from 0 to {most}")
    return float(value)


def _optional(value: object, most: float) -> float | None:
    return None if value is None else _number(value, most)


def _whole(value: object, most: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
        raise ValueError(f"{value!r} is no whole number from 0 to {most}")
    return value


def _optional_whole(value: object, most: int) -> int | None:
    return None if value is None else _whole(value, most)


def _text(value: object, longest: int) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= longest:
        raise ValueError("no text, or too long")
    return clean(value)


def _optional_text(value: object) -> str | None:
    return None if value is None else (_text(value, LONGEST_LINE) or None)
