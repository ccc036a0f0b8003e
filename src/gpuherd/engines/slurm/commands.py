"""SLURM's programs, run with a time limit and in the C locale, and the meaning of their error messages."""

from __future__ import annotations

import os
import pwd
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpuherd.engines import host
from gpuherd.engines.base import EngineAway, EngineMissing, Refused
from gpuherd.engines.slurm.parse import SACCT_FORMAT, SQUEUE_FORMAT, job_number
from gpuherd.engines.slurm.site import NODES_FORMAT, PARTITIONS_FORMAT
from gpuherd.errors import GpuherdError

PROGRAMS = ("sbatch", "squeue", "scontrol", "sinfo", "scancel")

# The error messages of SLURM's programs, and their meaning. Pure.

GET_SLURM = (
    "SLURM's commands are on the login node of a cluster, there often after `module load slurm`; "
    "on this machine --engine local needs none"
)
# The controller, the database or munge did not answer, or not in time. The request may have been carried out.
_AWAY = (
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
    "protocol authentication error",
    "authentication error",
    "invalid authentication credential",
    "temporarily unable to",
    "unexpected message received",
    "communication connection failure",
    "communication shutdown failure",
    "communications connection failure",
    "problem talking to the database",
    "failed to open persistent connection",
)
# The programs are installed, but no cluster is configured.
_UNCONFIGURED = (
    "could not establish a configuration source",
    "dns srv lookup failed",
    "unable to process configuration",
)
# Temporary limits: the same batch may be accepted later.
_MAY_PASS = (
    "job violates accounting/qos policy",
    "qosmaxsubmitjob",
    "qosgrpsubmit",
    "assocmaxsubmitjob",
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
DISABLED = "slurm accounting storage is disabled"
_PREFIX = re.compile(r"^(?:\w+: )?(?:(?:fatal|error|warning|\w+ error): )*(?:Batch job submission failed: )?")


def said(errors: str) -> str:
    """SLURM's message in one line, without the names of its programs.

    >>> said("sbatch: error: invalid partition specified: x\\nsbatch: error: Batch job submission failed: Invalid y\\n")
    'invalid partition specified: x; Invalid y'
    """
    lines = [_PREFIX.sub("", line).strip() for line in errors.splitlines()]
    return "; ".join(dict.fromkeys(line for line in lines if line))


def unavailable(errors: str) -> GpuherdError | None:
    """EngineAway or EngineMissing where the message means that SLURM has not answered, else None."""
    low = errors.lower()
    if any(words in low for words in _UNCONFIGURED):
        return EngineMissing(f"SLURM's commands are here, but know no cluster ({said(errors)}); {GET_SLURM}")
    if any(words in low for words in _AWAY):
        return EngineAway(said(errors))
    return None


def refusal(errors: str) -> Refused:
    """The error for a submission that SLURM has refused."""
    low = errors.lower()
    words = said(errors) or "sbatch has failed and said nothing"
    return Refused(words, may_pass=any(limit in low for limit in _MAY_PASS))


def only_ended(errors: str) -> bool:
    """Whether scancel has only complained about jobs that had ended already or are forgotten."""
    known = ("already completing or completed", "invalid job id", "job/step already completing")
    lines = [line.lower() for line in errors.splitlines() if line.strip()]
    return all(any(words in line for words in known) for line in lines)


# Running the programs.

_ASK_S = 20.0
_SUBMIT_S = 60.0
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


@dataclass(frozen=True, slots=True)
class _Done:
    code: int
    out: str
    errors: str


def environment(own: Mapping[str, str]) -> dict[str, str]:
    """The environment of SLURM's programs, and with sbatch also of the jobs."""
    return {
        name: value
        for name, value in own.items()
        if name in _KEPT or not (name.startswith(_OF_OTHERS) or name in _NOT_OURS)
    }


def _for_jobs(own: Mapping[str, str]) -> dict[str, str]:
    """Changes for jobs: they start in another folder, and find modules from this one."""
    places = host.absolute(own.get(host.NAME, ""))
    return {host.NAME: places} if places else {}


def user_name(number: int) -> str:
    """The user's name on this machine."""
    try:
        return pwd.getpwuid(number).pw_name
    except (KeyError, OverflowError):
        return f"user {number}"


class Programs:
    """Each method runs one program once. All raise EngineMissing where it is not installed, and EngineAway where SLURM
    does not answer.
    """

    def sbatch(self, arguments: Sequence[str], script: str) -> str:
        """Submits a script; returns the job's number. Raises Refused."""
        done = _run(["sbatch", *arguments], _SUBMIT_S, script)
        number = job_number(done.out)
        if done.code == 0 and number is not None:
            return number
        if done.code == 0:
            raise EngineAway(f"sbatch has printed no job number: {said(done.out + done.errors) or 'nothing'}")
        raise unavailable(done.errors) or refusal(done.errors)

    def squeue(self, names: Sequence[str]) -> str:
        """This user's jobs, at least those with these names, also those that have just ended."""
        words = ["squeue", "--noheader", f"--user={os.getuid()}", "--states=all", f"--format={SQUEUE_FORMAT}"]
        only = ",".join(names)
        if len(only) <= _MOST_WORD:
            words.append(f"--name={only}")
        return _answer(words)

    def sacct(self, *, handles: Sequence[str] = (), names: Sequence[str] = ()) -> str | None:
        """Accounting's records of these jobs, or of all with one of these names in the last week; None where accounting
        is switched off.
        """
        words = ["sacct", "--noheader", "--parsable2", "--allocations", f"--format={SACCT_FORMAT}"]
        if names:
            words += ["--starttime=now-7days", f"--user={os.getuid()}", f"--name={','.join(names)}"]
        else:
            words.append(f"--jobs={','.join(handles)}")
        done = _run(words, _ASK_S)
        if DISABLED in done.errors.lower():
            return None
        return _good(words, done)

    def scancel(self, handles: Sequence[str]) -> None:
        """Ends jobs; those that have ended are no error."""
        done = _run(["scancel", *handles], _ASK_S)
        if done.code == 0 or only_ended(done.errors):
            return
        raise unavailable(done.errors) or EngineAway(f"scancel: {said(done.errors)}")

    def config(self) -> str:
        """slurm.conf as the controller has it."""
        return _answer(["scontrol", "show", "config"])

    def nodes(self) -> str:
        """Each node of each partition."""
        return _answer(["sinfo", "--noheader", "--all", "--Node", f"--format={NODES_FORMAT}"])

    def job(self, number: str) -> str:
        """One job, with what it has on each node."""
        return _answer(["scontrol", "show", "job", "--details", number])

    def mpi_types(self) -> str:
        """The types that ``srun --mpi`` takes."""
        return _answer(["srun", "--mpi=list"])

    def partitions(self) -> str:
        """All partitions."""
        return _answer(["sinfo", "--noheader", "--all", f"--format={PARTITIONS_FORMAT}"])

    def accounts(self) -> str:
        """This user's accounts; sacctmgr knows users by their names only."""
        user = f"user={user_name(os.getuid())}"
        return _answer(["sacctmgr", "--noheader", "--parsable2", "show", "associations", user, "format=Account"])

    def qos(self) -> str:
        """All qualities of service."""
        return _answer(["sacctmgr", "--noheader", "--parsable2", "show", "qos", "format=Name"])


def _answer(words: Sequence[str]) -> str:
    return _good(words, _run(words, _ASK_S))


def _good(words: Sequence[str], done: _Done) -> str:
    if done.code == 0:
        return done.out
    raise unavailable(done.errors) or EngineAway(f"{words[0]}: {said(done.errors) or f'exit code {done.code}'}")


def _run(words: Sequence[str], limit_s: float, text: str = "") -> _Done:
    if shutil.which(words[0]) is None:
        raise EngineMissing(f"{words[0]} is not here; {GET_SLURM}")
    configuration = os.environ.get("SLURM_CONF")
    if configuration is not None and not Path(configuration).exists():
        # SLURM's programs would retry for a minute.
        raise EngineMissing(f"SLURM_CONF={configuration} is not there; {GET_SLURM}")
    try:
        done = subprocess.run(
            words,
            input=text,
            capture_output=True,
            env={**environment(os.environ), **(_for_jobs(os.environ) if words[0] == "sbatch" else _ASKING)},
            timeout=limit_s,
            encoding="utf-8",
            errors="replace",
        )
    except subprocess.TimeoutExpired as late:
        told = said((late.stderr or b"").decode(errors="replace"))
        text = f"{words[0]} took more than {limit_s:g} s" + (f" ({told})" if told else "")
        raise EngineAway(text) from late
    except OSError as problem:
        raise EngineAway(f"{words[0]} can't be started: {problem}") from problem
    return _Done(done.returncode, done.stdout, done.stderr)


def missing_programs() -> list[str]:
    """Those of SLURM's programs that are not in PATH."""
    return [name for name in PROGRAMS if shutil.which(name) is None]
