"""What srun starts on each node of an attempt that spans several:
``python -m gpuherd.jobs.remote.node_rank PORT FILE -- WORD...``

It tells the job its place among the nodes (``world``), and the follower which GPUs the job has there, runs the job, and
ends as it ends. SLURM ends all when one has failed, and tells the highest of all exit codes: that of a signal then, by
which it ended the others. The first that fails therefore leaves its own in ``FILE``, which can be made only once.

srun hands signals to the whole process group, in which the job is too; they do nothing to this process.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from gpuherd.engines import progress
from gpuherd.engines.world import Failure, World, of_slurm, ranks_of_slurm
from gpuherd.errors import ExitCode, GpuherdError
from gpuherd.jobs import clock
from gpuherd.jobs.remote.protocol import Claim, Order, claim_on_node, once, say, take, visible_gpus

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT)
_ANSWER_S = 10.0
_NOT_FOUND, _NOT_STARTED, _SIGNALLED = 127, 126, 128


def srun(order: Order, port: int, cpus: str | None) -> list[str]:
    """The words that start this on each node of the SLURM job that they run in, as often as the order says.

    Args:
        cpus: CPU cores of each process.
    """
    from gpuherd.engines.base import Placement  # here: only what srun starts needs these
    from gpuherd.engines.slurm.translate import steps

    asked = Placement(gpus=order.gpus or 0, nodes=order.job.nodes, tasks=order.tasks)
    words = [*steps(asked, cpus=cpus, mpi=order.mpi), sys.executable, "-m", "gpuherd.jobs.remote.node_rank"]
    return [*words, str(port), str(order.first_failure), "--", *order.job.argv]


def ask_steps(variables: Mapping[str, str]) -> bool:
    """Sends SIGTERM to what srun has started in the SLURM job of these variables, on all of its nodes; False where that
    can't be done.

    A signal to srun itself would not do: it takes SIGTERM for the wish to end all, and leaves SLURM's KillWait for it.
    """
    job = variables.get("SLURM_JOB_ID")
    if job is None:
        return False
    try:
        words = ["scancel", "--signal=TERM", job]
        return subprocess.run(words, stdin=subprocess.DEVNULL, timeout=_ANSWER_S, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def main(words: Sequence[str]) -> int:
    """The command. Returns the exit code."""
    if len(words) < 4 or not words[0].isdigit() or words[2] != "--":
        say("usage: python -m gpuherd.jobs.remote.node_rank PORT FILE -- WORD...")
        return ExitCode.USAGE
    try:
        world = of_slurm(os.environ, int(words[0]))
    except GpuherdError as problem:
        say(str(problem))
        return problem.exit_code
    for number in _SIGNALS:
        signal.signal(number, lambda *_: None)  # not ignored: the job would inherit that
    node = os.environ.get("SLURMD_NODENAME") or os.uname().nodename
    if world.rank > 0 and os.environ.get("SLURM_LOCALID", "0") == "0":
        claim = Claim(at=clock.wall(), node=node, gpus=visible_gpus(os.environ), pid=os.getpid())
        with suppress(OSError):  # it tells people which GPUs it has, no more
            take(claim_on_node(Path(words[1]), world.rank), claim)
    code = _run(words[3:], world)
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)  # an interpreter that ends takes handlers away, and one is still coming
    if code != 0:
        ended = Failure(world.rank, node, None if code < 0 else code, -code if code < 0 else None)
        say(str(ended))
        with suppress(OSError):
            once(Path(words[1]), json.dumps(asdict(ended)).encode())
    return code if code >= 0 else _SIGNALLED - code


def first_failure(path: Path) -> Failure | None:
    """What ``FILE`` says, None where nobody has failed."""
    try:
        return Failure(**json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError):
        return None


def _run(argv: Sequence[str], world: World) -> int:
    """The job's exit code, or minus the number of the signal that ended it."""
    environment = {**os.environ, **world.variables(), **ranks_of_slurm(os.environ)}
    if world.rank > 0 or os.environ.get("SLURM_LOCALID", "0") != "0":
        environment.pop(progress.VARIABLE, None)  # one file, for the first to write
    try:
        return subprocess.Popen(argv, env=environment).wait()
    except OSError as problem:
        say(f"can't start {argv[0]!r} on {os.uname().nodename}: {problem.strerror}")
        return _NOT_FOUND if isinstance(problem, FileNotFoundError) else _NOT_STARTED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
