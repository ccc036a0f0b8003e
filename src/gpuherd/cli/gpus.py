"""``gpuherd gpus``: every GPU, who uses it, what gpuherd holds, and free or busy with the reason.

The ``--json`` form is documented in docs/gpus.md; scripts rely on it.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any

from gpuherd.cli.common import add_command, add_run, add_watch, print_json, print_tables
from gpuherd.errors import ExitCode, UsageError
from gpuherd.jobs.options import GpuOptions
from gpuherd.options import Parser, add_options, build

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.text import Text

    from gpuherd.gpus.idle import Check
    from gpuherd.gpus.leases import Holder
    from gpuherd.gpus.query import GpuReader
    from gpuherd.gpus.state import Gpu, Machine
    from gpuherd.jobs.monitor.status import LeftOut
    from gpuherd.jobs.run_dir import RunDirectory
    from gpuherd.jobs.scheduler.limits import Allowance

GPUS = """\
Shows every GPU of this machine, who uses it, what gpuherd holds, and whether it is free, or why not.

examples:
  gpuherd gpus                 a table
  gpuherd gpus --watch         the same, renewed every 2 seconds; Ctrl-C ends it
  gpuherd gpus --json          for scripts; with --watch one line a look
  gpuherd gpus --run results   also which GPUs that run leaves out for a while (your own queue's are always told)
"""
_GPU_CELLS, _STATE_CELLS, _LEAST_NAME = 4, 16, 7
# By use, and the cells that each takes.
_FIGURES = {"Used/total MB": 13, "Util": 5, "Temp": 4, "Power": 5}
LONGEST_NAME = 22
_THRESHOLD = next(field for field in fields(GpuOptions) if field.name == "gpu_memory_threshold")


@dataclass(frozen=True, kw_only=True)
class ViewOptions:
    """The threshold as commands that start jobs declare it, so that both mean the same by free."""

    gpu_memory_threshold: int = field(default=GpuOptions().gpu_memory_threshold, metadata=_THRESHOLD.metadata)


def add_gpus(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """Registers the command."""
    parser = add_command(subparsers, "gpus", GPUS)
    parser.add_argument("--json", action="store_true", help="print JSON in place of a table")
    add_watch(parser)
    add_run(parser, help_text="a run's folder: tell which GPUs it leaves out")
    add_options(parser, ViewOptions)
    parser.set_defaults(run=run_gpus)


@dataclass(frozen=True)
class Row:
    """A GPU and what is to be said of it. ``visible``: the environment shows it to jobs started from here;
    ``excluded``: the machine's policy keeps it from gpuherd; ``left_out``: queues that leave it out for a while."""

    gpu: Gpu
    check: Check
    holder: Holder | None
    visible: bool
    excluded: bool = False
    left_out: tuple[LeftOut, ...] = ()

    @property
    def free(self) -> bool:
        """Free for a job: not in use by this one look, not held for another job, and not kept for others."""
        return self.check.free and self.holder is None and not self.excluded


@dataclass(frozen=True)
class View:
    """One look at the machine. ``lease_problem`` says why what gpuherd holds can't be told, if so; ``limits``: what
    this user may hold now, ``held`` what their gpuherds do hold; ``warnings`` are about the settings files."""

    machine: Machine
    rows: tuple[Row, ...]
    threshold_mb: int
    lease_problem: str | None
    at: float
    limits: Allowance
    held: int
    warnings: tuple[str, ...]


def run_gpus(args: argparse.Namespace) -> int:
    """Prints the table or JSON once, or again and again until Ctrl-C."""
    from gpuherd.gpus.query import GpuReader

    threshold_mb = build(ViewOptions, args).gpu_memory_threshold
    queues = _queues(args)
    driver = GpuReader()
    try:
        if args.json:
            indent = 2 if args.watch is None else None
            print_json(lambda: [json.dumps(as_json(look(driver, threshold_mb, queues)), indent=indent)], args.watch)
        else:
            print_tables(lambda: (as_table(look(driver, threshold_mb, queues)),), args.watch)
    except KeyboardInterrupt:
        if args.watch is None:
            raise
    return ExitCode.OK


def _queues(args: argparse.Namespace) -> tuple[RunDirectory, ...]:
    """The queues of which is told what they leave out: the user's own, and that of the folder that was named.

    Raises UsageError when there is no queue in that folder.
    """
    from gpuherd.batch.user_queue import folder
    from gpuherd.cli.common import meant
    from gpuherd.jobs.run_dir import RunDirectory

    named = () if args.folder is None else (meant(args),)
    try:
        own = RunDirectory(folder())
    except UsageError:  # a user without a home folder has no queue in it
        return named
    return named if own.root in [run.root for run in named] else (own, *named)


def look(driver: GpuReader, threshold_mb: int, queues: Sequence[RunDirectory] = ()) -> View:
    """What is known now."""
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
    limits, warnings = _limits()
    left_out, unread = _left_out(queues)
    held = 0 if leases is None else len(leases.held_by(os.geteuid()))
    shown = {gpu.uuid for gpu in visible_in(machine.gpus, os.environ)}
    rule = IdleRule(memory_threshold_mb=threshold_mb)
    rows = tuple(
        Row(
            gpu=gpu,
            check=check(gpu, rule),
            holder=None if leases is None else leases.holder(gpu.uuid),
            visible=gpu.uuid in shown or not shown.isdisjoint(gpu.mig_instances),
            excluded=is_named(gpu, limits.excluded),
            left_out=tuple(told[gpu.uuid] for told in left_out if gpu.uuid in told),
        )
        for gpu in machine.gpus
    )
    return View(machine, rows, threshold_mb, lease_problem, time.time(), limits, held, (*warnings, *unread))


def _left_out(queues: Sequence[RunDirectory]) -> tuple[list[dict[str, LeftOut]], list[str]]:
    """What each queue leaves out, by UUID, and a sentence for each that can't be read."""
    from gpuherd.errors import GpuherdError
    from gpuherd.jobs.monitor.status import left_out

    found, problems = [], []
    for run in queues:
        try:
            found.append(left_out(run, time.time()))
        except GpuherdError as problem:
            problems.append(str(problem))
    return found, problems


def _limits() -> tuple[Allowance, tuple[str, ...]]:
    """What the settings files allow this user now, and what is to be said of those files."""
    from datetime import datetime

    from gpuherd.gpus.lease_files import user_name
    from gpuherd.jobs.scheduler.limits import allowance
    from gpuherd.jobs.settings import NO_SETTINGS, load

    try:
        settings = load()
    except UsageError as problem:
        # Whoever only looks is told, and sees; no job is started with such a file.
        return allowance(NO_SETTINGS, "", datetime.now()), (str(problem),)
    return allowance(settings, user_name(os.geteuid()), datetime.now()), settings.warnings


def as_json(view: View) -> dict[str, Any]:
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
        "gpus": [_row_as_json(row) for row in view.rows],
    }


