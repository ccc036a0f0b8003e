"""Reads a job file of either kind, and makes a ``Job`` of each entry: names, needs, options, memory plans.

The readers (``commands_txt``, ``jobs_yaml``) make entries, ``assemble`` makes jobs of them. A job's keys are options
that ``Job`` and ``ModelUse`` declare, and ``env``.

A job without a name of its own is recognised by its content (command, environment, folder), not by its place in the
file: it stays the same job when lines are added above it, and a changed line is another job.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from gpuherd.errors import ExitCode, GpuherdError, JobCannotFit, one_line, printable
from gpuherd.gpus.visible import VARIABLES
from gpuherd.jobs.job import BadNeeds, Given, Job, ModelUse, Need, Planner, check_needs, job_fields, without_model
from gpuherd.options import Option, by_spelling, did_you_mean, option_fields

STDIN = "-"
MOST_JOBS = 1_000_000
SHELL = "/bin/sh"
_DOCUMENTS = frozenset({".yaml", ".yml", ".json"})
_MOST_BYTES = 256 * 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """A command of a job file, and the options that the file gives it.

    Attributes:
        line: its line in the file, counted from 1.
        argv: the command as an argument list.
        given: values of its options.
        proposed: the name that it gets if it has none of its own; it never reveals the command.
        group: a name for all jobs that the same entry of the file expands to; ``needs`` may use it.
    """

    line: int
    argv: tuple[str, ...]
    given: Given = field(default_factory=dict)
    proposed: str
    group: str | None = None


@dataclass(frozen=True, order=True, slots=True)
class Problem:
    """Something wrong in a job file: the line (0 where no single line is at fault) and a sentence."""

    line: int
    text: str

    def __str__(self) -> str:
        return f"line {self.line}: {one_line(self.text)}" if self.line else one_line(self.text)


class BadJobFile(GpuherdError):
    """A job file can't be used; no job was started. ``problems``: all that were found, in order."""

    exit_code = ExitCode.BAD_INPUT

    def __init__(self, problems: Sequence[Problem], source: str = ""):
        self.problems = tuple(sorted(problems))
        self.source = source
        more = len(self.problems) - 1
        where = f"{source}: " if source else ""
        super().__init__(f"{where}{self.problems[0]}" + (f" (and {more} more)" if more else ""))

    def lines(self) -> list[str]:
        """Each problem as one printable line, with the file's name in front."""
        where = f"{printable(self.source)}: " if self.source else ""
        return [f"{where}{problem}" for problem in self.problems]

    def of(self, source: str) -> BadJobFile:
        """The same with the name of the file."""
        return BadJobFile(self.problems, source)


class NoJobFile(GpuherdError):
    """The job file is missing or can't be read."""

    exit_code = ExitCode.MISSING


@dataclass(frozen=True, slots=True)
class Content:
    """What makes a job without a name the same job: its command, its additions to the environment, its folder."""

    argv: tuple[str, ...]
    env: tuple[tuple[str, str], ...]
    cwd: str | None

    @staticmethod
    def of(job: Job) -> Content:
        """The content of a job."""
        return Content(job.argv, tuple(sorted(job.env.items())), job.cwd)


@dataclass(frozen=True, kw_only=True, slots=True)
class FileRules:
    """How the jobs of a file are completed.

    Attributes:
        shell: /bin/sh runs each command line; else it is split into words.
        gpus, retries: GPUs and further tries of a job that gives none.
        known: contents of the jobs in the queue, so that a job without a name keeps the name that it got before.
        planner: plans jobs that name a model; it is called once for each use of a model.
        keep_unfit: a job whose model fits nowhere is kept, with the GPUs of a job that names no model, and
            ``JobFile.unfit`` has the reason; else it is an error in the file.
    """

    shell: bool = False
    gpus: int = 1
    retries: int = 1
    known: Mapping[str, Content] = field(default_factory=dict)
    planner: Planner | None = None
    keep_unfit: bool = False


@dataclass(frozen=True, slots=True)
class JobFile:
    """The jobs of a file, in its order; and by job name why a job's model fits nowhere."""

    jobs: tuple[Job, ...]
    unfit: Mapping[str, str]


def read_jobs(path: str | os.PathLike[str], rules: FileRules = FileRules()) -> tuple[Job, ...]:
    """The jobs of ``commands.txt`` or, by its ending, of ``jobs.yaml``; ``-`` reads commands from standard input.

    Raises NoJobFile when it can't be read, and BadJobFile with all that is wrong in it.
    """
    return read_job_file(path, rules).jobs


def read_job_file(path: str | os.PathLike[str], rules: FileRules) -> JobFile:
    """As ``read_jobs``, with the jobs whose models fit nowhere."""
    name = os.fspath(path)
    try:
        return assemble(read_entries(name, shell=rules.shell), rules)
    except BadJobFile as problem:
        raise problem.of("standard input" if name == STDIN else name) from None


