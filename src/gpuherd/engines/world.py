"""What the nodes of one attempt must know of each other, as variables that torchrun reads; and the request
to make room. Known to nodes alone.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

from gpuherd.errors import UsageError

# What the nodes of one attempt must know of each other to find together, as the variables that torchrun and programs
# like it read. Pure but for the look whether a port is in use.
#
# The first node's address is the host that SLURM names first among those of the job, or what the caller says. The
# port is made from the attempt's tag, between 20,000 and 31,999 (below those that Linux gives out itself, from 32,768
# on), so that two attempts on one node have different ones; the first node takes the next one that nobody listens at.

_FIRST_PORT, _PORTS = 20_000, 12_000
# The same rules for shells on SLURM's nodes, where nothing of ours runs. First for the one on the first node that
# starts srun: steps of one job have different ports, too; "0A" in /proc/net/tcp is a port that is listened at.
SHELL_PORT = f"$(({_FIRST_PORT} + (SLURM_JOB_ID + 97 * SLURM_STEP_ID) % {_PORTS}))"
SHELL_MEETING = f"""\
MASTER_PORT={SHELL_PORT}
while grep -Eqs "^ *[0-9]+: [0-9A-F]+:$(printf %04X "$MASTER_PORT") [0-9A-F]+:[0-9A-F]+ 0A " /proc/net/tcp*; do
    MASTER_PORT=$(({_FIRST_PORT} + (MASTER_PORT - {_FIRST_PORT} + 1) % {_PORTS}))
done
export MASTER_PORT"""
# Then for each process that srun starts.
SHELL_PLACE = """\
MASTER_ADDR=$(scontrol show hostnames "$SLURM_STEP_NODELIST" | head -n 1)
getent hosts "$MASTER_ADDR" >/dev/null || MASTER_ADDR=${SLURM_LAUNCH_NODE_IPADDR:-$MASTER_ADDR}
export MASTER_ADDR NNODES="$SLURM_STEP_NUM_NODES" NODE_RANK="$SLURM_NODEID"
export PET_MASTER_ADDR="$MASTER_ADDR" PET_MASTER_PORT="$MASTER_PORT" PET_NNODES="$NNODES" PET_NODE_RANK="$NODE_RANK"
if [ "$SLURM_STEP_NUM_TASKS" != "$SLURM_STEP_NUM_NODES" ]; then
    export RANK="$SLURM_PROCID" WORLD_SIZE="$SLURM_STEP_NUM_TASKS" LOCAL_RANK="$SLURM_LOCALID"
fi"""
_TRIES = 100
_MOST_HOSTS = 100_000
_PART = re.compile(r"([^\[\],]*)(?:\[([0-9,-]+)\])?")


@dataclass(frozen=True, slots=True)
class World:
    """A place among an attempt's nodes: ``rank`` of ``nodes``, which meet at ``address`` and ``port`` of the first."""

    rank: int
    nodes: int
    address: str
    port: int

    def variables(self) -> dict[str, str]:
        """For the job's environment. Those with PET_ are torchrun's own options."""
        known = {
            "MASTER_ADDR": self.address,
            "MASTER_PORT": str(self.port),
            "NNODES": str(self.nodes),
            "NODE_RANK": str(self.rank),
        }
        return known | {f"PET_{name}": value for name, value in known.items()}


@dataclass(frozen=True, slots=True)
class Failure:
    """The first failure among an attempt's nodes: on which, and how.

    ``code`` and ``signal`` are None both when the node was lost, which says nothing about the job.
    """

    rank: int
    node: str
    code: int | None = None
    signal: int | None = None

    @property
    def lost(self) -> bool:
        """Whether nobody could tell how it ended there."""
        return self.code is None and self.signal is None

    def __str__(self) -> str:
        how = "lost" if self.lost else f"exit code {self.code}" if self.signal is None else f"signal {self.signal}"
        return f"node {self.rank} ({self.node}): {how}"


class Others(Protocol):
    """The other nodes of an attempt that spans several, as the engine reaches them: each runs ``node.join``.

    All of it is called in the thread of the attempt's leader, and none of it waits.
    """

    address: str  # of the leader's node, as the others reach it
    names: tuple[str, ...]  # of all nodes, () where that is not known

    def begin(self, port: int) -> None:
        """Starts them; they meet the leader's at this port of its address."""
        ...

    def over(self) -> bool:
        """Whether all of them have ended."""
        ...

    def failure(self) -> Failure | None:
        """The first that failed, None while none has."""
        ...

    def end(self) -> None:
        """Asks those that run to make room, and ends them after the attempt's grace; also when called again."""
        ...


