"""Grid Engine's programs: how each is called, and the meaning of what they print: states, records, complaints."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from xml.etree import ElementTree

from gpuherd.engines.base import End, EngineAway, EngineMissing, Phase, Sighting
from gpuherd.engines.batch_system import BatchSystem, JobRow, places_in
from gpuherd.errors import printable

# qacct reads all of a file that may hold years of jobs.
_ACCOUNTING_S = 120.0
# A line of a verification that says nothing about the requested queue.
_OTHER_QUEUE = "not contained in its hard queue list"
_MOST_REASONS = 3


class GridEngineSystem(BatchSystem):
    """Grid Engine's dialect. All queries raise EngineMissing where its programs are not there, and EngineAway where
    sge_qmaster does not answer."""

    title = "Grid Engine"
    programs = ("qsub", "qstat", "qdel", "qalter", "qconf", "qselect", "qacct")
    canceller = "qdel"
    get = (
        "Grid Engine's commands are on the submit hosts of a cluster, there often after `module load sge` or "
        "`. $SGE_ROOT/default/common/settings.sh`; on this machine --engine local needs none"
    )
    meanings = (
        (EngineAway, ("unable to contact qmaster",)),
        (
            EngineMissing,
            ("sge_root", "cell directory", "act_qmaster", "unable to read qmaster name", "can't resolve"),
        ),
        (
            EngineAway,
            (
                "commlib error",
                "unable to send message to qmaster",
                "failed receiving gdi request",
                "got select error",
                "got send error",
                "got read error",
                "connection refused",
                "connection reset",
                "no route to host",
                "timeout",
                "try again later",
            ),
        ),
    )
    temporary = (
        "jobs are allowed",  # max_u_jobs, max_jobs
        "a job with more than",  # max_aj_tasks
        "job limit",
        "no space left on device",
        "disk quota exceeded",
    )
    over = ("does not exist", "already in deletion", "has registered", "has deleted", "do not exist")
    decoration = re.compile(
        r"^(?:Unable to run job: )?(?:(?:error|critical error|warning|commlib error): )*(?:Job \d+ )?"
        r"(?:(?:job rejected|denied|Job was rejected because)[:,]? *)?",
        re.IGNORECASE,
    )
    silent = ("verification:", "Exiting.")
    mark, first = ".", 1

    def verify(self, arguments: Sequence[str]) -> str | None:
        """What stands against such a job, in Grid Engine's words; None where an empty cluster could run it."""
        done = self.run("qsub", *arguments, text="exit 0\n")
        if done.code == 0:
            return None
        problem = self.unavailable(done.printed)
        if problem is not None:
            raise problem
        return done.printed

    def qstat(self, *words: str) -> str:
        """qstat's answer as XML."""
        return self.answer("qstat", *words, "-xml")

    def details(self, jobs: Sequence[str]) -> str:
        """All that Grid Engine knows of these jobs, as XML; nothing where one of them is gone by now."""
        done = self.run("qstat", "-j", ",".join(jobs), "-xml")
        return done.out if done.code == 0 and "<unknown_jobs" not in done.out else "<gone/>"

    def qacct(self, names: str) -> list[Record] | None:
        """The accounting records of jobs by these names, a pattern; None where accounting can't be read from here."""
        try:
            done = self.run("qacct", "-j", names, limit_s=_ACCOUNTING_S)
        except (EngineAway, EngineMissing):
            return None  # a long file, or none here: the nodes' own reports say most
        return read_qacct(done.out) if done.code == 0 or "not found" in done.errors else None

    def release(self, job: str) -> None:
        """A job waits for no other any more. One that has begun or ended meanwhile is no error."""
        # No job has the number 0. Against its manual, 8.1.9 refuses an empty list.
        self._or_nothing("qalter", "-hold_jid", "0", job)

    def select(self, *words: str) -> tuple[str, ...]:
        """The queue instances that qselect finds; () where it finds none."""
        return tuple(self._or_nothing("qselect", *words).split())

    def resources(self) -> Mapping[str, Complex]:
        """The resources that can be requested, by name and by shortcut."""
        return complexes(self.answer("qconf", "-sc"))

    def _or_nothing(self, *words: str) -> str:
        """The output of a program that also fails where there is nothing to do."""
        done = self.run(*words)
        if done.code == 0:
            return done.out
        problem = self.unavailable(done.printed)
        if problem is not None:
            raise problem
        return ""


GRID_ENGINE = GridEngineSystem()

# --- states and records -----------------------------------------------------------------------------------------------

# Exit codes of a job's script: the attempt made room on request, or because the job was deleted.
MADE_ROOM, DELETED = 75, 76
# Codes of the field "failed" of an accounting record (sge_status(5)).
_LIMIT_ENFORCED, _AFTER_JOB = 37, 100
_SIGNALLED = 128
_WORD = re.compile(r"^(\w+) +(.*?)\s*$")
_FIRST_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


