"""The connection to SLURM: sbatch submits batches as arrays, squeue and sacct report their states."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path

from gpuherd.engines.base import Batch, End, EngineAway, EngineMissing, Phase, Placement, Refused, Sighting, Ticket
from gpuherd.engines.slurm import parse, site, translate
from gpuherd.engines.slurm.commands import Programs, user_name
from gpuherd.engines.slurm.options import SlurmOptions
from gpuherd.engines.slurm.parse import Row
from gpuherd.errors import CannotWrite

# Jobs of one call of scancel: each is a request to the controller.
_CANCEL_AT_ONCE = 500
# How long to wait until accounting says who has cancelled a job: it hears of that after the controller.
_WAIT_FOR_A_NAME_S = 10.0
# Jobs and arrays of one call of sacct: their numbers are one argument.
_RECORDED_AT_ONCE = 5000


def refuse_unknown_mpi(options: SlurmOptions, programs: Programs) -> None:
    """Raises UsageError for an ``--mpi`` that srun doesn't know. If srun does not answer, nodes may still know it."""
    if options.mpi is None:
        return
    try:
        told = programs.mpi_types()
    except (EngineMissing, EngineAway):
        return
    site.refuse_unknown_mpi(options.mpi, told)


class SlurmEngine:
    """As ``base.Engine``. Raises UsageError for wrong ``--slurm-args``."""

    name = "slurm"
    look_s = 2.0
    chains = True

    def __init__(self, options: SlurmOptions):
        translate.checked(options.slurm_args)
        self._options = options
        self._programs = Programs()
        self._accounting = True
        self._mpi_is_known = options.mpi is None
        self._nameless_since: dict[str, float] = {}

    @cached_property
    def _settings(self) -> site.Settings:
        return site.settings(self._programs.config())

    @property
    def remembers_s(self) -> float:
        """As ``Engine.remembers_s``."""
        return self._settings.remembers_s

    def check(self, wanted: Collection[Placement]) -> Mapping[Placement, str]:
        """As ``Engine.check``; also raises UsageError for a partition that takes no jobs."""
        programs, settings = self._programs, self._settings
        if not self._mpi_is_known:
            refuse_unknown_mpi(self._options, programs)
            self._mpi_is_known = True
        there = site.Site(
            partitions=site.partitions(programs.nodes(), programs.partitions()),
            accounts=self._listed(programs.accounts) if "associations" in settings.enforced else None,
            qos=self._listed(programs.qos) if "qos" in settings.enforced else None,
        )
        named = self._options.partition or os.environ.get("SBATCH_PARTITION")
        return site.impossible(site.chosen(there, self._options, named), wanted, self._options.gpu_type)

    def submit(self, batch: Batch) -> Sequence[str]:
        """As ``Engine.submit``. A batch larger than the site's largest array becomes several arrays; if a later one of
        them is refused, EngineAway is raised: some of the batch is there, and is found by its name.
        """
        parts = translate.pieces(batch, self._settings.array_size)
        throttle, side_by_side = translate.throttles(batch, len(parts))
        handles: list[str] = []
        jobs: list[str] = []
        for number, part in enumerate(parts):
            behind = jobs[number - side_by_side] if number >= side_by_side else None
            words = translate.arguments(batch, part, self._options, throttle=throttle, behind=behind)
            text = translate.script(batch, part, self._options)
            _keep(batch.folder / f"{part.name}.sh", text)
            try:
                job = self._programs.sbatch(words, text)
            except Refused as problem:
                if not jobs:
                    raise
                raise EngineAway(f"SLURM has taken {len(handles)} of {len(batch.parcels)} jobs: {problem}") from problem
            jobs.append(job)
            handles += part.handles(job)
        return handles

    def look(self, tickets: Collection[Ticket]) -> Mapping[int, Sighting]:
        """As ``Engine.look``. squeue is asked about all, and sacct about those that it does not know or calls
        cancelled."""
        if not tickets:
            return {}
        size = self._settings.array_size
        places = {ticket: translate.named(ticket.batch, ticket.index, size) for ticket in tickets}
        names = sorted({name for name, _ in places.values()})
        now = list(parse.squeue(self._programs.squeue(names)))
        rows = _found(places, now)
        # Accounting also knows who has cancelled a job.
        unclear = [ticket for ticket in tickets if ticket not in rows or rows[ticket].end is End.CANCELLED]
        recorded = self._recorded({ticket: places[ticket] for ticket in unclear}, now)
        sightings = {}
        for ticket in tickets:
            told = self._told(rows.get(ticket), recorded.get(ticket), places[ticket][1])
            if told is not None:
                sightings[ticket.attempt] = told
        return sightings

    def cancel(self, handles: Collection[str]) -> None:
        """As ``Engine.cancel``."""
        for words in parse.short_lists(list(handles), _CANCEL_AT_ONCE):
            self._programs.scancel(words)

    def close(self) -> None:
        """As ``Engine.close``: there is nothing to close."""

    def _recorded(self, places: Mapping[Ticket, tuple[str, int]], now: Collection[Row]) -> dict[Ticket, Row]:
        """Accounting's rows for these. ``now``: the controller's rows."""
        # Whole arrays: asked about a single place, sacct leaves out what became of an array's waiting rest.
        jobs = sorted({parse.place_of(ticket.handle)[0] for ticket in places if ticket.handle is not None})
        nameless = sorted({name for ticket, (name, _) in places.items() if ticket.handle is None})
        parts = [jobs[at : at + _RECORDED_AT_ONCE] for at in range(0, len(jobs), _RECORDED_AT_ONCE)]
        found: dict[Ticket, Row] = {}
        for handles, names in (*((part, []) for part in parts), ([], nameless)):
            if self._accounting and (handles or names):
                try:
                    text = self._programs.sacct(handles=handles, names=names)
                except (EngineAway, EngineMissing):
                    # The database may be away for a long time while the controller works on.
                    continue
                self._accounting = text is not None
                rows = list(parse.sacct(text or ""))
                found |= {**_dropped(places, now, rows), **_found(places, rows)}
        return found

    def _told(self, row: Row | None, recorded: Row | None, place: int) -> Sighting | None:
        if recorded is not None and not recorded.ended:
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

    def _listed(self, ask: Callable[[], str]) -> frozenset[str] | None:
        """The names that sacctmgr lists; None where it does not answer."""
        try:
            return site.names(ask())
        except (EngineAway, EngineMissing):
            return None