def read_entries(name: str, *, shell: bool = False) -> tuple[Entry, ...]:
    """The entries of the file, each folder absolute. Raises NoJobFile and BadJobFile."""
    text = _text(name)
    if Path(name).suffix.lower() in _DOCUMENTS:
        from gpuherd.batch.jobs_yaml import read_document

        entries = read_document(text, shell=shell)
    else:
        from gpuherd.batch.commands_txt import read_commands

        entries = read_commands(text, shell=shell)
    if not entries:
        raise BadJobFile([Problem(0, "there is no command in it")])
    return tuple(_anchored(entry) for entry in entries)


def read_engine(name: str) -> dict[str, Any]:
    """Options of ``EngineOptions`` by name, from ``engine`` in ``jobs.yaml``.

    {} for any other file, and where the file or the block is wrong: ``read_jobs`` reports that.
    """
    if Path(name).suffix.lower() not in _DOCUMENTS or name == STDIN or not Path(name).is_file():
        return {}
    from gpuherd.batch import jobs_yaml

    try:
        return jobs_yaml.read_engine(_text(name))
    except (NoJobFile, BadJobFile):
        return {}


def _anchored(entry: Entry) -> Entry:
    """The entry with an absolute folder: the same file read from another folder is other work."""
    cwd = entry.given.get("cwd")
    return entry if cwd is None else replace(entry, given={**entry.given, "cwd": str(Path(cwd).absolute())})


def _text(name: str) -> str:
    try:
        if name == STDIN:
            data = sys.stdin.buffer.read(_MOST_BYTES + 1)
        else:
            with Path(name).open("rb") as file:
                data = file.read(_MOST_BYTES + 1)
    except (OSError, ValueError) as problem:
        reason = problem.strerror if isinstance(problem, OSError) else str(problem)
        raise NoJobFile(f"can't read {name}: {reason}") from None
    if len(data) > _MOST_BYTES:
        raise BadJobFile([Problem(0, f"larger than {_MOST_BYTES >> 20} MB; split it")])
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as problem:
        line = data.count(b"\n", 0, problem.start) + 1
        raise BadJobFile([Problem(line, "no UTF-8 text; save the file in UTF-8")]) from None


# --- keys of a job ---------------------------------------------------------------------------------------------------

_BY_KEY = {**by_spelling(Job), **by_spelling(ModelUse)}
_ALL = (*option_fields(Job), *option_fields(ModelUse))
KEYS = (*((spec.key or spec.name or declared.name).replace("_", "-") for declared, spec in _ALL), "env.NAME")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)


def option_of(key: str, known: Collection[str] = KEYS) -> tuple[str, Option]:
    """The field that a key of a job file sets, and its option. Raises ValueError, which names the nearest known key."""
    found = _BY_KEY.get(key.replace("-", "_"))
    if found is None:
        raise ValueError(unknown(key, known))
    declared, spec = found
    return declared.name, spec


def unknown(key: str, known: Collection[str]) -> str:
    """The message about an unknown key, with the nearest known one."""
    hint = did_you_mean(key.replace("_", "-"), known, f"possible: {', '.join(known)}", cutoff=0.5)
    return f"unknown key {key!r}{hint}"


def variable(name: str, value: str) -> str:
    """The name of a variable, checked. Raises ValueError for one that a job's environment can't have."""
    if not _VARIABLE.fullmatch(name):
        raise ValueError(f"{name!r} is no name of an environment variable")
    if name in VARIABLES:
        raise ValueError(f"{name} is set by gpuherd when it knows the job's GPUs; choose GPUs by --gpu-list")
    if name.startswith("GPUHERD_"):
        raise ValueError(f"{name} is gpuherd's own; a job can't set it")
    if "\0" in value:
        raise ValueError(f"the value of {name} has a NUL byte in it")
    return name


def merged(earlier: Given, later: Given) -> dict[str, Any]:
    """Both sets of options: the later value counts, except for ``env``, whose variables are joined.

    >>> merged({"mem": 1, "env": {"A": "1"}}, {"mem": 2, "env": {"B": "2"}})
    {'mem': 2, 'env': {'A': '1', 'B': '2'}}
    """
    both = {**earlier, **later}
    if "env" in earlier and "env" in later:
        both["env"] = {**earlier["env"], **later["env"]}
    return both


# --- entries become jobs ------------------------------------------------------------------------------------------


