"""Where jobs run, and what is requested of a cluster: flags, and the same in YAML."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import Field, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args

from gpuherd.errors import UsageError
from gpuherd.options import Option, did_you_mean, option, parse_value
from gpuherd.units import duration_s, positive_int, size_mb

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


# Where jobs run, and what is asked of a cluster: the options that every command starting jobs shares.

OptionsT = TypeVar("OptionsT", bound="DataclassInstance")
EngineName = Literal["local", "slurm", "ray"]
ENGINES: tuple[EngineName, ...] = get_args(EngineName)
LOCAL: EngineName = "local"
_SLURM_ONLY = (
    *("partition", "account", "qos", "constraint", "gpu_type", "array_limit", "slurm_args", "setup"),
    *("ntasks_per_node", "mpi", "in_allocation"),
)
_RAY_ONLY = ("ray_address", "ray_resources")


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Which engine runs the jobs, and what they ask of it. Times are seconds, memory MB (2^20 bytes).

    Raises UsageError for an option that says nothing to the engine, or that is empty.
    """

    engine: EngineName = option(
        "local",
        help="what runs the jobs: this machine, a SLURM cluster, or a Ray cluster",
        choices=ENGINES,
        group="engine",
    )
    cpus_per_job: int | None = option(
        None,
        help="CPU cores that each job gets on each node, like 8",
        parse=positive_int,
        metavar="N",
        group="engine",
    )
    host_mem: int | None = option(
        None,
        help="main memory that each job gets on each node, like 64GB",
        parse=size_mb,
        metavar="SIZE",
        group="engine",
    )
    time_limit: float | None = option(
        None,
        help="what the cluster grants a job at a time, like 4h; a job that is not done then goes on in another turn",
        parse=duration_s,
        metavar="TIME",
        group="engine",
    )
    notice: float = option(
        120.0,
        help="so long before its time is up a job gets SIGTERM, to save what it has, like 5m",
        parse=duration_s,
        metavar="TIME",
        group="engine",
    )
    at_most: int = option(
        1000,
        help="most jobs in the cluster's queue at once, like 200",
        parse=positive_int,
        metavar="N",
        group="engine",
        settable=True,
    )
    node_gpus: str | None = option(
        None,
        help="the GPUs of one of the cluster's nodes, like 4xA100-80GB: jobs that name a model are planned for them "
        "(default: what the cluster says of them)",
        metavar="GPUS",
        group="engine",
    )
    partition: str | None = option(None, help="SLURM partition, like gpu", metavar="NAME", group="engine")
    account: str | None = option(None, help="SLURM account, like physics", metavar="NAME", group="engine")
    qos: str | None = option(None, help="SLURM quality of service, like short", metavar="NAME", group="engine")
    constraint: str | None = option(None, help="SLURM node features, like 'a100|h100'", metavar="WORDS", group="engine")
    gpu_type: str | None = option(
        None,
        help="type of GPU as SLURM calls it, like a100 for --gres=gpu:a100:N",
        metavar="TYPE",
        group="engine",
    )
    array_limit: int | None = option(
        None,
        help="most jobs of one SLURM array that run at once, like 16",
        parse=positive_int,
        metavar="N",
        group="engine",
    )
    ntasks_per_node: int | None = option(
        None,
        help="processes of the job that srun starts on each SLURM node, as MPI and Lightning want it (default: one, "
        "which starts its own)",
        parse=positive_int,
        metavar="N",
        group="engine",
    )
    mpi: str | None = option(
        None,
        help="how srun brings these processes together, like pmix (srun --mpi=list)",
        metavar="TYPE",
        group="engine",
    )
    in_allocation: bool | None = option(
        None,
        help="inside a SLURM job: run in that job and nowhere else; --no-in-allocation: submit (default: in that job "
        "where all that is asked for fits, else submit)",
        yes_or_no=True,
        group="engine",
    )
    slurm_args: tuple[str, ...] = option(
        (), help="further words for SLURM, like --slurm-args=--exclude=n3", many=True, metavar="WORD", group="engine"
    )
    setup: tuple[str, ...] = option(
        (),
        help="shell lines that are run first on a SLURM node, like 'module load cuda'",
        many=True,
        metavar="LINE",
        group="engine",
    )
    ray_address: str | None = option(
        None,
        help="a Ray cluster, like 10.0.0.1:6379, or its job server, like http://10.0.0.1:8265 "
        "(default: one on this machine)",
        metavar="ADDRESS",
        group="engine",
    )
    ray_resources: tuple[str, ...] = option(
        (), help="custom Ray resources of each job, like licence=1", many=True, metavar="NAME=AMOUNT", group="engine"
    )

    def __post_init__(self) -> None:
        _check(self)


_DECLARED: Mapping[str, Field[Any]] = {each.name: each for each in fields(EngineOptions)}
_CLUSTER = frozenset(_DECLARED) - {"engine"}


def foreign(engine: str) -> frozenset[str]:
    """Names of the options here that say nothing to this engine.

    >>> sorted(foreign("slurm"))
    ['ray_address', 'ray_resources']
    """
    of_others = {"local": _CLUSTER, "slurm": frozenset(_RAY_ONLY), "ray": frozenset(_SLURM_ONLY)}
    return of_others.get(engine, frozenset())


def for_this_machine(options: OptionsT) -> OptionsT:
    """The same for the engine of this machine, without what is said of a cluster."""
    strange = {each.name: each.default for each in fields(options) if each.name in _CLUSTER}
    return replace(options, engine=LOCAL, **strange)


