"""The program on a node: ``python -m gpuherd.jobs.remote.agent MANIFEST INDEX`` leads one attempt.

It claims the attempt, runs it in a session of its own with its log, enforces its time limits, ends all of it when the
node is to make room (SIGTERM, SIGINT, SIGHUP, SIGUSR2) or its time is nearly up (SIGUSR1), and reports its end in a
file. It exits with 0 only if the job has succeeded, with 1 if it has failed, and with 75 if it may run again: it was
interrupted, or another process has it. Of an attempt on several nodes it leads all: by a command of the engine that
starts ``agent rank`` on each, elsewhere by what the engine gives it (``world.Others``), whose nodes ``join``.

``agent rank ENGINE PORT FILE -- WORD...`` runs one of several processes of an attempt, and ``agent guardian ...`` ends
an attempt whose leader has died (``node_job.Guardian``).

All input comes from the manifest, and all reports go into files next to it: no queue is opened here. Imports are few,
because this process starts once for each attempt.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path

from gpuherd.engines import progress
from gpuherd.engines.world import NodeFailure, NodeSide, Others, Rank, RankStarter, Stop, World, free_port, node_side
from gpuherd.errors import ExitCode, GpuherdError, UsageError
from gpuherd.gpus.visible import chosen_in, named_in, without
from gpuherd.gpus.visible import environment as visible_environment
from gpuherd.jobs import clock
from gpuherd.jobs.remote import NEEDS_LOOK_S, PATIENCE_S
from gpuherd.jobs.remote.node_job import NodePart, guard
from gpuherd.jobs.remote.protocol import (
    INTERRUPTED,
    NOT_NOW,
    TOO_EARLY,
    Claim,
    EndReport,
    Manifest,
    Order,
    claim_on_node,
    create_exclusive,
    exit_code,
    order_of,
    patiently,
    present,
    read_claim,
    read_ended,
    say,
    take,
)

_USAGE = """\
usage: python -m gpuherd.jobs.remote.agent MANIFEST INDEX
       python -m gpuherd.jobs.remote.agent rank ENGINE PORT FILE -- WORD..."""
_TIME_UP = signal.SIGUSR1
# SIGUSR2 is Grid Engine's word that SIGKILL follows.
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR2, _TIME_UP)
_NOT_FOUND, _NOT_STARTED, _SIGNALLED = 127, 126, 128


def main(words: Sequence[str]) -> int:
    """The command. Returns the exit code."""
    try:
        match words:
            case ["rank", engine, port, file, "--", _, *_] if port.isdigit():
                return _run_rank(engine, int(port), Path(file), words[5:])
            case ["guardian", *rest]:
                return guard(rest)
            case [manifest, index] if index.isdigit():
                return _lead_here(manifest, int(index))
    except (GpuherdError, OSError) as problem:
        say(str(problem))
        return problem.exit_code if isinstance(problem, GpuherdError) else ExitCode.CANNOT_WRITE
    say(_USAGE)
    return ExitCode.USAGE


def _lead_here(manifest: str, index: int) -> int:
    """Leads an attempt in this process, which signals ask to make room."""
    with Stop() as stop:
        for number in _SIGNALS:
            signal.signal(number, lambda number, _frame: stop.ask(time_up=number == _TIME_UP))
        try:
            return lead(manifest, index, stop)
        finally:
            for number in _SIGNALS:
                signal.signal(number, signal.SIG_IGN)  # nothing is left to be stopped


def lead(
    manifest: str,
    index: int,
    stop: Stop | None = None,
    *,
    handle: str | None = None,
    others: Others | None = None,
    patience_s: float = PATIENCE_S,
) -> int:
    """Runs the attempt at this place of the manifest, from its claim to the report of its end. Returns the exit code.

    It may be called in a process that lives on, in any thread; it installs no signal handlers there. ``stop`` asks it
    to make room, and so does an exception that is thrown into it (KeyboardInterrupt, SystemExit), which propagates when
    the attempt has ended. If the process dies, a guardian ends the attempt and reports its end.

    Args:
        handle: the engine's word for the attempt, where the node's variables do not give it.
        others: the other nodes of an attempt that spans several, where ``RankStarter.start_ranks`` does not start them.
        patience_s: how long a claim, a start or a report is tried again that fails.

    Raises UsageError for an invalid manifest or index, OSError where the attempt can't be claimed or reported.
    """
    if stop is None:
        with Stop() as never:
            return lead(manifest, index, never, handle=handle, others=others, patience_s=patience_s)
    shared, order = order_of(Path(manifest), index)
    side = node_side(shared.engine)
    if order.job.nodes > 1 and others is None and not side.starts_ranks:
        raise UsageError(f"{shared.engine} has given one node to an attempt that spans {order.job.nodes}")
    if order.has_ranks and others is None:
        _starter(side, shared.engine)
    inherited = environment(os.environ, shared, order)
    claim = _claim(inherited, handle, order, others, side)
    missing = _missing(order, stop)
    if missing is not None:
        # The dispatcher decides what follows; here the claim makes sure that the attempt never begins.
        say(f"attempt {order.attempt} does not begin: {missing}")
        claim = replace(claim, void=True, why=TOO_EARLY)
    if not patiently(lambda: take(Path(order.claim), claim), f"can't claim {order.claim}", patience_s, stop):
        return _taken(order)
    if missing is not None:
        return INTERRUPTED
    if not _is_out(Path(manifest)):
        say(f"the batch of attempt {order.attempt} is over")
        return INTERRUPTED
    part = NodePart(manifest, index, order, inherited, patience_s=patience_s)
    if order.has_ranks:
        part = _spread(part, others, side, shared.engine)
    return exit_code(part.run(stop, others))


def join(manifest: str, index: int, world: World, stop: Stop | None = None) -> NodeFailure | None:
    """Runs another node's part of an attempt, whose leader is elsewhere. Returns its failure, None if it ended well.

    It may be called as ``lead`` may. Its files, log included, are the attempt's with ``node<rank>`` in their names.
    Raises UsageError for an invalid manifest or index, OSError where its end can't be reported.
    """
    if stop is None:
        with Stop() as never:
            return join(manifest, index, world, never)
    shared, order = order_of(Path(manifest), index)
    side = node_side(shared.engine)
    inherited = environment(os.environ, shared, order)
    here = order.on_node(world.rank)
    with suppress(OSError):  # it tells people which GPUs it has, no more
        take(Path(here.claim), _claim(inherited, None, here, None, side))
    ended = NodePart(manifest, index, here, inherited, world, patience_s=PATIENCE_S).run(stop)
    if ended.well:
        return None
    node = os.uname().nodename
    if not ended.started:
        return NodeFailure(world.rank, node, ExitCode.FAILED)
    return NodeFailure(world.rank, node, ExitCode.FAILED if ended.code == 0 else ended.code, ended.signal)


def environment(own: Mapping[str, str], shared: Manifest, order: Order) -> dict[str, str]:
    """What the job inherits on this node. The GPUs are those of the engine; which environment goes over the other is
    ``NodeSide.own_environment_wins``."""
    wins = node_side(shared.engine).own_environment_wins
    merged = {**shared.environment, **own} if wins else {**own, **shared.environment}
    return without(merged) | (visible_environment(()) if order.gpus == 0 else chosen_in(own))


def _missing(order: Order, stop: Stop) -> str | None:
    """Why the attempt must not begin, None where all that it depends on has succeeded. That an engine starts it proves
    nothing: SLURM counts a job that it has forgotten as one that has succeeded.

    A missing report may be on its way over the network, and is waited for. Where none was ever written (the quota was
    used up), the job waits again until the queue has the success from the engine's accounting.
    """
    until = clock.mono() + order.delay_s
    for path in map(Path, order.after):
        while (ended := _read_now(path)) is None:
            if stop.asked or clock.mono() >= until:
                return f"{path.name} is not there, which would tell of the success of what it needs"
            time.sleep(NEEDS_LOOK_S)
        if not ended.well:
            return f"{path.name} tells that what it needs has not succeeded"
    return None


def _read_now(path: Path) -> EndReport | None:
    """A report as the server of a network file system has it now; None where it is missing or can't be read."""
    try:
        return read_ended(path) if path.name in present(path.parent) else None
    except OSError:
        return None


