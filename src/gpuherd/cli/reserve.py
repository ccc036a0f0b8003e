"""``gpuherd reserve``: GPUs for a time to come; ``list`` shows all reservations, ``cancel`` ends one."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpuherd.cli.common import add_json, print_json, print_note, print_table
from gpuherd.columns import Column
from gpuherd.errors import ExitCode, UsageError
from gpuherd.options import Parser, add_options, build, option
from gpuherd.units import duration_s, gpu_names, moment, positive_int

if TYPE_CHECKING:
    from gpuherd.gpus.reservations import Standing
    from gpuherd.gpus.state import Gpu
    from gpuherd.jobs.settings import Policy

RESERVE = """\
Reserves GPUs of this machine for a time to come. Every gpuherd of the machine keeps to it: jobs of others that would
still run then are not started on these GPUs, and while it lasts only yours are. People who don't use gpuherd see it in
gpuherd gpus. A reservation that is not used for 30 minutes lapses.

examples:
  gpuherd reserve --gpus 4 --from "fri 18:00" --for 2d --name "camera ready"
  gpuherd reserve --gpu-list 0,1 --from "2026-12-01 09:00" --for 8h
  gpuherd reserve --gpus 1 --for 90m                       from now on
  gpuherd reserve --gpus 8 --from tomorrow --for 1d --dry-run    which GPUs it would be, or who has them
  gpuherd reserve list                                     all reservations of the machine
  gpuherd reserve cancel 3f9c                              give one back

Times are local: "18:00" and "fri 18:00" are the next ones, a day alone begins at midnight, "in 2h" counts from now.
"""
RESERVE_LIST = """\
Lists the reservations of the machine: whose they are, which GPUs, from when to when, and whether they are used.

examples:
  gpuherd reserve list
  gpuherd reserve list --all       those that have ended, too
  gpuherd reserve list --json      for scripts
"""
RESERVE_CANCEL = """\
Cancels a reservation of yours, before it begins or while it lasts. Jobs that run go on. Root may cancel any.

examples:
  gpuherd reserve cancel 1000-3f9c
  gpuherd reserve cancel 3f9c
