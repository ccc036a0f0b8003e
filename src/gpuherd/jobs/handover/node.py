"""Leads one attempt on its node: ``python -m gpuherd.jobs.handover.node MANIFEST INDEX``.

It claims the attempt, runs it in a session of its own with its log, keeps its time limits, ends all of it when the
node is to make room (SIGTERM, SIGINT, SIGHUP) or its time is nearly up (SIGUSR1), and tells by a file how it has ended.
It exits with 0 only if the job has succeeded, with 1 if it has failed, and with 75 if it may run again: it was
interrupted, or somebody else has it. Of an attempt on several nodes it leads all: in SLURM by ``srun`` (``rank``),
elsewhere by what the engine gives it (``world.Others``), whose nodes ``join``.

Everything comes from the manifest, and everything is told in files beside it: no queue is opened here. What is imported
is little, for this begins once for each attempt.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from gpuherd.engines.stop import Stop
from gpuherd.engines.world import Failure, Others, World, free_port
from gpuherd.errors import ExitCode, GpuherdError, UsageError
from gpuherd.jobs import clock
from gpuherd.jobs.handover.manifest import Manifest, Order, order_of
from gpuherd.jobs.handover.part import Part
from gpuherd.jobs.handover.rank import ask_steps, srun
from gpuherd.jobs.handover.reports import NOT_NOW, Claim, read_claim, read_ended, take
from gpuherd.jobs.handover.telling import INTERRUPTED, exit_code, patiently, say

# What fails for want of space, processes or files is tried again for so long: a claim, a start, a report.
PATIENCE_S = 60.0
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_TIME_UP = signal.SIGUSR1
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, _TIME_UP)


def main(words: Sequence[str]) -> int:
    """The command: a manifest's path and an index in it. Returns the exit code."""
    if len(words) != 2 or not words[1].isdigit():
        say("usage: python -m gpuherd.jobs.handover.node MANIFEST INDEX")
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
    to make room, and so does an exception that is thrown into it (KeyboardInterrupt, SystemExit), which goes on when
    the attempt has ended. If the process dies, a guardian ends the attempt and tells of it.

    Args:
        handle: the engine's word for the attempt, where SLURM's variables do not say it.
        others: the other nodes of an attempt that spans several, where it is not SLURM that starts them.
        patience_s: how long a claim, a start or a report is tried again that fails.

    Raises UsageError for a manifest or an index that is none, OSError where the attempt can't be claimed or told of.
    """
    if stop is None:
        with Stop() as never:
            return lead(manifest, index, never, handle=handle, others=others, patience_s=patience_s)
    told, order = order_of(Path(manifest), index)
    if order.nodes > 1 and others is None and told.engine != "slurm":
        raise UsageError(f"{told.engine} has given one node to an attempt that spans {order.nodes}")
    inherited = environment(os.environ, told, order)
    claim = _claim(inherited, handle)
    if not patiently(lambda: take(Path(order.claim), claim), f"can't claim {order.claim}", patience_s, stop):
        return _taken(order)
    if not _is_out(Path(manifest)):
        say(f"the batch of attempt {order.attempt} is over")
        return INTERRUPTED
    part = Part(manifest, index, order, inherited, patience_s=patience_s)
    if order.nodes > 1:
        part = _spread(part, others)
    return exit_code(part.run(stop, others))


def join(manifest: str, index: int, world: World, stop: Stop | None = None) -> Failure | None:
    """Runs another node's part of an attempt, whose leader is elsewhere. Returns its failure, None if it ended well.

    It may be called as ``lead`` may. Its files are the attempt's with ``node<rank>`` in their names, its log among
    them. Raises UsageError for a manifest or an index that is none, OSError where its end can't be told.
    """
    if stop is None:
        with Stop() as never:
            return join(manifest, index, world, never)
    told, order = order_of(Path(manifest), index)
    inherited = environment(os.environ, told, order)
    ended = Part(manifest, index, order.on_node(world.rank), inherited, world, patience_s=PATIENCE_S).run(stop)
    if ended.well:
        return None
    node = os.uname().nodename
    if not ended.started:
        return Failure(world.rank, node, ExitCode.FAILED)
    return Failure(world.rank, node, ExitCode.FAILED if ended.code == 0 else ended.code, ended.signal)


def environment(own: Mapping[str, str], told: Manifest, order: Order) -> dict[str, str]:
    """What the job inherits on this node. The GPUs are those of the engine.

    What is told goes over the node's own. But SLURM hands on the environment of ``sbatch`` itself, and its own has been
    through the user's lines since (``--setup 'module load cuda'``): there the node's goes over what is told.
    """
    merged = {**told.environment, **own} if told.engine == "slurm" else {**own, **told.environment}
    merged.pop(_VISIBLE, None)
    if order.gpus == 0:
        merged[_VISIBLE] = ""
    elif _VISIBLE in own:
        merged[_VISIBLE] = own[_VISIBLE]
    return merged


def _spread(part: Part, others: Others | None) -> Part:
    """The leader's part of an attempt on several nodes."""
    order = part.order
    port = free_port(order.tag)
    if others is not None:
        return replace(part, world=World(0, order.nodes, others.address, port))
    words = srun(order.nodes, port, order.first_failure, order.argv, part.inherited.get("SLURM_CPUS_PER_TASK"))
    return replace(part, order=replace(order, argv=tuple(words)), ask_all=lambda: ask_steps(part.inherited))


def _taken(order: Order) -> int:
    """Somebody else has it. Only a success may let begin what comes after it (SLURM's ``afterok``)."""
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
    """Whether the batch is not over yet. Its manifest goes before its claims do: who has read it in time and comes late
    with a claim of its own, though the attempt has been run, finds it gone."""
    try:
        with manifest.open("rb"):
            return True
    except OSError as problem:
        return problem.errno not in NOT_NOW


def _claim(inherited: Mapping[str, str], handle: str | None) -> Claim:
    visible = inherited.get(_VISIBLE, "")
    return Claim(
        at=clock.wall(),
        node=os.environ.get("SLURMD_NODENAME") or os.uname().nodename,
        handle=handle or _slurm_handle(os.environ),
        gpus=tuple(name for name in visible.split(",") if name),
        pid=os.getpid(),
    )


def _slurm_handle(variables: Mapping[str, str]) -> str | None:
    array, task = variables.get("SLURM_ARRAY_JOB_ID"), variables.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array and task else variables.get("SLURM_JOB_ID")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
