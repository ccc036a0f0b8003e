"""A batch as sbatch's arguments and script. Pure.

A batch becomes one array job, or a plain job where it has a single parcel. A batch larger than the site's largest array
becomes several *pieces*. Their names say which parcels they hold, so that they are found again by name.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from gpuherd.engines.base import Batch, Placement
from gpuherd.engines.slurm.options import SlurmOptions
from gpuherd.errors import UsageError, printable

# Options that only gpuherd may give, and why.
_OURS = {
    "--array": "an array's indices are the jobs (--array-limit says how many run at once)",
    "--job-name": "by its name a job is found again",
    "--dependency": "what runs after what is in the jobs' needs",
    "--requeue": "a job that is to run again is handed over again",
    "--parsable": "gpuherd gives it",
    "--wrap": "the script is written here",
    "--wait": "nobody waits for sbatch itself",
    "--test-only": "nothing would be handed over",
    "--clusters": "set SLURM_CLUSTERS in the environment, so that every command of SLURM's asks the same cluster",
    "--nodes": "the number of nodes is said by each job",
    "--ntasks": "--ntasks-per-node N, an option of gpuherd's own, says how many run on each node",
    "--ntasks-per-node": "it is an option of gpuherd's own: leave out --slurm-args=",
    "--mpi": "it is an option of gpuherd's own: leave out --slurm-args=",
    "--help": "it would hand nothing over",
    "--usage": "it would hand nothing over",
    "--version": "it would hand nothing over",
}
_SHORT = {
    "-a": "--array",
    "-J": "--job-name",
    "-d": "--dependency",
    "-W": "--wait",
    "-M": "--clusters",
    "-N": "--nodes",
    "-n": "--ntasks",
    "-h": "--help",
    "-V": "--version",
}
# sbatch keeps the time before the end in 16 bits.
_MOST_NOTICE_S = 65535
_MOST_COMMENT = 200


@dataclass(frozen=True, slots=True)
class Piece:
    """The part of a batch that one call of sbatch submits: ``count`` parcels from the one at ``first`` on."""

    batch: str
    first: int
    count: int
    single: bool

    @property
    def name(self) -> str:
        """The SLURM job's name. A batch's own name has no plus sign."""
        return f"{self.batch}+{self.first}" if self.first else self.batch

    def handles(self, job: str) -> list[str]:
        """SLURM's ids of its parcels, in order, where sbatch returned ``job``."""
        return [job] if self.single else [f"{job}_{index}" for index in range(self.count)]


def pieces(batch: Batch, largest: int) -> tuple[Piece, ...]:
    """The batch in parts of at most ``largest`` parcels (SLURM's MaxArraySize; 0 or 1 where there are no arrays)."""
    size, parcels = max(1, largest), len(batch.parcels)
    starts = range(0, parcels, size)
    return tuple(
        Piece(batch.name, first, count, single=count == 1)
        for first, count in ((first, min(size, parcels - first)) for first in starts)
    )


def named(batch: str, index: int, largest: int) -> tuple[str, int]:
    """The name of the SLURM job that holds a batch's parcel, and the parcel's place in it."""
    size = max(1, largest)
    first = index // size * size
    return (f"{batch}+{first}" if first else batch), index - first


def throttles(batch: Batch, parts: int) -> tuple[int | None, int]:
    """How several arrays keep the batch's ``at_once``: how many parcels of each may run at once (None for any number),
    and how many arrays may; the next one then begins when an earlier one has ended.
    """
    if batch.at_once is None:
        return None, parts
    side_by_side = min(parts, batch.at_once)
    return batch.at_once // side_by_side, side_by_side


def arguments(
    batch: Batch, piece: Piece, options: SlurmOptions, *, throttle: int | None = None, behind: str | None = None
) -> list[str]:
    """The arguments of sbatch.

    Args:
        throttle: how many of this piece may run at once.
        behind: the SLURM job whose end, good or bad, this piece waits for.

    Raises UsageError for wrong ``--slurm-args``.
    """
    asked = batch.placement
    words = ["--parsable", "--no-requeue", f"--job-name={piece.name}", "--export=ALL", f"--chdir={batch.folder}"]
    if not piece.single:
        limit = "" if throttle is None or throttle >= piece.count else f"%{throttle}"
        words.append(f"--array=0-{piece.count - 1}{limit}")
    words += resources(asked, options)
    after = [f"afterok:{':'.join(batch.after)}"] if batch.after else []
    after += [f"afterany:{behind}"] if behind is not None else []
    if after:
        words.append(f"--dependency={','.join(after)}")
    words += ["--kill-on-invalid-dep=yes", f"--signal=B:USR1@{notice_s(options.notice, asked.time_s)}"]
    words += [f"--output={_output(batch, piece)}", f"--comment={_comment(batch, piece)}"]
    return [*words, *checked(options.slurm_args)]


