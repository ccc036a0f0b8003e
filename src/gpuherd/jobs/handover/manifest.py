"""What a node is told of the attempts of one batch: a file that is written once, before the batch is handed over, and
lies where all nodes see it. For its owner alone: commands and environments may hold secrets.

A line of JSON for what all of them share, and one for each: a leader looks at two of a thousand.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from gpuherd.errors import UsageError

# What belongs to the machine that a process is on, or to the engine that started it.
_OF_A_PLACE = ("SLURM_", "SLURMD_", "SBATCH_", "SRUN_", "RAY_", "PMI_", "PMIX_")
_OF_A_MACHINE = frozenset(
    {
        "CUDA_VISIBLE_DEVICES",
        "CUDA_DEVICE_ORDER",
        "GPU_DEVICE_ORDINAL",
        "ROCR_VISIBLE_DEVICES",
        "HOSTNAME",
        "TMPDIR",
        "XDG_RUNTIME_DIR",
        "_",
        "PWD",
        "OLDPWD",
        "SHLVL",
        "GPUHERD_ATTEMPT",
        "GPUHERD_PROGRESS",
    }
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    """One attempt: all that a node needs to run it. Paths are absolute and the same on every node; seconds.

    Attributes:
        attempt, tag: its number in the queue, and what its processes carry in their environment.
        argv, env, cwd: the command, what it adds to the environment, and its folder.
        log, progress: files for its output and for what it tells of itself.
        claim, ended: files by which it is taken (``reports.claim``) and told of.
        result: a file that must be there for a success, None for none.
        after: the files (as ``ended``) of other attempts: it begins only if each of them tells of a success.
        delay_s: so long such a file may be on its way, when the engine says that it can begin.
        nodes: how many nodes it spans.
        gpus: how many GPUs it has on each; 0 hides them all from it, None leaves what the engine shows it.
        timeout_s, stage_timeout_s, heartbeat_s: limits that the node keeps; None for none.
        grace_s: between SIGTERM and SIGKILL.
        notice_s: so long before its time is up the engine tells it; None where it doesn't.
        threads: for the numeric libraries, where nobody has told them; None for what the node gives it.
    """

    attempt: int
    tag: str
    argv: tuple[str, ...]
    log: str
    progress: str
    claim: str
    ended: str
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: str | None = None
    result: str | None = None
    after: tuple[str, ...] = ()
    delay_s: float = 15.0
    nodes: int = 1
    tasks: int = 1
    mpi: str | None = None
    gpus: int | None = None
    timeout_s: float | None = None
    stage_timeout_s: float | None = None
    heartbeat_s: float | None = None
    grace_s: float = 10.0
    notice_s: float | None = None
    threads: int | None = None

    @property
    def status(self) -> Path:
        """Where the attempt's shell writes its exit status, for a guardian: beside the report of its end."""
        return Path(self.ended).with_suffix(".status")

    @property
    def by_srun(self) -> bool:
        """Whether SLURM starts its processes, on one node or several."""
        return self.nodes * self.tasks > 1

    @property
    def first_failure(self) -> Path:
        """Where the first of several nodes that fails says how."""
        return Path(self.ended).with_suffix(".first")

    def on_node(self, rank: int) -> Order:
        """The same for another of its nodes, 1 or more: with files and a tag of its own."""
        there = f".node{rank}"
        return replace(
            self,
            tag=f"{self.tag}{there}",
            log=f"{self.log}{there}",
            progress=f"{self.progress}{there}",
            claim=str(claim_on_node(self.first_failure, rank)),
            ended=str(Path(self.ended).with_suffix(f"{there}.ended")),
            result=None,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """A batch. ``environment`` is that of whoever handed it over, without what belongs to a machine or an engine."""

    batch: str
    engine: str
    environment: Mapping[str, str]
    orders: tuple[Order, ...]


def claim_on_node(beside: Path, rank: int) -> Path:
    """Where another node of an attempt, 1 or more, tells that it has begun its part. ``beside``: a file of the attempt,
    whose name it has but for the suffix."""
    return beside.with_suffix(f".node{rank}.claim")


def portable(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that mean the same on another machine."""
    return {
        name: value
        for name, value in environment.items()
        if name not in _OF_A_MACHINE and not name.startswith(_OF_A_PLACE)
    }


def to_json(manifest: Manifest) -> str:
    """The file's text."""
    values = asdict(manifest)
    orders = values.pop("orders")
    return "".join(f"{json.dumps(each, separators=(',', ':'))}\n" for each in (values, *orders))


def order_of(path: Path, index: int) -> tuple[Manifest, Order]:
    """What all orders of a manifest's file share, as a manifest of one order, and that order.

    Raises OSError, and UsageError for a file that is none, and for an index that it lacks.
    """
    head, *lines = path.read_bytes().splitlines() or [b""]
    try:
        shared = json.loads(head)
        if not 0 <= index < len(lines):
            raise UsageError(f"{path} holds {len(lines)} orders, and none with the index {index}")
        values = json.loads(lines[index])
        order = Order(**{**values, "argv": tuple(values["argv"]), "after": tuple(values.get("after", ()))})
        return Manifest(**shared, orders=(order,)), order
    except (ValueError, TypeError, KeyError, RecursionError) as problem:
        raise UsageError(f"{path} is no manifest of a batch: {problem}") from problem
