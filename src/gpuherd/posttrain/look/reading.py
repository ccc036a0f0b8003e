"""A run of ``gpuherd posttrain``, or the output of ``gpuherd train``, read for looking at it. Never writes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from gpuherd.errors import QueueUnreadable, UsageError
from gpuherd.jobs.job import JobState
from gpuherd.jobs.queue.reader import SIMULATED_GPUS, notes_on_gpus
from gpuherd.posttrain.evaluation.answered import BadAnswers, read_answers
from gpuherd.posttrain.evaluation.found import Found, find_results
from gpuherd.posttrain.evaluation.gathering import Gathered, gathered
from gpuherd.posttrain.learning.folder import TrainDirectory
from gpuherd.posttrain.look.jobs_seen import read_timeline
from gpuherd.posttrain.look.kinds import Made, json_object, made_by
from gpuherd.posttrain.look.shown import Samples, Shown, Timeline
from gpuherd.posttrain.look.trainings import find_trainings
from gpuherd.posttrain.rounds.folder import RoundsDirectory

SHOWN_PROBLEMS = 40  # of an evaluation
_MOST_SETTINGS = 400
_JOBS = "#/jobs"
_WITHOUT_RESULT = (JobState.FAILED, JobState.CANCELLED)
_UNFINISHED = (JobState.RUNNING, JobState.WAITING)
_TOLD = ("reward", "correct", "accuracy")  # of a training's last figures, and of its evaluations
_STATES = (JobState.DONE, *_UNFINISHED, *_WITHOUT_RESULT)


def read_run(folder: Path, on_progress: Callable[[int, int], None] | None = None) -> Shown:
    """All that the page shows of it.

    Args:
        on_progress: told how many results have been read, of how many.

    Raises UsageError where it is no such folder, or nothing is in it yet.
    """
    made = made_by(folder)
    if made is None:
        raise UsageError(f"{folder} is no run of {Made.ROUNDS.value} and no output of {Made.TRAINING.value}")
    place = RoundsDirectory(folder)
    found, damaged = find_results(place.results if made is Made.ROUNDS else folder)
    tables = gathered(found, damaged, on_progress)
    trainings, unread = find_trainings(place.models if made is Made.ROUNDS else folder)
    timeline, queue_note = _timeline(place, {row.about.algorithm for row in tables.rows})
    if not tables.rows and not trainings and (timeline is None or not timeline.bars):
        raise UsageError(f"{folder}: nothing is finished there yet, and no training has logged a step")
    record = json_object(place.run_json)
    done = json_object(TrainDirectory(folder).done) if made is Made.TRAINING else {}
    samples, cut = _samples(found, tables)
    seeds = {seed for row in tables.rows for seed in row.seeds}
    own = dict.fromkeys(note for each in found for note in each.evaluation.notes)
    return Shown(
        title=str(record.get("experiment") or record.get("name") or folder.absolute().name),
        facts=_facts(made, record, _ended(done), tables, len(trainings), len(seeds), timeline),
        settings=_settings(made, folder, record),
        gathered=tables,
        trainings=trainings,
        timeline=timeline,
        samples=samples,
        notes=[
            *_gpus(made, place, record),
            *_unfinished(made, done, timeline),
            *tables.damaged,
            *unread,
            *queue_note,
            *cut,
            *own,
        ],
    )


def _timeline(place: RoundsDirectory, algorithms: set[str]) -> tuple[Timeline | None, list[str]]:
    if not place.queue.exists():
        return None, []
    try:
        found = read_timeline(place.queue, algorithms)
        bars = len(found.bars)
        told = (
            [f"{found.left_out} later attempts of jobs are not drawn: the first {bars} are"] if found.left_out else []
        )
        return found, told
    except (QueueUnreadable, UsageError) as problem:
        return None, [str(problem)]


def _samples(found: list[Found], tables: Gathered) -> tuple[list[Samples], list[str]]:
    """The first problems of every policy at every eta, of its first seed; and what can't be read."""
    rows = {(row.about, row.eta): row for row in tables.rows}
    read, told = [], []
    for each in found:
        for point in each.evaluation.points:
            row = rows.get((each.evaluation.about, point.eta))
            if row is None:
                continue  # another seed of a row that is there
            try:
                some = list(islice(read_answers(each.folder / point.answers), SHOWN_PROBLEMS))
            except BadAnswers as problem:
                told.append(str(problem))
                continue
            read.append(Samples(row, each.evaluation.about.seed, some))
    return read, told


def _facts(
    made: Made,
    record: Mapping[str, Any],
    ended: Sequence[tuple[str, str, str]],
    tables: Gathered,
    trainings: int,
    seeds: int,
    timeline: Timeline | None,
) -> list[tuple[str, str, str]]:
    """What stands at the head: (what, value, the view that tells more or nothing)."""
    facts = [("", made.value, ""), *ended]
    if policies := len(tables.summary):
        facts.append((f"{_counted(policies, 'policy', 'policies')} evaluated", f"{policies:,}", ""))
    if seeds > 1:
        facts.append(("seeds", str(seeds), ""))
    if trainings and made is Made.ROUNDS:
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


def _gpus(made: Made, place: RoundsDirectory, record: Mapping[str, Any]) -> list[str]:
    if made is Made.TRAINING and record.get("simulated") is True:
        return [SIMULATED_GPUS]
    return notes_on_gpus(place.queue)


def _unfinished(made: Made, done: Mapping[str, Any], timeline: Timeline | None) -> list[str]:
    """A sentence where not all has ended: what stands here is of what has."""
    if made is Made.TRAINING and not done:
        return ["This training was not finished when this page was made."]
    counts = {} if timeline is None else timeline.counts
    states = ", ".join(f"{counts[state]:,} {state}" for state in _UNFINISHED if counts.get(state))
    return [f"This run was not finished when this page was made: {states}."] if states else []


def _settings(made: Made, folder: Path, record: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What was asked for, by dotted keys."""
    told: Any = record.get("settings", {})
    if made is Made.TRAINING:
        from gpuherd.posttrain.config.yaml_strict import read_yaml

        place = TrainDirectory(folder)
        try:
            told = read_yaml(place.config)
        except (UsageError, OSError):
            told = {}
        told = {**told, "ended with": json_object(place.done)}
    command = record.get("command")
    pairs = [("command", " ".join(map(str, command)))] if isinstance(command, list) else []
    pairs += [(key, value) for key, value in _flat(told, "") if value not in ("", "None")]
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
