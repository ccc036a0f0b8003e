"""A job as the user means it, and how it stands: plain frozen data, no database, no processes."""

from __future__ import annotations

import math
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


ENDED = frozenset({JobState.DONE, JobState.FAILED, JobState.CANCELLED})


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """A command to run on some GPUs.

    Attributes:
        name: unique within a queue; submitting the same name again goes on with the job that is there.
        argv: the command as an argument list; never seen by a shell.
        gpus: how many GPUs it needs; 0 for a job that runs on the CPU.
        nodes: how many machines it spans; it gets ``gpus`` GPUs on each. More than 1 is for a cluster's engine.
        cpus: CPU cores that it gets on each node, None for the engine's default (on this machine: its share).
        host_memory_mb: main memory that it gets on each node of a cluster, None for the engine's default.
        gpus_at_most: when it runs out of memory it is tried on more GPUs, up to so many; None for never more.
        memory_mb: free memory that it needs on each GPU, None if unknown.
        share: it may share its GPU with other jobs of this queue that say so too; ``memory_mb`` must be given.
        priority: higher runs first; equal priorities run in the order of submission.
        needs: names of jobs that must have succeeded before.
        round: jobs of a round start when none of an earlier round waits or runs any more, however those ended.
        cost: how long it is expected to take, in any unit that is the same for the whole queue (bytes of the model,
            say); None if unknown. With ``order="longest"`` the costly ones start first.
        family: jobs of one family are alike: the memory that one was seen to use is expected of the others.
        retries: how many further tries a failure that may pass (a crash, out of memory) gets.
        timeout_s: seconds after which the job is stopped; None for no limit.
        stage_timeout_s: seconds that it may stay in one stage of its progress; None for no limit.
        heartbeat_s: seconds that it may go without telling its progress (``engines.progress``); None for no limit.
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
    nodes: int = 1
    cpus: int | None = None
    host_memory_mb: int | None = None
    gpus_at_most: int | None = None
    memory_mb: int | None = None
    share: bool = False
    priority: int = 0
    needs: tuple[str, ...] = ()
    round: int = 0
    cost: float | None = None
    family: str | None = None
    retries: int = 1
    timeout_s: float | None = None
    stage_timeout_s: float | None = None
    heartbeat_s: float | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: str | None = None
    result: str | None = None
    title: str | None = None
    identity: str | None = None

    def __post_init__(self) -> None:
        if not self.name:
            raise UsageError("a job needs a name")
        if not self.name.isascii() and any("\ud800" <= character <= "\udfff" for character in self.name):
            raise UsageError(f"job name {self.name!r} is no UTF-8 text; give it another")
        if not self.argv:
            raise UsageError(f"job {self.name!r} has no command")
        if any("\0" in word for word in self.argv):
            raise UsageError(f"job {self.name!r}: an argument contains a NUL byte, which no program can be given")
        if self.gpus < 0:
            raise JobCannotFit(f"job {self.name!r} asks for {self.gpus} GPUs; the least is 0")
        for least in ("nodes", "cpus", "host_memory_mb"):
            value = getattr(self, least)
            if value is not None and value < 1:
                raise JobCannotFit(f"job {self.name!r} asks for {least}={value}; the least is 1")
        if self.gpus_at_most is not None and self.gpus_at_most < max(1, self.gpus):
            raise JobCannotFit(f"job {self.name!r} asks for {self.gpus} GPUs and at most {self.gpus_at_most}")
        if self.memory_mb is not None and self.memory_mb < 1:
            raise JobCannotFit(f"job {self.name!r} asks for {self.memory_mb} MB; the least is 1")
        if self.share and (self.gpus != 1 or self.memory_mb is None):
            raise UsageError(f"job {self.name!r}: share is for jobs on 1 GPU that say how much memory they need")
        if self.cost is not None and not 0 <= self.cost < math.inf:
            raise UsageError(f"job {self.name!r}: cost={self.cost}; it must be a finite number of 0 or more")
        if self.retries < 0:
            raise UsageError(f"job {self.name!r}: retries={self.retries}; the least is 0")
        for limit in ("timeout_s", "stage_timeout_s", "heartbeat_s"):
            value = getattr(self, limit)
            if value is not None and not 0 < value < math.inf:
                raise UsageError(f"job {self.name!r}: {limit.removesuffix('_s')}={value} s; it must be above 0")
