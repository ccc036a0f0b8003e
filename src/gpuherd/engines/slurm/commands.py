"""SLURM's programs: how each is called, and the meaning of what they print.

squeue and sacct print one line a job with bars between the fields. The field that could contain a bar comes last:
SLURM's reasons in squeue, names in sacct. Lines of another form are skipped.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpuherd.engines import host
from gpuherd.engines.base import End, EngineAway, EngineMissing, Phase, Sighting
from gpuherd.engines.batch_system import ASK_S, BatchSystem, Done, JobRow, places_in
from gpuherd.engines.slurm.node import hosts
from gpuherd.errors import UsageError, printable

# The kernel's limit for one argument is 128 KiB.
_MOST_WORD = 100_000
# Variables by which users change the output of SLURM's programs, and those of a job that we may be part of: sbatch
# would take them for options. Those of sbatch itself are the user's options, except those that would change the kind of
# job.
_OF_OTHERS = ("SLURM_", "SQUEUE_", "SACCT_", "SINFO_", "SCANCEL_", "SCONTROL_", "SLURMD_", "SRUN_")
_NOT_OURS = frozenset({"SBATCH_ARRAY_INX", "SBATCH_WAIT", "SBATCH_CLUSTERS", "SBATCH_REQUEUE"})
_KEPT = ("SLURM_CONF", "SLURM_CLUSTERS", "SLURM_JWT", "SLURM_CONF_SERVER")
# For queries: no translations, and lists of an array's places in full, however long.
_ASKING = {"LC_ALL": "C", "SLURM_BITSTR_LEN": "0"}
_DISABLED = "slurm accounting storage is disabled"


def environment(own: Mapping[str, str]) -> dict[str, str]:
    """The environment of SLURM's programs, and with sbatch also of the jobs."""
    return {
        name: value
        for name, value in own.items()
        if name in _KEPT or not (name.startswith(_OF_OTHERS) or name in _NOT_OURS)
    }


