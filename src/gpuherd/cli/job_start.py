"""What commands that start jobs share: options of the engine and of the settings files, and memory plans for jobs that
name a model.

GPUs are queried when the first such job is planned, not before, because the query takes a moment.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from types import MappingProxyType, SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

from gpuherd.cli.common import print_note
from gpuherd.engines.registry import LOCAL
from gpuherd.errors import UsageError, printable
from gpuherd.options import option_fields

if TYPE_CHECKING:
    from gpuherd.engines.options import EngineOptions
    from gpuherd.gpus.state import Gpu
    from gpuherd.jobs.job import ModelUse, Need, Planner
    from gpuherd.jobs.options import DispatchOptions
    from gpuherd.jobs.settings import Settings
    from gpuherd.models.place.gpus import GpuSpec

_LONGEST_STEM = 60
# A list may name thousands of models; the table of a dry run has the plan of each.
_MOST_REPORTED_PLANS = 20
# The flags of gpuherd plan as keys of a job file.
JOB_FILE_KEYS: Mapping[str, str | None] = {
    "--dtype": "dtype={}",
    "--batch": "batch={}",
    "--prompt-tokens": "prompt-tokens={}",
    "--parallel": "parallel={}",
    "--num-gpus": "gpus={}",
}


# ---- memory plans ----------------------------------------------------------------------------------------------------


class AvailableGpus(NamedTuple):
    """GPUs that jobs may get, with the memory that is free while nothing runs on them; ``limit``: how many of them a
    run uses at once (None: all)."""

    cards: Sequence[GpuSpec]
    limit: int | None = None


def planner(
    available: Callable[[], AvailableGpus],
    report: Callable[[str], None] = print_note,
    spelling: Mapping[str, str | None] = MappingProxyType({}),
) -> Planner:
    """Returns a planner, which computes the GPUs and the memory for jobs that name a model.

    Args:
        available: returns the GPUs; called once, when the first model is planned.
        report: called with a printable sentence for each of the first plans.
        spelling: how messages write the flags of ``gpuherd plan``: ``JOB_FILE_KEYS`` for jobs from a file.
    """
    gpus: list[AvailableGpus] = []
    planned = 0

    def plan(use: ModelUse) -> Need:
        nonlocal planned
        from gpuherd.jobs.job import Need
        from gpuherd.models.place.resources import resources_for

        if not gpus:
            gpus.append(available())
        options = asdict(use)
        given_mb = options.pop("memory_mb")
        demand = resources_for(
            options.pop("model"),
            gpus[0].cards,
            gpu_range=options.pop("gpus"),
            most=gpus[0].limit,
            spelling=spelling,
            **options,
        )
        sentence = demand.sentence
        if given_mb is not None:
            sentence += f"; {given_mb} MB are used instead, as given for the job"
        planned += 1
        if planned <= _MOST_REPORTED_PLANS:
            report(printable(sentence))
        elif planned == _MOST_REPORTED_PLANS + 1:
            report("further plans are not shown; --dry-run shows the request of each job")
        return Need(demand.gpus, demand.memory_mb, memory_family(use, demand.gpus, demand.memory_mb), sentence)

    return plan


def memory_family(use: ModelUse, gpus: int, memory_mb: int) -> str:
    """One name for all jobs that use a model in the same way on the same number of GPUs: each needs the same memory.

    The plan is part of the name, because in another folder the same path may be another model.
    """
    import hashlib  # with OpenSSL, for jobs that name a model alone

    key = repr((sorted(asdict(use).items(), key=str), gpus, memory_mb))
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", use.model).strip("-")[-_LONGEST_STEM:].lstrip("-") or "model"
    return f"{stem}.{hashlib.sha256(key.encode('utf-8', 'surrogatepass')).hexdigest()[:8]}"


def gpus_as_idle(gpus: Sequence[Gpu], limit: int | None = None) -> AvailableGpus:
    """These GPUs, ``limit`` of them at once."""
    from gpuherd.models.place.inventory import idle_gpus

    return AvailableGpus(idle_gpus(gpus), limit)


def gpus_of_run(options: DispatchOptions, limit: int | None) -> AvailableGpus:
    """The GPUs that a run with these options may use, ``limit`` of them at once; on a cluster those of one node."""
    if options.engine != LOCAL:
        return gpus_of_cluster(options)
    from gpuherd.jobs.gpu.watch import watch_for_plan
    from gpuherd.jobs.settings import load

    return gpus_as_idle(watch_for_plan(options, load()).gpus, limit)


def gpus_of_cluster(options: EngineOptions) -> AvailableGpus:
    """The GPUs of one node of the cluster. Calls no driver on this machine."""
    from gpuherd.models.place.inventory import node_gpus

    return AvailableGpus(node_gpus(options))


def gpus_of_own_queue() -> AvailableGpus:
    """The GPUs of the dispatcher that works off the user's own queue; without a dispatcher those of this machine."""
    from gpuherd.batch.user_queue import folder
    from gpuherd.gpus.query import machine
    from gpuherd.jobs.feasibility import dispatchers_machine
    from gpuherd.jobs.run_dir import RunDirectory

    here = machine().gpus
    reported = dispatchers_machine(RunDirectory(folder()))
    if reported is None:
        return gpus_as_idle(here)
    now = {gpu.uuid: gpu for gpu in here}
    return gpus_as_idle([now.get(gpu.uuid, gpu) for gpu in reported.gpus], reported.max_gpus)


