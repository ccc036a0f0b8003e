"""A job as the user means it, and how it stands: plain frozen data, no database, no processes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from gpuherd.errors import JobCannotFit, UsageError


class JobState(StrEnum):
    """How a job stands in the queue."""

    WAITING = "waiting"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """A command to run on some GPUs.

    Attributes:
        name: unique within a queue; submitting the same name again goes on with the job that is there.
        argv: the command as an argument list; never seen by a shell.
        gpus: how many GPUs it needs; 0 for a job that runs on the CPU.
        memory_mb: free memory that it needs on each GPU, None if unknown.
        priority: higher runs first; equal priorities run in the order of submission.
        needs: names of jobs that must have succeeded before.
        retries: how many further tries a failure that may pass (a crash, out of memory) gets.
        timeout_s: wall-clock seconds after which the job is stopped; None for no limit.
        env: variables added to the job's environment.
        cwd: working directory, None for the dispatcher's.
        result: a file that exists when the job has succeeded; a job is done only while it is there. A relative path is
            one in ``cwd``.
        title: what progress lines call it, when that is not the name.
        identity: what its result depends on: a job that is done is done again when this changes. None: its command, the
            additions to its environment, and its working directory.
    """

    name: str
    argv: tuple[str, ...]
    gpus: int = 1
    memory_mb: int | None = None
    priority: int = 0
    needs: tuple[str, ...] = ()
    retries: int = 1
    timeout_s: float | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: str | None = None
    result: str | None = None
    title: str | None = None
    identity: str | None = None

    def __post_init__(self) -> None:
        if not self.name:
            raise UsageError("a job needs a name")
        if any("\ud800" <= character <= "\udfff" for character in self.name):
            raise UsageError(f"job name {self.name!r} is no UTF-8 text; give it another")
        if not self.argv:
            raise UsageError(f"job {self.name!r} has no command")
        if any("\0" in word for word in self.argv):
            raise UsageError(f"job {self.name!r}: an argument contains a NUL byte, which no program can be given")
        if self.gpus < 0:
            raise JobCannotFit(f"job {self.name!r} asks for {self.gpus} GPUs; the least is 0")
        if self.retries < 0:
            raise UsageError(f"job {self.name!r}: retries={self.retries}; the least is 0")
        if self.timeout_s is not None and self.timeout_s <= 0:
            raise UsageError(f"job {self.name!r}: timeout={self.timeout_s} s; it must be above 0")
