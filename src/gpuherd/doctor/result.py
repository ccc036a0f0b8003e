"""What a check says: plain data, no effects."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum


class Status(StrEnum):
    """How a check ended. Only FAIL means that something is wrong."""

    OK = "ok"
    WARN = "warn"  # works, but not as it could, or not now
    FAIL = "fail"
    SKIP = "skip"  # could not or need not be tried


@dataclass(frozen=True, slots=True)
class CheckResult:
    """One line of ``gpuherd doctor``: what was looked at, how it is, and what to do unless it is well.

    Raises ValueError for a result that is not OK and has no remedy: a complaint without a way out helps nobody.
    """

    name: str
    status: Status
    detail: str
    remedy: str | None = None

    def __post_init__(self) -> None:
        if (self.status is Status.OK) != (self.remedy is None):
            raise ValueError(f"{self.name}: {self.status} with remedy {self.remedy!r}")


def all_well(results: Iterable[CheckResult]) -> bool:
    """Whether nothing is wrong."""
    return all(result.status is not Status.FAIL for result in results)
