"""The state of a dispatcher, in one small file for ``status`` and ``top``; and where its attempts are."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpuherd.engines.registry import title
from gpuherd.jobs.attempts.failures import clean
from gpuherd.jobs.records import Handed

if TYPE_CHECKING:
    from gpuherd.jobs.scheduler.types import GpuView


# How a dispatcher stands now, told in one small file for those who look on: ``status`` and ``top``.
#
# The queue knows what was done; why a job still waits is known only to the dispatcher, from its last decision. It
# tells that here. The file is no record: nothing depends on it, it is replaced as a whole and without sync, and it
# means nothing once its dispatcher is gone. It is written at most once a second, and only when something has changed.

_MOST_BYTES = 4_000_000
_EVERY_S = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuStanding:
    """A GPU that the run may use. ``busy`` says why it is not free; ``ours``: a job of this queue runs on it;
    ``total_mb`` is None while the driver can't read it."""

    uuid: str
    label: str
    busy: str | None = None
    ours: bool = False
    total_mb: int | None = None

    @staticmethod
    def of(view: GpuView) -> GpuStanding:
        """What is told of a GPU with this verdict on it."""
        gpu = view.gpu
        total_mb = None if gpu.problem is not None else gpu.total_mb
        return GpuStanding(uuid=gpu.uuid, label=gpu.label, busy=view.busy, ours=view.ours, total_mb=total_mb)


@dataclass(frozen=True, kw_only=True, slots=True)
class Standing:
    """What a dispatcher tells of itself.

    Attributes:
        pid: the dispatcher's.
        mode: ``working``, ``draining`` or ``stopping``.
        closed: a sentence why nothing is started now (quiet hours, a full disk), or None.
        waits: why a job waits, by the number of the job in the queue; those that the last decision looked at.
        gpus: the GPUs that it may use, as it last saw them; () on the CPU.
        at_once: how many jobs can run side by side, None when it does not say.
        settings: the options that ``gpuherd set`` can change, as they are now.
        handed: of attempts that wait in an engine beyond this machine what it says why, in its own words, by the number
            of the attempt; those of which it says something.
        away: a sentence on an engine that does not answer at the moment, and since when; None while it does.
    """

    pid: int
    mode: str = "working"
    closed: str | None = None
    waits: Mapping[int, str] = field(default_factory=dict)
    gpus: tuple[GpuStanding, ...] = ()
    at_once: int | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    handed: Mapping[int, str] = field(default_factory=dict)
    away: str | None = None

    def most_mb(self, gpus: int) -> int | None:
        """The most memory that a job could find on each of so many of these GPUs, None where there are fewer; MIG
        instances, with a colon in their labels, are for jobs on one."""
        able = [gpu for gpu in self.gpus if gpus == 1 or ":" not in gpu.label]
        sizes = sorted((gpu.total_mb for gpu in able if gpu.total_mb is not None), reverse=True)
        return sizes[gpus - 1] if 1 <= gpus <= len(sizes) else None


class StandingFile:
    """Writes the file for a dispatcher; a file that can't be written is not worth a word."""

    def __init__(self, path: Path):
        self._path = path
        self._told: Standing | None = None
        self._touched = False
        self._next = 0.0

    def touch(self) -> None:
        """Something may have changed. Cheap: to be called at every decision."""
        self._touched = True

    def keep_time(self, now: float, standing: Callable[[], Standing]) -> None:
        """Tells what ``standing`` gives, if it is time and that has changed. ``now`` is ``clock.mono``."""
        if not self._touched or now < self._next:
            return
        self._touched, self._next = False, now + _EVERY_S
        wanted = standing()
        if wanted == self._told:
            return
        temporary = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        try:
            temporary.write_text(json.dumps(asdict(wanted)), encoding="utf-8", errors="backslashreplace")
            temporary.replace(self._path)
            self._told = wanted
        except OSError:
            with suppress(OSError):
                temporary.unlink()  # half of it, on a full disk

    @property
    def due_at(self) -> float | None:
        """When ``keep_time`` has something to do, None for never."""
        return self._next if self._touched else None

    def remove(self) -> None:
        """Takes the file away: the dispatcher has ended in order."""
        with suppress(OSError):
            self._path.unlink()


def read(path: Path, pid: int) -> Standing | None:
    """What the dispatcher with this pid last told, or None when it has told nothing (yet), or the file is no good."""
    try:
        with path.open("rb") as file:
            told = json.loads(file.read(_MOST_BYTES))
        if told["pid"] != pid:
            return None
        return Standing(
            pid=pid,
            mode=str(told["mode"]),
            closed=None if told["closed"] is None else str(told["closed"]),
            waits={int(job): str(reason) for job, reason in told["waits"].items()},
            gpus=tuple(_gpu(each) for each in told["gpus"]),
            at_once=None if told.get("at_once") is None else int(told["at_once"]),
            settings=dict(told["settings"]),
            handed={int(attempt): str(reason) for attempt, reason in told.get("handed", {}).items()},
            away=None if told.get("away") is None else str(told["away"]),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def _gpu(told: Mapping[str, Any]) -> GpuStanding:
    busy, total_mb = told["busy"], told.get("total_mb")
    return GpuStanding(
        uuid=str(told["uuid"]),
        label=str(told["label"]),
        busy=None if busy is None else str(busy),
        ours=bool(told["ours"]),
        total_mb=None if total_mb is None else int(total_mb),
    )


# Where an attempt is that an engine beyond this machine has, in words for people. Pure.


@dataclass(frozen=True, slots=True)
class InEngine:
    """How many running jobs an engine beyond this machine has, and how many of them have not begun there."""

    engine: str
    jobs: int
    in_line: int


def engine_name(engine: str) -> str:
    """The engine as people write it.

    >>> engine_name("slurm"), engine_name("ray")
    ('SLURM', 'Ray')
    """
    return title(engine) or clean(engine)


def why_in_line(handed: Handed, attempt: int, standing: Standing | None) -> str:
    """Why an attempt that was handed over has not begun, as a sentence.

    >>> why_in_line(Handed("slurm", "b1", 0, "17_0"), 4, Standing(pid=1, handed={4: "Resources"}))
    'waits in SLURM: Resources'
    """
    there = engine_name(handed.engine)
    if handed.handle is None:
        return f"is being handed to {there}"
    reason = None if standing is None else standing.handed.get(attempt)
    return f"waits in {there}" + (f": {clean(reason)}" if reason else "")


def there(in_engine: InEngine) -> str:
    """What an engine has, as a part of a sentence.

    >>> there(InEngine("slurm", 12, 5)), there(InEngine("ray", 1, 1))
    ('12 jobs in SLURM, 5 of them in its queue', '1 job in Ray, in its queue')
    """
    if in_engine.jobs == 1:
        return f"1 job in {engine_name(in_engine.engine)}" + (", in its queue" if in_engine.in_line else "")
    of_them = f", {in_engine.in_line} of them in its queue" if in_engine.in_line else ""
    return f"{in_engine.jobs} jobs in {engine_name(in_engine.engine)}{of_them}"