# ---- the engine in YAML files ----------------------------------------------------------------------------------------


def fill_from_yaml(args: argparse.Namespace, config_type: type, value: Any) -> None:
    """Sets the options of the key ``engine`` of a YAML file that the command line has not set; none at all if the
    command line names another engine.

    Raises UsageError, which names the key, for a wrong value.
    """
    from gpuherd.engines.options import read_block

    fill_from_block(args, read_block(value, {field.name for field, _ in option_fields(config_type)}))


def fill_from_block(args: argparse.Namespace, block: Mapping[str, Any]) -> None:
    """The same for values that were read already. Simulated GPUs belong to this machine, whatever a file says."""
    here = None if args.simulate is None else LOCAL
    if getattr(args, "engine", here) not in (None, block.get("engine")):
        return
    for name, value in block.items():
        if not hasattr(args, name):
            setattr(args, name, value)


def engine_key(file: str | None, overrides: Mapping[str, Any]) -> Any:
    """The value of the key ``engine`` of a YAML file, with the overrides of it by full keys (``engine``,
    ``engine.partition``); None if neither exists.

    Raises UsageError for a file that can't be read, and for an inner key of a value that is no mapping.
    """
    from gpuherd.posttrain.config.yaml_strict import read_yaml

    value: Any = None if file is None else read_yaml(file).get("engine")
    value = overrides.get("engine", value)
    inner = {key.partition(".")[2]: each for key, each in overrides.items() if key.startswith("engine.")}
    if not inner:
        return value
    block = {} if value is None else dict(value) if isinstance(value, Mapping) else {"name": value}
    return block | inner


def engine_overrides(words: Sequence[str]) -> list[str]:
    """Those of the words ``key=value`` whose key is ``engine`` or below it."""
    keys = [(word, word.lstrip("+").partition("=")[0]) for word in words]
    return [word.lstrip("+") for word, key in keys if key == "engine" or key.startswith("engine.")]


# ---- settings --------------------------------------------------------------------------------------------------------


def load_for(args: argparse.Namespace, config_type: type, *, stays: bool = True) -> Settings:
    """The user's and the machine's settings. Sets the options of this dataclass that the command line has not set.

    Args:
        stays: the command starts jobs on this machine if ``--in-allocation`` applies (``stay_inside``).

    Raises UsageError for a wrong settings file or a wrong ``--node-gpus``, and the errors of ``stay_inside``.
    """
    from gpuherd.jobs.settings import load

    settings = load()
    simulate_here(args)
    if stays:
        stay_inside(args, settings)
    settings.fill(args, config_type)
    check_node_gpus(getattr(args, "node_gpus", None))
    return settings


def simulate_here(args: argparse.Namespace) -> None:
    """With ``--simulate`` jobs run on this machine, whatever the settings say. Raises UsageError if the command line
    names a cluster."""
    if args.simulate is None:
        return
    if getattr(args, "engine", None) not in (None, LOCAL):
        raise UsageError(
            f"--simulate simulates GPUs of this machine, and --engine {args.engine} would submit the jobs to a "
            "cluster, where these GPUs do not exist; leave one of both out"
        )
    args.engine = LOCAL


def stay_inside(args: argparse.Namespace, settings: Settings) -> None:
    """Makes this machine the engine if the command was started inside a job of its engine and is to run its jobs there
    (``--in-allocation``). On another node than that of the job this process becomes the same command on that node.

    Raises as ``Foreground.take_over``.
    """
    from gpuherd.engines.base import Replacement
    from gpuherd.engines.options import EngineOptions, engine_values
    from gpuherd.engines.registry import foreign

    name = getattr(args, "engine", settings.engine)
    if name == LOCAL:
        return
    given = engine_values(args) | {"engine": name}
    defaults = {
        key: value
        for key, value in engine_values(SimpleNamespace(**settings.defaults)).items()
        if key not in foreign(name)
    }
    options = EngineOptions(**given)
    foreground = options.spec.foreground()
    if foreground is None:
        return
    argv = [sys.executable, "-m", "gpuherd", *sys.argv[1:]]
    found = foreground.take_over(options, EngineOptions(**(defaults | given)), argv)
    if found is None:
        return
    if isinstance(found, Replacement):
        from gpuherd.batch.run_remote import become

        become(found, inherited=(0, 1, 2))
    limits = [getattr(args, "max_concurrent", settings.defaults.get("max_concurrent")), found.at_once]
    given_limits = [limit for limit in limits if limit is not None]
    if given_limits:
        args.max_concurrent = min(given_limits)
    for option in foreign(LOCAL) & vars(args).keys():
        delattr(args, option)
    args.engine = LOCAL
    from gpuherd.gpus.visible import hide_unless_named

    # If the engine has given this shell no GPU, the GPUs of the machine belong to others.
    hide_unless_named(os.environ)
    print_note(f"the jobs run in {found.title}, on {found.node}")


def check_node_gpus(words: str | None) -> None:
    """Raises UsageError for a wrong ``--node-gpus``, whether or not a model is planned."""
    if words is not None:
        from gpuherd.models.place.inventory import parse_node_gpus

        parse_node_gpus(words)
