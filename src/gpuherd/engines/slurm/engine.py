"""The connection to SLURM: sbatch submits batches as arrays, squeue and sacct report their states.

A batch becomes one array job, or a plain job where it has a single parcel. A batch larger than the site's largest array
becomes several *pieces*. Their names say which parcels they hold, so that they are found again by name.
"""

from __future__ import annotations

import math
import shlex
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from gpuherd.engines.base import Batch, End, EngineAway, EngineMissing, Phase, Placement, Refused, Sighting, Ticket
from gpuherd.engines.batch_system import check_argument, keep_script, notice_s
from gpuherd.engines.slurm import site
from gpuherd.engines.slurm.commands import SLURM, SlurmJobRow
from gpuherd.engines.slurm.options import SlurmOptions
from gpuherd.errors import UsageError, printable
from gpuherd.gpus.lease_files import user_name

# --- a batch as sbatch's arguments and script (pure) ------------------------------------------------------------------

# Options that only gpuherd may give, and why.
_OURS = {
    "--array": "an array's indices are the jobs (--array-limit says how many run at once)",
    "--job-name": "a job is found again by its name",
    "--dependency": "the order of jobs is in their needs",
    "--requeue": "a job that is to run again is submitted again",
    "--parsable": "gpuherd gives it",
    "--wrap": "the script is written here",
    "--wait": "gpuherd does not wait for sbatch itself",
    "--test-only": "nothing would be submitted",
    "--clusters": "set SLURM_CLUSTERS in the environment, so that every program of SLURM asks the same cluster",
    "--nodes": "each job has its own number of nodes",
    "--ntasks": "--ntasks-per-node N, an option of gpuherd's own, says how many run on each node",
    "--ntasks-per-node": "it is an option of gpuherd's own: leave out --slurm-args=",
    "--mpi": "it is an option of gpuherd's own: leave out --slurm-args=",
    "--help": "nothing would be submitted",
    "--usage": "nothing would be submitted",
    "--version": "nothing would be submitted",
}
_SHORT = {
    "-a": "--array",
    "-J": "--job-name",
    "-d": "--dependency",
    "-W": "--wait",
    "-M": "--clusters",
    "-N": "--nodes",
    "-n": "--ntasks",
    "-h": "--help",
    "-V": "--version",
}
# sbatch keeps the time before the end in 16 bits.
_MOST_NOTICE_S = 65535
_MOST_COMMENT = 200


@dataclass(frozen=True, slots=True)
class Piece:
    """The part of a batch that one call of sbatch submits: ``count`` parcels from the one at ``first`` on."""

    batch: str
    first: int
    count: int
    single: bool

    @property
    def name(self) -> str:
        """The SLURM job's name. A batch's own name has no plus sign."""
        return f"{self.batch}+{self.first}" if self.first else self.batch


def pieces(batch: Batch, largest: int) -> tuple[Piece, ...]:
    """The batch in parts of at most ``largest`` parcels (SLURM's MaxArraySize; 0 or 1 where there are no arrays)."""
    size, parcels = max(1, largest), len(batch.parcels)
    starts = range(0, parcels, size)
    return tuple(
        Piece(batch.name, first, count, single=count == 1)
        for first, count in ((first, min(size, parcels - first)) for first in starts)
    )


def named(batch: str, index: int, largest: int) -> tuple[str, int]:
    """The name of the SLURM job that holds a batch's parcel, and the parcel's place in it."""
    size = max(1, largest)
    first = index // size * size
    return (f"{batch}+{first}" if first else batch), index - first


def throttles(batch: Batch, parts: int) -> tuple[int | None, int]:
    """How several arrays keep the batch's ``at_once``: how many parcels of each may run at once (None for any number),
    and how many arrays may; the next one then begins when an earlier one has ended.
    """
    if batch.at_once is None:
        return None, parts
    side_by_side = min(parts, batch.at_once)
    return batch.at_once // side_by_side, side_by_side


