"""For SLURM's nodes: SLURM's variables, the srun that starts the processes of an attempt, and the same rules as shell
lines for scripts in which nothing of gpuherd runs.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from itertools import product

from gpuherd.engines.world import FIRST_PORT, PORTS, Rank, RankStarter, World, resolves
from gpuherd.errors import UsageError

_ANSWER_S = 10.0

# Shell lines for the process on the first node that starts srun. Steps of one job have different ports; "0A" in
# /proc/net/tcp marks a port on which something listens.
SHELL_PORT = f"$(({FIRST_PORT} + (SLURM_JOB_ID + 97 * SLURM_STEP_ID) % {PORTS}))"
SHELL_MEETING = f"""\
MASTER_PORT={SHELL_PORT}
while grep -Eqs "^ *[0-9]+: [0-9A-F]+:$(printf %04X "$MASTER_PORT") [0-9A-F]+:[0-9A-F]+ 0A " /proc/net/tcp*; do
    MASTER_PORT=$(({FIRST_PORT} + (MASTER_PORT - {FIRST_PORT} + 1) % {PORTS}))
done
export MASTER_PORT"""
# Shell lines for each process that srun starts.
SHELL_PLACE = """\
MASTER_ADDR=$(scontrol show hostnames "$SLURM_STEP_NODELIST" | head -n 1)
getent hosts "$MASTER_ADDR" >/dev/null || MASTER_ADDR=${SLURM_LAUNCH_NODE_IPADDR:-$MASTER_ADDR}
export MASTER_ADDR NNODES="$SLURM_STEP_NUM_NODES" NODE_RANK="$SLURM_NODEID"
export PET_MASTER_ADDR="$MASTER_ADDR" PET_MASTER_PORT="$MASTER_PORT" PET_NNODES="$NNODES" PET_NODE_RANK="$NODE_RANK"
if [ "$SLURM_STEP_NUM_TASKS" != "$SLURM_STEP_NUM_NODES" ]; then
    export RANK="$SLURM_PROCID" WORLD_SIZE="$SLURM_STEP_NUM_TASKS" LOCAL_RANK="$SLURM_LOCALID"
fi"""
_MOST_HOSTS = 100_000
# A list is words with commas between them, a word is text and lists of numbers in brackets: n[08-10,12]-ib.
_NUMBERS = r"\[[0-9]{1,12}(?:-[0-9]{1,12})?(?:,[0-9]{1,12}(?:-[0-9]{1,12})?)*\]"
_PART = re.compile(rf"[^\[\],]+|{_NUMBERS}")
_WORD = re.compile(rf"(?:[^\[\],]|{_NUMBERS})+")
_LIST = re.compile(rf"{_WORD.pattern}(?:,{_WORD.pattern})*")


class _SlurmNode(RankStarter):
    """SLURM hands on the environment of ``sbatch`` itself, and the user's lines (``--setup 'module load cuda'``) have
    changed it since: the node's goes over what was submitted.
    """

    own_environment_wins = True

    def node(self, variables: Mapping[str, str]) -> str:
        """As ``NodeSide.node``."""
        return variables.get("SLURMD_NODENAME") or os.uname().nodename

    def nodes(self, variables: Mapping[str, str]) -> tuple[str, ...]:
        """As ``NodeSide.nodes``."""
        try:
            return tuple(hosts(variables.get("SLURM_JOB_NODELIST", "")))
        except UsageError:
            return ()

    def handle(self, variables: Mapping[str, str]) -> str | None:
        """As ``NodeSide.handle``."""
        array, task = variables.get("SLURM_ARRAY_JOB_ID"), variables.get("SLURM_ARRAY_TASK_ID")
        return f"{array}_{task}" if array and task else variables.get("SLURM_JOB_ID")

    def start_ranks(self, nodes: int, tasks: int, launcher: str | None, variables: Mapping[str, str]) -> list[str]:
        """As ``RankStarter.start_ranks``, by srun."""
        return steps(nodes, tasks, cpus=variables.get("SLURM_CPUS_PER_TASK"), mpi=launcher)

    def end_ranks(self, variables: Mapping[str, str]) -> bool:
        """As ``RankStarter.end_ranks``. A signal to srun itself would not do: it takes SIGTERM for the request to end
        all, and leaves SLURM's KillWait for it."""
        job = variables.get("SLURM_JOB_ID")
        if job is None:
            return False
        try:
            words = ["scancel", "--signal=TERM", job]
            return subprocess.run(words, stdin=subprocess.DEVNULL, timeout=_ANSWER_S, check=False).returncode == 0
        except (OSError, subprocess.TimeoutExpired):
            return False

    def rank(self, variables: Mapping[str, str], port: int) -> Rank:
        """As ``RankStarter.rank``. The first node's address is the host that SLURM names first, or where that name
        can't be resolved the address from which srun has started this."""
        try:
            node, nodes = int(variables["SLURM_NODEID"]), int(variables["SLURM_STEP_NUM_NODES"])
            local = int(variables.get("SLURM_LOCALID", "0"))
            named = next(hosts(variables["SLURM_STEP_NODELIST"]))
        except (KeyError, ValueError, StopIteration) as problem:
            raise UsageError(f"srun has not started this: {problem} among SLURM's variables") from None
        address = named if resolves(named) else variables.get("SLURM_LAUNCH_NODE_IPADDR", named)
        tasks = variables.get("SLURM_STEP_NUM_TASKS")
        among: dict[str, str] = {}
        if tasks is not None and tasks != variables.get("SLURM_STEP_NUM_NODES"):
            among = {"RANK": variables.get("SLURM_PROCID", "0"), "WORLD_SIZE": tasks, "LOCAL_RANK": str(local)}
        return Rank(World(node, nodes, address, port), among, local)


