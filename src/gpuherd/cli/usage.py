"""``gpuherd usage`` (who used the GPUs, by the machine's ledger), ``gpuherd record`` (watches them all the time) and
``gpuherd setup-machine`` (one ledger for all users). docs/usage.md describes the form of ``--json`` and ``--csv``.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpuherd.cli.common import add_json, print_json, print_note, progress_bar, progress_of
from gpuherd.errors import ExitCode, UsageError, clean
from gpuherd.options import Parser
from gpuherd.units import duration_s

if TYPE_CHECKING:
    from rich.progress import Progress

    from gpuherd.ledger.reader import Ledger
    from gpuherd.ledger.usage import Row, Total, Usage

USAGE = """\
Shows who used this machine's GPUs, and for what, by the ledger that gpuherds keep. What is running now is included.

examples:
  gpuherd usage                           the last 30 days, by user
  gpuherd usage --month --by project      this month; --month 2026-11 for another
  gpuherd usage --days 7 --by day
  gpuherd usage --since 2026-11-01 --until 2026-11-15 --by command
  gpuherd usage --month 2026-11 --csv > november.csv
"""
_DEFAULT_DAYS = 30
_BARS = "▏▎▍▌▋▊▉█"
_BAR_CELLS = 20
_LATE_S = 2.0


def add_usage(parser: Parser) -> None:
    when = parser.add_mutually_exclusive_group()
    when.add_argument(
        "--month", nargs="?", const="", metavar="YYYY-MM", help="one calendar month (default: the current one)"
    )
    when.add_argument("--days", type=_days, metavar="N", help=f"the last N days (default: {_DEFAULT_DAYS})")
    when.add_argument("--since", type=_date, metavar="DATE", help="from this day on, like 2026-11-01")
    parser.add_argument("--until", type=_date, metavar="DATE", help="with --since: up to the beginning of this day")
    parser.add_argument(
        "--by",
        choices=("user", "project", "gpu", "command", "day"),
        default="user",
        help="what the rows are (default: user)",
    )
    form = parser.add_mutually_exclusive_group()
    add_json(form, "the sums")
    form.add_argument("--csv", action="store_true", help="print the sums as CSV on standard output")


def _days(word: str) -> float:
    try:
        found = float(word)
    except ValueError:
        found = 0.0
    if not 0 < found <= 36_600:
        raise argparse.ArgumentTypeError(f"{word!r} is not a number of days; write 7")
    return found


def _date(word: str) -> datetime:
    try:
        return datetime.strptime(word, "%Y-%m-%d")
    except ValueError:
        raise argparse.ArgumentTypeError(f"{word!r} is not a day; write 2026-11-01") from None


def run_usage(args: argparse.Namespace) -> int:
    """Prints the table, JSON or CSV."""
    from gpuherd.gpus.lease_files import user_name
    from gpuherd.ledger.reader import Ledger, believed
    from gpuherd.ledger.usage import usage

    since, until = _span(args, datetime.now())
    ledger = Ledger.existing()
    if ledger is None:
        print_note("there is no ledger yet: gpuherd begins one when it runs something on a GPU (gpuherd record: now)")
        found = usage((), args.by, since, until, reader_uid=0)
        problems: list[str] = []
    else:
        reader_uid = ledger.reader_uid
        with ExitStack() as stack:
            records = list(ledger.read(since, until, _LateBar(stack)))
        found = usage(
            believed(records, reader_uid, others=True),
            args.by,
            since,
            until,
            reader_uid=reader_uid,
            user_name=user_name,
        )
        problems = [
            f"{count} lines of {user_name(owner)} in {ledger.folder} are no records and were passed over"
            for owner, count in sorted(ledger.skipped.items())
            if count
        ]
    for problem in problems:
        print_note(clean(problem))
    if args.json:
        print_json(_as_json(found, args.by, since, until, ledger))
    elif args.csv:
        from gpuherd.ledger.figures import csv_of

        sys.stdout.write(csv_of(found, args.by))
    else:
        _print_table(found, args.by, since, until, ledger)
    return ExitCode.OK


class _LateBar:
    """A progress bar that appears when reading takes longer than a moment."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack, self._began = stack, time.monotonic()
        self._bar: Progress | None = None
        self._shown = False

    def __call__(self, done: float, total: float) -> None:
        if not self._shown and time.monotonic() - self._began >= _LATE_S:
            self._shown = True
            self._update = progress_of(self._stack.enter_context(progress_bar(in_bytes=True)), "reading the ledger")
        if self._shown and self._update is not None:
            self._update(done, total)


