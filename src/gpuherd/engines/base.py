"""A connection to an engine beyond this machine, and the data that engines take and give.

SLURM, Ray and other engines decide where and when a job runs; gpuherd translates, follows and collects. How an engine
registers itself is in ``registry``.

A *parcel* is one attempt of one job. Parcels that ask for the same go together in a *batch*, which becomes an array job
where the engine has arrays. Before a batch is submitted, the queue has a ticket for each of its parcels, still without
a handle. A dispatcher that starts after a crash therefore finds by the batch's name what the engine has accepted, and
what never reached it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from gpuherd.errors import ExitCode, GpuherdError

if TYPE_CHECKING:
    from gpuherd.engines.options import EngineOptions

# --- Errors -----------------------------------------------------------------------------------------------------------


class EngineMissing(GpuherdError):
    """The engine's programs or libraries are not installed; the message says how to get them."""

    exit_code = ExitCode.MISSING


class EngineAway(GpuherdError):
    """The engine does not answer at the moment. The request may or may not have been carried out."""

    exit_code = ExitCode.BUSY


class Refused(GpuherdError):
    """The engine has refused a batch; the message is the engine's own.

    ``may_pass``: the reason is a temporary limit (jobs in the queue, a full disk), not the batch itself.
    """

    exit_code = ExitCode.USAGE

    def __init__(self, message: str, *, may_pass: bool = False):
        super().__init__(message)
        self.may_pass = may_pass


# --- What is submitted ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """The resources that one parcel requests on each of its nodes.

    Attributes:
        gpus: GPUs on each node; 0 for none.
        nodes: number of nodes; more than 1 for a program that spans them, as by torchrun.
        tasks: processes that the engine starts on each node; 1 for a program that starts its own there.
        cpus: CPU cores; None for the engine's default.
        memory_mb: main memory in MB (2^20 bytes); None for the engine's default.
        time_s: seconds after which the engine ends it; None for the engine's own limit.
    """

    gpus: int
    nodes: int = 1
    tasks: int = 1
    cpus: int | None = None
    memory_mb: int | None = None
    time_s: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Parcel:
    """One attempt to submit. ``attempt`` is its number in the queue, ``title`` its job's name for people."""

    attempt: int
    title: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """Parcels that are submitted together.

    Attributes:
        name: letters, digits, dots and dashes; unique among all queues, and kept by the engine.
        placement: what each parcel requests.
        after: handles of parcels that must have succeeded before any of these begins (``afterok``); () for none.
        at_once: how many of them may run at once; None for any number.
        command: what each node runs, as an argument list; the parcel's index in ``parcels`` is appended as its last
            word. It leads the attempt, reports through files, and exits with 0 when the job has succeeded.
        folder: absolute, on a file system that all nodes share; for scripts, and for the engine's own output of a
            parcel (``output``), which is shown where the job wrote no log.
    """

    name: str
    placement: Placement
    parcels: tuple[Parcel, ...]
    command: tuple[str, ...]
    folder: Path
    after: tuple[str, ...] = ()
    at_once: int | None = None

    def output(self, index: int | str) -> Path:
        """The file for the engine's own output of this parcel; ``%a`` stands for the index in SLURM's patterns."""
        return output_file(self.folder, self.name, index)


def output_file(folder: Path, batch: str, index: int | str) -> Path:
    """Where the engine's own output of a parcel goes."""
    return folder / f"{batch}.{index}.out"


# --- What is reported -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ticket:
    """Identifies a submitted parcel. ``handle`` is the engine's own id for it, None while it is not known."""

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
    """How a parcel ended according to the engine. What the job itself did is in the report that its node writes."""

    OK = "ok"
    FAILED = "failed"
    CANCELLED = "cancelled"
    PREEMPTED = "preempted"
    TIME_UP = "time_up"
    OUT_OF_MEMORY = "out_of_memory"
    NODE_LOST = "node_lost"
    NEVER = "never"  # a parcel that it had to follow has failed