@dataclass(frozen=True, kw_only=True, slots=True)
class GridEngineJobRow(JobRow):
    """A job, or one or several tasks of an array, as ``qstat -xml`` shows it. ``state``: letters like ``qw``, ``hqw``,
    ``r``, ``dr``, ``Eqw``."""

    system = GRID_ENGINE

    state: str

    @property
    def is_in_error(self) -> bool:
        """Whether it could not be started, and is kept for people to look at; it begins no more by itself."""
        return "E" in self.state

    @property
    def is_being_deleted(self) -> bool:
        """Whether somebody has deleted it, and its processes are being ended."""
        return "d" in self.state

    @property
    def phase(self) -> Phase:
        """How far it is; one in error counts as ended, although Grid Engine keeps it."""
        if self.is_in_error:
            return Phase.ENDED
        return Phase.WAITING if "q" in self.state else Phase.RUNNING

    def sighting(self, place: int, reason: str | None = None) -> Sighting:
        """What it says of the parcel at this place. ``reason``: what else is known of it."""
        said = _STATE_REASONS.get(self.state) if reason is None else reason
        if said is None and self.state not in _PLAIN_STATES:
            said = f"state {self.state}"
        return Sighting(
            handle=self.handle(place),
            phase=self.phase,
            reason=None if said is None else printable(said),
            end=End.FAILED if self.is_in_error else None,
            node=self.node,
        )


_PLAIN_STATES = frozenset({"r", "t", "hr", "hqw", "qw"})
_STATE_REASONS = {
    "qw": "in the queue",
    "hqw": "on hold, or behind another job",
    "dr": "it is being deleted",
    "dt": "it is being deleted",
    "s": "suspended",
    "S": "its queue is suspended",
    "T": "suspended: its node is under load",
    "Rq": "it is started again",
}


def read_qstat(text: str) -> list[GridEngineJobRow]:
    """The rows of ``qstat -xml``. Raises EngineAway for what is no such answer."""
    found = []
    for each in _xml(text).iter("job_list"):
        job = each.findtext("JB_job_number", "")
        tasks = each.findtext("tasks")
        if not job.isdigit():
            continue
        queue = each.findtext("queue_name") or ""
        found.append(
            GridEngineJobRow(
                job=job,
                name=each.findtext("JB_name", ""),
                state=each.findtext("state", ""),
                places=None if tasks is None else places_in(tasks, GRID_ENGINE.first),
                node=printable(queue.partition("@")[2]) or None,
            )
        )
    return found


def errors_of(text: str) -> dict[str, str]:
    """Why jobs could not be started: by job number the last message of ``qstat -j … -xml``."""
    found = {}
    for each in _xml(text).iter("element"):
        job = each.findtext("JB_job_number")
        messages = [message.text or "" for message in each.iter("QIM_message")]
        if job is not None and messages:
            found[job] = re.sub(r"^\S+ \S+ \[\d+:\d+\]: ", "", messages[-1]).removeprefix("error: ")
    return found


def why_it_waits(text: str) -> str | None:
    """The scheduler's reason in ``qstat -j JOB -xml``; None where the site's scheduler tells none."""
    messages = [each.text or "" for part in _xml(text).iter("SME_message_list") for each in part.iter("MES_message")]
    reasons = [each for each in dict.fromkeys(messages) if each and _OTHER_QUEUE not in each]
    return f"{reasons[0]} (and {len(reasons) - 1} more)" if len(reasons) > 1 else next(iter(reasons), None)


def unknown_hosts(text: str) -> frozenset[str]:
    """The hosts of the queue instances that ``qstat -f -qs u -xml`` shows: their sge_execd has not been heard."""
    names = (each.findtext("name", "") for each in _xml(text).iter("Queue-List"))
    return frozenset(name.partition("@")[2] for name in names if "@" in name)


@dataclass(frozen=True, kw_only=True, slots=True)
class Record(JobRow):
    """What accounting tells of a job or task that has run. Seconds; memory in bytes.

    Attributes:
        failed: the code by which Grid Engine says at what it failed. ``why``: its words for that.
        exit_status: of the script, as shells say it.
        limits: the resources that were requested by ``-l``.
    """

    system = GRID_ENGINE

    failed: int
    why: str
    exit_status: int
    ran_s: float
    most_memory: float
    limits: Mapping[str, str]

    def sighting(self, *, deleted: bool = False) -> Sighting:
        """The end of it. ``deleted``: Grid Engine was seen to delete it."""
        end, reason = self._end(deleted=deleted)
        place = 0 if self.places is None else self.places[0].start
        return Sighting(handle=self.handle(place), phase=Phase.ENDED, reason=reason, end=end, node=self.node)

    def _end(self, *, deleted: bool) -> tuple[End, str | None]:
        if self.failed == 0 and self.exit_status == 0:
            return End.OK, None
        by_signal = self.exit_status == MADE_ROOM or self.exit_status > _SIGNALLED
        if self._is_over("s_rt") and (self.failed == _LIMIT_ENFORCED or by_signal):
            return End.TIME_UP, "its time was up"
        if deleted or self.exit_status == DELETED:
            return End.CANCELLED, "deleted"
        if self.exit_status == MADE_ROOM:
            return End.PREEMPTED, "it has made room"
        if self.failed == _LIMIT_ENFORCED:
            memory = size_of(self.limits.get("h_vmem", ""))
            if memory is not None and self.most_memory >= memory:
                return End.OUT_OF_MEMORY, "it used more than h_vmem"
            return End.TIME_UP, self.why
        if self.failed not in (0, _AFTER_JOB):
            return End.FAILED, f"failed {self.failed}: {self.why}"
        return End.FAILED, f"exit status {self.exit_status}" + (f" ({self.why})" if self.why else "")

    def _is_over(self, limit: str) -> bool:
        seconds = self.limits.get(limit) or self.limits.get("h_rt", "")
        return seconds.isdigit() and self.ran_s >= int(seconds)