NODE = _SlurmNode()


def steps(
    nodes: int, tasks: int, *, cpus: str | None = None, mpi: str | None = None, more: Sequence[str] = ("--input=none",)
) -> list[str]:
    """The srun that, inside of a SLURM job, starts the processes of an attempt on all of its nodes; the command is to
    be appended. When one process fails all are ended.

    Args:
        cpus: CPU cores of each process; srun since 22.05 does not take them from the job.
    """
    words = ["srun", f"--nodes={nodes}", f"--ntasks={nodes * tasks}"]
    words += [f"--ntasks-per-node={tasks}", "--kill-on-bad-exit=1", *more, "--export=ALL"]
    words += [] if mpi is None else [f"--mpi={mpi}"]
    return words if cpus is None else [*words, f"--cpus-per-task={cpus}"]


def hosts(text: str) -> Iterator[str]:
    """The names in a list of hosts as SLURM writes it. Raises UsageError for what is none.

    >>> list(hosts("a,n[08-10,12]-ib,r[0-1]c[3-4]"))
    ['a', 'n08-ib', 'n09-ib', 'n10-ib', 'n12-ib', 'r0c3', 'r0c4', 'r1c3', 'r1c4']
    """
    if _LIST.fullmatch(text) is None:
        raise UsageError(f"{text[:100]!r} is no list of hosts as SLURM writes it")
    names = ("".join(parts) for word in _WORD.findall(text) for parts in product(*map(_numbers, _PART.findall(word))))
    for count, name in enumerate(names):
        if count == _MOST_HOSTS:
            raise UsageError(f"a list of more than {_MOST_HOSTS} hosts: {text[:100]!r}")
        yield name


def _numbers(part: str) -> list[str]:
    """The numbers of a part in brackets, as wide as the first of each range; of another part the part itself."""
    if not part.startswith("["):
        return [part]
    ranges = [(first, int(last or first)) for first, _, last in (each.partition("-") for each in part[1:-1].split(","))]
    if sum(last - int(first) for first, last in ranges) > _MOST_HOSTS:
        raise UsageError(f"a list of more than {_MOST_HOSTS} hosts: {part[:100]!r}")
    return [f"{number:0{len(first)}d}" for first, last in ranges for number in range(int(first), last + 1)]
