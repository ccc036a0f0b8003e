"""Our own jobs that hold GPUs without using them (``--idle-after``, ``--on-idle``): what becomes of them. Pure.

A job is idle while the driver reports a utilisation of 0 % for each of its GPUs, whether it holds memory there or not:
its leases keep the GPUs from others. It is not idle while one of its GPUs is used, or can't be read. On a GPU that
several jobs share it is unknown which of them computes: all of them do.

A job that has not computed yet may load its data or compile: it has ``FIRST_USE`` times as long. A job that is paused,
by whomever, is not idle; its time begins anew when it goes on, and after a gap of ``HOLE_S`` without looks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gpuherd.gpus.idle_held import HOLE_S
from gpuherd.gpus.state import Gpu
from gpuherd.jobs.options import OnIdle
from gpuherd.units import counted, duration

# A job has so many times as long before it computes for the first time.
FIRST_USE = 4.0


@dataclass(frozen=True, slots=True)
class JobLook:
    """A running attempt at one look: its id, the job's title, the labels of its GPUs, whether one of them is used, and
    whether its processes are stopped now."""

    id: int
    job: str
    gpus: tuple[str, ...]
    is_used: bool
    is_paused: bool = False


@dataclass(frozen=True, slots=True)
class JobIdleRow:
    """The looks at an attempt so far: since when it has been idle (the time of the last look while it is not), the last
    look, whether it has ever computed, and whether its idleness was reported."""

    since: float
    last: float
    has_computed: bool = False
    reported: bool = False


@dataclass(frozen=True, slots=True)
class IdleAction:
    """What to do with an idle attempt, after how many seconds without use, and the sentence to report."""

    kind: OnIdle
    attempt: int
    idle_s: float
    sentence: str


# By attempt's id.
JobIdleRows = Mapping[int, JobIdleRow]

_DOING: Mapping[OnIdle, str] = {
    "notify": "it goes on",
    "pause": "it is paused; gpuherd resume lets it go on",
    "requeue": "it is ended and waits again",
    "cancel": "it is cancelled",
}


def is_used(gpus: Mapping[str, Gpu], uuids: Sequence[str]) -> bool:
    """Whether one of these GPUs is used, or can't be read. ``gpus``: by UUID, as the driver has just described them."""
    return any(
        (gpu := gpus.get(uuid)) is None or gpu.problem is not None or gpu.utilisation_percent != 0 for uuid in uuids
    )


def idle_actions(
    mode: OnIdle, after_s: float | None, rows: JobIdleRows, looks: Sequence[JobLook], now: float
) -> tuple[tuple[IdleAction, ...], JobIdleRows]:
    """The actions after a look, and the rows for the next one.

    Args:
        after_s: seconds without use after which a job is idle; None: never.
        looks: our attempts on GPUs, without those that are being stopped.
        now: the look's time in seconds, of a monotonic clock.
    """
    actions: list[IdleAction] = []
    found: dict[int, JobIdleRow] = {}
    for look in looks:
        before = rows.get(look.id)
        row = found[look.id] = _row(before, look, now)
        limit_s = None if after_s is None else after_s if row.has_computed else after_s * FIRST_USE
        idle_s = now - row.since
        if limit_s is None or look.is_used or look.is_paused or idle_s < limit_s:
            continue
        if mode != "notify" or not row.reported:
            actions.append(IdleAction(mode, look.id, idle_s, _sentence(mode, look, row, idle_s)))
        found[look.id] = JobIdleRow(row.since, now, row.has_computed, reported=True)
    return tuple(actions), found


def _row(before: JobIdleRow | None, look: JobLook, now: float) -> JobIdleRow:
    has_computed = before is not None and before.has_computed
    if look.is_paused:
        return JobIdleRow(now, now, has_computed)
    if look.is_used:
        return JobIdleRow(now, now, has_computed=True)
    if before is None or now - before.last > HOLE_S:
        return JobIdleRow(now, now, has_computed)
    return JobIdleRow(before.since, now, has_computed, before.reported)


def _sentence(mode: OnIdle, look: JobLook, row: JobIdleRow, idle_s: float) -> str:
    """Ends with what is done, which follows the name of the job where it is reported."""
    gpus = f"GPU {', '.join(look.gpus)}" if len(look.gpus) <= 8 else f"any of its {counted(len(look.gpus), 'GPU')}"
    used = "has not used" if row.has_computed else "has never used"
    return f"{used} {gpus} for {duration(idle_s)}: {_DOING[mode]}"
