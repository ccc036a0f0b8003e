"""What the page of a run of ``gpuherd posttrain`` or ``gpuherd train`` shows, read from its folder. Never writes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from math import isfinite
from pathlib import Path
from typing import Any

from gpuherd.errors import QueueUnreadable, UsageError
from gpuherd.jobs.job import JobState
from gpuherd.jobs.queue.reader import SIMULATED_GPUS, notes_on_gpus
from gpuherd.posttrain.engine.curves import FILE, read_curves
from gpuherd.posttrain.eval.answers import AnsweredProblem, BadAnswers, read_answers
from gpuherd.posttrain.eval.tables import Found, Gathered, Row, find_results, gathered
from gpuherd.posttrain.report import OutputKind, json_object, output_kind
from gpuherd.posttrain.report.jobs import Timeline, read_timeline
from gpuherd.posttrain.runs.folder import OutputDirectory

Points = Sequence[tuple[float, float]]  # (step, value), by step


@dataclass(frozen=True, slots=True)
class Training:
    """The figures of one training by step.

    Attributes:
        name: its folder, as people call it.
        steps: how many were logged.
        series: by name of the figure; long ones thinned to means of neighbours.
    """

    name: str
    steps: int
    series: Mapping[str, Points]


@dataclass(frozen=True, slots=True)
class Samples:
    """The first problems of a policy's evaluation with their completions."""

    row: Row
    seed: int
    answered: Sequence[AnsweredProblem]


@dataclass(frozen=True, slots=True)
class RunReport:
    """A run as its page shows it.

    Attributes:
        title: the run's name.
        facts: what stands at the head: (what, value, the view that tells more or nothing).
        settings: what was asked for: (key, value), in order.
        gathered: all results in tables.
        trainings: in the order of their names.
        timeline: None of a run without a queue.
        samples: a policy at an eta each.
        notes: what a reader must know first.
    """

    title: str
    facts: Sequence[tuple[str, str, str]]
    settings: Sequence[tuple[str, str]]
    gathered: Gathered
    trainings: Sequence[Training] = ()
    timeline: Timeline | None = None
    samples: Sequence[Samples] = ()
    notes: Sequence[str] = ()


MOST_POINTS = 300  # of a curve on a screen
MOST_TRAININGS = 400
MOST_IN_ALL = 300_000  # points: 3 MB of the page


def find_trainings(root: Path, most_points: int = MOST_IN_ALL) -> tuple[list[Training], list[str]]:
    """The trainings that have logged something, by their names, with about so many points in all at most; and a
    sentence for each that can't be read or has no room."""
    found, notes = [], []
    paths = sorted(root.rglob(FILE))
    if len(paths) > MOST_TRAININGS:
        notes.append(f"{len(paths)} trainings: the page has the curves of the first {MOST_TRAININGS}")
    for path in paths[:MOST_TRAININGS]:
        try:
            lines = read_curves(path.parent)
        except (UsageError, OSError) as problem:
            notes.append(str(problem))
            continue
        if lines:
            found.append(Training(_name(path.parent, root), len(lines), series_of(lines)))
    return _within(found, most_points), notes


