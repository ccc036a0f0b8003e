"""What every engine beyond this machine is: four methods over plain data."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from gpuherd.errors import ExitCode, GpuherdError

# What an engine beyond this machine is to us: four methods over plain data. SLURM and Ray decide; we translate,
# follow and collect.
#
# A *parcel* is one attempt of one job. Parcels that ask for the same go together in a *batch*, an array where the
# engine has arrays. Before a batch is handed over, the queue has written down its parcels' tickets, each without a
# handle; so whoever comes after a death finds by the batch's name what the engine has taken, and what it never got.


class EngineMissing(GpuherdError):
    """The engine's programs or libraries are not there; the message says how to get them."""

    exit_code = ExitCode.MISSING


class EngineAway(GpuherdError):
    """The engine does not answer at the moment; what was asked of it may have been done or not."""

    exit_code = ExitCode.BUSY


class Refused(GpuherdError):
    """The engine has refused a batch, with its own words.

    ``may_pass``: a limit of the moment (jobs in the queue, a full disk), not something about the batch.
    """

    exit_code = ExitCode.USAGE

    def __init__(self, message: str, *, may_pass: bool = False):
        super().__init__(message)
        self.may_pass = may_pass


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """What one parcel asks of the engine, on each of its nodes.

    Attributes:
        gpus: GPUs on each node; 0 for none.
        nodes: how many nodes; more than 1 for a program that spans them, as by torchrun.
        tasks: how many processes the engine starts on each node; 1 for a program that starts its own there.
        cpus: CPU cores, None for what the engine gives by default.
        memory_mb: main memory in MB (2^20 bytes), None for what the engine gives by default.
        time_s: seconds after which the engine ends it, None for the engine's own limit.
    """

    gpus: int
    nodes: int = 1
    tasks: int = 1
    cpus: int | None = None
    memory_mb: int | None = None
    time_s: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Parcel:
    """One attempt on its way. ``attempt`` is its number in the queue, ``title`` what people call its job."""

    attempt: int
    title: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """Parcels that are handed over together.

    Attributes:
        name: letters, digits, dots and dashes; no other batch of any queue has it, and the engine keeps it.
        placement: what each parcel asks for.
        after: handles of parcels that must have succeeded before any of these begins (``afterok``); () for none.
        at_once: how many of them may run at once, None for any number.
        command: what each node is to run, as an argument list; the parcel's index in ``parcels`` is to be added as its
            last word. It leads the attempt, tells of it by files, and ends with 0 when the job has succeeded.
        folder: absolute, on a file system that all nodes see; for scripts, and for what the engine itself prints of a
            parcel (``output``), which is shown where its job wrote no log.
    """

    name: str
    placement: Placement
    parcels: tuple[Parcel, ...]
    command: tuple[str, ...]
    folder: Path
    after: tuple[str, ...] = ()
    at_once: int | None = None

    def output(self, index: int | str) -> Path:
        """The file for what the engine prints of this parcel; ``%a`` stands for the index in SLURM's words."""
        return output_file(self.folder, self.name, index)


def output_file(folder: Path, batch: str, index: int | str) -> Path:
    """Where the engine prints what it has to say of a parcel."""
    return folder / f"{batch}.{index}.out"


@dataclass(frozen=True, slots=True)
class Ticket:
    """By what a parcel is found again: ``handle`` is the engine's own word for it, None while we have not heard it."""

    attempt: int
    batch: str
    index: int
    handle: str | None = None


class Phase(StrEnum):
    """How far a parcel is."""

    WAITING = "waiting"
    RUNNING = "running"
    ENDED = "ended"


class End(StrEnum):
    """How a parcel ended, as the engine sees it. What the job itself did is told by the file that the node writes."""

    OK = "ok"
    FAILED = "failed"
    CANCELLED = "cancelled"
    PREEMPTED = "preempted"
    TIME_UP = "time_up"
    OUT_OF_MEMORY = "out_of_memory"
    NODE_LOST = "node_lost"
    NEVER = "never"  # what it was to come after has failed


@dataclass(frozen=True, kw_only=True, slots=True)
class Sighting:
    """A parcel as the engine tells of it now.

    Attributes:
        reason: in the engine's words, why it waits or how it ended; None where it says nothing.
        end: set when the phase is ENDED.
        by: who cancelled it, where the engine knows.
        node: where it runs or ran; the first of several.
    """

    handle: str
    phase: Phase
    reason: str | None = None
    end: End | None = None
    by: str | None = None
    node: str | None = None


class Engine(Protocol):
    """SLURM, Ray, or whatever else takes work. Every method may raise EngineAway. ``look`` may be called by another
    thread than the rest, also while one of them is at work.

    Attributes:
        name: the word of ``--engine``.
        look_s: seconds between two questions that it bears well.
        chains: whether ``Batch.after`` can be given: then jobs follow each other also while nobody of ours is there.
        remembers_s: for so many seconds after its end it surely knows a parcel. In ``Batch.after``, one that it does
            not know counts as succeeded.
    """

    name: str
    look_s: float
    chains: bool

    @property
    def remembers_s(self) -> float:
        """As above."""
        ...

    def check(self, wanted: Collection[Placement]) -> Mapping[Placement, str]:
        """Why those that can never be had here can't, in a sentence with what would do; nothing is handed over.

        Raises EngineMissing, and UsageError for options that it does not know (a partition, an account).
        """
        ...

    def submit(self, batch: Batch) -> Sequence[str]:
        """Hands the batch over; the handles of its parcels, in order. Raises Refused."""
        ...

    def look(self, tickets: Collection[Ticket]) -> Mapping[int, Sighting]:
        """How they stand, by attempt, in as few questions as can be; without those that the engine does not know."""
        ...

    def cancel(self, handles: Collection[str]) -> None:
        """Ends them, running or not. Those that have ended already are no error."""
        ...

    def close(self) -> None:
        """Leaves the engine as it was found; what was handed over goes on where it can."""
        ...


# What GPUs the nodes of a cluster have, as far as the cluster itself says.


def node_gpus(engine: str, partition: str | None) -> tuple[Mapping[str, int], ...] | None:
    """The GPUs of each node that jobs can get to, by type ("" for one that has no name); None where it can't be known.

    Raises EngineMissing, EngineAway, and UsageError for a partition that is not there.
    """
    if engine != "slurm":
        return None  # Ray counts GPUs, whatever they are
    from gpuherd.engines.slurm.engine import gpus_of_nodes

    return gpus_of_nodes(partition)
