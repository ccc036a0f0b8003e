"""Files between the dispatcher and the nodes: what a node reads of a batch, and what it reports of an attempt."""

from __future__ import annotations

import errno
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from types import NoneType
from typing import Any, TypeVar

from gpuherd.atomic import NO_LINKS, atomic_write, link_first
from gpuherd.engines.local.process import CannotStart, Exit
from gpuherd.engines.world import NodeFailure, Stop
from gpuherd.errors import ExitCode, UsageError, one_line
from gpuherd.gpus.visible import VARIABLES
from gpuherd.jobs.job import Job, job_of, spec_of
from gpuherd.jobs.remote import PAUSES_S

# The manifest describes the attempts of one batch for the nodes. It is written once, before the batch is submitted,
# where all nodes see it. Only its owner can read it: commands and environments may hold secrets.
#
# One line of JSON for the values that all attempts share, and one for each attempt: an agent parses two of a thousand.

_OF_A_MACHINE = frozenset(
    {
        *VARIABLES,
        "HOSTNAME",
        "TMPDIR",
        "XDG_RUNTIME_DIR",
        "_",
        "PWD",
        "OLDPWD",
        "SHLVL",
        "GPUHERD_ATTEMPT",
        "GPUHERD_PROGRESS",
    }
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    """One attempt: the job, and all that a node needs beyond it to run it. Paths are absolute and the same on every
    node; seconds.

    Attributes:
        attempt, tag: its number in the queue, and what its processes carry in their environment.
        job: as submitted, with the folder that it works in, and with the time limits that the node keeps.
        log, progress: files for its output and for its progress.
        claim, ended: files by which it is taken (``take``), and which reports its end.
        after: the files (as ``ended``) of other attempts: it begins only if each of them reports a success.
        delay_s: so long such a file may be on its way, when the engine says that it can begin.
        gpus: how many GPUs it has on each node; 0 hides them all from it, None leaves what the engine shows it.
        tasks: how many processes SLURM starts on each node; ``mpi``: how they find each other (srun --mpi).
        grace_s: between SIGTERM and SIGKILL.
        notice_s: so long before its time is up the engine announces that; None where it doesn't.
        threads: for the numeric libraries, unless the user has set them; None for what the node gives it.
    """

    attempt: int
    tag: str
    job: Job
    log: str
    progress: str
    claim: str
    ended: str
    after: tuple[str, ...] = ()
    delay_s: float = 15.0
    gpus: int | None = None
    tasks: int = 1
    mpi: str | None = None
    grace_s: float = 10.0
    notice_s: float | None = None
    threads: int | None = None

    @property
    def status(self) -> Path:
        """Where the attempt's shell writes its exit status, for a guardian: next to the report of its end."""
        return Path(self.ended).with_suffix(".status")

    @property
    def has_ranks(self) -> bool:
        """Whether it has several processes that the engine starts, on one node or several."""
        return self.job.nodes * self.tasks > 1

    @property
    def first_failure(self) -> Path:
        """Where the first of several nodes that fails reports how."""
        return Path(self.ended).with_suffix(".first")

    def on_node(self, rank: int) -> Order:
        """The same attempt for another of its nodes, 1 or more: with files and a tag of its own."""
        there = f".node{rank}"
        return replace(
            self,
            tag=f"{self.tag}{there}",
            log=f"{self.log}{there}",
            progress=f"{self.progress}{there}",
            claim=str(claim_on_node(self.first_failure, rank)),
            ended=str(Path(self.ended).with_suffix(f"{there}.ended")),
            job=replace(self.job, result=None),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """A batch. ``environment`` is the dispatcher's, without variables of a machine or an engine."""

    batch: str
    engine: str
    environment: Mapping[str, str]
    orders: tuple[Order, ...]


def claim_on_node(next_to: Path, rank: int) -> Path:
    """Where another node of an attempt, 1 or more, reports that it has begun its part. ``next_to``: a file of the
    attempt, whose name it has but for the suffix."""
    return next_to.with_suffix(f".node{rank}.claim")


def portable(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that mean the same on another machine: without those of the engine that started this process."""
    from gpuherd.engines.registry import specs  # here: nodes have no need of it

    of_engines = tuple(beginning for spec in specs() for beginning in spec.variables)
    return {
        name: value
        for name, value in environment.items()
        if name not in _OF_A_MACHINE and not name.startswith(of_engines)
    }


def to_json(manifest: Manifest) -> str:
    """The file's text."""
    shared = {"batch": manifest.batch, "engine": manifest.engine, "environment": dict(manifest.environment)}
    orders = ({**_values(each), "job": json.loads(spec_of(each.job))} for each in manifest.orders)
    return "".join(f"{json.dumps(each, separators=(',', ':'))}\n" for each in (shared, *orders))


def _values(order: Order) -> dict[str, Any]:
    return {each.name: getattr(order, each.name) for each in fields(order)}


def order_of(path: Path, index: int) -> tuple[Manifest, Order]:
    """Reads one order of a manifest's file: the shared values, as a manifest of one order, and the order.

    Raises OSError, and UsageError for a file that is no manifest and for an index that it does not have.
    """
    head, *lines = path.read_bytes().splitlines() or [b""]
    try:
        shared = json.loads(head)
        if not 0 <= index < len(lines):
            raise UsageError(f"{path} holds {len(lines)} orders, and none with the index {index}")
        values = json.loads(lines[index])
        if "argv" in values:
            raise ValueError(
                "an earlier version of gpuherd wrote it; cancel the jobs of its queue and submit them again"
            )
        job = job_of(json.dumps(values["job"]))
        order = Order(**{**values, "job": job, "after": tuple(values.get("after", ()))})
        return Manifest(**shared, orders=(order,)), order
    except (ValueError, TypeError, KeyError, RecursionError) as problem:
        raise UsageError(f"{path} is no manifest of a batch: {problem}") from problem


# Claims and reports of nodes: files that are complete or absent, on a file system that several machines see.
#
# An attempt is *claimed* before anything of it runs, by a hard link to a name that can be created only once: also over
# NFS one of two wins, whatever the other believes. The dispatcher can claim it too, and so make sure that it never
# begins (``void``). Its end is a second file, renamed into place. No process on a node opens the queue.
#
# A reader may see a file late, so an absent file proves nothing: an NFS client may believe for up to a minute that a
# name does not exist. ``present`` asks the server, by opening the folder. A name is created once and its content never
# changes, so that what was read once stays true. Whether an attempt may still begin must not be late: it is never read,
# but claimed.

_MOST_BYTES = 65536
# More than any second, number or size in a report.
_MOST = 1e15
_KINDS: Mapping[str, tuple[type, ...]] = {
    "bool": (bool,),
    "str": (str,),
    "str | None": (str, NoneType),
    "int": (int,),
    "int | None": (int, NoneType),
    "float": (int, float),
    "float | None": (int, float, NoneType),
    "tuple[str, ...]": (list,),
}
# ``Claim.why`` where a leader does not begin its attempt: ``completion.NoFault.TOO_EARLY``, which takes long to load.
TOO_EARLY = "TOO_EARLY"
# Errors of a file that is not there.
NOT_NOW = frozenset({errno.ENOENT, errno.ESTALE})


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """Who runs an attempt, or another node's part of one. ``at`` is the node's wall clock.

    Attributes:
        void: it never runs: the dispatcher has claimed it so that it does not begin, or its agent has, which was
            started before the attempt's needs had succeeded.
        node, handle: where it runs, and the engine's id for it there.
        gpus: the names of its GPUs there (``gpus.visible.named_in``).
        others: the names of its further nodes, where they are known.
        pid: its agent on the node.
        why: of a void one, why it was taken back (a name of ``completion.NoFault``); "" where the engine knows.
    """

    at: float
    void: bool = False
    node: str = ""
    handle: str | None = None
    gpus: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    pid: int = 0
    why: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class EndReport:
    """A node's report of an attempt's end. Seconds; MB (2^20 bytes).

    Attributes:
        at, ran_s: the end by the node's wall clock, and how long it ran by its own clock.
        started: whether the command itself ever ran; if not, ``problem`` says why.
        code, signal: of its main process, as in ``engines.local.process.Exit``.
        has_result: whether the job's result existed on the node, which wrote it (True for a job without one).
        limit, limit_s, stage: the limit for which the node ended it (words of ``timelimits.LimitKind``).
        interrupted: it was ended to make room, because its time is nearly up, or because its agent was lost.
        lost: it was ended because another of its nodes was lost; it is ``interrupted`` too.
        peak_mb: the most memory that it used on one GPU, None where not measured.
    """

    at: float
    ran_s: float
    started: bool = True
    problem: str | None = None
    code: int | None = None
    signal: int | None = None
    has_result: bool = True
    limit: str | None = None
    limit_s: float | None = None
    stage: str | None = None
    interrupted: bool = False
    lost: bool = False
    peak_mb: int | None = None

    @property
    def exit(self) -> Exit:
        """What the main process did."""
        return Exit(self.started, self.code, self.signal, self.ran_s)

    @property
    def well(self) -> bool:
        """Whether the job has succeeded; also when it was being ended and had done its work."""
        return self.started and self.code == 0 and self.has_result


def take(path: Path, claim: Claim) -> bool:
    """Claims an attempt; False when it is claimed already. Raises OSError, as on a file system without hard links."""
    return create_exclusive(path, json.dumps(asdict(claim)).encode())


def create_exclusive(path: Path, data: bytes) -> bool:
    """Creates a file that is complete from the first moment and can be created only once; False when it exists.

    Raises OSError, as on a file system without hard links.
    """
    # A unique name, also where two nodes have the same host name.
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(8).hex()}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        try:
            return link_first(temporary, path)
        except OSError as problem:
            if problem.errno not in NO_LINKS:
                raise
            text = f"{problem.strerror} (jobs are claimed by hard links, which its file system must have)"
            raise OSError(problem.errno, text, str(path)) from problem
    finally:
        with suppress(OSError):
            temporary.unlink()


def present(folder: Path) -> frozenset[str]:
    """The names in a folder of reports, as the server of a network file system has them now. Raises OSError.

    Opening a folder makes an NFS client ask whether it has changed, and drop its negative entries; opening one file
    after the other would be answered from its cache.
    """
    with os.scandir(folder) as entries:
        return frozenset(entry.name for entry in entries)


def read_claim(path: Path) -> Claim | None:
    """The attempt's claim, None while there is none. A claim that can't be parsed is a claim all the same."""
    data = _read(path)
    if data is None:
        return None
    values = _known(data, Claim)
    with suppress(TypeError):
        lists = {name: tuple(str(word) for word in values.get(name, ())) for name in ("gpus", "others")}
        return Claim(**{**values, **lists})
    return Claim(at=0.0)


def write_ended(path: Path, ended: EndReport) -> None:
    """Writes the report of an end. Raises OSError, as on a full disk or over a quota."""
    atomic_write(path, json.dumps(asdict(ended)).encode() + b"\n")


def read_ended(path: Path) -> EndReport | None:
    """The report of the attempt's end, None while there is none, or where the file can't be parsed."""
    data = _read(path)
    if data is None:
        return None
    try:
        return EndReport(**_known(data, EndReport))
    except TypeError:
        return None


def first_failure(path: Path) -> NodeFailure | None:
    """The first failure among an attempt's processes (``Order.first_failure``), None where none has failed."""
    try:
        return NodeFailure(**json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError):
        return None


def _known(data: bytes, kind: type[Claim | EndReport]) -> dict[str, Any]:
    """The values of a file, without fields of a later version; none where a value is impossible, since later code
    calculates with the values."""
    try:
        raw = json.loads(data)
    except (ValueError, RecursionError):
        return {}
    types = {each.name: str(each.type) for each in fields(kind)}
    values = {name: value for name, value in raw.items() if name in types} if isinstance(raw, dict) else {}
    return values if all(_fits(types[name], value) for name, value in values.items()) else {}


def _fits(kind: str, value: object) -> bool:
    if isinstance(value, (int, float)) and not -_MOST < value < _MOST:
        return False
    return isinstance(value, _KINDS[kind])


def _read(path: Path) -> bytes | None:
    try:
        with path.open("rb") as file:
            return file.read(_MOST_BYTES)
    except OSError as problem:
        if problem.errno in NOT_NOW:
            return None
        raise


# The end of an attempt, reported by its agent or its guardian: the report, the exit code, and a line for the engine's
# output.

T = TypeVar("T")

INTERRUPTED = int(ExitCode.BUSY)
_FOR_GOOD = frozenset({errno.EPERM, errno.EACCES, errno.EROFS, errno.ENOTDIR, errno.EOPNOTSUPP})


def write_report(order: Order, ended: EndReport, patience_s: float) -> None:
    """Writes the report; retries a failed write for so long. Raises OSError when that did not help."""
    patiently(lambda: write_ended(Path(order.ended), ended), f"can't write {order.ended}, that is {ended}", patience_s)
    for path in (order.status, order.first_failure):
        with suppress(OSError):
            path.unlink()


def exit_code(ended: EndReport) -> int:
    """0 for a success, 75 for what may run again as it is, 1 for a failure."""
    return ExitCode.OK if ended.well else INTERRUPTED if ended.interrupted else ExitCode.FAILED


def has_result(order: Order) -> bool:
    """Whether the job's result file exists."""
    job = order.job
    return job.result is None or Path(job.cwd or ".", job.result).exists()


def patiently(act: Callable[[], T], trouble: str, patience_s: float, stop: Stop | None = None) -> T:
    """Returns what ``act`` returns; retries for so long, and no longer than until we are stopped, while it fails in a
    way that may pass. Raises the last error: OSError, CannotStart.
    """
    until, was_reported, tries = time.monotonic() + patience_s, False, 0
    while True:
        pause_s = PAUSES_S[min(tries, len(PAUSES_S) - 1)]
        try:
            return act()
        except (OSError, CannotStart) as problem:
            if not _may_pass(problem) or time.monotonic() + pause_s > until or (stop is not None and stop.asked):
                raise
            if not was_reported:
                say(f"{trouble}: {problem}; trying again for {patience_s:g} s")
        was_reported, tries = True, tries + 1
        time.sleep(pause_s)


def say(text: str) -> None:
    """Prints a line on standard error; on a node that is the engine's output."""
    with suppress(OSError):
        sys.stderr.write(f"gpuherd: {one_line(text)}\n")
        sys.stderr.flush()


def _may_pass(problem: OSError | CannotStart) -> bool:
    return problem.may_pass if isinstance(problem, CannotStart) else problem.errno not in _FOR_GOOD