@dataclass(frozen=True, kw_only=True, slots=True)
class Sighting:
    """The state of a parcel as the engine reports it now.

    Attributes:
        reason: in the engine's words, why it waits or how it ended; None where the engine gives none.
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
    """A connection to an engine beyond this machine. Every method may raise EngineAway. ``look`` may be called from
    another thread than the rest, also while another method runs.

    Attributes:
        name: the word of ``--engine``.
        look_s: seconds between two calls of ``look`` that do not burden the engine.
        chains: whether ``Batch.after`` is supported: jobs then follow each other also while no dispatcher runs.
        remembers_s: how many seconds after its end the engine certainly still knows a parcel. An unknown parcel in
            ``Batch.after`` counts as succeeded.
    """

    name: str
    look_s: float
    chains: bool

    @property
    def remembers_s(self) -> float:
        """As above."""
        ...

    def check(self, wanted: Collection[Placement]) -> Mapping[Placement, str]:
        """Those placements that this site can never grant, each with the reason and what would be possible, as a
        sentence. Nothing is submitted.

        Raises EngineMissing, and UsageError for options that the site does not know (a partition, an account).
        """
        ...

    def submit(self, batch: Batch) -> Sequence[str]:
        """Submits the batch; returns the handles of its parcels, in order. Raises Refused."""
        ...

    def look(self, tickets: Collection[Ticket]) -> Mapping[int, Sighting]:
        """Their states by attempt, with as few queries as possible; without those that the engine does not know."""
        ...

    def cancel(self, handles: Collection[str]) -> None:
        """Ends them, running or not. Those that have ended already are no error."""
        ...

    def close(self) -> None:
        """Ends the connection; submitted jobs go on where the engine allows it."""
        ...


# --- A command in the foreground, and the engine's job that this process is in ----------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class CommandRequest:
    """A command of ``gpuherd run``.

    Attributes:
        name: what the engine's users see.
        wait_s: give up when it has not begun after so many seconds; None: wait for ever.
        tell: takes sentences for the user.
    """

    argv: tuple[str, ...]
    placement: Placement
    name: str
    wait_s: float | None
    tell: Callable[[str], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Replacement:
    """The program of the engine that this process becomes to run a command: ``argv[0]`` is looked up in PATH.

    Attributes:
        within: the running job of the engine ("SLURM job 17") of which the command becomes a part, and in which the
            requested resources were found to be; None for a new job.
    """

    argv: tuple[str, ...]
    environment: Mapping[str, str]
    within: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Inside:
    """The running job of the engine that this process is a part of, and which runs jobs itself instead of submitting.

    Attributes:
        title: for people, like "SLURM job 17".
        node: the name of the node that we run on.
        at_once: most jobs side by side; None for no limit.
    """

    title: str
    node: str
    at_once: int | None


class Foreground(Protocol):
    """What an engine can do in the session that a command was typed in; a module may be one."""

    def replacement(self, command: CommandRequest, options: EngineOptions) -> Replacement:
        """The engine's program that runs a command in the foreground. Raises JobCannotFit, UsageError, EngineMissing,
        EngineAway."""
        ...

    def inside(
        self,
        wanted: Callable[[], Sequence[Placement]],
        options: EngineOptions,
        submitted: str | None,
        tell: Callable[[str], None],
    ) -> Inside | None:
        """The job of the engine, of which this process is a part, that is to run jobs with these placements; None where
        they are to be submitted. Tells which where both could be meant.

        Args:
            submitted: the run's folder, where jobs of it were submitted before: then they go on so; else None.

        Raises JobCannotFit where the options demand it and it can't be; EngineMissing, EngineAway.
        """
        ...

    def take_over(self, given: EngineOptions, usual: EngineOptions, argv: Sequence[str]) -> Inside | Replacement | None:
        """As ``inside``, for a whole command before it begins; with a Replacement this process becomes ``argv`` on the
        job's own node.

        Args:
            given: the options of the command line; ``usual``: with those of the settings.

        Raises UsageError where that is demanded and can't be; EngineMissing, EngineAway.
        """
        ...

    def queue_notice(self, options: EngineOptions) -> str | None:
        """What ``gpuherd up`` says where it starts inside of a job of the engine. Raises UsageError for options that
        ask a queue to run in it."""
        ...


# --- Export -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportJob:
    """A job as ``gpuherd export`` hands it to an engine, which writes files that people submit by hand.

    Attributes:
        name: as people know it; any characters.
        line: what runs it, as one line of bash.
        needs: positions, in the same sequence, of jobs that must have succeeded before; each lower than its own.
        round: jobs of a later round begin when all of the round before have ended.
    """

    name: str
    line: str
    placement: Placement
    needs: tuple[int, ...] = ()
    round: int = 0
