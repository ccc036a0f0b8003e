"""Which tasks there are, by the names that configs use, and where: a module is imported when its task is asked for."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from gpuherd.errors import UsageError, printable
from gpuherd.options import did_you_mean
from gpuherd.posttrain.data.options import TaskOptions
from gpuherd.posttrain.rewards.function import FunctionRewards, FunctionTask
from gpuherd.posttrain.types import Task

# A function of each module: TaskOptions -> Task.
TASKS: Mapping[str, str] = {
    "arithmetic": "arithmetic:make",
    "star_graph": "star_graph:make",
    "sentiment": "sentiment:make",
    "tree_mdp": "tree_mdp:make",
    "gsm8k": "gsm8k:make",
    "math": "math500:make",
    "aime": "aime:make",
    "aime22to24": "aime:make_22_to_24",
    "aime2024": "aime:make_2024",
    "aime2025": "aime:make_2025",
    "tldr": "tldr:make",
    "imdb": "imdb:make",
    "code": "code:make",
    "mbpp": "code:make_mbpp",
    "humaneval": "code:make_humaneval",
}
_SPELLINGS = {"imdbgen": "imdb", "math_500": "math", "math500": "math"}
_FILES = "files:make_of_file"  # Path, TaskOptions -> Task
_PROGRAMS = "files:holds_programs"  # Path -> bool
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_SUFFIXES = (".jsonl", ".ndjson", ".json", ".parquet")


def make_task(name_or_path: str, options: TaskOptions | None = None) -> Task:
    """The task of a name, or of the problems in a local file, a folder or a data set of the Hub. No model is loaded and
    no problem of a named task read with it: that is done when problems or rewards are first asked for. Tasks that run
    code find out whether they can.

    Raises UsageError, which says the nearest name or setting; NoProtection; errors of looking into a file.
    """
    options = options or TaskOptions()
    scoring = None if options.reward is None else FunctionRewards(options.reward, options.reward_timeout)
    plain = _normalized(name_or_path)
    path = Path(name_or_path).expanduser()
    made: Task | None = None
    if plain in TASKS:
        made = _function(TASKS[plain])(options)
    elif _is_path(path) and not path.exists():
        raise UsageError(f"{name_or_path}: there is no such file of problems")
    elif path.exists() or _HUB_ID.fullmatch(name_or_path):
        made = _function(_FILES)(path, options)
    if made is not None:
        return made if scoring is None else FunctionTask(made, scoring)
    hint = did_you_mean(plain, TASKS, f"tasks: {', '.join(TASKS)}; or a file of problems")
    raise UsageError(f"no task {printable(name_or_path)!r}{hint}")


def is_task(name: str) -> bool:
    """Whether ``make_task`` alone can read a name: that of a task, a file of programs with their tests, or one that it
    refuses with the nearest. A file of other rows, a folder and an id of the Hub can be read as rows, too."""
    path = Path(name).expanduser()
    if _normalized(name) in TASKS or not (path.exists() or _is_path(path) or _HUB_ID.fullmatch(name)):
        return True
    return path.is_file() and bool(_function(_PROGRAMS)(path))


def _normalized(name: str) -> str:
    plain = name.lower().replace("-", "_")
    return _SPELLINGS.get(plain, plain)


def _is_path(path: Path) -> bool:
    return path.suffix.lower() in _SUFFIXES or path.is_absolute()


def _function(place: str) -> Callable[..., Any]:
    module, _, attribute = place.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(f"gpuherd.posttrain.data.{module}"), attribute)
    return found
