"""The options of ``hydra.launcher``: those that every command of gpuherd has, as a structured config.

There is no second list: names and what words mean come from gpuherd's own option dataclasses. Values are read as the
same words would be on the command line, so that ``timeout=2h`` and ``timeout: 7200`` both do.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields, make_dataclass
from typing import Any, Optional, Union

from gpuherd.errors import UsageError
from gpuherd.jobs.job import Given, Job
from gpuherd.jobs.options import DispatchOptions
from gpuherd.jobs.settings import load
from gpuherd.options import Option, build, parse_value

TARGET = "hydra_plugins.gpuherd_launcher.launcher.GpuherdLauncher"
# Options of each job: their names here, and the fields of Job.
_OF_A_JOB = {"gpus_per_job": "gpus", "mem": "memory_mb", "nodes": "nodes", "retries": "retries"}
# What the launcher of submitit calls them, which many programs' configs are written for: told, and never taken, since
# some mean another thing (a number of minutes, of GB).
_NAMES_HERE = {
    "tasks_per_node": "ntasks_per_node",
    "timeout_min": "time_limit, like time_limit=4h",
    "gpus_per_node": "gpus_per_job",
    "cpus_per_task": "cpus_per_job",
    "mem_gb": "host_mem, like host_mem=64GB",
    "array_parallelism": "array_limit",
    "srun_args": "slurm_args",
}
# Nothing is known of how long the jobs of a sweep take.
_NOT_HERE = frozenset({"order"})
# Hydra's configs know no tuples, and a number may be written as one or with a unit.
_WORD = Optional[Union[int, float, str]]  # noqa: UP007, UP045 - as OmegaConf reads it


@dataclass(frozen=True, slots=True)
class Settings:
    """Options of the run, and those given for each job."""

    run: DispatchOptions
    job: Given


def _options() -> dict[str, tuple[type, Field[Any]]]:
    """Each option of ``hydra.launcher``: the dataclass that it comes from, and its field there."""
    of_job = {each.name: each for each in fields(Job)}
    found: dict[str, tuple[type, Field[Any]]] = {name: (Job, of_job[original]) for name, original in _OF_A_JOB.items()}
    for each in fields(DispatchOptions):
        if "option" in each.metadata and each.name not in found and each.name not in _NOT_HERE:
            found[each.name] = (DispatchOptions, each)
    return dict(sorted(found.items(), key=lambda item: item[0] != "engine"))


OPTIONS = _options()


def option_of(name: str) -> Option:
    """What gpuherd says of an option: its help text, and how its words are read."""
    found: Option = OPTIONS[name][1].metadata["option"]
    return found


def _declared(name: str) -> tuple[str, Any, Any]:
    if OPTIONS[name][1].default is False:
        return name, Optional[bool], field(default=None)  # noqa: UP045
    if option_of(name).many:
        return name, Optional[list[Any]], field(default=None)  # noqa: UP045
    return name, Optional[str] if option_of(name).parse is None else _WORD, field(default=None)  # noqa: UP045


def _foreign(name: str) -> tuple[str, Any, Any]:
    return name, Any, field(default=None)


# None is what was not said: then the user's own settings file counts, else gpuherd's default.
GpuherdConf = make_dataclass(
    "GpuherdConf", [("_target_", str, field(default=TARGET)), *map(_declared, OPTIONS), *map(_foreign, _NAMES_HERE)]
)
GpuherdConf.__module__ = __name__  # it is pickled with the configs that are made of it


def read(said: Mapping[str, Any]) -> Settings:
    """The settings that the values of ``hydra.launcher`` mean; None is what was not said.

    Raises UsageError for a value that means nothing, naming its key, and for options that don't go together.
    """
    given = {DispatchOptions: Namespace(), Job: Namespace()}
    for name, value in said.items():
        if value is None:
            continue
        if name in _NAMES_HERE:
            raise UsageError(f"hydra.launcher.{name} is called {_NAMES_HERE[name]} here")
        origin, declared = OPTIONS[name]
        setattr(given[origin], declared.name, _value(name, value))
    load().fill(given[DispatchOptions], DispatchOptions)
    return Settings(build(DispatchOptions, given[DispatchOptions]), vars(given[Job]))


def _value(name: str, value: Any) -> Any:
    try:
        return parse_value(option_of(name), value)
    except ValueError as problem:
        raise UsageError(f"hydra.launcher.{name}: {problem}") from None
