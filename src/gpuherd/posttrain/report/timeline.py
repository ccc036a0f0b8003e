"""The jobs of a run as its queue tells them: when each attempt ran and where, what failed, and the hours of GPUs."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from sqlite3 import Row

from gpuherd.engines.registry import LOCAL
from gpuherd.errors import QueueUnreadable
from gpuherd.jobs.attempts.failures import with_code
from gpuherd.jobs.queue.reader import QueueReader
from gpuherd.jobs.run_dir import safe_name

# Behind the round, which only a reference's evaluation has not.
_PHASE = re.compile(r"_r\d+_(collect|train|evaluate)(?:_|$)|_(evaluate)(?:_\d+)?$")
MOST_BARS = 5000


@dataclass(frozen=True, slots=True)
class Bar:
    """An attempt of a job in time.

    Attributes:
        job: its name.
        phase: "collect", "train", "evaluate", or "" where its name says none.
        lanes: labels of its GPUs; ("CPU",) where it had none.
        start, end: seconds since the first start; ``end`` is None while it runs.
        state: "running", "done", "failed" or "requeued".
        gpus: how many.
    """

    job: str
    phase: str
    lanes: tuple[str, ...]
    start: float
    end: float | None
    state: str
    gpus: int


@dataclass(frozen=True, slots=True)
class Failure:
    """A job that has no result, or an attempt that was made again: of what kind, and why in one sentence."""

    job: str
    kind: str
    reason: str
    final: bool


@dataclass(frozen=True, slots=True)
class Timeline:
    """The jobs of a run.

    Attributes:
        bars: in the order of their starts.
        counts: jobs by state.
        failures: final ones first.
        gpu_hours: of all attempts that have ended, by phase; None for a run on CPUs.
        hours: of all attempts that have ended, by algorithm and phase: of GPUs, or on CPUs of jobs.
        left_out: later attempts that have no bar, though they count in all else.
    """

    bars: Sequence[Bar] = ()
    counts: Mapping[str, int] = field(default_factory=dict)
    failures: Sequence[Failure] = ()
    gpu_hours: Mapping[str, float] | None = None
    hours: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    left_out: int = 0


def read_timeline(queue: Path, algorithms: Collection[str], most_bars: int = MOST_BARS) -> Timeline:
    """All attempts and failures of a queue.

    Args:
        algorithms: those whose names jobs begin with.
        most_bars: that are drawn, the first ones; all else is of all attempts.

    Raises QueueUnreadable, UsageError where there is none.
    """
    with closing(QueueReader(queue)) as reader, reader.snapshot():
        jobs = reader.rows("SELECT name, state, reason FROM jobs ORDER BY id")
        attempts = reader.rows(
            "SELECT jobs.name AS name, attempts.state AS state, attempts.gpus AS gpus, attempts.labels AS labels, "
            "attempts.started_at AS started_at, attempts.ended_at AS ended_at, attempts.class AS class, "
            "attempts.reason AS reason, attempts.exit_code AS exit_code, "
            "attempts.engine AS engine, attempts.node AS node "
            "FROM attempts JOIN jobs ON jobs.id = attempts.job ORDER BY attempts.started_at"
        )
    try:
        ran = [each for each in attempts if not _never_began(each)]
        bars = [_bar(each, ran[0]["started_at"]) for each in ran]
    except (TypeError, ValueError, RecursionError):
        raise QueueUnreadable(f"{queue} is damaged: what it tells of its attempts can't be read") from None
    counts = Counter(each["state"] for each in jobs)
    shown, left_out = bars[:most_bars], max(0, len(bars) - most_bars)
    return Timeline(shown, counts, _failures(jobs, attempts), gpu_hours(bars), hours_by(bars, algorithms), left_out)


def phase_of(job: str) -> str:
    """What a job does, by its name (``rounds.plan.Step.name``); "" where that says nothing.

    >>> phase_of("PITA_gsm8k_llama32_r1_collect_2"), phase_of("reference_a_tiny_evaluate"), phase_of("other")
    ('collect', 'evaluate', '')
    >>> phase_of("CD_a_tiny_r0_evaluate_train"), phase_of("CD_train_tiny_r0_collect")  # data sets may be called so
    ('evaluate', 'collect')
    >>> phase_of("reference_a_tiny_evaluate_7"), phase_of("CD_a_tiny_r0_evaluate_7_b")  # shards
    ('evaluate', 'evaluate')
    """
    found = _PHASE.search(job)
    return (found[1] or found[2]) if found else ""


def gpu_hours(bars: Sequence[Bar]) -> dict[str, float] | None:
    """Hours of GPUs by phase, of attempts that have ended; None where no attempt had a GPU."""
    if not any(each.gpus for each in bars):
        return None
    found: dict[str, float] = {}
    for each in bars:
        if each.end is not None:
            hours = each.gpus * (each.end - each.start) / 3600
            found[each.phase or "other"] = found.get(each.phase or "other", 0.0) + hours
    return found


def hours_by(bars: Sequence[Bar], algorithms: Collection[str]) -> dict[str, dict[str, float]]:
    """Hours by algorithm and phase, of attempts that have ended: a job on two GPUs counts twice, one on a CPU once."""
    known = {safe_name(each): each for each in algorithms}
    found: dict[str, dict[str, float]] = {}
    for each in bars:
        if each.end is not None:
            fitting = [name for name in known if each.job.startswith(f"{name}_")]
            algorithm = known[max(fitting, key=len)] if fitting else each.job.partition("_")[0]
            phases, phase = found.setdefault(algorithm, {}), each.phase or "other"
            phases[phase] = phases.get(phase, 0.0) + max(1, each.gpus) * (each.end - each.start) / 3600
    return found


def _bar(row: Row, first: float) -> Bar:
    gpus, labels = json.loads(row["gpus"]), json.loads(row["labels"])
    end = None if row["ended_at"] is None else max(row["ended_at"], row["started_at"]) - first
    lanes = tuple(f"GPU {each}" for each in labels or gpus) or (f"CPU of {row['node']}" if row["node"] else "CPU",)
    return Bar(row["name"], phase_of(row["name"]), lanes, row["started_at"] - first, end, row["state"], len(gpus))


def _never_began(attempt: Row) -> bool:
    """Whether an engine beyond this machine has or had it in its line only."""
    return attempt["engine"] not in (None, LOCAL) and attempt["node"] is None and attempt["state"] != "done"


def _failures(jobs: Sequence[Row], attempts: Sequence[Row]) -> list[Failure]:
    last = {each["name"]: each for each in attempts if each["state"] == "failed"}
    kinds = {name: each["class"] for name, each in last.items()}
    ended = {
        each["name"]: Failure(each["name"], _kind(each, kinds), _reason(each, last.get(each["name"])), final=True)
        for each in jobs
        if each["state"] in ("failed", "cancelled")
    }
    again = [
        Failure(each["name"], each["class"] or "failed", _reason(each, each), final=False)
        for each in attempts
        if each["state"] == "failed" and not _same(ended, each)
    ]
    return [*ended.values(), *again]


def _kind(job: Row, kinds: Mapping[str, str | None]) -> str:
    """Of what kind a job's end without a result is: its last failure's, where it failed and is not just cancelled."""
    return str((kinds.get(job["name"]) if job["state"] == "failed" else None) or job["state"])


def _same(ended: Mapping[str, Failure], attempt: Row) -> bool:
    """Whether an attempt's failure is what its job ended with."""
    job = ended.get(attempt["name"])
    return job is not None and job.reason == _reason(attempt, attempt)


def _reason(row: Row, attempt: Row | None) -> str:
    """What a row says of its failure, with the exit code of the attempt, if it is that attempt's end."""
    reason: str = row["reason"] or ""
    return with_code(attempt["exit_code"], reason) if attempt is not None and attempt["reason"] == reason else reason
