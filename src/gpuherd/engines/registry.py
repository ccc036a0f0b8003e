"""The registry of engines: what an engine declares of itself, and how all are found.

Each engine is a folder below ``engines/`` (or a package outside with an entry point in the group ``gpuherd.engines``)
whose module ``spec`` holds ``ENGINE``, an ``EngineSpec``. No module outside of the folder names the engine: what
differs between engines is an attribute or a method of their specs.
"""

from __future__ import annotations

import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import Field, dataclass, fields
from functools import cache
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from gpuherd.errors import UsageError
from gpuherd.options import option
from gpuherd.units import duration_s, positive_int, size_mb

if TYPE_CHECKING:
    from gpuherd.checks import CheckResult
    from gpuherd.engines.base import Engine, ExportJob, Foreground
    from gpuherd.engines.options import EngineOptions
    from gpuherd.engines.world import Join, Lead

LOCAL = "local"
ENTRY_POINTS = "gpuherd.engines"
OptionsT = TypeVar("OptionsT")

# --- Options ----------------------------------------------------------------------------------------------------------
#
# The classes here have no methods of a dataclass of their own (init, eq): every start would pay for making them, and
# the classes of engines, which inherit from these, have theirs.


def engine_option(default: Any, *, many_jobs: bool = False, **declared: Any) -> Any:
    """An option of engines, declared as ``options.option``. ``many_jobs``: only commands with many jobs have it;
    ``gpuherd run`` and ``gpuherd train`` do not."""
    found = option(default, group="engine", **declared)
    if many_jobs:
        found.metadata = {**found.metadata, "many_jobs": True}
    return found


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class LocalOptions:
    """Which engine runs the jobs: all that can be said of this machine's engine. Other engines inherit from
    ``ClusterOptions``.

    Raises UsageError for an unknown engine, for an option of another engine than the one named, and for an empty one.
    """

    engine: str = engine_option(LOCAL, help="what runs the jobs")

    def __post_init__(self) -> None:
        _check(self)

    @property
    def spec(self) -> EngineSpec:
        """The engine that is named."""
        return find(self.engine)

    def of(self, kind: type[OptionsT]) -> OptionsT:
        """The same options, for type checkers as those of one engine. Every engine's options are part of
        ``EngineOptions``."""
        if not isinstance(self, kind):
            raise TypeError(f"{type(self).__name__} has no {kind.__name__}")
        return self


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class ClusterOptions(LocalOptions):
    """Options that every engine beyond this machine has. Times are seconds, memory MB (2^20 bytes)."""

    cpus_per_job: int | None = engine_option(
        None,
        help="CPU cores that each job gets on each node, like 8",
        parse=positive_int,
        metavar="N",
        many_jobs=True,
    )
    host_mem: int | None = engine_option(
        None,
        help="main memory that each job gets on each node, like 64GB",
        parse=size_mb,
        metavar="SIZE",
        many_jobs=True,
    )
    time_limit: float | None = engine_option(
        None,
        help="time limit of a job on the cluster, like 4h; a job that is not done then is submitted again to continue",
        parse=duration_s,
        metavar="TIME",
    )
    notice: float = engine_option(
        120.0,
        help="a job gets SIGTERM this long before its time limit, to save its state, like 5m",
        parse=duration_s,
        metavar="TIME",
        many_jobs=True,
    )
    at_most: int = engine_option(
        1000,
        help="most jobs in the cluster's queue at once, like 200",
        parse=positive_int,
        metavar="N",
        settable=True,
        many_jobs=True,
    )
    node_gpus: str | None = engine_option(
        None,
        help="the GPUs of one of the cluster's nodes, like 4xA100-80GB: jobs that name a model are planned for them "
        "(default: as the cluster reports them)",
        metavar="GPUS",
    )


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class BatchSystemOptions(ClusterOptions):
    """Options that every batch system has (``batch_system``): it has arrays, and its nodes run a script."""

    array_limit: int | None = engine_option(
        None,
        help="most jobs of one array of the batch system that run at once, like 16",
        parse=positive_int,
        metavar="N",
        many_jobs=True,
    )
    setup: tuple[str, ...] = engine_option(
        (),
        help="shell lines that are run first on a node, like 'module load cuda'",
        many=True,
        metavar="LINE",
    )