def _span(args: argparse.Namespace, now: datetime) -> tuple[float, float]:
    """The wall-clock seconds from which and to which it counts. Raises UsageError for a month that is none."""
    if args.until is not None and args.since is None:
        raise UsageError("--until goes with --since; write --since 2026-11-01 --until 2026-11-15")
    if args.month is not None:
        word = args.month or now.strftime("%Y-%m")
        if not re.fullmatch(r"\d{4}-(0[1-9]|1[0-2])", word, re.ASCII) or word < "1970":
            raise UsageError(f"{word!r} is no month; write --month 2026-11")
        first = datetime.strptime(word, "%Y-%m")
        last = (first + timedelta(days=32)).replace(day=1)
        return first.timestamp(), last.timestamp()
    if args.since is not None:
        end = args.until or now
        if end <= args.since:
            raise UsageError(f"{args.since:%Y-%m-%d} is not before {end:%Y-%m-%d}")
        return args.since.timestamp(), end.timestamp()
    days = _DEFAULT_DAYS if args.days is None else args.days
    return (now - timedelta(days=days)).timestamp(), now.timestamp()


# ---- forms -----------------------------------------------------------------------------------------------------------


def _as_json(found: Usage, by: str, since: float, until: float, ledger: Ledger | None) -> dict[str, Any]:
    from gpuherd.ledger.figures import Figures

    return {
        "since": since,
        "until": until,
        "by": by,
        "ledger": None if ledger is None else str(ledger.folder),
        "shared": ledger is not None and ledger.shared,
        "skipped_lines": 0 if ledger is None else sum(ledger.skipped.values()),
        "rows": [{by: row.key, "share": round(row.share, 6)} | Figures.of(row.total).values() for row in found.rows],
        "total": Figures.of(found.total).values(),
    }


def _print_table(found: Usage, by: str, since: float, until: float, ledger: Ledger | None) -> None:
    from rich.console import Console

    from gpuherd.columns import Column, fitted, window

    where = "" if ledger is None else (" of all users" if ledger.shared else " of your own gpuherds")
    print(f"GPU hours from {_day(since)} to {_day(until)}, by {by}, by the ledger{where}")
    if not found.rows:
        print("nothing was recorded in this time")
        return
    columns = (
        Column(by, 0, least=8, middle=by == "gpu"),
        Column("GPU-hours", 1, right=True),
        Column("share", 2, right=True),
        Column("", 5),
        Column("computing", 3, right=True),
        Column("kWh", 4, right=True),
        Column("mean MB", 6, right=True),
        Column("peak MB", 7, right=True),
        Column("uses", 8, right=True),
        Column("now", 9, right=True),
    )
    largest = max(row.share for row in found.rows)
    rows = [_cells(row, largest) for row in found.rows]
    if len(rows) > 1:
        rows.append(_figures("all", found.total, "100 %", ""))
    console = Console(highlight=False)
    table = fitted(columns, rows, window(console))
    table.show(console)
    table.show_left_out(console)
    if found.total.reported_only_s > 0:
        print("*: (partly) reported by others than the user, root or you: shown, and counted for nothing")
    if ledger is not None and not ledger.shared:
        print("other users' own records are not here: an administrator shares one ledger by gpuherd setup-machine")


def _cells(row: Row, largest: float) -> list[str]:
    return _figures(row.key, row.total, f"{row.share:.1%}".replace("%", " %"), _bar(row.share / (largest or 1.0)))