def arguments(
    batch: Batch, piece: Piece, options: SlurmOptions, *, throttle: int | None = None, behind: str | None = None
) -> list[str]:
    """The arguments of sbatch.

    Args:
        throttle: how many of this piece may run at once.
        behind: the SLURM job whose end, good or bad, this piece waits for.

    Raises UsageError for wrong ``--slurm-args``.
    """
    asked = batch.placement
    words = ["--parsable", "--no-requeue", f"--job-name={piece.name}", "--export=ALL", f"--chdir={batch.folder}"]
    if not piece.single:
        limit = "" if throttle is None or throttle >= piece.count else f"%{throttle}"
        words.append(f"--array=0-{piece.count - 1}{limit}")
    words += resources(asked, options)
    after = [f"afterok:{':'.join(batch.after)}"] if batch.after else []
    after += [f"afterany:{behind}"] if behind is not None else []
    if after:
        words.append(f"--dependency={','.join(after)}")
    words += ["--kill-on-invalid-dep=yes", f"--signal=B:USR1@{notice(options, asked.time_s)}"]
    words += [f"--output={_output(batch, piece)}", f"--comment={_comment(batch, piece)}"]
    return [*words, *checked(options.slurm_args)]


def resources(asked: Placement, options: SlurmOptions) -> list[str]:
    """The arguments, for sbatch and srun alike, that request the resources and the place. Raises UsageError."""
    words = []
    if asked.gpus:
        words.append(f"--gres=gpu:{options.gpu_type}:{asked.gpus}" if options.gpu_type else f"--gres=gpu:{asked.gpus}")
    words += [f"--nodes={asked.nodes}", f"--ntasks-per-node={asked.tasks}"]
    if asked.cpus is not None:
        words.append(f"--cpus-per-task={cpus_of_task(asked)}")
    if asked.memory_mb is not None:
        words.append(f"--mem={asked.memory_mb}M")
    if asked.time_s is not None:
        words.append(f"--time={_minutes(asked.time_s)}")
    for name in ("partition", "account", "qos", "constraint"):
        value = getattr(options, name)
        if value is not None:
            words.append(f"--{name}={value}")
    return words


def cpus_of_task(asked: Placement) -> int | None:
    """CPU cores of each process that srun starts; None where none are requested. Raises UsageError."""
    if asked.cpus is None:
        return None
    if asked.cpus % asked.tasks:
        raise UsageError(
            f"{asked.cpus} CPU cores on each node can't be shared out among {asked.tasks} processes; ask for a multiple"
        )
    return asked.cpus // asked.tasks


def script(batch: Batch, piece: Piece, options: SlurmOptions) -> str:
    """The script that SLURM runs on the first node: the user's lines, then the command, which replaces the shell, so
    that signals for the script reach it.
    """
    lines = ["#!/bin/bash", f"# {piece.name}: {piece.count} of gpuherd's jobs."]
    cpus = cpus_of_task(batch.placement)
    if cpus is not None:
        # Since SLURM 22.05 srun does not take it from sbatch.
        lines.append(f"export SRUN_CPUS_PER_TASK={cpus}")
    lines += options.setup
    index = _index(piece)
    if piece.first and not piece.single:
        pattern = shlex.quote(str(batch.folder) + "/")
        lines.append(f'exec >>{pattern}{shlex.quote(batch.name)}."{index}".out 2>&1')
    lines.append(f'exec {shlex.join(batch.command)} "{index}"')
    return "\n".join(lines) + "\n"


def notice(options: SlurmOptions, time_s: float | None) -> int:
    """Seconds before its time is up at which a job gets its signal."""
    return notice_s(options.notice, time_s, _MOST_NOTICE_S)


def checked(words: Sequence[str], program: str = "sbatch") -> tuple[str, ...]:
    """``--slurm-args``, checked. Raises UsageError for what is no option, or is gpuherd's own to give."""
    for word in words:
        given = _own_option(word.partition("=")[0])
        check_argument("--slurm-args", word, given, _OURS, program, "--slurm-args=--exclude=n3")
    return tuple(words)