class Slurm(BatchSystem):
    title = "SLURM"
    programs = ("sbatch", "squeue", "scontrol", "sinfo", "scancel")
    canceller = "scancel"
    get = (
        "SLURM's commands are on the login node of a cluster, there often after `module load slurm`; "
        "on this machine --engine local needs none"
    )
    meanings = (
        (
            EngineMissing,
            (
                "could not establish a configuration source",
                "dns srv lookup failed",
                "unable to process configuration",
            ),
        ),
        (
            # The controller, the database or munge did not answer.
            EngineAway,
            (
                "unable to contact slurm controller",
                "connect failure",
                "connection refused",
                "connection timed out",
                "connection reset",
                "socket timed out",
                "zero bytes were transmitted",
                "transport endpoint is not connected",
                "no route to host",
                "network is unreachable",
                "backup controller",
                "in standby mode",
                "munge",
                "authentication error",
                "invalid authentication credential",
                "temporarily unable to",
                "unexpected message received",
                "communication connection failure",
                "communication shutdown failure",
                "communications connection failure",
                "problem talking to the database",
                "failed to open persistent connection",
            ),
        ),
    )
    temporary = (
        "job violates accounting/qos policy",
        "qosgrpsubmit",
        "assocgrpsubmit",
        "maxsubmitjob",
        "submit limit",
        "queue is full",
        "no space left on device",
        "disk quota exceeded",
        "resource temporarily unavailable",
        "out of memory",
        "not available now",
        "required partition not available",
        "partition is not available",
        "i/o error",
        "error writing",
        "submission disabled",
        # The job that it is to follow has ended and was forgotten since the last look.
        "job dependency problem",
    )
    over = ("already completing or completed", "invalid job id", "job/step already completing")
    decoration = re.compile(r"^(?:\w+: )?(?:(?:fatal|error|warning|\w+ error): )*(?:Batch job submission failed: )?")
    mark, first = "_", 0

    def environment(self, program: str) -> Mapping[str, str]:
        """Jobs inherit that of sbatch; they start in another folder, and find modules from this one."""
        if program != "sbatch":
            return {**environment(os.environ), **_ASKING}
        places = host.absolute(os.environ.get(host.NAME, ""))
        return {**environment(os.environ), **({host.NAME: places} if places else {})}

    def run(self, *words: str, limit_s: float = ASK_S, text: str = "") -> Done:
        """As ``BatchSystem.run``. SLURM's programs would look for a lost configuration for a minute."""
        configuration = os.environ.get("SLURM_CONF")
        if configuration is not None and not Path(configuration).exists():
            raise EngineMissing(f"SLURM_CONF={configuration} is not there; {self.get}")
        return super().run(*words, limit_s=limit_s, text=text)

    def array_words(self, job: str, several: Sequence[str]) -> list[str]:
        """In one word, which is one request.

        >>> list(SLURM.short_lists(["8", "7_2", "7_0", "7_1", "7_5"], 3))
        [['7_[0-2]'], ['7_5', '8']]
        """
        if not several:
            return []
        single = len(several) == 1 and several[0].isdigit()
        return [f"{job}_{several[0]}" if single else f"{job}_[{','.join(several)}]"]

    # --- queries ----------------------------------------------------------------------------------------------------

    def squeue(self, names: Sequence[str]) -> Iterator[SlurmJobRow]:
        """This user's jobs, at least those with these names, also those that have just ended."""
        only = ",".join(names)
        return read_squeue(
            self.answer(
                *("squeue", "--noheader", f"--user={os.getuid()}", "--states=all", f"--format={_SQUEUE_FORMAT}"),
                *([f"--name={only}"] if len(only) <= _MOST_WORD else []),
            )
        )

    def sacct(self, *, jobs: Sequence[str] = (), names: Sequence[str] = ()) -> list[SlurmJobRow] | None:
        """Accounting's records of these jobs, or of all with one of these names in the last week; None where accounting
        is switched off.
        """
        these = [f"--jobs={','.join(jobs)}"]
        if names:
            these = ["--starttime=now-7days", f"--user={os.getuid()}", f"--name={','.join(names)}"]
        done = self.run("sacct", "--noheader", "--parsable2", "--allocations", f"--format={_SACCT_FORMAT}", *these)
        if _DISABLED in done.errors.lower():
            return None
        if done.code != 0:
            raise self.failure("sacct", done, done.errors)
        return list(read_sacct(done.out))

    def config(self) -> str:
        """slurm.conf as the controller has it."""
        return self.answer("scontrol", "show", "config")

    def job(self, number: str) -> str:
        """One job, with what it has on each node."""
        return self.answer("scontrol", "show", "job", "--details", number)


SLURM = Slurm()

# --- squeue and sacct -------------------------------------------------------------------------------------------------

# Job or array, place in it, state, first node, name; then what it waits for or how it ended.
_SQUEUE_FORMAT = "%F|%K|%T|%B|%j|%r"
_SACCT_FORMAT = "JobID,State,NodeList,Reason,JobName"

_STATES: dict[str, tuple[Phase, End | None]] = {
    # REVOKED: another cluster of a federation has it; its node reports through files as always.
    **dict.fromkeys(
        (
            *("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT"),
            "REVOKED",
        ),
        (Phase.WAITING, None),
    ),
    **dict.fromkeys(
        ("RUNNING", "SUSPENDED", "STOPPED", "RESIZING", "SIGNALING", "STAGE_OUT", "COMPLETING"), (Phase.RUNNING, None)
    ),
    "COMPLETED": (Phase.ENDED, End.OK),
    "FAILED": (Phase.ENDED, End.FAILED),
    # Its own deadline, which another try would miss too.
    "DEADLINE": (Phase.ENDED, End.FAILED),
    "CANCELLED": (Phase.ENDED, End.CANCELLED),
    "PREEMPTED": (Phase.ENDED, End.PREEMPTED),
    "TIMEOUT": (Phase.ENDED, End.TIME_UP),
    "OUT_OF_MEMORY": (Phase.ENDED, End.OUT_OF_MEMORY),
    "NODE_FAIL": (Phase.ENDED, End.NODE_LOST),
    "BOOT_FAIL": (Phase.ENDED, End.NODE_LOST),
}
_UNKNOWN = (Phase.RUNNING, None)
# States that say more than the reason in the same row.
_TOLD_AS_REASON = frozenset(
    {"SUSPENDED", "CONFIGURING", "COMPLETING", "SPECIAL_EXIT", "REVOKED", "REQUEUE_HOLD", "STOPPED", "DEADLINE"}
)
_NOTHING = frozenset({"", "None", "(null)", "n/a", "N/A", "None assigned"})
_JOB = re.compile(r"(\d{1,20})(?:_(?:(\d{1,20})|\[([^\]]*)\]))?(?:\+\d+)?")
_BY = re.compile(r"CANCELLED by (\d{1,20})")


