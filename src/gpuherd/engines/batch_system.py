"""A batch system that is driven by programs of the command line, as SLURM is by sbatch and Grid Engine by qsub.

``BatchSystem`` runs the programs with a time limit, says what their complaints mean, and writes the ids of jobs and of
places in arrays. An engine's folder has the dialect, a subclass with tables: the programs, the words of their
complaints, the form of ids. What states mean, and what a site can grant, is the folder's own.
"""

from __future__ import annotations

import math
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import ClassVar, TypeVar

from gpuherd.checks import CheckResult, Status
from gpuherd.engines.base import EngineAway, EngineMissing, Refused, Ticket
from gpuherd.errors import CannotWrite, GpuherdError, UsageError, printable
from gpuherd.options import did_you_mean

ASK_S = 20.0
SUBMIT_S = 60.0
_MOST_NAMES = 12
# Parcels of one call that cancels: each can be a request to the controller.
_CANCEL_AT_ONCE = 500
_NUMBER = re.compile(r"\s*(\d{1,20})(?:[.;]\S*)?\s*")
_RANGE = re.compile(r"(\d{1,12})(?:-(\d{1,12})(?::(\d{1,12}))?)?")


RowT = TypeVar("RowT", bound="JobRow")


@dataclass(frozen=True, slots=True)
class Done:
    """How a program ended."""

    code: int
    out: str
    errors: str

    @property
    def printed(self) -> str:
        """All that it has printed."""
        return self.out + self.errors