def resources(asked: Placement, options: SlurmOptions) -> list[str]:
    """The arguments, for sbatch and srun alike, that request the resources and the place. Raises UsageError."""
    words = []
    if asked.gpus:
        words.append(f"--gres=gpu:{options.gpu_type}:{asked.gpus}" if options.gpu_type else f"--gres=gpu:{asked.gpus}")
    words += [f"--nodes={asked.nodes}", f"--ntasks-per-node={asked.tasks}"]
    if asked.cpus is not None:
        words.append(f"--cpus-per-task={cpus_of_task(asked)}")
    if asked.memory_mb is not None:
        words.append(f"--mem={asked.memory_mb}M")
    if asked.time_s is not None:
        words.append(f"--time={_minutes(asked.time_s)}")
    for name in ("partition", "account", "qos", "constraint"):
        value = getattr(options, name)
        if value is not None:
            words.append(f"--{name}={value}")
    return words


def cpus_of_task(asked: Placement) -> int | None:
    """CPU cores of each process that srun starts; None where none are requested. Raises UsageError."""
    if asked.cpus is None:
        return None
    if asked.cpus % asked.tasks:
        raise UsageError(
            f"{asked.cpus} CPU cores on each node can't be shared out among {asked.tasks} processes; ask for a multiple"
        )
    return asked.cpus // asked.tasks


def steps(
    nodes: int, tasks: int, *, cpus: str | None = None, mpi: str | None = None, more: Sequence[str] = ("--input=none",)
) -> list[str]:
    """The srun that, inside of a SLURM job, starts the processes of an attempt on all of its nodes; the command is to
    be appended. When one process fails all are ended.

    Args:
        cpus: CPU cores of each process; srun since 22.05 does not take them from the job.
    """
    words = ["srun", f"--nodes={nodes}", f"--ntasks={nodes * tasks}"]
    words += [f"--ntasks-per-node={tasks}", "--kill-on-bad-exit=1", *more, "--export=ALL"]
    words += [] if mpi is None else [f"--mpi={mpi}"]
    return words if cpus is None else [*words, f"--cpus-per-task={cpus}"]


def script(batch: Batch, piece: Piece, options: SlurmOptions) -> str:
    """The script that SLURM runs on the first node: the user's lines, then the command, which replaces the shell, so
    that signals for the script reach it.
    """
    lines = ["#!/bin/bash", f"# {piece.name}: {piece.count} of gpuherd's jobs."]
    cpus = cpus_of_task(batch.placement)
    if cpus is not None:
        # Since SLURM 22.05 srun does not take it from sbatch.
        lines.append(f"export SRUN_CPUS_PER_TASK={cpus}")
    lines += options.setup
    index = _index(piece)
    if piece.first and not piece.single:
        pattern = shlex.quote(str(batch.folder) + "/")
        lines.append(f'exec >>{pattern}{shlex.quote(batch.name)}."{index}".out 2>&1')
    lines.append(f'exec {shlex.join(batch.command)} "{index}"')
    return "\n".join(lines) + "\n"


def notice_s(wanted_s: float, time_s: float | None) -> int:
    """Seconds before its time is up at which a job gets its signal: as requested, but at most half of the time."""
    most = _MOST_NOTICE_S if time_s is None else min(_MOST_NOTICE_S, time_s / 2)
    return max(1, int(min(wanted_s, most)))


def checked(words: Sequence[str], program: str = "sbatch") -> tuple[str, ...]:
    """``--slurm-args``, checked. Raises UsageError for what is no option, or is gpuherd's own to give."""
    for word in words:
        name = word.partition("=")[0]
        if not word.startswith("-") or word in ("-", "--"):
            raise UsageError(
                f"--slurm-args {word!r} is no option of {program}, which would take it for what is to run; "
                "write an option and its value in one word, like --slurm-args=--exclude=n3"
            )
        found = _meant(name)
        if found is not None:
            raise UsageError(f"--slurm-args {word!r}: {found} can't be given, {_OURS[found]}")
    return tuple(words)


def _meant(name: str) -> str | None:
    """The option of ``_OURS`` that a word gives, also abbreviated as sbatch would take it; None for another one."""
    if not name.startswith("--"):
        return _SHORT.get(name[:2])
    if name in _OURS:
        return name
    return next((ours for ours in _OURS if len(name) >= 5 and ours.startswith(name)), None)


def _index(piece: Piece) -> str:
    if piece.single:
        return str(piece.first)
    return f"$((SLURM_ARRAY_TASK_ID + {piece.first}))" if piece.first else "$SLURM_ARRAY_TASK_ID"


def _output(batch: Batch, piece: Piece) -> str:
    """Where SLURM itself writes. A per cent sign in the folder is escaped: it is not one of SLURM's patterns."""
    mark = "\0"
    if piece.single:
        path = str(batch.output(piece.first))
    elif piece.first:
        path = str(batch.folder / f"{piece.name}.{mark}.slurm")
    else:
        path = str(batch.output(mark))
    return path.replace("%", "%%").replace(mark, "%a")


def _comment(batch: Batch, piece: Piece) -> str:
    first = batch.parcels[piece.first].title
    text = first if piece.count == 1 else f"{first} and {piece.count - 1} more"
    return printable(f"gpuherd: {text}")[:_MOST_COMMENT]


def _minutes(seconds: float) -> int:
    """Whole minutes, in which SLURM counts."""
    return max(1, math.ceil(seconds / 60))
