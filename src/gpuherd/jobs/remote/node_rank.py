"""What an engine starts (``NodeSide.start_ranks``) for each process of an attempt that has several:
``python -m gpuherd.jobs.remote.node_rank ENGINE PORT FILE -- WORD...``

It gives the job its place among the nodes (``world``), reports which GPUs the job has there, runs the job, and ends as
it ends. SLURM ends all when one has failed, and returns the highest of all exit codes: that of a signal then, by which
it ended the others. The first that fails therefore leaves its own in ``FILE``, which can be made only once.

srun hands signals to the whole process group, in which the job is too; they do nothing to this process.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from gpuherd.engines import progress
from gpuherd.engines.world import Failure, Rank, node_side
from gpuherd.errors import ExitCode, GpuherdError
from gpuherd.gpus.visible import named_in
from gpuherd.jobs import clock
from gpuherd.jobs.remote.protocol import Claim, claim_on_node, once, say, take

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT)
_NOT_FOUND, _NOT_STARTED, _SIGNALLED = 127, 126, 128


def main(words: Sequence[str]) -> int:
    """The command. Returns the exit code."""
    if len(words) < 5 or not words[1].isdigit() or words[3] != "--":
        say("usage: python -m gpuherd.jobs.remote.node_rank ENGINE PORT FILE -- WORD...")
        return ExitCode.USAGE
    side, file = node_side(words[0]), Path(words[2])
    try:
        rank = side.rank(os.environ, int(words[1]))
    except GpuherdError as problem:
        say(str(problem))
        return problem.exit_code
    for number in _SIGNALS:
        signal.signal(number, lambda *_: None)  # not ignored: the job would inherit that
    node = side.node(os.environ)
    if rank.world.rank > 0 and rank.local == 0:
        claim = Claim(at=clock.wall(), node=node, gpus=named_in(os.environ), pid=os.getpid())
        with suppress(OSError):  # it tells people which GPUs it has, no more
            take(claim_on_node(file, rank.world.rank), claim)
    code = _run(words[4:], rank)
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)  # an interpreter that ends takes handlers away, and one is still coming
    if code != 0:
        ended = Failure(rank.world.rank, node, None if code < 0 else code, -code if code < 0 else None)
        say(str(ended))
        with suppress(OSError):
            once(file, json.dumps(asdict(ended)).encode())
    return code if code >= 0 else _SIGNALLED - code


def first_failure(path: Path) -> Failure | None:
    """The failure in ``FILE``, None where no process has failed."""
    try:
        return Failure(**json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError):
        return None


def _run(argv: Sequence[str], rank: Rank) -> int:
    """The job's exit code, or minus the number of the signal that ended it."""
    environment = {**os.environ, **rank.world.variables(), **rank.variables}
    if rank.world.rank > 0 or rank.local > 0:
        environment.pop(progress.VARIABLE, None)  # one file, for the first to write
    try:
        return subprocess.Popen(argv, env=environment).wait()
    except OSError as problem:
        say(f"can't start {argv[0]!r} on {os.uname().nodename}: {problem.strerror}")
        return _NOT_FOUND if isinstance(problem, FileNotFoundError) else _NOT_STARTED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
