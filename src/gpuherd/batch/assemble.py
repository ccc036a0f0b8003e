"""Reads a job file of either kind, and makes jobs of its drafts: names, needs, settings."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gpuherd.batch.job_options import BadJobFile, Draft, JobOptions, ModelUse, Need, Planner, Problem
from gpuherd.errors import ExitCode, GpuherdError, JobCannotFit
from gpuherd.jobs.job import BadNeeds, Job, check_needs
from gpuherd.options import did_you_mean

# Makes jobs of drafts: names, needs, settings. Pure.
#
# A job without a name of its own is found again by what it is (command, environment, folder), not by its place in the
# file: lines may be added above it and it stays the job that it was. A line that was changed is another job.


@dataclass(frozen=True, slots=True)
class Content:
    """What makes a job without a name the same job: its command, its additions to the environment, its folder."""

    argv: tuple[str, ...]
    env: tuple[tuple[str, str], ...]
    cwd: str | None

    @staticmethod
    def of(job: Job) -> Content:
        """The content of a job that is there already."""
        return Content(job.argv, tuple(sorted(job.env.items())), job.cwd)


def assemble(
    drafts: Sequence[Draft],
    *,
    gpus: int = 1,
    retries: int = 1,
    known: Mapping[str, Content] | None = None,
    planner: Planner | None = None,
    unfit: dict[str, str] | None = None,
) -> tuple[Job, ...]:
    """The jobs of a file, in its order.

    Args:
        drafts: what the file asks for.
        gpus, retries: how many GPUs and further tries a job gets that says nothing of them.
        known: jobs of the queue that they go to, so that those without a name keep the one that they were given.
        planner: says what jobs need that name a model; each use of a model is asked for once.
        unfit: collects, by job name, why a job's model fits nowhere. Such a job is still returned, with the GPUs of a
            job that names no model. Where this is None, such a job is an error in the file.

    Raises BadJobFile with everything that is wrong: names given twice, needs that name no job or go in a circle,
    settings that don't go together.
    """
    problems: list[Problem] = []
    options = _options(drafts)
    names = _names(drafts, options, known or {}, problems)
    meant = _meant(drafts, names) if any(said.needs for said in options) else {}
    planner = None if planner is None else _asked_once(planner)
    jobs = []
    for draft, said, name in zip(drafts, options, names, strict=True):
        try:
            full = replace(said, needs=_expanded(said.needs, name, meant)) if said.needs else said
            jobs.append(full.job(name, draft.argv, gpus=gpus, retries=retries, planner=planner))
        except JobCannotFit as problem:
            if unfit is None:
                problems.append(Problem(draft.line, str(problem)))
                continue
            unfit[name] = str(problem)
            jobs.append(full.without_model().job(name, draft.argv, gpus=gpus, retries=retries))
        except (ValueError, GpuherdError) as problem:
            problems.append(Problem(draft.line, str(problem)))
    if not problems:
        try:
            check_needs(jobs)
        except BadNeeds as problem:
            lines = {job.name: draft.line for job, draft in zip(jobs, drafts, strict=True)}
            problems += [_located(text, names, lines) for text, names in problem.faults]
    if unfit and len(unfit) == len(jobs):
        problems += [Problem(draft.line, unfit[job.name]) for job, draft in zip(jobs, drafts, strict=True)]
    if problems:
        raise BadJobFile(problems)
    return tuple(jobs)


def _asked_once(planner: Planner) -> Planner:
    """The planner, with its answers and refusals kept: many jobs of a file use one model."""
    told: dict[ModelUse, Need | GpuherdError] = {}

    def plan(use: ModelUse) -> Need:
        if use not in told:
            try:
                told[use] = planner(use)
            except GpuherdError as problem:
                told[use] = problem
        found = told[use]
        if isinstance(found, GpuherdError):
            raise found
        return found

    return plan


def _located(text: str, jobs: Sequence[str], lines: Mapping[str, int]) -> Problem:
    """The problem at the line of its first job, with the lines of the others that it names."""
    first, *others = (lines[name] for name in jobs)
    told = f" (lines {', '.join(str(line) for line in (first, *others))})" if others else ""
    return Problem(first, f"{text}{told}")


def _options(drafts: Sequence[Draft]) -> list[JobOptions]:
    """What is said of each draft. Drafts of which the same is said share it: a file may have a million of them."""
    made: dict[int, JobOptions] = {}
    for draft in drafts:
        # By identity: the drafts keep what they say alive, and equal ones would take longer to find than to make.
        if id(draft.said) not in made:
            made[id(draft.said)] = JobOptions(**draft.said)
    return [made[id(draft.said)] for draft in drafts]


def _names(
    drafts: Sequence[Draft], options: Sequence[JobOptions], known: Mapping[str, Content], problems: list[Problem]
) -> list[str]:
    """A name for each draft: its own, else that of the known job with its content, else the one proposed."""
    first: dict[str, int] = {}
    for draft, said in zip(drafts, options, strict=True):
        if said.name is not None:
            if said.name in first:
                text = f"the name {said.name!r} is taken: line {first[said.name]} has it"
                problems.append(Problem(draft.line, text))
            first.setdefault(said.name, draft.line)
    free: dict[Content, list[str]] = {}
    for name in sorted(known.keys() - first.keys(), reverse=True):
        free.setdefault(known[name], []).append(name)
    taken = {*first, *known}
    names = []
    for draft, said in zip(drafts, options, strict=True):
        same = free.get(Content(draft.argv, tuple(sorted(said.env.items())), said.cwd)) if free else None
        if said.name is not None:
            names.append(said.name)
        elif same:
            names.append(same.pop())
        else:
            names.append(_unused(draft.proposed, taken))
            taken.add(names[-1])
    return names


def _unused(proposed: str, taken: set[str]) -> str:
    name, number = proposed, 1
    while name in taken:
        number += 1
        name = f"{proposed}.{number}"
    return name


def _meant(drafts: Sequence[Draft], names: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """What a need may name: each job, and each group of jobs that one entry made."""
    groups: dict[str, list[str]] = {}
    for draft, name in zip(drafts, names, strict=True):
        if draft.group is not None:
            groups.setdefault(draft.group, []).append(name)
    return {group: tuple(members) for group, members in groups.items()} | {name: (name,) for name in names}


def _expanded(needs: Sequence[str], name: str, meant: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    """The needs as names of jobs. Raises ValueError for one that names none, with the nearest that does."""
    found: dict[str, None] = {}
    for need in needs:
        if need not in meant:
            hint = did_you_mean(need, meant, show=repr)
            raise ValueError(f"{name!r} needs {need!r}, and there is no such job{hint}")
        found |= dict.fromkeys(meant[need])
    return tuple(found)


# Reads a job file of either kind from a path or from standard input. The one place of the room that opens files.

STDIN = "-"
_DOCUMENTS = frozenset({".yaml", ".yml", ".json"})
_MOST_BYTES = 256 * 2**20


class NoJobFile(GpuherdError):
    """The job file is not there or can't be read."""

    exit_code = ExitCode.MISSING


