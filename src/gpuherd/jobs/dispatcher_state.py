"""The state of a dispatcher in one small file, for ``status`` and ``top``.

The queue records what was done; why a job still waits is known to the dispatcher alone, from its last decision, and it
writes that here. The file is no record: nothing depends on it, it is replaced as a whole and without sync, and it means
nothing once its dispatcher is gone. It is written at most once a second, and only when something has changed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpuherd.atomic import without_waiting
from gpuherd.engines.registry import title
from gpuherd.errors import clean

if TYPE_CHECKING:
    from gpuherd.jobs.scheduler.types import GpuView

_MOST_BYTES = 4_000_000
_EVERY_S = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuState:
    """A GPU that the run may use. ``busy`` is the reason why it is not free; ``ours``: a job of this queue runs on it;
    ``total_mb`` is None while the driver can't read it; ``kept``: only another user's turn keeps it from being free."""

    uuid: str
    label: str
    busy: str | None = None
    ours: bool = False
    total_mb: int | None = None
    kept: bool = False

    @staticmethod
    def of(view: GpuView) -> GpuState:
        """From the dispatcher's view of a GPU."""
        gpu = view.gpu
        total_mb = None if gpu.problem is not None else gpu.total_mb
        return GpuState(
            uuid=gpu.uuid, label=gpu.label, busy=view.busy, ours=view.ours, total_mb=total_mb, kept=view.kept
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class DispatcherState:
    """The state of a dispatcher.

    Attributes:
        pid: the dispatcher's.
        mode: ``working``, ``draining`` or ``stopping``.
        closed: a sentence why nothing is started now (quiet hours, a full disk), or None.
        waits: why a job waits, by the number of the job in the queue; the jobs that the last decision looked at.
        gpus: the GPUs that it may use, as it last saw them; () on the CPU.
        at_once: how many jobs can run at once, None where unknown.
        settings: the options that ``gpuherd set`` can change, with their values.
        handed: for attempts that wait in an engine beyond this machine the engine's own reason, by the number of the
            attempt; without attempts for which it gives none.
        away: a sentence on an engine that does not answer now, and since when; None while it answers.
    """

    pid: int
    mode: str = "working"
    closed: str | None = None
    waits: Mapping[int, str] = field(default_factory=dict)
    gpus: tuple[GpuState, ...] = ()
    at_once: int | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    handed: Mapping[int, str] = field(default_factory=dict)
    away: str | None = None

    def most_mb(self, gpus: int) -> int | None:
        """The most memory that a job on this many GPUs could get on each of them, None where there are fewer GPUs. MIG
        instances, whose labels have a colon, are for jobs on one GPU."""
        able = [gpu for gpu in self.gpus if gpus == 1 or ":" not in gpu.label]
        sizes = sorted((gpu.total_mb for gpu in able if gpu.total_mb is not None), reverse=True)
        return sizes[gpus - 1] if 1 <= gpus <= len(sizes) else None


class StateFile:
    """Writes the file for a dispatcher. A failure to write is ignored, and tried again with the next change."""

    def __init__(self, path: Path):
        self._path = path
        self._written: DispatcherState | None = None
        self._touched = False
        self._next = 0.0

    def touch(self) -> None:
        """Marks that something may have changed. Cheap: call it at every decision."""
        self._touched = True

    def keep_time(self, now: float, state: Callable[[], DispatcherState]) -> None:
        """Writes what ``state`` returns, if it is time and that has changed. ``now`` is ``clock.mono``."""
        if not self._touched or now < self._next:
            return
        self._touched, self._next = False, now + _EVERY_S
        new = state()
        if new == self._written:
            return
        temporary = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        try:
            temporary.write_text(json.dumps(asdict(new)), encoding="utf-8", errors="backslashreplace")
            temporary.replace(self._path)
            self._written = new
        except OSError:
            with suppress(OSError):
                temporary.unlink()  # half of it, on a full disk

    @property
    def due_at(self) -> float | None:
        """When ``keep_time`` has something to do, None for never."""
        return self._next if self._touched else None

    def remove(self) -> None:
        """Removes the file, when the dispatcher ends in order."""
        with suppress(OSError):
            self._path.unlink()


def read(path: Path, pid: int) -> DispatcherState | None:
    """The last state that the dispatcher with this pid wrote; None where there is none or the file is damaged."""
    try:
        with open(path, "rb", opener=without_waiting) as file:
            values = json.loads(file.read(_MOST_BYTES) or b"")
        by_number = {key: _by_number(values.get(key, {})) for key in ("waits", "handed")}
        gpus = tuple(GpuState(**gpu) for gpu in values["gpus"])
        return DispatcherState(**values | by_number | {"gpus": gpus}) if values["pid"] == pid else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def _by_number(values: Mapping[str, str]) -> dict[int, str]:
    return {int(number): reason for number, reason in values.items()}


def engine_name(engine: str) -> str:
    """The engine as people write it.

    >>> engine_name("slurm"), engine_name("ray")
    ('SLURM', 'Ray')
    """
    return title(engine) or clean(engine)