def _check(options: LocalOptions) -> None:
    strange = foreign(options.engine)
    for each in fields(options):
        declared = each.metadata.get("option")
        # A field of the same name in another group is an option of a job, which holds on any engine.
        if declared is None or declared.group != "engine":
            continue
        if declared.many:
            object.__setattr__(options, each.name, tuple(getattr(options, each.name)))
        value, flag = getattr(options, each.name), f"--{each.name.replace('_', '-')}"
        if each.name in strange and value != each.default:
            takers = " or --engine ".join(other.name for other in specs() if each.name in other.fields)
            raise UsageError(f"{flag} is for --engine {takers}, and this is {options.engine}")
        if value == "" or (isinstance(value, tuple) and "" in value):
            raise UsageError(f"{flag} is empty; leave it out where nothing is meant")


# --- The registry -----------------------------------------------------------------------------------------------------


class Exporter(NamedTuple):
    """How jobs become files that people submit by hand.

    Attributes:
        to: the word of ``gpuherd export --to``.
        files: texts by file name, from jobs in an order that respects their needs and rounds. Raises UsageError for
            options and jobs that can't be exported.
        submit_file: the file that starts all.
        ignores: names of the options that say nothing to the files.
    """

    to: str
    files: Callable[[Sequence[ExportJob], EngineOptions], Mapping[str, str]]
    submit_file: str = "submit.sh"
    ignores: frozenset[str] = frozenset({"engine", "at_most"})


class EngineSpec(ABC):
    """An engine as its folder registers it: ``engines/NAME/spec.py`` holds one instance, ``ENGINE``.

    A subclass sets the attributes, defines ``connect`` and overrides the other methods that it has something for; each
    default means "this engine does not have that". The module is imported at every start that has options of engines:
    it imports this module only, and everything else inside of its methods.

    What a *node* has to know of the engine is a ``world.NodeSide`` named ``NODE`` in the folder's module ``node``.

    Attributes:
        name: the word of ``--engine``.
        title: for people, like "SLURM".
        about: what it is in ``--help`` of ``--engine``, like "a SLURM cluster".
        order: its place in lists: by this number, then by name.
        options: its options, a dataclass that inherits from ``ClusterOptions``; the fields become flags, keys of
            ``engine:`` in YAML, keys of the settings and keywords of the Python API. Two engines may declare a field of
            the same name only with the same default. An engine of ours imports them when they are asked for: most
            commands need only its name.
        variables: beginnings of the names of environment variables that describe one machine or one job of the engine,
            and are not sent to nodes.
        kept_variables: beginnings of the names of those that say how to reach the engine, which a dispatcher in the
            background keeps.
        doctor_options: names of the options that ``gpuherd doctor --engine NAME`` has.
        exporter: how ``gpuherd export`` writes jobs for it; None where nothing can be exported.
        ranks_by: the program that starts several processes of a job on a node, like srun.
        gpu_type_flag: the flag that chooses the GPUs' type where a site has several; None where there is none.
        examples: lines for the examples in the ``--help`` of commands, by the command's name, each with its line end.
    """

    name: str
    title: str
    about: str
    order: int = 100
    variables: tuple[str, ...] = ()
    kept_variables: tuple[str, ...] = ()
    doctor_options: tuple[str, ...] = ()
    exporter: Exporter | None = None
    ranks_by: str = "the engine"
    gpu_type_flag: str | None = None
    examples: Mapping[str, str] = MappingProxyType({})

    @property
    def options(self) -> type[LocalOptions]:
        return ClusterOptions

    @property
    def fields(self) -> Mapping[str, Field[Any]]:
        """Its options by name."""
        return {each.name: each for each in fields(self.options)}

    # --- jobs

    @abstractmethod
    def connect(self, options: EngineOptions, lead: Lead, join: Join) -> Engine:
        """The connection. ``lead`` and ``join`` run a node's part of an attempt (``jobs.remote.agent``); an engine
        whose nodes start ``Batch.command`` does not need them. Raises EngineMissing, EngineAway and UsageError."""

    def tasks(self, options: EngineOptions) -> int:  # noqa: ARG002
        """Processes of a job that the engine starts on each node (``Placement.tasks``)."""
        return 1

    def ranks_flag(self, options: EngineOptions) -> str | None:  # noqa: ARG002
        """The flag that makes ``ranks_by`` start several processes of a job on a node; None without."""
        return None

    def launcher(self, options: EngineOptions) -> str | None:  # noqa: ARG002
        """How the processes of a job find each other, as ``RankStarter.start_ranks`` takes it (SLURM: ``--mpi``)."""
        return None

    def at_once(self, options: EngineOptions) -> int | None:
        """``Batch.at_once``."""
        return getattr(options, "array_limit", None)

    def where(self, options: EngineOptions) -> str | None:  # noqa: ARG002
        """Where the jobs are to run, for a dry run, like "partition gpu"; None for wherever the engine sends them."""
        return None

    def another_cluster(self, before: EngineOptions, now: EngineOptions) -> tuple[str, str] | None:  # noqa: ARG002
        """Where these options mean two clusters: the first one for people, and the flags that mean it; else None."""
        return None

    def inventory(self, options: EngineOptions) -> tuple[Mapping[str, int], ...] | None:  # noqa: ARG002
        """The GPUs of each node that these jobs can get to, by type ("" for one without a name); None where the engine
        does not tell.

        Raises EngineMissing, EngineAway, and UsageError for options that the site does not know.
        """
        return None

    def foreground(self) -> Foreground | None:
        """How it runs commands in the foreground, and jobs inside of a running job of its own; None where a command
        becomes a job whose output is followed, and where all jobs are submitted."""
        return None

    # --- the doctor

    def installed(self) -> str | None:
        """What of the engine is installed, like "SLURM's programs"; None for nothing. Must be quick."""
        return None

    def doctor(self, options: EngineOptions) -> list[CheckResult]:  # noqa: ARG002
        """What is found about the engine, each with a remedy unless it is well."""
        return []