def read_jobs(
    path: str | os.PathLike[str],
    *,
    shell: bool = False,
    gpus: int = 1,
    retries: int = 1,
    known: Mapping[str, Content] | None = None,
    planner: Planner | None = None,
    unfit: dict[str, str] | None = None,
) -> tuple[Job, ...]:
    """The jobs of ``commands.txt`` or, by its ending, of ``jobs.yaml``; ``-`` reads commands from standard input.

    Args:
        path: the file.
        shell: commands are run by /bin/sh in place of being split into words.
        gpus, retries: how many GPUs and further tries a job gets that says nothing of them.
        known: jobs of the queue that they go to (see ``assemble``).
        planner: says what jobs need that name a model.
        unfit: gets the jobs whose model fits nowhere (see ``assemble``).

    Raises NoJobFile when it can't be read, and BadJobFile with all that is wrong in it.
    """
    name = os.fspath(path)
    source = "standard input" if name == STDIN else name
    try:
        drafts = read_drafts(name, shell=shell)
        return assemble(drafts, gpus=gpus, retries=retries, known=known, planner=planner, unfit=unfit)
    except BadJobFile as problem:
        raise problem.of(source) from None


def read_drafts(name: str, *, shell: bool = False) -> tuple[Draft, ...]:
    """What the file asks for. Raises NoJobFile and BadJobFile."""
    text = _text(name)
    if Path(name).suffix.lower() in _DOCUMENTS:
        from gpuherd.batch.jobs_yaml import read_document

        drafts = read_document(text, shell=shell)
    else:
        from gpuherd.batch.commands_txt import read_commands

        drafts = read_commands(text, shell=shell)
    if not drafts:
        raise BadJobFile([Problem(0, "there is no command in it")])
    return tuple(_anchored(draft) for draft in drafts)


def read_engine(name: str) -> dict[str, Any]:
    """What ``jobs.yaml`` says under ``engine``, as names and values of ``EngineOptions``; {} for any other file, and
    where the file or what it says is wrong, which ``read_jobs`` tells."""
    if Path(name).suffix.lower() not in _DOCUMENTS or name == STDIN or not Path(name).is_file():
        return {}
    from gpuherd.batch import jobs_yaml

    try:
        return jobs_yaml.read_engine(_text(name))
    except (NoJobFile, BadJobFile):
        return {}


def _anchored(draft: Draft) -> Draft:
    """The draft with its folder in full: the same file read from another place is other work."""
    cwd = draft.said.get("cwd")
    return draft if cwd is None else replace(draft, said={**draft.said, "cwd": str(Path(cwd).absolute())})


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
