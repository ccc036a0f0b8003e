"""Reads a run folder for its page: each model's rows as arrays, its sketched spectra, and what failed and why.

Knows the files of a run (``ESDDirectory``) and their columns. Decides nothing about the page; never writes. A file that
can't be read is listed among the failures and spoils nothing else.
"""

from __future__ import annotations

import json
import logging
import re
from collections import Counter
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpuherd.errors import QueueUnreadable, UsageError, printable
from gpuherd.esd.folder import ESDDirectory, OnProgress, failure_records, run_record
from gpuherd.esd.results import ModelTable, read_tables
from gpuherd.esd.selection import stored_share
from gpuherd.jobs.attempts.failures import with_code
from gpuherd.jobs.queue.reader import QueueReader, notes_on_gpus

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

logger = logging.getLogger(__name__)

NO_RESULT = "unreadable result"
_MOST_RECORDS = 100_000  # of failures.jsonl: nobody reads more
MOST_REASON = 300  # characters
# Absolute paths, and those below a home folder. Within quotes a path may have spaces. What follows a letter, a digit, a
# dot or another slash is part of something else: org/model, 3/4, https://host/page.
_QUOTED = re.compile(r"(?P<quote>['\"])(?:file://|~)?/[^'\"\n]*?(?P<name>[^/'\"\n]+)/?(?P=quote)")
_BARE = re.compile(r"(?<![\w./~-])(?:file://|~)?/(?:[^\s/'\"<>:;,()]+/)*(?P<name>[^\s/'\"<>:;,()]+)/?")


@dataclass(frozen=True, slots=True)
class Failure:
    """A model without a result, or a row of a list that was refused: of what kind, and why in one sentence."""

    model: str
    kind: str
    reason: str


@dataclass(frozen=True, slots=True, eq=False)
class RunResults:
    """A run folder: its models in the order of their ids, what failed, and run.json where there is one.

    ``unfinished`` counts the jobs that are neither done nor failed, by their state; ``gpus`` is what must be known of
    GPUs.
    """

    directory: ESDDirectory
    models: tuple[ModelTable, ...]
    failures: tuple[Failure, ...]
    record: Mapping[str, Any] = field(default_factory=dict)
    unfinished: Mapping[str, int] = field(default_factory=dict)
    gpus: tuple[str, ...] = ()


def read_results(root: Path, on_progress: OnProgress | None = None) -> RunResults:
    """Reads a run folder.

    Args:
        on_progress: called with how many models are read, and how many there are.

    Raises:
        UsageError: this is no run folder, or no model has a result yet.
    """
    directory = ESDDirectory(root)
    if not directory.root.is_dir():
        raise UsageError(f"there is no folder {root}; name the --output-dir of a gpuherd esd run")
    paths = directory.stats_files()
    models: list[ModelTable] = []
    unreadable: list[Failure] = []
    for number, model in enumerate(read_tables(directory, paths)):
        if isinstance(model, ModelTable):
            models.append(replace(model, covered=stored_share(directory.coverage / f"{model.stem}.csv")))
        else:
            problem = model.problem.replace(str(model.path), f"stats/{model.path.name}")
            logger.warning("left out: %s", problem)
            unreadable.append(Failure(model.path.stem, NO_RESULT, problem))
        if on_progress is not None:
            on_progress(number + 1, len(paths))
    done = {model.model_id for model in models}
    jobs = _jobs(directory)
    failures = (*unreadable, *_failures(directory, done, jobs))
    if not models and not failures and not jobs.unfinished:
        raise UsageError(
            f"{directory.root} holds no results, neither stats/*.csv nor a run.json; name the output folder of a "
            "gpuherd esd, generate, posttrain or train"
        )
    models.sort(key=lambda model: (model.model_id.casefold(), model.stem))
    gpus = tuple(notes_on_gpus(directory.queue))
    return RunResults(directory, tuple(models), failures, _run_record(directory), jobs.unfinished, gpus)


def _failures(directory: ESDDirectory, done: set[str], jobs: _Jobs) -> list[Failure]:
    """What failures.jsonl and the queue say of models that have no result: the last word on each. A job that the queue
    knows has failed only if the queue says so: an attempt that failed can be followed by another.
    """
    last: dict[str, Failure] = {}
    recorded: set[str] = set()
    for record in failure_records(directory, _MOST_RECORDS):
        title, job = str(record.get("title") or record.get("job") or "?"), record.get("job")
        recorded.add(str(job))
        if title not in done and job not in jobs.not_failed:
            code = record.get("exit_code")
            reason = with_code(code if isinstance(code, int) else None, str(record.get("reason") or ""))
            last[title] = Failure(title, str(record.get("class") or "failed"), reason)
    for job, failure in jobs.failed.items():
        if job not in recorded and failure.model not in done:
            last[failure.model] = failure
    return list(last.values())


@dataclass(frozen=True, slots=True)
class _Jobs:
    """The queue's jobs by name: those that failed or were cancelled, and all others; how many of these are not done, by
    their state.
    """

    failed: Mapping[str, Failure] = field(default_factory=dict)
    not_failed: frozenset[str] = frozenset()
    unfinished: Mapping[str, int] = field(default_factory=dict)


def _jobs(directory: ESDDirectory) -> _Jobs:
    if not directory.queue.exists():
        return _Jobs()
    try:
        with closing(QueueReader(directory.queue)) as reader:
            rows = reader.rows("SELECT name, state, reason, spec FROM jobs")
    except (QueueUnreadable, UsageError) as problem:
        logger.warning("%s", problem)
        return _Jobs()
    failed = {
        row["name"]: Failure(_title(row["spec"]) or row["name"], row["state"], row["reason"] or "")
        for row in rows
        if row["state"] in ("failed", "cancelled")
    }
    others = [(row["name"], row["state"]) for row in rows if row["name"] not in failed]
    waiting = Counter(state for _, state in others if state != "done")
    return _Jobs(failed, frozenset(name for name, _ in others), dict(sorted(waiting.items())))


def _title(spec: str) -> str | None:
    """The model of a job, as the queue stores its job."""
    try:
        title = json.loads(spec).get("title")
    except (ValueError, AttributeError):
        return None
    return title if isinstance(title, str) else None


def _run_record(directory: ESDDirectory) -> dict[str, Any]:
    try:
        return run_record(directory)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as problem:
        logger.warning("%s can't be read: %s", directory.run_json, problem)
        return {}


def short_reason(reason: str) -> str:
    """A reason as a page shows it, which people send around: printable, no folders of this machine (each path is the
    name of its file), and at most MOST_REASON characters.

    >>> short_reason("/home/me/models/tuned/model.safetensors is truncated: [Errno 2] '/data/my disk/x.bin'")
    "model.safetensors is truncated: [Errno 2] 'x.bin'"
    >>> short_reason("no org/model at https://host.org/org/model; 3/4 of ~/cache/x: gone")
    'no org/model at https://host.org/org/model; 3/4 of x: gone'
    """
    short = _BARE.sub(lambda path: path["name"], _QUOTED.sub(lambda path: repr(path["name"]), reason))
    return printable(short if len(short) <= MOST_REASON else f"{short[: MOST_REASON - 1]}…")