def _own_option(name: str) -> str | None:
    """The option of ``_OURS`` that a word gives, also abbreviated as sbatch would take it; None for another one."""
    if not name.startswith("--"):
        return _SHORT.get(name[:2])
    return next((ours for ours in _OURS if name == ours or (len(name) >= 5 and ours.startswith(name))), None)


def _index(piece: Piece) -> str:
    if piece.single:
        return str(piece.first)
    return f"$((SLURM_ARRAY_TASK_ID + {piece.first}))" if piece.first else "$SLURM_ARRAY_TASK_ID"


def _output(batch: Batch, piece: Piece) -> str:
    """Where SLURM itself writes. A per cent sign in the folder is escaped: it is not one of SLURM's patterns."""
    mark = "\0"
    if piece.single:
        path = str(batch.output(piece.first))
    elif piece.first:
        path = str(batch.folder / f"{piece.name}.{mark}.slurm")
    else:
        path = str(batch.output(mark))
    return path.replace("%", "%%").replace(mark, "%a")


def _comment(batch: Batch, piece: Piece) -> str:
    first = batch.parcels[piece.first].title
    text = first if piece.count == 1 else f"{first} and {piece.count - 1} more"
    return printable(f"gpuherd: {text}")[:_MOST_COMMENT]


def _minutes(seconds: float) -> int:
    """Whole minutes, in which SLURM counts."""
    return max(1, math.ceil(seconds / 60))


# --- the connection ---------------------------------------------------------------------------------------------------

# How long to wait until accounting says who has cancelled a job: it hears of that after the controller.
_WAIT_FOR_A_NAME_S = 10.0
# Jobs and arrays of one call of sacct: their numbers are one argument.
_RECORDED_AT_ONCE = 5000