def find(name: str) -> EngineSpec:
    """The engine of this name. Raises UsageError."""
    spec = _known().get(name)
    if spec is None:
        raise UsageError(f"engine={name!r}; possible: {', '.join(names())}")
    return spec


def specs() -> tuple[EngineSpec, ...]:
    """All engines, this machine's first."""
    return tuple(_known().values())


def names() -> tuple[str, ...]:
    """The words that ``--engine`` takes."""
    return tuple(_known())


def title(name: str) -> str | None:
    """The engine as people write it; None for an engine that is not installed here."""
    spec = _known().get(name)
    return None if spec is None else spec.title


def foreign(name: str) -> frozenset[str]:
    """Names of the options that say nothing to this engine.

    >>> sorted(foreign("slurm") & {"partition", "ray_address", "time_limit"})
    ['ray_address']
    """
    own = find(name).fields
    return frozenset(field for spec in specs() for field in spec.fields if field not in own)


@cache
def _known() -> Mapping[str, EngineSpec]:
    # Plain calls here and below: this is done at every start.
    here = os.path.dirname(__file__)  # noqa: PTH120
    folders = [name for name in os.listdir(here) if os.path.isfile(f"{here}/{name}/spec.py")]  # noqa: PTH113, PTH208
    found = [import_module(f"{__package__}.{name}.spec").ENGINE for name in folders]
    found += [point.load() for point in _entry_points()]
    return {spec.name: spec for spec in sorted(found, key=lambda each: (each.order, each.name))}


def _entry_points() -> Collection[Any]:
    """Engines of other distributions. importlib.metadata takes 60 ms to import: only where a distribution has any."""
    section = f"[{ENTRY_POINTS}]".encode()
    for place in sys.path:
        with suppress(OSError):
            for name in os.listdir(place or "."):  # noqa: PTH208
                if name.endswith("-info"):
                    with suppress(OSError), open(f"{place or '.'}/{name}/entry_points.txt", "rb") as file:  # noqa: PTH123
                        if section in file.read():
                            from importlib.metadata import entry_points

                            return entry_points(group=ENTRY_POINTS)
    return ()