def _within(trainings: Sequence[Training], most: int) -> list[Training]:
    """The same with at most about so many points in all: of many trainings each curve is coarser."""
    lengths = [len(points) for each in trainings for points in each.series.values()]
    if sum(lengths) <= most:
        return list(trainings)
    fewer = max(2, max(lengths) * most // sum(lengths))
    return [
        replace(each, series={name: thinned(some, fewer) for name, some in each.series.items()}) for each in trainings
    ]


def series_of(lines: Sequence[Mapping[str, Any]]) -> dict[str, Points]:
    """Each figure's points; what is no finite number is left out."""
    found: dict[str, list[tuple[float, float]]] = {}
    for line in lines:
        for name, value in line.items():
            step, number = _number(line["step"]), _number(value)
            if name != "step" and step is not None and number is not None:
                found.setdefault(name, []).append((step, number))
    return {name: thinned(points) for name, points in found.items()}


def _number(value: object) -> float | None:
    """A finite number; None for anything else, whole numbers that no float can hold among them."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if isfinite(value) else None
    except OverflowError:
        return None


def thinned(points: Points, most: int = MOST_POINTS) -> Points:
    """At most so many points: the means of neighbours, equally many in each but the last.

    >>> thinned([(1, 2.0), (2, 4.0), (3, 9.0)], most=2)
    [(1.5, 3.0), (3.0, 9.0)]
    """
    if len(points) <= most:
        return list(points)
    size = -(-len(points) // most)
    parts = [points[start : start + size] for start in range(0, len(points), size)]
    return [(sum(x for x, _ in part) / len(part), sum(y for _, y in part) / len(part)) for part in parts]


def _name(folder: Path, root: Path) -> str:
    """The folder below the root, without the room that all are in."""
    parts = folder.relative_to(root).parts
    return "/".join(parts[1:] if parts[:1] == ("models",) else parts) or root.name


SHOWN_PROBLEMS = 40  # of an evaluation
_MOST_SETTINGS = 400
_JOBS = "#/jobs"
_WITHOUT_RESULT = (JobState.FAILED, JobState.CANCELLED)
_UNFINISHED = (JobState.RUNNING, JobState.WAITING)
_TOLD = ("reward", "correct", "accuracy")  # of a training's last figures, and of its evaluations
_STATES = (JobState.DONE, *_UNFINISHED, *_WITHOUT_RESULT)


def read_run(folder: Path, on_progress: Callable[[int, int], None] | None = None) -> RunReport:
    """All that the page shows of it.

    Args:
        on_progress: called with how many results have been read, of how many.

    Raises UsageError where it is no such folder, or nothing is in it yet.
    """
    kind = output_kind(folder)
    if kind is None:
        raise UsageError(
            f"{folder} is no run of {OutputKind.ROUNDS.value} and no output of {OutputKind.TRAINING.value}"
        )
    place = kind.directory(folder)
    found, damaged = find_results(place.results)
    tables = gathered(found, damaged, on_progress)
    trainings, unread = find_trainings(place.trainings)
    timeline, queue_note = _timeline(place, {row.about.algorithm for row in tables.rows})
    if not tables.rows and not trainings and (timeline is None or not timeline.bars):
        raise UsageError(f"{folder}: nothing is finished there yet, and no training has logged a step")
    record = json_object(place.run_json)
    done = json_object(place.done) if kind is OutputKind.TRAINING else {}
    samples, cut = _samples(found, tables)
    seeds = {seed for row in tables.rows for seed in row.seeds}
    own = dict.fromkeys(note for each in found for note in each.evaluation.notes)
    return RunReport(
        title=str(record.get("experiment") or record.get("name") or folder.absolute().name),
        facts=_facts(kind, record, _ended(done), tables, len(trainings), len(seeds), timeline),
        settings=_settings(place, record, done),
        gathered=tables,
        trainings=trainings,
        timeline=timeline,
        samples=samples,
        notes=[
            *_gpus(kind, place, record),
            *_unfinished(kind, done, timeline),
            *tables.damaged,
            *unread,
            *queue_note,
            *cut,
            *own,
        ],
    )


def _timeline(place: OutputDirectory, algorithms: set[str]) -> tuple[Timeline | None, list[str]]:
    if not place.queue.exists():
        return None, []
    try:
        found = read_timeline(place.queue, algorithms)
        bars = len(found.bars)
        notes = (
            [f"{found.left_out} later attempts of jobs are not drawn: the first {bars} are"] if found.left_out else []
        )
        return found, notes
    except (QueueUnreadable, UsageError) as problem:
        return None, [str(problem)]


def _samples(found: list[Found], tables: Gathered) -> tuple[list[Samples], list[str]]:
    """The first problems of every policy at every eta, of its first seed; and what can't be read."""
    rows = {(row.about, row.eta): row for row in tables.rows}
    read, notes = [], []
    for each in found:
        for point in each.evaluation.points:
            row = rows.get((each.evaluation.about, point.eta))
            if row is None:
                continue  # another seed of a row that is there
            try:
                some = list(islice(read_answers(each.folder / point.answers), SHOWN_PROBLEMS))
            except BadAnswers as problem:
                notes.append(str(problem))
                continue
            read.append(Samples(row, each.evaluation.about.seed, some))
    return read, notes


def _facts(
    kind: OutputKind,
    record: Mapping[str, Any],
    ended: Sequence[tuple[str, str, str]],
    tables: Gathered,
    trainings: int,
    seeds: int,
    timeline: Timeline | None,
) -> list[tuple[str, str, str]]:
    """What stands at the head: (what, value, the view that tells more or nothing)."""
    facts = [("", kind.value, ""), *ended]
    if policies := len(tables.summary):
        facts.append((f"{_counted(policies, 'policy', 'policies')} evaluated", f"{policies:,}", ""))
    if seeds > 1:
        facts.append(("seeds", str(seeds), ""))
    if trainings and kind is OutputKind.ROUNDS:
        facts.append((_counted(trainings, "training", "trainings"), f"{trainings:,}", ""))
    if timeline is not None:
        facts += [
            (f"{_counted(count, 'job', 'jobs')} {state}", f"{count:,}", _JOBS if state in _WITHOUT_RESULT else "")
            for state in _STATES
            if (count := timeline.counts.get(state, 0))
        ]
        if timeline.gpu_hours is not None:
            facts.append(("GPU-hours", f"{sum(timeline.gpu_hours.values()):.3g}", ""))
    if isinstance(started := record.get("started"), str):
        facts.append(("started", started[:16].replace("T", " ") + (" UTC" if started.endswith("+00:00") else ""), ""))
    return facts


def _counted(count: int, one: str, more: str) -> str:
    return one if count == 1 else more


def _ended(done: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """How a training ended: by what, after how many steps, with which figures that matter."""
    facts = [("", str(done["algorithm"]), "")] if isinstance(done.get("algorithm"), str) else []
    if isinstance(steps := done.get("steps"), int):
        facts.append((_counted(steps, "step", "steps"), f"{steps:,}", ""))
    last = done.get("last")
    for name, value in last.items() if isinstance(last, Mapping) else ():
        if str(name).rpartition("/")[2] in _TOLD and isinstance(value, int | float):
            facts.append((f"{name} at the end", f"{value:.4g}", ""))
    return facts


def _gpus(kind: OutputKind, place: OutputDirectory, record: Mapping[str, Any]) -> list[str]:
    if kind is OutputKind.TRAINING and record.get("simulated") is True:
        return [SIMULATED_GPUS]
    return notes_on_gpus(place.queue)


def _unfinished(kind: OutputKind, done: Mapping[str, Any], timeline: Timeline | None) -> list[str]:
    """A sentence where not all has ended: what stands here is of what has."""
    if kind is OutputKind.TRAINING and not done:
        return ["This training was not finished when this page was made."]
    counts = {} if timeline is None else timeline.counts
    states = ", ".join(f"{counts[state]:,} {state}" for state in _UNFINISHED if counts.get(state))
    return [f"This run was not finished when this page was made: {states}."] if states else []


def _settings(place: OutputDirectory, record: Mapping[str, Any], done: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What was asked for, by dotted keys."""
    settings = place.shown_settings(record)
    if done:
        settings = {**settings, "ended with": done}
    command = record.get("command")
    pairs = [("command", " ".join(map(str, command)))] if isinstance(command, list) else []
    pairs += [(key, value) for key, value in _flat(settings, "") if value not in ("", "None")]
    return pairs[:_MOST_SETTINGS]


def _flat(value: Any, key: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        for name, each in value.items():
            yield from _flat(each, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list) and any(isinstance(each, Mapping) for each in value):
        for number, each in enumerate(value):
            yield from _flat(each, f"{key}[{number}]")
    else:
        yield key, ", ".join(map(str, value)) if isinstance(value, list) else str(value)