def read_qacct(text: str) -> list[Record]:
    """The records of ``qacct -j``."""
    found = []
    for block in re.split(r"^=+\s*$", text, flags=re.MULTILINE):
        fields = {match[1]: match[2] for line in block.splitlines() if (match := _WORD.match(line))}
        job, failed = fields.get("jobnumber", ""), fields.get("failed", "").partition(":")
        if not job.isdigit():
            continue
        task = fields.get("taskid", "")
        found.append(
            Record(
                job=job,
                name=fields.get("jobname", ""),
                node=printable(fields.get("hostname", "")) or None,
                places=places_in(task, GRID_ENGINE.first) or None,
                failed=int(_first_number(failed[0])),
                why=printable(failed[2].strip()),
                exit_status=int(_first_number(fields.get("exit_status", ""))),
                ran_s=_first_number(fields.get("ru_wallclock", "")),
                most_memory=size_of(fields.get("maxvmem", "")) or 0.0,
                limits=_requests(fields.get("category", "")),
            )
        )
    return found


def _requests(category: str) -> dict[str, str]:
    found = {}
    for list_of in re.findall(r"(?:^| )-l (\S+)", category):
        for word in list_of.split(","):
            name, _, value = word.partition("=")
            found[name] = value
    return found


def size_of(text: str) -> float | None:
    """Bytes out of ``3.254MB``, ``64G``, ``512``; None for what is no size.

    >>> size_of("1.5K"), size_of("2.0MB"), size_of("INFINITY")
    (1536.0, 2097152.0, None)
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?) *([kKmMgGtT]?)B?s?", text.strip())
    if found is None:
        return None
    # k, m and g are powers of 1000 in Grid Engine's words, K, M and G of 1024.
    base = 1000.0 if found[2].islower() else 1024.0
    return float(found[1]) * math.pow(base, "kmgt".index(found[2].lower()) + 1 if found[2] else 0)


def _first_number(text: str) -> float:
    found = _FIRST_NUMBER.match(text.strip())
    return 0.0 if found is None else float(found[0])


def why_unsuitable(printed: str) -> str:
    """Why no queue can ever take what was verified, in Grid Engine's words; "" where it tells none."""
    lines = [line for line in printed.splitlines() if _OTHER_QUEUE not in line]
    reasons = [reason for line in lines if (reason := GRID_ENGINE.said(line))]
    reasons = [each for each in dict.fromkeys(reasons) if each != "no suitable queues"]
    more = f"; and {len(reasons) - _MOST_REASONS} more" if len(reasons) > _MOST_REASONS else ""
    return "; ".join(reasons[:_MOST_REASONS]) + more


@dataclass(frozen=True, slots=True)
class Complex:
    """A resource that can be requested: its type (INT, DOUBLE, MEMORY …), and how it is counted: ``NO`` (compared with
    what is there), ``YES`` (requested by slot) or ``JOB`` (requested once)."""

    kind: str
    consumable: str


def complexes(text: str) -> dict[str, Complex]:
    """Those of ``qconf -sc``, by name and by shortcut."""
    found = {}
    for line in text.splitlines():
        words = line.split()
        if len(words) >= 8 and not line.startswith("#"):
            found[words[0]] = found[words[1]] = Complex(words[2], words[5])
    return found


def fields_of(text: str) -> dict[str, str]:
    """What ``qconf -sp``, ``-sq`` or ``-se`` prints, by name; lines that go on are joined."""
    joined = re.sub(r"\\\n\s*", "", text)
    return {match[1]: match[2] for line in joined.splitlines() if (match := _WORD.match(line))}


def _xml(text: str) -> ElementTree.Element:
    try:
        return ElementTree.fromstring(text)  # noqa: S314 - what the site's own program prints
    except ElementTree.ParseError as problem:
        raise EngineAway(f"what qstat prints is not understood: {problem}") from problem