class SlurmEngine:
    """As ``base.Engine``. Raises UsageError for wrong ``--slurm-args``."""

    name = "slurm"
    look_s = 2.0
    chains = True

    def __init__(self, options: SlurmOptions):
        checked(options.slurm_args)
        self._options = options
        self._accounting = True
        self._mpi_is_known = options.mpi is None
        self._nameless_since: dict[str, float] = {}

    @cached_property
    def _settings(self) -> site.SlurmSettings:
        return site.settings(SLURM.config())

    @property
    def remembers_s(self) -> float:
        """As ``Engine.remembers_s``."""
        return self._settings.remembers_s

    def check(self, wanted: Collection[Placement]) -> Mapping[Placement, str]:
        """As ``Engine.check``; also raises UsageError for a partition that takes no jobs."""
        if not self._mpi_is_known:
            site.refuse_mpi(self._options)
            self._mpi_is_known = True
        there = site.site_now(self._settings.enforced)
        picked = site.chosen(there, self._options, site.named_partition(self._options))
        return site.impossible(picked, wanted, self._options.gpu_type)

    def submit(self, batch: Batch) -> Sequence[str]:
        """As ``Engine.submit``. A batch larger than the site's largest array becomes several arrays; if a later one of
        them is refused, EngineAway is raised: some of the batch is there, and is found by its name.
        """
        parts = pieces(batch, self._settings.array_size)
        throttle, side_by_side = throttles(batch, len(parts))
        handles: list[str] = []
        jobs: list[str] = []
        for number, part in enumerate(parts):
            behind = jobs[number - side_by_side] if number >= side_by_side else None
            words = arguments(batch, part, self._options, throttle=throttle, behind=behind)
            text = script(batch, part, self._options)
            keep_script(batch.folder / f"{part.name}.sh", text)
            try:
                job = SLURM.submit(words, text)
            except Refused as problem:
                if not jobs:
                    raise
                raise EngineAway(f"SLURM has taken {len(handles)} of {len(batch.parcels)} jobs: {problem}") from problem
            jobs.append(job)
            handles += SLURM.handles(job, part.count)
        return handles

    def look(self, tickets: Collection[Ticket]) -> Mapping[int, Sighting]:
        """As ``Engine.look``. squeue is asked about all, and sacct about those that it does not know or calls
        cancelled."""
        if not tickets:
            return {}
        size = self._settings.array_size
        places = {ticket: named(ticket.batch, ticket.index, size) for ticket in tickets}
        names = sorted({name for name, _ in places.values()})
        now = list(SLURM.squeue(names))
        rows = SLURM.rows_of(places, now)
        # Accounting also knows who has cancelled a job.
        unclear = [ticket for ticket in tickets if ticket not in rows or rows[ticket].end is End.CANCELLED]
        recorded = self._recorded({ticket: places[ticket] for ticket in unclear}, now)
        sightings = {}
        for ticket in tickets:
            sighting = self._sighting(rows.get(ticket), recorded.get(ticket), places[ticket][1])
            if sighting is not None:
                sightings[ticket.attempt] = sighting
        return sightings

    def cancel(self, handles: Collection[str]) -> None:
        """As ``Engine.cancel``."""
        SLURM.cancel(handles)

    def close(self) -> None:
        """As ``Engine.close``: there is nothing to close."""

    def _recorded(
        self, places: Mapping[Ticket, tuple[str, int]], now: Collection[SlurmJobRow]
    ) -> dict[Ticket, SlurmJobRow]:
        """Accounting's rows for these. ``now``: the controller's rows."""
        # Whole arrays: asked about a single place, sacct leaves out what became of an array's waiting rest.
        jobs = sorted({SLURM.parts(ticket.handle)[0] for ticket in places if ticket.handle is not None})
        nameless = sorted({name for ticket, (name, _) in places.items() if ticket.handle is None})
        parts = [jobs[at : at + _RECORDED_AT_ONCE] for at in range(0, len(jobs), _RECORDED_AT_ONCE)]
        found: dict[Ticket, SlurmJobRow] = {}
        for handles, names in (*((part, []) for part in parts), ([], nameless)):
            if self._accounting and (handles or names):
                try:
                    rows = SLURM.sacct(jobs=handles, names=names)
                except (EngineAway, EngineMissing):
                    # The database may be away for a long time while the controller works on.
                    continue
                self._accounting = rows is not None
                found |= {**_dropped(places, now, rows or ()), **SLURM.rows_of(places, rows or ())}
        return found

    def _sighting(self, row: SlurmJobRow | None, recorded: SlurmJobRow | None, place: int) -> Sighting | None:
        if recorded is not None and recorded.phase is not Phase.ENDED:
            recorded = None
        by = None if recorded is None or recorded.by is None else user_name(recorded.by)
        if row is None or (row.places is None and recorded is not None and recorded.places is not None):
            # A job that accounting calls alive and the controller does not know is gone: the record is late, or wrong.
            return None if recorded is None else recorded.sighting(place, by=by)
        sighting = row.sighting(place, by=by)
        if sighting.end is End.CANCELLED and recorded is None and self._accounting:
            now = time.monotonic()
            if now - self._nameless_since.setdefault(sighting.handle, now) < _WAIT_FOR_A_NAME_S:
                return Sighting(handle=sighting.handle, phase=Phase.RUNNING, reason="cancelled", node=sighting.node)
        return sighting


def _dropped(
    places: Mapping[Ticket, tuple[str, int]], now: Collection[SlurmJobRow], recorded: Collection[SlurmJobRow]
) -> dict[Ticket, SlurmJobRow]:
    """Those of arrays that controller and accounting both know, to be overruled by what either says of them. Who
    cancels single jobs of an array that waits takes them out of it, and SLURM keeps no record of them at all.
    """
    arrays = {(row.name, row.job) for row in now} & {(row.name, row.job) for row in recorded if not row.is_job}
    found = {}
    for ticket, (name, _) in places.items():
        job, place = (None, 0) if ticket.handle is None else SLURM.parts(ticket.handle)
        if job is not None and (name, job) in arrays:
            only = range(place, place + 1)
            found[ticket] = SlurmJobRow(job=job, places=(only,), state="CANCELLED", name=name)
    return found
