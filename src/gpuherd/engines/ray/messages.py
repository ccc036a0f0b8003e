"""What the follower and its process beside Ray say to each other. Both are ours and of one version: pickled."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from gpuherd.engines.cluster import Batch, EngineAway, EngineMissing, Placement, Refused, Sighting
from gpuherd.engines.ray.address import Address
from gpuherd.engines.world import Failure
from gpuherd.errors import GpuherdError, UsageError

Lead = Callable[..., int]
Join = Callable[..., Failure | None]


@dataclass(frozen=True, slots=True)
class Setup:
    """What the process begins with.

    Attributes:
        lead: leads an attempt in a worker of Ray: ``lead(manifest, index, stop, handle=…, others=…)``; a
            function that its module has by name.
        join: runs another node's part of an attempt over several: ``join(manifest, index, world, stop)``; None where
            there is none.
        resources: custom resources of each parcel.
        notice_s: so long before the time of a parcel is up it is asked to make room.
        folder: for the files of a cluster of our own; None for a cluster that is there.
    """

    address: Address
    lead: Lead
    join: Join | None
    resources: Mapping[str, float]
    notice_s: float
    folder: Path | None = None


@dataclass(frozen=True, slots=True)
class Check:
    placements: tuple[Placement, ...]


@dataclass(frozen=True, slots=True)
class Submit:
    batch: Batch


@dataclass(frozen=True, slots=True)
class Look:
    handles: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Cancel:
    handles: tuple[str, ...]


Question = Setup | Check | Submit | Look | Cancel


@dataclass(frozen=True, slots=True)
class Answer:
    value: Any


@dataclass(frozen=True, slots=True)
class Problem:
    """An error that was raised on purpose, or ``kind`` "bug" with a traceback."""

    kind: str
    text: str
    may_pass: bool = False


_KINDS: dict[str, type[GpuherdError]] = {
    "missing": EngineMissing,
    "away": EngineAway,
    "usage": UsageError,
}


def problem_of(error: GpuherdError) -> Problem:
    """An error to be told."""
    if isinstance(error, Refused):
        return Problem("refused", str(error), error.may_pass)
    kind = next((name for name, type_ in _KINDS.items() if isinstance(error, type_)), "away")
    return Problem(kind, str(error))


def error_of(problem: Problem) -> Exception:
    """The error that was told."""
    if problem.kind == "refused":
        return Refused(problem.text, may_pass=problem.may_pass)
    if problem.kind in _KINDS:
        return _KINDS[problem.kind](problem.text)
    error = RuntimeError(f"the process beside Ray has failed: {problem.text.strip().splitlines()[-1]}")
    error.add_note(problem.text)
    return error


class Office(Protocol):
    """Who does the work beside Ray: with tasks, or by the job server. Parcels are called by their handles."""

    def check(self, placements: tuple[Placement, ...]) -> dict[Placement, str]: ...

    def submit(self, batch: Batch) -> list[str]: ...

    def look(self, handles: tuple[str, ...]) -> dict[str, Sighting]: ...

    def cancel(self, handles: tuple[str, ...]) -> None: ...

    def close(self) -> None: ...


def handle_of(batch: str, index: int) -> str:
    """A parcel's handle: known before Ray has heard of it, so that a lost answer loses nothing."""
    return f"{batch}-{index}"