def refuse_ranks(options: EngineOptions | ClusterOptions) -> None:
    """For commands whose jobs are programs of ours: raises UsageError where SLURM is to start several processes of a
    job, of which each would do all of its work."""
    for flag, said in (("ntasks-per-node", options.ntasks_per_node), ("mpi", options.mpi)):
        if said is not None:
            raise UsageError(
                f"--{flag} is for programs whose processes srun starts (gpuherd run, batch and up); the jobs of this "
                "command start their own: leave it out"
            )


def said_in(values: object) -> dict[str, Any]:
    """What an object with some of these options as attributes says of them, by name."""
    return {name: getattr(values, name) for name in _DECLARED if hasattr(values, name)}


def as_for_jobs(name: str) -> Any:
    """An option of ``EngineOptions`` as a field of another dataclass: the same spelling, default and help."""
    known = _DECLARED[name]
    return field(default=known.default, metadata=known.metadata)


@dataclass(frozen=True, kw_only=True)
class ClusterOptions:
    """The part of ``EngineOptions`` that is said of one command alone, which says itself what it needs.

    Raises UsageError for an option that says nothing to the engine, or that is empty.
    """

    engine: EngineName = as_for_jobs("engine")  # noqa: RUF009 - a field, as for the others
    time_limit: float | None = as_for_jobs("time_limit")
    node_gpus: str | None = as_for_jobs("node_gpus")
    partition: str | None = as_for_jobs("partition")
    account: str | None = as_for_jobs("account")
    qos: str | None = as_for_jobs("qos")
    constraint: str | None = as_for_jobs("constraint")
    gpu_type: str | None = as_for_jobs("gpu_type")
    ntasks_per_node: int | None = as_for_jobs("ntasks_per_node")
    mpi: str | None = as_for_jobs("mpi")
    in_allocation: bool | None = as_for_jobs("in_allocation")
    slurm_args: tuple[str, ...] = as_for_jobs("slurm_args")
    setup: tuple[str, ...] = as_for_jobs("setup")
    ray_address: str | None = as_for_jobs("ray_address")
    ray_resources: tuple[str, ...] = as_for_jobs("ray_resources")

    def __post_init__(self) -> None:
        _check(self)

    def engine_options(self) -> EngineOptions:
        """The same for an engine."""
        return EngineOptions(**{each.name: getattr(self, each.name) for each in fields(ClusterOptions)})


def _check(options: EngineOptions | ClusterOptions) -> None:
    if options.engine not in ENGINES:
        raise UsageError(f"engine={options.engine!r}; possible: {', '.join(ENGINES)}")
    for name in ("slurm_args", "setup", "ray_resources"):
        object.__setattr__(options, name, tuple(getattr(options, name)))
    strange = foreign(options.engine)
    for each in fields(options):
        # One of the same name may mean another thing: what a job says of itself holds anywhere.
        ours = each.name in _CLUSTER and each.metadata["option"].group == "engine"
        said, flag = getattr(options, each.name), f"--{each.name.replace('_', '-')}"
        if ours and each.name in strange and said != each.default:
            raise UsageError(f"{flag} is for --engine {_meant(each.name)}, and this is {options.engine}")
        if ours and (said == "" or (isinstance(said, tuple) and "" in said)):
            raise UsageError(f"{flag} is empty; leave it out where nothing is meant")


def _meant(name: str) -> str:
    return "slurm" if name in _SLURM_ONLY else "ray" if name in _RAY_ONLY else "slurm or --engine ray"


# ``engine:`` in a YAML file: a name, or a mapping with the name and what else is said of it. Pure.
#
# ::
#
#     engine: slurm
#
#     engine:
#       name: slurm
#       partition: gpu
#       time-limit: 4h
#       cpus-per-job: 8

_OPTIONS: Mapping[str, Option] = {each.name: each.metadata["option"] for each in fields(EngineOptions)}


def read_block(told: Any, possible: Collection[str] = tuple(_OPTIONS), where: str = "engine") -> dict[str, Any]:
    """The options that a block says, by field name; {} for None, where there is none.

    Args:
        told: the value of the key as YAML has it.
        possible: names of the options that the command has.
        where: what the key is called in errors.

    Raises UsageError, with the key, for what is no option and for values that can't be.

    >>> read_block({"name": "slurm", "time-limit": "4h"})
    {'engine': 'slurm', 'time_limit': 14400.0}
    """
    if told is None:
        return {}
    block = told if isinstance(told, Mapping) else {"name": told}
    if "name" not in block:
        raise UsageError(f"{where}: it has no name; write name: slurm (possible: {', '.join(ENGINES)})")
    found: dict[str, Any] = {}
    for key, value in block.items():
        name = "engine" if key == "name" else str(key).replace("-", "_")
        if name not in possible or name not in _OPTIONS or key == "engine":
            raise UsageError(f"{where}.{key} is no option of an engine{_nearest(str(key), possible)}")
        try:
            found[name] = parse_value(_OPTIONS[name], value)
        except ValueError as problem:
            raise UsageError(f"{where}.{key}: {problem}") from None
    return found


def _nearest(key: str, possible: Collection[str]) -> str:
    known = ["name", *(name.replace("_", "-") for name in possible if name in _OPTIONS and name != "engine")]
    return did_you_mean(key.replace("_", "-"), known, f"possible: {', '.join(known)}")
