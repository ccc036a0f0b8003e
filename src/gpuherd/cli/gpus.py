"""``gpuherd gpus``: every GPU, its users, what gpuherd holds, and whether it is free or why not.

docs/gpus.md documents the form of ``--json``, on which scripts rely.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from gpuherd.cli.common import add_run_name, add_watch, print_view, run_of
from gpuherd.errors import UsageError
from gpuherd.jobs.options import GpuOptions
from gpuherd.options import Parser, add_options, build, same_option

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.text import Text

    from gpuherd.gpus.idle import Check
    from gpuherd.gpus.idle_held import IdleGpu
    from gpuherd.gpus.leases import Holder, LeaseFolder
    from gpuherd.gpus.query import GpuReader
    from gpuherd.gpus.reservations import Standing
    from gpuherd.gpus.state import Gpu, Machine
    from gpuherd.jobs.monitor.idle import IdleGpus
    from gpuherd.jobs.monitor.status import LeftOut
    from gpuherd.jobs.monitor.turns import WaitingUser
    from gpuherd.jobs.run_dir import RunDirectory
    from gpuherd.jobs.scheduler.limits import Allowance
    from gpuherd.jobs.settings import Settings

GPUS = """\
Shows every GPU of this machine, who uses it, what gpuherd holds, and whether it is free or why not. A GPU whose memory
is held for long without computing is shown as idle, with its user.

