"""The jobs of a run: read from its queue (when each attempt ran and where, what failed, the hours of GPUs), and their
view on the page (bars in time, what each algorithm took, failures, and sentences of cost and loss).
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from sqlite3 import Row
from typing import TYPE_CHECKING

from gpuherd.engines.registry import LOCAL
from gpuherd.errors import QueueUnreadable
from gpuherd.jobs.attempts.failures import with_code
from gpuherd.jobs.queue.reader import QueueReader
from gpuherd.jobs.run_dir import safe_name
from gpuherd.posttrain.report.figures import named
from gpuherd.report.charts import Axis, Span, timeline_chart
from gpuherd.report.nodes import (
    NONE,
    Column,
    Node,
    axis,
    card,
    cell,
    counted,
    element,
    figure,
    is_known,
    key,
    link,
    listed,
    note,
    table,
)

if TYPE_CHECKING:
    from gpuherd.posttrain.report.reading import RunReport

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
        ran = [each for each in attempts if _began(each)]
        bars = [_bar(each, ran[0]["started_at"]) for each in ran]
    except (TypeError, ValueError, RecursionError):
        raise QueueUnreadable(f"{queue} is damaged: what it tells of its attempts can't be read") from None
    counts = Counter(each["state"] for each in jobs)
    shown, left_out = bars[:most_bars], max(0, len(bars) - most_bars)
    return Timeline(shown, counts, _failures(jobs, attempts), gpu_hours(bars), hours_by(bars, algorithms), left_out)


def phase_of(job: str) -> str:
    """What a job does, by its name (``runs.plan.Step.name``); "" where that says nothing.

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
            phase = each.phase or "other"
            found[phase] = found.get(phase, 0.0) + each.gpus * (each.end - each.start) / 3600
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


def _began(attempt: Row) -> bool:
    """Whether it ran: an engine beyond this machine may have had it in its queue only."""
    return attempt["engine"] in (None, LOCAL) or attempt["node"] is not None or attempt["state"] == "done"


def _failures(jobs: Sequence[Row], attempts: Sequence[Row]) -> list[Failure]:
    """What jobs ended with that have no result, then the failures of attempts that were made again."""
    failed = [each for each in attempts if each["state"] == "failed"]
    last = {each["name"]: each for each in failed}
    ended: dict[str, Failure] = {}
    for job in jobs:
        if job["state"] in ("failed", "cancelled"):
            end = last.get(job["name"])
            kind = end["class"] if end is not None and job["state"] == "failed" else None
            ended[job["name"]] = Failure(job["name"], str(kind or job["state"]), _reason(job, end), final=True)
    again = [
        Failure(each["name"], each["class"] or "failed", _reason(each, each), final=False)
        for each in failed
        if each["name"] not in ended or ended[each["name"]].reason != _reason(each, each)
    ]
    return [*ended.values(), *again]


def _reason(row: Row, attempt: Row | None) -> str:
    """What a row says of its failure, with the exit code of the attempt, if it is that attempt's end."""
    reason: str = row["reason"] or ""
    return with_code(attempt["exit_code"], reason) if attempt is not None and attempt["reason"] == reason else reason


# --- the view ---------------------------------------------------------------------------------------------------------


_PHASES = {"collect": "#56b4e9", "train": "#e69f00", "evaluate": "#009e73", "": "#8c6bb1"}


def jobs_view(run: RunReport, timeline: Timeline) -> list[Node]:
    """The jobs in time, what each algorithm took, and the failures."""
    drawn = _timeline(timeline) if timeline.bars else note("No job has started yet.")
    columns = [Column("job", kind="name"), Column("kind"), Column("then"), Column("reason", kind="name", sorts=False)]
    lines = [
        [
            each.job,
            cell(each.kind, element("span", each.kind, kind="bad" if each.final else None)),
            "no result" if each.final else "tried again",
            each.reason or NONE,
        ]
        for each in timeline.failures
    ]
    failures = table("failures", columns, lines, hint="filter by words") if lines else note("None.")
    return [
        card("Jobs in time", drawn, _job_words(timeline)),
        *_hours_card(run, timeline),
        card("Failures", failures),
    ]


def _timeline(timeline: Timeline) -> Node:
    ends = [each.start if each.end is None else each.end for each in timeline.bars]
    running = any(each.end is None for each in timeline.bars)
    length = max(ends, default=0.0)
    whole = (1.06 * length if running else length) or 1.0  # what runs has no end yet
    scale, unit = (1.0, "s") if whole < 120 else (60.0, "min") if whole < 7200 else (3600.0, "h")
    spans: list[Span] = []
    busy: dict[str, list[float]] = {}  # of each lane: when each of its rows is free again
    for bar in timeline.bars:
        for lane in bar.lanes:
            free = busy.setdefault(lane, [])
            sub = next((at for at, end in enumerate(free) if end <= bar.start + 1e-9), len(free))
            free[sub : sub + 1] = [float("inf") if bar.end is None else bar.end]
            spans.append(_span(bar, lane, sub, whole, scale))
    drawn = timeline_chart(
        spans,
        Axis(unit, (0.0, whole / scale), tell=figure),
        f"{len(timeline.bars)} attempts of jobs on {len(busy)} devices over {_clock(length)}: arrow keys walk "
        "through them",
    )
    states = {each.state for each in timeline.bars}
    phases = dict.fromkeys(each.phase for each in timeline.bars)
    keys = [
        *(key(_PHASES.get(phase, _PHASES[""]), None, phase or "other") for phase in phases),
        element("span", "outlined: failed", kind="key bad") if "failed" in states else None,
        element("span", "pale: stopped, and done again", kind="key") if "requeued" in states else None,
        element("span", "dashed: not ended when this page was made", kind="key") if running else None,
    ]
    return element("div", drawn, element("div", *keys, kind="legend"))