class BatchSystem:
    """A subclass sets the attributes; parts of messages are in lower case.

    Attributes:
        title: for people, like "SLURM".
        programs: those that a machine needs from which jobs are submitted. ``canceller``: the one that ends jobs; the
            first submits.
        get: where the programs are to be had, as the end of a sentence.
        meanings: parts of messages that mean that the programs know no cluster (EngineMissing), or that no controller
            has answered, or not in time (EngineAway: the request may have been carried out). The first match holds.
        temporary: parts of refusals because of temporary limits: the same batch may be accepted later.
        over: parts of complaints about jobs that have ended already.
        decoration: what each line of a message begins with and says nothing: the program's name, the level.
        silent: beginnings of lines that say nothing.
        mark, first: an id of a place in an array is the array's number, the mark, and a number; the first is ``first``.
    """

    title: str
    programs: tuple[str, ...]
    canceller: str
    get: str
    meanings: Sequence[tuple[type[EngineAway | EngineMissing], Sequence[str]]]
    temporary: Sequence[str]
    over: Sequence[str]
    decoration: re.Pattern[str]
    silent: tuple[str, ...] = ()
    mark: str
    first: int

    # --- messages ---------------------------------------------------------------------------------------------------

    def said(self, printed: str) -> str:
        """A message in one line, without what says nothing."""
        lines = (self.decoration.sub("", line.strip()).strip() for line in printed.splitlines())
        return printable("; ".join(dict.fromkeys(line for line in lines if line and not line.startswith(self.silent))))

    def unavailable(self, printed: str) -> GpuherdError | None:
        """EngineAway or EngineMissing where the message means that the system has not answered, else None."""
        low = printed.lower()
        kind = next((kind for kind, parts in self.meanings if any(part in low for part in parts)), None)
        if kind is EngineMissing:
            return EngineMissing(
                f"{self.title}'s commands are here, but know no cluster ({self.said(printed)}); {self.get}"
            )
        return None if kind is None else EngineAway(self.said(printed))

    def refusal(self, printed: str) -> Refused:
        """The error for a submission that was refused."""
        low = printed.lower()
        words = self.said(printed) or f"{self.programs[0]} has failed and said nothing"
        return Refused(words, may_pass=any(part in low for part in self.temporary))

    def only_ended(self, printed: str) -> bool:
        """Whether a cancellation has only complained about jobs that had ended already or are forgotten."""
        lines = [line.lower() for line in printed.splitlines() if line.strip()]
        return all(any(part in line for part in self.over) for line in lines)

    # --- programs ---------------------------------------------------------------------------------------------------

    def missing(self) -> list[str]:
        """Those of the programs that are not in PATH."""
        return [name for name in self.programs if shutil.which(name) is None]

    def environment(self, program: str) -> Mapping[str, str]:  # noqa: ARG002
        """The environment of one of the programs: messages are wanted in English."""
        return {**os.environ, "LC_ALL": "C"}

    def run(self, *words: str, limit_s: float = ASK_S, text: str = "") -> Done:
        """Runs a program with the text as its input. Raises EngineMissing where it is not installed, EngineAway where
        it takes too long."""
        if shutil.which(words[0]) is None:
            raise EngineMissing(f"{words[0]} is not here; {self.get}")
        try:
            done = subprocess.run(
                words,
                input=text,
                capture_output=True,
                env=self.environment(words[0]),
                timeout=limit_s,
                encoding="utf-8",
                errors="replace",
            )
        except subprocess.TimeoutExpired as late:
            message = self.said((late.stderr or b"").decode(errors="replace"))
            raise EngineAway(
                f"{words[0]} took more than {limit_s:g} s" + (f" ({message})" if message else "")
            ) from late
        except OSError as problem:
            raise EngineAway(f"{words[0]} can't be started: {problem}") from problem
        return Done(done.returncode, done.stdout, done.stderr)

    def answer(self, *words: str) -> str:
        """The output of a program that answers. Raises as ``run``, and where it fails."""
        done = self.run(*words)
        if done.code != 0:
            raise self.failure(words[0], done, done.errors or done.out)
        return done.out

    def failure(self, program: str, done: Done, printed: str) -> GpuherdError:
        """The error that a failure means: EngineMissing, or EngineAway."""
        return self.unavailable(printed) or EngineAway(f"{program}: {self.said(printed) or f'exit code {done.code}'}")

    def submit(self, arguments: Sequence[str], script: str) -> str:
        """Submits a script; returns the job's number. Raises as ``run``, and Refused."""
        program = self.programs[0]
        done = self.run(program, *arguments, limit_s=SUBMIT_S, text=script)
        if done.code != 0:
            raise self.unavailable(done.printed) or self.refusal(done.printed)
        number = job_number(done.out)
        if number is None:
            raise EngineAway(f"{program} has printed no job number: {self.said(done.printed) or 'nothing'}")
        return number

    def cancel(self, handles: Collection[str]) -> None:
        """Ends jobs; those that have ended are no error."""
        for words in self.short_lists(handles, _CANCEL_AT_ONCE):
            done = self.run(self.canceller, *words)
            if done.code != 0 and not self.only_ended(done.printed):
                raise self.failure(self.canceller, done, done.printed)

    # --- ids --------------------------------------------------------------------------------------------------------

    def handle(self, job: str, place: int | None) -> str:
        """The id of a place in an array, counted from 0; with None that of a plain job, or of the whole array."""
        return job if place is None else f"{job}{self.mark}{place + self.first}"

    def handles(self, job: str, count: int) -> list[str]:
        """The ids of so many parcels of one submission, in order: an array, or a plain job for a single one."""
        return [job] if count == 1 else [self.handle(job, place) for place in range(count)]

    def parts(self, handle: str) -> tuple[str, int]:
        """The number of the job or array, and the place in it."""
        job, _, place = handle.partition(self.mark)
        return job, int(place) - self.first if place.isdigit() else 0

    def short_lists(self, handles: Iterable[str], most: int) -> Iterator[list[str]]:
        """Handles in the system's short form, with at most so many parcels in each list."""
        split = (handle.partition(self.mark) for handle in handles)
        known = sorted({(int(job), int(number) if number else -1) for job, _, number in split})
        for at in range(0, len(known), most):
            words: list[str] = []
            for job, each in groupby(known[at : at + most], itemgetter(0)):
                numbers = [number for _, number in each]
                if numbers[0] < 0:
                    words.append(str(job))
                words += self.array_words(str(job), spans(number for number in numbers if number >= 0))
            yield words

    def array_words(self, job: str, several: Sequence[str]) -> list[str]:
        """The words for these spans of an array's numbers (``0-41``, ``43``)."""
        return [f"{job}{self.mark}{span}" for span in several]

    def rows_of(self, places: Mapping[Ticket, tuple[str, int]], rows: Iterable[RowT]) -> dict[Ticket, RowT]:
        """The row of each ticket: by its handle, or by the name alone where the handle is not known. The name must
        match in any case: a controller that has crashed may give a number a second time.

        Args:
            places: the name of the job that holds each ticket's parcel, and the place in it.
        """
        by_name: dict[str, dict[str, list[RowT]]] = {}
        for row in rows:
            by_name.setdefault(row.name, {}).setdefault(row.job, []).append(row)
        found = {}
        for ticket, (name, place) in places.items():
            jobs = by_name.get(name, {})
            if ticket.handle is None:
                candidates = [row for rows_of_job in jobs.values() for row in rows_of_job]
            else:
                job, place = self.parts(ticket.handle)
                candidates = jobs.get(job, [])
            # An array whose waiting rest was cancelled names no place any more; its row then stands for the places that
            # no other row names. Its places that have begun go on.
            speaking = [row for row in candidates if row.speaks_of(place)] or [row for row in candidates if row.is_job]
            if speaking:
                found[ticket] = max(reversed(speaking), key=lambda row: int(row.job))
        return found

    # --- what people say --------------------------------------------------------------------------------------------

    def refuse_unknown(self, flag: str, word: str, there: Iterable[str], lack: str) -> None:
        """Raises UsageError for a name that is not among those of the site, with the nearest. ``lack``: how the message
        begins, like "there is no partition"."""
        every = sorted(there)
        if word not in every:
            hint = did_you_mean(word, every, cutoff=0.5) or "."
            listed = f" There are: {some(every)}" if every else " There is none"
            raise UsageError(f"{flag} {word}: {lack} {word} in {self.title}{hint}{listed}")

    def diagnose(self, judge: Callable[[], list[CheckResult]]) -> list[CheckResult]:
        """The doctor's results, or one that says why the system can't be used from here."""
        missing = self.missing()
        not_here = f"not here: {', '.join(missing)}"
        try:
            found = judge()
        except EngineMissing as problem:
            what = not_here if missing else "the commands know no cluster"
            return [CheckResult(self.title, Status.FAIL, what, str(problem))]
        except EngineAway as problem:
            remedy = "wait, or ask its administrator; submitted jobs go on meanwhile"
            return [CheckResult(self.title, Status.FAIL, f"{self.title} does not answer: {problem}", remedy)]
        if missing:
            remedy = f"install all of {self.title}'s commands here, or submit jobs where they are"
            return [CheckResult(self.title, Status.FAIL, not_here, remedy)]
        return found