def _spread(part: NodePart, others: Others | None, side: NodeSide, engine: str) -> NodePart:
    """The leader's part of an attempt on several nodes, or of several processes. Raises UsageError where there are no
    ``others`` and the engine starts no ranks."""
    order = part.order
    port = free_port(order.tag)
    if others is not None:
        return replace(part, world=World(0, order.job.nodes, others.address, port))
    starter = _starter(side, engine)
    start = starter.start_ranks(order.job.nodes, order.tasks, order.mpi, part.inherited)
    rank = (sys.executable, "-m", "gpuherd.jobs.remote.agent", "rank", engine, str(port), str(order.first_failure))
    led = replace(order, job=replace(order.job, argv=(*start, *rank, "--", *order.job.argv)))
    return replace(part, order=led, ask_all=lambda: starter.end_ranks(part.inherited))


def _starter(side: NodeSide, engine: str) -> RankStarter:
    if not isinstance(side, RankStarter):
        raise UsageError(f"{engine} starts no processes of an attempt")
    return side


def _taken(order: Order) -> int:
    """Another process has the attempt. Only a success may let its successors begin (SLURM's ``afterok``)."""
    claim, ended = read_claim(Path(order.claim)), read_ended(Path(order.ended))
    if ended is not None:
        say(f"attempt {order.attempt} has ended before")
        return exit_code(ended)
    if claim is not None and claim.void:
        say(f"attempt {order.attempt} is not to run any more")
    else:
        say(f"attempt {order.attempt} is run by {'another' if claim is None else claim.node} already")
    return INTERRUPTED


