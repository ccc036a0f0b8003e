"""The task of a name, of a file or of a data set of the Hub."""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Mapping
from pathlib import Path

from gpuherd.errors import UsageError, printable
from gpuherd.models.names import user_path
from gpuherd.options import did_you_mean
from gpuherd.posttrain.config.typed import read
from gpuherd.posttrain.data.dataset import SUFFIXES
from gpuherd.posttrain.data.options import ALIASES, NAMED, NamedTask, TaskOptions
from gpuherd.posttrain.rewards.function import FunctionRewards, FunctionTask
from gpuherd.posttrain.types import Task

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def tasks() -> Mapping[str, NamedTask]:
    """All tasks that are known by a name. Each module of this package registers its own when it is imported."""
    import gpuherd.posttrain.data as package

    for module in sorted(each.name for each in pkgutil.iter_modules(package.__path__)):
        importlib.import_module(f"{package.__name__}.{module}")
    return NAMED


def make_task(name_or_path: str, options: TaskOptions | None = None) -> Task:
    """The task of a name, or of the problems in a local file, a folder or a data set of the Hub. No model is loaded and
    no problem of a named task read with it: that is done when problems or rewards are first asked for. Tasks that run
    code find out whether they can.

    Raises UsageError, which says the nearest name or setting; NoProtection; errors of looking into a file.
    """
    options = options or TaskOptions()
    scoring = None if options.reward is None else FunctionRewards(options.reward, options.reward_timeout)
    path = user_path(name_or_path)
    if (known := _named(name_or_path)) is not None:
        made = known.make(read(known.settings, options.settings, known.name), options)
    elif _is_path(path) and not path.exists():
        raise UsageError(f"{name_or_path}: there is no such file of problems")
    elif path.exists() or _HUB_ID.fullmatch(name_or_path):
        from gpuherd.posttrain.data.files import make_of_file

        made = make_of_file(path, options)
    else:
        hint = did_you_mean(_normalized(name_or_path), NAMED, f"tasks: {', '.join(NAMED)}; or a file of problems")
        raise UsageError(f"no task {printable(name_or_path)!r}{hint}")
    return made if scoring is None else FunctionTask(made, scoring)


def is_task(name: str) -> bool:
    """Whether ``make_task`` alone can read a name: that of a task, a file of programs with their tests, or one that it
    refuses with the nearest. A file of other rows, a folder and an id of the Hub can be read as rows, too."""
    path = user_path(name)
    if _named(name) is not None or not (path.exists() or _is_path(path) or _HUB_ID.fullmatch(name)):
        return True
    from gpuherd.posttrain.data.files import holds_programs

    return path.is_file() and holds_programs(path)


def _named(name: str) -> NamedTask | None:
    plain = _normalized(name)
    return tasks().get(ALIASES.get(plain, plain))


def _normalized(name: str) -> str:
    return name.lower().replace("-", "_")


def _is_path(path: Path) -> bool:
    return path.suffix.lower() in SUFFIXES or path.is_absolute()