def _figures(key: str, total: Total, share: str, bar: str) -> list[str]:
    mark = " *" if total.reported_only_s > 0 else ""
    return [
        clean(key) + mark,
        f"{total.held_s / 3600:,.2f}",
        share,
        bar,
        "N/A" if total.computing is None else f"{total.computing:.0%}".replace("%", " %"),
        "N/A" if total.energy_j is None else f"{total.energy_j / 3.6e6:,.2f}",
        "N/A" if total.mean_mb is None else f"{total.mean_mb:,.0f}",
        "N/A" if total.peak_mb is None else f"{total.peak_mb:,}",
        str(total.uses),
        str(total.going_on or ""),
    ]


def _bar(share: float) -> str:
    """A bar of at most ``_BAR_CELLS`` cells, in eighths of a cell; of # where the output has no such characters."""
    try:
        _BARS.encode(sys.stdout.encoding or "utf-8")
    except (UnicodeEncodeError, LookupError):
        return "#" * round(share * _BAR_CELLS)
    whole, eighths = divmod(round(share * _BAR_CELLS * 8), 8)
    return "█" * whole + (_BARS[eighths - 1] if eighths else "")


def _day(wall: float) -> str:
    return datetime.fromtimestamp(wall).strftime("%Y-%m-%d %H:%M")


# ---- gpuherd record --------------------------------------------------------------------------------------------------

RECORD = """\
Records who uses this machine's GPUs, until Ctrl-C: also what runs without gpuherd. While any gpuherd runs on a GPU it
does the same on the way; this is for a record without gaps. Run by root, it counts for all users.

examples:
  gpuherd record                                     a sample every 10 seconds
  gpuherd record --every 1m
  gpuherd record --prometheus 9200                   also serve the sums at http://127.0.0.1:9200/metrics
  gpuherd record --systemd user > ~/.config/systemd/user/gpuherd-record.service
  gpuherd record --systemd system | sudo tee /etc/systemd/system/gpuherd-record.service
"""
_SHORTEST_EVERY_S, _LONGEST_EVERY_S = 1.0, 600.0


def add_record(parser: Parser) -> None:
    parser.add_argument(
        "--every", type=_every, default=10.0, metavar="TIME", help="time between two samples (default: 10s)"
    )
    parser.add_argument(
        "--prometheus",
        type=_port,
        metavar="PORT",
        help="serve metrics for Prometheus on this port of 127.0.0.1 (docs/grafana.json is a dashboard)",
    )
    parser.add_argument(
        "--systemd",
        nargs="?",
        const="user",
        choices=("user", "system"),
        help="print a unit file for systemd and exit (default: of a user's own services)",
    )


def _port(word: str) -> int:
    from gpuherd.jobs.options import port

    try:
        return port(word)
    except ValueError as problem:
        raise argparse.ArgumentTypeError(str(problem)) from None


def _every(word: str) -> float:
    try:
        found = duration_s(word)
    except ValueError as problem:
        raise argparse.ArgumentTypeError(str(problem)) from None
    if not _SHORTEST_EVERY_S <= found <= _LONGEST_EVERY_S:
        raise argparse.ArgumentTypeError(f"{word!r} is not a time from 1s to 10m")
    return found


def run_record(args: argparse.Namespace) -> int:
    """Samples until a signal, or prints the unit file."""
    if args.systemd is not None:
        print(_unit(args.systemd, args.every, args.prometheus), end="")
        return ExitCode.OK
    import signal

    from gpuherd.ledger.watcher import record_others

    ended = False

    def end(_number: int, _frame: object) -> None:
        nonlocal ended
        ended = True

    read_end, write_end = os.pipe()
    os.set_blocking(read_end, False)
    os.set_blocking(write_end, False)
    before = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
    woken = signal.set_wakeup_fd(write_end)
    print_note(f"a sample every {args.every:g} s; Ctrl-C ends it")
    try:
        with ExitStack() as services:
            if args.prometheus is not None:
                from gpuherd.jobs.monitor.machine_metrics import reader_of
                from gpuherd.jobs.monitor.prometheus import TextServer

                server = services.enter_context(TextServer(reader_of(), args.prometheus))
                print_note(f"metrics for Prometheus: http://127.0.0.1:{server.port}/metrics")
            record_others(args.every, lambda: ended, print_note, read_end)
    finally:
        signal.set_wakeup_fd(woken)
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(read_end)
        os.close(write_end)
    return ExitCode.OK


