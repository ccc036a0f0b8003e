"""Which engine a run hands its jobs to: made from the options, remembered for those who come after, and never changed
while the other one has jobs of the folder. Nothing of SLURM or Ray is imported before one of them is asked for.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, fields, replace
from typing import TYPE_CHECKING, Any, TypeVar

from gpuherd.engines.cluster import Engine, Placement
from gpuherd.engines.options import LOCAL, EngineOptions, for_this_machine
from gpuherd.errors import CannotWrite, GpuherdError, JobCannotFit, UsageError, printable
from gpuherd.jobs.durable import private_write
from gpuherd.jobs.job import Job
from gpuherd.jobs.options import DispatchOptions
from gpuherd.jobs.queuefile import QueueFile
from gpuherd.jobs.rundir import RunDirectory
from gpuherd.jobs.whereabouts import engine_name

if TYPE_CHECKING:
    from gpuherd.engines.slurm.site import Allocation

DispatchT = TypeVar("DispatchT", bound=DispatchOptions)


def make(options: EngineOptions) -> Engine:
    """The engine of ``options.engine``. Raises EngineMissing, EngineAway and UsageError."""
    if options.engine == "slurm":
        from gpuherd.engines.slurm.engine import SlurmEngine

        return SlurmEngine(options)
    from gpuherd.engines.ray.engine import RayEngine
    from gpuherd.jobs.handover.node import join, lead

    return RayEngine(options, lead, join)


@contextmanager
def opened(options: EngineOptions) -> Iterator[Engine | None]:
    """The engine while the context lasts; None for this machine."""
    if options.engine == LOCAL:
        yield None
        return
    with closing(make(options)) as engine:
        yield engine


def place_inside(wanted: Sequence[Placement], options: EngineOptions, run: RunDirectory | None) -> Allocation | None:
    """The SLURM job, of which this process is a part, that is to run jobs with these wishes; None where they are to be
    handed to the engine. Says which in one line on standard error, where both could be meant.

    A run whose jobs were handed to SLURM before goes on so. ``run``: None where there is no folder yet.

    Raises JobCannotFit where it can't be and ``in_allocation`` wants nothing else; EngineMissing, EngineAway.
    """
    number = os.environ.get("SLURM_JOB_ID")
    if options.engine != "slurm" or options.in_allocation is False or (number is None and not options.in_allocation):
        return None
    from gpuherd.engines.slurm.foreground import place_for

    found: Allocation | str
    if not options.in_allocation and run is not None and recall(run) is not None:
        found = f"jobs of {run.root} were submitted before (--in-allocation runs what is left in this one)"
    else:
        found = place_for(wanted, options, os.environ)
    if not isinstance(found, str):
        # Where SLURM has given this process no GPU, those that the machine has are others'.
        os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
        _tell(f"the jobs run in SLURM job {found.job}, on {found.nodes[0].name} (--no-in-allocation submits them)")
        return found
    if options.in_allocation:
        raise JobCannotFit(f"--in-allocation: {found}; leave it out to submit jobs of their own")
    _tell(f"inside of SLURM job {number}: new jobs are submitted, and wait in SLURM's queue: {found}")
    return None


def settled(jobs: Sequence[Job], options: DispatchT, run: RunDirectory | None) -> DispatchT:
    """The options by which these jobs run: as they are, or those of this machine, where the jobs run inside of the
    SLURM job that this process is a part of. Says so, and raises, as ``place_inside``."""
    if options.engine != "slurm":
        return options
    from gpuherd.jobs.outlook import would_ask

    wanted = [would_ask(job, options) for job in jobs]
    found = place_inside(wanted, options, run)
    if found is None:
        return options
    most = [each for each in (options.max_concurrent, options.array_limit, found.at_once(wanted)) if each is not None]
    return replace(for_this_machine(options), max_concurrent=min(most, default=None))


def _tell(sentence: str) -> None:
    sys.stderr.write(f"gpuherd: {printable(sentence)}\n")
    sys.stderr.flush()


def refuse_other_hands(queue: QueueFile, run: RunDirectory, options: EngineOptions) -> None:
    """Raises UsageError when jobs of this folder are in other hands than those of ``options``: they must end there, or
    be ended, before others may have it.
    """
    elsewhere: dict[str, int] = {}
    for record in queue.running():
        if not queue.owns(record):
            continue
        if record.handed is not None:
            elsewhere[record.handed.engine] = elsewhere.get(record.handed.engine, 0) + 1
        elif record.process is not None and record.process.is_alive():
            elsewhere[LOCAL] = elsewhere.get(LOCAL, 0) + 1
    for engine, jobs in elsewhere.items():
        how = f"go on with --engine {engine}, or end them first: gpuherd cancel --run {run.root} --all"
        if engine != options.engine:
            many = jobs > 1
            where = f"{'are' if many else 'is'} in the hands of {engine_name(engine)}"
            if engine == LOCAL:
                where = f"{'run' if many else 'runs'} on this machine"
            raise UsageError(f"{jobs} job{'s' if many else ''} of {run.root} {where}; {how}")
        before = recall(run)
        if before is not None and before.ray_address != options.ray_address:
            known = "the Ray of this machine" if before.ray_address is None else f"Ray at {before.ray_address}"
            address = "without --ray-address" if before.ray_address is None else f"--ray-address {before.ray_address}"
            raise UsageError(f"{jobs} jobs of {run.root} are in the hands of {known}; go on {address}")


def remember(run: RunDirectory, options: EngineOptions) -> None:
    """Writes down what the engine was asked by. Raises CannotWrite."""
    values = asdict(options)
    known = {each.name: values[each.name] for each in fields(EngineOptions)}
    try:
        run.handover.mkdir(exist_ok=True)
        private_write(run.engine_options, json.dumps(known).encode())
    except OSError as problem:
        raise CannotWrite(
            f"can't write in {run.handover}: {problem.strerror}; put that right and start again"
        ) from None


def recall(run: RunDirectory) -> EngineOptions | None:
    """The options of the last engine that this folder's jobs were handed to; None where there was none."""
    try:
        values = json.loads(run.engine_options.read_bytes())
        known: dict[str, Any] = {}
        for each in fields(EngineOptions):
            if each.name in values:
                value = values[each.name]
                known[each.name] = tuple(value) if isinstance(value, list) else value
        return EngineOptions(**known)
    except (OSError, ValueError, TypeError, AttributeError, GpuherdError):
        return None