def _found(places: Mapping[Ticket, tuple[str, int]], rows: Iterable[Row]) -> dict[Ticket, Row]:
    """The row of each ticket: by its handle, or by the name alone where the handle is not known. The name must match in
    any case: a controller that has crashed may give a number a second time.
    """
    by_name: dict[str, dict[str, list[Row]]] = {}
    for row in rows:
        by_name.setdefault(row.name, {}).setdefault(row.job, []).append(row)
    found = {}
    for ticket, (name, place) in places.items():
        jobs = by_name.get(name, {})
        if ticket.handle is None:
            candidates = [row for rows_of_job in jobs.values() for row in rows_of_job]
        else:
            job, place = parse.place_of(ticket.handle)
            candidates = jobs.get(job, [])
        # An array whose waiting rest was cancelled names no place any more; its row then stands for the places that no
        # other row names. Its places that have begun go on.
        speaking = [row for row in candidates if row.speaks_of(place)] or [row for row in candidates if row.is_whole]
        if speaking:
            found[ticket] = max(speaking, key=lambda row: int(row.job))
    return found


def _dropped(
    places: Mapping[Ticket, tuple[str, int]], now: Collection[Row], recorded: Collection[Row]
) -> dict[Ticket, Row]:
    """Those of arrays that controller and accounting both know, to be overruled by what either says of them. Who
    cancels single jobs of an array that waits takes them out of it, and SLURM keeps no record of them at all.
    """
    arrays = {(row.name, row.job) for row in now} & {(row.name, row.job) for row in recorded if not row.is_whole}
    found = {}
    for ticket, (name, _) in places.items():
        job, place = (None, 0) if ticket.handle is None else parse.place_of(ticket.handle)
        if job is not None and (name, job) in arrays:
            only = range(place, place + 1)
            found[ticket] = Row(job=job, places=(only,), state="CANCELLED", name=name)
    return found


def _keep(path: Path, text: str) -> None:
    """Keeps the script as it was submitted, for people to look at, readable by its owner alone: lines of --setup may
    hold secrets. Raises CannotWrite."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8", errors="surrogateescape") as file:
            os.fchmod(descriptor, 0o600)  # also a file that an earlier gpuherd wrote
            file.write(text)
    except OSError as problem:
        raise CannotWrite(f"can't write {path}: {problem.strerror}") from problem


# What GPUs the nodes of a SLURM partition have.


def gpus_of_nodes(options: SlurmOptions) -> tuple[Mapping[str, int], ...]:
    """The GPUs of each node of the partition (the one that jobs go to which name none), by SLURM's types; "" for GPUs
    of no type. With ``gpu_type`` only those. Raises EngineMissing, EngineAway, and UsageError for a partition that is
    not there.
    """
    programs = Programs()
    there = site.Site(partitions=site.partitions(programs.nodes(), programs.partitions()))
    named = options.partition or os.environ.get("SBATCH_PARTITION")
    plain = SlurmOptions(engine=options.engine)
    nodes = {node.name: node.gpus for each in site.chosen(there, plain, named) for node in each.nodes}
    wanted = options.gpu_type
    return tuple({name: many for name, many in gpus.items() if wanted in (None, name)} for gpus in nodes.values())
