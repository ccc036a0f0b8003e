"""Which engine a run hands its jobs to: made from the options, remembered for those who come after, and never changed
while the other one has jobs of the folder. Nothing of SLURM or Ray is imported before one of them is asked for.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, fields
from typing import Any

from gpuherd.engines.cluster import Engine
from gpuherd.engines.options import LOCAL, EngineOptions
from gpuherd.errors import CannotWrite, GpuherdError, UsageError
from gpuherd.jobs.durable import private_write
from gpuherd.jobs.queuefile import QueueFile
from gpuherd.jobs.rundir import RunDirectory
from gpuherd.jobs.whereabouts import engine_name


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
