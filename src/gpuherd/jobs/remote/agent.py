"""Leads one attempt on its node: ``python -m gpuherd.jobs.remote.agent MANIFEST INDEX``.

It claims the attempt, runs it in a session of its own with its log, enforces its time limits, ends all of it when the
node is to make room (SIGTERM, SIGINT, SIGHUP, SIGUSR2) or its time is nearly up (SIGUSR1), and reports its end in a
file. It exits with 0 only if the job has succeeded, with 1 if it has failed, and with 75 if it may run again: it was
interrupted, or another process has it. Of an attempt on several nodes it leads all: by a command of the engine that
starts a ``node_rank`` on each, elsewhere by what the engine gives it (``world.Others``), whose nodes ``join``.

All input comes from the manifest, and all reports go into files next to it: no queue is opened here. Imports are few,
because this process starts once for each attempt.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from gpuherd.engines.world import Failure, NodeSide, Others, Stop, World, free_port, node_side
from gpuherd.errors import ExitCode, GpuherdError, UsageError
from gpuherd.gpus.visible import chosen_in, named_in, without
from gpuherd.gpus.visible import environment as visible_environment
from gpuherd.jobs import clock
from gpuherd.jobs.remote import NEEDS_LOOK_S, PATIENCE_S
from gpuherd.jobs.remote.node_job import NodePart
from gpuherd.jobs.remote.protocol import (
    INTERRUPTED,
    NOT_NOW,
    TOO_EARLY,
    Claim,
    EndReport,
    Manifest,
    Order,
    exit_code,
    order_of,
    patiently,
    present,
    read_claim,
    read_ended,
    say,
    take,
)

_RANK = "gpuherd.jobs.remote.node_rank"
_TIME_UP = signal.SIGUSR1
# SIGUSR2 is Grid Engine's word that SIGKILL follows.
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR2, _TIME_UP)


def main(words: Sequence[str]) -> int:
    """The command: a manifest's path and an index in it. Returns the exit code."""
    if len(words) != 2 or not words[1].isdigit():
        say("usage: python -m gpuherd.jobs.remote.agent MANIFEST INDEX")
        return ExitCode.USAGE
    with Stop() as stop:
        for number in _SIGNALS:
            signal.signal(number, lambda number, _frame: stop.ask(time_up=number == _TIME_UP))
        try:
            return lead(words[0], int(words[1]), stop)
        except (GpuherdError, OSError) as problem:
            say(str(problem))
            return problem.exit_code if isinstance(problem, GpuherdError) else ExitCode.CANNOT_WRITE
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
        others: the other nodes of an attempt that spans several, where ``NodeSide.start_ranks`` does not start them.
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


def join(manifest: str, index: int, world: World, stop: Stop | None = None) -> Failure | None:
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
        return Failure(world.rank, node, ExitCode.FAILED)
    return Failure(world.rank, node, ExitCode.FAILED if ended.code == 0 else ended.code, ended.signal)


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
    """The leader's part of an attempt on several nodes, or of several processes."""
    order = part.order
    port = free_port(order.tag)
    if others is not None:
        return replace(part, world=World(0, order.job.nodes, others.address, port))
    start = side.start_ranks(order.job.nodes, order.tasks, order.mpi, part.inherited)
    words = (*start, sys.executable, "-m", _RANK, engine, str(port), str(order.first_failure), "--", *order.job.argv)
    led = replace(order, job=replace(order.job, argv=words))
    return replace(part, order=led, ask_all=lambda: side.end_ranks(part.inherited))


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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
