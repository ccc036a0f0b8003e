"""Dispatch options, shared by every command that starts jobs, and their changes by ``gpuherd set`` while a run goes on.

Which GPUs a run may take, when a GPU counts as free, and how the dispatcher behaves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, get_args

from gpuherd.engines import registry
from gpuherd.engines.options import EngineOptions
from gpuherd.engines.registry import LOCAL
from gpuherd.errors import UsageError
from gpuherd.jobs.job import job_name
from gpuherd.options import by_spelling, did_you_mean, option, option_fields, parse
from gpuherd.units import count, duration_s, gpu_names, positive_int, seconds, size_or_none_mb

Order = Literal["age", "longest"]
ORDERS: tuple[Order, ...] = get_args(Order)
YieldTo = Literal["ignore", "pause", "requeue"]
YIELDS: tuple[YieldTo, ...] = get_args(YieldTo)
OnIdle = Literal["notify", "pause", "requeue", "cancel"]
ON_IDLE: tuple[OnIdle, ...] = get_args(OnIdle)
# Options about the GPUs of this machine, and about jobs on them. The ledger is that of this machine's GPUs.
_HERE = frozenset({"gpu_list", "cpu_jobs", "yield_to_others", "idle_after", "on_idle", "project"})

# The least value of options with this parser.
_LEAST: Mapping[Callable[[str], Any] | None, int] = {count: 0, positive_int: 1, seconds: 0, size_or_none_mb: 0}


def foreign(engine: str) -> frozenset[str]:
    """Names of options that this engine doesn't have."""
    return registry.foreign(engine) | (frozenset() if engine == LOCAL else _HERE)


def port(word: str) -> int:
    """A TCP port that a user may listen on; 0 for any that is free."""
    if not word.isascii() or not word.isdigit() or not (int(word) == 0 or 1024 <= int(word) <= 65535):
        raise ValueError(f"{word!r} is not a port from 1024 to 65535 (or 0 for any)")
    return int(word)


def _refuse_wrong_values(options: GpuOptions, of: type[GpuOptions]) -> None:
    """Raises UsageError for values of this class's options that no word could give: those from Python have passed no
    parser."""
    for declared, spec in option_fields(of):
        value, least = getattr(options, declared.name), _LEAST.get(spec.parse)
        if value is None:
            continue
        if spec.choices is not None and value not in spec.choices:
            raise UsageError(f"{spec.flag or declared.name}={value!r}; possible: {', '.join(spec.choices)}")
        if least is not None and value < least:
            raise UsageError(f"{declared.name}={value}; the least is {least}")
        if spec.parse is duration_s and value <= 0:
            raise UsageError(f"{declared.name}={value}; it must be above 0")


