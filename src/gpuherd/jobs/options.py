"""Which GPUs a run may take and when one counts as free: the options that every command starting jobs shares."""

from __future__ import annotations

from dataclasses import dataclass

from gpuherd.errors import UsageError
from gpuherd.options import option


def gpu_names(word: str) -> str:
    """One GPU id (an index, 3:1 for a MIG instance, or a UUID) or several joined by commas, checked for form only."""
    names = word.split(",")
    if not all(name.strip() for name in names):
        raise ValueError(f"{word!r} is no list of GPU ids; write 0,1,2 or 0 1 2")
    return ",".join(name.strip() for name in names)


def positive_int(word: str) -> int:
    """A whole number above 0."""
    if not word.isascii() or not word.isdigit() or int(word) == 0:
        raise ValueError(f"{word!r} is not a whole number above 0")
    return int(word)


def count(word: str) -> int:
    """A whole number, 0 or more."""
    if not word.isascii() or not word.isdigit():
        raise ValueError(f"{word!r} is not a whole number of 0 or more")
    return int(word)


def seconds(word: str) -> float:
    """A number of seconds, 0 or more."""
    value = float(word)
    if not 0 <= value < float("inf"):
        raise ValueError(f"{word!r} is not a number of seconds")
    return value


@dataclass(frozen=True, kw_only=True)
class GpuOptions:
    """GPU choice for a run. ``gpu_list`` is in order of preference and may hold comma lists (``("0,1", "3")``)."""

    max_gpus: int = option(4, help="most GPUs to use at once", parse=positive_int, metavar="N", group="GPUs")
    gpu_list: tuple[str | int, ...] = option(
        (),
        help="GPUs to use, in order of preference: indices, 0:1 for MIG, or UUIDs (default: all visible)",
        aliases=("gpus",),
        parse=gpu_names,
        many=True,
        metavar="ID",
        group="GPUs",
    )
    gpu_memory_threshold: int = option(
        500,
        help="a GPU with less than this many MB in use can be free",
        flag="gpu-mem-threshold",
        aliases=("gpu-memory-threshold",),
        parse=count,
        metavar="MB",
        group="GPUs",
    )
    max_checks: int = option(
        10,
        help="checks in a row that must find a GPU free before it is taken",
        aliases=("max-check",),
        parse=positive_int,
        metavar="N",
        group="GPUs",
    )
    check_interval: float = option(
        1.0, help="seconds between two checks", parse=seconds, metavar="SECONDS", group="GPUs"
    )
    gpus_per_job: int = option(
        1,
        help="GPUs that each job gets",
        aliases=("num-gpus-per-job",),
        parse=positive_int,
        metavar="N",
        group="GPUs",
    )
    cpu_jobs: int = option(
        0,
        help="jobs at once on a machine without GPUs (0: one for every two cores)",
        parse=count,
        metavar="N",
        group="GPUs",
    )

    def __post_init__(self) -> None:
        for name in ("max_gpus", "max_checks", "gpus_per_job"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name}={getattr(self, name)}; the least is 1")
        for name in ("gpu_memory_threshold", "check_interval", "cpu_jobs"):
            if getattr(self, name) < 0:
                raise UsageError(f"{name}={getattr(self, name)}; the least is 0")

    @property
    def gpu_ids(self) -> tuple[str, ...]:
        """``gpu_list`` as single ids in order of preference, comma lists taken apart; () for all visible GPUs."""
        return tuple(part for entry in self.gpu_list for part in str(entry).split(","))
