"""For Grid Engine's nodes: its variables, and the program that starts the processes of an attempt over several nodes,
``python -m gpuherd.engines.gridengine.node WORD...``.

That program runs on the first node of a parallel job, as srun does for SLURM. It starts the words there, and by ``qrsh
-inherit`` on each other node; they get their environment through a pipe, since qrsh passes on only parts of it. When
one of them fails all are ended, and so they are when the pipe ends, because the first node's program was killed.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from gpuherd.engines.host import NAME as PYTHONPATH
from gpuherd.engines.world import Rank, RankStarter, World
from gpuherd.errors import UsageError
from gpuherd.gpus import visible
from gpuherd.gpus.state import Maker
from gpuherd.gpus.visible import CUDA, ROCR, VARIABLES, chosen_in, showing

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_MODULE = "gpuherd.engines.gridengine.node"
_NOT_AN_ARRAY = "undefined"
# By these the program tells each process its place.
_RANK, _NODES, _FIRST = "GPUHERD_NODE_RANK", "GPUHERD_NODES", "GPUHERD_FIRST_NODE"
GPUS = "GPUHERD_NODE_GPUS"  # how many GPUs the job has on each node, from its script
# Variables that Grid Engine, or a site's prolog, has set on that very node.
_OF_THE_NODE = ("SGE_JOB_SPOOL_DIR", "SGE_GPU", "SGE_HGR_gpu", "TMPDIR", "TMP", "HOSTNAME", "QRSH_PORT")
_LEASE_WAIT = "10m"  # for GPUs that others use still
_GRACE_S = 10.0
_LOOK_S = 0.1


class _GridEngineNode(RankStarter):
    """Grid Engine passes on nothing of the environment of qsub; the script sets those variables that hide the user's,
    and the user's lines (``--setup``) have changed them since: the node's go over what was submitted.
    """

    own_environment_wins = True

    def nodes(self, variables: Mapping[str, str]) -> tuple[str, ...]:
        """As ``NodeSide.nodes``."""
        return tuple(hosts(variables))

    def handle(self, variables: Mapping[str, str]) -> str | None:
        """As ``NodeSide.handle``."""
        job, task = variables.get("JOB_ID"), variables.get("SGE_TASK_ID", _NOT_AN_ARRAY)
        return job if job is None or task == _NOT_AN_ARRAY else f"{job}.{task}"

    def start_ranks(self, nodes: int, tasks: int, launcher: str | None, variables: Mapping[str, str]) -> list[str]:  # noqa: ARG002
        """As ``RankStarter.start_ranks``."""
        return [sys.executable, "-m", _MODULE, "all"]

    def rank(self, variables: Mapping[str, str], port: int) -> Rank:
        """As ``RankStarter.rank``."""
        try:
            world = World(int(variables[_RANK]), int(variables[_NODES]), variables[_FIRST], port)
        except (KeyError, ValueError) as problem:
            raise UsageError(f"{_MODULE} has not started this: {problem} among the variables") from None
        return Rank(world, {}, 0)


NODE = _GridEngineNode()


def hosts(variables: Mapping[str, str]) -> list[str]:
    """The nodes of the job, the leader's first; [] where they can't be read."""
    try:
        lines = Path(variables["PE_HOSTFILE"]).read_text(encoding="utf-8").splitlines()
    except (KeyError, OSError, ValueError):
        return []
    return list(dict.fromkeys(line.split()[0] for line in lines if line.strip()))


def main(words: Sequence[str]) -> int:
    """``all WORD...`` on the first node, ``one`` on another. Returns the exit code: that of the first that failed."""
    stops: list[int] = []
    for number in _SIGNALS:
        signal.signal(number, lambda number, _frame: stops.append(number))
    if words == ["one"]:
        return _on_other_node(stops)
    if len(words) < 2 or words[0] != "all":
        sys.stderr.write(f"usage: python -m {_MODULE} all WORD...\n")
        return 2
    return _on_all_nodes(words[1:], stops)


def _on_all_nodes(argv: Sequence[str], stops: Sequence[int]) -> int:
    names = hosts(os.environ)
    if not names:
        sys.stderr.write("gpuherd: Grid Engine has not named the nodes of this job (PE_HOSTFILE)\n")
        return 2
    environment = _environment(os.environ, 0, names)
    here = subprocess.Popen(argv, env=environment, stdin=subprocess.DEVNULL, start_new_session=True)
    others, pipes = [], []
    for rank in range(1, len(names)):
        # qrsh looks for what it runs in the node's own environment.
        places = os.environ.get(PYTHONPATH)
        words = ["qrsh", "-inherit", "-noshell", *([] if places is None else ["-v", f"{PYTHONPATH}={places}"])]
        read_end, write_end = os.pipe2(os.O_CLOEXEC)
        others.append(subprocess.Popen([*words, names[rank], sys.executable, "-m", _MODULE, "one"], stdin=read_end))
        os.close(read_end)
        pipe = os.fdopen(write_end, "wb")
        message = {"argv": list(argv), "env": _environment(os.environ, rank, names), "cwd": str(Path.cwd())}
        with suppress(BrokenPipeError):
            pipe.write(json.dumps(message).encode() + b"\n")
            pipe.flush()
        pipes.append(pipe)
    return _wait(here, others, pipes, lambda: bool(stops))


def _wait(
    process: subprocess.Popen[bytes],
    others: Sequence[subprocess.Popen[bytes]],
    pipes: Sequence[BinaryIO],
    has_to_end: Callable[[], bool],
) -> int:
    """Until all have ended, all together where one fails. Returns the exit code: that of the first that failed.

    Args:
        process: leads a session. ``others`` end when their ``pipes`` are closed.
    """
    everybody, failed, ending_since = (process, *others), 0, 0.0
    while None in [each.poll() for each in everybody]:
        failed = failed or next((each.returncode for each in everybody if each.returncode), 0)
        if not ending_since and (failed or has_to_end()):
            ending_since = time.monotonic()
            _signal_all(process, signal.SIGTERM)
            for pipe in pipes:
                with suppress(BrokenPipeError):
                    pipe.close()
        elif ending_since and time.monotonic() > ending_since + _GRACE_S:
            _signal_all(process, signal.SIGKILL)
            for each in others:
                each.kill()
        time.sleep(_LOOK_S)
    failed = failed or next((each.returncode for each in everybody if each.returncode), 0)
    return failed if failed >= 0 else 128 - failed


def _environment(own: Mapping[str, str], rank: int, names: Sequence[str]) -> dict[str, str]:
    return {**own, _RANK: str(rank), _NODES: str(len(names)), _FIRST: names[0]}


def _signal_all(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """To the process group of one that leads a session, where the job is too."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def _on_other_node(stops: Sequence[int]) -> int:
    """Runs what the first node sends, until it has ended, or the first node's end of the pipe is closed."""
    data = b""
    while not data.endswith(b"\n"):
        block = os.read(0, 65536)
        if not block:
            return 2
        data += block
    order = json.loads(data)
    own = {name: os.environ[name] for name in _OF_THE_NODE if name in os.environ}
    environment = {**order["env"], **own}
    argv = [*_lease(environment), *order["argv"]]
    process = subprocess.Popen(
        argv, env=environment, cwd=order["cwd"], stdin=subprocess.DEVNULL, start_new_session=True
    )
    return _wait(process, (), (), lambda: bool(stops) or _is_closed(0))