@dataclass(frozen=True, kw_only=True)
class GpuOptions:
    """GPU choice for a run. ``gpu_list`` is in order of preference and may hold comma lists (``("0,1", "3")``)."""

    max_gpus: int | None = option(
        None,
        help="most GPUs to use at once (default: all that are free and that the settings allow)",
        parse=positive_int,
        metavar="N",
        group="GPUs",
        settable=True,
        unset=("all",),
    )
    gpu_list: tuple[str | int, ...] = option(
        (),
        help="GPUs to use, in order of preference: indices, 0:1 for MIG, or UUIDs (default: all visible)",
        aliases=("gpus",),
        parse=gpu_names,
        many=True,
        metavar="ID",
        group="GPUs",
        settable=True,
        unset=("all",),
    )
    gpu_memory_threshold: int = option(
        500,
        help="a GPU with less than this many MB in use can be free",
        flag="gpu-mem-threshold",
        aliases=("gpu-memory-threshold",),
        parse=count,
        metavar="MB",
        group="GPUs",
        settable=True,
    )
    max_checks: int | None = option(
        None,
        help="checks in a row that must find a GPU free before it is taken (default: 10; 2 while nobody else uses any "
        "GPU of this machine)",
        aliases=("max-check",),
        parse=positive_int,
        metavar="N",
        group="GPUs",
        settable=True,
    )
    check_interval: float = option(
        1.0, help="seconds between two checks", parse=seconds, metavar="SECONDS", group="GPUs", settable=True
    )
    gpus_per_job: int = option(
        1,
        help="GPUs that each job gets; 0: none, it computes on the CPU",
        aliases=("num-gpus-per-job",),
        parse=count,
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
        _refuse_wrong_values(self, GpuOptions)

    def most_of(self, gpus: int) -> int:
        """How many of this number of GPUs may be used at once."""
        return gpus if self.max_gpus is None else min(self.max_gpus, gpus)

    @property
    def gpu_ids(self) -> tuple[str, ...]:
        """``gpu_list`` as single ids in order of preference, comma lists taken apart; () for all visible GPUs."""
        return tuple(part for entry in self.gpu_list for part in str(entry).split(","))


@dataclass(frozen=True, kw_only=True)
class DispatchOptions(EngineOptions, GpuOptions):
    """The options of a run of jobs: engine, GPUs, and the dispatcher's behaviour."""

    max_concurrent: int | None = option(
        None,
        help="most jobs to run at once, on GPUs or not",
        parse=positive_int,
        metavar="N",
        group="jobs",
        settable=True,
        unset=("none", "no"),
    )
    order: Order = option(
        "age",
        help="which waiting job of the highest priority starts first: the oldest, or the longest where costs are known",
        choices=ORDERS,
        group="jobs",
        settable=True,
    )
    share: bool = option(
        False,
        help="let jobs that declare their memory share a GPU while the sum fits",
        group="jobs",
        settable=True,
    )
    yield_to_others: YieldTo = option(
        "ignore",
        flag="yield",
        help="when another user's process starts on a GPU of ours: only report it, pause our job, or requeue it",
        choices=YIELDS,
        group="jobs",
        settable=True,
    )
    idle_after: float | None = option(
        None,
        help="a job that does not use its GPUs for this time, like 30m, is idle (four times as long before its first "
        "use; default: never)",
        parse=duration_s,
        metavar="TIME",
        group="jobs",
        settable=True,
        unset=("none", "no", "never"),
    )
    on_idle: OnIdle = option(
        "notify",
        help="what becomes of an idle job: only report it, pause it, requeue it (a job that is idle again and again "
        "fails), or cancel it",
        choices=ON_IDLE,
        group="jobs",
        settable=True,
    )
    timeout: float | None = option(
        None, help="time limit for each job, like 90s or 2h", parse=duration_s, metavar="TIME", group="jobs"
    )
    stage_timeout: float | None = option(
        None, help="time limit for each stage that a job reports", parse=duration_s, metavar="TIME", group="jobs"
    )
    heartbeat: float | None = option(
        None,
        help="stop a job that reports no progress for this time",
        parse=duration_s,
        metavar="TIME",
        group="jobs",
    )
    min_disk: int = option(
        200,
        help="with less free space than this, jobs are paused and none starts (MB, or like 2GB; 0: never)",
        parse=size_or_none_mb,
        metavar="SIZE",
        group="jobs",
    )
    project: str | None = option(
        None,
        help="what the GPU hours of jobs without a project of their own count for, in gpuherd usage (default: the name"
        " of the run's folder)",
        parse=job_name,
        metavar="NAME",
        group="jobs",
    )
    prometheus: int | None = option(
        None, help="serve metrics for Prometheus on this port of 127.0.0.1", parse=port, metavar="PORT", group="notices"
    )
    notify_command: str | None = option(
        None,
        help="run this command when the run ends and when a job fails (words, no shell; the notice is its input)",
        metavar="COMMAND",
        group="notices",
    )
    webhook: str | None = option(
        None, help="post the same notices as JSON to this address", metavar="URL", group="notices"
    )

    def __post_init__(self) -> None:
        EngineOptions.__post_init__(self)
        _refuse_wrong_values(self, DispatchOptions)
        self._refuse_local_options()

    def _refuse_local_options(self) -> None:
        if self.engine == LOCAL:
            return
        for each in fields(self):
            if each.name in _HERE and getattr(self, each.name) not in (each.default, []):
                flag = each.metadata["option"].flag or each.name.replace("_", "-")
                hint = "; the cluster chooses GPUs (--gpu-type, --constraint)" if each.name == "gpu_list" else ""
                raise UsageError(f"--{flag} is for this machine's GPUs, and the engine is {self.engine}{hint}")


# --- gpuherd set --------------------------------------------------------------------------------------------------

SETTABLE = tuple(declared.name for declared, spec in option_fields(DispatchOptions) if spec.settable)


def retuned(options: DispatchOptions, settings: Mapping[str, str]) -> DispatchOptions:
    """The options with some changed. Raises UsageError for an unknown one (with the nearest name) or a fixed one.

    >>> retuned(DispatchOptions(), {"gpus": "4,5", "max-checks": "3"}).gpu_ids
    ('4', '5')
    """
    return replace(options, **changes(settings))


def changes(settings: Mapping[str, str]) -> dict[str, Any]:
    """Field names and new values, from the words of ``gpuherd set``. Raises as ``retuned``.

    Whether the run's engine has such options is checked later, by ``DispatchOptions`` itself.
    """
    found: dict[str, Any] = {}
    known = by_spelling(DispatchOptions, SETTABLE)
    for word, value in settings.items():
        name = word.strip().lstrip("-").replace("-", "_")
        if name not in known:
            possible = f"possible: {', '.join(SETTABLE)}"
            if name in by_spelling(DispatchOptions):
                raise UsageError(f"{word} can't be changed while a run goes on; {possible}")
            raise UsageError(f"there is no option {word!r}{did_you_mean(name, known, possible)}")
        declared, spec = known[name]
        try:
            unset = value.strip().lower() in spec.unset
            found[declared.name] = declared.default if unset else parse(spec, value.strip())
        except ValueError as problem:
            raise UsageError(f"{word}: {problem}") from None
    return found


def dispatch_options(options: GpuOptions) -> DispatchOptions:
    """The dispatcher's options among these; what they lack has its default."""
    names = {each.name for each in fields(options)} & {each.name for each in fields(DispatchOptions)}
    return DispatchOptions(**{name: getattr(options, name) for name in names})