def _is_out(manifest: Path) -> bool:
    """Whether the batch is not over yet. Its manifest is removed before its claims: an agent that read the manifest in
    time, but claims the attempt late, after it has been run, finds the manifest gone."""
    try:
        with manifest.open("rb"):
            return True
    except OSError as problem:
        return problem.errno not in NOT_NOW


def _claim(
    inherited: Mapping[str, str], handle: str | None, order: Order, others: Others | None, side: NodeSide
) -> Claim:
    node = side.node(os.environ)
    further: tuple[str, ...] = ()
    if order.job.nodes > 1:
        further = side.nodes(os.environ) if others is None else others.names
    return Claim(
        at=clock.wall(),
        node=node,
        others=tuple(name for name in further if name != node),
        handle=handle or side.handle(os.environ),
        gpus=named_in(inherited),
        pid=os.getpid(),
    )


# One of several processes of an attempt, as the engine starts it (``RankStarter.start_ranks``). It gives the job its
# place among the nodes (``world``), reports which GPUs the job has there, runs the job, and ends as it ends. SLURM ends
# all when one has failed, and returns the highest of all exit codes: then that of a signal, by which it ended others.
# The first that fails therefore leaves its own in ``file``, which can be created only once.
#
# srun hands signals to the whole process group, in which the job is too; they do nothing to this process.

_RANK_SIGNALS = (*_SIGNALS, signal.SIGQUIT)


def _run_rank(engine: str, port: int, file: Path, argv: Sequence[str]) -> int:
    side = _starter(node_side(engine), engine)
    rank = side.rank(os.environ, port)
    for number in _RANK_SIGNALS:
        signal.signal(number, lambda *_: None)  # not ignored: the job would inherit that
    node = side.node(os.environ)
    if rank.world.rank > 0 and rank.local == 0:
        claim = Claim(at=clock.wall(), node=node, gpus=named_in(os.environ), pid=os.getpid())
        with suppress(OSError):  # it tells people which GPUs it has, no more
            take(claim_on_node(file, rank.world.rank), claim)
    code = _run(argv, rank)
    for number in _RANK_SIGNALS:
        signal.signal(number, signal.SIG_IGN)  # an interpreter that ends takes handlers away, and one is still coming
    if code != 0:
        ended = NodeFailure(rank.world.rank, node, None if code < 0 else code, -code if code < 0 else None)
        say(str(ended))
        with suppress(OSError):
            create_exclusive(file, json.dumps(asdict(ended)).encode())
    return code if code >= 0 else _SIGNALLED - code


def _run(argv: Sequence[str], rank: Rank) -> int:
    """The job's exit code, or minus the number of the signal that ended it."""
    variables = {**os.environ, **rank.world.variables(), **rank.variables}
    if rank.world.rank > 0 or rank.local > 0:
        variables.pop(progress.VARIABLE, None)  # one file, for the first to write
    try:
        return subprocess.Popen(argv, env=variables).wait()
    except OSError as problem:
        say(f"can't start {argv[0]!r} on {os.uname().nodename}: {problem.strerror}")
        return _NOT_FOUND if isinstance(problem, FileNotFoundError) else _NOT_STARTED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