def _row_as_json(row: Row) -> dict[str, Any]:
    gpu = asdict(row.gpu)
    for peer, told in zip(row.gpu.peers, gpu["peers"], strict=True):
        told["proximity"] = peer.proximity.name.lower()
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
        "free": row.free,
        "reason": row.check.reason or _why_not(row),
    }


def _why_not(row: Row) -> str:
    """Why a GPU that nobody uses is not free all the same; "" when it is."""
    if row.excluded:
        return "kept from gpuherd by this machine's policy"
    return "" if row.holder is None else "taken by gpuherd"


def as_table(view: View) -> RenderableType:
    """The machine for people: a table, or a sentence when there are no GPUs."""
    from rich.console import Group
    from rich.text import Text

    if not view.rows:
        none = f"No GPUs: {view.machine.problem or 'the driver finds none'}. Jobs run on the CPU."
        return Group(Text(none), *_remarks(view))
    return Group(_GpuTable(view), *_remarks(view))


@dataclass(frozen=True, slots=True)
class _GpuTable:
    """The table, made when its width is known: figures are never cut, and where the window is narrow the reasons get
    more lines. Where it is narrower still the least useful columns are left out, so that the state has a column."""

    view: View

    def __rich_console__(self, _console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        from rich.table import Table

        kept, room = _columns_in(options.max_width)
        table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
        table.add_column("GPU", no_wrap=True, min_width=_GPU_CELLS)
        if "Name" in kept:
            table.add_column("Name", no_wrap=True, overflow="ellipsis", max_width=min(LONGEST_NAME, _LEAST_NAME + room))
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
    """The headings of the columns between GPU and state for which there is room, and the cells that are left over."""
    room = width - (_GPU_CELLS + 1) - _STATE_CELLS
    kept = []
    for heading, cells in (*_FIGURES.items(), ("Name", _LEAST_NAME)):
        if cells + 1 <= room:
            kept.append(heading)
            room -= cells + 1
    return (kept[-1:] + kept[:-1] if kept[-1:] == ["Name"] else kept), room


def _cells(row: Row, names: Mapping[str, str]) -> Mapping[str, RenderableType]:
    from rich.text import Text

    gpu = row.gpu
    # Under its GPU's name an instance needs only what tells it apart: "MIG 1g.5gb".
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


def _state(row: Row, now: float) -> Text:
    """Free, taken, or busy or unusable and why, and a line for each process."""
    from rich.text import Text

    from gpuherd.gpus.idle import describe

    text = Text()
    if row.gpu.mig_instances:
        text.append(row.check.reason)
    elif row.gpu.problem is not None:
        text.append(f"unusable: {row.gpu.problem}", style="red")
    elif row.free:
        text.append("free", style="green")
    elif not row.check.free:
        text.append(f"busy: {row.check.reason}", style="yellow")
    elif row.excluded:
        text.append(_why_not(row), style="yellow")
    if row.gpu.uncorrected_errors:
        text.append(f"\n{row.gpu.uncorrected_errors} uncorrectable memory errors", style="red")
    for each in row.left_out:
        text.append(f"\n{each.sentence} ({each.queue})", style="yellow")
    if row.holder is not None:
        unused = ", and nobody uses it now" if row.check.free else ""
        text.append(("\n" if text else "") + row.holder.sentence(now) + unused, style="cyan")
    for process in row.gpu.processes:
        if row.check.reason == describe(process):
            continue  # told already, as the reason
        memory = "N/A" if process.memory_mb is None else f"{process.memory_mb} MB"
        kind = "" if process.compute else ", display"
        text.append(
            f"\n{process.user or 'someone'}: {process.command or 'a process'} (pid {process.pid}, {memory}{kind})"
        )
    return text


def _remarks(view: View) -> list[Text]:
    """What the table does not say."""
    from rich.text import Text

    from gpuherd.gpus.visible import naming_in

    remarks = list(view.warnings)
    if view.limits.sentence is not None:
        remarks.append(f"Your runs: {view.limits.sentence}; they hold {view.held} now.")
    hidden = [row.gpu.label for row in view.rows if not row.visible]
    if hidden:
        named = naming_in(os.environ, view.machine.maker)
        words = " ".join(f"{name}={value!r}" for name, value in named.items())
        remarks.append(f"{words} hides from jobs started here: GPU {', '.join(hidden)}")
    if view.lease_problem is not None:
        remarks.append(f"What gpuherd holds is not known: {view.lease_problem}")
    return [Text(remark, style="yellow") for remark in remarks]