def assemble(entries: Sequence[Entry], rules: FileRules = FileRules()) -> JobFile:
    """The jobs of a file's entries.

    Raises BadJobFile with everything that is wrong: names given twice, needs that name no job or form a circle, options
    that don't go together, models that fit nowhere (with ``keep_unfit``: when no job is left).
    """
    problems: list[Problem] = []
    names = _names(entries, rules.known, problems)
    jobs, unfit = _jobs(entries, names, rules, problems)
    if not problems:
        try:
            check_needs(jobs)
        except BadNeeds as problem:
            lines = {job.name: entry.line for job, entry in zip(jobs, entries, strict=True)}
            problems += [_located(text, named, lines) for text, named in problem.faults]
    if unfit and (len(unfit) == len(entries) or not rules.keep_unfit):
        lines = dict(zip(names, (entry.line for entry in entries), strict=True))
        problems += [Problem(lines[name], reason) for name, reason in unfit.items()]
    if problems:
        raise BadJobFile(problems)
    return JobFile(tuple(jobs), unfit)


def _jobs(
    entries: Sequence[Entry], names: Sequence[str], rules: FileRules, problems: list[Problem]
) -> tuple[list[Job], dict[str, str]]:
    """The jobs, and by name the reasons why models fit nowhere; other problems are added to ``problems``."""
    planner = None if rules.planner is None else _remembering(rules.planner)
    fields_of = partial(job_fields, gpus=rules.gpus, retries=rules.retries)
    targets = _targets(entries, names) if any("needs" in entry.given for entry in entries) else {}
    jobs: list[Job] = []
    unfit: dict[str, str] = {}
    # Entries that the same options are given share the mapping, and a file may have a million of them.
    shared: dict[int, dict[str, Any]] = {}
    for entry, name in zip(entries, names, strict=True):
        try:
            fields = shared.get(id(entry.given))
            if fields is None:
                try:
                    fields = fields_of(entry.given, planner=planner)
                except JobCannotFit as problem:
                    unfit[name] = str(problem)
                    fields = fields_of(without_model(entry.given))
                fields.pop("name", None)
                if name not in unfit:
                    shared[id(entry.given)] = fields
            if "needs" in fields:
                fields = fields | {"needs": _expanded(fields["needs"], name, targets)}
            jobs.append(Job(name=name, argv=entry.argv, **fields))
        except (ValueError, GpuherdError) as problem:
            problems.append(Problem(entry.line, str(problem)))
    return jobs, unfit


def _remembering(planner: Planner) -> Planner:
    """The planner, with its results and refusals kept: many jobs of a file use the same model."""
    known: dict[ModelUse, Need | GpuherdError] = {}

    def plan(use: ModelUse) -> Need:
        if use not in known:
            try:
                known[use] = planner(use)
            except GpuherdError as problem:
                known[use] = problem
        found = known[use]
        if isinstance(found, GpuherdError):
            raise found
        return found

    return plan


def _located(text: str, jobs: Sequence[str], lines: Mapping[str, int]) -> Problem:
    """The problem at the line of its first job; the text then lists the lines of all jobs that it names."""
    first, *others = (lines[name] for name in jobs)
    listed = f" (lines {', '.join(str(line) for line in (first, *others))})" if others else ""
    return Problem(first, f"{text}{listed}")


def _names(entries: Sequence[Entry], known: Mapping[str, Content], problems: list[Problem]) -> list[str]:
    """A name for each entry: its own, else that of the known job with its content, else the one proposed."""
    first: dict[str, int] = {}
    for entry in entries:
        own = entry.given.get("name")
        if own is not None:
            if own in first:
                problems.append(Problem(entry.line, f"the name {own!r} is taken: line {first[own]} has it"))
            first.setdefault(own, entry.line)
    free: dict[Content, list[str]] = {}
    for name in sorted(known.keys() - first.keys(), reverse=True):
        free.setdefault(known[name], []).append(name)
    taken = {*first, *known}
    names = []
    for entry in entries:
        own = entry.given.get("name")
        if own is not None:
            names.append(own)
        elif same := free.get(_content(entry)) if free else None:
            names.append(same.pop())
        else:
            names.append(_unused(entry.proposed, taken))
            taken.add(names[-1])
    return names


def _content(entry: Entry) -> Content:
    return Content(entry.argv, tuple(sorted(entry.given.get("env", {}).items())), entry.given.get("cwd"))


def _unused(proposed: str, taken: set[str]) -> str:
    name, number = proposed, 1
    while name in taken:
        number += 1
        name = f"{proposed}.{number}"
    return name


def _targets(entries: Sequence[Entry], names: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """The jobs that a need may name: one job by its name, all jobs of an entry by its group."""
    groups: dict[str, list[str]] = {}
    for entry, name in zip(entries, names, strict=True):
        if entry.group is not None:
            groups.setdefault(entry.group, []).append(name)
    return {group: tuple(members) for group, members in groups.items()} | {name: (name,) for name in names}


def _expanded(needs: Sequence[str], name: str, targets: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    """The needs as names of jobs. Raises ValueError for one that names none, with the nearest that does."""
    found: dict[str, None] = {}
    for need in needs:
        if need not in targets:
            hint = did_you_mean(need, targets, show=repr)
            raise ValueError(f"{name!r} needs {need!r}, and there is no such job{hint}")
        found |= dict.fromkeys(targets[need])
    return tuple(found)
