"""Runs Grid Engine's programs, each with a limit of time."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gpuherd.engines.base import EngineAway, EngineMissing
from gpuherd.engines.gridengine.parse import (
    GET_GRID_ENGINE,
    Complex,
    complexes,
    job_number,
    only_ended,
    refusal,
    said,
    unavailable,
)

_ASK_S = 20.0
_SUBMIT_S = 60.0
# qacct reads all of a file that may hold years of jobs.
_ACCOUNTING_S = 120.0


PROGRAMS = ("qsub", "qstat", "qdel", "qalter", "qconf", "qselect", "qacct")


def missing_programs() -> list[str]:
    """Those of Grid Engine's programs that are not in PATH."""
    return [name for name in PROGRAMS if shutil.which(name) is None]


@dataclass(frozen=True, slots=True)
class Done:
    """How a program ended."""

    code: int
    out: str
    errors: str


class Programs:
    """Each method is one program that is run once. All raise EngineMissing where it is not there, and EngineAway where
    sge_qmaster does not answer.
    """

    def qsub(self, arguments: Sequence[str], script: str) -> str:
        """Submits a script; the job's number. Raises Refused."""
        done = _run(["qsub", *arguments], _SUBMIT_S, script)
        number = job_number(done.out)
        if done.code == 0 and number is not None:
            return number
        printed = done.out + done.errors
        if done.code == 0:
            raise EngineAway(f"qsub named no job: {said(printed) or 'nothing'}")
        raise unavailable(printed) or refusal(printed)

    def verify(self, arguments: Sequence[str]) -> str | None:
        """What stands against such a job, in Grid Engine's words; None where an empty cluster could run it."""
        done = _run(["qsub", *arguments], _ASK_S, "exit 0\n")
        printed = done.out + done.errors
        if done.code == 0:
            return None
        problem = unavailable(printed)
        if problem is not None:
            raise problem
        return printed

    def qstat(self, *words: str) -> str:
        """qstat's answer as XML."""
        return _answer(["qstat", *words, "-xml"])

    def details(self, jobs: Sequence[str]) -> str:
        """All that Grid Engine knows of these jobs, as XML; "" where one of them is gone by now."""
        done = _run(["qstat", "-j", ",".join(jobs), "-xml"], _ASK_S)
        return done.out if done.code == 0 and "<unknown_jobs" not in done.out else ""

    def qacct(self, names: str) -> str | None:
        """The accounting records of jobs by these names, a pattern; None where accounting can't be read from here."""
        done = _run(["qacct", "-j", names], _ACCOUNTING_S)
        if done.code == 0 or "not found" in done.errors:
            return done.out
        return None

    def qdel(self, handles: Sequence[str]) -> None:
        """Ends jobs; those that have ended are no error."""
        done = _run(["qdel", *handles], _ASK_S)
        printed = done.out + done.errors
        if done.code != 0 and not only_ended(printed):
            raise unavailable(printed) or EngineAway(f"qdel: {said(printed)}")

    def release(self, job: str) -> None:
        """A job waits for no other any more. One that has begun or ended meanwhile is no error."""
        # No job has the number 0. Against its manual, 8.1.9 refuses an empty list.
        done = _run(["qalter", "-hold_jid", "0", job], _ASK_S)
        problem = unavailable(done.out + done.errors) if done.code != 0 else None
        if problem is not None:
            raise problem

    def show(self, *words: str) -> str:
        """What qconf shows of the configuration."""
        return _answer(["qconf", *words])

    def select(self, *words: str) -> tuple[str, ...]:
        """The queue instances that qselect finds; () where it finds none."""
        done = _run(["qselect", *words], _ASK_S)
        problem = unavailable(done.errors) if done.code != 0 else None
        if problem is not None:
            raise problem
        return tuple(done.out.split()) if done.code == 0 else ()


def known_resources() -> Mapping[str, Complex] | None:
    """The cluster's resources; None where no cluster answers."""
    try:
        return complexes(Programs().show("-sc"))
    except (EngineMissing, EngineAway):
        return None


def user_name() -> str:
    """This user's name, by which Grid Engine knows users."""
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return str(os.geteuid())


def _answer(words: Sequence[str]) -> str:
    done = _run(words, _ASK_S)
    if done.code == 0:
        return done.out
    printed = done.errors or done.out
    raise unavailable(printed) or EngineAway(f"{words[0]}: {said(printed) or f'exit code {done.code}'}")


def _run(words: Sequence[str], limit_s: float, text: str = "") -> Done:
    if shutil.which(words[0]) is None:
        raise EngineMissing(f"{words[0]} is not here; {GET_GRID_ENGINE}")
    try:
        done = subprocess.run(
            words,
            input=text,
            capture_output=True,
            env={**os.environ, "LC_ALL": "C"},
            timeout=limit_s,
            encoding="utf-8",
            errors="replace",
        )
    except subprocess.TimeoutExpired as late:
        printed = said((late.stderr or b"").decode(errors="replace"))
        raise EngineAway(f"{words[0]} took more than {limit_s:g} s" + (f" ({printed})" if printed else "")) from late
    except OSError as problem:
        raise EngineAway(f"{words[0]} can't be started: {problem}") from problem
    return Done(done.returncode, done.stdout, done.stderr)