def _unit(kind: str, every_s: float, port: int | None) -> str:
    from gpuherd.gpus.machine_dir import PLACE

    words = [sys.executable, "-m", "gpuherd", "record", "--every", f"{every_s:g}s"]
    words += [] if port is None else ["--prometheus", str(port)]
    lines = [
        "[Unit]",
        "Description=gpuherd record: who uses which GPU",
        "",
        "[Service]",
        f"ExecStart={' '.join(map(_quoted, words))}",
        "Restart=always",
        "RestartSec=30",
        "Nice=10",
        "NoNewPrivileges=yes",
    ]
    if kind == "system":
        lines += ["ProtectSystem=strict", "ProtectHome=read-only", f"ReadWritePaths={PLACE}", "PrivateTmp=yes"]
    lines += ["", "[Install]", f"WantedBy={'default.target' if kind == 'user' else 'multi-user.target'}", ""]
    return "\n".join(lines)


def _quoted(word: str) -> str:
    """A word as systemd reads it."""
    word = word.replace("\\", "\\\\").replace("%", "%%").replace("$", "$$").replace('"', '\\"')
    return f'"{word}"' if re.search(r"[\s\"';\\]", word) else word


# ---- gpuherd setup-machine -------------------------------------------------------------------------------------------

SETUP_MACHINE = """\
Sets this machine up for users who share its GPUs, once, as root: the folder of the common ledger and of reservations
(/var/lib/gpuherd, where no user can change the files of another), and /etc/gpuherd/policy.toml with all settings as
comments. A second call changes nothing. Nothing keeps running.

examples:
  sudo gpuherd setup-machine
  sudo gpuherd setup-machine --group gpuusers     only for the members of this group
  gpuherd setup-machine --dry-run                 what it would do
"""


def add_setup_machine(parser: Parser) -> None:
    parser.add_argument("--group", metavar="NAME", help="only members of this group share the ledger (default: all)")
    parser.add_argument("--dry-run", action="store_true", help="print what would be done")
    parser.add_argument(
        "--root", type=Path, default=Path("/"), metavar="DIR", help="an image's root folder in place of /"
    )
    add_json(parser, "what was done")


def run_setup_machine(args: argparse.Namespace) -> int:
    """Prints a line for each file and folder."""
    from gpuherd.gpus.setup import carry_out, plan

    root = args.root.absolute()
    if not root.is_dir():
        raise UsageError(f"--root {root} is no folder")
    steps = plan(args.group, root)
    if os.geteuid() != 0 and not args.dry_run:
        raise UsageError("only root can set up the machine for all users; run: sudo gpuherd setup-machine")
    if not args.dry_run:
        carry_out(steps)
    if args.json:
        print_json(
            {
                "dry_run": args.dry_run,
                "steps": [{"path": str(step.path), "changed": step.is_needed, "what": step.done} for step in steps],
            }
        )
        return ExitCode.OK
    for line in _lines(steps, dry_run=args.dry_run):
        print(line)
    return ExitCode.OK


def _lines(steps: Sequence[Any], *, dry_run: bool) -> Iterator[str]:
    for step in steps:
        would = "would be " if dry_run and step.is_needed and step.done.startswith("made") else ""
        yield f"{clean(str(step.path))}: {would}{step.done}"
    if any(step.is_needed for step in steps):
        yield "nothing was changed" if dry_run else "done; users' next gpuherds use it"
