"""The part of an engine that runs on its nodes: how the nodes of an attempt meet, what the engine's variables mean, and
the request to make room.
"""

from __future__ import annotations

import os
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from types import TracebackType
from typing import Protocol, Self

# The port at which the processes of an attempt meet is made from the attempt's tag, between 20,000 and 31,999 (below
# those that Linux gives out itself, from 32,768 on), so that two attempts on one node have different ports. The first
# node takes the next port on which nothing listens.

FIRST_PORT, PORTS = 20_000, 12_000
_TRIES = 100


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
class Rank:
    """One of the processes that an engine has started for an attempt.

    Attributes:
        variables: its place among all processes (RANK, WORLD_SIZE, LOCAL_RANK), where the engine starts several on a
            node; else nothing, since the process on each node starts the others.
        local: its number among those of its node.
    """

    world: World
    variables: Mapping[str, str]
    local: int


@dataclass(frozen=True, slots=True)
class NodeFailure:
    """The first failure among an attempt's nodes: on which, and how.

    ``code`` and ``signal`` are None both when the node was lost, which says nothing about the job.
    """

    rank: int
    node: str
    code: int | None = None
    signal: int | None = None

    @property
    def lost(self) -> bool:
        """Whether its end there is unknown."""
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

    def failure(self) -> NodeFailure | None:
        """The first that failed, None while none has."""
        ...

    def end(self) -> None:
        """Asks those that run to make room, and ends them after the attempt's grace; also when called again."""
        ...


# ``lead`` and ``join`` of ``jobs.remote.agent``, which run a node's part of an attempt.
Lead = Callable[..., int]
Join = Callable[..., NodeFailure | None]


class NodeSide:
    """An engine's side on a node: ``NODE`` in the folder's module ``node``.

    This class is that of an engine that starts a single process for an attempt and sets no variables; an engine that
    starts several has a ``RankStarter``. The module is imported when an attempt begins: it imports little.

    Attributes:
        own_environment_wins: a job inherits the environment of the process on the node, which has that of the command
            that submitted it and what the user's ``--setup`` has changed; else what was submitted goes over the node's.
        starts_ranks: whether this is a ``RankStarter``.
    """

    own_environment_wins = False
    starts_ranks = False

    def node(self, variables: Mapping[str, str]) -> str:  # noqa: ARG002
        """This node's name in the engine's words."""
        return os.uname().nodename

    def nodes(self, variables: Mapping[str, str]) -> tuple[str, ...]:  # noqa: ARG002
        """The names of all nodes of the engine's job; () where they are not known."""
        return ()

    def handle(self, variables: Mapping[str, str]) -> str | None:  # noqa: ARG002
        """The engine's id of the attempt (``Ticket.handle``)."""
        return None


class RankStarter(NodeSide, ABC):
    """The node side of an engine that starts an attempt's processes, on several nodes or several on one node."""

    starts_ranks = True

    @abstractmethod
    def start_ranks(self, nodes: int, tasks: int, launcher: str | None, variables: Mapping[str, str]) -> list[str]:
        """The command that, run by the leader on the first node, starts the words behind it on each of the nodes, so
        many times on each, and ends all when one of them fails. ``launcher``: ``EngineSpec.launcher``."""

    def end_ranks(self, variables: Mapping[str, str]) -> bool:  # noqa: ARG002
        """Sends SIGTERM to all that ``start_ranks`` has started, on all nodes. False where that can't be done: then the
        command gets the signal."""
        return False

    @abstractmethod
    def rank(self, variables: Mapping[str, str], port: int) -> Rank:
        """Which of the processes of ``start_ranks`` this is. Raises UsageError where the variables do not say."""


def node_side(engine: str) -> NodeSide:
    """The node side of the engine of this name. Of gpuherd's own engines only that module is loaded."""
    package = f"gpuherd.engines.{engine}"
    try:
        import_module(package)
    except ModuleNotFoundError as problem:
        if problem.name != package:
            raise
        from gpuherd.engines.registry import specs

        found = [type(spec).__module__.rpartition(".")[0] for spec in specs() if spec.name == engine]
        if not found:
            return NodeSide()
        (package,) = found
    try:
        node: NodeSide = import_module(f"{package}.node").NODE
        return node
    except ModuleNotFoundError as problem:
        if problem.name != f"{package}.node":
            raise
        return NodeSide()


def port_of(tag: str) -> int:
    """A port for the attempt with this tag; always the same."""
    return FIRST_PORT + zlib.crc32(tag.encode("utf-8", "surrogatepass")) % PORTS


def free_port(tag: str) -> int:
    """The same port, or the next one on which no process of this machine listens."""
    import socket  # here and below: a leader on a node is to begin at once, and most have no other nodes

    first = port_of(tag) - FIRST_PORT
    for step in range(_TRIES):
        port = FIRST_PORT + (first + step) % PORTS
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
    return FIRST_PORT + first


def resolves(host: str) -> bool:
    """Whether this machine knows a host of this name."""
    import socket

    try:
        socket.getaddrinfo(host, None)
    except (OSError, UnicodeError):
        return False
    return True


# The request to the leader of an attempt to make room, from a signal handler or from another thread.


class Stop:
    """A request to make room. ``fileno`` becomes readable with each request; ``heard`` empties it.

    Attributes:
        asked: there was a request.
        soon: there was a request that does not leave it the notice of its end.
    """

    def __init__(self) -> None:
        self._descriptor = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self.asked = False
        self.soon = False

    def ask(self, *, time_up: bool = False) -> None:
        """The attempt is to end, with its grace; nothing happens when it has ended already.

        Args:
            time_up: its time is nearly up: it has the notice that it requested, and not only the grace.
        """
        self.asked = True
        self.soon = self.soon or not time_up
        if self._descriptor >= 0:
            os.eventfd_write(self._descriptor, 1)

    def heard(self) -> None:
        """All requests so far are known."""
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
