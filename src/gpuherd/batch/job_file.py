"""Reads a job file of either kind from a path or from standard input. The one place of the room that opens files."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpuherd.batch.assemble import Content, assemble
from gpuherd.batch.draft import BadJobFile, Draft, Problem
from gpuherd.batch.model_use import Planner
from gpuherd.errors import ExitCode, GpuherdError
from gpuherd.jobs.job import Job

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
        from gpuherd.batch.document import read_document

        drafts = read_document(text, shell=shell)
    else:
        from gpuherd.batch.commands import read_commands

        drafts = read_commands(text, shell=shell)
    if not drafts:
        raise BadJobFile([Problem(0, "there is no command in it")])
    return tuple(_anchored(draft) for draft in drafts)


def read_engine(name: str) -> dict[str, Any]:
    """What ``jobs.yaml`` says under ``engine``, as names and values of ``EngineOptions``; {} for any other file, and
    where the file or what it says is wrong, which ``read_jobs`` tells."""
    if Path(name).suffix.lower() not in _DOCUMENTS or name == STDIN or not Path(name).is_file():
        return {}
    from gpuherd.batch import document

    try:
        return document.read_engine(_text(name))
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