def of_slurm(variables: Mapping[str, str], port: int) -> World:
    """The place of a task that srun has started, one on each node. Raises UsageError where a variable is missing."""
    try:
        rank, nodes = int(variables["SLURM_NODEID"]), int(variables["SLURM_STEP_NUM_NODES"])
        named = next(hosts(variables["SLURM_STEP_NODELIST"]))
    except (KeyError, ValueError, StopIteration) as problem:
        raise UsageError(f"srun has not started this: {problem} among SLURM's variables") from None
    address = named if resolves(named) else variables.get("SLURM_LAUNCH_NODE_IPADDR", named)
    return World(rank, nodes, address, port)


def ranks_of_slurm(variables: Mapping[str, str]) -> dict[str, str]:
    """The place of a process among all, in torch's words, where srun starts several on each node; else nothing, for
    the one on each node starts its own."""
    tasks = variables.get("SLURM_STEP_NUM_TASKS")
    if tasks is None or tasks == variables.get("SLURM_STEP_NUM_NODES"):
        return {}
    return {
        "RANK": variables.get("SLURM_PROCID", "0"),
        "WORLD_SIZE": tasks,
        "LOCAL_RANK": variables.get("SLURM_LOCALID", "0"),
    }


def hosts(text: str) -> Iterator[str]:
    """The names in a list of hosts as SLURM writes it. Raises UsageError for what is none.

    >>> list(hosts("a,n[08-10,12]-ib,r[0-1]c[3-4]"))
    ['a', 'n08-ib', 'n09-ib', 'n10-ib', 'n12-ib', 'r0c3', 'r0c4', 'r1c3', 'r1c4']
    """
    left = _MOST_HOSTS
    for word in _words(text):
        for name in _names(word, text):
            left -= 1
            if left < 0:
                raise UsageError(f"a list of more than {_MOST_HOSTS} hosts: {text[:100]!r}")
            yield name


def port_of(tag: str) -> int:
    """A port for the attempt with this tag; always the same."""
    return _FIRST_PORT + zlib.crc32(tag.encode("utf-8", "surrogatepass")) % _PORTS


def free_port(tag: str) -> int:
    """The same, or on this machine the next one that nobody listens at."""
    import socket  # here and below: a leader on a node is to begin at once, and most have no other nodes

    first = port_of(tag) - _FIRST_PORT
    for step in range(_TRIES):
        port = _FIRST_PORT + (first + step) % _PORTS
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
    return _FIRST_PORT + first


def resolves(host: str) -> bool:
    """Whether this machine knows a host of this name."""
    import socket

    try:
        socket.getaddrinfo(host, None)
    except (OSError, UnicodeError):
        return False
    return True


def _words(text: str) -> Iterator[str]:
    """The parts between the commas that stand outside of brackets."""
    depth, begin = 0, 0
    for place, sign in enumerate(text):
        depth += (sign == "[") - (sign == "]")
        if sign == "," and depth == 0:
            yield text[begin:place]
            begin = place + 1
    yield text[begin:]


def _names(word: str, text: str) -> Iterator[str]:
    match = _PART.match(word)
    if not word or match is None or match.end() == 0:
        raise UsageError(f"{text[:100]!r} is no list of hosts as SLURM writes it")
    rest = word[match.end() :]
    for number in _numbers(match[2], text) if match[2] else ("",):
        for ending in _names(rest, text) if rest else ("",):
            yield f"{match[1]}{number}{ending}"


def _numbers(ranges: str, text: str) -> Iterator[str]:
    for each in ranges.split(","):
        first, dash, last = each.partition("-")
        if not first.isdigit() or (dash and not last.isdigit()):
            raise UsageError(f"{text[:100]!r} is no list of hosts as SLURM writes it")
        for number in range(int(first), int(last or first) + 1):
            yield f"{number:0{len(first)}d}"


# By which somebody asks the leader of an attempt to make room: from a signal handler, or from another thread.


class Stop:
    """``fileno`` becomes readable when it is asked, so that whoever waits wakes; ``heard`` makes it wait again.

    Attributes:
        asked: somebody has asked.
        soon: somebody has asked who did not say that it has its notice.
    """

    def __init__(self) -> None:
        self._descriptor = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self.asked = False
        self.soon = False

    def ask(self, *, time_up: bool = False) -> None:
        """The attempt is to end, with its grace; nothing happens when it has ended already.

        Args:
            time_up: its time is nearly up: it has the notice for which it asked, and not only the grace.
        """
        self.asked = True
        self.soon = self.soon or not time_up
        if self._descriptor >= 0:
            os.eventfd_write(self._descriptor, 1)

    def heard(self) -> None:
        """What was asked so far is known."""
        with suppress(BlockingIOError):
            os.eventfd_read(self._descriptor)

    def fileno(self) -> int:
        """The descriptor to wait on."""
        return self._descriptor

    def close(self) -> None:
        """Frees the descriptor."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