@dataclass(frozen=True, kw_only=True, slots=True)
class JobRow:
    """What a line of a system's output is about: a job, or places of an array.

    Attributes:
        job: the number of the job or array, in digits. ``name``: its name.
        places: of an array, counted from 0; None for a plain job, or an array that names none.
        node: where it runs or ran; the first of several.
    """

    system: ClassVar[BatchSystem]

    job: str
    name: str
    places: tuple[range, ...] | None = None
    node: str | None = None

    def speaks_of(self, place: int) -> bool:
        """Whether this place is named."""
        return self.places is not None and any(place in each for each in self.places)

    @property
    def is_job(self) -> bool:
        """Whether it is about the job as a whole, which may be a single parcel."""
        return self.places is None

    def handle(self, place: int) -> str:
        """The id of the parcel at this place."""
        return self.system.handle(self.job, None if self.is_job and place == 0 else place)


def job_number(printed: str) -> str | None:
    """The job's number in the output of a submission (``123``, ``123;cluster``, ``123.1-5:1``); None where there is
    none."""
    found = (_NUMBER.fullmatch(line) for line in reversed(printed.splitlines()))
    return next((match[1] for match in found if match is not None), None)


def places_in(text: str, first: int = 0) -> tuple[range, ...]:
    """The places in a list as batch systems write it, counted from 0; parts of another form are left out.

    >>> places_in("1-5:1,7,10-20:5", 1), places_in("4-9%2"), places_in("N/A")
    ((range(0, 5), range(6, 7), range(9, 20, 5)), (range(4, 10),), ())
    """
    found = (_RANGE.fullmatch(part.strip()) for part in text.partition("%")[0].split(","))
    numbers = [(int(each[1]), int(each[2] or each[1]), int(each[3] or 1) or 1) for each in found if each is not None]
    return tuple(range(low - first, high - first + 1, step) for low, high, step in numbers)


def spans(numbers: Iterable[int]) -> list[str]:
    """Numbers in rising order, as words for runs of consecutive ones.

    >>> spans([0, 1, 2, 5])
    ['0-2', '5']
    """
    found: list[list[int]] = []
    for number in numbers:
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return [str(low) if low == high else f"{low}-{high}" for low, high in found]


def notice_s(wanted_s: float, time_s: float | None, most_s: float = math.inf) -> int:
    """Seconds before its time is up at which a job gets its signal: as requested, but at most half of the time."""
    return max(1, int(min(wanted_s, most_s, math.inf if time_s is None else time_s / 2)))


def check_argument(flag: str, word: str, given: str | None, ours: Mapping[str, str], program: str, like: str) -> None:
    """Checks a word of the user's for a program. Raises UsageError for what is no option, or is gpuherd's own to give.

    Args:
        given: the option of ``ours`` that it gives, None for another one; ``ours`` says why each can't be given.
        like: an example of the flag with a word.
    """
    if not word.startswith("-") or not word.strip("-"):
        raise UsageError(
            f"{flag} {word!r} is no option of {program}, which would take it for what is to run; write an option and "
            f"its value in one word, like {like}"
        )
    if given is not None:
        raise UsageError(f"{flag} {word!r}: {given} can't be given, {ours[given]}")


def keep_script(path: Path, text: str) -> None:
    """Keeps a script as it was submitted, for people to look at, readable by its owner alone: lines of --setup may hold
    secrets. Raises CannotWrite."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8", errors="surrogateescape") as file:
            os.fchmod(descriptor, 0o600)  # also a file that an earlier gpuherd wrote
            file.write(text)
    except OSError as problem:
        raise CannotWrite(f"can't write {path}: {problem.strerror}") from problem


def some(words: Sequence[str]) -> str:
    """The first of these words, and how many more there are."""
    shown = ", ".join(words[:_MOST_NAMES])
    return f"{shown} and {len(words) - _MOST_NAMES} more" if len(words) > _MOST_NAMES else shown