"""


def _moment(word: str) -> float:
    return moment(word, time.time())


@dataclass(frozen=True, kw_only=True)
class ReserveOptions:
    """What is to be reserved, and when."""

    gpus: int | None = option(None, help="how many GPUs", parse=positive_int, metavar="N")
    gpu_list: tuple[str, ...] = option(
        (), help="which GPUs: indices, 0:1 for MIG, or UUIDs (default: any)", parse=gpu_names, many=True, metavar="ID"
    )
    begin: float | None = option(
        None, help='when it begins, like "fri 18:00" (default: now)', flag="from", parse=_moment, metavar="TIME"
    )
    length: float | None = option(
        None, help="for how long, like 8h or 2d, always so many hours", flag="for", parse=duration_s, metavar="TIME"
    )
    name: str | None = option(None, help="what it is for; everybody can read it", metavar="TEXT")
    dry_run: bool = option(False, help="show what would be reserved, and reserve nothing")

    @property
    def gpu_ids(self) -> tuple[str, ...]:
        """``gpu_list`` as single ids."""
        return tuple(part for entry in self.gpu_list for part in entry.split(","))


def add_reserve(parser: Parser) -> None:
    add_options(parser, ReserveOptions)
    add_json(parser, "the reservation")


def run_reserve(args: argparse.Namespace) -> int:
    """Makes the reservation and prints it."""
    from gpuherd.gpus.query import GpuReader
    from gpuherd.jobs.gpu.booking import CannotReserve, Request, choose_gpus, make
    from gpuherd.jobs.gpu.reserved import standings_now
    from gpuherd.jobs.settings import load

    options = build(ReserveOptions, args)
    if (options.gpus is None) is not bool(options.gpu_list):
        raise UsageError("say how many GPUs with --gpus N, or which with --gpu-list 0,1")
    if options.length is None:
        raise UsageError("say for how long with --for, like --for 8h")
    now = time.time()
    since = now if options.begin is None else options.begin
    request = Request(options.gpus or 0, since, since + options.length, options.gpu_ids, options.name or "")
    settings = load()
    machine = GpuReader().snapshot()
    if not machine.gpus:
        raise CannotReserve(f"there are no GPUs to reserve: {machine.problem or 'the driver finds none'}")
    if options.dry_run:
        found = standings_now(settings.policy, now)
        chosen = choose_gpus(request, machine.gpus, found, settings, uid=os.geteuid(), now=now)
        _print_planned(args, chosen, request.since, request.until, now)
        return ExitCode.OK
    standing, folder = make(request, machine.gpus, settings, now)
    if args.json:
        from gpuherd.jobs.gpu.booking import as_json

        print_json({**as_json(standing, machine.gpus, now), "shared": folder.shared})
    else:
        one = standing.reservation
        print(f"{one.id}: {_sentence(standing, machine.gpus, now)}")
    if not folder.shared:
        print_note(
            "only your own gpuherds know of it: this machine has no folder that all users share; its administrator "
            "makes one with gpuherd setup-machine"
        )
    return ExitCode.OK


def _print_planned(args: argparse.Namespace, chosen: Sequence[Gpu], since: float, until: float, now: float) -> None:
    from gpuherd.gpus.reservations import when

    labels = [gpu.label for gpu in chosen]
    if args.json:
        uuids = [gpu.uuid for gpu in chosen]
        print_json({"gpus": len(chosen), "labels": labels, "uuids": uuids, "since": since, "until": until})
    else:
        print(f"would reserve GPU {', '.join(labels)} from {when(since, now)} until {when(until, now)}")


def _sentence(standing: Standing, gpus: Sequence[Gpu], now: float) -> str:
    from gpuherd.gpus.reservations import when
    from gpuherd.jobs.gpu.booking import labels_of

    one = standing.reservation
    labels = ", ".join(labels_of(standing, gpus))
    return f"GPU {labels} from {when(one.since, now)} until {when(one.until, now)}" + (
        f" ({one.name})" if one.name else ""
    )


def add_reserve_list(parser: Parser) -> None:
    parser.add_argument("--all", action="store_true", help="also those that have ended")
    add_json(parser, "the reservations")


def run_reserve_list(args: argparse.Namespace) -> int:
    """Prints a table or JSON."""
    from gpuherd.gpus.query import GpuReader
    from gpuherd.gpus.reservation_files import ReservationFolder
    from gpuherd.gpus.reservations import State
    from gpuherd.jobs.gpu.booking import as_json
    from gpuherd.jobs.gpu.reserved import standings_now

    now = time.time()
    policy = _policy()
    folder = ReservationFolder.existing()
    found = standings_now(policy, now, folder) if folder is not None else ()
    shown = [each for each in found if args.all or each.state(now) is not State.ENDED]
    gpus = GpuReader().snapshot().gpus if shown else ()
    if args.json:
        values = [as_json(each, gpus, now) for each in shown]
        print_json({"time": now, "shared": folder is not None and folder.shared, "reservations": values})
        return ExitCode.OK
    if not shown:
        print("No reservations.")
        return ExitCode.OK
    print_table(_COLUMNS, [_row(each, gpus, now) for each in shown])
    if folder is not None and not folder.shared:
        print_note("these are yours alone: this machine has no folder that all users share (gpuherd setup-machine)")
    return ExitCode.OK


_COLUMNS = (
    Column("Id", 0),
    Column("User", 1),
    Column("GPUs", 2, least=6),
    Column("From", 3),
    Column("Until", 4),
    Column("State", 5, least=12),
    Column("Name", 6, least=6),
)


def _row(standing: Standing, gpus: Sequence[Gpu], now: float) -> list[str]:
    from gpuherd.gpus.lease_files import user_name
    from gpuherd.gpus.reservations import when
    from gpuherd.jobs.gpu.booking import labels_of, state_words

    one = standing.reservation
    labels = ",".join(labels_of(standing, gpus))
    span = (when(one.since, now), when(one.until, now))
    return [one.id, user_name(one.uid), labels, *span, state_words(standing, now), one.name]


def _policy() -> Policy:
    """The machine's policy; one that is wrong is reported, and the rules are then the usual ones."""
    from gpuherd.jobs.settings import NO_SETTINGS, load

    try:
        return load().policy
    except UsageError as problem:
        print_note(str(problem))
        return NO_SETTINGS.policy


def add_reserve_cancel(parser: Parser) -> None:
    parser.add_argument("id", metavar="ID", help="the reservation, as gpuherd reserve list shows it")
    add_json(parser, "the reservation")


def run_reserve_cancel(args: argparse.Namespace) -> int:
    """Cancels the reservation."""
    from gpuherd.jobs.gpu.booking import cancel

    cancelled = cancel(args.id)
    if args.json:
        print_json({"id": cancelled.id, "cancelled": True})
    else:
        print(f"{cancelled.id} is cancelled")
    return ExitCode.OK