@dataclass(frozen=True, kw_only=True, slots=True)
class SlurmJobRow(JobRow):
    """A line of squeue or sacct. ``state``: SLURM's word, like RUNNING; ``by``: the user id that sacct gives with
    CANCELLED."""

    system = SLURM

    state: str
    reason: str | None = None
    by: int | None = None

    @property
    def phase(self) -> Phase:
        """How far it is; a state that is not known here counts as running."""
        return _STATES.get(self.state, _UNKNOWN)[0]

    @property
    def end(self) -> End | None:
        """How it ended; NEVER for a job that waited for another one that failed."""
        end = _STATES.get(self.state, _UNKNOWN)[1]
        never = end is End.CANCELLED and self.by is None and (self.reason or "").startswith("Dependency")
        return End.NEVER if never else end

    def sighting(self, place: int, by: str | None = None) -> Sighting:
        """The state of the parcel at this place. ``by``: who cancelled it."""
        reason = self.reason
        if self.state in _TOLD_AS_REASON or self.state not in _STATES:
            word = self.state.lower().replace("_", " ")
            reason = word if reason is None else f"{word}: {reason}"
        return Sighting(
            handle=self.handle(place),
            phase=self.phase,
            reason=reason,
            end=self.end,
            by=by if self.end is End.CANCELLED else None,
            node=self.node,
        )


def read_squeue(text: str) -> Iterator[SlurmJobRow]:
    """The rows of ``squeue --noheader -o _SQUEUE_FORMAT``."""
    for line in text.splitlines():
        job, place, state, node, name, reason = _fields(line, 6)
        places = _places(place)
        if _JOB.fullmatch(job) and job.isdigit() and places != ():
            yield SlurmJobRow(job=job, places=places, state=state, name=name, node=_word(node), reason=_word(reason))


def read_sacct(text: str) -> Iterator[SlurmJobRow]:
    """The rows of ``sacct --noheader --parsable2 --allocations --format=_SACCT_FORMAT``."""
    for line in text.splitlines():
        job, state, nodes, reason, name = _fields(line, 5)
        found, by = _JOB.fullmatch(job), _BY.match(state)
        places = None if found is None else _places(found[2] or found[3] or "")
        if found is not None and places != ():
            yield SlurmJobRow(
                job=found[1],
                places=places,
                state=state.partition(" ")[0].rstrip("+"),
                name=name,
                node=_word(first_node(nodes)),
                reason=_word(reason),
                by=int(by[1]) if by else None,
            )


def first_node(nodes: str) -> str:
    """The first of a list of nodes; the text itself where that is none.

    >>> first_node("n[08-11,20],gpu3"), first_node("a,b"), first_node("rack[1-2]-n7")
    ('n08', 'a', 'rack1-n7')
    """
    try:
        return next(hosts(nodes))
    except UsageError:
        return nodes


def _fields(line: str, count: int) -> list[str]:
    """The fields of a line, empty ones for a line of another form."""
    found = line.split("|", count - 1)
    return found if len(found) == count else [""] * count


def _places(text: str) -> tuple[range, ...] | None:
    """The places of an array; None for a plain job, () for a text of another form."""
    return None if text in ("N/A", "") else places_in(text)


def _word(text: str) -> str | None:
    return None if text in _NOTHING else printable(text)