def _is_closed(pipe: int) -> bool:
    """Whether the other end is gone; what it has sent is read, and not wanted."""
    return bool(select.select([pipe], [], [], 0)[0]) and not os.read(pipe, 65536)


def _lease(environment: dict[str, str]) -> list[str]:
    """What runs before the words, so that they get this node's GPUs: nothing where the site says which, as the script
    has it for the first node."""
    count = int(environment.get(GPUS, "0"))
    given = environment.get("SGE_HGR_gpu") or environment.get("SGE_GPU")
    for name in VARIABLES:  # those of the first node
        environment.pop(name, None)
    if count == 0:
        environment.update(visible.environment(()))
    elif CUDA in os.environ or ROCR in os.environ:
        environment.update(chosen_in(os.environ))
    elif given:
        environment.update(showing(given.replace(",", " ").split(), _maker()))
    else:
        return lease(count, f"gpuherd-{environment.get('JOB_ID', '')}")
    return []


def _maker() -> Maker:
    """The maker of this node's GPUs; as ``engines.export.IS_AMD``."""
    is_amd = Path("/dev/kfd").exists() and not Path("/dev/nvidiactl").exists()
    return Maker.AMD if is_amd else Maker.NVIDIA


def lease(gpus: int, name: str) -> list[str]:
    """The command that waits for so many GPUs of this node that gpuherd's leases call free, and becomes the words
    behind it."""
    run = [sys.executable, "-m", "gpuherd", "run", "--engine", "local", "--num-gpus", str(gpus)]
    return [*run, "--wait", _LEASE_WAIT, "--name", name, "--"]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
