"""The view of the jobs of a run, declared; and what they cost and what was lost, in sentences. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from gpuherd.posttrain.report.figures import named
from gpuherd.posttrain.report.reading import RunReport
from gpuherd.posttrain.report.timeline import Bar, Timeline
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
    phases = [
        phase
        for phase in ("collect", "train", "evaluate", "other")
        if any(phase in each for each in timeline.hours.values())
    ]
    columns = [
        Column("algorithm", kind="name"),
        *(Column(each, kind="num") for each in phases),
        Column("all", kind="num"),
    ]
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