def _span(bar: Bar, lane: str, sub: int, whole: float, scale: float) -> Span:
    tint = _PHASES.get(bar.phase, _PHASES[""])
    took = (
        f"since {_clock(bar.start)}"
        if bar.end is None
        else f"{_clock(bar.start)} to {_clock(bar.end)} ({_clock(bar.end - bar.start)})"
    )
    return Span(
        lane=lane,
        sub=sub,
        start=bar.start / scale,
        end=(whole if bar.end is None else bar.end) / scale,
        colour=tint,
        tip=(bar.job, f"{bar.phase or 'job'} on {', '.join(bar.lanes)}: {bar.state}", took),
        opacity=0.45 if bar.state == "requeued" else 0.25 if bar.end is None else 1.0,
        outline="var(--bad)" if bar.state == "failed" else tint if bar.end is None else None,
        broken=bar.end is None,
    )


def _clock(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.{0 if seconds == 0 or seconds >= 10 else 1}f} s"
    return f"{seconds / 60:.1f} min" if seconds < 5400 else f"{seconds / 3600:.2f} h"


def _hours_card(run: RunReport, timeline: Timeline) -> Iterator[Node]:
    """What each algorithm took, by phase: of GPUs, or of jobs where there were none."""
    if not timeline.hours:
        return
    took = {phase for hours in timeline.hours.values() for phase in hours}
    phases = [phase for phase in ("collect", "train", "evaluate", "other") if phase in took]
    columns = [Column("algorithm", kind="name"), *(Column(each, kind="num") for each in (*phases, "all"))]
    lines = [
        [
            cell(algorithm, named(run, algorithm)),
            *(cell(hours.get(phase), _hours(hours.get(phase))) for phase in phases),
            cell(sum(hours.values()), element("b", _hours(sum(hours.values())))),
        ]
        for algorithm, hours in timeline.hours.items()
    ]
    yield card(
        f"What each took, in {_hours_unit(timeline)}",
        table("what each took", columns, lines, sort=len(columns) - 1, descending=True),
        note("All attempts count, those too that failed or were stopped."),
    )


def _hours_unit(timeline: Timeline) -> str:
    return "GPU-hours" if timeline.gpu_hours else "hours of jobs on CPUs"


def _hours(value: float | None) -> str:
    if not is_known(value):
        return NONE
    return axis(float(f"{value:.5g}")) if value < 0.001 else f"{value:#.2g}" if value < 0.01 else figure(value)


def _job_words(timeline: Timeline) -> Node:
    states = ("done", "running", "waiting", "failed", "cancelled")
    jobs = ", ".join(f"{timeline.counts[each]} {each}" for each in states if timeline.counts.get(each))
    hours = ", ".join(f"{phase} {figure(each)}" for phase, each in (timeline.gpu_hours or {}).items())
    return note(f"Jobs: {jobs or 'none'}.{f' GPU-hours: {hours}.' if timeline.gpu_hours else ''}")


def cost_of(timeline: Timeline) -> Iterator[Node]:
    """What each algorithm took, in a sentence."""
    hours = sorted(((name, sum(each.values())) for name, each in timeline.hours.items()), key=lambda pair: -pair[1])
    if hours:
        more = f", and {len(hours) - 8} more" if len(hours) > 8 else ""
        words = listed([f"{name} {_hours(all_of_it)}" for name, all_of_it in hours[:8]])
        yield element("p", f"{_hours_unit(timeline)}: {words}{more}; by phase: see ", link("#/jobs", "Jobs"), ".")


def lost_of(timeline: Timeline) -> Iterator[Node]:
    """Which jobs have no result, in a sentence."""
    lost = [each for each in timeline.failures if each.final]
    if not lost:
        return
    failed = [each for each in lost if each.kind != "cancelled"]
    words = [f"{each.job} ({each.kind}{f': {each.reason}' if each.reason else ''})" for each in failed[:3]]
    words += [f"{len(failed) - 3} more failed"] if len(failed) > 3 else []
    cancelled = len(lost) - len(failed)
    words += [f"{cancelled} {'was' if cancelled == 1 else 'were'} cancelled"] if cancelled else []
    start = f"{counted(len(lost), 'job')} {'has' if len(lost) == 1 else 'have'} no result: {'; '.join(words)}; see "
    yield element("p", start, link("#/jobs", "Jobs"), ".", kind="bad")