examples:
  gpuherd gpus                 a table
  gpuherd gpus --watch         the same, updated every 2 seconds; Ctrl-C ends it
  gpuherd gpus --json          for scripts; with --watch one line per update
  gpuherd gpus --run results   also the GPUs that this run leaves out for a while (your own queue's are always shown)
"""
# Widths in terminal cells: of the columns that are always there, and of the others, the most useful first.
_GPU_CELLS, _STATE_CELLS, _SHORTEST_NAME, _LONGEST_NAME = 4, 16, 7, 22
_FIGURES = {"Used/total MB": 13, "Util": 5, "Temp": 4, "Power": 5}


@dataclass(frozen=True, kw_only=True)
class ViewOptions:
    """The threshold below which a GPU counts as free, declared as for commands that start jobs."""

    gpu_memory_threshold: int = same_option(GpuOptions, "gpu_memory_threshold")


def add_gpus(parser: Parser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    add_watch(parser)
    add_run_name(parser, help_text="a run's folder: show also which GPUs this run leaves out")
    add_options(parser, ViewOptions)


@dataclass(frozen=True)
class GpuRow:
    """A GPU and what is known of it. ``visible``: the environment shows it to jobs that are started from here;
    ``excluded``: the machine's policy forbids gpuherd to use it; ``left_out``: queues that leave it out for a while;
    ``reserved``: the reservation of it that is in force; ``next_reserved``: the first that is to come; ``lapsed``: one
    that would be in force had its owner used it; ``idle``: it is held, and has not been used for long."""

    gpu: Gpu
    check: Check
    holder: Holder | None
    visible: bool
    excluded: bool = False
    left_out: tuple[LeftOut, ...] = ()
    idle: IdleGpu | None = None
    reserved: Standing | None = None
    next_reserved: Standing | None = None
    lapsed: Standing | None = None

    @property
    def kept_for(self) -> Standing | None:
        """The reservation of another user that keeps it from this user's jobs now; None without one."""
        return None if self.reserved is None or self.reserved.reservation.uid == os.geteuid() else self.reserved

    @property
    def free(self) -> bool:
        """Whether a job may get it: not in use by this one sample, not held for another job, not excluded, and not
        reserved by another user."""
        return self.check.free and self.holder is None and not self.excluded and self.kept_for is None


@dataclass(frozen=True)
class MachineView:
    """The state of the machine at one time. ``lease_problem``: why it is not known what gpuherd holds, if so;
    ``limits``: what this user may hold now; ``held``: how many GPUs they hold; ``warnings``: about the settings files
    and about queues that can't be read; ``waiting``: users who wait for GPUs, in the order of their turns."""

    machine: Machine
    rows: tuple[GpuRow, ...]
    threshold_mb: int
    lease_problem: str | None
    at: float
    limits: Allowance
    held: int
    warnings: tuple[str, ...]
    waiting: tuple[WaitingUser, ...] = ()


def run_gpus(args: argparse.Namespace) -> int:
    """Prints the table or JSON once, or by ``--watch`` until Ctrl-C."""
    from gpuherd.gpus.query import GpuReader
    from gpuherd.jobs.monitor.idle import IdleGpus

    threshold_mb = build(ViewOptions, args).gpu_memory_threshold
    queues = _queues(args)
    driver, idle = GpuReader(), IdleGpus(threshold_mb=threshold_mb)
    indent = 2 if args.watch is None else None
    return print_view(
        args,
        lambda: [json.dumps(as_json(look(driver, threshold_mb, idle, queues)), indent=indent)],
        lambda: [as_table(look(driver, threshold_mb, idle, queues))],
    )


def _queues(args: argparse.Namespace) -> tuple[RunDirectory, ...]:
    """The queues whose left-out GPUs are shown: the user's own, and that of the named folder.

    Raises UsageError if that folder holds no queue.
    """
    from gpuherd.batch.user_queue import folder
    from gpuherd.jobs.run_dir import RunDirectory

    named = () if args.folder is None else (run_of(args),)
    try:
        own = RunDirectory(folder())
    except UsageError:  # a user without a home folder has no queue there
        return named
    return named if own.root in [run.root for run in named] else (own, *named)


def look(driver: GpuReader, threshold_mb: int, idle: IdleGpus, queues: Sequence[RunDirectory] = ()) -> MachineView:
    """Queries the driver, the leases, the settings and the queues. ``idle`` remembers the looks before."""
    from gpuherd.errors import CannotWrite
    from gpuherd.gpus.idle import IdleRule, check
    from gpuherd.gpus.leases import LeaseFolder
    from gpuherd.gpus.visible import is_named, visible_in

    machine = driver.snapshot(topology=True, errors=True)
    leases, lease_problem = None, None
    try:
        leases = LeaseFolder.existing()
    except (CannotWrite, UsageError) as problem:
        lease_problem = str(problem)
    settings, warnings = _settings()
    limits = _limits(settings)
    at = time.time()
    reservations = _reservations(settings, machine.gpus, at, leases)
    left_out, unread = _left_out(queues)
    held = 0 if leases is None else len(leases.held_by(os.geteuid()))
    holders = {} if leases is None else leases.holders(gpu.uuid for gpu in machine.gpus)
    visible = {gpu.uuid for gpu in visible_in(machine.gpus, os.environ)}
    rule = IdleRule(memory_threshold_mb=threshold_mb)
    idle_for = idle.look(machine.gpus)
    rows = tuple(
        GpuRow(
            gpu=gpu,
            check=check(gpu, rule),
            holder=holders.get(gpu.uuid),
            visible=gpu.uuid in visible or not visible.isdisjoint(gpu.mig_instances),
            excluded=is_named(gpu, limits.excluded),
            left_out=tuple(by_uuid[gpu.uuid] for by_uuid in left_out if gpu.uuid in by_uuid),
            **reservations.get(gpu.uuid, {}),
            idle=idle_for.get(gpu.uuid),
        )
        for gpu in machine.gpus
    )
    waiting = () if leases is None else _waiting(settings)
    return MachineView(machine, rows, threshold_mb, lease_problem, at, limits, held, (*warnings, *unread), waiting)


def _waiting(settings: Settings) -> tuple[WaitingUser, ...]:
    """The users whose gpuherds wait for GPUs."""
    from gpuherd.jobs.monitor.turns import read_line, waiting_users

    return waiting_users(read_line(settings))


def _reservations(
    settings: Settings, gpus: Sequence[Gpu], now: float, leases: LeaseFolder | None
) -> Mapping[str, Mapping[str, Standing]]:
    """By UUID, the fields of ``GpuRow`` for the reservations of the GPU; without those that have none."""
    from gpuherd.gpus.reservations import State
    from gpuherd.jobs.gpu.reserved import standings_now

    fields: dict[str, dict[str, Standing]] = {}
    kinds = {State.IN_FORCE: "reserved", State.TO_COME: "next_reserved", State.LAPSED: "lapsed"}
    for each in standings_now(settings.policy, now, leases=leases):
        kind = kinds.get(each.state(now))
        for gpu in gpus if kind is not None else ():
            if gpu.uuid in each.uuids:
                fields.setdefault(gpu.uuid, {}).setdefault(str(kind), each)
    return fields


def _left_out(queues: Sequence[RunDirectory]) -> tuple[list[dict[str, LeftOut]], list[str]]:
    """The GPUs that each queue leaves out, by UUID, and a message for each queue that can't be read."""
    from gpuherd.errors import GpuherdError
    from gpuherd.jobs.monitor.status import left_out

    found, problems = [], []
    for run in queues:
        try:
            found.append(left_out(run, time.time()))
        except GpuherdError as problem:
            problems.append(str(problem))
    return found, problems


def _settings() -> tuple[Settings, tuple[str, ...]]:
    """The settings files, and warnings about them."""
    from gpuherd.jobs.settings import NO_SETTINGS, load

    try:
        settings = load()
    except UsageError as problem:
        # A wrong file prevents starting jobs, but not looking at GPUs.
        return NO_SETTINGS, (str(problem),)
    return settings, settings.warnings


def _limits(settings: Settings) -> Allowance:
    """What the settings allow this user now."""
    from datetime import datetime

    from gpuherd.gpus.lease_files import user_name
    from gpuherd.jobs.gpu.turns import WeekUse
    from gpuherd.jobs.scheduler.limits import allowance

    user = user_name(os.geteuid())
    used_s = 0.0 if settings.policy.week_hours(user) is None else WeekUse().of(os.geteuid())
    return allowance(settings, user, datetime.now(), used_week_s=used_s)


def as_json(view: MachineView) -> dict[str, Any]:
    """The machine as plain data; the schema is in docs/gpus.md."""
    return {
        "time": view.at,
        "driver_version": view.machine.driver_version,
        "cuda_version": view.machine.cuda_version,
        "problem": view.machine.problem,
        "lease_problem": view.lease_problem,
        "memory_threshold_mb": view.threshold_mb,
        "limits": {
            "max_gpus": view.limits.max_gpus,
            "held": view.held,
            "reason": view.limits.sentence,
            "changes_at": view.limits.changes_at,
            "warnings": list(view.warnings),
        },
        "waiting": _waiting_as_json(view),
        "gpus": [_row_as_json(row, view) for row in view.rows],
    }


def _waiting_as_json(view: MachineView) -> list[dict[str, Any]]:
    from gpuherd.jobs.monitor.turns import users_as_json

    return users_as_json(view.waiting)


def _row_as_json(row: GpuRow, view: MachineView) -> dict[str, Any]:
    gpu = asdict(row.gpu)
    for peer, values in zip(row.gpu.peers, gpu["peers"], strict=True):
        values["proximity"] = peer.proximity.name.lower()
    holder = None if row.holder is None else asdict(row.holder)
    if holder is not None:
        del holder["uuid"]
    return {
        "label": row.gpu.label,
        **gpu,
        "visible": row.visible,
        "excluded": row.excluded,
        "left_out": [{"queue": each.queue, "until": each.until, "reason": each.reason} for each in row.left_out],
        "lease": holder,
        "reserved": _reservation_as_json(row.reserved, view),
        "next_reserved": _reservation_as_json(row.next_reserved, view),
        "lapsed": _reservation_as_json(row.lapsed, view),
        "idle": None if row.idle is None else _idle_as_json(row.idle, view.at),
        "free": row.free,
        "reason": row.check.reason or _why_not(row, view.at),
    }


def _reservation_as_json(standing: Standing | None, view: MachineView) -> Mapping[str, Any] | None:
    from gpuherd.jobs.gpu.booking import as_json

    return None if standing is None else as_json(standing, view.machine.gpus, view.at)


def _idle_as_json(idle: IdleGpu, now: float) -> dict[str, Any]:
    holders = [
        {"pid": each.pid, "user": each.user, "command": each.command, "memory_mb": each.memory_mb}
        for each in idle.holders
    ]
    return {
        "since": now - idle.idle_s,
        "idle_s": idle.idle_s,
        "used_mb": idle.used_mb,
        "cpu_cores": idle.cores,
        "holders": holders,
        "sentence": idle.sentence,
    }


def _why_not(row: GpuRow, now: float) -> str:
    """Why a GPU without users is not free; empty if it is."""
    if row.excluded:
        return "kept from gpuherd by this machine's policy"
    if row.holder is None and row.kept_for is not None:
        return _reservation_words(row.kept_for, now)
    return "" if row.holder is None else "taken by gpuherd"


def _reservation_words(standing: Standing, now: float) -> str:
    from gpuherd.gpus.lease_files import user_name
    from gpuherd.gpus.reservations import sentence

    uid = standing.reservation.uid
    return sentence(standing, "you" if uid == os.geteuid() else user_name(uid), now)


def as_table(view: MachineView) -> RenderableType:
    """The machine for people: a table, or a sentence if there are no GPUs."""
    from rich.console import Group
    from rich.text import Text

    if not view.rows:
        none = f"No GPUs: {view.machine.problem or 'the driver finds none'}. Jobs run on the CPU."
        return Group(Text(none), *_notes(view))
    return Group(_GpuTable(view), *_notes(view))


@dataclass(frozen=True, slots=True)
class _GpuTable:
    """The table, laid out when its width is known. Numbers are never cut. In a narrow window the reasons get more
    lines, and in a narrower one the least useful columns are left out, so that there is room for the state."""

    view: MachineView

    def __rich_console__(self, _console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        from rich.table import Table

        kept, room = _columns_in(options.max_width)
        table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
        table.add_column("GPU", no_wrap=True, min_width=_GPU_CELLS)
        if "Name" in kept:
            table.add_column(
                "Name", no_wrap=True, overflow="ellipsis", max_width=min(_LONGEST_NAME, _SHORTEST_NAME + room)
            )
        for heading, width in _FIGURES.items():
            if heading in kept:
                table.add_column(heading, justify="right", no_wrap=True, min_width=width)
        table.add_column("State and users", overflow="fold", min_width=_STATE_CELLS)
        names = {row.gpu.uuid: row.gpu.name for row in self.view.rows}
        for row in self.view.rows:
            cells = _cells(row, names)
            gpu = row.gpu.label if row.gpu.mig_parent is None else f" {row.gpu.label}"
            table.add_row(gpu, *(cells[heading] for heading in kept), _state(row, self.view.at))
        yield table


def _columns_in(width: int) -> tuple[list[str], int]:
    """The headings of the columns that fit between GPU and state, and the cells that remain."""
    room = width - (_GPU_CELLS + 1) - _STATE_CELLS
    kept = []
    for heading, cells in (*_FIGURES.items(), ("Name", _SHORTEST_NAME)):
        if cells + 1 <= room:
            kept.append(heading)
            room -= cells + 1
    return (kept[-1:] + kept[:-1] if kept[-1:] == ["Name"] else kept), room


def _cells(row: GpuRow, names: Mapping[str, str]) -> Mapping[str, RenderableType]:
    from rich.text import Text

    gpu = row.gpu
    # Below its GPU a MIG instance shows only what distinguishes it: "MIG 1g.5gb".
    name = gpu.name.removeprefix(names.get(gpu.mig_parent or "", "")).strip()
    return {
        "Name": Text(name.removeprefix("NVIDIA ").removeprefix("AMD ")),
        "Used/total MB": "N/A" if gpu.problem and not gpu.total_mb else f"{gpu.used_mb}/{gpu.total_mb}",
        "Util": _figure(gpu.utilisation_percent, "%"),
        "Temp": _figure(gpu.temperature_c, "C"),
        "Power": _figure(gpu.power_w, "W"),
    }


def _figure(value: float | None, unit: str) -> str:
    return "N/A" if value is None else f"{value:.0f} {unit}"


def _state(row: GpuRow, now: float) -> Text:
    """Free or held, or busy or unusable with the reason, and one line per process."""
    from rich.text import Text

    from gpuherd.gpus.idle import describe

    text = Text()
    if row.gpu.mig_instances:
        text.append(row.check.reason)
    elif row.gpu.problem is not None:
        text.append(f"unusable: {row.gpu.problem}", style="red")
    elif row.free:
        text.append("free", style="green")
    elif row.idle is not None:
        text.append(row.idle.sentence, style="yellow")
    elif not row.check.free:
        text.append(f"busy: {row.check.reason}", style="yellow")
    elif row.excluded:
        text.append(_why_not(row, now), style="yellow")
    if row.gpu.uncorrected_errors:
        text.append(f"\n{row.gpu.uncorrected_errors} uncorrectable memory errors", style="red")
    for each in row.left_out:
        text.append(f"\n{each.sentence} ({each.queue})", style="yellow")
    for reservation in (row.reserved, row.lapsed, row.next_reserved):
        if reservation is not None:
            text.append(("\n" if text else "") + _reservation_words(reservation, now), style="magenta")
    if row.holder is not None:
        unused = ", and nobody uses it now" if row.check.free else ""
        text.append(("\n" if text else "") + row.holder.sentence(now) + unused, style="cyan")
    for process in row.gpu.processes:
        if row.idle is not None or row.check.reason == describe(process):
            continue  # shown already, as the reason
        memory = "N/A" if process.memory_mb is None else f"{process.memory_mb} MB"
        kind = "" if process.compute else ", display"
        text.append(
            f"\n{process.user or 'someone'}: {process.command or 'a process'} (pid {process.pid}, {memory}{kind})"
        )
    return text


def _notes(view: MachineView) -> list[Text]:
    """Messages below the table: warnings, limits, hidden GPUs."""
    from rich.text import Text

    from gpuherd.gpus.visible import naming_in

    notes = list(view.warnings)
    if view.limits.sentence is not None:
        notes.append(f"Your runs: {view.limits.sentence}; they hold {view.held} now.")
    if view.waiting:
        notes.append(
            f"Waiting for GPUs, in the order of their turns: {', '.join(user.sentence for user in view.waiting)}"
        )
    hidden = [row.gpu.label for row in view.rows if not row.visible]
    if hidden:
        named = naming_in(os.environ, view.machine.maker)
        words = " ".join(f"{name}={value!r}" for name, value in named.items())
        notes.append(f"{words} hides from jobs started here: GPU {', '.join(hidden)}")
    if view.lease_problem is not None:
        notes.append(f"What gpuherd holds is not known: {view.lease_problem}")
    return [Text(note, style="yellow") for note in notes]
