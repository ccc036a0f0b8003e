"""The options of all engines as one dataclass, and ``engine:`` of a YAML file.

Every command that starts jobs has them. What each engine contributes is in its own folder (``registry``).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import Field, dataclass, field, fields, is_dataclass, replace
from types import new_class
from typing import TYPE_CHECKING, Any, TypeVar

from gpuherd.engines.registry import LOCAL, engine_option, foreign, names, specs
from gpuherd.errors import UsageError
from gpuherd.options import Option, did_you_mean, parse_value

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    # At run time every engine that is found takes part. Type checkers know the keywords of these.
    from gpuherd.engines.ray.options import RayOptions
    from gpuherd.engines.slurm.options import SlurmOptions

    class _OfAllEngines(RayOptions, SlurmOptions): ...

else:
    _defaults: dict[str, Any] = {}
    for _spec in specs():
        for _name, _declared in _spec.fields.items():
            if _defaults.setdefault(_name, _declared.default) != _declared.default:
                raise TypeError(f"engine {_spec.name}: option {_name} has another default in another engine")
    # Fields of a dataclass come in the order of its last base first.
    _OfAllEngines = new_class("_OfAllEngines", tuple(dict.fromkeys(spec.options for spec in reversed(specs()))))

OptionsT = TypeVar("OptionsT", bound="DataclassInstance")
ENGINES = names()
_ABOUT = [spec.about for spec in specs()]


@dataclass(frozen=True, kw_only=True)
class EngineOptions(_OfAllEngines):
    """Which engine runs the jobs, and what they request from it. Raises UsageError as ``LocalOptions``."""

    engine: str = engine_option(
        LOCAL,
        help=f"what runs the jobs: {', '.join(_ABOUT[:-1])}, or {_ABOUT[-1]}",
        choices=ENGINES,
    )


_DECLARED: Mapping[str, Field[Any]] = {each.name: each for each in fields(EngineOptions)}


def for_one_command(kind: type[OptionsT]) -> type[OptionsT]:
    """Class decorator, below ``@dataclass``, for options of a command that starts a single job: it has no flags for
    those options of engines that are about many jobs, unless it declares them itself."""
    for each in fields(EngineOptions):
        if each.metadata.get("many_jobs") and each.name not in vars(kind):
            others = (base for base in kind.__bases__ if is_dataclass(base) and not issubclass(base, EngineOptions))
            own = next((known for base in others for known in fields(base) if known.name == each.name), None)
            plain = each.default if own is None else field(default=own.default, metadata=own.metadata)
            setattr(kind, each.name, plain)
            kind.__annotations__[each.name] = each.type
    return kind


def for_this_machine(options: OptionsT) -> OptionsT:
    """The same for the engine of this machine, without the options of clusters."""
    strange = foreign(LOCAL)
    return replace(
        options, engine=LOCAL, **{each.name: each.default for each in fields(options) if each.name in strange}
    )


def engine_values(values: object) -> dict[str, Any]:
    """The options of engines that an object has as attributes, by name."""
    return {name: getattr(values, name) for name in _DECLARED if hasattr(values, name)}


def refuse_ranks(options: EngineOptions) -> None:
    """For commands whose jobs are programs of ours. Raises UsageError where the engine is to start several processes of
    a job, each of which would do all of its work."""
    flag = options.spec.ranks_flag(options)
    if flag is not None:
        raise UsageError(
            f"{flag} is for programs whose processes {options.spec.ranks_by} starts (gpuherd run, batch and up); the "
            "jobs of this command start their own: leave it out"
        )


# ``engine:`` in a YAML file: a name, or a mapping with the name and options.
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

_OPTIONS: Mapping[str, Option] = {name: each.metadata["option"] for name, each in _DECLARED.items()}


def read_block(value: Any, possible: Collection[str] = tuple(_OPTIONS), where: str = "engine") -> dict[str, Any]:
    """The options in a block, by field name; {} for None, where there is none.

    Args:
        value: of the key, as YAML has it.
        possible: names of the options that the command has.
        where: what the key is called in errors.

    Raises UsageError, with the key, for what is no option and for values that can't be.

    >>> read_block({"name": "slurm", "time-limit": "4h"})
    {'engine': 'slurm', 'time_limit': 14400.0}
    """
    if value is None:
        return {}
    block = value if isinstance(value, Mapping) else {"name": value}
    if "name" not in block:
        raise UsageError(f"{where}: it has no name; write name: slurm (possible: {', '.join(ENGINES)})")
    found: dict[str, Any] = {}
    for key, word in block.items():
        name = "engine" if key == "name" else str(key).replace("-", "_")
        if name not in possible or name not in _OPTIONS or key == "engine":
            raise UsageError(f"{where}.{key} is no option of an engine{_nearest(str(key), possible)}")
        try:
            found[name] = parse_value(_OPTIONS[name], word)
        except ValueError as problem:
            raise UsageError(f"{where}.{key}: {problem}") from None
    return found


def _nearest(key: str, possible: Collection[str]) -> str:
    known = ["name", *(name.replace("_", "-") for name in possible if name in _OPTIONS and name != "engine")]
    return did_you_mean(key.replace("_", "-"), known, f"possible: {', '.join(known)}")
